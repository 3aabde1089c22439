"""The processes of a run, which all get the same arguments: here there is one. benchmarks/ has those that torchrun starts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gbmoe.cli.bench.running.energy import counter_of
from gbmoe.cli.bench.running.parent_process import Runner
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.sustained_turns import ProcessRunner
from gbmoe.cli.bench.running.verify_and_time import BURSTS, Conditions

IN_TURNS, IN_TURNS_QUICK = Sustained(0.5, 3), Sustained(0.1, 3)


class OneProcess:
    """A run in this process, which starts others for rivals and for those that take turns."""

    # Options that such a run does not take.
    refused: tuple[str, ...] = ()

    def problem(self, suite: str, device: torch.device) -> str | None:
        """None if the suite can run here, otherwise what is wrong."""
        return None

    def tells(self) -> bool:
        """Whether this process prints and writes."""
        return True

    def device(self, device: torch.device) -> torch.device:
        """This process' own device of that type."""
        return device

    def joined(self, device: torch.device, timeout: float) -> AbstractContextManager:
        """A context in which all processes of the run are there."""
        return nullcontext()

    def agreed(self, value: Any) -> Any:
        """The value that the first process has."""
        return value

    def about(self) -> dict:
        """What the result file says about the processes."""
        return {}

    def why_no_energy(self, device: torch.device) -> str | None:
        """None if the energy of a call can be measured, otherwise the reason why not."""
        return counter_of(device)[1]

    def effort(self, quick: bool) -> Sustained:
        """How long calls are repeated for sustained times."""
        return IN_TURNS_QUICK if quick else IN_TURNS

    def runner(self, conditions: Conditions, quick: bool, timeout: float):
        """What makes the rows of configurations, as the conditions say that they are timed."""
        if conditions.timing == BURSTS:
            return Runner(conditions, timeout)
        return ProcessRunner(conditions, self.effort(quick), timeout)

