"""Blockwise-scaled e4m3 to the bit in plain PyTorch, and the tensors that hold it.

Numbers that share a scale form a tile: 128 of a row of activations or gradients, or 128 x 128 of a weight; the last ones of a row or
weight may be smaller. For a sum over rows a tile is 128 rows of an expert in one column. With the largest magnitude m of a tile,
encode = 448 / m, each number is stored as e4m3(number * encode), rounded to nearest even, and stands for that times decode = 1 / encode,
all in float32. Only decode is kept. A tile of zeros has scales of one. A tile that holds NaN or infinity has a decoding scale of NaN, so
that all that is computed from it is NaN. csrc/hopper/float8/float8.cuh is the same in CUDA, except for the sign of a NaN.

Shape suffixes: T tokens, P rows, K columns, E experts, F and H the sides of a weight; C tiles of a row, ceil(K / 128); B k-blocks of
R = 128 rows; Y bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
TILE = 128
_LARGEST = 448.0  # of e4m3
_FLOAT32_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ScaledRows:
    """Rows in e4m3 with their scales.

    Attributes:
        values_PK: [P,K], float8_e4m3fn, contiguous.
        scales_PC: the decoding scales, float32 [P,C].
    """
    values_PK: torch.Tensor
    scales_PC: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The numbers that this stands for, float32 [P,K]."""
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
        return cls(memory_Y[:values].view(FLOAT8).view(*shape_ENK), scales.view(shape_ENK[0], *map(_tiles, shape_ENK[1:])), dtype)

    @staticmethod
    def bytes_of(shape_ENK: Sequence[int]) -> int:
        """The bytes that values and scales of this shape take."""
        return _scales_begin(shape_ENK) + 4 * shape_ENK[0] * math.prod(map(_tiles, shape_ENK[1:]))

    def new_rows(self, rows: int) -> torch.Tensor:
        """A tensor for rows @ values[e].T, [rows,N], that is not initialised."""
        return self.values_ENK.new_empty(rows, self.values_ENK.size(1), dtype=self.dtype)

    def dequantized(self) -> torch.Tensor:
        """The numbers that this stands for, float32 [E,N,K]."""
        lines = _spread(self.scales, 1, self.values_ENK.size(1))
        return self.values_ENK.float() * _spread(lines, 2, self.values_ENK.size(2))


@dataclass(frozen=True)
class ScaledKBlocks:
    """Rows of each expert in e4m3 for a sum over them, cut into k-blocks of 128 rows, each column of which has a scale.

    The rows of each expert begin a k-block of their own, and zeros fill up its last one. There is room for ceil(P / 128) + E k-blocks,
    which is enough for any sizes. Those behind the last expert's may hold anything.

    Attributes:
        values_BKR: [B,K,128], float8_e4m3fn, contiguous: each k-block is transposed.
        scales_BK: the decoding scales, float32 [B,K].
        filled_rows_E: the rows of each expert with those that fill up its last k-block, int32 [E].
    """
    values_BKR: torch.Tensor
    scales_BK: torch.Tensor
    filled_rows_E: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The numbers that this stands for, as rows: float32 [128 B, K], of which expert e has filled_rows_E[e]."""
        columns = self.values_BKR.size(1)
        return (self.values_BKR.float() * self.scales_BK.unsqueeze(-1)).transpose(1, 2).reshape(-1, columns)


def k_blocks(rows: int, experts: int) -> int:
    """The number of k-blocks that is enough for `rows` rows of so many experts, whatever their sizes."""
    return _tiles(rows) + experts


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _scales_begin(shape_ENK: Sequence[int]) -> int:
    return -(-math.prod(shape_ENK) // 16) * 16  # bytes; aligned for any access


def _spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Each scale once for every one of the 128 numbers along `dim` that share it; `size` numbers in all."""
    return scales.repeat_interleave(TILE, dim).narrow(dim, 0, size)


def tile_scales(largest: torch.Tensor, power_2_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(encode, decode), float32, of tiles with these largest magnitudes, float32."""
    # A division by torch.div is rounded once; a number divided by a tensor is the number times a reciprocal, rounded twice.
    encode = torch.div(torch.full_like(largest, _LARGEST), largest).clamp(max=_FLOAT32_LARGEST)
    if power_2_scale:
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(largest == 0, 1.0, encode)
    finite = largest <= _FLOAT32_LARGEST
    return torch.where(finite, encode, 0.0), torch.where(finite, torch.div(torch.ones_like(encode), encode), torch.nan)


def quantize_rows(x_PK: torch.Tensor, power_2_scale: bool = False) -> ScaledRows:
    """Rows [P,K], any floating dtype, in e4m3."""
    rows, columns = x_PK.shape
    tiles = _tiles(columns)
    padded = torch.nn.functional.pad(x_PK.float(), (0, tiles * TILE - columns)).view(rows, tiles, TILE)
    encode, decode = tile_scales(padded.abs().amax(-1), power_2_scale)
    values = (padded * encode.unsqueeze(-1)).view(rows, tiles * TILE)[:, :columns].to(FLOAT8)
    return ScaledRows(values.contiguous(), decode)


def quantize_weights(w_EFH: torch.Tensor, power_2_scale: bool = False, transpose: bool = False) -> ScaledWeights:
    """A weight [E,F,H], any floating dtype, in e4m3; with `transpose` as [E,H,F]."""
    w = (w_EFH.transpose(1, 2) if transpose else w_EFH).float()
    experts, lines, columns = w.shape
    blocks = _tiles(lines), _tiles(columns)
    padded = torch.nn.functional.pad(w, (0, blocks[1] * TILE - columns, 0, blocks[0] * TILE - lines))
    padded = padded.view(experts, blocks[0], TILE, blocks[1], TILE)
    encode, decode = tile_scales(padded.abs().amax((2, 4)), power_2_scale)
    values = (padded * encode[:, :, None, :, None]).view(experts, blocks[0] * TILE, blocks[1] * TILE)[:, :lines, :columns].to(FLOAT8)
    return ScaledWeights(values.contiguous(), decode, w_EFH.dtype)


def quantize_k_blocks(x_PK: torch.Tensor, sizes_E: torch.Tensor, power_2_scale: bool = False) -> ScaledKBlocks:
    """The rows [P,K] of experts with these sizes, any floating dtype, in e4m3 for a sum over them.

    Sizes that go beyond the rows are cut at the last row, and negative ones count as 0. k-blocks that are not in use are zeros. Waits for
    sizes that are on a device.
    """
    rows, columns = x_PK.shape
    filled_PK = torch.zeros(k_blocks(rows, sizes_E.numel()) * TILE, columns, dtype=torch.float32, device=x_PK.device)
    filled_rows: list[int] = []
    row = 0
    for size in sizes_E.tolist():
        size = min(max(size, 0), rows - row)
        first = sum(filled_rows)
        filled_PK[first : first + size] = x_PK[row : row + size]
        filled_rows.append(_tiles(size) * TILE)
        row += size
    x_BKR = filled_PK.view(-1, TILE, columns).transpose(1, 2)
    encode, decode = tile_scales(x_BKR.abs().amax(-1), power_2_scale)
    values = (x_BKR * encode.unsqueeze(-1)).to(FLOAT8)
    return ScaledKBlocks(values.contiguous(), decode, torch.tensor(filled_rows, dtype=torch.int32, device=x_PK.device))
