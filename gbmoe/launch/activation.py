"""The experts' activation and its gradient, alone and together with what quantises their results. CUDA kernels where they are loaded,
otherwise plain PyTorch. No autograd.

Shape suffixes: T tokens, K slots a token, E experts, F ffn hidden, G columns of pairs, 2F, P padded rows of the plan, C tiles of a row.
"""

from __future__ import annotations

import torch

from gbmoe import float8
from gbmoe.float8 import ScaledKBlocks, ScaledRows
from gbmoe.launch.availability import float8_serves, serves
from gbmoe.launch.quantize import empty_k_blocks, empty_scaled_rows
from gbmoe.plain import plain_activation


def activate(h_PF: torch.Tensor, g_PF: torch.Tensor | None, activation: str) -> torch.Tensor:
    """act(h), times g where there is one, [P,F]; see plain_activation.activate. `activation` is a name in plain_activation.ACTIVATIONS."""
    if not serves(h_PF):
        return plain_activation.activate(h_PF, g_PF, activation)
    a_PF = torch.empty_like(h_PF)
    torch.ops.gbmoe_cuda.activate(h_PF, g_PF, plain_activation.kernel_arguments(activation), a_PF)
    return a_PF


def activate_pairs(pairs_PG: torch.Tensor, activation: str) -> torch.Tensor:
    """`activate` of h and g that lie element by element in pairs [P,2F], contiguous: [P,F]."""
    if not serves(pairs_PG):
        return plain_activation.activate_pairs(pairs_PG, activation)
    a_PF = pairs_PG.new_empty(pairs_PG.size(0), pairs_PG.size(1) // 2)
    torch.ops.gbmoe_cuda.activate_pairs(pairs_PG, plain_activation.kernel_arguments(activation), a_PF)
    return a_PF


def activate_pairs_backward(
    pairs_PG: torch.Tensor, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`activate_backward` of pairs [P,2F], contiguous: (weight * a [P,F], the pairs of dh and dg, grad_weights [T,K] or None). d may be
    overwritten."""
    if not serves(pairs_PG):
        return plain_activation.activate_pairs_backward(pairs_PG, d_PF, slot_of_row_P, weights_TK, activation)
    a_PF, dpairs_PG = torch.empty_like(d_PF), torch.empty_like(pairs_PG)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    torch.ops.gbmoe_cuda.activate_pairs_backward(pairs_PG, d_PF, slot_of_row_P, weights_TK, plain_activation.kernel_arguments(activation),
                                                 a_PF, dpairs_PG, grad_weights_TK)
    return a_PF, dpairs_PG, grad_weights_TK


def activate_backward(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The activation's share of the experts' backward, (weight * a, dg, grad_weights); see plain_activation.activate_backward.

    dh overwrites d. dg is None without g, grad_weights is None without weights.
    """
    if not serves(h_PF):
        return plain_activation.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
    a_PF = torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    torch.ops.gbmoe_cuda.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, plain_activation.kernel_arguments(activation),
                                           a_PF, dg_PF, grad_weights_TK)
    return a_PF, dg_PF, grad_weights_TK


def activate_backward_scaled(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None, activation: str, power_2_scale: bool, in_pairs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, ScaledRows, ScaledRows | None]:
    """activate_backward, and quantize_rows of dh and dg: (weight * a, dg, grad_weights, dh in e4m3, dg in e4m3). dh overwrites d.

    `in_pairs`, with g: in place of dg stand the pairs of dh and dg, element by element, [P,2F]. Then a overwrites d, and is returned there,
    so that no more memory is taken.

    One kernel where it is loaded, for bf16 and fp16, multiples of 16 columns, and operands that are aligned to 16 bytes.
    """
    if not float8_serves(h_PF):
        a_PF, dg_PF, grad_weights_TK = plain_activation.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
        scaled_dg = None if dg_PF is None else float8.quantize_rows(dg_PF, power_2_scale)
        scaled_dh = float8.quantize_rows(d_PF, power_2_scale)
        if not in_pairs:
            return a_PF, dg_PF, grad_weights_TK, scaled_dh, scaled_dg
        pairs_PG = _pairs(d_PF, dg_PF)
        return d_PF.copy_(a_PF), pairs_PG, grad_weights_TK, scaled_dh, scaled_dg
    own_a_PF = None if in_pairs else torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else h_PF.new_empty(h_PF.size(0), h_PF.size(1) * (2 if in_pairs else 1))
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    dh = empty_scaled_rows(h_PF, *h_PF.shape)
    dg = None if g_PF is None else empty_scaled_rows(h_PF, *h_PF.shape)
    torch.ops.gbmoe_cuda.activate_backward_scaled(
        h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, plain_activation.kernel_arguments(activation), power_2_scale, own_a_PF, dg_PF,
        dh.values_PK, dh.scales_PC, *((None, None) if dg is None else (dg.values_PK, dg.scales_PC)), grad_weights_TK)
    return d_PF if own_a_PF is None else own_a_PF, dg_PF, grad_weights_TK, dh, dg


def _pairs(dh_PF: torch.Tensor, dg_PF: torch.Tensor | None) -> torch.Tensor:
    """[P,2F], whose columns are those of dh and of dg in turns."""
    assert dg_PF is not None  # only a gate has pairs
    return torch.stack((dh_PF, dg_PF), -1).flatten(1)


def activate_backward_k_blocks(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None,
    sizes_E: torch.Tensor, activation: str, power_2_scale: bool, in_pairs: bool = False,
) -> tuple[ScaledKBlocks, ScaledKBlocks, ScaledKBlocks | None, torch.Tensor | None, ScaledRows, ScaledRows | None]:
    """activate_backward with its results in e4m3 alone: (weight * a, dh, dg) as quantize_k_blocks makes them, grad_weights, and (dh, dg) as
    quantize_rows does, whose rows after the last expert may hold anything. d may be overwritten. The
    gradient of a slot whose row is after the last expert is undefined.

    `in_pairs`, with g: in place of the k-blocks of dh stand those of the pairs of dh and dg, [B,2F,128], and None in place of dg's.

    One kernel where it is loaded, for bf16 and fp16, multiples of 16 columns, operands that are aligned to 16 bytes, and int32 or int64
    sizes on their device.
    """
    if not float8_serves(h_PF):
        a_PF, dg_PF, grad_weights_TK = plain_activation.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
        left_PF, left2_PF = (_pairs(d_PF, dg_PF), None) if in_pairs else (d_PF, dg_PF)
        a, dh_blocks = (float8.quantize_k_blocks(t, sizes_E, power_2_scale) for t in (a_PF, left_PF))
        dg_blocks = None if left2_PF is None else float8.quantize_k_blocks(left2_PF, sizes_E, power_2_scale)
        dg = None if dg_PF is None else float8.quantize_rows(dg_PF, power_2_scale)
        return a, dh_blocks, dg_blocks, grad_weights_TK, float8.quantize_rows(d_PF, power_2_scale), dg
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    tiles = -(-h_PF.size(1) // float8.TILE)
    dots_CP = None if weights_TK is None else h_PF.new_empty(tiles, h_PF.size(0), dtype=torch.float32)
    a = empty_k_blocks(h_PF, h_PF.size(0), sizes_E)
    dh, dg = empty_scaled_rows(h_PF, *h_PF.shape), None if g_PF is None else empty_scaled_rows(h_PF, *h_PF.shape)
    pairs = _blocks_like(a, 2) if in_pairs else None
    dh_blocks = _blocks_like(a, 1) if pairs is None else _every_second_column(pairs, 0)
    dg_blocks = None if g_PF is None else _blocks_like(a, 1) if pairs is None else _every_second_column(pairs, 1)
    torch.ops.gbmoe_cuda.activate_backward_k_blocks(
        h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, sizes_E, plain_activation.kernel_arguments(activation), power_2_scale,
        dh.values_PK, dh.scales_PC, *((None, None) if dg is None else (dg.values_PK, dg.scales_PC)),
        a.values_BKR, a.scales_BK, dh_blocks.values_BKR, dh_blocks.scales_BK,
        *((None, None) if dg_blocks is None else (dg_blocks.values_BKR, dg_blocks.scales_BK)), a.filled_rows_E, dots_CP, grad_weights_TK)
    return (a, dh_blocks, dg_blocks, grad_weights_TK, dh, dg) if pairs is None else (a, pairs, None, grad_weights_TK, dh, dg)


def _blocks_like(blocks: ScaledKBlocks, times: int) -> ScaledKBlocks:
    """k-blocks of the same rows with so many columns for each, not initialised."""
    of, columns, rows = blocks.values_BKR.shape
    return ScaledKBlocks(blocks.values_BKR.new_empty(of, times * columns, rows), blocks.scales_BK.new_empty(of, times * columns),
                         blocks.filled_rows_E)


def _every_second_column(blocks: ScaledKBlocks, first: int) -> ScaledKBlocks:
    return ScaledKBlocks(blocks.values_BKR[:, first::2], blocks.scales_BK[:, first::2], blocks.filled_rows_E)
