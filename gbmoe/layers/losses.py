"""The auxiliary losses, that is, the load-balancing loss and the router's z-loss, from what layers keep for them in forward.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import torch

from gbmoe._checks import autocast_enabled, require
from gbmoe.kernels.plain_torch import accumulate_dtype
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.kept import Kept

# ----------------------------------------------------------------------------------------------- the load-balancing loss

_LOAD_BALANCING_LOSS = Kept(  # of (tokens_per_expert [E], scores [T,E])
    "the load-balancing loss since the last clear, with the memory of their scores: call gbmoe.batched_load_balancing_loss(args) and then"
    " gbmoe.clear_load_balancing_loss() once a step, or set moe_loss_weight=0 in the Arguments of the layers")


def save_load_balancing_loss(loss: tuple[torch.Tensor, torch.Tensor], source: object | None = None) -> None:
    """Keep one layer's (tokens_per_expert [E], scores [T,E]) for batched_load_balancing_loss.

    A forward that torch.utils.checkpoint repeats in backward keeps nothing, because it did so when it first ran; nor does one inside
    torch.vmap.

    Args:
        source: any object, the same for each call of a layer, by which forwards of one layer are known. Without it each call counts as a
            layer of its own.
    """
    _LOAD_BALANCING_LOSS.append(loss, source)


def get_load_balancing_loss() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the layers have kept since the last clear, in the order in which they ran, one thread after the other."""
    return _LOAD_BALANCING_LOSS.items()


def clear_load_balancing_loss() -> None:
    """Forget what the layers have kept for the load-balancing loss; call it once a step, after the loss."""
    _LOAD_BALANCING_LOSS.clear()


def batched_load_balancing_loss(args: Arguments) -> torch.Tensor | float:
    """moe_loss_weight / (num_layers * K) * sum over layers of E / T * <tokens_per_expert, mean score>, E and T being each layer's.

    Mirrors megablocks.layers.moe.batched_load_balancing_loss (Switch Transformers, arXiv 2101.03961, summed over layers). The
    dtype is that of the scores, float32 with moe_lbl_in_fp32; in float16, where a count of 65,520 is infinite, it is computed in
    float32 and rounded once.

    The sum is over the layers that ran in training since the last clear, however many of the model's layers these are: the stages of a
    pipeline may differ, and frozen layers may run in evaluation mode, where they keep nothing, or under torch.no_grad, where their terms
    have no gradient. A layer that is called several times in a forward counts as many in num_layers.

    Raises:
        ValueError: where no layer ran; where one ran more than once, and the number of forwards is not that of the layers that this
            pipeline stage has according to `args`, as when clear_load_balancing_loss was not called after the step before; and where
            gradients are enabled now but were not when a layer ran that is to be trained, as under the reentrant torch.utils.checkpoint.
    """
    if args.moe_loss_weight == 0:
        return 0.0
    kept = get_load_balancing_loss()
    _check_number_of_layers(len(kept), args)
    _LOAD_BALANCING_LOSS.require_gradients("batched_load_balancing_loss")
    for count_E, score_TE in kept:
        require(count_E.dim() == 1, "batched_load_balancing_loss", "tokens_per_expert", "shape [E]", list(count_E.shape))
        require(score_TE.dim() == 2 and score_TE.size(1) == count_E.size(0), "batched_load_balancing_loss", "scores",
                lambda: f"shape [T, {count_E.size(0)}]", list(score_TE.shape))  # noqa: B023  (called at once)
    with _without_autocast(kept[0][1].device.type):
        first = kept[0][1]
        alike = all(score_TE.shape == first.shape and score_TE.device == first.device for _, score_TE in kept)
        return (_sum_of_like_layers if alike else _sum_of_layers)(kept, args)


def _check_number_of_layers(forwards: int, args: Arguments) -> None:
    """Raise ValueError unless each layer ran once, or so many layers ran as a stage has.

    What is kept without a source counts as a layer of its own, so that there may be fewer than `args` say, but not more.
    """
    least = args.num_layers // args.pipeline_model_parallel_size
    most = -(-args.num_layers // args.pipeline_model_parallel_size)
    if args.num_layers_per_virtual_pipeline_stage is not None:
        least = most = args.num_layers_per_virtual_pipeline_stage
    if least <= forwards <= most:
        return
    repeated = _LOAD_BALANCING_LOSS.is_any_source_repeated()
    known = forwards < least or not _LOAD_BALANCING_LOSS.is_any_source_unknown()
    number = str(most) if least == most else f"{least} to {most}"
    require(forwards > 0 and known and not repeated, "batched_load_balancing_loss", "layers that ran in training since the last clear",
            f"each layer once, or {number} in all (num_layers {args.num_layers}, pipeline_model_parallel_size"
            f" {args.pipeline_model_parallel_size}, num_layers_per_virtual_pipeline_stage {args.num_layers_per_virtual_pipeline_stage};"
            " call gbmoe.clear_load_balancing_loss() once a step, and run the layers in training mode)",
            f"{forwards}{', some of the same layer' if repeated else ''}")


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    return torch.autocast(device_type, enabled=False) if autocast_enabled(device_type) else contextlib.nullcontext()


def _sum_of_like_layers(kept: list[tuple[torch.Tensor, torch.Tensor]], args: Arguments) -> torch.Tensor:
    counts, each_scores = zip(*kept)
    tokens, experts = each_scores[0].shape
    scores = torch.cat(each_scores, dim=1)
    if args.moe_lbl_in_fp32:
        scores = scores.float()
    dtype, scores = scores.dtype, scores.mean(dim=0) if tokens else scores.sum(dim=0)
    if dtype == torch.float16:
        scores = scores.float()  # counts, and sums of them, may be too large for float16
    scale = experts * args.moe_loss_weight / (args.num_layers * max(tokens, 1) * args.moe_top_k)
    return (scale * torch.dot(torch.cat(counts).to(scores.dtype), scores)).to(dtype)


def _sum_of_layers(kept: list[tuple[torch.Tensor, torch.Tensor]], args: Arguments) -> torch.Tensor:
    """The sum over layers with different numbers of tokens or experts, or on different devices."""
    dtype = functools.reduce(torch.promote_types, (score_TE.dtype for _, score_TE in kept))
    dtype = torch.float32 if args.moe_lbl_in_fp32 else dtype
    wide, device = accumulate_dtype(dtype), kept[0][1].device
    terms = []
    for count_E, score_TE in kept:
        tokens, experts = score_TE.shape
        score_E = score_TE.mean(dim=0, dtype=wide) if tokens else score_TE.sum(dim=0, dtype=wide)
        scale = experts * args.moe_loss_weight / (args.num_layers * max(tokens, 1) * args.moe_top_k)
        terms.append((scale * torch.dot(count_E.to(wide), score_E)).to(device))
    return torch.stack(terms).sum().to(dtype)


# --------------------------------------------------------------------------------------------------- the router's z-loss

_ROUTER_LOGSUMEXP = Kept(  # of logsumexp [T]
    "the router's z-loss since the last clear: call gbmoe.batched_router_zloss(args) and then gbmoe.clear_router_zloss() once a step, or"
    " set moe_zloss_weight=0 in the Arguments of the layers")


def save_router_logsumexp(logsumexp_T: torch.Tensor, source: object | None = None) -> None:
    """Keep one router's logsumexp [T] of its logits for batched_router_zloss, as save_load_balancing_loss does."""
    _ROUTER_LOGSUMEXP.append(logsumexp_T, source)


def clear_router_zloss() -> None:
    """Forget what the routers kept for the z-loss; call it once a step, after the loss."""
    _ROUTER_LOGSUMEXP.clear()


def batched_router_zloss(args: Arguments) -> torch.Tensor | int:
    """moe_zloss_weight * mean over tokens of logsumexp(logits)**2, an entry for each router that ran in training since the last clear.

    Mirrors megablocks.layers.router.batched_router_zloss (ST-MoE, arXiv 2202.08906), except that routers in evaluation keep nothing
    here. The entry of one that ran under torch.no_grad, such as a frozen layer's, has no gradient. Where the weight is 0 it returns 0 with
    a warning. The entry of a router that got no token is 0. The dtype is that of the logits, or float32 with moe_zloss_in_fp32; float16, in
    which the square of 256 is infinite, is computed in float32 and rounded once.

    Raises:
        ValueError: where no router ran, and where gradients are enabled but were not when one ran that is to be trained, as under the
            reentrant torch.utils.checkpoint.
    """
    if args.moe_zloss_weight == 0:
        warnings.warn("batched_router_zloss was called, but moe_zloss_weight is 0", stacklevel=2)
        return 0
    kept = _ROUTER_LOGSUMEXP.items()
    require(len(kept) > 0, "batched_router_zloss", "routers that ran in training since the last clear",
            "at least 1 (run the layers in training mode, with moe_zloss_weight in the Arguments that they are built from)", 0)
    _ROUTER_LOGSUMEXP.require_gradients("batched_router_zloss")
    dtype = torch.float32 if args.moe_zloss_in_fp32 else kept[0].dtype
    if args.moe_zloss_in_fp32 or dtype == torch.float16:
        kept = [logsumexp_T.float() for logsumexp_T in kept]
    with _without_autocast(kept[0].device.type):
        squares = [logsumexp_T.square() for logsumexp_T in kept]
        means = [square_T.mean() if square_T.size(0) else square_T.sum() for square_T in squares]
        return (args.moe_zloss_weight * torch.stack(means)).to(dtype)
