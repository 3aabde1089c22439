"""One implementation's turn in a race: work for some time, then as long again that is timed, with the energy that it took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from gbmoe.cli.bench.measurements.measurement import Subject
from gbmoe.cli.bench.running.energy import EnergyCounter
from gbmoe.cli.bench.running.repeat import Clock, repeat

# More calls than are needed, because a device's clock may rise meanwhile.
_MORE = 1.1
_FASTER_THAN_ANY = 1e-7
_MOST_CALLS = 1_000_000


@dataclass(frozen=True)
class Turn:
    """Seconds of a call on average, and of each of its steps; its energy, where it is known; and how many calls were timed."""
    seconds: float
    steps: list[float]
    joules: float | None
    calls: int


def take_turn(subject: Subject, clock: Clock, seconds: float, calls: int = 2, counter: EnergyCounter | None = None,
              now: Callable[[], float] = time.perf_counter) -> Turn:
    """Call the subject for at least `seconds` and, directly after that, for at least `seconds` that are timed.

    Args:
        calls: how many untimed and how many timed calls to begin with. Where they take less than `seconds`, all is done again with
            more; the next turn may begin with Turn.calls.
        now: the host's clock, which times the counter's samples.
    """
    while True:
        with nullcontext() if counter is None else counter:
            found = repeat(subject, clock, before=calls, timed=calls)
            end = now()
        shorter = min(found.before, found.timed)
        if shorter >= seconds or calls == _MOST_CALLS:
            break
        calls = min(_MOST_CALLS, max(calls + 1, math.ceil(_MORE * calls * seconds / max(shorter, _FASTER_THAN_ANY * calls))))
    watts = None if counter is None else counter.watts(end - found.timed, end)
    once = found.timed / calls
    return Turn(once, found.steps, None if watts is None else watts * once, calls)
