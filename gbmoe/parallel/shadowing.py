"""Popular experts on all ranks for one step: their weights travel, and the rows of their tokens do not (FasterMoE's shadowing).

Where many tokens of all ranks choose the same experts, the links of the ranks that hold them are the bottleneck. In each forward the ranks
find out which experts are chosen most, and how many rows would still travel if the first one, the first two and so on of these were on
every rank. All ranks see the same numbers, and so decide alike: they take the number of experts with which the busiest link carries the
fewest bytes.

To the exchange a replica, here called a shadow, is one more expert of every rank, and all shadows together are one more chunk: ids of a
shadowed expert are replaced by that of its shadow on the token's own rank. The rows of that chunk stay where they are.

Weights travel in pieces. The owner sends a different piece to each rank, and each rank sends its piece to all others. Gradients travel in
the opposite direction: each rank adds up the ranks' gradients of its piece, in the order of ranks, in float32 (float64 for float64),
rounds once and sends the sum to the owner. Two runs therefore give the same bits, whatever order a reduction of the library would take.

Shape suffixes: T tokens, K slots a token, E all experts, L experts of this rank, W ranks, D destinations (ranks or, over several nodes,
nodes), S shadows, N = S + 1 numbers of shadows from 0 on, O shadows of this rank's own experts, F ffn hidden, H hidden, P elements of an
expert, padded to a multiple of W, Q = P / W elements of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gbmoe.float8 import Float8BlockScaling
from gbmoe.parallel import automatic_chunks, pass_agreement
from gbmoe.parallel.exchange import Compute, as_it_travels, experts_by_exchange, keys_of_nodes
from gbmoe.parallel.failures import guarded
from gbmoe.parallel.host_copy import to_host
from gbmoe.parallel.pass_agreement import Needs, joined
from gbmoe.parallel.placement import Placement
from gbmoe.plan import RoutingPlan

_EXCHANGES = 4  # of weights and their gradients, in forward and backward together
_WHAT = "making shadows of experts"

# (w1, w2 and v1 or None of this rank's experts) -> the same of the shadows.
ShadowsOf = Callable[..., "tuple[torch.Tensor | None, ...]"]


# -------------------------------------------------------------------------------------------------------------- decision


def fewest_bytes(rows_WDN: torch.Tensor, owners: Sequence[int], row_bytes: int, expert_bytes: int, overhead: float = 0.0) -> int:
    """How many of the candidates to shadow: the number with which the busiest link carries the fewest bytes, or the lowest of several
    such.

    Links carry as much in one direction as in the other, in forward and backward together. With n shadows, rank r's link carries

        2 * row_bytes * (rows that r sends to others + rows that others send to r)      a row and its sum, a gradient and its gradient
        + expert_bytes * 3 * (W - 1) / W       for each shadow of an expert that r holds
        + expert_bytes * (1 + (W - 1) / W)     for each other shadow
        + overhead                             if n is not 0

    each way: an owner sends its weights in pieces and then its own piece to all others, sends a piece of its gradient to each of them, and
    receives as much; the others receive and send all pieces but their own twice, except for the piece that the owner has already.

    Args:
        rows_WDN: the rows that each rank sends to each destination if the first n candidates are shadowed, any integers, on the CPU. Over
            nodes of W / D ranks each, a row goes to the rank with the sender's position in the destination.
        owners: S, the rank that holds each candidate, in the candidates' order.
        row_bytes, expert_bytes: the bytes of a row, and of the weights of an expert.
        overhead: the bytes that a link could carry in the time that exchanges of weights take besides their bytes.
    """
    world, destinations, numbers = rows_WDN.shape
    size = world // destinations
    rows_NWD = rows_WDN.permute(2, 0, 1).double()
    ranks = torch.arange(world, dtype=torch.int64, device="cpu")
    rows_NWD[:, ranks, ranks // size] = 0
    received_NW = rows_NWD.view(numbers, destinations, size, destinations).sum(1).transpose(1, 2).reshape(numbers, world)
    others = (world - 1) / world
    shares_NW = torch.full((numbers, world), 1 + others, dtype=torch.float64, device="cpu")
    shares_NW[0] = 0
    for candidate, owner in enumerate(owners):
        shares_NW[candidate + 1, owner] = 3 * others
    bytes_NW = 2 * row_bytes * (rows_NWD.sum(2) + received_NW) + expert_bytes * shares_NW.cumsum(0)
    busiest = [most + (overhead if number else 0.0) for number, most in enumerate(bytes_NW.amax(1).tolist())]
    return busiest.index(min(busiest))


def _candidates(counts_E: torch.Tensor, p: Placement, most: int) -> torch.Tensor:
    """The experts for which most slots have to travel, the most popular first, int64 [S]; the same on all ranks."""
    size = 1 if p.nodes is None else p.nodes.size
    slots_E = counts_E.long()
    here = p.rank // size * size * p.experts_per_rank
    slots_E[here : here + size * p.experts_per_rank] = 0
    guarded(lambda: dist.all_reduce(slots_E, group=p.group), p.group, _WHAT)
    return slots_E.argsort(descending=True, stable=True)[:most]


def _rows(ids_TK: torch.Tensor, candidates_S: torch.Tensor, p: Placement) -> torch.Tensor:
    """The rows that this rank sends to each destination if the first n candidates are shadowed, int32 [D,N]."""
    shadows, nodes = candidates_S.size(0), p.nodes
    key_TK = p.keys(ids_TK) if nodes is None else keys_of_nodes(p.keys(ids_TK), p, nodes)
    destinations = p.world if nodes is None else nodes.count
    place_E = torch.full((p.experts,), shadows, dtype=torch.int32, device=ids_TK.device)
    place_E[candidates_S] = torch.arange(shadows, dtype=torch.int32, device=ids_TK.device)
    place_TK = place_E[ids_TK.clamp(0, p.experts - 1).long()]
    # A token's row goes to a destination and chunk for as long as any of its slots there is of an expert that is not shadowed.
    same_TKK = key_TK.unsqueeze(2) == key_TK.unsqueeze(1)
    last_TK = torch.where(same_TKK, place_TK.unsqueeze(1), -1).amax(2)
    counted_TK = (key_TK >= 0) & ~same_TKK.tril(-1).any(2)
    entry_TK = torch.where(counted_TK, key_TK // p.chunks * (shadows + 1) + last_TK, destinations * (shadows + 1)).flatten().long()
    rows = torch.zeros(destinations * (shadows + 1) + 1, dtype=torch.int32, device=ids_TK.device)
    rows.scatter_add_(0, entry_TK, torch.ones_like(entry_TK, dtype=torch.int32))
    return rows[:-1].view(destinations, shadows + 1).flip(1).cumsum(1, dtype=torch.int32).flip(1)


def _overhead(device: torch.device, p: Placement) -> float:
    """fewest_bytes' overhead on this type of device by automatic_chunks' speeds; 0 where they are unknown."""
    if device.type not in automatic_chunks.SPEEDS:
        return 0.0
    _, links = automatic_chunks.SPEEDS[device.type]
    if p.nodes is None:
        return _EXCHANGES * links.exchange_latency * links.exchange
    return _EXCHANGES * (links.exchange_latency + links.network_latency) * links.network


def choose(x_TH: torch.Tensor, ids_TK: torch.Tensor, counts_E: torch.Tensor, p: Placement, most: int, expert_bytes: int,
           header_A: torch.Tensor) -> tuple[list[int], Needs]:
    """(the experts to shadow in this step, in ascending order, the same on all ranks; which gradients any rank needs). Collective; the host
    waits for the device once.

    It depends on the ranks' ids alone, so that the forward that activation checkpointing repeats chooses the same.

    Args:
        x_TH: this rank's tokens, of which only shape, dtype and device are read.
        ids_TK: the tokens' experts, int32; an id of no expert counts for none.
        counts_E: this rank's slots of each expert.
        p: which rank holds which experts.
        most: at most so many experts are chosen.
        expert_bytes: the bytes of an expert's weights, as they travel.
        header_A: of this pass (gbmoe.parallel.pass_agreement), whose errors it raises.
    """
    candidates_S = _candidates(counts_E, p, most)
    rows_DN = _rows(ids_TK, candidates_S, p)
    message_X = torch.cat([header_A, rows_DN.flatten()])
    messages_WX = message_X.new_empty(p.world, message_X.size(0))
    guarded(lambda: dist.all_gather(list(messages_WX), message_X, group=p.group), p.group, _WHAT)
    numbers = to_host(torch.cat([candidates_S.int(), messages_WX.flatten()]), p.group)
    rows_WDN, needs = pass_agreement.checked(numbers[candidates_S.size(0) :].view(messages_WX.shape), p.group)
    candidates = numbers[: candidates_S.size(0)].tolist()
    owners = [expert // p.experts_per_rank for expert in candidates]
    count = fewest_bytes(rows_WDN.reshape(p.world, *rows_DN.shape), owners, x_TH.size(1) * x_TH.element_size(), expert_bytes,
                         _overhead(x_TH.device, p))
    return sorted(candidates[:count]), needs


# --------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class _Pieces:
    """How the weights of shadows travel. `owned` has the number of shadows of each rank's own experts, `local` which of this rank's
    experts these are."""

    owned: list[int]
    local: list[int]
    group: dist.ProcessGroup | None

    @property
    def world(self) -> int:
        return len(self.owned)

    def spread(self, own_OP: torch.Tensor) -> torch.Tensor:
        """All shadows' weights [S,P], in the order of their owners, from those of this rank's own."""
        pieces_SQ = self._exchange(_by_piece(own_OP, self.world), [len(self.local)] * self.world, self.owned)
        pieces_WSQ = pieces_SQ.new_empty(self.world, *pieces_SQ.shape)
        guarded(lambda: dist.all_gather(list(pieces_WSQ), pieces_SQ, group=self.group), self.group, _WHAT)
        return _whole(pieces_WSQ.flatten(0, 1), self.world)

    def sum(self, grad_SP: torch.Tensor) -> torch.Tensor:
        """The sums of all ranks' gradients [O,P] of the shadows of this rank's own experts, from this rank's gradients of all shadows."""
        world, shadows = self.world, sum(self.owned)
        pieces_WSQ = self._exchange(_by_piece(grad_SP, world), [shadows] * world, [shadows] * world).view(world, shadows, -1)
        total_SQ = pieces_WSQ[0].to(torch.float64 if grad_SP.dtype == torch.float64 else torch.float32)
        for pieces_SQ in pieces_WSQ[1:]:
            total_SQ = total_SQ + pieces_SQ
        return _whole(self._exchange(total_SQ.to(grad_SP.dtype), self.owned, [len(self.local)] * world), world)

    def _exchange(self, rows_RQ: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        out = rows_RQ.new_empty(sum(receives), rows_RQ.size(1))
        guarded(lambda: dist.all_to_all_single(out, rows_RQ, receives, sends, group=self.group), self.group, _WHAT)
        return out


def _by_piece(whole_SP: torch.Tensor, world: int) -> torch.Tensor:
    """[W*S,Q], the pieces of all experts for one rank after those for another."""
    return whole_SP.view(whole_SP.size(0), world, whole_SP.size(1) // world).transpose(0, 1).flatten(0, 1).contiguous()


def _whole(pieces_RQ: torch.Tensor, world: int) -> torch.Tensor:
    """What _by_piece took apart."""
    return pieces_RQ.view(world, pieces_RQ.size(0) // world, pieces_RQ.size(1)).transpose(0, 1).flatten(1)


def _packed(matrices: Sequence[torch.Tensor], dtype: torch.dtype, world: int) -> torch.Tensor:
    """Matrices [S,F,H] side by side as [S,P], with zeros after them."""
    flat = [matrix.flatten(1).to(dtype) for matrix in matrices]
    spare = -sum(each.size(1) for each in flat) % world
    return torch.cat([*flat, flat[0].new_zeros(flat[0].size(0), spare)], dim=1)


def _unpacked(packed_SP: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The matrices that _packed took, each in memory of its own; `shapes` are [F,H] of each."""
    sizes = [shape.numel() for shape in shapes]
    parts = packed_SP.split([*sizes, packed_SP.size(1) - sum(sizes)], dim=1)
    return [part.clone(memory_format=torch.contiguous_format).view(-1, *shape) for part, shape in zip(parts, shapes)]


class _Shadows(torch.autograd.Function):
    """Weights [L,F,H] of this rank's experts -> those of all shadows [S,F,H], in `dtype`.

    The weights are inputs also where none of them is shadowed, so that every rank takes part in backward.
    """

    @staticmethod
    def forward(ctx, pieces, dtype, *weights_LFH):
        ctx.pieces, ctx.like = pieces, [(w.shape, w.dtype) for w in weights_LFH]
        spread_SP = pieces.spread(_packed([w[pieces.local] for w in weights_LFH], dtype, pieces.world))
        return tuple(_unpacked(spread_SP, [w.shape[1:] for w in weights_LFH]))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads_SFH):
        pieces = ctx.pieces
        own_OP = pieces.sum(_packed(grads_SFH, grads_SFH[0].dtype, pieces.world))
        if not pieces.local:
            return None, None, *(None for _ in ctx.like)
        grads = []
        for sum_OFH, (shape, dtype), need in zip(_unpacked(own_OP, [shape[1:] for shape, _ in ctx.like]), ctx.like,
                                                 ctx.needs_input_grad[2:]):
            grads.append(sum_OFH.new_zeros(shape, dtype=dtype) if need else None)
            if need:
                grads[-1][pieces.local] = sum_OFH.to(dtype)
        return None, None, *grads


# ----------------------------------------------------------------------------------------------------------------- layer


def _ids_with_shadows(ids_TK: torch.Tensor, shadowed: list[int], p: Placement) -> torch.Tensor:
    """Ids among the experts and shadows of all ranks, int32 [T,K]: those of shadowed experts name the shadow on this rank."""
    per_rank = p.experts_per_rank + len(shadowed)
    experts_E = torch.arange(p.experts, dtype=torch.int32, device="cpu")
    of_E = experts_E // p.experts_per_rank * per_rank + experts_E % p.experts_per_rank
    of_E[shadowed] = p.rank * per_rank + p.experts_per_rank + torch.arange(len(shadowed), dtype=torch.int32, device="cpu")
    exists_TK = (ids_TK >= 0) & (ids_TK < p.experts)
    return torch.where(exists_TK, of_E.to(ids_TK.device)[ids_TK.clamp(0, p.experts - 1).long()], -1)


def shadowed_experts_by_exchange(
    in_chunks: Callable[[list[tuple[int, int]], ShadowsOf | None], list[Compute]], x_TH: torch.Tensor, experts_TK: torch.Tensor,
    weights_TK: torch.Tensor, p: Placement, *, most: int, expert_elements: int, layer: int = 0, trains: bool = True,
    recipe: Float8BlockScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """experts_by_exchange, with up to `most` experts on all ranks in the steps in which that pays. Collective, in forward and backward.

    Besides what experts_by_exchange waits for, the host waits for the device once. It is not compiled: torch.compile breaks its graph
    around it.

    Args:
        in_chunks: makes the functions that compute the chunks of this rank's experts, given each chunk's first expert and the one after
            its last; and one more, given a function from this rank's weights to those of the shadows, which computes with these.
        x_TH, experts_TK, weights_TK, p: as for experts_by_exchange. Ranks must hold whole experts.
        most: at most so many experts are shadowed.
        expert_elements: the number of elements of an expert's weights.
        layer, trains, recipe: as for experts_by_exchange. Rows travel in their dtype.

    Returns:
        out [T,H] and tokens_per_expert [all experts], int32, of this rank's tokens.

    Raises:
        RuntimeError: where an exchange fails; it names the ranks that are missing.
    """
    x_TH = as_it_travels("shadowed_experts_by_exchange", x_TH, experts_TK, weights_TK)
    counts_E = RoutingPlan.from_experts(experts_TK, p.experts, check="none").counts_E
    ids_TK = experts_TK.int()
    header_A = pass_agreement.header("shadows", layer, x_TH, weights_TK, trains, p.group, None if recipe is None else recipe.engine)
    shadowed, needs = choose(x_TH, ids_TK, counts_E, p, min(most, p.experts), expert_elements * x_TH.element_size(), header_A)
    bounds = [p.bounds(chunk) for chunk in range(p.chunks)]
    if not shadowed:
        out_TH, _ = experts_by_exchange(in_chunks(bounds, None), x_TH, experts_TK, weights_TK, p, layer=layer, trains=trains,
                                        recipe=recipe)
        return out_TH, counts_E
    owners = [expert // p.experts_per_rank for expert in shadowed]
    local = [expert - p.first_expert for expert, owner in zip(shadowed, owners) if owner == p.rank]
    pieces = _Pieces([owners.count(rank) for rank in range(p.world)], local, p.group)

    def shadows_of(w1_LFH, w2_LFH, v1_LFH):
        matrices = (w1_LFH, w2_LFH) if v1_LFH is None else (w1_LFH, w2_LFH, v1_LFH)
        # Every rank takes part in backward, also one whose own experts are frozen.
        matrices = (joined(w1_LFH, needs.experts), *matrices[1:])
        shadows = _Shadows.apply(pieces, x_TH.dtype, *matrices)
        return (*shadows, None) if v1_LFH is None else shadows

    out_TH, _ = experts_by_exchange(in_chunks(bounds, shadows_of), x_TH, _ids_with_shadows(ids_TK, shadowed, p), weights_TK,
                                    p.with_shadows(len(shadowed)), layer=layer, trains=needs.experts, recipe=recipe)
    return out_TH, counts_E
