"""`gbmoe install-megablocks`: MegaBlocks 0.10.0 and stanford-stk 0.7.1, unmodified, next to the torch that is installed.

MegaBlocks pins torch 2.7.0, and its CUDA extension does not compile with CUDA 13. So its wheel is built without that extension: its
setup.py sees a stand-in torch without CUDA. Neither a GPU nor nvcc is needed. The environment is changed only once both wheels are built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gbmoe._atomic_files import one_line
from gbmoe.cli.signals import sigterm_unwinds

EXAMPLES = """\
python -m gbmoe install-megablocks
python -m gbmoe install-megablocks --python other-environment/bin/python
"""
_PACKAGES = {"megablocks": "0.10.0", "stanford-stk": "0.7.1"}
_BUILD_WITH = "setuptools>=70.1"
# The requirements of the two that they import without their extension, except torch.
_IMPORTED = ("numpy", "packaging")
_STAND_IN = {"torch/__init__.py": "__version__ = '0'\n",
             "torch/utils/cpp_extension.py": "CUDA_HOME = BuildExtension = CUDAExtension = None\n"}
# Prints which of the modules that follow are absent and then, each in a line, the packages of these versions.
_LOOK = """
import importlib.metadata, importlib.util, sys
print(*[name for name in sys.argv[1].split(",") if importlib.util.find_spec(name) is None])
for name in sys.argv[2].split(","):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
"""
_USE = """\
In Python, before the first import of megablocks:
    import gbmoe.compat.megablocks
    gbmoe.compat.megablocks.register()"""
_WHY_CHECK_COMPLAINS = """\
`pip check` says the following from now on, and ends with status 1. MegaBlocks pins what its CUDA extension was made with, and requires
Triton for kernels of its own. Here the extension is not compiled, and gbmoe takes the kernels' place, so other versions work, too:"""


class _Failed(Exception):
    """Raised where a program fails; its text is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --python."""
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON", help="the interpreter of the environment to install into"
                        " (default: this one)")


def run(arguments: argparse.Namespace) -> int:
    """Install what is missing. Return 2 where the environment is none to install into, and 1 where pip fails; the reason is printed, and
    nothing is left behind."""
    python = shutil.which(arguments.python)
    if python is None:
        return _fail(f"--python: expected a Python interpreter, found no program {arguments.python}", 2)
    python = os.path.abspath(python)  # not what it links to, which is outside the environment
    try:
        with sigterm_unwinds():
            absent, installed = _look(python)
            if {"pip", "torch"} & absent:
                name = "pip" if "pip" in absent else "torch"
                return _fail(f"--python: expected {name} in the environment of {python}, found none; install it first", 2)
            if installed.items() >= _PACKAGES.items() and not absent.intersection(_IMPORTED):
                print(f"{_names()} are installed already")
            else:
                _install(python)
                print(f"installed {_names()}")
            complaints = _complaints(python)
    except _Failed as failed:
        return _fail(str(failed), 1)
    except OSError as error:
        return _fail(f"{error.filename or python}: {error.strerror}", 2)
    if complaints:
        print("\n".join([_WHY_CHECK_COMPLAINS, *(f"    {line}" for line in complaints)]))
    if "gbmoe" in absent:
        print(f"gbmoe itself is not in the environment of {python}: install it there, too")
    print(_USE)
    return 0


def _names() -> str:
    return " and ".join(f"{name} {version}" for name, version in _PACKAGES.items())


def _fail(problem: str, status: int) -> int:
    print(f"gbmoe install-megablocks: {one_line(problem)}", file=sys.stderr)
    return status


def _look(python: str) -> tuple[set[str], dict[str, str]]:
    """(the modules that the environment lacks of those that are needed, the versions of the packages that it has)."""
    modules = ",".join(("pip", "torch", "gbmoe", *_IMPORTED))
    with tempfile.TemporaryDirectory() as elsewhere:  # where no checkout is that Python would find first
        absent, *packages = _run([python, "-c", _LOOK, modules, ",".join(_PACKAGES)], folder=elsewhere).split("\n")
    return set(absent.split()), dict(line.split() for line in packages if line)


def _install(python: str) -> None:
    with tempfile.TemporaryDirectory(prefix="gbmoe-megablocks-") as name:
        folder = Path(name)
        for file, text in _STAND_IN.items():
            (folder / "stand-in" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "stand-in" / file).write_text(text)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "-q", "--target", str(folder / "tools"), _BUILD_WITH])
        path = os.pathsep.join(filter(None, [str(folder / "stand-in"), str(folder / "tools"), os.environ.get("PYTHONPATH", "")]))
        # Without pip's cache, which may hold a wheel with the extension, and must not get one without it.
        _run([*pip, "wheel", "-q", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheels"),
              *(f"{package}=={version}" for package, version in _PACKAGES.items())], PYTHONPATH=path)
        _run([*pip, "install", "-q", *_IMPORTED])
        _run([*pip, "install", "-q", "--no-deps", *map(str, sorted((folder / "wheels").iterdir()))])


def _complaints(python: str) -> list[str]:
    """The lines of `pip check` about the two packages."""
    printed = _run([python, "-m", "pip", "--disable-pip-version-check", "check"], may_fail=True)
    return [line for line in printed.splitlines() if line.split(" ")[0] in _PACKAGES]


def _run(command: list[str], folder: str | None = None, may_fail: bool = False, **variables: str) -> str:
    """Run a program and return its output. If this process is interrupted, the program ends with all that it has started."""
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          errors="replace", env={**os.environ, **variables}, start_new_session=True) as process:
        try:
            printed, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode and not may_fail:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no message"]
        reason = next((line for line in lines if line.lower().startswith("error")), lines[-1])
        raise _Failed(f"{' '.join(command[1:4])}: {reason.strip()}")
    return printed
