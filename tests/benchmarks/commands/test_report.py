"""Pictures and pages: all that is there, nothing that is not, and the same bytes for the same rows."""

import contextlib
import importlib
import json

import pytest

from benchmarks.commands.report import BEGIN, END, PICTURES_BEGIN, PICTURES_END
from benchmarks.result_files import reading
from gbmoe.cli import main
from gbmoe.cli.bench import result_file
from gbmoe.testing import moe_shapes
from tests.cli.bench.rows import content, layer_row

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch):
    """Draw at a low resolution: these pictures are not looked at."""
    with contextlib.suppress(ImportError):
        pictures = importlib.import_module("benchmarks.result_files.pictures")
        monkeypatch.setattr(pictures, "STYLE", pictures.STYLE | {"figure.dpi": 10})


@pytest.fixture(scope="module")
def scaling(tmp_path_factory):
    """A file of the ends of the scaling suite's sweeps with a rival that is faster on the larger half, one that crashed and one that is not
    made for it."""
    rows = []
    for case in dict.fromkeys(case for sweep in moe_shapes.SCALING_CASES.values() for case in (sweep[0], sweep[-1])):
        for computation in ("forward", "forward+backward"):
            seconds = case.slots * 1e-8
            rows += [layer_row(case, "gbmoe-auto", seconds, computation, speedup=2.0),
                     layer_row(case, "bmm", 2 * seconds, computation, speedup=1.0),
                     layer_row(case, "loop", seconds * (0.5 if case.slots > 10**5 else 4), computation, speedup=0.5),
                     layer_row(case, "crashing", None, computation, outcome="crashed", problem="killed | by SIGSEGV"),
                     layer_row(case, "choosy", None, computation, outcome="left out", problem="not made for it")]
    file = tmp_path_factory.mktemp("scaling") / "scaling.json"
    result_file.write(file, content("scaling", rows))
    return file


def plot(file, folder):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    assert main(["bench", "plot", str(file), "--output", str(folder)]) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_pictures_of_everything_as_png_and_svg(scaling, tmp_path):
    pictures = plot(scaling, tmp_path)
    expected = {f"scaling-{computation}-{what}" for computation in ("forward", "forward-and-backward")
                for what in ("speed", "speedup", "memory", "growth")}
    assert set(pictures) == {f"{name}.{extension}" for name in expected for extension in ("png", "svg")}
    assert all(data.startswith(b"\x89PNG") for name, data in pictures.items() if name.endswith(".png"))
    bars = pictures["scaling-forward-speed.svg"].decode()
    assert "TFLOP/s" in bars and "crashed" in bars and "NVIDIA H200" in bars and "choosy" not in bars
    assert "extra peak memory in GiB" in pictures["scaling-forward-memory.svg"].decode()
    growth = pictures["scaling-forward-growth.svg"].decode()
    assert all(words in growth for words in ("experts", "tokens", "hidden size", "limit", "median time in ms"))
    assert "times as fast as bmm" in pictures["scaling-forward-speedup.svg"].decode()


def test_the_same_rows_give_the_same_bytes(tmp_path):
    file, case = tmp_path / "rows.json", moe_shapes.SMOKE_CASES[0]
    result_file.write(file, content("smoke", [layer_row(case, by, 1e-3, speedup=1.0) for by in ("gbmoe-auto", "bmm")]))
    pictures = plot(file, tmp_path / "a")
    assert len(pictures) == 6 and pictures == plot(file, tmp_path / "b")


def test_pictures_of_a_real_run(bench, one_case, tmp_path):
    bench(rivals="bmm")
    pictures = plot(tmp_path / "rows.json", tmp_path / "pictures")
    assert {"smoke-layer-forward-speedup.png", "smoke-product-weight-gradient-speed.svg"} <= set(pictures)


def test_the_account_compares_time_and_energy_with_the_dense_product_of_the_same_run(tmp_path):
    """As products take half as much of the energy as they do of the time here, one for the other would be seen."""
    file, case = tmp_path / "rows.json", moe_shapes.SMOKE_CASES[0]
    rows = content("smoke", [layer_row(case, "gbmoe-auto", 1e-3, joules=2.0), layer_row(case, "bmm", 1e-3, joules=1.0)])
    flops = rows["rows"][0]["flops"]
    dense = layer_row(case, "bmm", 8e-4) | {"by": "dense", "flops": 2 * flops, "joules": 1.6}
    rows["runs"][0] = rows["runs"][0] | {"limit_rows": [dense]}
    result_file.write(file, rows)
    picture = plot(file, tmp_path / "a")["smoke-forward-account.svg"].decode()
    assert ">40 %<" in picture and ">1 ms<" in picture and picture.count(">2 J<") == 1 and picture.count(" J<") == 1


def test_one_command_draws_several_files_or_the_pictures_that_are_named(scaling, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    smoke, case = tmp_path / "smoke.json", moe_shapes.SMOKE_CASES[0]
    result_file.write(smoke, content("smoke", [layer_row(case, by, 1e-3, speedup=1.0) for by in ("gbmoe-auto", "bmm")]))
    names = ["scaling-forward-growth.svg", "smoke-forward-speedup.png"]
    command = ["bench", "plot", str(scaling), str(smoke), "--output", str(tmp_path / "p"), "--only", *names]
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == names
    assert main([*command, "no-such.svg"]) == 2
    assert "--only: expected the name of a picture of these files, got no-such.svg" in capsys.readouterr().err


def test_pictures_of_two_files_of_a_suite_overwrote_each_other(scaling, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    other = tmp_path / "other.json"
    other.write_bytes(scaling.read_bytes())
    assert main(["bench", "plot", str(scaling), str(other), "--output", str(tmp_path / "p")]) == 2
    assert f"one file of suite scaling, whose pictures have the same names, got {scaling} and {other}" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("disturbed, bold", [((), True), (("gbmoe-auto",), False), (("bmm",), False), (("loop",), True)], ids=str)
def test_a_disturbed_line_was_shown_in_bold(disturbed, bold, tmp_path):
    """Only the fastest and the next one decide which is the fastest, and by how much; every disturbed figure is marked."""
    case, speeds = moe_shapes.SMOKE_CASES[0], {"gbmoe-auto": 1e-3, "bmm": 2e-3, "loop": 4e-3}
    rows = [layer_row(case, by, seconds, computation, speedup=2e-3 / seconds, timing="sustained")
            for by, seconds in speeds.items() for computation in ("forward", "forward+backward")]
    for row in rows:
        if row["by"] in disturbed and row["computation"] == "forward":
            row["quartiles"] = [0.95 * row["median"], 1.01 * row["median"]]
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    result_file.write(file, content("layers", rows))
    assert main(["bench", "report", str(file), "--output", str(page)]) == 0
    text = page.read_text()
    cells = [cell.strip() for line in text.splitlines() if line.startswith(f"| {case.name} ") for cell in line.strip("|").split("|")][2:5]
    assert [cell.startswith("**") for cell in cells] == [bold, False, False]
    assert [cell.count("?") for cell in cells] == [int(by in disturbed) for by in speeds]
    assert ("more than 4 % of the median apart" in text) == bool(disturbed)


def test_a_speed_up_over_what_was_disturbed_has_a_question_mark(tmp_path):
    file, case = tmp_path / "rows.json", moe_shapes.SMOKE_CASES[0]
    rows = [layer_row(case, by, seconds, speedup=1e-3 / seconds) for by, seconds in (("gbmoe-auto", 5e-4), ("bmm", 1e-3))]
    result_file.write(file, content("smoke", rows))
    assert ">2.00<" in plot(file, tmp_path / "steady")["smoke-forward-speedup.svg"].decode()
    rows[1]["quartiles"] = [0.8e-3, 1.1e-3]  # the baseline's
    result_file.write(file, content("smoke", rows))
    assert ">2.00?<" in plot(file, tmp_path / "disturbed")["smoke-forward-speedup.svg"].decode()


def test_limits_of_several_runs_are_a_span(scaling, tmp_path):
    found = reading.read(scaling)
    (run,) = found["runs"]
    found["runs"].append({**run, "limits": {**run["limits"], "flops": 0.95 * run["limits"]["flops"]}})
    file, page = tmp_path / "two-runs.json", tmp_path / "page.md"
    result_file.write(file, found)
    assert main(["bench", "report", str(file), "--output", str(page)]) == 0
    assert "Limits: a dense product of 665 to 700 TFLOP/s, a copy of 4 TB/s." in page.read_text()


def test_nothing_to_draw_and_nothing_to_read(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    empty = tmp_path / "empty.json"
    result_file.write(empty, content("smoke", [layer_row(moe_shapes.SMOKE_CASES[0], "bmm", outcome="crashed", problem="gone")]))
    assert main(["bench", "plot", str(empty), "--output", str(tmp_path / "p")]) == 1
    assert main(["bench", "plot", str(tmp_path / "absent.json"), "--output", str(tmp_path / "p")]) == 2
    captured = capsys.readouterr()
    assert "nothing to draw" in captured.out and "absent.json: No such file" in captured.err


def test_page(scaling, tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name in ("scaling-forward-speed.png", "scaling-forward-speed.svg", "other-forward-speed.png"):
        (pictures / name).touch()
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    assert main(["bench", "report", str(scaling), "--output", str(page), "--pictures", str(pictures)]) == 0
    text = page.read_text()
    for words in ("NVIDIA H200, driver 580, torch 2.11.0, gbmoe 0.1.0 at commit 0123456789ab, bfloat16, seed 0.",
                  "Limits: a dense product of 700 TFLOP/s, a copy of 4 TB/s.", "- loop: loop 1.0",
                  "- sonicmoe is left out: it is | not here", "- crashing, crashed: killed | by SIGSEGV (",
                  "- choosy, -: not made for it (", "| shape | routing | gbmoe-auto | bmm | loop | crashing |",
                  "![scaling forward speed](../pictures/scaling-forward-speed.png)",
                  "<details><summary>All rows: layer</summary>"):
        assert words in text
    assert "other-forward-speed" not in text and ".svg" not in text
    assert main(["bench", "report", str(scaling), "--output", str(page), "--pictures", str(pictures), "--short"]) == 0
    start = text.index("<details>")
    assert page.read_text() == text[:start].rstrip() + "\n" and "<details>" not in page.read_text()
    main_table = [line for line in text.splitlines() if "crashed / crashed" in line]
    line, = [line for line in main_table if line.startswith("| t1024-h2048-e64 ")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2].startswith("**") and not cells[3].startswith("**") and cells[5] == "crashed / crashed"
    line, = [line for line in main_table if line.startswith("| t65536-h2048-e64 ")]
    assert line.strip("|").split("|")[4].strip().startswith("**")  # there the loop is faster


def test_a_page_shows_the_pictures_that_lie_there_and_links_to_no_other(scaling, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "scaling-forward-speedup.svg").touch()
    page = tmp_path / "page.md"
    assert main(["bench", "report", str(scaling), "--output", str(page), "--pictures", str(tmp_path / "pictures")]) == 0
    text = page.read_text()
    assert text.count("![") == 1 and "![scaling forward speedup](pictures/scaling-forward-speedup.svg)" in text


def test_runs_of_one_machine_share_a_sentence(tmp_path):
    joined = content("smoke", [layer_row(moe_shapes.SMOKE_CASES[0], "bmm", 1e-3)])
    run, = joined["runs"]
    joined["runs"] = [run, run | {"versions": run["versions"] | {"commit": "fedcba98765432"}}, run | {"seed": 1}, run]
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    result_file.write(file, joined)
    assert main(["bench", "report", str(file), "--output", str(page)]) == 0
    where = "NVIDIA H200, driver 580, torch 2.11.0, gbmoe 0.1.0 at commit"
    assert f"{where}s 0123456789ab, fedcba987654, bfloat16, seed 0. {where} 0123456789ab, bfloat16, seed 1. Limits:" in page.read_text()


def test_a_broken_file_is_named_and_the_rest_reported(scaling, tmp_path, capsys):
    broken, page = tmp_path / "broken.json", tmp_path / "page.md"
    broken.write_text("[]")
    files = map(str, (broken, scaling, tmp_path / "absent.json"))
    assert main(["bench", "report", *files, "--output", str(page)]) == 2
    err, text = capsys.readouterr().err, page.read_text()
    for words in ("broken.json: expected a result file of gbmoe bench", "absent.json: No such file"):
        assert words in err and words in text
    assert "## scaling" in text


def test_configurations_that_no_run_finished_are_named(scaling, tmp_path):
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    whole = json.loads(scaling.read_text())
    file.write_text(json.dumps(whole | {"configurations": [*whole["configurations"], "layer/another/uniform"]}))
    for path, words in ((file, True), (scaling, False)):
        assert main(["bench", "report", str(path), "--output", str(page)]) == 0
        assert (f"**Not run:** 1 of {len(whole['configurations']) + 1} configurations: layer/another/uniform." in page.read_text()) == words


def test_readme_gets_the_main_table_and_two_pictures_and_keeps_the_rest(scaling, tmp_path, capsys):
    (tmp_path / "pictures").mkdir()
    for computation in ("forward", "forward-and-backward"):
        for what in ("speed", "speedup", "memory", "growth"):
            (tmp_path / "pictures" / f"scaling-{computation}-{what}.png").touch()
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nSTALE\n{END}\n\nThe end.\n")
    command = ["bench", "report", str(scaling), "--output", str(tmp_path / "page.md"),
               "--pictures", str(tmp_path / "pictures"), "--readme", str(readme)]
    assert main(command) == 0
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n") and text.endswith(f"{END}\n\nThe end.\n") and "STALE" not in text
    assert text.count("![") == 2 and "pictures/scaling-forward-and-backward-speedup.png" in text
    assert "| gbmoe-auto | bmm | loop |" in text and "crashing" not in text
    assert main(command) == 0 and readme.read_text() == text
    absent = [*command[:2], str(tmp_path / "absent.json"), *command[2:]]  # another file's table must not take its place
    assert main(absent) == 2 and readme.read_text() == text
    assert main([*command[:-1], str(tmp_path / "absent.md")]) == 2 and "absent.md: No such file" in capsys.readouterr().err
    for written in (["merge", str(scaling), "--json"], ["report", str(scaling), "--output"]):
        assert main(["bench", *written, str(readme / "file")]) == 2
        assert f"{written[-1]}: {readme} is not a directory" in capsys.readouterr().err
        absent = tmp_path / written[0] / "absent" / "file"
        assert main(["bench", *written, str(absent)]) == 0 and absent.exists()
    readme.write_text("no markers")
    assert main(command) == 2 and "expected the lines" in capsys.readouterr().err and readme.read_text() == "no markers"


def test_what_cannot_be_written_or_read_is_said_in_a_line(scaling, tmp_path, capsys):
    taken, latin = tmp_path / "taken", tmp_path / "latin.md"
    taken.mkdir()
    latin.write_bytes(f"{BEGIN}\xe9{END}".encode("latin-1"))
    for command in (["merge", str(scaling), "--json", str(taken)], ["report", str(scaling), "--output", str(taken)],
                    ["merge", str(scaling), "--json", "."], ["report", str(scaling), "--output", "."]):
        assert main(["bench", *command]) == 2
        line, = capsys.readouterr().err.splitlines()
        assert line == f"gbmoe bench {command[0]}: {command[2]}: {command[3]} is a directory"
    assert main(["bench", "report", str(scaling), "--output", str(tmp_path / "page.md"), "--readme", str(latin)]) == 2
    assert "latin.md: not UTF-8" in capsys.readouterr().err
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    for output in (latin, latin / "folder"):
        assert main(["bench", "plot", str(scaling), "--output", str(output)]) == 2
        assert capsys.readouterr().err.startswith("gbmoe bench plot: ")


def test_nothing_but_broken_files_gives_no_page(tmp_path, capsys):
    broken, page = tmp_path / "broken.json", tmp_path / "page.md"
    broken.write_text("[]")
    assert main(["bench", "report", str(broken), "--output", str(page)]) == 2
    assert main(["bench", "merge", str(broken), "--json", str(page)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3 and not page.exists()


def test_a_readme_may_have_a_place_of_their_own_for_the_pictures(scaling, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "scaling-forward-speedup.svg").touch()
    readme, places = tmp_path / "README.md", f"{PICTURES_BEGIN}\nSTALE\n{PICTURES_END}\n\nBetween.\n\n{BEGIN}\nSTALE\n{END}\n"
    readme.write_text(places)
    command = ["bench", "report", str(scaling), "--output", str(tmp_path / "page.md"), "--readme", str(readme)]
    assert main([*command, "--pictures", str(tmp_path / "pictures")]) == 0
    first, _, second = readme.read_text().partition("Between.")
    assert first == f"{PICTURES_BEGIN}\n![scaling forward speedup](pictures/scaling-forward-speedup.svg)\n{PICTURES_END}\n\n"
    assert "| gbmoe-auto | bmm | loop |" in second and "![" not in second and "STALE" not in second
