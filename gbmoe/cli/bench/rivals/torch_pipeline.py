"""torch's own grouped GEMM in a layer of plain PyTorch, eager and with torch.compile."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gbmoe.cli.bench.rivals.rival import Rival, RoutedExperts, SeparateWeights, combine, needs_cuda, sorted_slots


class _Experts(SeparateWeights):
    def forward(self, x_TH, weights_TK, experts_TK):
        order_R, ends_E = sorted_slots(experts_TK, self.w1.size(0))
        x_RH = x_TH[order_R // weights_TK.size(1)]
        a_RF = self.activation(F.grouped_mm(x_RH, self.w1.transpose(1, 2), offs=ends_E))
        if self.v1 is not None:
            a_RF = a_RF * F.grouped_mm(x_RH, self.v1.transpose(1, 2), offs=ends_E)
        return combine(F.grouped_mm(a_RF, self.w2, offs=ends_E), order_R, weights_TK)


class TorchGrouped(Rival):
    def unavailable(self, device):
        return None if hasattr(F, "grouped_mm") else f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"

    def about(self):
        return f"torch {torch.__version__}"

    def layer(self, case, weights):
        return RoutedExperts(case, weights, _Experts(weights))


class TorchGroupedCompiled(TorchGrouped):
    def unavailable(self, device):
        # For a CPU, compiling would take longer than all other measurements together.
        return super().unavailable(device) or needs_cuda(device)

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        layer.experts.compile(dynamic=False)
        return layer
