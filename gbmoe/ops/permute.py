"""padded_gather and padded_scatter: tokens to expert-major padded rows, and back. gather_slots, scatter_slots and make_slot_map do the
same with any SlotMap, for adapters, which have maps of their own.

Shape suffixes: T tokens, K slots a token, H hidden, P padded rows of the plan, S scales a row, C columns of a ragged map's scalars.

Under autocast they keep the dtype of the rows, which the products around them cast.
"""

from __future__ import annotations

import torch

from gbmoe import launch
from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._define_operator import define, positions
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def padded_gather(
    x_TH: torch.Tensor, plan: RoutingPlan, *, slot_scale_TK: torch.Tensor | None = None, probs_TK: torch.Tensor | None = None,
    row_scales_TS: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Copy each token's row to the rows of its slots, expert-major: out[row] = x[token of row]. Padding rows are zero.

    Mirrors megablocks.ops.padded_gather. Differentiable in x, slot_scale and probs; the gradient of x sums a token's rows in
    slot order in float32 (float64 for float64) and rounds once. Without a scale rows are copied bit for bit, NaN included.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64, on the plan's device; or float8_e4m3fn or float8_e5m2, which is
            moved as it is and not differentiable.
        plan: where the rows go.
        slot_scale_TK: factor of each slot's row [T,K], any floating dtype; multiplied in float32 and rounded once.
        probs_TK: [T,K], returned in row order as well, as [P]; zero where a row has no slot.
        row_scales_TS: scales that belong to the rows of a float8 x, [T,S], any floating dtype, returned in row order as [P,S].

    Returns:
        out [P,H], dtype of x; with probs or row scales a tuple of out, probs_P and row_scales_PS, without those that were not given.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> experts = torch.tensor([[1, 0], [1, 2]])
        >>> plan = RoutingPlan.from_experts(experts, num_experts=3, align=2)
        >>> padded_gather(torch.tensor([[1.0], [2.0]]), plan).flatten().tolist()
        [1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0]
    """
    check_plan(plan, "padded_gather")
    _check(x_TH, "padded_gather", "x", plan, plan.num_tokens, FLOATING + FLOAT8)
    for argument, scalars in (("slot_scale", slot_scale_TK), ("probs", probs_TK)):
        if scalars is not None:
            check_slot_scalars(scalars, "padded_gather", argument, plan)
    if x_TH.dtype in FLOAT8:
        require(slot_scale_TK is None, "padded_gather", "slot_scale", "None with a float8 x", "a tensor")
    slots = plan.slot_map
    out, probs_P = gather_slots(x_TH, slots, scale=slot_scale_TK, probs=probs_TK)
    results = [out] if probs_TK is None else [out, probs_P]
    if row_scales_TS is not None:
        _check(row_scales_TS, "padded_gather", "row_scales", plan, plan.num_tokens, FLOATING)
        results.append(gather_slots(row_scales_TS, slots)[0])
    return results[0] if len(results) == 1 else tuple(results)


def padded_scatter(y_PH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
    """Sum each token's rows, weighted, back to token order: out[t] = sum over j of weights[t,j] * y[row of slot (t,j)].

    Mirrors megablocks.ops.padded_scatter, but the sum is kept in float32 (float64 for float64), in slot order, and rounded once.
    Differentiable in y and weights. A dropped slot adds nothing and gets zero gradients, whatever its weight is.

    Args:
        y_PH: [P,H], bfloat16, float16, float32 or float64, on the plan's device.
        plan: where the rows are.
        weights_TK: [T,K], any of those dtypes (float32 with bfloat16 rows is usual); None gives every slot the weight one.

    Returns:
        [T,H], dtype of y.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_plan(plan, "padded_scatter")
    _check(y_PH, "padded_scatter", "y", plan, plan.num_rows, FLOATING)
    if weights_TK is not None:
        check_slot_scalars(weights_TK, "padded_scatter", "weights", plan)
    return scatter_slots(y_PH, plan.slot_map, weights=weights_TK)


def check_plan(plan: RoutingPlan, operator: str) -> None:
    """Raise TypeError for what is no plan, such as the ids of which one is made, and as RoutingPlan.check does."""
    if not isinstance(plan, RoutingPlan):
        require(False, operator, "plan", "a RoutingPlan, as RoutingPlan.from_experts makes of expert ids", type(plan).__name__, TypeError)
    plan.check()


def _check(rows, operator, argument, plan, expected, dtypes) -> None:
    require_tensor(rows, operator, argument, rank=2, dtypes=dtypes, device=plan.row_of_slot_TK.device)
    if rows.size(0) != expected:
        require(False, operator, argument, lambda: f"{expected} rows, as in the plan", rows.size(0))


def check_slot_scalars(scalars_TK: torch.Tensor, operator: str, argument: str, plan: RoutingPlan) -> None:
    """Raise unless scalars_TK is a floating [T,K] on the plan's device."""
    require_tensor(scalars_TK, operator, argument, rank=2, dtypes=FLOATING, device=plan.row_of_slot_TK.device)
    expected = plan.row_of_slot_TK.shape
    if scalars_TK.shape != expected:
        require(False, operator, argument, lambda: f"shape {list(expected)}, one a slot", list(scalars_TK.shape))


# ----------------------------------------------------------------------------------------------------------------- any map


def gather_slots(
    x_TH: torch.Tensor, slots: SlotMap, *, scale: torch.Tensor | None = None, probs: torch.Tensor | None = None,
    drop_zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """padded_gather with any map: out[row] = scale * x[token of the row's slot], zeros in rows without a slot. No host wait.

    Differentiable in x, scale and probs. Callers check shapes and dtypes, which are not checked here. Entries of the map may hold
    anything: one outside its range counts as none.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64; or, without a scale, float8 or uint8, which are not differentiable.
        slots: a map of T tokens and P rows, on the device of x.
        scale: factor of each slot's row, any floating dtype; [T,K] or, for a ragged map, [T,C] with columns below C. Multiplied in
            float32 (float64 for float64), rounded once.
        probs: a probability of each slot, with such a shape and dtype; returned in row order.
        drop_zero_probs: a row whose probability is exactly 0 is zeros and gives x no gradient.

    Returns:
        (out [P,H], dtype of x; probs [P], zero where a row has no slot, and empty where none were given).
    """
    as_bytes = x_TH.dtype in FLOAT8
    out_PH, probs_P = _gather(x_TH.detach().view(torch.uint8) if as_bytes else x_TH, *slots, scale, probs, drop_zero_probs)
    return out_PH.view(x_TH.dtype) if as_bytes else out_PH, probs_P


def scatter_slots(y_PH: torch.Tensor, slots: SlotMap, *, weights: torch.Tensor | None = None) -> torch.Tensor:
    """padded_scatter with any map: out[t] = sum over t's slots of weight * y[row of the slot]. No host wait.

    The sum is kept in float32 (float64 for float64), in slot order, and rounded once. Differentiable in y and weights; a slot without
    a row adds nothing and gets zero gradients, and rows without a slot are not read and get zero gradients. Callers check shapes and
    dtypes, which are not checked here. Entries of the map may hold anything: one outside its range counts as none.

    Args:
        y_PH: [P,H], bfloat16, float16, float32 or float64.
        slots: a map of P rows, on the device of y.
        weights: any floating dtype; [T,K] or, for a ragged map, [T,C] with columns below C. None gives every slot the weight one.

    Returns:
        [T,H], dtype of y.
    """
    return _scatter(y_PH, *slots, weights)


def make_slot_map(
    row_TK: torch.Tensor, *, rows: int, columns_TK: torch.Tensor | None = None, counts_T: torch.Tensor | None = None,
    pad_offsets_E: torch.Tensor | None = None, probs: torch.Tensor | None = None,
) -> SlotMap:
    """The SlotMap of slots with these rows; rows outside [0, rows) count as none. No host wait.

    Args:
        row_TK: int32 [T,K], the row of each slot; the entries of a token are adjacent in memory.
        rows: P.
        columns_TK, counts_T: those of a ragged map, int32, on the same device; both or neither.
        pad_offsets_E: int32 or int64; what is added to a slot's row, by the slot's column.
        probs: [T,K] or, for a ragged map, [T,C]; a slot whose probability is exactly 0 has no row.

    Returns:
        a map whose slot_of_row_P is 0 for rows that have a slot, because gathers and scatters read its sign only.
    """
    row_of_slot_TK, slot_of_row_P = _map_slots(row_TK, columns_TK, counts_T, pad_offsets_E, probs, rows)
    return SlotMap(row_of_slot_TK=row_of_slot_TK, slot_of_row_P=slot_of_row_P, columns_TK=columns_TK, counts_T=counts_T)


# -------------------------------------------------------------------------------------------------------------- operators


def _map_slots_kernel(row, columns, counts, pad_offsets, probs, rows):
    return launch.map_slots(row, columns_TK=columns, counts_T=counts, pad_offsets_E=pad_offsets, probs=probs, rows=rows)


_map_slots = define(
    "map_slots(Tensor row, Tensor? columns, Tensor? counts, Tensor? pad_offsets, Tensor? probs, SymInt rows) -> (Tensor, Tensor)",
    reference=_map_slots_kernel,
    fake=lambda row, columns, counts, pad_offsets, probs, rows: (row.new_empty(row.shape), row.new_empty(rows)),
)


def _gather_kernel(x, row_of_slot, slot_of_row, columns, counts, scale, probs, drop_zero_probs):
    out, probs = launch.gather(x, SlotMap(row_of_slot, slot_of_row, columns, counts), scale=scale, probs=probs,
                                drop_zero_probs=drop_zero_probs, clear_behind=True)
    return out, x.new_empty(0) if probs is None else probs


def _gather_fake(x, row_of_slot, slot_of_row, columns, counts, scale, probs, drop_zero_probs):
    rows = slot_of_row.size(0)
    return x.new_empty(rows, x.size(1)), x.new_empty(0) if probs is None else probs.new_empty(rows)


def _gather_setup_context(ctx, inputs, output):
    x, *slots, scale, probs, ctx.drop_zero_probs = inputs
    need_scale = scale is not None and ctx.needs_input_grad[_OF_GATHER["scale"]]
    # The gradient of x reads the scale, that of the scale reads x, and both read probs, which tell which rows were zeroed.
    ctx.save_for_backward(x if need_scale else None, *slots, scale, probs)
    ctx.set_materialize_grads(False)


def _gather_backward(ctx, grad_out, grad_probs_P):
    x, *slots, scale, probs = ctx.saved_tensors
    slots = dependent = SlotMap(*slots)
    grad_x = grad_scale = grad_probs = None
    if grad_out is not None:
        if ctx.drop_zero_probs:
            # Rows that were cleared because of a zero probability do not depend on x.
            mapped = make_slot_map(slots.row_of_slot_TK, rows=slots.num_rows, columns_TK=slots.columns_TK, counts_T=slots.counts_T,
                                   probs=probs)
            dependent = slots._replace(row_of_slot_TK=mapped.row_of_slot_TK)
        if ctx.needs_input_grad[_OF_GATHER["x"]]:
            grad_x = scatter_slots(grad_out, dependent, weights=scale)
        if x is not None:
            _, grad_scale = _scatter_backward_op(x, grad_out, *dependent, scale, False)
    if grad_probs_P is not None and probs is not None and ctx.needs_input_grad[_OF_GATHER["probs"]]:
        # A slot's probability receives the gradient of its row's entry: a scatter's gradient of weights, with y all ones.
        ones_T1 = grad_probs_P.new_ones(slots.num_tokens, 1)
        _, grad_probs = _scatter_backward_op(ones_T1, grad_probs_P.unsqueeze(1), *slots, probs, False)
    return {"x": grad_x, "scale": grad_scale, "probs": grad_probs}


_GATHER = (
    "padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? scale,"
    " Tensor? probs, bool drop_zero_probs) -> (Tensor, Tensor)")
_OF_GATHER = positions(_GATHER)
_gather = define(
    _GATHER, reference=_gather_kernel, fake=_gather_fake, setup_context=_gather_setup_context, backward=_gather_backward,
)


def _scatter_kernel(y, row_of_slot, slot_of_row, columns, counts, weights):
    return launch.scatter(y, SlotMap(row_of_slot, slot_of_row, columns, counts), weights=weights)


def _scatter_setup_context(ctx, inputs, output):
    y, *slots, weights = inputs
    need_weights = weights is not None and ctx.needs_input_grad[_OF_SCATTER["weights"]]
    ctx.save_for_backward(y if need_weights else None, *slots, weights)


def _scatter_backward(ctx, grad):
    y, *slots, weights = ctx.saved_tensors
    need_rows = ctx.needs_input_grad[_OF_SCATTER["y"]]
    grad_y, grad_weights = _scatter_backward_op(grad, y, *SlotMap(*slots), weights, need_rows)
    return {"y": grad_y if need_rows else None, "weights": None if y is None else grad_weights}


def _scatter_backward_kernel(grad, y, row_of_slot, slot_of_row, columns, counts, weights, need_rows):
    return launch.scatter_backward(
        grad, y, SlotMap(row_of_slot, slot_of_row, columns, counts), weights=weights, need_rows=need_rows)


def _scatter_backward_fake(grad, y, row_of_slot, slot_of_row, columns, counts, weights, need_rows):
    grad_y = grad.new_empty((slot_of_row.size(0), grad.size(1)) if need_rows else 0)
    return grad_y, grad.new_empty(0) if y is None or weights is None else weights.new_empty(weights.shape)


_SCATTER = "padded_scatter(Tensor y, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? weights) -> Tensor"
_OF_SCATTER = positions(_SCATTER)
_scatter = define(
    _SCATTER, reference=_scatter_kernel,
    fake=lambda y, row_of_slot, slot_of_row, columns, counts, weights: y.new_empty(row_of_slot.size(0), y.size(1)),
    setup_context=_scatter_setup_context, backward=_scatter_backward,
)

_scatter_backward_op = define(
    "padded_scatter_backward(Tensor grad, Tensor? y, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts,"
    " Tensor? weights, bool need_rows) -> (Tensor, Tensor)",
    reference=_scatter_backward_kernel, fake=_scatter_backward_fake,
)
