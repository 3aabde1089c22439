"""The layers, with MegaBlocks' names."""

from gbmoe.layers.arguments import Arguments, from_megatron
from gbmoe.layers.dmoe import ParallelDroplessMLP, dMoE
from gbmoe.layers.expert_bias import update_expert_bias, update_expert_bias_after
from gbmoe.layers.expert_parallel_options import ExpertParallelOptions
from gbmoe.layers.lora_adapters import (
    adapter_state_dict,
    add_adapter,
    load_adapter_state_dict,
    merge_adapters,
    remove_adapter,
    set_adapters,
    unmerge_adapters,
)
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
    "Arguments", "ExpertParallelOptions", "LearnedRouter", "ParallelDroplessMLP", "adapter_state_dict", "add_adapter",
    "batched_load_balancing_loss", "batched_router_zloss", "clear_load_balancing_loss", "clear_router_zloss", "dMoE", "from_megatron",
    "get_load_balancing_loss", "load_adapter_state_dict", "merge_adapters", "record_experts", "remove_adapter", "replay_experts",
    "save_load_balancing_loss", "set_adapters", "stack_experts", "unmerge_adapters", "unstack_experts", "update_expert_bias",
    "update_expert_bias_after",
]
