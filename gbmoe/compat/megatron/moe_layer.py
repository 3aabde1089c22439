"""GbmoeMoELayer: Megatron-Core's MoELayer, router, shared experts and parameters included, whose rows travel by gbmoe."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer

from gbmoe._checks import require
from gbmoe.compat.megatron.experts_configuration import ADAPTER
from gbmoe.compat.megatron.megakernel import build_megakernel_backend


class GbmoeMoELayer(MoELayer):
    """A MoELayer with GroupedExperts whose token dispatcher is left out.

    Raises:
        ValueError, TypeError: for other experts, and for fields of the configuration with which rows travel in other ways (Megakernel).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        require(not self.shared_expert_overlap, ADAPTER, "moe_shared_expert_overlap", "False (it runs within the dispatcher's steps)", True)
        require(self.config.cuda_graph_impl == "none" or not self.config.cuda_graph_modules, ADAPTER, "cuda_graph_modules",
                "none (the layer is not captured in parts)", self.config.cuda_graph_modules)
        # Megatron computes shared experts before latent projections; this layer adds them afterwards.
        self.megakernel = build_megakernel_backend(config=self.config, ep_group=self.ep_group, routed_experts=self.experts,
                                                   shared_experts=None, num_local_experts=self.num_local_experts)

    def forward(self, hidden_states: torch.Tensor, intermediate_tensors: None = None, padding_mask: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, None]:
        """(the layer's result, None). hidden_states [S,B,H], padding_mask [B,S], as in MoELayer."""
        require(intermediate_tensors is None, ADAPTER, "intermediate_tensors", "None", type(intermediate_tensors).__name__)
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            if (self.config.fp8 or self.config.fp4) and moe_layer.te_checkpoint is not None:
                # It enters the float8 context of forward again, which TransformerEngine's modules ask for, the shared experts among them.
                return moe_layer.te_checkpoint(self._layer, False, tensor_parallel.random.get_cuda_rng_tracker, self.tp_group,
                                               hidden_states, padding_mask), None
            return tensor_parallel.checkpoint(self._layer, False, hidden_states, padding_mask), None
        return self._layer(hidden_states, padding_mask), None

    def _layer(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, padding_mask)
        if self.config.moe_latent_size:
            hidden_states, _ = self.fc1_latent_proj(hidden_states)
        out = self.megakernel(hidden_states, probs, routing_map)
        if self.config.moe_latent_size:
            out, _ = self.fc2_latent_proj(out)
        return out if shared is None else out + shared
