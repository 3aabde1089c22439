"""Our own kernels for compute capability 9.0 (csrc/hopper/): sizes on the device, the activation inside the products.

Shape suffixes: T tokens, K slots a token, P rows of all groups, E groups (experts), H hidden, F ffn hidden, G columns of pairs, 2F, N
columns, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gbmoe import launch
from gbmoe._checks import dtype_name
from gbmoe.engines import tensor_core
from gbmoe.engines.base import GatheredRows, device_sizes, why_not_cuda
from gbmoe.engines.hopper_gemms import (
    biased_rows_gemm,
    down_backward_gemm,
    down_backward_pairs_gemm,
    is_padded,
    launch_rows,
    low_rank_rows_gemm,
    rows_gemm_gathered,
    two_weight_gradients_gemm_gathered,
    up_gemm,
    up_pairs_gemm,
    weight_gradient_gemm_gathered,
    workspace,
)
from gbmoe.engines.low_rank import LowRank
from gbmoe.engines.own_kernels import HOPPER_FEW_ROWS, OwnKernels, few_rows_linear
from gbmoe.launch import availability
from gbmoe.launch.alignment import aligned, has_aligned_rows, lies_transposed, rows_or_columns_in_place, two_in_place
from gbmoe.separate_weights import in_memory
from gbmoe.tuning import gathering, groups_of_few_rows, hopper_tiles, tensor_core_tiles
from gbmoe.tuning.device import Device

_DTYPES = (torch.bfloat16, torch.float16)
# For which the first GEMM has instances that read weights contiguous along F, pairs of gate and up as well.
_UP_ALONG_F = ("silu", "gelu_tanh", "clamped_silu", "situ")


class Hopper(OwnKernels):
    """gbmoe's own kernels: nearly as fast as a dense product from a few hundred rows a group on, and without a host wait."""

    name = "hopper"

    def unavailable(self, device):
        reason = why_not_cuda(device)
        if reason is not None:
            return reason
        found = Device.of(device).capability
        if found != (9, 0):
            return f"runs on compute capability 9.0, this device has {found[0]}.{found[1]}"
        reason = availability.why_not()  # asked after the capability, so that no other GPU builds the extension for this engine
        if reason is not None:
            return reason
        if not availability.hopper_built():
            return "the extension was compiled without sm_90; compile it: python -m gbmoe build --arch 9.0"
        return None

    def refuses_dtype(self, problem):
        return None if problem.dtype in _DTYPES else f"takes bfloat16 and float16, not {dtype_name(problem.dtype)}"

    def has_few_rows(self, rows, groups):
        return groups_of_few_rows.few_rows_on_hopper(rows, groups)

    def pads_columns(self, device, rows, columns):
        return not self._is_few_rows_linear(device, rows, 1, columns)

    def _is_few_rows_linear(self, device: Device, rows: int, groups: int, columns: int) -> bool:
        """Whether few_rows_linear computes a @ b.T of one group: few rows and columns, where no sum may be split or rows are very few."""
        return groups == 1 and groups_of_few_rows.few_rows_linear(device, rows, columns) and (
            self.batch_invariant or self.has_few_rows(rows, groups))

    def rows_gemm(self, a, b, a2, b2, sizes, trans_b, out):
        device, rows, groups, columns = Device.of(a.device), a.size(0), b.size(0), out.size(1)
        if a2 is None and trans_b and self._is_few_rows_linear(device, rows, groups, columns):
            few_rows_linear(a, b[0], sizes, out)
            return
        unrounded = out.dtype != a.dtype
        if a2 is None and not unrounded and self.has_few_rows(rows, groups):
            HOPPER_FEW_ROWS.gemm(a, b, sizes, trans_b, out)
            return
        if a2 is None and (self.batch_invariant or unrounded) and tensor_core_tiles.few_low_tiles(device, rows, groups, columns):
            tensor_core.launch_rows(tensor_core_tiles.rows_gemm(device, rows, groups, columns), a, b, None, None, sizes, trans_b, out)
            return
        inner = a.size(1) * (1 if a2 is None else 2)
        if unrounded:
            config = hopper_tiles.unrounded_rows_gemm(device, rows, inner, columns)
        else:
            config = hopper_tiles.rows_gemm(device, rows, groups, inner, columns, splits=not self.batch_invariant)
        launch_rows(config, a, b, a2, b2, device_sizes(sizes, a.device), trans_b, out)

    def weight_gradient_gemm(self, a, b, sizes, out, accumulate):
        assert accumulate == (out.dtype == torch.float32)  # the kernels tell by the dtype
        sizes = device_sizes(sizes, a.device)
        config = hopper_tiles.weight_gradient_gemm(Device.of(a.device), a.size(0), *out.shape, gathered=False)
        out, _, places = in_memory(out)
        torch.ops.gbmoe_cuda.hopper_weights(
            a, b, sizes, config.tiling, workspace(a, sizes, config), config.split.splitting, places, out)

    def up(self, x, w1_EFH, v1_EFH, sizes_E, activation, save):
        if self.has_few_rows(x.num_rows, w1_EFH.size(0)):
            return self.few_rows_up(HOPPER_FEW_ROWS, x, w1_EFH, v1_EFH, sizes_E, activation, save)
        w1, v1, along_f = two_in_place(w1_EFH, v1_EFH)
        if along_f:
            if activation.partition(" ")[0] not in _UP_ALONG_F:
                return super().up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
            w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
        elif _config(x, w1.size(1), v1 is not None, activation).gather_up:
            return up_gemm(aligned(x.tokens_TH), x.slots.slot_of_row_P, x.slots.top_k, w1, v1, sizes_E, activation, save)
        result = up_gemm(aligned(x.rows_PH()), None, 1, w1, v1, sizes_E, activation, save)
        x.forget()
        return result

    def up_pairs(self, x, w_EGH, bias_EG, sizes_E, activation, save):
        w, along_f = rows_or_columns_in_place(w_EGH)
        composes = self.has_few_rows(x.num_rows, w_EGH.size(0)) and not (self.batch_invariant and bias_EG is not None)
        if composes or not along_f or activation.partition(" ")[0] not in _UP_ALONG_F:
            return super().up_pairs(x, w_EGH, bias_EG, sizes_E, activation, save)
        result = up_pairs_gemm(aligned(x.rows_PH()), w.transpose(1, 2), bias_EG, sizes_E, activation, save)
        x.forget()
        return result

    def why_composed(self, w1_EFH, v1_EFH, activation, rows, biased, paired):
        along_f = not self.copies(w1_EFH, v1_EFH) and bool(lies_transposed(w1_EFH))
        name, few = activation.partition(" ")[0], self.has_few_rows(rows, w1_EFH.size(0))
        if biased and not paired:
            return "no kernel adds biases to gate and up that lie apart and activates"
        if few and (along_f or paired) and not (paired and biased and self.batch_invariant):
            return "no kernel for few rows an expert reads gate and up transposed and activates"
        if paired and not along_f:
            return "no kernel with the activation reads gate and up in turns but along F"
        if along_f and name not in _UP_ALONG_F:
            return f"no kernel with {name} reads gate and up transposed"
        return None

    def adds_bias_in_kernel(self, rows, groups):
        return self.batch_invariant or not self.has_few_rows(rows, groups)

    def biased_product(self, a, b, bias_EN, sizes_E, trans_b=False):
        # With few rows the product is rounded before the bias is added, which other rows must not decide.
        if bias_EN is None or (self.has_few_rows(a.size(0), b.size(0)) and not self.batch_invariant):
            return super().biased_product(a, b, bias_EN, sizes_E, trans_b)
        b, is_transposed = self.readable(b)
        return biased_rows_gemm(aligned(a), b, bias_EN, sizes_E, trans_b != is_transposed, splits=not self.batch_invariant)

    def down(self, a_PF, w2_EFH, sizes_E):
        if self.has_few_rows(a_PF.size(0), w2_EFH.size(0)):
            return HOPPER_FEW_ROWS.down(a_PF, w2_EFH, sizes_E)
        return super().down(a_PF, w2_EFH, sizes_E)

    def gathers_before_up(self, ffn, activation, token_bytes):
        return not gathering.always_gathers_in_up(ffn, activation, token_bytes)

    def down_backward(self, dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation):
        config = _config(dz, w2_EFH.size(1), g_PF is not None, activation)
        w2, along_f = rows_or_columns_in_place(w2_EFH)
        if config.gather_down_backward and not along_f:
            d_PF = rows_gemm_gathered(aligned(dz.tokens_TH), dz.slots.slot_of_row_P, dz.slots.top_k, w2, sizes_E)
            a_PF, dg_PF, dweights_TK = launch.activate_backward(h_PF, g_PF, d_PF, dz.slots.slot_of_row_P, weights_TK, activation)
            return a_PF, d_PF, dg_PF, dweights_TK, (d_PF, dg_PF)
        if config.fuse_activation_gradient:
            a_PF, dh_PF, dg_PF, dweights_TK = down_backward_gemm(
                aligned(dz.rows_PH()), w2.transpose(1, 2) if along_f else w2, sizes_E, h_PF, g_PF, dz.slots.slot_of_row_P, weights_TK,
                activation)
            return a_PF, dh_PF, dg_PF, dweights_TK, (dh_PF, dg_PF)
        return super().down_backward(dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation)

    def down_backward_pairs(self, dz, w2_EFH, sizes_E, pairs_PG, weights_TK, activation):
        w2, along_f = rows_or_columns_in_place(w2_EFH)
        if along_f or activation.partition(" ")[0] not in _UP_ALONG_F:
            return super().down_backward_pairs(dz, w2_EFH, sizes_E, pairs_PG, weights_TK, activation)
        return down_backward_pairs_gemm(aligned(dz.rows_PH()), w2, sizes_E, pairs_PG, dz.slots.slot_of_row_P, weights_TK, activation)

    def weight_gradient(self, left_PF, rows, sizes_E, out_EFH=None):
        gathers = _config(rows, left_PF.size(1)).gather_weight_gradient and (out_EFH is None or has_aligned_rows(out_EFH))
        if not gathers:
            return super().weight_gradient(left_PF, rows, sizes_E, out_EFH)
        return weight_gradient_gemm_gathered(
            left_PF, aligned(rows.tokens_TH), rows.slots.slot_of_row_P, rows.slots.top_k, sizes_E, out_EFH)

    # Adapters: the second product is added to the sums of the first before they are rounded, as one or few k-blocks more.

    def _adds_low_rank_apart(self, rows, groups):
        """Whether rows are so few that kernels which take no second pair compute the first product; these round, which rows of others must
        not decide."""
        return self.has_few_rows(rows, groups) and not self.batch_invariant

    def product_low_rank(self, a, b, bias_EN, sizes_E, trans_b, rows_PR, b_ERN):
        if self._adds_low_rank_apart(a.size(0), b.size(0)):
            return super().product_low_rank(a, b, bias_EN, sizes_E, trans_b, rows_PR, b_ERN)
        b, is_transposed = self.readable(b)
        trans_b, low, splits = trans_b != is_transposed, LowRank(rows_PR, b_ERN), not self.batch_invariant
        if bias_EN is None:
            return low_rank_rows_gemm(aligned(a), b, None, None, sizes_E, trans_b, low, splits)
        return biased_rows_gemm(aligned(a), b, bias_EN, sizes_E, trans_b, splits, low)

    def up_low_rank(self, x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save, low):
        w1, v1, along_f = two_in_place(w1_EFH, v1_EFH)
        fuses = w1_bias_EF is None and v1_bias_EF is None and (not along_f or activation.partition(" ")[0] in _UP_ALONG_F)
        if not fuses or self._adds_low_rank_apart(x.num_rows, w1_EFH.size(0)):
            return super().up_low_rank(x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save, low)
        if along_f:
            w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
        result = up_gemm(aligned(x.rows_PH()), None, 1, w1, v1, sizes_E, activation, save, low)
        x.forget()
        return result

    def up_pairs_low_rank(self, x, w_EGH, bias_EG, sizes_E, activation, save, low):
        w, along_f = rows_or_columns_in_place(w_EGH)
        apart = self._adds_low_rank_apart(x.num_rows, w_EGH.size(0))
        if apart or not along_f or activation.partition(" ")[0] not in _UP_ALONG_F:
            return super().up_pairs_low_rank(x, w_EGH, bias_EG, sizes_E, activation, save, low)
        result = up_pairs_gemm(aligned(x.rows_PH()), w.transpose(1, 2), bias_EG, sizes_E, activation, save, low)
        x.forget()
        return result

    def down_backward_low_rank(self, dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation, low):
        if not _config(dz, w2_EFH.size(1), g_PF is not None, activation).fuse_activation_gradient:
            return super().down_backward_low_rank(dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation, low)
        w2, along_f = rows_or_columns_in_place(w2_EFH)
        a_PF, dh_PF, dg_PF, dweights_TK = down_backward_gemm(
            aligned(dz.rows_PH()), w2.transpose(1, 2) if along_f else w2, sizes_E, h_PF, g_PF, dz.slots.slot_of_row_P, weights_TK,
            activation, low)
        return a_PF, dh_PF, dg_PF, dweights_TK, (dh_PF, dg_PF)

    def down_backward_pairs_low_rank(self, dz, w2_EFH, sizes_E, pairs_PG, weights_TK, activation, low):
        w2, along_f = rows_or_columns_in_place(w2_EFH)
        if along_f or activation.partition(" ")[0] not in _UP_ALONG_F:
            return super().down_backward_pairs_low_rank(dz, w2_EFH, sizes_E, pairs_PG, weights_TK, activation, low)
        return down_backward_pairs_gemm(
            aligned(dz.rows_PH()), w2, sizes_E, pairs_PG, dz.slots.slot_of_row_P, weights_TK, activation, low)

    def up_backward_low_rank(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E, low):
        w1, v1, are_transposed = two_in_place(w1_EFH, v1_EFH)
        return low_rank_rows_gemm(
            aligned(dh_PF), w1, None if v1 is None else aligned(dg_PF), v1, sizes_E, are_transposed, low, splits=True)

    def makes_two_weight_gradients(self, left_PF, rows, sizes_E):
        num_rows, ffn = left_PF.shape
        return _config(rows, ffn).gather_two_weight_gradients and gathering.rows_pay_for_two(num_rows, sizes_E.numel(), ffn)

    def two_weight_gradients(self, left_PF, left2_PF, rows, sizes_E, out_EFH, out2_EFH):
        if has_aligned_rows(out_EFH) and has_aligned_rows(out2_EFH):
            two_weight_gradients_gemm_gathered(
                left_PF, left2_PF, aligned(rows.tokens_TH), rows.slots.slot_of_row_P, rows.slots.top_k, sizes_E, out_EFH, out2_EFH)
        else:  # no kernel that gathers stores columns
            self.write_gradient(left_PF, rows.rows_PH(), sizes_E, out_EFH)
            self.write_gradient(left2_PF, rows.rows_PH(), sizes_E, out2_EFH)


class HopperBatchInvariant(Hopper):
    """The same kernels, but in forward a row gets the same bits whatever other rows there are, and however many.

    Each sum is one sequence of 16 terms after 16, in the order of K: none is split along K. Tiles of any size, and mma.sync and wgmma, give
    such a sum the same bits (docs/numerics.md), so that the number of rows may choose among them. Gradients may depend on other rows, as
    those of `hopper` do.
    """

    name = "hopper_batch_invariant"
    batch_invariant = True

    def up_backward(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E):
        return _HOPPER.up_backward(dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E)


_HOPPER = Hopper()


def _config(rows: GatheredRows, ffn: int, glu: bool = False, activation: str = "") -> gathering.LayerConfig:
    """The configuration for these rows; no GEMM gathers where they are gathered already."""
    if rows.are_gathered or rows.tokens_TH is None:
        config = gathering.layer_config(rows.rows_PH().size(1), ffn, glu, activation, 0, False)
        return replace(config, gather_up=False, gather_down_backward=False, gather_weight_gradient=False, gather_two_weight_gradients=False)
    padded = is_padded(rows.slots.slot_of_row_P, rows.tokens_TH, rows.slots.top_k)
    return gathering.layer_config(rows.tokens_TH.size(1), ffn, glu, activation, rows.tokens_TH.nbytes, padded)
