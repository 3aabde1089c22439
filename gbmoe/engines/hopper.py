"""Our own kernels for compute capability 9.0 (csrc/hopper/): sizes on the device, the activation inside the products.

Shape suffixes: T tokens, K slots a token, P rows of all groups, E groups (experts), H hidden, F ffn hidden, G columns of pairs, 2F, C runs
of 64 columns.
"""

from __future__ import annotations

import functools

import torch

from gbmoe import extension, launch
from gbmoe._checks import dtype_name
from gbmoe.engines import tensor_core
from gbmoe.engines.base import GatheredRows, device_sizes, why_not_cuda
from gbmoe.engines.lora_products import LowRank
from gbmoe.engines.own_kernels import HOPPER_FEW_ROWS, OwnKernels, few_rows_linear
from gbmoe.launch import availability
from gbmoe.launch.alignment import aligned, lies_transposed, rows_or_columns_in_place, two_in_place
from gbmoe.plain import plain_activation
from gbmoe.separate_weights import in_memory
from gbmoe.tuning import gathering, groups_of_few_rows, hopper_tiles, tensor_core_tiles
from gbmoe.tuning.device import Device
from gbmoe.tuning.hopper_tiles import GemmConfig

_DTYPES = (torch.bfloat16, torch.float16)
# For which the first GEMM has instances that read weights contiguous along F, pairs of gate and up as well.
_UP_ALONG_F = ("silu", "gelu_tanh", "clamped_silu", "situ")


class Hopper(OwnKernels):
    """gbmoe's own kernels: nearly as fast as a dense product from a few hundred rows a group on, and without a host wait."""

    name = "hopper"
    decides_by_kind = True
    adds_in_16_bits = True
    few_rows_kernels = HOPPER_FEW_ROWS

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
        if unrounded:
            config = hopper_tiles.unrounded_rows_gemm(device, rows, a.size(1), columns)
        else:
            config = self._rows_config(a, b, a2, columns)
        launch_rows(config, a, b, a2, b2, device_sizes(sizes, a.device), trans_b, out)

    def _rows_config(self, a: torch.Tensor, b: torch.Tensor, a2: torch.Tensor | None, columns: int) -> GemmConfig:
        """The configuration of a GEMM of rows whose first two pairs of operands have a and a2. A pair of low rank is a k-block or two,
        which does not change what tiles are the fastest."""
        inner = a.size(1) if a2 is None or 2 * a2.size(1) < a.size(1) else a.size(1) + a2.size(1)
        return hopper_tiles.rows_gemm(Device.of(a.device), a.size(0), b.size(0), inner, columns, splits=not self.batch_invariant)

    def weight_gradient_gemm(self, a, b, sizes, out, accumulate):
        sizes = device_sizes(sizes, a.device)
        config = hopper_tiles.weight_gradient_gemm(Device.of(a.device), a.size(0), *out.shape, gathered=False)
        out, _, places = in_memory(out)
        torch.ops.gbmoe_cuda.hopper_weights(
            a, b, sizes, config.tiling, workspace(a, sizes, config), config.split.splitting, places, accumulate, out)

    def up(self, x, w1_EFH, v1_EFH, sizes_E, activation, save):
        few = self.few_rows(x.num_rows, w1_EFH)
        if few is not None:
            return few.up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
        w1, v1, along_f = two_in_place(w1_EFH, v1_EFH)
        if along_f:
            if activation.partition(" ")[0] not in _UP_ALONG_F:
                return super().up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
            w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
        config = _config(x, w1.size(1), v1 is not None, activation)
        if config.gather_up_along_f if along_f else config.gather_up:
            return up_gemm(aligned(x.tokens_TH), x.slots.slot_of_row_P, x.slots.top_k, w1, v1, sizes_E, activation, save)
        result = up_gemm(aligned(x.rows_PH()), None, 1, w1, v1, sizes_E, activation, save)
        x.forget()
        return result

    def up_low_rank(self, x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save, low):
        # Few rows as in up_pairs. The GEMM of gate and up with the activation adds no biases.
        composed = (v1_EFH is None or w1_bias_EF is not None or v1_bias_EF is not None
                    or (self.has_few_rows(x.num_rows, w1_EFH.size(0)) and not self.batch_invariant))
        w1, v1, along_f = (w1_EFH, v1_EFH, False) if composed else two_in_place(w1_EFH, v1_EFH)
        if composed or (along_f and activation.partition(" ")[0] not in _UP_ALONG_F):
            return super().up_low_rank(x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save, low)
        if along_f:
            w1, v1 = w1.transpose(1, 2), v1.transpose(1, 2)
        a2, b2 = _second_pair(low, along_f)
        _, v2 = _second_pair(low._replace(b_ERN=low.b2_ERN), along_f)
        if _config(x, w1.size(1), True, activation).gather_up_along_f:  # in pairs of CTAs, whatever w1 is contiguous along
            return up_gemm(aligned(x.tokens_TH), x.slots.slot_of_row_P, x.slots.top_k, w1, v1, sizes_E, activation, save, a2, b2, v2)
        result = up_gemm(aligned(x.rows_PH()), None, 1, w1, v1, sizes_E, activation, save, a2, b2, v2)
        x.forget()
        return result

    def up_pairs(self, x, w_EGH, bias_EG, sizes_E, activation, save, low=None):
        # The kernels for few rows take no second pair. Without them it is added in memory, which other rows must not decide.
        few = self.has_few_rows(x.num_rows, w_EGH.size(0)) and not (self.batch_invariant and low is not None)
        w, along_f = (w_EGH, False) if few else rows_or_columns_in_place(w_EGH)
        if not along_f or activation.partition(" ")[0] not in _UP_ALONG_F:
            arguments = x, w_EGH, bias_EG, sizes_E, activation, save
            return super().up_pairs(*arguments) if low is None else super().up_pairs_low_rank(*arguments, low)
        w = w.transpose(1, 2)
        second = _second_pair(low, True)
        if bias_EG is None and _config(x, w.size(1) // 2, True, activation).gather_up_along_f:
            return up_pairs_gemm(
                aligned(x.tokens_TH), x.slots.slot_of_row_P, x.slots.top_k, w, None, sizes_E, activation, save, *second)
        result = up_pairs_gemm(aligned(x.rows_PH()), None, 1, w, bias_EG, sizes_E, activation, save, *second)
        x.forget()
        return result

    up_pairs_low_rank = up_pairs

    def why_composed(self, w1_EFH, v1_EFH, activation, rows, biased, paired):
        along_f = not self.copies(w1_EFH, v1_EFH) and bool(lies_transposed(w1_EFH))
        name = activation.partition(" ")[0]
        if self.few_rows(rows, w1_EFH) is not None:
            return None
        if biased and not paired:
            return "no kernel of large tiles adds biases to gate and up that lie apart and activates"
        if paired and not along_f:
            return "no kernel with the activation reads gate and up in turns but along F"
        if along_f and name not in _UP_ALONG_F:
            return f"no kernel with {name} reads gate and up transposed"
        return None

    def adds_bias_in_kernel(self, rows, w_EFH):
        return True

    def biased_product(self, a, b, bias_EN, sizes_E, trans_b=False):
        if bias_EN is None or self.has_few_rows(a.size(0), b.size(0)):
            return super().biased_product(a, b, bias_EN, sizes_E, trans_b)
        b, is_transposed = self.readable(b)
        return biased_rows_gemm(aligned(a), b, bias_EN, sizes_E, trans_b != is_transposed, splits=not self.batch_invariant)

    def product_low_rank(self, a, b, bias_EN, sizes_E, trans_b, rows_PR, b_ERN):
        # With few rows the first product is rounded before the second is added to it, which other rows must not decide.
        if self.has_few_rows(a.size(0), b.size(0)) and not self.batch_invariant:
            return super().product_low_rank(a, b, bias_EN, sizes_E, trans_b, rows_PR, b_ERN)
        b, is_transposed = self.readable(b)
        trans_b = trans_b != is_transposed
        b2 = launch.with_aligned_rows(b_ERN.transpose(1, 2) if trans_b else b_ERN)
        if bias_EN is not None:
            return biased_rows_gemm(aligned(a), b, bias_EN, sizes_E, trans_b, not self.batch_invariant, aligned(rows_PR), b2)
        out_PN = a.new_empty(a.size(0), b_ERN.size(2))
        self.rows_gemm(aligned(a), b, aligned(rows_PR), b2, sizes_E, trans_b, out_PN)
        return out_PN

    def gathers_before_up(self, ffn, activation, token_bytes):
        return not gathering.always_gathers_in_up(ffn, activation, token_bytes)

    def down_backward(self, dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation, low=None):
        config = _config(dz, w2_EFH.size(1), g_PF is not None, activation)
        w2, along_f = rows_or_columns_in_place(w2_EFH)
        if config.gather_down_backward and not along_f and low is None:
            d_PF = rows_gemm_gathered(aligned(dz.tokens_TH), dz.slots.slot_of_row_P, dz.slots.top_k, w2, sizes_E)
            a_PF, dg_PF, dweights_TK = launch.activate_backward(h_PF, g_PF, d_PF, dz.slots.slot_of_row_P, weights_TK, activation)
            return a_PF, d_PF, dg_PF, dweights_TK, (d_PF, dg_PF)
        if config.fuse_activation_gradient:
            a_PF, dh_PF, dg_PF, dweights_TK = down_backward_gemm(
                aligned(dz.rows_PH()), w2.transpose(1, 2) if along_f else w2, sizes_E, h_PF, g_PF, dz.slots.slot_of_row_P, weights_TK,
                activation, *_second_pair(low, along_f))
            return a_PF, dh_PF, dg_PF, dweights_TK, (dh_PF, dg_PF)
        arguments = dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation
        return super().down_backward(*arguments) if low is None else super().down_backward_low_rank(*arguments, low)

    down_backward_low_rank = down_backward

    def down_backward_pairs(self, dz, w2_EFH, sizes_E, pairs_PG, weights_TK, activation, low=None):
        w2, along_f = rows_or_columns_in_place(w2_EFH)
        if along_f or activation.partition(" ")[0] not in _UP_ALONG_F:
            arguments = dz, w2_EFH, sizes_E, pairs_PG, weights_TK, activation
            return super().down_backward_pairs(*arguments) if low is None else super().down_backward_pairs_low_rank(*arguments, low)
        return down_backward_pairs_gemm(aligned(dz.rows_PH()), w2, sizes_E, pairs_PG, dz.slots.slot_of_row_P, weights_TK, activation,
                                        *_second_pair(low, False))

    down_backward_pairs_low_rank = down_backward_pairs

    def up_backward_low_rank(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E, low):
        if v1_EFH is None:
            return self.product_low_rank(dh_PF, w1_EFH, None, sizes_E, False, low.rows_PR, low.b_ERN)
        w1, v1, trans_b = two_in_place(w1_EFH, v1_EFH)
        b3 = launch.with_aligned_rows(low.b_ERN.transpose(1, 2) if trans_b else low.b_ERN)
        dh, dg = aligned(dh_PF), aligned(dg_PF)
        dx_PH = dh.new_empty(dh.size(0), w1_EFH.size(2))
        launch_rows(self._rows_config(dh, w1, dg, dx_PH.size(1)), dh, w1, dg, v1, device_sizes(sizes_E, dh.device), trans_b, dx_PH,
                    aligned(low.rows_PR), b3)
        return dx_PH

    def weight_gradient(self, left_PF, rows, sizes_E, out_EFH=None, only=False):
        num_rows, columns = left_PF.shape
        config = _config(rows, columns)
        gathers = config.gather_weight_gradient or (
            only and config.gather_only_weight_gradient and gathering.rows_pay_for_gathering(num_rows, sizes_E.numel(), columns))
        if not gathers or (out_EFH is not None and lies_transposed(out_EFH) is None):
            return super().weight_gradient(left_PF, rows, sizes_E, out_EFH)
        return weight_gradient_gemm_gathered(
            left_PF, aligned(rows.tokens_TH), rows.slots.slot_of_row_P, rows.slots.top_k, sizes_E, out_EFH)

    def makes_two_weight_gradients(self, left_PF, rows, sizes_E):
        num_rows, ffn = left_PF.shape
        return _config(rows, ffn).gather_two_weight_gradients and gathering.rows_pay_for_gathering(num_rows, sizes_E.numel(), ffn)

    def two_weight_gradients(self, left_PF, left2_PF, rows, sizes_E, out_EFH, out2_EFH):
        along_f = lies_transposed(out_EFH)
        if along_f is not None and lies_transposed(out2_EFH) == along_f:
            two_weight_gradients_gemm_gathered(
                left_PF, left2_PF, aligned(rows.tokens_TH), rows.slots.slot_of_row_P, rows.slots.top_k, sizes_E, out_EFH, out2_EFH)
        else:
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

    def up_backward_low_rank(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E, low):
        return _HOPPER.up_backward_low_rank(dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E, low)


_HOPPER = Hopper()


def _config(rows: GatheredRows, ffn: int, glu: bool = False, activation: str = "") -> gathering.LayerConfig:
    """The configuration for these rows; no GEMM gathers where they are gathered already."""
    tokens = rows.tokens_shape
    if rows.are_gathered or tokens is None:
        return gathering.layer_config_of_gathered(rows.rows_PH().size(1), ffn, glu, activation)
    padded = _padded(rows.slots.slot_of_row_P, tokens[0], rows.slots.top_k)
    return gathering.layer_config(tokens[1], ffn, glu, activation, 2 * tokens.numel(), padded)  # elements of 16 bits


def _second_pair(low: LowRank | None, along_n: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(a2 [P,R], b2 [E,N,R]), b2 contiguous along N or along R as the first pair's weights are: where it is not, it is copied, which
    costs less than a product of its own. (None, None) of None."""
    if low is None:
        return None, None
    b2 = launch.with_aligned_rows(low.b_ERN if along_n else low.b_ERN.transpose(1, 2))
    return aligned(low.rows_PR), b2.transpose(1, 2) if along_n else b2


def _padded(slot_of_row_P: torch.Tensor, tokens: int, top_k: int) -> bool:
    """Whether experts' rows are padded, as far as the numbers of rows and slots tell: a plan with padding has more rows than slots unless
    the caller has dropped as many slots. It decides about speed alone."""
    return slot_of_row_P.size(0) > tokens * top_k


# ------------------------------------------------------------------------------------------------------------- the kernels
#
# Operands are bfloat16 or float16, contiguous, aligned to 16 bytes and on one device. Weights are [E,F,H], contiguous along H, or where it
# says so along F; their rows, and those of their gradients, may lie further apart, and they may be SeparateWeights. a2 [P,R] and b2, which
# is as the weights with R for their inner dimension, are a second pair of operands, whose product is added before the sum is rounded; b2
# may be a stack where b is none. b3, and v2, which is v1's b2, are stacks. Sizes are integers [E], on the host or the device.
# slot_of_row is int32 [P]: a GEMM that gathers reads row r from token slot_of_row[r] // top_k, and takes zeros where a row has no slot.


def up_gemm(x, slot_of_row_P, top_k, w1_EFH, v1_EFH, sizes, activation, save, a2=None, b2=None, v2=None):
    """Engine.up of gathered rows x [P,H]; or, with slot_of_row, of the tokens [T,H], for silu and gelu_tanh only. With a gate, h may have
    a second pair a2 and b2, and g then has a2 and v2; of tokens where CTAs form pairs."""
    a_PF = x.new_empty(x.size(0) if slot_of_row_P is None else slot_of_row_P.size(0), w1_EFH.size(1))
    h_PF = torch.empty_like(a_PF) if save else None
    g_PF = torch.empty_like(a_PF) if save and v1_EFH is not None else None
    gathered = slot_of_row_P is not None
    config = hopper_tiles.up_gemm(Device.of(x.device), a_PF.size(0), x.size(1), a_PF.size(1), v1_EFH is not None, gathered=gathered,
                                  padded=gathered and _padded(slot_of_row_P, x.size(0), top_k), along_f=w1_EFH.stride(2) != 1)
    launch_up(config, x, slot_of_row_P, top_k, w1_EFH, v1_EFH, device_sizes(sizes, x.device), activation, a_PF, h_PF, g_PF, a2,
              b2, v2)
    return a_PF, h_PF, g_PF


def launch_up(config: GemmConfig, x, slot_of_row_P, top_k, w1_EFH, v1_EFH, sizes, activation, a_PF, h_PF, g_PF, a2=None, b2=None,
              v2=None) -> None:
    """up_gemm in a given configuration, with sizes on the device, into a, h and g; h and g may be None."""
    kind = plain_activation.kernel_arguments(activation)
    memory = workspace(x, sizes, config)
    w1, v1, places = in_memory(w1_EFH, v1_EFH)
    if v1 is None:
        torch.ops.gbmoe_cuda.hopper_up(x, slot_of_row_P, top_k, w1, places, sizes, kind, config.tiling, memory, a_PF, h_PF)
    else:
        torch.ops.gbmoe_cuda.hopper_up_glu(
            x, slot_of_row_P, top_k, w1, v1, a2, b2, v2, places, sizes, kind, config.tiling, memory, a_PF, h_PF, g_PF)


def up_pairs_gemm(x, slot_of_row_P, top_k, w_EGH, bias_EG, sizes, activation, save, a2=None, b2=None):
    """Engine.up_pairs of weights that lie contiguous along F, and of gathered rows x [P,H]; or, with slot_of_row, of the tokens [T,H], for
    silu and gelu_tanh only, without a bias."""
    gathered = slot_of_row_P is not None
    a_PF = x.new_empty(slot_of_row_P.size(0) if gathered else x.size(0), w_EGH.size(1) // 2)
    pairs_PG = x.new_empty(a_PF.size(0), w_EGH.size(1)) if save else None
    config = hopper_tiles.up_gemm(Device.of(x.device), a_PF.size(0), x.size(1), a_PF.size(1), True, gathered=gathered,
                                  padded=gathered and _padded(slot_of_row_P, x.size(0), top_k), along_f=True)
    launch_up_pairs(config, x, slot_of_row_P, top_k, w_EGH, bias_EG, device_sizes(sizes, x.device), activation, a_PF, pairs_PG, a2, b2)
    return a_PF, pairs_PG


def launch_up_pairs(config: GemmConfig, x, slot_of_row_P, top_k, w_EGH, bias_EG, sizes, activation, a_PF, pairs_PG, a2=None,
                    b2=None) -> None:
    """up_pairs_gemm in a given configuration, with sizes on the device, into a and pairs, which may be None."""
    w, _, places = in_memory(w_EGH)
    torch.ops.gbmoe_cuda.hopper_up_pairs(
        x, slot_of_row_P, top_k, w, a2, b2, places, None if bias_EG is None else aligned(bias_EG), sizes,
        plain_activation.kernel_arguments(activation), config.tiling, workspace(x, sizes, config), a_PF, pairs_PG)


def biased_rows_gemm(a, b, bias_EN, sizes, trans_b, splits, a2=None, b2=None):
    """out[rows of e] = a[rows of e] @ b[e] + bias[e], rounded once. `splits`: whether sums may be cut along K."""
    out = a.new_empty(a.size(0), bias_EN.size(1))
    config = hopper_tiles.biased_rows_gemm(Device.of(a.device), a.size(0), b.size(0), a.size(1), out.size(1), splits=splits)
    sizes = device_sizes(sizes, a.device)
    b, b2, places = in_memory(b, b2)
    torch.ops.gbmoe_cuda.hopper_rows_biased(a, b, a2, b2, places, aligned(bias_EN), sizes, trans_b, config.tiling,
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
    """out[e] = a[rows of e].T @ x[token of row], [E,F,H], contiguous along H or F, whose rows or columns may lie further apart. Rows
    without a slot count as zero rows of x. a may hold anything after the last group."""
    return _weight_gradients_gathered(a_PF, None, x_TH, slot_of_row_P, top_k, sizes, out_EFH, None)[0]


def two_weight_gradients_gemm_gathered(a_PF, a2_PF, x_TH, slot_of_row_P, top_k, sizes, out_EFH=None, out2_EFH=None):
    """weight_gradient_gemm_gathered of a and of a2, which has a's shape, in one launch; both results are contiguous along the same
    dimension."""
    return _weight_gradients_gathered(a_PF, a2_PF, x_TH, slot_of_row_P, top_k, sizes, out_EFH, out2_EFH)


def _weight_gradients_gathered(a_PF: torch.Tensor, a2_PF: torch.Tensor | None, x_TH, slot_of_row_P, top_k, sizes, out_EFH, out2_EFH):
    """Both gradients, the second of which is None without a2. They are allocated where they are not given."""
    sizes = device_sizes(sizes, x_TH.device)
    out_EFH = x_TH.new_empty(sizes.numel(), a_PF.size(1), x_TH.size(1)) if out_EFH is None else out_EFH
    out2_EFH = torch.empty_like(out_EFH) if out2_EFH is None and a2_PF is not None else out2_EFH
    config = hopper_tiles.weight_gradient_gemm(Device.of(a_PF.device), a_PF.size(0), *out_EFH.shape, gathered=True,
                                               padded=_padded(slot_of_row_P, x_TH.size(0), top_k), two=a2_PF is not None)
    torch.ops.gbmoe_cuda.hopper_weights_gathered(
        a_PF, a2_PF, x_TH, slot_of_row_P, top_k, sizes, config.tiling, workspace(a_PF, sizes, config), config.split.splitting, out_EFH,
        out2_EFH)
    return out_EFH, out2_EFH


def down_backward_gemm(dz_PH, w2_EFH, sizes, h_PF, g_PF, slot_of_row_P, weights_TK, activation, a2=None, b2=None):
    """Engine.down_backward without its last result, for gathered rows dz [P,H], where d is rounded to their dtype in between; weights have
    any floating dtype."""
    a_PF, dh_PF = torch.empty_like(h_PF), torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK, dots_CP, dweights_TK = _to_sum_dots(weights_TK, h_PF)
    config = hopper_tiles.down_backward_gemm(Device.of(h_PF.device), h_PF.size(1))
    w2, b2, places = in_memory(w2_EFH, b2)
    torch.ops.gbmoe_cuda.hopper_down_backward(
        dz_PH, w2, a2, b2, places, device_sizes(sizes, dz_PH.device), h_PF, g_PF, slot_of_row_P, weights_TK,
        plain_activation.kernel_arguments(activation), config.tiling, a_PF, dh_PF, dg_PF, dots_CP, dweights_TK)
    return a_PF, dh_PF, dg_PF, dweights_TK


def down_backward_pairs_gemm(dz_PH, w2_EFH, sizes, pairs_PG, slot_of_row_P, weights_TK, activation, a2, b2):
    """Engine.down_backward_pairs for gathered rows dz [P,H] and w2 that lies contiguous along H; otherwise as down_backward_gemm."""
    a_PF, dpairs_PG = pairs_PG.new_empty(pairs_PG.size(0), pairs_PG.size(1) // 2), torch.empty_like(pairs_PG)
    weights_TK, dots_CP, dweights_TK = _to_sum_dots(weights_TK, a_PF)
    config = hopper_tiles.down_backward_pairs_gemm(Device.of(a_PF.device), a_PF.size(1))
    w2, b2, places = in_memory(w2_EFH, b2)
    torch.ops.gbmoe_cuda.hopper_down_backward_pairs(
        dz_PH, w2, a2, b2, places, device_sizes(sizes, dz_PH.device), pairs_PG, slot_of_row_P, weights_TK,
        plain_activation.kernel_arguments(activation), config.tiling, a_PF, dpairs_PG, dots_CP, dweights_TK)
    return a_PF, dpairs_PG, dweights_TK


def _to_sum_dots(weights_TK, a_PF):
    """(weights as the kernel reads them, its partial sums for every 64 columns, their gradients), each None without weights."""
    if weights_TK is None:
        return None, None, None
    dots_CP = a_PF.new_empty((a_PF.size(1) + 63) // 64, a_PF.size(0), dtype=torch.float32)
    read_TK = (weights_TK.float() if weights_TK.dtype == torch.float64 else weights_TK).contiguous()
    return read_TK, dots_CP, weights_TK.new_zeros(weights_TK.shape)


def launch_rows(config: GemmConfig, a, b, a2, b2, sizes, trans_b, out, a3=None, b3=None) -> None:
    """Hopper.rows_gemm with a given configuration, and sizes on the device or None; with a3 and b3, a stack, three products are summed. out
    may be float32 in square tiles, no cluster, and without a3."""
    b, b2, places = in_memory(b, b2)
    torch.ops.gbmoe_cuda.hopper_rows(
        a, b, a2, b2, a3, b3, places, sizes, trans_b, config.tiling, workspace(a, sizes, config), config.split.splitting, out)


def workspace(like: torch.Tensor, sizes: torch.Tensor | None, config: GemmConfig) -> torch.Tensor | None:
    """Memory for the tile counter and the partial sums of split-K, or None where the GEMM uses neither."""
    if not config.tile_counter:
        return None
    groups = 1 if sizes is None else sizes.numel()
    return like.new_empty(_workspace_bytes(like.device, groups, config.split.per_sm), dtype=torch.uint8)


@functools.lru_cache(maxsize=256)
def _workspace_bytes(device: torch.device, groups: int, splits_per_sm: int) -> int:
    return extension.answer("hopper_workspace", torch.empty(0, dtype=torch.uint8, device=device), groups, splits_per_sm)
