"""transformers' own implementations of experts, in the experts of its Mixtral: the eager loop, batched_mm and grouped_mm; and gbmoe's."""

from __future__ import annotations

import torch

from gbmoe.cli.bench.rivals.rival import Rival, RoutedExperts, not_importable, versions

_MODULE = "transformers.models.mixtral.modeling_mixtral"


class _Experts(torch.nn.Module):
    """MixtralExperts with gbmoe's weights: gate and up are one matrix [E,2F,H], down is [E,H,F]."""

    def __init__(self, case, weights, implementation):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(hidden_size=case.hidden, intermediate_size=case.ffn, num_local_experts=case.experts,
                               num_experts_per_tok=case.top_k, hidden_act="silu")
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.module = MixtralExperts(config)
        self.module.gate_up_proj = torch.nn.Parameter(torch.cat([weights.w1_EFH, weights.v1_EFH], dim=1))
        self.module.down_proj = torch.nn.Parameter(weights.w2_EFH.transpose(1, 2).contiguous())

    def forward(self, x_TH, weights_TK, experts_TK):
        return self.module(x_TH, experts_TK, weights_TK)

    def weight_gradients(self):
        w1_EFH, v1_EFH = self.module.gate_up_proj.grad.chunk(2, dim=1)
        return {"w1": w1_EFH, "v1": v1_EFH, "w2": self.module.down_proj.grad.transpose(1, 2)}


class _Transformers(Rival):
    implementation: str

    def unavailable(self, device):
        reason = not_importable(_MODULE)
        if reason is None and self.implementation != "eager":
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
            if self.implementation not in ALL_EXPERTS_FUNCTIONS:
                reason = f"{versions('transformers')} has no {self.implementation}"
        return reason

    def about(self):
        return versions("transformers")

    def refuses(self, case, dtype):
        return None if case.mlp_type == "glu" else "Mixtral's experts are gated"

    def layer(self, case, weights):
        return RoutedExperts(case, weights, _Experts(case, weights, self.implementation))


class Eager(_Transformers):
    implementation = "eager"


class BatchedMm(_Transformers):
    implementation = "batched_mm"


class GroupedMm(_Transformers):
    implementation = "grouped_mm"


class Gbmoe(_Transformers):
    """gbmoe as transformers calls it, on weights as transformers stores them."""
    implementation = "gbmoe"

    def unavailable(self, device):
        reason = not_importable(_MODULE)
        if reason is None:
            from gbmoe.compat import transformers
            try:
                transformers.register()
            except ImportError as error:
                reason = str(error)
        return reason
