"""Dispatch, the experts' computation and combine as three steps, for schedules that overlap trips of one micro-batch with another's
products.

    dispatched = dispatch(x_TH, ids_TK, weights_TK, group, num_experts)
    y_SH = expert_mlp(dispatched.rows_SH, dispatched.plan, w1, w2, v1, weights_TK=dispatched.weights_SK)
    out_TH = combine(y_SH, dispatched)

Each step is a part of autograd's graph with one exchange of its own, in backward too. Rows travel as in exchange.py, in one chunk and one
trip.

What keeps ranks together: dispatch, combine and both their backwards begin with a message of one size, whose header says which step this
is, of which dispatch (pass_agreement). So ranks that take steps in different orders meet in these messages. On the CPU each step compares
them before its rows travel. On GPUs only dispatch, which waits for the numbers of rows anyway, does so at once; the others leave theirs to
the next dispatch, or to check_steps.

Shape suffixes: T tokens, K slots a token, R rows sent, S rows received, H hidden, E experts, W ranks, X elements of a message.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._define_operator import refuse_jit_tracing
from gbmoe.ops.permute import gather_slots, scatter_slots
from gbmoe.parallel import groups, pass_agreement
from gbmoe.parallel.differentiable_all_to_all import all_to_all, weights_with_ids
from gbmoe.parallel.dispatch_combine import first_rows_of, plan_of_destinations
from gbmoe.parallel.exchange import as_it_travels, total_rows, with_sizes
from gbmoe.parallel.host_copy import HostCopy, to_device
from gbmoe.parallel.pass_agreement import Needs, joined
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.row_counts import exchanged_counts, message_of
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap


@dataclass(frozen=True)
class _Trip:
    """The way of one dispatch's rows, which its other steps take, too.

    `number` and `layer` name the dispatch; `message` is the shape [W, X] of the messages with which steps begin.
    """

    map: SlotMap
    sends: list[int]
    receives: list[int]
    group: dist.ProcessGroup
    needs: Needs
    layer: int
    number: int
    message: tuple[int, int]

    def back(self, t_S: torch.Tensor) -> torch.Tensor:
        """[S,...] sent back to where the rows came from, [R,...]."""
        out_R = t_S.new_empty(sum(self.sends), *t_S.shape[1:])
        all_to_all(out_R, t_S.contiguous(), self.sends, self.receives, self.group)
        return out_R

    def out(self, t_R: torch.Tensor) -> torch.Tensor:
        """[R,...] sent to the ranks of the rows' experts, [S,...]."""
        out_S = t_R.new_empty(sum(self.receives), *t_R.shape[1:])
        all_to_all(out_S, t_R.contiguous(), self.receives, self.sends, self.group)
        return out_S

    def begin(self, step: str, like: torch.Tensor) -> None:
        """Tell all ranks which step begins, and compare it with theirs now or, on GPUs, later. Raises as pass_agreement.check."""
        path = f"{step} of dispatch {self.number}, {like.size(1)} x {like.dtype} a row"
        header = pass_agreement.begin(self.layer, path, Needs(False, False, False), self.group)
        message_WX = torch.zeros(self.message, dtype=torch.int32, device="cpu")
        message_WX[:, : len(header)] = torch.tensor(header, dtype=torch.int32, device="cpu")
        message_WX = to_device(message_WX, like.device)
        told_WX = torch.empty_like(message_WX)
        all_to_all(told_WX, message_WX, None, None, self.group)
        headers_WN = told_WX[:, : pass_agreement.NUMBERS]
        if _is_compared_later(like.device):
            _LATER.setdefault(self.group, []).append(_Begun(path, header, HostCopy(headers_WN.contiguous())))
        else:
            pass_agreement.check(headers_WN.amax(0).tolist(), self.group)


@dataclass(frozen=True)
class Dispatched:
    """Rows that a dispatch has brought to this rank, and what its experts need to know of them.

    Attributes:
        rows_SH: one row of each token that has any expert here, in the order of ranks. Differentiable in x.
        weights_SK: their router weights, also of slots whose experts are elsewhere. Differentiable in weights.
        plan: the plan of this rank's experts for these rows; the sizes of its groups are on the host.
        tokens_per_expert: of all experts, int32 [E], of this rank's own tokens.
    """

    rows_SH: torch.Tensor
    weights_SK: torch.Tensor
    plan: RoutingPlan
    tokens_per_expert: torch.Tensor
    _trip: _Trip

    def detached(self) -> Dispatched:
        """The same with rows and weights that are leaves of a graph of their own, as far as they required gradients, so that the experts'
        backward can run without dispatch's. Their gradients are for `backward`."""
        rows_SH, weights_SK = (t.detach().requires_grad_(t.requires_grad) for t in (self.rows_SH, self.weights_SK))
        return replace(self, rows_SH=rows_SH, weights_SK=weights_SK)

    def backward(self, leaves: Dispatched) -> None:
        """The backward of dispatch: gradients of `leaves`, which `detached` returned, go to the tokens' ranks. A leaf without a gradient
        counts as one of zeros, as the trip is all ranks'."""
        pairs = [(t, leaf) for t, leaf in ((self.rows_SH, leaves.rows_SH), (self.weights_SK, leaves.weights_SK)) if t.requires_grad]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in pairs]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], gradients)


def dispatch(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, group: dist.ProcessGroup | None, num_experts: int, *,
             layer: int = 0, trains: bool = True) -> Dispatched:
    """Send each token's row once to every rank that holds any of its experts. Every rank of the group must call it, with any number of
    tokens, and all ranks take the steps of all micro-batches in the same order, backward's too.

    The host waits for the device once, for the numbers of rows. Work that is to run meanwhile has to be launched before. Rows travel on
    the current stream, in backward on the same one. torch.compile breaks its graph around it.

    Args:
        x_TH: this rank's tokens, any floating dtype; rows travel in it or, under autocast, in autocast's.
        ids_TK: the tokens' experts, ids among all experts, int32 or int64; an id of no expert drops its slot.
        weights_TK: the tokens' router weights, any floating dtype.
        group: the ranks; None for the default group. Rank r of W holds the experts from r * num_experts / W on.
        num_experts: of all ranks, a multiple of their number.
        layer: the layer's number, the same on all ranks (gbmoe.parallel.pass_agreement.next_layer), or 0.
        trains: whether the experts may have gradients of their own.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        ValueError: on all ranks, where they take different steps, or in different ways; it says which ranks differ in what.
        RuntimeError: where an exchange fails; it names the ranks that are missing.
    """
    if torch.compiler.is_compiling():
        from gbmoe.parallel import uncompiled
        return uncompiled.dispatch(x_TH, ids_TK, weights_TK, group, num_experts, layer=layer, trains=trains)
    refuse_jit_tracing("gbmoe.parallel.dispatch")
    x_TH = as_it_travels("dispatch", x_TH, ids_TK, weights_TK)
    p = _placement(group, num_experts)
    plan = RoutingPlan.from_experts(ids_TK, p.experts, check="none")
    ids_TK = ids_TK.int().contiguous()
    to_ranks = plan_of_destinations(p.keys(ids_TK), p.world, 1)
    header = pass_agreement.header(f"dispatch to {num_experts} experts", layer, x_TH, weights_TK, trains, p.group)
    number = pass_agreement.passes_begun(p.group)
    message_WX = message_of(header, to_ranks, plan, p)
    counts = exchanged_counts(message_WX, p)
    check_steps(p.group)
    trip = _Trip(first_rows_of(to_ranks, total_rows(counts.sends)).slot_map, counts.sends[0], counts.receives[0], groups.whole(group),
                 counts.needs, layer, number, (message_WX.size(0), message_WX.size(1)))
    x_TH, weights_TK = joined(x_TH, counts.needs.x), joined(weights_TK, counts.needs.weights)
    # Flat first, as in gbmoe.parallel.dispatch_combine.
    bytes_TB = ids_TK.view(-1).view(torch.uint8).view(ids_TK.size(0), 4 * ids_TK.size(1))
    ids_RK = gather_slots(bytes_TB, trip.map)[0].view(torch.int32)
    rows_SH, weights_SK, ids_SK = _Dispatch.apply(gather_slots(x_TH, trip.map)[0], gather_slots(weights_TK, trip.map)[0], ids_RK, trip)
    of_experts = RoutingPlan.from_experts(ids_SK - p.first_expert, p.experts_per_rank, check="none")
    return Dispatched(rows_SH, weights_SK, with_sizes(of_experts, counts.sizes), plan.counts_E, trip)


def combine(y_SH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
    """Send each row's sum over this rank's experts back, and add those of a token in the order of ranks, in float32 (float64 for float64),
    rounded once. Every rank must call it for the same dispatch. The host does not wait, except on a CPU, where it waits for the other
    ranks.

    Args:
        y_SH: weighted sums of the rows of `dispatched`, as expert_mlp(rows_SH, plan, ..., weights_TK=weights_SK) returns them; any
            floating dtype, the same on all ranks.
        dispatched: what `dispatch` returned, or its `detached`.

    Returns:
        out [T,H], dtype of y, differentiable in y.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        ValueError: on all ranks, where they take different steps; on GPUs it is the next dispatch that raises, or check_steps.
        RuntimeError: where an exchange fails; it names the ranks that are missing.
    """
    if torch.compiler.is_compiling():
        from gbmoe.parallel import uncompiled
        return uncompiled.combine(y_SH, dispatched)
    refuse_jit_tracing("gbmoe.parallel.combine")
    require(isinstance(dispatched, Dispatched), "combine", "dispatched", "what gbmoe.parallel.dispatch returned",
            type(dispatched).__name__, TypeError)
    require_tensor(y_SH, "combine", "y", rank=2, dtypes=FLOATING, device=dispatched.rows_SH.device)
    expected, trip = list(dispatched.rows_SH.shape), dispatched._trip
    require(list(y_SH.shape) == expected, "combine", "y", f"shape {expected}, one row for each that came", list(y_SH.shape))
    return scatter_slots(_Combine.apply(joined(y_SH, trip.needs.any), trip), trip.map)


def check_steps(group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError if ranks took different steps on GPUs since the last dispatch: call it before an optimizer's step, on all ranks.
    It waits for the device. On CPUs each step has raised already. RuntimeError where ranks do not come; it names them."""
    group = groups.whole(group)
    for step in _LATER.pop(group, ()):
        headers_WN = step.told.wait(group)
        others = [rank for rank, digest in enumerate(headers_WN[:, 1].tolist()) if digest != step.header[1]]
        if others:
            named = [dist.get_global_rank(group, rank) for rank in others]
            raise ValueError(f"{pass_agreement.PASSES_DIFFER}this rank's was the {step.path}, and ranks {named} took another step")


def _is_compared_later(device: torch.device) -> bool:
    """Whether the host would have to wait for a step's headers."""
    return device.type == "cuda"


class _Begun(NamedTuple):
    """A step of which it is not known yet whether all ranks took it; `told` are the headers of all ranks."""

    path: str
    header: list[int]
    told: HostCopy


_LATER: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Begun]] = weakref.WeakKeyDictionary()


def _placement(group: dist.ProcessGroup | None, num_experts: int) -> Placement:
    group = groups.whole(group)
    world = groups.world_of(group, "dispatch", "group")
    require(num_experts > 0 and num_experts % world == 0, "dispatch", "num_experts", f"a multiple of {world} ranks", num_experts)
    return Placement(group=group, world=world, rank=groups.rank_in(group), experts=num_experts, experts_per_rank=num_experts // world,
                     shards=1)


class _Dispatch(torch.autograd.Function):
    """One node, so that its two exchanges are in the same order on all ranks, whatever else a graph has."""

    @staticmethod
    def forward(ctx, rows_RH, weights_RK, ids_RK, trip):
        ctx.trip = trip
        rows_SH = trip.out(rows_RH)
        weights_SK, ids_SK = weights_with_ids(weights_RK, ids_RK, trip.receives, trip.sends, trip.group)
        # What needs a gradient on any rank does on all of them (joined), so that all nodes and leaves are alike.
        ctx.mark_non_differentiable(ids_SK, *(t for t, needs in ((rows_SH, trip.needs.x), (weights_SK, trip.needs.weights)) if not needs))
        return rows_SH, weights_SK, ids_SK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SH, grad_SK, _):
        trip = ctx.trip
        trip.begin("backward", grad_SH)
        grad_RH = trip.back(grad_SH) if trip.needs.x else None
        return grad_RH, trip.back(grad_SK) if trip.needs.weights else None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_SH, trip):
        ctx.trip = trip
        trip.begin("combine", y_SH)
        return trip.back(y_SH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RH):
        ctx.trip.begin("backward of combine", grad_RH)
        return ctx.trip.out(grad_RH), None
