"""install.py: what an installation does, and what it says where it cannot."""

import os
from pathlib import Path

import pytest

from gbmoe.extension import install
from gbmoe.extension.install import Action
from gbmoe.extension.toolkit import Nvcc, Torch

CUDA, CPU, ISOLATED = Torch(Path(), "13.0", "2.13.0"), Torch(Path(), None, "2.13.0+cpu"), None
FITS, OTHER = Nvcc(Path("nvcc"), (13, 1), frozenset({"90"})), Nvcc(Path("nvcc"), (12, 8), frozenset({"90"}))
COMPILE, PURE, REFUSE = Action.COMPILE, Action.PURE, Action.REFUSE


# Columns: GBMOE_BUILD unset, 1 and 0.
@pytest.mark.parametrize("torch, nvcc, unset, one, zero", [
    (ISOLATED, FITS, PURE, REFUSE, PURE), (ISOLATED, None, PURE, REFUSE, PURE), (ISOLATED, OTHER, PURE, REFUSE, PURE),
    (CUDA, FITS, COMPILE, COMPILE, PURE), (CUDA, None, REFUSE, REFUSE, PURE), (CUDA, OTHER, REFUSE, REFUSE, PURE),
    (CPU, FITS, PURE, REFUSE, PURE), (CPU, None, PURE, REFUSE, PURE), (CPU, OTHER, PURE, REFUSE, PURE)])
def test_an_installation_compiles_leaves_out_or_refuses_and_never_fails_in_silence(torch, nvcc, unset, one, zero):
    for environment, action in (({}, unset), ({"GBMOE_BUILD": "1"}, one), ({"GBMOE_BUILD": "0"}, zero),
                                ({"GBMOE_REQUIRE_EXTENSION": "1"}, one)):
        decision = install.decide(environment, torch, nvcc, "linux")
        assert decision.action == action, environment
        if action == REFUSE:
            assert decision.reason and decision.remedy and "\n  remedy: " in str(decision)
    decision = install.decide({"GBMOE_BUILD": "0", "GBMOE_REQUIRE_EXTENSION": "1"}, torch, nvcc, "linux")
    assert decision.action == PURE


def test_the_remedies_name_what_to_do():
    assert "--no-build-isolation" in install.decide({"GBMOE_BUILD": "1"}, None, FITS).remedy
    another = install.decide({}, CUDA, OTHER, "linux")
    assert another.reason == "nvcc is 12.8 but torch 2.13.0 is built for CUDA 13.0"
    assert "install nvcc 13.x" in another.remedy and "GBMOE_BUILD=0" in another.remedy
    assert "unset GBMOE_BUILD" in install.decide({"GBMOE_BUILD": "1"}, CPU, FITS, "linux").remedy


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_another_value_of_gbmoe_build_is_an_error(value):
    decision = install.decide({"GBMOE_BUILD": value}, CPU, None)
    assert decision.action == REFUSE and decision.reason == f"GBMOE_BUILD: expected 0 or 1, got {value!r}"


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_where_nothing_can_ever_be_compiled_gbmoe_is_installed_without_kernels(monkeypatch, platform):
    monkeypatch.setattr("sys.platform", platform)
    assert install.decide({}, CUDA, None, platform).action == PURE
    assert install.decide({"GBMOE_BUILD": "1"}, CUDA, None, platform).action == REFUSE


@pytest.mark.parametrize("version, fits", [("77.0.3", True), ("84.2.1", True), ("77", True), ("76.1.0", False), ("65.5.0", False)])
def test_a_setuptools_that_is_too_old_is_named(version, fits):
    assert (install.too_old(version) is None) == fits
    assert fits or f"setuptools {version} is too old" in install.too_old(version)


def test_a_torch_that_cannot_be_imported_is_an_error_and_not_a_pure_package(monkeypatch):
    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file")
    monkeypatch.setattr(Torch, "imported", broken)
    for name in ("GBMOE_BUILD", "GBMOE_REQUIRE_EXTENSION"):
        monkeypatch.delenv(name, raising=False)
    decision = install.decide_here()
    assert decision.action == REFUSE and "cannot be imported: libcudart.so.13" in decision.reason
    monkeypatch.setitem(os.environ, "GBMOE_BUILD", "0")
    assert install.decide_here().action == PURE


def test_what_will_happen_is_said_in_one_line_and_a_refusal_is_a_status(toolkit, monkeypatch, capsys):
    assert install.main() == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "compiling the CUDA extension with nvcc 13.0 for 7.5" in line and "about" in line
    (toolkit.home / "bin/nvcc").write_text("#!/bin/sh\nexit 3\n")
    monkeypatch.setattr("gbmoe.extension.toolkit._nvcc_candidates", lambda: [toolkit.home / "bin/nvcc"])
    assert install.main() == 1
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "does not run" in line and "CUDA_HOME" in line
