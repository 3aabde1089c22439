"""build.py: the architectures asked for are the ones compiled for, and a build leaves a whole object or nothing."""

import ctypes
import errno
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build
from tests.extension.toolkit_of_paper import FAKE_NVCC, why_not_loaded

ROOT = Path(__file__).parent.parent.parent


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


def test_the_toolkits_folder_is_that_of_this_machine(toolkit, monkeypatch):
    nvcc, torch_build = build.Nvcc.find(), build.Torch.imported()
    for machine, folder in (("x86_64", "x86_64-linux"), ("aarch64", "sbsa-linux")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        targets = [root.name for root in build._library_roots(nvcc, torch_build) if root.parent.name == "targets"]
        assert targets == [folder]
