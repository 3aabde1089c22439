"""route: a router's logits to scores, the K best experts and their weights, in one launch.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.kernels import plain_torch
from gbmoe.kernels.alignment import aligned
from gbmoe.kernels.availability import serves
from gbmoe.tuning import router as tuning


class Routing(NamedTuple):
    """What a router decides: scores [T,E], weights [T,K], experts [T,K] (int64) and logsumexp [T] (float32 or float64)."""
    scores_TE: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor
    logsumexp_T: torch.Tensor


def route(logits_TE: torch.Tensor, top_k: int, *, normalize: float | None = None) -> Routing:
    """Softmax over the experts, the top_k highest, their weights divided by their p-norm, and the logits' logsumexp.

    The choice is torch.topk's on finite logits without ties; ties go to the lower expert, NaN ranks above every number, and
    -inf gives a score of 0. Everything is computed in float32 (float64 for float64) and rounded once. Differentiable in the
    logits through scores, weights and logsumexp (the router z-loss of arXiv 2202.08906 is its mean square).

    Args:
        logits_TE: [T,E], bfloat16, float16, float32 or float64.
        top_k: experts a token, 1 to E.
        normalize: p of the norm that the weights are divided by (MegaBlocks' moe_normalize_expert_weights), positive or infinity;
            None leaves them as they are. CUDA kernels take None and 1 to 126 / log2(E); any other p is computed in plain PyTorch.

    Returns:
        Routing; scores and weights have the dtype of the logits or, under autocast, float32, as torch.softmax.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2).experts_TK
        tensor([[1, 2]])
    """
    require_tensor(logits_TE, "route", "logits", rank=2, dtypes=FLOATING)
    require_choice("route", top_k, logits_TE.size(1), normalize)
    wide = autocast_enabled(logits_TE.device.type)
    return Routing(*_route(logits_TE, top_k, None if normalize is None else float(normalize), wide))


def require_choice(operator: str, top_k: int, experts: int, normalize: float | None) -> None:
    """Raise ValueError unless top_k and normalize are what route() takes."""
    require(isinstance(top_k, int) and 1 <= top_k <= experts, operator, "top_k", lambda: f"an int, 1 to {experts}, the number of experts",
            repr(top_k))
    require(normalize is None or (isinstance(normalize, (int, float)) and normalize > 0), operator, "normalize", "None or a positive p",
            repr(normalize))


def kernels_take(experts: int, top_k: int, p: float | None) -> bool:
    """Whether there is a CUDA kernel of route() for these, whatever the number of tokens. Plain PyTorch does the others, and float64."""
    return tuning.serves(experts, top_k) and _plain_powers(p, experts)


def _kernels_serve(loaded: torch.Tensor, top_k: int, p: float | None, stored: torch.dtype | None = None) -> bool:
    """Whether a kernel takes these logits and stores scores of a dtype (None: theirs); or these scores, and stores the logits' gradient."""
    if torch.float64 in (loaded.dtype, stored) or not serves(loaded):
        return False
    return kernels_take(loaded.size(1), top_k, p)


def _plain_powers(p: float | None, experts: int) -> bool:
    """Whether the p-th power of a row's largest score, which is at least 1 / experts, is a normal float32 number, and slopes are finite.

    The kernels do not divide scores by the largest one first, as the reference does. That would take more registers for every norm, so
    that a quarter fewer warps could run.
    """
    return p is None or 1 <= p <= 126 / max(1.0, math.log2(experts))


def _scores_dtype(logits: torch.Tensor, wide: bool) -> torch.dtype:
    return torch.float32 if wide and logits.dtype != torch.float64 else logits.dtype


def empty_routing(like: torch.Tensor, logits_shape: Sequence[int], top_k: int, logits_dtype: torch.dtype,
                  scores_dtype: torch.dtype) -> Routing:
    """The tensors of a Routing, for logits of that shape and dtype."""
    tokens = logits_shape[0]
    return Routing(like.new_empty(logits_shape, dtype=scores_dtype), like.new_empty(tokens, top_k, dtype=scores_dtype),
                   like.new_empty(tokens, top_k, dtype=torch.int64),
                   like.new_empty(tokens, dtype=plain_torch.accumulate_dtype(logits_dtype)))


def route_logits(logits: torch.Tensor, top_k: int, p: float | None, scores_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """route() without checks and autograd, with scores and weights in another dtype."""
    if not _kernels_serve(logits, top_k, p, scores_dtype):
        return plain_torch.route(logits, top_k, p, scores_dtype)
    outputs = empty_routing(logits, logits.shape, top_k, logits.dtype, scores_dtype)
    config = tuning.forward(logits.size(1), top_k, logits.dtype == torch.float32)
    torch.ops.gbmoe_cuda.route(aligned(logits), p or 0.0, *config, *outputs)
    return tuple(outputs)


def _route_fake(logits, top_k, p, wide):
    return tuple(empty_routing(logits, logits.shape, top_k, logits.dtype, _scores_dtype(logits, wide)))


def _route_kernel(logits, top_k, p, wide):
    return route_logits(logits, top_k, p, _scores_dtype(logits, wide))


def _route_backward_kernel(scores, ids, grad_scores, grad_weights, grad_logsumexp, p, dtype):
    if not _kernels_serve(scores, ids.size(1), p, dtype):
        return plain_torch.route_backward(scores, ids, grad_scores, grad_weights, grad_logsumexp, p, dtype)
    grad = torch.empty_like(scores, dtype=dtype)
    given = (None if g is None else aligned(g) for g in (grad_scores, grad_weights, grad_logsumexp))
    config = tuning.backward(scores.size(1), ids.size(1), dtype == torch.float32)
    torch.ops.gbmoe_cuda.route_backward(scores, ids, *given, p or 0.0, *config, grad)
    return grad


def _setup_context(ctx, inputs, output):
    logits, _, ctx.p, _ = inputs
    scores, _, ids, _ = output
    ctx.dtype = logits.dtype
    ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores, ids)


def _backward(ctx, grad_scores, grad_weights, _grad_ids, grad_logsumexp):
    if grad_scores is None and grad_weights is None and grad_logsumexp is None:
        return {}
    scores, ids = ctx.saved_tensors
    return {"logits": route_backward(scores, ids, grad_scores, grad_weights, grad_logsumexp, ctx.p, ctx.dtype)}


_route = define(
    "route(Tensor logits, int top_k, float? p, bool wide) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_route_kernel, fake=_route_fake, setup_context=_setup_context, backward=_backward,
)

# The logits' gradient, in the dtype that it is given.
route_backward = define(
    "route_backward(Tensor scores, Tensor ids, Tensor? grad_scores, Tensor? grad_weights, Tensor? grad_logsumexp, float? p,"
    " ScalarType dtype) -> Tensor",
    reference=_route_backward_kernel,
    fake=lambda scores, ids, grad_scores, grad_weights, grad_logsumexp, p, dtype: torch.empty_like(scores, dtype=dtype),
)
