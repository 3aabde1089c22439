"""`gbmoe bench report`: files' rows as a Markdown page; its main table and pictures between the markers of a README."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gbmoe._files import one_line, write_text
from gbmoe.cli.bench import markdown, results

# Where a README takes the main table, and the pictures; without a place of their own the pictures follow the table.
BEGIN, END = "<!-- bench report: begin -->", "<!-- bench report: end -->"
PICTURES_BEGIN, PICTURES_END = "<!-- bench pictures: begin -->", "<!-- bench pictures: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the files and what is written."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what bench --json or bench merge wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.md", help="the page")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="show the pictures of bench plot that lie there (default: none)")
    parser.add_argument("--readme", type=Path, metavar="FILE.md",
                        help=f"put the main table of the first file between {BEGIN} and {END}, and two of its pictures behind"
                        f" it, or between {PICTURES_BEGIN} and {PICTURES_END}")


def run(arguments: argparse.Namespace) -> int:
    """Write what can be reported; 1 where a file is missing or broken, a row of gbmoe's is wrong, or the README has no
    place for its part, which is of the first file or of none; 2 where the page cannot be written, and where all that is there
    to read is broken: there is no page then."""
    problem = results.no_place("--output", arguments.output)
    if problem:
        return _fail(problem)
    contents, broken = results.read_all(arguments.files)
    if not contents and any(problem.status == 2 for problem in broken):
        return _fail(*broken)
    problems = list(map(str, broken))
    pictures = _pictures(arguments.pictures, arguments.output.parent)
    try:
        write_text(arguments.output, markdown.page(list(contents.values()), pictures, problems))
    except OSError as error:
        return _fail(f"{arguments.output}: {error.strerror}")
    first = contents.get(arguments.files[0])
    if arguments.readme and first:
        pictures = _pictures(arguments.pictures, arguments.readme.parent)
        problems += _insert(arguments.readme, markdown.main_table(first), markdown.main_pictures(first, pictures))
    problems += [fault for content in contents.values() for fault in results.faults(content)]
    _fail(*problems)
    return 1 if problems else 0


def _fail(*problems: object) -> int:
    for problem in problems:
        print(f"gbmoe bench report: {one_line(problem)}", file=sys.stderr)
    return 2


def _pictures(folder: Path | None, seen_from: Path) -> list[str]:
    """The pictures, as a page in `seen_from` refers to them: of one that lies there in both formats the PNG."""
    found = {path.stem: path for extension in ("svg", "png") for path in (folder.glob(f"*.{extension}") if folder else ())}
    return [Path(os.path.relpath(path, seen_from)).as_posix() for _, path in sorted(found.items())]


def _insert(readme: Path, table: str, pictures: str) -> list[str]:
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        return [f"{readme}: {error.strerror}"]
    except UnicodeDecodeError as error:
        return [f"{readme}: not UTF-8: {error}"]
    with_pictures = _between(text, PICTURES_BEGIN, PICTURES_END, pictures)
    if with_pictures is None:
        table = f"{table}\n\n{pictures}".rstrip()
    changed = _between(with_pictures or text, BEGIN, END, table)
    if changed is None:
        return [f"{readme}: expected the lines {BEGIN} and {END}"]
    try:
        write_text(readme, changed)
    except OSError as error:
        return [f"{readme}: {error.strerror}"]
    return []


def _between(text: str, begin: str, end: str, piece: str) -> str | None:
    """The text with `piece` in place of what stands between the markers; None where they are not there."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    return f"{before}{begin}\n{piece}\n{end}{after}" if found_begin and found_end else None
