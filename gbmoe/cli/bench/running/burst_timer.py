"""Time a call that has been warmed up, with a cold L2 cache: the median of its repetitions, and their quartiles.

On CUDA, events take the times. Before each repetition the device reads a buffer several times as large as the L2 cache, so that no
repetition finds its operands there. The buffer is read rather than written, because a written buffer would leave the cache full of
lines that the timed call has to write back, tens of megabytes that are not its own. While the device reads, the host runs ahead, as in
a busy training step; the read is repeated where it has to cover all of the host's work. Other devices are timed by
time.perf_counter.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from gbmoe.cli.bench.running.timing_statistics import Timing

_MOST_FLUSHES = 64


@dataclass(frozen=True)
class Effort:
    """How often a call is repeated: for `seconds`, but at least `fewest` and at most `most` times."""
    seconds: float
    fewest: int
    most: int


THOROUGH, QUICK = Effort(0.5, 10, 100), Effort(0.1, 3, 20)


def time_steps(steps: Sequence[Callable[[], object]], device: torch.device, reset: Callable[[], object] = lambda: None,
               hide_host: bool = False, effort: Effort = THOROUGH) -> tuple[Timing, list[Timing]]:
    """Time the steps, one after the other: returns (all together, each). `reset` is called before each repetition, untimed.

    Device memory in use grows by a few times the size of the L2 cache. With `hide_host` the device is kept busy until the host has
    enqueued the whole call, however short its kernels are.
    """
    measure = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    measure(steps, device, reset, 2)
    if hide_host and device.type == "cuda":
        measure = partial(_cuda_seconds, flushes=_covering_flushes(steps, device, reset))
    once = statistics.median(map(sum, measure(steps, device, reset, 3)))
    repetitions = min(effort.most, max(effort.fewest, int(effort.seconds / max(once, 1e-9))))
    seconds = measure(steps, device, reset, repetitions)
    return Timing.of([sum(each) for each in seconds]), [Timing.of(step) for step in zip(*seconds)]


def _cpu_seconds(steps, device, reset, repetitions) -> list[list[float]]:
    seconds = []
    for _ in range(repetitions):
        reset()
        marks = [time.perf_counter()]
        for step in steps:
            step()
            marks.append(time.perf_counter())
        seconds.append([end - start for start, end in pairwise(marks)])
    return seconds


def _flush_with(device) -> Callable[[], object]:
    several_caches = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(several_caches // 4, dtype=torch.int32, device=device).max


def _covering_flushes(steps, device, reset) -> int:
    """The number of flushes that take the device twice as long as the host needs to enqueue the call."""
    host = []
    for _ in range(5):
        reset()
        torch.cuda.synchronize(device)
        host += map(sum, _cpu_seconds(steps, device, lambda: None, 1))
    flush = statistics.median(map(sum, _cuda_seconds([_flush_with(device)], device, lambda: None, 5)))
    return min(_MOST_FLUSHES, 1 + math.ceil(2 * statistics.median(host) / flush))


def _cuda_seconds(steps, device, reset, repetitions, flushes=1) -> list[list[float]]:
    flush = _flush_with(device)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)] for _ in range(repetitions)]
    torch.cuda.synchronize(device)
    for start, *ends in marks:
        reset()
        for _ in range(flushes):
            flush()
        start.record()
        for step, end in zip(steps, ends):
            step()
            end.record()
    torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) / 1e3 for start, end in pairwise(each)] for each in marks]
