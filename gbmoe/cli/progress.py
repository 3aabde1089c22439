"""Progress of a command that takes long, on stderr: one line that changes on a terminal, otherwise a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_BETWEEN_DRAWINGS_S = 0.1
_BETWEEN_LINES_S = 15.0


def time_left(elapsed: float, done: float, total: float) -> str:
    """", ... left" for the end of a line, at the rate so far; "" where nothing is done yet."""
    if not done:
        return ""
    seconds = elapsed / done * (total - done)
    return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"


class StatusLine:
    """What the command is doing, while the block lasts.

    Example:
        >>> with StatusLine("gbmoe verify") as status:
        ...     status.show("3 of 210: gmm a @ b")
    """

    def __init__(self, command: str):
        self._command, self._shown, self._width = command, "", 0
        # Where stderr is no terminal the first line comes after some seconds, so that a short run prints none.
        self._last = -_BETWEEN_DRAWINGS_S if self._on_terminal() else time.monotonic()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_) -> None:
        self._draw("")

    def show(self, text: str) -> None:
        """Show the text in place of the one before. Most calls of a fast sequence show nothing."""
        now, terminal = time.monotonic(), self._on_terminal()
        if now - self._last < (_BETWEEN_DRAWINGS_S if terminal else _BETWEEN_LINES_S):
            return
        self._last = now
        if terminal:
            self._draw(f"{self._command}: {text}"[: shutil.get_terminal_size().columns - 1])
        elif sys.stderr is not None:
            print(f"{self._command}: {text}", file=sys.stderr, flush=True)

    def print_above(self, line: str, file: TextIO | None = None) -> None:
        """Print a line that stays."""
        shown = self._shown
        self._draw("")
        print(line, file=file, flush=self._on_terminal())
        self._draw(shown)

    def _draw(self, text: str) -> None:
        if self._on_terminal() and text != self._shown:
            # Noted first: an interruption of what follows must not hide that the line is there.
            self._shown, self._width = text, max(self._width, len(text))
            sys.stderr.write(f"\r{text.ljust(self._width)}" + ("" if text else "\r"))
            sys.stderr.flush()

    @staticmethod
    def _on_terminal() -> bool:
        return sys.stderr is not None and sys.stderr.isatty()
