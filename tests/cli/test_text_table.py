"""Tables: rich's on a terminal, aligned text in a pipe."""

import sys

import pytest

from gbmoe.cli.text_table import print_table


def test_cells_of_several_lines_in_a_pipe(capsys):
    print_table([("name", "<"), ("time", ">")], [("a-\nlong-\nname", "1.5"), ("b", "22.5")])
    assert capsys.readouterr().out.splitlines() == ["name   time", "-----  ----", "a-      1.5", "long-", "name", "b      22.5"]


def test_table_on_a_terminal_and_in_a_pipe(monkeypatch, capsys):
    columns, rows = [("name[x]", "<"), ("time", ">")], [("a[b]", "1.5"), ("longer", "22.5")]
    print_table(columns, rows)
    assert capsys.readouterr().out.splitlines() == ["name[x]  time", "-------  ----", "a[b]      1.5", "longer   22.5"]
    pytest.importorskip("rich", reason="terminals are drawn by rich, which scripts/test.sh installs")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(columns, rows)
    out = capsys.readouterr().out
    assert all(text in out for text in ("name[x]", "a[b]", "22.5")) and "-------  ----" not in out
