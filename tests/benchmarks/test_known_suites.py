"""The suites of known results: that they are asked for, listed and timed as they say."""

import pytest
import torch

from benchmarks.known_suites import SUITES
from gbmoe.cli import main
from gbmoe.cli.bench import checkout, command, suites

CPU = torch.device("cpu")


def test_a_wheel_names_what_a_checkout_has():
    assert set(SUITES) == {*checkout.SUITES, *suites.SUITES}


@pytest.mark.parametrize("suite", ["nyu", "layers", "float8", "transformers", "gemm", "permute", "scaling", "inference", "host"])
def test_suites_for_cuda_want_to_be_asked_on_a_cpu(suite, capsys, monkeypatch):
    monkeypatch.setattr(command, "default_device", lambda: CPU)
    assert main(["bench", "--suite", suite]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("place, timing, suites", [
    ("cuda", "sustained", ("layers", "float8", "transformers", "gemm", "nyu", "scaling", "parallel")),
    ("cuda", "bursts", ("permute", "inference", "host", "smoke")),
    ("cpu", "sustained", ("parallel",)), ("cpu", "bursts", ("layers", "gemm", "smoke", "permute")),
])
def test_how_suites_are_timed(place, timing, suites):
    assert {SUITES[suite].timing(torch.device(place)) for suite in suites} == {timing}


@pytest.mark.parametrize("arguments, words", [
    (["--suite", "permute", "--timing", "sustained"], "--timing: suite permute is timed in bursts alone"),
    (["--suite", "gemm", "--shape", "64,32,48,4,2"], "--shape: suite gemm has shapes of its own; expected suite layers or float8 or"
     " transformers, or none"),
])
def test_arguments_that_make_no_sense(arguments, words, capsys):
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err
