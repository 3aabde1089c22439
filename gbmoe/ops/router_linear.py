"""router_logits: a router's linear layer whose result for a token has the same bits whatever other tokens there are.

Shape suffixes: T tokens, E experts, H hidden.
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import require
from gbmoe._define_operator import define
from gbmoe.ops import flops


def router_logits(x_TH: torch.Tensor, weight_EH: torch.Tensor, engine: str) -> torch.Tensor:
    """x @ weight.T, [T,E], by one of the engines.BATCH_INVARIANT. (cuBLAS chooses kernels, which sum in different orders, by the number
    of tokens.) In float32 (float64 for float64): no sum is rounded.

    Differentiable in both. Gradients are products of the logits' gradient in the operands' dtype, as those of torch.nn.Linear are.

    Raises:
        TypeError, ValueError: for a weight of another dtype or row length than x, and if the engine cannot compute it.
    """
    return _router_logits(x_TH, weight_EH, engine)


def _check(x_TH, weight_EH):
    # Called inside the operator, after autocast's rule has cast both.
    require(weight_EH.dtype == x_TH.dtype, "router_logits", "weight", lambda: f"the dtype of x, {x_TH.dtype}", weight_EH.dtype, TypeError)
    require(weight_EH.size(1) == x_TH.size(1), "router_logits", "weight", lambda: f"size(1) == {x_TH.size(1)}", weight_EH.size(1))


def _kernel(x_TH, weight_EH, engine):
    _check(x_TH, weight_EH)
    return engines.linear(x_TH, weight_EH, engine=engine)


def _fake(x_TH, weight_EH, engine):
    _check(x_TH, weight_EH)
    return x_TH.new_empty(x_TH.size(0), weight_EH.size(0), dtype=accumulate_dtype(x_TH.dtype))


def _setup_context(ctx, inputs, output):
    x_TH, weight_EH, _ = inputs
    ctx.dtype = x_TH.dtype
    save_for_products(ctx, x_TH, weight_EH)


def _backward(ctx, grad_TE):
    return dict(zip(("x", "weight"), products_of_gradient(grad_TE.to(ctx.dtype), *ctx.saved_tensors)))


def save_for_products(ctx, x_TH, weight_EH, *others):
    """Save what products_of_gradient needs, for the first two inputs, and other tensors after it."""
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x_TH if need_weight else None, weight_EH if need_x else None, *others)


def products_of_gradient(grad_TE, x_TH, weight_EH):
    """The gradients of x and weight, [T,H] and [E,H]. Either is None where the other operand, which it is a product of, was not saved."""
    grad_x_TH = None if weight_EH is None else torch.mm(grad_TE, weight_EH)
    grad_weight_EH = None if x_TH is None else torch.mm(grad_TE.t(), x_TH)
    return grad_x_TH, grad_weight_EH


_router_logits = define("router_logits(Tensor x, Tensor weight, str engine) -> Tensor", reference=_kernel, fake=_fake, backward=_backward,
                        setup_context=_setup_context, autocast=("x", "weight"), flops=flops.router_logits)
