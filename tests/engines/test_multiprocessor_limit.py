"""The limit of multiprocessors: that it reaches the launches, that their grids are smaller, and that results do not depend on it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import gbmoe
from gbmoe import engines, programs
from gbmoe.engines import multiprocessor_limit
from gbmoe.testing.cuda_graphs import captured
from gbmoe.testing.exact_inputs import poison
from tests import csrc_operators

LIMITS = (100, 64, 2)


@pytest.fixture(autouse=True)
def unlimited():
    yield
    gbmoe.limit_multiprocessors(None)


@pytest.fixture
def told(monkeypatch):
    """What csrc/ is told of the limit, as if there were a GPU with 132 multiprocessors."""
    told = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setitem(vars(engines.ENGINES["tensor_core"]), "unavailable", lambda device: None)
    monkeypatch.setattr(multiprocessor_limit.availability, "why_not", lambda: None)
    monkeypatch.setattr(torch.ops.gbmoe_cuda, "limit_multiprocessors", told.append, raising=False)
    yield told
    gbmoe.limit_multiprocessors(None)


def test_it_holds_until_the_end_of_the_block_or_the_next_call(told):
    everything = 2**31 - 1
    gbmoe.limit_multiprocessors(132)
    assert told == [132]
    with gbmoe.limit_multiprocessors(64):
        assert told[-1] == 64
        with pytest.raises(KeyError), gbmoe.limit_multiprocessors(None):
            assert told[-1] == everything
            raise KeyError
        assert told[-1] == 64
    assert told[-1] == 132
    again = gbmoe.limit_multiprocessors(2)
    for _ in range(2):
        with again:
            assert told[-1] == 2
        assert told[-1] == 132
    gbmoe.limit_multiprocessors(None)
    assert told[-1] == everything
    assert csrc_operators.schemas()["limit_multiprocessors"] == "limit_multiprocessors(int most) -> ()"


@pytest.mark.parametrize("most, error, message", [
    (64.0, TypeError, "most: expected an int or None, got 64.0"), (True, TypeError, "most: expected an int or None, got True"),
    ("64", TypeError, "most: expected an int or None, got '64'"), (1, ValueError, "most: expected at least 2, .*, got 1"),
    (-4, ValueError, "most: expected at least 2, .*, got -4"),
    (133, ValueError, "most: expected at most the 132 multiprocessors of cuda:0, got 133")], ids=str)
def test_what_is_no_limit_is_refused_and_changes_nothing(told, most, error, message):
    gbmoe.limit_multiprocessors(100)
    with pytest.raises(error, match=f"limit_multiprocessors: {message}"):
        gbmoe.limit_multiprocessors(most)
    assert told == [100]


def test_a_gpu_without_gemms_of_gbmoe_cannot_be_limited_and_says_so(told, monkeypatch):
    monkeypatch.setitem(vars(engines.ENGINES["tensor_core"]), "unavailable", lambda device: "runs elsewhere")
    with pytest.raises(RuntimeError, match="got cuda:0: tensor_core runs elsewhere. Those of cuBLAS and torch cannot be limited"):
        gbmoe.limit_multiprocessors(100)
    gbmoe.limit_multiprocessors(None)  # which they are not


@pytest.mark.slow
def test_compiled_code_is_limited_where_it_says_so():
    def step(x):
        x = x * 2
        with gbmoe.limit_multiprocessors(10):
            x = torch.sin(x)
            seen.append(multiprocessor_limit._limit)
        return x + 1

    for _ in range(3):
        seen = []
        torch.testing.assert_close(torch.compile(step, backend="eager")(torch.ones(2)), torch.sin(torch.full((2,), 2.0)) + 1)
        assert seen == [10] and multiprocessor_limit._limit is None


# ------------------------------------------------------------------------------------------------------------------ on GPUs


def layer_and_input(engine, *, tokens=1536, hidden=512, ffn=5120):
    """A layer whose sums over ffn and over rows are split where they may be, with more tiles than there are multiprocessors."""
    options = {"fp8_recipe": gbmoe.Float8BlockScaling(float8_weight_gradients=True)} if engine == "float8" else {"engine": engine}
    args = gbmoe.Arguments(hidden_size=hidden, ffn_hidden_size=ffn, moe_num_experts=4, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                           bf16=True, moe_loss_weight=0, device="cuda", **options)
    torch.manual_seed(0)
    return gbmoe.dMoE(args), torch.randn(tokens, 1, hidden, device="cuda", dtype=torch.bfloat16)


def step_of(layer, x):
    """A function that runs the layer forward and backward, in poisoned memory, and returns all results."""
    inputs = [x.requires_grad_(), *layer.parameters()]

    def step():
        if not torch.cuda.is_current_stream_capturing():
            poison("cuda")
        out = layer(x)
        return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    return step


def same(results, others):
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


def grids(call, folder):
    """The CTAs of each persistent GEMM in a call, in their order."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    file = folder / "trace.json"
    profile.export_chrome_trace(str(file))
    kernels = [event for event in json.loads(file.read_text())["traceEvents"]
               if event.get("cat") == "kernel" and "grouped_gemm_kernel" in event["name"]]
    return [math.prod(kernel["args"]["grid"]) for kernel in sorted(kernels, key=lambda kernel: kernel["ts"])]


def is_limited(limited, full, most):
    """Whether grids are those of `most` multiprocessors, where `full` are those of all."""
    there = torch.cuda.get_device_properties("cuda").multi_processor_count
    return len(full) > 0 and limited == [round(ctas / there) * most for ctas in full]


def skip_without(engine):
    device = torch.device("cuda", torch.cuda.current_device())
    if engine == "float8":
        engine = "hopper"
    if reason := engines.ENGINES[engine].unavailable(device):
        pytest.skip(reason)
    if torch.cuda.get_device_properties(device).multi_processor_count < max(LIMITS):
        pytest.skip("has fewer multiprocessors than the limits")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "hopper_batch_invariant", "tensor_core", "float8"])
def test_results_have_the_same_bits_with_fewer_ctas(engine, tmp_path):
    """Where sums are split follows from the number of clusters that a schedule is made for, which was that of the launch."""
    skip_without(engine)
    step = step_of(*layer_and_input(engine))
    expected, full = step(), grids(step, tmp_path)
    for most in (torch.cuda.get_device_properties("cuda").multi_processor_count // 2 * 2, *LIMITS):
        with gbmoe.limit_multiprocessors(most):
            assert same(step(), expected), most
            assert is_limited(grids(step, tmp_path), full, most), most
    assert grids(step, tmp_path) == full


@pytest.mark.gpu
def test_long_sums_of_rows_have_the_same_bits():
    """Clusters that are kept together along K, and splits of a few tiles in the end."""
    skip_without("hopper")
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, inner, columns in ((4096, 14336, 4096), (700, 8192, 1024)):
        sizes = torch.tensor([rows // 2, 0, rows - rows // 2], device="cuda")
        a = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16, generator=generator)
        b = torch.randn(3, inner, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
        expected = gbmoe.gmm(a, b, sizes, engine="hopper")
        for most in LIMITS:
            poison("cuda")
            with gbmoe.limit_multiprocessors(most):
                assert torch.equal(gbmoe.gmm(a, b, sizes, engine="hopper"), expected), (inner, most)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_programs_and_compiled_code_from_before_the_limit_are_limited(compiled, tmp_path):
    skip_without("tensor_core")
    layer, x = layer_and_input("auto")
    step = step_of(torch.compile(layer) if compiled else layer, x)
    programs.forget_all()
    for _ in range(4):  # recorded at the second, run from the third on
        expected = step()
    full = grids(step, tmp_path)
    for most in LIMITS:
        with gbmoe.limit_multiprocessors(most):
            assert same(step(), expected), most
            assert is_limited(grids(step, tmp_path), full, most), most


@pytest.mark.gpu
def test_a_cuda_graph_keeps_the_limit_of_its_capture(tmp_path):
    skip_without("tensor_core")
    step = step_of(*layer_and_input("auto"))
    expected, full = step(), grids(step, tmp_path)
    for most in LIMITS:
        with gbmoe.limit_multiprocessors(most):
            graph, results = captured(step)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert same(results, expected), most
        assert is_limited(grids(graph.replay, tmp_path), full, most), most
    graph, results = captured(step)
    with gbmoe.limit_multiprocessors(2):
        assert grids(graph.replay, tmp_path) == full
