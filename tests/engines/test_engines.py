"""The table of engines: what is available where, what is refused, what "auto" takes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import choice, hopper, tensor_core
from gbmoe.launch import availability
from gbmoe.problem import Problem
from gbmoe.testing import exact_inputs
from gbmoe.tuning import device as device_module
from gbmoe.tuning.device import Device
from tests.tuning import cards

CPU = torch.device("cpu")


def problem(device=CPU, dtype=torch.bfloat16, rows=1024, groups=8, inner=64, columns=64, k_grouped=False):
    return Problem(torch.device(device), dtype, rows, groups, inner, columns, k_grouped)


def test_every_engine_says_yes_or_why_not(device):
    table = engines.availability(device)
    assert list(table) == ["hopper", "hopper_batch_invariant", "tensor_core", "tensor_core_batch_invariant", "cublas_loop",
                           "cublas_grouped", "torch", "reference"]
    assert table["reference"] is None
    for name, reason in table.items():
        assert reason is None or len(reason) > 10, name
    if device.type == "cpu":
        assert all(reason == "runs on CUDA devices only, not on cpu" for name, reason in table.items() if name != "reference")


@pytest.mark.parametrize("change, words", [
    (dict(dtype=torch.float16), "takes bfloat16, not float16"),
    (dict(inner=60), "multiples of 8, not 60 and 64"),
    (dict(columns=63), "multiples of 8, not 64 and 63"),
    (dict(rows=0), "takes no empty operands"),
    (dict(rows=2**31), "the groups' ends in int32, not 2147483648 rows"),
])
def test_torchs_product_says_what_it_does_not_take(change, words):
    assert words in engines.ENGINES["torch"].refuses(problem(**change))
    assert engines.ENGINES["torch"].refuses(problem()) is None


@pytest.mark.parametrize("change, words", [
    (dict(dtype=torch.float32), "takes bfloat16 and float16, not float32"),
    (dict(inner=60), "multiples of 8, not 60 and 64"),
    (dict(groups=0), "takes no empty operands"),
    (dict(rows=2**31), "takes at most 2147482624 rows, groups and columns, not 2147483648"),
    (dict(rows=2**31 - 8), "at most 2147482624"),
    (dict(inner=2**31), "at most 2147482624"),
    (dict(columns=2**32), "at most 2147482624"),
])
def test_the_hopper_engine_says_what_it_does_not_take(change, words):
    assert words in engines.ENGINES["hopper"].refuses(problem(**change))
    assert engines.ENGINES["hopper"].refuses(problem(dtype=torch.float16)) is None
    assert engines.ENGINES["hopper"].refuses(problem(rows=2**31 - 2**10)) is None


@pytest.mark.parametrize("change, words", [
    (dict(dtype=torch.float64), "takes bfloat16, float16 and float32, not float64"),
    (dict(dtype=torch.float32), "takes float32 only where TF32 is allowed"),
    (dict(inner=60), "multiples of 8, not 60 and 64"),
    (dict(groups=0), "takes no empty operands"),
    (dict(rows=2**31), "takes at most 2147482624 rows, groups and columns, not 2147483648"),
])
def test_the_tensor_core_engine_says_what_it_does_not_take(change, words):
    assert words in engines.ENGINES["tensor_core"].refuses(problem(**change))
    assert engines.ENGINES["tensor_core"].refuses(problem(dtype=torch.float16)) is None


@pytest.mark.parametrize("allowed", [False, True])
def test_a_problem_in_float32_knows_whether_tf32_is_allowed(float32_products, allowed):
    """It is part of what the choice of an engine is remembered for, so that a later change of the setting counts."""
    float32_products("tf32" if allowed else "ieee")
    a, b, sizes = torch.zeros(8, 8), torch.zeros(1, 8, 8), torch.tensor([8])
    single = Problem.of(a, b, sizes, False, False)
    assert single.tf32 == allowed and (engines.ENGINES["tensor_core"].refuses(single) is None) == allowed
    assert not Problem.of(a.bfloat16(), b.bfloat16(), sizes, False, False).tf32


@pytest.mark.parametrize("k_grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows, groups, inner, columns", [
    (0, 4, 8, 8), (8, 4, 8, 8), (7, 3, 5, 9), (65536, 8, 4096, 4096), (8, 512, 64, 64)])
def test_auto_always_finds_an_engine_that_serves(device, dtype, rows, groups, inner, columns, k_grouped):
    wanted = problem(device, dtype, rows, groups, inner, columns, k_grouped)
    chosen = engines.select("auto", wanted)
    assert chosen.unavailable(wanted.device) is None and chosen.refuses(wanted) is None


@pytest.mark.parametrize("groups, k_grouped, sizes_on_host, name", [
    (8, False, True, "cublas_loop"), (8, False, False, "hopper"), (64, False, True, "hopper"),
    (16, False, True, "cublas_loop"), (16, True, True, "hopper"), (8, True, True, "cublas_loop")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_loops_over_few_large_groups_only_where_nobody_waits(monkeypatch, forgotten, dtype, groups, k_grouped, sizes_on_host, name):
    pretend_gpu(monkeypatch, (9, 0))
    wanted = Problem(torch.device("cuda", 0), dtype, 65536, groups, 4096, 14336, k_grouped, sizes_on_host)
    assert engines.select("auto", wanted).name == name


def pretend_gpu(monkeypatch, capability):
    """Make the engines answer as on such a GPU, where the extension is loaded and has code for it."""
    device_module._found.cache_clear()
    engines.forget()
    major, minor = capability
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(availability, "why_not", lambda: None)
    monkeypatch.setattr(torch.ops, "gbmoe_cuda", SimpleNamespace(tensor_core_built=lambda index: True, hopper_rows=None))
    for name in ("cublas_loop", "cublas_grouped"):
        monkeypatch.setitem(vars(engines.ENGINES[name]), "unavailable", lambda device: None)


@pytest.fixture
def forgotten():
    yield
    device_module._found.cache_clear()
    engines.forget()


@pytest.mark.parametrize("capability, dtype, name", [
    ((7, 5), torch.float16, "cublas_loop"), ((8, 0), torch.bfloat16, "tensor_core"), ((8, 6), torch.float16, "tensor_core"),
    ((8, 9), torch.bfloat16, "tensor_core"), ((9, 0), torch.bfloat16, "hopper"), ((10, 0), torch.bfloat16, "torch"),
    ((10, 0), torch.float16, "tensor_core"), ((12, 0), torch.bfloat16, "tensor_core"), ((8, 0), torch.float32, "cublas_loop")])
def test_auto_chooses_by_compute_capability(monkeypatch, forgotten, capability, dtype, name):
    pretend_gpu(monkeypatch, capability)
    w1_EFH = torch.empty(8, 14336, 4096, dtype=dtype, device="meta")
    sizes_E = SimpleNamespace(device=torch.device("cuda", 0))
    x_TH = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
    assert engines.select("auto", Problem(torch.device("cuda", 0), dtype, 32768, 8, 4096, 14336, False)).name == name
    if dtype != torch.float32:  # one engine for all of a layer's products, so that its fused steps are used
        assert engines.for_experts("auto", x_TH, 32768, w1_EFH, sizes_E).name == name


@pytest.fixture
def launched(monkeypatch):
    """Configurations that engines launch, instead of kernels, of bfloat16 tensors without memory."""
    configs = []
    for module in (hopper, tensor_core):
        monkeypatch.setattr(module, "launch_rows", lambda config, *_: configs.append(config))
    return configs


def launch_rows(engine, rows, groups, inner, columns):
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta")
                 for shape in ((rows, inner), (groups, inner, columns), (rows, columns)))
    engines.ENGINES[engine].rows_gemm(a, b, None, None, torch.empty(groups, dtype=torch.int32, device="meta"), False, out)


@pytest.mark.parametrize("engine, device, problem, tile_n", [
    ("hopper_batch_invariant", cards.H100, (512, 8, 14336, 4096), 256), ("hopper_batch_invariant", cards.H200, (512, 8, 14336, 4096), 256),
    ("hopper_batch_invariant", cards.H100_PCIE, (512, 8, 14336, 4096), 128), ("tensor_core", cards.H100, (14000, 1, 512, 256), 128),
    ("tensor_core", cards.A100, (14000, 1, 512, 256), 256), ("tensor_core", cards.L40S, (17000, 1, 512, 256), 128),
    ("tensor_core", cards.H200, (17000, 1, 512, 256), 256)])
def test_tiles_are_those_of_the_gpu_that_has_the_operands(monkeypatch, launched, engine, device, problem, tile_n):
    """All were given an H200's."""
    monkeypatch.setattr(Device, "of", lambda of: device)
    launch_rows(engine, *problem)
    assert [config.tile_n for config in launched] == [tile_n]


@pytest.mark.parametrize("device, name", [(cards.A100, "tensor_core"), (cards.H100_PCIE, "hopper"), (cards.B200, "torch")],
                         ids=cards.card_id)
def test_a_graph_has_the_engine_that_auto_chooses_outside_of_one(monkeypatch, forgotten, device, name):
    """torch.compile traces the choice, except for what is asked of the device."""
    def constant(function):
        function._dynamo_marked_constant = True
        return function

    torch.compiler.reset()  # what was asked of another device is a constant of graphs of the same code
    engines.forget()
    monkeypatch.setattr(choice, "_device_fields", constant(lambda of: tuple(device)))
    monkeypatch.setattr(choice, "_unavailable", constant(lambda engine, of: "no" if engine == "hopper" != name else None))

    def named(x):
        problem = Problem(torch.device("cuda", 0), torch.bfloat16, x.size(0), 8, 4096, 14336, False)
        return x + len(engines.select("auto", problem).name)

    compiled = torch.compile(named, fullgraph=True, dynamic=True, backend="eager")
    for rows in (32768, 4096):
        assert int(named(torch.zeros(rows))[0]) == int(compiled(torch.zeros(rows))[0]) == len(name)


def test_auto_takes_tensor_core_on_hopper_where_tf32_is_allowed(monkeypatch, forgotten):
    pretend_gpu(monkeypatch, (9, 0))
    wanted = Problem(torch.device("cuda", 0), torch.float32, 32768, 8, 4096, 14336, False)
    assert engines.select("auto", wanted).name == "cublas_loop"
    assert engines.select("auto", replace(wanted, tf32=True)).name == "tensor_core"


@pytest.mark.parametrize("name", ["hopper", "tensor_core", "torch", "hopper_batch_invariant"])
def test_a_named_engine_refused_a_batch_of_nothing(monkeypatch, forgotten, name):
    """A rank of expert parallelism may get no rows."""
    pretend_gpu(monkeypatch, (9, 0))
    wanted = Problem(torch.device("cuda", 0), torch.bfloat16, 0, 8, 64, 64, False)
    assert engines.select(name, wanted).name == "reference"
    assert engines.select(name, replace(wanted, rows=64)).name == name


def test_what_auto_takes_is_told_by_dtype(monkeypatch, forgotten):
    pretend_gpu(monkeypatch, (10, 0))
    taken = engines.taken_by_auto(torch.device("cuda", 0))
    assert taken["bfloat16"] == ["torch", "tensor_core"] and taken["float16"] == taken["float32 in TF32"] == ["tensor_core"]
    assert taken["float32"] == ["cublas_loop", "cublas_grouped"] and taken["float64"] == ["cublas_loop"]
    assert set(taken["odd bfloat16"]) <= {"cublas_loop", "cublas_grouped"}


def test_a_forced_engine_serves_or_raises():
    assert engines.select("reference", problem()).name == "reference"
    with pytest.raises(ValueError, match="engine 'torch' cannot serve this product: runs on CUDA devices only"):
        engines.select("torch", problem())
    with pytest.raises(ValueError, match="engine: expected one of auto, .* got 'fast'"):
        engines.select("fast", problem())


@pytest.mark.memcheck
@pytest.mark.parametrize("place, engine", [("cpu", "reference"), *(pytest.param("cuda", name, marks=pytest.mark.gpu)
                                                                   for name in ("reference", "cublas_loop", "cublas_grouped"))])
@pytest.mark.parametrize("sizes, counted", [
    ([5, 9, 1], [5, 5, 0]), ([-3, 4, 5], [0, 4, 5]), ([2**62, 2**62, 2**62], [10, 0, 0]), ([4, -2**63, 2**63 - 1], [4, 0, 6])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_host_sizes_beyond_the_rows_reach_nothing_outside(place, engine, sizes, counted, dtype):
    """Inside operators sizes are a plan's, which may be made by hand."""
    around = torch.full((30, 16), float("nan"), dtype=dtype, device=place)
    a, b = around[10:20], torch.randn(3, 16, 16, dtype=dtype, device=place)
    a.copy_(torch.randn(10, 16, dtype=dtype))
    sizes, counted = torch.tensor(sizes), torch.tensor(counted)
    for operands in ((a, b, False, False), (a, b, False, True), (a, a, True, False)):
        left, right, *layout = operands
        results = []
        for given in (sizes, counted):
            exact_inputs.poison(place)
            target = torch.full((50, 16), 7.0, dtype=dtype, device=place)  # 48 of them are as many as three groups of 16
            out = target[10:20] if not layout[0] else target[1:49].view(3, 16, 16)
            results.append(engines.product(left, right, given, *layout, engine=engine, out=out))
            assert bool((target[:1] == 7).all()) and bool((target[-1:] == 7).all())
            assert layout[0] or (bool((target[:10] == 7).all()) and bool((target[20:] == 7).all()))
        assert bool(results[0].isfinite().all())
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("columns", [1, 4, 13, 64])
def test_a_linear_layer_may_have_any_number_of_columns(device, rows, columns):
    """A batch-invariant layer with four experts was refused by its router."""
    x, weight = (exact_inputs.exact_values(*shape, dtype=torch.bfloat16, device=device, seed=seed)
                 for seed, shape in enumerate(((rows, 72), (columns, 72))))
    expected = (x.double() @ weight.double().t()).float()
    for name, reason in engines.availability(device).items():
        if reason is None:
            got = engines.linear(x, weight, engine=name)
            assert torch.equal(got, expected), name
            assert got.is_contiguous() and got.untyped_storage().nbytes() == expected.nbytes, name
    assert torch.equal(engines.linear(x, weight), expected)


def test_which_engines_have_the_rows_in_memory_before_the_first_product():
    """Hopper's gathers at up to 512, if the tokens are reached by 32 bits and the activation is one of two; float8 quantises on the way."""
    def answers(name, *cases):
        table = engines.ENGINES | {name: pair[0] for name, pair in engines.FLOAT8_ENGINES.items()}
        return [table[name].gathers_before_up(*case) for case in cases]

    cases = [(512, "silu", 1 << 30), (520, "silu", 1 << 30), (512, "gelu_tanh", 1 << 30), (512, "gelu", 1 << 30), (512, "silu", 1 << 36)]
    for name in ("hopper", "hopper_batch_invariant"):
        assert answers(name, *cases) == [False, True, False, True, True]
    for name in ("tensor_core", "tensor_core_batch_invariant", "torch", "cublas_loop", "reference"):
        assert answers(name, *cases) == [True] * 5
    assert answers("float8_block", *cases) == [False] * 5


@pytest.mark.parametrize("name, roundings, place", [
    ("reference", [2], "cpu"), *(pytest.param(name, roundings, "cuda", marks=pytest.mark.gpu) for name, roundings in (
        ("hopper", [1]), ("tensor_core", [1]), ("cublas_loop", [2, 3]), ("cublas_grouped", [2]), ("torch", [3])))])
def test_how_often_the_gradient_of_a_glus_rows_is_rounded(name, roundings, place):
    """docs/numerics.md said once of every engine. The sums are exact in float32, so that the bits tell the roundings."""
    engine, device = engines.ENGINES[name], torch.device(place)
    reason = engine.unavailable(device)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    dh_PF, dg_PF = (exact_inputs.exact_values(64, 256, dtype=torch.bfloat16, device=device, seed=seed) for seed in (1, 2))
    w1_EFH, v1_EFH = (exact_inputs.exact_values(1, 256, 128, dtype=torch.bfloat16, device=device, seed=seed) for seed in (3, 4))
    dx_PH = engine.up_backward(dh_PF, w1_EFH, dg_PF, v1_EFH, torch.tensor([64], device="cpu" if engine.needs_host_sizes else device))
    first_PH, second_PH = dh_PF.double() @ w1_EFH[0].double(), dg_PF.double() @ v1_EFH[0].double()
    expected = {1: (first_PH + second_PH).bfloat16(), 2: (first_PH.bfloat16() + second_PH).bfloat16(),
                3: first_PH.bfloat16() + second_PH.bfloat16()}
    (found,) = [count for count, sums_PH in expected.items() if torch.equal(dx_PH, sums_PH)]
    assert found in roundings
