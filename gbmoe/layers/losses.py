"""The auxiliary losses, that is, the load-balancing loss and the router's z-loss, from what layers keep for them in forward.

Shape suffixes: T tokens, K slots a token (top-k), E experts, S sequences.
"""

from __future__ import annotations

import contextlib
import functools
import warnings

import torch
import torch.distributed as dist

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import autocast_enabled, require
from gbmoe.layers import load_balancing_terms
from gbmoe.layers.arguments import Arguments, require_arguments
from gbmoe.layers.kept import Kept
from gbmoe.layers.routed import Routed

# ----------------------------------------------------------------------------------------------- the load-balancing loss

_LOAD_BALANCING_LOSS = Kept(  # of Routed
    "the load-balancing loss since the last clear, with the memory of their scores: call gbmoe.batched_load_balancing_loss(args) and then"
    " gbmoe.clear_load_balancing_loss() once a step, or set moe_loss_weight=0 in the Arguments of the layers")


def save_load_balancing_loss(loss: tuple[torch.Tensor, torch.Tensor], source: object | None = None, *,
                             experts: torch.Tensor | None = None, padding_mask: torch.Tensor | None = None,
                             cu_seqlens: torch.Tensor | None = None) -> None:
    """Keep one layer's (tokens_per_expert [E], scores [T,E]) for batched_load_balancing_loss.

    A forward that torch.utils.checkpoint repeats in backward keeps nothing, because it did so when it first ran. Nor does one inside
    torch.vmap.

    Args:
        source: any object, the same for each call of a layer, by which forwards of one layer are known. Without it each call counts as a
            layer of its own.
        experts: ids [sl, bs, K], or with other leading dimensions of T tokens together, -1 for none. A "seq_aux_loss" needs them.
        padding_mask: bool [T], or of the ids' leading dimensions: True for tokens that count nowhere.
        cu_seqlens: [S+1], the bounds of packed sequences.
    """
    counts_E, scores_TE = loss
    mask_T = None if padding_mask is None else padding_mask.reshape(-1)
    _LOAD_BALANCING_LOSS.append(Routed(counts_E, scores_TE, experts, mask_T, cu_seqlens), source)


def get_load_balancing_loss() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the layers have kept since the last clear, in the order in which they ran, one thread after the other."""
    return [(routed.counts_E, routed.scores_TE) for routed in _LOAD_BALANCING_LOSS.items()]


def clear_load_balancing_loss() -> None:
    """Forget what the layers have kept for the load-balancing loss; call it once a step, after the loss."""
    _LOAD_BALANCING_LOSS.clear()


def batched_load_balancing_loss(args: Arguments, group: dist.ProcessGroup | None = None, so_far: list[torch.Tensor] | None = None,
                                ) -> torch.Tensor | float:
    """moe_loss_weight / num_layers times the sum over layers of the loss that args.moe_router_load_balancing_type names.

    - "aux_loss": E / (K * T) * <tokens_per_expert, mean score>, with each layer's E and T. Mirrors
      megablocks.layers.moe.batched_load_balancing_loss (Switch Transformers, arXiv 2101.03961, summed over layers).
    - "seq_aux_loss": the same of each sequence by itself, and the mean over those that have tokens (DeepSeek-V3, arXiv 2412.19437,
      equations 17 to 20).
    - "global_aux_loss": tokens_per_expert and T are those of the global batch (Qwen3; arXiv 2501.11873): summed over the ranks of
      `group` and, with `so_far`, over the micro-batches of the step. Gradients flow through this rank's scores. The mean of the ranks'
      losses is that of the global batch, and so is the mean of their gradients, which DistributedDataParallel takes.
    - "none": 0.

    Scores that are not a softmax are divided by their sum over the experts first, as in DeepSeek-V3 and Megatron-Core. Tokens of padding
    do not count, and T does not include them.

    The dtype is that of the scores, or float32 with moe_lbl_in_fp32. In float16, where a count of 65,520 is infinite, the loss is
    computed in float32 and rounded once. So is every loss but MegaBlocks' own without padding.

    The sum is over the layers that ran in training since the last clear, however many of the model's layers these are. So the stages of a
    pipeline may differ. Frozen layers may run in evaluation mode, where they keep nothing, or under torch.no_grad, where their terms have
    no gradient. A layer that is called several times in a forward counts as that many in num_layers.

    Args:
        group: for "global_aux_loss", the data-parallel ranks, expert-parallel ones among them; None for the default group, or this process
            alone where torch.distributed is not initialised. Collective: all of its ranks call it after the same layers.
        so_far: for "global_aux_loss", a list, which is empty at a step's first micro-batch. A call adds what the list holds of the
            micro-batches before, and puts the sum into it for the next call. Call clear_load_balancing_loss between micro-batches.

    Raises:
        ValueError: where no layer ran. Where one ran more than once, and the number of forwards is not that of the layers that this
            pipeline stage has according to `args`, as when clear_load_balancing_loss was not called after the step before. (Where stages
            differ, also where each layer ran equally often and once is enough for a stage; num_layers_per_virtual_pipeline_stage then
            says how many forwards a stage that calls layers repeatedly has.) Where gradients are enabled now but were not when a layer
            ran that is to be trained, as under the reentrant torch.utils.checkpoint. Where `so_far` is of other layers. Where a
            "seq_aux_loss" lacks the layers' ids. On all ranks, where for "global_aux_loss" they ran layers with other numbers of experts,
            or in another order; on a GPU possibly in the next call, as no host waits for it.
        RuntimeError: where the collective fails; it names the ranks that are missing.
        TypeError: for arguments of another library.
    """
    require_arguments(args, "batched_load_balancing_loss")
    kind = args.moe_router_load_balancing_type
    if args.moe_loss_weight == 0 or kind == "none":
        return 0.0
    kept = _LOAD_BALANCING_LOSS.items()
    _check_number_of_layers(len(kept), args)
    _LOAD_BALANCING_LOSS.require_gradients("batched_load_balancing_loss")
    for routed in kept:
        _check_shapes(routed)
    device = kept[0].scores_TE.device
    with _without_autocast(device.type):
        normalize = args.moe_router_score_function != "softmax"
        if kind == "aux_loss" and not normalize and all(routed.padding_mask_T is None for routed in kept):
            return load_balancing_terms.of_megablocks([(routed.counts_E, routed.scores_TE) for routed in kept], args)
        dtype = functools.reduce(torch.promote_types, (routed.scores_TE.dtype for routed in kept))
        dtype = torch.float32 if args.moe_lbl_in_fp32 else dtype
        wide = accumulate_dtype(dtype)
        if kind == "seq_aux_loss":
            terms = [load_balancing_terms.of_sequences(routed, wide, normalize, args.batch_first) for routed in kept]
        elif kind == "global_aux_loss":
            terms = load_balancing_terms.of_global_batch(kept, wide, normalize, group, so_far)
        else:
            terms = [load_balancing_terms.of_batch(routed, wide, normalize) for routed in kept]
        total = torch.stack([term.to(device) for term in terms]).sum()
        return (args.moe_loss_weight / (args.num_layers * args.moe_top_k) * total).to(dtype)


def _check_shapes(routed: Routed) -> None:
    operator, (counts_E, scores_TE, experts, mask_T, cu_seqlens) = "batched_load_balancing_loss", routed
    require(counts_E.dim() == 1, operator, "tokens_per_expert", "shape [E]", list(counts_E.shape))
    require(scores_TE.dim() == 2 and scores_TE.size(1) == counts_E.size(0), operator, "scores",
            lambda: f"shape [T, {counts_E.size(0)}]", list(scores_TE.shape))
    tokens = scores_TE.size(0)
    require(experts is None or experts.numel() == tokens * experts.size(-1), operator, "experts",
            lambda: f"shape [..., K] with {tokens} tokens, as scores have", None if experts is None else list(experts.shape))
    require(mask_T is None or mask_T.size(0) == tokens, operator, "padding_mask", lambda: f"{tokens} entries, as scores have tokens",
            None if mask_T is None else mask_T.size(0))
    require(cu_seqlens is None or (cu_seqlens.dim() == 1 and cu_seqlens.size(0) > 0), operator, "cu_seqlens", "shape [S+1]",
            None if cu_seqlens is None else list(cu_seqlens.shape))


def _check_number_of_layers(forwards: int, args: Arguments) -> None:
    """Raise ValueError unless each layer ran once, or so many layers ran as a stage has.

    What is kept without a source counts as a layer of its own, so that there may be fewer than `args` say, but not more.

    Where stages differ in their numbers of layers, a stage's own number is not known: several rounds of few layers may be as many forwards
    as another stage has layers. Then they are taken for several steps without a clear.
    """
    least = args.num_layers // args.pipeline_model_parallel_size
    most = -(-args.num_layers // args.pipeline_model_parallel_size)
    if args.num_layers_per_virtual_pipeline_stage is not None:
        least = most = args.num_layers_per_virtual_pipeline_stage
    rounds = 1 if least == most else _LOAD_BALANCING_LOSS.rounds()
    if least <= forwards <= most and (rounds == 1 or forwards // rounds < least):
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


# --------------------------------------------------------------------------------------------------- the router's z-loss

_ROUTER_LOGSUMEXP = Kept(  # of (logsumexp [T], padding mask [T] or None)
    "the router's z-loss since the last clear: call gbmoe.batched_router_zloss(args) and then gbmoe.clear_router_zloss() once a step, or"
    " set moe_zloss_weight=0 in the Arguments of the layers")


def save_router_logsumexp(logsumexp_T: torch.Tensor, source: object | None = None, padding_mask_T: torch.Tensor | None = None) -> None:
    """Keep one router's logsumexp [T] of its logits for batched_router_zloss, as save_load_balancing_loss does. It is 0 for padding."""
    _ROUTER_LOGSUMEXP.append((logsumexp_T, padding_mask_T), source)


def clear_router_zloss() -> None:
    """Forget what the routers kept for the z-loss; call it once a step, after the loss."""
    _ROUTER_LOGSUMEXP.clear()


def batched_router_zloss(args: Arguments) -> torch.Tensor | int:
    """moe_zloss_weight times the mean of logsumexp(logits)**2 over all tokens but padding: an entry for each router that ran in training
    since the last clear.

    Mirrors megablocks.layers.router.batched_router_zloss (ST-MoE, arXiv 2202.08906), except that routers in evaluation keep nothing
    here. The entry of one that ran under torch.no_grad, such as a frozen layer's, has no gradient. Where the weight is 0 it returns 0 with
    a warning. The entry of a router that got no token is 0. The dtype is that of the logits, the widest where routers differ, or float32
    with moe_zloss_in_fp32. In float16, where the square of 256 is infinite, the loss is computed in float32 and rounded once.

    Raises:
        ValueError: where no router ran, and where gradients are enabled but were not when one ran that is to be trained, as under the
            reentrant torch.utils.checkpoint.
        TypeError: for arguments of another library.
    """
    require_arguments(args, "batched_router_zloss")
    if args.moe_zloss_weight == 0:
        warnings.warn("batched_router_zloss was called, but moe_zloss_weight is 0", stacklevel=2)
        return 0
    kept = _ROUTER_LOGSUMEXP.items()
    require(len(kept) > 0, "batched_router_zloss", "routers that ran in training since the last clear",
            "at least 1 (run the layers in training mode, with moe_zloss_weight in the Arguments that they are built from)", 0)
    _ROUTER_LOGSUMEXP.require_gradients("batched_router_zloss")
    dtype, device = functools.reduce(torch.promote_types, (logsumexp_T.dtype for logsumexp_T, _ in kept)), kept[0][0].device
    if args.moe_zloss_in_fp32:
        dtype = torch.float32
    # MegaBlocks' numbers, except for float16; dtypes that differ, which it does not take, are widened before the square.
    wide = torch.float32 if dtype == torch.float16 else dtype
    with _without_autocast(device.type):
        means = [_mean_square(logsumexp_T.to(wide), mask_T).to(device) for logsumexp_T, mask_T in kept]
        return (args.moe_zloss_weight * torch.stack(means)).to(dtype)


def _mean_square(logsumexp_T: torch.Tensor, mask_T: torch.Tensor | None) -> torch.Tensor:
    square_T = logsumexp_T.square()
    if mask_T is None:
        return square_T.mean() if square_T.size(0) else square_T.sum()
    # One sum over the tokens, rounded once.
    tokens = (mask_T.numel() - mask_T.sum()).clamp(min=1)
    wide = accumulate_dtype(square_T.dtype)
    return (square_T.sum(dtype=wide) / tokens).to(square_T.dtype)
