"""Our own kernels for every GPU since compute capability 8.0 (csrc/tensor_core/): mma.sync, with the sizes on the device.

Shape suffixes: P rows of all groups, E groups (experts), H hidden, F ffn hidden.
"""

from __future__ import annotations

import functools

import torch

from gbmoe import extension
from gbmoe.engines.base import Engine, device_sizes
from gbmoe.kernels import plain_torch
from gbmoe.kernels.alignment import aligned
from gbmoe.problem import known, result_shape
from gbmoe.tuning import grouped_gemm as tuning

_MAX_SIZE = 2**31 - 2**10  # rows and columns are int32 in the kernels, and a tile may reach some hundreds beyond the last one


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class TensorCore(Engine):
    """One persistent kernel for each grouped GEMM, without a host wait; the first GEMM of an expert computes the activation too."""

    name = "tensor_core"

    def unavailable(self, device):
        if device.type != "cuda":
            return f"runs on CUDA devices only, not on {device.type}"
        capability = _capability(device)
        if capability < (8, 0):
            return f"runs on compute capability 8.0 and later, this device has {capability[0]}.{capability[1]}"
        status = extension.status()
        return None if status.loaded else f"needs the CUDA extension: {status.reason}"

    def refuses(self, problem):
        if problem.dtype == torch.float32 and not problem.tf32:
            return "takes float32 only where TF32 is allowed (torch.backends.cuda.matmul.fp32_precision = 'tf32')"
        if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"takes bfloat16, float16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
        # Rows are copied in chunks of 16 bytes.
        if problem.inner % 8 or problem.columns % 8:
            return f"takes row lengths that are multiples of 8, not {problem.inner} and {problem.columns}"
        sizes = (problem.rows, problem.groups, problem.inner, problem.columns)
        if 0 in sizes:
            return "takes no empty operands"
        too_large = [size for size in sizes if known(size > _MAX_SIZE)]
        if too_large:
            return f"takes at most {_MAX_SIZE} rows, groups and columns, not {too_large[0]}"
        return None

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if trans_a and accumulate and out.dtype == torch.float32:
            return _weight_gradient_gemm(a, b, sizes, out, accumulate=True)
        product = out
        if out is None or accumulate:
            product = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b))
        if trans_a:
            _weight_gradient_gemm(a, b, sizes, product)
        else:
            _rows_gemm(a, b, None, None, sizes, trans_b, product)
        return out.add_(product) if accumulate else product

    def up(self, x, w1_EFH, v1_EFH, sizes_E, activation, save):
        """The activation in the epilogue; in float32 composed, because the epilogue's approximations are for results of 16 bits."""
        if w1_EFH.dtype == torch.float32:
            return super().up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
        result = up_gemm(aligned(x.rows_PH()), aligned(w1_EFH), None if v1_EFH is None else aligned(v1_EFH), sizes_E, activation, save)
        x.forget()
        return result

    def up_backward(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E):
        """Both products in one GEMM, so that their sum is rounded once."""
        if v1_EFH is None:
            dg_PF = None
        else:
            dg_PF, v1_EFH = aligned(dg_PF), aligned(v1_EFH)
        dx_PH = dh_PF.new_empty(dh_PF.size(0), w1_EFH.size(2))
        _rows_gemm(aligned(dh_PF), aligned(w1_EFH), dg_PF, v1_EFH, sizes_E, False, dx_PH)
        return dx_PH


# ------------------------------------------------------------------------------------------------------------- the kernels
#
# Operands are contiguous, aligned to 16 bytes and on one device. Weights are [E,F,H], as in MegaBlocks. Sizes are integers [E], on the
# host or the device.


def up_gemm(x_PH, w1_EFH, v1_EFH, sizes, activation, save):
    """Engine.up for gathered rows, in bfloat16 or float16."""
    a_PF = x_PH.new_empty(x_PH.size(0), w1_EFH.size(1))
    h_PF = torch.empty_like(a_PF) if save else None
    g_PF = torch.empty_like(a_PF) if save and v1_EFH is not None else None
    columns = a_PF.size(1) * (1 if v1_EFH is None else 2)
    config = tuning.tensor_core_up_gemm(a_PF.size(0), w1_EFH.size(0), columns)
    torch.ops.gbmoe_cuda.tensor_core_up(
        x_PH, w1_EFH, v1_EFH, device_sizes(sizes, x_PH.device), plain_torch.ACTIVATION_INDEX[activation],
        config.tile_m, config.tile_n, config.panel, a_PF, h_PF, g_PF)
    return a_PF, h_PF, g_PF


def launch_rows(config: tuning.TensorCoreConfig, a, b, a2, b2, sizes, trans_b, out) -> None:
    """out[rows of e] = a[rows of e] @ b[e], with a2 and b2 + a2[rows of e] @ b2[e], in a given configuration."""
    torch.ops.gbmoe_cuda.tensor_core_rows(
        a, b, a2, b2, device_sizes(sizes, a.device), trans_b, config.tile_m, config.tile_n, config.panel, out)


def launch_weight_gradient(config: tuning.TensorCoreConfig, a, b, sizes, out, accumulate: bool = False) -> None:
    """out[e] = a[rows of e].T @ b[rows of e] in a given configuration; `accumulate` adds it to out, which is float32 then."""
    torch.ops.gbmoe_cuda.tensor_core_weights(
        a, b, device_sizes(sizes, a.device), config.tile_m, config.tile_n, config.panel, accumulate, out)


def _rows_gemm(a, b, a2, b2, sizes, trans_b, out):
    launch_rows(tuning.tensor_core_rows_gemm(a.size(0), sizes.numel(), out.size(1)), a, b, a2, b2, sizes, trans_b, out)


def _weight_gradient_gemm(a, b, sizes, out, accumulate=False):
    launch_weight_gradient(tuning.tensor_core_weight_gradient_gemm(*out.shape), a, b, sizes, out, accumulate)
    return out
