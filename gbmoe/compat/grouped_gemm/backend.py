"""grouped_gemm.backend: the product without autograd, optionally written to a tensor of the caller's."""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe._checks import require, require_tensor
from gbmoe.ops.batch_sizes import check_sizes
from gbmoe.ops.gmm import check_arguments, check_operands
from gbmoe.problem import result_shape


def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False,
        c: torch.Tensor | None = None) -> torch.Tensor:
    """The product of gbmoe.gmm, written to `c` where that is given. Mirrors grouped_gemm.backend.gmm.

    It is neither differentiable nor cast by autocast, because its callers are autograd functions that do both.

    Args:
        a, b, batch_sizes, trans_a, trans_b: as in gbmoe.gmm.
        c: contiguous, in the result's shape and a's dtype, on a's device; overwritten and returned.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_arguments(a, b, batch_sizes, trans_a, trans_b)
    check_operands(a, b, trans_a, trans_b)
    check_sizes(batch_sizes, a.size(0))
    if c is not None:
        shape = result_shape(a, b, batch_sizes.numel(), trans_a, trans_b)
        require_tensor(c, "gmm", "c", dtypes=(a.dtype,), device=a.device)
        require(tuple(c.shape) == shape, "gmm", "c", lambda: f"shape {list(shape)}", list(c.shape))
        require(c.is_contiguous(), "gmm", "c", "a contiguous tensor", f"strides {c.stride()}")
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        # Engines may store 16 bytes at a time: for a view that does not start at a multiple of them the result is copied.
        direct = c is not None and c.data_ptr() % 16 == 0
        result = engines.product(a, b, batch_sizes, trans_a, trans_b, engine="auto", out=c if direct else None)
        return result if c is None or direct else c.copy_(result)
