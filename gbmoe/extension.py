"""The compiled CUDA kernels: find them, or build them once, load them, and say what happened.

Looked for in this order: gbmoe/_C.so, compiled ahead of time while the package was built, if its sources are still those that
are here; then the cache directory
(GBMOE_CACHE_DIR, by default ~/.cache/gbmoe), where `load()` compiles csrc/ at the first use of a CUDA tensor. Without the
extension every operator still works through PyTorch; with GBMOE_REQUIRE_EXTENSION=1 its absence is an error.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from gbmoe import _compile

_PACKAGE = Path(__file__).parent
_AHEAD_OF_TIME = _PACKAGE / "_C.so"


@dataclass(frozen=True)
class Status:
    """Whether the extension is loaded, from which file, and if it is not, why."""
    loaded: bool
    path: Path | None
    reason: str | None


def source_folder() -> Path:
    """csrc/: beside the package in a checkout, inside it where it is installed."""
    checkout = _PACKAGE.parent / "csrc"
    return checkout if (checkout / "register.cpp").exists() else _PACKAGE / "csrc"


def _up_to_date(path: Path) -> bool:
    """Whether an object compiled ahead of time was compiled from the sources that are here now (a checkout may move on)."""
    recorded = _compile.digest_file(path)
    return path.exists() and recorded.exists() and recorded.read_text().strip() == _compile.source_digest(source_folder())


def _cached_path(nvcc: _compile.Nvcc, default: tuple[str, ...]) -> Path:
    # Everything that changes the machine code names the file, so a new source or toolkit never meets an old object.
    facts = (_compile.source_digest(source_folder()), nvcc.version, torch.__version__, _compile.architectures(nvcc, default))
    root = Path(os.environ.get("GBMOE_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gbmoe")
    return root / f"gbmoe_C-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def _from_cache() -> Path:
    """The object in the cache, compiled now if it is missing; the processes of a node compile it once between them."""
    nvcc = _compile.Nvcc.find()
    reason = _compile.why_not(nvcc, _compile.Torch.imported())
    if reason is not None:
        raise _compile.CompileError(reason)
    major, minor = torch.cuda.get_device_capability()
    here = (f"{major}.{minor}",)  # one device is here to be served; TORCH_CUDA_ARCH_LIST asks for more
    target = _cached_path(nvcc, here)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            print(f"gbmoe: compiling its CUDA extension, once, into {target.parent} (about a minute) ...", file=sys.stderr, flush=True)
            start = time.monotonic()
            compiled = _compile.build(source_folder(), target, here)
            print(f"gbmoe: compiled for {', '.join(compiled)} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return target


def _load_object() -> Path:
    """Load the object compiled ahead of time, or else the one in the cache. Raises CompileError or OSError."""
    if _up_to_date(_AHEAD_OF_TIME):
        try:
            torch.ops.load_library(str(_AHEAD_OF_TIME))
            return _AHEAD_OF_TIME
        except OSError as error:  # built for another CUDA than the torch that is here now
            print(f"gbmoe: {_AHEAD_OF_TIME.name} does not load: {error}", file=sys.stderr, flush=True)
    path = _from_cache()
    torch.ops.load_library(str(path))
    return path


@functools.cache
def load() -> Status:
    """Load the extension, building it first where that is needed and possible. Done once a process; later calls are free.

    Needs a CUDA device (it asks for its capability), so nothing calls this before a CUDA tensor is met. Raises RuntimeError
    where GBMOE_REQUIRE_EXTENSION=1 and there is no extension.
    """
    try:
        return Status(True, _load_object(), None)
    except (_compile.CompileError, OSError) as error:
        reason = str(error)
    if os.environ.get("GBMOE_REQUIRE_EXTENSION") == "1":
        raise RuntimeError(f"GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension is not available: {reason}")
    print(f"gbmoe: working without its CUDA extension: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
    return Status(False, None, reason)


def status() -> Status:
    """What `load()` found where a CUDA device is present; otherwise why there is nothing to load. Starts no build on a CPU."""
    if not load.cache_info().currsize and not torch.cuda.is_available():
        built = f"; {_AHEAD_OF_TIME.name} is built" if _AHEAD_OF_TIME.exists() else ""
        return Status(False, None, f"no CUDA device{built}")
    return load()


def loaded() -> bool:
    """True where the kernels may be called; loads or builds them at the first call on a machine with a CUDA device."""
    return load().loaded
