"""Rows in e4m3 with their scales as rows of bytes, which gathers, pulls and all-to-alls move as they are.

A row of K columns has its K values, its C scales in float32, and bytes without a meaning up to Y, the next multiple of 16. No autograd.

Shape suffixes: P rows, K columns, C = ceil(K / 128) tiles of a row, Y bytes of a packed row.
"""

from __future__ import annotations

import torch

from gbmoe.float8 import FLOAT8, TILE, ScaledRows
from gbmoe.launch.alignment import aligned
from gbmoe.launch.quantize import quantize_rows


def bytes_of_row(columns: int) -> int:
    """Y. No more than rows of 16 bits and of a multiple of 16 bytes have."""
    return -(-(columns + 4 * -(-columns // TILE)) // 16) * 16


def pack(x_PK: torch.Tensor, power_2_scale: bool, out_PY: torch.Tensor | None = None) -> torch.Tensor:
    """The rows x, bfloat16 or float16, in e4m3, uint8 [P,Y]; written to out_PY where that is given."""
    rows, columns = x_PK.shape
    if out_PY is None:
        out_PY = x_PK.new_empty(rows, bytes_of_row(columns), dtype=torch.uint8)
    if rows == 0:
        return out_PY
    scaled = quantize_rows(aligned(x_PK), power_2_scale)
    # A copy to rows with a pitch takes as long for an element of one byte as for one of eight.
    words = torch.int64 if columns % 8 == 0 else torch.uint8
    out_PY.view(words)[:, : columns // words.itemsize].copy_(scaled.values_PK.view(words))
    scales = _scales_in(out_PY, columns)
    scales.copy_(scaled.scales_PC.view(scales.dtype))
    return out_PY


def unpack(packed_PY: torch.Tensor, columns: int) -> ScaledRows:
    """What `pack` took: the values where they are, Y bytes from row to row, and a copy of the scales."""
    scales = torch.empty(packed_PY.size(0), -(-columns // TILE), dtype=torch.float32, device=packed_PY.device)
    if packed_PY.size(0):
        of_rows = _scales_in(packed_PY, columns)
        scales.view(of_rows.dtype).copy_(of_rows)
    return ScaledRows(packed_PY[:, :columns].view(FLOAT8), scales)


def in_place(packed_PY: torch.Tensor, columns: int) -> ScaledRows:
    """The same without a copy where `columns` is a multiple of 4: the scales, too, lie Y bytes apart, as gbmoe/launch/dequantize.py takes
    them."""
    if columns % 4:
        return unpack(packed_PY, columns)
    return ScaledRows(packed_PY[:, :columns].view(FLOAT8), _scales_in(packed_PY, columns))


def as_packed(rows_PK: torch.Tensor) -> torch.Tensor:
    """uint8 [P,Y] in the first bytes of contiguous rows of 16 bits."""
    rows, columns = rows_PK.shape
    pitch = bytes_of_row(columns)
    return rows_PK.view(-1).view(torch.uint8)[: rows * pitch].view(rows, pitch)


def _scales_in(packed_PY: torch.Tensor, columns: int) -> torch.Tensor:
    """The scales [P,C], or as bytes [P,4C] where their place is no multiple of an element."""
    words = torch.float32 if columns % 4 == 0 else torch.uint8
    tiles = -(-columns // TILE)
    return packed_PY.view(words)[:, columns // words.itemsize :][:, : 4 * tiles // words.itemsize]
