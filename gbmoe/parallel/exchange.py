"""The experts of a group of ranks, by all-to-all: rows go to the ranks that hold their experts; one sum a token and rank comes back.

A token's row travels once to every rank that holds any of its experts, with the token's ids and router weights. That rank computes
the weighted sum of its experts as a layer of its own would, and sends one row back; the token's rank adds these in the order of
ranks, in float32 (float64 for float64), and rounds once. Both ways are built of padded_gather and padded_scatter with a
RoutingPlan whose "experts" are ranks, so that the gradient of either way is the other.

Over several nodes a row travels once to every node that needs it, to the rank with the same position in that node, which hands it on
once to every rank of the node that needs it. Sums come back the same way, rounded once on each trip. With chunks, each rank's experts
are divided into that many groups, and the rows of one chunk can travel while the chunk before it computes, where multiprocessors are left
for that; a row then travels once to every chunk of every rank that needs it.

A destination is a rank or, on the trip between nodes, a node.

Shape suffixes: T tokens, K slots a token, N destinations that a token may have, W ranks, S rows received, H hidden, X elements of a
message (gbmoe.parallel.row_counts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops.gmm import computed_dtype
from gbmoe.parallel import pass_agreement
from gbmoe.parallel.dispatch_combine import Trip, first_rows_of, plan_of_destinations
from gbmoe.parallel.groups import Nodes
from gbmoe.parallel.pass_agreement import joined
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.row_counts import exchanged_counts, exchanged_counts_by_node, message_of
from gbmoe.parallel.scaled_exchange import ScaledExchange
from gbmoe.plan import RoutingPlan

# The experts of one chunk: (rows [S,H], their plan, router weights [S,K] or None) -> weighted sums [S,H].
Compute = Callable[[torch.Tensor, RoutingPlan, "torch.Tensor | None"], torch.Tensor]

# The experts over rows in e4m3: (the exchange, x [T,H], router weights [T,K]) -> weighted sums [T,H].
Scaled = Callable[[ScaledExchange, torch.Tensor, torch.Tensor], torch.Tensor]


def experts_by_exchange(chunks: Sequence[Compute], x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor,
                        p: Placement, *, layer: int = 0, trains: bool = True, recipe: Float8BlockScaling | None = None,
                        scaled: Scaled | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of each token's experts, wherever they are. Every rank of the group must call it, with any number of tokens.

    Waits for the device once, for the numbers of rows. Differentiable in x, in the weights, and in whatever the functions of `chunks`
    differentiate in.

    Args:
        chunks: p.chunks functions, each of which computes one chunk of this rank's experts.
        x_TH: this rank's tokens.
        experts_TK: the tokens' experts, ids among all experts, int32 or int64; an id of no expert drops its slot.
        weights_TK: the tokens' router weights.
        p: which rank holds which experts.
        layer: the layer's number, the same on all ranks (gbmoe.parallel.pass_agreement.next_layer), or 0.
        trains: whether the functions of `chunks` may differentiate in anything of their own.
        recipe: the recipe of float8 by which the functions of `chunks` compute, the same on all ranks.
        scaled: computes what `chunks` does, which is one chunk then, from rows that travel in e4m3; where every rank has it and none needs
            rows in 16 bits, as gradients of weights do unless the recipe has float8_dispatch. Not over several nodes.

    Returns:
        out [T,H] and tokens_per_expert [all experts], int32, of this rank's tokens.

    Raises:
        ValueError: on all ranks, where they make passes of different layers, or in different ways; it says which ranks differ in what.
        RuntimeError: where an exchange fails; it names the ranks that are missing.
    """
    x_TH = as_it_travels("experts_by_exchange", x_TH, experts_TK, weights_TK)
    plan = RoutingPlan.from_experts(experts_TK, p.experts, check="none")
    ids_TK = experts_TK.int().contiguous()
    key_TN = p.keys(ids_TK)
    to_ranks = plan_of_destinations(key_TN, p.world, p.chunks)
    in_16_bits = scaled is None or recipe is None or (torch.is_grad_enabled() and trains and not recipe.float8_dispatch)
    header_A = pass_agreement.header("exchange", layer, x_TH, weights_TK, trains, p.group, None if recipe is None else recipe.engine,
                                     in_16_bits)
    message_WX = message_of(header_A, to_ranks, plan, p)
    nodes, kept = p.nodes, p.chunks - 1 if p.shadows else None
    if nodes is None:
        counts = exchanged_counts(message_WX, p)
        trip = Trip(first_rows_of(to_ranks, total_rows(counts.sends)).slot_map, counts.sends, counts.receives, p.group, kept)
    else:
        to_nodes = plan_of_destinations(keys_of_nodes(key_TN, p, nodes), nodes.count, p.chunks)
        counts = exchanged_counts_by_node(message_WX, to_nodes, p, nodes)
        trip = Trip(first_rows_of(to_nodes, total_rows(counts.sends)).slot_map, counts.sends, counts.receives, nodes.across, kept)

    needs = counts.needs
    if scaled is not None and recipe is not None and not needs.in_16_bits:
        over = ScaledExchange(trip, ids_TK, p.first_expert, counts.sizes, needs, recipe)
        return scaled(over, x_TH, weights_TK), plan.counts_E
    slots, rows = trip.slots(ids_TK, joined(weights_TK, needs.weights)), trip.rows(joined(x_TH, needs.x))
    coming, going = [trip.send(0, rows[0])], []
    for chunk, compute in enumerate(chunks):
        if chunk + 1 < len(chunks):
            coming.append(trip.send(chunk + 1, rows[chunk + 1]))  # while this chunk computes
        weights_SK, ids_SK = slots[chunk]
        if nodes is None or counts.inside is None or chunk == kept:
            sums_SH = joined(_compute(compute, chunk, coming[chunk], ids_SK, weights_SK, counts, p), needs.any)
        else:
            sends, receives = ([by_chunk[chunk]] for by_chunk in counts.inside)
            to_ranks = plan_of_destinations(_of_ranks_inside(ids_SK, chunk, p, nodes), nodes.size, 1)
            inner = Trip(first_rows_of(to_ranks, total_rows(sends)).slot_map, sends, receives, nodes.inside)
            (weights_SK, ids_SK), = inner.slots(ids_SK, weights_SK)
            handed = inner.send(0, inner.rows(coming[chunk].wait())[0])
            sums_SH = joined(_compute(compute, chunk, handed, ids_SK, weights_SK, counts, p), needs.any)  # before its inner trip
            sums_SH = inner.sums([inner.send_back(0, sums_SH).wait()])
        going.append(trip.send_back(chunk, sums_SH))
    return trip.sums([sums.wait() for sums in going]), plan.counts_E


def as_it_travels(function: str, x_TH, experts_TK, weights_TK, needs_weights: bool = True) -> torch.Tensor:
    """x in the dtype in which the experts compute, autocast's where that is on: in it rows travel and sums come back, and the pass's header
    names it. TypeError or ValueError for what cannot travel. All later steps take what was checked here, or built here."""
    require_tensor(experts_TK, function, "experts", rank=2, dtypes=(torch.int32, torch.int64))
    require_tensor(x_TH, function, "x", rank=2, dtypes=FLOATING, device=experts_TK.device)
    if needs_weights or weights_TK is not None:
        require_tensor(weights_TK, function, "weights", rank=2, dtypes=FLOATING, device=experts_TK.device)
    if x_TH.size(0) != experts_TK.size(0):
        require(False, function, "x", lambda: f"{experts_TK.size(0)} rows, as experts has", x_TH.size(0))
    if weights_TK is not None and weights_TK.shape != experts_TK.shape:
        require(False, function, "weights", lambda: f"shape {list(experts_TK.shape)}, one a slot", list(weights_TK.shape))
    return x_TH.to(computed_dtype(x_TH))


def total_rows(by_chunk: list[list[int]]) -> int:
    return sum(sum(rows) for rows in by_chunk)


def _compute(compute, chunk, rows, ids_SK, weights_SK, counts, p) -> torch.Tensor:
    """The weighted sums of a chunk's experts. Its plan is built while the rows travel."""
    first, end = p.bounds(chunk)
    # Ids of other ranks' experts, and of other chunks', are outside the plan's range: it drops their slots.
    plan = RoutingPlan.from_experts(ids_SK - (p.first_expert + first), end - first, check="none")
    rows_SH = rows.wait()
    # Other implementations of experts may return another dtype, such as autocast's own choice for a sum.
    return compute(rows_SH, with_sizes(plan, counts.sizes[first:end]), weights_SK).to(rows_SH.dtype)


def with_sizes(plan: RoutingPlan, sizes: torch.Tensor) -> RoutingPlan:
    """The plan with its sizes given on the host, so that no engine waits for them, and without rows after the last expert."""
    return first_rows_of(plan, sum(sizes.tolist()), sizes)


def keys_of_nodes(key_TN: torch.Tensor, p: Placement, nodes: Nodes) -> torch.Tensor:
    """Keys node * chunks + chunk, made of keys rank * chunks + chunk."""
    rank_TN = key_TN // p.chunks
    return torch.where(key_TN >= 0, rank_TN // nodes.size * p.chunks + key_TN % p.chunks, -1)


def _of_ranks_inside(ids_SK, chunk, p, nodes):
    """For each slot of this chunk, the position in this node of the rank that computes it; -1 for the slots of other chunks and nodes."""
    key_SN = p.keys(ids_SK)
    rank_SN = key_SN // p.chunks
    here_SN = (key_SN >= 0) & (rank_SN // nodes.size == nodes.node) & (key_SN % p.chunks == chunk)
    return torch.where(here_SN, rank_SN % nodes.size, -1)
