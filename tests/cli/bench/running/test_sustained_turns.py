"""Rows that are timed sustained: who is ready when, in which process, in which order, and what becomes of those that fail."""

import itertools
import os

import pytest
import torch

from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.measurements.measurement import Configuration
from gbmoe.cli.bench.running import rival_process, sustained_turns
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.sustained_turn import Turn
from gbmoe.cli.bench.running.sustained_turns import ProcessRunner
from gbmoe.cli.bench.running.verify_and_time import SUSTAINED, Conditions
from gbmoe.testing import moe_shapes
from tests.cli.bench.running.test_rival_process import FATES, TIMES, fake  # noqa: F401  (a fixture)

CONDITIONS = Conditions(torch.device("cpu"), torch.float32, timing=SUSTAINED)


def measured(*names, computations=("forward",), rounds=3, seconds=1e-4, conditions=CONDITIONS):
    """(rows by name, the runner's rivals left out, what was reported)."""
    case, reported = moe_shapes.SMOKE_CASES[0], []
    ways = [("gbmoe", name.removeprefix("gbmoe-")) if name.startswith("gbmoe-") else (name, None) for name in names]
    measurements = [LayerMeasurement(case, *way, "uniform", computation) for way in ways for computation in computations]
    with ProcessRunner(conditions, Sustained(seconds, rounds), timeout=60) as runner:
        rows = runner.run(Configuration("layer/tiny-mlp/uniform", tuple(measurements)), reported.append)
        return {row["name"]: row for row in rows}, runner.rivals_left_out, reported


@pytest.mark.slow
def test_rows_say_how_they_were_timed_and_have_all_of_a_burst():
    rows, _, reported = measured("gbmoe-auto", "gbmoe-reference", "bmm", computations=("forward", "forward+backward"))
    assert len(rows) == 6 and reported == list(rows.values())
    for row in rows.values():
        assert row["verified"] and row["timing"] == SUSTAINED and TIMES <= set(row)
        assert row["joules"] is None and row["extra_peak_bytes"] is None and row["repetitions"] >= 3
        low, high = row["quartiles"]
        assert 0 < low <= row["median"] <= high
    training = rows["layer/tiny-mlp/uniform/forward+backward/gbmoe-auto"]
    assert training["forward"]["flops"] * 3 == training["flops"] and training["backward"]["median"] > 0


def test_turns_are_taken_in_rotated_rounds_when_all_are_ready(monkeypatch):
    asked = []

    class Telling(rival_process.Worker):
        def make_ready(self, measurement):
            asked.append(f"{self.rival} ready")
            return super().make_ready(measurement)

        def take_turn(self, seconds):
            asked.append(self.rival)
            return super().take_turn(seconds)

    monkeypatch.setattr(sustained_turns, "Worker", Telling)
    rows, *_ = measured("bmm", "loop", "gbmoe-auto")
    assert all(row["verified"] for row in rows.values())
    names = ["bmm", "loop", "gbmoe-auto"]
    assert asked == [*(f"{name} ready" for name in names), *names, *names[1:], names[0], names[2], *names[:2]]


class _Serving:
    """What a process does, with a variable of its own: it is forked from a server that has the environment of its own start."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def __call__(self, *arguments):
        os.environ[self.name] = self.value
        rival_process._serve(*arguments)  # there it is as it was


def test_each_has_a_process_of_its_own_in_which_nothing_is_made_between_turns(fake, monkeypatch, tmp_path):  # noqa: F811
    log, names = tmp_path / "log", [fake("Logging"), fake("LoggingToo")]
    monkeypatch.setattr(rival_process, "_serve", _Serving("GBMOE_TEST_LOG", str(log)))
    measured(*names)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len({process for process, *_ in lines}) == len({(process, name) for process, name, _ in lines}) == 2
    assert [name for _, name, what in lines if what == "made"] == names
    runs = [name for name, _ in itertools.groupby(name for _, name, what in lines if what == "called")]
    a, b = names
    assert runs == [a, b, a, b, a, b], "verified, a before b, and then a b, b a, a b"


@pytest.mark.parametrize("name, outcome, words", [
    ("CrashingLater", "crashed", "was killed by SIGSEGV"),
    ("OutOfMemoryLater", "out of memory", "OutOfMemoryLater: CUDA out of memory. Tried to allocate 64.00 GiB. (also resident: bmm"),
])
def test_one_that_fails_in_its_turn_has_no_time_and_the_others_go_on(fake, name, outcome, words):  # noqa: F811
    rows, *_ = measured("bmm", fake(name), "loop", computations=("forward", "forward+backward"))
    for computation in ("forward", "forward+backward"):
        row = rows[f"layer/tiny-mlp/uniform/{computation}/{name}"]
        assert (row["outcome"], row["verified"]) == (outcome, False) and words in row["problem"]
        assert not TIMES & set(row) and "extra_peak_bytes" not in row
        assert all(rows[f"layer/tiny-mlp/uniform/{computation}/{other}"]["median"] for other in ("bmm", "loop"))


def test_whatever_rivals_do_the_others_are_timed(fake):  # noqa: F811
    names = [fake(name) for name in (*FATES, "Absent", "CrashingImport")]
    rows, left_out, reported = measured(*names, "bmm")
    for name, (outcome, words) in FATES.items():
        row = rows[f"layer/tiny-mlp/uniform/forward/{name}"]
        assert row["outcome"] == outcome and words in row["problem"] and not TIMES & set(row)
    assert rows["layer/tiny-mlp/uniform/forward/bmm"]["median"]
    assert left_out["Absent"] == "it is not here" and "ended with status 3" in left_out["CrashingImport"]
    assert reported.count(None) == 2


def test_memory_that_ran_out_says_whose_it_was(fake):  # noqa: F811
    rows, *_ = measured("bmm", "gbmoe-auto", fake("OutOfMemory"))
    problem = rows["layer/tiny-mlp/uniform/forward/OutOfMemory"]["problem"]
    assert problem.startswith("OutOfMemory: CUDA out of memory.") and problem.endswith("(also resident: bmm, gbmoe-auto)")


def test_energy_is_the_median_of_the_rounds_that_have_it(monkeypatch):
    found = iter([Turn(1e-3, [1e-3], joules, 7) for joules in (0.7, None, 0.5)])
    monkeypatch.setattr(rival_process.Worker, "take_turn", lambda self, seconds: next(found))
    row, = measured("gbmoe-auto")[0].values()
    assert row["joules"] == 0.6 and row["median"] == 1e-3 and row["repetitions"] == 21


def test_what_a_call_leaves_is_let_go_of_between_turns(monkeypatch):
    """All that take part are on the device at once."""
    measurement = LayerMeasurement(moe_shapes.SMOKE_CASES[0], "gbmoe", "auto", "uniform", "forward+backward")
    row, moved = rival_process._make_ready("gbmoe-auto", measurement, CONDITIONS)
    subject = rival_process._Ready.subject
    try:
        assert row["verified"] and moved > 0 and subject.inputs._oracles == {}
        for _ in range(2):
            assert subject.out_TH is None and subject.x_TH.grad is None
            assert all(parameter.grad is None for parameter in subject.layer.parameters())
            assert isinstance(rival_process._take_turn("gbmoe-auto", CONDITIONS.device, 1e-4), Turn)
    finally:
        rival_process._rest("gbmoe-auto", CONDITIONS.device)
    assert rival_process._Ready.subject is None
