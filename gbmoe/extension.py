"""The compiled CUDA kernels: find them, or build them once, load them, and say what happened.

Looked for in this order: gbmoe/_C.so, compiled ahead of time while the package was built, if its sources are still those that
are here; then the cache directory (GBMOE_CACHE_DIR, by default ~/.cache/gbmoe), where `load()` compiles csrc/ at the first use of
a CUDA tensor, for every GPU that the process sees. Without the extension every operator still works through PyTorch; with
GBMOE_REQUIRE_EXTENSION=1 its absence is an error.

Users may share a cache that all of them can write, and load from one that they can only read.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def _why_passed_over(path: Path) -> str | None:
    """None where an object compiled ahead of time is from the sources that are here now (a checkout may move on)."""
    note = _compile.digest_file(path)
    if not path.exists():
        return f"{path} is missing"
    if not note.exists():
        return f"{path} lies without {note.name}, which says what it was compiled from"
    if note.read_text(errors="replace").strip() != _compile.source_digest(source_folder()):
        return f"{path} was compiled from other sources than those in {source_folder()}"
    return None


def _visible_architectures() -> tuple[str, ...]:
    """The capabilities of the GPUs that this process sees, each once and in order: one object serves them all."""
    found = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    oldest = _compile.DEFAULT_ARCHITECTURES[0]
    served = tuple(f"{major}.{minor}" for major, minor in found if (major, minor) >= tuple(map(int, oldest.split("."))))
    if not served:
        names = ", ".join(f"{major}.{minor}" for major, minor in found) or "none"
        raise _compile.CompileError(f"no visible GPU has compute capability {oldest} or newer (visible: {names})")
    return served


def _cache_folder() -> Path:
    given = os.environ.get("GBMOE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "gbmoe"
    except RuntimeError as error:
        raise _compile.CompileError("no folder for what is compiled: HOME is not set and this user has no passwd entry;"
                                    " GBMOE_CACHE_DIR names one") from error


def _cached_path(nvcc: _compile.Nvcc, default: tuple[str, ...]) -> Path:
    # Everything that changes the machine code names the file, so that a new source or toolkit never meets an old object, and
    # machines of two kinds may share a home.
    facts = (_compile.source_digest(source_folder()), nvcc.version, torch.__version__, platform.machine(),
             sorted(set(_compile.architectures(nvcc, default))))
    return _cache_folder() / f"gbmoe_C-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


def _say(text: str) -> None:
    print(f"gbmoe: {text}", file=sys.stderr, flush=True)


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file: created where it is missing, neither truncated nor looked for behind a link.

    Another user's may be open for reading only, which is enough for flock. It is opened before it is created, because in a
    folder such as /tmp the kernel refuses O_CREAT on a file of another user's.
    """
    common = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        for flags in (os.O_RDWR, os.O_RDONLY):
            with suppress(FileNotFoundError, PermissionError):
                return os.open(path, flags | common)
        return os.open(path, os.O_RDWR | os.O_CREAT | common, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _compile.CompileError(f"the lock {path} is a symbolic link, which is not followed: remove it") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock while another process compiles the same object, or this one does."""
    handle = _open_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks; on NFS also one that is open for reading only
            _say(f"{path} cannot be locked ({error.strerror}): processes that start together may each compile")
        yield
    finally:
        os.close(handle)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # where more than the file is amiss, creating its folder or the lock says what
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _load_cached() -> Path:
    """Load the object in the cache, compiled now if it is missing, broken or does not load.

    The processes of a node compile it once between them: whoever comes second finds another file than the one it gave up.
    """
    nvcc = _compile.Nvcc.find()
    reason = _compile.why_not(nvcc, _compile.Torch.imported())
    if nvcc is None or reason is not None:
        raise _compile.CompileError(reason)
    here = _visible_architectures()  # TORCH_CUDA_ARCH_LIST may ask for others
    target = _cached_path(nvcc, here)
    given_up = _identity(target)
    fault = f"{target} is missing" if given_up is None else _load_file(target)
    if fault is not None:
        _compile_into(target, here, given_up, fault)
        fault = _load_file(target)
        if fault is not None:
            raise _compile.CompileError(fault)
    return target


def _load_file(path: Path) -> str | None:
    """Load one object of the cache: None, or why that cannot be."""
    try:
        if not _compile.whole(path):  # never handed to the loader, which the end of a file that is missing would kill
            return f"{path} is not what was written there"
        torch.ops.load_library(str(path))
    except OSError as error:
        return _cause(error)
    return None


def _cause(error: OSError) -> str:
    """What the loader said; torch's own error names the file only."""
    return f"{error}: {error.__cause__}" if error.__cause__ else str(error)


def _compile_into(target: Path, default: tuple[str, ...], given_up: tuple[int, int, int] | None, fault: str) -> None:
    """Compile `target` under its lock, unless another process has put a file there since `given_up` was looked at."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if _identity(target) not in (None, given_up):
                return
            if given_up is not None:
                _say(f"compiling anew, because {fault}")
            _say(f"compiling its CUDA extension, once, into {target.parent} (about a minute) ...")
            start = time.monotonic()
            compiled = _compile.build(source_folder(), target, default)
            _say(f"compiled for {', '.join(compiled)} in {time.monotonic() - start:.0f} s")
    except OSError as error:
        raise _compile.CompileError(f"{fault}, and nothing can be compiled into {target.parent}: {error};"
                                    " GBMOE_CACHE_DIR names another folder") from error


def _load_object() -> Path:
    """Load the object compiled ahead of time, or else the one in the cache. Raises CompileError or OSError."""
    passed_over = _why_passed_over(_AHEAD_OF_TIME)
    if passed_over is None:
        try:
            torch.ops.load_library(str(_AHEAD_OF_TIME))
            return _AHEAD_OF_TIME
        except OSError as error:  # built for another CUDA than the torch that is here now
            passed_over = f"{_AHEAD_OF_TIME.name} does not load: {_cause(error)}"
            _say(passed_over)
    try:
        return _load_cached()
    except (_compile.CompileError, OSError) as error:
        if not _AHEAD_OF_TIME.exists():
            raise
        raise _compile.CompileError(f"{passed_over}; and {error}") from error


@functools.cache
def load() -> Status:
    """Load the extension, building it first where that is needed and possible. Done once a process; later calls are free.

    Needs a CUDA device (it asks for its capability), so nothing calls this before a CUDA tensor is met. Raises RuntimeError
    where GBMOE_REQUIRE_EXTENSION=1 and there is no extension.
    """
    try:
        return Status(True, _load_object(), None)
    except (_compile.CompileError, OSError) as error:
        reason = str(error) or type(error).__name__
        if os.environ.get("GBMOE_REQUIRE_EXTENSION") == "1":
            raise RuntimeError(f"GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension is not available: {reason}") from error
    _say(f"working without its CUDA extension: {reason.splitlines()[0]}")
    return Status(False, None, reason)


def status() -> Status:
    """What `load()` found where a CUDA device is present; otherwise why there is nothing to load. Starts no build on a CPU."""
    if not load.cache_info().currsize and not torch.cuda.is_available():
        built = ""
        if _AHEAD_OF_TIME.exists():
            built = f"; {_why_passed_over(_AHEAD_OF_TIME) or _AHEAD_OF_TIME.name + ' is built'}"
        return Status(False, None, f"no CUDA device{built}")
    return load()


def loaded() -> bool:
    """True where the kernels may be called; loads or builds them at the first call on a machine with a CUDA device."""
    return load().loaded
