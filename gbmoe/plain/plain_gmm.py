"""The grouped GEMM, and x @ weight.T with sums in float32, in plain PyTorch.

Shape suffixes: E experts, M rows of all groups, P rows, K inner dimension, N columns.
"""

from __future__ import annotations

import torch

from gbmoe._accumulate_dtype import accumulate_dtype


def linear(x_PK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, [P,N], of operands of one dtype on one device; in float32 where they have 16 bits, of which no sum is rounded."""
    if accumulate_dtype(x_PK.dtype) != x_PK.dtype:
        # torch's product of this kind exists on CUDA alone, and refuses to be tuned. Elsewhere the operands are widened, which is exact.
        if x_PK.device.type == "cuda" and not torch.cuda.tunable.is_enabled():
            return torch.mm(x_PK, weight_NK.t(), out_dtype=torch.float32)
        x_PK, weight_NK = x_PK.float(), weight_NK.float()
    return torch.mm(x_PK, weight_NK.t())


def gmm(a: torch.Tensor, b: torch.Tensor, sizes: list[int], trans_a: bool, trans_b: bool, out: torch.Tensor,
        accumulate: bool = False) -> None:
    """Write the grouped GEMM's result to `out`: one matrix product for each group, in at least fp32, rounded once.

    m-grouped: a [M,K], b [E,K,N] (or [E,N,K] with trans_b), out [M,N]. k-grouped (trans_a): a [M,K], b [M,N], out [E,K,N].
    Rows after the last group are not touched. With `accumulate` the product is added to `out`. Sizes that go beyond the rows are
    cut at the last row, and negative ones count as 0.
    """
    wide = accumulate_dtype(a.dtype)
    row = 0
    for e, size in enumerate(sizes):
        size = min(max(size, 0), a.size(0) - row)
        rows = slice(row, row + size)
        row += size
        if trans_a:
            product, target = a[rows].to(wide).t() @ b[rows].to(wide), out[e]
        else:
            weight = b[e].to(wide)
            product, target = a[rows].to(wide) @ (weight.t() if trans_b else weight), out[rows]
        target.copy_(product + target if accumulate else product)
