"""`gbmoe bench`: its rows and JSON are complete, and it never shows the time of a result that it has not verified."""

import json
import re
import sys
import time

import pytest
import torch

from gbmoe import cases, layers, reference, routing
from gbmoe.cli import bench, main, permutation, suites, timing
from gbmoe.cli.table import print_table
from gbmoe.engines.reference import Reference
from gbmoe.layers.mlp import BmmExperts
from gbmoe.ops import permute
from tests.conftest import DEVICES

TIMES = {"median", "quartiles", "repetitions", "tflops", "speedup", "of_dense", "terabytes", "times_bound"}
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
        assert "FAILED" in progress and not re.search(r"\d [mu]s|TFLOP|TB/s", progress)
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


@pytest.mark.parametrize("suite", ["layers", "gemm", "permute"])
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


def run_permute(tmp_path, monkeypatch, dtype="bf16"):
    """Exit status of the permute suite on the CPU with two shapes, the JSON, and its rows by name."""
    monkeypatch.setattr(cases, "PLAN_CASES", (*cases.PERMUTE_CASES[4:], cases.PLAN_CASES[-1]))
    file = tmp_path / "rows.json"
    status = main(["bench", "--suite", "permute", "--device", "cpu", "--dtype", dtype, "--json", str(file)])
    content = json.loads(file.read_text())
    return status, content, {row["name"]: row for row in content["rows"]}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_permute_is_complete(dtype, tmp_path, monkeypatch, capsys):
    status, content, rows = run_permute(tmp_path, monkeypatch, dtype)
    assert status == 0, [row["problem"] for row in rows.values() if row["problem"]]
    assert set(content["peers_left_out"]) == {"MegaBlocks", "TransformerEngine"} and not content["engines_left_out"]
    routed = {f"{routing}/{step}/align{align}" for routing in ("uniform", "zipf") for align in (16, 128)
              for step in ("plan", "gather", "padded_gather", "scatter", "scatter-backward")}
    expected = {"copy/none/copy/torch"}
    for case in ("65536x1024-e8k1-small", "16384x2048-e64k8-small"):
        expected |= {f"{case}/{step}/gbmoe" for step in {"random/route", "random/route-backward", *routed}}
    expected |= {f"16384x2048-e128k8-small/{step}/gbmoe" for step in routed if "/plan/" in step}
    assert set(rows) == {f"permutation/{name}" for name in expected} and len(content["rows"]) == len(rows)
    copy = rows["permutation/copy/none/copy/torch"]
    assert copy["times_bound"] == 1
    for row in rows.values():
        assert row["verified"] and row["problem"] is None and row["error"] <= row["limit"] and TIMES <= set(row)
        if row["computation"] == "plan":
            assert row["bytes"] is row["terabytes"] is row["times_bound"] is None
        else:
            bound = row["bytes"] / (copy["bytes"] / copy["median"])
            assert row["bytes"] > 0 and row["times_bound"] == pytest.approx(row["median"] / bound)
    assert "median us" in capsys.readouterr().out


def test_bytes_are_those_of_the_formulas():
    case = cases.MoeCase("case", tokens=40, hidden=6, ffn=0, experts=8, top_k=2)
    slots, rows = 80, reference.padded_rows(80, 8, 16)

    def subject(computation, align=16):
        return permutation.PermutationConfiguration(case, "gbmoe", None, "zipf", computation, align).build(CPU, torch.bfloat16)

    plan = subject("plan").build_plan()
    used = int(plan.padded_counts_E.sum())
    assert slots < used < rows == plan.num_rows
    row = 2 * case.hidden
    assert subject("copy", None).bytes_moved() == 2 * 2 * 40 * 6
    assert subject("route", None).bytes_moved() == 2 * 40 * 8 + (2 * 40 * 8 + 2 * slots + 8 * slots + 4 * 40)
    assert subject("route-backward", None).bytes_moved() == 2 * (2 * 40 * 8) + 2 * slots + 8 * slots + 4 * 40 + 2 * 40 * 8
    assert subject("gather").bytes_moved() == row * (40 + used)
    assert subject("padded_gather").bytes_moved() == row * (40 + rows)
    assert subject("scatter").bytes_moved() == row * (slots + 40) + 4 * slots
    assert subject("scatter-backward").bytes_moved() == row * (40 + 2 * slots) + row * (rows - slots) + 2 * 4 * slots
    assert subject("plan").bytes_moved() is None


def last_row(result):
    result[-1] += 1
    return result


# Where, what is wrong there, and the computations whose rows must then fail.
FAULTS = {
    "plan": (routing, "_routing_plan", lambda right: lambda *args: (right(*args)[0].flip(0), *right(*args)[1:]),
             {"plan", "gather", "padded_gather", "scatter", "scatter-backward"}),
    "tiles": (routing, "_routing_plan", lambda right: lambda *args: (*right(*args)[:4], last_row(right(*args)[4])), {"plan"}),
    "gather": (permute, "gather", lambda right: lambda x, row_of_slot, *args, **options: (
        right(x, row_of_slot, *args, **options)[0].index_fill_(0, row_of_slot[-1, -1:].long(), 0), x.new_empty(0)),
        {"gather", "padded_gather"}),
    "rows behind the last expert": (
        permute, "gather", lambda right: lambda x, *args, **options: (last_row(right(x, *args, **options)[0]), x.new_empty(0)),
        {"padded_gather"}),
    "scatter": (permute, "scatter", lambda right: lambda *args, **options: last_row(right(*args, **options)), {"scatter"}),
    "scatter-backward": (reference, "padded_scatter_backward",
                         lambda right: lambda *args: (right(*args)[0], last_row(right(*args)[1])), {"scatter-backward"}),
    "padding of a gradient": (reference, "padded_scatter_backward",
                              lambda right: lambda *args: (last_row(right(*args)[0]), right(*args)[1]), {"scatter-backward"}),
    "route": (reference, "route", lambda right: lambda *args: (*right(*args)[:2], right(*args)[2].roll(1, 0), right(*args)[3]),
              {"route"}),
    "logsumexp": (reference, "route", lambda right: lambda *args: (*right(*args)[:3], last_row(right(*args)[3])), {"route"}),
    "route-backward": (reference, "route_backward", lambda right: lambda *args: last_row(right(*args)), {"route-backward"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_time_for_a_wrong_permutation(fault, tmp_path, capsys, monkeypatch):
    place, name, wrong, computations = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    status, _, rows = run_permute(tmp_path, monkeypatch)
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["computation"] for row in failed} == computations and not any("Error" in row["problem"] for row in failed)
    assert_no_time(capsys.readouterr(), failed)


def test_no_bound_from_a_wrong_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(permutation._Copy, "call", lambda self: (self.target,))
    status, _, rows = run_permute(tmp_path, monkeypatch)
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert [row["computation"] for row in failed] == ["copy"]
    assert all(row["times_bound"] is None for row in rows.values() if row["verified"])
    assert_no_time(capsys.readouterr(), failed)


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


@pytest.mark.gpu
def test_a_slow_host_can_be_kept_out_of_the_time():
    tensor = torch.zeros(1024, device="cuda")

    def call():
        time.sleep(5e-4)
        tensor.add_(1)

    shown, hidden = (timing.time_calls(call, tensor.device, hide_host=hide).median for hide in (False, True))
    assert hidden < 1e-4 < shown
