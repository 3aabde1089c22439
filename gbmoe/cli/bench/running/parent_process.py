"""Run configurations: gbmoe's measurements run in this process, each rival's in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gbmoe.cli.bench.measurements.copy import CopyMeasurement
from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement
from gbmoe.cli.bench.measurements.measurement import FORWARD, Configuration, Measurement
from gbmoe.cli.bench.rivals import RIVALS
from gbmoe.cli.bench.roofline import Limits
from gbmoe.cli.bench.running.rival_process import Worker
from gbmoe.cli.bench.running.verify_and_time import Conditions, forget, measure
from gbmoe.testing.moe_shapes import MoeCase


class Runner:
    """Makes the rows of configurations; keeps the rivals' processes, and whether each rival can be used.

    Example:
        >>> with Runner(Conditions(torch.device("cpu"), torch.float32)) as runner:
        ...     rows = runner.run(configuration)
    """

    def __init__(self, conditions: Conditions, timeout: float = 300):
        self.conditions, self.timeout = conditions, timeout
        self.rivals_left_out: dict[str, str] = {}
        self.rivals_about: dict[str, str] = {}
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()

    def run(self, configuration: Configuration,
            report: Callable[[dict | None], object] = lambda row: None) -> list[dict]:
        """The configuration's rows, gbmoe's first. `report` is called after each measurement, with its row, or with None where the rival
        cannot be used."""
        rows = []

        def keep(row):
            if row is not None:
                rows.append(row)
            report(row)

        ours = [m for m in configuration.measurements if m.implementation not in RIVALS]
        for measurement in ours:
            keep(measure(measurement, self.conditions))
        forget(self.conditions.device)
        theirs: dict[str, list] = {}
        for measurement in configuration.measurements:
            if measurement.implementation in RIVALS:
                theirs.setdefault(measurement.implementation, []).append(measurement)
        for rival, measurements in theirs.items():
            worker = self._worker(rival)
            for measurement in measurements:
                keep(worker.measure(measurement) if worker else None)
            if worker:
                worker.rest()
        return rows

    def _worker(self, rival: str) -> Worker | None:
        """The rival's process, or None if the rival cannot be used."""
        if rival not in self._workers and rival not in self.rivals_left_out:
            worker = Worker(rival, self.conditions, self.timeout)
            reason, about = worker.unavailable()
            if reason is not None:
                worker.stop()
                self.rivals_left_out[rival] = reason
            else:
                self._workers[rival] = worker
                self.rivals_about |= {rival: about} if about else {}
        return self._workers.get(rival)


# The edge of the dense product and the rows of the copy, whose buffer has 4 GiB in bf16 on a GPU and a 128th elsewhere.
LIMITS_ON_A_GPU, LIMITS_ELSEWHERE = (8192, 2**20), (512, 2**13)


def measure_limits(conditions: Conditions, row_of: Callable[[Measurement], dict]) -> tuple[Limits, list[dict]]:
    """The rates of a large dense product and a large copy, verified and timed by `row_of` like everything else, and their rows."""
    edge, tokens = LIMITS_ON_A_GPU if conditions.device.type == "cuda" else LIMITS_ELSEWHERE
    dense = ProductMeasurement(MoeCase(f"dense-{edge}", edge, edge, edge, 1, 1), "dense", None, "equal", FORWARD)
    copy = CopyMeasurement(MoeCase("copy", tokens, 2048, 0, 1, 1), "torch", None, "none", "copy")
    rows = [row_of(dense), row_of(copy)]
    rates = [row[field] * 1e12 if row["verified"] else None for row, field in zip(rows, ("tflops", "terabytes"))]
    return Limits(*rates), rows


def total(configurations: Sequence[Configuration]) -> int:
    """The number of measurements of all configurations."""
    return sum(len(configuration.measurements) for configuration in configurations)
