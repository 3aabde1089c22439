"""Which rank brings which tokens: each rank publishes its own, and plans which rows the tokens of all ranks have on it.

Shape suffixes: T tokens of this rank, C the most tokens that a rank has room for, W ranks, S = W * C tokens of all ranks, K slots a
token, E experts of this rank, H hidden, P rows of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.engines.base import GatheredRows
from gbmoe.ops.plan_sizes import wants_host_sizes
from gbmoe.parallel.host_copy import HostCopy
from gbmoe.parallel.peer_memory import Layout, PeerMemory, Regions
from gbmoe.plan import RoutingPlan
from gbmoe.problem import allows_tf32
from gbmoe.slot_map import SlotMap

# Rows are pulled ahead into room for a share more than are expected: to pull all of them again takes longer than to know their number
# beforehand saves. Fewer are expected after a step with fewer, by a share in each forward, but not many times as many as it had.
_MORE_ROWS, _FEWER_ROWS, _MOST_TIMES = 1 / 8, 1 / 32, 1.5
_ROWS_TOGETHER = 1024  # P is rounded up to a multiple of this, so that the allocator sees few different sizes
_ANY_ID = 2**31 - 1


@dataclass(frozen=True)
class Spread:
    """How experts are spread over the ranks of a group, and how rows travel.

    Attributes:
        group: the ranks that hold the experts.
        experts: the number of experts on all ranks together.
        experts_per_rank: the number of experts of which a rank holds the weights, or shards of them.
        first_expert: the first expert of this rank.
        shards: Z, the number of ranks that hold a shard of the same expert.
        rows: the most rows that a rank may compute, as a multiple of the mean over ranks. None sets no bound: the host then waits for
            the number of rows in each forward.
        by_slot: push the row of every slot, and sum rows in slot order. The sums have the same bits as those of one GPU.
        timeout_seconds: how long a rank's device waits for the others; None for the group's own timeout.
    """

    group: dist.ProcessGroup | None
    experts: int
    experts_per_rank: int
    first_expert: int
    shards: int
    rows: float | None = None
    by_slot: bool = False
    timeout_seconds: float | None = None

    def __post_init__(self):
        require(not self.by_slot or self.shards == 1, "Spread", "shards", "1 together with by_slot: the ranks that hold shards of an expert"
                " would push their rows to one place", self.shards)
        require(self.rows is None or not self.by_slot, "Spread", "rows", "None together with by_slot, which sums every slot's row and"
                " would read unwritten ones if rows beyond a bound were dropped", self.rows)

    @property
    def shard(self) -> int:
        """Which shard of its experts this rank holds."""
        return dist.get_rank(self.group) // (self.experts // self.experts_per_rank)


@dataclass
class Arrived:
    """Which rows the tokens of all ranks have on this rank. Once this exists, the tokens may be pulled."""

    regions: Regions
    slots: SlotMap  # from the tokens of all ranks to this rank's rows
    weights_SK: torch.Tensor | None
    tokens_W: list[int]  # of each rank, as far as the host knows: where it did not wait for the numbers, C


class Arrival:
    """Publishes this rank's tokens and plans those of all ranks, on the device. `finish` returns the result, and `sizes` then each
    expert's rows.

    Where the number of rows is not bounded, `finish` waits for the device once. Work that the caller starts before it hides that wait.
    Until the caller pulls the rows the device has nothing to do, so `finish` does no more than that takes. With `pulls_ahead` the device
    pulls them meanwhile, as many as there were in the last steps and some more: then the host's wait costs no time, and if there are not
    more, `rows_ahead` are the rows.
    """

    def __init__(self, memory: PeerMemory, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, spread: Spread,
                 pulls_ahead: bool = False):
        self._memory, self._x_TH, self._ids_TK, self._weights_TK, self._spread = memory, x_TH, ids_TK, weights_TK, spread
        self._pulls_ahead, self._rows_here = pulls_ahead, 0
        self._ahead_PH: torch.Tensor | None = None
        self._offsets_E1: torch.Tensor | None = None  # on the host, where the host waits for them
        tokens = ids_TK.size(0)
        self._layers = ids_TK.size(1), x_TH.size(1), x_TH.dtype, spread.shards, spread.by_slot  # those that share a capacity
        self._expectation = *self._layers, spread.experts, spread.experts_per_rank  # those of which as many rows are expected here
        if memory.capacity(self._layers) == 0:
            memory.reserve(self._layers, tokens)
        capacity = memory.capacity(self._layers)
        require(spread.rows is None or tokens <= capacity, "peer_experts", "x",
                f"at most {capacity} tokens, the room made at the first call (with a bounded number of rows it cannot grow, because"
                " ranks do not tell each other how many tokens they bring)", tokens)
        self._begin()

    def _begin(self) -> None:
        memory, spread, tokens = self._memory, self._spread, self._ids_TK.size(0)
        top_k, hidden, dtype, shards, by_slot = self._layers
        layout = Layout(memory.capacity(self._layers), top_k, hidden, dtype, memory.ranks, shards, by_slot)
        self._regions = memory.regions(layout)
        own = self._regions.own
        fits = tokens <= layout.tokens
        if fits:
            weights = None if self._weights_TK is None else self._weights_TK.contiguous()
            torch.ops.gbmoe_cuda.publish_slots(self._ids_TK.contiguous(), weights, own["ids"], None if weights is None else own["weights"])
        if spread.rows is not None:
            own["x"][:tokens].copy_(self._x_TH)
            memory.barrier()
            self._plan_rows()
            self._on_host = None
            return
        own["header"].fill_(tokens)
        memory.barrier()
        self._plan_rows()
        # A header is read as the ids of one token's four slots, all of which are in range.
        headers_W4 = torch.empty(memory.ranks, 4, dtype=torch.int32, device=self._x_TH.device)
        torch.ops.gbmoe_cuda.collect_slots(self._regions.peers["header"], None, 0, _ANY_ID, headers_W4, None)
        self._on_host = HostCopy(torch.cat([headers_W4[:, 0], self._plan.offsets_E1]))
        # The tokens are published while the header's numbers travel to the host.
        if fits:
            own["x"][:tokens].copy_(self._x_TH)
        memory.barrier()
        expected = memory.expected_rows.get(self._expectation, 0) if self._pulls_ahead else 0
        if expected:
            self._ahead_PH = self._x_TH.new_empty(self._room(expected), hidden)
            torch.ops.gbmoe_cuda.pull_rows(self._regions.peers["x"], memory.rank, self._plan.row_of_slot_TK, self._ahead_PH)

    def _plan_rows(self) -> None:
        spread, layout, peers = self._spread, self._regions.layout, self._regions.peers
        ids_SK = torch.empty(layout.ranks * layout.tokens, layout.top_k, dtype=torch.int32, device=self._x_TH.device)
        weighted = self._weights_TK is not None
        self._weights_SK = torch.empty_like(ids_SK, dtype=torch.float32) if weighted else None
        torch.ops.gbmoe_cuda.collect_slots(peers["ids"], peers["weights"] if weighted else None, spread.first_expert,
                                           spread.experts_per_rank, ids_SK, self._weights_SK)
        self._plan = RoutingPlan.from_experts(ids_SK, spread.experts_per_rank, check="none")

    def finish(self) -> Arrived:
        """Return the rows that all ranks' tokens have here."""
        if self._on_host is None:
            layout = self._regions.layout
            rows = self._rows(math.ceil(self._spread.rows * layout.tokens * layout.top_k * self._spread.shards))  # type: ignore[operator]
            _watch_overflow(self._plan.offsets_E1, rows)
            return self._arrived(rows, [layout.tokens] * layout.ranks)
        numbers = self._on_host.wait(self._spread.group)
        ranks, memory = self._memory.ranks, self._memory
        while max(numbers[:ranks].tolist()) > memory.capacity(self._layers):  # all ranks see the same maximum, and begin again together
            memory.reserve(self._layers, self._ids_TK.size(0))
            self._begin()
            numbers = self._on_host.wait(self._spread.group)
        self._offsets_E1, self._rows_here = numbers[ranks:], int(numbers[-1])
        return self._arrived(self._rows(self._rows_here), numbers[:ranks].tolist())

    def rows_ahead(self) -> GatheredRows | None:
        """The rows, if all were pulled ahead, and otherwise None; once, after `finish`. Expects about as many for the next steps."""
        if self._on_host is None:
            return None
        known, rows = self._memory.expected_rows, self._rows_here
        expected = max(rows, math.floor(known.get(self._expectation, 0) * (1 - _FEWER_ROWS)))
        known[self._expectation] = min(expected, math.ceil(rows * _MOST_TIMES))
        ahead_PH, self._ahead_PH = self._ahead_PH, None
        if ahead_PH is None or ahead_PH.size(0) < self._slots.num_rows:
            return None
        return GatheredRows(None, self._slots, ahead_PH[: self._slots.num_rows])

    def sizes(self, engine: str, rows: int, w1_EFH: torch.Tensor) -> torch.Tensor:
        """The rows of each expert, on the host or on the device as `engine` wants them for `rows` rows and w1; after `finish`."""
        if self._offsets_E1 is not None and wants_host_sizes(engine, self._x_TH.device, self._x_TH.dtype, rows, *w1_EFH.shape, False,
                                                             allows_tf32(self._x_TH.dtype)):
            return self._offsets_E1.diff().long()
        return self._plan.padded_counts_E

    def _room(self, expected: int) -> int:
        """Rows to make room for where so many are expected: one of few different numbers, so that the allocator sees few sizes."""
        rows = math.ceil(expected * (1 + _MORE_ROWS))
        together = 1 << max(rows.bit_length() - 5, 0)
        return self._rows(math.ceil(rows / together) * together)

    def _rows(self, needed: int) -> int:
        return min(self._plan.num_rows, max(math.ceil(needed / _ROWS_TOGETHER), 1) * _ROWS_TOGETHER)

    def _arrived(self, rows: int, tokens_W: list[int]) -> Arrived:
        self._slots = SlotMap(row_of_slot_TK=self._plan.row_of_slot_TK, slot_of_row_P=self._plan.slot_of_row_P[:rows])
        return Arrived(self._regions, self._slots, self._weights_SK, tokens_W)


# Rows beyond the bound are dropped in the step that has them, and reported by a later step. _BEYOND holds [rows needed, bound] of the
# worst overflow of a device; it lies on the device, so that replays of a CUDA graph write it too. _SEEN holds the copies of it that
# calls outside of graphs have sent to the host and not yet looked at.
_BEYOND: dict[torch.device, torch.Tensor] = {}
_SEEN: list[HostCopy] = []


def _watch_overflow(offsets_E1: torch.Tensor, bound: int) -> None:
    capturing = torch.cuda.is_current_stream_capturing()
    while not capturing and _SEEN and (beyond := _SEEN[0].if_there()) is not None:
        _SEEN.pop(0)
        _report_overflow(beyond)
    device = offsets_E1.device
    if device not in _BEYOND:
        _BEYOND[device] = torch.zeros(2, dtype=torch.int32, device=device)
    needed = torch.stack([offsets_E1[-1], torch.full_like(offsets_E1[-1], bound)])
    _BEYOND[device].copy_(torch.where((needed[0] > bound) & (needed[0] > _BEYOND[device][0]), needed, _BEYOND[device]))
    if not capturing:
        _SEEN.append(HostCopy(_BEYOND[device]))


def _report_overflow(beyond: torch.Tensor) -> None:
    needed, bound = beyond.tolist()
    if needed:
        _SEEN.clear()
        for tensor in _BEYOND.values():
            tensor.zero_()
        raise ValueError(f"peer_experts: rows: expected at most {bound} on this rank, the bound that expert_parallel_rows sets, got"
                         f" {needed} in an earlier step, which dropped those beyond the bound")


def check_overflow() -> None:
    """Raise ValueError if a step since the last report had more rows on this rank than their bound. Waits for the device.

    Eager calls raise the same error by themselves in a later step. Replays of a CUDA graph cannot: call this after them.
    """
    _SEEN.clear()
    for beyond in _BEYOND.values():
        _report_overflow(beyond.cpu())
