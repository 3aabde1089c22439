"""MegaBlocks' expert parallelism and its permutation; gbmoe/cli/bench/rivals/megablocks.py has its layers.

Shape suffixes: T tokens, K slots a token, R = T * K, E experts, H hidden, P padded rows.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.rivals.kinds import ParallelRival, Permutation, PermutationRival
from gbmoe.cli.bench.rivals.megablocks import MegaBlocks, MegaBlocksGrouped, import_reason, stand_in
from gbmoe.cli.bench.rivals.rival import Prepared


class ParallelMegaBlocks(MegaBlocksGrouped, ParallelRival):
    """MegaBlocks' dMoE with grouped products, on one rank and over several."""

    kinds = ("layer", "parallel")

    def parallel_layer(self, case, weights, group):
        return self.layer(case, weights, moe_expert_model_parallelism=True, expert_parallel_group=group)


class MegaBlocksKernels(MegaBlocks, PermutationRival):
    """MegaBlocks' permutation alone."""

    kinds = ("permutation",)

    def unavailable(self, device):
        return import_reason(device)

    def permutation(self, ids_TK, experts, align):
        return _Permutation(ids_TK, experts, align)


class _Permutation(Permutation):
    def __init__(self, ids_TK: torch.Tensor, experts: int, align: int):
        stand_in()
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
