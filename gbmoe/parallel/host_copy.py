"""Tensors that the device sends to the host, and the host's wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gbmoe.parallel.failures import wait_for_ranks


class HostCopy:
    """A copy of a tensor to the host, which the device makes while it goes on with other work."""

    def __init__(self, numbers: torch.Tensor):
        if numbers.device.type != "cuda":
            self._copy = numbers.detach().clone()
            self._there: Any = torch.cpu.Event()
            return
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    def wait(self, group: dist.ProcessGroup | None, look: Callable[[], None] | None = None,
             give_up: Callable[[Exception], None] | None = None) -> torch.Tensor:
        """Wait for the copy, whose elements depend on all ranks of `group`. Raises CollectiveFailed as wait_for_ranks does."""
        wait_for_ranks(self._there.query, group, look, give_up)
        return self._copy

    def if_there(self) -> torch.Tensor | None:
        """The copy if it has arrived, otherwise None. Does not wait."""
        return self._copy if self._there.query() else None


def to_host(numbers: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`numbers`, which depend on all ranks of `group`, on the CPU. Raises CollectiveFailed as wait_for_ranks does."""
    if numbers.device.type != "cuda" or torch.compiler.is_compiling():
        return numbers.cpu()
    return HostCopy(numbers).wait(group)


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the CPU, on `device`. The host does not wait for the device."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
