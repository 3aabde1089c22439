"""`gbmoe bench`: time layers and grouped products; the time of a result that has not been verified is never shown.

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
from gbmoe.cli.machine import DTYPES, describe_extension, describe_machine, describe_versions, device_argument
from gbmoe.cli.suites import SEED, SUITES, Configuration, Subject, left_out
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
    unable = {name: reason for c in configurations for name, reason in left_out(c.case, device, dtype).items()}
    for name, reason in unable.items():
        print(f"engine {name} left out: {reason}")
    if arguments.json:
        head = {"machine": describe_machine(device), "versions": describe_versions(), "extension": describe_extension(),
                "engines_left_out": unable, "suite": arguments.suite, "dtype": str(dtype).removeprefix("torch."), "seed": SEED,
                "time": started.isoformat(timespec="seconds")}
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
        timing = time_calls(subject.call, device, subject.reset)
        extra_peak_bytes = _extra_peak_bytes(subject, device)
    except Exception as error:  # an engine that raises is a finding, and the other rows are wanted too
        return row | {"problem": f"{type(error).__name__}: {error}"}
    return row | {
        "verified": True, "median": timing.median, "quartiles": [timing.low, timing.high], "repetitions": timing.repetitions,
        "flops": configuration.flops(), "tflops": configuration.flops() / timing.median / 1e12,
        "extra_peak_bytes": extra_peak_bytes,
    }


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
    """Add "speedup", over 'bmm' in the same contest, and "of_dense", the share of the fastest dense product's rate.

    Both among the verified rows only, None where there is nothing to compare with.
    """
    timed = [row for row in rows if row["verified"]]
    bmm = {row["contest"]: row["median"] for row in timed if row["implementation"] == "bmm"}
    dense = max((row["tflops"] for row in timed if row["implementation"] == "dense"), default=None)
    for row in timed:
        row["speedup"] = bmm[row["contest"]] / row["median"] if row["contest"] in bmm else None
        row["of_dense"] = row["tflops"] / dense if dense else None


# ------------------------------------------------------------------------------------------------------------- reporting


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:#.4g}"


def _progress(row: dict) -> str:
    if not row["verified"]:
        return f"{row['name']}: FAILED: {row['problem']}"
    return f"{row['name']}: verified, {_milliseconds(row['median'])} ms, {row['tflops']:#.3g} TFLOP/s"


def _print_rows(rows: list[dict]) -> None:
    def shape(row):
        return f"{row['case']} {row['tokens']}x{row['hidden']}x{row['ffn']} e{row['experts']}k{row['top_k']}"

    # Heading, alignment, key that a row must have for the cell, and the cell.
    columns = [
        ("case TxHxF", "<", "case", shape),
        ("routing", "<", "routing", lambda row: row["routing"]),
        ("computation", "<", "computation", lambda row: row["computation"]),
        ("by", "<", "name", lambda row: row["name"].rpartition("/")[2]),
        ("verified", "<", "verified", lambda row: "yes" if row["verified"] else "NO"),
        ("median ms", ">", "median", lambda row: _milliseconds(row["median"])),
        ("quartiles ms", ">", "quartiles", lambda row: " - ".join(map(_milliseconds, row["quartiles"]))),
        ("TFLOP/s", ">", "tflops", lambda row: f"{row['tflops']:#.3g}"),
        ("x bmm", ">", "speedup", lambda row: f"{row['speedup']:.2f}"),
        ("of dense", ">", "of_dense", lambda row: f"{row['of_dense']:.0%}"),
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
