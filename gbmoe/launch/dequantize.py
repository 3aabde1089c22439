"""What rows in e4m3 stand for, in the layer's dtype or quantised again along tokens. The CUDA kernels of csrc/hopper/float8/ where they are
loaded, for multiples of 16 columns, otherwise plain PyTorch. No autograd.

The rows' values and scales may both be views with a pitch, as packed_rows.in_place makes them.

Shape suffixes: T tokens, P rows, K columns, E experts.
"""

from __future__ import annotations

import torch

from gbmoe import float8
from gbmoe.float8 import TILE, ScaledKBlocks, ScaledRows
from gbmoe.launch.availability import float8_serves
from gbmoe.launch.quantize import empty_k_blocks
from gbmoe.plain import plain_permute
from gbmoe.slot_map import SlotMap


def dequantize_rows(scaled: ScaledRows, dtype: torch.dtype) -> torch.Tensor:
    """What the values stand for, [P,K]: each times its scale in float32, rounded once to `dtype`, bfloat16 or float16."""
    if float8_serves(scaled.values_PK):
        out_PK = scaled.values_PK.new_empty(scaled.values_PK.shape, dtype=dtype)
        torch.ops.gbmoe_cuda.dequantize_rows(scaled.values_PK, scaled.scales_PC, None, 1, out_PK)
        return out_PK
    out_PK = scaled.values_PK.to(dtype, memory_format=torch.contiguous_format)  # exact
    whole, scales_PC = out_PK.size(1) // TILE, scaled.scales_PC
    out_PK[:, : whole * TILE].unflatten(1, (whole, TILE)).mul_(scales_PC[:, :whole].unsqueeze(2))
    if out_PK.size(1) > whole * TILE:
        out_PK[:, whole * TILE :].mul_(scales_PC[:, whole:])
    return out_PK


def dequantize_gathered(tokens: ScaledRows, slots: SlotMap, dtype: torch.dtype) -> torch.Tensor:
    """gather of dequantize_rows, [P,K], as one kernel where it is loaded; rows after the last expert may then hold anything. Only for a
    plan's map, whose slot_of_row_P are the slots."""
    assert slots.columns_TK is None and slots.counts_T is None
    if not float8_serves(tokens.values_PK):
        return plain_permute.padded_gather(dequantize_rows(tokens, dtype), slots)[0]
    out_PK = tokens.values_PK.new_empty(slots.num_rows, tokens.values_PK.size(1), dtype=dtype)
    torch.ops.gbmoe_cuda.dequantize_rows(tokens.values_PK, tokens.scales_PC, slots.slot_of_row_P, slots.top_k, out_PK)
    return out_PK


def requantize_k_blocks(scaled: ScaledRows, slots: SlotMap | None, sizes_E: torch.Tensor, power_2_scale: bool, dtype: torch.dtype,
                        ) -> ScaledKBlocks:
    """quantize_k_blocks of dequantize_rows or, with a plan's `slots`, of dequantize_gathered, to the bit; as one kernel where it is loaded,
    for int32 or int64 sizes on the device of the rows."""
    assert slots is None or (slots.columns_TK is None and slots.counts_T is None)
    values = scaled.values_PK
    if not float8_serves(values):
        rows_PK = dequantize_rows(scaled, dtype) if slots is None else dequantize_gathered(scaled, slots, dtype)
        return float8.quantize_k_blocks(rows_PK, sizes_E, power_2_scale)
    out = empty_k_blocks(values, values.size(0) if slots is None else slots.num_rows, sizes_E)
    slot_of_row_P, top_k = (None, 1) if slots is None else (slots.slot_of_row_P, slots.top_k)
    torch.ops.gbmoe_cuda.requantize_k_blocks(values, scaled.scales_PC, slot_of_row_P, top_k, sizes_E, power_2_scale,
                                             dtype == torch.bfloat16, out.values_BKR, out.scales_BK, out.filled_rows_E)
    return out
