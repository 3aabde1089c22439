"""loader.py: which object is loaded, and what is said where there is none."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build, cache, loader
from tests.extension.toolkit_of_paper import again, devices, why_not_loaded


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


def test_compiled_once_and_then_loaded_from_the_cache(toolkit):
    first = extension.load()
    assert first.loaded and first.reason is None
    assert again() == first and toolkit.links() == 1
    assert first.path.stat().st_mode & 0o777 == 0o755
    assert sorted(path.suffix for path in first.path.parent.iterdir()) == [".lock", ".so"]


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
    both.unlink()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;8.6;9.0")
    assert again().path not in (first, both)
    assert "sm_86" in toolkit.commands("-x cu -c")[-1] and "compute_90,code=compute_90" not in toolkit.commands("-x cu -c")[-1]


def test_no_device_that_the_kernels_are_for(toolkit, monkeypatch):
    devices(monkeypatch, (6, 1))
    assert why_not_loaded() == "no visible GPU has compute capability 7.0 or newer (visible: 6.1)"


def test_why_an_object_compiled_ahead_of_time_is_not_taken(toolkit, tmp_path, monkeypatch):
    """Without a compiler, that reason is the helpful one."""
    ahead = tmp_path / "_C.so"
    without_nvcc(monkeypatch)
    ahead.write_bytes(b"an object")
    missing = "; and nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"
    assert why_not_loaded() == f"{ahead} lacks _C.so.json next to it, which says what it was compiled from{missing}"
    build.facts_file(ahead).write_text('{"sources": "0", "cuda_major": 13, "architectures": ["9.0"]}')
    other_sources = f"{ahead} was compiled from other sources than those in {tmp_path / 'csrc'}"
    assert why_not_loaded() == other_sources + missing
    extension.load.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.fullmatch(f"no CUDA device: .*; {other_sources}", extension.status().reason)
    record(ahead, cuda_major=12)
    assert why_not_loaded() == f"{ahead} was compiled for CUDA 12; torch 2.13.0 is built for CUDA 13.0{missing}"
    record(ahead)
    extension.load.cache_clear()
    assert re.fullmatch(f"no CUDA device: .*; {ahead} is built for 9.0", extension.status().reason)
    assert again() == extension.Status(True, ahead, None, architectures=("9.0",))
    ahead.write_bytes(b"foreign")
    reason = why_not_loaded()
    assert reason == f"_C.so does not load: Could not load this library: {ahead}: version GLIBC_9.9 not found{missing}"


def test_the_cause_stays_beside_the_error_where_the_extension_is_required(toolkit, monkeypatch):
    monkeypatch.setenv("GBMOE_REQUIRE_EXTENSION", "1")
    (toolkit.home / "fails").touch()
    with pytest.raises(RuntimeError, match="the CUDA extension is not available") as raised:
        extension.load()
    assert isinstance(raised.value.__cause__, build.CompileError)


def record(path, *built, cuda_major=13):
    """Note that the object at `path` was compiled from the current sources."""
    build.record_facts(path, build.Facts(build.source_digest(build.source_folder()), cuda_major, built or ("9.0",)))


def without_nvcc(monkeypatch):
    """As on a compute node that has a driver alone."""
    monkeypatch.setattr("gbmoe.extension.toolkit._nvcc_candidates", lambda: [])


def in_the_cache(tmp_path, *built):
    """An object in the cache, compiled for these architectures on another node."""
    path = cache.path_for(13, list(built))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"an object")
    build._seal(path)
    return path


def test_a_node_without_nvcc_loads_what_another_one_has_compiled(toolkit, tmp_path, monkeypatch):
    path = extension.load().path
    without_nvcc(monkeypatch)
    assert again() == extension.Status(True, path, None, architectures=("9.0+PTX",)) and toolkit.links() == 1
    monkeypatch.setattr(build.Torch, "imported", lambda: build.Torch(Path(), "13.2", "2.15.0"))  # a later torch
    assert again().path == path
    monkeypatch.setattr(build.Torch, "imported", lambda: build.Torch(Path(), "12.8", "2.13.0"))  # another CUDA
    assert why_not_loaded().startswith("nvcc was not found")


def test_an_nvcc_of_another_minor_version_compiles_nothing_again(toolkit):
    path = extension.load().path
    (toolkit.home / "bin/nvcc").write_text((toolkit.home / "bin/nvcc").read_text().replace("release 13.0", "release 13.2"))
    assert again().path == path and toolkit.links() == 1


def test_an_object_with_code_of_the_device_comes_before_others(toolkit, tmp_path, monkeypatch):
    devices(monkeypatch, (8, 6))
    older, exact = in_the_cache(tmp_path, "8.0"), in_the_cache(tmp_path, "8.0", "8.6", "9.0")
    assert again().path == exact
    exact.unlink()
    assert again().path == older and toolkit.links() == 0


def test_an_object_without_code_for_the_device_is_refused_with_the_remedy(toolkit, tmp_path, monkeypatch):
    """Before, its first kernel failed with "no kernel image is available"."""
    ahead = tmp_path / "_C.so"
    ahead.write_bytes(b"an object")
    record(ahead, "8.0")
    without_nvcc(monkeypatch)
    assert why_not_loaded() == (f"{ahead} has code for 8.0 and none for each visible GPU (9.0)"
                                "; and nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)")
    assert "python -m gbmoe build --arch 9.0" in extension.status().remedy and toolkit.loaded == []
    devices(monkeypatch, (8, 0), (9, 0))  # it would fail on the second one
    assert not again().loaded and "CUDA_VISIBLE_DEVICES" in extension.status().remedy
    devices(monkeypatch, (8, 0), (8, 6))
    assert again().loaded


def test_ptx_of_an_older_generation_is_taken_only_where_nothing_can_be_compiled_and_that_is_said(toolkit, tmp_path, monkeypatch, capsys):
    older = in_the_cache(tmp_path, "8.0+PTX")
    assert again().architectures == ("9.0+PTX",)
    extension.load().path.unlink()
    without_nvcc(monkeypatch)
    status = again()
    assert status.path == older and "without Hopper's kernels" in status.note and "gbmoe build --arch 9.0" in status.note
    assert status.note in capsys.readouterr().err


def test_a_list_of_architectures_that_leaves_out_the_gpu_is_refused(toolkit, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert why_not_loaded() == "TORCH_CUDA_ARCH_LIST (8.6) leaves out a visible GPU (9.0)" and toolkit.links() == 0


def test_objects_of_earlier_versions_are_ignored(toolkit, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    for name in ("gbmoe_C-0123456789abcdef.so", cache.path_for(13, ["9.0"]).name.replace("9.0", "fast"), "gbmoe_C-.so"):
        (tmp_path / "cache" / name).write_bytes(b"an object")
    assert cache.compiled(13) == [] and again().loaded and toolkit.links() == 1


def test_a_first_use_says_how_long_it_takes(toolkit, capsys):
    extension.load()
    said = capsys.readouterr().err
    assert re.search(r"for 9\.0\+PTX: about \d+ (s|minutes) with \d+ jobs? \(", said) and "compiled for 9.0+PTX in" in said


def test_without_cuda_in_torch_that_is_the_reason(toolkit, monkeypatch):
    monkeypatch.setattr(build.Torch, "imported", lambda: build.Torch(Path(), None, "2.13.0+cpu"))
    assert why_not_loaded().endswith("is built without CUDA")
    extension.load.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert extension.status().reason == "no CUDA device: torch 2.13.0+cpu is built without CUDA" and extension.status().remedy


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
