"""Result files (gbmoe/cli/bench/result_file.py) that are read, checked against schema.py, and what several of them have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files.schema import misshapen
from gbmoe._atomic_files import one_line, read_json
from gbmoe.cli.bench.result_file import timing_of


class BrokenFile(Exception):
    """Raised for a file that is missing, cannot be read or holds no results; its text, a line, names the file."""


def read(path: Path) -> dict:
    """The file's content, checked against schema.py. Raises BrokenFile."""
    try:
        content: Any = read_json(path)
    except OSError as error:
        raise BrokenFile(one_line(f"{path}: {error.strerror}")) from None
    except ValueError as error:
        raise BrokenFile(one_line(f"{path}: {error}")) from None
    problem = misshapen(content)
    if problem:
        raise BrokenFile(one_line(f"{path}: expected a result file of gbmoe bench, got one {problem}"))
    return content


def read_all(paths: Iterable[Path]) -> tuple[dict[Path, dict], list[BrokenFile]]:
    """The contents of the files that hold results, in their order, and an error for each of the others."""
    contents, problems = {}, []
    for path in paths:
        try:
            contents[path] = read(path)
        except BrokenFile as broken:
            problems.append(broken)
    return contents, problems


def timing(content: dict) -> str | None:
    """How its rows are timed; None where it has no row."""
    return next((timing_of(row) for row in content["rows"]), None)


def apart(contents: Iterable[dict]) -> str | None:
    """What keeps files from being shown together: the same suite, timed in bursts and sustained; None where nothing does."""
    ways: dict[str, set[str]] = {}
    for content in contents:
        ways.setdefault(content["suite"], set()).update(filter(None, [timing(content)]))
    return next((f"expected files of suite {suite} that are timed in one way, got {' and '.join(sorted(found))}: figures of the two are"
                 " not compared" for suite, found in ways.items() if len(found) > 1), None)


def missing(content: dict) -> list[str]:
    """The suite's configurations that no run of the content has finished."""
    done = {name for run in content["runs"] for name in run["configurations"]}
    return [name for name in content["configurations"] if name not in done]


def without_cap(rows: Sequence[dict]) -> list[dict]:
    """The rows without a memory limit, or all rows where all have one."""
    return [row for row in rows if not row.get("memory_limit")] or list(rows)
