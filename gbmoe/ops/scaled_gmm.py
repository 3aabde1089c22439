"""The grouped GEMM of e4m3 operands that come with their scales.

Shape suffixes: M rows of all groups, E groups (experts), K inner, N columns, C tiles of a row, ceil(K / 128).
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe._checks import dtype_name, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.float8 import FLOAT8, TILE, ScaledRows, ScaledWeights
from gbmoe.launch.alignment import aligned
from gbmoe.ops import flops
from gbmoe.ops.batch_sizes import check_sizes
from gbmoe.problem import Problem

_OUTPUTS = (torch.bfloat16, torch.float16)


def scaled_gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
               out_dtype: torch.dtype) -> torch.Tensor:
    """gmm with trans_b of operands that are float8 already; gmm calls it, and has the checks of batch_sizes.

    Args:
        a: [M,K], float8_e4m3fn.
        b: [E,N,K], float8_e4m3fn.
        scale_a: decoding scales, float32 [M,C]: a[m,k] stands for a[m,k] * scale_a[m, k // 128].
        scale_b: decoding scales, float32 [E, ceil(N / 128), C].
        out_dtype: bfloat16 or float16.

    Returns:
        [M,N], without a gradient.
    """
    device = a.device
    for argument, tensor, rank in (("a", a, 2), ("b", b, 3)):
        require_tensor(tensor, "gmm", argument, rank=rank, dtypes=(FLOAT8,), device=device)
    require(b.size(2) == a.size(1), "gmm", "b", lambda: f"b.size(2) == a.size(1) == {a.size(1)}", b.size(2))
    tiles = -(-a.size(1) // TILE)
    for argument, scales, shape in (("scale_a", scale_a, [a.size(0), tiles]),
                                    ("scale_b", scale_b, [b.size(0), -(-b.size(1) // TILE), tiles])):
        require_tensor(scales, "gmm", argument, rank=len(shape), dtypes=(torch.float32,), device=device)
        _require_shape(scales, argument, shape)
    require(out_dtype in _OUTPUTS, "gmm", "out_dtype", "bfloat16 or float16", out_dtype)
    return _scaled_gmm(a, b, scale_a, scale_b, batch_sizes, dtype_name(out_dtype))


def _require_shape(scales: torch.Tensor, argument: str, shape: list[int]) -> None:
    require(list(scales.shape) == shape, "gmm", argument, lambda: f"shape {shape}, a scale for each 128", list(scales.shape))


def _reference(a, b, scale_a, scale_b, batch_sizes, out_dtype):
    check_sizes(batch_sizes, a.size(0))
    out_MN = _fake(a, b, scale_a, scale_b, batch_sizes, out_dtype)
    if out_MN.numel() == 0:
        return out_MN
    problem = Problem(a.device, out_MN.dtype, a.size(0), b.size(0), a.size(1), b.size(1), False, batch_sizes.device.type == "cpu")
    engine = engines.select("float8_block", problem)
    rows, weights = ScaledRows(aligned(a), aligned(scale_a)), ScaledWeights(aligned(b), aligned(scale_b), out_MN.dtype)
    return engine.scaled_product(rows, weights, batch_sizes, out_MN)


def _fake(a, b, scale_a, scale_b, batch_sizes, out_dtype):
    return scale_a.new_empty(a.size(0), b.size(1), dtype=getattr(torch, out_dtype))


_scaled_gmm = define(
    "scaled_gmm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor batch_sizes, str out_dtype) -> Tensor",
    reference=_reference, fake=_fake, waits=lambda a, b, scale_a, scale_b, batch_sizes, *_: batch_sizes.device.type == "cpu",
    flops=flops.scaled_gmm,
)
