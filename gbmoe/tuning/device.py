"""Device: what a choice depends on besides the call, and how constants that were fitted on one GPU are scaled to another.

A constant in this folder stands for a quantity that another GPU has more or less of. These are the quantities:

    Device.tiles            a number of tiles or CTAs stands for waves: how often every
                            multiprocessor gets one
    Device.flops            a number of FLOP stands for the time that the tensor cores take,
                            next to a fixed cost
    Device.panel            a panel's height stands for the shape of a wave: a part of the
                            result that is about as high as wide
    Device.l2_power_of_two  a length stands for bytes: what a wave reads, or a group's
                            weights, next to what the L2 holds

On an H100 and an H200, where constants were measured, each gives the constant itself. On any other GPU it is reckoned.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

# FLOP that the tensor cores of one multiprocessor do in a cycle with dense operands of 16 bits, by compute capability, from
# NVIDIA's data sheets. They do not tell clocks, nor of a card whose tensor cores are slowed down (H20). A later capability counts as
# the last one here.
_FLOPS_A_CYCLE = {(7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 7): 2048, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192,
                  (11, 0): 8192, (12, 0): 1024}


class Device(NamedTuple):
    """A GPU, as far as choices depend on it. A tuple, because it is a key of every cache of choices, and a tuple's hash takes no
    Python.

    `multiprocessors`, of a MIG instance those that it has, whatever gbmoe.limit_multiprocessors says; `l2_bytes`,
    the size of the L2 cache; `capability`, the compute capability.
    """
    multiprocessors: int
    l2_bytes: int
    capability: tuple[int, int]

    @staticmethod
    def of(device: torch.device) -> Device:
        """What torch says of a CUDA device, asked once. Any other device has no kernel that is chosen here, and counts as
        FITTED_ON."""
        # Asked for each launch. An operand's device has an index; what "cuda" alone means may change, and is not kept.
        return _found(device if device.index is not None else _current(device))

    def tiles(self, fitted: float) -> float:
        """How many tiles, or CTAs, are as many for each multiprocessor as `fitted` were."""
        return fitted * self.multiprocessors / FITTED_ON.multiprocessors

    def flops(self, fitted: float) -> float:
        """How many FLOP take as many cycles of all tensor cores as `fitted` did."""
        return fitted * (self._flops_a_cycle() / FITTED_ON._flops_a_cycle())

    def panel(self, fitted: int) -> int:
        """The height of a panel, in tiles along M, where `fitted` was best: both sides of what CTAs that run at once cover grow
        with the square root of their number."""
        return max(1, round(fitted * math.sqrt(self.multiprocessors / FITTED_ON.multiprocessors)))

    @property
    def l2_power_of_two(self) -> int:
        """The largest power of two of bytes that the L2 holds. An H100's 50 MiB and an H200's 60 are both 32, and need the same
        choices."""
        return 1 << max(0, self.l2_bytes.bit_length() - 1)

    def _flops_a_cycle(self) -> int:
        earlier = [known for known in _FLOPS_A_CYCLE if known <= self.capability] or [min(_FLOPS_A_CYCLE)]
        return self.multiprocessors * _FLOPS_A_CYCLE[max(earlier)]


# An H200, on which constants were fitted, most of them on an H100 too: that has as many multiprocessors.
FITTED_ON = Device(132, 60 << 20, (9, 0))


def _current(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


@functools.cache
def _found(device: torch.device) -> Device:
    if device.type != "cuda":
        return FITTED_ON
    found = torch.cuda.get_device_properties(device)
    return Device(found.multi_processor_count, found.L2_cache_size, (found.major, found.minor))
