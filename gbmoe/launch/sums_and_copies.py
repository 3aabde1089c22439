"""Sums and copies for which torch has an operator, but no program can call it, or it is slow. CUDA kernels where they are loaded, otherwise
torch's. No autograd."""

from __future__ import annotations

import torch

from gbmoe.launch.alignment import aligned, has_aligned_rows
from gbmoe.launch.availability import serves

_16_BIT = (torch.bfloat16, torch.float16)
_AT_MOST_32_BIT = (*_16_BIT, torch.float32)


def add_to_rows(to: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """to += added, of one shape, dtype and device; the sum is rounded once. Returns `to`."""
    if (to.dtype in _16_BIT and serves(to) and to.numel() % 8 == 0
            and all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (to, added))):
        torch.ops.gbmoe_cuda.add_to_rows(to, added)
        return to
    return to.add_(added)


def copy_scaled(tensor: torch.Tensor, scale: float, to: torch.Tensor) -> torch.Tensor:
    """to = tensor * scale, of one shape and device, each of any floating dtype and any strides; returns `to`. Where both have three
    dimensions and are contiguous along different ones, one kernel reads and writes whole lines, which torch's does not."""
    kinds = {tensor.dtype, to.dtype}
    if tensor.dim() == 3 and kinds.issubset(_AT_MOST_32_BIT) and serves(tensor):
        along, to_along = _fastest(tensor), _fastest(to)
        if along is not None and to_along is not None and along != to_along:
            torch.ops.gbmoe_cuda.copy_transposed(tensor, scale, to)
            return to
    return torch.mul(tensor, scale, out=to)


def with_aligned_rows(matrices: torch.Tensor) -> torch.Tensor:
    """`matrices` [E,R,C] if it has aligned rows, otherwise a contiguous copy."""
    if has_aligned_rows(matrices):
        return matrices
    if matrices.is_contiguous():
        return aligned(matrices)
    return copy_scaled(matrices, 1.0, torch.empty_like(matrices, memory_format=torch.contiguous_format))


def _fastest(tensor: torch.Tensor) -> int | None:
    """The dimension along which it is contiguous, as csrc/copy_transposed.cu finds it."""
    return next((dim for dim in range(tensor.dim()) if tensor.stride(dim) == 1 and tensor.size(dim) > 1), None)
