"""The two trips that a layer's rows make over the links, each measured by itself: "dispatch" takes rows to the ranks that hold the
token's experts, and "combine" takes one sum a token and rank back to the token's rank.

                 dispatch                                      combine
    peer_memory  rows pulled from their owners, and written    sums of the rows here pushed to the owners, a barrier, and the
                 in the order of experts                       ranks' sums added up
    exchange     rows gathered by rank, all-to-all             all-to-all back, and the ranks' sums added up

The bytes of a measurement are those that cross a rank's link: the rows that come to it from other ranks, each once. On several ranks
the largest number counts.

Shape suffixes: T tokens of a rank, A tokens of all ranks, W ranks, K slots a token, E experts, H hidden, R rows sent, S rows received,
P rows by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.measurements.parallel_layer import Part, all_ranks_inputs, of_all_ranks, refuse_peer_memory
from gbmoe.cli.bench.measurements.measurement import Measurement, Subject
from gbmoe.ops import padded_gather, padded_scatter
from gbmoe.parallel import peer_memory
from gbmoe.parallel.arrival import Arrival
from gbmoe.parallel.peer_transport import push_sums, sum_of_ranks
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.region_rows import pull_rows
from gbmoe.plan import RoutingPlan
from gbmoe.testing import accuracy, oracle

DISPATCH, COMBINE = "dispatch", "combine"
# The allowed error of sums, in roundings. Equal rows are summed, so that a sum of n is n times the row, rounded on each rank and here.
_ROUNDINGS = 4


@dataclass(frozen=True)
class LinkMeasurement(Measurement):
    """One trip, by the `transport` peer_memory or exchange."""

    transport: str = "exchange"

    kind = "link"

    @property
    def by(self) -> str:
        return f"{self.implementation}-{self.transport}"

    def describe(self) -> dict:
        return super().describe() | {"transport": self.transport}

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return {"peer_memory": _PeerMemory, "exchange": _Exchange}[self.transport](self, device, dtype)


class _Trip(Subject):
    """What both transports share: a router's choice of experts, the ranks that need each token, and the checks of the results."""

    def __init__(self, measurement: LinkMeasurement, device: torch.device, dtype: torch.dtype):
        self.case, self.computation = measurement.case, measurement.computation
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.part = Part.of(self.case, self.rank, self.ranks)
        inputs, mine = all_ranks_inputs(self.case, measurement.routing, device, dtype)
        self.x_AH, self.x_TH, self.weights = inputs.x_TH, inputs.x_TH[mine], inputs.weights
        self.ids_TK = oracle.best_experts(self.x_TH.float() @ self.weights.router_EH.float().t(), self.case.top_k)
        self.ids_AK = of_all_ranks(self.ids_TK)
        self.groups = min(self.ranks, self.case.experts)
        self.needed_AW = self._needed(self.ids_AK)
        self.needed_TW = self.needed_AW[mine]

    def _needed(self, ids_AK: torch.Tensor) -> torch.Tensor:
        """Which ranks hold any of each token's experts."""
        group_AK = ids_AK // (self.case.experts // self.groups)
        needed = torch.zeros(ids_AK.size(0), self.groups, dtype=torch.bool, device=ids_AK.device).scatter_(1, group_AK, True)
        return needed.repeat(1, self.ranks // self.groups)

    def steps(self):
        return [self._dispatch if self.computation == DISPATCH else self._combine]

    def outputs(self) -> torch.Tensor:
        return self.steps()[0]()

    def bytes_moved(self) -> int:
        by_rank = self.needed_AW[:, self.rank].view(self.ranks, -1).sum(1)
        return int(by_rank.sum() - by_rank[self.rank]) * self.x_TH.size(1) * self.x_TH.dtype.itemsize

    def facts(self) -> dict:
        counts_E = self.ids_AK.flatten().bincount(minlength=self.case.experts)
        return {"imbalance": float(counts_E.max() / counts_E.double().mean())}

    def _same(self, rows: torch.Tensor, expected: torch.Tensor) -> accuracy.Verdict:
        return accuracy.Verdict("rows", accuracy.relative_error(rows, expected), 0.0)

    def _sums(self, sums_TH: torch.Tensor, times_T: torch.Tensor) -> accuracy.Verdict:
        error = accuracy.relative_error(sums_TH, self.x_TH.double() * times_T.unsqueeze(1))
        return accuracy.Verdict("sums", error, _ROUNDINGS * torch.finfo(sums_TH.dtype).eps)


class _Exchange(_Trip):
    """torch.distributed's all-to-all, with buffers allocated and numbers of rows known beforehand."""

    def __init__(self, measurement, device, dtype):
        super().__init__(measurement, device, dtype)
        every_W = torch.arange(self.ranks, dtype=torch.int64, device=device)
        self.plan = RoutingPlan.from_experts(torch.where(self.needed_TW, every_W, -1), self.ranks, exact=True, check="none")
        self.sends = self.needed_TW.sum(0).tolist()
        self.receives = self.needed_AW[:, self.rank].view(self.ranks, -1).sum(1).tolist()
        self.came_SH = self.x_TH.new_empty(sum(self.receives), self.x_TH.size(1))
        self.back_RH = self.x_TH.new_empty(self.plan.num_rows, self.x_TH.size(1))
        self._dispatch()  # combine sends these rows back

    def _dispatch(self):
        dist.all_to_all_single(self.came_SH, padded_gather(self.x_TH, self.plan), self.receives, self.sends)
        return self.came_SH

    def _combine(self):
        dist.all_to_all_single(self.back_RH, self.came_SH, self.sends, self.receives)
        return padded_scatter(self.back_RH, self.plan)

    def check(self, outputs):
        if self.computation == DISPATCH:
            return self._same(outputs, self.x_AH[self.needed_AW[:, self.rank]])
        return self._sums(outputs, self.needed_TW.sum(1))


class _PeerMemory(_Trip):
    """The kernels that pull and push, with the tokens published and the plan made beforehand."""

    def __init__(self, measurement, device, dtype):
        super().__init__(measurement, device, dtype)
        refuse_peer_memory(self.case, self.x_TH)
        experts = self.part.experts
        self.where = Placement(group=None, world=self.ranks, rank=self.rank, experts=self.case.experts,
                               experts_per_rank=experts.stop - experts.start, shards=self.ranks // self.groups)
        self.memory = peer_memory.of_group(None, device)
        with self.memory.passing():
            self.arrived = Arrival(self.memory, self.x_TH, self.ids_TK, None, self.where).finish()
        self.rows_PH = self._dispatch()

    def _dispatch(self):
        regions = self.arrived.regions
        return pull_rows(regions, "x", self.arrived.slots, self.x_TH, self.rank).rows_PH()

    def _combine(self):
        push_sums(self.rows_PH, self.arrived, None, self.rank)
        self.memory.barrier()
        return sum_of_ranks(self.arrived, self.x_TH, self.ids_TK, None, self.where)

    def check(self, outputs):
        if self.computation == COMBINE:
            return self._sums(outputs, torch.full_like(self.ids_TK[:, 0], self.case.top_k * self.where.shards))
        slot_P, tokens = self.arrived.slots.slot_of_row_P.long(), self.arrived.regions.layout.tokens
        in_use_P = slot_P >= 0
        token_P = slot_P[in_use_P] // self.case.top_k
        token_P = token_P // tokens * self.case.tokens + token_P % tokens  # the plan counts the capacity, not the tokens, of each rank
        return self._same(outputs[in_use_P], self.x_AH[token_P])
