"""Compile csrc/ into one shared object. Standard library only: setup.py runs this file before gbmoe can be imported.

The object is written against torch's stable ABI and holds no Python API, so one file serves every Python version and
every torch from 2.10 on that was built for the same CUDA major version. setup.py calls it ahead of time, if torch can be
imported during the build; gbmoe/extension/cache.py calls it once, at the first use of a CUDA tensor. No GPU is probed here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# The oldest torch whose stable ABI has all that csrc/ uses (2.10), in the encoding of TORCH_TARGET_VERSION.
TORCH_TARGET_VERSION = "0x020a000000000000"
DEFAULT_ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# TORCH_CUDA_ARCH_LIST also takes family names.
_ARCHITECTURE_NAMES = {
    "Volta": "7.0+PTX", "Turing": "7.5+PTX", "Ampere": "8.0;8.6+PTX", "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX", "Blackwell+Tegra": "11.0", "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}


class CompileError(RuntimeError):
    """csrc/ cannot be compiled here; the message says what is missing or what nvcc printed."""


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
        version = _run([str(path), "--version"])
        codes = _run([str(path), "--list-gpu-code"])
        found = re.search(r"release (\d+)\.(\d+)", version)
        if not found:
            raise CompileError(f"{path} --version: expected 'release' and a version, got {version.strip()[:80]!r}")
        # The nvcc on PATH may be a script outside of the toolkit. A dry run prints the toolkit's folder, in the file system's encoding.
        dryrun = subprocess.run([str(path), "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True)
        top = re.search(rb"^#\$ TOP=(.*)$", dryrun.stderr, re.MULTILINE)
        real = Path(os.fsdecode(top.group(1))).resolve() / "bin" / "nvcc" if top else path.resolve()
        return cls(real if real.exists() else path, (int(found[1]), int(found[2])),
                   frozenset(re.findall(r"sm_(\d+[af]?)", codes)))


def _nvcc_candidates() -> list[Path]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    return list(dict.fromkeys([*candidates, Path("/usr/local/cuda/bin/nvcc")]))


_running: set[subprocess.Popen] = set()


def _run(command: list[str], scratch: str | None = None) -> str:
    """Run a command, with its temporary files in `scratch`, and return its output. Raises CompileError where it fails."""
    # nvcc prints text in the encoding of its locale; bytes that are not UTF-8 must not stop the build.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
                          env={**os.environ, "TMPDIR": scratch} if scratch else None, start_new_session=True) as process:
        _running.add(process)
        try:
            printed, errors = process.communicate()
        except BaseException:  # a signal, in the main thread
            _kill_running()
            raise
        finally:
            _running.discard(process)
    if process.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{printed}{errors}".rstrip())
    return printed + errors


def _kill_running() -> None:
    """Kill all running compilers. Each is killed with its process group, because the passes that it starts would outlive it."""
    for process in list(_running):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def architectures(nvcc: Nvcc, default: tuple[str, ...] = DEFAULT_ARCHITECTURES) -> list[str]:
    """Architectures to compile for, as in TORCH_CUDA_ARCH_LIST ("8.0", "9.0a", "9.0+PTX").

    The environment variable wins where it is set; naming an architecture that nvcc lacks is an error. Otherwise they are those of
    `default`, in order. One that this nvcc does not know is replaced by the newest before it, whose code (in the same generation) or
    PTX runs there; one that is older than all that nvcc knows is left out. The newest architecture comes with PTX for later devices.
    """
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if requested:
        for name, numbers in _ARCHITECTURE_NAMES.items():
            requested = re.sub(rf"\b{re.escape(name)}\b", numbers, requested)
        chosen = [part for part in re.split(r"[;,\s]+", requested) if part]
        for part in chosen:
            if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", part):
                raise CompileError(f"TORCH_CUDA_ARCH_LIST: expected entries such as 8.0 or 9.0+PTX, got {part!r}")
            code = _code(part)
            if code not in nvcc.codes and code.rstrip("af") not in nvcc.codes:
                raise CompileError(f"TORCH_CUDA_ARCH_LIST: nvcc {nvcc.version[0]}.{nvcc.version[1]} cannot compile for {part}"
                                   f"; it knows {', '.join(sorted(nvcc.codes, key=lambda c: int(re.sub('[af]', '', c))))}")
        return chosen
    known = sorted(int(code) for code in nvcc.codes if code.isdigit())
    nearest: dict[int, bool] = {}  # code -> whether a device of a later generation needs its PTX
    for wanted in sorted(int(_code(part)) for part in default):
        before = [code for code in known if code <= wanted]
        if before:
            nearest[before[-1]] = nearest.get(before[-1], False) or before[-1] // 10 != wanted // 10
    if not nearest:
        raise CompileError(f"nvcc {nvcc.version[0]}.{nvcc.version[1]} knows none of the architectures {', '.join(default)}")
    nearest[max(nearest)] = True
    return [f"{code // 10}.{code % 10}{'+PTX' if ptx else ''}" for code, ptx in nearest.items()]


def source_folder() -> Path:
    """The folder csrc/: beside the package in a checkout, inside it where gbmoe is installed."""
    package = Path(__file__).parent.parent
    checkout = package.parent / "csrc"
    return checkout if (checkout / "register.cpp").exists() else package / "csrc"


def source_digest(folder: Path) -> str:
    """A digest of everything that decides what is compiled, and how: the files of `folder`, and this file."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".cpp", ".h")):
        digest.update(source.relative_to(folder).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()


def digest_file(output: Path) -> Path:
    """The path of the file beside an object compiled ahead of time that holds the source_digest of its sources."""
    return output.with_name(output.name + ".sources")


def record_sources(output: Path, folder: Path) -> None:
    """Write the digest_file of `output`, which was compiled from the files that are in `folder` now."""
    digest_file(output).write_text(source_digest(folder) + "\n")


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


def _code(architecture: str) -> str:
    return architecture.removesuffix("+PTX").replace(".", "")


def _gencode(chosen: list[str]) -> list[str]:
    flags = []
    for part in chosen:
        code = _code(part)
        flags.append(f"-gencode=arch=compute_{code},code=sm_{code}")
        if part.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{code},code=compute_{code}")
    return flags


def _library_roots(nvcc: Nvcc, torch: Torch) -> list[Path]:
    """Folders that hold include/ and lib/: the toolkit, then the nvidia wheels beside torch and on sys.path."""
    major = nvcc.version[0]
    sites = [torch.folder.parent, *(Path(entry) for entry in sys.path if entry)]
    wheels = [site / "nvidia" / name for site in sites for name in (f"cu{major}", "cublas", "cuda_runtime")]
    target = {"aarch64": "sbsa-linux"}.get(platform.machine(), f"{platform.machine()}-linux")
    return list(dict.fromkeys([nvcc.home, nvcc.home / "targets" / target, *wheels]))


def include_flags(nvcc: Nvcc, torch: Torch) -> list[str]:
    """-I for torch's headers and for the folder that has cublas_v2.h. Raises CompileError where no folder has it."""
    root = next((r for r in _library_roots(nvcc, torch) if (r / "include" / "cublas_v2.h").exists()), None)
    if root is None:
        raise CompileError(f"cublas_v2.h is neither in {nvcc.home / 'include'} nor in an nvidia-cublas wheel beside torch")
    cublas = [] if root == nvcc.home else ["-isystem", str(root / "include")]
    return ["-I", str(torch.folder / "include"), *cublas]


def compile_flags(nvcc: Nvcc, torch: Torch, chosen: list[str]) -> list[str]:
    """The flags of every translation unit; scripts and tests that compile a single file use them too."""
    return ["-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden",
            "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", *_gencode(chosen), *include_flags(nvcc, torch)]


def sources(folder: Path) -> list[Path]:
    """The translation units of csrc/, in a fixed order."""
    return sorted([*folder.rglob("*.cu"), *folder.rglob("*.cpp")])


def compile_unit(nvcc: Nvcc, torch: Torch, chosen: list[str], source: Path, output: Path, options: tuple[str, ...] = ()) -> None:
    """Compile one file of csrc/ to an object, with more `options` for nvcc if any. Raises CompileError with nvcc's output.

    csrc/hopper/ uses instructions that only sm_90a has. With 9.0 among the architectures its kernels are compiled for that one
    alone; without it they are empty, and gbmoe_cuda::hopper_built returns false.
    """
    if source.parent.name == "hopper":
        hopper = any(_code(part).startswith("90") for part in chosen)
        chosen = ["9.0a"] if hopper else chosen[:1]
        defines = ["-DGBMOE_HOPPER"] if hopper else []
    else:
        defines = []
    _run([str(nvcc.path), *compile_flags(nvcc, torch, chosen), *defines, *options, "-x", "cu", "-c", str(source), "-o", str(output)],
         scratch=str(output.parent))


def why_not(nvcc: Nvcc | None, torch: Torch | None) -> str | None:
    """None if the extension can be built, otherwise the reason in one line."""
    if torch is None:
        return "torch is not importable"
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA"
    if nvcc is None:
        return _why_no_nvcc()
    if nvcc.version[0] != int(torch.cuda.split(".")[0]):
        return f"nvcc is {nvcc.version[0]}.{nvcc.version[1]} but torch {torch.version} is built for CUDA {torch.cuda}"
    if nvcc.version < (12, 5):
        return f"nvcc is {nvcc.version[0]}.{nvcc.version[1]}; cuBLAS has grouped GEMMs from CUDA 12.5 on"
    return None


def _why_no_nvcc() -> str:
    for path in _nvcc_candidates():
        try:
            if path.exists():
                Nvcc.at(path)
        except (CompileError, OSError) as error:
            return f"nvcc was found at {path} but does not run: {' '.join(str(error).split())[:300]}"
    return "nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"


def build(folder: Path, output: Path, default: tuple[str, ...] = DEFAULT_ARCHITECTURES) -> list[str]:
    """Compile every file of `folder` and link `output`; returns the architectures. Raises CompileError, or OSError where a
    folder cannot be written.

    `output` is written under another name and renamed once it has reached the disk. So neither processes that build it at the same time
    nor a machine that loses power leave half a file under its name.
    """
    nvcc, torch = Nvcc.find(), Torch.imported()
    reason = why_not(nvcc, torch)
    if nvcc is None or reason is not None:
        raise CompileError(reason)
    chosen = architectures(nvcc, default)
    roots = _library_roots(nvcc, torch)
    cublas = next((lib for root in roots for sub in ("lib64", "lib")
                   for lib in [root / sub / f"libcublas.so.{nvcc.version[0]}"] if lib.exists()), None)
    if cublas is None:
        raise CompileError(f"libcublas.so.{nvcc.version[0]} is neither in {nvcc.home} nor in an nvidia-cublas wheel beside torch")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gbmoe-build-") as scratch:
        # Named after their places: files of two folders may have one name.
        units = [(source, Path(scratch) / f"{'_'.join(source.relative_to(folder).parts)}.o") for source in sources(folder)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            try:
                list(pool.map(lambda unit: compile_unit(nvcc, torch, chosen, *unit), units))
            except BaseException:  # one has failed, or a signal ends the process: do not wait for the others
                pool.shutdown(wait=False, cancel_futures=True)
                _kill_running()
                raise
        # On the target's file system, so that it can be renamed, and with a random name: containers that share a cache may have equal
        # process ids.
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        os.close(handle)
        linked = Path(name)
        try:
            # libtorch_cuda is linked by name. torch loads its libraries with local visibility, so that an object which only leaves the
            # symbols undefined would not find them.
            _run([str(nvcc.path), "-shared", "-cudart", "static", "-o", name, *(str(obj) for _, obj in units),
                  "-L", str(torch.folder / "lib"), "-ltorch_cuda", "-ltorch_cpu", "-lc10",
                  f"-L{cublas.parent}", f"-l:{cublas.name}"])
            _seal(linked)
            linked.chmod(0o755)  # mkstemp lets only the owner read the file, but a cache may have several users
            os.replace(linked, output)
        finally:
            linked.unlink(missing_ok=True)
    _sync_folder(output.parent)
    return chosen


def _sync_folder(folder: Path) -> None:
    """Make sure that a rename in `folder` has reached the disk, where the file system can sync a folder."""
    with contextlib.suppress(OSError):  # the renamed file is complete either way
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
