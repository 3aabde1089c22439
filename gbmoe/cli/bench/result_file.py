"""The result file of a run: what was measured, where, and the rows. It is written whole or not at all.

    {"suite", "baseline", "configurations": [every name of the suite's list],
     "runs": [{machine, versions, clocks, extension, limits, dtype, seed, time, what was left out, ...}],
     "rows": [{..., "run": which of the runs}]}

Only a row's known fields are written: one that is absent is null. Numbers that were measured or derived have six significant
digits, far more than two runs have in common; counts are whole. Rivals are "peers" here, as they were first called, so
that files of all versions can be joined.

The rows of a file are timed in one way, sustained or in bursts ("timing"; those of older files have none and are bursts), and no page,
picture or joined file compares the two.
"""

from __future__ import annotations

import decimal
import json
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gbmoe._atomic_files import write_text
from gbmoe._checks import dtype_name
from gbmoe.cli.bench.measurements.measurement import SEED
from gbmoe.cli.bench.running.verify_and_time import BURSTS, SUSTAINED, Conditions
from gbmoe.cli.describe_system import describe_clocks, describe_extension, describe_machine, describe_versions

# For numbers that were measured or derived. After this mode of rounding, rounding to fewer digits gives what it gives without it: pages
# do not depend on whether their rows were in a file.
_SIX_DIGITS = decimal.Context(prec=6, rounding=decimal.ROUND_05UP)


def describe_run(conditions: Conditions, limit_rows: Sequence[dict], **more) -> dict:
    """The fields of a run that are known before its rows."""
    return {
        "machine": describe_machine(conditions.device), "clocks": describe_clocks(conditions.device),
        "versions": describe_versions(), "extension": _without_folder(describe_extension()),
        "dtype": dtype_name(conditions.dtype), "seed": SEED,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "limits": conditions.limits.describe(), "limit_rows": list(limit_rows), **more,
    }


def _without_folder(extension: dict) -> dict:
    """The extension's description with the file's name alone: results are shared, and its folder does not concern their readers."""
    return extension | {"path": extension["path"] and Path(extension["path"]).name}


def finish(content: dict) -> dict:
    """Add "speedup" to the rows: over the baseline's row in the same contest of the same run, or None where there is none."""
    rows = content["rows"]
    base = {(row["run"], row["contest"]): row["median"] for row in rows
            if row.get("median") and row["by"] == content["baseline"]}
    for row in rows:
        median, reference = row.get("median"), base.get((row["run"], row["contest"]))
        row["speedup"] = reference / median if median and reference else None
    return content


def make_folder_for(option: str, path: Path) -> str | None:
    """Make the folder of a file that is to be written at `path`. Returns why it cannot be written, or None where it can."""
    if path.is_dir():
        return f"{option}: {path} is a directory"
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        return None
    return make_folder(option, path.parent)


def make_folder(option: str, folder: Path) -> str | None:
    """Make a folder in which files are to be written. Returns why they cannot be, or None where they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not tell: the file system may be read-only, or none for files
    except (FileExistsError, NotADirectoryError):
        return f"{option}: {folder} is not a directory"
    except OSError as error:
        return f"{option}: {folder}: {error.strerror}"
    return None


def write(path: Path, content: dict) -> None:
    """Write `content` to `path`, whole or not at all. A row is a line."""
    fields = ",\n".join(f"{_compact(name)}:{_a_line_each(value)}" for name, value in _as_written(content).items())
    write_text(path, f"{{\n{fields}\n}}\n")


def _as_written(value: Any, in_row: bool = False) -> Any:
    """The value with rounded numbers, and rows without the fields that are null."""
    if isinstance(value, float):
        return float(_SIX_DIGITS.create_decimal(repr(value)))
    if isinstance(value, dict):
        return {name: _as_written(each, in_row or name in ("rows", "limit_rows")) for name, each in value.items()
                if not in_row or each is not None}
    return [_as_written(each, in_row) for each in value] if isinstance(value, (list, tuple)) else value


def _a_line_each(value: object) -> str:
    """JSON of a field: a list of records with a line for each."""
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(map(_compact, value)) + "\n]"
    return _compact(value)


def _compact(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def faults(content: dict) -> list[str]:
    """A line for each of gbmoe's own rows, and each limit, that is wrong."""
    return [f"{row['name']}: {row.get('problem') or row['outcome']}" for row in wrong(content)]


def wrong(content: dict) -> list[dict]:
    """gbmoe's own rows that are wrong, and the limits that could not be measured. Running out of memory is a result, not a fault."""
    ours = [row for row in content["rows"] if row["implementation"] == "gbmoe"]
    return [row for row in ours if row["outcome"] not in ("verified", "left out", "out of memory")] + [
        row for run in content["runs"] for row in run["limit_rows"] if not row["verified"]]


def timing_of(row: dict) -> str:
    """How a row is timed; rows of older files do not say, and are bursts."""
    return row.get("timing") or BURSTS


# How far the quartiles of an undisturbed row lie apart at most, as a part of the median. Sustained, they are quartiles of rounds of many
# calls, which differ by 1 to 3 %; in bursts, of single calls.
SPREAD_AT_MOST = {SUSTAINED: 0.04, BURSTS: 0.25}


def is_disturbed(row: dict) -> bool:
    """True where a row's time may be that of the host, or of whatever else ran: see SPREAD_AT_MOST."""
    if row.get("median") is None:
        return False
    lower, upper = row["quartiles"]
    return upper - lower > SPREAD_AT_MOST[timing_of(row)] * row["median"]
