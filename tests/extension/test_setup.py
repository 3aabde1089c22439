"""setup.py: what an installation compiles, and what the package holds."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch

from gbmoe import extension
from gbmoe.extension import build

SOURCES = build.sources(extension.source_folder())


def test_setup_compiles_and_notes_the_sources(toolkit, source_tree, tmp_path):
    program = ("import runpy, sys, torch; torch.version.cuda = '13.0'; sys.argv = ['setup.py', 'build_py', '-d', sys.argv[1]]; "
               "runpy.run_path('setup.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, cwd=source_tree)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "out" / "gbmoe" / "_C.so"
    assert build.whole(built)
    assert build.digest_file(built).read_text().strip() == build.source_digest(source_tree / "csrc")


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
