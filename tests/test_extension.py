"""The extension: every file compiles, the architectures asked for are the ones compiled for, absence is said and can be refused."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from gbmoe import _compile, extension

ROOT = Path(__file__).parent.parent
SOURCES = _compile.sources(extension.source_folder())


@pytest.fixture(scope="module")
def nvcc():
    found = _compile.Nvcc.find()
    if found is None:
        # CI has nvcc and says so, so that this cannot pass there by skipping.
        assert os.environ.get("GBMOE_TEST_REQUIRE_NVCC") != "1", "GBMOE_TEST_REQUIRE_NVCC=1, but nvcc was not found"
        pytest.skip("nvcc was not found")
    return found


def cuda_torch(nvcc):
    """This torch's headers; a CPU build has the same ones."""
    return _compile.Torch(Path(torch.__file__).parent, f"{nvcc.version[0]}.{nvcc.version[1]}", torch.__version__)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_file_compiles_and_uses_no_python_api(nvcc, source, tmp_path):
    torch_build = cuda_torch(nvcc)
    try:
        _compile.include_flags(nvcc, torch_build)
    except _compile.CompileError as error:
        assert os.environ.get("GBMOE_TEST_REQUIRE_NVCC") != "1", str(error)
        pytest.skip(str(error))
    known = [a for a in _compile.DEFAULT_ARCHITECTURES if a.replace(".", "") in nvcc.codes]
    output = tmp_path / "unit.o"
    _compile.compile_unit(nvcc, torch_build, [known[0], "9.0"], source, output)
    undefined = subprocess.run(["nm", "-u", str(output)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-1] for line in undefined.splitlines()]
    assert symbols and not [s for s in symbols if s.startswith(("Py", "_Py"))]
    # The stable ABI is C: a C++ symbol of torch's would tie the object to one release.
    assert not [s for s in symbols if s.startswith(("_ZN2at", "_ZN3c10", "_ZN5torch", "_ZNK2at", "_ZNK3c10"))]


def test_the_default_architectures_are_those_that_nvcc_knows(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    new = _compile.Nvcc(Path("nvcc"), (13, 0), frozenset({"75", "80", "86", "89", "90", "100", "120"}))
    assert _compile.architectures(new) == ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0+PTX"]
    old = _compile.Nvcc(Path("nvcc"), (12, 4), frozenset({"70", "75", "80", "86", "89", "90", "90a"}))
    assert _compile.architectures(old) == ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0+PTX"]


@pytest.mark.parametrize("asked, got", [
    ("9.0", ["9.0"]), ("8.0;9.0+PTX", ["8.0", "9.0+PTX"]), ("8.0 9.0a", ["8.0", "9.0a"]), ("Hopper", ["9.0+PTX"]),
    ("Ampere,9.0", ["8.0", "8.6+PTX", "9.0"])])
def test_torch_cuda_arch_list_is_honoured(monkeypatch, asked, got):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    nvcc = _compile.Nvcc(Path("nvcc"), (13, 0), frozenset({"75", "80", "86", "89", "90", "100"}))
    assert _compile.architectures(nvcc) == got


@pytest.mark.parametrize("asked, words", [("7.0", "cannot compile for 7.0; it knows 75, 80"), ("fast", "expected entries such as 8.0")])
def test_architectures_that_cannot_be_are_refused(monkeypatch, asked, words):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    with pytest.raises(_compile.CompileError, match=words):
        _compile.architectures(_compile.Nvcc(Path("nvcc"), (13, 0), frozenset({"75", "80"})))


# Builds with a compiler that does not end, on any machine; SIGTERM raises SystemExit, as it does in `gbmoe convert`.
ENDLESS_BUILD = """
import pathlib, signal, sys
from gbmoe import _compile
home = pathlib.Path(sys.argv[1])
_compile.why_not = lambda nvcc, torch: None
_compile._library_roots = lambda nvcc, torch: [home]
_compile.compile_flags = lambda nvcc, torch, chosen: []
_compile.Nvcc.find = classmethod(lambda cls: cls(home / "nvcc", (13, 0), frozenset({"90"})))
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
_compile.build(home / "sources", home / "out" / "object.so", ("9.0",))
"""
# Starts a pass that outlives it, as nvcc does.
ENDLESS_NVCC = """#!/usr/bin/env bash
mktemp >/dev/null
bash -c 'echo $$ >"$1/pids/$$"; sleep 600' pass "{home}"
"""


def test_a_build_that_is_interrupted_ends_its_compilers_and_leaves_no_files(tmp_path):
    for name in ("lib64/libcublas.so.13", *(f"sources/{i}.cu" for i in range(2 * os.cpu_count())), "pids/", "temporary/"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    (tmp_path / "nvcc").write_text(ENDLESS_NVCC.format(home=tmp_path))
    (tmp_path / "nvcc").chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", ENDLESS_BUILD, str(tmp_path)], env=environment)
    try:
        while len(list((tmp_path / "pids").iterdir())) < os.cpu_count() and process.poll() is None:
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        started = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in started}
        alive = [pid for pid, command in commands.items() if command.exists() and command.read_bytes()]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
    assert alive == [] and len(started) == os.cpu_count()  # none was begun after the signal
    assert list((tmp_path / "temporary").iterdir()) == [] and list((tmp_path / "out").iterdir()) == []


def test_why_not():
    nvcc = _compile.Nvcc(Path("nvcc"), (12, 4), frozenset({"90"}))
    torch_cpu, torch_13 = _compile.Torch(Path(), None, "2.13.0+cpu"), _compile.Torch(Path(), "13.0", "2.13.0")
    old = _compile.Nvcc(Path("nvcc"), (12, 4), frozenset())
    assert _compile.why_not(old, _compile.Torch(Path(), "12.8", "2.10.0")) == "nvcc is 12.4; cuBLAS has grouped products from CUDA 12.5 on"
    assert _compile.why_not(nvcc, None) == "torch is not importable"
    assert _compile.why_not(nvcc, torch_cpu) == "torch 2.13.0+cpu is built without CUDA"
    assert _compile.why_not(None, torch_13).startswith("nvcc was not found")
    assert _compile.why_not(nvcc, torch_13) == "nvcc is 12.4 but torch 2.13.0 is built for CUDA 13.0"
    assert _compile.why_not(_compile.Nvcc(Path("nvcc"), (13, 1), frozenset()), torch_13) is None


@pytest.fixture
def no_extension(monkeypatch):
    """The state of a machine where the extension can be neither found nor built."""
    def refuse():
        raise _compile.CompileError("nvcc was not found")
    monkeypatch.setattr(extension, "_load_object", refuse)
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


@pytest.fixture
def source_tree(tmp_path):
    """A copy to build in, so that no build folder or compiled object of the checkout takes part."""
    tree = tmp_path / "tree"
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "gbmoe", "csrc"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    return tree


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


@pytest.mark.gpu
def test_built_once_at_first_use_and_then_taken_from_the_cache(nvcc, source_tree, tmp_path):
    program = "import torch, gbmoe; x = torch.ones(4, 8, device='cuda'); " \
              "print(gbmoe.gmm(x, torch.ones(1, 8, 8, device='cuda'), torch.tensor([4]), engine='cublas_loop').sum().item())"
    environment = {**os.environ, "GBMOE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(source_tree)}
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path)
            for _ in range(2)]
    assert [run.stdout for run in runs] == ["256.0\n", "256.0\n"], runs[0].stderr
    assert "compiling its CUDA extension, once, into" in runs[0].stderr and runs[1].stderr == ""
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


@pytest.mark.gpu
def test_the_extension_is_loaded_where_nvcc_is(nvcc):
    assert extension.status().reason is None
