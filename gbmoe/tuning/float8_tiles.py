"""The tiles of the Hopper engine's GEMMs of e4m3 operands with scales, whose k-blocks have 128 terms.

Fitted on an H200, the tile counter of short sums on an H100 (docs/notes/float8-tiles.md, hopper-float8-main-loop.md).
"""

from __future__ import annotations

import functools
from dataclasses import replace

from gbmoe.tuning import hopper_tiles
from gbmoe.tuning.device import Device
from gbmoe.tuning.hopper_tiles import NARROW, PANEL, WIDE, GemmConfig, ceil_div


@functools.lru_cache(maxsize=1024)
def rows_gemm(device: Device, rows: int, inner: int, columns: int) -> GemmConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e].T of scaled e4m3 operands; where two products are summed, `inner`
    counts the terms of both.

    Narrow tiles are faster where they leave no more columns empty than wide ones. Clusters gain nothing. A tile counter is for
    long sums, and for shorter ones of large GEMMs, next to which its schedule is short (docs/notes/schedule-tile-counter.md).
    """
    narrow, wide = ceil_div(columns, NARROW) * NARROW, ceil_div(columns, WIDE) * WIDE
    counter = inner >= 2048 or (inner >= 512 and 2 * rows * inner * columns >= device.flops(1e11))
    return GemmConfig(NARROW if narrow <= 1.02 * wide else WIDE, panel=device.panel(PANEL), tile_counter=counter)


@functools.lru_cache(maxsize=1024)
def up_gemm(device: Device, rows: int, inner: int, ffn: int, glu: bool) -> GemmConfig:
    """The configuration of an expert's first GEMM of scaled e4m3 operands, with its activation: clusters of two and, for long
    sums, a tile counter."""
    return replace(hopper_tiles.up_gemm(device, rows, inner, ffn, glu), tile_counter=inner >= 2048, most_ahead=0)


@functools.lru_cache(maxsize=64)
def weight_gradient_gemm(device: Device) -> GemmConfig:
    """The configuration of out[e] = a[rows of e].T @ b[rows of e] of scaled e4m3 operands, in k-blocks of 128 rows.

    The longest sums come first, from a counter, as of hopper_tiles.weight_gradient_gemm. The kernels have no clusters and do not
    split sums; what either would gain is not known.
    """
    return GemmConfig(WIDE, panel=device.panel(hopper_tiles.WEIGHT_GRADIENT_PANEL), tile_counter=True)
