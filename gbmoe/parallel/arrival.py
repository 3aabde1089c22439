"""Which rank brings which tokens: each rank publishes its own, and plans which rows the tokens of all ranks have on it.

With its ids each rank publishes a header, [its tokens, the digest of what must be equal on all ranks, what it needs, 0]. Where the host
waits for the number of rows, it has the headers of all ranks then. Where it does not wait, the device compares the digests, and a later
pass reports what it found.

Where experts may be lent, the device decides which are before it makes the plan. That has room for as many borrowed experts as there may
be after this rank's own. The host learns what was decided with the number of rows.

Shape suffixes: T tokens of this rank, C the most tokens that a rank has room for, W ranks, S = W * C tokens of all ranks, K slots a
token, E experts of this rank, A of all ranks, H hidden, P rows of this rank, N elements of a header, X elements of a row as it travels.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, replace

import torch

from gbmoe import engines
from gbmoe._checks import require
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.float8 import Float8BlockScaling
from gbmoe.launch import peers
from gbmoe.parallel import loans, pass_agreement, region_rows
from gbmoe.parallel.host_copy import HostCopy
from gbmoe.parallel.lent_experts import Ledger
from gbmoe.parallel.peer_memory import PeerMemory, capturing, rounded_up
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.regions import Layout, Regions
from gbmoe.parallel.windows import Windows
from gbmoe.plain.plain_plan import padded_rows
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap

# Rows are pulled ahead into room for a share more than are expected: to pull all of them again takes longer than to know their number
# beforehand saves. Fewer are expected after a step with fewer, by a share in each forward, but not many times as many as it had.
_MORE_ROWS, _FEWER_ROWS, _MOST_TIMES = 1 / 8, 1 / 32, 1.5
_ROWS_TOGETHER = 1024  # P is rounded up to a multiple of this, so that the allocator sees few different sizes


@dataclass(frozen=True)
class Joint:
    """What the ranks of a group need of one pass's backward: each says so of itself, and takes part in what any of them needs.

    Attributes:
        x, weights: gradients of tokens, and of router weights.
        experts: gradients of weights of experts.
        x_again: the rows of x once more, for gradients of w1 and v1.
        packed: a layout for the tokens of this pass alone, because something takes saved tensors away. All ranks must have the same one.
        wide_gradient: rows of the result's gradient in the tokens' dtype, for the gradient of w2, also where a recipe of float8 quantises
            them.
    """

    x: bool = False
    weights: bool = False
    experts: bool = False
    x_again: bool = False
    packed: bool = False
    wide_gradient: bool = False

    @property
    def any(self) -> bool:
        return self.x or self.weights or self.experts

    def bits(self) -> int:
        """As the bits of an int: the bitwise or over the ranks is what any rank needs."""
        return self.x | self.weights << 1 | self.experts << 2 | self.x_again << 3 | self.packed << 4 | self.wide_gradient << 5

    @classmethod
    def of_bits(cls, bits: int) -> Joint:
        return cls(*(bool(bits >> bit & 1) for bit in range(6)))

    def without_excess(self) -> Joint:
        """The same, but rows of x are needed again for gradients of weights alone: a rank that does not know whether it will borrow asks
        for them in any case."""
        return replace(self, x_again=self.x_again and self.experts)


@dataclass(frozen=True)
class Arrived:
    """Which rows the tokens of all ranks have on this rank. Once this exists, the tokens may be pulled."""

    memory: PeerMemory
    regions: Regions
    slots: SlotMap  # from the tokens of all ranks to this rank's rows
    weights_SK: torch.Tensor | None
    tokens_W: list[int]  # of each rank, as far as the host knows: where it did not wait for the numbers, C
    needs: Joint
    windows: Windows | None = None  # where rows may be more than there is room for; `slots` are those of the first window
    divided_SK: torch.Tensor | None = None  # of Windows.divided
    recipe: Float8BlockScaling | None = None  # by which rows of x travel in e4m3
    ledger: Ledger | None = None  # the loans of this pass, if there are any

    def with_own_capacity(self) -> Arrived:
        """The same in a layout for the tokens of this pass, of which other passes that let the memory grow change nothing. A pass that is
        repeated later has tensors of the same shapes and values in it. It costs a few launches. Where rows are bounded it is this one."""
        layout = self.regions.layout
        C, K, W = layout.tokens, layout.top_k, layout.ranks
        own_C = min(C, rounded_up(max(self.tokens_W)))
        if own_C == C:
            return self

        def cut(t_SK: torch.Tensor) -> torch.Tensor:
            return t_SK.view(W, C, K)[:, :own_C].reshape(-1, K)

        slot_P = self.slots.slot_of_row_P
        slot_of_row_P = torch.where(slot_P >= 0, slot_P - slot_P // (C * K) * ((C - own_C) * K), slot_P)
        regions = self.memory.regions(replace(layout, tokens=own_C))
        return replace(self, regions=regions, slots=SlotMap(row_of_slot_TK=cut(self.slots.row_of_slot_TK), slot_of_row_P=slot_of_row_P),
                       weights_SK=None if self.weights_SK is None else cut(self.weights_SK))


class Arrival:
    """Publishes this rank's tokens and plans those of all ranks, on the device. `finish` returns the result, and
    `sizes_and_engine` then each expert's rows.

    Where the number of rows is not bounded, `finish` waits for the device once. Work that the caller starts before it hides that wait.
    Until the caller pulls the rows the device has nothing to do, so `finish` does no more than that takes. With `pulls_ahead` the device
    pulls them meanwhile, as many as there were in the last steps and some more: then the host's wait costs no time, and if there are not
    more, `rows_ahead` are the rows. `expert_MFH`, the shape of an expert's matrices, matters where experts may be lent.

    Attributes:
        ids_TK: of this rank's tokens: after `finish`, where experts are lent, with those of the ranks that compute the slots.
        decided: where experts may be lent, the event of the current stream after which they are.
    """

    def __init__(self, memory: PeerMemory, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, where: Placement, *,
                 layer: int = 0, records: bool = False, needs: Joint = Joint(), pulls_ahead: bool = False,
                 recipe: Float8BlockScaling | None = None, expert_MFH: tuple[int, ...] = ()):
        self._memory, self._x_TH, self.ids_TK, self._weights_TK, self._where = memory, x_TH, ids_TK, weights_TK, where
        self._pulls_ahead, self._rows_here, self._needs, self._recipe = pulls_ahead, 0, needs, recipe
        self._ahead_PX: torch.Tensor | None = None
        self._windows: Windows | None = None
        self._divided_SK: torch.Tensor | None = None
        self._numbers_on_host: torch.Tensor | None = None  # headers, offsets and loans, where the host waits for them
        # Of this rank, own and borrowed: as many as there may be, until the host knows better.
        self._experts = where.experts_per_rank + min(where.loans, where.experts - where.experts_per_rank)
        self._lent_MLFH = (expert_MFH[0], where.loans, *expert_MFH[1:]) if where.loans else ()
        self._ledger: Ledger | None = None
        tokens, bounded = ids_TK.size(0), where.rows is not None
        # Layers that share a capacity. Where rows are bounded it does not grow after the first call, and shapes follow it.
        kind = ids_TK.size(1), x_TH.size(1), x_TH.dtype, where.shards, where.exact
        self._layers = (*kind, "rows are bounded") if bounded else kind
        self._expectation = *self._layers, where.experts, where.experts_per_rank  # those of which as many rows are expected here
        self._records = records
        path = _path(*kind, where.experts, weights_TK is not None, bounded, recipe and recipe.engine, self._lent_MLFH)
        self._digest = memory.announce(layer, path, records)
        if bounded and not capturing(x_TH.device):
            memory.report.look()
        if memory.capacity(self._layers) == 0:
            memory.reserve(self._layers, max(tokens, memory.capacity(kind)))
        capacity = memory.capacity(self._layers)
        require(not bounded or tokens <= capacity, "peer_experts", "x",
                f"at most {capacity} tokens, the room made at the first call (with a bounded number of rows it cannot grow, because"
                " ranks do not tell each other how many tokens they bring)", tokens)
        self._begin()

    def _begin(self) -> None:
        memory, where, (tokens, top_k), hidden = self._memory, self._where, self.ids_TK.shape, self._x_TH.size(1)
        layout = Layout(memory.capacity(self._layers), top_k, hidden, self._x_TH.dtype, memory.ranks, where.shards, where.exact,
                        self._lent_MLFH)
        self._regions = memory.regions(layout)
        own, fits = self._regions.own, tokens <= layout.tokens
        ids_TK, weights = self.ids_TK if fits else self.ids_TK[:0], None
        if fits and self._weights_TK is not None:
            weights = self._weights_TK.contiguous()
        header = tokens, self._digest, self._needs.bits(), 0
        peers.publish_slots(ids_TK.contiguous(), weights, header, own["ids"], None if weights is None else own["weights"], own["header"])
        if where.rows is not None:
            region_rows.publish(self._x_TH, self._regions, "x", memory.rank, self._recipe)
            memory.barrier()
            self._plan_rows(memory.report.headers_WN, only_differing=True)
            self._on_host = None
            return
        memory.barrier()
        headers_WN = torch.empty(memory.ranks, peers.HEADER_NUMBERS, dtype=torch.int32, device=self._x_TH.device)
        self._plan_rows(headers_WN)
        numbers = [headers_WN.flatten(), self._plan.offsets_E1]
        if where.loans:
            numbers.append(self._decision)
            self.decided = memory.stream().record_event()
        self._on_host = HostCopy(torch.cat(numbers))
        # The tokens are published while the headers travel to the host.
        if fits:
            region_rows.publish(self._x_TH, self._regions, "x", memory.rank, self._recipe)
        memory.barrier()
        expected = memory.expected_rows.get(self._expectation, 0) if self._pulls_ahead else 0
        if expected:
            self._ahead_PX = region_rows.pull_ahead(self._regions, "x", self._plan.row_of_slot_TK, self._room(expected), self._x_TH,
                                                    memory.rank, self._recipe)

    def _plan_rows(self, headers_WN: torch.Tensor, only_differing: bool = False) -> None:
        where, layout, of_ranks = self._where, self._regions.layout, self._regions.peers
        ids_SK = torch.empty(layout.ranks * layout.tokens, layout.top_k, dtype=torch.int32, device=self._x_TH.device)
        weighted = self._weights_TK is not None
        self._weights_SK = torch.empty_like(ids_SK, dtype=torch.float32) if weighted else None
        first, experts = (0, where.experts) if where.loans else (where.first_expert, where.experts_per_rank)
        peers.collect_slots(of_ranks["ids"], of_ranks["weights"] if weighted else None, of_ranks["header"], first, experts, only_differing,
                            ids_SK, self._weights_SK, headers_WN)
        if where.loans:
            elements = math.prod(self._lent_MLFH) // where.loans
            price = loans.price_in_rows(elements, self._x_TH.element_size(), self._x_TH.device.type, self._records)
            self._decision = peers.lend_experts(
                ids_SK, self._weights_SK, layout.ranks, where.experts_per_rank, where.loans, price, self._memory.rank)
        if where.rows is not None:
            room = self._together(math.ceil(where.rows * layout.tokens * layout.top_k * where.shards))
            self._windows = Windows.of(room, ids_SK.size(0), layout.top_k, where.experts_per_rank)
            if self._windows is not None:
                ids_SK = self._divided_SK = self._windows.divided(ids_SK, layout.ranks)
        self._plan = RoutingPlan.from_experts(ids_SK, self._experts, check="none")

    def finish(self) -> Arrived:
        """Return the rows that all ranks' tokens have here.

        Raises:
            ValueError: on all ranks, where they make different passes; it says which ranks differ in what.
            CollectiveFailed: where the host waits and ranks do not come; it names them.
        """
        if self._on_host is None:
            return self._bounded()
        memory = self._memory
        headers_WN, rows = self._numbers()
        most = max(header[peers.TOKENS] for header in headers_WN)
        if most > memory.capacity(self._layers):  # all ranks see the same maximum, and begin again together
            memory.make_room(self._layers, most)
            self._begin()
            headers_WN, rows = self._numbers()
        self._tokens_W = [header[peers.TOKENS] for header in headers_WN]
        if self._where.loans:
            self._read_loans()
        self._rows_here = rows
        needs = Joint.of_bits(functools.reduce(operator.or_, (header[peers.NEEDS] for header in headers_WN))).without_excess()
        slots = sum(self._tokens_W) * self.ids_TK.size(1)
        # Of what this pass has, and not of the memory's capacity: a pass that is repeated has as many rows.
        most_rows = padded_rows(slots, self._plan.num_experts, self._plan.align)
        return self._arrived(min(most_rows, self._together(rows)), self._tokens_W, needs)

    def _numbers(self) -> tuple[list[list[int]], int]:
        """The headers of all ranks and the number of this rank's rows, once the headers are of one pass. Lists of Python's: each number
        that is read from a tensor takes the host as long as a launch."""
        assert self._on_host is not None
        N = peers.HEADER_NUMBERS
        self._numbers_on_host = self._on_host.wait(self._where.group, self._memory.board.look, self._memory.board.fail)
        self._memory.board.check()  # before the header of a rank that has left the pass is read
        numbers = self._numbers_on_host[: N * self._memory.ranks + self._plan.num_experts + 1].tolist()
        headers_WN = [numbers[N * rank : N * rank + N] for rank in range(self._memory.ranks)]
        if any(header[peers.DIGEST] != headers_WN[0][peers.DIGEST] for header in headers_WN):
            self._memory.refuse()
        return headers_WN, numbers[-1]

    def _read_loans(self) -> None:
        """What the host has to know of the loans that the device has decided."""
        where, memory, numbers = self._where, self._memory, self._numbers_on_host
        assert numbers is not None
        size = memory.ranks * where.experts
        made = loans.read(int(numbers[-size - 1]), numbers[-size:].view(memory.ranks, where.experts), where.experts_per_rank)
        self._experts = where.experts_per_rank
        if made:
            self._ledger = Ledger(tuple(made), where.experts_per_rank)
            self._experts += len(self._ledger.borrowed(memory.rank))
            ranks_A = self._decision[1 + memory.rank * where.experts :][: where.experts]
            self.ids_TK = peers.ids_of_computing_ranks(self.ids_TK, ranks_A, where.experts_per_rank)

    def _bounded(self) -> Arrived:
        layout, windows = self._regions.layout, self._windows
        rows = self._plan.num_rows if windows is None else windows.rows
        if not capturing(self._x_TH.device):
            self._memory.report.send()
        # No host knows what the other ranks need, so that all take part in everything.
        records, narrow = self._records, self._recipe is not None and self._recipe.float8_dispatch
        needs = Joint(records, records, records, records, wide_gradient=records and not narrow)
        arrived = self._arrived(rows, [layout.tokens] * layout.ranks, needs)
        return replace(arrived, windows=windows, divided_SK=self._divided_SK)

    def rows_ahead(self) -> GatheredRows | None:
        """The rows, if all were pulled ahead, and otherwise None; once, after `finish`. Expects about as many for the next steps."""
        if self._on_host is None:
            return None
        known, rows = self._memory.expected_rows, self._rows_here
        expected = max(rows, math.floor(known.get(self._expectation, 0) * (1 - _FEWER_ROWS)))
        known[self._expectation] = min(expected, math.ceil(rows * _MOST_TIMES))
        ahead_PX, self._ahead_PX = self._ahead_PX, None
        if ahead_PX is None or ahead_PX.size(0) < self._slots.num_rows:
            return None
        return region_rows.gathered(ahead_PX[: self._slots.num_rows], self._slots, self._x_TH)

    def sizes_and_engine(self, engine: str, w1_EFH: torch.Tensor) -> tuple[torch.Tensor, Engine]:
        """The rows of each expert, those of borrowed ones last, on the host or on the device as `engine` wants them for these rows and
        such w1, and the engine of experts whose sizes are there; after `finish`."""
        x_TH, rows, sizes_E = self._x_TH, self._slots.num_rows, self._plan.padded_counts_E[: self._experts]
        on_host, shape_EFH = x_TH.device.type == "cpu", (sizes_E.numel(), *w1_EFH.shape[1:])
        resolved = engines.resolve(engine, x_TH.device, x_TH.dtype, rows, shape_EFH, on_host)
        if resolved.needs_host_sizes and self._numbers_on_host is not None:
            first = self._memory.ranks * peers.HEADER_NUMBERS
            sizes_E = self._numbers_on_host[first : first + self._experts + 1].diff().long()
            if not on_host:
                resolved = engines.resolve(engine, x_TH.device, x_TH.dtype, rows, shape_EFH, True)
        assert resolved.engine is not None
        return sizes_E, resolved.engine

    def _room(self, expected: int) -> int:
        """Rows to make room for where so many are expected: one of few different numbers, so that the allocator sees few sizes."""
        rows = math.ceil(expected * (1 + _MORE_ROWS))
        together = 1 << max(rows.bit_length() - 5, 0)
        return self._rows(math.ceil(rows / together) * together)

    def _rows(self, needed: int) -> int:
        return min(self._plan.num_rows, self._together(needed))

    @staticmethod
    def _together(needed: int) -> int:
        return max(math.ceil(needed / _ROWS_TOGETHER), 1) * _ROWS_TOGETHER

    def _arrived(self, rows: int, tokens_W: list[int], needs: Joint) -> Arrived:
        self._slots = SlotMap(row_of_slot_TK=self._plan.row_of_slot_TK, slot_of_row_P=self._plan.slot_of_row_P[:rows])
        return Arrived(self._memory, self._regions, self._slots, self._weights_SK, tokens_W, needs, recipe=self._recipe,
                       ledger=self._ledger)


@functools.lru_cache(maxsize=256)
def _path(top_k: int, hidden: int, dtype: torch.dtype, shards: int, exact: bool, experts: int, weighted: bool, bounded: bool,
          recipe: str | None, lent_MLFH: tuple[int, ...]) -> str:
    """How rows travel, and in what form: equal on all ranks."""
    return (f"mapped memory of {hidden} x {dtype} a row{pass_agreement.quantised_by(recipe)} and {top_k} slots a token,"
            f" {'with' if weighted else 'without'} router weights,"
            f" {experts} experts in {shards} shards{', one row a slot' if exact else ''}{', rows bounded' if bounded else ''}"
            f"{f', at most {lent_MLFH[1]} experts of {[lent_MLFH[0], *lent_MLFH[2:]]} lent' if lent_MLFH else ''}")
