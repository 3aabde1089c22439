"""loader.py: which object is loaded, and what is said where there is none."""

import os
import subprocess
import sys

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build, loader
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
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert again().path not in (first, both)
    assert "sm_86" in toolkit.commands("-x cu -c")[-1] and "sm_90" not in toolkit.commands("-x cu -c")[-1]


def test_no_device_that_the_kernels_are_for(toolkit, monkeypatch):
    devices(monkeypatch, (6, 1))
    assert why_not_loaded() == "no visible GPU has compute capability 7.0 or newer (visible: 6.1)"


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
