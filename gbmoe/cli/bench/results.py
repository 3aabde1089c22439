"""The file of a run: who measured what, where, and the rows; written whole or not at all, read with care, joined.

    {"suite", "baseline", "configurations": [every name of the suite's list],
     "runs": [{machine, versions, clocks, extension, limits, dtype, seed, time, what was left out, ...}],
     "rows": [{..., "run": which of the runs}],
     "findings": [of the suite article]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from gbmoe._files import one_line, read_json, write_text
from gbmoe.cli.bench import article
from gbmoe.cli.bench.measure import Conditions
from gbmoe.cli.bench.measurement import SEED
from gbmoe.cli.bench.structure import misshapen
from gbmoe.cli.machine import describe_clocks, describe_extension, describe_machine, describe_versions


class BrokenFile(Exception):
    """Raised for a file that holds no results; its text, a line, names the file."""

    # With which a command ends that has nothing else to work on.
    status = 2


class UnreadFile(BrokenFile):
    """Raised for a file that is missing or cannot be read."""

    status = 1


def describe_run(conditions: Conditions, limit_rows: Sequence[dict], **more) -> dict:
    """What is known of a run before its rows."""
    return {
        "machine": describe_machine(conditions.device), "clocks": describe_clocks(conditions.device),
        "versions": describe_versions(), "extension": _without_folder(describe_extension()),
        "dtype": str(conditions.dtype).removeprefix("torch."), "seed": SEED,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "limits": conditions.limits.describe(), "limit_rows": list(limit_rows), **more,
    }


def _without_folder(extension: dict) -> dict:
    """Results are shared: which file it was says enough, where it lay does not concern their readers."""
    return extension | {"path": extension["path"] and Path(extension["path"]).name}


def finish(content: dict) -> dict:
    """Add to the rows "speedup", over the baseline's in the same contest of the same run, None where there is nothing
    to compare with; and the article's findings to its suite."""
    rows = content["rows"]
    base = {(row["run"], row["contest"]): row["median"] for row in rows
            if row.get("median") and row["by"] == content["baseline"]}
    for row in rows:
        median, reference = row.get("median"), base.get((row["run"], row["contest"]))
        row["speedup"] = reference / median if median and reference else None
    return add_findings(content)


def add_findings(content: dict) -> dict:
    """Add the article's findings to its suite."""
    if content["suite"] == "article":
        content["findings"] = [finding.describe() for finding in article.findings(content)]
    return content


def no_place(option: str, path: Path) -> str | None:
    """Why a file cannot be written at `path`: its folder is missing, or it is one."""
    if path.is_dir():
        return f"{option}: {path} is a directory"
    return None if path.parent.is_dir() else f"{option}: {path.parent} is not a directory"


def write(path: Path, content: dict) -> None:
    """Write `content` to `path`, whole or not at all."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> dict:
    """The file's content, which holds what structure.py says. Raises BrokenFile."""
    try:
        content = read_json(path)
    except OSError as error:
        raise UnreadFile(one_line(f"{path}: {error.strerror}")) from None
    except ValueError as error:
        raise BrokenFile(one_line(f"{path}: {error}")) from None
    problem = misshapen(content)
    if problem:
        raise BrokenFile(one_line(f"{path}: expected a file of gbmoe bench, got one {problem}"))
    return content


def read_all(paths: Iterable[Path]) -> tuple[dict[Path, dict], list[BrokenFile]]:
    """The contents of the files that hold results, in their order, and what is wrong with the others."""
    contents, problems = {}, []
    for path in paths:
        try:
            contents[path] = read(path)
        except BrokenFile as broken:
            problems.append(broken)
    return contents, problems


def merge(contents: Sequence[dict], baseline: str | None = None) -> tuple[dict, list[str]]:
    """One content of several of one suite, and the configurations of its list that none of them holds.

    Of rows with one name the last counts; speed-ups are over the baseline of their own run, which is theirs, or the one
    that is given. Raises ValueError for different suites, or different baselines and none given.
    """
    for field, what in (("suite", "of one suite"), *([] if baseline else [("baseline", "with one baseline")])):
        values = {content[field] for content in contents}
        if len(values) != 1:
            raise ValueError(f"expected results {what}, got {', '.join(sorted(values))}")
    runs, rows = [], {}
    for content in contents:
        rows |= {row["name"]: row | {"run": len(runs) + row["run"]} for row in content["rows"]}
        runs += content["runs"]
    names = list(dict.fromkeys(name for content in contents for name in content["configurations"]))
    order = {name: index for index, name in enumerate(names)}
    merged = {"suite": contents[0]["suite"], "baseline": contents[0]["baseline"], "configurations": names, "runs": runs,
              "rows": sorted(rows.values(), key=lambda row: order.get(row["setting"], len(order)))}
    if baseline:
        merged["baseline"] = baseline
        finish(merged)
    else:
        add_findings(merged)
    return merged, missing(merged)


def missing(content: dict) -> list[str]:
    """The configurations of its suite's list that no run of the content has finished."""
    done = {name for run in content["runs"] for name in run["configurations"]}
    return [name for name in content["configurations"] if name not in done]


def faults(content: dict) -> list[str]:
    """What is wrong with gbmoe's own rows and with the limits, a line each."""
    return [f"{row['name']}: {row['problem']}" for row in wrong(content)]


def wrong(content: dict) -> list[dict]:
    """The rows that are gbmoe's fault, and the limits that could not be measured. Running out of memory is a result, no
    fault."""
    ours = [row for row in content["rows"] if row["implementation"] == "gbmoe"]
    return [row for row in ours if row["outcome"] not in ("verified", "left out", "out of memory")] + [
        row for run in content["runs"] for row in run["limit_rows"] if not row["verified"]]
