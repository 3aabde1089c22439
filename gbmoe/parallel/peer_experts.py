"""The experts of a layer over ranks that map each other's memory: rows are pulled from their owners, sums pushed back.

A row crosses a link once for every rank that holds one of the token's experts. The tokens of all ranks have one numbering,
rank * C + index. Each rank builds a plan that takes all of them to its own experts. The gather reads a token's row in its owner's memory
and writes it to the rows of its slots. The scatter sums a token's rows here and writes the sum into the owner's memory; the owner adds
the ranks' sums in rank order. Backward is the same road the other way: the output's gradient is pulled, and the gradient of x is pushed
while the weights' gradients are computed.

Shape suffixes: T tokens of this rank, C the most tokens that a rank has room for, W ranks, S = W * C tokens of all ranks, K slots a
token, E experts of this rank, H hidden, F ffn hidden of this rank, P rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gbmoe import engines
from gbmoe._define_operator import without_autocast
from gbmoe.engines.base import GatheredRows
from gbmoe.kernels import scatter
from gbmoe.ops.gradient_scale import scales_exactly
from gbmoe.parallel import peer_memory
from gbmoe.parallel.arrival import Arrival, Arrived, Spread
from gbmoe.parallel.peer_memory import PeerMemory, of_group
from gbmoe.slot_map import SlotMap
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients


def peer_experts(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor,
                 v1_EFH: torch.Tensor | None, activation: str, engine: str, spread: Spread,
                 meanwhile: Callable[[], None] | None = None, gradient_scale: float = 1.0) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * mlp_e(x[t]), as gbmoe.expert_mlp, with the experts spread over the ranks of a group.

    Every rank calls it, in the same order. Differentiable in x, weights, w1, w2 and v1. It waits for the device once, for the
    number of rows, unless `spread.rows` bounds it.

    Args:
        x_TH: [T,H] of this rank, bfloat16, float16 or float32 on CUDA; T may differ between ranks, and be 0.
        ids_TK: each token's experts [T,K], ids among the experts of all ranks, int64; -1 drops a slot.
        weights_TK: [T,K], any floating dtype but float64; None gives every slot the weight one.
        w1_EFH, w2_EFH, v1_EFH: the weights of this rank's experts.
        activation: a name in gbmoe.kernels.plain_torch.ACTIVATIONS.
        engine: see gbmoe.engines.
        spread: how the experts are spread over the group.
        meanwhile: called once, to start work that the device does while the host waits for the number of rows.
        gradient_scale: the gradients of w1, w2 and v1 are multiplied by it.
    """
    memory = of_group(spread.group, x_TH.device, spread.timeout_seconds)
    x_TH, ids_TK = x_TH.contiguous(), ids_TK.long().contiguous()
    memory.begin()
    with torch.no_grad():
        arrival = Arrival(memory, x_TH, ids_TK, weights_TK, spread, pulls_ahead=True)
    if meanwhile is not None:
        meanwhile()
    with torch.no_grad():
        arrived = arrival.finish()
        rows = [arrival.rows_ahead() or pull_rows(arrived.regions.peers["x"], arrived.slots, x_TH, memory.rank)]
        sizes_E = arrival.sizes(engine, arrived.slots.num_rows, w1_EFH)
    out_TH = _PeerExperts.apply(x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, ids_TK, activation, engine, spread, arrived, rows, sizes_E,
                                gradient_scale)
    memory.end()
    return out_TH


def pull_rows(addresses: torch.Tensor, slots: SlotMap, like_TH: torch.Tensor, rank: int) -> GatheredRows:
    """The rows of this rank's experts, read from every rank's memory. `addresses` are those of the ranks' tokens."""
    rows_PH = like_TH.new_empty(slots.num_rows, like_TH.size(1))
    torch.ops.gbmoe_cuda.pull_rows(addresses, rank, slots.row_of_slot_TK, rows_PH)
    return GatheredRows(None, slots, rows_PH)


# Up to peer_memory.RANKS_WITH_COPY_ENGINES ranks, copy engines copy whole matrices of tokens while backward's GEMMs run. The GEMMs need
# all multiprocessors, and copy engines none. But copy engines also copy the rows that are not needed here: with eight slots a token
# these are hardly any of another rank's rows where there are two ranks, but a third of them where there are eight.


class _TokensOnTheirWay:
    """All ranks' tokens x: the ranks publish them, and once they `depart` the copy engines bring them here while GEMMs run."""

    def __init__(self, memory: PeerMemory, arrived: Arrived, x_TH: torch.Tensor):
        self._memory, self._arrived, self._x_TH, self._stream = memory, arrived, x_TH, memory.side_stream()
        own_CH = arrived.regions.own["x"]
        self._x_WCH = x_TH.new_empty(memory.ranks, *own_CH.shape)
        self._stream.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(self._stream):
            own_CH[: x_TH.size(0)].copy_(x_TH)
            memory.barrier(channel=1)

    def depart(self) -> None:
        """Begin the copies when the current stream gets here: rows that it pulls before have the links to themselves."""
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        with torch.cuda.stream(self._stream):
            for rank in self._memory.others():
                _copy_rows(self._x_WCH[rank], self._arrived.regions.x_of_rank[rank], self._arrived.tokens_W[rank])
            _copy_rows(self._x_WCH[self._memory.rank], self._x_TH, self._x_TH.size(0))
            self._copied = self._stream.record_event()
        # _x_WCH was allocated on the current stream, which waits for the side stream before the next pass: no record_stream is needed.

    def gathered(self, arrived: Arrived) -> GatheredRows:
        """The rows of this rank's experts, once the current stream has waited for the copies."""
        # And not for what has come to the side stream after them.
        torch.cuda.current_stream(self._x_WCH.device).wait_event(self._copied)
        return GatheredRows(self._x_WCH.flatten(0, 1), arrived.slots)


class _SumsOnTheirWay:
    """The sums of the other ranks' tokens, on their way to their owners: the copy engines take them there while later GEMMs run."""

    def __init__(self, memory: PeerMemory, arrived: Arrived, y_PH: torch.Tensor):
        regions = arrived.regions
        self._device, self._stream = memory.device, memory.side_stream()
        shape = regions.own["x"].shape
        self._sums_WCH = y_PH.new_empty(memory.ranks, *shape)
        # The kernel writes the sums for a rank to row [this rank] of that rank's [W,C,H]. Here they go to a buffer of their own,
        # so the address that it is given lies as many bytes in front of the buffer.
        before = memory.rank * self._sums_WCH[0].nbytes
        addresses = torch.tensor([regions.own["pushed"].data_ptr() if rank == memory.rank else sums_CH.data_ptr() - before
                                  for rank, sums_CH in enumerate(self._sums_WCH)], dtype=torch.int64, device="cpu")
        torch.ops.gbmoe_cuda.push_row_sums(y_PH, arrived.slots.row_of_slot_TK, None, addresses, memory.rank)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for rank in memory.others():
                _copy_rows(regions.pushed_of_rank[rank], self._sums_WCH[rank], arrived.tokens_W[rank])

    def wait(self) -> None:
        """Let the current stream wait until the sums have arrived."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _copy_rows(to_CH: torch.Tensor, from_CH: torch.Tensor, rows: int) -> None:
    """Copy the first rows by a copy engine, if one of the two is another rank's."""
    to_CH[:rows].copy_(from_CH[:rows], non_blocking=True)


def push_sums(y_PH: torch.Tensor, arrived: Arrived, weights_SK: torch.Tensor | None, rank: int) -> None:
    """Write each token's weighted sum of its rows y here into its owner's memory; with by_slot, the rows themselves, unweighted."""
    layout, peers = arrived.regions.layout, arrived.regions.peers["pushed"]
    if layout.by_slot:
        torch.ops.gbmoe_cuda.push_slot_rows(y_PH, arrived.slots.slot_of_row_P, layout.top_k, layout.tokens, peers)
    else:
        torch.ops.gbmoe_cuda.push_row_sums(y_PH, arrived.slots.row_of_slot_TK, weights_SK, peers, rank)


def sum_of_ranks(arrived: Arrived, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None,
                 spread: Spread, scale: float = 1.0) -> torch.Tensor:
    """Add up, for each token of this rank, what the ranks have pushed: `scale` times their sums or, with by_slot, its slots' rows.
    After a barrier."""
    pushed, ids_TK = arrived.regions.own["pushed"], ids_TK.contiguous()
    if spread.by_slot:
        slots_TK = torch.arange(ids_TK.numel(), dtype=torch.int32, device=ids_TK.device).view(ids_TK.shape)
        slots_TK = torch.where((ids_TK >= 0) & (ids_TK < spread.experts), slots_TK, -1)
        return scatter(pushed, SlotMap(row_of_slot_TK=slots_TK, slot_of_row_P=slots_TK.flatten()), weights=weights_TK)
    out_TH = x_TH.new_empty(x_TH.shape)
    torch.ops.gbmoe_cuda.sum_pushed_rows(pushed, ids_TK, spread.experts, spread.experts_per_rank, scale, out_TH)
    return out_TH


def scales_rows(gradient_scale: float, dtype: torch.dtype, spread: Spread) -> bool:
    """Whether peer_experts, for tokens of this dtype, scales in backward each row's router weight by gradient_scale, and so dh, dg and the
    gradients of the weights, and divides dx by it where the owner adds up the ranks' sums. Otherwise it scales the gradients of the
    weights, a pass over all of them. With by_slot dx is summed by the scatter, without a scale.
    """
    return gradient_scale != 1 and scales_exactly(gradient_scale, dtype) and not spread.by_slot


class _PeerExperts(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, ids_TK, activation, engine, spread, arrived, rows, sizes_E, gradient_scale):
        memory = of_group(spread.group, x_TH.device, spread.timeout_seconds)
        save = any(ctx.needs_input_grad)
        experts = engines.for_experts(engine, x_TH, arrived.slots.num_rows, w1_EFH, sizes_E)
        # `rows` is emptied, so that their memory is free again for what follows.
        a_PF, h_PF, g_PF = experts.up(rows.pop(), w1_EFH, v1_EFH, sizes_E, activation, save)
        y_PH = experts.down(a_PF, w2_EFH, sizes_E)
        del a_PF
        push_sums(y_PH, arrived, arrived.weights_SK, memory.rank)
        memory.barrier()
        out_TH = sum_of_ranks(arrived, x_TH, ids_TK, weights_TK, spread)
        if save:
            ctx.save_for_backward(x_TH, ids_TK, weights_TK, w1_EFH, w2_EFH, v1_EFH, h_PF, g_PF, arrived.slots.row_of_slot_TK,
                                  arrived.slots.slot_of_row_P, sizes_E, arrived.weights_SK)
            ctx.activation, ctx.engine, ctx.spread, ctx.layout = activation, engine, spread, arrived.regions.layout
            ctx.gradient_scale, ctx.tokens_W = gradient_scale, arrived.tokens_W
        return out_TH

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx, grad_TH):
        (x_TH, ids_TK, weights_TK, w1_EFH, w2_EFH, v1_EFH, h_PF, g_PF, row_of_slot_SK, slot_of_row_P, sizes_E,
         weights_SK) = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        need_x, need_weights, need_w1, need_w2, need_v1 = ctx.needs_input_grad[:5]
        spread, tokens = ctx.spread, x_TH.size(0)
        memory = of_group(spread.group, x_TH.device, spread.timeout_seconds)
        memory.begin()
        slots = SlotMap(row_of_slot_TK=row_of_slot_SK, slot_of_row_P=slot_of_row_P)
        arrived = Arrived(memory.regions(ctx.layout), slots, weights_SK, ctx.tokens_W)
        own = arrived.regions.own
        dx_TH = dweights_TK = None
        gradients = WeightGradients(MEGABLOCKS, w1_EFH, w2_EFH, v1_EFH)
        beside = memory.ranks <= peer_memory.RANKS_WITH_COPY_ENGINES
        tokens_x = _TokensOnTheirWay(memory, arrived, x_TH) if beside and (need_w1 or need_v1) else None
        own["grad"][:tokens].copy_(grad_TH)
        if tokens_x is None and (need_w1 or need_v1):
            own["x"][:tokens].copy_(x_TH)
        memory.barrier()
        experts = engines.for_experts(ctx.engine, x_TH, slot_of_row_P.size(0), w1_EFH, sizes_E)
        dz = pull_rows(arrived.regions.peers["grad"], slots, x_TH, memory.rank)
        if tokens_x is not None:
            tokens_x.depart()
        scaled_rows = scales_rows(ctx.gradient_scale, x_TH.dtype, spread)
        if scaled_rows:
            ones = torch.ones_like(row_of_slot_SK, dtype=torch.float32) if weights_SK is None else weights_SK
            weights_SK = ones * ctx.gradient_scale
        a_PF, dh_PF, dg_PF, dweights_SK, (dh, dg) = experts.down_backward(dz, w2_EFH, sizes_E, h_PF, g_PF, weights_SK, ctx.activation)
        del h_PF, g_PF
        if need_weights:
            torch.ops.gbmoe_cuda.push_slot_scalars(dweights_SK, row_of_slot_SK, slot_of_row_P.size(0), spread.shard,
                                                   arrived.regions.peers["pushed_scalars"])
        sums = None
        if need_x:
            dxp_PH = experts.up_backward(dh, w1_EFH, dg, v1_EFH, sizes_E)
            if beside and not spread.by_slot:
                sums = _SumsOnTheirWay(memory, arrived, dxp_PH)
            else:
                push_sums(dxp_PH, arrived, None, memory.rank)
            del dxp_PH
        del dh, dg
        if need_w2:
            experts.weight_gradient(a_PF, dz, sizes_E, gradients["w2"])
        del a_PF, dz
        if need_w1 or need_v1:
            xp = pull_rows(arrived.regions.peers["x"], slots, x_TH, memory.rank) if tokens_x is None else tokens_x.gathered(arrived)
            del tokens_x
            if need_v1:
                experts.weight_gradient(dg_PF, xp, sizes_E, gradients["v1"])
            del dg_PF
            if need_w1:
                experts.weight_gradient(dh_PF, xp, sizes_E, gradients["w1"])
            del xp
        dw1, dw2, dv1 = gradients.tensors(1.0 if scaled_rows else ctx.gradient_scale)
        if sums is not None:
            sums.wait()
        memory.barrier()
        if need_x:
            dx_TH = sum_of_ranks(arrived, x_TH, ids_TK, None, spread, 1 / ctx.gradient_scale if scaled_rows else 1.0)
        if need_weights:
            dweights_TK = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
            torch.ops.gbmoe_cuda.sum_pushed_scalars(own["pushed_scalars"], ids_TK, memory.ranks, spread.experts, spread.experts_per_rank,
                                                    dweights_TK)
        memory.end()
        return dx_TH, dweights_TK, dw1, dw2, dv1, *[None] * 8

