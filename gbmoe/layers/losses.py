"""The auxiliary losses, that is, the load-balancing loss and the router's z-loss, and the tensors that layers keep for them in forward.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from gbmoe._checks import require
from gbmoe.layers.arguments import Arguments


class _Link:
    def __init__(self, older: _Link | None, item: Any, with_grad: bool):
        self.older, self.item, self.with_grad = older, item, with_grad


class _Chain:
    """One thread's items, as a linked list that begins with the newest."""

    def __init__(self):
        self.last = _Link(None, None, True)


class _Chains(threading.local):
    """`own` is a chain for each thread; `every` is the list of all chains, which the threads share."""

    def __init__(self, every: list[_Chain]):
        # threading.local calls this in every thread that accesses the object, with the same list.
        self.own, self.every = _Chain(), every
        every.append(self.own)


def _in_a_checkpoint() -> bool:
    """Whether torch.compile, while it traces, is inside the function of exactly one torch.utils.checkpoint.

    Items kept inside nested checkpoints, or inside torch's other higher-order operators, cannot leave them.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        return tracer.description == "torch.utils.checkpoint.checkpoint" and tracer.parent.parent is None
    except (AttributeError, ImportError):  # this torch has other names for them: the graph breaks here, as at any side effect
        return False


# torch.compile calls this function instead of tracing it. The attribute is what torch.compiler.assume_constant_result sets.
_in_a_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Kept:
    """An append-only list that threads append to, and that a compiled graph can append to without depending on its contents.

    torch.compile guards the length of a Python list, so that layers which are compiled one by one would each get a graph of their own,
    until torch refuses more. Of a linked list a graph sees only the type of its newest link. Appending reads and writes that link, in a
    compiled graph without a lock, so every thread has a linked list that no other thread appends to.

    A forward that runs while autograd computes gradients is one that torch.utils.checkpoint repeats. Its items have been kept before,
    so append does nothing then. A compiled graph cannot check this: where an eager checkpoint repeats a compiled graph, its items are
    kept a second time during backward. In that case clear after backward, or compile the checkpoint with its contents.
    """

    def __init__(self):
        self._chains = _Chains([])

    def append(self, item: Any) -> None:
        """Keep one more item."""
        if not torch.compiler.is_dynamo_compiling():
            if torch._C._current_graph_task_id() == -1:
                self._append(item)
        elif _in_a_checkpoint():
            # A checkpoint's function may have no side effects except those allowed here. The kept item becomes an additional result of
            # the function, and backward repeats its operators alone.
            torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(self._append, item)
        else:
            self._append(item)

    def _append(self, item: Any) -> None:
        own = self._chains.own
        own.last = _Link(own.last, item, torch.is_grad_enabled())

    def clear(self) -> None:
        """Forget the items of all threads."""
        if torch.compiler.is_dynamo_compiling():
            for chain in self._chains.every:
                chain.last = _Link(None, None, True)
        else:
            self._chains = _Chains([])  # a thread that is appending at this moment appends to the old chains

    def items(self) -> list[Any]:
        """The items kept since the last clear, thread by thread; those of a thread in the order in which they were kept."""
        return [link.item for link in self._links()]

    def require_gradients(self, operator: str) -> None:
        """Raise ValueError if gradients are enabled now but were not when an item was kept."""
        if torch.is_grad_enabled():
            require(all(link.with_grad for link in self._links()), operator, "what the layers kept in training",
                    "losses with gradients (under torch.utils.checkpoint use use_reentrant=False, because the reentrant one runs its"
                    " function without gradients; for the value alone, compute it under torch.no_grad())",
                    "some that were kept while gradients were off")

    def _links(self) -> list[_Link]:
        chains, links = self._chains, []
        for chain in (chains.own, *(chain for chain in chains.every if chain is not chains.own)):
            newest_first, link = [], chain.last
            while link.older is not None:
                newest_first.append(link)
                link = link.older
            links += newest_first[::-1]
        return links


# ----------------------------------------------------------------------------------------------- the load-balancing loss

_LOAD_BALANCING_LOSS = Kept()  # of (tokens_per_expert [E], scores [T,E])


def save_load_balancing_loss(loss: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep one layer's (tokens_per_expert [E], scores [T,E]) for batched_load_balancing_loss.

    A forward that torch.utils.checkpoint repeats in backward keeps nothing, because it did so when it first ran.
    """
    _LOAD_BALANCING_LOSS.append(loss)


def get_load_balancing_loss() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the layers have kept since the last clear, in the order in which they ran, one thread after the other."""
    return _LOAD_BALANCING_LOSS.items()


def clear_load_balancing_loss() -> None:
    """Forget what the layers have kept for the load-balancing loss; call it once a step, after the loss."""
    _LOAD_BALANCING_LOSS.clear()


def batched_load_balancing_loss(args: Arguments) -> torch.Tensor | float:
    """moe_loss_weight * E / (layers * T * K) * sum over layers of <tokens_per_expert, mean score>.

    Mirrors megablocks.layers.moe.batched_load_balancing_loss (Switch Transformers, arXiv 2101.03961, summed over layers). The
    dtype is that of the scores, float32 with moe_lbl_in_fp32; in float16, where a count of 65,520 is infinite, it is computed in
    float32 and rounded once.

    Raises:
        ValueError: where the number of layers that ran is not the number that this pipeline stage has according to `args`, and where
            gradients are enabled but were not when a layer ran, as under the reentrant torch.utils.checkpoint.
    """
    if args.moe_loss_weight == 0:
        return 0.0
    layers = args.num_layers // args.pipeline_model_parallel_size
    if args.num_layers_per_virtual_pipeline_stage is not None:
        layers = args.num_layers_per_virtual_pipeline_stage
    kept = get_load_balancing_loss()
    require(len(kept) == layers, "batched_load_balancing_loss", "layers that ran in training since the last clear",
            f"{layers} (num_layers {args.num_layers}, pipeline_model_parallel_size {args.pipeline_model_parallel_size},"
            f" num_layers_per_virtual_pipeline_stage {args.num_layers_per_virtual_pipeline_stage};"
            " call gbmoe.clear_load_balancing_loss() once a step, and run the layers in training mode)", len(kept))
    _LOAD_BALANCING_LOSS.require_gradients("batched_load_balancing_loss")
    counts, each_scores = zip(*kept)
    tokens = each_scores[0].size(0)
    for count_E, score_TE in kept:
        require(list(count_E.shape) == [args.moe_num_experts], "batched_load_balancing_loss", "tokens_per_expert",
                lambda: f"shape [{args.moe_num_experts}]", list(count_E.shape))
        require(list(score_TE.shape) == [tokens, args.moe_num_experts], "batched_load_balancing_loss", "scores",
                lambda: f"shape [{tokens}, {args.moe_num_experts}]", list(score_TE.shape))
    scores = torch.cat(each_scores, dim=1)
    if args.moe_lbl_in_fp32:
        scores = scores.float()
    dtype, scores = scores.dtype, scores.mean(dim=0) if tokens else scores.sum(dim=0)
    if dtype == torch.float16:
        scores = scores.float()  # counts, and sums of them, may be too large for float16
    scale = args.moe_num_experts * args.moe_loss_weight / (args.num_layers * max(tokens, 1) * args.moe_top_k)
    return (scale * torch.dot(torch.cat(counts).to(scores.dtype), scores)).to(dtype)


# --------------------------------------------------------------------------------------------------- the router's z-loss

_ROUTER_LOGSUMEXP = Kept()  # of logsumexp [T]


def save_router_logsumexp(logsumexp_T: torch.Tensor) -> None:
    """Keep one router's logsumexp [T] of its logits for batched_router_zloss, as save_load_balancing_loss does."""
    _ROUTER_LOGSUMEXP.append(logsumexp_T)


def clear_router_zloss() -> None:
    """Forget what the routers kept for the z-loss; call it once a step, after the loss."""
    _ROUTER_LOGSUMEXP.clear()


def batched_router_zloss(args: Arguments) -> torch.Tensor | int:
    """moe_zloss_weight * mean over tokens of logsumexp(logits)**2, an entry for each router that ran in training since the last clear.

    Mirrors megablocks.layers.router.batched_router_zloss (ST-MoE, arXiv 2202.08906), except that routers in evaluation keep nothing
    here. Where the weight is 0 it returns 0 with a warning. The entry of a router that got no token is 0. The dtype is that of
    the logits, or float32 with moe_zloss_in_fp32; float16, in which the square of 256 is infinite, is computed in float32 and
    rounded once.

    Raises:
        ValueError: where no router ran, and where gradients are enabled but were not when one ran, as under the reentrant
            torch.utils.checkpoint.
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
    squares = [logsumexp_T.square() for logsumexp_T in kept]
    means = [square_T.mean() if square_T.size(0) else square_T.sum() for square_T in squares]
    return (args.moe_zloss_weight * torch.stack(means)).to(dtype)
