"""expert_mlp: every expert's MLP or GLU over the tokens routed to it, from x to the weighted sum, as one operator.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan.

Saved for backward are x, the pre-activations h (and g) and the plan: x's rows are gathered again, the activation is
computed again, and the router weights' gradient comes from the activation, so that the experts' output y is not needed
(csrc/activation.cu has the formulas).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from gbmoe import engines, extension, reference
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._library import define, is_watched
from gbmoe.engines.base import Problem
from gbmoe.ops.gmm import aligned, computed_dtype, product
from gbmoe.ops.permute import check_slot_scalars, gather, padded_gather, padded_scatter, scatter
from gbmoe.routing import RoutingPlan


def activation_name(activation: str | Callable) -> str | None:
    """The name in reference.ACTIVATIONS of an activation that has a kernel; None for any other callable."""
    if isinstance(activation, str):
        require(activation in reference.ACTIVATIONS, "expert_mlp", "activation",
                f"a callable or one of {', '.join(reference.ACTIVATIONS)}", repr(activation))
        return activation
    if isinstance(activation, partial) and activation.func is F.gelu and not activation.args:
        if set(activation.keywords) <= {"approximate"}:
            return {"tanh": "gelu_tanh", "none": "gelu"}.get(activation.keywords.get("approximate", "none"))
    if type(activation) is torch.nn.GELU:
        return {"tanh": "gelu_tanh", "none": "gelu"}.get(activation.approximate)
    modules = {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu", torch.nn.Identity: "identity"}
    functions = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu"}
    return modules.get(type(activation)) or next((name for f, name in functions.items() if f is activation), None)


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
        activation: a name ("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "identity") or a callable on [P,F]; torch's
            own functions and modules of those names are recognised and take the fused path.
        engine: of the grouped products; see gbmoe.engines.
        recompute_activation: for other callables: save the pre-activation and compute the activation again in backward
            (True) or keep its graph (False). The fused path always recomputes; a module with parameters of its own never does.

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
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
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


def _activate(h_PF, g_PF, activation):
    if h_PF.device.type != "cuda" or not extension.loaded():
        return reference.activate(h_PF, g_PF, activation)
    a_PF = torch.empty_like(h_PF)
    torch.ops.gbmoe_cuda.activate(h_PF, g_PF, reference.ACTIVATION_INDEX[activation], a_PF)
    return a_PF


def _activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation):
    # Writes dh over d.
    if h_PF.device.type != "cuda" or not extension.loaded():
        return reference.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
    a_PF = torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    torch.ops.gbmoe_cuda.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, reference.ACTIVATION_INDEX[activation],
                                           a_PF, dg_PF, grad_weights_TK)
    return a_PF, *(h_PF.new_empty(0) if t is None else t for t in (dg_PF, grad_weights_TK))


def _fused(engine: str, x: torch.Tensor, rows: int, w1: torch.Tensor, sizes: torch.Tensor) -> engines.Engine | None:
    """The engine that computes products and activation together, where it is the one to use for both products."""
    return _fusing_engine(engine, x.device, x.dtype, rows, *w1.shape, sizes.device.type == "cpu")


@engines.remembered
def _fusing_engine(engine, device, dtype, rows, experts, ffn, hidden, on_host) -> engines.Engine | None:
    chosen = {engines.select(engine, Problem(device, dtype, rows, experts, *inner_columns, False, on_host))
              for inner_columns in ((hidden, ffn), (ffn, hidden))}
    first = chosen.pop()
    return first if first.fuses_activation and not chosen else None


def _forward(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, save):
    """Returns (out [T,H], h [P,F], g [P,F]); h and g are empty where nothing is saved, g where there is no v1."""
    fused = _fused(engine, x, slot_of_row.size(0), w1, sizes)
    if fused is not None:
        x, w1, v1 = aligned(x), aligned(w1), None if v1 is None else aligned(v1)
        where = (slot_of_row, row_of_slot.size(1))
        if not fused.gathers(w1.size(1), activation):
            x, where = gather(x, row_of_slot, slot_of_row)[0], (None, 1)
        a_PF, h_PF, g_PF = fused.up(x, *where, w1, v1, sizes, activation, save)
        del x
    else:
        xp_PH, _ = gather(x, row_of_slot, slot_of_row)
        h_PF = product(xp_PH, w1, sizes, trans_b=True, engine=engine)
        g_PF = None if v1 is None else product(xp_PH, v1, sizes, trans_b=True, engine=engine)
        del xp_PH
        a_PF = _activate(h_PF, g_PF, activation)
        if not save:
            h_PF = g_PF = None
    y_PH = product(a_PF, w2, sizes, engine=engine if fused is None else fused)
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
    fused = _fused(engine, x, slot_of_row.size(0), w1, sizes)
    gathers_grad, gathers_x = (False, False) if fused is None else fused.gathers_in_backward(w1.size(1))
    gathers_grad = gathers_grad and w2.is_contiguous()
    grad, x = aligned(grad) if gathers_grad else grad, aligned(x) if gathers_x else x
    where = slot_of_row, row_of_slot.size(1)

    def weights_gradient(left_PF, tokens_TH, rows_PH):
        """Of a weight, from the tokens' rows, or with None from the tokens, whose rows the product gathers."""
        if rows_PH is None:
            return fused.weights_gathered(left_PF, tokens_TH, *where, sizes)
        return product(left_PF, rows_PH, sizes, trans_a=True, engine=engine)

    dz_PH = None if gathers_grad else gather(grad, row_of_slot, slot_of_row)[0]
    if fused is not None and not gathers_grad and fused.differentiates(w1.size(2)) and w2.is_contiguous():
        a_PF, dh_PF, dg_PF, dweights = fused.down_backward(aligned(dz_PH), aligned(w2), sizes, aligned(h),
                                                           None if g is None else aligned(g), slot_of_row, weights, activation)
    else:
        dh_PF = fused.rows_gathered(grad, *where, aligned(w2), sizes) if gathers_grad \
            else product(dz_PH, w2, sizes, trans_b=True, engine=engine)
        a_PF, dg_PF, dweights = _activate_backward(h, g, dh_PF, slot_of_row, weights, activation)
    del h, g
    if need.w2:
        dw2 = weights_gradient(a_PF, grad, dz_PH)
    del a_PF, dz_PH
    if need.x:
        if fused is not None:
            dxp_PH = fused.up_backward(dh_PF, aligned(w1), None if v1 is None else dg_PF, None if v1 is None else aligned(v1), sizes)
        else:
            dxp_PH = product(dh_PF, w1, sizes, engine=engine)
            if v1 is not None:
                product(dg_PF, v1, sizes, engine=engine, out=dxp_PH, accumulate=True)
        dx = scatter(dxp_PH, row_of_slot)
        del dxp_PH
    if need.w1 or need.v1:
        xp_PH = None if gathers_x else gather(x, row_of_slot, slot_of_row)[0]
        if need.v1:
            dv1 = weights_gradient(dg_PF, x, xp_PH)
        del dg_PF
        if need.w1:
            dw1 = weights_gradient(dh_PF, x, xp_PH)
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
    x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, ctx.activation, ctx.engine, _ = inputs
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
)

_expert_mlp_backward = define(
    "expert_mlp_backward(Tensor grad, Tensor x, Tensor? weights, Tensor row_of_slot, Tensor slot_of_row, Tensor sizes,"
    " Tensor w1, Tensor w2, Tensor? v1, Tensor h, Tensor g, str activation, str engine, bool need_x, bool need_weights,"
    " bool need_w1, bool need_w2, bool need_v1) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward, fake=_backward_fake,
)


# --------------------------------------------------------------------------------------------------------- any callable


def _composed(x_TH, plan, sizes, w1_EFH, w2_EFH, v1_EFH, weights_TK, activation, engine, recompute):
    """The same from the separate operators, with an activation that only Python knows."""
    xp_PH = padded_gather(x_TH, plan)
    h_PF = _grouped(xp_PH, w1_EFH, sizes, True, engine)
    g_PF = None if v1_EFH is None else _grouped(xp_PH, v1_EFH, sizes, True, engine)
    trained = isinstance(activation, torch.nn.Module) and any(True for _ in activation.parameters())
    recompute = recompute and not trained and torch.is_grad_enabled()
    if recompute and not torch.compiler.is_compiling():
        y_PH = _RecomputedActivation.apply(h_PF, g_PF, w2_EFH, sizes, activation, engine)
    else:
        if trained:
            # The gradient of an activation's own parameters sums over all rows: those without a slot must not take part.
            live_P1 = plan.slot_of_row_P.unsqueeze(1) >= 0
            a_PF = torch.where(live_P1, activation(torch.where(live_P1, h_PF, 0)), 0)
            a_PF = a_PF if g_PF is None else a_PF * g_PF
        elif recompute:
            # A compiler sees forward and backward at once: marked like this it computes the activation again, and no product.
            a_PF = checkpoint(_activated, h_PF, g_PF, activation, use_reentrant=False)
        else:
            a_PF = _activated(h_PF, g_PF, activation)
        y_PH = _grouped(a_PF, w2_EFH, sizes, False, engine)
    return padded_scatter(y_PH, plan, weights_TK)


def _grouped(a, b, sizes, trans_b, engine):
    # The operator itself: the plan's sizes are known to be right and need not fill the rows.
    return torch.ops.gbmoe.gmm(a, b, sizes, False, trans_b, engine, False)


def _activated(h_PF, g_PF, activation):
    return activation(h_PF) if g_PF is None else activation(h_PF) * g_PF


class _RecomputedActivation(torch.autograd.Function):
    """(act(h) * g) @ w2 that saves h, g and w2, and computes the activation again in backward.

    Each gradient is computed only where it is needed, and the incoming one is not written to. An activation that draws random
    numbers draws the same ones again.
    """

    @staticmethod
    def forward(ctx, h_PF, g_PF, w2_EFH, sizes, activation, engine):
        ctx.save_for_backward(h_PF, g_PF, w2_EFH, sizes)
        ctx.activation, ctx.engine = activation, engine
        ctx.cpu_rng_state, ctx.device_rng_states = torch.get_rng_state(), get_device_states(h_PF)
        # autograd.Function runs its backward with autocast off; what the products were cast to is kept in the output.
        y_PH = _grouped(_activated(h_PF, g_PF, activation), w2_EFH, sizes, False, engine)
        ctx.dtype = y_PH.dtype
        return y_PH

    @staticmethod
    def backward(ctx, grad_PH):
        h_PF, g_PF, w2_EFH, sizes = ctx.saved_tensors
        need_h, need_g, need_w2 = ctx.needs_input_grad[:3]
        devices, states = ctx.device_rng_states
        with torch.random.fork_rng(devices, device_type=h_PF.device.type if devices else "cuda"), torch.enable_grad():
            torch.set_rng_state(ctx.cpu_rng_state)
            set_device_states(devices, states, device_type=h_PF.device.type)
            h_PF = h_PF.detach().requires_grad_(need_h)
            g_PF = None if g_PF is None else g_PF.detach().requires_grad_(need_g)
            a_PF = _activated(h_PF, g_PF, ctx.activation)
        grad_h = grad_g = grad_w2 = None
        if need_w2:
            grad_w2 = torch.ops.gbmoe.gmm(a_PF.detach().to(ctx.dtype), grad_PH, sizes, True, False, ctx.engine, False).to(w2_EFH.dtype)
        wanted = [t for t in (h_PF, g_PF) if t is not None and t.requires_grad]
        if wanted:
            grad_a = _grouped(grad_PH, w2_EFH.to(ctx.dtype), sizes, True, ctx.engine)
            grads = list(torch.autograd.grad(a_PF, wanted, grad_a.to(a_PF.dtype)))
            grad_h = grads.pop(0) if need_h else None
            grad_g = grads.pop(0) if grads else None
        return grad_h, grad_g, grad_w2, None, None, None
