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

Shape suffixes: T tokens, K slots a token, N destinations that a token may have, W ranks, R rows sent, S rows received, H hidden,
C chunks, E experts on this rank, B bytes, A numbers of a header (gbmoe.parallel.pass_agreement), X = A + C + E numbers of a message. In
exact mode every slot has a row of its own: U slots of this
rank's tokens, V slots of this rank's experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe.ops import padded_gather, padded_scatter
from gbmoe.ops.permute import gather_slots, scatter_slots
from gbmoe.parallel import pass_agreement
from gbmoe.parallel.groups import Nodes, guarded
from gbmoe.parallel.host_copy import to_host
from gbmoe.parallel.pass_agreement import Needs, joined
from gbmoe.parallel.placement import Placement
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap

# The experts of one chunk: (rows [S,H], their plan, router weights [S,K] or None) -> weighted sums [S,H].
Compute = Callable[[torch.Tensor, RoutingPlan, "torch.Tensor | None"], torch.Tensor]


def _once(to_TN: torch.Tensor) -> torch.Tensor:
    """Each token's destinations in ascending order, with -1 in place of those that occur again."""
    if to_TN.size(1) == 1:
        return to_TN
    to_TN = to_TN.sort(dim=1).values
    others = torch.where(to_TN[:, 1:] == to_TN[:, :-1], -1, to_TN[:, 1:])
    return torch.cat([to_TN[:, :1], others], dim=1)


def _plan_of(key_TN: torch.Tensor, destinations: int, chunks: int) -> RoutingPlan:
    """The plan of the rows that go to each destination, chunk after chunk, from keys destination * chunks + chunk."""
    to_TN = _once(key_TN)
    if chunks > 1:
        to_TN = torch.where(to_TN >= 0, to_TN % chunks * destinations + to_TN // chunks, -1)
    return RoutingPlan.from_experts(to_TN, destinations * chunks, check="none")


def _cut(plan: RoutingPlan, rows: int, sizes: torch.Tensor | None = None) -> RoutingPlan:
    """The plan with its first `rows` rows alone: behind them there are none for any destination. `sizes`, if the host knows them, are those
    of each destination."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # imported here because it imports sympy
        if statically_known_true(plan.num_rows == 0):  # the compiler does not slice an empty tensor by an unknown size
            return plan if sizes is None else plan.with_host_sizes(sizes)
    return plan.first_rows(rows, sizes)


# ------------------------------------------------------------------------------------------------------------- all-to-all


def _all_to_all(out: torch.Tensor, x: torch.Tensor, receives, sends, group):
    if torch.compiler.is_compiling():
        dist.all_to_all_single(out, x, output_split_sizes=receives, input_split_sizes=sends, group=group)
    else:
        _all_to_all_of_host(out, x, receives, sends, group)


def _all_to_all_of_host(out: torch.Tensor, x: torch.Tensor, receives, sends, group, async_op=False):
    """all_to_all_single of contiguous tensors outside of compiled graphs."""
    return guarded(functools.partial(dist.all_to_all_single, out, x, receives, sends, group, async_op), group)


class _AllToAll(torch.autograd.Function):
    """Send sends[r] rows to each rank r, in the order of ranks, and receive receives[r] rows from it."""

    @staticmethod
    def forward(ctx, x, receives, sends, group):
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        out = x.new_empty(sum(receives), *x.shape[1:])
        _all_to_all(out, x.contiguous(), receives, sends, group)
        return out.view_as(out)  # torch 2.11's compiler loses the gradient of `out` itself, because it was written to in here

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.sends, ctx.receives, ctx.group), None, None, None


class _AllToAllWithIds(torch.autograd.Function):
    """The same for router weights [R,K] and ids int32 [R,K] together, in one exchange."""

    @staticmethod
    def forward(ctx, weights_RK, ids_RK, receives, sends, group):
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        weights_SK, ids_SK = _weights_with_ids(weights_RK, ids_RK, receives, sends, group)
        ctx.mark_non_differentiable(ids_SK)
        return weights_SK, ids_SK

    @staticmethod
    def backward(ctx, grad, _):
        return _AllToAll.apply(grad, ctx.sends, ctx.receives, ctx.group), None, None, None, None


def _weights_with_ids(weights_RK, ids_RK, receives, sends, group):
    packed_RB = torch.cat([ids_RK.view(torch.uint8), weights_RK.contiguous().view(torch.uint8)], dim=1)
    out_SB = packed_RB.new_empty(sum(receives), packed_RB.size(1))
    _all_to_all(out_SB, packed_RB, receives, sends, group)
    behind_ids = 4 * ids_RK.size(1)
    # clone, as contiguous() returns a single row where it is, whose place may be no multiple of an element.
    ids_SK = out_SB[:, :behind_ids].clone(memory_format=torch.contiguous_format).view(torch.int32)
    return out_SB[:, behind_ids:].clone(memory_format=torch.contiguous_format).view(weights_RK.dtype), ids_SK


def _is_recorded(t: torch.Tensor) -> bool:
    """Whether autograd records what is done with t. If not, an autograd.Function does no more than its forward, and takes some 10 us."""
    return t.requires_grad and torch.is_grad_enabled()


class _Travelling:
    """Rows under way: _start sends them, and wait() returns them when they have arrived.

    Backward runs the same two steps in reverse: _Wait.backward sends the gradient, and _Start.backward returns it when it has arrived.
    """

    def __init__(self, rows, receives, sends, group):
        self.receives, self.sends, self.group = receives, sends, group
        self.work = self.sent = self.back = None
        self.rows = _Start.apply(rows, self) if _is_recorded(rows) else self.send(rows, receives, sends)

    def send(self, x, receives, sends):
        out = x.new_empty(sum(receives), *x.shape[1:])
        self.sent = x = x.contiguous()  # kept until it has been sent
        self.work = _all_to_all_of_host(out, x, receives, sends, self.group, async_op=True)
        return out

    def arrive(self):
        if self.work is not None:
            guarded(self.work.wait, self.group)
        self.work = self.sent = None

    def wait(self) -> torch.Tensor:
        rows, self.rows = self.rows, None  # the rows' autograd graph refers to this object: kept, they would form a cycle
        if _is_recorded(rows):
            return _Wait.apply(rows, self)
        self.arrive()
        return rows


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RH, travelling):
        ctx.travelling = travelling
        return travelling.send(rows_RH, travelling.receives, travelling.sends)

    @staticmethod
    @once_differentiable
    def backward(ctx, _grad_SH):  # the gradient in name only: _Wait.backward has sent the real one
        travelling = ctx.travelling
        travelling.arrive()
        grad_RH, travelling.back = travelling.back, None
        return grad_RH, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_SH, travelling):
        ctx.travelling = travelling
        travelling.arrive()
        return rows_SH.view_as(rows_SH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SH):
        travelling = ctx.travelling
        travelling.back = travelling.send(grad_SH, travelling.sends, travelling.receives)
        return grad_SH, None


class _Received:
    """Takes the place of _Travelling for rows that do not travel, and under torch.compile, which orders collectives itself."""

    def __init__(self, rows):
        self.rows = rows

    def wait(self):
        return self.rows


def _start(rows, receives, sends, group):
    if torch.compiler.is_compiling():
        return _Received(_AllToAll.apply(rows, receives, sends, group))
    return _Travelling(rows, receives, sends, group)


# ------------------------------------------------------------------------------------------------------------- one trip


@dataclass(frozen=True)
class _Trip:
    """Rows to the destinations of one group and sums back, chunk by chunk. `sends` and `receives` are rows by chunk and destination.

    `map` is that of the plan whose experts are the destinations. The rows of the chunk `kept` are all for this rank, on all ranks: they
    stay where they are.
    """

    map: SlotMap
    sends: list[list[int]]
    receives: list[list[int]]
    group: dist.ProcessGroup | None
    kept: int | None = None

    def slots(self, ids_TK, weights_TK):
        """(router weights [S,K], ids [S,K]) of the rows that arrive, by chunk."""
        # Flat first, as ids of one slot a token count as contiguous with any stride between slots, which a view as bytes does not take.
        bytes_TB = ids_TK.view(-1).view(torch.uint8).view(ids_TK.size(0), 4 * ids_TK.size(1))
        ids_RK = gather_slots(bytes_TB, self.map)[0].view(torch.int32)  # moves bytes unchanged
        weights_RK = gather_slots(weights_TK, self.map)[0]
        exchange = _AllToAllWithIds.apply if torch.compiler.is_compiling() or _is_recorded(weights_RK) else _weights_with_ids
        chunks = zip(self._by_chunk(weights_RK), self._by_chunk(ids_RK), self.receives, self.sends)
        return [(weights, ids) if chunk == self.kept else exchange(weights, ids, receives, sends, self.group)
                for chunk, (weights, ids, receives, sends) in enumerate(chunks)]

    def rows(self, x_TH) -> list[torch.Tensor]:
        """The rows to send, by chunk."""
        return self._by_chunk(gather_slots(x_TH, self.map)[0])

    def send(self, chunk, rows_RH):
        return _Received(rows_RH) if chunk == self.kept else _start(rows_RH, self.receives[chunk], self.sends[chunk], self.group)

    def send_back(self, chunk, sums_SH):
        return _Received(sums_SH) if chunk == self.kept else _start(sums_SH, self.sends[chunk], self.receives[chunk], self.group)

    def sums(self, sums_RH: list[torch.Tensor]) -> torch.Tensor:
        """Each token's sum of the rows that came back for it, in the order of destinations."""
        all_RH = sums_RH[0] if len(sums_RH) == 1 else torch.cat(sums_RH)
        if torch.compiler.is_compiling():
            torch._check(all_RH.size(0) == self.map.num_rows)  # the compiler cannot know that as many rows come back as were sent
        return scatter_slots(all_RH, self.map)

    def _by_chunk(self, rows):
        return [rows] if len(self.sends) == 1 else list(rows.split([sum(sends) for sends in self.sends]))


@dataclass(frozen=True)
class _Counts:
    """The numbers of rows that the host must know in a layer call; it waits for all of them once.

    sends, receives: rows by chunk and rank. Over several nodes they are by chunk and node, and `inside` has those of the second trip.
    sizes: rows of each local expert, int64 on the CPU.
    needs: which gradients any rank needs.
    slots: the slots sent to and received from each rank, int64 [W] each, on the CPU; empty over several nodes.
    """

    sends: list[list[int]]
    receives: list[list[int]]
    sizes: torch.Tensor
    needs: Needs
    inside: tuple[list[list[int]], list[list[int]]] | None = None
    slots: tuple[torch.Tensor, ...] = ()


def _exchange_counts(message: torch.Tensor, group) -> torch.Tensor:
    out = torch.empty_like(message)
    _all_to_all(out, message, None, None, group)
    return out


def _lists(counts_WC: torch.Tensor) -> list[list[int]]:
    return counts_WC.t().tolist()


def _message(header_A: torch.Tensor, to_ranks: RoutingPlan, plan: RoutingPlan, p: Placement) -> torch.Tensor:
    """What each rank is told: the header, the rows that go to it, by chunk, and the slots of each of its experts; int32 [W, X]."""
    slots_WE = plan.counts_E.repeat(p.shards).view(p.world, p.experts_per_rank)
    return torch.cat([header_A.expand(p.world, -1), to_ranks.counts_E.view(p.chunks, p.world).t(), slots_WE], dim=1)


def _counts(message_WX: torch.Tensor, p: Placement) -> _Counts:
    """The counts where rows make a single trip."""
    sent, received = to_host(torch.stack([message_WX, _exchange_counts(message_WX, p.group)]), p.group)
    received, needs = pass_agreement.checked(received, p.group)
    sent, c = sent[:, pass_agreement.NUMBERS :], p.chunks
    slots = (sent[:, c:].sum(1), received[:, c:].sum(1))
    return _Counts(_lists(sent[:, :c]), _lists(received[:, :c]), received[:, c:].sum(0), needs, slots=slots)


def _counts_by_node(message_WX: torch.Tensor, to_nodes: RoutingPlan, p: Placement, nodes: Nodes) -> _Counts:
    """The counts where rows make two trips. This rank hands on, inside its node, the rows that the ranks with its position in every node
    send to it: the sum of their messages, and of their headers the largest of each number."""
    a, c, x = pass_agreement.NUMBERS, p.chunks, message_WX.size(1)
    rows_NC = to_nodes.counts_E.view(c, nodes.count).t()
    across = torch.cat([rows_NC, message_WX.view(nodes.count, nodes.size * x)], dim=1)
    came = _exchange_counts(across, nodes.across)
    came_NDX = came[:, c:].view(nodes.count, nodes.size, x)
    inside = torch.cat([came_NDX[:, :, :a].amax(0), came_NDX[:, :, a:].sum(0, dtype=torch.int32)], dim=1)
    handed = _exchange_counts(inside, nodes.inside)
    parts = (rows_NC, came[:, :c], inside[:, a : a + c], handed)
    host = to_host(torch.cat([part.flatten() for part in parts]), p.group).split([part.numel() for part in parts])
    sent, received, passed, handed = (flat.view(part.shape) for flat, part in zip(host, parts))
    handed, needs = pass_agreement.checked(handed, p.group)
    return _Counts(_lists(sent), _lists(received), handed[:, c:].sum(0), needs, (_lists(passed), _lists(handed[:, :c])))


# --------------------------------------------------------------------------------------------------------------- layers


def experts_by_exchange(chunks: Sequence[Compute], x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor,
                        p: Placement, *, layer: int = 0, trains: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
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

    Returns:
        out [T,H] and tokens_per_expert [all experts], int32, of this rank's tokens.

    Raises:
        ValueError: on all ranks, where they make passes of different layers, or in different ways; it says which ranks differ in what.
        RuntimeError: where an exchange fails; it names the ranks that are missing.
    """
    _check("experts_by_exchange", x_TH, experts_TK, weights_TK)
    plan = RoutingPlan.from_experts(experts_TK, p.experts, check="none")
    ids_TK = experts_TK.int().contiguous()
    key_TN = p.keys(ids_TK)
    to_ranks = _plan_of(key_TN, p.world, p.chunks)
    message_WX = _message(pass_agreement.header("exchange", layer, x_TH, weights_TK, trains, p.group), to_ranks, plan, p)
    nodes, kept = p.nodes, p.chunks - 1 if p.shadows else None
    if nodes is None:
        counts = _counts(message_WX, p)
        trip = _Trip(_cut(to_ranks, _total(counts.sends)).slot_map, counts.sends, counts.receives, p.group, kept)
    else:
        to_nodes = _plan_of(keys_of_nodes(key_TN, p, nodes), nodes.count, p.chunks)
        counts = _counts_by_node(message_WX, to_nodes, p, nodes)
        trip = _Trip(_cut(to_nodes, _total(counts.sends)).slot_map, counts.sends, counts.receives, nodes.across, kept)

    needs = counts.needs
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
            to_ranks = _plan_of(_of_ranks_inside(ids_SK, chunk, p, nodes), nodes.size, 1)
            inner = _Trip(_cut(to_ranks, _total(sends)).slot_map, sends, receives, nodes.inside)
            (weights_SK, ids_SK), = inner.slots(ids_SK, weights_SK)
            handed = inner.send(0, inner.rows(coming[chunk].wait())[0])
            sums_SH = joined(_compute(compute, chunk, handed, ids_SK, weights_SK, counts, p), needs.any)  # before its inner trip
            sums_SH = inner.sums([inner.send_back(0, sums_SH).wait()])
        going.append(trip.send_back(chunk, sums_SH))
    return trip.sums([sums.wait() for sums in going]), plan.counts_E


def _check(function: str, x_TH, experts_TK, weights_TK) -> None:
    """Raise TypeError or ValueError for what cannot travel. All later steps take what was checked here, or built here."""
    require_tensor(experts_TK, function, "experts", rank=2, dtypes=(torch.int32, torch.int64))
    require_tensor(x_TH, function, "x", rank=2, dtypes=FLOATING, device=experts_TK.device)
    require_tensor(weights_TK, function, "weights", rank=2, dtypes=FLOATING, device=experts_TK.device)
    if x_TH.size(0) != experts_TK.size(0):
        require(False, function, "x", lambda: f"{experts_TK.size(0)} rows, as experts has", x_TH.size(0))
    if weights_TK.shape != experts_TK.shape:
        require(False, function, "weights", lambda: f"shape {list(experts_TK.shape)}, one a slot", list(weights_TK.shape))


def _total(by_chunk: list[list[int]]) -> int:
    return sum(sum(rows) for rows in by_chunk)


def _compute(compute, chunk, rows, ids_SK, weights_SK, counts, p) -> torch.Tensor:
    """The weighted sums of a chunk's experts. Its plan is built while the rows travel."""
    first, behind = p.bounds(chunk)
    # Ids of other ranks' experts, and of other chunks', are outside the plan's range: it drops their slots.
    plan = RoutingPlan.from_experts(ids_SK - (p.first_expert + first), behind - first, check="none")
    return compute(rows.wait(), _with_sizes(plan, counts.sizes[first:behind]), weights_SK)


def _with_sizes(plan: RoutingPlan, sizes: torch.Tensor) -> RoutingPlan:
    """The plan with its sizes given on the host, so that no engine waits for them, and without rows behind the last expert."""
    return _cut(plan, sum(sizes.tolist()), sizes)


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


# ----------------------------------------------------------------------------------------------------------- exact mode


@dataclass(frozen=True)
class _WholeRows:
    """Gives every slot a row of its own, as a single process does: a row travels once to a rank, and is repeated there for its slots;
    every slot's row travels back.

    Both sides order the rows of slots by rank, token and slot. `slots` is the plan of the tokens' rank, which sorts its slots by the
    rank that computes them; `here` is the plan of the computing rank, which repeats the rows that came for their slots.
    """

    trip: _Trip
    slots: RoutingPlan
    here: RoutingPlan
    sent: list[int]
    received: list[int]

    def out(self, x_TH):
        return padded_gather(self.trip.send(0, self.trip.rows(x_TH)[0]).wait(), self.here)

    def back(self, y_VH, weights_TK=None):
        return padded_scatter(_AllToAll.apply(y_VH, self.sent, self.received, self.trip.group), self.slots, weights_TK)

    def scalars_out(self, weights_TK):
        """Each slot's router weight at the rank that computes the slot, [V,1]."""
        flat = SlotMap(row_of_slot_TK=self.slots.row_of_slot_TK.view(-1, 1), slot_of_row_P=self.slots.slot_of_row_P)
        weights_U1, _ = gather_slots(weights_TK.reshape(-1, 1), flat)
        return _AllToAll.apply(weights_U1, self.received, self.sent, self.trip.group)


class _OutWhole(torch.autograd.Function):
    """Forward sends rows out. In backward the token's rank sums the gradients of its slots' rows, in slot order."""

    @staticmethod
    def forward(ctx, x_TH, rows):
        ctx.rows = rows
        return rows.out(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_VH):
        return ctx.rows.back(grad_VH), None


class _BackWeighed(torch.autograd.Function):
    """Forward brings rows back, weighs and sums them. Backward hands on the gradient of the weighed rows, not that of the rows
    themselves, because the experts multiply by the weights in their own backward."""

    @staticmethod
    def forward(ctx, y_VH, weights_TK, rows):
        ctx.rows = rows
        return rows.back(y_VH, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        return ctx.rows.out(grad_TH), None, None


def exact_experts_by_exchange(
    compute: Compute, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, p: Placement, *, weighs_later: bool,
    layer: int = 0, trains: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """experts_by_exchange with the same bits that one process gives: every slot's row comes back, and the token's rank sums them.

    A row still travels only once to each rank that needs it, but one row for every slot comes back. It works in one chunk and one trip.
    It is not compiled: torch.compile breaks its graph around it.

    Args:
        compute: a function of rows with one slot each: (rows [V,H], plan, weights [V,1] or None) -> rows [V,H].
        weighs_later: `compute` is given the weights but returns rows without them, and in backward expects the gradient of the weighed
            rows. Otherwise it is given None.
        layer, trains: as in experts_by_exchange.
    """
    _check("exact_experts_by_exchange", x_TH, experts_TK, weights_TK)
    plan = RoutingPlan.from_experts(experts_TK, p.experts, check="none")
    ids_TK = experts_TK.int().contiguous()
    key_TK = p.keys(ids_TK)
    to_ranks = _plan_of(key_TK, p.world, 1)
    path = "exact exchange" if weighs_later else "exact exchange without gbmoe's kernels"
    counts = _counts(_message(pass_agreement.header(path, layer, x_TH, weights_TK, trains, p.group), to_ranks, plan, p), p)
    needs, trip = counts.needs, _Trip(_cut(to_ranks, _total(counts.sends)).slot_map, counts.sends, counts.receives, p.group)
    x_TH, weights_TK = joined(x_TH, needs.x), joined(weights_TK, needs.weights)
    (_, ids_SK), = trip.slots(ids_TK, weights_TK.detach())

    local_SK = ids_SK - p.first_expert
    here_SK = (local_SK >= 0) & (local_SK < p.experts_per_rank)
    sent, received = (slots_W.tolist() for slots_W in counts.slots)
    here = _cut(RoutingPlan.from_experts(torch.where(here_SK, 0, -1), 1, check="none"), sum(received))
    slots = _cut(RoutingPlan.from_experts(key_TK, p.world, check="none"), sum(sent))
    rows = _WholeRows(trip, slots, here, sent, received)
    expert_V = local_SK.reshape(-1)[here.slot_of_row_P.long()]
    of_slots = _with_sizes(RoutingPlan.from_experts(expert_V, p.experts_per_rank, check="none"), counts.sizes)

    x_VH = _OutWhole.apply(x_TH, rows)
    if weighs_later:
        y_VH = compute(x_VH, of_slots, rows.scalars_out(weights_TK))
        return _BackWeighed.apply(joined(y_VH, needs.any), weights_TK.detach(), rows), plan.counts_E
    return rows.back(joined(compute(x_VH, of_slots, None), needs.any), weights_TK), plan.counts_E
