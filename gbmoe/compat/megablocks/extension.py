"""A stand-in for `megablocks_ops`, MegaBlocks' CUDA extension: the same functions on torch, for any device.

MegaBlocks' own does not compile with CUDA 13. These write to results that the caller allocated, as the extension does;
shapes and meaning are those of gbmoe.compat.megablocks.ops, which computes.

Shape suffixes: B rows of a batch, R entries, E bins, N outputs.
"""

from __future__ import annotations

import torch

from gbmoe.compat.megablocks import ops


def exclusive_cumsum(x_BR: torch.Tensor, dim: int, out_BR: torch.Tensor) -> None:
    """Sums of the entries before each, to out."""
    out_BR.copy_(ops.exclusive_cumsum(x_BR, dim))


def inclusive_cumsum(x_BR: torch.Tensor, dim: int, out_BR: torch.Tensor) -> None:
    """Sums of the entries up to and with each, to out."""
    out_BR.copy_(ops.inclusive_cumsum(x_BR, dim))


def histogram(x: torch.Tensor, num_bins: int) -> torch.Tensor:
    """How often each of 0 .. num_bins - 1 occurs in each row of x, int32."""
    return ops.histogram(x, num_bins)


def indices(padded_bins_E: torch.Tensor, block_size: int, output_block_rows: int, output_block_columns: int,
            out: torch.Tensor) -> None:
    """Column indices of the block-sparse activation matrix, to out."""
    out.copy_(ops.topology(padded_bins_E, block_size, output_block_rows, output_block_columns))


def replicate_forward(x_BE: torch.Tensor, bins_E: torch.Tensor, out_BN: torch.Tensor) -> None:
    """Each x[:, e] as often as bin e is long, to out."""
    out_BN.copy_(ops.replicate(x_BE, bins_E, out_BN.size(1)))


def replicate_backward(grad_BN: torch.Tensor, bins_E: torch.Tensor, out_BE: torch.Tensor) -> None:
    """Sum of each bin's gradients, to out."""
    out_BE.copy_(ops.sum_bins(grad_BN, bins_E))


def sort(x_R: torch.Tensor, end_bit: int, x_out_R: torch.Tensor, iota_out_R: torch.Tensor) -> None:
    """x, stably sorted by its bits [0, end_bit), and where each entry stood, to the two results."""
    values_R, indices_R = ops.sort(x_R, end_bit)
    x_out_R.copy_(values_R)
    iota_out_R.copy_(indices_R)
