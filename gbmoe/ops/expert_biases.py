"""The gradients that biases of an expert's two products bring.

    y[r] = a[r] @ w2[e] + w2_bias[e],  out = sum of weight[r] * y[r]:
    dw2_bias[e] = sum over r of e of weight[r] * dz[r],   dweight[r] += <w2_bias[e], dz[r]>,   dw1_bias[e] = sum over r of e of dh[r]

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gbmoe.engines.base import Engine, GatheredRows

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
    """Leave w2_bias's gradient in `to` if it is wanted. Returns dweights [T,K], where the router's are wanted with <bias[e], dz[row]> added
    for each slot that has a row."""
    weights_P = _weights_of_rows(dz.slots.slot_of_row_P, weights_TK) if wanted.w2_bias else None
    adds_to = dweights_TK if wanted.weights else None
    dots_P, gradient_EH = experts.bias_backward(dz, None if adds_to is None else bias_EH, sizes_E, weights_P)
    if gradient_EH is not None:
        to.set_bias("w2", gradient_EH)
    return dweights_TK if adds_to is None or dots_P is None else _added(dots_P, dz.slots.row_of_slot_TK, sizes_E, adds_to)


def _weights_of_rows(slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """The router weight of each row, and 0 of a row without a slot."""
    if weights_TK is None:
        return (slot_of_row_P >= 0).float()
    slots = weights_TK.numel()
    weight_P = weights_TK.reshape(-1)[slot_of_row_P.clamp(0, max(slots - 1, 0)).long()]
    return torch.where((slot_of_row_P >= 0) & (slot_of_row_P < slots), weight_P, 0)


def _added(dots_P: torch.Tensor, row_of_slot_TK: torch.Tensor, sizes_E: torch.Tensor, dweights_TK: torch.Tensor) -> torch.Tensor:
    """dweights with each slot's row's dot added. A slot whose row lies after the last expert's has none."""
    row_TK = row_of_slot_TK.clamp(min=0).long()
    has_row_TK = (row_of_slot_TK >= 0) & (row_TK < sizes_E.sum().to(row_TK.device, non_blocking=True))
    return (dweights_TK + torch.where(has_row_TK, dots_P[row_TK], 0)).to(dweights_TK.dtype)
