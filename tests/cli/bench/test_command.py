"""`gbmoe bench --suite`: rows and file are complete, and it never shows the time of a result that it has not
verified."""

import re
import sys

import pytest
import torch

from benchmarks.result_files import reading
from gbmoe import layers
from gbmoe.cli import main
from gbmoe.cli.bench import suites, table
from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement
from gbmoe.cli.bench.running import parent_process, verify_and_time
from gbmoe.engines.reference import Reference
from gbmoe.testing import moe_shapes
from tests.cli.bench.rows import ROUNDED, printed
from tests.cli.bench.running.test_rival_process import TIMES
from tests.conftest import DEVICES

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("place", DEVICES)
def test_smoke_is_complete(place, bench, tmp_path, capsys):
    status, content, rows = bench(rivals="all", place=place)
    assert status == 0, [row["problem"] for row in rows.values() if "problem" in row]
    run, = content["runs"]
    assert {"machine", "versions", "extension", "clocks", "limits", "dtype", "seed", "time", "peers"} <= set(run)
    assert {"torch", "cuda", "gbmoe", "python", "commit", "dirty"} <= set(run["versions"])
    assert run["machine"]["device"] == place and run["machine"]["cpu"]
    assert {row["timing"] for row in rows.values()} == {"bursts"} and "sustained" not in run
    assert run["dtype"] == {"cpu": "float32", "cuda": "bfloat16"}[place]
    assert (run["clocks"] is None) == (place == "cpu")
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]  # no temporary file is left
    for case in moe_shapes.SMOKE_CASES:
        for computation in ("forward", "forward+backward"):
            for by in ("gbmoe-auto", "gbmoe-reference", "bmm", "loop"):
                assert f"layer/{case.name}/uniform/{computation}/{by}" in rows
    for routing in ("equal", "skewed"):
        for computation in ("forward", "weight-gradient"):
            for by in ("gbmoe-reference", "bmm", "loop"):
                assert f"product/small-glu/{routing}/{computation}/{by}" in rows
    assert len(rows) == len(content["rows"])
    for row in rows.values():
        assert row["verified"] and "problem" not in row and row["error"] <= row["limit"] and TIMES <= set(row)
        assert ("extra_peak_bytes" in row) == (place == "cuda")
        low, high = row["quartiles"]
        assert 0 < low <= row["median"] <= high
        assert row["tflops"] == pytest.approx(row["flops"] / row["median"] / 1e12, rel=ROUNDED)
        least = max(row["flops"] / run["limits"]["flops"], row["bytes"] / run["limits"]["bytes"])
        assert row["of_limit"] == pytest.approx(least / row["median"], rel=ROUNDED)
        assert row["speedup"] == pytest.approx(rows[row["contest"] + "/bmm"]["median"] / row["median"], rel=ROUNDED)
        if row["computation"] == "forward+backward":
            assert row["forward"]["flops"] + row["backward"]["flops"] == pytest.approx(row["flops"], abs=2)
            assert row["backward"]["flops"] == pytest.approx(2 * row["forward"]["flops"], abs=2)
            assert max(row["forward"]["median"], row["backward"]["median"]) <= high
    out = capsys.readouterr().out
    assert {(line["shape"], line["routing"], line["pass"], line["who"]) for line in printed(out)} == {
        (row["case"], row["routing"], row["computation"], row["by"]) for row in rows.values()}
    assert all(float(line["ms"].removesuffix("?")) > 0 and float(line["TFLOP/s"]) > 0 for line in printed(out))
    assert "tiny-glu: 256 tokens, hidden 64, ffn 128, 8 experts, top 2, GLU\n" in out


def assert_no_time(captured, failed):
    """Neither the table nor the progress nor the messages give a time or a rate for the rows `failed`."""
    for row in failed:
        assert not row["verified"] and row["problem"] and not TIMES & set(row)
        progress, = [line for line in captured.err.splitlines() if f" {row['name']}: " in line]
        assert re.search("WRONG|ERROR", progress) and not re.search(r"\d [mu]s|TFLOP|TB/s", progress)
        assert any(line.startswith(f"FAIL: {row['name']}: ") for line in captured.out.splitlines())
        reason = f"{row['case']}, {row['routing']}, {row['computation']}, {row['by']}: {row['outcome']}: {row['problem']}"
        assert reason in captured.out.splitlines()
    lines = [list(line.values()) for line in printed(captured.out) if {"wrong", "error"} & set(line.values())]
    assert len(lines) == len(failed)
    for line in lines:
        who = max(place for place, cell in enumerate(line) if cell in ("wrong", "error"))
        assert set(line[who + 1 :]) <= {"-"}


def test_no_time_for_a_wrong_engine(bench, capsys, monkeypatch, one_case):
    right = Reference.gmm
    monkeypatch.setattr(Reference, "gmm", lambda *args: right(*args).mul_(1.001))
    status, _, rows = bench()
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["name"] for row in failed} == {name for name in rows if "gbmoe-" in name}
    assert_no_time(capsys.readouterr(), failed)


def test_no_time_for_a_wrong_gradient(bench, capsys, monkeypatch, one_case):
    right = Reference.gmm

    def last_row_forgotten(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if trans_a:
            sizes = sizes.clone()
            sizes[-1] -= 1
        return right(self, a, b, sizes, trans_a, trans_b, out, accumulate)

    monkeypatch.setattr(Reference, "gmm", last_row_forgotten)
    status, _, rows = bench()
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert {row["name"] for row in failed} == {
        name for name in rows if "gbmoe-" in name and ("forward+backward" in name or "weight-gradient" in name)}
    assert_no_time(capsys.readouterr(), failed)


def test_an_engine_that_raises_fails_alone_and_by_name(bench, capsys, monkeypatch, one_case):
    def broken(*args):
        raise RuntimeError("the engine is broken")

    monkeypatch.setattr(Reference, "gmm", broken)
    status, _, rows = bench()
    assert status == 1
    failed = [row for row in rows.values() if not row["verified"]]
    assert failed and all(row["problem"] == "RuntimeError: the engine is broken" for row in failed)
    assert rows["product/tiny-mlp/equal/forward/dense"]["verified"]
    assert_no_time(capsys.readouterr(), failed)


def test_gbmoe_without_memory_is_a_result_and_no_fault(bench, monkeypatch, one_case):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Reference, "gmm", full)
    status, _, rows = bench()
    assert status == 0
    assert {row["outcome"] for row in rows.values() if row["implementation"] == "gbmoe"} == {"out of memory"}


def test_no_share_of_a_limit_that_could_not_be_measured(bench, capsys, monkeypatch, one_case):
    monkeypatch.setattr(parent_process, "ProductMeasurement",
                        lambda case, *_: ProductMeasurement(case, "nobody", None, "equal", "forward"))
    status, content, rows = bench()
    assert status == 1 and "FAIL: product/dense-64/equal/forward/nobody: KeyError" in capsys.readouterr().out
    assert content["runs"][0]["limits"]["flops"] is None
    assert all(row["bound_by"] == "memory" for row in rows.values())


@pytest.mark.parametrize("fault", ["nan in the result", "wrong by 1 %"])
def test_a_wrong_result_is_not_even_timed(fault, monkeypatch):
    right = Reference.gmm
    factor = float("nan") if fault.startswith("nan") else 1.01
    monkeypatch.setattr(Reference, "gmm", lambda *args: right(*args).mul_(factor))
    monkeypatch.setattr(verify_and_time, "time_steps", lambda *args: pytest.fail("timed before it was verified"))
    measurement = ProductMeasurement(moe_shapes.SMOKE_CASES[0], "gbmoe", "reference", "skewed", "forward")
    assert not verify_and_time.measure(measurement, verify_and_time.Conditions(CPU, torch.bfloat16))["verified"]


def test_layers_leave_nothing_in_the_load_balancing_loss(bench, one_case):
    layers.clear_load_balancing_loss()
    assert bench()[0] == 0
    assert layers.get_load_balancing_loss() == []


def test_a_run_that_is_cut_off_leaves_what_it_has_done(bench, tmp_path, monkeypatch):
    right, done = parent_process.Runner.run, []

    def second_is_cut_off(self, configuration, report):
        if done:
            raise KeyboardInterrupt
        done.append(configuration.name)
        return right(self, configuration, report)

    monkeypatch.setattr(parent_process.Runner, "run", second_is_cut_off)
    with pytest.raises(KeyboardInterrupt):
        bench()
    content = reading.read(tmp_path / "rows.json")
    assert content["runs"][0]["configurations"] == done and {row["setting"] for row in content["rows"]} == set(done)


@pytest.mark.parametrize("arguments, words", [
    ([], "expected --shape, --suite, merge, plot or report"),
    (["--suite", "smoke", "--engines", "fast"], "--engines: expected names of auto, "),
    (["--suite", "smoke", "--engines", "auto,hopper"], "--engines: hopper runs on CUDA devices only, not on cpu"),
    (["--suite", "smoke", "--memory-limit", "0"], "--memory-limit: expected more than 0 GiB, got 0"),
    (["--suite", "smoke", "--timeout", "0"], "--timeout: expected more than 0 s, got 0"),
    (["--suite", "smoke", "--engines", "auto", "--baseline", "nobody"],
     "--baseline: expected one of bmm, dense, gbmoe-auto, loop, got 'nobody'"),
    (["--suite", "smoke", "--json", f"{__file__}/rows.json"], f"--json: {__file__} is not a directory"),
    (["--suite", "smoke", "--shape", "64,32,48,4,2"], "--shape: suite smoke has shapes of its own; expected suite layers or float8"),
])
def test_arguments_that_make_no_sense(arguments, words, capsys):
    assert main(["bench", *arguments, *(["--device", "cpu"] if arguments else [])]) == 2
    assert words in capsys.readouterr().err


def test_a_baseline_and_engines_of_ones_own(bench, one_case):
    _, content, rows = bench("--engines", "auto", "--baseline", "gbmoe-auto")
    assert content["baseline"] == "gbmoe-auto" and content["runs"][0]["options"]["engines"] == ["auto"]
    assert {row.get("engine") for row in rows.values()} == {"auto", None}
    layer_rows = [row for row in rows.values() if row["kind"] == "layer"]
    assert layer_rows and all(row["speedup"] == 1 for row in layer_rows)
    assert all("speedup" not in row for row in rows.values() if row["kind"] == "product")


@pytest.mark.parametrize("text", ["64,32,48,4", "64,32,48,4,2,1", "64,32,48,4,2,relu", "64,32,48,4,0", "64,32,48,4,-2", "a,32,48,4,2", "",
                                  "64,32,48,4,5"])
def test_a_shape_that_is_none(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--device", "cpu", f"--shape={text}"])
    assert "--shape: expected tokens,hidden,ffn,experts,top_k[,mlp]" in capsys.readouterr().err


def test_layers_of_ones_own_take_the_place_of_the_suites(tmp_path, capsys):
    file = tmp_path / "rows.json"
    command = ["bench", "--device", "cpu", "--quick", "--engines", "auto", "--rivals", "bmm", "--json", str(file)]
    shapes = ["--shape", "48,32,40,4,2", "--shape", "16,8,24,8,1,mlp", "--shape", "48,32,40,4,2,glu"]
    assert main([*command, *shapes]) == 0
    content = reading.read(file)
    assert content["suite"] == "layers" and len(content["configurations"]) == 4
    sizes = {tuple(row[size] for size in ("tokens", "hidden", "ffn", "experts", "top_k", "mlp_type", "routing")): row["verified"]
             for row in content["rows"]}
    assert sizes == {(*shape, routing): True for routing in ("uniform", "skewed")
                     for shape in ((48, 32, 40, 4, 2, "glu"), (16, 8, 24, 8, 1, "mlp"))}
    assert main(["bench", "--suite", "layers", "--device", "cpu", "--list-configs", *shapes[:2]]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["0\tlayer/t48-h32-f40-e4-k2/uniform", "1\tlayer/t48-h32-f40-e4-k2/skewed"]


def test_a_layer_that_nobody_computes_ended_in_a_traceback_or_was_dropped(monkeypatch, capsys):
    command = ["bench", "--device", "cpu", "--quick", "--rivals", "none", "--shape", "48,32,40,4,2"]
    assert main([*command, "--engines", ""]) == 2
    assert "--shape: expected one that --engines or --rivals compute here, got t48-h32-f40-e4-k2: none is named" in capsys.readouterr().err
    monkeypatch.setattr(suites, "refusal", lambda name, device, dtype, *sizes: "takes no width of 20" if 20 in sizes else None)
    for shapes in (["--shape", "48,20,40,4,2"], ["--shape", "48,20,40,4,2", "--list-configs"]):
        assert main([*command, "--engines", "reference", *shapes]) == 2
        captured = capsys.readouterr()
        assert "got t48-h20-f40-e4-k2: reference takes no width of 20" in captured.err and not captured.out
    assert main(["bench", "--suite", "gemm", "--device", "cpu", "--rivals", "none", "--engines", "auto", "--list-configs"]) == 0
    monkeypatch.setattr(suites.Suite, "configurations", lambda *_: [])
    assert main(["bench", "--suite", "gemm", "--device", "cpu", "--rivals", "none", "--engines", "auto"]) == 2
    assert "--engines, --rivals: expected some that compute the suite here, got none" in capsys.readouterr().err


def test_a_sustained_run_is_complete(bench, one_case, tmp_path, capsys):
    status, content, rows = bench("--timing", "sustained", rivals="bmm,loop")
    assert status == 0, [row["problem"] for row in rows.values() if "problem" in row]
    run, = content["runs"]
    assert run["sustained"] == "0.0001 s of work before 0.0001 s that are timed, median of 2 rounds"
    assert run["energy_left_out"] == "NVML counts the energy of CUDA devices only, not of cpu"
    for row in (*rows.values(), *run["limit_rows"]):
        assert row["verified"] and row["timing"] == "sustained" and "median" in row and "joules" not in row
    assert all(TIMES <= set(row) for row in rows.values())
    row = rows["layer/tiny-mlp/uniform/forward/gbmoe-auto"]
    assert row["speedup"] == pytest.approx(rows["layer/tiny-mlp/uniform/forward/bmm"]["median"] / row["median"], rel=ROUNDED)
    assert "energy left out: NVML counts" in capsys.readouterr().out
    page = tmp_path / "page.md"
    assert main(["bench", "report", str(tmp_path / "rows.json"), "--output", str(page)]) == 0
    assert f"Timed sustained, one after the other: {run['sustained']}." in page.read_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_and_in_a_log(terminal, monkeypatch, capsys):
    if terminal:
        pytest.importorskip("rich", reason="terminals are drawn by rich, which scripts/test.sh installs")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    row = {"name": "layer/a[b]/bmm", "verified": False, "outcome": "crashed", "problem": "gone"}
    with table.Progress(2) as progress:
        progress.advance(row)
        progress.advance(None)
    err = capsys.readouterr().err
    assert "layer/a[b]/bmm: CRASHED: gone" in err.replace("\n", "")
    assert ("[1/2, " in err) != terminal and ("1/2" in err or "2/2" in err)


def test_a_named_rival_that_computes_nothing_of_a_suite_was_not_mentioned(bench, one_case, capsys):
    _, content, rows = bench(rivals="bmm,megablocks")
    reason = "computes nothing that suite smoke measures"
    assert content["runs"][0]["peers_left_out"] == {"megablocks": reason} and any(row["implementation"] == "bmm" for row in rows.values())
    assert f"megablocks left out: {reason}" in capsys.readouterr().out
