"""MegaBlocks (github.com/databricks/megablocks): its dMoE with grouped and with block-sparse products, and its
permutation.

Router, gathers, scatters and products are MegaBlocks' own. Its CUDA extension does not compile with CUDA 13; where it is missing,
gbmoe.compat.megablocks replaces the extension's sort, histogram and sums.

Shape suffixes: T tokens, K slots a token, R = T * K, E experts, H hidden, P padded rows.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from gbmoe._importable import is_importable
from gbmoe.cli.bench.gbmoe_itself import DroplessLayer, layer_arguments
from gbmoe.cli.bench.peers.base import Peer, Permutation, Prepared, needs_cuda, not_importable, versions

_STAND_IN = "gbmoe.compat.megablocks.extension"


def _own_extension() -> bool:
    """False also where the stand-in has taken the extension's place, so that `about` names it."""
    return is_importable("megablocks_ops") and getattr(sys.modules.get("megablocks_ops"), "__name__", None) != _STAND_IN


def _stand_in() -> None:
    """Register the stand-in for the extension where it is missing. Every process does so before it measures: one that replaces a
    crashed process has not been asked whether the peer is available."""
    if not _own_extension():
        from gbmoe.compat.megablocks import register
        register()


def _import_reason(device: torch.device) -> str | None:
    """None if MegaBlocks can be imported, otherwise the reason. A stand-in may replace its extension, but not its Triton kernels."""
    reason = needs_cuda(device) or not_importable("triton")
    if reason is None and not is_importable("megablocks"):
        reason = "megablocks is not installed"
    if reason is not None:
        return reason
    try:
        _stand_in()
    except Exception as error:
        return f"megablocks_ops is missing, and there is no stand-in: {type(error).__name__}: {error}"
    return not_importable("megablocks.layers.dmoe")


class _MegaBlocks(Peer):
    kinds = ("layer", "parallel")
    impl: str

    def about(self):
        extension = "" if _own_extension() else ", with gbmoe's stand-in for the extension megablocks_ops"
        return versions("megablocks", "stanford-stk") + extension

    def layer(self, case, weights):
        return self._layer(case, weights)

    def parallel_layer(self, case, weights, group):
        return self._layer(case, weights, moe_expert_model_parallelism=True, expert_parallel_group=group)

    def _layer(self, case, weights, **parallel):
        _stand_in()
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        # With a recent Triton, Arguments refuses 'sparse': mlp_impl is set after it, and "later" is a name that it does not check.
        arguments = Arguments(**layer_arguments(case, weights), mlp_impl="later", device=torch.device("meta"),
                              **parallel)
        arguments.mlp_impl = self.impl
        return DroplessLayer(dMoE(arguments), weights)


class MegaBlocksGrouped(_MegaBlocks):
    impl = "grouped"

    def unavailable(self, device):
        # grouped_gemm is asked for before MegaBlocks, whose stand-in would otherwise provide gbmoe.compat.grouped_gemm.
        return needs_cuda(device) or not_importable("grouped_gemm_backend", "grouped_gemm") or _import_reason(device)

    def refuses(self, case, dtype):
        return None if dtype == torch.bfloat16 else "takes bfloat16 only"


class MegaBlocksSparse(_MegaBlocks):
    impl = "sparse"

    def unavailable(self, device):
        return _import_reason(device)

    def refuses(self, case, dtype):
        if case.ffn % 128:
            return f"takes an ffn that is a multiple of 128, not {case.ffn}"
        return None if dtype in (torch.bfloat16, torch.float16) else "takes bfloat16 and float16 only"


class MegaBlocksKernels(_MegaBlocks):
    kinds = ("permutation",)

    def unavailable(self, device):
        return _import_reason(device)

    def permutation(self, ids_TK, experts, align):
        return _Permutation(ids_TK, experts, align)


class _Permutation(Permutation):
    def __init__(self, ids_TK: torch.Tensor, experts: int, align: int):
        _stand_in()
        from megablocks import ops
        from megablocks.backend import kernels

        self.ops, self.kernels = ops, kernels
        self.ids_TK, self.experts, self.align = ids_TK, experts, align
        self.maps = self._maps()
        self.rows = int(self.maps[3][-1])

    def _maps(self) -> tuple[torch.Tensor, ...]:
        """(indices [R], bin_ids [R], bins [E], padded_bins [E]), which MegaBlocks' layer computes from the router's choice."""
        ids_R = self.ids_TK.flatten().int()
        bin_ids_R, indices_R = self.ops.sort(ids_R, max((self.experts - 1).bit_length(), 1))
        counts_E = self.ops.histogram(ids_R, self.experts)
        bins_E, padded_bins_E = (self.ops.inclusive_cumsum(sizes_E, 0).view(-1)
                                 for sizes_E in (counts_E, self.ops.round_up(counts_E, self.align)))
        return indices_R, bin_ids_R, bins_E, padded_bins_E

    def plan(self):
        return Prepared(self._maps, self._row_of_slot)

    def _row_of_slot(self, maps) -> dict[str, torch.Tensor]:
        indices_R, bin_ids_R, bins_E, padded_bins_E = (each.long() for each in maps)
        padding_before_E = (padded_bins_E - bins_E).roll(1).index_fill(0, bins_E.new_zeros(1), 0)
        row_R = torch.arange(len(indices_R), dtype=torch.int64, device=indices_R.device) + padding_before_E[bin_ids_R]
        return {"row_of_slot_TK": torch.empty_like(row_R).scatter_(0, indices_R, row_R).int()}

    def padded_gather(self, x_TH):
        return Prepared(lambda: self._gather(x_TH, self.maps, None))

    def _gather(self, x_TH, maps, weights_R):
        indices_R, bin_ids_R, bins_E, padded_bins_E = maps
        top_k = self.ids_TK.size(1)
        return self.kernels.padded_gather(x_TH, indices_R, bin_ids_R, weights_R, bins_E, padded_bins_E, top_k)

    def plan_and_gather(self, x_TH):
        return Prepared(lambda: self._gather(x_TH, self._maps(), None))

    def scatter(self, y_PH, weights_TK):
        indices_R, bin_ids_R, *bins = self.maps
        return Prepared(partial(self.kernels.padded_scatter, y_PH, indices_R, bin_ids_R, weights_TK.flatten(), *bins,
                                self.ids_TK.size(1)))

    def scatter_backward(self, grad_TH, y_PH, weights_TK):
        indices_R, bin_ids_R, *bins = self.maps
        top_k, weights_R = self.ids_TK.size(1), weights_TK.flatten()
        return Prepared(
            lambda: (self._gather(grad_TH, self.maps, weights_R),
                     self.kernels.padded_scatter_wgrad(y_PH, grad_TH, indices_R, bin_ids_R, *bins, top_k)),
            lambda grads: (grads[0], grads[1].view(weights_TK.shape)))
