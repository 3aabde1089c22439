"""`gbmoe verify`: passes on what is right, and fails on each kind of fault, by name and exit status."""

import pytest
import torch

from gbmoe import engines, plan
from gbmoe.cli import main, verify
from gbmoe.engines.reference import Reference
from gbmoe.plain import plain_permute
from gbmoe.testing import accuracy
from tests.conftest import DEVICES

pytestmark = pytest.mark.slow


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("place", DEVICES)
def test_passes_and_covers_every_operator_engine_and_dtype(place, capsys):
    status, lines = main(["verify", "--device", place]), lines_of(capsys)
    assert status == 0, [line for line in lines if line.startswith("FAIL")]
    assert lines[-1].startswith("PASS")
    for operator in ("gmm a @ b", "gmm a @ b.T", "gmm a.T @ b", "expert_mlp, mlp", "expert_mlp, glu", "dMoE, mlp", "dMoE, glu"):
        for engine in ("auto", "reference"):
            for dtype in ("bfloat16", "float16", "float32", "float64"):
                assert any(line.split("  ")[0] == operator and f" {engine} " in line and f" {dtype} " in line for line in lines)
    for operator in ("routing plan", "padded_gather", "padded_scatter", "padded_scatter, weighted"):
        assert any(line.startswith(f"{operator}  ") for line in lines)
    for name, reason in engines.availability(torch.device(place)).items():
        assert reason is None or f"engine {name} is not available: {reason}" in lines


def test_leaves_the_number_of_threads_as_it_was(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(verify, "DTYPES", {})
    assert main(["verify", "--device", "cpu"]) == 0
    assert torch.get_num_threads() == threads


def inaccurate(gmm):
    def wrong(*args):
        return gmm(*args).mul_(1.02)
    return wrong


def one_row_not_written(gmm):
    def wrong(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        result = gmm(self, a, b, sizes, trans_a, trans_b, out, accumulate)
        if not trans_a and result.size(0) > 16:
            result[16] = float("nan")
        return result
    return wrong


def no_accumulation(gmm):
    def wrong(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        return gmm(self, a, b, sizes, trans_a, trans_b, out, False)
    return wrong


def raising(gmm):
    def wrong(*args):
        raise RuntimeError("the engine is broken")
    return wrong


@pytest.mark.parametrize("fault, operator, message", [
    (inaccurate, "gmm a @ b", "relative error"), (one_row_not_written, "gmm a @ b.T", "relative error inf"),
    (no_accumulation, "expert_mlp, glu", "grad x"), (raising, "dMoE, mlp", "the engine is broken"),
])
def test_fails_on_a_wrong_engine(fault, operator, message, monkeypatch, capsys):
    monkeypatch.setattr(verify, "DTYPES", {"bf16": torch.bfloat16})
    monkeypatch.setattr(Reference, "gmm", fault(Reference.gmm))
    assert main(["verify", "--device", "cpu"]) == 1
    lines = lines_of(capsys)
    assert lines[-1].startswith("FAIL")
    assert any(line.startswith(f"FAIL: {operator}, engine reference, bfloat16: ") and message in line for line in lines)
    assert any(line.startswith(operator) and " reference " in line and line.endswith("FAIL") for line in lines)
    assert any(line.startswith("padded_gather ") and line.endswith("PASS") for line in lines)


def test_fails_on_a_copy_that_is_off_by_the_last_bit(monkeypatch, capsys):
    right = plain_permute.padded_gather
    monkeypatch.setattr(verify, "DTYPES", {"fp32": torch.float32})

    def off(*args, **options):
        out, *probs = right(*args, **options)
        return out * (1 + 2**-23), *probs

    monkeypatch.setattr(plain_permute, "padded_gather", off)
    assert main(["verify", "--device", "cpu"]) == 1
    assert any(line.startswith("FAIL: padded_gather, engine -, float32: out") for line in lines_of(capsys))


def test_fails_on_a_wrong_routing_plan(monkeypatch, capsys):
    def unstable(*args):
        row_of_slot, slot_of_row, *rest = right(*args)
        return row_of_slot, slot_of_row.flip(0), *rest

    right = plan._routing_plan
    monkeypatch.setattr(verify, "DTYPES", {})
    monkeypatch.setattr(plan, "_routing_plan", unstable)
    assert main(["verify", "--device", "cpu"]) == 1
    assert any(line.startswith("FAIL: routing plan") and "slot_of_row_P is wrong" in line for line in lines_of(capsys))


def test_an_engine_that_refuses_a_dtype_is_listed_not_failed(monkeypatch, capsys):
    monkeypatch.setattr(verify, "DTYPES", {"fp32": torch.float32})
    monkeypatch.setattr(Reference, "refuses", lambda self, problem: "takes no float32 today")
    assert main(["verify", "--device", "cpu"]) == 0
    assert "engine reference refuses float32: takes no float32 today" in lines_of(capsys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_limit_is_twice_the_yardstick(dtype):
    exact = {"out": torch.ones(8, dtype=torch.float64)}
    yardstick = {"out": torch.full((8,), 1 + 2**-6, dtype=dtype)}
    assert accuracy.judge({"out": torch.full((8,), 1 + 2**-5, dtype=dtype)}, exact, yardstick).passed
    assert not accuracy.judge({"out": torch.full((8,), 1 + 2**-5 + 2**-7, dtype=dtype)}, exact, yardstick).passed
    assert not accuracy.judge({"out": torch.full((8,), float("nan"), dtype=dtype)}, exact, yardstick).passed
    assert not accuracy.judge({"out": torch.ones(7, dtype=dtype)}, exact, yardstick).passed


def test_nothing_passes_where_the_yardstick_overflows():
    exact, overflowed = {"out": torch.ones(8).double()}, {"out": torch.full((8,), float("inf"))}
    assert not accuracy.judge({"out": torch.ones(8)}, exact, overflowed).passed
    assert not accuracy.judge(overflowed, exact, overflowed).passed


def test_one_wrong_group_among_many_is_seen():
    exact = torch.ones(1000, 4, 4, dtype=torch.float64)
    result = exact.float()
    result[7, 3] = 0.99
    assert not accuracy.judge({"out": result}, {"out": exact}, {"out": exact.float() * (1 + 1e-4)}).passed
