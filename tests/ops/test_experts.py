"""expert_mlp: the fused operator and the composed path, every activation, engine and combination of frozen inputs."""

import contextlib
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe import RoutingPlan, engines, launch
from gbmoe.ops import local_transport
from gbmoe.plain import plain_activation
from gbmoe.problem import Problem
from gbmoe.testing import exact_inputs
from gbmoe.testing.oracle import ACTIVATIONS as CALLABLES
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id


def inputs(dtype, device, *, tokens=50, hidden=24, ffn=40, experts=5, top_k=2, glu=True):
    values = partial(exact_inputs.exact_values, dtype=dtype, device=device)
    scale = exact_inputs.fan_in_scale(hidden)
    tensors = {
        "x": values(tokens, hidden, seed=1), "weights": values(tokens, top_k, seed=2),
        "w1": values(experts, ffn, hidden, seed=3, scale=scale), "w2": values(experts, ffn, hidden, seed=4, scale=scale),
    }
    if glu:
        tensors["v1"] = values(experts, ffn, hidden, seed=5, scale=scale)
    ids = exact_inputs.expert_ids(tokens, experts - 1, top_k, device=device, seed=6, skew=1.0)  # the last expert stays empty
    if tokens > 3:
        ids[2, 0] = -1
        ids[3] = -1
    return tensors, ids, values(tokens, hidden, seed=7)


def loop(ids, activation, *, x, weights, w1, w2, v1=None):
    """The definition: a sum over each token's slots, one expert at a time, with PyTorch's own gradients."""
    out = torch.zeros_like(x)
    for e in range(w1.size(0)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        a = activation(x[token] @ w1[e].t())
        if v1 is not None:
            a = a * (x[token] @ v1[e].t())
        out = out.index_add(0, token, weights[token, slot, None] * (a @ w2[e]))
    return out


def forward_and_gradients(function, tensors, grad):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach(), **dict(zip((f"grad_{name}" for name in leaves), grads))}


def run(tensors, ids, grad, activation, engine="auto", align=1, **options):
    plan = RoutingPlan.from_experts(ids, tensors["w1"].size(0), align=align)

    def layer(x, weights, w1, w2, v1=None):
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=activation, engine=engine, **options)

    exact_inputs.poison(ids.device)
    return forward_and_gradients(layer, tensors, grad)


def expected(tensors, ids, grad, activation, dtype):
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    return forward_and_gradients(lambda **leaves: loop(ids, activation, **leaves), tensors, grad.to(dtype))


@pytest.mark.parametrize("activation", [*CALLABLES, "tanh", "tanh-kept"])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("align", [1, 16])
def test_float64_is_the_definition(device, activation, glu, align):
    tensors, ids, grad = inputs(torch.float64, device, glu=glu)
    function = CALLABLES.get(activation, torch.tanh)
    chosen = activation if activation in CALLABLES else torch.tanh
    got = run(tensors, ids, grad, chosen, align=align, recompute_activation=activation != "tanh-kept")
    torch.testing.assert_close(got, expected(tensors, ids, grad, function, torch.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
def test_every_engine_is_as_accurate_as_a_loop(engine_on, dtype, glu, activation):
    engine, device = engine_on
    tensors, ids, grad = inputs(dtype, device, glu=glu)
    reason = engines.ENGINES[engine].refuses(Problem(device, dtype, ids.numel(), 5, 24, 40, False))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    function = F.silu if activation == "silu" else activation
    got = run(tensors, ids, grad, activation, engine)
    exact = expected(tensors, ids, grad, function, torch.float64)
    baseline = expected(tensors, ids, grad, function, dtype)
    for what in got:
        assert_as_accurate_as(got[what], baseline[what], exact[what], what)


@pytest.mark.gpu
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
@pytest.mark.parametrize("tokens, hidden, ffn", [(6, 24, 40), (300, 136, 264)])
def test_tf32_is_as_accurate_as_a_loop_in_float16(float32_products, tokens, hidden, ffn, activation, glu):
    """TF32 has the mantissa of float16, which is the yardstick because cuBLAS does not use TF32 for every shape."""
    device = torch.device("cuda")
    reason = engines.ENGINES["tensor_core"].unavailable(device)
    if reason is not None:
        pytest.skip(f"tensor_core: {reason}")
    float32_products("tf32")
    tensors, ids, grad = inputs(torch.float32, device, tokens=tokens, hidden=hidden, ffn=ffn, glu=glu)
    function = F.silu if activation == "silu" else activation
    got = run(tensors, ids, grad, activation, "tensor_core")
    exact = expected(tensors, ids, grad, function, torch.float64)
    baseline = expected(tensors, ids, grad, function, torch.float16)
    for what in got:
        assert_as_accurate_as(got[what], baseline[what].float(), exact[what], what)


@pytest.mark.pairs
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu_squared"])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("hidden, ffn", [(136, 256), (136, 264), (200, 512), (72, 640), (200, 1024)])
def test_many_tiles(engine_on, activation, glu, hidden, ffn):
    """Some hundred rows an expert, three slots a token, rows without a slot: where kernels choose by shape, each of their ways."""
    engine, device = engine_on
    tokens = 300 if device.type == "cuda" else 40
    tensors, ids, grad = inputs(torch.bfloat16, device, tokens=tokens, hidden=hidden, ffn=ffn, top_k=3, glu=glu)
    got = run(tensors, ids, grad, activation, engine, align=16)
    exact = expected(tensors, ids, grad, CALLABLES[activation], torch.float64)
    baseline = expected(tensors, ids, grad, CALLABLES[activation], torch.bfloat16)
    for what in got:
        assert_as_accurate_as(got[what], baseline[what], exact[what], what)


@pytest.mark.gpu
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("hidden, ffn", [(1288, 256), (1288, 640), (1544, 256), (1544, 640), (1544, 768), (72, 1920), (72, 3840)])
def test_more_tiles_than_blocks(dtype, glu, hidden, ffn, align):
    """Rings of stages and the walk over tiles go round several times, gathering or not; pairs with a side left over. Without padding pairs
    of CTAs gather by TMA."""
    device = torch.device("cuda")
    tensors, ids, grad = inputs(dtype, device, tokens=6000, hidden=hidden, ffn=ffn, top_k=3, glu=glu)
    got = run(tensors, ids, grad, "silu", align=align)
    exact = expected(tensors, ids, grad, F.silu, torch.float64)
    baseline = expected(tensors, ids, grad, F.silu, dtype)
    for what in got:
        assert_as_accurate_as(got[what], baseline[what], exact[what], what)


@pytest.mark.gpu
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("ffn", [256, 264, 1024])
def test_long_rows(weighted, glu, ffn, align):
    """Shapes at which backward gathers inside its products, or fuses w2 with the activation: without weights, called twice, with w2
    transposed."""
    device = torch.device("cuda")
    tensors, ids, grad = inputs(torch.bfloat16, device, tokens=300, hidden=1600, ffn=ffn, top_k=3, glu=glu)
    if not weighted:
        tensors["weights"] = torch.ones_like(tensors["weights"])
    exact, baseline = (expected(tensors, ids, grad, F.silu, dtype) for dtype in (torch.float64, torch.bfloat16))
    plan = RoutingPlan.from_experts(ids, 5, align=align)
    for transposed in (False, True):
        leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        w2 = leaves["w2"].transpose(1, 2).contiguous().transpose(1, 2) if transposed else leaves["w2"]
        weights = leaves["weights"] if weighted else None
        if not weighted:
            del leaves["weights"]
        exact_inputs.poison(device)
        out = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], w2, leaves.get("v1"), weights_TK=weights, activation="silu")
        first = torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)
        second = torch.autograd.grad(out, list(leaves.values()), grad)
        for name, one, two in zip(leaves, first, second):
            assert torch.equal(one, two), name
            assert_as_accurate_as(one, baseline[f"grad_{name}"], exact[f"grad_{name}"], name)


@pytest.mark.parametrize("shape", [dict(tokens=0), dict(tokens=1, top_k=1), dict(hidden=8, ffn=8), dict(hidden=7, ffn=5),
                                   dict(experts=2, top_k=1), dict(tokens=3, experts=130, top_k=3)], ids=str)
def test_unusual_shapes(device, shape):
    tensors, ids, grad = inputs(torch.float32, device, **shape)
    got = run(tensors, ids, grad, "gelu", align=8)
    torch.testing.assert_close(got, expected(tensors, ids, grad, F.gelu, torch.float32), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
@pytest.mark.parametrize("frozen", ["x", "weights", "w1", "w2", "v1", "all but x", "all but w2", "all but v1"])
def test_frozen_inputs(device, activation, frozen):
    """MegaBlocks' memory-optimised function fails unless x and every weight need a gradient."""
    tensors, ids, grad = inputs(torch.float64, device)
    full = run(tensors, ids, grad, activation)
    trained = [n for n in tensors if (n == frozen[8:] if frozen.startswith("all but ") else n != frozen)]
    leaves = {n: t.clone().requires_grad_(n in trained) for n, t in tensors.items()}
    plan = RoutingPlan.from_experts(ids, leaves["w1"].size(0))
    out = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"],
                           activation=activation)
    out.backward(grad)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in trained)
        if name in trained:
            torch.testing.assert_close(leaf.grad, full[f"grad_{name}"])


@pytest.mark.parametrize("ffn", [40, 264, 640])
def test_every_gradient_alone_has_the_same_bits(device, ffn):
    tensors, ids, grad = inputs(torch.bfloat16, device, ffn=ffn)
    full = run(tensors, ids, grad, "silu", align=16)
    plan = RoutingPlan.from_experts(ids, 5, align=16)
    for name in tensors:
        leaves = {n: t.clone().requires_grad_(n == name) for n, t in tensors.items()}
        exact_inputs.poison(device)
        out = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"])
        assert torch.equal(torch.autograd.grad(out, leaves[name], grad)[0], full[f"grad_{name}"]), name


LAYOUTS = {"transposed": lambda t: t.t().contiguous().t(),
           "shifted": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)}


@pytest.mark.parametrize("ffn", [40, 264, 640])
def test_tokens_and_gradients_of_any_layout(device, ffn):
    """Transposed, off their 16 bytes, and one number for all."""
    tensors, ids, grad = inputs(torch.bfloat16, device, ffn=ffn)
    plain, plan = run(tensors, ids, grad, "silu", align=16), RoutingPlan.from_experts(ids, 5, align=16)
    for name, layout in LAYOUTS.items():
        x = layout(tensors["x"]).requires_grad_()
        leaves = [x, *(tensors[n].clone().requires_grad_() for n in ("weights", "w1", "w2", "v1"))]
        out = gbmoe.expert_mlp(x, plan, *leaves[2:], weights_TK=leaves[1])
        got = dict(zip(plain, (out, *torch.autograd.grad(out, leaves, layout(grad)))))
        assert all(torch.equal(got[what], plain[what]) for what in plain), name
    ones = grad.new_ones(()).expand(grad.shape)
    one, all_of_them = run(tensors, ids, ones, "silu", align=16), run(tensors, ids, ones.contiguous(), "silu", align=16)
    assert all(torch.equal(one[what], all_of_them[what]) for what in one)


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("ffn", [40, 264, 640])
@pytest.mark.parametrize("layout", ["transposed", "shifted"])
def test_preactivations_in_columns_were_read_as_rows(device, layout, ffn, glu):
    """What forward saves comes back from hooks of the caller, as those that offload it, or from a compiler, which choose the strides."""
    tensors, ids, grad = inputs(torch.bfloat16, device, ffn=ffn, glu=glu)

    def unpack(saved):
        return LAYOUTS[layout](saved) if saved.dim() == 2 and saved.is_floating_point() else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        got = run(tensors, ids, grad, "silu", align=16, keep_gathered_rows=True)
    plain = run(tensors, ids, grad, "silu", align=16)
    assert all(torch.equal(got[what], plain[what]) for what in plain)


@pytest.mark.parametrize("ffn", [40, 264, 640])
@pytest.mark.parametrize("tokens", [0, 9])
def test_nobody_comes(device, ffn, tokens):
    """Without a token, or without a token that has an expert, everything is zero."""
    tensors, ids, grad = inputs(torch.bfloat16, device, ffn=ffn, tokens=tokens)
    got = run(tensors, ids.fill_(-1), grad, "silu", align=16)
    assert all(bool((t == 0).all()) for t in got.values())


@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
def test_incoming_gradient_is_not_written_to(device, activation):
    """MegaBlocks' memory-optimised function computes the input's gradient in the memory of the incoming one."""
    tensors, ids, grad = inputs(torch.float32, device)
    before = grad.clone()
    run(tensors, ids, grad, activation)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
def test_backward_twice_gives_the_same_gradients(device, activation):
    tensors, ids, grad = inputs(torch.float32, device)
    leaves = [t.requires_grad_() for t in tensors.values()]
    plan = RoutingPlan.from_experts(ids, 5)
    out = gbmoe.expert_mlp(leaves[0], plan, leaves[2], leaves[3], leaves[4], weights_TK=leaves[1], activation=activation)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("activation", ["silu", "relu_squared", torch.tanh], ids=["silu", "relu_squared", "tanh"])
def test_nan_in_one_expert_stays_with_its_tokens(device, activation):
    tensors, ids, grad = inputs(torch.float32, device)
    for name in ("w1", "v1"):
        tensors[name][1, 0, 0] = float("nan")
    got = run(tensors, ids, grad, activation, align=16)
    hit = (ids == 1).any(1)
    assert bool(got["out"][hit].isnan().any(1).all()) and not bool(got["out"][~hit].isnan().any())
    for what in ("grad_w1", "grad_w2", "grad_v1"):
        others = [e for e in range(5) if e != 1]
        assert not bool(got[what][others].isnan().any()), what
    assert bool((got["grad_w1"][4] == 0).all() & (got["grad_w2"][4] == 0).all())


def test_batched_gradients_are_those_of_each(device):
    tensors, ids, grad = inputs(torch.float64, device)
    leaves = [t.requires_grad_() for t in tensors.values()]
    plan = RoutingPlan.from_experts(ids, 5)
    out = gbmoe.expert_mlp(leaves[0], plan, leaves[2], leaves[3], leaves[4], weights_TK=leaves[1])
    grads = torch.stack([grad, grad.flip(0)])
    batched = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    for i, each in enumerate(grads):
        for got, alone in zip(batched, torch.autograd.grad(out, leaves, each, retain_graph=True)):
            torch.testing.assert_close(got[i], alone)


def test_backward_under_a_dispatch_mode_is_the_operator(device):
    """Dispatch modes, such as a counter of FLOPs, see an operator for backward too."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    tensors, ids, grad = inputs(torch.float32, device)
    plan = RoutingPlan.from_experts(ids, 5)
    out = gbmoe.expert_mlp(tensors["x"].requires_grad_(), plan, tensors["w1"], tensors["w2"], tensors["v1"])
    with Watch():
        out.backward(grad)
    assert any(name.startswith("gbmoe.expert_mlp_backward") for name in seen)


def test_second_derivatives_are_refused(device):
    tensors, ids, _ = inputs(torch.float64, device)
    x = tensors["x"].requires_grad_()
    out = gbmoe.expert_mlp(x, RoutingPlan.from_experts(ids, 5), tensors["w1"], tensors["w2"], activation="silu")
    grad, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_mixed_dtypes_under_autocast_are_refused(device):
    tensors, ids, _ = inputs(torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(TypeError, match="b: expected the dtype of a"):
        gbmoe.expert_mlp(tensors["x"].double(), RoutingPlan.from_experts(ids, 5), tensors["w1"], tensors["w2"])


def test_nothing_but_x_and_preactivations_is_saved():
    """The padded copy of x, the activation and the experts' output are computed again, not kept."""
    tensors, ids, _ = inputs(torch.float32, "cpu", tokens=64, hidden=8, ffn=24)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    plan = RoutingPlan.from_experts(ids, 5, align=16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"])
    rows = plan.num_rows
    assert sorted(tuple(s) for s in saved if len(s) == 2 and s[0] == rows) == [(rows, 24), (rows, 24)]


@pytest.fixture
def gathers(monkeypatch):
    """The rows that were gathered, as (rows of the tokens, rows): one entry for each call."""
    calls, gather = [], launch.gather
    monkeypatch.setattr(launch, "gather", lambda x, slots, **named: calls.append((x.size(0), slots.num_rows)) or gather(x, slots, **named))
    return calls


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_kept_rows_give_the_same_bits_with_one_gather_less(device, gathers, dtype, align, glu):
    tensors, ids, grad = inputs(dtype, device, glu=glu)
    results = []
    for keep, number in ((False, 3), (True, 2)):
        results.append(run(tensors, ids, grad, "silu", engine="reference", align=align, keep_gathered_rows=keep))
        assert len(gathers) == number
        gathers.clear()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("fields, number", [(dict(), 2), (dict(align=16), 3), (dict(activation="gelu"), 3), (dict(glu=False), 3),
                                            (dict(keep_gathered_rows=True), 2), (dict(ffn=512), 1), (dict(ffn=512, align=16), 1),
                                            (dict(ffn=2304), 3), (dict(tokens=800), 1), (dict(glu=False, tokens=800), 2),
                                            (dict(glu=False, tokens=800, ffn=2304), 3)], ids=str)
def test_how_often_hopper_gathers_ahead(gathers, fields, number):
    """Of three times: not before the first GEMM where CTAs form pairs and no row is padding, nor before two GEMMs of gradients for a small
    F; with 256 rows an expert neither before one of two gradients up to F = 1,024, and of one up to 2,048."""
    device = torch.device("cuda")
    reason = engines.ENGINES["hopper"].unavailable(device)
    if reason is not None:
        pytest.skip(f"hopper: {reason}")
    of = dict(align=1, activation="silu", glu=True, ffn=768, tokens=600, keep_gathered_rows=False) | fields
    tensors, ids, grad = inputs(torch.bfloat16, device, tokens=of["tokens"], hidden=1544, ffn=of["ffn"], glu=of["glu"])
    run(tensors, ids, grad, of["activation"], engine="hopper", align=of["align"], keep_gathered_rows=of["keep_gathered_rows"])
    assert len(gathers) == number


@pytest.mark.parametrize("frozen, kept", [((), True), (("w1",), True), (("v1",), True), (("x", "weights", "w2"), True),
                                          (("w1", "v1"), False), (("x", "weights", "w1", "w2", "v1"), False)], ids=str)
def test_rows_are_kept_if_a_weights_gradient_needs_them(frozen, kept):
    tensors, ids, grad = inputs(torch.float32, "cpu")
    plan = RoutingPlan.from_experts(ids, 5, align=16)
    results = []
    for keep in (False, True):
        leaves = {n: t.detach().clone().requires_grad_(n not in frozen) for n, t in tensors.items()}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            out = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"],
                                   keep_gathered_rows=keep)
        assert saved.count((plan.num_rows, 24)) == (keep and kept)
        if out.requires_grad:
            results.append(torch.autograd.grad(out, [t for n, t in leaves.items() if n not in frozen], grad))
    assert all(torch.equal(*both) for both in zip(*results))


@pytest.mark.parametrize("case", ["in expert order", "a callable", "no gradients"])
def test_keeping_rows_has_no_effect_where_none_are_gathered_or_needed(gathers, case):
    """A callable's rows are kept by the products' own gradients."""
    tensors, ids, grad = inputs(torch.float32, "cpu", top_k=1)
    plan = RoutingPlan.from_counts(torch.tensor([20, 0, 12, 9, 9]), 50) if case == "in expert order" else RoutingPlan.from_experts(ids, 5)
    activation = torch.tanh if case == "a callable" else "silu"
    number = []
    for keep in (False, True):
        x, w1 = tensors["x"].clone().requires_grad_(case != "no gradients"), tensors["w1"].clone().requires_grad_(case != "no gradients")
        out = gbmoe.expert_mlp(x, plan, w1, tensors["w2"], activation=activation, keep_gathered_rows=keep)
        if case != "no gradients":
            out.backward(grad)
        number.append(len(gathers))
        gathers.clear()
    assert number[0] == number[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_kept_rows_under_activation_checkpointing(reentrant):
    tensors, ids, grad = inputs(torch.float32, "cpu")
    plan = RoutingPlan.from_experts(ids, 5, align=16)

    def layer(x, weights, w1, w2, v1, keep=True):
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, keep_gathered_rows=keep)

    leaves = [t.requires_grad_() for t in tensors.values()]
    expected = torch.autograd.grad(layer(*leaves, keep=False), leaves, grad)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = checkpoint(layer, *leaves, use_reentrant=reentrant)
    assert (plan.num_rows, 24) not in kept  # nothing is kept between forward and backward
    out.backward(grad)
    assert all(torch.equal(leaf.grad, want) for leaf, want in zip(leaves, expected))


def test_kept_rows_are_those_of_the_autocast_dtype():
    tensors, ids, grad = inputs(torch.float32, "cpu")
    plan, saved, results = RoutingPlan.from_experts(ids, 5, align=16), [], []
    leaves = [t.requires_grad_() for t in tensors.values()]
    for keep in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.shape, t.dtype)) or t, lambda t: t), \
                torch.autocast("cpu", dtype=torch.bfloat16):
            out = gbmoe.expert_mlp(leaves[0], plan, leaves[2], leaves[3], leaves[4], weights_TK=leaves[1], keep_gathered_rows=keep)
        results.append(torch.autograd.grad(out, leaves, grad.bfloat16()))
        assert saved.count(((plan.num_rows, 24), torch.bfloat16)) == keep
    assert all(torch.equal(*both) for both in zip(*results))


def test_float8_keeps_no_rows():
    """They are quantised on their way, in forward and in backward, and are never in memory in their own dtype."""
    tensors, ids, grad = inputs(torch.bfloat16, "cpu", hidden=32, ffn=48)
    plan, saved, results = RoutingPlan.from_experts(ids, 5, align=16), [], []
    leaves = [t.requires_grad_() for t in tensors.values()]
    for keep in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            out = gbmoe.expert_mlp(leaves[0], plan, leaves[2], leaves[3], leaves[4], weights_TK=leaves[1], keep_gathered_rows=keep,
                                   fp8_recipe=gbmoe.Float8BlockScaling())
        results.append(torch.autograd.grad(out, leaves, grad))
    assert (plan.num_rows, 32) not in saved and all(torch.equal(*both) for both in zip(*results))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, ffn, keeps", [(264, 768, True), (1544, 768, True), (264, 512, False)])
def test_kept_rows_give_hoppers_bits(hidden, ffn, keeps):
    """At 512 the first product gathers, so that there is nothing to keep. At 264 the activation's gradient is not fused."""
    device = torch.device("cuda")
    reason = engines.ENGINES["hopper"].unavailable(device)
    if reason is not None:
        pytest.skip(f"hopper: {reason}")
    tensors, ids, grad = inputs(torch.bfloat16, device, tokens=600, hidden=hidden, ffn=ffn)
    saved, results = [], []
    for keep in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            results.append(run(tensors, ids, grad, "silu", engine="hopper", keep_gathered_rows=keep))
        rows = [shape[0] for shape in saved if len(shape) == 2 and shape[1] == hidden and shape[0] != 600]
        assert any(number >= 1200 - 3 for number in rows) == (keep and keeps)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("retain", [False, True])
def test_preactivations_are_freed_when_they_have_been_used(monkeypatch, retain):
    """Backward does not hold them to its end, unless the graph is retained."""
    tensors, ids, grad = inputs(torch.float32, "cpu", tokens=64, ffn=56)
    leaves = [t.requires_grad_() for t in tensors.values()]
    plan = RoutingPlan.from_experts(ids, 5, align=16)
    preactivations, alive = [], []

    def pack(tensor):
        if tensor.shape == (plan.num_rows, 56):
            preactivations.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = gbmoe.expert_mlp(leaves[0], plan, leaves[2], leaves[3], leaves[4], weights_TK=leaves[1])
    scatter = local_transport.scatter

    def watching(*args, **named):
        alive.extend(preactivation() is not None for preactivation in preactivations)
        return scatter(*args, **named)

    monkeypatch.setattr(local_transport, "scatter", watching)
    torch.autograd.grad(out, leaves, grad, retain_graph=retain)
    assert alive == [retain, retain]


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("scale", [0.25, 1 / 3])
@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "callable"])
@pytest.mark.parametrize("in_order", [False, True], ids=["gathered", "in_order"])
def test_the_scale_of_the_weights_gradients_reaches_no_other_gradient(device, dtype, scale, activation, in_order):
    tensors, ids, grad = inputs(dtype, device)
    plan = RoutingPlan.from_experts(ids, 5)
    if in_order:
        plan = RoutingPlan.from_counts(torch.tensor([3, 0, 2, 1, 0]), tensors["x"].size(0), device=device)
        tensors["weights"] = tensors["weights"][:, :1].contiguous()

    def gradients(**changes):
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        out = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"],
                               activation=activation, **changes)
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad)))

    plain, scaled = gradients(), gradients(weight_gradient_scale=scale)
    for name in plain:
        if name in ("x", "weights"):
            assert torch.equal(scaled[name], plain[name]), name
        else:
            torch.testing.assert_close(scaled[name], plain[name] * scale, msg=name)


def test_no_gradient_saves_nothing(device):
    tensors, ids, _ = inputs(torch.float32, device)
    plan = RoutingPlan.from_experts(ids, 5)
    others = (None, plan.row_of_slot_TK, plan.slot_of_row_P, plan.host_sizes(), tensors["w1"], tensors["w2"], tensors["v1"], None, None,
              None, "silu", "auto", False, False, False, 1.0, "separate")
    out, *saved = torch.ops.gbmoe.expert_mlp(tensors["x"], *others)
    assert len(saved) == 6 and all(tensor.numel() == 0 for tensor in saved)
    torch.testing.assert_close(out, loop(ids, F.silu, **{**tensors, "weights": torch.ones_like(tensors["weights"])}))
    with pytest.raises(ValueError, match="expert_mlp: save: expected True where a gradient is needed, got False"):
        torch.ops.gbmoe.expert_mlp(tensors["x"].requires_grad_(), *others)


def test_autocast(device):
    tensors, ids, _ = inputs(torch.float32, device)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    plan = RoutingPlan.from_experts(ids, 5)
    for activation in ("silu", torch.tanh):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"],
                                   activation=activation)
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(out.float().sum(), list(leaves.values()))
        assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in grads)


def test_opcheck(device):
    tensors, ids, _ = inputs(torch.float32, device, tokens=12)
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    plan = RoutingPlan.from_experts(ids.clamp(min=0), 5)  # every row in use: rows in use by nobody hold what they held
    for keep_rows in (False, True):
        torch.library.opcheck(torch.ops.gbmoe.expert_mlp.default, (
            leaves["x"], leaves["weights"], plan.row_of_slot_TK, plan.slot_of_row_P, plan.host_sizes(), leaves["w1"], leaves["w2"],
            leaves["v1"], None, None, None, "silu", "reference", True, keep_rows, False, 1.0, "separate"))
    rows = exact_inputs.exact_values(plan.num_rows, 8, dtype=torch.float32, device=device, seed=1)
    torch.library.opcheck(torch.ops.gbmoe.clear_rows_without_slot.default, (plan.slot_of_row_P, rows))


T, K, E, H, FFN = 6, 2, 3, 8, 16
PLAN = RoutingPlan.from_experts(torch.randint(E, (T, K)), E)
GOOD = dict(x_TH=torch.zeros(T, H), plan=PLAN, w1_EFH=torch.zeros(E, FFN, H), w2_EFH=torch.zeros(E, FFN, H))


@pytest.mark.parametrize("change, words", [
    (dict(x_TH=torch.zeros(5, H)), "x: expected 6 rows, as in the plan, got 5"),
    (dict(plan=torch.zeros(T, 1, dtype=torch.int64)), "plan: expected a RoutingPlan, as RoutingPlan.from_experts makes .*, got Tensor"),
    (dict(x_TH=torch.zeros(T, 9)), "w1: expected shape \\[E,F,H\\] == \\[3, 16, 9\\], got \\[3, 16, 8\\]"),
    (dict(w1_EFH=torch.zeros(4, FFN, H)), "w1: expected shape \\[E,F,H\\] == \\[3, 16, 8\\], got \\[4, 16, 8\\]"),
    (dict(w2_EFH=torch.zeros(E, 17, H)), "w2: expected shape \\[E,F,H\\] == \\[3, 16, 8\\], got \\[3, 17, 8\\]"),
    (dict(v1_EFH=torch.zeros(E, FFN, 7)), "v1: expected shape \\[E,F,H\\] == \\[3, 16, 8\\], got \\[3, 16, 7\\]"),
    (dict(w1_EFH=torch.zeros(E * FFN, H)), "w1: expected 3 dimensions, got \\[48, 8\\]"),
    (dict(w2_EFH=torch.zeros(E, FFN, H).half()), "w2: expected the dtype of x, torch.float32, got torch.float16"),
    (dict(weights_TK=torch.zeros(T, 3)), "weights: expected shape \\[6, 2\\], one a slot, got \\[6, 3\\]"),
    (dict(weights_TK=torch.zeros(T, 3), weights_on="input"), "weights: expected shape \\[6, 2\\], one a slot, got \\[6, 3\\]"),
    (dict(v1_EFH=torch.zeros(E, H), layout=gbmoe.WeightLayout(up_transposed=True)), "v1: expected 3 dimensions, got \\[3, 8\\]"),
    (dict(x_TH=torch.zeros(T, H, dtype=torch.int8)), "x: expected dtype .*, got torch.int8"),
    (dict(w2_EFH=torch.zeros(E, FFN, H, device="meta")), "w2: expected device cpu, got meta"),
    (dict(activation="softmax"), "activation: expected a callable or one of silu, .* got 'softmax'"),
])
def test_bad_arguments(change, words):
    with pytest.raises((TypeError, ValueError), match="expert_mlp: " + words):
        gbmoe.expert_mlp(**{**GOOD, **change})


def test_slot_weights_of_a_row_are_the_only_ones_read():
    """relu_squared has a reference slope of its own; this pins that the fused backward uses the row's slot, not its row."""
    tensors, ids, grad = inputs(torch.float64, "cpu", tokens=20, top_k=3)
    got = run(tensors, ids, grad, "relu_squared", align=16)
    want = expected(tensors, ids, grad, CALLABLES["relu_squared"], torch.float64)
    torch.testing.assert_close(got["grad_weights"], want["grad_weights"])
    assert list(plain_activation.ACTIVATIONS) == ["silu", "gelu_tanh", "gelu", "relu", "relu_squared", "identity"]


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("ffn", [64, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_a_slot_beyond_the_weights_is_none(device, dtype, ffn, gated):
    """In a hand-made plan, the row of such a slot gets zeros, and no weight gets a gradient from it."""
    rows = 11
    slot_of_row = torch.tensor([0, 6, 3, -1, 1, 5, -7, 2**31 - 1, 4, 12, -2**31], dtype=torch.int32, device=device)
    clean = torch.tensor([0, -1, 3, -1, 1, 5, -1, -1, 4, -1, -1], dtype=torch.int32, device=device)
    h, g, d = (exact_inputs.exact_values(rows, ffn, dtype=dtype, device=device, seed=seed) for seed in (1, 2, 3))
    weights = exact_inputs.exact_values(3, 2, dtype=torch.float32, device=device, seed=4)
    results = []
    for slots in (slot_of_row, clean):
        exact_inputs.poison(device)
        dh = d.clone()
        computed = launch.activate_backward(h, g if gated else None, dh, slots, weights, "silu")
        assert [t is None for t in computed] == [False, not gated, False]
        results.append([dh, *(t for t in computed if t is not None)])
    for result, expected in zip(*results):
        assert bool(result.isfinite().all()) and torch.equal(result, expected)
    assert bool((results[0][0][clean < 0] == 0).all()) and int((results[0][-1] != 0).sum()) == 5


def test_autocast_keeps_a_copy_of_every_weight_for_backward():
    """What docs/token.md says of memory: the operator saves what it multiplied, and not the caller's float32 tensors."""
    tensors, ids, _ = inputs(torch.float32, "cpu")
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    plan = RoutingPlan.from_experts(ids, leaves["w1"].size(0))
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with keep, torch.autocast("cpu", dtype=torch.bfloat16):
        gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"], activation="silu")
    dtypes = {name: [t.dtype for t in saved if t.shape == leaves[name].shape] for name in ("x", "w1")}
    assert dtypes == {"x": [torch.bfloat16], "w1": 3 * [torch.bfloat16]}


@pytest.mark.parametrize("options", [dict(), dict(recompute_activation=False), dict(activation="silu")], ids=str)
def test_an_autocast_around_backward_changed_the_dtype_of_its_products(device, options):
    """Of those that autograd calls in Python: the second product of an activation without a kernel, and all of the fused operator."""
    torch.manual_seed(0)
    plan = RoutingPlan.from_experts(torch.tensor([[0, 1], [2, -1], [1, 1], [3, 0]], device=device), 4)
    leaves = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((4, 16), (4, 8, 16), (4, 8, 16), (4, 8, 16), (4, 2))]

    def gradients(context):
        x, w1, w2, v1, weights = leaves
        out = gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, **{"activation": F.mish, **options})
        with context:
            return torch.autograd.grad(out.square().sum(), leaves)

    inside = gradients(torch.autocast(device.type, dtype=torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(inside, gradients(contextlib.nullcontext())))


@contextlib.contextmanager
def anomaly_detection_in_memory_full_of_nan(around_forward=True):
    """Deterministic algorithms fill with NaN what torch.empty gives, as memory may hold anyway."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.autograd.detect_anomaly() if around_forward else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around_forward", [True, False])
@pytest.mark.parametrize("activation", ["silu", pytest.param(F.mish, id="mish"),
                                        pytest.param(lambda h: h.mul_(torch.sigmoid(h)), id="in place")])
@pytest.mark.parametrize("options", [dict(), dict(recompute_activation=False), dict(align=4), dict(align=4, recompute_activation=False),
                                     dict(in_order=True), dict(in_order=True, recompute_activation=False)], ids=str)
def test_anomaly_detection_took_rows_without_a_slot_for_gradients(device, activation, options, around_forward):
    """Autograd was handed them as their memory was."""
    torch.manual_seed(0)
    options = dict(options)
    align, in_order = options.pop("align", 1), options.pop("in_order", False)
    ids = torch.tensor([[0, -1], [-1, -1], [2, 3], [1, 0], [0, 0], [3, -1], [2, 1]], device=device)
    plan = RoutingPlan.from_counts(torch.tensor([2, 0, 3, 1], device=device), 7) if in_order \
        else RoutingPlan.from_experts(ids, 4, align=align)
    leaves = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((7, 16), (4, 8, 16), (4, 8, 16), (4, 8, 16))]

    def gradients(around_backward):
        out = gbmoe.expert_mlp(leaves[0], plan, *leaves[1:], activation=activation, **options)
        with around_backward:
            return torch.autograd.grad(out.square().sum(), leaves)

    expected = gradients(contextlib.nullcontext())
    with anomaly_detection_in_memory_full_of_nan(around_forward):
        got = gradients(torch.autograd.detect_anomaly())
    assert all(bool(g.isfinite().all()) for g in got)
    torch.testing.assert_close(got, expected)
