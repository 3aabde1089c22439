"""route: a router's logits to scores, the K best experts and their weights, in one launch.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.launch import plain_router
from gbmoe.launch.alignment import aligned
from gbmoe.launch.availability import serves
from gbmoe.router_function import SCORES, RouterFunction, softmax_topk_code
from gbmoe.tuning import router_kernels as tuning


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

    The choice is torch.topk's on finite logits without ties; ties go to the lower expert, NaN ranks above every number, and
    -inf gives a score of 0. Everything is computed in float32 (float64 for float64) and rounded once. Differentiable in the
    logits through scores, weights and logsumexp (the router z-loss of arXiv 2202.08906 is its mean square).

    Args:
        logits_TE: [T,E], bfloat16, float16, float32 or float64.
        top_k: experts a token, 1 to E.
        normalize: p of the norm that the weights are divided by (MegaBlocks' moe_normalize_expert_weights), positive or infinity;
            None leaves them as they are. CUDA kernels take None and 1 to 126 / log2(E); any other p is computed in plain PyTorch. With a
            `function`, which has one of its own, it stays None.
        function: a RouterFunction. CUDA kernels take norms None and 1, up to 64 groups, and a group_best of 1 and 2; the others are
            computed in plain PyTorch.
        expert_bias: [E], float32 or float64, added to what experts are ranked by, and to nothing else. It has no gradient.
        padding_mask: bool [T]. Where it is True the token is padding: its ids are -1, which a RoutingPlan leaves out, its weights, scores
            and logsumexp are 0, and it has no gradient, whatever its logits are.
        given_experts: ids [T,K], int32 or int64, that are taken instead of a choice, as for replay. The weights are those of these experts
            by the logits of now, and gradients flow through them. An id outside [0,E) becomes -1, with the weight 0.
        scores_dtype: the dtype of scores and weights: torch.float32, or None for that of the logits. Those of float64 logits are float64.

    Returns:
        Routing; scores and weights have the dtype of the logits or scores_dtype or, under autocast, float32, as torch.softmax.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2).experts_TK
        tensor([[1, 2]])
        >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2, function=RouterFunction("sigmoid"), expert_bias=torch.tensor([1.0, 0, 0])).experts_TK
        tensor([[0, 1]])
    """
    require_tensor(logits_TE, "route", "logits", rank=2, dtypes=FLOATING)
    code = router_code("route", logits_TE.size(1), top_k, normalize, function)
    if expert_bias is not None or padding_mask is not None or given_experts is not None:
        require_router_tensors("route", logits_TE, logits_TE.size(1), top_k, expert_bias, padding_mask, given_experts)
    require(scores_dtype in (None, torch.float32), "route", "scores_dtype", "None or torch.float32", scores_dtype)
    wide = scores_dtype is not None or autocast_enabled(logits_TE.device.type)
    return Routing(*_route(logits_TE, expert_bias, padding_mask, given_experts, top_k, code, wide))


def router_code(operator: str, experts: int, top_k: int, normalize: float | None, function: RouterFunction | None) -> str:
    """The code of the function that route()'s arguments describe. Raises ValueError unless they are what it takes."""
    require(isinstance(top_k, int) and 1 <= top_k <= experts, operator, "top_k", lambda: f"an int, 1 to {experts}, the number of experts",
            repr(top_k))
    require(normalize is None or (isinstance(normalize, (int, float)) and normalize > 0), operator, "normalize", "None or a positive p",
            repr(normalize))
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


# ------------------------------------------------------------------------------------------------- which kernel, if there is one

# Of a call that is a softmax, the K highest and their norm there are kernels that do nothing else, and backward has the scores of forward.
# All other calls have one kernel, and backward has the logits of forward.


def is_softmax_topk(function: RouterFunction, *others: torch.Tensor | None) -> bool:
    """Whether a call is no more than a softmax, the K highest and their norm; `others` are the bias, the mask and the ids that it is
    given."""
    return function.is_softmax_topk and all(other is None for other in others)


def kernels_take(experts: int, top_k: int, function: RouterFunction, softmax_topk: bool) -> bool:
    """Whether there is a CUDA kernel of route() for these, whatever the number of tokens. Plain PyTorch does the others, and float64."""
    if not tuning.serves(experts, top_k):
        return False
    if softmax_topk:
        return _plain_powers(function.softmax_topk_norm, experts)
    limited = not function.has_groups or (function.num_groups <= tuning.MOST_GROUPS and function.group_best <= 2)
    return limited and function.normalize in (None, 1)


def _kernels_serve(loaded: torch.Tensor, top_k: int, function: RouterFunction, softmax_topk: bool, stored: torch.dtype) -> bool:
    """Whether a kernel takes these logits and stores scores of a dtype; or these scores or logits, and stores the logits' gradient."""
    if torch.float64 in (loaded.dtype, stored) or not serves(loaded):
        return False
    return kernels_take(loaded.size(1), top_k, function, softmax_topk)


def _plain_powers(p: float | None, experts: int) -> bool:
    """Whether the p-th power of a row's largest score, which is at least 1 / experts, is a normal float32 number, and slopes are finite.

    The kernels do not divide scores by the largest one first, as the reference does. That would take more registers for every norm, so
    that a quarter fewer warps could run.
    """
    return p is None or 1 <= p <= 126 / max(1.0, math.log2(experts))


def _needs_powers(function: RouterFunction) -> bool:
    return function.softmax_topk_norm not in (None, 1, 2)


def _scores_dtype(logits: torch.Tensor, wide: bool) -> torch.dtype:
    return torch.float32 if wide and logits.dtype != torch.float64 else logits.dtype


def empty_routing(like: torch.Tensor, logits_shape: Sequence[int], top_k: int, logits_dtype: torch.dtype,
                  scores_dtype: torch.dtype) -> Routing:
    """The tensors of a Routing, for logits of that shape and dtype."""
    tokens = logits_shape[0]
    return Routing(like.new_empty(logits_shape, dtype=scores_dtype), like.new_empty(tokens, top_k, dtype=scores_dtype),
                   like.new_empty(tokens, top_k, dtype=torch.int64),
                   like.new_empty(tokens, dtype=accumulate_dtype(logits_dtype)))


def route_logits(
    logits: torch.Tensor, expert_bias: torch.Tensor | None, padding_mask: torch.Tensor | None, given: torch.Tensor | None, top_k: int,
    function: RouterFunction, scores_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """route() without checks and autograd, with scores and weights in another dtype."""
    plain = is_softmax_topk(function, expert_bias, padding_mask, given)
    if not _kernels_serve(logits, top_k, function, plain, scores_dtype):
        if plain:
            return plain_router.softmax_topk(logits, top_k, function.softmax_topk_norm, scores_dtype)
        return plain_router.route(logits, expert_bias, padding_mask, given, top_k, function, scores_dtype)
    outputs = empty_routing(logits, logits.shape, top_k, logits.dtype, scores_dtype)
    if plain:
        config = tuning.forward(logits.size(1), top_k, logits.dtype == torch.bfloat16, _needs_powers(function))
    else:
        config = tuning.any_function(logits.size(1), top_k)
        expert_bias, padding_mask, given = (
            None if t is None else aligned(t.to(dtype))
            for t, dtype in ((expert_bias, torch.float32), (padding_mask, torch.bool), (given, torch.int64)))
    torch.ops.gbmoe_cuda.route(aligned(logits), expert_bias, padding_mask, given, *formula(function.code, plain), *config, *outputs)
    return tuple(outputs)


@functools.lru_cache(maxsize=1024)
def formula(code: str, plain: bool) -> tuple:
    """The function of this code as csrc/router/function.cuh has it, field by field; `plain`: of a softmax, the K highest and their norm."""
    function = RouterFunction.of_code(code)
    if plain:
        return 0, 1, 1, 1, function.softmax_topk_norm or 0.0, 0.0, 1.0
    kind = 1 + (SCORES.index(function.score) if function.pre_softmax else len(SCORES))
    groups = (function.num_groups, function.group_topk, function.group_best) if function.has_groups else (1, 1, 1)
    return kind, *groups, function.normalize or 0.0, function.epsilon, function.scale


def _route_fake(logits, expert_bias, padding_mask, given, top_k, function, wide):
    return tuple(empty_routing(logits, logits.shape, top_k, logits.dtype, _scores_dtype(logits, wide)))


def _route_kernel(logits, expert_bias, padding_mask, given, top_k, function, wide):
    return route_logits(logits, expert_bias, padding_mask, given, top_k, RouterFunction.of_code(function), _scores_dtype(logits, wide))


def _route_backward_kernel(saved, ids, padding_mask, grad_scores, grad_weights, grad_logsumexp, code, of_scores, dtype):
    function = RouterFunction.of_code(code)
    grads = grad_scores, grad_weights, grad_logsumexp
    if not _kernels_serve(saved, ids.size(1), function, of_scores, dtype):
        if of_scores:
            return plain_router.softmax_topk_backward(saved, ids, *grads, function.softmax_topk_norm, dtype).contiguous()
        return plain_router.route_backward(saved, ids, padding_mask, *grads, function, dtype).contiguous()
    grad = saved.new_empty(saved.shape, dtype=dtype)
    given = (None if g is None else aligned(g) for g in grads)
    experts, top_k = saved.size(1), ids.size(1)
    if of_scores:
        config = tuning.backward(experts, top_k, dtype == torch.float32, _needs_powers(function))
    else:
        config = tuning.any_function_backward(experts)
    padding_mask = None if padding_mask is None else padding_mask.contiguous()
    torch.ops.gbmoe_cuda.route_backward(aligned(saved), ids, padding_mask, *given, *formula(code, of_scores), *config, grad)
    return grad


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
    reference=_route_backward_kernel,
    fake=lambda saved, ids, padding_mask, grad_scores, grad_weights, grad_logsumexp, function, of_scores, dtype:
        saved.new_empty(saved.shape, dtype=dtype),
)
