"""expert_mlp: every expert's MLP or GLU over the tokens routed to it, from x to the weighted sum, as one operator.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan.

Saved for backward are x, the pre-activations h (and g) and the plan: x's rows are gathered again, the activation is
computed again, and the router weights' gradient comes from the activation, so that the experts' output y is not needed
(csrc/activation_kernels.cu has the formulas).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

from gbmoe import engines, reference
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._library import define, is_transformed, is_watched
from gbmoe.engines.base import GatheredRows, Problem
from gbmoe.kernels import scatter
from gbmoe.ops.gmm import computed_dtype, grouped
from gbmoe.ops.permute import check_slot_scalars, padded_gather, padded_scatter
from gbmoe.routing import RoutingPlan

# Modules that have a kernel, with the method that they compute by, and functions.
_MODULES = {torch.nn.SiLU: ("silu", torch.nn.SiLU.forward), torch.nn.ReLU: ("relu", torch.nn.ReLU.forward),
            torch.nn.Identity: ("identity", torch.nn.Identity.forward), torch.nn.GELU: ("gelu", torch.nn.GELU.forward)}
_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu"}
_GELUS = {"tanh": "gelu_tanh", "none": "gelu"}  # by `approximate`


def activation_name(activation: str | Callable) -> str | None:
    """The name in reference.ACTIVATIONS of an activation that has a kernel; None for any other callable.

    Only what is exactly torch's own counts: no subclass, and no module that has hooks or a `forward` of its own.
    """
    if isinstance(activation, str):
        require(activation in reference.ACTIVATIONS, "expert_mlp", "activation",
                f"a callable or one of {', '.join(reference.ACTIVATIONS)}", repr(activation))
        return activation
    if type(activation) is partial:
        known = activation.func is F.gelu and not activation.args and set(activation.keywords) <= {"approximate"}
        return _GELUS.get(activation.keywords.get("approximate", "none")) if known else None
    if isinstance(activation, torch.nn.Module) and type(activation) in _MODULES:
        name, forward = _MODULES[type(activation)]
        # A bound method's __func__ would say the same, but not to torch.compile.
        if _is_hooked(activation) or "forward" in activation.__dict__ or type(activation).forward is not forward:
            return None
        return _GELUS.get(str(activation.approximate)) if name == "gelu" else name
    return next((name for function, name in _FUNCTIONS.items() if function is activation), None)


def _is_hooked(module: torch.nn.Module) -> bool:
    """True where calling the module would call more than its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
             modules._global_forward_hooks, modules._global_forward_pre_hooks, modules._global_backward_hooks,
             modules._global_backward_pre_hooks)
    return any(len(of) > 0 for of in hooks)


def expert_mlp(
    x_TH: torch.Tensor, plan: RoutingPlan, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor, v1_EFH: torch.Tensor | None = None,
    *, weights_TK: torch.Tensor | None = None, activation: str | Callable = "silu", engine: str = "auto",
    recompute_activation: bool = True,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * mlp_e(x[t]) with e the expert of slot (t,j), in float32 and rounded once.

    mlp_e(x) = act(x @ w1[e].T) @ w2[e], or with v1 the GLU (act(x @ w1[e].T) * (x @ v1[e].T)) @ w2[e]; MegaBlocks' weight
    layout. Differentiable in x, weights, w1, w2 and v1, any of which may be frozen.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64.
        plan: of the router's choice, on the device of x.
        w1_EFH, w2_EFH, v1_EFH: [E,F,H], dtype and device of x (under autocast they are cast with x).
        weights_TK: router weights [T,K], any floating dtype; None counts every slot once.
        activation: a name ("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "identity") or a callable on [P,F], which may
            hold parameters and may write to its argument; torch's own functions and modules of those names are recognised and
            take the fused path, unless they have hooks or are altered.
        engine: of the grouped products; see gbmoe.engines.
        recompute_activation: for other callables: save the pre-activation and call the activation again in backward (True),
            as torch.utils.checkpoint does, or keep its graph (False). The fused path always recomputes.

    Returns:
        [T,H], dtype of x.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> x, experts = torch.randn(6, 16), torch.randint(4, (6, 2))
        >>> w1, w2 = torch.randn(4, 32, 16), torch.randn(4, 32, 16)
        >>> plan = RoutingPlan.from_experts(experts, num_experts=4)
        >>> expert_mlp(x, plan, w1, w2, weights_TK=torch.rand(6, 2), activation="gelu").shape
        torch.Size([6, 16])
    """
    _check_arguments(x_TH, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK)
    sizes = plan_sizes(plan, x_TH, w1_EFH, engine)
    name = activation_name(activation)
    if name is None:
        return _composed(x_TH, plan, sizes, w1_EFH, w2_EFH, v1_EFH, weights_TK, activation, engine, recompute_activation)
    tensors = (x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH)
    save = torch.is_grad_enabled() and (is_transformed() or any(t is not None and t.requires_grad for t in tensors))
    return _expert_mlp(x_TH, weights_TK, plan.row_of_slot_TK, plan.slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH,
                       name, engine, save)[0]


def plan_sizes(plan: RoutingPlan, x_TH: torch.Tensor, w_EFH: torch.Tensor, engine: str) -> torch.Tensor:
    """The plan's rows per expert where the engine wants them: on the host, at one wait a plan, or on the device."""
    if x_TH.is_meta:
        return plan.padded_counts_E
    wanted = _wants_host_sizes(engine, x_TH.device, computed_dtype(x_TH), plan.num_rows, *w_EFH.shape, plan.has_host_sizes)
    return plan.host_sizes() if wanted else plan.padded_counts_E


@engines.remembered
def _wants_host_sizes(engine, device, dtype, rows, experts, ffn, hidden, on_host) -> bool:
    problems = (Problem(device, dtype, rows, experts, hidden, ffn, variable_k, on_host) for variable_k in (False, True))
    return any(engines.select(engine, problem).needs_host_sizes for problem in problems)


def _check_arguments(x_TH, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK) -> None:
    device = plan.row_of_slot_TK.device
    autocast = autocast_enabled(device.type)
    require_tensor(x_TH, "expert_mlp", "x", rank=2, dtypes=FLOATING, device=device)
    require(x_TH.size(0) == plan.num_tokens, "expert_mlp", "x",
            lambda: f"{plan.num_tokens} rows, as in the plan", x_TH.size(0))
    require_tensor(w1_EFH, "expert_mlp", "w1", rank=3, dtypes=FLOATING, device=device)
    expected = [plan.num_experts, w1_EFH.size(1), x_TH.size(1)]
    for argument, weight in (("w1", w1_EFH), ("w2", w2_EFH), ("v1", v1_EFH)):
        if weight is None and argument == "v1":
            continue
        require_tensor(weight, "expert_mlp", argument, rank=3, dtypes=FLOATING, device=device)
        require(list(weight.shape) == expected, "expert_mlp", argument,
                lambda: f"shape [E,F,H] == {expected}", list(weight.shape))
        if not autocast:
            require(weight.dtype == x_TH.dtype, "expert_mlp", argument,
                    lambda: f"the dtype of x, {x_TH.dtype}", weight.dtype, TypeError)
    if weights_TK is not None:
        check_slot_scalars(weights_TK, "expert_mlp", "weights", plan)


# ------------------------------------------------------------------------------------------------------- fused operator


def _forward(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, save):
    """Returns (out [T,H], h [P,F], g [P,F]); h and g are empty where nothing is saved, g where there is no v1."""
    experts = engines.for_experts(engine, x, slot_of_row.size(0), w1, sizes)
    a_PF, h_PF, g_PF = experts.up(x, row_of_slot, slot_of_row, w1, v1, sizes, activation, save)
    y_PH = experts.down(a_PF, w2, sizes)
    del a_PF
    out_TH = scatter(y_PH, row_of_slot, weights=weights)
    return out_TH, *(out_TH.new_empty(0) if t is None else t for t in (h_PF, g_PF))  # no two the same: an operator's may not be


def _forward_fake(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, save):
    saved = (slot_of_row.size(0), w1.size(1))
    return x.new_empty(x.shape), x.new_empty(saved if save else 0), x.new_empty(saved if save and v1 is not None else 0)


@dataclass(frozen=True)
class _Needs:
    """Which gradients are wanted."""
    x: bool
    weights: bool
    w1: bool
    w2: bool
    v1: bool


def _gradients(grad: torch.Tensor, saved: list, activation: str, engine: str, need: _Needs) -> tuple[torch.Tensor | None, ...]:
    """Returns (dx, dweights, dw1, dw2, dv1), each None where it is not needed.

    `saved` is what forward saved and is emptied: whoever has no other reference to the pre-activations sets their memory free
    as soon as they have been used. The order of the steps keeps as little as can be at a time: at most five [P,F], a 32nd of one
    and one [P,H], or two [P,F], one [P,H] (two where `accumulate` takes a product apart) and two of the weights' gradients, or
    one [P,F], one [P,H] and all three.
    """
    x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g = saved
    saved.clear()
    dx = dw1 = dw2 = dv1 = None
    g = None if v1 is None else g
    experts = engines.for_experts(engine, x, slot_of_row.size(0), w1, sizes)
    dz = GatheredRows(grad, row_of_slot, slot_of_row)
    a_PF, dh_PF, dg_PF, dweights = experts.down_backward(dz, w2, sizes, h, g, weights, activation)
    del h, g
    if need.w2:
        dw2 = experts.weight_gradient(a_PF, dz, sizes)
    del a_PF, dz
    if need.x:
        dx = scatter(experts.up_backward(dh_PF, w1, dg_PF, v1, sizes), row_of_slot)
    xp = GatheredRows(x, row_of_slot, slot_of_row)
    if need.v1 and dg_PF is not None:
        dv1 = experts.weight_gradient(dg_PF, xp, sizes)
    del dg_PF
    if need.w1:
        dw1 = experts.weight_gradient(dh_PF, xp, sizes)
    return dx, dweights if need.weights else None, dw1, dw2, dv1


def _backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g, activation, engine,
              need_x, need_weights, need_w1, need_w2, need_v1):
    grads = _gradients(grad, [x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g], activation, engine,
                       _Needs(need_x, need_weights, need_w1, need_w2, need_v1))
    return tuple(grad.new_empty(0) if t is None else t for t in grads)  # no two the same: an operator's results may not be


def _backward_fake(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g, activation, engine,
                   need_x, need_weights, need_w1, need_w2, need_v1):
    wanted = ((x, need_x), (weights, need_weights), (w1, need_w1), (w2, need_w2), (v1, need_v1))
    return tuple(like.new_empty(like.shape) if need else grad.new_empty(0) for like, need in wanted)


def _setup_context(ctx, inputs, output):
    x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, ctx.activation, ctx.engine, save = inputs
    require(save, "expert_mlp", "save", "True where a gradient is wanted", save)
    _, h, g = output
    ctx.mark_non_differentiable(h, g)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g)


def _autograd_backward(ctx, grad, _grad_h, _grad_g):
    needs = ctx.needs_input_grad
    wanted = {0: needs[0], 1: needs[1], 5: needs[5], 6: needs[6], 7: needs[7]}
    grads = [None] * 11
    if grad is None:
        return tuple(grads)
    saved = list(ctx.saved_tensors)
    if torch.is_grad_enabled() or is_watched(grad, *saved):  # or differentiated again
        computed = _expert_mlp_backward(grad, *saved, ctx.activation, ctx.engine, *wanted.values())
    else:
        # Not through the operator, whose caller would hold the pre-activations to its end. Autograd lets go of what it saved
        # here unless it was asked to retain the graph.
        ctx.maybe_clear_saved_tensors()
        computed = _gradients(grad, saved, ctx.activation, ctx.engine, _Needs(*wanted.values()))
    for (position, needed), value in zip(wanted.items(), computed):
        grads[position] = value if needed else None
    return tuple(grads)


_expert_mlp = define(
    "expert_mlp(Tensor x, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, Tensor sizes, Tensor w1, Tensor w2,"
    " Tensor? v1, str activation, str engine, bool save) -> (Tensor, Tensor, Tensor)",
    reference=_forward, fake=_forward_fake, setup_context=_setup_context, backward=_autograd_backward, autocast=(0, 5, 6, 7),
    waits=lambda x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu",
)

_expert_mlp_backward = define(
    "expert_mlp_backward(Tensor grad, Tensor x, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, Tensor sizes,"
    " Tensor w1, Tensor w2, Tensor? v1, Tensor h, Tensor g, str activation, str engine, bool need_x, bool need_weights,"
    " bool need_w1, bool need_w2, bool need_v1) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward, fake=_backward_fake,
    waits=lambda grad, x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu",
)


# --------------------------------------------------------------------------------------------------------- any callable


def _composed(x_TH, plan, sizes, w1_EFH, w2_EFH, v1_EFH, weights_TK, activation, engine, recompute):
    """The same from the separate operators, with an activation that only Python knows."""
    xp_PH = padded_gather(x_TH, plan)
    h_PF = _grouped(xp_PH, w1_EFH, sizes, True, engine)
    g_PF = None if v1_EFH is None else _grouped(xp_PH, v1_EFH, sizes, True, engine)
    live_P1 = plan.slot_of_row_P.unsqueeze(1) >= 0
    recompute = recompute and torch.is_grad_enabled()

    def activated(h_PF, g_PF):
        # Rows without a slot hold anything, in h, in g and in the gradient that comes back; gradients of what the activation captures
        # sum over all rows. What it gets is also a copy, which it may overwrite: h is saved.
        a_PF = torch.where(live_P1, activation(torch.where(live_P1, h_PF, 0)), 0)
        return a_PF if g_PF is None else a_PF * g_PF

    if torch.compiler.is_compiling():
        # A compiler sees forward and backward at once: marked like this it computes the activation again, and no product.
        a_PF = checkpoint(activated, h_PF, g_PF, use_reentrant=False) if recompute else activated(h_PF, g_PF)
        y_PH = _grouped(a_PF, w2_EFH, sizes, False, engine)
    else:
        w2_EFH, calls = w2_EFH.to(computed_dtype(w2_EFH)), 0

        def activated_product(h_PF, g_PF):
            # Called again, in backward, it is for what it saves and not for the product.
            nonlocal calls
            calls += 1
            a_PF = activated(h_PF, g_PF)
            return _DownProduct.apply(a_PF.to(computed_dtype(a_PF)), w2_EFH, sizes, engine, calls == 1)

        y_PH = checkpoint(activated_product, h_PF, g_PF, use_reentrant=False) if recompute else activated_product(h_PF, g_PF)
    return padded_scatter(y_PH, plan, weights_TK)


def _grouped(a, b, sizes, trans_b, engine):
    return grouped(a, b, sizes, False, trans_b, engine=engine)


class _DownProduct(torch.autograd.Function):
    """a @ w2; without `compute` the result is undefined, and what counts is that a and w2 are saved."""

    @staticmethod
    def forward(ctx, a_PF, w2_EFH, sizes, engine, compute):
        need_a, need_w2 = ctx.needs_input_grad[:2]
        ctx.engine = engine
        ctx.save_for_backward(a_PF if need_w2 else None, w2_EFH if need_a else None, sizes)
        if not compute:
            return a_PF.new_empty(1, 1).expand(a_PF.size(0), w2_EFH.size(2))
        return _grouped(a_PF, w2_EFH, sizes, False, engine)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PH):
        a_PF, w2_EFH, sizes = ctx.saved_tensors
        grad_a = None if w2_EFH is None else _grouped(grad_PH, w2_EFH, sizes, True, ctx.engine)
        grad_w2 = None if a_PF is None else grouped(a_PF, grad_PH, sizes, True, engine=ctx.engine)
        return grad_a, grad_w2, None, None, None
