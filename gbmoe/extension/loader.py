"""Find the extension, or build it once, and load it; where that fails, say why.

First comes gbmoe/_C.so, which was compiled ahead of time when the package was built, if its sources are still the current ones. Then
comes the cache (cache.py), into which `load()` compiles csrc/ at the first use of a CUDA tensor, for every GPU that the process sees.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from gbmoe.extension import build, cache

AHEAD_OF_TIME = Path(__file__).parent.parent / "_C.so"


@dataclass(frozen=True)
class Status:
    """Whether the extension is loaded, from which file, and why not if it is not."""
    loaded: bool
    path: Path | None
    reason: str | None


def _why_passed_over(path: Path) -> str | None:
    """None if an object compiled ahead of time was made of the current sources, which may have changed in a checkout; otherwise why it
    cannot be used."""
    note = build.digest_file(path)
    if not path.exists():
        return f"{path} is missing"
    if not note.exists():
        return f"{path} lacks {note.name} beside it, which says what it was compiled from"
    if note.read_text(errors="replace").strip() != build.source_digest(build.source_folder()):
        return f"{path} was compiled from other sources than those in {build.source_folder()}"
    return None


def _visible_architectures() -> tuple[str, ...]:
    """The compute capabilities of the GPUs that this process sees, each once and in order. One object is compiled for all of them."""
    found = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    oldest = build.DEFAULT_ARCHITECTURES[0]
    served = tuple(f"{major}.{minor}" for major, minor in found if (major, minor) >= tuple(map(int, oldest.split("."))))
    if not served:
        names = ", ".join(f"{major}.{minor}" for major, minor in found) or "none"
        raise build.CompileError(f"no visible GPU has compute capability {oldest} or newer (visible: {names})")
    return served


def _load_cached() -> Path:
    """Load the object in the cache, after compiling it if it is missing, broken or does not load.

    Only one of the processes of a node compiles it. The others then find another file than the one that they could not load.
    """
    nvcc = build.Nvcc.find()
    reason = build.why_not(nvcc, build.Torch.imported())
    if nvcc is None or reason is not None:
        raise build.CompileError(reason)
    here = _visible_architectures()  # unless TORCH_CUDA_ARCH_LIST names others
    target = cache.cached_path(nvcc, here)
    given_up = cache.identity(target)
    fault = f"{target} is missing" if given_up is None else _load_file(target)
    if fault is not None:
        cache.compile_into(target, here, given_up, fault)
        fault = _load_file(target)
        if fault is not None:
            raise build.CompileError(fault)
    return target


def _load_file(path: Path) -> str | None:
    """Load one object of the cache. Returns None, or the reason why it cannot be loaded."""
    try:
        if not build.whole(path):  # loading a file whose end is missing would kill the process
            return f"{path} is damaged: it is not what gbmoe wrote there"
        torch.ops.load_library(str(path))
    except OSError as error:
        return _cause(error)
    return None


def _cause(error: OSError) -> str:
    """The error with its cause, which has the dynamic loader's message; torch's own error only names the file."""
    return f"{error}: {error.__cause__}" if error.__cause__ else str(error)


def _load_object() -> Path:
    """Load the object compiled ahead of time or, if that cannot be used, the one in the cache. Raises CompileError or OSError."""
    passed_over = _why_passed_over(AHEAD_OF_TIME)
    if passed_over is None:
        try:
            torch.ops.load_library(str(AHEAD_OF_TIME))
            return AHEAD_OF_TIME
        except OSError as error:  # it was built for another CUDA than torch is now
            passed_over = f"{AHEAD_OF_TIME.name} does not load: {_cause(error)}"
            cache.say(passed_over)
    try:
        return _load_cached()
    except (build.CompileError, OSError) as error:
        if not AHEAD_OF_TIME.exists():
            raise
        raise build.CompileError(f"{passed_over}; and {error}") from error


@functools.cache
def load() -> Status:
    """Load the extension, and build it before that where needed. This is done once in a process; later calls return the same result.

    It needs a CUDA device, whose compute capability it asks for, so it is called only once there is a CUDA tensor. Raises RuntimeError
    if GBMOE_REQUIRE_EXTENSION=1 and the extension is not available.
    """
    try:
        return Status(True, _load_object(), None)
    except (build.CompileError, OSError) as error:
        reason = str(error) or type(error).__name__
        if os.environ.get("GBMOE_REQUIRE_EXTENSION") == "1":
            raise RuntimeError(f"GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension is not available: {reason}") from error
    cache.say(f"working without its CUDA extension: {reason.splitlines()[0]}")
    return Status(False, None, reason)


def status() -> Status:
    """The result of `load()` where there is a CUDA device, otherwise a Status that says so. Nothing is built without a CUDA device."""
    if not load.cache_info().currsize and not torch.cuda.is_available():
        built = ""
        if AHEAD_OF_TIME.exists():
            built = f"; {_why_passed_over(AHEAD_OF_TIME) or AHEAD_OF_TIME.name + ' is built'}"
        return Status(False, None, f"no CUDA device{built}")
    return load()


def loaded() -> bool:
    """True if the kernels can be called. The first call on a machine with a CUDA device loads or builds them."""
    return load().loaded
