"""Fixtures of the benchmark's tests, and how they run it."""

import json

import pytest
import torch

from gbmoe import cases
from gbmoe.cli import main
from gbmoe.cli.bench import run_suite
from gbmoe.cli.bench.measure import few_threads
from gbmoe.cli.bench.timing import Effort


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """--quick is two repetitions; and one thread, as a run on the CPU has: a busy machine must not slow this down a
    hundredfold."""
    monkeypatch.setattr(run_suite, "QUICK", Effort(0, 2, 2))
    with few_threads(torch.device("cpu")):
        yield


@pytest.fixture
def one_case(monkeypatch):
    """The smoke suite with its smallest layer alone, and that layer's products."""
    monkeypatch.setattr(cases, "SMOKE_CASES", cases.SMOKE_CASES[:1])


@pytest.fixture
def bench(tmp_path):
    """Runs a suite on the CPU, quickly: (exit status, the file's content, its rows by name)."""
    def run(*arguments, suite="smoke", peers="none", place="cpu"):
        file = tmp_path / "rows.json"
        status = main(["bench", "--suite", suite, "--device", place, "--quick", "--peers", peers, "--json", str(file),
                       *arguments])
        content = json.loads(file.read_text())
        return status, content, {row["name"]: row for row in content["rows"]}
    return run
