"""Our own kernels for every GPU since compute capability 8.0 (csrc/tensor_core/): mma.sync, with the sizes on the device.

Shape suffixes: P rows of all groups, E groups (experts), H hidden, F ffn hidden.
"""

from __future__ import annotations

import torch

from gbmoe import extension
from gbmoe._checks import dtype_name
from gbmoe.engines.base import device_sizes, why_not_cuda
from gbmoe.engines.own_kernels import FEW_ROWS, OwnKernels
from gbmoe.launch import availability
from gbmoe.launch.alignment import aligned, lies_transposed, two_in_place
from gbmoe.plain import plain_activation
from gbmoe.separate_weights import in_memory
from gbmoe.tuning import tensor_core_tiles as tiles
from gbmoe.tuning.device import Device
from gbmoe.tuning.tensor_core_tiles import TensorCoreConfig


class TensorCore(OwnKernels):
    """One kernel for each grouped GEMM, without a host wait; the first GEMM of an expert computes the activation too."""

    name = "tensor_core"
    decides_by_kind = True
    few_rows_kernels = FEW_ROWS

    def unavailable(self, device):
        reason = why_not_cuda(device)
        if reason is not None:
            return reason
        found = Device.of(device).capability
        if found < (8, 0):
            return f"runs on compute capability 8.0 and later, this device has {found[0]}.{found[1]}"
        reason = availability.why_not()
        if reason is not None:
            return reason
        index = torch.cuda.current_device() if device.index is None else device.index
        if not extension.answer("tensor_core_built", index):
            return f"the extension has no code for this device; compile it: python -m gbmoe build --arch {found[0]}.{found[1]}"
        return None

    def refuses_dtype(self, problem):
        if problem.dtype == torch.float32 and not problem.tf32:
            return "takes float32 only where TF32 is allowed (torch.backends.cuda.matmul.fp32_precision = 'tf32')"
        if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"takes bfloat16, float16 and float32, not {dtype_name(problem.dtype)}"
        return None

    def rows_gemm(self, a, b, a2, b2, sizes, trans_b, out):
        rows, groups = a.size(0), b.size(0)
        if a2 is None and out.dtype == a.dtype != torch.float32 and self.has_few_rows(rows, groups):
            FEW_ROWS.gemm(a, b, sizes, trans_b, out)
            return
        launch_rows(tiles.rows_gemm(Device.of(a.device), rows, groups, out.size(1)), a, b, a2, b2, sizes, trans_b, out)

    def weight_gradient_gemm(self, a, b, sizes, out, accumulate):
        launch_weight_gradient(tiles.weight_gradient_gemm(Device.of(a.device), *out.shape), a, b, sizes, out, accumulate)

    def up(self, x, w1_EFH, v1_EFH, sizes_E, activation, save):
        """The activation in the epilogue; in float32 composed, because the epilogue's approximations are for results of 16 bits."""
        if w1_EFH.dtype == torch.float32:
            return super().up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
        few = self.few_rows(x.num_rows, w1_EFH)
        if few is not None:
            return few.up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
        w1, v1, are_transposed = two_in_place(w1_EFH, v1_EFH)
        if are_transposed:  # no kernel with the activation reads them
            return super().up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
        result = up_gemm(aligned(x.rows_PH()), w1, v1, sizes_E, activation, save)
        x.forget()
        return result

    def why_composed(self, w1_EFH, v1_EFH, activation, rows, biased, paired):
        if w1_EFH.dtype == torch.float32:
            return "the epilogue's approximations of the activation are not for float32"
        if self.few_rows(rows, w1_EFH) is not None:
            return None
        if biased:
            return "no kernel of large tiles adds biases and activates"
        if paired or (not self.copies(w1_EFH, v1_EFH) and lies_transposed(w1_EFH)):
            return "no kernel of large tiles reads gate and up transposed and activates"
        return None


class TensorCoreBatchInvariant(TensorCore):
    """The same kernels, but a row of a product of rows gets the same bits whatever other rows there are, and however many.

    Tiles of every size make a sum by the same instructions on the same terms in the same order. The kernels for few rows make it of parts.
    """

    name = "tensor_core_batch_invariant"
    batch_invariant = True

    def has_few_rows(self, rows, groups):
        return False


# ------------------------------------------------------------------------------------------------------------- the kernels
#
# Operands are contiguous, aligned to 16 bytes and on one device; rows of weights may lie further apart. Sizes are integers [E], on the
# host or the device.


def up_gemm(x_PH, w1_EFH, v1_EFH, sizes, activation, save):
    """Engine.up for gathered rows, in bfloat16 or float16."""
    a_PF = x_PH.new_empty(x_PH.size(0), w1_EFH.size(1))
    h_PF = torch.empty_like(a_PF) if save else None
    g_PF = torch.empty_like(a_PF) if save and v1_EFH is not None else None
    config = tiles.up_gemm(Device.of(x_PH.device), a_PF.size(0), w1_EFH.size(0))
    launch_up(config, x_PH, w1_EFH, v1_EFH, sizes, activation, a_PF, h_PF, g_PF)
    return a_PF, h_PF, g_PF


def launch_up(config: TensorCoreConfig, x_PH, w1_EFH, v1_EFH, sizes, activation, a_PF, h_PF, g_PF) -> None:
    """up_gemm in a given configuration, into a, h and g; h and g may be None."""
    w1, v1, places = in_memory(w1_EFH, v1_EFH)
    torch.ops.gbmoe_cuda.tensor_core_up(
        x_PH, w1, v1, places, device_sizes(sizes, x_PH.device), plain_activation.kernel_arguments(activation), config.tiling, a_PF, h_PF,
        g_PF)


def launch_rows(config: TensorCoreConfig, a, b, a2, b2, sizes, trans_b, out) -> None:
    """out[rows of e] = a[rows of e] @ b[e], with a2 and b2 + a2[rows of e] @ b2[e], in a given configuration. With trans_b and without a2
    out may be float32, to which nothing is rounded."""
    b, b2, places = in_memory(b, b2)
    torch.ops.gbmoe_cuda.tensor_core_rows(
        a, b, a2, b2, places, device_sizes(sizes, a.device), trans_b, config.tiling, out)


def launch_weight_gradient(config: TensorCoreConfig, a, b, sizes, out, accumulate: bool = False) -> None:
    """out[e] = a[rows of e].T @ b[rows of e] in a given configuration; `accumulate` adds it to out, which is float32 then."""
    out, _, places = in_memory(out)
    torch.ops.gbmoe_cuda.tensor_core_weights(
        a, b, device_sizes(sizes, a.device), config.tiling, accumulate, places, out)
