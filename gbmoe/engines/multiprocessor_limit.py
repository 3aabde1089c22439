"""The limit of multiprocessors that gbmoe's GEMMs take, for schedules in which something else runs at the same time.

csrc/ keeps the number, and each launch reads it (csrc/multiprocessor_limit.cpp): launches of backward on autograd's threads do, and those
of recorded programs (gbmoe/programs/). It decides how many CTAs there are and nothing else, so no choice of kernels takes it into account.
"""

from __future__ import annotations

import threading

import torch

from gbmoe._checks import require
from gbmoe.engines.choice import ENGINES
from gbmoe.launch import availability

_FEWEST = 2       # a cluster has two CTAs
_ALL = 2**31 - 1  # more than there are

_lock = threading.Lock()
_limit: int | None = None  # csrc/ has the same, where it is loaded


class limit_multiprocessors:
    """From this call on gbmoe's grouped GEMMs take at most `most` multiprocessors. Used with `with`, until the end of the block, where the
    limit is again what it was before the call.

    Persistent GEMMs otherwise start a CTA on every multiprocessor, and a kernel on another stream gets a place when they end. With a limit
    they leave room to it: to NCCL's kernels, which move rows of another micro-batch, for example.

    ::

        compute, travel = torch.cuda.Stream(), torch.cuda.Stream()
        gbmoe.limit_multiprocessors(116)             # of 132; once, before training
        with torch.cuda.stream(travel):
            a = gbmoe.parallel.dispatch(x, ids, weights, group, num_experts)
        compute.wait_stream(travel)
        with torch.cuda.stream(compute):
            y = gbmoe.expert_mlp(a.rows_SH, a.plan, w1, w2, v1, weights_TK=a.weights_SK)
        with torch.cuda.stream(travel):              # meanwhile the next micro-batch
            b = gbmoe.parallel.dispatch(next_x, next_ids, next_weights, group, num_experts)
        travel.wait_stream(compute)
        with torch.cuda.stream(travel):
            out = gbmoe.parallel.combine(y, a)

    Tensors that cross streams also want `record_stream`.

    *What is limited:* GEMMs of the engines `hopper`, `tensor_core` and their batch invariant forms, and of float8, in forward and backward.
    `tensor_core` may have two CTAs on a multiprocessor: it starts as many as `most` multiprocessors have room for, and the device may
    spread them over more. *What is not:* GEMMs of few rows an expert, which are not persistent; kernels that route, sort, gather,
    scatter, quantise or move rows; cuBLAS' and torch's GEMMs, which the other engines call.

    *Results* have the same bits with any limit. Tiles, and where sums are split, are chosen for the whole device.

    *Threads, streams, devices:* the number is the process's, for all threads, streams and devices, and each launch reads it on the host. So
    it holds in backward if it holds while `backward()` runs, also in compiled code and in kinds of calls that were recorded before.
    A CUDA graph keeps the number that held when it was captured, torch.compile's graphs too. In code that torch.compile traces,
    the call breaks the graph.

    On a CPU there is nothing to limit, and the call has no effect.

    Args:
        most: at least 2, and no more than the current CUDA device has. An odd number may count as the next lower one, as CTAs may come
            in pairs. None, which is the default: all.

    Raises:
        TypeError, ValueError: with what was expected and what came.
        RuntimeError: the current CUDA device has none of gbmoe's GEMMs; it says why not. Only cuBLAS or torch would compute there.
    """

    def __init__(self, most: int | None):
        _check(most)
        self.most, self._before = most, _exchange(most)

    def __enter__(self) -> limit_multiprocessors:
        _exchange(self.most)
        return self

    def __exit__(self, *_) -> None:
        _exchange(self._before)


def _check(most: int | None) -> None:
    """Raises what limit_multiprocessors raises."""
    if most is None:
        return
    operator, argument = "limit_multiprocessors", "most"
    require(isinstance(most, int) and not isinstance(most, bool), operator, argument, "an int or None", repr(most), TypeError)
    require(most >= _FEWEST, operator, argument, f"at least {_FEWEST}, as CTAs may come in pairs", most)
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.cuda.get_device_properties(device).multi_processor_count
    require(most <= there, operator, argument, f"at most the {there} multiprocessors of {device}", most)
    reason = ENGINES["tensor_core"].unavailable(device)
    if reason is not None:
        raise RuntimeError(f"{operator}: expected a device that gbmoe has GEMMs for, got {device}: tensor_core {reason}. Those of cuBLAS"
                           " and torch cannot be limited")


def _exchange(most: int | None) -> int | None:
    """Make it the limit. Returns what was the limit before."""
    global _limit
    with _lock:  # torch.compile does not trace it, and breaks its graph here, so that launches are limited where the code says
        before, _limit = _limit, most
        if torch.cuda.is_available() and availability.why_not() is None:
            torch.ops.gbmoe_cuda.limit_multiprocessors(_ALL if most is None else most)
        return before
