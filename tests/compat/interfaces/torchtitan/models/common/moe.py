"""torchtitan's GroupedExperts: its parameters, its configuration and its formula."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.config import Configurable


class GroupedExperts(torch.nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dim: int
        hidden_dim: int
        num_experts: int
        param_init: dict | None = None
        sharding_config: object | None = None

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.w1_EFD = torch.nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, config.dim))
        self.w2_EDF = torch.nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))
        self.w3_EFD = torch.nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, config.dim))

    def forward(self, x_RD, num_tokens_per_expert_E):
        offsets_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        x, w1, w2, w3 = (t.bfloat16() for t in (x_RD, self.w1_EFD, self.w2_EDF, self.w3_EFD))
        h_RF = F.silu(self._grouped_mm(A=x, B_t=w1.mT, offs=offsets_E)) * self._grouped_mm(A=x, B_t=w3.mT, offs=offsets_E)
        return self._grouped_mm(A=h_RF, B_t=w2.mT, offs=offsets_E).type_as(x_RD)

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)
