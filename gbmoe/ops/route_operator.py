"""route: a router's logits to scores, the K best experts and their weights, in one launch.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.launch import router
from gbmoe.launch.router import is_softmax_topk
from gbmoe.router_function import RouterFunction, softmax_topk_code


class Routing(NamedTuple):
    """What a router decides: scores [T,E], weights [T,K], experts [T,K] (int64) and logsumexp [T] (float32 or float64)."""
    scores_TE: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor
    logsumexp_T: torch.Tensor


def route(logits_TE: torch.Tensor, top_k: int, *, normalize: float | None = None, function: RouterFunction | None = None,
          expert_bias: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None,
          given_experts: torch.Tensor | None = None, scores_dtype: torch.dtype | None = None) -> Routing:
    """Scores of all experts, the top_k best experts, their weights, and the logits' logsumexp.

    Without a `function` it is MegaBlocks' router: softmax over the experts, the top_k highest, their weights divided by their p-norm. With
    one it is any router that a RouterFunction describes.

    The choice is torch.topk's on finite logits without ties; ties go to the lower expert, NaN ranks above every other value, and -inf
    gives a score of 0. Everything is computed in float32 (float64 for float64) and rounded once. Differentiable in the logits through
    scores, weights and logsumexp (the router z-loss of arXiv 2202.08906 is its mean square).

    Args:
        logits_TE: [T,E], bfloat16, float16, float32 or float64.
        top_k: experts a token, 1 to E.
        normalize: p of the norm that the weights are divided by (MegaBlocks' moe_normalize_expert_weights), positive or infinity;
            None leaves them as they are. CUDA kernels take None and 1 to 126 / log2(E); any other p is computed in plain PyTorch. With a
            `function`, which has one of its own, it stays None.
        function: a RouterFunction. CUDA kernels take norms None and 1, up to 64 groups, and a group_best of 1 and 2; the others are
            computed in plain PyTorch.
        expert_bias: [E], float32 or float64, added to what experts are ranked by, and to nothing else. It has no gradient.
        padding_mask: bool [T]. Where it is True the token is padding. Whatever its logits are, its ids are -1, which a RoutingPlan leaves
            out, its weights, scores and logsumexp are 0, and it has no gradient.
        given_experts: ids [T,K], int32 or int64, that are taken instead of a choice, as for replay. The weights are those that the
            present logits give these experts, and gradients flow through them. An id outside [0,E) becomes -1, with the weight 0.
        scores_dtype: the dtype of scores and weights: torch.float32, or None for that of the logits. Those of float64 logits are float64.

    Returns:
        Routing; scores and weights have the dtype of the logits or scores_dtype or, under autocast, float32, as torch.softmax.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2).experts_TK
        tensor([[1, 2]])
        >>> logits, bias = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([1.0, 0, 0])
        >>> route(logits, 2, function=RouterFunction("sigmoid"), expert_bias=bias).experts_TK
        tensor([[0, 1]])
    """
    require_tensor(logits_TE, "route", "logits", rank=2, dtypes=FLOATING)
    code = router_code("route", logits_TE.size(1), top_k, normalize, function)
    if expert_bias is not None or padding_mask is not None or given_experts is not None:
        require_router_tensors("route", logits_TE, logits_TE.size(1), top_k, expert_bias, padding_mask, given_experts)
    if scores_dtype is not None:
        require(scores_dtype == torch.float32, "route", "scores_dtype", "None or torch.float32", scores_dtype)
    wide = scores_dtype is not None or autocast_enabled(logits_TE.device.type)
    return Routing(*_route(logits_TE, expert_bias, padding_mask, given_experts, top_k, code, wide))


def router_code(operator: str, experts: int, top_k: int, normalize: float | None, function: RouterFunction | None) -> str:
    """The code of the function that route()'s arguments describe. Raises ValueError unless they are what it takes."""
    if not isinstance(top_k, int) or not 1 <= top_k <= experts:
        require(False, operator, "top_k", lambda: f"an int, 1 to {experts}, the number of experts", repr(top_k))
    if normalize is not None and not (isinstance(normalize, (int, float)) and normalize > 0):
        require(False, operator, "normalize", "None or a positive p", repr(normalize))
    if function is None:
        return softmax_topk_code(normalize)
    require(isinstance(function, RouterFunction), operator, "function", "a gbmoe.RouterFunction", type(function).__name__, TypeError)
    require(normalize is None, operator, "normalize", "None with a function, which has its own", repr(normalize))
    function.check(operator, experts, top_k)
    return function.code


def require_router_tensors(operator: str, like: torch.Tensor, experts: int, top_k: int, expert_bias: torch.Tensor | None,
                           padding_mask: torch.Tensor | None, given_experts: torch.Tensor | None) -> None:
    """Raise TypeError or ValueError unless these are what route() takes, for the tokens of `like`."""
    device, tokens = like.device, like.size(0)
    if expert_bias is not None:
        require_tensor(expert_bias, operator, "expert_bias", rank=1, dtypes=(torch.float32, torch.float64), device=device)
        require(expert_bias.size(0) == experts, operator, "expert_bias", lambda: f"shape [E] == [{experts}]", list(expert_bias.shape))
    if padding_mask is not None:
        require_tensor(padding_mask, operator, "padding_mask", rank=1, dtypes=(torch.bool,), device=device)
        require(padding_mask.size(0) == tokens, operator, "padding_mask", lambda: f"shape [T] == [{tokens}]", list(padding_mask.shape))
    if given_experts is not None:
        require_tensor(given_experts, operator, "given_experts", rank=2, dtypes=(torch.int32, torch.int64), device=device)
        require(given_experts.size(0) == tokens and given_experts.size(1) == top_k, operator, "given_experts",
                lambda: f"shape [T,K] == [{tokens}, {top_k}]", list(given_experts.shape))


def _scores_dtype(logits: torch.Tensor, wide: bool) -> torch.dtype:
    return torch.float32 if wide and logits.dtype != torch.float64 else logits.dtype


def _route_fake(logits, expert_bias, padding_mask, given, top_k, function, wide):
    return router.empty_routing(logits, logits.shape, top_k, logits.dtype, _scores_dtype(logits, wide))


def _route_kernel(logits, expert_bias, padding_mask, given, top_k, function, wide):
    return router.route(logits, expert_bias, padding_mask, given, top_k, RouterFunction.of_code(function), _scores_dtype(logits, wide))


def save_for_gradient(ctx, function: RouterFunction, others: tuple[torch.Tensor | None, ...], scores: torch.Tensor, logits: torch.Tensor,
                      ids: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """What gradient_of_logits needs, to be saved; `others` are the bias, the mask and the given ids. Logits are kept where the scores that
    forward returns, which may have 16 bits, do not determine the slopes."""
    ctx.function, ctx.of_scores = function, is_softmax_topk(function, *others)
    ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)
    return scores if ctx.of_scores else logits, ids, others[1]


def gradient_of_logits(ctx, saved, grad_scores, grad_weights, grad_logsumexp, dtype):
    """The logits' gradient in a dtype, of what save_for_gradient returned."""
    kept, ids, padding_mask = saved
    return route_backward(kept, ids, padding_mask, grad_scores, grad_weights, grad_logsumexp, ctx.function.code, ctx.of_scores, dtype)


def _setup_context(ctx, inputs, output):
    logits, *others, _, code, _ = inputs
    scores, _, ids, _ = output
    ctx.dtype = logits.dtype
    ctx.save_for_backward(*save_for_gradient(ctx, RouterFunction.of_code(code), tuple(others), scores, logits, ids))


def _backward(ctx, grad_scores, grad_weights, _grad_ids, grad_logsumexp):
    if grad_scores is None and grad_weights is None and grad_logsumexp is None:
        return {}
    return {"logits": gradient_of_logits(ctx, ctx.saved_tensors, grad_scores, grad_weights, grad_logsumexp, ctx.dtype)}


_route = define(
    "route(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, Tensor? given, int top_k, str function, bool wide)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_route_kernel, fake=_route_fake, setup_context=_setup_context, backward=_backward,
)

# The logits' gradient, in the dtype that it is given, from the scores of a softmax, the K highest and their norm, or else from the logits.
route_backward = define(
    "route_backward(Tensor saved, Tensor ids, Tensor? padding_mask, Tensor? grad_scores, Tensor? grad_weights, Tensor? grad_logsumexp,"
    " str function, bool of_scores, ScalarType dtype) -> Tensor",
    reference=router.route_backward,
    fake=lambda saved, ids, padding_mask, grad_scores, grad_weights, grad_logsumexp, function, of_scores, dtype:
        saved.new_empty(saved.shape, dtype=dtype),
)
