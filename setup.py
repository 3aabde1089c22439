"""Build gbmoe; everything declarative is in pyproject.toml.

The CUDA extension is compiled here when torch is importable during the build (`pip install . --no-build-isolation`), is a
CUDA build and nvcc is found; otherwise the package is pure Python and compiles csrc/ once, at the first use of a CUDA
tensor (gbmoe/extension/). GBMOE_REQUIRE_EXTENSION=1 makes a build without the extension fail.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("gbmoe_build", ROOT / "gbmoe" / "extension" / "build.py")
compiler = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = compiler  # dataclasses look their module up there
_spec.loader.exec_module(compiler)


def reason_for_no_extension():
    """None if the extension will be compiled during this build, otherwise the reason why not."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not importable during the build; csrc/ is compiled at the first use of a CUDA tensor"
    return compiler.why_not(compiler.Nvcc.find(), compiler.Torch.imported())


REASON = reason_for_no_extension()


class BuildPy(build_py):
    def run(self):
        super().run()
        if REASON is None:
            target = Path(self.build_lib) / "gbmoe" / "_C.so"
            if self.editable_mode:
                target = ROOT / "gbmoe" / "_C.so"
            for old in (target, compiler.digest_file(target)):
                old.unlink(missing_ok=True)
            try:
                compiled = compiler.build(ROOT / "csrc", target)
                compiler.record_sources(target, ROOT / "csrc")
            except (compiler.CompileError, OSError) as error:  # SystemExit, because editable installs swallow every Exception
                raise SystemExit(f"gbmoe: the CUDA extension failed to compile:\n{error}") from error
            print(f"gbmoe: compiled the CUDA extension for {', '.join(compiled)}")
        elif os.environ.get("GBMOE_REQUIRE_EXTENSION") == "1":
            raise SystemExit(f"gbmoe: GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension cannot be built: {REASON}")
        else:
            print(f"gbmoe: no CUDA extension in this build: {REASON}")


class BinaryIfCompiled(Distribution):
    def has_ext_modules(self):
        return REASON is None


class WheelForEveryPython(bdist_wheel):
    """Tags the wheel py3-none-<platform> instead of with this interpreter, because the extension does not use Python's API."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if REASON is None else (python, abi, platform)


# README.md without the links that would be dead on a package index; pyproject.toml says that it is made here.
description = runpy.run_path(str(ROOT / "scripts" / "description.py"))["of_checkout"](ROOT)

setup(distclass=BinaryIfCompiled, cmdclass={"build_py": BuildPy, "bdist_wheel": WheelForEveryPython},
      long_description=description, long_description_content_type="text/markdown")
