"""build.py: the architectures asked for are the ones compiled for, and a build leaves a whole object or nothing."""

import ctypes
import errno
import os
import platform
import shutil
from pathlib import Path

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build
from tests.extension.toolkit_of_paper import FAKE_NVCC, devices, why_not_loaded

ROOT = Path(__file__).parent.parent.parent


def test_files_of_one_name_in_two_folders_had_one_object(toolkit):
    folder = build.source_folder()
    (folder / "hopper").mkdir()
    (folder / "hopper" / "one.cu").write_text("// another")
    assert extension.load().loaded
    objects = [word for word in toolkit.commands("-ltorch_cuda")[0].split() if word.endswith(".o")]
    assert len(set(objects)) == 2


@pytest.mark.parametrize("architectures, compiled", [("8.0 12.0", []), ("8.0 9.0", ["arch=compute_90a,code=sm_90a"])])
def test_files_of_hopper_were_compiled_without_its_kernels_for_other_gpus(toolkit, monkeypatch, architectures, compiled):
    (build.source_folder() / "hopper").mkdir()
    (build.source_folder() / "hopper" / "two.cu").write_text("// sm_90a alone")
    devices(monkeypatch, (8, 0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
    assert extension.load().loaded
    commands = toolkit.commands("hopper/two.cu")
    assert [word.removeprefix("-gencode=") for command in commands for word in command.split() if "gencode" in word] == compiled


def test_bytes_of_nvcc_that_are_no_utf8_are_read_and_shown(toolkit):
    script = FAKE_NVCC.replace("V13.0.88", "V13.0.88, \\351dition").replace("#$ TOP", "\\351\\n#$ TOP")
    (toolkit.home / "bin/nvcc").write_text(script.replace("echo 'no space'", "printf 'cr\\351ation impossible'"))
    assert build.Nvcc.find().path == toolkit.home / "bin/nvcc"
    assert extension.load().loaded
    (toolkit.home / "fails").touch()
    (toolkit.home.parent / "csrc" / "one.cu").write_text("// another")
    reason = why_not_loaded()
    assert reason.startswith(str(toolkit.home / "bin/nvcc")) and "cr\ufffdation impossible" in reason


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


def test_the_time_that_is_said_beforehand_follows_architectures_jobs_and_load(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    folder = extension.source_folder()
    one, two = build.estimate(folder, ["9.0"], 1), build.estimate(folder, ["8.0", "9.0"], 1)
    assert one < two < 2 * one  # the kernels of hopper/ are compiled once
    assert build.estimate(folder, ["8.0"], 1) < one
    assert build.estimate(folder, ["9.0"], 4) < one / 3
    monkeypatch.setattr(os, "getloadavg", lambda: (31.0, 0.0, 0.0))
    assert build.estimate(folder, ["9.0"], 1) == 2 * one
