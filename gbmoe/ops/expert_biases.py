"""The gradients that biases of an expert's two products bring.

    y[r] = a[r] @ w2[e] + w2_bias[e],  out = sum of weight[r] * y[r]:
    dw2_bias[e] = sum over r of e of weight[r] * dz[r],   dweight[r] += <w2_bias[e], dz[r]>,   dw1_bias[e] = sum over r of e of dh[r]

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gbmoe import launch
from gbmoe.engines.base import RANKS_OF_BIAS, Engine, GatheredRows, device_sizes

if TYPE_CHECKING:
    from gbmoe.ops.expert_forward_backward import Gradients
    from gbmoe.weight_layout import WeightGradients


def gradients_of_up(experts: Engine, dh_PF: torch.Tensor, dg_PF: torch.Tensor | None, sizes_E: torch.Tensor, wanted: Gradients,
                    to: WeightGradients) -> None:
    """Leave the gradients of w1_bias and v1_bias that are wanted in `to`. dh (and dg), [P,F], or dh the pairs [P,2F], are the products'."""
    if wanted.w1_bias:
        to.set_bias("w1", experts.bias_gradient(dh_PF, sizes_E))
    if wanted.v1_bias and dg_PF is not None:
        to.set_bias("v1", experts.bias_gradient(dg_PF, sizes_E))


def gradients_of_down(experts: Engine, dz: GatheredRows, bias_EH: torch.Tensor, weights_TK: torch.Tensor | None, sizes_E: torch.Tensor,
                      wanted: Gradients, to: WeightGradients, dweights_TK: torch.Tensor | None) -> torch.Tensor | None:
    """Leave w2_bias's gradient in `to` if it is wanted. Returns dweights [T,K]; if the router's gradient is wanted, <bias[e], dz[row]> has
    been added for each slot that has a row, perhaps in place."""
    adds_to, weights_PB = dweights_TK if wanted.weights else None, None
    if adds_to is None and not wanted.w2_bias:
        return dweights_TK  # no row has to be gathered for it
    if wanted.w2_bias:
        weights_PB = launch.weights_in_columns(dz.slots.slot_of_row_P, weights_TK, bias_EH.dtype, RANKS_OF_BIAS)
    dots, gradient_EH = experts.bias_backward(dz, None if adds_to is None else bias_EH, sizes_E, weights_PB)
    if gradient_EH is not None:
        to.set_bias("w2", gradient_EH)
    if adds_to is None or dots is None:
        return dweights_TK
    return launch.add_dots(dots, dz.slots, device_sizes(sizes_E, dots.device), adds_to)
