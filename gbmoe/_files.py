"""Files that are written whole or not at all, JSON that is read with care, and the names in them as one line of a message."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Python's reader and its writer give up at different depths, near 1,000: below this both are far from it.
_DEEPEST = 50


@contextmanager
def appears_complete(target: Path, replaces: bool = False) -> Iterator[Path]:
    """A path beside `target` for a file or a folder: it gets target's name at the end, or is removed where there is an error.

    The name is drawn, not made of a process id: containers that share a folder count their processes each from 1, and one
    run must never remove what another one is writing.

    Raises:
        FileExistsError: where there is something at `target` in the end, unless this `replaces` it.
    """
    partial_path = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.partial")
    try:
        yield partial_path
        if not replaces and os.path.lexists(target):
            raise FileExistsError(f"{target}: exists already")
        os.replace(partial_path, target)
    except BaseException:
        if partial_path.is_dir():
            shutil.rmtree(partial_path)
        else:
            partial_path.unlink(missing_ok=True)
        raise


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` as UTF-8, whole or not at all, in the place of the file that is there or that a link there names.

    What is no file, such as /dev/stdout, is written to as it is.
    """
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    with appears_complete(target.resolve(), replaces=True) as partial_path, open(partial_path, "x", encoding="utf-8") as file:
        file.write(text)


def read_json(path: Path) -> object:
    """The value in the file: strict JSON in UTF-8, every number finite, every text sound, no value deeper than 50 others.

    What passes can be written again, as JSON and as text.

    Raises:
        OSError: where it cannot be read.
        ValueError: "not JSON: " and why, for anything else.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_refused, parse_float=_finite)
        _check(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return value


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large for a number")
    return number


def _check(value: object) -> None:
    values = [value]
    for _ in range(_DEEPEST):
        for text in values:
            if isinstance(text, str):
                text.encode("utf-8")  # half of a surrogate pair raises UnicodeEncodeError, a kind of ValueError
        inner = [value for value in values if isinstance(value, (dict, list))]
        values = [entry for value in inner for entry in ([*value, *value.values()] if isinstance(value, dict) else value)]
        if not values:
            return
    raise ValueError(f"expected at most {_DEEPEST} levels")


def one_line(text: object, most: int = 1000) -> str:
    """The text as one line of a message: lines joined, what a terminal would not show as a character escaped, cut at `most`."""
    line = " ".join(str(text).split("\n"))
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= most else line[: most - 3] + "..."
