"""`gbmoe bench`: its rows and JSON are complete, and it never shows the time of a result that it has not verified."""

import json
import re
import sys

import pytest
import torch

from gbmoe import cases, layers
from gbmoe.cli import bench, main, suites, timing
from gbmoe.cli.table import print_table
from gbmoe.engines.reference import Reference
from gbmoe.layers.mlp import BmmExperts
from tests.conftest import DEVICES

TIMES = {"median", "quartiles", "repetitions", "tflops", "speedup", "of_dense"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few repetitions, and one thread, so that a busy machine does not slow this down a hundredfold."""
    monkeypatch.setattr(timing, "_REPETITIONS", (2, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(cases, "SMOKE_CASES", cases.SMOKE_CASES[:1])


def run_smoke(tmp_path, place="cpu"):
    """Exit status of the smoke suite, the JSON, and its rows by name."""
    file = tmp_path / "rows.json"
    status = main(["bench", "--suite", "smoke", "--device", place, "--json", str(file)])
    content = json.loads(file.read_text())
    return status, content, {row["name"]: row for row in content["rows"]}


@pytest.mark.parametrize("place", DEVICES)
def test_smoke_is_complete(place, tmp_path, capsys):
    status, content, rows = run_smoke(tmp_path, place)
    assert status == 0, [row["problem"] for row in rows.values() if row["problem"]]
    assert {"machine", "versions", "extension", "suite", "dtype", "seed", "time", "rows"} <= set(content)
    assert {"torch", "cuda", "gbmoe", "python", "commit", "dirty"} <= set(content["versions"])
    assert content["machine"]["device"] == place and content["machine"]["cpu"]
    assert content["dtype"] == {"cpu": "float32", "cuda": "bfloat16"}[place]
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]  # no temporary file is left
    for case in cases.SMOKE_CASES:
        for computation in ("forward", "forward+backward"):
            for by in ("gbmoe-auto", "gbmoe-reference", "bmm", "reference"):
                assert f"layer/{case.name}/real/{computation}/{by}" in rows
    for routing in ("equal", "skewed"):
        for computation in ("forward", "weight-gradient"):
            assert f"product/small-glu/{routing}/{computation}/gmm-reference" in rows
    for row in rows.values():
        assert row["verified"] and row["problem"] is None and row["error"] <= row["limit"] and TIMES <= set(row)
        assert (row["extra_peak_bytes"] is None) == (place == "cpu")
        low, high = row["quartiles"]
        assert 0 < low <= row["median"] <= high
        assert row["tflops"] == pytest.approx(row["flops"] / row["median"] / 1e12)
        bmm = rows[row["contest"] + "/bmm"]
        assert row["speedup"] == pytest.approx(bmm["median"] / row["median"])
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if " yes " in line]) == len(rows)


def test_flops_are_those_of_the_products():
    case = cases.MoeCase("case", tokens=10, hidden=3, ffn=5, experts=4, top_k=2, mlp_type="glu")
    layer = suites.LayerConfiguration(case, "bmm", None, "real", "forward")
    assert layer.flops() == 2 * 10 * 2 * 3 * 5 * 3
    assert suites.LayerConfiguration(case, "bmm", None, "real", "forward+backward").flops() == 3 * layer.flops()
    assert suites.ProductConfiguration(case, "bmm", None, "equal", "forward").flops() == 2 * 10 * 2 * 3 * 5


def assert_no_time(captured, failed):
    """Neither the table nor the progress nor the messages give a time or a rate for the rows `failed`."""
    for row in failed:
        assert not row["verified"] and row["problem"] and not TIMES & set(row)
        progress, = [line for line in captured.err.splitlines() if f" {row['name']}: " in line]
        assert "FAILED" in progress and not re.search(r"\d ms|TFLOP", progress)
        assert any(line.startswith(f"FAIL: {row['name']}: ") for line in captured.out.splitlines())
    lines = [re.split(r" {2,}", line.strip()) for line in captured.out.splitlines() if re.search(r"  NO +-", line)]
    assert len(lines) == len(failed)
    for line in lines:
        assert set(line[line.index("NO") + 1 :]) == {"-"}


def test_no_time_for_a_wrong_engine(tmp_path, capsys, monkeypatch, one_case):
    right = Reference.gmm
    monkeypatch.setattr(Reference, "gmm", lambda *args: right(*args).mul_(1.001))
    status, _, rows = run_smoke(tmp_path)
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["name"] for row in failed} == {name for name in rows if "gbmoe-" in name or "gmm-" in name}
    assert_no_time(capsys.readouterr(), failed)


def test_no_time_for_a_wrong_gradient(tmp_path, capsys, monkeypatch, one_case):
    right = Reference.gmm

    def last_row_forgotten(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if trans_a:
            sizes = sizes.clone()
            sizes[-1] -= 1
        return right(self, a, b, sizes, trans_a, trans_b, out, accumulate)

    monkeypatch.setattr(Reference, "gmm", last_row_forgotten)
    status, _, rows = run_smoke(tmp_path)
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["name"] for row in failed} == {
        name for name in rows
        if ("gbmoe-" in name and "forward+backward" in name) or ("gmm-" in name and "weight-gradient" in name)}
    assert_no_time(capsys.readouterr(), failed)


def test_no_time_for_a_wrong_layer_and_no_speedup_over_it(tmp_path, capsys, monkeypatch, one_case):
    right = BmmExperts.forward
    # Without the router weights.
    monkeypatch.setattr(BmmExperts, "forward", lambda self, x, plan, weights: right(self, x, plan, None))
    status, _, rows = run_smoke(tmp_path)
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["name"] for row in failed} == {name for name in rows if name.startswith("layer/") and name.endswith("/bmm")}
    assert all(row["speedup"] is None for row in rows.values() if row["kind"] == "layer" and row["verified"])
    assert_no_time(capsys.readouterr(), failed)


def test_an_engine_that_raises_fails_alone_and_by_name(tmp_path, capsys, monkeypatch, one_case):
    def broken(*args):
        raise RuntimeError("the engine is broken")

    monkeypatch.setattr(Reference, "gmm", broken)
    status, _, rows = run_smoke(tmp_path)
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert failed and all(row["problem"] == "RuntimeError: the engine is broken" for row in failed)
    assert rows["layer/tiny-mlp/real/forward/bmm"]["verified"]
    assert_no_time(capsys.readouterr(), failed)


@pytest.mark.parametrize("fault", ["nan in the result", "wrong by 1 %"])
def test_a_wrong_result_is_not_even_timed(fault, monkeypatch):
    right = Reference.gmm
    factor = float("nan") if fault.startswith("nan") else 1.01
    monkeypatch.setattr(Reference, "gmm", lambda *args: right(*args).mul_(factor))
    monkeypatch.setattr(bench, "time_calls", lambda *args: pytest.fail("timed before it was verified"))
    configuration = suites.ProductConfiguration(cases.SMOKE_CASES[0], "gmm", "reference", "skewed", "forward")
    assert not bench.measure(configuration, CPU, torch.bfloat16)["verified"]


@pytest.mark.parametrize("suite", ["layers", "gemm"])
def test_suites_for_cuda_want_to_be_asked_on_a_cpu(suite, capsys, monkeypatch):
    monkeypatch.setattr(bench, "default_device", lambda: CPU)
    assert main(["bench", "--suite", suite]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("suite, dtype", [("layers", "bf16"), ("gemm", "fp32")])
def test_suites_for_cuda_scaled_down(suite, dtype, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cases, "LAYER_CASES", cases.LAYER_CASES[:2])
    monkeypatch.setattr(cases, "GEMM_CASES", cases.GEMM_CASES[1:4])
    file = tmp_path / "rows.json"
    status = main(["bench", "--suite", suite, "--device", "cpu", "--dtype", dtype, "--json", str(file)])
    assert status == 0, capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(row["verified"] and row["of_dense"] for row in rows)
    routings = {"real", "uniform"} if suite == "layers" else {"equal", "skewed"}
    assert {row["routing"] for row in rows[1:]} == routings


def test_samples_find_one_missing_row_in_a_large_product(monkeypatch):
    case = cases.MoeCase("case", tokens=4096, hidden=128, ffn=128, experts=4, top_k=1)
    right = Reference.gmm

    def last_row_forgotten(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        result = right(self, a, b, sizes, trans_a, trans_b, out, accumulate)
        if not trans_a:
            result[int(sizes[0]) - 1] = 0
        return result

    for computation in ("forward", "weight-gradient"):
        assert bench.measure(suites.ProductConfiguration(case, "gmm", "reference", "skewed", computation), CPU,
                             torch.float32)["verified"]
    monkeypatch.setattr(Reference, "gmm", last_row_forgotten)
    assert not bench.measure(suites.ProductConfiguration(case, "gmm", "reference", "skewed", "forward"), CPU,
                             torch.float32)["verified"]


def test_group_sizes_sum_to_the_slots():
    for case in cases.GEMM_CASES:
        equal, skewed = suites.group_sizes(case, "equal"), suites.group_sizes(case, "skewed")
        assert sum(equal) == sum(skewed) == case.slots
        assert set(equal) == {case.slots // case.experts} and max(skewed) > 2 * min(skewed)


def test_layers_leave_nothing_in_the_load_balancing_loss(one_case, tmp_path):
    layers.clear_load_balancing_loss()
    assert run_smoke(tmp_path)[0] == 0
    assert layers.get_load_balancing_loss() == []


def test_json_is_written_whole_or_not_at_all(tmp_path, capsys):
    file = tmp_path / "rows.json"
    bench.write_json(file, {"rows": [1]})
    with pytest.raises(ValueError):
        bench.write_json(file, {"rows": [float("inf")]})
    assert json.loads(file.read_text()) == {"rows": [1]} and list(tmp_path.iterdir()) == [file]
    assert main(["bench", "--suite", "smoke", "--json", str(tmp_path / "absent" / "rows.json")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_table_on_a_terminal_and_in_a_pipe(monkeypatch, capsys):
    columns, rows = [("name", "<"), ("time", ">")], [("a[b]", "1.5"), ("longer", "22.5")]
    print_table(columns, rows)
    assert capsys.readouterr().out.splitlines() == ["name    time", "------  ----", "a[b]     1.5", "longer  22.5"]
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(columns, rows)
    out = capsys.readouterr().out
    assert "a[b]" in out and "22.5" in out and "------  ----" not in out


def test_quartiles_and_resets():
    calls = []
    measured = timing.time_calls(lambda: calls.append("call"), CPU, lambda: calls.append("reset"))
    assert measured.repetitions == 2 and 0 <= measured.low <= measured.median <= measured.high
    assert calls[::2] == ["reset"] * (len(calls) // 2) and calls[1::2] == ["call"] * (len(calls) // 2)
