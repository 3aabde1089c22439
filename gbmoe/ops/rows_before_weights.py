"""The experts' rows before they are weighed, for a caller that sums them itself.

Shape suffixes: T tokens, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gbmoe._define_operator import differentiable_once
from gbmoe.ops.activations import activation_name
from gbmoe.ops.expert_arguments import check_arguments, matrices
from gbmoe.ops.experts import backward_operator, forward_operator
from gbmoe.ops.gmm import computed_dtype
from gbmoe.ops.gradient_scale import scales_exactly, with_scaled_gradients
from gbmoe.ops.plan_sizes import sizes_and_engine
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout


class _RowsBeforeWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weights_T1, row_of_slot, slot_of_row, sizes, w1, w2, v1, activation, engine, scale, layout, save):
        parameters = (w1, w2, v1, None, None, None)  # without biases
        y_TH, *saved = forward_operator(x_TH, None, row_of_slot, slot_of_row, sizes, *parameters, activation, engine, save, False, False,
                                         scale, layout)
        ctx.activation, ctx.engine, ctx.scale, ctx.layout = activation, engine, scale, layout
        ctx.save_for_backward(x_TH, weights_T1, row_of_slot, slot_of_row, sizes, *parameters, *saved)
        return y_TH

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_TH):
        needs = ctx.needs_input_grad
        wanted = [*(needs[position] for position in (0, 1, 5, 6, 7)), False, False, False]
        computed = backward_operator(grad_TH, *ctx.saved_tensors, ctx.activation, ctx.engine, ctx.scale, ctx.layout, *wanted)
        dx, dweights, dw1, dw2, dv1 = (grad if wants else None for grad, wants in zip(computed[:5], wanted))
        return dx, dweights, None, None, None, dw1, dw2, dv1, None, None, None, None, None


def rows_before_weights(x_TH: torch.Tensor, plan: RoutingPlan, weights_T1: torch.Tensor, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor,
                        v1_EFH: torch.Tensor | None, activation: str | Callable, engine: str, weight_gradient_scale: float = 1,
                        layout: WeightLayout = MEGABLOCKS) -> torch.Tensor:
    """expert_mlp with one slot a token, without weighing: the caller weighs the rows where it sums them, in expert_mlp's order.

    The gradient that the caller passes back for a row must be that of the weighed row. Then every gradient has the same bits as
    expert_mlp's own; they would differ if rows were weighed and rounded before they are passed back.

    Args:
        weights_T1: the router weight of each token's slot, which gets its gradient here.
        activation: one that activation_name recognises.
        weight_gradient_scale, layout: as in expert_mlp.
    """
    of_experts = matrices(layout, w1_EFH, w2_EFH, v1_EFH)
    check_arguments(x_TH, plan, *of_experts, weights_T1)
    scale = weight_gradient_scale
    if not scales_exactly(scale, computed_dtype(x_TH)):
        w1_EFH, w2_EFH, v1_EFH = with_scaled_gradients(scale, w1_EFH, w2_EFH, v1_EFH, one_operator=True)  # type: ignore[assignment]
        scale = 1
    x_TH, w1_EFH, w2_EFH = (t.to(computed_dtype(t)) for t in (x_TH, w1_EFH, w2_EFH))
    v1_EFH = None if v1_EFH is None else v1_EFH.to(computed_dtype(v1_EFH))
    # In a Function's forward needs_input_grad says nothing of no_grad.
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TH, weights_T1, w1_EFH, w2_EFH, v1_EFH))
    sizes, resolved = sizes_and_engine(plan, x_TH, of_experts[0].shape, engine)
    return _RowsBeforeWeights.apply(x_TH, weights_T1, plan.row_of_slot_TK, plan.slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH,
                                    activation_name(activation), resolved, scale, layout.code, save)
