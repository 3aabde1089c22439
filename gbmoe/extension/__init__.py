"""The compiled CUDA kernels: loader.py finds and loads them, cache.py keeps objects that were compiled at first use or by `gbmoe build`,
build.py compiles csrc/, and install.py decides what an installation does.

Without the extension every operator still works through PyTorch; with GBMOE_REQUIRE_EXTENSION=1 its absence is an error.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from gbmoe.extension.build import source_folder
from gbmoe.extension.loader import Status, load, loaded, status

__all__ = ["Status", "answer", "has", "load", "loaded", "source_folder", "status"]


def has(name: str) -> bool:
    """Whether the extension, which is loaded, was compiled with the operator `name`."""
    return hasattr(torch.ops.gbmoe_cuda, name)


def answer(name: str, *arguments):
    """Call an operator of the extension that returns a number or a bool, not tensors.

    torch.jit.trace records every call of an operator and fails for these results. Another thread is not traced.
    """
    operator = getattr(torch.ops.gbmoe_cuda, name)
    if not torch.jit.is_tracing():  # type: ignore[attr-defined]
        return operator(*arguments)
    with ThreadPoolExecutor(1) as one:
        return one.submit(operator, *arguments).result()
