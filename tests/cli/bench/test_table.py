"""Tables of rows: they fit, a column has one unit, and a line says in words what it is of."""

import re

import pytest

from gbmoe.cli.bench import table
from gbmoe.cli.text_table import print_table
from gbmoe.testing import moe_shapes
from tests.cli.bench.rows import RUN, content, layer_row, printed

LONGEST = moe_shapes.own_case(131072, 16384, 14336, 1024, 128, "mlp")


def rows_of(case):
    """Rows of all there is, with every field that a table shows, and one without a time."""
    names = ("gbmoe-auto", "gbmoe-hopper_batch_invariant", "torch-grouped-compiled", "transformers-batched_mm", "megablocks-grouped")
    rows = [layer_row(case, by, 1.2345e-3, computation, timing="sustained", joules=0.7654, speedup=1.5)
            for by in names for computation in ("forward", "forward+backward", "forward, CUDA graph", table.MICRO_BATCHES)]
    return [*rows, layer_row(case, "megablocks-sparse", outcome="crashed", problem="its process was killed by SIGSEGV " * 9)]


@pytest.mark.parametrize("case", [moe_shapes.SMOKE_CASES[0], LONGEST], ids=lambda case: case.name)
@pytest.mark.parametrize("width", [120, 100, 80, 60])
@pytest.mark.parametrize("framed", [True, False], ids=["rich", "plain"])
def test_a_table_was_wider_than_the_terminal(case, width, framed, capsys, monkeypatch):
    if framed:
        pytest.importorskip("rich", reason="terminals are drawn by rich, which scripts/test.sh installs")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(width))
    rows = rows_of(case)
    headings, cells = table.table(rows, "megablocks-grouped", width)
    assert {"shape", "routing", "pass", "who", "ms", "TFLOP/s"} <= {heading for heading, _ in headings}
    for row, line in zip(rows, cells, strict=True):  # nothing is cut off
        whole = [cell.replace("\n", "") for cell in line]
        assert row["case"] in whole and row["by"] in whole and ("1.234" in whole) == row["verified"]
    print_table(headings, cells)
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width and "1.234" in out


def test_a_wide_terminal_gets_no_more_than_120_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("gbmoe.cli.text_table.is_importable", lambda name: False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    table.print_content(content("layers", rows_of(LONGEST)))
    lines = capsys.readouterr().out.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("---"))
    assert max(map(len, lines[: rule + 20])) <= 120


def test_a_column_has_one_unit_and_its_heading_names_it():
    headings, cells = table.table(rows_of(moe_shapes.SMOKE_CASES[0])[:1], "bmm", 200)
    assert dict(zip([heading for heading, _ in headings], cells[0])) == {
        "shape": "tiny-mlp", "routing": "uniform", "pass": "forward", "who": "gbmoe-auto", "ms": "1.234", "TFLOP/s": "0.0136",
        "% of limit": "50", "limit": "compute", "x bmm": "1.50", "peak GiB": "1.000", "J": "0.7654"}


def test_shapes_limits_and_reasons_are_in_words(capsys):
    rows = rows_of(moe_shapes.SMOKE_CASES[0])
    rows[0]["quartiles"] = [1e-3, 1.3e-3]
    table.print_content(content("layers", rows) | {"runs": [RUN | {"limit_rows": [{**rows[4], "name": "product/dense/equal"}]}]})
    out = capsys.readouterr().out
    for line in ("tiny-mlp: 256 tokens, hidden 64, ffn 128, 4 experts, top 2, plain MLP",
                 "? was disturbed: its quartiles lie more than 4 % of the median apart",
                 "limit: a dense product: verified, 1.234 ms, 0.0136 TFLOP/s, 0.810 TB/s, 0.7654 J"):
        assert line in out.splitlines()
    assert "tiny-mlp, uniform, forward, megablocks-sparse: crashed: its process was killed by SIGSEGV" in out
    assert [line["ms"] for line in printed(out)][:2] == ["1.234?", "1.234"] and printed(out)[-1]["ms"] == "crashed"
