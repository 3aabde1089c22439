"""The transport over memory that ranks map from each other: rows are pulled from their owners, sums pushed back.

The tokens of all ranks have one numbering, rank * C + index. The gather reads a token's row in its owner's memory and writes it to the
rows of its slots. The scatter sums a token's rows here and writes the sum into the owner's memory; the owner adds the ranks' sums in rank
order. Backward is the same road the other way: the output's gradient is pulled, and the gradient of x is pushed while the weights'
gradients are computed.

Shape suffixes: T tokens of this rank, C the most tokens that a rank has room for, W ranks, S = W * C tokens of all ranks, K slots a
token, H hidden, P rows of this rank, X elements of a row as it travels (region_rows.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gbmoe.engines.base import GatheredRows
from gbmoe.engines.gathered_scaled_rows import GatheredScaledRows
from gbmoe.float8 import Float8BlockScaling
from gbmoe.launch import peers, scatter
from gbmoe.launch.peers import PeerRegion
from gbmoe.ops.expert_forward_backward import Transport
from gbmoe.parallel import peer_memory, region_rows
from gbmoe.parallel.arrival import Arrived
from gbmoe.parallel.peer_memory import PeerMemory
from gbmoe.parallel.placement import Placement
from gbmoe.slot_map import SlotMap


class PeerTransport(Transport):
    """Pulls rows of all ranks' tokens, and pushes sums. Used within PeerMemory.passing.

    Args:
        arrived: which rows the tokens of all ranks have here.
        where: which rank holds which experts.
        x_TH, ids_TK, weights_TK: this rank's tokens, contiguous, their experts and router weights; all but the ids as they came.
        rows: in forward, the rows, if they were pulled ahead. They are handed out once.
        grad_TH: in backward, the gradient of the result.
        kept_PX: in backward, the rows of x that forward has kept, if it has. They are handed out once.
        pulls_again: in backward, whether rows of x will be asked for here. Where any rank's is, all publish their tokens again.
    """

    gives_back_first = True  # while the gradients of weights are computed

    def __init__(self, arrived: Arrived, where: Placement, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, *,
                 rows: GatheredRows | None = None, grad_TH: torch.Tensor | None = None, kept_PX: torch.Tensor | None = None,
                 pulls_again: bool = True):
        self.dtype, self.weights_TK = x_TH.dtype, arrived.weights_SK
        self._memory, self._arrived, self._where = arrived.memory, arrived, where
        self._x_TH, self._ids_TK, self._own_weights_TK = x_TH, ids_TK, weights_TK
        self._rows, self._grad_TH, self._kept_PX, self._pulls_again = rows, grad_TH, kept_PX, pulls_again
        self._coming: _TokensOnTheirWay | None = None
        self._going: _SumsOnTheirWay | None = None
        self._dx_factor: float | None = None
        self._gives_weights = self._by_copy_engines = False
        recipe, needs = arrived.recipe, arrived.needs
        # By which rows of x, and of the gradient, are in e4m3 in this pass: what gradients of weights read is so by float8_dispatch alone.
        self._of_x = recipe if recipe is not None and (grad_TH is None or recipe.float8_dispatch) else None
        self._of_grad = None if needs.wide_gradient else recipe

    def rows(self) -> GatheredRows:
        rows, self._rows = self._rows, None
        return self._pulled("x", self._of_x) if rows is None else rows

    def keep_rows(self) -> torch.Tensor:
        """Pull the rows of x [P,H], or packed [P,Y], for backward as well: `rows` then returns these."""
        self._rows = self.rows()
        return self._rows.packed_PY() if isinstance(self._rows, GatheredScaledRows) else self._rows.rows_PH()

    def combine(self, y_PH: torch.Tensor) -> torch.Tensor:
        push_sums(y_PH, self._arrived, self.weights_TK, self._memory.rank)
        self._memory.barrier()
        return sum_of_ranks(self._arrived, self._x_TH, self._ids_TK, self._own_weights_TK, self._where)

    def gradient_rows(self) -> GatheredRows:
        memory, arrived = self._memory, self._arrived
        again, self._by_copy_engines = arrived.needs.x_again, _by_copy_engines(arrived)
        if again and self._by_copy_engines:
            self._coming = _TokensOnTheirWay(memory, arrived, self._x_TH, self._pulls_again, self._of_x)
        grad_TH, self._grad_TH = self._grad_TH, None
        assert grad_TH is not None
        region_rows.publish(grad_TH, arrived.regions, "grad", memory.rank, self._of_grad)
        del grad_TH
        if again and self._coming is None:
            region_rows.publish(self._x_TH, arrived.regions, "x", memory.rank, self._of_x)
        memory.barrier()
        dz = self._pulled("grad", self._of_grad)
        if self._coming is not None:
            self._coming.depart()
        return dz

    def rows_again(self) -> GatheredRows:
        kept_PX, self._kept_PX = self._kept_PX, None
        if kept_PX is not None:
            return region_rows.gathered(kept_PX, self._arrived.slots, self._x_TH)
        rows = self._tokens_rows(self._arrived.slots)
        if self._arrived.windows is None:
            self._coming = None
        return rows

    def ones_TK(self) -> torch.Tensor:
        return torch.ones_like(self._arrived.slots.row_of_slot_TK, dtype=torch.float32)

    def of_window(self, slots: SlotMap) -> Transport:
        """The transport of a further window's rows (gbmoe/parallel/windows.py); in backward after this one's."""
        return _OfWindow(self, slots)

    def give_back(self, dx_PH: torch.Tensor, factor: float) -> None:
        self._dx_factor = factor
        if self._by_copy_engines and not self._where.exact:
            self._going = _SumsOnTheirWay(self._memory, self._arrived, dx_PH)
        else:
            push_sums(dx_PH, self._arrived, None, self._memory.rank)

    def give_back_router_gradient(self, dweights_TK: torch.Tensor | None) -> None:
        self._push_scalars(dweights_TK, self._arrived.slots)

    def _push_scalars(self, dweights_TK: torch.Tensor | None, slots: SlotMap) -> None:
        if dweights_TK is not None and self._own_weights_TK is not None:
            peers.push_slot_scalars(dweights_TK, slots.row_of_slot_TK, slots.num_rows, self._where.shard,
                                    self._arrived.regions.peers["pushed_scalars"])
            self._gives_weights = True

    def arrived(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        self._wait_for_sums()
        self._memory.barrier()
        dx_TH = dweights_TK = None
        if self._dx_factor is not None:
            dx_TH = sum_of_ranks(self._arrived, self._x_TH, self._ids_TK, None, self._where, self._dx_factor)
        if self._gives_weights:
            assert self._own_weights_TK is not None
            dweights_TK = torch.empty_like(self._own_weights_TK, memory_format=torch.contiguous_format)
            peers.sum_pushed_scalars(self._arrived.regions.own["pushed_scalars"], self._ids_TK, self._memory.ranks, self._where.experts,
                                     self._where.experts_per_rank, dweights_TK)
        return dx_TH, dweights_TK

    def _wait_for_sums(self) -> None:
        if self._going is not None:
            self._going.wait()

    def _pulled(self, region: str, recipe: Float8BlockScaling | None, slots: SlotMap | None = None) -> GatheredRows:
        slots = self._arrived.slots if slots is None else slots
        return region_rows.pull_rows(self._arrived.regions, region, slots, self._x_TH, self._memory.rank, recipe)

    def _tokens_rows(self, slots: SlotMap) -> GatheredRows:
        return self._pulled("x", self._of_x, slots) if self._coming is None else self._coming.gathered(slots)


class _OfWindow(Transport):
    """Rows of one more window of `first`'s pass: pulled when they are asked for, and sums and scalars pushed at once. The pass's barriers,
    and what is done after them, are `first`'s."""

    def __init__(self, first: PeerTransport, slots: SlotMap):
        self.dtype, self.weights_TK = first.dtype, first.weights_TK
        self._first, self._slots = first, slots

    def rows(self) -> GatheredRows:
        return self._first._tokens_rows(self._slots)

    def combine(self, y_PH: torch.Tensor) -> torch.Tensor:
        """y itself: the tokens' sums are on their way to `first`'s result."""
        self._push(y_PH, self.weights_TK)
        return y_PH

    def gradient_rows(self) -> GatheredRows:
        return self._first._pulled("grad", self._first._of_grad, self._slots)

    def rows_again(self) -> GatheredRows:
        return self.rows()

    def ones_TK(self) -> torch.Tensor:
        return self._first.ones_TK()

    def give_back(self, dx_PH: torch.Tensor, factor: float) -> None:
        self._first._wait_for_sums()  # of whole matrices, in which these tokens' places mean nothing
        self._push(dx_PH, None)

    def give_back_router_gradient(self, dweights_TK: torch.Tensor | None) -> None:
        self._first._push_scalars(dweights_TK, self._slots)

    def arrived(self) -> tuple[None, None]:
        return None, None

    def _push(self, y_PH: torch.Tensor, weights_SK: torch.Tensor | None) -> None:
        push_sums(y_PH, replace(self._first._arrived, slots=self._slots), weights_SK, self._first._memory.rank)


def push_sums(y_PH: torch.Tensor, arrived: Arrived, weights_SK: torch.Tensor | None, rank: int) -> None:
    """Write each token's weighted sum of its rows y here into its owner's memory; in exact mode, the rows themselves, unweighted."""
    regions, slots = arrived.regions, arrived.slots
    if regions.sums is None:
        peers.push_slot_rows(y_PH, slots.slot_of_row_P, regions.layout.top_k, regions.layout.tokens, regions.peers["pushed"])
    else:
        peers.push_row_sums(y_PH, slots.row_of_slot_TK, weights_SK, regions.sums, rank)


def sum_of_ranks(arrived: Arrived, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None,
                 where: Placement, scale: float = 1.0) -> torch.Tensor:
    """Add up, for each token of this rank, what the ranks have pushed: `scale` times their sums or, in exact mode, its slots' rows, by
    their weights or else by `scale`. After a barrier."""
    pushed, ids_TK = arrived.regions.own["pushed"], ids_TK.contiguous()
    if where.exact:
        slots_TK = torch.arange(ids_TK.numel(), dtype=torch.int32, device=ids_TK.device).view(ids_TK.shape)
        slots_TK = torch.where((ids_TK >= 0) & (ids_TK < where.experts), slots_TK, -1)
        if scale != 1:
            weights_TK = torch.full_like(slots_TK, scale, dtype=torch.float32)
        return scatter(pushed, SlotMap(row_of_slot_TK=slots_TK, slot_of_row_P=slots_TK.flatten()), weights=weights_TK)
    out_TH = x_TH.new_empty(x_TH.shape)
    peers.sum_pushed_rows(pushed, ids_TK, where.experts, where.experts_per_rank, scale, out_TH)
    return out_TH


# Up to peer_memory.RANKS_WITH_COPY_ENGINES ranks, copy engines copy whole matrices of tokens while backward's GEMMs run. The GEMMs need
# all multiprocessors, and copy engines none. But copy engines also copy the rows that are not needed here: with eight slots a token
# these are hardly any of another rank's rows where there are two ranks, but a third of them where there are eight. Short passes, which
# wait for the host, leave them out.


def _by_copy_engines(arrived: Arrived) -> bool:
    """Whether backward of this pass uses them. All ranks have the same numbers of tokens here, whatever became of their layouts."""
    layout = arrived.regions.layout
    token_bytes = layout.hidden * layout.dtype.itemsize
    return (layout.ranks <= peer_memory.RANKS_WITH_COPY_ENGINES
            and peer_memory.rounded_up(max(arrived.tokens_W)) * token_bytes >= peer_memory.BYTES_FOR_COPY_ENGINES)


class _TokensOnTheirWay:
    """All ranks' tokens x: the ranks publish them, and once they `depart` the copy engines bring them here while GEMMs run; if `pulls`,
    otherwise for the other ranks alone."""

    def __init__(self, memory: PeerMemory, arrived: Arrived, x_TH: torch.Tensor, pulls: bool, recipe: Float8BlockScaling | None):
        self._memory, self._arrived, self._x_TH, self._stream, self._pulls = memory, arrived, x_TH, memory.side_stream(), pulls
        self._of_ranks = region_rows.region_of(arrived.regions, "x", recipe).of_rank
        own_CX = self._of_ranks[memory.rank]
        self._x_WCX = own_CX.new_empty(memory.ranks if pulls else 0, *own_CX.shape)
        self._stream.wait_stream(memory.stream())
        with memory.on(self._stream):
            region_rows.publish(x_TH, arrived.regions, "x", memory.rank, recipe)
            memory.barrier(channel=1)

    def depart(self) -> None:
        """Begin the copies when the current stream gets here: rows that it pulls before have the links to themselves."""
        self._stream.wait_stream(self._memory.stream())
        with self._memory.on(self._stream):
            for rank in self._memory.others() if self._pulls else ():
                _copy_rows(self._x_WCX[rank], self._of_ranks[rank], self._arrived.tokens_W[rank])
            if self._pulls:
                here = self._memory.rank
                own_CX = self._x_TH if self._x_TH.dtype == self._x_WCX.dtype else self._of_ranks[here]
                _copy_rows(self._x_WCX[here], own_CX, self._x_TH.size(0))
            self._copied = self._stream.record_event()
        # _x_WCX was allocated on the current stream, which waits for the side stream before the next pass: no record_stream is needed.

    def gathered(self, slots: SlotMap) -> GatheredRows:
        """The rows of these slots, once the current stream has waited for the copies."""
        # And not for what has come to the side stream after them.
        self._memory.stream().wait_event(self._copied)
        return region_rows.gathered_tokens(self._x_WCX.flatten(0, 1), slots, self._x_TH)


class _SumsOnTheirWay:
    """The sums of the other ranks' tokens, on their way to their owners: the copy engines take them there while later GEMMs run."""

    def __init__(self, memory: PeerMemory, arrived: Arrived, y_PH: torch.Tensor):
        regions, here = arrived.regions, memory.rank
        assert regions.sums is not None
        self._memory, self._stream = memory, memory.side_stream()
        self._sums_WCH = y_PH.new_empty(memory.ranks, *regions.own["x"].shape)
        into = [regions.sums.of_rank[here] if rank == here else sums_CH for rank, sums_CH in enumerate(self._sums_WCH)]
        # The kernel writes the sums for a rank to row [this rank] of that rank's [W,C,H]. Here they go to a buffer of their own,
        # so the address that it is given lies as many bytes in front of the buffer.
        before = here * self._sums_WCH[0].nbytes
        addresses = torch.tensor([sums_CH.data_ptr() - before for sums_CH in into], dtype=torch.int64, device="cpu")
        peers.push_row_sums(y_PH, arrived.slots.row_of_slot_TK, None, PeerRegion(into, addresses), here)
        self._stream.wait_stream(memory.stream())
        with memory.on(self._stream):
            for rank in memory.others():
                _copy_rows(regions.sums.of_rank[rank], self._sums_WCH[rank], arrived.tokens_W[rank])

    def wait(self) -> None:
        """Let the current stream wait until the sums have arrived."""
        self._memory.stream().wait_stream(self._stream)


def _copy_rows(to_CH: torch.Tensor, from_CH: torch.Tensor, rows: int) -> None:
    """Copy the first rows by a copy engine, if one of the two is another rank's."""
    to_CH[:rows].copy_(from_CH[:rows], non_blocking=True)
