"""What is kept of the times of many calls: the median and the quartiles. All timers, of bursts and of sustained work, report it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Timing:
    """Seconds: median, first and third quartile, over `repetitions` calls."""
    median: float
    low: float
    high: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """The statistics of at least two times in seconds."""
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


def of_rounds(means: Sequence[float], calls: int) -> Timing:
    """The timing of rounds with that many calls together, from their means."""
    return replace(Timing.of(means), repetitions=calls)


def rotated(rivals: Sequence, turn: int) -> list:
    """The order of the rivals in round `turn`."""
    first = turn % max(len(rivals), 1)
    return [*rivals[first:], *rivals[:first]]
