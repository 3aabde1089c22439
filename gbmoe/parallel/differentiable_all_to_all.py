"""Rows by all-to-all: forward sends them, backward sends their gradients the other way; at once, or started and waited for later.

Shape suffixes: R rows sent, S rows received, K slots of a row, H hidden, B bytes.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gbmoe.parallel.failures import guarded


def all_to_all(out: torch.Tensor, x: torch.Tensor, receives, sends, group):
    if torch.compiler.is_compiling():
        dist.all_to_all_single(out, x, output_split_sizes=receives, input_split_sizes=sends, group=group)
    else:
        _all_to_all_of_host(out, x, receives, sends, group)


def _all_to_all_of_host(out: torch.Tensor, x: torch.Tensor, receives, sends, group, async_op=False):
    """all_to_all_single of contiguous tensors outside of compiled graphs."""
    return guarded(functools.partial(dist.all_to_all_single, out, x, receives, sends, group, async_op), group)


class AllToAll(torch.autograd.Function):
    """Send sends[r] rows to each rank r, in the order of ranks, and receive receives[r] rows from it."""

    @staticmethod
    def forward(ctx, x, receives, sends, group):
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        out = x.new_empty(sum(receives), *x.shape[1:])
        all_to_all(out, x.contiguous(), receives, sends, group)
        return out.view_as(out)  # torch 2.11's compiler loses the gradient of `out` itself, because it was written to in here

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.sends, ctx.receives, ctx.group), None, None, None


class AllToAllWithIds(torch.autograd.Function):
    """The same for router weights [R,K] and ids int32 [R,K] together, in one exchange."""

    @staticmethod
    def forward(ctx, weights_RK, ids_RK, receives, sends, group):
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        weights_SK, ids_SK = weights_with_ids(weights_RK, ids_RK, receives, sends, group)
        ctx.mark_non_differentiable(ids_SK)
        return weights_SK, ids_SK

    @staticmethod
    def backward(ctx, grad, _):
        return AllToAll.apply(grad, ctx.sends, ctx.receives, ctx.group), None, None, None, None


def weights_with_ids(weights_RK, ids_RK, receives, sends, group):
    packed_RB = torch.cat([ids_RK.view(torch.uint8), weights_RK.contiguous().view(torch.uint8)], dim=1)
    out_SB = packed_RB.new_empty(sum(receives), packed_RB.size(1))
    all_to_all(out_SB, packed_RB, receives, sends, group)
    behind_ids = 4 * ids_RK.size(1)
    # clone, as contiguous() returns a single row where it is, whose place may be no multiple of an element.
    ids_SK = out_SB[:, :behind_ids].clone(memory_format=torch.contiguous_format).view(torch.int32)
    return out_SB[:, behind_ids:].clone(memory_format=torch.contiguous_format).view(weights_RK.dtype), ids_SK


def is_recorded(t: torch.Tensor) -> bool:
    """Whether autograd records what is done with t. If not, an autograd.Function does no more than its forward, and takes some 10 us."""
    return t.requires_grad and torch.is_grad_enabled()


class Travelling:
    """Rows under way: start sends them, and wait() returns them when they have arrived.

    Backward runs the same two steps in reverse: _Wait.backward sends the gradient, and _Start.backward returns it when it has arrived.
    """

    def __init__(self, rows, receives, sends, group):
        self.receives, self.sends, self.group = receives, sends, group
        self.work = self.sent = self.back = None
        self.rows = _Start.apply(rows, self) if is_recorded(rows) else self.send(rows, receives, sends)

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
        if is_recorded(rows):
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


class Received:
    """Takes the place of Travelling for rows that do not travel, and under torch.compile, which orders collectives itself."""

    def __init__(self, rows):
        self.rows = rows

    def wait(self):
        return self.rows


def start(rows, receives, sends, group):
    if torch.compiler.is_compiling():
        return Received(AllToAll.apply(rows, receives, sends, group))
    return Travelling(rows, receives, sends, group)
