"""Make a row: build a measurement's subject, verify it, and only then time it.

A row is a plain dict, ready for JSON. `outcome` is "verified", or says why the row has no time:

    wrong           it ran, and its result is not what it should be
    error           it raised
    crashed         it lost the device (an illegal memory access) or its process
    timed out       it gave no result in time
    out of memory   under the limit where there is one
    left out        the implementation is not made for this
"""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gbmoe import cases
from gbmoe.cli.bench import layer, permutation
from gbmoe.cli.bench.limits import PASSES, Limits
from gbmoe.cli.bench.measurement import GRAPH, Measurement, Refusal, Subject
from gbmoe.cli.bench.timing import THOROUGH, Effort, Timing, time_steps

VERIFIED, WRONG, ERROR, CRASHED, TIMED_OUT, OUT_OF_MEMORY, LEFT_OUT = (
    "verified", "wrong", "error", "crashed", "timed out", "out of memory", "left out")


@dataclass(frozen=True)
class Conditions:
    """What all rows of a run have in common."""
    device: torch.device
    dtype: torch.dtype
    effort: Effort = THOROUGH
    limits: Limits = Limits()


def measure(measurement: Measurement, conditions: Conditions) -> dict:
    """The row. Times are in seconds; extra_peak_bytes (CUDA) is the memory that a call needs beyond what is allocated
    before it."""
    device = conditions.device
    row = unmeasured(measurement, conditions, ERROR, None)
    if measurement.memory_limit:
        forget(device)  # what is kept for the next row counts as well
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    try:
        cases.poison(device)
        subject = measurement.build(device, conditions.dtype)
        with _memory_limit(device, measurement.memory_limit, before):
            outputs = subject.outputs()
        verdict = subject.check(outputs)
        del outputs
        subject.reset()
        row |= {"error": _finite(verdict.error), "limit": _finite(verdict.limit)} | subject.facts()
        if not verdict.passed:
            return row | {"outcome": WRONG, "problem": str(verdict)}
        row |= _times(measurement, subject, conditions) if measurement.timed else {}
    except Refusal as refusal:
        return row | {"outcome": LEFT_OUT, "problem": str(refusal)}
    except torch.OutOfMemoryError as error:
        return row | {"outcome": OUT_OF_MEMORY, "problem": str(error).splitlines()[0]}
    except Exception as error:  # an implementation that raises is a finding, and the other rows are wanted too
        return row | {"outcome": CRASHED if _is_lost(device) else ERROR, "problem": _in_words(error)}
    finally:
        if device.type == "cuda" and not _is_lost(device):
            subject = None
            torch.cuda.empty_cache()
    return row | {"outcome": VERIFIED, "verified": True}


@contextmanager
def few_threads(device: torch.device):
    """On a CPU one thread: shapes scaled down for it gain nothing from more, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def unmeasured(measurement: Measurement, conditions: Conditions, outcome: str, problem: str | None) -> dict:
    """The row of a measurement that gave nothing."""
    dtype = str(conditions.dtype).removeprefix("torch.")
    return measurement.describe() | {"dtype": dtype, "verified": False, "outcome": outcome, "problem": problem}


def forget(device: torch.device) -> None:
    """Free what is kept between rows for the next one."""
    layer.layer_inputs.cache_clear()
    permutation.routed.cache_clear()
    if device.type == "cuda" and not _is_lost(device):
        gc.collect()  # a peer's tensors may hang on each other
        torch.cuda.empty_cache()


def _times(measurement: Measurement, subject: Subject, conditions: Conditions) -> dict:
    device = conditions.device
    together, each = time_steps(subject.steps(), device, subject.reset, subject.hide_host, conditions.effort)
    flops, moved = measurement.flops(), subject.bytes_moved()
    row = _rates(together, flops, moved, conditions.limits) | {"repetitions": together.repetitions}
    # A graph has taken its memory when it was captured.
    row["extra_peak_bytes"] = None if measurement.computation == GRAPH else _extra_peak_bytes(subject, device)
    if len(each) == 2:
        whole = PASSES["forward+backward"]
        row |= {name: _rates(timing, flops * PASSES[name] // whole, moved * PASSES[name] // whole, conditions.limits)
                for name, timing in zip(("forward", "backward"), each)}
    return row


def _rates(timing: Timing, flops: int | None, moved: int | None, limits: Limits) -> dict:
    least = limits.seconds(flops, moved)
    return {"median": timing.median, "quartiles": [timing.low, timing.high],
            "flops": flops, "tflops": _tera(flops, timing.median),
            "bytes": moved, "terabytes": _tera(moved, timing.median),
            "of_limit": least[0] / timing.median if least else None, "bound_by": least[1] if least else None}


def _tera(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / seconds / 1e12


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON knows no infinity


def _extra_peak_bytes(subject: Subject, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    subject.reset()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for step in subject.steps():
        step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _memory_limit(device: torch.device, gib: float | None, before: int):
    """Allocations fail that would take the process more than `gib` above `before` bytes.

    Tensors that the subject was built from count; what it took to draw them, and what verifying will take, does not.
    """
    if not gib or device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (before + gib * 2**30) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _is_lost(device: torch.device) -> bool:
    """Whether an error has taken the CUDA context with it."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def _in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


