"""The permute suite: complete, exact, and without a time or a bound from anything wrong."""

import pytest
import torch

from benchmarks.measurements import plan_and_permutation
from gbmoe import RoutingPlan, launch, plan
from gbmoe.cli.bench.measurements import copy
from gbmoe.plain import plain_permute, plain_plan, plain_router
from gbmoe.testing import moe_shapes
from tests.cli.bench.rows import ROUNDED, printed
from tests.cli.bench.test_command import assert_no_time

CPU = torch.device("cpu")


@pytest.fixture
def permute_suite(bench, monkeypatch):
    """Runs the permute suite on the CPU with two shapes."""
    monkeypatch.setattr(moe_shapes, "PLAN_CASES", (*moe_shapes.PERMUTE_CASES[4:], moe_shapes.PLAN_CASES[-1]))
    return lambda dtype="bf16", rivals="none": bench("--dtype", dtype, suite="permute", rivals=rivals)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_permute_is_complete(dtype, permute_suite, capsys):
    status, content, rows = permute_suite(dtype, "all" if dtype == "bf16" else "none")
    assert status == 0, [row["problem"] for row in rows.values() if "problem" in row]
    run, = content["runs"]
    assert set(run["peers_left_out"]) == ({"megablocks", "transformer_engine"} if dtype == "bf16" else set())
    assert not run["engines_left_out"]
    routed = {f"{routing}/align{align}/{step}" for routing in ("uniform", "zipf") for align in (16, 128)
              for step in ("plan", "gather", "padded_gather", "plan+gather", "scatter", "scatter-backward")}
    expected = set()
    for case in ("65536x1024-e8k1-small", "16384x2048-e64k8-small"):
        expected |= {f"{case}/{step}/gbmoe" for step in {"random/route", "random/route-backward", *routed}}
    expected |= {f"16384x2048-e128k8-small/{step}/gbmoe" for step in routed if step.endswith("/plan")}
    assert set(rows) == {f"permutation/{name}" for name in expected} and len(content["rows"]) == len(rows)
    copy, = (row for row in run["limit_rows"] if row["computation"] == "copy")
    assert copy["verified"] and run["limits"]["bytes"] == pytest.approx(copy["bytes"] / copy["median"], rel=ROUNDED)
    for row in rows.values():
        assert row["verified"] and "problem" not in row and row["error"] <= row["limit"] and {"median", "quartiles"} <= set(row)
        if row["computation"] == "plan":
            assert not {"bytes", "terabytes", "of_limit"} & set(row)
        else:
            bound = row["bytes"] / (copy["bytes"] / copy["median"])
            assert row["bytes"] > 0 and row["of_limit"] == pytest.approx(bound / row["median"], rel=ROUNDED)
    assert all(float(line["us"].removesuffix("?")) > 0 for line in printed(capsys.readouterr().out))


def test_bytes_are_those_of_the_formulas():
    case = moe_shapes.MoeCase("case", tokens=40, hidden=6, ffn=0, experts=8, top_k=2)
    slots, rows = 80, plain_plan.padded_rows(80, 8, 16)

    def bytes_moved(step, align=16):
        measurement = plan_and_permutation.PermutationMeasurement(case, "gbmoe", None, "zipf", step, align=align)
        return measurement.build(CPU, torch.bfloat16).bytes_moved()

    plan = RoutingPlan.from_experts(plan_and_permutation.routed(case, "zipf", 16, CPU)[0], 8, align=16)
    used = int(plan.padded_counts_E.sum())
    assert slots < used < rows == plan.num_rows
    row = 2 * case.hidden
    assert copy.CopyMeasurement(case, "torch", None, "none", "copy").build(CPU, torch.bfloat16).bytes_moved() == 2 * 2 * 40 * 6
    assert bytes_moved("route", None) == 2 * 40 * 8 + (2 * 40 * 8 + 2 * slots + 8 * slots + 4 * 40)
    assert bytes_moved("route-backward", None) == 2 * (2 * 40 * 8) + 2 * slots + 8 * slots + 4 * 40 + 2 * 40 * 8
    assert bytes_moved("gather") == row * (40 + used)
    assert bytes_moved("padded_gather") == bytes_moved("plan+gather") == row * (40 + rows)
    assert bytes_moved("scatter") == row * (slots + 40) + 4 * slots
    assert bytes_moved("scatter-backward") == row * (40 + 2 * slots) + row * (rows - slots) + 2 * 4 * slots
    assert bytes_moved("plan") is None


def last_row(result):
    result[-1] += 1
    return result


def last(right):
    """A function like `right` whose result has a wrong last element."""
    return lambda *args, **options: last_row(right(*args, **options))


def last_of(position):
    """Alters a function so that its result at `position` has a wrong last element."""
    def wrap(right):
        def wrong(*args, **options):
            results = list(right(*args, **options))
            last_row(results[position])
            return tuple(results)
        return wrong
    return wrap


def gather_with(fault):
    """A gather whose rows go through `fault`, which gets the map [T,K] as well."""
    return lambda right: lambda x, slots, **options: (
        fault(right(x, slots, **options)[0], slots.row_of_slot_TK), x.new_empty(0))


ROUTED = {"plan", "gather", "padded_gather", "plan+gather", "scatter", "scatter-backward"}
GATHERS = {"gather", "padded_gather", "plan+gather"}
# Where, what is wrong there, and the computations whose rows must then fail.
FAULTS = {
    "plan": (plan, "_routing_plan", lambda right: lambda *args: (
        right(*args)[0].flip(0), *right(*args)[1:]), ROUTED),
    "tiles": (plan, "_routing_plan", last_of(4), {"plan"}),
    "gather": (launch, "gather", gather_with(lambda out, rows: out.index_fill_(0, rows[-1, -1:].long(), 0)), GATHERS),
    "rows after the last expert": (launch, "gather", gather_with(lambda out, _: last_row(out)), GATHERS - {"gather"}),
    "scatter": (launch, "scatter", last, {"scatter"}),
    "scatter-backward": (plain_permute, "padded_scatter_backward", last_of(1), {"scatter-backward"}),
    "padding of a gradient": (plain_permute, "padded_scatter_backward", last_of(0), {"scatter-backward"}),
    "route": (plain_router, "softmax_topk", lambda right: lambda *args: (
        *right(*args)[:2], right(*args)[2].roll(1, 0), right(*args)[3]), {"route"}),
    "logsumexp": (plain_router, "softmax_topk", last_of(3), {"route"}),
    "route-backward": (plain_router, "softmax_topk_backward", last, {"route-backward"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_time_for_a_wrong_permutation(fault, permute_suite, capsys, monkeypatch):
    place, name, wrong, computations = FAULTS[fault]
    monkeypatch.setattr(moe_shapes, "PLAN_CASES", moe_shapes.PERMUTE_CASES[-1:])  # one shape shows it
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    status, _, rows = permute_suite()
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["computation"] for row in failed} == computations
    assert not any("Error" in row["problem"] for row in failed)
    assert_no_time(capsys.readouterr(), failed)


def test_no_bound_from_a_wrong_copy(permute_suite, capsys, monkeypatch):
    monkeypatch.setattr(copy.Copy, "outputs", lambda self: torch.zeros_like(self.source))
    status, content, rows = permute_suite()
    assert status == 1 and "FAIL: permutation/copy/none/copy/torch: out: relative error" in capsys.readouterr().out
    assert content["runs"][0]["limits"]["bytes"] is None
    assert all(row["verified"] and "of_limit" not in row for row in rows.values())
