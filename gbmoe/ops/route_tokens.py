"""route_tokens: a linear layer and what route() makes of its logits, which stay in float32.

Logits that are rounded to 16 bits choose other experts wherever two of them are nearly equal. One operator computes both, so that the
logits' gradient can be in the operands' dtype from the kernel on: autograd would want it in float32, and cast it in a pass of its own.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.kernels import plain_torch
from gbmoe.ops import flops
from gbmoe.ops.router_logits import products_of_gradient, save_for_products
from gbmoe.ops.router_softmax_topk import Routing, empty_routing, require_choice, route_backward, route_logits


def route_tokens(x_TH: torch.Tensor, weight_EH: torch.Tensor, top_k: int, *, normalize: float | None = None,
                 engine: str | None = None) -> Routing:
    """route(x @ weight.T, top_k, normalize=normalize) with logits in float32, which are rounded nowhere.

    Differentiable in x and weight through scores, weights and logsumexp. Runs on every device; float64 is computed in float64. Under
    autocast both operands are cast to its dtype, and scores and weights are float32.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64.
        weight_EH: [E,H], one of these too. Of two dtypes the product has the wider one: a float32 weight beside bfloat16 tokens makes a
            product of float32.
        top_k, normalize: as those of route().
        engine: one of engines.BATCH_INVARIANT computes the product, so that a token's logits have the same bits whatever other tokens
            there are; None leaves it to torch.

    Returns:
        Routing; scores and weights have the dtype of x.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; and if the engine cannot compute the product.

    Example:
        >>> x, weight = torch.ones(1, 2).bfloat16(), torch.tensor([[1, 0], [1, 2**-8]]).bfloat16()
        >>> route_tokens(x, weight, 1).experts_TK, route_tokens(x, weight, 1).scores_TE.dtype
        (tensor([[1]]), torch.bfloat16)
    """
    require_tensor(x_TH, "route_tokens", "x", rank=2, dtypes=FLOATING)
    require_tensor(weight_EH, "route_tokens", "weight", rank=2, dtypes=FLOATING, device=x_TH.device)
    require(weight_EH.size(1) == x_TH.size(1), "route_tokens", "weight", lambda: f"size(1) == {x_TH.size(1)}", weight_EH.size(1))
    require_choice("route_tokens", top_k, weight_EH.size(0), normalize)
    wide = autocast_enabled(x_TH.device.type) and x_TH.dtype != torch.float64
    return Routing(*_route_tokens(x_TH, weight_EH, top_k, None if normalize is None else float(normalize), engine,
                                  torch.float32 if wide else x_TH.dtype))


def _kernel(x_TH, weight_EH, top_k, p, engine, scores_dtype):
    if weight_EH.dtype != x_TH.dtype:
        dtype = torch.promote_types(x_TH.dtype, weight_EH.dtype)
        x_TH, weight_EH = x_TH.to(dtype), weight_EH.to(dtype)
    logits_TE = plain_torch.linear(x_TH, weight_EH) if engine is None else engines.linear(x_TH, weight_EH, engine=engine)
    return route_logits(logits_TE, top_k, p, scores_dtype)


def _fake(x_TH, weight_EH, top_k, p, engine, scores_dtype):
    logits_dtype = plain_torch.accumulate_dtype(torch.promote_types(x_TH.dtype, weight_EH.dtype))
    return tuple(empty_routing(x_TH, (x_TH.size(0), weight_EH.size(0)), top_k, logits_dtype, scores_dtype))


def _setup_context(ctx, inputs, output):
    x_TH, weight_EH, _, ctx.p, _, _ = inputs
    scores_TE, _, experts_TK, _ = output
    ctx.dtypes = x_TH.dtype, weight_EH.dtype
    ctx.mark_non_differentiable(experts_TK)
    ctx.set_materialize_grads(False)
    save_for_products(ctx, x_TH, weight_EH, scores_TE, experts_TK)


def _backward(ctx, grad_scores_TE, grad_weights_TK, _, grad_logsumexp_T):
    if grad_scores_TE is None and grad_weights_TK is None and grad_logsumexp_T is None:
        return {}
    x_TH, weight_EH, scores_TE, experts_TK = ctx.saved_tensors
    dtype = torch.promote_types(*ctx.dtypes)
    grad_logits_TE = route_backward(scores_TE, experts_TK, grad_scores_TE, grad_weights_TK, grad_logsumexp_T, ctx.p, dtype)
    if ctx.dtypes[0] == ctx.dtypes[1]:
        return dict(zip(("x", "weight"), products_of_gradient(grad_logits_TE, x_TH, weight_EH)))
    operands = (None if operand is None else operand.to(dtype) for operand in (x_TH, weight_EH))
    grads = products_of_gradient(grad_logits_TE, *operands)
    return {name: None if grad is None else grad.to(of) for name, grad, of in zip(("x", "weight"), grads, ctx.dtypes)}


_route_tokens = define(
    "route_tokens(Tensor x, Tensor weight, int top_k, float? p, str? engine, ScalarType scores_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_kernel, fake=_fake, setup_context=_setup_context, backward=_backward, autocast=("x", "weight"), flops=flops.router_logits,
)
