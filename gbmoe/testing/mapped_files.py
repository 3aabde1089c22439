"""Memory that ranks on CPUs map from each other: files in the host's memory. With it tests of mapped memory run without GPUs.

It takes the place of torch.distributed._symmetric_memory, of which it has the part that gbmoe uses:

    peer_memory.MAPPERS["cpu"] = lambda: mapped_files

The ranks of the group must be processes of one host. Nothing here is meant to be fast.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
_COUNT = itertools.count()
_PATHS: dict[int, Path] = {}  # of memory that was not mapped by other ranks yet, by its address


def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of `size` elements on the CPU, in a file, that `rendezvous` has other ranks map. Filled with bytes of 0xFF: NaN."""
    path = Path(_FOLDER) / f"gbmoe-{os.getpid()}-{next(_COUNT)}"
    memory = torch.from_file(str(path), shared=True, size=size, dtype=dtype, device=device)
    memory.view(torch.uint8).fill_(0xFF)
    _PATHS[memory.data_ptr()] = path
    return memory


@dataclass
class Handle:
    """The memory of all ranks of a group, uint8 [bytes] each."""

    rank: int
    of_rank: list[torch.Tensor]

    @property
    def buffer_ptrs(self) -> list[int]:
        """The address of each rank's memory in this process."""
        return [memory.data_ptr() for memory in self.of_rank]

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first elements of a rank's memory, of this shape and dtype."""
        return self.of_rank[rank][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> Handle:
    """Map the memory of all ranks of the group. Collective; all have equally much."""
    path, rank = _PATHS.pop(memory.data_ptr()), dist.get_rank(group)
    each: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(each, str(path), group=group)
    of_rank = [memory if of == rank else torch.from_file(theirs, shared=True, size=memory.numel(), dtype=memory.dtype, device="cpu")
               for of, theirs in enumerate(each)]
    dist.barrier(group)
    path.unlink()
    return Handle(rank, of_rank)
