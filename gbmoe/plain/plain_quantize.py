"""Blockwise-scaled e4m3 to the bit in plain PyTorch: the oracle of csrc/hopper/float8/, and what computes it elsewhere.

Numbers that share a scale form a tile: 128 of a row of activations or gradients, or 128 x 128 of a weight; the last ones of a row or
weight may be smaller. For a sum over rows a tile is 128 rows of an expert in one column. With the largest magnitude m of a tile,
encode = 448 / m, each number is stored as e4m3(number * encode), rounded to nearest even, and stands for that times decode = 1 / encode,
all in float32. Only decode is kept. A tile of zeros has scales of one. A tile that holds NaN or infinity has a decoding scale of NaN, so
that all that is computed from it is NaN. csrc/hopper/float8/float8.cuh is the same in CUDA, except for the sign of a NaN.

Shape suffixes: T tokens, P rows, K columns, E experts, F and H the sides of a weight; C tiles of a row, ceil(K / 128); B k-blocks of
R = 128 rows.
"""

from __future__ import annotations

import torch

from gbmoe.float8.scaled_tensors import FLOAT8, TILE, ScaledKBlocks, ScaledRows, ScaledWeights, k_blocks, tiles_of

_LARGEST = 448.0  # of e4m3
_FLOAT32_LARGEST = torch.finfo(torch.float32).max


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
    tiles = tiles_of(columns)
    padded = torch.nn.functional.pad(x_PK.float(), (0, tiles * TILE - columns)).view(rows, tiles, TILE)
    encode, decode = tile_scales(padded.abs().amax(-1), power_2_scale)
    values = (padded * encode.unsqueeze(-1)).view(rows, tiles * TILE)[:, :columns].to(FLOAT8)
    return ScaledRows(values.contiguous(), decode)


def quantize_weights(w_EFH: torch.Tensor, power_2_scale: bool = False, transpose: bool = False) -> ScaledWeights:
    """A weight [E,F,H], any floating dtype, in e4m3; with `transpose` as [E,H,F]."""
    w = (w_EFH.transpose(1, 2) if transpose else w_EFH).float()
    experts, lines, columns = w.shape
    blocks = tiles_of(lines), tiles_of(columns)
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
        filled_rows.append(tiles_of(size) * TILE)
        row += size
    x_BKR = filled_PK.view(-1, TILE, columns).transpose(1, 2)
    encode, decode = tile_scales(x_BKR.abs().amax(-1), power_2_scale)
    values = (x_BKR * encode.unsqueeze(-1)).to(FLOAT8)
    return ScaledKBlocks(values.contiguous(), decode, torch.tensor(filled_rows, dtype=torch.int32, device=x_PK.device))
