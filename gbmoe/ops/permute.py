"""padded_gather and padded_scatter: tokens to expert-major padded rows, and back.

Shape suffixes: T tokens, K slots a token, H hidden, P padded rows of the plan, S scales a row.

Under autocast both keep the dtype of what they move: casting is the business of the products around them.
"""

from __future__ import annotations

import torch

from gbmoe import extension, reference
from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._library import define
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


# --------------------------------------------------------------------------- kernels, called inside operators as well
#
# Maps are dense (columns and counts None) or ragged; see reference.padded_gather. Their shapes are taken on trust, their entries
# are not: what lies outside its range counts as none.


def _kernels_serve(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and extension.loaded()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def gather(x_TH, row_of_slot_TK, slot_of_row_P, columns_TK=None, counts_T=None, scale=None, probs=None, drop_zero_probs=False,
           *, clear_behind=False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """padded_gather without checks and autograd: (out [P,H], probs [P] where given); the CUDA kernel where it is loaded.

    The rows behind the last expert are zeros with `clear_behind`, and otherwise whatever was there.
    """
    if not _kernels_serve(x_TH):
        return reference.padded_gather(x_TH, row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, scale, probs, drop_zero_probs)
    out_PH = x_TH.new_empty(slot_of_row_P.size(0), x_TH.size(1))
    probs_P = None if probs is None else probs.new_empty(slot_of_row_P.size(0))
    torch.ops.gbmoe_cuda.padded_gather(x_TH.contiguous(), row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, _contiguous(scale),
                                       _contiguous(probs), drop_zero_probs, clear_behind, out_PH, probs_P)
    return out_PH, probs_P


def scatter(y_PH, row_of_slot_TK, columns_TK=None, counts_T=None, weights=None) -> torch.Tensor:
    """padded_scatter without checks and autograd; the CUDA kernel where it is loaded."""
    if not _kernels_serve(y_PH):
        return reference.padded_scatter(y_PH, row_of_slot_TK, weights, columns_TK, counts_T)
    out_TH = y_PH.new_empty(row_of_slot_TK.size(0), y_PH.size(1))
    torch.ops.gbmoe_cuda.padded_scatter(y_PH.contiguous(), row_of_slot_TK, columns_TK, counts_T, _contiguous(weights), out_TH)
    return out_TH


def scatter_backward(grad_TH, y_PH, row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, weights, *,
                     need_rows=True) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of padded_scatter, see reference.padded_scatter_backward; the CUDA kernel where it is loaded.

    Without `need_rows` the first result is empty.
    """
    if not _kernels_serve(grad_TH):
        rows, dots = reference.padded_scatter_backward(grad_TH, y_PH, row_of_slot_TK, slot_of_row_P, weights, columns_TK, counts_T)
        return rows if need_rows else grad_TH.new_empty(0), dots
    grad_y_PH = grad_TH.new_empty(slot_of_row_P.size(0), grad_TH.size(1)) if need_rows else None
    grad_weights = None
    if y_PH is not None and weights is not None:
        # The kernel writes the scalars of all slots of a dense map, and of a ragged one those in use, where there are rows.
        written = columns_TK is None and grad_TH.numel() > 0
        grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format) if written \
            else torch.zeros_like(weights, memory_format=torch.contiguous_format)
    torch.ops.gbmoe_cuda.padded_scatter_backward(
        grad_TH.contiguous(), _contiguous(y_PH), row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, _contiguous(weights), True,
        grad_y_PH, grad_weights)
    return tuple(grad_TH.new_empty(0) if t is None else t for t in (grad_y_PH, grad_weights))


def map_slots(row_TK, columns_TK, counts_T, pad_offsets_E, probs, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """row_of_slot [T,K] and slot_of_row [P] of a map's rows; the CUDA kernel where it is loaded. P is `rows`.

    A slot has its row, plus pad_offsets_E of its column; or -1 where that is not in [0, P), where the column is none, and with
    probs where its probability is 0. Beyond a ragged map's counts anything may stand. slot_of_row is 0 for rows that a slot
    has and PADDING for others: the operators below read its sign only.
    """
    if _kernels_serve(row_TK):
        row_of_slot_TK = torch.empty(row_TK.shape, dtype=torch.int32, device=row_TK.device)
        slot_of_row_P = row_of_slot_TK.new_empty(rows)
        pad_offsets_E = None if pad_offsets_E is None else pad_offsets_E.long().contiguous()
        torch.ops.gbmoe_cuda.map_slots(
            row_TK, columns_TK, counts_T, pad_offsets_E, _contiguous(probs), row_of_slot_TK, slot_of_row_P)
        return row_of_slot_TK, slot_of_row_P
    slots = row_TK.size(1)
    if columns_TK is not None:
        row_TK = torch.where((columns_TK >= 0) & (columns_TK < slots), row_TK, -1)
    row_TK, columns_TK, probs = reference.dense_slots(row_TK, columns_TK, counts_T, torch.iinfo(torch.int32).max, probs)
    if pad_offsets_E is not None:
        row_TK = torch.where(row_TK >= 0, row_TK + pad_offsets_E.long()[columns_TK], -1)
    exists_TK = (row_TK >= 0) & (row_TK < rows)
    if probs is not None:
        exists_TK &= probs != 0
    row_TK = torch.where(exists_TK, row_TK, -1).int()
    # Slots without a row write behind the last one, each column to its own place: one place for all would be a queue.
    target_TK = torch.where(exists_TK, row_TK, rows + torch.arange(slots, device=row_TK.device))
    slot_of_row_P = torch.full((rows + slots,), reference.PADDING, dtype=torch.int32, device=row_TK.device)
    return row_TK, slot_of_row_P.scatter_(0, target_TK.flatten().long(), 0)[:rows].clone()


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
