"""expert_mlp with any callable as activation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe import RoutingPlan
from gbmoe.ops import composed_experts
from gbmoe.testing import exact_inputs
from tests.ops.test_experts import anomaly_detection_in_memory_full_of_nan, inputs, loop


@pytest.fixture
def new_memory_is_nan():
    """Let torch.empty fill its result with NaN, so that reading unwritten memory always shows, not only by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


KINDS_OF_PLAN = ["align 1", "align 16", "made by hand"]


def plan_of(ids, kind):
    """A hand-made plan: some rows among an expert's have no slot, and `align` does not say so."""
    plan = RoutingPlan.from_experts(ids, 5, align=1 if kind == "align 1" else 16)
    if kind != "made by hand":
        return plan
    return RoutingPlan(5, 1, plan.row_of_slot_TK, plan.slot_of_row_P, plan.counts_E, plan.offsets_E1, plan.padded_counts_E)


def layer_and_gradients(tensors, ids, grad, activation, kind, leaves, **options):
    out = gbmoe.expert_mlp(tensors["x"], plan_of(ids, kind), tensors["w1"], tensors["w2"], tensors.get("v1"),
                           weights_TK=tensors["weights"], activation=activation, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def definition_and_gradients(tensors, ids, grad, activation, leaves):
    out = loop(ids, activation, **tensors)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


TRAINED = ["x weights w1 w2 v1", "x", "weights", "w1", "w2", "v1"]


def test_parameters_of_the_activation_are_trained(device):
    """A function that recomputes the activation would lose the parameters' gradients; rows without a slot must not contribute to them,
    NaN or not."""
    activation = torch.nn.PReLU(device=device, dtype=torch.float64)
    for align in (1, 4):
        tensors, ids, grad = inputs(torch.float64, device)
        activation.weight.grad = None
        plan = RoutingPlan.from_experts(ids, 5, align=align)
        for recompute in (True, False):
            activation.weight.grad = None
            exact_inputs.poison(device)
            out = gbmoe.expert_mlp(tensors["x"], plan, tensors["w1"], tensors["w2"], tensors["v1"], weights_TK=tensors["weights"],
                                   activation=activation, recompute_activation=recompute)
            out.backward(grad)
            got = activation.weight.grad
            activation.weight.grad = None
            loop(ids, activation, **tensors).backward(grad)
            torch.testing.assert_close(got, activation.weight.grad)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("capture", ["partial", "lambda", "module"])
@pytest.mark.parametrize("only", [False, True], ids=["everything", "nothing-else"])
def test_captured_parameter_of_the_activation_lost_its_gradient(device, capture, recompute, only):
    """Recomputing hid what a callable captures from autograd, and without it rows of dropped slots made the gradient NaN."""
    slope = torch.full((40,), 0.25, dtype=torch.float64, device=device).requires_grad_()
    module = torch.nn.PReLU(40, device=device, dtype=torch.float64)
    module.weight = torch.nn.Parameter(slope.detach().clone())
    leaf = module.weight if capture == "module" else slope
    activation = {"partial": partial(F.prelu, weight=slope), "lambda": lambda h: F.prelu(h, slope), "module": module}[capture]
    tensors, ids, grad = inputs(torch.float64, device)
    if not only:
        tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    for align in (1, 16):
        plan = RoutingPlan.from_experts(ids, 5, align=align)
        out = gbmoe.expert_mlp(tensors["x"], plan, tensors["w1"], tensors["w2"], tensors["v1"], weights_TK=tensors["weights"],
                               activation=activation, recompute_activation=recompute)
        leaves = [t for t in (leaf, *tensors.values()) if t.requires_grad]
        expected_grads = torch.autograd.grad(loop(ids, activation, **tensors), leaves, grad)
        for got, want in zip(torch.autograd.grad(out, leaves, grad), expected_grads, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("trained", ["x weights w1 w2 v1", "w2", "w1", "v1"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("activation", [partial(F.silu, inplace=True), lambda h: h.tanh_()], ids=["silu", "tanh"])
def test_activation_in_place_overwrote_what_was_saved(device, activation, recompute, trained):
    """The pre-activations that backward computes the activation from were already activated."""
    tensors, ids, grad = inputs(torch.float64, device)
    leaves = [tensors[name].requires_grad_() for name in trained.split()]
    plan = RoutingPlan.from_experts(ids, 5)
    out = gbmoe.expert_mlp(tensors["x"], plan, tensors["w1"], tensors["w2"], tensors["v1"], weights_TK=tensors["weights"],
                           activation=activation, recompute_activation=recompute)
    expected_grads = torch.autograd.grad(loop(ids, activation, **tensors), leaves, grad)
    for got, want in zip(torch.autograd.grad(out, leaves, grad), expected_grads, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("kind", KINDS_OF_PLAN)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
def test_activation_saw_what_rows_without_a_slot_held(device, kind, recompute, glu):
    """The activation gets zeros in such rows, with and without gradients, and gradients of zero, whatever tensors it captures."""
    tensors, ids, grad = inputs(torch.float64, device, glu=glu)
    live, seen, grads = plan_of(ids, kind).slot_of_row_P >= 0, [], []
    captured = torch.ones(live.numel(), 40, dtype=torch.float64, device=device).requires_grad_()  # a number for each element
    captured.register_hook(grads.append)

    def activation(h):
        seen.append(h.detach().clone())
        return torch.tanh(h) * captured

    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    layer_and_gradients(tensors, ids, grad, activation, kind, [captured, *tensors.values()], recompute_activation=recompute)
    assert len(seen) == 1 + recompute and not bool(live.all())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            gbmoe.expert_mlp(tensors["x"], plan_of(ids, kind), tensors["w1"], tensors["w2"], tensors.get("v1"), activation=activation,
                             recompute_activation=recompute)
    for h in (*seen, *grads):
        assert bool((h[~live] == 0).all()) and bool(h[live].isfinite().all())


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("kind", KINDS_OF_PLAN)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
def test_activation_without_a_value_at_zero_reached_the_weights(device, kind, recompute, glu):
    """Rows of zeros become infinite, and so does the slope there."""
    tensors, ids, grad = inputs(torch.float64, device, glu=glu)
    tensors = {name: torch.randn_like(t).requires_grad_() for name, t in tensors.items()}
    leaves = list(tensors.values())

    def activation(h):
        return h.abs().log()

    got = layer_and_gradients(tensors, ids, grad, activation, kind, leaves, recompute_activation=recompute)
    for one, want in zip(got, definition_and_gradients(tensors, ids, grad, activation, leaves), strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, want)


class _Operators(TorchDispatchMode):
    """The operators that are called, with the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen.append((function.overloadpacket.__name__, getattr(result, "shape", None)))
        return result

    def of_shape(self, *shape):
        return [name for name, of in self.seen if of == shape]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
def test_activation_of_any_callable_cost_passes_over_the_preactivations(device, recompute, glu):
    """Copies that kept rows without a slot from it: 9 to 15 % of a layer's time."""
    tensors, ids, grad = inputs(torch.float32, device, glu=glu)
    plan, leaves = plan_of(ids, "align 1"), [t.requires_grad_() for t in tensors.values()]
    with _Operators() as forward:
        out = gbmoe.expert_mlp(tensors["x"], plan, tensors["w1"], tensors["w2"], tensors.get("v1"), weights_TK=tensors["weights"],
                               activation=lambda h: h * torch.tanh(h), recompute_activation=recompute)
    with _Operators() as backward:
        torch.autograd.grad(out, leaves, grad)
    shape = (plan.num_rows, 40)
    products = ["gmm"] * (1 + glu)
    gate = ["mul"] * glu
    made = [name.removesuffix("_by_host") for name in forward.of_shape(*shape) if name not in ("detach", "view", "alias")]
    assert sorted(made) == sorted([*products, "tanh", "mul", *gate])
    # The activation again, its gradient, that of the gate, and of a from y's.
    again = ["tanh", "mul", *gate] if recompute else []
    made = [name.removesuffix("_by_host") for name in backward.of_shape(*shape) if name not in ("detach", "view", "alias")]
    assert sorted(made) == sorted([*again, "gmm", "mul", "mul", "tanh_backward", "add", *gate * 2])


def _silu_in_place(h):
    return h.mul_(torch.sigmoid(h))


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("kind", KINDS_OF_PLAN)
@pytest.mark.parametrize("recompute", [True, False])
def test_activation_in_place_that_no_name_gives_away(device, recompute, kind, trained):
    for glu in (True, False):
        tensors, ids, grad = inputs(torch.float64, device, glu=glu)
        leaves = [tensors[name].requires_grad_() for name in trained.split() if name in tensors]
        if not leaves:
            continue
        expected_results = definition_and_gradients(tensors, ids, grad, _silu_in_place, leaves)
        plan = plan_of(ids, kind)

        def layer(x, weights, w1, w2, v1=None, plan=plan):
            return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=_silu_in_place, recompute_activation=recompute)

        for outer in (layer, partial(checkpoint, layer, use_reentrant=False)):
            out = outer(*(tensors[name] for name in ("x", "weights", "w1", "w2", "v1") if name in tensors))
            for _ in range(2):  # backward finds what it starts from as the last one found it
                got = [out.detach(), *torch.autograd.grad(out, leaves, grad, retain_graph=True)]
                for one, want in zip(got, expected_results, strict=True):
                    torch.testing.assert_close(one, want)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(layer(**tensors), expected_results[0])


@pytest.mark.parametrize("kind", KINDS_OF_PLAN)
@pytest.mark.parametrize("recompute", [True, False])
def test_activation_in_place_that_captures_a_parameter(device, recompute, kind):
    tensors, ids, grad = inputs(torch.float64, device)
    slope = torch.linspace(0.5, 2, 40, dtype=torch.float64, device=device).requires_grad_()
    leaves = [slope, *(t.requires_grad_() for t in tensors.values())]

    def activation(h):
        return h.mul_(slope).tanh_()

    got = layer_and_gradients(tensors, ids, grad, activation, kind, leaves, recompute_activation=recompute)
    for one, want in zip(got, definition_and_gradients(tensors, ids, grad, activation, leaves), strict=True):
        torch.testing.assert_close(one, want)


def test_result_of_an_activation_was_overwritten(device):
    """The result may be the activation's own memory, so rows without a slot must not be cleared in it."""
    for kind in KINDS_OF_PLAN:
        tensors, ids, _ = inputs(torch.float64, device)
        own = torch.full((plan_of(ids, kind).num_rows, 40), 3.0, dtype=torch.float64, device=device)
        for recompute in (True, False):
            leaf = tensors["w2"].requires_grad_()
            out = gbmoe.expert_mlp(tensors["x"], plan_of(ids, kind), tensors["w1"], leaf, activation=lambda h, own=own: own,
                                   recompute_activation=recompute)
            torch.autograd.grad(out.sum(), leaf)
            assert bool((own == 3).all())


def test_random_numbers_of_the_activation_are_drawn_again(device):
    """out is linear in w1 for an activation that only drops: <w1, grad> equals <out, grad_out> if both saw the same mask."""
    tensors, ids, grad = inputs(torch.float64, device, glu=False)
    w1 = tensors["w1"].requires_grad_()
    plan = RoutingPlan.from_experts(ids, 5)
    out = gbmoe.expert_mlp(tensors["x"], plan, w1, tensors["w2"], weights_TK=tensors["weights"],
                           activation=lambda h: F.dropout(h, 0.5))
    before = torch.rand(1, device=device)
    out.backward(grad)
    torch.testing.assert_close((w1 * w1.grad).sum(), (out * grad).sum())
    assert not torch.equal(before, torch.rand(1, device=device))  # backward left the generator where it was


@pytest.mark.parametrize("kind", KINDS_OF_PLAN)
@pytest.mark.parametrize("recompute", [True, False])
def test_batched_gradients_of_any_callable_are_those_of_each(device, kind, recompute):
    """vmap has no rule for operators that write to their arguments."""
    tensors, ids, grad = inputs(torch.float64, device)
    leaves = [t.requires_grad_() for t in tensors.values()]
    out = gbmoe.expert_mlp(leaves[0], plan_of(ids, kind), leaves[2], leaves[3], leaves[4], weights_TK=leaves[1],
                           activation=lambda h: h * torch.tanh(h), recompute_activation=recompute)
    grads = torch.stack([grad, grad.flip(0)])
    batched = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    for i, each in enumerate(grads):
        for got, alone in zip(batched, torch.autograd.grad(out, leaves, each, retain_graph=True)):
            torch.testing.assert_close(got[i], alone)


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("argument", ["w1", "w2", "v1", "weights"])
@pytest.mark.parametrize("activation, recompute", [("silu", True), (torch.tanh, True), (torch.tanh, False)])
def test_w2_that_a_callable_did_not_see_change_gave_wrong_gradients(device, activation, recompute, argument, glu):
    """An optimizer's step between forward and backward is an error, whichever tensor it writes to."""
    tensors, ids, grad = inputs(torch.float64, device, glu=glu)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    if argument not in leaves:
        return
    out = gbmoe.expert_mlp(leaves["x"], RoutingPlan.from_experts(ids, 5), leaves["w1"], leaves["w2"], leaves.get("v1"),
                           weights_TK=leaves["weights"], activation=activation, recompute_activation=recompute)
    with torch.no_grad():
        leaves[argument].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)


@pytest.mark.parametrize("recompute", [True, False])
def test_w2_alone_may_change_before_backward(device, recompute):
    """Its gradient does not depend on it, where nothing else wants one."""
    tensors, ids, grad = inputs(torch.float64, device)
    tensors["w2"].requires_grad_()
    out = gbmoe.expert_mlp(tensors["x"], RoutingPlan.from_experts(ids, 5), tensors["w1"], tensors["w2"], tensors["v1"],
                           weights_TK=tensors["weights"], activation=torch.tanh, recompute_activation=recompute)
    with torch.no_grad():
        tensors["w2"].mul_(2)
    out.backward(grad)
    leaf = tensors["w2"].detach().clone().requires_grad_()
    out = gbmoe.expert_mlp(tensors["x"], RoutingPlan.from_experts(ids, 5), tensors["w1"], leaf, tensors["v1"],
                           weights_TK=tensors["weights"], activation=torch.tanh)
    out.backward(grad)
    torch.testing.assert_close(tensors["w2"].grad, leaf.grad)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("activation, error, words", [
    (None, TypeError, "activation: expected a callable or one of silu, .*, got None"),
    (3, TypeError, "activation: expected a callable or one of silu, .*, got 3"),
    (lambda h: None, TypeError, "activation: expected a callable that returns a torch.Tensor, got NoneType"),
    (lambda h: h[:, :3], ValueError, r"activation: expected a result with the shape of its argument, \[100, 40\], got \[100, 3\]"),
    (lambda h: h.double(), TypeError, "activation: expected a result with the dtype of its argument, torch.float32, got torch.float64"),
])
def test_an_activation_that_is_none(activation, error, words, recompute):
    tensors, ids, _ = inputs(torch.float32, "cpu")
    for align in (1, 4):
        plan = RoutingPlan.from_experts(ids, 5, align=align)
        with pytest.raises(error, match=("expert_mlp: " + words).replace("100", str(plan.num_rows))):
            gbmoe.expert_mlp(tensors["x"], plan, tensors["w1"].requires_grad_(), tensors["w2"], activation=activation,
                             recompute_activation=recompute)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("activation", ["silu", torch.tanh], ids=["fused", "composed"])
def test_vmap_had_no_rule_for_a_callables_cleared_rows(device, activation):
    tensors, ids, _ = inputs(torch.float64, device)
    plan, many = RoutingPlan.from_experts(ids, 5), torch.stack([tensors["x"], tensors["x"].flip(0)])

    def layer(x):
        return gbmoe.expert_mlp(x, plan, tensors["w1"], tensors["w2"], tensors["v1"], weights_TK=tensors["weights"], activation=activation)

    torch.testing.assert_close(torch.vmap(layer)(many), torch.stack([layer(x) for x in many]))


@pytest.mark.filterwarnings("ignore")
def test_a_grouped_product_within_anomaly_detection_has_no_undefined_rows(device):
    torch.manual_seed(0)
    a, b = torch.randn(9, 16, device=device, requires_grad=True), torch.randn(3, 16, 8, device=device, requires_grad=True)
    sizes = torch.tensor([2, 0, 3])
    with anomaly_detection_in_memory_full_of_nan():
        out = composed_experts._grouped(a, b, sizes.to(device) if device.type == "cuda" else sizes, False, "auto")
        assert bool((out[5:] == 0).all())
        grad, _ = torch.autograd.grad(out.square().sum(), (a, b))
    assert bool((grad[5:] == 0).all()) and bool(grad.isfinite().all())
