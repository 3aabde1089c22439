"""Repeat a subject's call without a pause, and say how long a call took: what both sustained timers do.

Between two calls, and between those that do not count and those that do, nothing waits for the device. A clock says when the device
reached a place in its work: a GPU's by events, a CPU's by time.perf_counter, a test's as it likes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from gbmoe.cli.bench.measurements.measurement import Subject


@dataclass(frozen=True)
class Sustained:
    """In each of `rounds`, at least `seconds` of work before at least `seconds` that are timed."""
    seconds: float
    rounds: int

    def in_words(self) -> str:
        return f"{self.seconds:g} s of work before {self.seconds:g} s that are timed, median of {self.rounds} rounds"


class Clock(Protocol):
    """Says when a device reaches a place in its work."""

    def mark(self) -> Any:
        """Mark the end of all work that the device has been given."""

    def wait(self) -> None:
        """Wait until the device has done all its work."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks, which the device has passed."""


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device's work."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Repeated:
    """Seconds: of the calls that do not count, of those that do, and of a call's steps on average; all steps' sum is a call's mean."""
    before: float
    timed: float
    steps: list[float]


def repeat(subject: Subject, clock: Clock, *, before: int, timed: int) -> Repeated:
    """`before` calls and, directly after them, `timed` calls; waits for the device at the end.

    `reset` precedes every call and is part of the time of its first step, as it is of a training step's.
    """
    steps = subject.steps()
    begin = clock.mark()
    for _ in range(before):
        subject.reset()
        for step in steps:
            step()
    marks = [clock.mark()]
    for call in range(timed):
        subject.reset()
        for place, step in enumerate(steps):
            step()
            # Marks cost the host some us: where a call has one step, only the last mark is needed.
            if len(steps) > 1 or (call == timed - 1 and place == len(steps) - 1):
                marks.append(clock.mark())
    clock.wait()
    between = [clock.seconds(*pair) for pair in pairwise(marks)]
    each = [sum(between[place :: len(steps)]) / timed for place in range(len(steps))] if len(steps) > 1 else [sum(between) / timed]
    return Repeated(clock.seconds(begin, marks[0]), clock.seconds(marks[0], marks[-1]), each)
