"""The router of any RouterFunction in plain PyTorch, forward and gradient: the path of every device without a kernel, and the oracle of the
tests. A softmax, the K highest and their norm, without biases, are softmax_topk, which has the same results.

Shape suffixes: T tokens, K slots a token (top-k), E experts, G groups.
"""

from __future__ import annotations

import math

import torch

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe.router_function import RouterFunction

# ------------------------------------------------------------------------------------------- any function


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, padding_T: torch.Tensor | None, given_TK: torch.Tensor | None, top_k: int,
    function: RouterFunction, scores_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """(scores [T,E], weights [T,K], ids [T,K], logsumexp [T]); see gbmoe.ops.route."""
    logits_TE = logits_TE.contiguous().to(accumulate_dtype(logits_TE.dtype))
    scores_TE, logsumexp_T = scores_of(logits_TE, function), logits_TE.logsumexp(-1)
    if given_TK is None:
        ids_TK = _choose(scores_TE, logits_TE, bias_E, top_k, function)
    else:
        given_TK = given_TK.contiguous()
        ids_TK = torch.where((given_TK >= 0) & (given_TK < logits_TE.size(1)), given_TK.long(), -1)
    weights_TK = _Weights(logits_TE, scores_TE, ids_TK, function).weights_TK
    if padding_T is not None:
        padding_T1 = padding_T.unsqueeze(1)
        scores_TE, weights_TK = scores_TE.masked_fill(padding_T1, 0), weights_TK.masked_fill(padding_T1, 0)
        ids_TK, logsumexp_T = ids_TK.masked_fill(padding_T1, -1), logsumexp_T.masked_fill(padding_T, 0)
    return scores_TE.to(scores_dtype), weights_TK.to(scores_dtype), ids_TK, logsumexp_T


def route_backward(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, padding_T: torch.Tensor | None, grad_scores_TE: torch.Tensor | None,
    grad_weights_TK: torch.Tensor | None, grad_logsumexp_T: torch.Tensor | None, function: RouterFunction, dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of the logits, in `dtype`. Each slot of `ids` counts, so that an expert that is named twice gets both gradients; an id of no
    expert counts as none, and padding has no gradient. The formulas stand in csrc/router/any_function_backward.cuh."""
    wide = accumulate_dtype(logits_TE.dtype)
    logits_TE = logits_TE.to(wide)
    scores_TE = scores_of(logits_TE, function)
    of_scores_TE = torch.zeros_like(logits_TE) if grad_scores_TE is None else grad_scores_TE.to(wide)
    of_logits_TE = torch.zeros_like(logits_TE)
    if grad_weights_TK is not None:
        weights = _Weights(logits_TE, scores_TE, ids_TK, function)
        target_TE = of_scores_TE if function.pre_softmax else of_logits_TE
        target_TE = target_TE.scatter_add(1, weights.expert_TK, weights.backward(grad_weights_TK.to(wide)))
        if function.pre_softmax:
            of_scores_TE = target_TE
        else:
            of_logits_TE = target_TE
    if function.score == "softmax":
        inner_T1 = (scores_TE * of_scores_TE).sum(-1, keepdim=True)
        of_logits_TE = of_logits_TE + scores_TE * (of_scores_TE - inner_T1)
    else:
        of_logits_TE = of_logits_TE + _slope(logits_TE, scores_TE, function) * of_scores_TE
    if grad_logsumexp_T is not None:
        of_logits_TE = of_logits_TE + grad_logsumexp_T.to(wide).unsqueeze(1) * logits_TE.softmax(-1)
    if padding_T is not None:
        of_logits_TE = of_logits_TE.masked_fill(padding_T.unsqueeze(1), 0)
    return of_logits_TE.to(dtype)


def scores_of(logits_TE: torch.Tensor, function: RouterFunction) -> torch.Tensor:
    """The scores [T,E] of these logits."""
    if function.score == "softmax":
        return logits_TE.softmax(-1)
    return logits_TE.sigmoid() if function.score == "sigmoid" else _softplus(logits_TE).sqrt()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), exact for any x; torch's own is x above 20."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _slope(logits_TE: torch.Tensor, scores_TE: torch.Tensor, function: RouterFunction) -> torch.Tensor:
    """The derivative of each score by its logit, of a function that is no softmax."""
    if function.score == "sigmoid":
        return scores_TE * (-logits_TE).sigmoid()  # 1 - score would lose the bits of a score that is nearly 1
    # A score of 0 gives its logit no gradient, although the slope of the root is infinite there.
    return torch.where(scores_TE == 0, 0, logits_TE.sigmoid() / (2 * scores_TE))


def _choose(scores_TE: torch.Tensor, logits_TE: torch.Tensor, bias_E: torch.Tensor | None, top_k: int,
            function: RouterFunction) -> torch.Tensor:
    """The ids [T,K] of the experts that rank highest; RouterFunction says by what."""
    by_logits = not function.pre_softmax or (bias_E is None and not function.has_groups)
    by_TE = logits_TE if by_logits else scores_TE
    if bias_E is not None:
        by_TE = by_TE + bias_E.to(by_TE.dtype)
    order_TE = _descending(by_TE)
    if function.has_groups:
        group_of_E = torch.arange(by_TE.size(1), dtype=torch.int64, device=by_TE.device) // (by_TE.size(1) // function.num_groups)
        # Experts of the chosen groups come before all others, -inf before any other group's highest.
        outside_TE = (~_chosen_groups(by_TE, function)[:, group_of_E]).to(torch.uint8)
        order_TE = order_TE.gather(1, torch.sort(outside_TE.gather(1, order_TE), dim=-1, stable=True).indices)
    return order_TE[:, :top_k].clone(memory_format=torch.contiguous_format)


def _descending(by: torch.Tensor) -> torch.Tensor:
    """Indices from the highest to the lowest, the lower index among equals, NaN first."""
    return torch.sort(by, dim=-1, descending=True, stable=True).indices


def _chosen_groups(by_TE: torch.Tensor, function: RouterFunction) -> torch.Tensor:
    """Which groups experts may be chosen from, bool [T,G]."""
    by_TGS = by_TE.unflatten(1, (function.num_groups, -1))
    worth_TG = torch.sort(by_TGS, dim=-1, descending=True, stable=True).values[:, :, : function.group_best].sum(-1)
    best_TG = _descending(worth_TG)[:, : function.group_topk]
    return torch.zeros_like(worth_TG, dtype=torch.bool).scatter(1, best_TG, True)


class _Weights:
    """The weights of chosen experts, and their gradient. An id that names no expert has the weight 0 and counts in no sum."""

    def __init__(self, logits_TE: torch.Tensor, scores_TE: torch.Tensor, ids_TK: torch.Tensor, function: RouterFunction):
        self._function, exists_TK = function, (ids_TK >= 0) & (ids_TK < logits_TE.size(1))
        self._exists_TK, self.expert_TK = exists_TK, torch.where(exists_TK, ids_TK, 0)
        if not function.pre_softmax:
            self._chosen_TK = torch.where(exists_TK, logits_TE.gather(1, self.expert_TK), -torch.inf).softmax(-1)
        else:
            self._chosen_TK = torch.where(exists_TK, scores_TE.gather(1, self.expert_TK), 0)

    @property
    def weights_TK(self) -> torch.Tensor:
        function, weights_TK = self._function, self._chosen_TK
        if function.pre_softmax and function.normalize is not None:
            of_largest_TK, norm_T1, largest_T1 = relative_norm(weights_TK, function.normalize)
            weights_TK = of_largest_TK / (norm_T1 + function.epsilon / largest_T1)
        return torch.where(self._exists_TK, weights_TK * function.scale, 0)

    def backward(self, grad_TK: torch.Tensor) -> torch.Tensor:
        """The gradient of what the weights are made of: of the chosen logits without `pre_softmax`, of the chosen scores with it."""
        function, chosen_TK = self._function, self._chosen_TK
        grad_TK = torch.where(self._exists_TK, grad_TK * function.scale, 0)
        if not function.pre_softmax:
            grad_TK = chosen_TK * (grad_TK - (grad_TK * chosen_TK).sum(-1, keepdim=True))
        elif function.normalize is not None:
            grad_TK = norm_gradient(chosen_TK, grad_TK, function.normalize, function.epsilon)
        return torch.where(self._exists_TK, grad_TK, 0)


# ------------------------------------------------------------------------------------ a softmax, the K highest and their norm


def softmax_topk(logits_TE: torch.Tensor, top_k: int, p: float | None, scores_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(scores [T,E], weights [T,K], ids [T,K], logsumexp [T]) of a router's logits; see gbmoe.ops.route.

    Ties go to the lower expert, and NaN ranks above every number: a stable sort in descending order does both.
    """
    wide = accumulate_dtype(logits_TE.dtype)
    logits_TE = logits_TE.to(wide)
    scores_TE = logits_TE.softmax(-1)
    order_TE = torch.sort(logits_TE, dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, :top_k].clone(memory_format=torch.contiguous_format)
    weights_TK = scores_TE.gather(1, ids_TK)
    if p is not None:
        of_largest_TK, norm_T1, _ = relative_norm(weights_TK, p)
        weights_TK = of_largest_TK / norm_T1
    return scores_TE.to(scores_dtype), weights_TK.to(scores_dtype), ids_TK, logits_TE.logsumexp(-1)


_LARGEST_POWER = 1e30  # which float32 holds, and which leaves nothing of a number below 1


def relative_norm(weights_TK: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the weights divided by their row's largest one, the p-norm of these, that largest weight); for p up to 2 nothing is divided, and
    the last is 1.

    A power of a weight below 1 underflows if p is large enough: 0.1 to the 46th is 0 in float32.
    """
    p = p if p == math.inf else min(p, _LARGEST_POWER)
    largest_T1 = torch.ones_like(weights_TK[:, :1])
    if p > 2:
        largest_T1 = weights_TK.amax(-1, keepdim=True)
        largest_T1 = torch.where(largest_T1 == 0, 1, largest_T1)
    of_largest_TK = weights_TK / largest_T1
    return of_largest_TK, torch.linalg.vector_norm(of_largest_TK, ord=p, dim=-1, keepdim=True), largest_T1


def norm_gradient(chosen_TK: torch.Tensor, grad_TK: torch.Tensor, p: float, epsilon: float = 0.0) -> torch.Tensor:
    """The gradient of the chosen scores, of that of the weights: the scores divided by their p-norm plus epsilon."""
    of_largest_TK, norm_T1, largest_T1 = relative_norm(chosen_TK, p)
    if p == math.inf:
        largest_TK = (of_largest_TK == 1).to(chosen_TK.dtype)  # integers divided by integers have torch's default dtype
        share_TK = largest_TK / largest_TK.sum(-1, keepdim=True)
    else:
        # A score of 0 gives its logit no gradient, also where p < 1 makes the slope here infinite.
        p = min(p, _LARGEST_POWER)
        share_TK = torch.where(of_largest_TK == 0, 0, of_largest_TK ** (p - 1)) / (of_largest_TK**p).sum(-1, keepdim=True)
    inner_T1 = (grad_TK * of_largest_TK).sum(-1, keepdim=True)
    if epsilon == 0:
        return (grad_TK - inner_T1 * share_TK) / (norm_T1 * largest_T1)
    # With an epsilon the scores may all be 0, of which a share is NaN: the norm's slope is the share times the norm.
    slope_TK = torch.ones_like(share_TK) if p == 1 else torch.where(norm_T1 == 0, 0, share_TK * norm_T1)
    divisor_T1 = norm_T1 * largest_T1 + epsilon
    return (grad_TK - inner_T1 * largest_T1 / divisor_T1 * slope_TK) / divisor_T1


def softmax_topk_backward(
    scores_TE: torch.Tensor, ids_TK: torch.Tensor, grad_scores_TE: torch.Tensor | None, grad_weights_TK: torch.Tensor | None,
    grad_logsumexp_T: torch.Tensor | None, p: float | None, dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient of route's logits, in `dtype`; the formulas stand in csrc/router/softmax_topk_backward.cuh. An id of no expert counts as
    none."""
    wide = accumulate_dtype(scores_TE.dtype)
    score_TE = scores_TE.to(wide)
    grad_TE = torch.zeros_like(score_TE) if grad_scores_TE is None else grad_scores_TE.to(wide)
    if grad_weights_TK is not None:
        exists_TK = (ids_TK >= 0) & (ids_TK < score_TE.size(1))
        ids_TK = torch.where(exists_TK, ids_TK, 0)
        grad_TK, chosen_TK = grad_weights_TK.to(wide), torch.where(exists_TK, score_TE.gather(1, ids_TK), 0)
        if p is not None:
            grad_TK = norm_gradient(chosen_TK, grad_TK, p)
        grad_TE = grad_TE.scatter_add(1, ids_TK, torch.where(exists_TK, grad_TK, 0))
    grad_TE = grad_TE - (score_TE * grad_TE).sum(-1, keepdim=True)
    if grad_logsumexp_T is not None:
        grad_TE = grad_TE + grad_logsumexp_T.to(wide).unsqueeze(1)
    return (score_TE * grad_TE).to(dtype)
