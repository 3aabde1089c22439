"""The launches of csrc/hopper/ for operands of 16 bits.

Operands are bfloat16 or float16, contiguous, aligned to 16 bytes and on one device. Weights are [E,F,H], contiguous along H, or where it
says so along F; their rows, and those of their gradients, may lie further apart, and they may be SeparateWeights. Sizes are integers [E],
on the host or the device. slot_of_row is int32 [P]: a GEMM that gathers reads row r from token slot_of_row[r] // top_k, and takes zeros
where a row has no slot. `low` is a LowRank whose product is added to the sums before they are rounded, or None; with one, no GEMM gathers.

Shape suffixes: T tokens, K slots a token, P rows of all groups, E groups (experts), H hidden, F ffn hidden, G columns of pairs, 2F, C runs
of 64 columns, N columns, R ranks.
"""

from __future__ import annotations

import functools

import torch

from gbmoe import extension
from gbmoe.engines.base import device_sizes
from gbmoe.engines.low_rank import LowRank
from gbmoe.launch import plain_activation
from gbmoe.launch.alignment import aligned, has_aligned_rows
from gbmoe.separate_weights import in_memory
from gbmoe.tuning import hopper_tiles
from gbmoe.tuning.device import Device
from gbmoe.tuning.hopper_tiles import GemmConfig


def up_gemm(x, slot_of_row_P, top_k, w1_EFH, v1_EFH, sizes, activation, save, low=None):
    """Engine.up of gathered rows x [P,H]; or, with slot_of_row, of the tokens [T,H], for silu and gelu_tanh only."""
    a_PF = x.new_empty(x.size(0) if slot_of_row_P is None else slot_of_row_P.size(0), w1_EFH.size(1))
    h_PF = torch.empty_like(a_PF) if save else None
    g_PF = torch.empty_like(a_PF) if save and v1_EFH is not None else None
    gathered = slot_of_row_P is not None
    config = hopper_tiles.up_gemm(Device.of(x.device), a_PF.size(0), x.size(1), a_PF.size(1), v1_EFH is not None, gathered=gathered,
                                  padded=gathered and is_padded(slot_of_row_P, x, top_k), along_f=w1_EFH.stride(2) != 1)
    launch_up(config, x, slot_of_row_P, top_k, w1_EFH, v1_EFH, device_sizes(sizes, x.device), activation, a_PF, h_PF, g_PF, low)
    return a_PF, h_PF, g_PF


def launch_up(config: GemmConfig, x, slot_of_row_P, top_k, w1_EFH, v1_EFH, sizes, activation, a_PF, h_PF, g_PF,
              low: LowRank | None = None) -> None:
    """up_gemm in a given configuration, with sizes on the device, into a, h and g; h and g may be None."""
    kind = plain_activation.kernel_arguments(activation)
    memory = workspace(x, sizes, config)
    w1, v1, places = in_memory(w1_EFH, v1_EFH)
    second = _low_rank(low, w1.stride(2) != 1)
    if v1 is None:
        torch.ops.gbmoe_cuda.hopper_up(
            x, slot_of_row_P, top_k, w1, places, second, sizes, kind, config.tiling, memory, a_PF, h_PF)
    else:
        torch.ops.gbmoe_cuda.hopper_up_glu(
            x, slot_of_row_P, top_k, w1, v1, places, second, sizes, kind, config.tiling, memory, a_PF, h_PF, g_PF)


def up_pairs_gemm(x_PH, w_EGH, bias_EG, sizes, activation, save, low=None):
    """Engine.up_pairs of gathered rows and weights that lie contiguous along F."""
    a_PF = x_PH.new_empty(x_PH.size(0), w_EGH.size(1) // 2)
    pairs_PG = x_PH.new_empty(x_PH.size(0), w_EGH.size(1)) if save else None
    config = hopper_tiles.up_gemm(Device.of(x_PH.device), a_PF.size(0), x_PH.size(1), a_PF.size(1), True, gathered=False, padded=False,
                                  along_f=True)
    sizes = device_sizes(sizes, x_PH.device)
    w, _, places = in_memory(w_EGH)
    torch.ops.gbmoe_cuda.hopper_up_pairs(
        x_PH, w, places, _low_rank(low, True), None if bias_EG is None else aligned(bias_EG), sizes,
        plain_activation.kernel_arguments(activation), config.tiling, workspace(x_PH, sizes, config), a_PF, pairs_PG)
    return a_PF, pairs_PG


def biased_rows_gemm(a, b, bias_EN, sizes, trans_b, splits, low=None):
    """out[rows of e] = a[rows of e] @ b[e] + bias[e], rounded once. `splits`: whether sums may be cut along K."""
    out = a.new_empty(a.size(0), bias_EN.size(1))
    config = hopper_tiles.biased_rows_gemm(Device.of(a.device), a.size(0), b.size(0), a.size(1), out.size(1), splits=splits)
    sizes = device_sizes(sizes, a.device)
    b, _, places = in_memory(b)
    torch.ops.gbmoe_cuda.hopper_rows_biased(a, b, places, _low_rank(low, not trans_b), aligned(bias_EN), sizes, trans_b, config.tiling,
                                            workspace(a, sizes, config), config.split.splitting, out)
    return out


def rows_gemm_gathered(x_TH, slot_of_row_P, top_k, w_EFH, sizes):
    """out[row] = x[token of row] @ w[e].T, [P,F], with zeros in rows without a slot."""
    product_PF = x_TH.new_empty(slot_of_row_P.size(0), w_EFH.size(1))
    w, _, places = in_memory(w_EFH)
    torch.ops.gbmoe_cuda.hopper_rows_gathered(x_TH, slot_of_row_P, top_k, w, places, device_sizes(sizes, x_TH.device),
                                              hopper_tiles.gathered_rows_gemm(Device.of(x_TH.device)).tiling, product_PF)
    return product_PF


def weight_gradient_gemm_gathered(a_PF, x_TH, slot_of_row_P, top_k, sizes, out_EFH=None):
    """out[e] = a[rows of e].T @ x[token of row], [E,F,H], whose rows may lie further apart. Rows without a slot count as zero rows of x.
    a may hold anything behind the last group."""
    return _weight_gradients_gathered(a_PF, None, x_TH, slot_of_row_P, top_k, sizes, out_EFH, None)[0]


def two_weight_gradients_gemm_gathered(a_PF, a2_PF, x_TH, slot_of_row_P, top_k, sizes, out_EFH=None, out2_EFH=None):
    """weight_gradient_gemm_gathered of a and of a2, which has a's shape, in one launch."""
    return _weight_gradients_gathered(a_PF, a2_PF, x_TH, slot_of_row_P, top_k, sizes, out_EFH, out2_EFH)


def _weight_gradients_gathered(a_PF: torch.Tensor, a2_PF: torch.Tensor | None, x_TH, slot_of_row_P, top_k, sizes, out_EFH, out2_EFH):
    """Both gradients, the second of which is None without a2. They are allocated where they are not given."""
    sizes = device_sizes(sizes, x_TH.device)
    out_EFH = x_TH.new_empty(sizes.numel(), a_PF.size(1), x_TH.size(1)) if out_EFH is None else out_EFH
    out2_EFH = torch.empty_like(out_EFH) if out2_EFH is None and a2_PF is not None else out2_EFH
    config = hopper_tiles.weight_gradient_gemm(Device.of(a_PF.device), a_PF.size(0), *out_EFH.shape, gathered=True,
                                               padded=is_padded(slot_of_row_P, x_TH, top_k), two=a2_PF is not None)
    torch.ops.gbmoe_cuda.hopper_weights_gathered(
        a_PF, a2_PF, x_TH, slot_of_row_P, top_k, sizes, config.tiling, workspace(a_PF, sizes, config), config.split.splitting, out_EFH,
        out2_EFH)
    return out_EFH, out2_EFH


def down_backward_gemm(dz_PH, w2_EFH, sizes, h_PF, g_PF, slot_of_row_P, weights_TK, activation, low=None):
    """Engine.down_backward without its last result, for gathered rows dz [P,H], where d is rounded to their dtype in between; weights have
    any floating dtype."""
    a_PF, dh_PF = torch.empty_like(h_PF), torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK, dots_CP, dweights_TK = _to_sum_dots(weights_TK, h_PF)
    config = hopper_tiles.down_backward_gemm(Device.of(h_PF.device), h_PF.size(1))
    w2, _, places = in_memory(w2_EFH)
    torch.ops.gbmoe_cuda.hopper_down_backward(
        dz_PH, w2, places, _low_rank(low, w2.stride(2) != 1), device_sizes(sizes, dz_PH.device), h_PF, g_PF, slot_of_row_P, weights_TK,
        plain_activation.kernel_arguments(activation), config.tiling, a_PF, dh_PF, dg_PF, dots_CP, dweights_TK)
    return a_PF, dh_PF, dg_PF, dweights_TK


def down_backward_pairs_gemm(dz_PH, w2_EFH, sizes, pairs_PG, slot_of_row_P, weights_TK, activation, low=None):
    """Engine.down_backward_pairs for gathered rows dz [P,H] and w2 that lies contiguous along H; otherwise as down_backward_gemm."""
    a_PF, dpairs_PG = pairs_PG.new_empty(pairs_PG.size(0), pairs_PG.size(1) // 2), torch.empty_like(pairs_PG)
    weights_TK, dots_CP, dweights_TK = _to_sum_dots(weights_TK, a_PF)
    config = hopper_tiles.down_backward_pairs_gemm(Device.of(a_PF.device), a_PF.size(1))
    w2, _, places = in_memory(w2_EFH)
    torch.ops.gbmoe_cuda.hopper_down_backward_pairs(
        dz_PH, w2, places, _low_rank(low, False), device_sizes(sizes, dz_PH.device), pairs_PG, slot_of_row_P, weights_TK,
        plain_activation.kernel_arguments(activation), config.tiling, a_PF, dpairs_PG, dots_CP, dweights_TK)
    return a_PF, dpairs_PG, dweights_TK


def _to_sum_dots(weights_TK, a_PF):
    """(weights as the kernel reads them, its partial sums for every 64 columns, their gradients), each None without weights."""
    if weights_TK is None:
        return None, None, None
    dots_CP = a_PF.new_empty((a_PF.size(1) + 63) // 64, a_PF.size(0), dtype=torch.float32)
    read_TK = (weights_TK.float() if weights_TK.dtype == torch.float64 else weights_TK).contiguous()
    return read_TK, dots_CP, weights_TK.new_zeros(weights_TK.shape)


def low_rank_rows_gemm(a, b, a2, b2, sizes, trans_b, low, splits):
    """a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e]) + low.rows[rows of e] @ low.b[e]; b [E,K,N], or [E,N,K] with trans_b. `splits`: whether
    sums may be cut along K."""
    out = a.new_empty(a.size(0), b.size(1 if trans_b else 2))
    inner = a.size(1) * (1 if a2 is None else 2)  # the tiles are those without the pair
    config = hopper_tiles.rows_gemm(Device.of(a.device), a.size(0), b.size(0), inner, out.size(1), splits=splits)
    launch_rows(config, a, b, a2, b2, device_sizes(sizes, a.device), trans_b, out, low)
    return out


def launch_rows(config: GemmConfig, a, b, a2, b2, sizes, trans_b, out, low: LowRank | None = None) -> None:
    """Hopper.rows_gemm with a given configuration, and sizes on the device or None. out may be float32 in square tiles and no cluster."""
    b, b2, places = in_memory(b, b2)
    torch.ops.gbmoe_cuda.hopper_rows(
        a, b, a2, b2, places, _low_rank(low, not trans_b), sizes, trans_b, config.tiling, workspace(a, sizes, config),
        config.split.splitting, out)


def _low_rank(low: LowRank | None, along_n: bool) -> list[torch.Tensor]:
    """The operands of the second pair as kernels take them: rows [P,R], and [E,N,R], or two of a gate and up, contiguous along R or
    along N, as the weights are. They are copied where they are not."""
    if low is None:
        return []
    if low.rows_PR.size(1) % 8:
        raise ValueError(f"low rank: rows: expected a multiple of 8 columns, got {low.rows_PR.size(1)}")
    return [aligned(low.rows_PR), *(_contiguous_along(b, along_n) for b in (low.b_ERN, low.b2_ERN) if b is not None)]


def _contiguous_along(b_ERN: torch.Tensor, along_n: bool) -> torch.Tensor:
    here = b_ERN if along_n else b_ERN.transpose(1, 2)
    here = here if has_aligned_rows(here) else aligned(here)
    return here.transpose(1, 2) if along_n else here


def workspace(like: torch.Tensor, sizes: torch.Tensor | None, config: GemmConfig) -> torch.Tensor | None:
    """Memory for the tile counter and the partial sums of split-K, or None where the GEMM uses neither."""
    if not config.tile_counter:
        return None
    groups = 1 if sizes is None else sizes.numel()
    return like.new_empty(_workspace_bytes(like.device, groups, config.split.per_sm), dtype=torch.uint8)


@functools.lru_cache(maxsize=256)
def _workspace_bytes(device: torch.device, groups: int, splits_per_sm: int) -> int:
    return extension.answer("hopper_workspace", torch.empty(0, dtype=torch.uint8, device=device), groups, splits_per_sm)


def is_padded(slot_of_row_P: torch.Tensor, tokens_TH: torch.Tensor, top_k: int) -> bool:
    """Whether experts' rows are padded, as far as the numbers of rows and slots tell: a plan with padding has more rows than slots unless
    the caller has dropped as many slots. It decides about speed alone."""
    return slot_of_row_P.size(0) > tokens_TH.size(0) * top_k
