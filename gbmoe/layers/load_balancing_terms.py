"""The kinds of load-balancing losses, each of what layers kept of their routing; losses.py has what is common to them.

Shape suffixes: T tokens, K slots a token (top-k), E experts, S sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import require
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.routed import Routed, Sequences
from gbmoe.layers.same_layers import require_same_layers
from gbmoe.parallel import failures, groups

# ------------------------------------------------------------------------------------- MegaBlocks', with the bits of MegaBlocks


def of_megablocks(kept: list[tuple[torch.Tensor, torch.Tensor]], args: Arguments) -> torch.Tensor:
    """The loss of layers whose tokens all count: moe_loss_weight / (num_layers * K) * sum of E / T * <tokens_per_expert, mean score>."""
    first = kept[0][1]
    alike = all(score_TE.shape == first.shape and score_TE.device == first.device for _, score_TE in kept)
    return (_sum_of_like_layers if alike else _sum_of_layers)(kept, args)


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


# ----------------------------------------------------------------------------- terms of one layer, without the weight and 1 / K


def of_batch(routed: Routed, dtype: torch.dtype, normalize: bool) -> torch.Tensor:
    """E * <tokens_per_expert / T, mean score>."""
    tokens = routed.number_of_tokens().clamp(min=1).to(dtype)
    score_E = routed.shares(dtype, normalize).sum(0) / tokens
    return score_E.size(0) * torch.dot(routed.counts_E.to(dtype) / tokens, score_E)


def of_sequences(routed: Routed, dtype: torch.dtype, normalize: bool, batch_first: bool) -> torch.Tensor:
    """The mean, over sequences with tokens, of E * <tokens_per_expert / T, mean score>, T, counts and mean being of the sequence."""
    require(routed.experts is not None, "batched_load_balancing_loss", "experts",
            "ids of each token, which layers with moe_router_load_balancing_type 'seq_aux_loss' keep", None)
    experts: torch.Tensor = routed.experts  # type: ignore[assignment]
    number, mask_T = routed.scores_TE.size(1), routed.padding_mask_T
    sequences = Sequences(experts.shape[:-1], batch_first, routed.cu_seqlens, experts.device)
    tokens_S = sequences.tokens(mask_T)
    counts_SE = sequences.counts(experts.reshape(-1, experts.size(-1)), number, mask_T).to(dtype)
    score_SE = sequences.sum(routed.shares(dtype, normalize))
    area_S = tokens_S.clamp(min=1).to(dtype).square()
    return number * ((counts_SE * score_SE).sum(1) / area_S).sum() / (tokens_S > 0).sum().clamp(min=1)


def of_global_batch(kept: Sequence[Routed], dtype: torch.dtype, normalize: bool, group: dist.ProcessGroup | None,
                    so_far: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """E * <tokens_per_expert / T of the global batch, mean score> for each layer; the mean score is this rank's part of the sum over all
    ranks, divided by the mean number of tokens of a rank."""
    sizes, device = [routed.counts_E.size(0) for routed in kept], kept[0].scores_TE.device
    with torch.no_grad():
        tokens = torch.stack([routed.number_of_tokens().to(device) for routed in kept])
        own = torch.cat([*(routed.counts_E.to(device, torch.int64) for routed in kept), tokens])
        world = groups.world_of(group, "batched_load_balancing_loss", "group") if dist.is_available() and dist.is_initialized() else 1
        if world > 1:
            require_same_layers(sizes, device, group)
            failures.guarded(lambda: dist.all_reduce(own, group=group), group, "summing the tokens of experts", "the load-balancing loss")
        total = _added(own, so_far)
        here_L, tokens_L = own[-len(kept):].clamp(min=1), total[-len(kept):].clamp(min=1)
        fractions = [(counts_E / tokens).to(dtype) for counts_E, tokens in zip(total[:-len(kept)].double().split(sizes), tokens_L)]
    terms = []
    for routed, fraction_E, here in zip(kept, fractions, here_L):
        score_E = routed.shares(dtype, normalize).sum(0)
        terms.append(score_E.size(0) * world / here.to(score_E) * torch.dot(fraction_E.to(score_E.device), score_E))
    return terms


def _added(own: torch.Tensor, so_far: list[torch.Tensor] | None) -> torch.Tensor:
    """The sum of this micro-batch and those before, which `so_far` holds from now on."""
    if so_far is None:
        return own
    if so_far:
        before = so_far[0]
        require(before.shape == own.shape, "batched_load_balancing_loss", "so_far",
                lambda: f"a list that is empty, or of a call after the same layers, with a tensor of shape {list(own.shape)}",
                list(before.shape))
        own = own + before
    so_far[:] = [own]
    return own
