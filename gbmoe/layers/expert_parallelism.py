"""Experts spread over the ranks of a group: how a layer's rows get to them and back (gbmoe.parallel).

Shape suffixes: T tokens, K slots a token, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe._define_operator import may_be_transformed, refuse_jit_tracing
from gbmoe._version import __version__
from gbmoe.layers import expert_parallel_options, mpu
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.expert_weights import ExpertWeights, GroupedExperts
from gbmoe.layers.same_activation import require_same_activation
from gbmoe.ops.activations import activation_name
from gbmoe.ops.gmm import computed_dtype
from gbmoe.parallel import agreement, automatic_chunks, exchange, groups, pass_agreement, peer_memory, uncompiled
from gbmoe.parallel.peer_experts import peer_experts
from gbmoe.parallel.placement import Placement, sharding
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import MEGABLOCKS

# The arguments that must be the same on all ranks, as activation_fn must be the same function. `engine` and `mlp_impl` may differ.
_SAME = ("hidden_size", "ffn_hidden_size", "moe_num_experts", "moe_top_k", "mlp_type", "bias", "dtype", *expert_parallel_options.FLAT_NAMES)


class Prepared(NamedTuple):
    """What ranks have agreed about when a layer was made.

    Attributes:
        layer: the layer's number in the group, by which ranks tell whether they are in the same layer; 0 where nobody has counted.
        maps: whether all ranks can compute with rows that they pull from each other's memory; None where they have not asked.
        device_type: of the memory that they asked about for `maps`; None where it cannot be mapped on the device on which the layer was
            made, "meta" for example. They ask about that of another type of device at the first call with tokens there.
    """

    layer: int = 0
    maps: bool | None = None
    device_type: str | None = None


UNPREPARED = Prepared()


def prepare(args: Arguments) -> Prepared:
    """Compare the ranks' arguments and make the process groups of nodes. A layer calls it at construction; collective over the group.

    Does nothing without expert parallelism, in a group of one rank, and where torch.distributed is not initialised.

    Raises:
        ValueError: on all ranks; it names the arguments that differ, and which ranks have which. On a rank that is no member of the
            group.
    """
    if not args.moe_expert_model_parallelism or not dist.is_initialized() or mpu.expert_parallel_world_size(args) == 1:
        return Prepared()
    values: dict[str, Any] = {name: getattr(args, name) for name in _SAME}
    recipe = args.fp8_recipe and dataclasses.replace(args.fp8_recipe, keep_weights=True)  # of which results do not depend
    values["dtype"], values["fp8_recipe"] = str(args.dtype), str(recipe)
    values["weight_layout"] = (args.weight_layout or MEGABLOCKS).code
    values.update({"device type": torch.device(args.device).type, "gbmoe's version": __version__})
    agreement.require_same_on_all_ranks(values, args.expert_parallel_group)
    placement(args)
    require_same_activation(args)
    maps = _all_map(args)
    pass_agreement.make_anchor(torch.device(args.device))
    layer, device_type = pass_agreement.next_layer(args.expert_parallel_group), torch.device(args.device).type
    return Prepared(layer, maps, device_type if device_type in peer_memory.MAPPERS else None)


def _all_map(args: Arguments) -> bool:
    """Whether the ranks' implementations and activations can all compute with pulled rows, and their memory can be mapped, if there is any
    on the device where the layer is made. Collective."""
    transport, group, device = args.expert_parallel.transport, args.expert_parallel_group, torch.device(args.device)
    never = transport == "exchange" or _why_exchange(args, placement(args)) is not None
    if never or (device.type in peer_memory.MAPPERS and peer_memory.unavailable(group, device) is not None):
        return transport == "peer_memory"  # the first call says why it cannot be
    mine = args.mlp_impl == "gbmoe" and activation_name(args.activation_fn) is not None
    alike = agreement.of_all_ranks_unless_alike(mine, group, "choosing a transport") is None
    require((mine and alike) or transport == "auto", "Arguments", "expert_parallel_transport",
            "'auto' or 'exchange' where a rank has another mlp_impl, or an activation without a kernel", repr(transport))
    return mine and alike


def _for_tokens_on(device: torch.device, prepared: Prepared, args: Arguments, where: Placement) -> Prepared:
    """What construction would have found out if the layer had been made where its tokens are. Collective at the first call with tokens
    on another type of device."""
    if not prepared.maps or device.type == prepared.device_type or expert_parallel_options.of(args).transport != "auto":
        return prepared
    if device.type not in peer_memory.MAPPERS:
        return prepared._replace(maps=False)
    unavailable = uncompiled.unavailable if torch.compiler.is_compiling() else peer_memory.unavailable
    return prepared._replace(maps=unavailable(where.group, device) is None)


def placement(args: Arguments) -> Placement:
    """Which rank holds which experts. `args` may be MegaBlocks' own Arguments, which lack gbmoe's additional fields."""
    group, spread, experts = args.expert_parallel_group, args.moe_expert_model_parallelism, args.moe_num_experts
    if spread and not torch.compiler.is_compiling():  # in whose graphs a group is known by its name
        group = groups.whole(group)
    world = groups.world_of(group) if spread else 1
    degree, shards = sharding(world, experts, args.ffn_hidden_size)
    experts_per_rank, options = experts // degree, expert_parallel_options.of(args)
    if shards > 1:
        require(not options.exact, "Arguments", "expert_parallel_exact",
                "False where ranks share an expert (more ranks than experts), as each rank rounds its part of the expert's sum",
                options.exact)
        require(not options.shadows, "Arguments", "expert_parallel_shadows",
                "0 where ranks share an expert (more ranks than experts)", options.shadows)
        require(not options.loans, "Arguments", "expert_parallel_loans",
                "0 where ranks share an expert (more ranks than experts)", options.loans)
    return Placement(
        group=group, world=world, rank=groups.rank_in(group) if spread else 0, experts=experts, experts_per_rank=experts_per_rank,
        shards=shards,
        nodes=None if options.exact else groups.nodes_of(group, options.ranks_per_node),
        chunks=1 if options.exact else min(options.chunks or 1, experts_per_rank),
        exact=options.exact, rows=options.rows, loans=options.loans)


def maps_memory(experts: ExpertWeights, x_TH: torch.Tensor, weights_TK: torch.Tensor, args: Arguments, where: Placement,
                prepared: Prepared) -> bool:
    """Whether rows are pulled from memory that the ranks map from each other; otherwise they are exchanged.

    All ranks decide alike: by their arguments, which are the same, and by what construction found out about the ranks' memory.

    Raises:
        ValueError: where args.expert_parallel_transport asks for mapped memory and it cannot be used; it says why.
    """
    transport = expert_parallel_options.of(args).transport
    if transport == "exchange" or prepared.maps is False or (prepared.maps is None and torch.compiler.is_compiling()):
        return False
    reason = _why_no_peer_memory(experts, x_TH, weights_TK, args, where)
    if reason is not None and transport != "auto":
        peer_memory.refuse_to_exchange("Arguments", "expert_parallel_transport", reason, where.group, x_TH.device)
    return reason is None


def _why_no_peer_memory(experts, x_TH, weights_TK, args, where) -> str | None:
    if not isinstance(experts, GroupedExperts):
        return f"mlp_impl {args.mlp_impl!r} is not computed by gbmoe's grouped engines"
    if experts.hooks_set_weights():
        return "hooks compute the experts' weights (pruning, the older weight_norm) only where the module is called"
    if activation_name(args.activation_fn) is None:
        return "gbmoe has no kernel for the activation"
    if weights_TK.dtype == torch.float64:
        return "the router weights are float64"
    reason = _why_exchange(args, where) or peer_memory.check_rows(x_TH.dtype, x_TH.size(1))
    if reason is not None or torch.compiler.is_compiling():  # construction has asked about the memory
        return reason
    return peer_memory.unavailable(where.group, x_TH.device)


def _why_exchange(args, where: Placement) -> str | None:
    """None, or which of the arguments, the same on all ranks, only the exchange can do."""
    if expert_parallel_options.of(args).shadows:
        return "only the exchange copies experts to all ranks (expert_parallel_shadows)"
    if where.chunks > 1 or where.nodes is not None:
        return "only the exchange divides experts into chunks and ranks into nodes"
    return None


def parallel_experts(experts: ExpertWeights, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor,
                     args: Arguments, meanwhile: Callable[[], None] | None = None, prepared: Prepared = UNPREPARED,
                     counts: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the layer with experts spread over args.expert_parallel_group; mirrors ParallelMLP.parallel_forward_once.

    Ranks of one node that map each other's memory pull rows from it and push sums back; others exchange them. The host waits for the
    device once, for the number of rows, unless args.expert_parallel_rows bounds it. `meanwhile` is called once, before that wait, and
    may start work for the device. `prepared` is what `prepare` returned for the layer.

    Returns:
        out [T,H] and tokens_per_expert [all experts], int32, of this rank's tokens; without `counts` it may be None.
    """
    refuse_jit_tracing("dMoE with experts spread over ranks")
    where = placement(args)
    x_TH = x_TH.to(computed_dtype(x_TH))  # in which rows travel
    prepared = _for_tokens_on(x_TH.device, prepared, args, where)
    if maps_memory(experts, x_TH, weights_TK, args, where, prepared):
        counts_E = RoutingPlan.from_experts(experts_TK, where.experts, check="none").counts_E if counts else None
        return _experts_by_mapped_memory(experts, x_TH, experts_TK, weights_TK, args, where, meanwhile, prepared.layer), counts_E
    if prepared.maps:
        peer_memory.agree_to_exchange(args.expert_parallel_group, x_TH.device, prepared.layer)
    if meanwhile is not None:
        meanwhile()
    trains = _may_train(experts, args)
    if where.exact:
        rows = experts.rows_before_weights()
        return uncompiled.exact_experts_by_exchange(rows or experts, x_TH, experts_TK, weights_TK, where, weighs_later=rows is not None,
                                                   layer=prepared.layer, trains=trains, recipe=_recipe(experts))
    return _experts_by_exchange(experts, x_TH, experts_TK, weights_TK, args, where, prepared.layer, trains)


def _experts_by_mapped_memory(experts, x_TH, experts_TK, weights_TK, args, where, meanwhile, layer) -> torch.Tensor:
    """out [T,H] with rows that are pulled from other ranks' memory."""
    (w1, w2, v1), scale, keep_weights = experts.weights_of_pass(x_TH.dtype)
    own = experts.args  # `args` may be MegaBlocks'
    return peer_experts(x_TH, experts_TK, weights_TK, w1, w2, v1, str(activation_name(args.activation_fn)), own.experts_engine, where,
                        meanwhile, scale, layer=layer, keep_weights=keep_weights, keep_gathered_rows=own.keep_gathered_rows,
                        layout=experts.layout)


def _may_train(experts: torch.nn.Module, args: Arguments) -> bool:
    """Whether computing the experts may give gradients to anything but tokens and router weights: to their parameters, or to what an
    activation holds that nobody can ask."""
    if any([parameter is not None and parameter.requires_grad for parameter in experts._parameters.values()]):  # the usual case
        return True
    activation = args.activation_fn
    parts = [experts, *([activation] if isinstance(activation, torch.nn.Module) else [])]
    if any(p.requires_grad for part in parts for p in part.parameters()):
        return True
    return not isinstance(activation, torch.nn.Module) and activation_name(activation) is None


def _experts_by_exchange(experts, x_TH, experts_TK, weights_TK, args, where, layer, trains):
    """(out [T,H], tokens_per_expert) by torch.distributed's all-to-all."""
    matrices, options = 2 if args.mlp_type == "mlp" else 3, expert_parallel_options.of(args)
    if not options.chunks:
        where = dataclasses.replace(where, chunks=automatic_chunks.choose(
            where, x_TH.size(0), args.hidden_size, args.ffn_hidden_size, args.moe_top_k, matrices, x_TH.dtype, x_TH.device))
    shadows = options.shadows
    if shadows and where.world > 1:
        return uncompiled.shadowed_experts_by_exchange(
            experts.in_chunks, x_TH, experts_TK, weights_TK, where, most=shadows,
            expert_elements=matrices * args.hidden_size * args.ffn_hidden_size, layer=layer, trains=trains, recipe=_recipe(experts))
    if where.chunks == 1:
        chunks = [experts]
    else:
        chunks = experts.in_chunks([where.bounds(chunk) for chunk in range(where.chunks)])
    scaled = _over_scaled_rows(experts, x_TH, weights_TK, where)
    return exchange.experts_by_exchange(chunks, x_TH, experts_TK, weights_TK, where, layer=layer, trains=trains,
                                        recipe=_recipe(experts), scaled=scaled)


def _recipe(experts):
    """The experts' recipe of float8, or None; MegaBlocks' own Arguments may lack the field."""
    return getattr(experts.args, "fp8_recipe", None)


def _over_scaled_rows(experts, x_TH, weights_TK, where: Placement):
    """The experts over rows that travel in e4m3, or None where this rank computes with others: without a recipe, in parts, with an
    activation that has no kernel, and where a compiler traces one graph."""
    args = experts.args
    if not isinstance(experts, GroupedExperts) or args.fp8_recipe is None or torch.compiler.is_compiling() or may_be_transformed():
        return None
    if x_TH.element_size() != 2 or weights_TK.dtype == torch.float64 or activation_name(args.activation_fn) is None:
        return None
    if where.chunks > 1 or where.nodes is not None:
        return None
    return lambda over, x_TH, weights_TK: experts(x_TH, None, weights_TK, over=over)

