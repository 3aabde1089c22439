"""Alignment of operands for kernels that read 16 bytes at a time."""

from __future__ import annotations

import torch


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` if it is contiguous and starts at a multiple of 16 bytes, otherwise a copy that is and does."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
