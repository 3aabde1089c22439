"""Time a call: warm, with a cold L2 cache, as a median with its quartiles.

On CUDA by events, with a buffer several times the L2 written before each repetition, so that no repetition finds its operands
where the last one left them; the write also gives the host a head start, as in a busy training step. Elsewhere by
time.perf_counter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BUDGET_SECONDS = 0.5
_REPETITIONS = (10, 100)


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, first and third quartile, over `repetitions` calls."""
    median: float
    low: float
    high: float
    repetitions: int


def time_calls(call: Callable[[], object], device: torch.device, reset: Callable[[], object] = lambda: None) -> Timing:
    """Time `call`, with `reset` called, untimed, before each repetition. Device memory in use grows by a few L2 caches."""
    measure = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    measure(call, device, reset, 2)
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


def _cuda_seconds(call, device, reset, repetitions) -> list[float]:
    flush = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    torch.cuda.synchronize(device)
    for start, end in events:
        reset()
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in events]
