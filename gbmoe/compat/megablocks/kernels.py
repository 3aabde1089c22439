"""A stand-in for `megablocks.backend.kernels` where there is no Triton: its gathers and scatters on gbmoe's operators.

MegaBlocks' autograd functions call these, so the order of arguments is theirs. The scatters are those of
gbmoe.compat.megablocks.ops; the gathers also take weights, and the functions named wgrad compute the weights' gradients.

Shape suffixes: as in gbmoe.compat.megablocks.ops.
"""

from __future__ import annotations

import torch

from gbmoe import launch
from gbmoe.compat.megablocks.ops import (
    binned_scatter,
    padded_rows,
    padded_scatter,
    scatter,
    slot_map_of_bins,
    slot_map_of_capacity,
)
from gbmoe.slot_map import SlotMap

__all__ = ["binned_gather", "binned_scatter", "binned_scatter_wgrad", "gather", "padded_gather", "padded_scatter",
           "padded_scatter_wgrad", "scatter", "scatter_wgrad"]


def padded_gather(x_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor, weights_R: torch.Tensor | None,
                  bins_E: torch.Tensor, padded_bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """Each slot's token, times its weight where there are weights: [P,H]."""
    slots = slot_map_of_bins("padded_gather", indices_R, bin_ids=bin_ids_R, bins=bins_E, padded_bins=padded_bins_E, top_k=top_k,
                             rows=padded_rows(padded_bins_E, "padded_gather"))
    return _gather(x_TH, slots, weights_R)


def gather(x_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor, weights_R: torch.Tensor | None,
           bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """padded_gather without padding: [R,H]."""
    return padded_gather(x_TH, indices_R, bin_ids_R, weights_R, bins_E, bins_E, top_k)


def binned_gather(x_TH: torch.Tensor, indices_R: torch.Tensor, weights_R: torch.Tensor | None, bins_E: torch.Tensor,
                  expert_capacity: int, top_k: int) -> torch.Tensor:
    """Each slot's token, times its weight where there are weights, to bins of one size: [E,C,H]."""
    slots = slot_map_of_capacity("binned_gather", indices_R, bins=bins_E, capacity=expert_capacity, top_k=top_k)
    out_PH = _gather(x_TH, slots, weights_R)
    return out_PH.view(bins_E.numel(), expert_capacity, x_TH.size(1))


def padded_scatter_wgrad(x_PH: torch.Tensor, grad_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor,
                         bins_E: torch.Tensor, padded_bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """<x[row of a slot], grad[its token]> for every slot, in slot order: [R], dtype of x."""
    slots = slot_map_of_bins("padded_scatter", indices_R, bin_ids=bin_ids_R, bins=bins_E, padded_bins=padded_bins_E, top_k=top_k,
                             rows=x_PH.size(0))
    return _weights_gradient(x_PH, grad_TH, slots)


def scatter_wgrad(x_RH: torch.Tensor, grad_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor,
                  bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """padded_scatter_wgrad without padding."""
    return padded_scatter_wgrad(x_RH, grad_TH, indices_R, bin_ids_R, bins_E, bins_E, top_k)


def binned_scatter_wgrad(x_ECH: torch.Tensor, grad_TH: torch.Tensor, indices_R: torch.Tensor, bins_E: torch.Tensor,
                         top_k: int) -> torch.Tensor:
    """padded_scatter_wgrad for bins of one size; zero for dropped slots."""
    slots = slot_map_of_capacity("binned_scatter", indices_R, bins=bins_E, capacity=x_ECH.size(1), top_k=top_k)
    return _weights_gradient(x_ECH.flatten(0, 1), grad_TH, slots)


def _gather(x_TH, slots: SlotMap, weights_R):
    scale_TK = None if weights_R is None else weights_R.view(slots.row_of_slot_TK.shape)
    return launch.gather(x_TH, slots, scale=scale_TK, clear_behind=True)[0]


def _weights_gradient(x_PH, grad_TH, slots: SlotMap):
    like_weights_TK = x_PH.new_empty(slots.row_of_slot_TK.shape)
    return launch.scatter_backward(grad_TH, x_PH, slots, weights=like_weights_TK, need_rows=False)[1].flatten()
