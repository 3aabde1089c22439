"""The router: scores, the K best experts and their weights of logits, and the logits' gradient, each in one launch. CUDA kernels where they
are loaded and take the call, otherwise plain PyTorch. No autograd.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe.launch.alignment import aligned
from gbmoe.launch.availability import serves
from gbmoe.plain import plain_router
from gbmoe.router_function import SCORES, RouterFunction
from gbmoe.tuning import router_kernels as tuning

# Of a call that is a softmax, the K highest and their norm there are kernels that do nothing else, and backward has the scores of forward.
# All other calls have one kernel, and backward has the logits of forward.


def is_softmax_topk(function: RouterFunction, expert_bias: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None,
                    given: torch.Tensor | None = None) -> bool:
    """Whether a call is no more than a softmax, the K highest and their norm."""
    return expert_bias is None and padding_mask is None and given is None and function.is_softmax_topk


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


def empty_routing(like: torch.Tensor, logits_shape: Sequence[int], top_k: int, logits_dtype: torch.dtype,
                  scores_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Scores, weights, ids and logsumexp, as plain_router.route returns them, for logits of that shape and dtype."""
    tokens = logits_shape[0]
    return (like.new_empty(logits_shape, dtype=scores_dtype), like.new_empty(tokens, top_k, dtype=scores_dtype),
            like.new_empty(tokens, top_k, dtype=torch.int64), like.new_empty(tokens, dtype=accumulate_dtype(logits_dtype)))


def route(
    logits: torch.Tensor, expert_bias: torch.Tensor | None, padding_mask: torch.Tensor | None, given: torch.Tensor | None, top_k: int,
    function: RouterFunction, scores_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """(scores [T,E], weights [T,K], ids [T,K], logsumexp [T]) of logits [T,E]; see gbmoe.ops.route for the arguments. Scores and weights
    have the dtype scores_dtype."""
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
    torch.ops.gbmoe_cuda.route(aligned(logits), expert_bias, padding_mask, given, formula(function.code, plain), config, *outputs)
    return outputs


def route_backward(
    saved: torch.Tensor, ids: torch.Tensor, padding_mask: torch.Tensor | None, grad_scores: torch.Tensor | None,
    grad_weights: torch.Tensor | None, grad_logsumexp: torch.Tensor | None, code: str, of_scores: bool, dtype: torch.dtype,
) -> torch.Tensor:
    """The logits' gradient [T,E] in a dtype: with `of_scores` from the scores of a call that is_softmax_topk, otherwise from the logits."""
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
    torch.ops.gbmoe_cuda.route_backward(aligned(saved), ids, padding_mask, *given, formula(code, of_scores), config, grad)
    return grad


@functools.lru_cache(maxsize=1024)
def formula(code: str, plain: bool) -> tuple:
    """The function of this code as csrc/router/function.cuh has it, field by field; `plain`: of a softmax, the K highest and their norm."""
    function = RouterFunction.of_code(code)
    if plain:
        return 0, 1, 1, 1, function.softmax_topk_norm or 0.0, 0.0, 1.0
    kind = 1 + (SCORES.index(function.score) if function.pre_softmax else len(SCORES))
    groups = (function.num_groups, function.group_topk, function.group_best) if function.has_groups else (1, 1, 1)
    return kind, *groups, function.normalize or 0.0, function.epsilon, function.scale
