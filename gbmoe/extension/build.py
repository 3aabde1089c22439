"""Compile csrc/ into one shared object. Standard library only: setup.py runs this file before gbmoe can be imported.

The object is written against torch's stable ABI and holds no Python API, so one file serves every Python version and
every torch from 2.10 on that was built for the same CUDA major version. setup.py calls it ahead of time, if torch can be
imported during the build; gbmoe/extension/cache.py calls it once, for `gbmoe build` or at the first use of a CUDA tensor. No GPU is
probed here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

# setup.py imports these files without the package gbmoe, hence by relative names.
from .architectures import DEFAULT_ARCHITECTURES, architectures, code_of
from .compiler_processes import Compilers
from .jobs import Jobs
from .toolkit import CompileError, Nvcc, Torch, output_of, why_not

__all__ = ["DEFAULT_ARCHITECTURES", "CompileError", "Nvcc", "Torch", "architectures", "why_not"]  # and what is defined here

# The oldest torch whose stable ABI has all that csrc/ uses (2.10), in the encoding of TORCH_TARGET_VERSION.
TORCH_TARGET_VERSION = "0x020a000000000000"
# Seconds of one core that a file takes: without kernels, and more for each architecture (nvcc 13.0, a server's core that has nothing else
# to do). Of a file by its path, or else of a folder of csrc/, whose average it is. Those of hopper/ have their kernels once, those of
# tensor_core/ from 8.0 on.
_SECONDS = {"router/softmax_topk_forward.cu": (5.0, 30.0), "router/softmax_topk_backward.cu": (4.0, 10.0),
            "router/any_function_forward.cu": (4.0, 12.0), "router/any_function_backward.cu": (4.0, 8.0),
            "": (3.0, 3.0), "tensor_core": (5.0, 25.0), "hopper": (0.0, 21.0)}
_LINK_SECONDS = 3.0


def source_folder() -> Path:
    """The folder csrc/: next to the package in a checkout, inside it where gbmoe is installed."""
    package = Path(__file__).parent.parent
    checkout = package.parent / "csrc"
    return checkout if (checkout / "operators.h").exists() else package / "csrc"


def source_digest(folder: Path) -> str:
    """A digest of everything that decides what is compiled, and how: the files of `folder`, and this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".cpp", ".h")):
        digest.update(source.relative_to(folder).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Facts:
    """What an object was made of: the source_digest of its sources, the CUDA major version, and its architectures."""
    sources: str
    cuda_major: int
    architectures: tuple[str, ...]


def facts_file(output: Path) -> Path:
    """The path of the file next to an object compiled ahead of time that holds its Facts. It is a file of its own, because tools that
    repair wheels rewrite objects."""
    return output.with_name(output.name + ".json")


def record_facts(output: Path, facts: Facts) -> None:
    """Write the facts_file of `output`."""
    facts_file(output).write_text(json.dumps(asdict(facts)) + "\n", encoding="utf-8")


def read_facts(output: Path) -> Facts | None:
    """The Facts in the facts_file of `output`; None where there is none, or none that gbmoe wrote.

    Raises OSError where it cannot be read.
    """
    try:
        found = json.loads(facts_file(output).read_text(encoding="utf-8"))
        return Facts(str(found["sources"]), int(found["cuda_major"]), tuple(map(str, found["architectures"])))
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


# The seal follows the ELF file, where the dynamic loader does not read: a digest of all bytes before it. Loading an object whose end is
# missing kills the process with SIGBUS, so the cache checks the seal first. It is in the same file, so that one rename publishes both.
_SEAL = b"\0gbmoe-sha256:"


def _seal(path: Path) -> None:
    with open(path, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(_SEAL + digest)
        file.flush()
        os.fsync(file.fileno())


def whole(path: Path) -> bool:
    """Whether `path` is, to the last byte, the file that `build` wrote. Raises OSError where it exists and cannot be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    end = len(content) - len(_SEAL) - hashlib.sha256().digest_size
    return end > 0 and content[end:] == _SEAL + hashlib.sha256(memoryview(content)[:end]).digest()


def _gencode(chosen: list[str]) -> list[str]:
    flags = []
    for part in chosen:
        code = code_of(part)
        flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
        if part.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{code},code=compute_{code}")
    return flags


def _library_roots(nvcc: Nvcc, torch: Torch) -> list[Path]:
    """Folders that hold include/ and lib/: the toolkit, then the nvidia wheels next to torch and on sys.path."""
    major = nvcc.version[0]
    sites = [torch.folder.parent, *(Path(entry) for entry in sys.path if entry)]
    wheels = [site / "nvidia" / name for site in sites for name in (f"cu{major}", "cublas", "cuda_runtime")]
    target = {"aarch64": "sbsa-linux"}.get(platform.machine(), f"{platform.machine()}-linux")
    return list(dict.fromkeys([nvcc.home, nvcc.home / "targets" / target, *wheels]))


def include_flags(nvcc: Nvcc, torch: Torch) -> list[str]:
    """-I for torch's headers and for the folder that has cublas_v2.h. Raises CompileError where no folder has it."""
    root = next((r for r in _library_roots(nvcc, torch) if (r / "include" / "cublas_v2.h").exists()), None)
    if root is None:
        raise CompileError(f"cublas_v2.h is neither in {nvcc.home / 'include'} nor in an nvidia-cublas wheel next to torch")
    cublas = [] if root == nvcc.home else ["-isystem", str(root / "include")]
    return ["-I", str(torch.folder / "include"), *cublas]


def compile_flags(nvcc: Nvcc, torch: Torch, chosen: list[str]) -> list[str]:
    """The flags of every translation unit; scripts and tests that compile a single file use them too."""
    # -lineinfo triples an object, which compression undoes. What makes the smallest code drivers before CUDA 12.4 cannot load: those of
    # CUDA 13 all can.
    compress = "--compress-mode=size" if nvcc.version >= (13, 0) else "-Xfatbin=-compress-all"
    return ["-std=c++17", "-O3", "-lineinfo", compress, "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden",
            "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", *_gencode(chosen), *include_flags(nvcc, torch)]


def sources(folder: Path, chosen: list[str]) -> list[Path]:
    """The translation units of csrc/ for the architectures `chosen`, in a fixed order. Without 9.0 those of csrc/hopper/ are left out."""
    units = sorted([*folder.rglob("*.cu"), *folder.rglob("*.cpp")])
    hopper = any(code_of(part).startswith("90") for part in chosen)
    return [unit for unit in units if hopper or not is_of_hopper(unit)]


def unit_command(nvcc: Nvcc, torch: Torch, chosen: list[str], source: Path, output: Path, options: tuple[str, ...] = ()) -> list[str]:
    """The command that compiles one file of csrc/ to an object, with more `options` for nvcc if any.

    csrc/hopper/ uses instructions that only sm_90a has, and is compiled for that one alone.
    """
    of_file = ["9.0a"] if is_of_hopper(source) else chosen
    return [str(nvcc.path), *compile_flags(nvcc, torch, of_file), *options, "-x", "cu", "-c", str(source), "-o", str(output)]


def is_of_hopper(source: Path) -> bool:
    """Whether a file of csrc/ has kernels for compute capability 9.0 alone."""
    return source.parent.as_posix().endswith(("/hopper", "/hopper/float8"))


def compile_unit(nvcc: Nvcc, torch: Torch, chosen: list[str], source: Path, output: Path, options: tuple[str, ...] = ()) -> None:
    """Run `unit_command`. Raises CompileError with nvcc's output."""
    output_of(unit_command(nvcc, torch, chosen, source, output, options), scratch=str(output.parent))


def estimate(folder: Path, chosen: list[str], jobs: int) -> float:
    """The seconds that compiling all of `folder` takes, by what was measured for its files (_SECONDS) and by how busy the machine is."""
    costs = [_seconds(source, chosen) for source in sources(folder, chosen)]
    busy = max(1.0, (os.getloadavg()[0] + jobs) / (os.cpu_count() or 1))  # runnable processes that share a core
    return (max([sum(costs) / jobs, *costs]) + _LINK_SECONDS) * busy


def duration(seconds: float) -> str:
    """Seconds for people, in minutes from two on."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _seconds(source: Path, chosen: list[str]) -> float:
    if is_of_hopper(source):
        return sum(_SECONDS["hopper"])
    base, architecture = _SECONDS.get(f"{source.parent.name}/{source.name}") or _SECONDS.get(source.parent.name) or _SECONDS[""]
    with_kernels = [part for part in chosen if source.parent.name != "tensor_core" or part[0] != "7"]
    return base + architecture * (len(with_kernels) + sum(part.endswith("+PTX") for part in with_kernels) / 4)


def build(folder: Path, output: Path, nvcc: Nvcc, torch: Torch, chosen: list[str], jobs: Jobs,
          report: Callable[[str], None] = lambda line: None) -> None:
    """Compile every file of `folder` for the architectures `chosen` and link `output`. `report` gets a line for each file.

    Raises CompileError, or OSError where a folder cannot be written. `output` is written under another name and renamed once it has
    reached the disk. So neither processes that build it at the same time nor a machine that loses power leave half a file under its name.
    However this process ends, the compilers end with it, and their files are removed.
    """
    cublas = _cublas(nvcc, torch)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Random names, because containers that share a folder may have equal process ids. What is linked is on the target's file system, so
    # that it can be renamed.
    scratch = Path(tempfile.gettempdir()) / f"gbmoe-build-{secrets.token_hex(8)}"
    linked = output.with_name(f".{output.name}.{secrets.token_hex(8)}")
    with Compilers(scratch, linked) as compilers:
        scratch.mkdir(mode=0o700)
        objects = _compile_all(folder, scratch, nvcc, torch, chosen, jobs, compilers, report)
        # libtorch_cuda is linked by name. torch loads its libraries with local visibility, so that an object which only leaves the
        # symbols undefined would not find them.
        compilers.run([str(nvcc.path), "-shared", "-cudart", "static", "-o", str(linked), *map(str, objects),
                       "-L", str(torch.folder / "lib"), "-ltorch_cuda", "-ltorch_cpu", "-lc10",
                       f"-L{cublas.parent}", f"-l:{cublas.name}"], scratch)
        _seal(linked)
        linked.chmod(0o755)  # a cache may have several users
        os.replace(linked, output)
    _sync_folder(output.parent)


def _compile_all(folder: Path, scratch: Path, nvcc: Nvcc, torch: Torch, chosen: list[str], jobs: Jobs, compilers: Compilers,
                 report: Callable[[str], None]) -> list[Path]:
    """Compile every file of `folder`, those that take longest first, and return the objects."""
    units = sources(folder, chosen)
    # Named after their places: files of two folders may have one name.
    objects = {source: scratch / f"{'_'.join(source.relative_to(folder).parts)}.o" for source in units}

    def compile_one(source: Path) -> float:
        start = time.monotonic()
        compilers.run(unit_command(nvcc, torch, chosen, source, objects[source]), scratch)
        return time.monotonic() - start
    with ThreadPoolExecutor(max_workers=jobs.count) as pool:
        try:
            running = {pool.submit(compile_one, source): source
                       for source in sorted(units, key=lambda source: -_seconds(source, chosen))}
            costs = {source: _seconds(source, chosen) for source in units}
            start, finished = time.monotonic(), 0.0
            for number, done in enumerate(as_completed(running), 1):
                seconds = done.result()
                finished += costs[running[done]]
                left = (time.monotonic() - start) * (sum(costs.values()) - finished) / finished  # as fast as it went so far
                report(f"[{number:{len(str(len(units)))}}/{len(units)}] {running[done].relative_to(folder).as_posix()}: {seconds:.0f} s"
                       + (f"; {duration(left)} left" if number < len(units) else ""))
        except BaseException:  # one has failed, or a signal ends the process: do not wait for the others
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.end()
            raise
    return list(objects.values())


def _cublas(nvcc: Nvcc, torch: Torch) -> Path:
    """The cuBLAS library to link. Raises CompileError where there is none."""
    name = f"libcublas.so.{nvcc.version[0]}"
    for root in _library_roots(nvcc, torch):
        for library in (root / "lib64" / name, root / "lib" / name):
            if library.exists():
                return library
    raise CompileError(f"{name} is neither in {nvcc.home} nor in an nvidia-cublas wheel next to torch")


def _sync_folder(folder: Path) -> None:
    """Make sure that a rename in `folder` has reached the disk, where the file system can sync a folder."""
    with contextlib.suppress(OSError):  # the renamed file is complete either way
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
