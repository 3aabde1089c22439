"""gbmoe: the experts of a Mixture-of-Experts layer, with MegaBlocks' interface.

Importing it starts no CUDA context, builds nothing, and changes nothing in other packages.
"""

from gbmoe import _interrupted_import  # noqa: F401, I001  the first import: what follows imports torch
from gbmoe import launch as kernels  # noqa: F401  its earlier name
from gbmoe import ops
from gbmoe._version import __version__
from gbmoe.engines.multiprocessor_limit import limit_multiprocessors
from gbmoe.float8 import Float8BlockScaling
from gbmoe.layers import (
    Arguments,
    ExpertParallelOptions,
    adapter_state_dict,
    add_adapter,
    batched_load_balancing_loss,
    batched_router_zloss,
    clear_load_balancing_loss,
    clear_router_zloss,
    dMoE,
    get_load_balancing_loss,
    load_adapter_state_dict,
    merge_adapters,
    record_experts,
    remove_adapter,
    replay_experts,
    set_adapters,
    stack_experts,
    unmerge_adapters,
    unstack_experts,
    update_expert_bias,
    update_expert_bias_after,
)
from gbmoe.lora_factors import ExpertLora, LoraFactors
from gbmoe.ops import ExpertPath, expert_mlp, expert_path, gmm, grouped_mlp, padded_gather, padded_scatter
from gbmoe.ops.activations import ClampedSilu, Situ
from gbmoe.ops.gradient_sink import WeightGradientSink
from gbmoe.plan import RoutingPlan
from gbmoe.router_function import RouterFunction
from gbmoe.stacked_weights import stacked
from gbmoe.weight_layout import WeightLayout

__all__ = [
    "Arguments", "ClampedSilu", "ExpertLora", "ExpertParallelOptions", "ExpertPath", "Float8BlockScaling", "LoraFactors",
    "RouterFunction", "RoutingPlan", "Situ", "WeightGradientSink", "WeightLayout", "__version__", "adapter_state_dict", "add_adapter",
    "batched_load_balancing_loss", "batched_router_zloss", "clear_load_balancing_loss", "clear_router_zloss", "dMoE", "expert_mlp",
    "expert_path", "get_load_balancing_loss", "gmm", "grouped_mlp", "limit_multiprocessors", "load_adapter_state_dict",
    "merge_adapters", "ops", "padded_gather", "padded_scatter", "record_experts", "remove_adapter", "replay_experts", "set_adapters",
    "stack_experts", "stacked", "unmerge_adapters", "unstack_experts", "update_expert_bias", "update_expert_bias_after",
]
