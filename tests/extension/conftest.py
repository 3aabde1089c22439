"""Fixtures: a machine with a GPU and a toolkit that only pretend, and a copy of the checkout to build in."""

import shutil
from pathlib import Path

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build, loader
from tests.extension.toolkit_of_paper import Toolkit, devices

ROOT = Path(__file__).parent.parent.parent


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
    for name in ("TORCH_CUDA_ARCH_LIST", "GBMOE_REQUIRE_EXTENSION", "GBMOE_BUILD", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    extension.load.cache_clear()
    yield toolkit
    extension.load.cache_clear()


@pytest.fixture
def source_tree(tmp_path):
    """A copy to build in, so that no build folder or compiled object of the checkout takes part."""
    tree = tmp_path / "tree"
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "gbmoe", "csrc", "scripts/description.py"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tree / name)
    return tree
