"""How many compilers may run at the same time. Standard library only: setup.py runs this file before gbmoe can be imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .toolkit import CompileError

# Memory that one compiler is counted with. Its largest process was measured with 0.7 GiB for hopper/down_projection_backward.cu and 0.4 GiB
# for most files (nvcc 13.0).
_BYTES = 1 << 30
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Jobs:
    """A number of compilers, and what limits it."""
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} job{'s' if self.count > 1 else ''} ({self.reason})"


def jobs(asked: int | None = None) -> Jobs:
    """The smallest of what CPU affinity, a container's quota, Slurm, free memory and MAX_JOBS allow; `asked` decides alone.

    Raises CompileError where MAX_JOBS is not a number greater than 0.
    """
    if asked is not None:
        return Jobs(asked, "as asked for")
    limits = [_processors(), _quota(), _slurm(), _memory(), _max_jobs()]
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.count)


def _processors() -> Jobs:
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        count = os.cpu_count() or 1
    return Jobs(count, f"CPUs of this process: {count}")


def _max_jobs() -> Jobs | None:
    text = os.environ.get("MAX_JOBS", "").strip()
    if not text:
        return None
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise CompileError(f"MAX_JOBS: expected a number greater than 0, got {text!r}", "set MAX_JOBS to a number, or unset it")
    return Jobs(int(text), f"MAX_JOBS={text}")


def _slurm() -> Jobs | None:
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        text = os.environ.get(name, "")
        if re.fullmatch(r"0*[1-9]\d*", text):
            return Jobs(int(text), f"{name}={text}")
    return None


def _memory() -> Jobs | None:
    free = [room for room in (_free_memory(), *_free_in_cgroups()) if room is not None]
    if not free:
        return None
    return Jobs(max(1, min(free) // _BYTES), f"free memory: {min(free) / 2**30:.1f} GiB")


def _free_memory() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def _quota() -> Jobs | None:
    quotas = []
    for folder in _cgroup_folders():
        limit = _words(folder / "cpu.max") or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(limit) == 2 and all(word.isdigit() for word in limit) and int(limit[1]):  # "max" and -1 are no limit
            quotas.append(int(limit[0]) / int(limit[1]))
    return Jobs(max(1, int(min(quotas))), f"the container's CPU quota: {min(quotas):g}") if quotas else None


def _free_in_cgroups() -> Iterator[int]:
    for folder in _cgroup_folders():
        limit = _first(folder / "memory.max") or _first(folder / "memory.limit_in_bytes")
        used = _first(folder / "memory.current") or _first(folder / "memory.usage_in_bytes")
        if limit and used and limit.isdigit() and used.isdigit():
            # Files that were read count as used, and are dropped where memory is needed.
            statistics = " ".join(_words(folder / "memory.stat"))
            cached = re.search(r"(?:total_)?inactive_file (\d+)", statistics)
            yield max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _cgroup_folders() -> Iterator[Path]:
    """The folders of this process's control groups and of those around them. Where a group's path is not visible, as in a container, the
    root is the container's own group."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        here = root / path.lstrip("/")
        yield from (folder for folder in (here, *here.parents) if folder == root or root in folder.parents)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _first(path: Path) -> str | None:
    return next(iter(_words(path)), None)
