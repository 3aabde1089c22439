"""toolkit.py: which nvcc is found, whether it fits torch, and what is said where it does not."""

import os
import re
import sys
from pathlib import Path

import pytest

from gbmoe.extension import toolkit as toolkit_module
from gbmoe.extension.toolkit import Nvcc, Torch, way_out, why_not
from tests.extension.toolkit_of_paper import why_not_loaded


def test_a_toolkit_whose_path_is_no_utf8_is_found(toolkit, tmp_path, monkeypatch):
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    os.rename(toolkit.home, home)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert Nvcc.find().path == home / "bin/nvcc"


@pytest.mark.parametrize("script, words", [
    ("exit 3", "does not run: .*--version"), (None, "Exec format"),
    ("echo no compiler", "expected 'release' and a version, got 'no compiler'")])
def test_an_nvcc_that_does_not_run_is_not_said_to_be_missing(toolkit, monkeypatch, script, words):
    (toolkit.home / "bin/nvcc").write_bytes(b"\0" if script is None else f"#!/bin/sh\n{script}\n".encode())
    monkeypatch.setattr(toolkit_module, "_nvcc_candidates", lambda: [Path("/nonexistent/nvcc"), toolkit.home / "bin/nvcc"])
    reason = why_not_loaded()
    assert reason.startswith(f"nvcc was found at {toolkit.home / 'bin/nvcc'} but does not run: ")
    assert re.search(words, reason), reason


def test_why_not():
    torch_cpu, torch_13 = Torch(Path(), None, "2.13.0+cpu"), Torch(Path(), "13.0", "2.13.0")
    nvcc = Nvcc(Path("nvcc"), (12, 4), frozenset({"90"}))
    assert why_not(nvcc, Torch(Path(), "12.8", "2.10.0")) == "nvcc is 12.4; cuBLAS has grouped GEMMs from CUDA 12.5 on"
    assert why_not(nvcc, None) == "torch is not importable"
    assert why_not(nvcc, torch_cpu) == "torch 2.13.0+cpu is built without CUDA"
    assert why_not(None, torch_13).startswith("nvcc was not found")
    assert why_not(nvcc, torch_13) == "nvcc is 12.4 but torch 2.13.0 is built for CUDA 13.0"
    assert why_not(Nvcc(Path("nvcc"), (13, 1), frozenset()), torch_13) is None
    assert way_out(torch_13).startswith("install nvcc 13.x")


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_on_other_systems_than_linux_nothing_is_compiled(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    torch_13, nvcc = Torch(Path(), "13.0", "2.13.0"), Nvcc(Path("nvcc"), (13, 0), frozenset({"90"}))
    assert why_not(nvcc, torch_13) == f"the kernels are compiled on Linux only, not on {platform}"
    assert "everything runs through PyTorch" in way_out(torch_13)
