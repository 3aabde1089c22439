"""The wheel of a release: its description, its name, what scripts/check_wheel.py refuses, the workflow that builds it.

    pytest tests/test_wheel.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import gbmoe

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28_x86_64"
ARCHITECTURES = {"12": ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0+PTX"], "13": ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]}
METADATA = "Metadata-Version: 2.4\nName: gbmoe\nVersion: 0.2.0+cu13\n\nText with a [link](https://example.org/x).\n"


def script(name: str):
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


description = script("description")
check_wheel = script("check_wheel")


def test_a_description_without_a_repository_has_no_dead_links():
    text = description.description("See [the `x` page](docs/x.md#part), [torch](https://pytorch.org), [below](#below).\n"
                                   "![a curve](results/curve.svg)\n", "1.0", repository="")
    assert text == ("See the `x` page, [torch](https://pytorch.org), below.\n*In the repository, a picture: a curve.*\n")


def test_a_description_with_a_repository_has_absolute_links_to_the_files_of_its_version():
    text = description.description("[page](docs/x.md#part) ![curve](results/curve.svg)", "1.0", repository="https://example.org/gbmoe")
    assert text == ("[page](https://example.org/gbmoe/blob/v1.0/docs/x.md#part)"
                    " ![curve](https://example.org/gbmoe/raw/v1.0/results/curve.svg)")


@pytest.mark.parametrize("code", ["```python\nops[0](x)  # [page](docs/x.md)\n```\n", "call `ops[0](x)` twice"])
def test_a_description_keeps_code(code):
    assert description.description(code, "1.0", repository="") == code


def test_the_description_of_the_readme_has_no_dead_links():
    text = description.of_checkout(ROOT)
    without_code = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=\"([^\"]*)\"", without_code, re.MULTILINE)
    assert [target for found in targets for target in found if target and not target.startswith("https://")] == []
    assert text.startswith("# gbmoe\n")


def test_the_package_uses_that_description_and_the_version_of_one_file(tmp_path):
    tree = tmp_path / "tree"
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    for name in ("gbmoe", "csrc", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    # -S: torch, whose import takes seconds, is not found; -I: nor is the checkout.
    write = ("import os, sys; sys.path[:0] = eval(sys.argv[1]); os.chdir(sys.argv[2]); import setuptools.build_meta as backend;"
             " print(backend.prepare_metadata_for_build_wheel(sys.argv[3]))")
    site = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "out").mkdir()
    for part in [*site.glob("setuptools"), *site.glob("setuptools-*"), *site.glob("_distutils_hack")]:
        (alone / part.name).symlink_to(part)
    made = subprocess.run([sys.executable, "-I", "-S", "-c", write, repr([str(alone)]), str(tree), str(tmp_path / "out")],
                          capture_output=True, text=True, env={**os.environ, "GBMOE_BUILD": "0"})
    assert made.returncode == 0, made.stderr
    metadata = (tmp_path / "out" / made.stdout.splitlines()[-1] / "METADATA").read_text()
    assert check_wheel.wrong_metadata(metadata, gbmoe.__version__.partition("+")[0]) == []
    assert metadata.partition("\n\n")[2].strip() == description.of_checkout(ROOT).strip()
    assert "\nDescription-Content-Type: text/markdown\n" in metadata


def test_the_sdist_has_what_setup_py_runs():
    assert "include scripts/description.py" in (ROOT / "MANIFEST.in").read_text().splitlines()


@pytest.mark.parametrize("name", [f"gbmoe-0.2.0+cu13-py3-none-{PLATFORM}.whl", f"gbmoe-1.0rc1+cu12-py3-none-{PLATFORM}.whl",
                                  f"gbmoe-0.2.0+cu13-py3-none-manylinux_2_27_x86_64.{PLATFORM}.whl"])
def test_names_of_releases(name):
    assert check_wheel.wrong_name(Path(name), PLATFORM) == []


@pytest.mark.parametrize("name", [f"gbmoe-0.2.0-py3-none-{PLATFORM}.whl", "gbmoe-0.2.0+cu13-py3-none-linux_x86_64.whl",
                                  f"gbmoe-0.2.0+cu13-cp312-cp312-{PLATFORM}.whl", f"gbmoe-0.2.0+cu11-py3-none-{PLATFORM}.whl"])
def test_a_name_without_cuda_or_for_one_python_or_any_linux_is_refused(name):
    assert len(check_wheel.wrong_name(Path(name), PLATFORM)) == 1


@pytest.mark.parametrize("made", ["missing", "folder", "empty", "text", "cut", "without METADATA", "another library", "another name"])
def test_what_is_no_wheel_ended_in_a_traceback(made, tmp_path, monkeypatch, capsys):
    wheel = tmp_path / (f"gbmoe-0.2.0+cu13-py3-none-{PLATFORM}.whl" if made != "another name" else "a\nb")
    if made == "folder":
        wheel.mkdir()
    elif made in ("empty", "text", "another name"):
        wheel.write_text("" if made == "empty" else "no wheel")
    elif made != "missing":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("gbmoe/_C.so", "no library")
            if made != "without METADATA":
                archive.writestr("gbmoe.dist-info/METADATA", "Version: 0.2.0+cu13\n\ngbmoe")
        if made == "cut":
            wheel.write_bytes(wheel.read_bytes()[:-30])
    monkeypatch.setattr(sys, "argv", ["check_wheel.py", str(wheel)])
    assert check_wheel.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check_wheel.py: ") and "expected" in line


def test_a_wheel_over_100_megabytes_is_refused():
    assert check_wheel.wrong_size(100_000_000) == []
    assert check_wheel.wrong_size(100_000_001) == ["expected at most 100 MB, got 100.0 MB"]


def test_libraries_other_than_torch_and_cublas_are_refused():
    needed = ["libtorch_cuda.so", "libtorch_cpu.so", "libc10.so", "libcublas.so.13", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6",
              "ld-linux-x86-64.so.2"]
    assert check_wheel.wrong_libraries(needed, "13") == []
    assert check_wheel.wrong_libraries([*needed, "libcuda.so.1"], "13") == ["the extension needs libcuda.so.1, which not every system has"]
    assert len(check_wheel.wrong_libraries(needed, "12")) == 1  # it was linked with the cuBLAS of another CUDA


@pytest.mark.parametrize("symbol", ["_ZN3c104cuda20CUDACachingAllocator9allocatorE", "_ZNK2at10TensorBase4sizeEl",
                                    "_ZN5torch7Library4_defEv", "_ZTIN3c105ErrorE", "PyObject_Call"])
def test_functions_of_torchs_cpp_and_of_python_are_refused(symbol):
    assert check_wheel.wrong_symbols(["aoti_torch_get_dim", symbol, "malloc@GLIBC_2.2.5"], PLATFORM) == \
        [f"{symbol} is not in torch's stable ABI"]


def test_symbols_of_a_newer_glibc_are_refused():
    undefined = ["memcpy@GLIBC_2.14", "fcntl64@GLIBC_2.28", "dlsym@GLIBC_2.34", "__libc_single_threaded@GLIBC_2.32"]
    assert check_wheel.wrong_symbols(undefined, PLATFORM) == \
        ["dlsym@GLIBC_2.34 is not in glibc 2.28", "__libc_single_threaded@GLIBC_2.32 is not in glibc 2.28"]
    assert check_wheel.wrong_symbols(undefined, "linux_x86_64") == []


def test_metadata_with_another_version_or_dead_links_is_refused():
    assert check_wheel.wrong_metadata(METADATA, "0.2.0+cu13") == []
    assert check_wheel.wrong_metadata(METADATA, "0.2.0+cu12") == ["METADATA: expected Version: 0.2.0+cu12"]
    assert len(check_wheel.wrong_metadata(METADATA + "[page](docs/x.md)\n", "0.2.0+cu13")) == 1
    assert check_wheel.wrong_metadata(METADATA.partition("\n\n")[0] + "\n\n", "0.2.0+cu13") == ["METADATA: there is no description"]


@pytest.mark.parametrize("major", ARCHITECTURES)
def test_the_script_and_the_page_name_the_architectures_of_a_wheel(major):
    text = (ROOT / "scripts" / "wheel.sh").read_text()
    assert f'{major}) architectures="{";".join(ARCHITECTURES[major])}"' in text
    page = (ROOT / "docs" / "install.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `+cu{major}`"))
    assert ", ".join(part.removesuffix("+PTX") for part in ARCHITECTURES[major]) in row


def test_the_version_is_marked_in_the_wheel_alone(tmp_path):
    """What scripts/wheel.sh does to its copy of gbmoe/_version.py."""
    command = re.search(r"sed -i -E (\"s/\^\(__version__.*\") ", (ROOT / "scripts" / "wheel.sh").read_text())[1]
    copy = tmp_path / "_version.py"
    shutil.copy(ROOT / "gbmoe" / "_version.py", copy)
    subprocess.run(["bash", "-c", f"major=13; sed -i -E {command} {copy}"], check=True)
    assert copy.read_text() == f'__version__ = "{gbmoe.__version__}+cu13"\n'


def test_the_workflow_builds_both_wheels_with_the_script():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    job = workflow["jobs"]["wheel"]
    assert job["container"] == "${{ vars.MANYLINUX_IMAGE }}"
    assert {row["cuda"].split(".")[0] for row in job["strategy"]["matrix"]["include"]} == set(ARCHITECTURES)
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert any("scripts/wheel.sh" in command for command in commands)
    assert any("--load" in command for command in commands)
    assert workflow[True]["push"]["tags"] == ["v*"]  # YAML reads the key `on` as true


def test_the_recipe_of_spack_compiles():
    path = ROOT / "packaging" / "spack" / "package.py"
    compile(path.read_text(), str(path), "exec")
