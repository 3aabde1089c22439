"""cuBLAS from the extension: one cublasGemmEx per group, or one cublasGemmGroupedBatchedEx for all (csrc/cublas_grouped_gemm.cu)."""

from __future__ import annotations

import torch

from gbmoe.engines.base import Engine, host_sizes, why_not_cuda
from gbmoe.launch import availability
from gbmoe.problem import result_shape


class _Cublas(Engine):
    needs_host_sizes = True

    def unavailable(self, device):
        return why_not_cuda(device) or availability.why_not()

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if out is None:
            out = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b))
        self._call(a, b, host_sizes(sizes), trans_a, trans_b, accumulate, out)
        return out


class CublasLoop(_Cublas):
    """One cublasGemmEx for every group: as fast as a dense product where groups have thousands of rows, slow where they are small."""

    name = "cublas_loop"

    def _call(self, *arguments):
        torch.ops.gbmoe_cuda.cublas_loop(*arguments)


class CublasGrouped(_Cublas):
    """One cublasGemmGroupedBatchedEx for all groups. cuBLAS 13 has no Hopper kernel for it, so it is seldom the fastest."""

    name = "cublas_grouped"

    def _call(self, a, b, sizes, trans_a, trans_b, accumulate, out):
        pointers = a.new_empty(3 * sizes.numel(), dtype=torch.int64)
        torch.ops.gbmoe_cuda.cublas_grouped(a, b, sizes, trans_a, trans_b, accumulate, pointers, out)
