"""torchtitan's GroupedExperts, RoutedExperts and MoE: parameters, configurations and formulas. The router is a softmax alone."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.config import Configurable
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher


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


class RoutedExperts(torch.nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        inner_experts: GroupedExperts.Config
        token_dispatcher: LocalTokenDispatcher.Config
        param_init: dict | None = None
        sharding_config: object | None = None

    def __init__(self, config):
        super().__init__()
        self.inner_experts = config.inner_experts.build()
        self.token_dispatcher = config.token_dispatcher.build()

    def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E):
        x_TD, scores_TK, ids_TK = (t.flatten(0, 1) for t in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
        order_N = ids_TK.flatten().argsort(stable=True)
        token_N = order_N // ids_TK.size(1)
        rows_ND = self.inner_experts(x_TD[token_N], num_local_tokens_per_expert_E)
        rows_ND = (rows_ND.float() * scores_TK.flatten()[order_N, None]).to(rows_ND.dtype)
        return torch.zeros_like(x_TD).index_add(0, token_N, rows_ND).view(x_BLD.shape)

    def parallelize(self, parallel_dims):
        self.token_dispatcher.wire_meshes(ep_mesh=parallel_dims.get_optional_mesh("ep"))


class MoE(torch.nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int = 8
        routed_experts: RoutedExperts.Config
        router: object
        load_balance_coeff: float | None = 1e-3
        shared_experts: object | None = None
        param_init: dict | None = None
        sharding_config: object | None = None

    def __init__(self, config):
        super().__init__()
        self.routed_experts = config.routed_experts.build()
        self.router = config.router.build()
        self.register_buffer("tokens_per_expert_E", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x_BLD):
        scores_BLK, ids_BLK, scores_BLE = self.router(x_BLD, None)
        counts_E = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, ids_BLK, True).sum(dim=(0, 1))
        self.tokens_per_expert_E.add_(counts_E)
        return self.routed_experts(x_BLD, scores_BLK, ids_BLK, counts_E)


class TokenChoiceTopKRouter(torch.nn.Module, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        gate: object
        top_k: int = 1
        score_func: str = "sigmoid"

    def __init__(self, config):
        super().__init__()
        self.gate, self.top_k = config.gate.build(), config.top_k

    def forward(self, x_BLD, expert_bias_E):
        scores_BLE = self.gate(x_BLD).softmax(-1)
        scores_BLK, ids_BLK = scores_BLE.topk(self.top_k, dim=-1, sorted=False)
        return scores_BLK, ids_BLK, scores_BLE
