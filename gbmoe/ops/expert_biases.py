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


def gradients(experts: Engine, dz: GatheredRows, dh_PF: torch.Tensor, dg_PF: torch.Tensor | None, weights_TK: torch.Tensor | None,
              sizes_E: torch.Tensor, wanted: Gradients, to: WeightGradients) -> None:
    """Leave the gradients of biases that are wanted in `to`. dh (and dg), [P,F], or dh the pairs [P,2F], are those of the products."""
    if wanted.w1_bias:
        to.set_bias("w1", experts.bias_gradient(dh_PF, sizes_E))
    if wanted.v1_bias and dg_PF is not None:
        to.set_bias("v1", experts.bias_gradient(dg_PF, sizes_E))
    if wanted.w2_bias:
        to.set_bias("w2", experts.bias_gradient(dz.rows_PH(), sizes_E, _weights_of_rows(dz.slots.slot_of_row_P, weights_TK)))


def _weights_of_rows(slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """The router weight of each row, and 0 of a row without a slot."""
    if weights_TK is None:
        return (slot_of_row_P >= 0).float()
    slots = weights_TK.numel()
    weight_P = weights_TK.reshape(-1)[slot_of_row_P.clamp(0, max(slots - 1, 0)).long()]
    return torch.where((slot_of_row_P >= 0) & (slot_of_row_P < slots), weight_P, 0)


def add_to_router_gradient(experts: Engine, dz: GatheredRows, bias_EH: torch.Tensor, sizes_E: torch.Tensor, dweights_TK: torch.Tensor,
                           ) -> torch.Tensor:
    """dweights [T,K] with <bias[e], dz[row]> added for each slot that has a row."""
    rows_PH = dz.rows_PH()
    dots_PE = experts.linear(rows_PH, bias_EH.contiguous())
    ends_E = sizes_E.to(rows_PH.device, torch.int64, non_blocking=True).cumsum(0)
    row_of_slot = dz.slots.row_of_slot_TK
    row_TK = row_of_slot.clamp(min=0).long()
    expert_TK = torch.searchsorted(ends_E, row_TK, right=True).clamp(max=bias_EH.size(0) - 1)
    # A slot whose row lies after the last expert's has none.
    has_row_TK = (row_of_slot >= 0) & (row_TK < ends_E[-1])
    dot_TK = torch.where(has_row_TK, dots_PE[row_TK, expert_TK], 0)
    return (dweights_TK + dot_TK).to(dweights_TK.dtype)
