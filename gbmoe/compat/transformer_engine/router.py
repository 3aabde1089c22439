"""TransformerEngine's router functions by name and signature, on gbmoe.ops.route.

Experts are chosen, scored and weighed in float32 (float64 for float64, which TransformerEngine does not take), and results are rounded
once. Ties, NaN and infinities are those of route. Where route has a kernel a call is that, and one scatter into each dense result; the host
never waits. Autocast changes nothing.

Shape suffixes: T tokens, E experts, K slots a token (top-k), C columns.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import FLOATING, require, require_choice, require_tensor
from gbmoe.ops.route_operator import route
from gbmoe.router_function import SCORES, RouterFunction

__all__ = ["fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"]

_EPSILON = 1e-20  # what TransformerEngine adds to a sum of scores that it divides by
_COUNTS = (torch.int32, torch.int64, *FLOATING)


def fused_topk_with_score_function(
    logits: torch.Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None, scaling_factor: float | None,
    score_function: str, expert_bias: torch.Tensor | None, routing_map_format: Any = "BYTEMAP", topk_indices: None = None,
    qb_histogram: None = None, qb_bin_bounds: None = None, qb_histogram_mode: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's `topk` experts: (probs [..., E], the weights of those chosen and 0 elsewhere; routing_map, bool [T,E]).

    Differentiable in logits. It is gbmoe.ops.route, which returns ids and weights instead and takes padding and given ids too.

    Args:
        logits: [..., E], bfloat16, float16, float32 or float64; all dimensions but the last are tokens. probs have its shape and dtype.
        topk: 1 to E.
        use_pre_softmax: True: probs are softmax scores over all experts. False: the softmax over the chosen logits. It has no
            effect on other scores.
        num_groups, group_topk: experts are chosen from the group_topk best of num_groups groups of adjacent experts; a group is worth the
            sum of its topk // group_topk best. A group_topk of None or 0 takes experts from all groups.
        scaling_factor: what probs are multiplied by; None for 1.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". The latter two are divided by their sum over the chosen experts, plus
            1e-20, where topk is above 1.
        expert_bias: [E], floating, added to what experts are ranked by, and to nothing else; None with "softmax". It has no gradient.
        routing_map_format: BYTEMAP, as a name or as TransformerEngine's own constant; a map of bits is not made.
        topk_indices, qb_histogram, qb_bin_bounds, qb_histogram_mode: None; quantile balancing is not computed.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    name = "fused_topk_with_score_function"
    _check(name, logits, topk, score_function, routing_map_format)
    for argument, value in (("topk_indices", topk_indices), ("qb_histogram", qb_histogram), ("qb_bin_bounds", qb_bin_bounds),
                            ("qb_histogram_mode", qb_histogram_mode)):
        require(value is None, name, argument, "None", type(value).__name__)
    experts = logits.size(-1)
    groups: tuple[int, ...] = ()
    if group_topk not in (None, 0):
        _check_groups(name, experts, topk, num_groups, group_topk)
        groups = (num_groups, group_topk)  # type: ignore[assignment]
    require(scaling_factor is None or (isinstance(scaling_factor, (int, float)) and math.isfinite(scaling_factor)), name,
            "scaling_factor", "None or a finite number", scaling_factor)
    if expert_bias is not None:
        require(score_function != "softmax", name, "expert_bias", "None with score_function 'softmax'", "a tensor")
        require_tensor(expert_bias, name, "expert_bias", rank=1, dtypes=FLOATING, device=logits.device)
        require(expert_bias.size(0) == experts, name, "expert_bias", lambda: f"shape [E] == [{experts}]", list(expert_bias.shape))
        expert_bias = expert_bias.detach().to(accumulate_dtype(expert_bias.dtype))

    logits_TE = logits.reshape(-1, experts)
    function = _function(score_function, bool(use_pre_softmax), topk, groups, 1.0 if scaling_factor is None else float(scaling_factor))
    routing = route(logits_TE, topk, function=function, expert_bias=expert_bias)
    probs_TE = logits.new_zeros(logits_TE.shape).scatter_(1, routing.experts_TK, routing.weights_TK.to(logits.dtype))
    return probs_TE.view(logits.shape), _routing_map(routing.experts_TK, logits_TE)


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: Any = "BYTEMAP",
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a load-balancing loss is made of: (routing_map, bool [T,E], of each token's `topk` best; scores [..., E] of all experts).

    Scores are float32 (float64 for float64) and differentiable in logits. Those of "sigmoid" and "sqrtsoftplus" are divided by their sum
    over all experts, plus 1e-20, where topk is above 1. Neither biases nor groups count.

    Args:
        logits, topk, score_function, routing_map_format: as in fused_topk_with_score_function.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    _check("fused_compute_score_for_moe_aux_loss", logits, topk, score_function, routing_map_format)
    logits_TE = logits.reshape(-1, logits.size(-1))
    routing = route(logits_TE, topk, function=_function(score_function, True, 1, (), 1.0), scores_dtype=torch.float32)
    scores_TE = routing.scores_TE
    if score_function != "softmax" and topk > 1:
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + _EPSILON)
    return _routing_map(routing.experts_TK, logits_TE), scores_TE.view(logits.shape)


def fused_moe_aux_loss(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: int | torch.Tensor, num_experts: int, topk: int, coeff: float,
) -> torch.Tensor:
    """coeff * num_experts / (topk * total_num_tokens**2) * <sum of probs over tokens, tokens_per_expert>, with no dimension.

    Summed in float32 (float64 for float64), and rounded to the dtype of probs. Differentiable in probs.

    Args:
        probs: [T,C], bfloat16, float16, float32 or float64. C is num_experts, or a multiple of it where the loss is that of each of several
            sequences, which then lie side by side.
        tokens_per_expert: [C], int32, int64 or floating, on the device of probs; a constant for gradients.
        total_num_tokens: at least 1; those of all ranks where tokens_per_expert are. A tensor of one element is not read by the host.
        num_experts, topk: at least 1.
        coeff: the loss's weight.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    name = "fused_moe_aux_loss"
    require_tensor(probs, name, "probs", rank=2, dtypes=FLOATING)
    require_tensor(tokens_per_expert, name, "tokens_per_expert", rank=1, dtypes=_COUNTS, device=probs.device)
    require(tokens_per_expert.size(0) == probs.size(1), name, "tokens_per_expert", lambda: f"shape [C] == [{probs.size(1)}]",
            list(tokens_per_expert.shape))
    for argument, value in (("num_experts", num_experts), ("topk", topk)):
        require(isinstance(value, int) and value >= 1, name, argument, "an int of at least 1", repr(value))
    require(probs.size(1) % num_experts == 0, name, "num_experts", lambda: f"a divisor of {probs.size(1)}, the columns of probs",
            num_experts)
    wide, tokens = accumulate_dtype(probs.dtype), total_num_tokens
    if isinstance(tokens, torch.Tensor):
        require_tensor(tokens, name, "total_num_tokens", dtypes=_COUNTS)
        require(tokens.numel() == 1, name, "total_num_tokens", "one element", list(tokens.shape))
        tokens = tokens.detach().to(wide).reshape(())
    else:
        require(isinstance(tokens, (int, float)) and tokens >= 1, name, "total_num_tokens", "a number of at least 1", repr(tokens))
    scale = coeff * num_experts / topk / tokens / tokens
    loss = (probs.sum(0, dtype=wide) * tokens_per_expert.detach().to(wide)).sum(dtype=wide)
    return (loss * scale).to(probs.dtype)


def _make_function(score: str, pre_softmax: bool, topk: int, groups: tuple[int, ...], scale: float) -> RouterFunction:
    """`groups` are (num_groups, group_topk), or nothing."""
    limits: dict[str, Any] = {}
    if groups:
        limits = {"num_groups": groups[0], "group_topk": groups[1], "group_best": max(1, topk // groups[1])}
    if score == "softmax":
        return RouterFunction(pre_softmax=pre_softmax, scale=scale, **limits)
    norm: dict[str, Any] = {"normalize": 1, "epsilon": _EPSILON} if topk > 1 else {}
    return RouterFunction(score, scale=scale, **limits, **norm)


_kept_function = functools.lru_cache(maxsize=256)(_make_function)


def _function(*of) -> RouterFunction:
    # A compiler traces what a cache holds, and warns of it.
    return _make_function(*of) if torch.compiler.is_compiling() else _kept_function(*of)


def _routing_map(experts_TK: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
    # Not True, with which torch.jit.trace fails.
    return torch.zeros(logits_TE.shape, dtype=torch.bool, device=logits_TE.device).scatter_(1, experts_TK, 1)


def _check(name: str, logits: torch.Tensor, topk: int, score_function: str, routing_map_format: Any) -> None:
    require_tensor(logits, name, "logits", dtypes=FLOATING)
    require(logits.dim() >= 1, name, "logits", "shape [..., E]", "a tensor without dimensions")
    experts = logits.size(-1)
    require(isinstance(topk, int) and 1 <= topk <= experts, name, "topk", lambda: f"an int, 1 to {experts}, the number of experts",
            repr(topk))
    require_choice(name, "score_function", score_function, SCORES)
    # TransformerEngine's constant is a member of an enumeration that gbmoe does not import.
    require(str(getattr(routing_map_format, "name", routing_map_format)).upper() == "BYTEMAP", name, "routing_map_format",
            "BYTEMAP, a bool for each token and expert", routing_map_format)


def _check_groups(name: str, experts: int, topk: int, num_groups: Any, group_topk: Any) -> None:
    require(isinstance(num_groups, int) and num_groups >= 1 and experts % num_groups == 0, name, "num_groups",
            lambda: f"a divisor of {experts}, the number of experts, with group_topk", repr(num_groups))
    size = experts // num_groups
    require(isinstance(group_topk, int) and 1 <= group_topk <= num_groups and topk <= size * group_topk, name, "group_topk",
            lambda: f"1 to num_groups == {num_groups}, groups of {size} experts, with at least topk == {topk} in all", repr(group_topk))
