"""grouped_mlp: rows that are in expert order already, on every engine, against one expert at a time."""

from functools import partial

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import gbmoe
from gbmoe import RoutingPlan, engines, launch
from gbmoe.ops import local_transport
from gbmoe.problem import Problem
from gbmoe.testing import cuda_graphs, exact_inputs
from gbmoe.testing.oracle import ACTIVATIONS as CALLABLES
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

COUNTS = (17, 0, 3, 40, 0)  # of 66 rows: the last six are nobody's
CASES = {"some": (COUNTS, 66), "all": (COUNTS, 60), "one": ((0, 0, 12), 12), "nobody": ((0, 0), 9), "no-rows": ((0, 0, 0), 0)}


def inputs(dtype, device, counts=COUNTS, rows=66, *, hidden=24, ffn=40, glu=True, weighted=True):
    values = partial(exact_inputs.exact_values, dtype=dtype, device=device)
    scale = exact_inputs.fan_in_scale(hidden)
    tensors = {"x": values(rows, hidden, seed=1)}
    if weighted:
        tensors["weights"] = values(rows, seed=2)
    for seed, name in enumerate(("w1", "w2", "v1") if glu else ("w1", "w2")):
        tensors[name] = values(len(counts), ffn, hidden, seed=3 + seed, scale=scale)
    return tensors, torch.tensor(counts, device=device), values(rows, hidden, seed=7)


def loop(counts, activation, *, x, w1, w2, v1=None, weights=None):
    """The definition, with PyTorch's own gradients; what the rows of nobody hold does not enter."""
    out, first = [], 0
    for e, size in enumerate(counts):
        rows = slice(first, first + size)
        a = activation(x[rows] @ w1[e].t())
        if v1 is not None:
            a = a * (x[rows] @ v1[e].t())
        y = a @ w2[e]
        out.append(y if weights is None else weights[rows, None] * y)
        first += size
    return torch.cat([*out, torch.zeros_like(x[first:])]) + 0 * sum(t[:0].sum() for t in (x, w1, w2))


def forward_and_gradients(function, tensors, grad):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad, materialize_grads=True)
    return {"out": out.detach(), **dict(zip((f"grad_{name}" for name in leaves), grads))}


def run(tensors, counts, grad, activation="silu", engine="auto", **options):
    def rows(x, w1, w2, v1=None, weights=None):
        return gbmoe.grouped_mlp(x, counts, w1, w2, v1, weights_R=weights, activation=activation, engine=engine, **options)

    exact_inputs.poison(grad.device)
    return forward_and_gradients(rows, tensors, grad)


def expected(tensors, counts, grad, activation, dtype):
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    return forward_and_gradients(lambda **leaves: loop(counts.tolist(), activation, **leaves), tensors, grad.to(dtype))


@pytest.mark.parametrize("activation", ["silu", "relu_squared", torch.tanh], ids=["silu", "relu_squared", "composed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("case", CASES)
def test_float64_is_the_definition(device, case, activation, glu, weighted):
    tensors, counts, grad = inputs(torch.float64, device, *CASES[case], glu=glu, weighted=weighted)
    got = run(tensors, counts, grad, activation)
    torch.testing.assert_close(got, expected(tensors, counts, grad, CALLABLES.get(activation, torch.tanh), torch.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
def test_every_engine_is_as_accurate_as_a_loop(engine_on, dtype, glu, activation):
    engine, device = engine_on
    tensors, counts, grad = inputs(dtype, device, glu=glu)
    reason = engines.ENGINES[engine].refuses(Problem(device, dtype, 66, 5, 24, 40, False))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    function = F.silu if activation == "silu" else activation
    got = run(tensors, counts, grad, activation, engine)
    exact, baseline = (expected(tensors, counts, grad, function, of) for of in (torch.float64, dtype))
    for what in got:
        assert_as_accurate_as(got[what], baseline[what], exact[what], what)


@pytest.mark.pairs
@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
@pytest.mark.parametrize("hidden, ffn", [(136, 256), (200, 512), (72, 640), (1600, 264)])
def test_many_tiles(engine_on, hidden, ffn, weighted):
    """Some hundred rows an expert: where kernels choose by shape, each of their ways, and none that gathers."""
    engine, device = engine_on
    if device.type == "cpu":  # has no tiles, and seconds for as many products
        hidden, ffn = hidden // 4, ffn // 4
    tensors, counts, grad = inputs(torch.bfloat16, device, (300, 0, 129, 400), 900, hidden=hidden, ffn=ffn, weighted=weighted)
    got = run(tensors, counts, grad, "silu", engine)
    exact, baseline = (expected(tensors, counts, grad, F.silu, of) for of in (torch.float64, torch.bfloat16))
    for what in got:
        assert_as_accurate_as(got[what], baseline[what], exact[what], what)


@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
def test_rows_of_nobody_reached_results(device, activation, weighted):
    """NaN in a buffer's unused rows, in what comes back for them, and in their weights."""
    tensors, counts, grad = inputs(torch.float32, device, weighted=weighted)
    clean = run(tensors, counts, grad, activation)
    dirty = {name: t.clone() for name, t in tensors.items()}
    for t in (dirty["x"], grad, dirty.get("weights", grad)):
        t[60:] = float("nan")
    got = run(dirty, counts, grad, activation)
    for what in got:
        assert torch.equal(got[what], clean[what]), what
    assert bool((got["out"][60:] == 0).all() & (got["grad_x"][60:] == 0).all())


def test_the_same_bits_as_tokens_with_one_slot(device):
    """Which are gathered and scattered: the rounding is the same."""
    tensors, counts, grad = inputs(torch.bfloat16, device)
    ids = torch.repeat_interleave(torch.arange(6, device=device), torch.cat([counts, counts.new_tensor([6])]))
    plan = RoutingPlan.from_experts(torch.where(ids < 5, ids, -1), 5)

    def tokens(x, w1, w2, v1, weights):
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights.unsqueeze(1))

    got, slots = run(tensors, counts, grad), forward_and_gradients(tokens, tensors, grad)
    assert all(torch.equal(got[what], slots[what]) for what in got)


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
def test_rows_in_expert_order_were_gathered(device, weighted, monkeypatch):
    tensors, counts, grad = inputs(torch.bfloat16, device, weighted=weighted)

    def gather(*_, **__):
        raise AssertionError("gathered")

    monkeypatch.setattr(launch, "gather", gather)
    run(tensors, counts, grad)
    if not weighted:
        monkeypatch.setattr(local_transport, "scatter", gather)
        run(tensors, counts, grad)
    run(tensors, counts, grad, torch.tanh)


@pytest.mark.parametrize("frozen", ["x", "weights", "w1", "w2", "v1"])
def test_frozen_inputs(device, frozen):
    tensors, counts, grad = inputs(torch.float64, device)
    full = run(tensors, counts, grad)
    leaves = {name: t.clone().requires_grad_(name != frozen) for name, t in tensors.items()}
    out = gbmoe.grouped_mlp(leaves["x"], counts, leaves["w1"], leaves["w2"], leaves["v1"], weights_R=leaves["weights"])
    out.backward(grad)
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name == frozen)
        if name != frozen:
            torch.testing.assert_close(leaf.grad, full[f"grad_{name}"])


def test_nothing_that_is_handed_in_is_written_to(device):
    tensors, counts, grad = inputs(torch.float32, device, weighted=False)
    before = [t.clone() for t in (*tensors.values(), counts, grad)]
    run(tensors, counts, grad)
    assert all(torch.equal(t, was) for t, was in zip((*tensors.values(), counts, grad), before, strict=True))


@pytest.mark.parametrize("layout", ["transposed rows", "shifted rows", "transposed w2", "halves of one matrix"])
def test_layouts(device, layout):
    """torchtitan stores w2 as [E,H,F], NeMo w1 and v1 as one [E,H,2F]."""
    tensors, counts, grad = inputs(torch.bfloat16, device)
    plain = run(tensors, counts, grad)
    changes = {
        "transposed rows": lambda t: t | {"x": t["x"].t().contiguous().t()},
        "shifted rows": lambda t: t | {"x": torch.cat([t["x"].new_zeros(1), t["x"].flatten()])[1:].view(t["x"].shape)},
        "transposed w2": lambda t: t | {"w2": t["w2"].transpose(1, 2).contiguous().transpose(1, 2)},
        "halves of one matrix": lambda t: t | dict(zip(("w1", "v1"), torch.cat([t["w1"], t["v1"]], 1).transpose(1, 2).contiguous()
                                                       .transpose(1, 2).split(40, 1))),
    }
    leaves = {name: t.detach().requires_grad_() for name, t in changes[layout](tensors).items()}
    out = gbmoe.grouped_mlp(leaves["x"], counts, leaves["w1"], leaves["w2"], leaves["v1"], weights_R=leaves["weights"])
    exact_grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad.t().contiguous().t())))
    exact = expected(tensors, counts, grad, F.silu, torch.float64)
    for what, got in {"out": out.detach(), **{f"grad_{name}": g for name, g in exact_grads.items()}}.items():
        assert_as_accurate_as(got, plain[what], exact[what], what)  # another layout may be another kernel


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_counts_lie_anywhere(device, place, dtype):
    tensors, counts, grad = inputs(torch.bfloat16, device)
    plain = run(tensors, counts, grad)
    got = run(tensors, counts.to(dtype).to("cpu" if place == "host" else device), grad)
    assert all(torch.equal(got[what], plain[what]) for what in got)


def test_counts_that_their_owner_rewrites_before_backward(device):
    tensors, counts, grad = inputs(torch.float64, device)
    full = run(tensors, counts, grad)
    x = tensors["x"].clone().requires_grad_()
    out = gbmoe.grouped_mlp(x, counts, tensors["w1"], tensors["w2"], tensors["v1"], weights_R=tensors["weights"])
    counts.zero_()
    out.backward(grad)
    torch.testing.assert_close(x.grad, full["grad_x"])


@pytest.mark.gpu
def test_the_host_waited():
    device = torch.device("cuda")
    tensors, counts, grad = inputs(torch.bfloat16, device)
    with cuda_graphs.no_host_wait():
        run(tensors, counts, grad, engine="hopper" if engines.ENGINES["hopper"].unavailable(device) is None else "torch")


@pytest.mark.parametrize("change, error, match", [
    (dict(counts=torch.tensor([10, -1, 3, 40, 0])), ValueError, r"counts: expected no negative entry, got -1"),
    (dict(counts=torch.tensor([10, 20, 37, 0, 0])), ValueError, r"counts: expected a sum of at most num_rows == 66, got 67"),
    (dict(counts=torch.tensor([2**62, 2**62, 2**62, 2**62, 1])), ValueError, r"counts: expected a sum of at most num_rows == 66, got"),
    (dict(counts=torch.tensor([1.0, 2.0])), TypeError, r"counts: expected dtype int32, int64"),
    (dict(counts=torch.tensor([60, 6])), ValueError, r"grouped_mlp: counts: expected 5 entries, one for each expert of w1, got 2"),
    (dict(counts=torch.empty(0, dtype=torch.int64)), ValueError, r"counts: expected at least one expert, got 0"),
    (dict(weights=torch.ones(65)), ValueError, r"grouped_mlp: weights: expected 66 entries, one a row of x, got 65"),
    (dict(weights=torch.ones(66, 1)), ValueError, r"grouped_mlp: weights: expected 1 dimensions"),
    (dict(x=torch.ones(66, 24, 1)), ValueError, r"grouped_mlp: x: expected 2 dimensions"),
])
def test_errors_name_the_argument(change, error, match):
    tensors, counts, _ = inputs(torch.float32, "cpu")
    arguments = tensors | {"counts": counts} | change
    with pytest.raises(error, match=match):
        gbmoe.grouped_mlp(arguments["x"], arguments["counts"], arguments["w1"], arguments["w2"], arguments["v1"],
                          weights_R=arguments["weights"])


@pytest.mark.parametrize("counts", [(10, -5, 3, 100, 7), (2**62, 2**62, 2**62, 2**62, 2**62), (-1, -1, -1, -1, -1)], ids=str)
def test_counts_beyond_the_rows_led_out_of_bounds(device, counts):
    """Unchecked, of what goes beyond the rows the rows that are there count."""
    tensors, _, grad = inputs(torch.float64, device)
    for place in ("cpu", device):
        got = run(tensors, torch.tensor(counts, device=place), grad, check="none")
        ends = torch.tensor([max(0, c) for c in counts], dtype=torch.float64).cumsum(0).clamp(max=66).long()
        bounded = torch.cat([ends[:1], ends.diff()])
        torch.testing.assert_close(got, expected(tensors, bounded, grad, F.silu, torch.float64))


def test_meta_device():
    tensors, counts, _ = inputs(torch.bfloat16, "cpu")
    meta = {name: t.to("meta").requires_grad_() for name, t in tensors.items()}
    for activation in ("silu", torch.tanh):
        out = gbmoe.grouped_mlp(meta["x"], counts.to("meta"), meta["w1"], meta["w2"], meta["v1"], weights_R=meta["weights"],
                                activation=activation)
        assert out.is_meta and out.shape == (66, 24)
        out.sum().backward()
        assert all(t.grad.shape == t.shape for t in meta.values())


@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
def test_one_graph_serves_every_number_of_rows(device, activation):
    def rows(x, counts, w1, w2, v1, weights):
        return gbmoe.grouped_mlp(x, counts, w1, w2, v1, weights_R=weights, activation=activation)

    compiles = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(rows, backend=compiles, fullgraph=True, dynamic=True)
    for place in ("cpu", device) if device.type != "cpu" else (device,):
        of_first = None
        for counts, number in ((COUNTS, 66), ((9, 9, 9, 9, 9), 50), ((0, 0, 0, 0, 33), 33)):
            tensors, counts, grad = inputs(torch.float32, device, counts, number)
            counts = counts.to(place)
            eager = run(tensors, counts, grad, activation)
            got = forward_and_gradients(lambda counts=counts, **t: compiled(
                t["x"], counts, t["w1"], t["w2"], t["v1"], t["weights"]), tensors, grad)
            torch.testing.assert_close(got, eager)
            of_first = of_first or compiles.frame_count
        assert compiles.frame_count == of_first
    assert compiles.frame_count <= (1 if device.type == "cpu" else 3)  # counts on the host and on the device are different graphs


def test_compiled_counts_are_checked():
    tensors, counts, _ = inputs(torch.float32, "cpu")
    compiled = torch.compile(lambda counts: gbmoe.grouped_mlp(tensors["x"], counts, tensors["w1"], tensors["w2"]), backend="aot_eager",
                             fullgraph=True)
    with pytest.raises(ValueError, match=r"counts: expected a sum of at most num_rows == 66, got 120"):
        compiled(counts * 2)


def test_autocast(device):
    tensors, counts, grad = inputs(torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        out = gbmoe.grouped_mlp(tensors["x"], counts, tensors["w1"], tensors["w2"], tensors["v1"], weights_R=tensors["weights"])
    halves = {name: t if name == "weights" else t.bfloat16() for name, t in tensors.items()}
    assert torch.equal(out, run(halves, counts, grad.bfloat16())["out"])
