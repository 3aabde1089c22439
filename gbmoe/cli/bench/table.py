"""What a run prints: its progress on stderr, and a table."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gbmoe._importable import is_importable
from gbmoe.cli.bench.measurements.base import MOVING
from gbmoe.cli.progress import time_left
from gbmoe.cli.text_table import print_table


def duration(seconds: float, kind: str) -> str:
    """A time in the unit of the kind of measurement: microseconds for what moves rows, otherwise milliseconds."""
    return f"{seconds * (1e6 if kind in MOVING else 1e3):#.4g}"


def unit(kind: str) -> str:
    return "us" if kind in MOVING else "ms"


def bandwidth_unit(kind: str) -> str:
    """The unit of bandwidths: GB/s for links, which are slower than memory, otherwise TB/s."""
    return "GB/s" if kind == "link" else "TB/s"


def _bandwidth(row: dict) -> str:
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
            found.append(f"{_bandwidth(row)} {bandwidth_unit(row['kind'])}")
        if row.get("joules") is not None:
            found.append(f"{joules(row)} J")
    return f"{row['name']}: " + ", ".join(found)


@contextmanager
def progress(total: int, tells: bool) -> Iterator[Callable[[dict | None], object]]:
    """What is called after each measurement with its row, or with None where its peer cannot be used; silent unless this process
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
        """One measurement is done. `row` is None where its peer cannot be used."""
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


def shape(row: dict) -> str:
    """The case and its sizes."""
    sizes = "x".join(str(row[key]) for key in ("tokens", "hidden", "ffn") if row[key])
    return f"{row['case']} {sizes} e{row['experts']}k{row['top_k']}"


def _times(row: dict, part: str | None = None) -> str:
    timing = row[part] if part else row
    return duration(timing["median"], row["kind"])


# For each column: its heading, its alignment, the key without which a row's cell is empty, and the text of the cell.
_COLUMNS = (
    ("case TxH[xF]", "<", "case", shape),
    ("routing", "<", "routing", lambda row: row["routing"]),
    ("align", ">", "align", lambda row: str(row["align"])),
    ("computation", "<", "computation", lambda row: row["computation"]),
    ("GiB at most", ">", "memory_limit", lambda row: f"{row['memory_limit']:g}"),
    ("by", "<", "by", lambda row: row["by"]),
    ("verified", "<", "verified", lambda row: "yes" if row["verified"] else "NO"),
    ("median {unit}", ">", "median", _times),
    ("quartiles {unit}", ">", "quartiles",
     lambda row: " - ".join(duration(end, row["kind"]) for end in row["quartiles"])),
    ("forward {unit}", ">", "forward", lambda row: _times(row, "forward")),
    ("backward {unit}", ">", "backward", lambda row: _times(row, "backward")),
    ("TFLOP/s", ">", "tflops", lambda row: f"{row['tflops']:#.3g}"),
    ("{bandwidth}", ">", "terabytes", _bandwidth),
    ("of limit", ">", "of_limit", lambda row: f"{row['of_limit']:.0%} {row['bound_by']}"),
    ("J", ">", "joules", joules),
    ("x {baseline}", ">", "speedup", lambda row: f"{row['speedup']:.2f}"),
    ("extra peak MiB", ">", "extra_peak_bytes", lambda row: f"{row['extra_peak_bytes'] / 2**20:.0f}"),
    ("largest/mean expert", ">", "imbalance", lambda row: f"{row['imbalance']:.2f}"),
    ("", "<", "problem", lambda row: f"{row['outcome']}: {row['problem']}"),
)


# The columns that are left out, in this order, where a terminal is too narrow for all. The result file has them.
_EXPENDABLE = ("imbalance", "terabytes", "quartiles", "forward", "backward", "extra_peak_bytes", "verified", "of_limit")


def table(rows: Sequence[dict], baseline: str, width: int | None = None) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(headings with their alignment, cells) for rows of one kind. Columns without any value are left out, and so are further ones where
    the table would be wider than `width`."""
    shown = [column for column in _COLUMNS if any(row.get(column[2]) is not None for row in rows)]
    for key in _EXPENDABLE:
        headings, cells = _filled(shown, rows, baseline)
        if width is None or _width(headings, cells) <= width:
            break
        shown = [column for column in shown if column[2] != key]
    return _filled(shown, rows, baseline)


def _filled(columns, rows, baseline) -> tuple[list[tuple[str, str]], list[list[str]]]:
    kind = rows[0]["kind"]
    names = {"unit": unit(kind), "bandwidth": bandwidth_unit(kind), "baseline": baseline}
    headings = [(heading.format(**names), align) for heading, align, *_ in columns]
    return headings, [["-" if row.get(key) is None else cell(row) for _, _, key, cell in columns] for row in rows]


def _width(headings, cells) -> int:
    """The width of the table with a frame around each cell."""
    return sum(max(map(len, column)) + 3 for column in zip([heading for heading, _ in headings], *cells)) + 1


def print_content(content: dict) -> None:
    """Print the rows in a table for each kind, the limits, and what was left out."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for rows in by_kind(measured(content)).values():
        print_table(*table(rows, content["baseline"], width))
    for (by, problem), settings in left_out(content).items():
        print(f"{by} left out: {problem}: {', '.join(settings)}")
    for run in content["runs"]:
        for row in run["limit_rows"]:
            print(f"limit: {one_line(row)}")
        if run.get("energy_left_out"):
            print(f"energy left out: {run['energy_left_out']}")
        for what in ("engine", "peer"):
            for name, reason in run[f"{what}s_left_out"].items():
                print(f"{what} {name} left out: {reason}")


def measured(content: dict) -> list[dict]:
    """The rows without those whose implementation is not made for the case."""
    return [row for row in content["rows"] if row["outcome"] != "left out"]


def without_cap(rows: Sequence[dict]) -> list[dict]:
    """The rows without a memory limit, or all rows where all have one."""
    return [row for row in rows if not row.get("memory_limit")] or list(rows)


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
