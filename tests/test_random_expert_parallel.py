"""scripts/random_expert_parallel.py: it finds nothing in layers that are right, and finds what is wrong."""

import argparse
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.forked_python import spawn

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "random_expert_parallel.py"


def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = sys.modules[SCRIPT.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("option, value", [("--ranks", "0"), ("--ranks", "-1"), ("--cases", "0"), ("--seed", "-1"), ("--cases", "9" * 30)])
def test_no_ranks_had_no_failure(option, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["random_expert_parallel.py", option, value])
    with pytest.raises(SystemExit) as end:
        script().main()
    assert end.value.code == 2 and f"{option}: expected a number of at least" in capsys.readouterr().err.splitlines()[-1]


def worker(rank, store, breaks):
    module = script()
    if breaks:
        right = module.Case.layer

        def wrong_layer(self, parallel, dtype):
            layer = right(self, parallel, dtype)
            if parallel and rank == 1:
                layer.register_forward_hook(lambda module, inputs, out: out * 1.1)
            return layer
        module.Case.layer = wrong_layer
    options = argparse.Namespace(ranks=2, cases=6, seed=0, mapped=False, cuda=False)
    with pytest.raises(SystemExit) as end:
        module.run(rank, options, str(store))
    assert end.value.code == breaks


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_cases_over_two_ranks(tmp_path, breaks):
    spawn(worker, (tmp_path / "store", breaks), nprocs=2)


@pytest.mark.slow
def test_cases_draw_every_option_and_are_the_same_again():
    module = script()
    cases = [module.Case(seed, 4, torch.device("cpu"), False) for seed in range(200)]
    assert {case.option for case in cases} >= {"none", "exact", "rows", "bmm", "kept rows", *module.ONLY_EXCHANGED}
    assert vars(cases[7]) == vars(module.Case(7, 4, torch.device("cpu"), False))
