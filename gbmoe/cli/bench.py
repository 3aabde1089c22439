"""`gbmoe bench`: time layers, grouped products and permutations; the time of an unverified result is never shown.

`measure` builds one configuration of a suite (gbmoe/cli/suites.py), verifies it and only then times it. Its row is a plain
dict, ready for JSON, without any time where something was wrong.

    python -m gbmoe bench --suite smoke --json smoke.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from gbmoe import cases
from gbmoe.cli.configuration import SEED, Configuration, Subject
from gbmoe.cli.machine import DTYPES, describe_extension, describe_machine, describe_versions, device_argument
from gbmoe.cli.suites import SUITES, left_out
from gbmoe.cli.table import print_table
from gbmoe.cli.timing import time_calls
from gbmoe.layers.arguments import default_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --suite, --device, --dtype and --json."""
    parser.add_argument("--suite", choices=SUITES, required=True,
                        help="; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items()))
    parser.add_argument("--device", type=device_argument, help="cpu or cuda (default: cuda where there is a device); suites"
                        " made for CUDA run on a CPU only when it is asked for, with scaled-down shapes")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, seed, time and rows to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Measure a suite, print its table, write its JSON; 1 where any row could not be verified."""
    device, suite = arguments.device or default_device(), SUITES[arguments.suite]
    if suite.needs_cuda and device.type != "cuda" and arguments.device is None:
        print(f"gbmoe bench: suite {arguments.suite} is made for CUDA and there is no CUDA device; --device cpu runs it"
              " scaled down", file=sys.stderr)
        return 2
    if arguments.json and not arguments.json.parent.is_dir():
        print(f"gbmoe bench: --json: {arguments.json.parent} is not a directory", file=sys.stderr)
        return 2
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    started = datetime.now(timezone.utc)
    configurations = suite.configurations(device, dtype)
    rows = []
    for index, configuration in enumerate(configurations, start=1):
        rows.append(measure(configuration, device, dtype))
        print(f"[{index}/{len(configurations)}] {_progress(rows[-1])}", file=sys.stderr, flush=True)
    compare(rows)
    _print_rows(rows)
    unable = {name: reason for c in configurations if suite.uses_engines
              for name, reason in left_out(c.case, device, dtype).items()}
    peers = suite.peers_left_out()
    for kind, reasons in (("engine", unable), ("peer", peers)):
        for name, reason in reasons.items():
            print(f"{kind} {name} left out: {reason}")
    if arguments.json:
        head = {"machine": describe_machine(device), "versions": describe_versions(), "extension": describe_extension(),
                "engines_left_out": unable, "peers_left_out": peers, "suite": arguments.suite,
                "dtype": str(dtype).removeprefix("torch."), "seed": SEED, "time": started.isoformat(timespec="seconds")}
        write_json(arguments.json, head | {"rows": rows})
    failed = [row for row in rows if not row["verified"]]
    for row in failed:
        print(f"FAIL: {row['name']}: {row['problem']}")
    return 1 if failed else 0


def measure(configuration: Configuration, device: torch.device, dtype: torch.dtype) -> dict:
    """Build, verify, then time. The row has "problem" where that failed, and then no time.

    Times are in seconds; extra_peak_bytes (CUDA) is the memory that a call needs beyond what is allocated before it.
    """
    row = configuration.describe() | {"dtype": str(dtype).removeprefix("torch."), "verified": False, "problem": None}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    cases.poison(device)
    try:
        subject = configuration.build(device, dtype)
        verdict = subject.check()
        row |= {"error": _finite(verdict.error), "limit": _finite(verdict.limit)}
        if not verdict.passed:
            return row | {"problem": str(verdict)}
        timing = time_calls(subject.call, device, subject.reset, subject.hide_host)
        extra_peak_bytes = _extra_peak_bytes(subject, device)
        flops, moved = configuration.flops(), subject.bytes_moved()
    except Exception as error:  # an engine that raises is a finding, and the other rows are wanted too
        return row | {"problem": f"{type(error).__name__}: {error}"}
    return row | {
        "verified": True, "median": timing.median, "quartiles": [timing.low, timing.high], "repetitions": timing.repetitions,
        "flops": flops, "tflops": _tera(flops, timing.median), "bytes": moved, "terabytes": _tera(moved, timing.median),
        "extra_peak_bytes": extra_peak_bytes,
    }


def _tera(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / seconds / 1e12


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON knows no infinity


def _extra_peak_bytes(subject: Subject, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    subject.reset()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    subject.call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def compare(rows: list[dict]) -> None:
    """Add "speedup", over 'bmm' in the same contest, "of_dense", the share of the fastest dense product's rate, and
    "times_bound", the time over what the fastest copy of as many bytes takes.

    All among the verified rows only, None where there is nothing to compare with.
    """
    timed = [row for row in rows if row["verified"]]
    bmm = {row["contest"]: row["median"] for row in timed if row["implementation"] == "bmm"}
    dense = max((row["tflops"] for row in timed if row["implementation"] == "dense"), default=None)
    copy = max((row["terabytes"] for row in timed if row["computation"] == "copy"), default=None)
    for row in timed:
        row["speedup"] = bmm[row["contest"]] / row["median"] if row["contest"] in bmm else None
        row["of_dense"] = row["tflops"] / dense if dense else None
        row["times_bound"] = copy / row["terabytes"] if copy and row["terabytes"] else None


# ------------------------------------------------------------------------------------------------------------- reporting


def _unit(row: dict) -> str:
    return "us" if row["kind"] == "permutation" else "ms"


def _duration(seconds: float, row: dict) -> str:
    return f"{seconds * {'us': 1e6, 'ms': 1e3}[_unit(row)]:#.4g}"


def _rates(row: dict) -> list[str]:
    return [f"{row[key]:#.3g} {unit}" for key, unit in (("tflops", "TFLOP/s"), ("terabytes", "TB/s")) if row[key] is not None]


def _progress(row: dict) -> str:
    if not row["verified"]:
        return f"{row['name']}: FAILED: {row['problem']}"
    return f"{row['name']}: " + ", ".join(["verified", f"{_duration(row['median'], row)} {_unit(row)}", *_rates(row)])


def _print_rows(rows: list[dict]) -> None:
    def shape(row):
        sizes = "x".join(str(row[key]) for key in ("tokens", "hidden", "ffn") if row[key])
        return f"{row['case']} {sizes} e{row['experts']}k{row['top_k']}"

    unit = _unit(rows[0])
    # Heading, alignment, key that a row must have for the cell, and the cell.
    columns = [
        ("case TxH[xF]", "<", "case", shape),
        ("routing", "<", "routing", lambda row: row["routing"]),
        ("align", ">", "align", lambda row: str(row["align"])),
        ("computation", "<", "computation", lambda row: row["computation"]),
        ("by", "<", "name", lambda row: row["name"].rpartition("/")[2]),
        ("verified", "<", "verified", lambda row: "yes" if row["verified"] else "NO"),
        (f"median {unit}", ">", "median", lambda row: _duration(row["median"], row)),
        (f"quartiles {unit}", ">", "quartiles", lambda row: " - ".join(_duration(end, row) for end in row["quartiles"])),
        ("TFLOP/s", ">", "tflops", lambda row: f"{row['tflops']:#.3g}"),
        ("x bmm", ">", "speedup", lambda row: f"{row['speedup']:.2f}"),
        ("of dense", ">", "of_dense", lambda row: f"{row['of_dense']:.0%}"),
        ("MB moved", ">", "bytes", lambda row: f"{row['bytes'] / 1e6:#.4g}"),
        ("TB/s", ">", "terabytes", lambda row: f"{row['terabytes']:#.3g}"),
        ("x bound", ">", "times_bound", lambda row: f"{row['times_bound']:.2f}"),
        ("extra peak MiB", ">", "extra_peak_bytes", lambda row: f"{row['extra_peak_bytes'] / 2**20:.0f}"),
    ]
    shown = [column for column in columns if any(row.get(column[2]) is not None for row in rows)]
    print_table([column[:2] for column in shown],
                [["-" if row.get(key) is None else cell(row) for _, _, key, cell in shown] for row in rows])


def write_json(path: Path, content: dict) -> None:
    """Write `content` to `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
