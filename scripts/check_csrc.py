"""Compiles every file of csrc/, without a GPU, and checks what a test of Python cannot see.

    scripts/check_csrc.py [ARCHITECTURE...]     for example 8.0 8.6; without arguments all of those in _SHARED_KIB
    scripts/check_csrc.py --ci                  for those in _OF_CI

1. Every file compiles for the oldest architecture that it has code for, uses no Python API, and of torch only the stable C ABI: a C++
   symbol of torch's would tie the object to one release.
2. The kernels of csrc/tensor_core/ fit on each of those architectures: a CTA's registers and shared memory leave room for the CTAs that
   the launch counts on, and kernels in 16 bits keep their sums in registers. A spill to local memory in the main loop costs more than
   any tile gains. Kernels in TF32 may spill up to _TF32_SPILL bytes.
3. The kernels for few rows, which their __launch_bounds__ make fit, spill no more than _FEW_ROWS_SPILL bytes on any of them.

It needs nvcc and torch's headers; --ci takes some 16 minutes of one core. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from check_wheel import unstable_symbols

from gbmoe.extension import build
from gbmoe.extension.jobs import jobs

# Shared memory of a multiprocessor in KiB ("Technical Specifications per Compute Capability", CUDA C++ Programming Guide). Each CTA takes
# 1 KiB more than it asks for.
_SHARED_KIB = {"8.0": 164, "8.6": 100, "8.9": 100, "9.0": 228, "10.0": 228, "12.0": 100}
# Without 8.6 and 8.9, which are of 8.0's generation and have instances that 8.0 has, too. In few_rows.cu, the file that was compared, their
# kernels take the same registers as each other and at most one more or less than on 8.0; on 9.0, 10.0 and 12.0 it is up to 17 (nvcc 13.0).
_OF_CI = ("8.0", "9.0", "10.0", "12.0")
_REGISTERS = 64 * 1024   # of a multiprocessor, on all of them
_TF32_SPILL = 96         # bytes, stores of one thread
_FEW_ROWS_SPILL = 16     # likewise
_STUB_REGISTERS = 16     # an instance for GPUs with another amount of shared memory is an empty kernel


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one instance, and what its name says of its tile (TileShape and Memory in csrc/tensor_core/traits.cuh)."""
    name: str
    registers: int
    spilled: int       # bytes of local memory a thread: spills, and arrays whose index is not known when it is compiled
    static_bytes: int

    @property
    def tile(self) -> list[int]:
        """Tile M and N, warp tile M and N, and the stages for little and for much shared memory."""
        return [int(n) for n in re.findall(r"Li(\d+)E", re.search(r"TileShapeI((?:Li\d+E)+)E", self.name)[1])]

    @property
    def threads(self) -> int:
        m, n, warp_m, warp_n = self.tile[:4]
        return 32 * (m // warp_m) * (n // warp_n)

    @property
    def shared_bytes(self) -> int:
        large = "MemoryE1" in self.name
        return (self.tile[0] + self.tile[1]) * (128 if large else 64) * self.tile[5 if large else 4] + self.static_bytes + 1024

    @property
    def ctas(self) -> int:
        """CTAs that a launch counts on (kCtasPerMultiprocessor)."""
        return 2 if self.threads <= 128 else 1

    @property
    def is_for_few_rows(self) -> bool:
        return "few_rows_kernel" in self.name

    @property
    def may_spill(self) -> int:
        """Bytes."""
        return _FEW_ROWS_SPILL if self.is_for_few_rows else _TF32_SPILL if "GemmTraitsIf" in self.name else 0

    def faults(self, architecture: str) -> Iterator[str]:
        """What is wrong with it on such a GPU."""
        if self.spilled > self.may_spill:
            yield f"{self.spilled} bytes are spilled"
        if self.is_for_few_rows:
            return
        # Registers are handed out to warps in steps of 8 a thread.
        fit = _REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        if fit < self.ctas:
            yield f"{self.registers} registers a thread leave room for {fit} CTAs, not {self.ctas}"
        if self.shared_bytes * self.ctas > _SHARED_KIB[architecture] << 10:
            yield f"{self.ctas} CTAs of {self.shared_bytes} bytes of shared memory do not fit into {_SHARED_KIB[architecture]} KiB"


def parse(printed: str) -> dict[str, list[Kernel]]:
    """By architecture ("8.0"), the kernels that nvcc --resource-usage has printed, without stubs."""
    found = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\d+)(\d)\w?'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
                       r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?", printed, re.DOTALL)
    kernels: dict[str, list[Kernel]] = {}
    for name, major, minor, stack, spilled, registers, static in found:
        if int(registers) > _STUB_REGISTERS:
            kernel = Kernel(name, int(registers), max(int(stack), int(spilled)), int(static or 0))
            kernels.setdefault(f"{major}.{minor}", []).append(kernel)
    return kernels


def includes_architecture_code(source: Path) -> bool:
    """Whether the file, or one of csrc/ that it includes, has code that only some architectures compile."""
    text = source.read_text()
    return "__CUDA_ARCH__" in text or any(includes_architecture_code(source.parent / name)
                                          for name in re.findall(r'^#include "(.*)"', text, re.MULTILINE))


def wrong_symbols(unit: Path) -> list[str]:
    """Symbols that an object must not need, or why it has none."""
    printed = subprocess.run(["nm", "-u", str(unit)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-1] for line in printed.splitlines()]
    return unstable_symbols(symbols) if symbols else ["it needs no symbol at all"]


class Compiler:
    """nvcc and the headers of the torch that is installed; a CPU build of torch has the same ones."""

    def __init__(self) -> None:
        found = build.Nvcc.find()
        if found is None:
            raise SystemExit("check_csrc.py: expected nvcc in CUDA_HOME, PATH or /usr/local/cuda, found none")
        self.nvcc = found
        self.torch = replace(build.Torch.imported(), cuda=f"{found.version[0]}.{found.version[1]}")
        # Compression takes a quarter of the time, and changes nothing that is looked at.
        self.uncompressed = ["--no-compress"] if found.version >= (13, 0) else []

    def faults_of_file(self, source: Path) -> list[str]:
        """What is wrong with a file, compiled for the oldest architecture, and for Hopper where its code differs there."""
        oldest = next(a for a in build.DEFAULT_ARCHITECTURES if a.replace(".", "") in self.nvcc.codes)
        return self.faults_for([oldest, "9.0"] if includes_architecture_code(source) else [oldest], source)

    def faults_for(self, chosen: list[str], source: Path) -> list[str]:
        """What is wrong with a file, compiled for these architectures."""
        # Optimising takes most of the time and finds no more errors. Not every nvcc 12 can go without.
        options = ["--Ofast-compile=max", *self.uncompressed] if self.nvcc.version >= (13, 0) else []
        with tempfile.TemporaryDirectory() as scratch:
            unit = Path(scratch) / "unit.o"
            try:
                build.compile_unit(self.nvcc, self.torch, chosen, source, unit, tuple(options))
            except build.CompileError as error:
                return [str(error)]
            return wrong_symbols(unit)

    def kernels_of(self, source: Path, architectures: list[str]) -> dict[str, list[Kernel]]:
        """The kernels in a file by architecture, compiled for all of them at once: what runs on the host is compiled only once."""
        with tempfile.TemporaryDirectory() as scratch:
            unit = Path(scratch) / "unit.o"
            # Line numbers change no register and take a twentieth of the time.
            flags = [flag for flag in build.compile_flags(self.nvcc, self.torch, architectures) if flag != "-lineinfo"]
            command = [str(self.nvcc.path), *flags, *self.uncompressed,
                       "--resource-usage", "-x", "cu", "-c", str(source), "-o", str(unit)]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            wrong = [done.stderr] if done.returncode else wrong_symbols(unit)
            if wrong:
                raise SystemExit(f"check_csrc.py: {source}: " + "\n".join(wrong))
            kernels = parse(done.stderr)
            if kernels.keys() != set(architectures):
                raise SystemExit(f"check_csrc.py: {source}: expected kernels for {', '.join(architectures)}, got some but stubs for "
                                 f"{', '.join(kernels) or 'none'}")
            return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=", ".join(_SHARED_KIB))
    parser.add_argument("--ci", action="store_true", help=", ".join(_OF_CI))
    arguments = parser.parse_args()
    architectures = list(dict.fromkeys(arguments.architectures or (_OF_CI if arguments.ci else _SHARED_KIB)))
    unknown = set(architectures) - set(_SHARED_KIB)
    if unknown:
        parser.error(f"expected architectures among {', '.join(_SHARED_KIB)}, got {', '.join(sorted(unknown))}")
    compiler, wrong = Compiler(), 0
    sources = build.sources(build.source_folder(), list(build.DEFAULT_ARCHITECTURES))
    for_all = [source for source in sources if source.parent.name == "tensor_core"]
    others = [source for source in sources if source not in for_all]
    with ThreadPoolExecutor(jobs().count) as pool:
        of_all = [pool.submit(compiler.kernels_of, source, architectures) for source in for_all]
        of_files = pool.map(compiler.faults_of_file, others)
        for architecture in architectures:
            kernels = [kernel for job in of_all for kernel in job.result()[architecture]]
            faults = [f"  {kernel.name}: {fault}" for kernel in kernels for fault in kernel.faults(architecture)]
            wrong += len(faults)
            most = max(kernel.registers for kernel in kernels)
            spilled = max(kernel.spilled for kernel in kernels)
            print(f"tensor_core for {architecture}: {len(kernels)} kernels, at most {most} registers, at most {spilled} bytes "
                  f"spilled, {len(faults)} faults", *faults, sep="\n", flush=True)
        for source, faults in zip(others, of_files):
            wrong += len(faults)
            print(f"{source.relative_to(build.source_folder())}: {'; '.join(faults) or 'compiles'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
