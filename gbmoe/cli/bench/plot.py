"""`gbmoe bench plot`: draw a file's rows."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from gbmoe._files import one_line
from gbmoe.cli.bench import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file and --output."""
    parser.add_argument("file", type=Path, metavar="FILE", help="what bench --json or bench merge wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where the pictures go")


def run(arguments: argparse.Namespace) -> int:
    """Write the pictures and print their names; 1 where the file is missing or has nothing to draw, 2 where it is broken or the
    pictures cannot be written."""
    if importlib.util.find_spec("matplotlib") is None:
        print("gbmoe bench plot: needs matplotlib: pip install 'gbmoe[plot]'", file=sys.stderr)
        return 1
    from gbmoe.cli.bench.figures import draw

    try:
        content = results.read(arguments.file)
    except results.BrokenFile as broken:
        print(f"gbmoe bench plot: {broken}", file=sys.stderr)
        return broken.status
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        written = draw(content, arguments.output)
    except OSError as error:
        print(f"gbmoe bench plot: {one_line(error.filename or arguments.output)}: {error.strerror}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)) if written else f"{arguments.file}: no row has a time, nothing to draw")
    return 0 if written else 1
