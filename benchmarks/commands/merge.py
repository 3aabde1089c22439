"""`gbmoe bench merge`: join the result files that runs of single configurations wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.result_files import reading
from gbmoe._atomic_files import one_line
from gbmoe.cli.bench import result_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the files, --baseline and --json."""
    parser.add_argument("parts", nargs="+", type=Path, metavar="DIR_OR_FILE",
                        help="a result file, or a folder of them")
    parser.add_argument("--baseline", metavar="NAME", help="the baseline of speed-ups (default: the one in the files)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the joined results go")


def run(arguments: argparse.Namespace) -> int:
    """Write everything that could be read. Return 2, with a message that names it, where a file is missing or broken, or the files
    cannot be joined or written; otherwise 1 where a configuration of the suite is missing or a row of gbmoe's is wrong."""
    problem = result_file.make_folder_for("--json", arguments.json)
    if problem:
        return _fail(problem)
    contents, broken = reading.read_all(_files(arguments.parts))
    if not contents:
        return _fail(*broken, "no file holds results, nothing is written")
    try:
        merged, missing = merge(list(contents.values()), arguments.baseline)
    except ValueError as error:
        return _fail(error)
    wrong = list(map(str, broken))
    if arguments.baseline and all(row["by"] != arguments.baseline for row in merged["rows"]):
        present = ", ".join(sorted({row["by"] for row in merged["rows"]}))
        wrong.append(f"--baseline: no row is by {arguments.baseline}: expected one of {present}")
    try:
        result_file.write(arguments.json, merged)
    except OSError as error:
        return _fail(f"{arguments.json}: {error.strerror}")
    there = len(merged["configurations"]) - len(missing)
    print(f"{arguments.json}: {len(merged['rows'])} rows of {there} configurations")
    faults = [f"no result of {name}" for name in missing] + result_file.faults(merged)
    _fail(*wrong, *faults)
    return 2 if wrong else 1 if faults else 0


def merge(contents: Sequence[dict], baseline: str | None = None) -> tuple[dict, list[str]]:
    """Join the contents of several result files of one suite. Returns the joined content, and the suite's configurations that are in
    none of them.

    Of rows with one name the last counts; speed-ups are over the baseline of their own run, which is theirs, or the one
    that is given. Raises ValueError for different suites, or different baselines and none given, and where some are timed in bursts
    and others sustained.
    """
    for field, what in (("suite", "of one suite"), *([] if baseline else [("baseline", "with one baseline")])):
        values = {content[field] for content in contents}
        if len(values) != 1:
            raise ValueError(f"expected results {what}, got {', '.join(sorted(values))}")
    problem = reading.apart(contents)
    if problem:
        raise ValueError(problem)
    runs: list[dict] = []
    rows: dict[str, dict] = {}
    for content in contents:
        rows |= {row["name"]: row | {"run": len(runs) + row["run"]} for row in content["rows"]}
        runs += content["runs"]
    names = list(dict.fromkeys(name for content in contents for name in content["configurations"]))
    order = {name: index for index, name in enumerate(names)}
    merged = {"suite": contents[0]["suite"], "baseline": contents[0]["baseline"], "configurations": names, "runs": runs,
              "rows": sorted(rows.values(), key=lambda row: order.get(row["setting"], len(order)))}
    if baseline:
        merged["baseline"] = baseline
        result_file.finish(merged)
    return merged, reading.missing(merged)


def _fail(*problems: object) -> int:
    for problem in problems:
        print(f"gbmoe bench merge: {one_line(problem)}", file=sys.stderr)
    return 2


def _files(parts: Iterable[Path]) -> list[Path]:
    return [file for part in parts for file in (sorted(part.glob("*.json")) if part.is_dir() else [part])]
