"""Time a call: warm, with a cold L2 cache, as a median with its quartiles.

On CUDA by events, with a buffer several times the L2 read before each repetition, so that no repetition finds its operands
where the last one left them. Read, not written: a written buffer would leave the cache full of lines that the call has to
write back, tens of megabytes that are not its own. Reading also gives the host a head start, as in a busy training step, and
is repeated where that must cover all that the host does in the call. Elsewhere by time.perf_counter.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

_BUDGET_SECONDS = 0.5
_REPETITIONS = (10, 100)
_MOST_FLUSHES = 64


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, first and third quartile, over `repetitions` calls."""
    median: float
    low: float
    high: float
    repetitions: int


def time_calls(call: Callable[[], object], device: torch.device, reset: Callable[[], object] = lambda: None,
               hide_host: bool = False) -> Timing:
    """Time `call`, with `reset` called, untimed, before each repetition. Device memory in use grows by a few L2 caches.

    With `hide_host` the device is kept busy until the host has enqueued the whole call, however short its kernels are.
    """
    measure = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    measure(call, device, reset, 2)
    if hide_host and device.type == "cuda":
        measure = partial(_cuda_seconds, flushes=_covering_flushes(call, device, reset))
    once = statistics.median(measure(call, device, reset, 3))
    fewest, most = _REPETITIONS
    seconds = measure(call, device, reset, int(min(most, max(fewest, _BUDGET_SECONDS / max(once, 1e-9)))))
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, len(seconds))


def _cpu_seconds(call, device, reset, repetitions) -> list[float]:
    seconds = []
    for _ in range(repetitions):
        reset()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _flush_with(device) -> Callable[[], object]:
    buffer = torch.zeros(4 * torch.cuda.get_device_properties(device).L2_cache_size // 4, dtype=torch.int32, device=device)
    return buffer.max


def _covering_flushes(call, device, reset) -> int:
    """How many flushes the device spends twice the time on that the host needs to enqueue the call."""
    host = []
    for _ in range(5):
        reset()
        torch.cuda.synchronize(device)
        host += _cpu_seconds(call, device, lambda: None, 1)
    flush = statistics.median(_cuda_seconds(_flush_with(device), device, lambda: None, 5))
    return min(_MOST_FLUSHES, 1 + math.ceil(2 * statistics.median(host) / flush))


def _cuda_seconds(call, device, reset, repetitions, flushes=1) -> list[float]:
    flush = _flush_with(device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    torch.cuda.synchronize(device)
    for start, end in events:
        reset()
        for _ in range(flushes):
            flush()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in events]
