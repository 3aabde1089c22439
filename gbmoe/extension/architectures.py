"""GPU architectures: which ones csrc/ is compiled for, and which devices an object that was compiled for some of them runs on.

They are written as in TORCH_CUDA_ARCH_LIST: "8.0", "9.0a" (code of that device alone), "10.0f" (code of its family), "9.0+PTX" (with PTX
too, which the driver compiles for any later device). Standard library only: setup.py runs this file before gbmoe can be imported.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable

from .toolkit import CompileError, Nvcc

DEFAULT_ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# TORCH_CUDA_ARCH_LIST also takes family names.
_NAMES = {
    "Volta": "7.0+PTX", "Turing": "7.5+PTX", "Ampere": "8.0;8.6+PTX", "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX", "Blackwell+Tegra": "11.0", "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
_FORM = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


class Service(enum.IntEnum):
    """How well code for some architectures serves a device; the smaller, the better."""
    EXACT = 0
    SAME_GENERATION = 1
    PTX = 2  # the driver compiles it when it is loaded; without the kernels that only one generation has


def code_of(architecture: str) -> str:
    """ "90a" of "9.0a+PTX"."""
    return architecture.removesuffix("+PTX").replace(".", "")


def key(architecture: str) -> tuple[int, int, str]:
    """Sorts architectures by age."""
    major, minor, suffix, ptx = _parts(architecture)
    return major, minor, suffix + ptx


def _parts(architecture: str) -> tuple[int, int, str, str]:
    found = _FORM.fullmatch(architecture)
    if not found:
        raise CompileError(f"expected an architecture such as 8.0 or 9.0+PTX, got {architecture!r}")
    return int(found[1]), int(found[2]), found[3], found[4] or ""


def service(built: Iterable[str], device: str) -> Service | None:
    """How well an object that was compiled for `built` serves a device of compute capability `device` ("9.0"); None where it has no code
    that runs there."""
    major, minor, _, _ = _parts(device)
    found: list[Service] = []
    for architecture in built:
        its_major, its_minor, suffix, ptx = _parts(architecture)
        if (its_major, its_minor) == (major, minor):
            found.append(Service.EXACT)
        elif suffix == "a":
            continue
        elif its_major == major and its_minor < minor:
            found.append(Service.SAME_GENERATION)
        elif ptx and suffix == "" and (its_major, its_minor) < (major, minor):
            found.append(Service.PTX)
    return min(found, default=None)


def serves_all(built: Iterable[str], devices: Iterable[str]) -> Service | None:
    """How well it serves the device that it serves worst; None where one of them has no code."""
    built = list(built)
    found = [service(built, device) for device in devices]
    return None if None in found else max((one for one in found if one is not None), default=None)


def listed(text: str, name: str) -> list[str]:
    """The architectures of a list in TORCH_CUDA_ARCH_LIST's form, with names of families too. `name` is what the user called it.

    Raises CompileError for one that has no such form.
    """
    for family, numbers in _NAMES.items():
        text = re.sub(rf"\b{re.escape(family)}\b", numbers, text)
    chosen = [part for part in re.split(r"[;,\s]+", text) if part]
    for part in chosen:
        if not _FORM.fullmatch(part):
            raise CompileError(f"{name}: expected entries such as 8.0 or 9.0+PTX, got {part!r}")
    return sorted(set(chosen), key=key)


def requested(text: str, name: str, nvcc: Nvcc) -> list[str]:
    """The `listed` architectures. Raises CompileError for one that nvcc does not know, too."""
    chosen = listed(text, name)
    for part in chosen:
        code = code_of(part)
        if code not in nvcc.codes and code.rstrip("af") not in nvcc.codes:
            raise CompileError(f"{name}: nvcc {nvcc.version[0]}.{nvcc.version[1]} cannot compile for {part}"
                               f"; it knows {', '.join(sorted(nvcc.codes, key=lambda c: int(re.sub('[af]', '', c))))}")
    return chosen


def nearest(nvcc: Nvcc, wanted: Iterable[str]) -> list[str]:
    """Those of `wanted` that this nvcc knows, in order.

    One that it does not know is replaced by the newest before it, whose code (in the same generation) or PTX runs there; one that is older
    than all that nvcc knows is left out. The newest architecture comes with PTX for later devices. Raises CompileError if none is left.
    """
    wanted = list(wanted)
    known = sorted(int(code) for code in nvcc.codes if code.isdigit())
    found: dict[int, bool] = {}  # code -> whether a device of a later generation needs its PTX
    for code in sorted(int(code_of(part)) for part in wanted):
        before = [one for one in known if one <= code]
        if before:
            found[before[-1]] = found.get(before[-1], False) or before[-1] // 10 != code // 10
    if not found:
        raise CompileError(f"nvcc {nvcc.version[0]}.{nvcc.version[1]} knows none of the architectures {', '.join(wanted)}")
    found[max(found)] = True
    return [f"{code // 10}.{code % 10}{'+PTX' if ptx else ''}" for code, ptx in found.items()]


def architectures(nvcc: Nvcc, default: Iterable[str] = DEFAULT_ARCHITECTURES) -> list[str]:
    """The architectures to compile for: those of TORCH_CUDA_ARCH_LIST where it is set, otherwise the `nearest` to `default`."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    return requested(text, "TORCH_CUDA_ARCH_LIST", nvcc) if text else nearest(nvcc, default)
