"""A stand-in for `megablocks_ops`, MegaBlocks' CUDA extension: the same functions on torch, for any device.

MegaBlocks' own extension does not compile with CUDA 13. Like it, these functions write to results that the caller allocated. Shapes
and meaning are those of gbmoe.compat.megablocks.ops, which computes the results.

Shape suffixes: B rows of a batch, R entries, E bins, N outputs.
"""

from __future__ import annotations

import torch

from gbmoe.compat.megablocks import ops


def exclusive_cumsum(x_BR: torch.Tensor, dim: int, out_BR: torch.Tensor) -> None:
    """Write the sums of all entries before each one to `out`."""
    out_BR.copy_(ops.exclusive_cumsum(x_BR, dim))


def inclusive_cumsum(x_BR: torch.Tensor, dim: int, out_BR: torch.Tensor) -> None:
    """Write the sums of all entries up to and including each one to `out`."""
    out_BR.copy_(ops.inclusive_cumsum(x_BR, dim))


def histogram(x: torch.Tensor, num_bins: int) -> torch.Tensor:
    """How often each of 0 .. num_bins - 1 occurs in each row of x, int32."""
    return ops.histogram(x, num_bins)


def indices(padded_bins_E: torch.Tensor, block_size: int, output_block_rows: int, output_block_columns: int,
            out: torch.Tensor) -> None:
    """Write the column indices of the block-sparse activation matrix to `out`."""
    out.copy_(ops.topology(padded_bins_E, block_size, output_block_rows, output_block_columns))


def replicate_forward(x_BE: torch.Tensor, bins_E: torch.Tensor, out_BN: torch.Tensor) -> None:
    """Write each x[:, e] to `out`, as often as bin e is long."""
    out_BN.copy_(ops.replicate(x_BE, bins_E, out_BN.size(1)))


def replicate_backward(grad_BN: torch.Tensor, bins_E: torch.Tensor, out_BE: torch.Tensor) -> None:
    """Write the sum of each bin's gradients to `out`."""
    out_BE.copy_(ops.sum_bins(grad_BN, bins_E))


def sort(x_R: torch.Tensor, end_bit: int, x_out_R: torch.Tensor, iota_out_R: torch.Tensor) -> None:
    """Write x, stably sorted by its bits [0, end_bit), and the index from which each entry came, to the two results."""
    values_R, indices_R = ops.sort(x_R, end_bit)
    x_out_R.copy_(values_R)
    iota_out_R.copy_(indices_R)
