"""A stand-in for `megablocks.backend.kernels` where there is no Triton: its gathers and scatters on gbmoe's operators.

Called from MegaBlocks' autograd functions, under its argument order. The scatters are those of
gbmoe.compat.megablocks.ops; the gathers also take weights, and the wgrads are the weights' gradients.

Shape suffixes: as in gbmoe.compat.megablocks.ops.
"""

from __future__ import annotations

import torch

from gbmoe.compat.megablocks.ops import _binned_maps, _capacity_maps, binned_scatter, padded_rows, padded_scatter, scatter
from gbmoe.ops import permute

__all__ = ["binned_gather", "binned_scatter", "binned_scatter_wgrad", "gather", "padded_gather", "padded_scatter",
           "padded_scatter_wgrad", "scatter", "scatter_wgrad"]


def padded_gather(x_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor, weights_R: torch.Tensor | None,
                  bins_E: torch.Tensor, padded_bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """Each slot's token, times its weight where there are weights: [P,H]."""
    rows = padded_rows(padded_bins_E, "padded_gather")
    return _gather(x_TH, weights_R, *_binned_maps(indices_R, bin_ids_R, bins_E, padded_bins_E, top_k, rows, "padded_gather"))


def gather(x_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor, weights_R: torch.Tensor | None,
           bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """padded_gather without padding: [R,H]."""
    return padded_gather(x_TH, indices_R, bin_ids_R, weights_R, bins_E, bins_E, top_k)


def binned_gather(x_TH: torch.Tensor, indices_R: torch.Tensor, weights_R: torch.Tensor | None, bins_E: torch.Tensor,
                  expert_capacity: int, top_k: int) -> torch.Tensor:
    """Each slot's token, times its weight where there are weights, to bins of one size: [E,C,H]."""
    out_PH = _gather(x_TH, weights_R, *_capacity_maps(indices_R, bins_E, expert_capacity, top_k, "binned_gather"))
    return out_PH.view(bins_E.numel(), expert_capacity, x_TH.size(1))


def padded_scatter_wgrad(x_PH: torch.Tensor, grad_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor,
                         bins_E: torch.Tensor, padded_bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """<x[row of a slot], grad[its token]> for every slot, in slot order: [R], dtype of x."""
    maps = _binned_maps(indices_R, bin_ids_R, bins_E, padded_bins_E, top_k, x_PH.size(0), "padded_scatter")
    return _wgrad(x_PH, grad_TH, *maps)


def scatter_wgrad(x_RH: torch.Tensor, grad_TH: torch.Tensor, indices_R: torch.Tensor, bin_ids_R: torch.Tensor,
                  bins_E: torch.Tensor, top_k: int) -> torch.Tensor:
    """padded_scatter_wgrad without padding."""
    return padded_scatter_wgrad(x_RH, grad_TH, indices_R, bin_ids_R, bins_E, bins_E, top_k)


def binned_scatter_wgrad(x_ECH: torch.Tensor, grad_TH: torch.Tensor, indices_R: torch.Tensor, bins_E: torch.Tensor,
                         top_k: int) -> torch.Tensor:
    """padded_scatter_wgrad for bins of one size; zero for dropped slots."""
    return _wgrad(x_ECH.flatten(0, 1), grad_TH, *_capacity_maps(indices_R, bins_E, x_ECH.size(1), top_k, "binned_scatter"))


def _gather(x_TH, weights_R, row_of_slot_TK, slot_of_row_P):
    scale_TK = None if weights_R is None else weights_R.view(row_of_slot_TK.shape)
    return permute.gather(x_TH, row_of_slot_TK, slot_of_row_P, scale=scale_TK, clear_behind=True)[0]


def _wgrad(x_PH, grad_TH, row_of_slot_TK, slot_of_row_P):
    like_weights_TK = x_PH.new_empty(row_of_slot_TK.shape)
    return permute.scatter_backward(grad_TH, x_PH, row_of_slot_TK, slot_of_row_P, None, None, like_weights_TK,
                                    need_rows=False)[1].flatten()
