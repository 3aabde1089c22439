"""The line of progress: what a terminal is left with, and what a file gets."""

import io
import sys

import pytest

from gbmoe.cli import progress
from gbmoe.cli.progress import StatusLine, time_left


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """The lines that a terminal shows."""
    lines = []
    for line in text.split("\n"):
        cells = []
        for piece in line.split("\r"):
            cells[: len(piece)] = piece
        lines.append("".join(cells).rstrip())
    return lines


def test_a_terminal_shows_one_line_and_is_clean_at_the_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_BETWEEN_DRAWINGS_S", 0)
    with StatusLine("gbmoe x") as status:
        status.show("a long text")
        status.show("short")
        assert screen(terminal.getvalue()) == ["gbmoe x: short"]
        status.print_above("a line", terminal)
        assert screen(terminal.getvalue()) == ["a line", "gbmoe x: short"]
    assert screen(terminal.getvalue()) == ["a line", ""]


def test_a_line_whose_drawing_is_interrupted_is_removed(monkeypatch):
    class Interrupted(Terminal):
        def flush(self):
            if "2 of 3" in self.getvalue() and not self.getvalue().endswith("\r"):
                raise KeyboardInterrupt

    terminal = Interrupted()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_BETWEEN_DRAWINGS_S", 0)
    with pytest.raises(KeyboardInterrupt), StatusLine("gbmoe x") as status:
        status.show("1 of 3: long")
        status.show("2 of 3")
    assert screen(terminal.getvalue()) == [""]


def test_a_file_gets_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with StatusLine("gbmoe x") as status:
        for second in range(40):
            now[0] = float(second)
            status.show(f"second {second}")
    assert capsys.readouterr().err == "gbmoe x: second 15\ngbmoe x: second 30\n"


def test_time_left():
    assert (time_left(10, 0, 5), time_left(10, 1, 3), time_left(100, 1, 7)) == ("", ", 20 s left", ", 10 min left")
