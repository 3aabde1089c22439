"""Files that are written whole or not at all, JSON that is checked when it is read, and text shortened to one line of a message."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The deepest nesting of JSON that is read. Python's reader and its writer give up at different depths, both near 1,000.
_DEEPEST = 50


@contextmanager
def appears_complete(target: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield a path next to `target` for a file or a folder. At the end it is renamed to `target`, or removed after an error.

    Its name is random and not made of a process id: containers that share a folder each number their processes from 1, and one
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
    """Write `text` to `target` as UTF-8, whole or not at all. It replaces a file that is there; of a link, the file that it names.

    Something else than a file, such as /dev/stdout, is written to directly.
    """
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    with appears_complete(target.resolve(), replaces=True) as partial_path, open(partial_path, "x", encoding="utf-8") as file:
        file.write(text)


def read_json(path: Path) -> object:
    """The value in the file, which must be strict JSON in UTF-8: finite numbers, text that UTF-8 can encode, and at most 50 levels.

    So the value can be written again, as JSON and as text.

    Raises:
        OSError: where the file cannot be read.
        ValueError: "not JSON: " and the reason, for anything else.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_refused, parse_float=_finite)
        _check(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return value


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


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
                text.encode("utf-8")  # half of a surrogate pair raises UnicodeEncodeError, a subclass of ValueError
        inner = [value for value in values if isinstance(value, (dict, list))]
        values = [entry for value in inner for entry in ([*value, *value.values()] if isinstance(value, dict) else value)]
        if not values:
            return
    raise ValueError(f"expected at most {_DEEPEST} levels")


def one_line(text: object, most: int = 1000) -> str:
    """The text as one line of a message: lines are joined, unprintable characters escaped, and what exceeds `most` is cut off."""
    line = " ".join(str(text).split("\n"))
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= most else line[: most - 3] + "..."
