"""grouped_gemm (github.com/tgale96/grouped_gemm) in a layer of plain PyTorch, and its product alone."""

from __future__ import annotations

from functools import partial

import torch

from gbmoe.cli.bench.rivals.rival import (
    Prepared,
    Rival,
    RoutedExperts,
    SeparateWeights,
    combine,
    needs_cuda,
    not_importable,
    sorted_slots,
    versions,
)


class _Experts(SeparateWeights):
    def forward(self, x_TH, weights_TK, experts_TK):
        from grouped_gemm.ops import gmm

        order_R, ends_E = sorted_slots(experts_TK, self.w1.size(0))
        sizes_E = ends_E.long().diff(prepend=ends_E.new_zeros(1)).cpu()
        x_RH = x_TH[order_R // weights_TK.size(1)]
        a_RF = self.activation(gmm(x_RH, self.w1, sizes_E, trans_b=True))
        if self.v1 is not None:
            a_RF = a_RF * gmm(x_RH, self.v1, sizes_E, trans_b=True)
        return combine(gmm(a_RF, self.w2, sizes_E), order_R, weights_TK)


class GroupedGemm(Rival):
    kinds = ("layer", "product")

    def unavailable(self, device):
        # The extension is asked for, too: under the package's name gbmoe.compat.grouped_gemm may be registered.
        return needs_cuda(device) or not_importable("grouped_gemm_backend", "grouped_gemm")

    def about(self):
        return versions("grouped_gemm")

    def refuses(self, case, dtype):
        return None if dtype == torch.bfloat16 else "takes bfloat16 only"

    def layer(self, case, weights):
        return RoutedExperts(case, weights, _Experts(weights))

    def product(self, a, b, sizes, trans_a):
        from grouped_gemm import backend

        return Prepared(partial(backend.gmm, a, b, torch.tensor(sizes, dtype=torch.int64, device="cpu"), trans_a=trans_a))
