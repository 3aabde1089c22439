"""Print tables: with rich where stdout is a terminal and rich is installed, otherwise as aligned text for pipes and logs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from gbmoe._importable import is_importable


def has_frames() -> bool:
    """Whether tables are drawn with frames, which take three characters a column and one more; without, two lie between columns."""
    return sys.stdout.isatty() and is_importable("rich")


def print_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells under `columns`, which are (heading, alignment) pairs; the alignment is "<" or ">". A cell may have lines."""
    rows = [tuple(row) for row in rows]
    if has_frames():
        _print_rich(columns, rows)
        return
    headings = tuple(heading for heading, _ in columns)
    widths = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in zip(headings, *rows)]
    rule = tuple("-" * width for width in widths)
    for row in (headings, rule, *rows):
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            print("  ".join(f"{cell:{align}{width}}" for cell, (_, align), width in zip(line, columns, widths)).rstrip())


def _print_rich(columns, rows) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading, align in columns:
        # Text objects, here and below, because rich would read brackets in a string as markup.
        table.add_column(Text(heading), justify="right" if align == ">" else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
