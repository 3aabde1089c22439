"""route_tokens: a linear layer and what route() makes of its logits, which stay in float32.

Logits that are rounded to 16 bits choose other experts wherever two of them are nearly equal. One operator computes both, so that the
logits' gradient can be in the operands' dtype from the kernel on: autograd would want it in float32, and cast it in a pass of its own.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define, is_unseen
from gbmoe.launch import router
from gbmoe.ops import flops
from gbmoe.ops.route_operator import (
    Routing,
    require_router_tensors,
    route_backward,
    router_code,
    save_for_gradient,
)
from gbmoe.ops.router_linear import products_of_gradient, save_for_products
from gbmoe.plain import plain_gmm
from gbmoe.programs import Programs
from gbmoe.router_function import RouterFunction


def route_tokens(x_TH: torch.Tensor, weight_EH: torch.Tensor, top_k: int, *, normalize: float | None = None,
                 engine: str | None = None, bias: torch.Tensor | None = None, function: RouterFunction | None = None,
                 expert_bias: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None,
                 given_experts: torch.Tensor | None = None, scores_dtype: torch.dtype | None = None) -> Routing:
    """route(x @ weight.T + bias, top_k, ...) with logits in float32, which are rounded nowhere.

    Differentiable in x, weight and bias through scores, weights and logsumexp. Runs on every device; float64 is computed in float64. Under
    autocast both operands are cast to its dtype, and scores and weights are float32.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64.
        weight_EH: [E,H], one of these too. Of two dtypes the product has the wider one: a float32 weight with bfloat16 tokens makes a
            product of float32, in TF32 where torch.set_float32_matmul_precision allows it.
        top_k, normalize, function, expert_bias, padding_mask, given_experts: as those of route().
        engine: one of engines.BATCH_INVARIANT computes the product, so that a token's logits have the same bits whatever other tokens
            there are; None leaves it to torch.
        bias: [E], of any of these dtypes, added to the logits in float32.
        scores_dtype: the dtype of scores and weights: torch.float32, or None for that of x.

    Returns:
        Routing; scores and weights have the dtype of x, or scores_dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; and if the engine cannot compute the product.

    Example:
        >>> x = torch.ones(1, 2).bfloat16()
        >>> routing = route_tokens(x, torch.tensor([[1, 0], [1, 2**-8]]).bfloat16(), 1)
        >>> routing.experts_TK, routing.scores_TE.dtype
        (tensor([[1]]), torch.bfloat16)
    """
    return Routing(*router_operator(*router_inputs(
        x_TH, weight_EH, top_k, normalize=normalize, engine=engine, bias=bias, function=function, expert_bias=expert_bias,
        padding_mask=padding_mask, given_experts=given_experts, scores_dtype=scores_dtype))[:4])


def router_inputs(x_TH: torch.Tensor, weight_EH: torch.Tensor, top_k: int, *, normalize: float | None, engine: str | None,
                  bias: torch.Tensor | None, function: RouterFunction | None, expert_bias: torch.Tensor | None,
                  padding_mask: torch.Tensor | None, scores_dtype: torch.dtype | None, given_experts: torch.Tensor | None = None) -> tuple:
    """The operator's inputs, of route_tokens' arguments, which are checked."""
    require_tensor(x_TH, "route_tokens", "x", rank=2, dtypes=FLOATING)
    require_tensor(weight_EH, "route_tokens", "weight", rank=2, dtypes=FLOATING, device=x_TH.device)
    if weight_EH.size(1) != x_TH.size(1):
        require(False, "route_tokens", "weight", lambda: f"size(1) == {x_TH.size(1)}", weight_EH.size(1))
    experts = weight_EH.size(0)
    code = router_code("route_tokens", experts, top_k, normalize, function)
    if expert_bias is not None or padding_mask is not None or given_experts is not None:
        require_router_tensors("route_tokens", x_TH, experts, top_k, expert_bias, padding_mask, given_experts)
    if bias is not None:
        require_tensor(bias, "route_tokens", "bias", rank=1, dtypes=FLOATING, device=x_TH.device)
        require(bias.size(0) == experts, "route_tokens", "bias", lambda: f"shape [E] == [{experts}]", list(bias.shape))
    if scores_dtype is not None:
        require(scores_dtype == torch.float32, "route_tokens", "scores_dtype", "None or torch.float32", scores_dtype)
    if x_TH.dtype == torch.float64:
        scores_dtype = torch.float64
    elif scores_dtype is None:
        scores_dtype = torch.float32 if autocast_enabled(x_TH.device.type) else x_TH.dtype
    return x_TH, weight_EH, bias, expert_bias, padding_mask, given_experts, top_k, code, engine, scores_dtype


def router_kernel(x_TH, weight_EH, bias_E, expert_bias_E, padding_T, given_TK, top_k, code, engine, scores_dtype):
    function = RouterFunction.of_code(code)
    if weight_EH.dtype != x_TH.dtype:
        dtype = torch.promote_types(x_TH.dtype, weight_EH.dtype)
        x_TH, weight_EH = x_TH.to(dtype), weight_EH.to(dtype)
    logits_TE = plain_gmm.linear(x_TH, weight_EH) if engine is None else engines.linear(x_TH, weight_EH, engine=engine)
    if bias_E is not None:
        logits_TE += bias_E
    routing = router.route(logits_TE, expert_bias_E, padding_T, given_TK, top_k, function, scores_dtype)
    # The gradient of a softmax, the K highest and their norm needs no logits: nobody keeps them.
    kept = logits_TE.new_empty(0) if router.is_softmax_topk(function, expert_bias_E, padding_T, given_TK) else logits_TE
    return *routing, kept


def saved_of_router(inputs: tuple, scores_TE: torch.Tensor, logits_TE: torch.Tensor) -> tuple[bool, str, torch.Tensor]:
    """Whether gradients are computed from scores, the function's code, and the scores or the logits that they are computed from."""
    of_scores = router.is_softmax_topk(RouterFunction.of_code(inputs[7]), *inputs[3:6])
    return of_scores, inputs[7], scores_TE if of_scores else logits_TE


def _fake(x_TH, weight_EH, bias_E, expert_bias_E, padding_T, given_TK, top_k, code, engine, scores_dtype):
    logits_dtype = accumulate_dtype(torch.promote_types(x_TH.dtype, weight_EH.dtype))
    shape = (x_TH.size(0), weight_EH.size(0))
    plain = router.is_softmax_topk(RouterFunction.of_code(code), expert_bias_E, padding_T, given_TK)
    return *router.empty_routing(x_TH, shape, top_k, logits_dtype, scores_dtype), x_TH.new_empty(0 if plain else shape, dtype=logits_dtype)


def _setup_context(ctx, inputs, output):
    x_TH, weight_EH, bias_E, *others, _, code, _, _ = inputs
    scores_TE, _, experts_TK, _, logits_TE = output
    ctx.dtypes, ctx.bias_dtype = (x_TH.dtype, weight_EH.dtype), None if bias_E is None else bias_E.dtype
    save_for_products(ctx, x_TH, weight_EH, *save_for_gradient(ctx, RouterFunction.of_code(code), tuple(others), scores_TE, logits_TE,
                                                               experts_TK))
    ctx.mark_non_differentiable(experts_TK, logits_TE)


def _backward(ctx, grad_scores_TE, grad_weights_TK, _, grad_logsumexp_T, __):
    if grad_scores_TE is None and grad_weights_TK is None and grad_logsumexp_T is None:
        return {}
    saved = ctx.saved_tensors
    inputs = [grad_scores_TE, grad_weights_TK, grad_logsumexp_T, *saved, ctx.function.code, ctx.of_scores, *ctx.dtypes,
              ctx.bias_dtype if ctx.needs_input_grad[2] else None]
    unseen = saved[2].is_cuda and not torch.is_grad_enabled() and is_unseen(saved[2], *inputs)
    return dict(zip(("x", "weight", "bias"), _programs(inputs) if unseen else router_gradients(inputs)))


def router_gradients(inputs: list) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, weight and bias, each None where it is not wanted, of the gradients of scores, weights and logsumexp, the tensors
    that were saved, the function's code, whether these are of scores, and the dtypes of x, weight and bias; None for the bias's where its
    gradient is not wanted."""
    *grads_of_results, x_TH, weight_EH, kept_TE, ids_TK, padding_T, code, of_scores, x_dtype, weight_dtype, bias_dtype = inputs
    dtype = torch.promote_types(x_dtype, weight_dtype)
    grad_logits_TE = route_backward(kept_TE, ids_TK, padding_T, *grads_of_results, code, of_scores, dtype)
    grad_bias_E = None if bias_dtype is None else grad_logits_TE.sum(0, dtype=accumulate_dtype(dtype)).to(bias_dtype)
    if x_dtype == weight_dtype:
        return *products_of_gradient(grad_logits_TE, x_TH, weight_EH), grad_bias_E
    grads = products_of_gradient(grad_logits_TE, *(None if operand is None else operand.to(dtype) for operand in (x_TH, weight_EH)))
    return *(None if grad is None else grad.to(of) for grad, of in zip(grads, (x_dtype, weight_dtype))), grad_bias_E


_programs = Programs(router_gradients, "route_tokens_backward")


router_operator = define(
    "route_tokens(Tensor x, Tensor weight, Tensor? bias, Tensor? expert_bias, Tensor? padding_mask, Tensor? given, int top_k,"
    " str function, str? engine, ScalarType scores_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=router_kernel, fake=_fake, setup_context=_setup_context, backward=_backward, autocast=("x", "weight"),
    flops=flops.router_logits, recorded=lambda *inputs: True,
)
