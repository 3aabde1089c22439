"""The extension: the architectures asked for are the ones compiled for, absence is said and can be refused."""

import ctypes
import errno
import fcntl
import os
import platform
import pwd
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build, cache, loader

ROOT = Path(__file__).parent.parent.parent
SOURCES = build.sources(extension.source_folder())


def test_the_default_architectures_are_those_that_nvcc_knows(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    new = build.Nvcc(Path("nvcc"), (13, 0), frozenset({"75", "80", "86", "89", "90", "100", "120"}))
    assert build.architectures(new) == ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]
    old = build.Nvcc(Path("nvcc"), (12, 4), frozenset({"70", "75", "80", "86", "89", "90", "90a"}))
    assert build.architectures(old) == ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0+PTX"]


@pytest.mark.parametrize("asked, got", [
    ("9.0", ["9.0"]), ("8.0;9.0+PTX", ["8.0", "9.0+PTX"]), ("8.0 9.0a", ["8.0", "9.0a"]), ("Hopper", ["9.0+PTX"]),
    ("Ampere,9.0", ["8.0", "8.6+PTX", "9.0"])])
def test_torch_cuda_arch_list_is_honoured(monkeypatch, asked, got):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    nvcc = build.Nvcc(Path("nvcc"), (13, 0), frozenset({"75", "80", "86", "89", "90", "100"}))
    assert build.architectures(nvcc) == got


@pytest.mark.parametrize("asked, words", [("7.0", "cannot compile for 7.0; it knows 75, 80"), ("fast", "expected entries such as 8.0")])
def test_architectures_that_cannot_be_are_refused(monkeypatch, asked, words):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    with pytest.raises(build.CompileError, match=words):
        build.architectures(build.Nvcc(Path("nvcc"), (13, 0), frozenset({"75", "80"})))


@pytest.mark.parametrize("devices, codes, got", [
    (("8.0", "9.0"), {"75", "80", "90", "120"}, ["8.0", "9.0+PTX"]),
    (("8.7", "9.0"), {"80", "86", "90"}, ["8.6", "9.0+PTX"]),  # code of the same generation
    (("9.0", "10.3", "12.0"), {"80", "90", "120"}, ["9.0+PTX", "12.0+PTX"]),  # 10.3 compiles PTX of 9.0, not of 12.0
    (("8.6", "8.9"), {"80", "86"}, ["8.6+PTX"]),
    (("7.0", "9.0"), {"75", "90"}, ["9.0+PTX"]),  # nothing that this nvcc makes runs on 7.0
    (("12.1",), {"90", "100", "120"}, ["12.0+PTX"]),
])
def test_every_device_has_code_that_runs_on_it(monkeypatch, devices, codes, got):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert build.architectures(build.Nvcc(Path("nvcc"), (13, 0), frozenset(codes)), devices) == got


# Builds with a compiler that does not end, on any machine; SIGTERM raises SystemExit, as it does in `gbmoe convert`.
ENDLESS_BUILD = """
import pathlib, signal, sys
from gbmoe.extension import build
home = pathlib.Path(sys.argv[1])
build.why_not = lambda nvcc, torch: None
build._library_roots = lambda nvcc, torch: [home]
build.compile_flags = lambda nvcc, torch, chosen: []
build.Nvcc.find = classmethod(lambda cls: cls(home / "nvcc", (13, 0), frozenset({"90"})))
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
build.build(home / "sources", home / "out" / "object.so", ("9.0",))
"""
# Starts a pass that outlives it, as nvcc does.
ENDLESS_NVCC = """#!/usr/bin/env bash
mktemp >/dev/null
bash -c 'echo $$ >"$1/pids/$$"; sleep 600' pass "{home}"
"""


def test_a_build_that_is_interrupted_ends_its_compilers_and_leaves_no_files(tmp_path):
    for name in ("lib64/libcublas.so.13", *(f"sources/{i}.cu" for i in range(2 * os.cpu_count())), "pids/", "temporary/"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    (tmp_path / "nvcc").write_text(ENDLESS_NVCC.format(home=tmp_path))
    (tmp_path / "nvcc").chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", ENDLESS_BUILD, str(tmp_path)], env=environment)
    try:
        while len(list((tmp_path / "pids").iterdir())) < os.cpu_count() and process.poll() is None:
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        started = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in started}
        alive = [pid for pid, command in commands.items() if command.exists() and command.read_bytes()]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
    assert alive == [] and len(started) == os.cpu_count()  # none was begun after the signal
    assert list((tmp_path / "temporary").iterdir()) == [] and list((tmp_path / "out").iterdir()) == []


def test_why_not():
    nvcc = build.Nvcc(Path("nvcc"), (12, 4), frozenset({"90"}))
    torch_cpu, torch_13 = build.Torch(Path(), None, "2.13.0+cpu"), build.Torch(Path(), "13.0", "2.13.0")
    old = build.Nvcc(Path("nvcc"), (12, 4), frozenset())
    assert build.why_not(old, build.Torch(Path(), "12.8", "2.10.0")) == "nvcc is 12.4; cuBLAS has grouped GEMMs from CUDA 12.5 on"
    assert build.why_not(nvcc, None) == "torch is not importable"
    assert build.why_not(nvcc, torch_cpu) == "torch 2.13.0+cpu is built without CUDA"
    assert build.why_not(None, torch_13).startswith("nvcc was not found")
    assert build.why_not(nvcc, torch_13) == "nvcc is 12.4 but torch 2.13.0 is built for CUDA 13.0"
    assert build.why_not(build.Nvcc(Path("nvcc"), (13, 1), frozenset()), torch_13) is None


@pytest.fixture
def no_extension(monkeypatch):
    """The state of a machine where the extension can be neither found nor built."""
    def refuse():
        raise build.CompileError("nvcc was not found")
    monkeypatch.setattr(loader, "_load_object", refuse)
    extension.load.cache_clear()
    yield
    extension.load.cache_clear()


def test_absence_is_said_once(no_extension, monkeypatch, capsys):
    monkeypatch.delenv("GBMOE_REQUIRE_EXTENSION", raising=False)
    assert extension.load() == extension.load() == extension.Status(False, None, "nvcc was not found")
    assert capsys.readouterr().err == "gbmoe: working without its CUDA extension: nvcc was not found\n"


def test_absence_is_an_error_where_the_extension_is_required(no_extension, monkeypatch):
    monkeypatch.setenv("GBMOE_REQUIRE_EXTENSION", "1")
    with pytest.raises(RuntimeError, match="GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension is not available: nvcc was not found"):
        extension.load()


# --------------------------------------------------------------------------------------- the cache, with a toolkit of paper

FAKE_NVCC = r"""#!/bin/sh
home=$(dirname "$(dirname "$0")")
case "$*" in
*--version*) printf 'nvcc: release 13.0, V13.0.88\n'; exit ;;
*--list-gpu-code*) echo 'sm_75 sm_80 sm_86 sm_90 sm_120'; exit ;;
*--dryrun*) printf '#$ TOP=%s\n' "$home" >&2; exit ;;
esac
echo "$*" >> "$home/commands"
while [ "$1" != -o ]; do shift; done
if [ -e "$home/fails" ]; then echo half > "$2"; echo 'no space' >&2; exit 1; fi
case "$*" in *-ltorch_cuda*) sleep 0.1; cp "$home/object" "$2" ;; *) : > "$2" ;; esac
"""


class Toolkit:
    """A CUDA toolkit whose nvcc writes down its commands, and links by copying the file `object`."""

    def __init__(self, home):
        self.home = home
        for name in ("bin/nvcc", "include/cublas_v2.h", "lib64/libcublas.so.13"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()
        (home / "bin/nvcc").write_text(FAKE_NVCC)
        (home / "bin/nvcc").chmod(0o755)
        (home / "object").write_bytes(b"an object")
        self.loaded = []  # what the loader was given, in order

    def commands(self, with_word=""):
        log = self.home / "commands"
        return [line for line in log.read_text().splitlines() if with_word in line] if log.exists() else []

    def links(self):
        return len(self.commands("-ltorch_cuda"))

    def load(self, path):
        content = Path(path).read_bytes()
        self.loaded.append(content[:9])
        assert content.startswith((b"an object", b"foreign")), f"the loader was given {content!r}"
        if content.startswith(b"foreign"):
            raise OSError(f"Could not load this library: {path}") from OSError("version GLIBC_9.9 not found")


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A machine with one GPU of 9.0, a toolkit and an empty cache in tmp_path/cache."""
    toolkit = Toolkit(tmp_path / "toolkit")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cu").write_text("// one")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path / "csrc")
    monkeypatch.setattr(loader, "AHEAD_OF_TIME", tmp_path / "_C.so")
    monkeypatch.setattr(build.Torch, "imported", lambda: build.Torch(Path(torch.__file__).parent, "13.0", "2.13.0"))
    monkeypatch.setattr(torch.ops, "load_library", toolkit.load)
    devices(monkeypatch, (9, 0))
    monkeypatch.setenv("CUDA_HOME", str(toolkit.home))
    monkeypatch.setenv("GBMOE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("TORCH_CUDA_ARCH_LIST", "GBMOE_REQUIRE_EXTENSION"):
        monkeypatch.delenv(name, raising=False)
    extension.load.cache_clear()
    yield toolkit
    extension.load.cache_clear()


def devices(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])


def again():
    """Forget what this process has loaded, as another process would start."""
    extension.load.cache_clear()
    return extension.load()


def why_not_loaded():
    status = again()
    assert not status.loaded and status.path is None
    return status.reason


def test_compiled_once_and_then_loaded_from_the_cache(toolkit):
    first = extension.load()
    assert first.loaded and first.reason is None
    assert again() == first and toolkit.links() == 1
    assert first.path.stat().st_mode & 0o777 == 0o755
    assert sorted(path.suffix for path in first.path.parent.iterdir()) == [".lock", ".so"]


def test_files_of_one_name_in_two_folders_had_one_object(toolkit):
    folder = build.source_folder()
    (folder / "hopper").mkdir()
    (folder / "hopper" / "one.cu").write_text("// another")
    assert extension.load().loaded
    objects = [word for word in toolkit.commands("-ltorch_cuda")[0].split() if word.endswith(".o")]
    assert len(set(objects)) == 2


def test_bytes_of_nvcc_that_are_no_utf8_are_read_and_shown(toolkit):
    script = FAKE_NVCC.replace("V13.0.88", "V13.0.88, \\351dition").replace("#$ TOP", "\\351\\n#$ TOP")
    (toolkit.home / "bin/nvcc").write_text(script.replace("echo 'no space'", "printf 'cr\\351ation impossible'"))
    assert build.Nvcc.find().path == toolkit.home / "bin/nvcc"
    assert extension.load().loaded
    (toolkit.home / "fails").touch()
    (toolkit.home.parent / "csrc" / "one.cu").write_text("// another")
    reason = why_not_loaded()
    assert reason.startswith(str(toolkit.home / "bin/nvcc")) and "cr\ufffdation impossible" in reason


def test_a_toolkit_whose_path_is_no_utf8_is_found(toolkit, tmp_path, monkeypatch):
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    os.rename(toolkit.home, home)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert build.Nvcc.find().path == home / "bin/nvcc"


@pytest.mark.parametrize("script, words", [
    ("exit 3", "does not run: .*--version"), (None, "Exec format"),
    ("echo no compiler", "expected 'release' and a version, got 'no compiler'")])
def test_an_nvcc_that_does_not_run_is_not_said_to_be_missing(toolkit, monkeypatch, script, words):
    (toolkit.home / "bin/nvcc").write_bytes(b"\0" if script is None else f"#!/bin/sh\n{script}\n".encode())
    monkeypatch.setattr(build, "_nvcc_candidates", lambda: [Path("/nonexistent/nvcc"), toolkit.home / "bin/nvcc"])
    reason = why_not_loaded()
    assert reason.startswith(f"nvcc was found at {toolkit.home / 'bin/nvcc'} but does not run: ")
    assert re.search(words, reason), reason


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
        results.append(loader._load_cached())
    threads = [threading.Thread(target=process) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and toolkit.links() == 1


def test_the_object_reaches_the_disk_before_its_name_and_the_name_after_it(toolkit, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(handle):
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def recorded_replace(source, target):
        assert build.whole(Path(source))
        events.append("rename")
        replace(source, target)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    assert extension.load().loaded and events == ["file", "rename", "folder"]


def test_a_folder_that_cannot_be_synced_is_no_reason_to_go_without(toolkit, monkeypatch):
    fsync = os.fsync

    def refuse_folders(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)
    monkeypatch.setattr(os, "fsync", refuse_folders)
    assert extension.load().loaded


def test_a_sealed_object_is_still_one_for_the_loader(tmp_path):
    path = tmp_path / "object.so"
    shutil.copy(torch._C.__file__, path)
    assert not build.whole(path)
    build._seal(path)
    assert build.whole(path)
    ctypes.CDLL(str(path))


def test_a_failed_link_leaves_nothing_behind(toolkit, tmp_path):
    link = "*-ltorch_cuda*) echo half > \"$2\"; exit 1"
    script = FAKE_NVCC.replace("*-ltorch_cuda*) sleep 0.1", link + ";; *never*) sleep 0.1")
    (toolkit.home / "bin/nvcc").write_text(script)
    assert "-ltorch_cuda" in why_not_loaded()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_all_visible_devices_are_compiled_for(toolkit, monkeypatch):
    first = extension.load().path
    devices(monkeypatch, (9, 0), (8, 0), (6, 1), (9, 0))
    both = again().path
    assert both != first
    flags = toolkit.commands("-x cu -c")[-1]
    assert all(f"code={code}" in flags for code in ("sm_80", "sm_90", "compute_90"))
    assert not any(f"{kind}_61" in flags for kind in ("sm", "compute"))
    devices(monkeypatch, (8, 0), (9, 0))
    assert again().path == both and toolkit.links() == 2
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert again().path not in (first, both)
    assert "sm_86" in toolkit.commands("-x cu -c")[-1] and "sm_90" not in toolkit.commands("-x cu -c")[-1]


def test_no_device_that_the_kernels_are_for(toolkit, monkeypatch):
    devices(monkeypatch, (6, 1))
    assert why_not_loaded() == "no visible GPU has compute capability 7.0 or newer (visible: 6.1)"


def test_machines_of_two_kinds_share_a_home(toolkit, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    first = extension.load().path
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert again().path != first and toolkit.links() == 2


def test_the_toolkits_folder_is_that_of_this_machine(toolkit, monkeypatch):
    nvcc, torch_build = build.Nvcc.find(), build.Torch.imported()
    for machine, folder in (("x86_64", "x86_64-linux"), ("aarch64", "sbsa-linux")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        targets = [root.name for root in build._library_roots(nvcc, torch_build) if root.parent.name == "targets"]
        assert targets == [folder]


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


def test_why_an_object_compiled_ahead_of_time_is_not_taken(toolkit, tmp_path, monkeypatch):
    """Without a compiler, that reason is the helpful one."""
    ahead = tmp_path / "_C.so"
    monkeypatch.setattr(build, "_nvcc_candidates", lambda: [])
    ahead.write_bytes(b"an object")
    missing = "; and nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"
    assert why_not_loaded() == f"{ahead} lacks _C.so.sources beside it, which says what it was compiled from{missing}"
    build.digest_file(ahead).write_bytes(b"\xff")
    other_sources = f"{ahead} was compiled from other sources than those in {tmp_path / 'csrc'}"
    assert why_not_loaded() == other_sources + missing
    extension.load.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert extension.status().reason == f"no CUDA device; {other_sources}"
    build.record_sources(ahead, tmp_path / "csrc")
    assert extension.status().reason == "no CUDA device; _C.so is built"
    assert again() == extension.Status(True, ahead, None)
    ahead.write_bytes(b"foreign")
    reason = why_not_loaded()
    assert reason == f"_C.so does not load: Could not load this library: {ahead}: version GLIBC_9.9 not found{missing}"


def test_the_cause_stays_beside_the_error_where_the_extension_is_required(toolkit, monkeypatch):
    monkeypatch.setenv("GBMOE_REQUIRE_EXTENSION", "1")
    (toolkit.home / "fails").touch()
    with pytest.raises(RuntimeError, match="the CUDA extension is not available") as raised:
        extension.load()
    assert isinstance(raised.value.__cause__, build.CompileError)


def test_setup_compiles_and_notes_the_sources(toolkit, source_tree, tmp_path):
    program = ("import runpy, sys, torch; torch.version.cuda = '13.0'; sys.argv = ['setup.py', 'build_py', '-d', sys.argv[1]]; "
               "runpy.run_path('setup.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, cwd=source_tree)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "out" / "gbmoe" / "_C.so"
    assert build.whole(built)
    assert build.digest_file(built).read_text().strip() == build.source_digest(source_tree / "csrc")


# ------------------------------------------------------------------------------------------------------------ the package


@pytest.fixture
def source_tree(tmp_path):
    """A copy to build in, so that no build folder or compiled object of the checkout takes part."""
    tree = tmp_path / "tree"
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "gbmoe", "csrc"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    return tree


def build_wheel(tree, **environment):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tree / "out"), str(tree)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch builds the extension into the wheel")
def test_wheel_without_cuda_is_pure_and_carries_the_sources(source_tree):
    done = build_wheel(source_tree, CUDA_HOME="/nonexistent", PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    wheel, = (source_tree / "out").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"gbmoe/csrc/{path.relative_to(extension.source_folder())}" for path in SOURCES} <= set(names)
    assert not [n for n in names if n.endswith(".so") or n.startswith("tests")]
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.10"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch can build the extension")
def test_build_fails_where_the_extension_is_required_and_cannot_be(source_tree):
    done = build_wheel(source_tree, GBMOE_REQUIRE_EXTENSION="1")
    assert done.returncode != 0
    assert "GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension cannot be built: torch" in done.stderr + done.stdout


@pytest.mark.gpu
def test_built_once_at_first_use_and_then_taken_from_the_cache(source_tree, tmp_path):
    if build.Nvcc.find() is None:
        pytest.skip("nvcc was not found")
    program = "import torch, gbmoe; x = torch.ones(4, 8, device='cuda'); " \
              "print(gbmoe.gmm(x, torch.ones(1, 8, 8, device='cuda'), torch.tensor([4]), engine='cublas_loop').sum().item())"
    environment = {**os.environ, "GBMOE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(source_tree)}
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path)
            for _ in range(2)]
    assert [run.stdout for run in runs] == ["256.0\n", "256.0\n"], runs[0].stderr
    assert "compiling its CUDA extension, once, into" in runs[0].stderr and runs[1].stderr == ""
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


@pytest.mark.gpu
def test_the_extension_is_loaded_where_nvcc_is():
    if build.Nvcc.find() is None:
        pytest.skip("nvcc was not found")
    assert extension.status().reason is None
