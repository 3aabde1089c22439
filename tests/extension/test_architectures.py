"""architectures.py: what is compiled for which GPUs, and which GPUs an object serves."""

from pathlib import Path

import pytest

from gbmoe.extension import build
from gbmoe.extension.architectures import Service, serves_all, service


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


@pytest.mark.parametrize("built, device, served", [
    (["9.0"], "9.0", Service.EXACT), (["9.0a"], "9.0", Service.EXACT), (["8.0", "9.0+PTX"], "9.0", Service.EXACT),
    (["8.0"], "8.6", Service.SAME_GENERATION), (["8.0+PTX"], "8.9", Service.SAME_GENERATION), (["10.0f"], "10.3", Service.SAME_GENERATION),
    (["8.0+PTX"], "9.0", Service.PTX), (["9.0+PTX"], "12.0", Service.PTX),
    (["8.0"], "9.0", None), (["8.6"], "8.0", None), (["9.0+PTX"], "8.0", None),
    (["9.0a+PTX"], "10.0", None), (["10.0a"], "10.3", None), (["10.0f+PTX"], "12.0", None), ([], "9.0", None)])
def test_an_object_serves_a_device_by_code_of_its_generation_or_by_ptx_of_an_older_one(built, device, served):
    assert service(built, device) == served


def test_an_object_serves_several_devices_as_well_as_the_one_that_it_serves_worst():
    assert serves_all(["8.0+PTX"], ["8.0", "8.6"]) == Service.SAME_GENERATION
    assert serves_all(["8.0+PTX"], ["8.0", "9.0"]) == Service.PTX
    assert serves_all(["8.0", "9.0"], ["8.0", "12.0"]) is None
