"""grouped_gemm.ops: the differentiable product, and nv-grouped-gemm's permutation.

Shape suffixes: T tokens, K slots a token, H hidden, P rows. For the product M rows, E groups, K inner, N columns.
"""

from __future__ import annotations

import torch

import gbmoe.ops
from gbmoe.compat.grouped_gemm import backend
from gbmoe.compat.transformer_engine import moe_permute, moe_unpermute

__all__ = ["GroupedGemm", "backend", "gmm", "permute", "unpermute"]


class GroupedGemm(torch.autograd.Function):
    """grouped_gemm's autograd function, for code that applies or extends it. `gmm` is faster, and autocast casts its operands.

    GroupedGemm.apply(a, b, batch_sizes, trans_b): shapes, dtypes and errors are those of gbmoe.gmm. As in grouped_gemm it is not cast
    by autocast and is differentiable twice.
    """

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool) -> torch.Tensor:
        """a [M,K], b [E,K,N] or with trans_b [E,N,K], sizes [E] -> [M,N]."""
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return _uncast(a, b, batch_sizes, trans_b=trans_b)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """grad [M,N] -> the gradients of a and b that are needed."""
        a, b, batch_sizes = ctx.saved_tensors
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = _uncast(grad, b, batch_sizes, trans_b=not ctx.trans_b)
        if ctx.needs_input_grad[1]:
            left, right = (grad, a) if ctx.trans_b else (a, grad)
            grad_b = _uncast(left, right, batch_sizes, trans_a=True)
        return grad_a, grad_b, None, None


def _uncast(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, **transposed: bool) -> torch.Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return gbmoe.ops.gmm(a, b, batch_sizes, **transposed)  # type: ignore[arg-type]


def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """gbmoe.gmm with grouped_gemm's signature: a [M,K], b [E,K,N] or with trans_b [E,N,K], sizes [E] -> [M,N]."""
    return gbmoe.ops.gmm(a, b, batch_sizes, trans_b=trans_b)


def permute(
    input_act: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, max_token_num: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each token's row to its experts' rows, expert-major. Mirrors nv-grouped-gemm's ops.permute.

    Args:
        input_act: [T,H], bfloat16, float16, float32 or float64; or float8 (not differentiable).
        indices: expert ids [T,K], or [T] for one slot a token; int32 or int64, on input_act's device. -1 drops a slot.
        num_out_tokens: P. None and 0 mean T * K; slots whose rows are not below P are dropped.
        max_token_num: accepted without effect; nothing here keeps a workspace.

    Returns:
        rows [P,H] and row_id_map, int32 [K * T]: entry k * T + t is the row of slot (t,k), or -1.
    """
    if indices.dim() == 1:
        indices = indices.unsqueeze(1)
    return moe_permute(input_act, indices, num_out_tokens, max_token_num, map_type="index")


def unpermute(input_act: torch.Tensor, row_id_map: torch.Tensor, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Sum each token's rows, weighted by probs, back to token order. Mirrors nv-grouped-gemm's ops.unpermute.

    Args:
        input_act: [P,H], bfloat16, float16, float32 or float64.
        row_id_map: the map that permute returned.
        probs: [T,K], any of those dtypes; None for one slot a token, with the weight one.

    Returns:
        [T,H], dtype of input_act.
    """
    return moe_unpermute(input_act, row_id_map, probs, map_type="index")
