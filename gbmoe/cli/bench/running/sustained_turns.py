"""Run configurations timed sustained: every implementation resident in a process of its own, one at a time in turns.

All that compete are ready (imported, compiled, verified, and called once more) before the first is timed. In each of the
rounds that follow, whose order rotates, every implementation works for some time and then, without a pause, as long again, timed
(sustained_turn.py). A row's time is the median of its rounds'. Between turns a process keeps only weights and inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gbmoe.cli.bench.measurements.measurement import Configuration, Measurement
from gbmoe.cli.bench.rivals import RIVALS
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.rival_process import Worker
from gbmoe.cli.bench.running.sustained_turn import Turn
from gbmoe.cli.bench.running.timing_statistics import of_rounds, rotated
from gbmoe.cli.bench.running.verify_and_time import OUT_OF_MEMORY, Conditions, all_rates


@dataclass
class _Contestant:
    """One that takes turns: its process, its row so far, the bytes that a call moves, and the turns that it has taken."""
    measurement: Measurement
    worker: Worker
    row: dict
    moved: int | None
    turns: list[Turn] = field(default_factory=list)


class ProcessRunner:
    """Rows of configurations; the same for parent_process.Runner's callers.

    Example:
        >>> with ProcessRunner(Conditions(device, torch.bfloat16, timing=SUSTAINED), Sustained(0.5, 3)) as runner:
        ...     rows = runner.run(configuration)
    """

    def __init__(self, conditions: Conditions, effort: Sustained, timeout: float = 300):
        self.conditions, self.effort, self.timeout = conditions, effort, timeout
        self.rivals_left_out: dict[str, str] = {}
        self.rivals_about: dict[str, str] = {}
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(self, *_) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def run(self, configuration: Configuration, report: Callable[[dict | None], object] = lambda row: None) -> list[dict]:
        """The configuration's rows, contest by contest. `report` is called after each contest with every row of it, with None for one
        that is left out with its rival."""
        rows = []
        for measurements in configuration.contests():
            for row in self._contest(measurements):
                report(row)
                rows += [] if row is None else [row]
        return rows

    def _contest(self, measurements: Sequence[Measurement]) -> list[dict | None]:
        rows: dict[str, dict | None] = {}
        contestants: list[_Contestant] = []
        for measurement in measurements:
            worker = self._worker(measurement)
            rows[measurement.name] = None
            if worker is not None:
                rows[measurement.name], moved = worker.make_ready(measurement)
                row = _naming_whose_memory(rows[measurement.name], contestants)
                if row["verified"]:
                    contestants.append(_Contestant(measurement, worker, row, moved))
        for turn in range(self.effort.rounds):
            for contestant in rotated(contestants, turn):
                self._take_turn(contestant, contestants)
            contestants = [contestant for contestant in contestants if contestant.row["verified"]]
        for contestant in contestants:
            contestant.row |= self._times(contestant)
        for worker in self._workers.values():
            worker.rest()
        return [rows[measurement.name] for measurement in measurements]

    def _take_turn(self, contestant: _Contestant, contestants: Sequence[_Contestant]) -> None:
        taken = contestant.worker.take_turn(self.effort.seconds)
        if isinstance(taken, Turn):
            contestant.turns.append(taken)
        else:
            contestant.row.pop("extra_peak_bytes", None)
            contestant.row |= {"verified": False} | taken
            _naming_whose_memory(contestant.row, [other for other in contestants if other is not contestant])

    def _times(self, contestant: _Contestant) -> dict:
        turns = contestant.turns
        calls = sum(turn.calls for turn in turns)
        together = of_rounds([turn.seconds for turn in turns], calls)
        each = [of_rounds(step, calls) for step in zip(*(turn.steps for turn in turns))]
        joules = [turn.joules for turn in turns if turn.joules is not None]
        return all_rates(contestant.measurement, together, each, contestant.moved, self.conditions.limits) | {
            "joules": statistics.median(joules) if joules else None}

    def _worker(self, measurement: Measurement) -> Worker | None:
        """The process of an implementation; None for a rival that cannot be used."""
        by, rival = measurement.by, measurement.implementation
        if by not in self._workers and rival not in self.rivals_left_out:
            worker = Worker(by, self.conditions, self.timeout)
            reason, about = worker.unavailable() if rival in RIVALS else (None, None)
            if reason is not None:
                worker.stop()
                self.rivals_left_out[rival] = reason
            else:
                self._workers[by] = worker
                self.rivals_about |= {rival: about} if about else {}
        return self._workers.get(by)


def _naming_whose_memory(row: dict, resident: Sequence[_Contestant]) -> dict:
    """The row. Where memory ran out, its problem names whose row it is, and who else was resident."""
    if row["outcome"] == OUT_OF_MEMORY:
        others = ", ".join(contestant.measurement.by for contestant in resident) or "nobody"
        row["problem"] = f"{row['by']}: {row['problem']} (also resident: {others})"
    return row
