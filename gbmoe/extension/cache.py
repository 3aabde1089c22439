"""The cache of compiled objects: its folder, the name of an object in it, and the lock that is held while one is compiled.

The folder is GBMOE_CACHE_DIR, by default ~/.cache/gbmoe. Users may share a cache that all of them can write to, and may load from
one that they can only read. An object's name says what it was made of, so that it is found without a compiler:

    gbmoe_C-<digest of its sources>-cu13-x86_64-8.0_9.0+PTX.so
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gbmoe.extension import build
from gbmoe.extension.architectures import key
from gbmoe.extension.jobs import Jobs
from gbmoe.extension.toolkit import CompileError, Nvcc, Torch

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]


def _folder() -> Path:
    given = os.environ.get("GBMOE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "gbmoe"
    except RuntimeError as error:
        raise CompileError("no folder for what is compiled: HOME is not set and this user has no passwd entry;"
                                 " set GBMOE_CACHE_DIR to a folder") from error


@dataclass(frozen=True)
class Compiled:
    """An object that has been compiled, and the architectures that it has code for."""
    path: Path
    architectures: tuple[str, ...]


def _prefix(cuda_major: int) -> str:
    # Everything that changes what an object does or where it loads, except its architectures. Several kinds of machine can share a home.
    # Neither torch's version nor the compiler's is among it: the ABI is stable, and objects of one CUDA major version are compatible.
    return f"gbmoe_C-{build.source_digest(build.source_folder())[:16]}-cu{cuda_major}-{platform.machine()}-"


def path_for(cuda_major: int, architectures: list[str]) -> Path:
    """The path of the object of these sources for `architectures`, whether it is compiled already or not."""
    return _folder() / f"{_prefix(cuda_major)}{'_'.join(sorted(set(architectures), key=key))}.so"


def compiled(cuda_major: int) -> list[Compiled]:
    """The objects of these sources in the cache, for this CUDA major version and kind of machine. Needs no compiler and writes nothing."""
    prefix, found = _prefix(cuda_major), []
    with suppress(OSError, CompileError):  # a folder that cannot be had or read has no objects
        for name in sorted(os.listdir(_folder())):
            if name.startswith(prefix) and name.endswith(".so"):
                architectures = tuple(name[len(prefix):-len(".so")].split("_"))
                with suppress(CompileError):  # not a name that path_for makes
                    found.append(Compiled(_folder() / name, tuple(sorted(architectures, key=key))))
    return found


def say(text: str) -> None:
    """Tell the user, on stderr, what gbmoe is doing."""
    print(f"gbmoe: {text}", file=sys.stderr, flush=True)


def _open_lock(path: Path) -> int:
    """Open the lock file and return its descriptor. It is created where it is missing, not truncated, and links are not followed.

    Another user's lock may only be readable, which is enough for flock. An existing file is opened without O_CREAT, because in a
    folder such as /tmp the kernel refuses that flag for a file of another user.
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
        raise CompileError(f"the lock {path} is a symbolic link, which is not followed: remove it") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock, for which this waits while another process compiles the same object."""
    handle = _open_lock(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # the file system has no locks, or, on NFS, the file is open for reading only
            say(f"{path} cannot be locked ({error.strerror}): processes that start at the same time may all compile")
        yield
    finally:
        os.close(handle)


def identity(path: Path) -> tuple[int, int, int] | None:
    """Numbers that tell the file at `path` from one that replaces it; None where there is no file."""
    try:
        found = path.stat()
    except OSError:  # if more than the file is wrong, creating its folder or the lock will raise a better error
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def compile_into(target: Path, nvcc: Nvcc, torch: Torch, chosen: list[str], jobs: Jobs, given_up: tuple[int, int, int] | None,
                 fault: str, tell: Callable[[str], None], report: Callable[[str], None]) -> None:
    """Compile `target` under its lock, unless another process has replaced the file whose identity is `given_up`. `fault` says why that
    one could not be used. `tell` gets what is done and how long it takes, `report` a line for each file of csrc/.

    Raises CompileError.
    """
    folder = build.source_folder()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if identity(target) not in (None, given_up):
                return
            if given_up is not None:
                tell(f"compiling again, because {fault}")
            seconds = build.estimate(folder, chosen, jobs.count)
            tell(f"compiling its CUDA extension, once, into {target.parent}, for {', '.join(chosen)}: about {build.duration(seconds)}"
                 f" with {jobs} ...")
            start = time.monotonic()
            build.build(folder, target, nvcc, torch, chosen, jobs, report)
            tell(f"compiled for {', '.join(chosen)} in {build.duration(time.monotonic() - start)}")
    except OSError as error:
        raise CompileError(f"{fault}, and nothing can be compiled into {target.parent}: {error};"
                           " set GBMOE_CACHE_DIR to another folder") from error
