"""The tiles of the tensor_core engine's GEMMs.

Fitted on an H200, which is not what this engine is for, and a router's on an H100 (docs/notes/tensor-core-speed.md). Numbers of
tiles stand for multiprocessors without one, and are scaled as such; a wide tile and a square one were compared with 164 KiB of
shared memory and more, not with 100.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from gbmoe.tuning.device import Device
from gbmoe.tuning.hopper_tiles import PANEL, WEIGHT_GRADIENT_PANEL, ceil_div


@dataclass(frozen=True)
class TensorCoreConfig:
    """How one grouped GEMM of the tensor_core engine is divided.

    Attributes:
        tile_m, tile_n: the size of a CTA's tile; csrc/tensor_core/traits.cuh names those that there are.
        panel: the most tiles along M that are walked before the next tile along N.
    """
    tile_m: int
    tile_n: int
    panel: int = PANEL

    @functools.cached_property
    def tiling(self) -> tuple[int, ...]:
        """A Tiling of csrc/tensor_core/launch.cuh, field by field, as a launch takes it."""
        return self.tile_m, self.tile_n, self.panel


WIDE, SQUARE, LOW = TensorCoreConfig(128, 256), TensorCoreConfig(128, 128), TensorCoreConfig(64, 128)
_FEWEST_WIDE = 128      # with fewer wide tiles some multiprocessors have none
_FEW_LOW = 64           # so few low tiles leave half of the multiprocessors without one
_WIDE_IS_FASTER = 1.1   # a column in a square tile takes this many times as long as one in a wide tile
_ROWS_OF_LOW = 64       # rows a group on average up to which half of a tile of 128 rows would be empty


@functools.lru_cache(maxsize=1024)
def rows_gemm(device: Device, rows: int, groups: int, columns: int) -> TensorCoreConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e]: low tiles where groups have few rows on average, or one group
    has few low tiles."""
    if rows <= _ROWS_OF_LOW * groups or few_low_tiles(device, rows, groups, columns):
        tile = LOW
    else:
        tile = _wide_or_square(device, rows / WIDE.tile_m, columns)
    return replace(tile, panel=device.panel(PANEL))


@functools.lru_cache(maxsize=1024)
def up_gemm(device: Device, rows: int, groups: int) -> TensorCoreConfig:
    """The configuration of an expert's first GEMM with its activation, which has no square tiles."""
    return replace(LOW if rows <= _ROWS_OF_LOW * groups else WIDE, panel=device.panel(PANEL))


@functools.lru_cache(maxsize=1024)
def weight_gradient_gemm(device: Device, groups: int, features: int, columns: int) -> TensorCoreConfig:
    """The configuration of out[e] = a[rows of e].T @ b[rows of e], [features,columns] for each group."""
    tile = _wide_or_square(device, groups * ceil_div(features, WIDE.tile_m), columns)
    return replace(tile, panel=device.panel(WEIGHT_GRADIENT_PANEL))


def few_low_tiles(device: Device, rows: int, groups: int, columns: int) -> bool:
    """Whether a GEMM of one group has so few low tiles that larger ones would leave most multiprocessors without any: a router's
    logits. The Hopper engine asks too, where no sum may be split."""
    return groups == 1 and ceil_div(rows, LOW.tile_m) * ceil_div(columns, LOW.tile_n) <= device.tiles(_FEW_LOW)


def _wide_or_square(device: Device, tiles_m: float, columns: int) -> TensorCoreConfig:
    """Wide tiles, which read a quarter less of their operands for each term, where there are enough and the last one is not too
    empty."""
    wide = ceil_div(columns, WIDE.tile_n)
    fits = wide * WIDE.tile_n < ceil_div(columns, SQUARE.tile_n) * SQUARE.tile_n * _WIDE_IS_FASTER
    return WIDE if fits and tiles_m * wide >= device.tiles(_FEWEST_WIDE) else SQUARE
