"""What the arguments of a layer say of gbmoe/parallel/placement.py; mirrors megablocks.layers.mpu."""

from __future__ import annotations

import torch.distributed as dist

from gbmoe.layers.arguments import Arguments
from gbmoe.parallel import groups
from gbmoe.parallel.placement import sharding


def expert_parallel_world_size(args: Arguments) -> int:
    """The number of ranks that the experts are spread over; 1 without expert parallelism. Raises ValueError on a rank that is no member
    of the group."""
    return groups.world_of(args.expert_parallel_group) if args.moe_expert_model_parallelism else 1


def expert_parallel_rank(args: Arguments) -> int:
    """This process's rank among those that the experts are spread over."""
    return dist.get_rank(args.expert_parallel_group) if args.moe_expert_model_parallelism else 0


def expert_sharding_degree(args: Arguments) -> int:
    """Into how many groups of whole experts the ranks divide them. Raises ValueError as sharding does."""
    return sharding(expert_parallel_world_size(args), args.moe_num_experts, args.ffn_hidden_size)[0]


def hidden_sharding_degree(args: Arguments) -> int:
    """Into how many shards each expert's ffn rows are divided. Raises ValueError as sharding does."""
    return sharding(expert_parallel_world_size(args), args.moe_num_experts, args.ffn_hidden_size)[1]


def experts_per_rank(args: Arguments) -> int:
    """The number of experts whose weights, or shards of them, this rank holds."""
    return args.moe_num_experts // expert_sharding_degree(args)


def features_per_rank(args: Arguments) -> int:
    """The number of ffn rows of each of these experts that this rank holds."""
    return args.ffn_hidden_size // hidden_sharding_degree(args)


def first_expert(args: Arguments) -> int:
    """The first expert of which this rank holds the weights, or a shard of them."""
    return expert_parallel_rank(args) % expert_sharding_degree(args) * experts_per_rank(args)


def first_feature(args: Arguments) -> int:
    """The first ffn row of each of these experts that this rank holds."""
    return expert_parallel_rank(args) // expert_sharding_degree(args) * features_per_rank(args)
