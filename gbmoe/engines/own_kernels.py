"""What the engines with kernels of our own share: the operands that they take, and which of their GEMMs computes what.

Shape suffixes: P rows of all groups, E groups (experts), H hidden, F ffn hidden.
"""

from __future__ import annotations

import torch

from gbmoe import launch
from gbmoe._checks import require
from gbmoe.engines.base import RANKS_OF_BIAS, Engine, GatheredRows, device_sizes, sum_of_both
from gbmoe.engines.lora_products import RankProduct
from gbmoe.launch.alignment import aligned, has_aligned_rows, lies_transposed, rows_or_columns_in_place, two_in_place
from gbmoe.plain import plain_activation
from gbmoe.problem import Problem, known, result_shape
from gbmoe.separate_weights import Stack, in_memory, with_one_table
from gbmoe.tuning import groups_of_few_rows
from gbmoe.tuning.device import Device

_MAX_SIZE = 2**31 - 2**10  # rows and columns are int32 in the kernels, and a tile may reach some hundreds beyond the last one


class OwnKernels(Engine):
    """An engine of two GEMMs, m-grouped and k-grouped, that read the sizes on the device. A subclass defines both, and `refuses_dtype`."""

    reads_separate_weights = True
    # Whether the products of forward give a row the same bits whatever other rows there are.
    batch_invariant = False
    few_rows_kernels: FewRowsKernels

    def refuses_dtype(self, problem: Problem) -> str | None:
        """None if the kernels take operands of the problem's dtype, otherwise the reason why not."""
        raise TypeError(f"{type(self).__name__} does not say which dtypes it takes")

    def rows_gemm(self, a: torch.Tensor, b: torch.Tensor, a2: torch.Tensor | None, b2: torch.Tensor | None, sizes: torch.Tensor | None,
                  trans_b: bool, out: torch.Tensor) -> None:
        """out[rows of e] = a[rows of e] @ b[e], with a2 and b2 + a2[rows of e] @ b2[e], summed before it is rounded. Without sizes one
        group has all rows. Of one group with trans_b and without a2, out may be float32 where operands have 16 bits."""
        raise TypeError(f"{type(self).__name__} does not say how it computes an m-grouped GEMM")

    def weight_gradient_gemm(self, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        """out[e] = a[rows of e].T @ b[rows of e]; `accumulate` adds it to out instead, which is float32 then, or of their dtype with
        adds_in_16_bits."""
        raise TypeError(f"{type(self).__name__} does not say how it computes a k-grouped GEMM")

    def has_few_rows(self, rows: int, groups: int) -> bool:
        """Whether the kernels for groups of few rows compute an m-grouped GEMM of forward."""
        return groups_of_few_rows.few_rows(rows, groups)

    def few_rows(self, rows: int, weights: Stack) -> FewRowsKernels | None:
        """The kernels for groups of few rows, where they compute the product of so many rows with these weights in forward."""
        takes = weights.dtype != torch.float32 and self.has_few_rows(rows, weights.size(0))
        return self.few_rows_kernels if takes else None

    def pads_columns(self, device: Device, rows: int, columns: int) -> bool:
        """Whether `linear` pads weights to a multiple of 8 columns, which tiles need."""
        return True

    def refuses(self, problem):
        reason = self.refuses_dtype(problem)
        if reason is not None:
            return reason
        # Rows are read 16 bytes at a time, and TMA's tensor maps need rows that start at multiples of them.
        if problem.inner % 8 or problem.columns % 8:
            return f"takes row lengths that are multiples of 8, not {problem.inner} and {problem.columns}"
        sizes = (problem.rows, problem.groups, problem.inner, problem.columns)
        if 0 in sizes:
            return "takes no empty operands"
        too_large = [size for size in sizes if known(size > _MAX_SIZE)]
        if too_large:
            return f"takes at most {_MAX_SIZE} rows, groups and columns, not {too_large[0]}"
        return None

    def readable(self, matrices):
        return rows_or_columns_in_place(matrices)

    def copies(self, w1_EFH, v1_EFH=None):
        transposed = lies_transposed(w1_EFH)
        if v1_EFH is None or transposed is None:
            return transposed is None
        return lies_transposed(v1_EFH) != transposed or with_one_table(w1_EFH, v1_EFH) is None

    def writes_in_place(self, out_EKN):
        return has_aligned_rows(out_EKN)

    def adds_in_place(self, out_EKN):
        return has_aligned_rows(out_EKN)

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if trans_a and accumulate and (out.dtype == torch.float32 or self.adds_in_16_bits):
            self.weight_gradient_gemm(a, b, sizes, out, True)
            return out
        product = out
        if out is None or accumulate:
            product = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b))
        if trans_a:
            self.weight_gradient_gemm(a, b, sizes, product, False)
        else:
            self.rows_gemm(a, b, None, None, sizes, trans_b, product)
        return launch.add_to_rows(out, product) if accumulate else product

    def linear(self, x, weight):
        """Without a tensor of sizes, which would be one kernel more in each call; and without padding in the kernels for few rows."""
        require(x.dtype == weight.dtype, "linear", "weight", lambda: f"the dtype of x, {x.dtype}", weight.dtype, TypeError)
        rows, columns = x.size(0), weight.size(0)
        pads = columns % 8 and self.pads_columns(Device.of(x.device), rows, columns)
        weight_NK = torch.nn.functional.pad(weight, (0, 0, 0, -columns % 8)) if pads else weight
        out = x.new_empty(rows, weight_NK.size(0), dtype=torch.float32)
        self.rows_gemm(aligned(x), aligned(weight_NK).unsqueeze(0), None, None, None, True, out)
        # A copy in any case, so that the result has a storage of its own size: the columns of a single row are contiguous.
        return out[:, :columns].clone(memory_format=torch.contiguous_format) if pads else out

    def up_biased(self, x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save):
        few = self.few_rows(x.num_rows, w1_EFH)
        if few is None:
            return super().up_biased(x, w1_EFH, v1_EFH, w1_bias_EF, v1_bias_EF, sizes_E, activation, save)
        return few.up(x, w1_EFH, v1_EFH, sizes_E, activation, save, w1_bias_EF, v1_bias_EF)

    def up_pairs(self, x, w_EGH, bias_EG, sizes_E, activation, save):
        few = self.few_rows(x.num_rows, w_EGH)
        if few is None:
            return super().up_pairs(x, w_EGH, bias_EG, sizes_E, activation, save)
        return few.up_pairs(x, w_EGH, bias_EG, sizes_E, activation, save)

    def biased_product(self, a, b, bias_EN, sizes_E, trans_b=False):
        few = self.few_rows(a.size(0), b)
        if few is None or bias_EN is None:
            return super().biased_product(a, b, bias_EN, sizes_E, trans_b)
        out_PN = a.new_empty(a.size(0), bias_EN.size(1))
        b, is_transposed = self.readable(b)
        few.gemm(aligned(a), b, sizes_E, trans_b != is_transposed, out_PN, bias_EN)
        return out_PN

    def adds_bias_in_kernel(self, rows, w_EFH):
        return self.few_rows(rows, w_EFH) is not None

    def down(self, a_PF, w2_EFH, sizes_E):
        few = self.few_rows(a_PF.size(0), w2_EFH)
        return super().down(a_PF, w2_EFH, sizes_E) if few is None else few.down(a_PF, w2_EFH, sizes_E)

    def down_biased(self, a_PF, w2_EFH, bias_EH, sizes_E):
        few = self.few_rows(a_PF.size(0), w2_EFH)
        return super().down_biased(a_PF, w2_EFH, bias_EH, sizes_E) if few is None else few.down(a_PF, w2_EFH, sizes_E, bias_EH)

    def up_backward(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E):
        """Both products in one GEMM, so that their sum is rounded once."""
        dx_PH = dh_PF.new_empty(dh_PF.size(0), w1_EFH.size(2))
        w1, v1, are_transposed = two_in_place(w1_EFH, v1_EFH)
        self.rows_gemm(aligned(dh_PF), w1, None if v1 is None else aligned(dg_PF), v1, sizes_E, are_transposed, dx_PH)
        return dx_PH

    # By csrc/low_rank/, which adds up a sum in one order whatever rows there are, and reads rows that are not gathered yet from their
    # tokens.

    def rank_product(self, a, b_ERK, sizes_E, a2=None, b2_ERK=None):
        """With few rows by their kernels."""
        if not self._has_product_kernel(a, b_ERK, a2):
            return super().rank_product(a, b_ERK, sizes_E, a2, b2_ERK)
        operands, out_PR, _ = _product_operands(RankProduct(a, b_ERK, a2, b2_ERK), sizes_E)
        torch.ops.gbmoe_cuda.rank_product(*operands, out_PR)
        return out_PR

    def rank_gradient(self, left_PR, right, sizes_E, out_ERN=None):
        if not _has_rank_kernels(left_PR, left_PR.size(1)):
            return super().rank_gradient(left_PR, right, sizes_E, out_ERN)
        right, slot_of_row_P, top_k = _wide_operand(right)
        made_ERN = _gradient_to_write(left_PR, right, sizes_E, out_ERN)
        torch.ops.gbmoe_cuda.rank_gradient(
            aligned(left_PR), right, slot_of_row_P, top_k, device_sizes(sizes_E, left_PR.device), made_ERN)
        return _written(out_ERN, made_ERN)

    def rank_product_and_gradients(self, product, gradients, sizes_E):
        one_kernel = (0 < len(gradients) <= _MOST_GRADIENTS and self._has_product_kernel(product.a, product.b_ERK, product.a2)
                      and all(_has_rank_kernels(gradient.left_PR, gradient.left_PR.size(1)) for gradient in gradients)
                      and len({_tokens_slots(wide) for wide in (product.a, *(gradient.right for gradient in gradients))}) == 1)
        if not one_kernel:
            return super().rank_product_and_gradients(product, gradients, sizes_E)
        operands, out_PR, a = _product_operands(product, sizes_E)
        of_gradients, made = [], []
        for left_PR, right, out_ERN in gradients:
            right_here = a if right is product.a else _wide_operand(right)[0]
            made.append(_gradient_to_write(left_PR, right_here, sizes_E, out_ERN))
            of_gradients += aligned(left_PR), right_here, made[-1]
        of_gradients += [None] * (3 * _MOST_GRADIENTS - len(of_gradients))
        torch.ops.gbmoe_cuda.rank_product_and_gradients(*operands, out_PR, *of_gradients)
        for gradient, made_ERN in zip(gradients, made):
            _written(gradient.out_ERN, made_ERN)
        return out_PR

    def bias_backward(self, rows, bias_EN, sizes_E, weights_PB):
        """By the kernels of csrc/low_rank/, which read the rows once for both: the bias is the same for all ranks, and the product is in
        float32."""
        if bias_EN is None or not self._has_product_kernel(rows, bias_EN.unsqueeze(1), None):
            return super().bias_backward(rows, bias_EN, sizes_E, weights_PB)
        product = RankProduct(rows, bias_EN.unsqueeze(1).expand(-1, RANKS_OF_BIAS, -1))
        operands, dots_PB, wide = _product_operands(product, sizes_E, torch.float32)
        if weights_PB is None:
            torch.ops.gbmoe_cuda.rank_product(*operands, dots_PB)
            return dots_PB, None
        sums_EBN = _gradient_to_write(weights_PB, wide, sizes_E, None)
        nothing = [None] * (3 * (_MOST_GRADIENTS - 1))
        torch.ops.gbmoe_cuda.rank_product_and_gradients(*operands, dots_PB, weights_PB, wide, sums_EBN, *nothing)
        return dots_PB, sum_of_both(sums_EBN)

    def _has_product_kernel(self, a: GatheredRows | torch.Tensor, b_ERK: torch.Tensor, a2: torch.Tensor | None) -> bool:
        """Whether csrc/low_rank/ computes rank_product."""
        rows = a.size(0) if isinstance(a, torch.Tensor) else a.num_rows
        return _has_rank_kernels(b_ERK, b_ERK.size(1)) and not (a2 is None and self.has_few_rows(rows, b_ERK.size(0)))


_MOST_RANKS, _MOST_GRADIENTS = 64, 3  # of an instance in csrc/low_rank/, and of a launch


def _has_rank_kernels(rows: torch.Tensor, ranks: int) -> bool:
    """Whether csrc/low_rank/ has kernels for operands of this dtype and so many ranks."""
    return rows.dtype != torch.float32 and ranks <= _MOST_RANKS


def _tokens_slots(rows: GatheredRows | torch.Tensor) -> torch.Tensor | None:
    """The slot of each row, where csrc/low_rank/ reads rows from their tokens; None where they lie in memory."""
    if isinstance(rows, torch.Tensor) or rows.are_gathered or rows.tokens_TH is None:
        return None
    return rows.slots.slot_of_row_P


def _wide_operand(rows: GatheredRows | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(rows [P,N], None, 1), or (tokens [T,N], the slot of each row, slots of a token), as csrc/low_rank/ reads them."""
    if isinstance(rows, torch.Tensor):
        return aligned(rows), None, 1
    slot_of_row_P = _tokens_slots(rows)
    tokens_TN = rows.tokens_TH if slot_of_row_P is not None else None  # not `given`, which is in e4m3 where tokens came so
    return (aligned(rows.rows_PH()), None, 1) if tokens_TN is None else (aligned(tokens_TN), slot_of_row_P, rows.slots.top_k)


def _product_operands(product: RankProduct, sizes_E: torch.Tensor, out_dtype: torch.dtype | None = None,
                      ) -> tuple[tuple, torch.Tensor, torch.Tensor]:
    """(the operator's arguments before `out`, a new `out`, a as it lies in memory); `out_dtype` may be float32."""
    (a, slot_of_row_P, top_k), b_ERK, a2 = _wide_operand(product.a), product.b_ERK, product.a2
    require(a.dtype == b_ERK.dtype, "rank_product", "b", lambda: f"the dtype of a, {a.dtype}", b_ERK.dtype, TypeError)
    b, b2, along_r = two_in_place(b_ERK, product.b2_ERK)
    out_PR = a.new_empty(a.size(0) if slot_of_row_P is None else slot_of_row_P.size(0), b_ERK.size(1), dtype=out_dtype)
    return (a, slot_of_row_P, top_k, b, None if a2 is None else aligned(a2), b2, device_sizes(sizes_E, a.device), along_r), out_PR, a


def _gradient_to_write(left_PR: torch.Tensor, right: torch.Tensor, sizes_E: torch.Tensor, out_ERN: torch.Tensor | None) -> torch.Tensor:
    """`out`, or a new tensor where there is none or the kernel does not write it where it lies."""
    if out_ERN is not None and has_aligned_rows(out_ERN):
        return out_ERN
    return left_PR.new_empty(sizes_E.numel(), left_PR.size(1), right.size(1))


def _written(out_ERN: torch.Tensor | None, made_ERN: torch.Tensor) -> torch.Tensor:
    return made_ERN if out_ERN is None or made_ERN is out_ERN else out_ERN.copy_(made_ERN)


# ------------------------------------------------------------------------------------------- kernels for groups of few rows
#
# csrc/tensor_core/few_rows.cu, from compute capability 8.0 on, and csrc/hopper/few_rows_gemm.cu. Operands are bfloat16 or float16,
# contiguous, aligned to 16 bytes and on one device; rows of weights may lie further apart. Biases have any strides, and are added to sums
# before these are rounded. Sizes are integers [E], on the host or the device.


class FewRowsKernels:
    """The kernels for groups of few rows of one kind: those of any GPU, which make sums of parts, or Hopper's, which give a sum the same
    bits as their other kernels that split none."""

    def __init__(self, prefix: str):
        self.prefix = prefix

    def gemm(self, a: torch.Tensor, b: Stack, sizes: torch.Tensor | None, trans_b: bool, out: torch.Tensor,
             bias_EN: torch.Tensor | None = None) -> None:
        """out[rows of e] = a[rows of e] @ b[e] + bias[e], in float32 and rounded once: a [P,K], b [E,K,N], or [E,N,K] with trans_b, out
        [P,N] of their dtype. K is a multiple of 8, and without trans_b N is, too. Without sizes one group has all rows. RuntimeError for
        another dtype of out."""
        b, _, places = in_memory(b)
        self.op("gemm")(a, b, places, device_sizes(sizes, a.device), trans_b, False, bias_EN, out)

    def down(self, a_PF: torch.Tensor, w2_EFH: Stack, sizes_E: torch.Tensor, bias_EH: torch.Tensor | None = None) -> torch.Tensor:
        """Engine.down, or down_biased, [P,H], directly after `up`: the weights and sizes are read while that ends, unless they are copied
        here."""
        b_here, trans_b = rows_or_columns_in_place(w2_EFH)
        copied = b_here.data_ptr() != w2_EFH.data_ptr() or sizes_E.device != a_PF.device or not sizes_E.is_contiguous()
        y_PH = a_PF.new_empty(a_PF.size(0), w2_EFH.size(2))
        b_here, _, places = in_memory(b_here)
        self.op("gemm")(a_PF, b_here, places, device_sizes(sizes_E, a_PF.device), trans_b, not copied, bias_EH, y_PH)
        return y_PH

    def up(self, x: GatheredRows, w1_EFH: Stack, v1_EFH: Stack | None, sizes: torch.Tensor, activation: str, save: bool,
           w1_bias_EF: torch.Tensor | None = None, v1_bias_EF: torch.Tensor | None = None,
           ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Engine.up, or up_biased, (a, h, g) [P,F], of rows [P,H] and weights [E,F,H]. Rows that are not gathered yet are read from their
        tokens."""
        w1, v1, are_transposed = two_in_place(w1_EFH, v1_EFH)
        if are_transposed:  # the operator tells by their strides
            w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
        a_PF = x.new_empty(x.num_rows, w1_EFH.size(1))
        h_PF = torch.empty_like(a_PF) if save else None
        g_PF = torch.empty_like(a_PF) if save and v1_EFH is not None else None
        self._launch_up(x, w1, v1, w1_bias_EF, v1_bias_EF, sizes, activation, a_PF, h_PF, g_PF)
        return a_PF, h_PF, g_PF

    def up_pairs(self, x: GatheredRows, w_EGH: Stack, bias_EG: torch.Tensor | None, sizes: torch.Tensor, activation: str, save: bool,
                 ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Engine.up_pairs, (a [P,F], pairs [P,G]), as `up`. Weights that do not lie contiguous along G are copied."""
        w_EHG = w_EGH.transpose(1, 2)
        w_EHG = w_EHG if has_aligned_rows(w_EHG) else aligned(w_EHG)
        a_PF = x.new_empty(x.num_rows, w_EGH.size(1) // 2)
        pairs_PG = x.new_empty(x.num_rows, w_EGH.size(1)) if save else None
        of_gate, of_up = _columns_in_turns(bias_EG)
        h_PF, g_PF = _columns_in_turns(pairs_PG)
        self._launch_up(x, w_EHG.transpose(1, 2), None, of_gate, of_up, sizes, activation, a_PF, h_PF, g_PF)
        return a_PF, pairs_PG

    def _launch_up(self, x: GatheredRows, w1: Stack, v1: Stack | None, w1_bias_EF, v1_bias_EF, sizes, activation: str, a_PF, h_PF, g_PF,
                   ) -> None:
        """`up` of weights that the operator reads in place, into a, h and g. h and g may be None, or every other column of one tensor."""
        if x.are_gathered or x.tokens_TH is None:
            rows, slot_of_row_P, top_k = x.rows_PH(), None, 1
        else:
            rows, slot_of_row_P, top_k = x.tokens_TH, x.slots.slot_of_row_P, x.slots.top_k
        w1, v1, places = in_memory(w1, v1)
        self.op("up")(aligned(rows), slot_of_row_P, top_k, w1, v1, places, w1_bias_EF, v1_bias_EF, device_sizes(sizes, rows.device),
                      plain_activation.kernel_arguments(activation), a_PF, h_PF, g_PF)
        x.forget()

    def op(self, name: str):
        """The operator, "gemm" or "up"."""
        return getattr(torch.ops.gbmoe_cuda, f"{self.prefix}_{name}")


def _columns_in_turns(matrix: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Its columns 0, 2, 4, ... and the others; (None, None) of None."""
    return (None, None) if matrix is None else (matrix[:, ::2], matrix[:, 1::2])


FEW_ROWS, HOPPER_FEW_ROWS = FewRowsKernels("few_rows"), FewRowsKernels("hopper_few_rows")


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = x @ weight.T, of x [P,K] and weight [N,K], on Hopper with the bits of HOPPER_FEW_ROWS; with sizes, [1], of so many rows. For
    few columns. out has their dtype, or float32, to which nothing is rounded."""
    torch.ops.gbmoe_cuda.few_rows_linear(x, weight, device_sizes(sizes, x.device), out)
