"""cache.py: an object is compiled once, by one process, and again only if it is broken."""

import errno
import fcntl
import os
import platform
import pwd
import subprocess
import threading

import pytest

from gbmoe import extension
from gbmoe.extension import cache, loader
from tests.extension.toolkit_of_paper import again, why_not_loaded
from tests.forked_python import python


def test_without_home_and_passwd_entry_it_falls_back_and_says_so(toolkit, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "GBMOE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert why_not_loaded() == ("no folder for what is compiled: HOME is not set and this user has no passwd entry;"
                                " set GBMOE_CACHE_DIR to a folder")


def test_a_cache_that_cannot_be_written_falls_back_and_says_so(toolkit, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GBMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    reason = why_not_loaded()
    assert f"nothing can be compiled into {tmp_path / 'file' / 'cache'}: [Errno {errno.ENOTDIR}]" in reason
    assert reason.endswith("set GBMOE_CACHE_DIR to another folder")


# What a full disk, a lost machine or a foreign hand may leave. The loader dies of the second (SIGBUS), so it must not see it.
BROKEN = {"empty": lambda whole: b"", "cut": lambda whole: whole[:-1], "zeros": lambda whole: bytes(len(whole)),
          "foreign-bytes": lambda whole: b"x" + whole[1:], "foreign-file": lambda whole: b"foreign"}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_object_in_the_cache_is_compiled_anew_once(toolkit, capsys, broken):
    path = extension.load().path
    path.write_bytes(BROKEN[broken](path.read_bytes()))
    assert again().path == path and toolkit.links() == 2
    assert "compiling again, because" in capsys.readouterr().err
    assert again().loaded and toolkit.links() == 2


def test_a_whole_object_that_the_loader_refuses_is_compiled_anew_once(toolkit, capsys):
    (toolkit.home / "object").write_bytes(b"foreign")
    reason = why_not_loaded()
    assert "version GLIBC_9.9 not found" in reason and toolkit.links() == 1
    (toolkit.home / "object").write_bytes(b"an object")
    assert again().loaded and toolkit.links() == 2


def test_an_object_that_is_refused_after_compiling_anew_too_is_given_up(toolkit):
    (toolkit.home / "object").write_bytes(b"foreign")
    why_not_loaded()
    assert "version GLIBC_9.9 not found" in why_not_loaded() and toolkit.links() == 2
    assert not extension.loaded() and toolkit.links() == 2


@pytest.mark.parametrize("found", ["missing", "cut"])
def test_those_who_wait_for_the_lock_take_what_was_compiled_meanwhile(toolkit, found):
    if found == "cut":
        path = extension.load().path
        path.write_bytes(path.read_bytes()[:-1])
        (toolkit.home / "commands").unlink()
    results, start = [], threading.Barrier(4)

    def process():
        start.wait()
        results.append(loader._load_compiled_now(("9.0",)))
    threads = [threading.Thread(target=process) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and toolkit.links() == 1


def test_machines_of_two_kinds_share_a_home(toolkit, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    first = extension.load().path
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert again().path != first and toolkit.links() == 2


def lock_of(path):
    return path.with_suffix(".lock")


def test_the_lock_is_not_truncated(toolkit):
    path = extension.load().path
    path.unlink()
    lock_of(path).write_text("kept")
    assert again().loaded and lock_of(path).read_text() == "kept"


def test_a_lock_that_is_a_link_is_not_followed(toolkit, tmp_path):
    path = extension.load().path
    path.unlink()
    lock_of(path).unlink()
    (tmp_path / "precious").write_text("kept")
    for target in ("precious", "not there"):
        lock_of(path).symlink_to(tmp_path / target)
        assert why_not_loaded() == f"the lock {lock_of(path)} is a symbolic link, which is not followed: remove it"
        lock_of(path).unlink()
    assert (tmp_path / "precious").read_text() == "kept" and not (tmp_path / "not there").exists()


def test_another_users_lock_serves(toolkit, monkeypatch):
    """The lock can only be read, and in a folder such as /tmp the kernel refuses to open it with O_CREAT."""
    path = extension.load().path
    path.unlink()
    original, opened = os.open, []

    def as_another_user(name, flags, *rest, **named):
        if str(name).endswith(".lock"):
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise PermissionError(errno.EACCES, "Permission denied", str(name))
            opened.append(name)
        return original(name, flags, *rest, **named)
    monkeypatch.setattr(os, "open", as_another_user)
    assert again().loaded and opened == [lock_of(path)]


def test_a_lock_that_cannot_be_opened_is_named(toolkit, monkeypatch):
    path = extension.load().path
    path.unlink()
    lock_of(path).unlink()
    lock_of(path).mkdir()
    reason = why_not_loaded()
    assert reason.startswith(f"{path} is missing, and nothing can be compiled into {path.parent}: [Errno {errno.EISDIR}]")


def test_a_whole_object_needs_no_lock(toolkit, monkeypatch):
    """A cache that somebody else filled may be readable only."""
    extension.load()
    monkeypatch.setattr(cache, "_open_lock", lambda path: pytest.fail("opened the lock"))
    assert again().loaded


def test_a_file_system_without_locks_is_said_and_does_not_stop_the_build(toolkit, monkeypatch, capsys):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert extension.load().loaded
    assert "cannot be locked (No locks available): processes that start at the same time may all compile" in capsys.readouterr().err


WINDOWS = """
import os, shutil, sys, torch
sys.modules.update(fcntl=None, pwd=None, resource=None)  # as on Windows, where importing them fails
for name in ("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "sched_getaffinity"):
    delattr(os, name)
sys.platform = "win32"
shutil.which = lambda name: None  # which asks Windows itself from Python 3.12 on
import gbmoe
from gbmoe import extension
from gbmoe.cli import main
x = torch.ones(4, 8)
assert gbmoe.gmm(x, torch.ones(1, 8, 8), torch.tensor([4])).sum() == 256
assert extension.status().reason.startswith("no CUDA device")
sys.exit(main(["build", "--arch", "9.0"]))
"""


def test_without_fcntl_gbmoe_is_imported_and_says_that_nothing_is_compiled():
    """It was imported at the top, and gbmoe could not be imported on Windows."""
    done = subprocess.run([python("torch"), "-c", WINDOWS], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "gbmoe build: " in done.stderr
