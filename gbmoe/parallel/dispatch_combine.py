"""One trip of rows to the destinations of a group, and of sums back.

A destination is a rank or, on the trip between nodes, a node. A trip is built of gathers and scatters with a RoutingPlan whose "experts"
are destinations, so that the gradient of either way is the other.

Shape suffixes: T tokens, K slots a token, N destinations that a token may have, R rows sent, S rows received, H hidden, B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gbmoe.ops.permute import gather_slots, scatter_slots
from gbmoe.parallel.differentiable_all_to_all import AllToAllWithIds, Received, is_recorded, start, weights_with_ids
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap


def _once(to_TN: torch.Tensor) -> torch.Tensor:
    """Each token's destinations in ascending order, with -1 in place of those that occur again."""
    if to_TN.size(1) == 1:
        return to_TN
    to_TN = to_TN.sort(dim=1).values
    others = torch.where(to_TN[:, 1:] == to_TN[:, :-1], -1, to_TN[:, 1:])
    return torch.cat([to_TN[:, :1], others], dim=1)


def plan_of_destinations(key_TN: torch.Tensor, destinations: int, chunks: int) -> RoutingPlan:
    """The plan of the rows that go to each destination, chunk after chunk, from keys destination * chunks + chunk."""
    to_TN = _once(key_TN)
    if chunks > 1:
        to_TN = torch.where(to_TN >= 0, to_TN % chunks * destinations + to_TN // chunks, -1)
    return RoutingPlan.from_experts(to_TN, destinations * chunks, check="none")


def first_rows_of(plan: RoutingPlan, rows: int, sizes: torch.Tensor | None = None) -> RoutingPlan:
    """The plan with only its first `rows` rows: after them there are none for any destination. `sizes`, if the host knows them, are those
    of each destination."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # imported here because it imports sympy
        if statically_known_true(plan.num_rows == 0):  # the compiler does not slice an empty tensor by an unknown size
            return plan if sizes is None else plan.with_host_sizes(sizes)
    return plan.first_rows(rows, sizes)


@dataclass(frozen=True)
class Trip:
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
        exchange = AllToAllWithIds.apply if torch.compiler.is_compiling() or is_recorded(weights_RK) else weights_with_ids
        chunks = zip(self._by_chunk(weights_RK), self._by_chunk(ids_RK), self.receives, self.sends)
        return [(weights, ids) if chunk == self.kept else exchange(weights, ids, receives, sends, self.group)
                for chunk, (weights, ids, receives, sends) in enumerate(chunks)]

    def rows(self, x_TH) -> list[torch.Tensor]:
        """The rows to send, by chunk."""
        return self._by_chunk(gather_slots(x_TH, self.map)[0])

    def send(self, chunk, rows_RH):
        return Received(rows_RH) if chunk == self.kept else start(rows_RH, self.receives[chunk], self.sends[chunk], self.group)

    def send_back(self, chunk, sums_SH):
        return Received(sums_SH) if chunk == self.kept else start(sums_SH, self.sends[chunk], self.receives[chunk], self.group)

    def sums(self, sums_RH: list[torch.Tensor]) -> torch.Tensor:
        """Each token's sum of the rows that came back for it, in the order of destinations."""
        all_RH = sums_RH[0] if len(sums_RH) == 1 else torch.cat(sums_RH)
        if torch.compiler.is_compiling():
            torch._check(all_RH.size(0) == self.map.num_rows)  # the compiler cannot know that as many rows come back as were sent
        return scatter_slots(all_RH, self.map)

    def _by_chunk(self, rows):
        return [rows] if len(self.sends) == 1 else list(rows.split([sum(sends) for sends in self.sends]))
