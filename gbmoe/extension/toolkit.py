"""The torch and the CUDA compiler of this machine, and why they cannot compile csrc/. Standard library only: setup.py runs this file
before gbmoe can be imported."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST_CUDA = (12, 5)  # cuBLAS has grouped GEMMs from this version on


class CompileError(RuntimeError):
    """csrc/ cannot be compiled here; the message says what is missing or what nvcc printed, and `remedy`, in one line, what helps."""

    def __init__(self, reason: str, remedy: str | None = None):
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Torch:
    """What the build needs to know of torch, without importing it: its folder, its version, and the CUDA it was built for."""
    folder: Path
    cuda: str | None  # "13.0", or None for a build without CUDA
    version: str

    @classmethod
    def imported(cls) -> Torch:
        import torch
        return cls(Path(torch.__file__).parent, torch.version.cuda, torch.__version__)

    @property
    def cuda_major(self) -> int:
        """13 for CUDA 13.0; 0 for a build without CUDA."""
        return int(self.cuda.split(".")[0]) if self.cuda else 0


@dataclass(frozen=True)
class Nvcc:
    """One CUDA compiler: its path, its version and the architectures it can generate code for."""
    path: Path
    version: tuple[int, int]
    codes: frozenset[str]  # {"80", "90", "90a", ...}

    @property
    def home(self) -> Path:
        return self.path.parent.parent

    @classmethod
    def find(cls) -> Nvcc | None:
        """The nvcc of CUDA_HOME or CUDA_PATH, else of PATH, else of /usr/local/cuda; None if none of them runs."""
        for path in _nvcc_candidates():
            with contextlib.suppress(CompileError, OSError):  # _why_no_nvcc says later which one failed, and how
                return cls.at(path)
        return None

    @classmethod
    def at(cls, path: Path) -> Nvcc:
        """The compiler at `path`. Raises OSError where it cannot be started, CompileError where it fails or is not nvcc."""
        version = output_of([str(path), "--version"])
        codes = output_of([str(path), "--list-gpu-code"])
        found = re.search(r"release (\d+)\.(\d+)", version)
        if not found:
            raise CompileError(f"{path} --version: expected 'release' and a version, got {version.strip()[:80]!r}")
        # The nvcc on PATH may be a script outside of the toolkit. A dry run prints the toolkit's folder, in the file system's encoding.
        dryrun = subprocess.run([str(path), "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True)
        top = re.search(rb"^#\$ TOP=(.*)$", dryrun.stderr, re.MULTILINE)
        real = Path(os.fsdecode(top.group(1))).resolve() / "bin" / "nvcc" if top else path.resolve()
        return cls(real if real.exists() else path, (int(found[1]), int(found[2])),
                   frozenset(re.findall(r"sm_(\d+[af]?)", codes)))


def output_of(command: list[str], scratch: str | None = None) -> str:
    """Run a command, with its temporary files in `scratch`, and return its output. Raises CompileError where it fails."""
    # nvcc prints text in the encoding of its locale; bytes that are not UTF-8 must not stop the build.
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace",
                          env={**os.environ, "TMPDIR": scratch} if scratch else None)
    return checked_output(command, done.returncode, done.stdout + done.stderr)


def checked_output(command: list[str], status: int, printed: str) -> str:
    """What a command has printed. Raises CompileError, with the command, unless its exit status is 0."""
    if status != 0:
        raise CompileError(f"{' '.join(command)}\n{printed}".rstrip())
    return printed


def _nvcc_candidates() -> list[Path]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    return list(dict.fromkeys([*candidates, Path("/usr/local/cuda/bin/nvcc")]))


def why_not(nvcc: Nvcc | None, torch: Torch | None) -> str | None:
    """None if the extension can be built, otherwise the reason in one line."""
    if torch is None:
        return "torch is not importable"
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA"
    if sys.platform != "linux":
        return f"the kernels are compiled on Linux only, not on {sys.platform}"
    if nvcc is None:
        return _why_no_nvcc()
    if nvcc.version[0] != torch.cuda_major:
        return f"nvcc is {nvcc.version[0]}.{nvcc.version[1]} but torch {torch.version} is built for CUDA {torch.cuda}"
    if nvcc.version < OLDEST_CUDA:
        return f"nvcc is {nvcc.version[0]}.{nvcc.version[1]}; cuBLAS has grouped GEMMs from CUDA 12.5 on"
    return None


def way_out(torch: Torch | None) -> str:
    """What helps where `why_not` has a reason, in one line."""
    if torch is None:
        return "install torch first"
    if torch.cuda is None:
        return "for an NVIDIA GPU, install a torch that is built for CUDA"
    if sys.platform != "linux":
        return "everything runs through PyTorch here; the kernels need Linux (on Windows: WSL 2)"
    wanted = "12.5 or a later 12.x" if torch.cuda_major == 12 else f"{torch.cuda_major}.x"
    return f"install nvcc {wanted} or load its module, and set CUDA_HOME to its folder"


def fitting_nvcc(torch: Torch) -> Nvcc:
    """The compiler that can build the extension for this torch. Raises CompileError, with a remedy, where there is none."""
    nvcc = Nvcc.find()
    reason = why_not(nvcc, torch)
    if nvcc is None or reason is not None:
        raise CompileError(str(reason), way_out(torch))
    return nvcc


def _why_no_nvcc() -> str:
    for path in _nvcc_candidates():
        try:
            if path.exists():
                Nvcc.at(path)
        except (CompileError, OSError) as error:
            return f"nvcc was found at {path} but does not run: {' '.join(str(error).split())[:300]}"
    return "nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"
