"""A stand-in for `grouped_gemm_backend`, grouped_gemm's CUDA extension, which it also calls grouped_gemm.backend.backend."""

from __future__ import annotations

import torch

from gbmoe.compat.grouped_gemm import backend


def gmm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, batch_sizes: torch.Tensor, trans_a: bool, trans_b: bool, /) -> None:
    """gbmoe.compat.grouped_gemm.backend.gmm, written to `c`; shapes, dtypes and errors are those of that function."""
    backend.gmm(a, b, batch_sizes, trans_a, trans_b, c)
