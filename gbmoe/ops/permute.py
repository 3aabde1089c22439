"""padded_gather and padded_scatter: tokens to expert-major padded rows, and back.

Shape suffixes: T tokens, K slots a token, H hidden, P padded rows of the plan, S scales a row.

Under autocast both keep the dtype of what they move: casting is the business of the products around them.
"""

from __future__ import annotations

import torch

from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._library import define
from gbmoe.kernels import gather, map_slots, scatter, scatter_backward
from gbmoe.routing import RoutingPlan

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def padded_gather(
    x_TH: torch.Tensor, plan: RoutingPlan, *, slot_scale_TK: torch.Tensor | None = None, probs_TK: torch.Tensor | None = None,
    row_scales_TS: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Copy each token's row to the rows of its slots, expert-major: out[row] = x[token of row]. Padding rows are zero.

    Mirrors megablocks.ops.padded_gather. Differentiable in x, slot_scale and probs; the gradient of x sums a token's rows in
    slot order in float32 (float64 for float64) and rounds once. Without a scale a copy: bit for bit, NaN included.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64, on the plan's device; or float8_e4m3fn or float8_e5m2, which is
            moved as it is and not differentiable.
        plan: where the rows go.
        slot_scale_TK: factor of each slot's row [T,K], any floating dtype; multiplied in float32 and rounded once.
        probs_TK: [T,K], returned in row order as well, as [P]; zero where a row has no slot.
        row_scales_TS: scales that belong to the rows of a float8 x, [T,S], any floating dtype, returned in row order as [P,S].

    Returns:
        out [P,H], dtype of x; with probs or row scales a tuple (out, probs_P, row_scales_PS) of those that were asked for.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> plan = RoutingPlan.from_experts(torch.tensor([[1, 0], [1, 2]]), num_experts=3, align=2)
        >>> padded_gather(torch.tensor([[1.0], [2.0]]), plan).flatten().tolist()
        [1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0]
    """
    _check(x_TH, "padded_gather", "x", plan, plan.num_tokens, FLOATING + FLOAT8)
    for argument, scalars in (("slot_scale", slot_scale_TK), ("probs", probs_TK)):
        if scalars is not None:
            check_slot_scalars(scalars, "padded_gather", argument, plan)
    rows = (plan.row_of_slot_TK, plan.slot_of_row_P, None, None)
    if x_TH.dtype in FLOAT8:
        require(slot_scale_TK is None, "padded_gather", "slot_scale", "None beside a float8 x", "a tensor")
        out, probs_P = _gather(x_TH.detach().view(torch.uint8), *rows, None, probs_TK, False)
        out = out.view(x_TH.dtype)
    else:
        out, probs_P = _gather(x_TH, *rows, slot_scale_TK, probs_TK, False)
    results = [out] if probs_TK is None else [out, probs_P]
    if row_scales_TS is not None:
        _check(row_scales_TS, "padded_gather", "row_scales", plan, plan.num_tokens, FLOATING)
        results.append(_gather(row_scales_TS, *rows, None, None, False)[0])
    return results[0] if len(results) == 1 else tuple(results)


def padded_scatter(y_PH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
    """Sum each token's rows, weighted, back to token order: out[t] = sum over j of weights[t,j] * y[row of slot (t,j)].

    Mirrors megablocks.ops.padded_scatter, with one difference for the better: the sum is kept in float32 (float64 for
    float64), in slot order, and rounded once. Differentiable in y and weights. A dropped slot adds nothing and gets zero
    gradients, whatever its weight holds.

    Args:
        y_PH: [P,H], bfloat16, float16, float32 or float64, on the plan's device.
        plan: where the rows are.
        weights_TK: [T,K], any of those dtypes (float32 beside bfloat16 rows is usual); None counts every slot once.

    Returns:
        [T,H], dtype of y.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check(y_PH, "padded_scatter", "y", plan, plan.num_rows, FLOATING)
    if weights_TK is not None:
        check_slot_scalars(weights_TK, "padded_scatter", "weights", plan)
    return _scatter(y_PH, plan.row_of_slot_TK, plan.slot_of_row_P, None, None, weights_TK)


def _check(rows, operator, argument, plan, expected, dtypes) -> None:
    require_tensor(rows, operator, argument, rank=2, dtypes=dtypes, device=plan.row_of_slot_TK.device)
    require(rows.size(0) == expected, operator, argument, lambda: f"{expected} rows, as in the plan", rows.size(0))


def check_slot_scalars(scalars_TK: torch.Tensor, operator: str, argument: str, plan: RoutingPlan) -> None:
    """Raise unless scalars_TK is a floating [T,K] on the plan's device."""
    require_tensor(scalars_TK, operator, argument, rank=2, dtypes=FLOATING, device=plan.row_of_slot_TK.device)
    expected = list(plan.row_of_slot_TK.shape)
    require(list(scalars_TK.shape) == expected, operator, argument, lambda: f"shape {expected}, one a slot", list(scalars_TK.shape))


# -------------------------------------------------------------------------------------------------------------- operators


_map_slots = define(
    "map_slots(Tensor row, Tensor? columns, Tensor? counts, Tensor? pad_offsets, Tensor? probs, SymInt rows) -> (Tensor, Tensor)",
    reference=map_slots,
    fake=lambda row, columns, counts, pad_offsets, probs, rows: (row.new_empty(row.shape), row.new_empty(rows)),
)


def _gather_kernel(x, row_of_slot, slot_of_row, columns, counts, scale, probs, drop_zero_probs):
    out, probs = gather(x, row_of_slot, slot_of_row, columns, counts, scale, probs, drop_zero_probs, clear_behind=True)
    return out, x.new_empty(0) if probs is None else probs


def _gather_fake(x, row_of_slot, slot_of_row, columns, counts, scale, probs, drop_zero_probs):
    rows = slot_of_row.size(0)
    return x.new_empty(rows, x.size(1)), x.new_empty(0) if probs is None else probs.new_empty(rows)


def _gather_setup_context(ctx, inputs, output):
    x, row_of_slot, slot_of_row, columns, counts, scale, probs, ctx.drop_zero_probs = inputs
    need_scale = scale is not None and ctx.needs_input_grad[5]
    # What the gradients read, beyond the map: the scale for x, x for the scale, the probabilities for which rows they zeroed.
    ctx.save_for_backward(x if need_scale else None, row_of_slot, slot_of_row, columns, counts, scale, probs)
    ctx.set_materialize_grads(False)


def _gather_backward(ctx, grad_out, grad_probs_P):
    x, row_of_slot, slot_of_row, columns, counts, scale, probs = ctx.saved_tensors
    grad_x = grad_scale = grad_probs = None
    if grad_out is not None:
        if ctx.drop_zero_probs:
            # Rows that a zero probability cleared do not depend on x.
            row_of_slot_grad, _ = _map_slots(row_of_slot, columns, counts, None, probs, slot_of_row.size(0))
        else:
            row_of_slot_grad = row_of_slot
        if ctx.needs_input_grad[0]:
            grad_x = _scatter(grad_out, row_of_slot_grad, slot_of_row, columns, counts, scale)
        if x is not None:
            _, grad_scale = _scatter_backward_op(x, grad_out, row_of_slot_grad, slot_of_row, columns, counts, scale, False)
    if grad_probs_P is not None and probs is not None and ctx.needs_input_grad[6]:
        # A slot's probability receives the entry of its row, which is 1 times it: a scatter's gradient of weights.
        ones_T1 = grad_probs_P.new_ones(row_of_slot.size(0), 1)
        _, grad_probs = _scatter_backward_op(ones_T1, grad_probs_P.unsqueeze(1), row_of_slot, slot_of_row, columns, counts, probs, False)
    return grad_x, None, None, None, None, grad_scale, grad_probs, None


_gather = define(
    "padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? scale,"
    " Tensor? probs, bool drop_zero_probs) -> (Tensor, Tensor)",
    reference=_gather_kernel, fake=_gather_fake, setup_context=_gather_setup_context, backward=_gather_backward,
)


def _scatter_setup_context(ctx, inputs, output):
    y, row_of_slot, slot_of_row, columns, counts, weights = inputs
    need_weights = weights is not None and ctx.needs_input_grad[5]
    ctx.save_for_backward(y if need_weights else None, row_of_slot, slot_of_row, columns, counts, weights)


def _scatter_backward(ctx, grad):
    y, row_of_slot, slot_of_row, columns, counts, weights = ctx.saved_tensors
    need_rows = ctx.needs_input_grad[0]
    grad_y, grad_weights = _scatter_backward_op(grad, y, row_of_slot, slot_of_row, columns, counts, weights, need_rows)
    return grad_y if need_rows else None, None, None, None, None, None if y is None else grad_weights


def _scatter_backward_fake(grad, y, row_of_slot, slot_of_row, columns, counts, weights, need_rows):
    grad_y = grad.new_empty((slot_of_row.size(0), grad.size(1)) if need_rows else 0)
    return grad_y, grad.new_empty(0) if y is None or weights is None else weights.new_empty(weights.shape)


_scatter = define(
    "padded_scatter(Tensor y, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? weights) -> Tensor",
    reference=lambda y, row_of_slot, slot_of_row, columns, counts, weights: scatter(y, row_of_slot, columns, counts, weights),
    fake=lambda y, row_of_slot, slot_of_row, columns, counts, weights: y.new_empty(row_of_slot.size(0), y.size(1)),
    setup_context=_scatter_setup_context, backward=_scatter_backward,
)

_scatter_backward_op = define(
    "padded_scatter_backward(Tensor grad, Tensor? y, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts,"
    " Tensor? weights, bool need_rows) -> (Tensor, Tensor)",
    reference=lambda grad, y, row_of_slot, slot_of_row, columns, counts, weights, need_rows: scatter_backward(
        grad, y, row_of_slot, slot_of_row, columns, counts, weights, need_rows=need_rows),
    fake=_scatter_backward_fake,
)
