"""A rival's process: whatever the rival does is a result, and the run goes on."""

import pytest
import torch

from gbmoe.cli import main
from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.running import rival_process
from gbmoe.cli.bench.running.burst_timer import QUICK
from gbmoe.cli.bench.running.verify_and_time import Conditions
from gbmoe.testing import moe_shapes

TIMES = {"median", "quartiles", "tflops", "terabytes", "of_limit"}
# What a rival does, the outcome, and what its row says.
FATES = {
    "Crashing": ("crashed", "killed by SIGSEGV | about to touch what is not mine"),
    "Wrong": ("wrong", "relative error"),
    "WrongChoice": ("wrong", "router's choice"),
    "Raising": ("error", "RuntimeError: the rival is broken"),
    "OutOfMemory": ("out of memory", "Tried to allocate 64.00 GiB"),
}


@pytest.fixture
def fake(monkeypatch):
    """Makes a class of tests/cli/bench/fakes.py a rival by the name of the class."""
    def add(name):
        monkeypatch.setitem(rivals.RIVALS, name, f"tests.cli.bench.fakes:{name}")
        return name
    return add


def test_the_run_goes_on_whatever_its_rivals_do(bench, fake, one_case, capsys):
    names = [fake(name) for name in (*FATES, "Absent", "CrashingImport")]
    status, content, rows = bench(rivals=",".join([*names, "bmm"]))
    assert status == 0, "a rival's failure is not gbmoe's"
    for name, (outcome, words) in FATES.items():
        row = rows[f"layer/tiny-mlp/uniform/forward/{name}"]
        assert row["outcome"] == outcome and words in row["problem"], row
        assert not row["verified"] and not TIMES & set(row)
    assert rows["layer/tiny-mlp/uniform/forward+backward/bmm"]["verified"]
    left_out = content["runs"][0]["peers_left_out"]
    assert left_out["Absent"] == "it is not here" and "ended with status 3" in left_out["CrashingImport"]
    assert not any(row["by"] in left_out for row in rows.values())
    captured = capsys.readouterr()
    assert "CRASHED: its process was killed by SIGSEGV" in captured.err
    assert "rival Absent left out: it is not here" in captured.out and "FAIL" not in captured.out


def test_a_rival_that_hangs_is_ended(fake):
    made = rival_process.Worker(fake("Hanging"), Conditions(torch.device("cpu"), torch.float32, QUICK), timeout=0.5)
    try:
        assert made.unavailable() == (None, None)
        row = made.measure(LayerMeasurement(moe_shapes.SMOKE_CASES[0], "Hanging", None, "uniform", "forward"))
        assert (row["outcome"], row["problem"]) == ("timed out", "no result in 0.5 s")
        assert made._process is None
    finally:
        made.stop()


def test_after_a_crash_the_next_measurement_gets_a_new_process(fake):
    made = rival_process.Worker(fake("CrashingOnce"), Conditions(torch.device("cpu"), torch.float32, QUICK), timeout=60)
    try:
        for computation, outcome in (("forward", "crashed"), ("forward+backward", "verified")):
            row = made.measure(LayerMeasurement(moe_shapes.SMOKE_CASES[0], "CrashingOnce", None, "uniform", computation))
            assert row["outcome"] == outcome, row["problem"]
        made.rest()
    finally:
        made.stop()


@pytest.mark.parametrize("option", ["--rivals", "--peers"])  # by their earlier name, too
def test_a_rival_that_nobody_knows_is_refused(capsys, option):
    assert main(["bench", "--suite", "smoke", "--device", "cpu", option, "nobody"]) == 2
    assert "--rivals: expected names of bmm, " in capsys.readouterr().err
