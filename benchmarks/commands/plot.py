"""`gbmoe bench plot`: draw the rows of result files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.result_files import reading
from gbmoe._atomic_files import one_line
from gbmoe._importable import is_importable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the files, --output and --only."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file that bench --json or bench merge wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder for the pictures")
    parser.add_argument("--only", nargs="+", metavar="NAME.svg", help="write only these pictures (default: all, as PNG and SVG)")


def run(arguments: argparse.Namespace) -> int:
    """Write the pictures and print their names. Return 2 where a file is missing or broken, two files are of one suite, a picture of --only
    is none of theirs, or the pictures cannot be written; otherwise 1 where a file has nothing to draw, and without matplotlib."""
    if not is_importable("matplotlib"):
        print("gbmoe bench plot: needs matplotlib: pip install 'gbmoe[plot]'", file=sys.stderr)
        return 1
    from benchmarks.result_files.pictures import draw

    contents, broken = reading.read_all(arguments.files)
    problems = list(map(str, broken))
    if not contents:
        for problem in problems:
            print(f"gbmoe bench plot: {problem}", file=sys.stderr)
        return 2
    apart = reading.apart(contents.values())
    if apart:
        print(f"gbmoe bench plot: {one_line(apart)}", file=sys.stderr)
        return 2
    suites: dict[str, Path] = {}
    for file, content in contents.items():
        other = suites.setdefault(content["suite"], file)
        if other != file:
            print(f"gbmoe bench plot: expected one file of suite {content['suite']}, whose pictures have the same names, got {other} and "
                  f"{file}: bench merge joins them", file=sys.stderr)
            return 2
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        drawn = {file: draw(content, arguments.output, arguments.only) for file, content in contents.items()}
    except OSError as error:
        print(f"gbmoe bench plot: {one_line(error.filename or arguments.output)}: {error.strerror}", file=sys.stderr)
        return 2
    written = [path for paths in drawn.values() for path in paths]
    if arguments.only:
        absent = sorted(set(arguments.only) - {path.name for path in written})
        problems += [f"--only: expected the name of a picture of these files, got {one_line(name)}" for name in absent]
    idle = [] if arguments.only else [file for file, paths in drawn.items() if not paths]
    for line in [*written, *(f"{file}: no row has a time, nothing to draw" for file in idle)]:
        print(line)
    for problem in problems:
        print(f"gbmoe bench plot: {problem}", file=sys.stderr)
    return 2 if problems else 1 if idle else 0
