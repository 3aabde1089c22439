"""Time calls as a training step makes them: one directly after the other, on all ranks at once, with the contestants in turns.

In every round each call is repeated for some time untimed and then for as long timed; the contestants' order is rotated from round to
round. A round's time is the mean over its calls on the slowest rank; a row's is the median of its rounds. For implementations with
a process of their own, on one GPU, it is gbmoe/cli/bench/running/sustained_turns.py that does this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gbmoe.cli.bench.measurements.measurement import Subject
from gbmoe.cli.bench.running.repeat import Clock, Sustained, clock_of, repeat
from gbmoe.cli.bench.running.timing_statistics import Timing, of_rounds, rotated

_MOST_CALLS = 20_000

AMONG_RANKS, AMONG_RANKS_QUICK = Sustained(0.3, 3), Sustained(0.02, 2)


def time_in_turns(subjects: Sequence[Subject], device: torch.device, effort: Sustained) -> list[tuple[Timing, list[Timing]]]:
    """For each subject its steps' time together, and each step's. Collective: all ranks bring the same subjects, in one order."""
    clock = clock_of(device)
    calls = [_calls_for(effort.seconds, subject, device, clock) for subject in subjects]
    rounds: list[list[list[float]]] = [[] for _ in subjects]
    for turn in range(effort.rounds):
        for place in rotated(range(len(subjects)), turn):
            dist.barrier()
            rounds[place].append(_of_slowest_rank(subjects[place], device, clock, calls[place]))
            subjects[place].reset()
    of_all = [count * effort.rounds for count in calls]
    return [(of_rounds([each[0] for each in found], count), [of_rounds(step, count) for step in zip(*(each[1:] for each in found))])
            for found, count in zip(rounds, of_all)]


def _calls_for(seconds: float, subject: Subject, device: torch.device, clock: Clock) -> int:
    """How many calls take so long, the same number on all ranks."""
    once = _of_slowest_rank(subject, device, clock, 2)[0]
    return min(_MOST_CALLS, max(2, math.ceil(seconds / once)))


def _of_slowest_rank(subject: Subject, device: torch.device, clock: Clock, calls: int) -> list[float]:
    """Mean seconds of a call, after as many that do not count, and of each of its steps."""
    found = repeat(subject, clock, before=calls, timed=calls)
    slowest = torch.tensor([found.timed / calls, *found.steps], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()
