"""Where the host's time for a layer of gbmoe's goes, by what the code that takes it is for.

cProfile sees every function of Python's and every function of C++ that these call, and how long each took without those that it called.
It makes each of them slower by about the same time, which is taken off again: what the calls took more than those without a profile.
Backward runs on the thread of the caller, where it is seen.

    checks       of arguments, of who watches a call, and of how tensors lie
    choice       of engines, tiles and layouts
    Python       of gbmoe: everything else in its functions
    modules      torch's Python: calls of modules, and what its functions do
    dispatcher   calls of gbmoe's operators through torch's dispatcher, there and back
    launches     calls of csrc's operators, which launch kernels; they are C++, in which no profile of Python's sees further
    operators    calls of torch's own operators, with their launches, or on a CPU with what they compute
    allocation   of tensors
    autograd     its functions, its graph and its engine
    rest         what no function was seen in
"""

from __future__ import annotations

import cProfile
import pstats
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

import gbmoe
from benchmarks.measurements.host_time import HostMeasurement, HostOfLayer
from gbmoe.cli.bench import table

PARTS = ("checks", "choice", "Python", "modules", "dispatcher", "launches", "operators", "allocation", "autograd", "rest")
# Seconds of profiled calls, and the fewest and the most of them.
_SECONDS, _FEWEST, _MOST = 0.3, 3, 200
_GBMOE, _TORCH = (f"{Path(package.__path__[0])}/" for package in (gbmoe, torch))

# Functions of Python by how their path begins inside their package; the first that fits counts.
_OF_GBMOE = (("_checks.py", "checks"), ("launch/alignment.py", "checks"), ("launch/availability.py", "checks"),
             ("engines/choice.py", "choice"), ("engines/resolved.py", "choice"), ("tuning/", "choice"), ("weight_layout.py", "choice"),
             ("programs/", "choice"), ("_define_operator.py", "dispatcher"), ("ops/saved_for_backward.py", "autograd"),
             ("cli/", "rest"), ("", "Python"))
_OF_TORCH = (("_ops.py", "dispatcher"), ("_library/", "dispatcher"), ("autograd/", "autograd"), ("_functorch/", "autograd"),
             ("utils/_contextlib.py", "autograd"), ("", "modules"))
# And those of gbmoe that check, or record for backward, wherever they are: by how their names begin or end.
_CHECKS = ("check", "_check", "require", "_require", "is_watched", "_is_watched", "is_unseen", "_is_unseen", "may_be_", "_is_plain",
           "has_global_hooks", "_refuse_")
_RECORDS = ("setup_context", "_autograd_backward")
# Functions of C++ by name. Those that ask tensors and Python's objects for something are part of the function that asks.
_ALLOCATES = {"new_empty", "empty", "empty_like", "empty_strided", "new_zeros", "zeros", "zeros_like", "new_full", "full", "full_like",
              "new_ones", "ones", "ones_like"}
_OF_AUTOGRAD = {"apply", "run_backward", "save_for_backward", "mark_non_differentiable", "set_materialize_grads", "_set_grad_enabled",
                "maybe_clear_saved_tensors", "_any_requires_grad", "requires_grad_", "detach", "is_grad_enabled"}
_ASKS = {"size", "dim", "numel", "stride", "is_contiguous", "data_ptr", "element_size", "storage_offset", "is_neg", "is_floating_point",
         "is_inference", "untyped_storage", "is_autocast_enabled", "get_autocast_dtype", "is_anomaly_enabled", "is_inference_mode_enabled"}


class HostPartsMeasurement(HostMeasurement):
    """The parts of the host's time for a layer of gbmoe's, in the field `parts`, in seconds."""

    kind = "host-parts"

    def build(self, device: torch.device, dtype: torch.dtype) -> HostOfLayer:
        return _HostParts(self, device, dtype)


class _HostParts(HostOfLayer):
    def further(self, seconds: float) -> dict:
        def call() -> None:
            for step in self.steps():
                step()

        calls = min(_MOST, max(_FEWEST, int(_SECONDS / seconds)))
        return {"parts": parts_of([profiled(call, self.reset) for _ in range(calls)], seconds)}


def profiled(call: Callable[[], object], reset: Callable[[], object]) -> dict:
    """pstats' entries of one call, after a `reset` that they do not have."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        reset()
        profile.enable()
        call()
        profile.disable()
    reset()
    return pstats.Stats(profile).stats  # type: ignore[attr-defined]


def parts_of(calls: Sequence[dict], seconds: float) -> dict[str, float]:
    """The seconds of each of PARTS in a call, which sum to `seconds`, those of a call without a profile: medians of the calls' entries."""
    seen = median(sum(own for _, _, own, _, _ in entries.values()) for entries in calls)
    entered = median(sum(count for _, count, _, _, _ in entries.values()) for entries in calls)
    each = max(0.0, seen - seconds) / max(entered, 1)  # what the profile adds to a function that is entered once
    of_calls = [_of_call(entries, each) for entries in calls]
    named = {part: median(found[part] for found in of_calls) for part in PARTS[:-1]}
    excess = max(1.0, sum(named.values()) / seconds)
    parts = {part: taken / excess for part, taken in named.items()}
    return parts | {"rest": max(0.0, seconds - sum(parts.values()))}


def _of_call(entries: dict, each: float) -> dict[str, float]:
    """The seconds of each part in the entries of a call, without the `each` that the profile adds to a function that is entered."""
    found: dict[str, float] = defaultdict(float)
    for function, (_, count, own, _, callers) in entries.items():
        part = part_of(function)
        if part is not None:
            found[part] += max(0.0, own - count * each)
            continue
        for caller, (count, _, own, _) in callers.items():
            found[part_of(caller) or "rest"] += max(0.0, own - count * each)
    return found


def part_of(function: tuple[str, int, str]) -> str | None:
    """The part that a function belongs to, given as pstats names it (file, line, name); None for one that is part of its caller."""
    file, _, name = function
    if file == "~":
        return _part_of_builtin(name)
    if file.startswith("<gbmoe: program of "):
        return "Python"
    for package, places in ((_GBMOE, _OF_GBMOE), (_TORCH, _OF_TORCH)):
        if file.startswith(package):
            if package == _GBMOE and name.startswith(_CHECKS):
                return "checks"
            if package == _GBMOE and name.endswith(_RECORDS):
                return "autograd"
            return next(part for place, part in places if file.removeprefix(package).startswith(place))
    return None


def _part_of_builtin(name: str) -> str | None:
    """As part_of, for a function of C++: "<built-in method torch.where>" or "<method 'size' of 'torch._C.TensorBase' objects>"."""
    method = re.fullmatch(r"<method '(.+)' of '(.+)' objects>", name)
    qualified = f"{method[2]}.{method[1]}" if method else name.removeprefix("<built-in method ").removesuffix(">")
    for prefix, part in (("torch._ops.gbmoe_cuda.", "launches"), ("torch._ops.gbmoe.", "dispatcher"), ("torch._ops.", "operators")):
        if qualified.startswith(prefix):
            return part
    short = qualified.rpartition(".")[2]
    if short in _OF_AUTOGRAD:
        return "autograd"
    if not qualified.startswith("torch.") or short in _ASKS:
        return None
    if short in _ALLOCATES:
        return "allocation"
    is_operator = qualified.startswith(("torch._C.TensorBase.", "torch._C._nn.")) or not qualified.startswith("torch._C.")
    return "operators" if is_operator else None


def parts_table(rows: Sequence[dict], baseline: str, width: int = table.WIDTH) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """A line for each part of each shape's time, and their sum, with a column for each computation."""
    computations = list(dict.fromkeys(row["computation"] for row in rows))
    headings = [("shape", "<"), ("part of the host's time", "<"), *((f"{computation} us", ">") for computation in computations)]
    cells = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {row["computation"]: row for row in rows if row["case"] == case}
        for part in ("all", *PARTS):
            cells.append([case, part, *(_cell(of_case.get(computation), part) for computation in computations)])
    return headings, cells


def _cell(row: dict | None, part: str) -> str:
    if row is None or row.get("median") is None:
        return "-" if row is None else row["outcome"]
    seconds = row["median"] if part == "all" else row["parts"][part]
    return f"{seconds * 1e6:.1f}"


table.TABLES[HostPartsMeasurement.kind] = parts_table
