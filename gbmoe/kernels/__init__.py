"""The functions that operators and engines compute with: CUDA kernels where they are loaded, otherwise plain PyTorch. No autograd.

The shapes of a SlotMap are not checked. Its entries may hold anything: one outside its range counts as none.

Shape suffixes: T tokens, K slots a token, H hidden, F ffn hidden, P padded rows of the plan, Y bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from gbmoe import extension, float8
from gbmoe.float8 import ScaledKBlocks, ScaledRows, ScaledWeights
from gbmoe.kernels import plain_torch
from gbmoe.slot_map import SlotMap
from gbmoe.tuning import permutation


def _kernels_serve(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and extension.loaded()


def _float8_kernels_serve(tensor: torch.Tensor) -> bool:
    """As _kernels_serve. Raises RuntimeError for a CUDA device without float8 kernels: their code is for compute capability 9.0 alone, and
    in an extension that was compiled without it they do nothing, without an error."""
    return _kernels_serve(tensor) and _has_float8_kernels(tensor.device)


@functools.cache
def _has_float8_kernels(device: torch.device) -> bool:
    found = torch.cuda.get_device_capability(device)
    if found != (9, 0):
        raise RuntimeError(f"float8 kernels: expected a device of compute capability 9.0, got {device} of {found[0]}.{found[1]}")
    if not extension.answer("hopper_built"):
        raise RuntimeError("float8 kernels: expected an extension compiled for 9.0, got one without; rebuild it with 9.0 in"
                           " TORCH_CUDA_ARCH_LIST")
    return True


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def gather(
    x_TH: torch.Tensor, slots: SlotMap, *, scale: torch.Tensor | None = None, probs: torch.Tensor | None = None,
    drop_zero_probs: bool = False, clear_behind: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """padded_gather without checks and autograd: (out [P,H], probs [P] or None); the CUDA kernel where it is loaded.

    With `clear_behind` the rows behind the last expert are zeros; otherwise they may hold anything.
    """
    if not _kernels_serve(x_TH):
        out_PH, gathered_P = plain_torch.padded_gather(x_TH, slots, scale=scale, probs=probs, drop_zero_probs=drop_zero_probs)
        return out_PH, None if probs is None else gathered_P
    out_PH = x_TH.new_empty(slots.num_rows, x_TH.size(1))
    probs_P = None if probs is None else probs.new_empty(slots.num_rows)
    torch.ops.gbmoe_cuda.padded_gather(x_TH.contiguous(), *slots, _contiguous(scale), _contiguous(probs), drop_zero_probs, clear_behind,
                                       permutation.SHORT_ROW, out_PH, probs_P)
    return out_PH, probs_P


def scatter(y_PH: torch.Tensor, slots: SlotMap, *, weights: torch.Tensor | None = None) -> torch.Tensor:
    """padded_scatter without checks and autograd; the CUDA kernel where it is loaded."""
    if not _kernels_serve(y_PH):
        return plain_torch.padded_scatter(y_PH, slots, weights=weights)
    out_TH = y_PH.new_empty(slots.num_tokens, y_PH.size(1))
    torch.ops.gbmoe_cuda.padded_scatter(
        y_PH.contiguous(), slots.row_of_slot_TK, slots.columns_TK, slots.counts_T, _contiguous(weights), out_TH)
    return out_TH


def scatter_backward(
    grad_TH: torch.Tensor, y_PH: torch.Tensor | None, slots: SlotMap, *, weights: torch.Tensor | None = None, need_rows: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of padded_scatter, see plain_torch.padded_scatter_backward; the CUDA kernel where it is loaded.

    Without `need_rows` the first result is empty.
    """
    if not _kernels_serve(grad_TH):
        rows, dots = plain_torch.padded_scatter_backward(grad_TH, y_PH, slots, weights=weights)
        return rows if need_rows else grad_TH.new_empty(0), dots
    grad_y_PH = grad_TH.new_empty(slots.num_rows, grad_TH.size(1)) if need_rows else None
    grad_weights = None
    if y_PH is not None and weights is not None:
        # Where there are rows, the kernel writes the scalars of all slots of a dense map, but of a ragged map only those in use.
        written = slots.columns_TK is None and grad_TH.numel() > 0
        grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format) if written \
            else torch.zeros_like(weights, memory_format=torch.contiguous_format)
    torch.ops.gbmoe_cuda.padded_scatter_backward(
        grad_TH.contiguous(), _contiguous(y_PH), *slots, _contiguous(weights), True, grad_y_PH, grad_weights)
    return (grad_TH.new_empty(0) if grad_y_PH is None else grad_y_PH,
            grad_TH.new_empty(0) if grad_weights is None else grad_weights)


def map_slots(
    row_TK: torch.Tensor, *, columns_TK: torch.Tensor | None = None, counts_T: torch.Tensor | None = None,
    pad_offsets_E: torch.Tensor | None = None, probs: torch.Tensor | None = None, rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_of_slot [T,K] and slot_of_row [P] of a SlotMap with these rows, see plain_torch.map_slots; the CUDA kernel where it is loaded."""
    if not _kernels_serve(row_TK):
        return plain_torch.map_slots(row_TK, columns_TK=columns_TK, counts_T=counts_T, pad_offsets_E=pad_offsets_E, probs=probs, rows=rows)
    row_of_slot_TK = torch.empty(row_TK.shape, dtype=torch.int32, device=row_TK.device)
    slot_of_row_P = row_of_slot_TK.new_empty(rows)
    pad_offsets_E = None if pad_offsets_E is None else pad_offsets_E.long().contiguous()
    torch.ops.gbmoe_cuda.map_slots(row_TK, columns_TK, counts_T, pad_offsets_E, _contiguous(probs), row_of_slot_TK, slot_of_row_P)
    return row_of_slot_TK, slot_of_row_P


def clear_rows_without_slot(slot_of_row_P: torch.Tensor, rows_PF: torch.Tensor) -> None:
    """Write zeros to the rows of a contiguous [P,F], of any dtype, whose entry in slot_of_row_P is negative; leave the others."""
    if not _kernels_serve(rows_PF):
        plain_torch.clear_rows_without_slot(slot_of_row_P, rows_PF)
    else:
        torch.ops.gbmoe_cuda.clear_rows_without_slot(slot_of_row_P, rows_PF)


def activate(h_PF: torch.Tensor, g_PF: torch.Tensor | None, activation: str) -> torch.Tensor:
    """act(h), times g where there is one, [P,F]; see plain_torch.activate. `activation` is a name in plain_torch.ACTIVATIONS."""
    if not _kernels_serve(h_PF):
        return plain_torch.activate(h_PF, g_PF, activation)
    a_PF = torch.empty_like(h_PF)
    torch.ops.gbmoe_cuda.activate(h_PF, g_PF, plain_torch.kernel_arguments(activation), a_PF)
    return a_PF


def activate_backward(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The activation's share of the experts' backward, (weight * a, dg, grad_weights); see plain_torch.activate_backward.

    dh overwrites d. dg is None without g, grad_weights is None without weights.
    """
    if not _kernels_serve(h_PF):
        return plain_torch.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
    a_PF = torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    torch.ops.gbmoe_cuda.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, plain_torch.kernel_arguments(activation),
                                           a_PF, dg_PF, grad_weights_TK)
    return a_PF, dg_PF, grad_weights_TK


def activate_backward_scaled(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None, activation: str, power_2_scale: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, ScaledRows, ScaledRows | None]:
    """activate_backward, and quantize_rows of dh and dg: (weight * a, dg, grad_weights, dh in e4m3, dg in e4m3). dh overwrites d.

    One kernel where it is loaded, for bf16 and fp16, multiples of 16 columns, and operands that are aligned to 16 bytes.
    """
    if not _float8_kernels_serve(h_PF):
        a_PF, dg_PF, grad_weights_TK = plain_torch.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
        scaled_dg = None if dg_PF is None else float8.quantize_rows(dg_PF, power_2_scale)
        return a_PF, dg_PF, grad_weights_TK, float8.quantize_rows(d_PF, power_2_scale), scaled_dg
    a_PF = torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    dh = empty_scaled_rows(h_PF, *h_PF.shape)
    dg = None if g_PF is None else empty_scaled_rows(h_PF, *h_PF.shape)
    torch.ops.gbmoe_cuda.activate_backward_scaled(
        h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, plain_torch.kernel_arguments(activation), power_2_scale, a_PF, dg_PF, dh.values_PK,
        dh.scales_PC, *((None, None) if dg is None else (dg.values_PK, dg.scales_PC)), grad_weights_TK)
    return a_PF, dg_PF, grad_weights_TK, dh, dg


def activate_backward_k_blocks(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None,
    sizes_E: torch.Tensor, activation: str, power_2_scale: bool,
) -> tuple[ScaledKBlocks, ScaledKBlocks, ScaledKBlocks | None, torch.Tensor | None, ScaledRows, ScaledRows | None]:
    """activate_backward with its results in e4m3 alone: (weight * a, dh, dg) as quantize_k_blocks makes them, grad_weights, and (dh, dg) as
    quantize_rows does, whose rows behind the last expert may hold anything. d may be overwritten. The
    gradient of a slot whose row is behind the last expert is undefined.

    One kernel where it is loaded, for bf16 and fp16, multiples of 16 columns, operands that are aligned to 16 bytes, and int32 or int64
    sizes on their device.
    """
    if not _float8_kernels_serve(h_PF):
        a_PF, dg_PF, grad_weights_TK = plain_torch.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
        a, dh_blocks = (float8.quantize_k_blocks(t, sizes_E, power_2_scale) for t in (a_PF, d_PF))
        dg_blocks = None if dg_PF is None else float8.quantize_k_blocks(dg_PF, sizes_E, power_2_scale)
        dg = None if dg_PF is None else float8.quantize_rows(dg_PF, power_2_scale)
        return a, dh_blocks, dg_blocks, grad_weights_TK, float8.quantize_rows(d_PF, power_2_scale), dg
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    tiles = -(-h_PF.size(1) // float8.TILE)
    dots_CP = None if weights_TK is None else h_PF.new_empty(tiles, h_PF.size(0), dtype=torch.float32)
    a = _empty_k_blocks(h_PF, h_PF.size(0), sizes_E)

    def like_a() -> ScaledKBlocks:
        return ScaledKBlocks(torch.empty_like(a.values_BKR), torch.empty_like(a.scales_BK), a.filled_rows_E)

    dh, dh_blocks = empty_scaled_rows(h_PF, *h_PF.shape), like_a()
    dg, dg_blocks = (None, None) if g_PF is None else (empty_scaled_rows(h_PF, *h_PF.shape), like_a())
    torch.ops.gbmoe_cuda.activate_backward_k_blocks(
        h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, sizes_E, plain_torch.kernel_arguments(activation), power_2_scale,
        dh.values_PK, dh.scales_PC, *((None, None) if dg is None else (dg.values_PK, dg.scales_PC)),
        a.values_BKR, a.scales_BK, dh_blocks.values_BKR, dh_blocks.scales_BK,
        *((None, None) if dg_blocks is None else (dg_blocks.values_BKR, dg_blocks.scales_BK)), a.filled_rows_E, dots_CP, grad_weights_TK)
    return a, dh_blocks, dg_blocks, grad_weights_TK, dh, dg


def empty_scaled_rows(like: torch.Tensor, rows: int, columns: int) -> ScaledRows:
    """Rows in e4m3 with their scales, not initialised, on the device of `like`."""
    tiles = -(-columns // float8.TILE)
    return ScaledRows(like.new_empty(rows, columns, dtype=float8.FLOAT8), like.new_empty(rows, tiles, dtype=torch.float32))


def quantize_rows(x_PK: torch.Tensor, power_2_scale: bool) -> ScaledRows:
    """Rows in e4m3, see gbmoe.float8.quantize_rows; the CUDA kernel, for multiples of 16 columns, where it is loaded."""
    if not _float8_kernels_serve(x_PK):
        return float8.quantize_rows(x_PK, power_2_scale)
    out = empty_scaled_rows(x_PK, *x_PK.shape)
    torch.ops.gbmoe_cuda.quantize_rows(x_PK.contiguous(), power_2_scale, out.values_PK, out.scales_PC)
    return out


def quantize_gathered(x_TH: torch.Tensor, slots: SlotMap, power_2_scale: bool) -> ScaledRows:
    """gather and quantize_rows, as one kernel where it is loaded; rows behind the last expert may then hold anything. Dense maps only."""
    assert slots.columns_TK is None and slots.counts_T is None
    if not _float8_kernels_serve(x_TH):
        return float8.quantize_rows(plain_torch.padded_gather(x_TH, slots)[0], power_2_scale)
    out = empty_scaled_rows(x_TH, slots.num_rows, x_TH.size(1))
    torch.ops.gbmoe_cuda.quantize_gathered(x_TH.contiguous(), slots.row_of_slot_TK, slots.slot_of_row_P, power_2_scale, out.values_PK,
                                           out.scales_PC)
    return out


def _empty_k_blocks(like: torch.Tensor, rows: int, sizes_E: torch.Tensor) -> ScaledKBlocks:
    """k-blocks for `rows` rows of as many columns as `like` has, not initialised, on its device."""
    blocks, columns = float8.k_blocks(rows, sizes_E.numel()), like.size(1)
    return ScaledKBlocks(like.new_empty(blocks, columns, float8.TILE, dtype=float8.FLOAT8),
                         like.new_empty(blocks, columns, dtype=torch.float32), like.new_empty(sizes_E.numel(), dtype=torch.int32))


def quantize_k_blocks(x_PK: torch.Tensor, sizes_E: torch.Tensor, power_2_scale: bool) -> ScaledKBlocks:
    """Rows in e4m3 for a sum over them, see gbmoe.float8.quantize_k_blocks; the CUDA kernel, for multiples of 16 columns and int32 or int64
    sizes on the device of x, where it is loaded."""
    if not _float8_kernels_serve(x_PK):
        return float8.quantize_k_blocks(x_PK, sizes_E, power_2_scale)
    out = _empty_k_blocks(x_PK, x_PK.size(0), sizes_E)
    torch.ops.gbmoe_cuda.quantize_k_blocks(x_PK.contiguous(), None, 1, sizes_E, power_2_scale, out.values_BKR, out.scales_BK,
                                           out.filled_rows_E)
    return out


def quantize_gathered_k_blocks(x_TK: torch.Tensor, slots: SlotMap, sizes_E: torch.Tensor, power_2_scale: bool) -> ScaledKBlocks:
    """gather and quantize_k_blocks, as one kernel where it is loaded. Only for a plan's map, whose slot_of_row_P are the slots."""
    assert slots.columns_TK is None and slots.counts_T is None
    if not _float8_kernels_serve(x_TK):
        return float8.quantize_k_blocks(plain_torch.padded_gather(x_TK, slots)[0], sizes_E, power_2_scale)
    out = _empty_k_blocks(x_TK, slots.num_rows, sizes_E)
    torch.ops.gbmoe_cuda.quantize_k_blocks(x_TK.contiguous(), slots.slot_of_row_P, slots.top_k, sizes_E, power_2_scale, out.values_BKR,
                                           out.scales_BK, out.filled_rows_E)
    return out


def quantize_weights(w_EFH: torch.Tensor, power_2_scale: bool, transpose: bool) -> ScaledWeights:
    """A weight in e4m3, with `transpose` as [E,H,F], see gbmoe.float8.quantize_weights; the CUDA kernel, for multiples of 16, where it is
    loaded."""
    if not _float8_kernels_serve(w_EFH):
        return float8.quantize_weights(w_EFH, power_2_scale, transpose)
    out = _empty_scaled_weights(w_EFH, transpose)
    results = (None, None, out.values_ENK, out.scales) if transpose else (out.values_ENK, out.scales, None, None)
    torch.ops.gbmoe_cuda.quantize_weights(w_EFH.contiguous(), power_2_scale, *results)
    return out


def quantize_weights_both_ways(w_EFH: torch.Tensor, power_2_scale: bool, memories: Sequence[torch.Tensor | None] = (None, None),
                               ) -> tuple[ScaledWeights, ScaledWeights]:
    """quantize_weights without and with `transpose`, from one read where the CUDA kernel is loaded.

    `memories`, where given, are what either is written to, uint8 [Y], Y = ScaledWeights.bytes_of.
    """
    out, transposed = (_empty_scaled_weights(w_EFH, transpose, memory_Y) for transpose, memory_Y in zip((False, True), memories))
    if not _float8_kernels_serve(w_EFH):
        for to, transpose in ((out, False), (transposed, True)):
            scaled = float8.quantize_weights(w_EFH, power_2_scale, transpose)
            to.values_ENK.copy_(scaled.values_ENK)
            to.scales.copy_(scaled.scales)
        return out, transposed
    torch.ops.gbmoe_cuda.quantize_weights(
        w_EFH.contiguous(), power_2_scale, out.values_ENK, out.scales, transposed.values_ENK, transposed.scales)
    return out, transposed


def _empty_scaled_weights(w_EFH: torch.Tensor, transpose: bool, memory_Y: torch.Tensor | None = None) -> ScaledWeights:
    shape = w_EFH.transpose(1, 2).shape if transpose else w_EFH.shape
    if memory_Y is None:
        memory_Y = w_EFH.new_empty(ScaledWeights.bytes_of(shape), dtype=torch.uint8)
    return ScaledWeights.in_memory(memory_Y, shape, w_EFH.dtype)
