"""What a run prints: its progress on stderr, and tables of its rows, which the result file has in full.

A table has at most WIDTH columns of text and fits the terminal; each of its columns has one unit, which its heading names.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gbmoe._importable import is_importable
from gbmoe.cli.bench.measurements.measurement import IN_MICROSECONDS, MICRO_BATCHES, MOVING
from gbmoe.cli.bench.result_file import SPREAD_AT_MOST, is_disturbed, timing_of
from gbmoe.cli.progress import time_left
from gbmoe.cli.text_table import has_frames, print_table

WIDTH = 120


def duration(seconds: float, kind: str) -> str:
    """A time in the unit of the kind of measurement: microseconds for what moves rows and for the host's work, otherwise milliseconds."""
    value = seconds * (1e6 if kind in IN_MICROSECONDS else 1e3)
    return f"{value:#.4g}" if value < 9999.5 else f"{value:.0f}"


def unit(kind: str) -> str:
    return "us" if kind in IN_MICROSECONDS else "ms"


def bandwidth_unit(kind: str) -> str:
    """The unit of bandwidths: GB/s for links, which are slower than memory, otherwise TB/s."""
    return "GB/s" if kind == "link" else "TB/s"


def bandwidth(row: dict) -> str:
    """The bytes of a second."""
    return f"{row['terabytes'] * (1e3 if row['kind'] == 'link' else 1):#.3g}"


def joules(row: dict) -> str:
    """The energy of a call."""
    return f"{row['joules']:#.4g}"


def one_line(row: dict) -> str:
    """A row as a line of the progress log."""
    if not row["verified"]:
        return f"{row['name']}: {row['outcome'].upper()}: {row.get('problem') or 'no reason is known'}"
    found = ["verified"]
    if row.get("median") is not None:
        found.append(f"{duration(row['median'], row['kind'])} {unit(row['kind'])}")
        if row.get("tflops") is not None:
            found.append(f"{row['tflops']:#.3g} TFLOP/s")
        if row.get("terabytes") is not None:
            found.append(f"{bandwidth(row)} {bandwidth_unit(row['kind'])}")
        if row.get("joules") is not None:
            found.append(f"{joules(row)} J")
    return f"{row['name']}: " + ", ".join(found)


@contextmanager
def progress(total: int, tells: bool) -> Iterator[Callable[[dict | None], object]]:
    """What is called after each measurement with its row, or with None where its rival cannot be used; silent unless this process
    `tells`."""
    if not tells:
        yield lambda row: None
        return
    with Progress(total) as shown:
        yield shown.advance


class Progress:
    """Shows progress on stderr: a bar with the time left where rich can draw on a terminal, otherwise a line for each row."""

    def __init__(self, total: int):
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._bar = self._task = None
        if sys.stderr is not None and sys.stderr.isatty() and is_importable("rich"):
            self._bar, self._task = _rich_bar(total)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, row: dict | None) -> None:
        """One measurement is done. `row` is None where its rival cannot be used."""
        self._done += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=row["name"] if row else None)
            if row and not row["verified"]:
                self._bar.console.print(one_line(row), markup=False, highlight=False)
        elif row:
            print(f"[{self._done}/{self._total}{self._left()}] {one_line(row)}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        return time_left(time.monotonic() - self._start, self._done, self._total)


def _rich_bar(total: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Bar(MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
              TextColumn("{task.description}", markup=False), console=Console(stderr=True))
    return bar, bar.add_task("", total=total)


# ------------------------------------------------------------------------------------------------------------------ tables


def _time(row: dict) -> str:
    """The time, or how the row ended without one."""
    if row.get("median") is None:
        return row["outcome"]
    return duration(row["median"], row["kind"]) + ("?" if is_disturbed(row) else "")


# For each column: its heading, its alignment, the key without which a row's cell is empty, and the text of the cell.
_COLUMNS = (
    ("shape", "<", "case", lambda row: row["case"]),
    ("routing", "<", "routing", lambda row: row["routing"]),
    ("align", ">", "align", lambda row: str(row["align"])),
    ("{what}", "<", "computation", lambda row: "four micro-batches" if row["computation"] == MICRO_BATCHES else row["computation"]),
    ("who", "<", "by", lambda row: row["by"]),
    ("{unit}", ">", "outcome", _time),
    ("kernels {unit}", ">", "kernels", lambda row: duration(row["kernels"], row["kind"])),
    ("TFLOP/s", ">", "tflops", lambda row: f"{row['tflops']:#.3g}"),
    ("{bandwidth}", ">", "terabytes", bandwidth),
    ("% of limit", ">", "of_limit", lambda row: f"{100 * row['of_limit']:.0f}"),
    ("limit", "<", "bound_by", lambda row: row["bound_by"]),
    ("x {baseline}", ">", "speedup", lambda row: f"{row['speedup']:.2f}"),
    ("peak GiB", ">", "extra_peak_bytes", lambda row: f"{row['extra_peak_bytes'] / 2**30:.3f}"),
    ("J", ">", "joules", joules),
)
# Columns that are left out, in this order, where not all fit, and columns whose cells are then broken into lines.
_EXPENDABLE = ("bound_by", "joules", "extra_peak_bytes", "speedup", "of_limit")
_FOLDED = ("case", "computation", "by")
_NARROWEST = 8  # of what is broken into lines

# The kinds of measurements that have a table of their own: a function of the same arguments. benchmarks/ adds some.
TABLES: dict[str, Callable[[Sequence[dict], str, int], tuple[list[tuple[str, str]], list[list[str]]]]] = {}


def table(rows: Sequence[dict], baseline: str, width: int = WIDTH) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(headings with their alignment, cells) for rows of one kind, in `width` columns of text.

    Columns without any value are left out. Where the others do not fit, _EXPENDABLE ones are left out, too, and then cells get several
    lines.
    """
    moving = rows[0]["kind"] in MOVING
    shown = [column for column in _COLUMNS if any(row.get(column[2]) is not None for row in rows)
             and (moving or column[2] != "terabytes")]  # of layers and products, the rate of operations says it
    for key in (*_EXPENDABLE, None):
        headings, cells = _filled(shown, rows, baseline)
        if _width(headings, cells) <= width:
            return headings, cells
        shown = [column for column in shown if column[2] != key]
    places = [place for place, column in enumerate(shown) if column[2] in _FOLDED]
    limits = {place: max(len(line[place]) for line in cells) for place in places}
    while _width(headings, cells) > width and max(limits.values()) > _NARROWEST:
        widest = max(limits, key=limits.__getitem__)
        limits[widest] -= 1
        cells = [[_folded(cell, limits.get(place, len(cell))) for place, cell in enumerate(line)] for line in cells]
    return headings, cells


def _filled(columns, rows, baseline) -> tuple[list[tuple[str, str]], list[list[str]]]:
    kind = rows[0]["kind"]
    names = {"unit": unit(kind), "bandwidth": bandwidth_unit(kind), "baseline": baseline, "what": "step" if kind in MOVING else "pass"}
    headings = [(heading.format(**names), align) for heading, align, *_ in columns]
    return headings, [["-" if row.get(key) is None else cell(row) for _, _, key, cell in columns] for row in rows]


def _width(headings, cells) -> int:
    """The width of the table as it is printed."""
    columns = zip([heading for heading, _ in headings], *cells)
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    return sum(widths) + (3 * len(widths) + 1 if has_frames() else 2 * (len(widths) - 1))


def _folded(cell: str, limit: int) -> str:
    """The text in lines of at most `limit` characters, broken after a sign between words where there is one."""
    lines = [""]
    for word in re.findall(r"[^-+_, ]*[-+_, ]*", cell.replace("\n", "")):
        for piece in [word[start : start + limit] for start in range(0, len(word), limit)]:
            if len(lines[-1]) + len(piece) > limit and lines[-1]:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


_OF_LAYERS = ("layer", "host", "host-parts")  # kinds of measurements


def sizes(row: dict) -> str:
    """The row's shape in words."""
    ffn = f", ffn {row['ffn']}" if row["ffn"] else ""
    of_layer = {"glu": ", GLU", "mlp": ", plain MLP"}.get(row["mlp_type"], "") if row["kind"] in _OF_LAYERS else ""
    return f"{row['tokens']} tokens, hidden {row['hidden']}{ffn}, {row['experts']} experts, top {row['top_k']}{of_layer}"


def print_content(content: dict) -> None:
    """Print the rows in a table for each kind, its shapes in words, why rows have no time, the limits, and what was left out."""
    width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    for kind, rows in by_kind(measured(content)).items():
        print_table(*TABLES.get(kind, table)(rows, content["baseline"], width))
        for case, words in {row["case"]: sizes(row) for row in rows}.items():
            print(f"{case}: {words}")
        if any(map(is_disturbed, rows)):
            print(f"? was disturbed: its quartiles lie more than {100 * SPREAD_AT_MOST[timing_of(rows[0])]:.0f} % of the median apart")
        for cap in {row["memory_limit"]: None for row in rows if row.get("memory_limit")}:
            print(f"each had at most {cap:g} GiB of device memory")
        for by, problem in {(row["by"], row["uncaptured"]): None for row in rows if row.get("uncaptured")}:
            print(f"{by} has no time of kernels: {problem}")
        for row in rows:
            if not row["verified"]:
                what = ", ".join([row["case"], row["routing"], row["computation"], row["by"]])
                print(f"{what}: {row['outcome']}: {row.get('problem') or 'no reason is known'}")
    for (by, problem), settings in left_out(content).items():
        print(f"{by} left out: {problem}: {', '.join(settings)}")
    for run in content["runs"]:
        for row, what in zip(run["limit_rows"], ("dense product", "copy")):
            print(f"limit: a {what}: {one_line(row).partition(': ')[2]}")
        if run.get("energy_left_out"):
            print(f"energy left out: {run['energy_left_out']}")
        for what, without in (("engine", run["engines_left_out"]), ("rival", run["peers_left_out"])):
            for name, reason in without.items():
                print(f"{what} {name} left out: {reason}")


def measured(content: dict) -> list[dict]:
    """The rows without those whose implementation is not made for the case."""
    return [row for row in content["rows"] if row["outcome"] != "left out"]


def left_out(content: dict) -> dict[tuple[str, str], list[str]]:
    """The settings that implementations are not made for, by (implementation, reason)."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in content["rows"]:
        if row["outcome"] == "left out":
            reasons.setdefault((row["by"], row.get("problem") or ""), {})[row["setting"]] = None
    return {key: list(settings) for key, settings in reasons.items()}


def by_kind(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """The rows of each kind of measurement, in their order."""
    kinds: dict[str, list[dict]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    return kinds
