"""Fixtures of the benchmark's tests, and a function that runs it."""

import json

import pytest
import torch

from gbmoe.cli import main
from gbmoe.cli.bench.running.verify_and_time import few_threads
from gbmoe.testing import moe_shapes
from tests.cli.bench import hurried


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """--quick repeats as little as it can, in one thread, as a run on the CPU has: a busy machine must not slow this down a hundredfold."""
    for place in hurried.least():
        monkeypatch.setattr(*place)
    with few_threads(torch.device("cpu")):
        yield


@pytest.fixture
def one_case(monkeypatch):
    """Reduce the smoke suite to its smallest layer and that layer's products."""
    monkeypatch.setattr(moe_shapes, "SMOKE_CASES", moe_shapes.SMOKE_CASES[:1])


@pytest.fixture
def bench(tmp_path):
    """A function that runs a suite on the CPU, quickly: returns (exit status, the file's content, its rows by name)."""
    def run(*arguments, suite="smoke", rivals="none", place="cpu"):
        file = tmp_path / "rows.json"
        status = main(["bench", "--suite", suite, "--device", place, "--quick", "--rivals", rivals, "--json", str(file),
                       *arguments])
        content = json.loads(file.read_text())
        return status, content, {row["name"]: row for row in content["rows"]}
    return run
