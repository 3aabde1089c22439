"""Files of results with anything altered: a command does its work, or says in one line, with status 2, what is wrong."""

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.result_files import reading
from benchmarks.result_files.schema import misshapen
from gbmoe.cli import main
from gbmoe.cli.bench import result_file
from gbmoe.testing import moe_shapes
from tests.altered import altered, get, paths, put
from tests.cli.bench import rows as made_up

# What a field of one kind or another can be.
VALUES = (1e-30, "x", 1e30, 2**63 - 1, 0, -1e30, "", 200 * "x", 64 * "x", True, "a, b+c", 1)
MEASURED = Path(__file__).parents[3] / "results" / "h200"
REDUCED = Path(__file__).parent  # files of results/h200 that are in the history, with a row of each sort


def measured(suite):
    name = f"{suite}.json"
    return json.loads((REDUCED / name if (REDUCED / name).exists() else MEASURED / name).read_text())


def some_of(suite, *more):
    """A measured result file reduced to one row of each sort, with such rows of the files `more`."""
    content = measured(suite)
    rows, timing = {}, {name: value for name, value in content["rows"][0].items() if name == "timing"}
    others = [row for other in more for row in measured(other)["rows"]]
    for row in content["rows"] + [{**row, **timing, "run": 0} for row in others]:  # a file's rows are timed in one way
        rows.setdefault((*sort_of(row), row["implementation"] == "gbmoe"), row)
    return content | {"rows": list(rows.values()), "configurations": content["configurations"][:2]}


def sort_of(row):
    return row["kind"], row.get("median") is not None


def nodes(content):
    """Paths of the nodes; of rows that are of one sort, of one row's."""
    def meaning(path):
        keys = [key for key in path if isinstance(key, str)]
        return (*keys, *sort_of(content["rows"][path[1]])) if path[0] == "rows" and len(path) > 1 else tuple(keys)

    return list({meaning(path): path for path in paths(content)}.values())


def run(capsys, *command):
    """The exit status of a command that ended as it should."""
    status = main(["bench", *map(str, command)])
    err = capsys.readouterr().err
    assert status in (0, 1, 2), command
    if status == 2:
        line, *more = err.splitlines()
        assert more in ([], ["gbmoe bench merge: no file holds results, nothing is written"])
        assert line.startswith(f"gbmoe bench {command[0]}: ") and line.isprintable() and len(line) < 1200
    return status


@pytest.mark.slow
def test_altered_results_are_merged_and_reported_or_refused_in_a_line(tmp_path, capsys):
    file, merged, page = tmp_path / "altered.json", tmp_path / "merged.json", tmp_path / "page.md"
    content = some_of("scaling", "layers", "permute")
    commands = [["merge", file, "--json", merged], ["report", file, "--output", page],
                ["merge", file, "--baseline", "bmm", "--json", merged]]
    statuses = []
    for number, path in enumerate(nodes(content)):
        # A sixteenth of all there are; of neighbours, which are much alike, each another.
        for what, data in islice(altered(content, path), number % 16, None, 16):
            file.write_bytes(data)
            try:
                statuses.append(run(capsys, *commands[number % 3]))
                for command in commands if statuses[-1] != 2 else ():
                    assert run(capsys, *command) != 2
            except Exception as error:
                raise AssertionError(f"{path} altered: {what}") from error
    assert statuses.count(2) > len(statuses) / 3 and statuses.count(0) > 10


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))])
def test_whatever_passes_is_drawn(turn, tmp_path, capsys, monkeypatch):
    """Every leaf altered at once, each to another of the values that it may have."""
    pictures = pytest.importorskip("benchmarks.result_files.pictures", reason="pictures need matplotlib, which scripts/test.sh installs")
    monkeypatch.setattr(pictures, "STYLE", pictures.STYLE | {"figure.dpi": 10})
    file, content = tmp_path / "altered.json", some_of("scaling", "permute")
    put(content, ("runs", 0, "machine", "name"), "$\\frac$ {0} %")
    leaves = [path for path in paths(content) if path[0] in ("baseline", "rows")]
    leaves = [path for path in leaves if path[-1] != "computation"]  # rows of one are drawn together
    changed = 0
    for number, path in enumerate(leaves):
        before = get(content, path)
        for value in [] if isinstance(before, (dict, list)) else VALUES[(turn + number) % len(VALUES):]:
            put(content, path, value)
            if misshapen(content) is None:
                changed += 1
                break
            put(content, path, before)
    assert changed > len(leaves) / 4
    result_file.write(file, content)
    assert run(capsys, "plot", file, "--output", tmp_path / "pictures") == 0
    assert len(list((tmp_path / "pictures").iterdir())) > 3


def test_altered_results_are_not_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    file, content, refused = tmp_path / "altered.json", some_of("scaling"), 0
    for path in (("rows", 0, "median"), ("rows", 0, "speedup"), ("runs", 0, "machine", "name"), ("suite",)):
        for what, data in altered(content, path):
            file.write_bytes(data)
            try:
                reading.read(file)
            except reading.BrokenFile:
                assert run(capsys, "plot", file, "--output", tmp_path / "pictures") == 2, (path, what)
                refused += 1
    assert refused > 80 and not (tmp_path / "pictures").exists()


def test_a_row_is_a_line_of_the_file(tmp_path):
    """Indented, the files of results were a third larger, and a row thirty lines of them."""
    file, case = tmp_path / "rows.json", moe_shapes.SMOKE_CASES[0]
    rows = [made_up.layer_row(case, by, 1e-3, speedup=1.0) for by in ("gbmoe-auto", "bmm")]
    result_file.write(file, made_up.content("smoke", rows))
    assert json.loads(file.read_text()) == reading.read(file)
    lines = [line.rstrip(",") for line in file.read_text().splitlines() if '"median"' in line]
    assert [json.loads(line) for line in lines] == reading.read(file)["rows"] and len(lines) == 2 and ": " not in "".join(lines)


def test_numbers_had_seventeen_digits_and_a_third_of_the_fields_was_null(tmp_path):
    file, third = tmp_path / "rows.json", 1 / 3
    row = made_up.layer_row(moe_shapes.SMOKE_CASES[0], "bmm", third, speedup=None, forward={"median": third, "flops": None})
    made = made_up.content("smoke", [row])
    made["runs"] = [made["runs"][0] | {"limit_rows": [{**row, "bytes": 2**40 + 1}]}]
    result_file.write(file, made)
    content = reading.read(file)
    for written in (*content["rows"], *content["runs"][0]["limit_rows"]):
        assert written["median"] == 0.333333 and written["forward"] == {"median": 0.333333}
        assert written["tflops"] == pytest.approx(written["flops"] / written["median"] / 1e12, rel=made_up.ROUNDED)
        assert not {"speedup", "engine", "memory_limit", "problem"} & set(written) and None not in written.values()
    assert content["runs"][0]["limit_rows"][0]["bytes"] == 2**40 + 1  # counts are whole
    assert content["runs"][0]["clocks"] is None


def test_a_field_that_is_null_is_as_if_it_were_absent(tmp_path, capsys):
    """Files of before have such fields."""
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    rows = [made_up.layer_row(moe_shapes.SMOKE_CASES[0], by, 1e-3, timing="sustained") for by in ("gbmoe-auto", "bmm")]
    result_file.write(file, made_up.content("smoke", rows))
    commands = [["report", file, "--output", page], ["merge", file, "--json", tmp_path / "merged.json"]]
    texts = []
    for nulls in (False, True):
        if nulls:
            absent = dict.fromkeys(("engine", "memory_limit", "problem", "align", "speedup", "joules", "forward", "imbalance"))
            content = json.loads(file.read_text())
            file.write_text(json.dumps({**content, "rows": [absent | row for row in content["rows"]]}))
        assert [run(capsys, *command) for command in commands] == [0, 0]
        texts.append((page.read_text(), (tmp_path / "merged.json").read_text()))
    assert texts[0][0] == texts[1][0] and json.loads(texts[0][1]) == json.loads(texts[1][1])


@pytest.mark.parametrize("path", sorted(MEASURED.parent.glob("*/*.json")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_results_that_are_kept_are_as_they_are_written_now(path, tmp_path):
    result_file.write(tmp_path / "again.json", reading.read(path))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
