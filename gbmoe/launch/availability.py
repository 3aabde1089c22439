"""Whether there are CUDA kernels for a tensor, and why not: the one place that asks."""

from __future__ import annotations

import functools

import torch

from gbmoe import extension
from gbmoe.separate_weights import Stack


def serves(tensor: Stack) -> bool:
    """Whether the kernels of csrc/ compute for this tensor: it is on a CUDA device, and they are loaded. This call loads them where
    that can be done."""
    return tensor.device.type == "cuda" and extension.loaded()


def why_not() -> str | None:
    """None if the CUDA extension is loaded, otherwise why what needs it does not run. Loads it where that can be done."""
    status = extension.status()
    return None if status.loaded else f"needs the CUDA extension: {status.reason}"


def sorts(device: torch.device, num_experts: int) -> bool:
    """Whether the kernels that sort slots by expert, of the plan and of a row map, are loaded and have room for `num_experts` experts in
    the device's shared memory."""
    return device.type == "cuda" and extension.loaded() and num_experts <= _most_experts(device)


@functools.cache
def _most_experts(device: torch.device) -> int:
    return extension.answer("routing_plan_max_experts", device.index)


def hopper_built() -> bool:
    """Whether the extension, which is loaded, has the kernels of csrc/hopper/."""
    return extension.has("hopper_rows")


def float8_serves(tensor: Stack) -> bool:
    """As `serves`. Raises RuntimeError for a CUDA device without float8 kernels: their code is for compute capability 9.0 alone, and an
    extension that was compiled without it does not have them."""
    return serves(tensor) and _has_float8(tensor.device)


@functools.cache
def _has_float8(device: torch.device) -> bool:
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0):
        raise RuntimeError(f"float8 kernels: expected a device of compute capability 9.0, got {device} of {found[0]}.{found[1]}")
    if not hopper_built():
        raise RuntimeError("float8 kernels: expected an extension compiled for 9.0, got one without; rebuild it with 9.0 in"
                           " TORCH_CUDA_ARCH_LIST")
    return True
