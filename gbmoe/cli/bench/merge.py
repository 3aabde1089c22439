"""`gbmoe bench merge`: join the parts that single configurations left."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from gbmoe._files import one_line
from gbmoe.cli.bench import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the parts, --baseline and --json."""
    parser.add_argument("parts", nargs="+", type=Path, metavar="DIR_OR_FILE",
                        help="a file of results, or a folder of them")
    parser.add_argument("--baseline", metavar="NAME", help="whom speed-ups are over (default: whom they were over)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the joined results go")


def run(arguments: argparse.Namespace) -> int:
    """Write all that is there; 1 where a file or a configuration of the suite's list is missing or broken, or a row of
    gbmoe's is wrong, which is named; 2 for what cannot be joined or written, and where no file holds results."""
    problem = results.no_place("--json", arguments.json)
    if problem:
        return _fail(problem)
    contents, broken = results.read_all(_files(arguments.parts))
    if not contents and any(problem.status == 2 for problem in broken):
        return _fail(*broken)
    problems = list(map(str, broken))
    if contents:
        try:
            merged, missing = results.merge(list(contents.values()), arguments.baseline)
        except ValueError as error:
            return _fail(error)
        problems += [f"no result of {name}" for name in missing] + results.faults(merged)
        if arguments.baseline and all(row["by"] != arguments.baseline for row in merged["rows"]):
            present = ", ".join(sorted({row["by"] for row in merged["rows"]}))
            problems.append(f"no row is by {arguments.baseline}: expected one of {present}")
        try:
            results.write(arguments.json, merged)
        except OSError as error:
            return _fail(f"{arguments.json}: {error.strerror}")
        there = len(merged["configurations"]) - len(missing)
        print(f"{arguments.json}: {len(merged['rows'])} rows of {there} configurations")
    else:
        problems.append("no results at all, nothing written")
    _fail(*problems)
    return 1 if problems else 0


def _fail(*problems: object) -> int:
    for problem in problems:
        print(f"gbmoe bench merge: {one_line(problem)}", file=sys.stderr)
    return 2


def _files(parts: Iterable[Path]) -> list[Path]:
    return [file for part in parts for file in (sorted(part.glob("*.json")) if part.is_dir() else [part])]
