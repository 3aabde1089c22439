"""torch.nn.functional.grouped_mm, which uses CUTLASS on Hopper; the sizes stay on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gbmoe._checks import dtype_name
from gbmoe.engines.base import Engine, device_sizes, why_not_cuda
from gbmoe.launch.availability import serves
from gbmoe.problem import known


class TorchGrouped(Engine):
    """torch.nn.functional.grouped_mm: bfloat16 only, where it has kernels (compute capability 9 and 10). Elsewhere it loops over the
    groups, with a host wait."""

    name = "torch"
    decides_by_kind = True

    def unavailable(self, device):
        reason = why_not_cuda(device)
        if reason is not None:
            return reason
        if not hasattr(F, "grouped_mm"):
            return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability[0] not in (9, 10):
            return f"torch's grouped GEMM has kernels for compute capability 9 and 10, this device has {capability[0]}.{capability[1]}"
        return None

    def refuses(self, problem):
        if problem.dtype != torch.bfloat16:
            return f"torch's grouped GEMM takes bfloat16, not {dtype_name(problem.dtype)}"
        # Its tensor maps need rows that start at multiples of 16 bytes.
        if problem.inner % 8 or problem.columns % 8:
            return f"torch's grouped GEMM takes row lengths that are multiples of 8, not {problem.inner} and {problem.columns}"
        if problem.groups >= 1024:
            return f"torch's grouped GEMM takes fewer than 1024 groups, not {problem.groups}"
        if known(problem.rows >= 2**31):
            return f"torch's grouped GEMM takes the groups' ends in int32, not {problem.rows} rows"
        if 0 in (problem.rows, problem.groups, problem.inner, problem.columns):
            return "torch's grouped GEMM takes no empty operands"
        return None

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        sizes = device_sizes(sizes, a.device)
        # Clamped, because a caller may have overwritten the sizes, and torch's kernel trusts them.
        ends = sizes.clamp(min=0).cumsum(0).clamp_(max=a.size(0)).int()
        if trans_a:
            product = F.grouped_mm(a.t(), b, offs=ends)
            _zero_empty_groups(product, sizes)
        else:
            product = F.grouped_mm(a, b.transpose(1, 2) if trans_b else b, offs=ends)
        if out is None:
            return product
        return out.add_(product) if accumulate else out.copy_(product)


def _zero_empty_groups(out, sizes):
    # Not every release of torch writes the groups without rows (pytorch #172439, #193633).
    if serves(out):
        torch.ops.gbmoe_cuda.zero_empty_groups(sizes, out)
    else:
        out.masked_fill_((sizes <= 0)[:, None, None], 0)
