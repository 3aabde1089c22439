"""Whether the kernels for groups of few rows compute a product: where reading the weights takes most of the time.

Each of these kernels multiplies a fixed number of a group's rows at a time, and reads the weights again for the next ones. How
many rows a group may have on average follows from that number, not from the number of multiprocessors: those share the groups
whatever kernel is chosen. Fitted on an H200 and an H100; a router that sends nearly all rows to one group was not measured.
"""

from __future__ import annotations

from gbmoe.tuning.device import Device

_MOST_GROUPS = 1024  # each CTA looks through the sizes for its rows, 128 of them at a time; more groups were not measured


def few_rows(rows: int, groups: int) -> bool:
    """Whether the kernels of any GPU (csrc/tensor_core/few_rows.cuh), which multiply 8 rows at a time, compute an m-grouped GEMM:
    where groups have so few rows on average that they beat low tiles of tensor_core's (docs/notes/few-tokens.md)."""
    return rows <= 2 * groups <= 2 * _MOST_GROUPS


def few_rows_on_hopper(rows: int, groups: int) -> bool:
    """Whether Hopper's own kernels (csrc/hopper/few_rows_gemm.cuh), which multiply 32 rows at a time, compute an m-grouped GEMM:
    where groups have so few rows on average that they beat all others (docs/notes/few-rows-by-tma.md)."""
    return rows <= 8 * groups <= 8 * _MOST_GROUPS


def few_rows_linear(device: Device, rows: int, columns: int) -> bool:
    """Whether a kernel for few rows computes out = x @ weight.T where no sum may be split: a batch-invariant router's logits.

    A CTA has 8 rows and 16 columns or 8, and takes as long as the few large tiles of the alternatives, which all run at once, if
    some four CTAs follow each other on a multiprocessor (docs/notes/few-rows-in-turns.md).
    """
    return rows * max(16, columns) / (8 * 16) <= device.tiles(512)
