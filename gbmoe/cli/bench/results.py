"""The file of a run: who measured what, where, and the rows; written whole or not at all, read with care, joined.

    {"suite", "baseline", "configurations": [every name of the suite's list],
     "runs": [{machine, versions, clocks, extension, limits, dtype, seed, time, what was left out, ...}],
     "rows": [{..., "run": which of the runs}],
     "findings": [of the suite article]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from gbmoe.cli.bench import article
from gbmoe.cli.bench.measure import Conditions
from gbmoe.cli.bench.measurement import SEED
from gbmoe.cli.machine import describe_clocks, describe_extension, describe_machine, describe_versions

_FIELDS = {"suite": str, "baseline": str, "configurations": list, "runs": list, "rows": list}
# What merge, plot and report take for granted.
_RUN_FIELDS = ("machine", "versions", "dtype", "seed", "time", "limits", "limit_rows", "configurations", "peers", "peers_left_out",
               "engines_left_out")
_ROW_FIELDS = ("name", "setting", "contest", "kind", "case", "tokens", "hidden", "ffn", "experts", "top_k", "mlp_type", "routing",
               "computation", "by", "implementation", "engine", "memory_limit", "dtype", "verified", "outcome", "problem", "run")


class BrokenFile(Exception):
    """Raised for a file that is missing or holds no results; its text names the file."""


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


def no_folder(option: str, path: Path) -> str | None:
    """Why a file cannot be written at `path`, where its folder is missing."""
    return None if path.parent.is_dir() else f"{option}: {path.parent} is not a directory"


def write(path: Path, content: dict) -> None:
    """Write `content` to `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> dict:
    """The file's content. Raises BrokenFile."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise BrokenFile(f"{path}: {error.strerror}") from None
    except ValueError as error:  # of which JSON's and UTF-8's are kinds
        raise BrokenFile(f"{path}: not JSON: {error}") from None
    problem = _misshapen(content)
    if problem:
        raise BrokenFile(f"{path}: expected a file of gbmoe bench, got one {problem}")
    return content


def _misshapen(content: object) -> str | None:
    lacking = [name for name, kind in _FIELDS.items() if not isinstance(content, dict) or not isinstance(content.get(name), kind)]
    if lacking:
        return f"without {', '.join(lacking)}"
    for what, entries, fields in (("run", content["runs"], _RUN_FIELDS), ("row", content["rows"], _ROW_FIELDS)):
        for number, entry in enumerate(entries):
            lacking = [field for field in fields if not isinstance(entry, dict) or field not in entry]
            if lacking:
                return f"whose {what} {number} is without {', '.join(lacking)}"
    runs = range(len(content["runs"]))
    strangers = [row["name"] for row in content["rows"] if row["run"] not in runs]
    return f"whose row {strangers[0]} is of a run that is not there" if strangers else None


def read_all(paths: Iterable[Path]) -> tuple[dict[Path, dict], list[str]]:
    """The contents of the files that could be read, in their order, and what is wrong with the others."""
    contents, problems = {}, []
    for path in paths:
        try:
            contents[path] = read(path)
        except BrokenFile as broken:
            problems.append(str(broken))
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
