"""`gbmoe bench report`: the rows of result files as a Markdown page; the main table and pictures between the markers of a README."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.result_files import markdown_page, reading
from gbmoe._atomic_files import one_line, write_text
from gbmoe.cli.bench import result_file

# Between these markers of a README go the main table and the pictures. Without markers of their own the pictures follow the table.
BEGIN, END = "<!-- bench report: begin -->", "<!-- bench report: end -->"
PICTURES_BEGIN, PICTURES_END = "<!-- bench pictures: begin -->", "<!-- bench pictures: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the files to read and those to write."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file that bench --json or bench merge wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.md", help="the page")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="show the pictures that bench plot wrote to DIR (default: none)")
    parser.add_argument("--short", action="store_true", help="leave out the tables of every row, which are in the files")
    parser.add_argument("--readme", type=Path, metavar="FILE.md",
                        help=f"put the main table of the first file between {BEGIN} and {END}, and two of its pictures after"
                        f" it, or between {PICTURES_BEGIN} and {PICTURES_END}")


def run(arguments: argparse.Namespace) -> int:
    """Write what can be reported. Return 2 where a file is missing or broken or cannot be written, or the README has no place for its
    part, which is of the first file or of none; otherwise 1 where a row of gbmoe's is wrong. There is no page where no file can be read,
    or files of one suite are timed in two ways."""
    problem = result_file.make_folder_for("--output", arguments.output)
    if problem:
        return _fail(problem)
    contents, broken = reading.read_all(arguments.files)
    if not contents:
        return _fail(*broken)
    problem = reading.apart(contents.values())
    if problem:
        return _fail(problem)
    problems = list(map(str, broken))
    pictures = _pictures(arguments.pictures, arguments.output.parent)
    try:
        write_text(arguments.output, markdown_page.page(list(contents.values()), pictures, problems, not arguments.short))
    except OSError as error:
        return _fail(f"{arguments.output}: {error.strerror}")
    first = contents.get(arguments.files[0])
    if arguments.readme and first:
        pictures = _pictures(arguments.pictures, arguments.readme.parent)
        problems += _insert(arguments.readme, markdown_page.main_table(first), markdown_page.main_pictures(first, pictures))
    faults = [fault for content in contents.values() for fault in result_file.faults(content)]
    _fail(*problems, *faults)
    return 2 if problems else 1 if faults else 0


def _fail(*problems: object) -> int:
    for problem in problems:
        print(f"gbmoe bench report: {one_line(problem)}", file=sys.stderr)
    return 2


def _pictures(folder: Path | None, seen_from: Path) -> list[str]:
    """The paths by which a page in the folder `seen_from` refers to the pictures; of a picture in both formats, that of the PNG."""
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


def _between(text: str, begin: str, end: str, insertion: str) -> str | None:
    """The text with `insertion` in place of what stands between the markers; None where a marker is missing."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    return f"{before}{begin}\n{insertion}\n{end}{after}" if found_begin and found_end else None
