"""expert_mlp: every expert's MLP or GLU over the tokens routed to it, from x to the weighted sum, as one operator.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan,
Y bytes.

Saved for backward are x, the pre-activations h (and g) and the plan. Backward gathers x's rows again, unless they are to be kept, and
computes the activation again; it computes the router weights' gradient from the activation, so that the experts' output y is not needed
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

from gbmoe import engines
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define, is_watched, may_be_batched, may_be_transformed, without_autocast
from gbmoe.engines.base import GatheredRows
from gbmoe.float8 import Float8BlockScaling, ScaledWeights, keeps_weights
from gbmoe.kernels import clear_rows_without_slot, plain_torch, scatter
from gbmoe.kernels.alignment import aligned
from gbmoe.ops import flops
from gbmoe.ops.gmm import computed_dtype, grouped
from gbmoe.ops.permute import check_plan, check_slot_scalars, padded_gather, padded_scatter
from gbmoe.plan import RoutingPlan
from gbmoe.problem import Problem, allows_tf32
from gbmoe.slot_map import SlotMap


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x) ** 2, the function of the activation "relu_squared", for what takes a callable."""
    return F.relu(x).square()


# Modules and functions for which there are kernels; modules with the forward method that the kernels stand for.
_MODULES = {torch.nn.SiLU: ("silu", torch.nn.SiLU.forward), torch.nn.ReLU: ("relu", torch.nn.ReLU.forward),
            torch.nn.Identity: ("identity", torch.nn.Identity.forward), torch.nn.GELU: ("gelu", torch.nn.GELU.forward)}
_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", relu_squared: "relu_squared"}
_GELUS = {"tanh": "gelu_tanh", "none": "gelu"}  # by `approximate`


def activation_name(activation: str | Callable) -> str | None:
    """The name in plain_torch.ACTIVATIONS of an activation that has a kernel; None for any other callable.

    Only torch's own functions and modules and relu_squared count: no subclass, and no module that has hooks or a `forward` of its own.
    """
    if isinstance(activation, str):
        require(activation in plain_torch.ACTIVATIONS, "expert_mlp", "activation",
                f"a callable or one of {', '.join(plain_torch.ACTIVATIONS)}", repr(activation))
        return activation
    require(callable(activation), "expert_mlp", "activation", f"a callable or one of {', '.join(plain_torch.ACTIVATIONS)}",
            repr(activation), TypeError)
    if type(activation) is partial:
        known = activation.func is F.gelu and not activation.args and set(activation.keywords) <= {"approximate"}
        return _GELUS.get(activation.keywords.get("approximate", "none")) if known else None
    if isinstance(activation, torch.nn.Module) and type(activation) in _MODULES:
        name, forward = _MODULES[type(activation)]
        # Comparing a bound method's __func__ would do the same, but torch.compile cannot trace it.
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
    recompute_activation: bool = True, batch_invariant: bool = False, fp8_recipe: Float8BlockScaling | None = None,
    keep_gathered_rows: bool = False,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * mlp_e(x[t]) with e the expert of slot (t,j), in float32 and rounded once.

    mlp_e(x) = act(x @ w1[e].T) @ w2[e], or with v1 the GLU (act(x @ w1[e].T) * (x @ v1[e].T)) @ w2[e]; MegaBlocks' weight
    layout. Differentiable in x, weights, w1, w2 and v1, any of which may be frozen.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64.
        plan: the plan of the router's choice, on the device of x.
        w1_EFH, w2_EFH, v1_EFH: [E,F,H], dtype and device of x (under autocast they are cast with x).
        weights_TK: router weights [T,K], any floating dtype; None gives every slot the weight one.
        activation: a name ("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "identity") or a callable on [P,F], which returns the
            same shape and dtype, may hold parameters and may write to its argument. Torch's own functions and modules of those names
            are recognised and take the fused path, unless they have hooks or are altered.
        engine: the engine of the grouped GEMMs; see gbmoe.engines.
        recompute_activation: for callables without a kernel: save the pre-activation and call the activation again in backward
            (True), as torch.utils.checkpoint does, or keep its graph (False). The fused path always recomputes. With True, a callable
            that writes to its argument costs a copy, one more product and one more call. A write that torch does not see (through
            .data, or by a kernel that does not declare it) makes the saved pre-activation wrong.
        batch_invariant: a token's output has the same bits whatever other tokens there are, however many, and however they are routed.
            The engine `hopper` does this, on other GPUs `tensor_core`; with another one ValueError says why not. With a callable without
            a kernel it holds if the callable does so, too. It is about forward; gradients of weights are sums over tokens.
        fp8_recipe: compute products of rows in float8, see gbmoe.Float8BlockScaling; on the CPU and on compute capability 9.0, for
            bfloat16 and float16, with H and F multiples of 16. Not together with batch_invariant or a named engine.
        keep_gathered_rows: keep the rows of x that forward gathers until backward, which then gathers one time less: P * H elements of
            memory for that time. Without effect where there are none to gather (tokens in expert order; float8), where `hopper` gathers
            inside backward's products too (silu and tanh-gelu up to F = 512), and for a callable without a kernel, whose rows are kept
            anyway. Where forward would gather inside its first product, or has few rows an expert, it gathers only for this. Where
            `hopper` gathers for both w1's and v1's gradients in one product (a GLU up to F = 1,024), what it gains was not measured.

    Returns:
        [T,H], dtype of x, or under autocast that of its products.

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
    if fp8_recipe is not None:
        require(not batch_invariant, "expert_mlp", "batch_invariant", "False beside fp8_recipe", batch_invariant)
        engine = engines.float8(fp8_recipe, engine)
    engine = engines.batch_invariant(engine, x_TH.device) if batch_invariant else engine
    sizes = plan_sizes(plan, x_TH, w1_EFH, engine)
    name = activation_name(activation)
    if name is None:
        return _composed(x_TH, plan, sizes, w1_EFH, w2_EFH, v1_EFH, weights_TK, activation, engine, recompute_activation)
    tensors = (x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH)
    # A trace may be run with gradients also where it was made without, as torch.jit.trace does for its check.
    records = torch.is_grad_enabled() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    save = records and (may_be_transformed() or any(t is not None and t.requires_grad for t in tensors))
    row_of_slot_TK = None if plan.is_in_expert_order else plan.row_of_slot_TK
    keep_rows = keep_gathered_rows and save and row_of_slot_TK is not None and (
        may_be_transformed() or any(w is not None and w.requires_grad for w in (w1_EFH, v1_EFH))
    ) and _gathers_before_up(engine, x_TH, plan.num_rows, w1_EFH, sizes, name)
    # Copies that autocast makes of weights are not in their memory.
    uncast = (w for w in (w1_EFH, w2_EFH, v1_EFH) if w is not None and w.dtype == computed_dtype(w))
    keep_weights = save and (may_be_transformed() or x_TH.requires_grad) and keeps_weights(fp8_recipe, uncast)
    return _expert_mlp(x_TH, weights_TK, row_of_slot_TK, plan.slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH, name, engine, save,
                       keep_rows, keep_weights)[0]


def plan_sizes(plan: RoutingPlan, x_TH: torch.Tensor, w_EFH: torch.Tensor, engine: str) -> torch.Tensor:
    """The plan's rows per expert: on the host, at the cost of one wait for each plan, if the engine needs them there, or on the device."""
    if x_TH.is_meta:
        return plan.padded_counts_E
    dtype = computed_dtype(x_TH)
    rows, *shape = plan.num_rows, *w_EFH.shape
    # While torch traces, sizes are tensors; the choice of an engine is made for those of the trace.
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        rows, *shape = map(int, (rows, *shape))
    wanted = wants_host_sizes(engine, x_TH.device, dtype, rows, *shape, plan.has_host_sizes, allows_tf32(dtype))
    return plan.host_sizes() if wanted else plan.padded_counts_E


@engines.remembered
def wants_host_sizes(engine, device, dtype, rows, experts, ffn, hidden, on_host, tf32) -> bool:
    """Whether the engine of a layer with `rows` rows and weights [experts,ffn,hidden] reads its sizes on the host."""
    problems = (Problem(device, dtype, rows, experts, hidden, ffn, k_grouped, on_host, tf32) for k_grouped in (False, True))
    return any(engines.select(engine, problem).needs_host_sizes for problem in problems)


def _gathers_before_up(engine: str, x_TH: torch.Tensor, rows: int, w_EFH: torch.Tensor, sizes_E: torch.Tensor, activation: str) -> bool:
    """Whether forward has the gathered rows in memory, as Engine.gathers_before_up says of the engine of the first product."""
    if x_TH.is_meta:
        return False  # no engine is asked
    dtype = computed_dtype(x_TH)
    experts, ffn, hidden = w_EFH.shape
    problem = Problem(x_TH.device, dtype, rows, experts, hidden, ffn, False, sizes_E.device.type == "cpu", allows_tf32(dtype))
    return engines.select(engine, problem).gathers_before_up(ffn, activation, x_TH.numel() * dtype.itemsize)


def _check_arguments(x_TH, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK) -> None:
    check_plan(plan, "expert_mlp")
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
#
# Without row_of_slot the tokens are in expert order, with one slot each: row r is token r, or has no expert. Then nothing is gathered,
# and without weights nothing is scattered: the rows are the result, with zeros in those that have no expert.


def _slot_map(row_of_slot, slot_of_row):
    # One that keeps every row in its place is its own inverse.
    return SlotMap(row_of_slot_TK=slot_of_row.unsqueeze(1) if row_of_slot is None else row_of_slot, slot_of_row_P=slot_of_row)


def _gathered(tokens_TH, row_of_slot, slots, rows_PH=None):
    if rows_PH is not None:
        return GatheredRows(None, slots, rows_PH)  # without the tokens, so that the rows are what counts, and are not forgotten
    return GatheredRows(tokens_TH, slots) if row_of_slot is not None else GatheredRows(None, slots, aligned(tokens_TH))


def _scattered(rows_PH, row_of_slot, slots, weights=None):
    """Each token's sum. It may be computed in the memory of `rows_PH`, which the caller must not use afterwards."""
    if row_of_slot is not None or weights is not None:
        return scatter(rows_PH, slots, weights=weights)
    clear_rows_without_slot(slots.slot_of_row_P, rows_PH)
    return rows_PH


def _forward(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, save, keep_rows, keep_weights):
    """Returns (out [T,H], h [P,F], g [P,F], rows [P,H], and w1, w2 and v1 for backward); h and g are empty where nothing is saved, g and v1
    where there is no v1, the gathered rows unless they are to be kept and there is something to gather, and weights unless they are
    to be kept: those are float8's, uint8 [Y], Y = ScaledWeights.bytes_of."""
    experts = engines.for_experts(engine, x, slot_of_row.size(0), w1, sizes)
    kept = [None, None, None]

    def weight(place, w_EFH, transpose):
        if keep_weights and w_EFH is not None:
            # As large as the fake's, also where nothing is written: without rows no engine of float8 is asked.
            kept[place] = w_EFH.new_empty(ScaledWeights.bytes_of(w_EFH.shape), dtype=torch.uint8)
            return experts.weight_for_both_passes(w_EFH, kept[place], transpose)
        return w_EFH

    slots = _slot_map(row_of_slot, slot_of_row)
    rows_PH = _gathered(x, row_of_slot, slots).rows_PH() if keep_rows and row_of_slot is not None else None
    a_PF, h_PF, g_PF = experts.up(_gathered(x, row_of_slot, slots, rows_PH), weight(0, w1, False), weight(2, v1, False), sizes,
                                  activation, save)
    y_PH = experts.down(a_PF, weight(1, w2, True), sizes)
    del a_PF
    out_TH = _scattered(y_PH, row_of_slot, slots, weights)
    # Separate tensors: an operator's may not alias.
    return (out_TH, *(out_TH.new_empty(0) if t is None else t for t in (h_PF, g_PF, rows_PH)),
            *(out_TH.new_empty(0, dtype=torch.uint8) if t is None else t for t in kept))


def _forward_fake(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, save, keep_rows, keep_weights):
    rows, ffn, hidden = slot_of_row.size(0), w1.size(1), w1.size(2)
    return (x.new_empty(x.shape), x.new_empty((rows, ffn) if save else 0), x.new_empty((rows, ffn) if save and v1 is not None else 0),
            x.new_empty((rows, hidden) if keep_rows and row_of_slot is not None else 0),
            *(x.new_empty(ScaledWeights.bytes_of(w.shape) if keep_weights and w is not None else 0, dtype=torch.uint8)
              for w in (w1, w2, v1)))


@dataclass(frozen=True)
class _Needs:
    """Which gradients are needed."""
    x: bool
    weights: bool
    w1: bool
    w2: bool
    v1: bool


def _gradients(grad: torch.Tensor, saved: list, activation: str, engine: str, need: _Needs) -> tuple[torch.Tensor | None, ...]:
    """Returns (dx, dweights, dw1, dw2, dv1), each None where it is not needed.

    `saved` is the list of the tensors that forward saved. It is emptied, so that the memory of the pre-activations is freed as soon
    as they have been used, unless the caller has other references to them. The steps are ordered so that as little memory as possible
    is in use at a time. The peak is the largest of three moments: five [P,F], a 32nd of one, and one [P,H]; two [P,F], one [P,H] (two
    where an engine cannot accumulate into a product) and two weights' gradients; one [P,F], one [P,H] and three weights' gradients, or
    two [P,F] and three weights' gradients where w1's and v1's are made in one GEMM that gathers, so that there is no [P,H] then.
    In float8 the first two have dh and dg in e4m3 as well, which take the memory of one [P,F]; with gradients of weights in e4m3 the three
    moments have 5.5, two and half a [P,F]. Rows that forward has kept are one more [P,H] in the first two, and the [P,H] of the third.
    Weights that it has kept are freed once they have been used.
    """
    x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g, rows, *kept = saved
    saved.clear()
    dx = dw1 = dw2 = dv1 = None
    g = None if v1 is None else g
    slots = _slot_map(row_of_slot, slot_of_row)
    experts = engines.for_experts(engine, x, slots.num_rows, w1, sizes)
    kept_w1_Y, kept_w2_Y, kept_v1_Y = (kept_Y if kept_Y.numel() else None for kept_Y in kept)
    del kept
    dz = _gathered(grad, row_of_slot, slots)
    w2 = experts.weight_for_backward(w2, kept_w2_Y, True)
    a_PF, dh_PF, dg_PF, dweights, (dh, dg) = experts.down_backward(dz, w2, sizes, h, g, weights, activation)
    del h, g, w2, kept_w2_Y
    if need.w2:
        dw2 = experts.weight_gradient(a_PF, dz, sizes)
    del a_PF, dz
    if need.x:
        w1 = experts.weight_for_backward(w1, kept_w1_Y, False)
        v1 = None if v1 is None else experts.weight_for_backward(v1, kept_v1_Y, False)
        dx = _scattered(experts.up_backward(dh, w1, dg, v1, sizes), row_of_slot, slots)
    del dh, dg, w1, v1, kept_w1_Y, kept_v1_Y
    xp = _gathered(x, row_of_slot, slots, rows if rows.dim() == 2 else None)
    together = experts.two_weight_gradients(dh_PF, dg_PF, xp, sizes) if need.w1 and need.v1 and dg_PF is not None else None
    if together is not None:
        dw1, dv1 = together
    else:
        if need.v1 and dg_PF is not None:
            dv1 = experts.weight_gradient(dg_PF, xp, sizes)
        del dg_PF
        if need.w1:
            dw1 = experts.weight_gradient(dh_PF, xp, sizes)
    return dx, dweights if need.weights else None, dw1, dw2, dv1


def _backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g, rows, kept_w1, kept_w2, kept_v1, activation, engine,
              need_x, need_weights, need_w1, need_w2, need_v1):
    saved = [x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g, rows, kept_w1, kept_w2, kept_v1]
    grads = _gradients(grad, saved, activation, engine, _Needs(need_x, need_weights, need_w1, need_w2, need_v1))
    return tuple(grad.new_empty(0) if t is None else t for t in grads)  # separate tensors: an operator's results may not alias


def _backward_fake(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, h, g, rows, kept_w1, kept_w2, kept_v1, activation,
                   engine, need_x, need_weights, need_w1, need_w2, need_v1):
    wanted = ((x, need_x), (weights, need_weights), (w1, need_w1), (w2, need_w2), (v1, need_v1))
    return tuple(like.new_empty(like.shape) if need else grad.new_empty(0) for like, need in wanted)


def _setup_context(ctx, inputs, output):
    x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, ctx.activation, ctx.engine, save, _, _ = inputs
    require(save, "expert_mlp", "save", "True where a gradient is needed", save)
    _, *for_backward = output
    ctx.mark_non_differentiable(*for_backward)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, *for_backward)


def _autograd_backward(ctx, grad, *_):
    needs = ctx.needs_input_grad
    wanted = {0: needs[0], 1: needs[1], 5: needs[5], 6: needs[6], 7: needs[7]}
    grads = [None] * 13
    if grad is None:
        return tuple(grads)
    saved = list(ctx.saved_tensors)
    if torch.is_grad_enabled() or is_watched(grad, *saved):  # something watches this call, or will differentiate it again
        computed = _expert_mlp_backward(grad, *saved, ctx.activation, ctx.engine, *wanted.values())
    else:
        # Not through the operator, whose caller would hold the pre-activations until it ends. Here autograd drops the saved tensors,
        # unless it was asked to retain the graph.
        ctx.maybe_clear_saved_tensors()
        computed = _gradients(grad, saved, ctx.activation, ctx.engine, _Needs(*wanted.values()))
    for (position, needed), value in zip(wanted.items(), computed):
        grads[position] = value if needed else None
    return tuple(grads)


_expert_mlp = define(
    "expert_mlp(Tensor x, Tensor? weights, Tensor? row_of_slot, Tensor slot_of_row, Tensor sizes, Tensor w1, Tensor w2,"
    " Tensor? v1, str activation, str engine, bool save, bool keep_rows, bool keep_weights)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_forward, fake=_forward_fake, setup_context=_setup_context, backward=_autograd_backward, autocast=(0, 5, 6, 7),
    waits=lambda x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu", flops=flops.expert_mlp,
)

_expert_mlp_backward = define(
    "expert_mlp_backward(Tensor grad, Tensor x, Tensor? weights, Tensor? row_of_slot, Tensor slot_of_row, Tensor sizes,"
    " Tensor w1, Tensor w2, Tensor? v1, Tensor h, Tensor g, Tensor rows, Tensor kept_w1, Tensor kept_w2, Tensor kept_v1,"
    " str activation, str engine, bool need_x, bool need_weights, bool need_w1, bool need_w2, bool need_v1)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward, fake=_backward_fake,
    waits=lambda grad, x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu", flops=flops.expert_mlp_backward,
)


class _RowsBeforeWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weights_T1, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine):
        save = any(ctx.needs_input_grad)
        y_TH, *saved = _expert_mlp(x_TH, None, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, save, False, False)
        ctx.activation, ctx.engine = activation, engine
        ctx.save_for_backward(x_TH, weights_T1, row_of_slot, slot_of_row, sizes, w1, w2, v1, *saved)
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        needs = ctx.needs_input_grad
        wanted = [needs[position] for position in (0, 1, 5, 6, 7)]
        computed = _expert_mlp_backward(grad_TH, *ctx.saved_tensors, ctx.activation, ctx.engine, *wanted)
        dx, dweights, dw1, dw2, dv1 = (grad if wants else None for grad, wants in zip(computed, wanted))
        return dx, dweights, None, None, None, dw1, dw2, dv1, None, None


def rows_before_weights(x_TH: torch.Tensor, plan: RoutingPlan, weights_T1: torch.Tensor, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor,
                        v1_EFH: torch.Tensor | None, activation: str | Callable, engine: str) -> torch.Tensor:
    """expert_mlp with one slot a token, without weighing: the caller weighs the rows where it sums them, in expert_mlp's order.

    The gradient that the caller passes back for a row must be that of the weighed row. Then every gradient has the same bits as
    expert_mlp's own; they would differ if rows were weighed and rounded before they are passed back.

    Args:
        weights_T1: the router weight of each token's slot, which gets its gradient here.
        activation: one that activation_name recognises.
    """
    _check_arguments(x_TH, plan, w1_EFH, w2_EFH, v1_EFH, weights_T1)
    x_TH, w1_EFH, w2_EFH = (t.to(computed_dtype(t)) for t in (x_TH, w1_EFH, w2_EFH))
    v1_EFH = None if v1_EFH is None else v1_EFH.to(computed_dtype(v1_EFH))
    return _RowsBeforeWeights.apply(x_TH, weights_T1, plan.row_of_slot_TK, plan.slot_of_row_P, plan_sizes(plan, x_TH, w1_EFH, engine),
                                    w1_EFH, w2_EFH, v1_EFH, activation_name(activation), engine)


# --------------------------------------------------------------------------------------------------------- any callable


def _composed(x_TH, plan, sizes, w1_EFH, w2_EFH, v1_EFH, weights_TK, activation, engine, recompute):
    """expert_mlp composed of separate operators, for an activation without a kernel.

    Rows without a slot may hold anything in h, in g and in the gradient that comes back. The gradients of tensors that the activation
    captures sum over all rows, so the activation is given zeros in those rows, and gradients of zero.
    """
    compiled, transformed = torch.compiler.is_compiling(), may_be_transformed()
    recompute = recompute and torch.is_grad_enabled() and not transformed
    eager = not compiled and not transformed  # a transform of torch.func takes no write to an argument, and no autograd.Function of ours
    in_place = plan.is_in_expert_order and eager
    xp_PH = _RowsInPlace.apply(x_TH, plan.slot_of_row_P) if in_place else padded_gather(x_TH, plan)
    masks = not eager or plan.pads_within_experts
    live_P1 = plan.slot_of_row_P.unsqueeze(1) >= 0 if masks else None

    def masked(h_PF, g_PF):
        # The activation is given a copy, which it may overwrite, because h is saved.
        a_PF = torch.where(live_P1, _result_of(activation, torch.where(live_P1, h_PF, 0)), 0)
        return a_PF if g_PF is None else a_PF * g_PF

    if not eager:
        # A compiler fuses torch.where with the activation, and sees forward and backward at once: with this mark it computes the
        # activation again in backward, but no product.
        h_PF = _grouped(xp_PH, w1_EFH, sizes, True, engine)
        g_PF = None if v1_EFH is None else _grouped(xp_PH, v1_EFH, sizes, True, engine)
        a_PF = checkpoint(masked, h_PF, g_PF, use_reentrant=False) if recompute else masked(h_PF, g_PF)
        y_PH = _grouped(a_PF, w2_EFH, sizes, False, engine)
    else:
        y_PH = _composed_eagerly(xp_PH, plan.slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH, activation, engine, recompute,
                                 masked if masks else None)
    return padded_scatter(y_PH, plan, weights_TK)


def _composed_eagerly(xp_PH, slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH, activation, engine, recompute, masked):
    """y [P,H]. `masked` computes the activation where rows without a slot lie among an expert's rows, and is None elsewhere.

    If all rows without a slot lie behind the last expert, no product reads them. They are set to zero for the activation alone, in
    place, in a product's result that nothing else refers to, which takes no pass over [P,F] beyond the activation's own.

    If they lie among an expert's rows, the GEMMs of the weights' gradients read them. There act(0) is a factor of a and of dg, and its
    slope at 0 is one of dh. The other factors are zeros, but a NaN or an infinity times zero is NaN. The activation's result, and the
    gradient that it hands back, may be its own memory, which must not be written to. So `masked` makes copies. Only g is cleared in place:
    it is a factor of the gradient of act(h), where anomaly detection would see what rows that no product reads may hold.
    """
    w2_EFH = w2_EFH.to(computed_dtype(w2_EFH))
    cleared_P = slot_of_row_P if masked is None else None
    overwrites = computed = False
    version_of_w2 = _version(w2_EFH)

    def up(w_EFH, cleared_P):
        h_PF = _grouped(xp_PH, w_EFH, sizes, True, engine)
        if cleared_P is not None:
            with torch.no_grad():  # gradients need no change, because those of these rows are not used
                _clear_rows_without_slot(cleared_P, h_PF)
        return h_PF

    def activated(h_PF, g_PF):
        a_PF = _result_of(activation, h_PF.clone() if overwrites else h_PF)
        return a_PF if g_PF is None else a_PF * g_PF

    def activated_product(h_PF, g_PF):
        # When it is called again in backward, only the tensors that it saves are needed, not the product.
        nonlocal overwrites, computed
        first, version = not computed, h_PF._version if recompute else None
        a_PF = (masked or activated)(h_PF, g_PF)
        if recompute and first and h_PF._version != version:
            overwrites = True
            return None
        computed = True
        # What the first call saves is dropped, and with it torch's own check. The gradient of w2 alone needs no w2.
        if a_PF.requires_grad and _version(w2_EFH) != version_of_w2:
            raise RuntimeError("expert_mlp: w2 has been modified by an inplace operation between forward and backward: expected version"
                               f" {version_of_w2}, got {_version(w2_EFH)}")
        return _DownProduct.apply(a_PF.to(computed_dtype(a_PF)), w2_EFH, sizes, cleared_P, engine, first)

    g_PF = None if v1_EFH is None else up(v1_EFH, slot_of_row_P)
    if not recompute:
        return activated_product(up(w1_EFH, cleared_P), g_PF)
    y_PH = checkpoint(activated_product, up(w1_EFH, cleared_P), g_PF, use_reentrant=False)
    if y_PH is None:
        # The activation has overwritten the pre-activation, which backward needs. So that is computed once more, and copied this time.
        y_PH = checkpoint(activated_product, up(w1_EFH, cleared_P), g_PF, use_reentrant=False)
    return y_PH


def _version(tensor: torch.Tensor) -> int | None:
    """What an operation that writes to the tensor counts up; None for a tensor of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _result_of(activation: Callable, h_PF: torch.Tensor) -> torch.Tensor:
    """activation(h) [P,F], checked: what follows would name w2 or nothing where the caller's function is wrong."""
    a_PF = activation(h_PF)
    require(isinstance(a_PF, torch.Tensor), "expert_mlp", "activation", "a callable that returns a torch.Tensor", type(a_PF).__name__,
            TypeError)
    require(a_PF.shape == h_PF.shape, "expert_mlp", "activation",
            lambda: f"a result with the shape of its argument, {list(h_PF.shape)}", list(a_PF.shape))
    require(a_PF.dtype == h_PF.dtype or autocast_enabled(h_PF.device.type), "expert_mlp", "activation",
            lambda: f"a result with the dtype of its argument, {h_PF.dtype}", a_PF.dtype, TypeError)
    return a_PF


def _grouped(a, b, sizes, trans_b, engine):
    return grouped(a, b, sizes, False, trans_b, engine=engine)


_clear_rows_without_slot = define(
    "clear_rows_without_slot(Tensor slot_of_row, Tensor(a!) rows) -> ()",
    reference=clear_rows_without_slot, fake=lambda slot_of_row, rows: None,
)


class _RowsInPlace(torch.autograd.Function):
    """x [P,H] as it is, where padded_gather would copy each row to its own place; its gradient is zeros where a row has no slot."""

    @staticmethod
    def forward(ctx, x_PH, slot_of_row_P):
        ctx.save_for_backward(slot_of_row_P)
        return x_PH.view_as(x_PH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PH):
        (slot_of_row_P,) = ctx.saved_tensors
        return torch.where(slot_of_row_P.unsqueeze(1) >= 0, grad_PH, 0), None


class _DownProduct(torch.autograd.Function):
    """a @ w2. Without `compute` only a and w2 are saved, and the result is undefined.

    With `slot_of_row` the gradient of a is zero where a row has no slot.
    """

    @staticmethod
    def forward(ctx, a_PF, w2_EFH, sizes, slot_of_row_P, engine, compute):
        need_a, need_w2 = ctx.needs_input_grad[:2]
        ctx.engine = engine
        ctx.save_for_backward(a_PF if need_w2 else None, w2_EFH if need_a else None, sizes, slot_of_row_P)
        if not compute:
            return a_PF.new_empty(1, 1).expand(a_PF.size(0), w2_EFH.size(2))
        return _grouped(a_PF, w2_EFH, sizes, False, engine)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, grad_PH):
        a_PF, w2_EFH, sizes, slot_of_row_P = ctx.saved_tensors
        grad_a = None if w2_EFH is None else _grouped(grad_PH, w2_EFH, sizes, True, ctx.engine)
        if grad_a is not None and slot_of_row_P is not None:
            if may_be_batched(grad_a):
                grad_a = torch.where(slot_of_row_P.unsqueeze(1) >= 0, grad_a, 0)
            else:
                _clear_rows_without_slot(slot_of_row_P, grad_a)
        grad_w2 = None if a_PF is None else grouped(a_PF, grad_PH, sizes, True, engine=ctx.engine)
        return grad_a, grad_w2, None, None, None, None
