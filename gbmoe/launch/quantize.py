"""Operands in e4m3 with their scales, see gbmoe/plain/plain_quantize.py. The CUDA kernels of csrc/hopper/float8/ where they are loaded,
otherwise plain PyTorch. No autograd.

Shape suffixes: T tokens, K columns, E experts, F ffn hidden, H hidden, P padded rows of the plan, Y bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gbmoe import float8
from gbmoe.float8 import ScaledKBlocks, ScaledRows, ScaledWeights
from gbmoe.launch.alignment import aligned, has_aligned_rows, has_pairs_in_aligned_rows
from gbmoe.launch.availability import float8_serves
from gbmoe.plain import plain_permute
from gbmoe.separate_weights import Stack, in_memory
from gbmoe.slot_map import SlotMap


def empty_scaled_rows(like: torch.Tensor, rows: int, columns: int) -> ScaledRows:
    """Rows in e4m3 with their scales, not initialised, on the device of `like`."""
    tiles = -(-columns // float8.TILE)
    return ScaledRows(like.new_empty(rows, columns, dtype=float8.FLOAT8), like.new_empty(rows, tiles, dtype=torch.float32))


def quantize_rows(x_PK: torch.Tensor, power_2_scale: bool) -> ScaledRows:
    """Rows in e4m3, see gbmoe.float8.quantize_rows; the CUDA kernel, for multiples of 16 columns, where it is loaded."""
    if not float8_serves(x_PK):
        return float8.quantize_rows(x_PK, power_2_scale)
    out = empty_scaled_rows(x_PK, *x_PK.shape)
    torch.ops.gbmoe_cuda.quantize_rows(x_PK.contiguous(), power_2_scale, out.values_PK, out.scales_PC)
    return out


def quantize_gathered(x_TH: torch.Tensor, slots: SlotMap, power_2_scale: bool) -> ScaledRows:
    """gather and quantize_rows, as one kernel where it is loaded; rows after the last expert may then hold anything. Dense maps only."""
    assert slots.columns_TK is None and slots.counts_T is None
    if not float8_serves(x_TH):
        return float8.quantize_rows(plain_permute.padded_gather(x_TH, slots)[0], power_2_scale)
    out = empty_scaled_rows(x_TH, slots.num_rows, x_TH.size(1))
    torch.ops.gbmoe_cuda.quantize_gathered(x_TH.contiguous(), slots.row_of_slot_TK, slots.slot_of_row_P, power_2_scale, out.values_PK,
                                           out.scales_PC)
    return out


def empty_k_blocks(like: torch.Tensor, rows: int, sizes_E: torch.Tensor) -> ScaledKBlocks:
    """k-blocks for `rows` rows of as many columns as `like` has, not initialised, on its device."""
    blocks, columns = float8.k_blocks(rows, sizes_E.numel()), like.size(1)
    return ScaledKBlocks(like.new_empty(blocks, columns, float8.TILE, dtype=float8.FLOAT8),
                         like.new_empty(blocks, columns, dtype=torch.float32), like.new_empty(sizes_E.numel(), dtype=torch.int32))


def quantize_k_blocks(x_PK: torch.Tensor, sizes_E: torch.Tensor, power_2_scale: bool) -> ScaledKBlocks:
    """Rows in e4m3 for a sum over them, see gbmoe.float8.quantize_k_blocks; the CUDA kernel, for multiples of 16 columns and int32 or int64
    sizes on the device of x, where it is loaded."""
    if not float8_serves(x_PK):
        return float8.quantize_k_blocks(x_PK, sizes_E, power_2_scale)
    out = empty_k_blocks(x_PK, x_PK.size(0), sizes_E)
    torch.ops.gbmoe_cuda.quantize_k_blocks(x_PK.contiguous(), None, 1, sizes_E, power_2_scale, out.values_BKR, out.scales_BK,
                                           out.filled_rows_E)
    return out


def quantize_gathered_k_blocks(x_TK: torch.Tensor, slots: SlotMap, sizes_E: torch.Tensor, power_2_scale: bool) -> ScaledKBlocks:
    """gather and quantize_k_blocks, as one kernel where it is loaded. Only for a plan's map, whose slot_of_row_P are the slots."""
    assert slots.columns_TK is None and slots.counts_T is None
    if not float8_serves(x_TK):
        return float8.quantize_k_blocks(plain_permute.padded_gather(x_TK, slots)[0], sizes_E, power_2_scale)
    out = empty_k_blocks(x_TK, slots.num_rows, sizes_E)
    torch.ops.gbmoe_cuda.quantize_k_blocks(x_TK.contiguous(), slots.slot_of_row_P, slots.top_k, sizes_E, power_2_scale, out.values_BKR,
                                           out.scales_BK, out.filled_rows_E)
    return out


def quantize_weights(w_EFH: Stack, power_2_scale: bool, transpose: bool) -> ScaledWeights:
    """A weight in e4m3, with `transpose` as [E,H,F], see gbmoe.float8.quantize_weights; the CUDA kernel, for multiples of 16, where it is
    loaded. That copies the weight where reads_weights_in_place says no."""
    if not float8_serves(w_EFH):
        return float8.quantize_weights(_as_tensor(w_EFH), power_2_scale, transpose)
    out = _empty_scaled_weights(w_EFH, transpose)
    _quantize_weights(w_EFH, power_2_scale, *((None, out) if transpose else (out, None)))
    return out


def quantize_weights_both_ways(w_EFH: Stack, power_2_scale: bool, memories: Sequence[torch.Tensor | None] = (None, None),
                               ) -> tuple[ScaledWeights, ScaledWeights]:
    """quantize_weights without and with `transpose`, from one read where the CUDA kernel is loaded.

    `memories`, where given, are what either is written to, uint8 [Y], Y = ScaledWeights.bytes_of.
    """
    out, transposed = (_empty_scaled_weights(w_EFH, transpose, memory_Y) for transpose, memory_Y in zip((False, True), memories))
    if float8_serves(w_EFH):
        _quantize_weights(w_EFH, power_2_scale, out, transposed)
        return out, transposed
    stack_EFH = _as_tensor(w_EFH)
    for to, transpose in ((out, False), (transposed, True)):
        scaled = float8.quantize_weights(stack_EFH, power_2_scale, transpose)
        to.values_ENK.copy_(scaled.values_ENK)
        to.scales.copy_(scaled.scales)
    return out, transposed


def reads_weights_in_place(w_EFH: Stack) -> bool:
    """Whether the kernel reads a weight where it lies: its rows, or its columns, in vectors of 16 bytes, whose elements are all of this
    weight or every second one."""
    return _rows_of_vectors(w_EFH) is not None


def _rows_of_vectors(w_EFH: Stack) -> tuple[Stack, bool] | None:
    """(a stack whose rows the kernel reads, whether that is the transposed one), or None."""
    for is_transposed in (False, True):
        rows = w_EFH.transpose(1, 2) if is_transposed else w_EFH
        if has_aligned_rows(rows) or has_pairs_in_aligned_rows(rows):
            return rows, is_transposed
    return None


def _quantize_weights(w_EFH: Stack, power_2_scale: bool, out: ScaledWeights | None, transposed: ScaledWeights | None) -> None:
    """The kernel. Blocks are square, so that the results of a transposed stack are the transposed results, with the same bits."""
    rows, is_transposed = _rows_of_vectors(w_EFH) or (aligned(w_EFH), False)
    tensor, _, places = in_memory(rows)
    both = (transposed, out) if is_transposed else (out, transposed)
    results = [field for to in both for field in ((None, None) if to is None else (to.values_ENK, to.scales))]
    torch.ops.gbmoe_cuda.quantize_weights(tensor, places, power_2_scale, *results)


def _as_tensor(w_EFH: Stack) -> torch.Tensor:
    return w_EFH if isinstance(w_EFH, torch.Tensor) else w_EFH.contiguous()


def _empty_scaled_weights(w_EFH: Stack, transpose: bool, memory_Y: torch.Tensor | None = None) -> ScaledWeights:
    shape = w_EFH.transpose(1, 2).shape if transpose else w_EFH.shape
    if memory_Y is None:
        memory_Y = torch.empty(ScaledWeights.bytes_of(shape), dtype=torch.uint8, device=w_EFH.device)
    return ScaledWeights.in_memory(memory_Y, shape, w_EFH.dtype)
