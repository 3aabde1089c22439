"""What a result file must hold. It is checked once, when a file is read, so that all code after that can rely on the types.

A row has no fields that are null; one that an older version wrote counts as absent where it is null. Fields that no code computes with,
and fields that a later version may add, can hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gbmoe._atomic_files import one_line
from gbmoe.cli.bench.measurements.measurement import MOVING
from gbmoe.cli.bench.result_file import timing_of
from gbmoe.cli.bench.running.verify_and_time import (
    BURSTS,
    CRASHED,
    ERROR,
    LEFT_OUT,
    OUT_OF_MEMORY,
    SUSTAINED,
    TIMED_OUT,
    VERIFIED,
    WRONG,
)

# Between these bounds the quotient of any two numbers is finite, and so are the axes that are drawn from it.
_SMALLEST, _LARGEST = 1e-30, 1e30
# The most characters of a field's value that a message shows.
_SHOWN = 60


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words and as a test."""
    words: str
    holds: Callable[[Any], bool]

    def fault(self, value: Any) -> str | None:
        """What is wrong with `value`, as ": expected ..., got ...", to be written after the path to it; None where it is right."""
        return None if self.holds(value) else f": expected {self.words}, got {one_line(repr(value), _SHOWN)}"

    def or_null(self) -> _Kind:
        return _Kind(f"{self.words} or null", lambda value: value is None or self.holds(value))


@dataclass(frozen=True)
class _ListOf:
    entry: object
    length: int | None = None

    def fault(self, value: Any) -> str | None:
        if not isinstance(value, list) or self.length not in (None, len(value)):
            return _Kind(f"a list{f' of {self.length}' if self.length else ''}", lambda _: False).fault(value)
        return _first((f"[{i}]", self.entry, each) for i, each in enumerate(value))


@dataclass(frozen=True)
class _MapOf:
    """A map from any names to values of one kind."""
    entry: object

    def fault(self, value: Any) -> str | None:
        if not isinstance(value, dict):
            return _Kind("an object", lambda _: False).fault(value)
        return _first((f".{one_line(name, _SHOWN)}", self.entry, each) for name, each in value.items())


@dataclass(frozen=True)
class _Record:
    """An object that has all of `fields`, and may have those of `optional`, each of the right kind. An optional one that is null is as
    if it were absent."""
    fields: Mapping[str, object]
    optional: Mapping[str, object]

    def fault(self, value: Any) -> str | None:
        lacking = self.lacking(value)
        if lacking:
            return f" is without {', '.join(lacking)}"
        given = {name: kind for name, kind in self.optional.items() if value.get(name) is not None}
        return _first((f".{name}", kind, value[name]) for name, kind in {**self.fields, **given}.items())

    def lacking(self, value: Any) -> list[str]:
        return [name for name in self.fields if not isinstance(value, dict) or name not in value]


def _first(entries) -> str | None:
    for where, kind, value in entries:
        fault = kind.fault(value)
        if fault:
            return where + fault
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _matches(pattern: str) -> Callable[[Any], bool]:
    found = re.compile(pattern, re.ASCII).fullmatch
    return lambda value: isinstance(value, str) and found(value) is not None


def _one_of(*values: str) -> _Kind:
    return _Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_LINE = _Kind("a line of text", lambda value: isinstance(value, str) and len(value) <= 200 and value.isprintable())
# Words that become part of file names, so they have no slash, and of pictures' text, where $ and \ have a meaning.
_FILE_WORD = _Kind("a name without a slash", _matches(r"\w[\w .,+-]{0,63}"))
_WORD = _Kind("a name", _matches(r"\w[\w .,+/-]{0,199}"))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_COUNT = _Kind("a count", lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63)
_SOME = _Kind("a count above 0", lambda value: _COUNT.holds(value) and value > 0)
_NUMBER = _Kind("a number", _is_number)
_POSITIVE = _Kind("a number above 0", lambda value: _is_number(value) and value >= _SMALLEST)

_RATES = {"quartiles": _ListOf(_POSITIVE, 2), "flops": _SOME, "tflops": _POSITIVE, "bytes": _COUNT, "terabytes": _POSITIVE,
          "of_limit": _POSITIVE, "bound_by": _WORD}
_PASS = _Record({"median": _POSITIVE}, _RATES)
_MEASURED = {
    "name": _WORD, "setting": _WORD, "contest": _WORD, "kind": _one_of("layer", "product", "permutation", "link", "host", "host-parts"),
    "case": _WORD, "tokens": _COUNT, "hidden": _COUNT, "ffn": _COUNT, "experts": _COUNT, "top_k": _COUNT, "mlp_type": _WORD,
    "routing": _WORD, "computation": _FILE_WORD, "by": _WORD, "implementation": _WORD, "dtype": _WORD, "verified": _FLAG,
    "outcome": _one_of(VERIFIED, WRONG, ERROR, CRASHED, TIMED_OUT, OUT_OF_MEMORY, LEFT_OUT),
}
_PERHAPS = {
    "engine": _WORD, "memory_limit": _POSITIVE, "problem": _TEXT, "align": _COUNT, "median": _POSITIVE, **_RATES, "forward": _PASS,
    "backward": _PASS, "extra_peak_bytes": _NUMBER, "speedup": _POSITIVE, "imbalance": _NUMBER,
    "timing": _one_of(BURSTS, SUSTAINED), "joules": _POSITIVE, "kernels": _POSITIVE, "uncaptured": _TEXT, "parts": _MapOf(_NUMBER),
}
_ROW = _Record({**_MEASURED, "run": _COUNT}, _PERHAPS)
_RUN = _Record({
    "machine": _Record({"name": _LINE, "device": _WORD}, {"driver": _LINE}),
    "versions": _Record({"torch": _LINE, "gbmoe": _LINE, "commit": _LINE.or_null(), "dirty": _FLAG.or_null()}, {}),
    "dtype": _WORD, "seed": _COUNT, "time": _LINE, "limits": _Record(dict.fromkeys(("flops", "bytes"), _POSITIVE.or_null()), {}),
    "limit_rows": _ListOf(_Record(_MEASURED, _PERHAPS)), "configurations": _ListOf(_WORD), "peers": _MapOf(_TEXT),
    "peers_left_out": _MapOf(_TEXT), "engines_left_out": _MapOf(_TEXT),
}, {"ranks": _SOME, "sustained": _LINE, "energy_left_out": _TEXT})
_HEAD = {"suite": _FILE_WORD, "baseline": _WORD, "configurations": _ListOf(_WORD)}


def misshapen(content: Any) -> str | None:
    """Why `content`, as read from JSON, is no result file, to be written after "a file"; None where it is one."""
    kinds = {"suite": object, "baseline": object, "configurations": list, "runs": list, "rows": list}
    lacking = [name for name, kind in kinds.items()
               if not isinstance(content, dict) or name not in content or not isinstance(content[name], kind)]
    if lacking:
        return f"without {', '.join(lacking)}"
    entries = [(f"{what} {number}", kind, entry) for what, kind in (("run", _RUN), ("row", _ROW))
               for number, entry in enumerate(content[f"{what}s"])]
    head = [(name, kind, content[name]) for name, kind in _HEAD.items()]
    fault = _first([*entries, *head])
    if fault:
        return f"whose {fault}"
    timings = {timing_of(row) for row in content["rows"]}
    if len(timings) > 1:
        return f"whose rows are timed in {len(timings)} ways, {' and '.join(sorted(timings))}"
    for number, row in enumerate(content["rows"]):
        if row["run"] >= len(content["runs"]):
            return f"whose row {row['name']} is of a run that is not there"
        lacking = _half_measured(row)
        if lacking:
            return f"whose row {number} is without {', '.join(lacking)}"
    return None


def _half_measured(row: dict) -> list[str]:
    """The fields that this row lacks, given those that it has."""
    timed, shared = row.get("median") is not None, row.get("of_limit") is not None
    needed = ["quartiles"] if timed else []
    if shared or (timed and row["kind"] in ("layer", "product")):
        needed += ["terabytes"] if row["kind"] in MOVING else ["flops", "tflops"]
    if shared:
        needed.append("bound_by")
    return [name for name in needed if row.get(name) is None]
