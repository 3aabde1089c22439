"""Tensors in blockwise-scaled e4m3: values, and a decoding scale for each tile of 128 of them (gbmoe/plain/plain_quantize.py).

Shape suffixes: P rows, K columns, E experts, N and K the sides of a weight; C tiles of a row, ceil(K / 128); B k-blocks of R = 128 rows;
Y bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
TILE = 128


@dataclass(frozen=True)
class ScaledRows:
    """Rows in e4m3 with their scales.

    Attributes:
        values_PK: [P,K], float8_e4m3fn, contiguous, or with rows that lie a multiple of 16 bytes apart.
        scales_PC: the decoding scales, float32 [P,C].
    """
    values_PK: torch.Tensor
    scales_PC: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The values that this stands for, float32 [P,K]."""
        return self.values_PK.float() * _spread(self.scales_PC, 1, self.values_PK.size(1))


@dataclass(frozen=True)
class ScaledWeights:
    """A weight of each expert in e4m3 with its scales.

    Attributes:
        values_ENK: [E,N,K], float8_e4m3fn, contiguous: out = rows @ values[e].T.
        scales: the decoding scales, float32 [E, ceil(N / 128), C].
        dtype: of the weight, and of the products that are computed with it.
    """
    values_ENK: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def in_memory(cls, memory_Y: torch.Tensor, shape_ENK: Sequence[int], dtype: torch.dtype) -> ScaledWeights:
        """One whose values and scales are views of `memory_Y`, uint8, which is not written; Y = bytes_of(shape_ENK)."""
        values = math.prod(shape_ENK)
        scales = memory_Y[_scales_begin(shape_ENK) :].view(torch.float32)
        return cls(memory_Y[:values].view(FLOAT8).view(*shape_ENK), scales.view(shape_ENK[0], *map(tiles_of, shape_ENK[1:])), dtype)

    @staticmethod
    def bytes_of(shape_ENK: Sequence[int]) -> int:
        """The bytes that values and scales of this shape take."""
        return _scales_begin(shape_ENK) + 4 * shape_ENK[0] * math.prod(map(tiles_of, shape_ENK[1:]))

    def new_rows(self, rows: int) -> torch.Tensor:
        """A tensor for rows @ values[e].T, [rows,N], that is not initialised."""
        return self.values_ENK.new_empty(rows, self.values_ENK.size(1), dtype=self.dtype)

    def dequantized(self) -> torch.Tensor:
        """The values that this stands for, float32 [E,N,K]."""
        lines = _spread(self.scales, 1, self.values_ENK.size(1))
        return self.values_ENK.float() * _spread(lines, 2, self.values_ENK.size(2))


@dataclass(frozen=True)
class ScaledKBlocks:
    """Rows of each expert in e4m3 for a sum over them, cut into k-blocks of 128 rows, each column of which has a scale.

    The rows of each expert begin a k-block of their own, and zeros fill up its last one. There is room for ceil(P / 128) + E k-blocks,
    which is enough for any sizes. Those after the last expert's may hold anything.

    Attributes:
        values_BKR: [B,K,128], float8_e4m3fn, contiguous: each k-block is transposed.
        scales_BK: the decoding scales, float32 [B,K].
        filled_rows_E: the rows of each expert with those that fill up its last k-block, int32 [E].
    """
    values_BKR: torch.Tensor
    scales_BK: torch.Tensor
    filled_rows_E: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The values that this stands for, as rows: float32 [128 B, K], of which expert e has filled_rows_E[e]."""
        columns = self.values_BKR.size(1)
        return (self.values_BKR.float() * self.scales_BK.unsqueeze(-1)).transpose(1, 2).reshape(-1, columns)


def k_blocks(rows: int, experts: int) -> int:
    """The number of k-blocks that is enough for `rows` rows of so many experts, whatever their sizes."""
    return tiles_of(rows) + experts


def tiles_of(size: int) -> int:
    """The number of tiles that cover `size` elements."""
    return -(-size // TILE)


def _scales_begin(shape_ENK: Sequence[int]) -> int:
    return -(-math.prod(shape_ENK) // 16) * 16  # bytes; aligned for any access


def _spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Each scale once for every one of the 128 elements along `dim` that share it; `size` elements in all."""
    return scales.repeat_interleave(TILE, dim).narrow(dim, 0, size)
