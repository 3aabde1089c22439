"""Make a row: build a measurement's subject, verify it, and only then time it.

A row is a plain dict, ready for JSON. Its `outcome` is "verified", or says why it has no time:

    wrong           it ran, and its result is not what it should be
    error           it raised an exception
    crashed         it lost the device (an illegal memory access) or its process
    timed out       it gave no result in time
    out of memory   it needed more than the device has, or than the memory limit where there is one
    left out        the implementation is not made for this
"""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gbmoe._checks import dtype_name
from gbmoe.cli.bench.measurements.measurement import GRAPH, Measurement, Refusal, Subject, forget_kept
from gbmoe.cli.bench.roofline import PASSES, Limits
from gbmoe.cli.bench.running.burst_timer import THOROUGH, Effort, time_steps
from gbmoe.cli.bench.running.timing_statistics import Timing
from gbmoe.testing import exact_inputs

VERIFIED, WRONG, ERROR, CRASHED, TIMED_OUT, OUT_OF_MEMORY, LEFT_OUT = (
    "verified", "wrong", "error", "crashed", "timed out", "out of memory", "left out")
# How a row was timed: a few calls apart, each with a cold L2 cache; or one after the other for as long as it takes to be at the clock
# that the power limit allows. Figures of the two are not compared.
BURSTS, SUSTAINED = "bursts", "sustained"


@dataclass(frozen=True)
class Conditions:
    """The conditions that all rows of a run share."""
    device: torch.device
    dtype: torch.dtype
    effort: Effort = THOROUGH
    limits: Limits = Limits()
    timing: str = BURSTS


def measure(measurement: Measurement, conditions: Conditions) -> dict:
    """The row, timed in bursts. Times are in seconds; extra_peak_bytes (CUDA) is the memory that a call needs beyond what is
    allocated before it."""
    device = conditions.device
    row, subject = verify(measurement, conditions)
    try:
        if subject is not None:
            row |= _times(measurement, subject, conditions)
    except Exception as error:
        row |= {"verified": False} | failure(error, device)
    finally:
        if device.type == "cuda" and not is_lost(device):
            subject = None
            torch.cuda.empty_cache()
    return row


def verify(measurement: Measurement, conditions: Conditions) -> tuple[dict, Subject | None]:
    """The row without a time; and the subject, if it is right."""
    device = conditions.device
    row = unmeasured(measurement, conditions, ERROR, None)
    if measurement.memory_limit:
        forget(device)  # tensors kept from earlier rows would count towards the memory limit
    before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    try:
        exact_inputs.poison(device)
        subject = measurement.build(device, conditions.dtype)
        with _memory_limit(device, measurement.memory_limit, before):
            outputs = subject.outputs()
        verdict = subject.check(outputs)
        del outputs
        subject.reset()
        row |= {"error": finite_or_none(verdict.error), "limit": finite_or_none(verdict.limit)} | subject.facts()
    except Exception as error:  # an implementation that raises is a finding, and the other rows are wanted too
        return row | failure(error, device), None
    if not verdict.passed:
        return row | {"outcome": WRONG, "problem": str(verdict)}, None
    return row | {"outcome": VERIFIED, "verified": True}, subject


def failure(error: Exception, device: torch.device) -> dict:
    """A row's outcome and problem, for what an implementation raised."""
    if isinstance(error, Refusal):
        return {"outcome": LEFT_OUT, "problem": str(error)}
    if isinstance(error, torch.OutOfMemoryError):
        return {"outcome": OUT_OF_MEMORY, "problem": str(error).splitlines()[0]}
    return {"outcome": CRASHED if is_lost(device) else ERROR, "problem": in_words(error)}


@contextmanager
def few_threads(device: torch.device):
    """Use one thread on a CPU: shapes that were scaled down gain nothing from more, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def unmeasured(measurement: Measurement, conditions: Conditions, outcome: str, problem: str | None) -> dict:
    """The row of a measurement without a result."""
    return measurement.describe() | {"dtype": dtype_name(conditions.dtype), "timing": conditions.timing, "verified": False,
                                     "outcome": outcome, "problem": problem}


def forget(device: torch.device) -> None:
    """Free the tensors that are kept from one row for the next."""
    forget_kept()
    if device.type == "cuda" and not is_lost(device):
        gc.collect()  # a rival's tensors may be part of reference cycles
        torch.cuda.empty_cache()


def _times(measurement: Measurement, subject: Subject, conditions: Conditions) -> dict:
    device = conditions.device
    timed_on = torch.device("cpu") if subject.of_host else device
    together, each = time_steps(subject.steps(), timed_on, subject.reset, subject.hide_host, conditions.effort)
    row = all_rates(measurement, together, each, subject.bytes_moved(), conditions.limits)
    return row | {"extra_peak_bytes": extra_peak_bytes(measurement, subject, device)} | subject.further(together.median)


def all_rates(measurement: Measurement, together: Timing, each: list[Timing], moved: int | None, limits: Limits) -> dict:
    """The rates of a row, and of its passes where it has two: a call's time, and that of each of its steps."""
    flops = measurement.flops()
    row = rates(together, flops, moved, limits) | {"repetitions": together.repetitions}
    if len(each) == 2:
        row |= {name: rates(timing, _share(flops, name), _share(moved, name), limits)
                for name, timing in zip(("forward", "backward"), each)}
    return row


def _share(count: int | None, name: str) -> int | None:
    """The share that a pass has of the operations, or bytes, of forward and backward."""
    return None if count is None else count * PASSES[name] // PASSES["forward+backward"]


def rates(timing: Timing, flops: int | None, moved: int | None, limits: Limits) -> dict:
    """The fields of a row's time, and of the rates that it means for these operations and bytes."""
    least = limits.seconds(flops, moved)
    return {"median": timing.median, "quartiles": [timing.low, timing.high],
            "flops": flops, "tflops": _tera(flops, timing.median),
            "bytes": moved, "terabytes": _tera(moved, timing.median),
            "of_limit": least[0] / timing.median if least else None, "bound_by": least[1] if least else None}


def _tera(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / seconds / 1e12


def finite_or_none(number: float) -> float | None:
    """The number, or None where it is infinite or NaN, which JSON does not know."""
    return number if math.isfinite(number) else None


def extra_peak_bytes(measurement: Measurement, subject: Subject, device: torch.device) -> int | None:
    """The memory that a call needs beyond what is allocated before it. None where it is not CUDA's, and for a graph, which has taken
    its memory when it was captured."""
    if device.type != "cuda" or measurement.computation == GRAPH:
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
    """Let allocations fail that would take the process more than `gib` GiB above `before` bytes.

    Tensors that the subject keeps count towards the limit; memory used to draw them, or to verify the result, does not.
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


def is_lost(device: torch.device) -> bool:
    """Whether an error has destroyed the CUDA context."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def in_words(error: Exception) -> str:
    """The error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


