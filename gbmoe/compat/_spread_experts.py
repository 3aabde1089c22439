"""Silu-gated experts in bfloat16 from tokens to their sums, on one rank or spread over those of a group: for adapters whose framework
holds the weights.

Shape suffixes: T tokens of this rank, K slots a token, S rows received, H hidden, F ffn hidden, E experts of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.float8 import Float8BlockScaling, keeps_weights
from gbmoe.layers.expert_parallel_options import TRANSPORTS
from gbmoe.ops import expert_mlp
from gbmoe.parallel import agreement, exchange, groups, pass_agreement, peer_memory
from gbmoe.parallel.peer_experts import peer_experts
from gbmoe.parallel.placement import Placement
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import WeightLayout

__all__ = ["TRANSPORTS", "SpreadExperts", "routed_experts"]

_LAYOUT = WeightLayout(down_transposed=True)


def routed_experts(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, w1_EFH: torch.Tensor, w2_EHF: torch.Tensor,
                   w3_EFH: torch.Tensor, *, engine: str = "auto", fp8_recipe: Float8BlockScaling | None = None) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * (silu(x[t] @ w1[e].T) * (x[t] @ w3[e].T)) @ w2[e].T with e = ids[t,j], by gbmoe.expert_mlp.

    Args:
        x_TH: [T,H]; the weights have its dtype.
        ids_TK: [T,K], int32 or int64.
        weights_TK: [T,K], any floating dtype.
        w1_EFH, w3_EFH: gate and up [E,F,H].
        w2_EHF: down [E,H,F].
        engine, fp8_recipe: see expert_mlp.

    Returns:
        [T,H], dtype of x.
    """
    plan = RoutingPlan.from_experts(ids_TK, w1_EFH.size(0), check="none")
    return expert_mlp(x_TH, plan, w1_EFH, w2_EHF, w3_EFH, weights_TK=weights_TK, layout=_LAYOUT, engine=engine, fp8_recipe=fp8_recipe)


class SpreadExperts:
    """routed_experts where each rank of a group holds equally many experts, in the order of ranks. Making one is collective over the
    group. So is every call, to which ranks may bring any number of tokens.

    Args:
        group: the ranks; more than one.
        experts: of all ranks, a multiple of their number.
        device_type: where tokens and weights will be.
        transport: "peer_memory" (ranks of one node map each other's memory), "exchange" (torch.distributed's all-to-all), or "auto".

    Raises:
        ValueError: on all ranks, where their arguments differ, experts do not divide evenly, or memory cannot be mapped as asked; it says
            why.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int, device_type: str, transport: str = "auto"):
        world = groups.world_of(group, "SpreadExperts", "group")
        arguments = {"experts": experts, "transport": transport, "device type": device_type}
        agreement.require_same_on_all_ranks(arguments, group, "SpreadExperts", "group")
        require(experts % world == 0, "SpreadExperts", "experts", f"a multiple of {world} ranks", experts)
        nodes = groups.nodes_of(group)
        self.where = Placement(group=group, world=world, rank=groups.rank_in(group), experts=experts, experts_per_rank=experts // world,
                               shards=1, nodes=nodes)
        device = torch.device(device_type)
        if device_type != "cpu":
            device = torch.device(device_type, torch.get_device_module(device).current_device())
        reason = "transport is 'exchange'" if transport == "exchange" else (
            "only the exchange divides ranks into nodes" if nodes is not None else peer_memory.unavailable(group, device))
        require(reason is None or transport != "peer_memory", "SpreadExperts", "transport",
                f"'auto' or 'exchange', as rows cannot be pulled from other ranks' memory: {reason}", repr(transport))
        self.maps = reason is None
        pass_agreement.make_anchor(device)
        self.layer = pass_agreement.next_layer(group)

    def __call__(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, w1_EFH: torch.Tensor, w2_EHF: torch.Tensor,
                 w3_EFH: torch.Tensor, *, engine: str = "auto", fp8_recipe: Float8BlockScaling | None = None) -> torch.Tensor:
        """As routed_experts; ids are among the experts of all ranks, and the weights those of this rank's.

        Raises:
            TypeError, ValueError: naming the argument; on all ranks, where they make passes of different layers, or in different ways.
            RuntimeError: where ranks do not come; it names them.
        """
        weights = (w1_EFH, w2_EHF, w3_EFH)
        if self.maps:
            return peer_experts(x_TH, ids_TK, weights_TK, w1_EFH, w2_EHF, w3_EFH, "silu",
                                engine if fp8_recipe is None else fp8_recipe.engine, self.where, layer=self.layer,
                                keep_weights=keeps_weights(fp8_recipe, weights), layout=_LAYOUT)

        def compute(rows_SH, plan, weights_SK):
            return expert_mlp(rows_SH, plan, *weights, weights_TK=weights_SK, layout=_LAYOUT, engine=engine, fp8_recipe=fp8_recipe)

        return exchange.experts_by_exchange([compute], x_TH, ids_TK, weights_TK, self.where, layer=self.layer,
                                            trains=any(w.requires_grad for w in weights), recipe=fp8_recipe)[0]
