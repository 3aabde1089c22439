"""Megakernel: from tokens to the weighted sums of their experts, wherever these are, by the signatures of Megatron's megakernel backends.

Where GPUs of one host map each other's memory, each rank pulls its experts' rows and pushes the sums back (gbmoe/parallel/peer_experts.py).
Elsewhere rows travel by torch.distributed's all-to-all. Either way a token goes once to each rank that holds one of its experts. In a group
of one rank nothing travels, and rows are gathered for the first GEMM or in it.

Shape suffixes: T tokens of this rank, K slots a token (top-k), E experts of all ranks, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from gbmoe._checks import require
from gbmoe.compat.megatron.experts_configuration import ADAPTER
from gbmoe.compat.megatron.grouped_experts import GroupedExperts
from gbmoe.float8 import keeps_weights
from gbmoe.layers.expert_parallel_options import TRANSPORTS
from gbmoe.ops import expert_mlp
from gbmoe.ops.activations import activation_name
from gbmoe.ops.gmm import computed_dtype
from gbmoe.parallel import agreement, pass_agreement, peer_memory
from gbmoe.parallel.exchange import experts_by_exchange
from gbmoe.parallel.peer_experts import peer_experts
from gbmoe.parallel.placement import Placement
from gbmoe.plan import RoutingPlan
from gbmoe.separate_weights import StackOrList
from gbmoe.stacked_weights import stacked

# Fields with which a token may have more or fewer experts than moe_router_topk, or rows travel in other ways.
_FIELDS = {"moe_pad_expert_input_to_capacity": "no expert is padded", "moe_router_padding_for_quantization": "no expert is padded",
           "moe_expert_rank_capacity_factor": "no rank drops rows", "moe_apply_probs_on_input": "results are weighed",
           "overlap_moe_expert_parallel_comm": "dispatch, experts and combine are one call",
           "overlap_dispatch_backward_with_experts_wgrad": "dispatch, experts and combine are one call"}


class Megakernel(torch.nn.Module):
    """The routed experts of a MoE layer with their dispatch and combine. It has no parameters: those stay in `routed_experts`.

    Args:
        config: the TransformerConfig.
        ep_group: the expert-parallel group, a process group of which every rank makes its layers in the same order.
        routed_experts: this rank's GroupedExperts.
        shared_experts: None, or a module that is called with the hidden states and whose result is added.
        num_local_experts: of this rank.
        transport: "peer_memory" (ranks map each other's memory; without biases of experts), "exchange" (all-to-all), or "auto".

    Where there are several ranks, making one is collective over the group.

    Raises:
        ValueError, TypeError: naming the argument or field, what was expected and what came.
    """

    def __init__(self, *, config: Any, ep_group: Any, routed_experts: GroupedExperts, shared_experts: Any = None, num_local_experts: int,
                 transport: str = "auto"):
        super().__init__()
        require(isinstance(routed_experts, GroupedExperts), ADAPTER, "routed_experts", "GroupedExperts of gbmoe.compat.megatron",
                type(routed_experts).__name__, TypeError)
        for name, reason in _FIELDS.items():
            require(not getattr(config, name, None), ADAPTER, name, f"None or False ({reason})", getattr(config, name, None))
        parallel = routed_experts.tp_group.size()
        require(parallel == 1, ADAPTER, "expert_tensor_parallel_size", "1 (ranks of an exchange hold whole experts)", parallel)
        self.config, self.experts = config, config.num_moe_experts
        require(num_local_experts * ep_group.size() == self.experts, ADAPTER, "num_local_experts",
                f"{self.experts} experts over {ep_group.size()} ranks", num_local_experts)
        self._modules_elsewhere = (routed_experts, shared_experts)  # in a tuple, so that they are not this module's children
        self._placement = Placement(group=ep_group, world=ep_group.size(), rank=ep_group.rank(), experts=self.experts,
                                    experts_per_rank=num_local_experts, shards=1)
        require(transport in TRANSPORTS, ADAPTER, "transport", f"one of {', '.join(TRANSPORTS)}", repr(transport))
        self._transport = transport
        self._layer = 0
        if ep_group.size() > 1:
            agreement.require_same_on_all_ranks({"num_moe_experts": self.experts, "transport": transport}, ep_group, ADAPTER, "ep_group")
            self._layer = pass_agreement.next_layer(ep_group)

    def _why_exchanged(self, x_TH: torch.Tensor, options: dict[str, Any]) -> str | None:
        """None where rows are pulled from mapped memory; otherwise why not."""
        if self._transport == "exchange":
            return "transport is 'exchange'"
        if options["w1_bias"] is not None or options["w2_bias"] is not None:
            return "experts have biases"
        if activation_name(options["activation"]) is None:
            return "the activation has no kernel"
        return peer_memory.check_rows(computed_dtype(x_TH), x_TH.size(1)) or peer_memory.unavailable(self._placement.group, x_TH.device)

    def _tell_of_exchange(self, device: torch.device, reason: str) -> None:
        """Refuse to exchange rows, or agree to it with ranks that might pull theirs."""
        group = self._placement.group
        if self._transport == "peer_memory":
            peer_memory.refuse_to_exchange(ADAPTER, "transport", reason, group, device)
        if self._transport == "auto" and peer_memory.unavailable(group, device) is None:
            peer_memory.agree_to_exchange(group, device, self._layer)

    def forward(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """out[t] = sum over the experts e of token t of probs[t,e] * mlp_e(x[t]), and the shared experts' result.

        Args:
            hidden_states: [...,H]; all dimensions but the last are tokens.
            probs: [T,E], any floating dtype.
            routing_map: [T,E], bool; at most moe_router_topk experts of each token, which is not checked: any further are left out.

        Returns:
            The shape and dtype of hidden_states.
        """
        routed, shared = self._modules_elsewhere
        x_TH = hidden_states.reshape(-1, hidden_states.size(-1))
        require(probs.shape == routing_map.shape == (x_TH.size(0), self.experts), ADAPTER, "routing_map",
                f"shape [T,E] == {[x_TH.size(0), self.experts]}, as probs", list(routing_map.shape))
        chosen_TK, ids_TK = routing_map.to(torch.int8).topk(min(self.config.moe_router_topk, self.experts), dim=1)
        weights_TK = probs.gather(1, ids_TK)
        ids_TK = torch.where(chosen_TK > 0, ids_TK, -1)
        w1, w2, options = routed.of_this_call()

        def experts(x_TH, plan, weights_TK):
            return expert_mlp(x_TH, plan, w1, w2, weights_TK=weights_TK, **options)

        if self._placement.world == 1:
            out_TH = experts(x_TH, RoutingPlan.from_experts(ids_TK, self.experts, check="none"), weights_TK)
        elif (reason := self._why_exchanged(x_TH, options)) is None:
            out_TH = _over_mapped_memory(x_TH, ids_TK, weights_TK, w1, w2, self._placement, self._layer, options)
        else:
            self._tell_of_exchange(x_TH.device, reason)
            trains = any(parameter.requires_grad for parameter in routed.parameters())
            out_TH, _ = experts_by_exchange([experts], x_TH, ids_TK, weights_TK, self._placement, layer=self._layer, trains=trains,
                                            recipe=options["fp8_recipe"])
        out = out_TH.view(hidden_states.shape)
        return out if shared is None else out + shared(hidden_states)


def _over_mapped_memory(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, w1: StackOrList, w2: StackOrList,
                        where: Placement, layer: int, options: dict[str, Any]) -> torch.Tensor:
    recipe, name = options["fp8_recipe"], activation_name(options["activation"])
    assert name is not None
    one, two = (each if isinstance(each, torch.Tensor) else stacked(each) for each in (w1, w2))
    # Megatron's experts end in the mean over ranks, as other parameters do: its optimizer divides, and not this pass.
    return peer_experts(x_TH, ids_TK, weights_TK, one, two, None, name, options["engine"] if recipe is None else recipe.engine, where,
                        layer=layer, keep_weights=keeps_weights(recipe, (one, two)), layout=options["layout"],
                        gradient_sink=options["gradient_sink"])


def build_megakernel_backend(*, config: Any, ep_group: Any, routed_experts: Any, shared_experts: Any, num_local_experts: int) -> Megakernel:
    """The Megakernel of a layer, by the signature of Megatron's factory of them; the arguments are Megakernel's."""
    return Megakernel(config=config, ep_group=ep_group, routed_experts=routed_experts, shared_experts=shared_experts,
                      num_local_experts=num_local_experts)
