"""ScatterMoE (github.com/shawntan/scattermoe): Triton products that gather their rows and scatter their results."""

from __future__ import annotations

import torch

from gbmoe.cli.bench.rivals.rival import Rival, RoutedExperts, needs_cuda, not_importable, versions


class _Experts(torch.nn.Module):
    """ScatterMoE's MLP or GLUMLP. A GLU has one matrix [E,2F,H] for its first product, of which the linear half comes first, and
    [E,H,F] for the second."""

    def __init__(self, case, weights):
        from scattermoe.mlp import GLUMLP, MLP

        super().__init__()
        with torch.device("meta"):
            self.module = (GLUMLP if weights.glu else MLP)(
                input_size=case.hidden, hidden_size=case.ffn, num_experts=case.experts, top_k=case.top_k,
                activation=weights.activation)
        first = torch.cat([weights.v1_EFH, weights.w1_EFH], dim=1) if weights.glu else weights.w1_EFH
        self.module.experts.weight = torch.nn.Parameter(first)
        self.module.output_experts.weight = torch.nn.Parameter(weights.w2_EFH.transpose(1, 2).contiguous())
        self.glu = weights.glu

    def forward(self, x_TH, weights_TK, experts_TK):
        return self.module(x_TH, weights_TK, experts_TK)

    def weight_gradients(self):
        first = self.module.experts.weight.grad
        gradients = dict(zip(("v1", "w1"), first.chunk(2, dim=1))) if self.glu else {"w1": first}
        return {**gradients, "w2": self.module.output_experts.weight.grad.transpose(1, 2)}


class ScatterMoe(Rival):
    def unavailable(self, device):
        return needs_cuda(device) or not_importable("scattermoe.mlp")

    def about(self):
        return versions("scattermoe")

    def layer(self, case, weights):
        return RoutedExperts(case, weights, _Experts(case, weights))
