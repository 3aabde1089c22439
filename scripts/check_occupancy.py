"""Compiles csrc/tensor_core/ for every generation of GPUs and checks that as many CTAs as are launched fit on a multiprocessor.

    scripts/check_occupancy.py [ARCHITECTURE...]     for example 8.0 8.6; without arguments all of those in _SHARED_KIB

A CTA's registers and shared memory must leave room for the CTAs that the launch counts on, and kernels in 16 bits must keep their
sums in registers: a spill to local memory in the main loop costs more than any tile gains. Those in TF32 may spill up to _TF32_SPILL
bytes. It needs nvcc and torch's headers, takes some two minutes with two cores, and prints one line for each architecture.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gbmoe.extension import build

# Shared memory of a multiprocessor in KiB ("Technical Specifications per Compute Capability", CUDA C++ Programming Guide). Each CTA takes
# 1 KiB more than it asks for.
_SHARED_KIB = {"8.0": 164, "8.6": 100, "8.9": 100, "9.0": 228, "10.0": 228, "12.0": 100}
_REGISTERS = 64 * 1024   # of a multiprocessor, on all of them
_TF32_SPILL = 96         # bytes, stores of one thread
_STUB_REGISTERS = 16     # an instance for GPUs with another amount of shared memory is an empty kernel


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one instance, and what its name says of its tile (TileShape and Memory in csrc/tensor_core/traits.cuh)."""
    name: str
    registers: int
    spilled: int
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
    def is_tf32(self) -> bool:
        return "GemmTraitsIf" in self.name

    def faults(self, architecture: str) -> Iterator[str]:
        """What is wrong with it on such a GPU."""
        # Registers are handed out to warps in steps of 8 a thread.
        fit = _REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        if fit < self.ctas:
            yield f"{self.registers} registers a thread leave room for {fit} CTAs, not {self.ctas}"
        if self.shared_bytes * self.ctas > _SHARED_KIB[architecture] << 10:
            yield f"{self.ctas} CTAs of {self.shared_bytes} bytes of shared memory do not fit into {_SHARED_KIB[architecture]} KiB"
        if self.spilled > (_TF32_SPILL if self.is_tf32 else 0):
            yield f"{self.spilled} bytes are spilled"


def parse(printed: str) -> list[Kernel]:
    """The kernels that nvcc --resource-usage has printed, without stubs."""
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
                       printed, re.DOTALL)
    kernels = [Kernel(name, int(registers), int(spilled), int(static or 0)) for name, spilled, registers, static in found]
    return [kernel for kernel in kernels if kernel.registers > _STUB_REGISTERS]


def kernels_of(source: Path, architecture: str) -> list[Kernel]:
    """The kernels in a file, compiled for that architecture."""
    nvcc, torch = build.Nvcc.find(), build.Torch.imported()
    if nvcc is None:
        raise SystemExit("check_occupancy.py: expected nvcc in CUDA_HOME, PATH or /usr/local/cuda, found none")
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(nvcc.path), *build.compile_flags(nvcc, torch, [architecture]), "--resource-usage", "-x", "cu", "-c", str(source),
                   "-o", f"{scratch}/unit.o"]
        return parse(subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True).stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=", ".join(_SHARED_KIB))
    architectures = parser.parse_args().architectures or list(_SHARED_KIB)
    unknown = set(architectures) - set(_SHARED_KIB)
    if unknown:
        parser.error(f"expected architectures among {', '.join(_SHARED_KIB)}, got {', '.join(sorted(unknown))}")
    sources = sorted((build.source_folder() / "tensor_core").glob("*.cu"))
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        jobs = {arch: [pool.submit(kernels_of, source, arch) for source in sources] for arch in architectures}
        for architecture, of_files in jobs.items():
            kernels = [kernel for job in of_files for kernel in job.result()]
            faults = [f"  {kernel.name}: {fault}" for kernel in kernels for fault in kernel.faults(architecture)]
            wrong += len(faults) + (not kernels)
            most = max((kernel.registers for kernel in kernels), default=0)
            spilled = max((kernel.spilled for kernel in kernels), default=0)
            print(f"{architecture}: {len(kernels)} kernels, at most {most} registers, at most {spilled} bytes spilled (TF32), "
                  f"{len(faults)} faults", *faults, sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
