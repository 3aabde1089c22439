"""The cache of compiled objects: its folder, the name of an object in it, and the lock that is held while one is compiled.

The folder is GBMOE_CACHE_DIR, by default ~/.cache/gbmoe. Users may share a cache that all of them can write to, and may load from
one that they can only read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gbmoe.extension import build


def _folder() -> Path:
    given = os.environ.get("GBMOE_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "gbmoe"
    except RuntimeError as error:
        raise build.CompileError("no folder for what is compiled: HOME is not set and this user has no passwd entry;"
                                 " set GBMOE_CACHE_DIR to a folder") from error


def cached_path(nvcc: build.Nvcc, default: tuple[str, ...]) -> Path:
    """The path of the object of these sources, for this compiler and the architectures `default`, be it compiled already or not."""
    # The name depends on everything that changes the machine code, so that new sources or a new toolkit never load an old object, and
    # different machines can share a home directory.
    facts = (build.source_digest(build.source_folder()), nvcc.version, torch.__version__, platform.machine(),
             sorted(set(build.architectures(nvcc, default))))
    return _folder() / f"gbmoe_C-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"


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
        raise build.CompileError(f"the lock {path} is a symbolic link, which is not followed: remove it") from error


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


def compile_into(target: Path, default: tuple[str, ...], given_up: tuple[int, int, int] | None, fault: str) -> None:
    """Compile `target` under its lock, unless another process has replaced the file whose identity is `given_up`. `fault` says why that
    one could not be used."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if identity(target) not in (None, given_up):
                return
            if given_up is not None:
                say(f"compiling again, because {fault}")
            say(f"compiling its CUDA extension, once, into {target.parent} (about a minute) ...")
            start = time.monotonic()
            compiled = build.build(build.source_folder(), target, default)
            say(f"compiled for {', '.join(compiled)} in {time.monotonic() - start:.0f} s")
    except OSError as error:
        raise build.CompileError(f"{fault}, and nothing can be compiled into {target.parent}: {error};"
                                 " set GBMOE_CACHE_DIR to another folder") from error
