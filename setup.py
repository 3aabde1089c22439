"""Build gbmoe; everything declarative is in pyproject.toml.

The CUDA extension is compiled here where torch can be imported during the build (`pip install . --no-build-isolation`) and is built
for CUDA. If there is no compiler that fits, the build fails and says why. GBMOE_BUILD=0 leaves the extension out, GBMOE_BUILD=1 fails
wherever it cannot be compiled (gbmoe/extension/install.py). A package without it compiles csrc/ once, by `python -m gbmoe build` or at
the first use of a CUDA tensor.
"""

import ctypes
import functools
import importlib
import runpy
import signal
import sys
import types
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
# The files of gbmoe/extension that need only the standard library, as a package of their own: gbmoe itself imports torch.
_package = types.ModuleType("gbmoe_extension")
_package.__path__ = [str(ROOT / "gbmoe" / "extension")]
sys.modules[_package.__name__] = _package
install = importlib.import_module("gbmoe_extension.install")

if install.too_old(setuptools.__version__):  # before pyproject.toml is read, and before what an old one lacks is imported
    raise SystemExit(install.too_old(setuptools.__version__))

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402


@functools.cache
def decision():
    return install.decide_here()


def end_with_the_frontend():
    """Let this process end when the frontend that started it (pip, build) is ended, which would leave it compiling."""
    if sys.platform == "linux" and "setuptools.build_meta" in sys.modules:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class BuildPy(build_py):
    def run(self):
        if decision().action == install.Action.REFUSE:
            raise SystemExit(str(decision()))  # because editable installs swallow every Exception
        super().run()
        target = (ROOT if self.editable_mode else Path(self.build_lib)) / "gbmoe" / "_C.so"
        if decision().action == install.Action.COMPILE:
            end_with_the_frontend()
            install.compile_ahead(ROOT / "csrc", target)
            return
        if not self.editable_mode:  # the build folder may have one of an earlier build
            install.remove(target)
        print(f"gbmoe: no CUDA extension in this build: {decision().reason}", flush=True)


class BinaryIfCompiled(setuptools.Distribution):
    def has_ext_modules(self):
        return decision().action == install.Action.COMPILE


class WheelForEveryPython(bdist_wheel):
    """Tags the wheel py3-none-<platform> instead of with this interpreter, because the extension does not use Python's API."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if decision().action == install.Action.COMPILE else (python, abi, platform)


# README.md without the links that would be dead on a package index; pyproject.toml says that it is made here.
description = runpy.run_path(str(ROOT / "scripts" / "description.py"))["of_checkout"](ROOT)

setuptools.setup(distclass=BinaryIfCompiled, cmdclass={"build_py": BuildPy, "bdist_wheel": WheelForEveryPython},
                 long_description=description, long_description_content_type="text/markdown")
