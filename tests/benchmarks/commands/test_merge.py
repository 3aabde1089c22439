"""Configurations one at a time, and their parts joined: nothing is lost, done twice or passed off as whole."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.result_files import reading
from gbmoe.cli import main
from gbmoe.cli.bench import result_file
from gbmoe.testing import moe_shapes
from tests.cli.bench.rows import content, layer_row
from tests.forked_python import python

SMOKE = ["bench", "--suite", "smoke", "--device", "cpu", "--quick", "--rivals", "none"]


def listed(capsys, *arguments):
    capsys.readouterr()
    assert main([*SMOKE, *arguments, "--list-configs"]) == 0
    return dict(line.split("\t") for line in capsys.readouterr().out.splitlines())


def test_the_list_is_of_the_suite_alone(capsys):
    configurations = listed(capsys)
    assert configurations["0"] == "layer/tiny-mlp/uniform" and list(configurations) == [str(i) for i in range(5)]
    assert listed(capsys, "--rivals", "all", "--engines", "reference") == configurations


@pytest.mark.parametrize("suite", ["nyu", "layers", "gemm", "permute", "scaling", "inference", "host"])
def test_every_suite_has_a_list_with_unique_names(suite, capsys):
    assert main(["bench", "--suite", suite, "--device", "cpu", "--list-configs"]) == 0
    names = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(names) == len(set(names)) > 7


def test_parts_are_the_whole(tmp_path, capsys, one_case):
    parts, whole = tmp_path / "parts", tmp_path / "whole.json"
    assert main([*SMOKE, "--json", str(whole)]) == 0
    for index in listed(capsys):
        assert main([*SMOKE, "--config", index, "--output", str(parts)]) == 0
    assert sorted(path.name for path in parts.iterdir()) == [f"smoke-{i:04d}.json" for i in range(3)]
    joined = tmp_path / "joined.json"
    assert main(["bench", "merge", str(parts), "--json", str(joined)]) == 0
    expected, merged = reading.read(whole), reading.read(joined)
    assert [row["name"] for row in merged["rows"]] == [row["name"] for row in expected["rows"]]
    assert merged["configurations"] == expected["configurations"] and len(merged["runs"]) == 3
    for row in merged["rows"]:
        assert row["setting"] in merged["runs"][row["run"]]["configurations"]


def test_the_baseline_may_be_chosen_when_parts_are_joined(tmp_path, capsys, one_case):
    file, joined = tmp_path / "a.json", tmp_path / "b.json"
    assert main([*SMOKE, "--json", str(file)]) == 0
    assert main(["bench", "merge", str(file), "--baseline", "gbmoe-reference", "--json", str(joined)]) == 0
    merged = reading.read(joined)
    assert merged["baseline"] == "gbmoe-reference"
    assert {row["speedup"] for row in merged["rows"] if row["by"] == "gbmoe-reference"} == {1.0}
    assert main(["bench", "merge", str(file), "--baseline", "nobody", "--json", str(joined)]) == 2
    assert "no row is by nobody: expected one of dense, gbmoe-auto, gbmoe-reference" in capsys.readouterr().err


def test_a_finished_part_is_not_done_again(tmp_path, capsys, one_case):
    part = [*SMOKE, "--config", "1", "--output", str(tmp_path)]
    assert main(part) == 0
    file = tmp_path / "smoke-0001.json"
    first = file.read_bytes()
    assert main(part) == 0 and file.read_bytes() == first
    assert "is there already; --force" in capsys.readouterr().out
    assert main([*part, "--force"]) == 0 and file.read_bytes() != first
    file.write_text(file.read_text()[:-20])  # cut off: not finished
    assert main(part) == 0
    assert reading.read(file)


def test_what_was_wrong_stays_wrong(tmp_path, capsys, one_case):
    part, file = [*SMOKE, "--config", "1", "--output", str(tmp_path)], tmp_path / "smoke-0001.json"
    assert main(part) == 0
    content = reading.read(file)
    row = next(row for row in content["rows"] if row["implementation"] == "gbmoe")
    row |= {"verified": False, "outcome": "wrong", "problem": "out: too far off"}
    result_file.write(file, content)
    capsys.readouterr()
    assert main(part) == 1
    assert f"FAIL: {row['name']}: out: too far off" in capsys.readouterr().out
    for command in (["merge", str(file), "--json"], ["report", str(file), "--output"]):
        written = tmp_path / f"by-{command[0]}"
        assert main(["bench", *command, str(written)]) == 1 and written.exists()
        assert f"{row['name']}: out: too far off" in capsys.readouterr().err


@pytest.mark.parametrize("break_it, words", [
    (lambda content: content["rows"][2].pop("outcome"), "whose row 2 is without outcome"),
    (lambda content: content["runs"][0].pop("machine"), "whose run 0 is without machine"),
    (lambda content: content["rows"].append(None), "without name, setting"),
    (lambda content: content.update(rows=None), "without rows"),
    (lambda content: content["rows"][0].update(run=1), "is of a run that is not there"),
])
def test_a_file_with_holes_is_broken(break_it, words, tmp_path, one_case):
    assert main([*SMOKE, "--config", "1", "--output", str(tmp_path)]) == 0
    file = tmp_path / "smoke-0001.json"
    content = reading.read(file)
    break_it(content)
    file.write_text(json.dumps(content))
    with pytest.raises(reading.BrokenFile, match=f"smoke-0001.json: expected a result file of gbmoe bench, got one .*{words}"):
        reading.read(file)


def test_what_is_missing_or_broken_is_named_and_the_rest_joined(tmp_path, capsys, one_case):
    parts = [tmp_path / f"smoke-{i:04d}.json" for i in range(3)]
    assert main([*SMOKE, "--config", "1", "--output", str(tmp_path)]) == 0
    parts[2].write_text("{")
    (tmp_path / "other.json").write_text("{}")
    capsys.readouterr()
    joined = tmp_path / "joined" / "smoke.json"
    joined.parent.mkdir()
    assert main(["bench", "merge", *map(str, parts), str(tmp_path / "other.json"), "--json", str(joined)]) == 2
    err = capsys.readouterr().err
    for words in (f"{parts[0]}: No such file", f"{parts[2]}: not JSON", "no result of layer/tiny-mlp/uniform",
                  "no result of product/tiny-mlp/skewed",
                  "other.json: expected a result file of gbmoe bench, got one without suite"):
        assert words in err
    assert {row["setting"] for row in reading.read(joined)["rows"]} == {"product/tiny-mlp/equal"}
    joined.unlink()
    assert main(["bench", "merge", str(parts[0]), "--json", str(joined)]) == 2
    assert "nothing is written" in capsys.readouterr().err and not joined.exists()


def test_parts_of_one_configuration_with_other_rivals_complete_each_other(tmp_path, capsys, one_case):
    for folder, engines in (("a", "auto"), ("b", "reference")):
        assert main([*SMOKE, "--engines", engines, "--config", "0", "--output", str(tmp_path / folder)]) == 0
    joined = tmp_path / "joined.json"
    main(["bench", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(joined)])
    assert {row["by"] for row in reading.read(joined)["rows"]} == {"gbmoe-auto", "gbmoe-reference"}


def test_results_of_two_suites_are_not_joined(tmp_path, capsys):
    content = {"configurations": [], "runs": [], "rows": [], "baseline": "bmm"}
    for suite in ("smoke", "gemm"):
        result_file.write(tmp_path / f"{suite}.json", content | {"suite": suite})
    assert main(["bench", "merge", str(tmp_path), "--json", str(tmp_path / "joined.json")]) == 2
    assert "expected results of one suite, got gemm, smoke" in capsys.readouterr().err


def test_a_killed_part_leaves_no_file(tmp_path):
    """Killed at any moment: the part is either whole or not there."""
    command = [python(), "-m", "gbmoe", *SMOKE, "--config", "2", "--output", str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in running.stderr:
        if line.startswith("[1/"):
            break
    running.kill()
    running.wait()
    time.sleep(0.1)
    assert not list(tmp_path.glob("*.json"))


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "rows.json"
    result_file.write(file, {"rows": [1]})
    with pytest.raises(ValueError):
        result_file.write(file, {"rows": [float("inf")]})
    assert json.loads(file.read_text()) == {"rows": [1]} and list(tmp_path.iterdir()) == [file]


def test_swept_sizes_are_the_axes_of_the_scaling_suite():
    for size, sweep in moe_shapes.SCALING_CASES.items():
        values = [getattr(case, size) for case in sweep]
        assert values == sorted(set(values))
        others = {tuple(getattr(case, name) for name in ("tokens", "hidden", "experts", "ffn", "top_k") if name != size)
                  for case in sweep}
        assert len(others) == 1


def test_results_of_bursts_and_of_sustained_work_were_joined(tmp_path, capsys):
    case = moe_shapes.SMOKE_CASES[0]
    rows = {name: [layer_row(case, by, 1e-3, **more) for by in ("gbmoe-auto", "bmm")] for name, more in
            (("old", {}), ("bursts", {"timing": "bursts"}), ("sustained", {"timing": "sustained", "joules": 0.7}))}
    files = {name: tmp_path / f"{name}.json" for name in rows}
    for name, file in files.items():
        result_file.write(file, content("smoke", rows[name]))
    out = tmp_path / "out.json"
    assert main(["bench", "merge", str(files["old"]), str(files["bursts"]), "--json", str(out)]) == 0
    out.unlink()
    words = "expected files of suite smoke that are timed in one way, got bursts and sustained"
    for command in (["merge", "--json", str(out)], ["report", "--output", str(tmp_path / "page.md")],
                    ["plot", "--output", str(tmp_path / "pictures")]):
        if command[0] == "plot":
            pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
        capsys.readouterr()
        assert main(["bench", command[0], str(files["old"]), str(files["sustained"]), *command[1:]]) == 2
        assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bursts.json", "old.json", "sustained.json"]


def test_a_file_that_mixes_both_is_refused(tmp_path, capsys):
    file, case = tmp_path / "mixed.json", moe_shapes.SMOKE_CASES[0]
    result_file.write(file, content("smoke", [layer_row(case, "bmm", 1e-3), layer_row(case, "loop", 1e-3, timing="sustained")]))
    assert main(["bench", "report", str(file), "--output", str(tmp_path / "page.md")]) == 2
    assert "whose rows are timed in 2 ways, bursts and sustained" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_that_is_timed_in_another_way_was_taken_for_done(tmp_path, capsys, one_case):
    part = [*SMOKE, "--config", "0", "--output", str(tmp_path)]
    assert main(part) == 0
    assert main([*part, "--timing", "sustained"]) == 2
    assert "smoke-0000.json is timed in bursts, and this run is to be sustained; --force does it again" in capsys.readouterr().err
    assert main([*part, "--timing", "sustained", "--force"]) == 0
    assert {row["timing"] for row in reading.read(tmp_path / "smoke-0000.json")["rows"]} == {"sustained"}


def test_results_from_before_there_were_two_ways_are_bursts(tmp_path):
    older = json.loads((Path(__file__).parents[3] / "results" / "h200" / "layers.json").read_text())
    for row in older["rows"]:
        del row["timing"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    measured = reading.read(tmp_path / "older.json")
    assert reading.timing(measured) == "bursts" and not any("timing" in row for row in measured["rows"])
