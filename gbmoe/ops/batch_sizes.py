"""The check of a grouped GEMM's group sizes, on the host or on the device."""

from __future__ import annotations

import torch

from gbmoe._checks import require


def check_sizes(batch_sizes: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless no size is negative and their sum is `rows`; on a device this is an assertion, without a wait."""
    if batch_sizes.device.type == "cpu":
        sizes = batch_sizes.tolist()  # Python's sums do not overflow
        low, total = min(sizes, default=0), sum(sizes)
        require(low >= 0, "gmm", "batch_sizes", "no negative entry", low)
        require(total == rows, "gmm", "batch_sizes", lambda: f"sum(batch_sizes) == a.size(0) == {rows}", total)
    elif batch_sizes.device.type != "meta":
        torch._assert_async(_sizes_fill(batch_sizes, rows),
                            f"gmm: batch_sizes: expected no negative entry and sum(batch_sizes) == a.size(0) == {rows}")


_UNSIGNED = {torch.int32: torch.uint32, torch.int64: torch.uint64}


def _sizes_fill(sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Whether no size is negative and their sum is `rows`, which is less than 2**53; a boolean tensor on the sizes' device.

    A negative size is replaced by a huge one. Sums in float64 are exact up to 2**53, do not overflow, and cannot return to `rows` once
    they are beyond it.
    """
    return sizes.view(_UNSIGNED[sizes.dtype]).double().sum() == rows
