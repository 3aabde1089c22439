"""The layers, with MegaBlocks' names."""

from gbmoe.layers.arguments import Arguments, from_megatron
from gbmoe.layers.dmoe import ParallelDroplessMLP, dMoE
from gbmoe.layers.expert_bias import update_expert_bias, update_expert_bias_after
from gbmoe.layers.expert_parallel_options import ExpertParallelOptions
from gbmoe.layers.losses import (
    batched_load_balancing_loss,
    batched_router_zloss,
    clear_load_balancing_loss,
    clear_router_zloss,
    get_load_balancing_loss,
    save_load_balancing_loss,
)
from gbmoe.layers.replay import record_experts, replay_experts, stack_experts, unstack_experts
from gbmoe.layers.router import LearnedRouter

__all__ = [
    "Arguments", "ExpertParallelOptions", "LearnedRouter", "ParallelDroplessMLP", "batched_load_balancing_loss", "batched_router_zloss",
    "clear_load_balancing_loss", "clear_router_zloss", "dMoE", "from_megatron", "get_load_balancing_loss",
    "record_experts", "replay_experts", "save_load_balancing_loss", "stack_experts", "unstack_experts", "update_expert_bias",
    "update_expert_bias_after",
]
