"""Experts whose products of rows are computed in blockwise-scaled e4m3 (gbmoe/plain/plain_quantize.py); the same steps on every device.

What a recipe quantises: x on its way to the padded rows, the activation's result, the gradient of the output on its way to the padded
rows, those of the pre-activations, and the weights, each in the orientation that its product sums along. Gradients of weights are
computed by another engine, from tensors in the layer's dtype; or, with float8_weight_gradients, from the same values quantised
along the rows. With float8_dispatch the rows of x and of the output's gradient are, for these, what e4m3 stands for.

Shape suffixes: T tokens, P rows of all groups, E groups (experts), H hidden, F ffn hidden, M rows and N columns of a group's result, K
inner, C tiles of a row, B k-blocks, R rows of one, Y bytes.
"""

from __future__ import annotations

import torch

from gbmoe import float8, launch
from gbmoe._checks import dtype_name
from gbmoe.engines.base import Engine, GatheredRows, device_sizes, host_sizes
from gbmoe.engines.gathered_scaled_rows import GatheredScaledRows
from gbmoe.engines.hopper import Hopper, workspace
from gbmoe.engines.reference import Reference
from gbmoe.float8 import TILE, Float8BlockScaling, ScaledKBlocks, ScaledRows, ScaledWeights
from gbmoe.launch.alignment import aligned, has_aligned_rows
from gbmoe.plain import plain_activation, plain_plan
from gbmoe.problem import result_shape
from gbmoe.separate_weights import Stack
from gbmoe.tuning import float8_tiles
from gbmoe.tuning.device import Device

_DTYPES = (torch.bfloat16, torch.float16)
_NORMAL = torch.finfo(torch.float32)


class Float8(Engine):
    """The steps of a layer's experts. A subclass defines `scaled_product` and `scaled_weight_gradient`, and which engine computes what is
    not in float8.

    Between `up` and `down` the activation's result is a ScaledRows, not a tensor; what `up_backward` takes are ScaledRows, too. With
    float8_weight_gradients what `weight_gradient` takes on the left are the ScaledKBlocks that `down_backward` returns. Each weight may be
    a ScaledWeights, in the orientation that the product sums along.
    """

    unscaled: Engine
    reads_separate_weights = True

    def __init__(self, recipe: Float8BlockScaling):
        self.name, self.power_2_scale, self.float8_weight_gradients = recipe.engine, recipe.power_2_scale, recipe.float8_weight_gradients
        self.float8_dispatch, self.recipe = recipe.float8_dispatch, recipe

    def refuses(self, problem):
        if problem.dtype not in _DTYPES:
            return f"takes bfloat16 and float16, not {dtype_name(problem.dtype)}"
        if problem.inner % 16 or problem.columns % 16:
            return f"takes row lengths that are multiples of 16, not {problem.inner} and {problem.columns}"
        if self.float8_dispatch and self.power_2_scale and problem.dtype == torch.float16:
            return "with float8_dispatch and power_2_scale takes bfloat16: finite values in float16 would round to infinity"
        return self.unscaled.refuses(problem)

    def scaled_product(self, a: ScaledRows, b: ScaledWeights, sizes: torch.Tensor, out: torch.Tensor, a2: ScaledRows | None = None,
                       b2: ScaledWeights | None = None) -> torch.Tensor:
        """out[rows of e] = a[rows of e] @ b[e].T (+ a2[rows of e] @ b2[e].T), [P,N], summed in float32 and rounded once. Returns out."""
        raise TypeError(f"{type(self).__name__} does not say how it computes a scaled product")

    def scaled_weight_gradient(self, a: ScaledKBlocks, b: ScaledKBlocks, out: torch.Tensor) -> torch.Tensor:
        """out[e] = a[rows of e].T @ b[rows of e], [E,M,N], summed in float32 and rounded once; 0 without rows. The rows of out are aligned
        (has_aligned_rows), and may lie further apart. Returns out."""
        raise TypeError(f"{type(self).__name__} does not say how it computes a gradient of weights")

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if trans_a and not self.float8_weight_gradients:
            return self.unscaled.gmm(a, b, sizes, trans_a, trans_b, out, accumulate)
        product = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b)) if out is None or accumulate else out
        if trans_a:
            self.scaled_weight_gradient(self._k_blocks(a, sizes), self._k_blocks(b, sizes), product)
        else:
            self.scaled_product(self._rows(a), self._weights(b, not trans_b), sizes, product)
        return out.add_(product) if accumulate else product

    def weight_for_both_passes(self, w_EFH, for_backward_Y, transpose):
        memories = (for_backward_Y, None) if transpose else (None, for_backward_Y)  # both orientations take as much
        return launch.quantize_weights_both_ways(w_EFH, self.power_2_scale, memories)[transpose]

    def weight_for_backward(self, w_EFH, for_backward_Y, transpose):
        shape = w_EFH.shape if transpose else w_EFH.transpose(1, 2).shape
        return w_EFH if for_backward_Y is None else ScaledWeights.in_memory(for_backward_Y, shape, w_EFH.dtype)

    def up(self, x, w1_EFH, v1_EFH, sizes_E, activation, save):
        rows = self._gathered(x)
        h_PF = self._product(rows, w1_EFH, sizes_E)
        g_PF = None if v1_EFH is None else self._product(rows, v1_EFH, sizes_E)
        a_PF = self._rows(launch.activate(h_PF, g_PF, activation))
        return (a_PF, h_PF, g_PF) if save else (a_PF, None, None)

    def up_biased(self, x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save):
        rows = self._gathered(x)
        h_PF = self._biased(self._product(rows, w1_EFH, sizes_E), w1_bias_EF, sizes_E)
        g_PF = None if v1_EFH is None else self._biased(self._product(rows, v1_EFH, sizes_E), v1_bias_EF, sizes_E)
        a_PF = self._rows(launch.activate(h_PF, g_PF, activation))
        return (a_PF, h_PF, g_PF) if save else (a_PF, None, None)

    def down_biased(self, a_PF, w2_EFH, bias_EH, sizes_E):
        return self._biased(self.down(a_PF, w2_EFH, sizes_E), bias_EH, sizes_E)

    def _biased(self, out_PN: torch.Tensor, bias_EN: torch.Tensor | None, sizes_E: torch.Tensor) -> torch.Tensor:
        # A bias is not quantised.
        return out_PN if bias_EN is None else self.unscaled.add_bias(out_PN, bias_EN, sizes_E)

    def copies(self, w1_EFH, v1_EFH=None):
        return any(w is not None and not launch.reads_weights_in_place(w) for w in (w1_EFH, v1_EFH))

    def readable(self, matrices):
        return matrices, False  # what is quantised is read where it lies

    def adds_in_place(self, out_EKN):
        return not self.float8_weight_gradients and self.unscaled.adds_in_place(out_EKN)

    def bias_gradient(self, rows_PN, sizes_E, weights_PB=None):
        if isinstance(rows_PN, ScaledKBlocks):
            return _sums_of_blocks(rows_PN)
        return self.unscaled.bias_gradient(rows_PN, sizes_E, weights_PB)

    def bias_backward(self, rows, bias_EN, sizes_E, weights_PB):
        return self.unscaled.bias_backward(rows, bias_EN, sizes_E, weights_PB)

    def gathers_before_up(self, ffn, activation, token_bytes):
        return False  # what is gathered is quantised on its way

    def down(self, a_PF, w2_EFH, sizes_E):
        return self._product(a_PF, w2_EFH, sizes_E, transpose=True)

    def down_backward(self, dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation):
        return self._down_backward(dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation, in_pairs=False)

    def makes_gradient_of_pairs(self, added):
        # What is added to a sink is a product of its own where gradients are e4m3, and of both it would be twice as large.
        return not (added and self.float8_weight_gradients)

    def down_backward_to_pairs(self, dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation):
        a, pairs, _, dweights_TK, scaled = self._down_backward(dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation, in_pairs=True)
        return a, pairs, dweights_TK, scaled

    def _down_backward(self, dz: GatheredRows, w2_EFH: Stack | ScaledWeights, sizes_E: torch.Tensor, h_PF: torch.Tensor,
                       g_PF: torch.Tensor | None, weights_TK: torch.Tensor | None, activation: str, in_pairs: bool) -> tuple:
        """As Engine.down_backward; with `in_pairs` the pairs and None stand in place of dh and dg."""
        d_PF = self._product(self._gathered(dz), w2_EFH, sizes_E)
        if self.float8_weight_gradients:
            a, dh_blocks, dg_blocks, dweights_TK, dh, dg = launch.activate_backward_k_blocks(
                h_PF, g_PF, d_PF, dz.slots.slot_of_row_P, weights_TK, device_sizes(sizes_E, d_PF.device), activation, self.power_2_scale,
                in_pairs)
            return a, dh_blocks, dg_blocks, dweights_TK, (dh, dg)
        a_PF, dg_PF, dweights_TK, dh, dg = launch.activate_backward_scaled(
            h_PF, g_PF, d_PF, dz.slots.slot_of_row_P, weights_TK, activation, self.power_2_scale, in_pairs)
        return (a_PF, dg_PF, None, dweights_TK, (dh, dg)) if in_pairs else (a_PF, d_PF, dg_PF, dweights_TK, (dh, dg))

    def up_backward(self, dh, w1_EFH, dg, v1_EFH, sizes_E):
        second = () if v1_EFH is None else (dg, self._weights(v1_EFH, transpose=True))
        w1 = self._weights(w1_EFH, transpose=True)
        return self.scaled_product(dh, w1, sizes_E, w1.new_rows(dh.values_PK.size(0)), *second)

    def rows_for_weights(self, x):
        if not self.float8_dispatch or isinstance(x, GatheredScaledRows):
            return x
        if x.tokens_TH is None:
            rows_PH = x.rows_PH()
            return GatheredRows(None, x.slots, launch.dequantize_rows(self._rows(rows_PH), rows_PH.dtype))
        return GatheredRows(launch.dequantize_rows(self._rows(x.tokens_TH), x.tokens_TH.dtype), x.slots)

    def makes_two_weight_gradients(self, left_PF, rows, sizes_E):
        return not self.float8_weight_gradients and self.unscaled.makes_two_weight_gradients(left_PF, rows, sizes_E)

    def two_weight_gradients(self, left_PF, left2_PF, rows, sizes_E, out_EFH, out2_EFH):
        self.unscaled.two_weight_gradients(left_PF, left2_PF, rows, sizes_E, out_EFH, out2_EFH)

    def weight_gradient(self, left_PF, rows, sizes_E, out_EFH=None, only=False):
        if not self.float8_weight_gradients:
            return self.unscaled.weight_gradient(left_PF, rows, sizes_E, out_EFH, only)
        # w1's gradient and v1's have the same rows on the right.
        right = rows.once("k_blocks", lambda: self._gathered_k_blocks(rows, sizes_E))
        left = left_PF if isinstance(left_PF, ScaledKBlocks) else self._k_blocks(left_PF, sizes_E)
        if out_EFH is None:
            out_EFH = rows.new_empty(sizes_E.numel(), left.values_BKR.size(1), right.values_BKR.size(1))
        self._write_scaled_gradient(left, right, out_EFH)
        return out_EFH

    def add_weight_gradient(self, left_PF, rows, sizes_E, out_EFH, scale=1.0):
        if not self.float8_weight_gradients:
            self.unscaled.add_weight_gradient(left_PF, rows, sizes_E, out_EFH, scale)
        else:
            out_EFH.add_(self.weight_gradient(left_PF, rows, sizes_E), alpha=scale)

    def _write_scaled_gradient(self, left: ScaledKBlocks, right: ScaledKBlocks, out_EFH: torch.Tensor) -> None:
        if out_EFH.stride(2) != 1 and out_EFH.stride(1) == 1:
            left, right, out_EFH = right, left, out_EFH.transpose(1, 2)
        if has_aligned_rows(out_EFH):
            self.scaled_weight_gradient(left, right, out_EFH)
        else:
            out_EFH.copy_(self.scaled_weight_gradient(left, right, torch.empty_like(out_EFH, memory_format=torch.contiguous_format)))

    def _product(self, rows: ScaledRows, w_EFH: Stack | ScaledWeights, sizes_E: torch.Tensor, transpose: bool = False,
                 ) -> torch.Tensor:
        w = self._weights(w_EFH, transpose)
        return self.scaled_product(rows, w, sizes_E, w.new_rows(rows.values_PK.size(0)))

    def _rows(self, x_PK: torch.Tensor) -> ScaledRows:
        return launch.quantize_rows(aligned(x_PK), self.power_2_scale)

    def _gathered(self, x: GatheredRows) -> ScaledRows:
        if isinstance(x, GatheredScaledRows):
            return x.scaled()
        if x.tokens_TH is None:
            return self._rows(x.rows_PH())
        return launch.quantize_gathered(aligned(x.tokens_TH), x.slots, self.power_2_scale)

    def _k_blocks(self, x_PK: torch.Tensor, sizes_E: torch.Tensor) -> ScaledKBlocks:
        return launch.quantize_k_blocks(aligned(x_PK), device_sizes(sizes_E, x_PK.device), self.power_2_scale)

    def _gathered_k_blocks(self, x: GatheredRows, sizes_E: torch.Tensor) -> ScaledKBlocks:
        if isinstance(x, GatheredScaledRows):
            return x.k_blocks(sizes_E, self.power_2_scale)
        if x.tokens_TH is None:
            return self._k_blocks(x.rows_PH(), sizes_E)
        sizes = device_sizes(sizes_E, x.tokens_TH.device)
        return launch.quantize_gathered_k_blocks(aligned(x.tokens_TH), x.slots, sizes, self.power_2_scale)

    def _weights(self, w_EFH: Stack | ScaledWeights, transpose: bool = False) -> ScaledWeights:
        if isinstance(w_EFH, ScaledWeights):
            return w_EFH
        kept = float8.cached(w_EFH, self.power_2_scale, lambda: launch.quantize_weights_both_ways(w_EFH, self.power_2_scale))
        return launch.quantize_weights(w_EFH, self.power_2_scale, transpose) if kept is None else kept[transpose]


def _sums_of_blocks(rows: ScaledKBlocks) -> torch.Tensor:
    """The sum of each expert's rows, float32 [E,N], which are there in e4m3 alone. Blocks after those of the last expert are not read."""
    sums_BN = rows.values_BKR.to(torch.bfloat16).sum(2, dtype=torch.float32) * rows.scales_BK
    return torch.segment_reduce(sums_BN, "sum", lengths=rows.filled_rows_E // TILE, axis=0, unsafe=True)


class Float8Reference(Float8):
    """The steps of the kernels in plain PyTorch, what their results are compared with: the products of a k-block are summed alone, times
    both scales, and these sums are added up, all in float32."""

    needs_host_sizes = True
    unscaled = Reference()

    def unavailable(self, device):
        return None if device.type == "cpu" else f"runs on the CPU only, not on {device.type}"

    def scaled_product(self, a, b, sizes, out, a2=None, b2=None):
        row = 0
        for e, size in enumerate(plain_plan.bounded_counts(host_sizes(sizes), out.size(0)).tolist()):
            here = slice(row, row + size)
            row += size
            sum_MN = torch.zeros(size, out.size(1), dtype=torch.float32, device=out.device)
            for rows, weights in ((a, b), (a2, b2)):
                if rows is not None and weights is not None:
                    _add_scaled_blocks(sum_MN, rows, here, weights, e)
            out[here] = sum_MN
        return out

    def scaled_weight_gradient(self, a, b, out):
        first = 0
        for e, rows in enumerate(a.filled_rows_E.tolist()):
            sum_MN = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
            for block in range(first, first + rows // TILE):
                part_MN = a.values_BKR[block].float() @ b.values_BKR[block].float().t()
                sum_MN += _scaled(part_MN, a.scales_BK[block].unsqueeze(1), b.scales_BK[block])
            first += rows // TILE
            out[e] = sum_MN
        return out


def _add_scaled_blocks(sum_MN: torch.Tensor, a: ScaledRows, rows: slice, b: ScaledWeights, e: int) -> None:
    """Add a[rows] @ b[e].T, one k-block after the other."""
    for c, k in enumerate(range(0, a.values_PK.size(1), TILE)):
        part_MN = a.values_PK[rows, k : k + TILE].float() @ b.values_ENK[e, :, k : k + TILE].float().t()
        scale_N = b.scales[e, :, c].repeat_interleave(TILE)[: sum_MN.size(1)]
        sum_MN += _scaled(part_MN, a.scales_PC[rows, c].unsqueeze(1), scale_N)


def _scaled(part_MN: torch.Tensor, scale_M1: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    """part * scale_a * scale_b as csrc/hopper/float8/scale_product.cuh has it: times the product of both where that is normal, elsewhere
    times one after the other. For there the product has overflowed or lost bits, although the result may be in range."""
    scale_MN = scale_M1 * scale_N
    magnitude_MN = scale_MN.abs()
    far_MN = ((magnitude_MN < _NORMAL.tiny) & (scale_M1 != 0) & (scale_N != 0)) | (magnitude_MN > _NORMAL.max)
    if not far_MN.any():
        return part_MN * scale_MN
    a_is_larger_MN = scale_M1.abs() > scale_N.abs()
    larger_MN = torch.where(a_is_larger_MN, scale_M1, scale_N)
    smaller_MN = torch.where(a_is_larger_MN, scale_N, scale_M1)
    return torch.where(far_MN, part_MN * larger_MN * smaller_MN, part_MN * scale_MN)


class Float8Hopper(Float8):
    """Our own kernels for compute capability 9.0 (csrc/hopper/scaled_*.cu), with the sizes on the device."""

    unscaled = Hopper()

    def unavailable(self, device):
        return self.unscaled.unavailable(device)

    def scaled_product(self, a, b, sizes, out, a2=None, b2=None):
        rows, inner = a.values_PK.shape
        config = float8_tiles.rows_gemm(Device.of(out.device), rows, inner * (1 if a2 is None else 2), out.size(1))
        second = (None,) * 4 if a2 is None else (a2.values_PK, a2.scales_PC, b2.values_ENK, b2.scales)
        sizes = device_sizes(sizes, out.device)
        torch.ops.gbmoe_cuda.hopper_scaled_rows(
            a.values_PK, a.scales_PC, b.values_ENK, b.scales, *second, sizes, config.tiling,
            workspace(out, sizes, config), out)
        return out

    def scaled_weight_gradient(self, a, b, out):
        config, rows_E = float8_tiles.weight_gradient_gemm(Device.of(out.device)), a.filled_rows_E
        torch.ops.gbmoe_cuda.hopper_scaled_weights(
            a.values_BKR, a.scales_BK, b.values_BKR, b.scales_BK, rows_E, config.tiling, workspace(out, rows_E, config), out)
        return out

    def why_composed(self, w1_EFH, v1_EFH, activation, rows, biased, paired):
        return "no kernel of float8 adds biases and activates" if biased else None

    def up(self, x, w1_EFH, v1_EFH, sizes_E, activation, save):
        rows, w1 = self._gathered(x), self._weights(w1_EFH)
        v1 = None if v1_EFH is None else self._weights(v1_EFH)
        like, shape = w1.values_ENK, (rows.values_PK.size(0), w1.values_ENK.size(1))
        a = launch.empty_scaled_rows(like, *shape)
        h_PF = w1.new_rows(shape[0]) if save else None
        g_PF = w1.new_rows(shape[0]) if save and v1 is not None else None
        config = float8_tiles.up_gemm(Device.of(like.device), *rows.values_PK.shape, shape[1], v1 is not None)
        sizes = device_sizes(sizes_E, like.device)
        torch.ops.gbmoe_cuda.hopper_scaled_up(
            rows.values_PK, rows.scales_PC, w1.values_ENK, w1.scales, *((None, None) if v1 is None else (v1.values_ENK, v1.scales)), sizes,
            plain_activation.kernel_arguments(activation), config.tiling, workspace(like, sizes, config),
            self.power_2_scale, w1.dtype == torch.bfloat16, a.values_PK, a.scales_PC, h_PF, g_PF)
        return a, h_PF, g_PF
