"""setup.py: what an installation compiles, and what the package holds."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch

import gbmoe
from gbmoe import extension
from gbmoe.extension import build
from tests.extension.toolkit_of_paper import FAKE_NVCC

pytestmark = pytest.mark.slow

SOURCES = build.sources(extension.source_folder(), ["9.0"])


def test_setup_compiles_and_notes_the_sources(toolkit, source_tree, tmp_path):
    program = ("import runpy, sys, torch; torch.version.cuda = '13.0'; sys.argv = ['setup.py', 'build_py', '-d', sys.argv[1]]; "
               "runpy.run_path('setup.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, cwd=source_tree)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "out" / "gbmoe" / "_C.so"
    assert build.whole(built)
    sources = build.source_digest(source_tree / "csrc")
    assert build.read_facts(built) == build.Facts(sources, 13, ("7.5", "8.0", "8.6", "9.0+PTX", "12.0+PTX"))
    again = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, cwd=source_tree)
    assert again.returncode == 0 and "is up to date" in again.stdout and toolkit.links() == 1


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
    # gbmoe/compat/startup/ is no package, and was left out.
    assert {str(path.relative_to(source_tree)) for path in (source_tree / "gbmoe").rglob("*.py")} <= set(names)
    assert not [n for n in names if n.endswith(".so") or n.startswith("tests")]
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.10"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA torch can build the extension")
def test_build_fails_where_the_extension_is_required_and_cannot_be(source_tree):
    done = build_wheel(source_tree, GBMOE_REQUIRE_EXTENSION="1")
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert "the CUDA extension cannot be compiled: torch" in said and "(GBMOE_REQUIRE_EXTENSION=1 asks for it)" in said


TORCH = "import types; __version__ = '2.13.0'; version = types.SimpleNamespace(cuda='13.0')"


def test_a_cuda_torch_without_a_compiler_that_fits_ended_in_a_package_without_kernels(source_tree, tmp_path):
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text(TORCH)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC.replace("13.0", "12.8"))
    nvcc.chmod(0o755)
    environment = {"PYTHONPATH": str(tmp_path / "site"), "CUDA_HOME": str(tmp_path / "cuda"), "GBMOE_BUILD": ""}
    done = build_wheel(source_tree, **environment)
    said = done.stderr + done.stdout
    assert done.returncode != 0 and "nvcc is 12.8 but torch 2.13.0 is built for CUDA 13.0" in said and "remedy: install nvcc 13.x" in said
    done = build_wheel(source_tree, **environment | {"GBMOE_BUILD": "0"})
    assert done.returncode == 0, done.stderr
    assert [wheel.name for wheel in (source_tree / "out").iterdir()] == [f"gbmoe-{gbmoe.__version__}-py3-none-any.whl"]


def test_a_setuptools_that_is_too_old_failed_obscurely(source_tree):
    program = "import runpy, setuptools; setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=source_tree)
    assert done.returncode == 1 and done.stderr.endswith("remedy: pip install 'setuptools>=77' wheel\n")
