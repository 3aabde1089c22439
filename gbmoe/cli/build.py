"""`gbmoe build`: compile the CUDA extension into the cache, on a machine with nvcc that needs no GPU.

    python -m gbmoe build                  for the GPUs of this machine; without any, for those of TORCH_CUDA_ARCH_LIST, else for all
    python -m gbmoe build --arch 8.0 9.0   for compute capabilities 8.0 and 9.0

A process that sees a GPU finds the object there without a compiler, with every torch of the same CUDA major version.
"""

from __future__ import annotations

import argparse
import sys

import torch

from gbmoe.extension import architectures, build, cache, loader
from gbmoe.extension.architectures import Service
from gbmoe.extension.jobs import jobs
from gbmoe.extension.toolkit import CompileError, Nvcc, Torch, fitting_nvcc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --arch and --jobs."""
    parser.add_argument("--arch", nargs="+", metavar="ARCH", help="compute capabilities of the GPUs, such as 9.0, or 8.0+PTX for later"
                        " ones too (default: those of the visible GPUs; without any, TORCH_CUDA_ARCH_LIST, else all that nvcc knows)")
    parser.add_argument("--jobs", type=_count, metavar="N", help="compilers that run at the same time (default: as many as CPUs, free"
                        " memory and MAX_JOBS allow)")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number greater than 0, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Compile, unless an object for these architectures is there already. Return 1 where that is not possible, and 2 for architectures
    that make no sense."""
    asked = " ".join(arguments.arch or [])
    try:
        # Asked before a compiler is looked for: a node without one, but with a filled cache, lacks nothing.
        ready = _ready(architectures.listed(asked, "--arch") if asked else None)
    except CompileError as error:
        return _fail(error, 2 if asked else 1)
    if ready is not None:
        print(f"nothing to do: {ready.path} has code for {', '.join(ready.architectures)}")
        return 0
    try:
        torch_build = Torch.imported()
        nvcc = fitting_nvcc(torch_build)
        if not asked:
            return _build(torch_build, nvcc, _of_this_machine(nvcc), arguments.jobs)
        try:
            chosen = architectures.requested(asked, "--arch", nvcc)
        except CompileError as error:
            return _fail(error, 2)
        return _build(torch_build, nvcc, chosen, arguments.jobs)
    except (CompileError, OSError) as error:
        return _fail(error, 1)


def _ready(asked: list[str] | None) -> cache.Compiled | None:
    """An object that has code for all that is asked for, or, if nothing is, for the visible GPUs; None where there is none."""
    for one in loader.usable():
        if asked is not None:
            has = {*one.architectures, *(architecture.removesuffix("+PTX") for architecture in one.architectures)}
            fits = has.issuperset(asked)
        else:
            served = architectures.serves_all(one.architectures, loader.visible_devices()) if torch.cuda.is_available() else None
            fits = served is not None and served < Service.PTX
        if fits and (one.path == loader.AHEAD_OF_TIME or build.whole(one.path)):
            return one
    return None


def _of_this_machine(nvcc: Nvcc) -> list[str]:
    """The architectures of the visible GPUs; without any, those of TORCH_CUDA_ARCH_LIST, or the default ones."""
    if torch.cuda.is_available():
        return architectures.nearest(nvcc, loader.visible_devices())
    return architectures.architectures(nvcc)


def _build(torch_build: Torch, nvcc: Nvcc, chosen: list[str], count: int | None) -> int:
    target = cache.path_for(torch_build.cuda_major, chosen)
    given_up = cache.identity(target)
    if given_up is not None and build.whole(target):
        print(f"nothing to do: {target} is there")
        return 0
    cache.compile_into(target, nvcc, torch_build, chosen, jobs(count), given_up, f"{target} is incomplete", _tell, _tell)
    print(f"{target}, {target.stat().st_size / 1e6:.0f} MB")
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)


def _fail(error: Exception, status: int) -> int:
    print(f"gbmoe build: {error}", file=sys.stderr)
    remedy = getattr(error, "remedy", None)
    if remedy:
        print(f"gbmoe build: {remedy}", file=sys.stderr)
    return status
