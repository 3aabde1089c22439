"""Run configurations in all processes of torchrun together: every rank verifies and times the same rows, and the first one reports.

Rivals run in these processes too, so a rival that crashes ends the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.running.sustained_timer import AMONG_RANKS, AMONG_RANKS_QUICK, time_in_turns
from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.measurement import Configuration, Measurement, Refusal, Subject
from gbmoe.cli.bench.roofline import Limits
from gbmoe.cli.bench.running.processes import OneProcess
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.timing_statistics import Timing
from gbmoe.cli.bench.running.verify_and_time import (
    ERROR,
    LEFT_OUT,
    OUT_OF_MEMORY,
    VERIFIED,
    WRONG,
    Conditions,
    all_rates,
    extra_peak_bytes,
    finite_or_none,
    forget,
    in_words,
    unmeasured,
)
from gbmoe.parallel import release
from gbmoe.testing import exact_inputs

_COMMAND = "torchrun --nproc-per-node 2 -m gbmoe bench --suite"


class Ranks(OneProcess):
    """All processes of torchrun, which make the same rows together; the first one tells."""

    refused = ("engines", "memory_limit")

    def problem(self, suite: str, device: torch.device) -> str | None:
        """None if this process is one of several ranks that torchrun has started, otherwise what is wrong, with the command to use."""
        ranks = os.environ.get("WORLD_SIZE", "")
        if not ranks.isdigit() or int(ranks) < 2 or not {"RANK", "LOCAL_RANK", "MASTER_ADDR"} <= set(os.environ):
            return f"suite {suite} needs at least two processes, which torchrun starts: {_COMMAND} {suite}"
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if device.type == "cuda" and here > torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            return f"suite {suite} needs a GPU for each process of a machine, and torchrun has started {here} processes for {gpus} GPUs"
        return None

    def tells(self) -> bool:
        """True of the first rank, and of a process that torchrun has not started."""
        return os.environ.get("RANK", "0") == "0"

    def device(self, device: torch.device) -> torch.device:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device.type == "cuda" else device

    @contextmanager
    def joined(self, device: torch.device, timeout: float) -> Iterator[None]:
        """Join the process group of all ranks, and leave it at the end. A rank that waits for the others longer than `timeout` seconds
        fails."""
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout), device_id=device if on_gpu else None)
        yield
        # Not after an exception, when the other ranks may be in the middle of a collective.
        release()
        dist.destroy_process_group()

    def agreed(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def about(self) -> dict:
        return {"ranks": dist.get_world_size()}

    def why_no_energy(self, device: torch.device) -> str:
        return "of one GPU alone"

    def effort(self, quick: bool) -> Sustained:
        return AMONG_RANKS_QUICK if quick else AMONG_RANKS

    def runner(self, conditions: Conditions, quick: bool, timeout: float) -> RankRunner:
        return RankRunner(conditions, self.effort(quick))


class RankRunner:
    """Makes the rows of configurations, the same on all ranks; it has the methods of parent_process.Runner that the suite needs."""

    def __init__(self, conditions: Conditions, effort: Sustained):
        self.conditions, self.effort = conditions, effort
        self.rivals_left_out: dict[str, str] = {}
        self.rivals_about: dict[str, str] = {}

    def __enter__(self) -> RankRunner:
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        # Not after an exception, when the other ranks may be elsewhere.
        for name in self.rivals_about if kind is None else ():
            rivals.load(name).end()

    def run(self, configuration: Configuration, report: Callable[[dict | None], object] = lambda row: None) -> list[dict]:
        """The configuration's rows: those of one contest are verified one after the other and timed in turns. `report` is called
        after each, with None for one that is left out with its rival."""
        rows = []
        for measurements in configuration.contests():
            for row in self._contest(measurements):
                report(row)
                rows += [] if row is None else [row]
        forget(self.conditions.device)
        return rows

    def _contest(self, measurements: Sequence[Measurement]) -> list[dict | None]:
        device, subjects = self.conditions.device, dict[str, Subject]()
        rows: dict[str, Any] = {}
        for measurement in measurements:
            rows[measurement.name] = row = self._verified(measurement, subjects)
            if row is not None and row["verified"]:
                row["extra_peak_bytes"] = self._most(extra_peak_bytes(measurement, subjects[measurement.name], device))
        taking_part = [measurement for measurement in measurements if measurement.name in subjects]
        timings = time_in_turns([subjects[measurement.name] for measurement in taking_part], device, self.effort)
        for measurement, timing in zip(taking_part, timings):
            rows[measurement.name] |= self._times(measurement, subjects[measurement.name], *timing)
        return [rows[measurement.name] for measurement in measurements]

    def _verified(self, measurement: Measurement, subjects: dict[str, Subject]) -> dict | None:
        """The row without a time, or None for a rival that cannot be used. If the result is right, its subject goes into `subjects`."""
        device = self.conditions.device
        row = unmeasured(measurement, self.conditions, ERROR, None)
        if measurement.implementation in rivals.RIVALS and not self._is_available(measurement.implementation):
            return None
        exact_inputs.poison(device)
        subject, failure = self._on_all(lambda: measurement.build(device, self.conditions.dtype))
        if failure is None:
            outputs, failure = self._on_all(subject.outputs)
        if failure is None:
            verdict, failure = self._on_all(lambda: subject.check(outputs))
        if failure is not None:
            return row | failure
        outputs = None
        subject.reset()
        worst = max(_gathered((not verdict.passed, finite_or_none(verdict.error), finite_or_none(verdict.limit), str(verdict))),
                    key=lambda found: (found[0], found[1] is None, found[1] or 0.0))
        row |= {"error": worst[1], "limit": worst[2]} | subject.facts()
        if worst[0]:
            return row | {"outcome": WRONG, "problem": worst[3]}
        subjects[measurement.name] = subject
        return row | {"outcome": VERIFIED, "verified": True}

    def _times(self, measurement: Measurement, subject: Subject, together: Timing, each: list[Timing]) -> dict:
        limits = Limits() if measurement.kind == "link" else self.conditions.limits  # which are a GPU's, and no link's
        return all_rates(measurement, together, each, self._most(subject.bytes_moved()), limits)

    def _is_available(self, name: str) -> bool:
        if name not in self.rivals_left_out and name not in self.rivals_about:
            rival = rivals.load(name)
            reasons = _gathered(rival.unavailable(self.conditions.device))
            found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
            if found:
                self.rivals_left_out[name] = reasons[0] or found[0]
            else:
                self.rivals_about[name] = rival.about() or name
        return name in self.rivals_about

    def _on_all(self, call: Callable[[], Any]) -> tuple[Any, dict | None]:
        """(the result of `call` on this rank, None), or a row that says how it failed if it did on any rank."""
        result = failure = None
        try:
            result = call()
        except Refusal as refusal:
            failure = {"outcome": LEFT_OUT, "problem": str(refusal)}
        except torch.OutOfMemoryError as error:
            failure = {"outcome": OUT_OF_MEMORY, "problem": str(error).splitlines()[0]}
        except Exception as error:  # an implementation that raises is a result, and the other rows are still to be made
            failure = {"outcome": ERROR, "problem": in_words(error)}
        return result, next((found for found in _gathered(failure) if found is not None), None)

    def _most(self, count: int | None) -> int | None:
        """The largest `count` of all ranks."""
        return None if count is None else max(_gathered(count))


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks, in their order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
