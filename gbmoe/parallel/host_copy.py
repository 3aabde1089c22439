"""Numbers that the device sends to the host, and the host's wait for them: the one place where a rank that hangs is noticed on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gbmoe.parallel import groups

# How long the host asks without a pause; how long it then lets other threads of Python run between its questions, but does not sleep,
# because a thread that sleeps is woken late, and the device has nothing to do meanwhile; and how long it sleeps afterwards.
_SPIN_SECONDS = 0.01
_AWAKE_SECONDS = 1.0
_PAUSE_SECONDS = 1e-4


class HostCopy:
    """A copy of numbers to the host that the device makes while it goes on with other work."""

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
        """Wait for the numbers, which depend on all ranks of `group`. Raises CollectiveFailed as wait_for_ranks does."""
        wait_for_ranks(self._there.query, group, look, give_up)
        return self._copy

    def if_there(self) -> torch.Tensor | None:
        """The numbers if they have arrived, otherwise None. Does not wait."""
        return self._copy if self._there.query() else None


def to_host(numbers: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`numbers`, which depend on all ranks of `group`, on the CPU. Raises CollectiveFailed as wait_for_ranks does."""
    if numbers.device.type != "cuda" or torch.compiler.is_compiling():
        return numbers.cpu()
    return HostCopy(numbers).wait(group)


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few numbers of the CPU on `device`. The host does not wait for the device."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def wait_for_ranks(there: Callable[[], bool], group: dist.ProcessGroup | None, look: Callable[[], None] | None = None,
                   give_up: Callable[[Exception], None] | None = None) -> None:
    """Wait until `there` says so, shortly before the group's timeout at the longest. Meanwhile `look` is called again and again; what it
    raises ends the wait. `give_up` is called with the error before the roll is called, which takes seconds.

    NCCL's watchdog ends the process at the timeout without saying which rank it waited for; until then the ranks that wait can
    still call each other.

    Raises:
        CollectiveFailed: naming the ranks that do not answer, or do not wait, too.
    """
    begin, limit = time.monotonic(), None
    with groups.Waiting(group):
        while not there():
            waited = time.monotonic() - begin
            if waited <= _SPIN_SECONDS:
                continue
            if look is not None:
                look()
            if limit is None:  # torch takes as long as a few kernels to tell it, and most waits are shorter than that
                timeout = groups.timeout_of(group)
                limit = max(timeout - 2 * groups.ROLL_CALL_SECONDS, timeout / 2)
            if waited > limit:
                why = f"no answer within {limit:.0f} s"
                if give_up is not None:
                    give_up(groups.CollectiveFailed(why))
                raise groups.failure(group, why)
            time.sleep(0 if waited < _AWAKE_SECONDS else _PAUSE_SECONDS)
