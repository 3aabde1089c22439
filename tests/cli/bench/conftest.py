"""Fixtures of the benchmark's tests, and a function that runs it."""

import json

import pytest
import torch

from gbmoe.cli import main
from gbmoe.cli.bench import command
from gbmoe.cli.bench.running import parent_process, processes
from gbmoe.cli.bench.running.cold_cache_timer import Effort
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.verify_and_time import few_threads
from gbmoe.testing import moe_shapes


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """--quick is two repetitions, or two rounds of some; what the limits are measured on is small; and one thread, as a run on the CPU has:
    a busy machine must not slow this down a hundredfold."""
    monkeypatch.setattr(command, "QUICK", Effort(0, 2, 2))
    monkeypatch.setattr(processes, "IN_TURNS_QUICK", Sustained(1e-4, 2))
    monkeypatch.setattr(parent_process, "LIMITS_ELSEWHERE", (64, 2**8))
    with few_threads(torch.device("cpu")):
        yield


@pytest.fixture
def one_case(monkeypatch):
    """Reduce the smoke suite to its smallest layer and that layer's products."""
    monkeypatch.setattr(moe_shapes, "SMOKE_CASES", moe_shapes.SMOKE_CASES[:1])


@pytest.fixture
def bench(tmp_path):
    """A function that runs a suite on the CPU, quickly: returns (exit status, the file's content, its rows by name)."""
    def run(*arguments, suite="smoke", peers="none", place="cpu"):
        file = tmp_path / "rows.json"
        status = main(["bench", "--suite", suite, "--device", place, "--quick", "--peers", peers, "--json", str(file),
                       *arguments])
        content = json.loads(file.read_text())
        return status, content, {row["name"]: row for row in content["rows"]}
    return run
