"""padded_gather and padded_scatter: tokens to expert-major padded rows, and back.

Shape suffixes: T tokens, K slots a token, H hidden, P padded rows of the plan.

Under autocast both keep the dtype of what they move: casting is the business of the products around them.
"""

from __future__ import annotations

import torch

from gbmoe import extension, reference
from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._library import define
from gbmoe.routing import RoutingPlan


def padded_gather(x_TH: torch.Tensor, plan: RoutingPlan) -> torch.Tensor:
    """Copy each token's row to the rows of its slots, expert-major: out[row] = x[token of row]. Padding rows are zero.

    Mirrors megablocks.ops.padded_gather. Differentiable in x; the gradient sums a token's rows in slot order in float32
    (float64 for float64) and rounds once. A copy: bit for bit, NaN included.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64, on the plan's device.
        plan: where the rows go.

    Returns:
        [P,H], dtype of x.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check(x_TH, "padded_gather", "x", plan, plan.num_tokens)
    return _gather(x_TH, plan.row_of_slot_TK, plan.slot_of_row_P)


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
    _check(y_PH, "padded_scatter", "y", plan, plan.num_rows)
    if weights_TK is not None:
        check_weights(weights_TK, "padded_scatter", plan)
    return _scatter(y_PH, plan.row_of_slot_TK, plan.slot_of_row_P, weights_TK)


def _check(rows: torch.Tensor, operator: str, argument: str, plan: RoutingPlan, expected: int) -> None:
    require_tensor(rows, operator, argument, rank=2, dtypes=FLOATING, device=plan.row_of_slot_TK.device)
    require(rows.size(0) == expected, operator, argument, f"{expected} rows, as in the plan", rows.size(0))


def check_weights(weights_TK: torch.Tensor, operator: str, plan: RoutingPlan) -> None:
    """Raise unless weights_TK is a floating [T,K] on the plan's device."""
    require_tensor(weights_TK, operator, "weights", rank=2, dtypes=FLOATING, device=plan.row_of_slot_TK.device)
    expected = list(plan.row_of_slot_TK.shape)
    require(list(weights_TK.shape) == expected, operator, "weights", f"shape {expected}, one a slot", list(weights_TK.shape))


# ------------------------------------------------------------------------------ kernels, called inside operators as well


def gather(x_TH: torch.Tensor, row_of_slot_TK: torch.Tensor, slot_of_row_P: torch.Tensor) -> torch.Tensor:
    """padded_gather without checks and autograd; the CUDA kernel where it is loaded."""
    if x_TH.device.type == "cuda" and extension.loaded():
        out_PH = x_TH.new_empty(slot_of_row_P.size(0), x_TH.size(1))
        torch.ops.gbmoe_cuda.padded_gather(x_TH.contiguous(), row_of_slot_TK, slot_of_row_P, out_PH)
        return out_PH
    return reference.padded_gather(x_TH, row_of_slot_TK, slot_of_row_P)


def scatter(y_PH: torch.Tensor, row_of_slot_TK: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """padded_scatter without checks and autograd; the CUDA kernel where it is loaded."""
    if y_PH.device.type == "cuda" and extension.loaded():
        out_TH = y_PH.new_empty(row_of_slot_TK.size(0), y_PH.size(1))
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        torch.ops.gbmoe_cuda.padded_scatter(y_PH.contiguous(), row_of_slot_TK, weights_TK, out_TH)
        return out_TH
    return reference.padded_scatter(y_PH, row_of_slot_TK, weights_TK)


def scatter_backward(
    grad_TH: torch.Tensor, y_PH: torch.Tensor | None, row_of_slot_TK: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of padded_scatter, see reference.padded_scatter_backward; the CUDA kernel where it is loaded."""
    if grad_TH.device.type != "cuda" or not extension.loaded():
        return reference.padded_scatter_backward(grad_TH, y_PH, row_of_slot_TK, slot_of_row_P, weights_TK)
    y_PH = None if y_PH is None else y_PH.contiguous()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_y_PH = grad_TH.new_empty(slot_of_row_P.size(0), grad_TH.size(1))
    grad_weights_TK = None
    if y_PH is not None and weights_TK is not None:
        # The kernel writes every slot where there is a row to write it from.
        make = torch.empty_like if grad_y_PH.numel() else torch.zeros_like
        grad_weights_TK = make(weights_TK)
    torch.ops.gbmoe_cuda.padded_scatter_backward(
        grad_TH.contiguous(), y_PH, row_of_slot_TK, slot_of_row_P, weights_TK, grad_y_PH, grad_weights_TK)
    return grad_y_PH, grad_TH.new_empty(0) if grad_weights_TK is None else grad_weights_TK


# -------------------------------------------------------------------------------------------------------------- operators


def _gather_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _gather_backward(ctx, grad):
    row_of_slot, slot_of_row = ctx.saved_tensors
    return _scatter(grad, row_of_slot, slot_of_row, None), None, None


_gather = define(
    "padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row) -> Tensor",
    reference=gather,
    fake=lambda x, row_of_slot, slot_of_row: x.new_empty(slot_of_row.size(0), x.size(1)),
    setup_context=_gather_setup_context, backward=_gather_backward,
)


def _scatter_setup_context(ctx, inputs, output):
    y, row_of_slot, slot_of_row, weights = inputs
    need_weights = weights is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(y if need_weights else None, row_of_slot, slot_of_row, weights)


def _scatter_backward(ctx, grad):
    y, row_of_slot, slot_of_row, weights = ctx.saved_tensors
    grad_y, grad_weights = _scatter_backward_op(grad, y, row_of_slot, slot_of_row, weights)
    return grad_y, None, None, None if y is None else grad_weights


def _scatter_backward_fake(grad, y, row_of_slot, slot_of_row, weights):
    grad_y = grad.new_empty(slot_of_row.size(0), grad.size(1))
    return grad_y, grad.new_empty(0) if y is None or weights is None else torch.empty_like(weights)


_scatter = define(
    "padded_scatter(Tensor y, Tensor row_of_slot, Tensor slot_of_row, Tensor? weights) -> Tensor",
    reference=lambda y, row_of_slot, slot_of_row, weights: scatter(y, row_of_slot, weights),
    fake=lambda y, row_of_slot, slot_of_row, weights: y.new_empty(row_of_slot.size(0), y.size(1)),
    setup_context=_scatter_setup_context, backward=_scatter_backward,
)

_scatter_backward_op = define(
    "padded_scatter_backward(Tensor grad, Tensor? y, Tensor row_of_slot, Tensor slot_of_row, Tensor? weights)"
    " -> (Tensor, Tensor)",
    reference=scatter_backward, fake=_scatter_backward_fake,
)
