"""Find the extension, or build it once, and load it; where that fails, say why, and what helps.

First comes gbmoe/_C.so, which was compiled ahead of time when the package was built, if its sources are still the current ones. Then
comes the cache (cache.py), which `gbmoe build` fills, and into which `load()` compiles csrc/ at the first use of a CUDA tensor. An object
is taken only if it has code for every GPU that the process sees: a kernel without code for its device would fail when it is launched.
One that serves a GPU by PTX alone is taken only where none can be compiled.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gbmoe.extension import architectures, build, cache
from gbmoe.extension.architectures import Service
from gbmoe.extension.cache import Compiled
from gbmoe.extension.jobs import jobs
from gbmoe.extension.toolkit import CompileError, Torch, fitting_nvcc, way_out

AHEAD_OF_TIME = Path(__file__).parent.parent / "_C.so"


@dataclass(frozen=True)
class Status:
    """Whether the extension is loaded, from which file, and why not if it is not.

    `remedy` is what helps then, in one line. `architectures` are those of the loaded object, and `note` says what a GPU lacks with it.
    """
    loaded: bool
    path: Path | None
    reason: str | None
    remedy: str | None = None
    architectures: tuple[str, ...] = ()
    note: str | None = None


def why_passed_over(path: Path) -> str | None:
    """None if an object compiled ahead of time was made of the current sources, which may have changed in a checkout, and for torch's CUDA;
    otherwise why it cannot be used."""
    if not path.exists():
        return f"{path} is missing"
    facts = build.read_facts(path)
    if facts is None:
        return f"{path} lacks {build.facts_file(path).name} next to it, which says what it was compiled from"
    if facts.sources != build.source_digest(build.source_folder()):
        return f"{path} was compiled from other sources than those in {build.source_folder()}"
    found = Torch.imported()
    if facts.cuda_major != found.cuda_major:
        return f"{path} was compiled for CUDA {facts.cuda_major}; torch {found.version} is built for CUDA {found.cuda or 'none'}"
    return None


def usable() -> list[Compiled]:
    """The objects of these sources that this torch can load, with a GPU or without: the one compiled ahead of time, then those of the
    cache."""
    facts = None if why_passed_over(AHEAD_OF_TIME) else build.read_facts(AHEAD_OF_TIME)
    ahead = [Compiled(AHEAD_OF_TIME, facts.architectures)] if facts else []
    return ahead + cache.compiled(Torch.imported().cuda_major)


def visible_devices() -> tuple[str, ...]:
    """The compute capabilities of the GPUs that this process sees and the kernels are for, each once and in order ("8.0", "9.0"). Raises
    CompileError where there is none."""
    found = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    oldest = build.DEFAULT_ARCHITECTURES[0]
    served = tuple(f"{major}.{minor}" for major, minor in found if (major, minor) >= tuple(map(int, oldest.split("."))))
    if not served:
        names = ", ".join(f"{major}.{minor}" for major, minor in found) or "none"
        raise CompileError(f"no visible GPU has compute capability {oldest} or newer (visible: {names})")
    return served


def _load_object() -> Status:
    """Load an object that serves all visible GPUs, compiled before or now. Raises CompileError or OSError."""
    if Torch.imported().cuda is None:  # a torch for other devices that it calls cuda
        raise CompileError(f"torch {torch.__version__} is built without CUDA", way_out(Torch.imported()))
    devices = visible_devices()
    found = [(architectures.serves_all(one.architectures, devices), one) for one in usable()]
    passed_over = why_passed_over(AHEAD_OF_TIME) if AHEAD_OF_TIME.exists() else None
    faults = [passed_over] if passed_over else []
    faults += [f"{one.path} has code for {', '.join(one.architectures)} and none for each visible GPU ({', '.join(devices)})"
               for served, one in found if served is None]
    ranked = sorted(((served, one) for served, one in found if served is not None), key=lambda pair: pair[0])  # files stay in order
    for served, one in ranked:
        if served < Service.PTX:
            fault = _load_file(one.path)
            if fault is None:
                return Status(True, one.path, None, architectures=one.architectures)
            faults.append(fault)
    try:
        one = _load_compiled_now(devices)
    except (CompileError, OSError) as error:
        by_ptx = next((one for served, one in ranked if served == Service.PTX and _load_file(one.path) is None), None)
        if by_ptx is None:
            reasons = [*(fault for fault in faults if fault not in str(error)), str(error) or type(error).__name__]
            raise CompileError("; and ".join(reasons), _remedy(error, devices)) from error
        one = by_ptx
    return Status(True, one.path, None, architectures=one.architectures, note=_lacking(one, devices))


def _lacking(one: Compiled, devices: tuple[str, ...]) -> str | None:
    """What is to be said of an object that serves one of the devices by PTX alone; None if none does."""
    by_ptx = [device for device in devices if architectures.service(one.architectures, device) == Service.PTX]
    if not by_ptx:
        return None
    hopper = " and without Hopper's kernels" if "9.0" in by_ptx else ""
    return f"GPUs of {', '.join(by_ptx)} run PTX of an older generation{hopper}; {_build_command(devices)}"


def _build_command(devices: tuple[str, ...]) -> str:
    return f"on a machine with nvcc: python -m gbmoe build --arch {' '.join(devices)}"


def _remedy(error: Exception, devices: tuple[str, ...]) -> str | None:
    """The error's own remedy and, because it can always be done elsewhere, the command that compiles for these devices."""
    own = getattr(error, "remedy", None)
    several = "; or show gbmoe only some of the GPUs (CUDA_VISIBLE_DEVICES)" if len(devices) > 1 else ""
    return f"{own}; or fill the cache (GBMOE_CACHE_DIR) {_build_command(devices)}{several}" if own else None


def _load_compiled_now(devices: tuple[str, ...]) -> Compiled:
    """Load the object that this machine's compiler makes for `devices`, after compiling it if it is missing, broken or does not load.

    Only one of the processes of a node compiles it. The others then find another file than the one that they could not load.
    """
    torch_build = Torch.imported()
    nvcc = fitting_nvcc(torch_build)
    chosen = build.architectures(nvcc, devices)  # unless TORCH_CUDA_ARCH_LIST names others
    if architectures.serves_all(chosen, devices) is None:
        if os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
            raise CompileError(f"TORCH_CUDA_ARCH_LIST ({', '.join(chosen)}) leaves out a visible GPU ({', '.join(devices)})",
                               "unset TORCH_CUDA_ARCH_LIST or add what is missing")
        raise CompileError(f"nvcc {nvcc.version[0]}.{nvcc.version[1]} makes no code for one of the visible GPUs ({', '.join(devices)})",
                           "hide that GPU from gbmoe (CUDA_VISIBLE_DEVICES)")
    target = cache.path_for(torch_build.cuda_major, chosen)
    given_up = cache.identity(target)
    fault = f"{target} is missing" if given_up is None else _load_file(target)
    if fault is not None:
        cache.compile_into(target, nvcc, torch_build, chosen, jobs(), given_up, fault, cache.say, _by_quarters())
        fault = _load_file(target)
        if fault is not None:
            raise CompileError(fault)
    return Compiled(target, tuple(chosen))


def _by_quarters() -> Callable[[str], None]:
    """A report that passes on only four lines of a build, for a program that has other things to say."""
    last = 0

    def report(line: str) -> None:
        nonlocal last
        done, _, total = line[1:line.index("]")].partition("/")
        quarter = 4 * int(done) // int(total)
        if quarter > last:
            last = quarter
            cache.say(line)
    return report


def _load_file(path: Path) -> str | None:
    """Load one object. Returns None, or the reason why it cannot be loaded."""
    try:
        # Loading a file whose end is missing would kill the process. Tools that repair wheels rewrite the file that was compiled ahead of
        # time, and it then ends in another way.
        if path != AHEAD_OF_TIME and not build.whole(path):
            return f"{path} is damaged: it is not what gbmoe wrote there"
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} does not load: {_cause(error)}" if path == AHEAD_OF_TIME else _cause(error)
    return None


def _cause(error: OSError) -> str:
    """The error with its cause, which has the dynamic loader's message; torch's own error only names the file."""
    return f"{error}: {error.__cause__}" if error.__cause__ else str(error)


@functools.cache
def load() -> Status:
    """Load the extension, and build it before that where needed. This is done once in a process; later calls return the same result.

    It needs a CUDA device, whose compute capability it asks for, so it is called only once there is a CUDA tensor. Raises RuntimeError
    if GBMOE_REQUIRE_EXTENSION=1 and the extension is not available.
    """
    try:
        status = _load_object()
    except (CompileError, OSError) as error:
        reason, remedy = str(error) or type(error).__name__, getattr(error, "remedy", None)
        if os.environ.get("GBMOE_REQUIRE_EXTENSION") == "1":
            raise RuntimeError(f"GBMOE_REQUIRE_EXTENSION=1, but the CUDA extension is not available: {reason}"
                               f"{'; ' + remedy if remedy else ''}") from error
        cache.say(f"working without its CUDA extension: {reason.splitlines()[0]}")
        if remedy:
            cache.say(remedy)
        return Status(False, None, reason, remedy)
    if status.note:
        cache.say(status.note)
    return status


def status() -> Status:
    """The result of `load()` where there is a CUDA device, otherwise a Status that says so. Nothing is built without a CUDA device."""
    if not load.cache_info().currsize and not torch.cuda.is_available():
        return _without_device()
    return load()


def _without_device() -> Status:
    """Why torch has no CUDA device, and what has been compiled for the machines that have one."""
    found = Torch.imported()
    if found.cuda is None:
        return Status(False, None, f"no CUDA device: torch {found.version} is built without CUDA", way_out(found))
    try:
        torch.cuda.init()
        why = f"torch {found.version} sees none"
    except (RuntimeError, AssertionError) as error:  # it says what is wrong with the driver
        why = str(error).splitlines()[0].rstrip(".")
    ready = [f"{one.path} is built for {', '.join(one.architectures)}" for one in usable()]
    if AHEAD_OF_TIME.exists():
        ready += [fault for fault in [why_passed_over(AHEAD_OF_TIME)] if fault]
    remedy = None if ready else "on a machine with nvcc python -m gbmoe build --arch 9.0 (or that of your GPUs) compiles for other nodes"
    return Status(False, None, "; ".join([f"no CUDA device: {why}", *ready]), remedy)


def loaded() -> bool:
    """True if the kernels can be called. The first call on a machine with a CUDA device loads or builds them."""
    return load().loaded
