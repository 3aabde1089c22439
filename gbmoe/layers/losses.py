"""The auxiliary losses, that is, the load-balancing loss and the router's z-loss, and the tensors that layers keep for them in forward.

Shape suffixes: T tokens, K slots a token (top-k), E experts.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import warnings
from typing import Any

import torch

from gbmoe._checks import autocast_enabled, require
from gbmoe.kernels.plain_torch import accumulate_dtype
from gbmoe.layers.arguments import Arguments


class Source:
    """Stands for the layer that keeps items: layers that are not the same have different ones. It holds nothing, so that no item keeps a
    layer's weights in memory. A copy of a layer gets its own."""


class _Link:
    def __init__(self, older: _Link | None, item: Any = None, source: object | None = None, loses_gradient: bool = False,
                 trace: Any = None):
        self.older, self.item, self.source = older, item, source
        self.loses_gradient, self.trace = loses_gradient, trace


class _Chain:
    """One thread's items, as a linked list that begins with the newest."""

    def __init__(self):
        self.last = _Link(None)


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


def _begins_without_gradients() -> bool:
    """Whether gradients were off when the frame began that torch.compile traces; its graph is guarded by that."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        state: Any = InstructionTranslator.current_tx().output.tracing_context.global_context.global_state
        return not state["grad_enabled"][1]
    except (AttributeError, ImportError, KeyError):  # this torch has other names for it
        return True


def _is_transformed() -> bool:
    """Whether this is inside a transform of torch.func, such as torch.vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# torch.compile calls these functions instead of tracing them. The attribute is what torch.compiler.assume_constant_result sets.
for _function in (_in_a_checkpoint, _begins_without_gradients, _is_transformed):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _current_trace() -> Any:
    """What traces eager calls at this moment: torch.jit's state, or the mode of fake tensors, as under torch.export; None for nothing."""
    if torch._C._is_tracing():
        return torch._C._get_tracing_state()
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch._guards.detect_fake_mode()
    return None


def _loses_gradient() -> bool:
    """Whether this is a function that the reentrant torch.utils.checkpoint, or one like it, runs without gradients and will repeat.

    Unlike torch.no_grad, an autograd.Function's forward has forward-mode derivatives off as well.
    """
    if torch.is_inference_mode_enabled():
        return False
    is_forward_mode_enabled = getattr(torch._C, "_is_fwd_grad_enabled", None)
    return is_forward_mode_enabled is None or not is_forward_mode_enabled()


_PILE = 128  # items of one layer without a clear, which is more than the micro-batches of a step


class Kept:
    """An append-only list that threads append to, and that a compiled graph can append to without depending on its contents.

    torch.compile guards the length of a Python list, so that layers which are compiled one by one would each get a graph of their own,
    until torch refuses more. Of a linked list a graph sees only the type of its newest link. Appending reads and writes that link, in a
    compiled graph without a lock, so every thread has a linked list that no other thread appends to.

    A forward that runs while autograd computes gradients is one that torch.utils.checkpoint repeats. Its items have been kept before,
    so append does nothing then. A compiled graph cannot check this: where an eager checkpoint repeats a compiled graph, its items are
    kept a second time during backward. In that case clear after backward, or compile the checkpoint with its contents.

    Nor does append do anything inside transforms of torch.func, whose tensors mean nothing outside. What is kept while torch.export,
    make_fx or torch.jit.trace traces is seen by the same trace alone.

    Args:
        pile: what to say, once, where eager forwards have left more items of one layer than a step has; None says nothing.
    """

    def __init__(self, pile: str | None = None):
        self._chains = _Chains([])
        self._pile, self._appended, self._look_at = pile, 0, _PILE
        self._warned = pile is None

    def append(self, item: Any, source: object | None = None) -> None:
        """Keep one more item, of the layer that `source` stands for."""
        if torch.compiler.is_dynamo_compiling():
            if _is_transformed():
                return
            loses_gradient = not torch.is_grad_enabled() and _begins_without_gradients()
            if _in_a_checkpoint():
                # A checkpoint's function may have no side effects except those allowed here. The kept item becomes an additional result
                # of the function, and backward repeats its operators alone.
                torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(
                    self._append, item, source, loses_gradient, None)
            else:
                self._append(item, source, loses_gradient, None)
        elif torch._C._current_graph_task_id() == -1 and torch._C._functorch.peek_interpreter_stack() is None:
            self._append(item, source, not torch.is_grad_enabled() and _loses_gradient(), _current_trace())
            self._appended += 1
            if self._appended >= self._look_at:
                self._look_for_a_pile()

    def _append(self, item: Any, source: object | None, loses_gradient: bool, trace: Any) -> None:
        own = self._chains.own
        own.last = _Link(own.last, item, source, loses_gradient, trace)

    def _look_for_a_pile(self) -> None:
        if self._warned:
            return
        # Seldom enough that looking at every link takes nothing from the time of a step.
        links = self._every_link()
        self._look_at = self._appended + max(len(links), _PILE)
        counts = collections.Counter(id(link.source) for link in links if link.source is not None)
        if counts and max(counts.values()) >= _PILE:
            self._warned = True
            warnings.warn(f"{max(counts.values())} forwards of one layer in training have been kept for {self._pile}", stacklevel=2)

    def clear(self) -> None:
        """Forget the items of all threads."""
        if torch.compiler.is_dynamo_compiling():
            for chain in self._chains.every:
                chain.last = _Link(None)
        else:
            self._chains = _Chains([])  # a thread that is appending at this moment appends to the old chains
            self._appended, self._look_at = 0, _PILE

    def items(self) -> list[Any]:
        """The items kept since the last clear, thread by thread; those of a thread in the order in which they were kept."""
        return [link.item for link in self._links()]

    def is_any_source_repeated(self) -> bool:
        """Whether a layer has kept more than one item."""
        seen: list[object] = []
        for link in self._links():
            if link.source is not None:
                if any(link.source is other for other in seen):
                    return True
                seen.append(link.source)
        return False

    def is_any_source_unknown(self) -> bool:
        """Whether it is not known of which layer some item is."""
        return any(link.source is None for link in self._links())

    def require_gradients(self, operator: str) -> None:
        """Raise ValueError if gradients are enabled now, and an item lost its gradient.

        An item that was kept while gradients were off, such as a frozen layer's under torch.no_grad, has none to lose. The reentrant
        torch.utils.checkpoint turns them off too, but its layers are trained. Where a graph of torch.compile begins without gradients
        the two cannot be told apart.
        """
        if torch.is_grad_enabled():
            require(not any(link.loses_gradient for link in self._links()), operator, "what the layers kept in training",
                    "losses with gradients (under torch.utils.checkpoint use use_reentrant=False, because the reentrant one runs its"
                    " function without gradients; for the value alone, compute it under torch.no_grad(); call a compiled layer that is"
                    " frozen in evaluation mode)", "some that were kept while gradients were off")

    def _links(self) -> list[_Link]:
        trace = None if torch.compiler.is_dynamo_compiling() else _current_trace()
        return [link for link in self._every_link() if link.trace is trace]

    def _every_link(self) -> list[_Link]:
        chains, links = self._chains, []
        for chain in (chains.own, *(chain for chain in chains.every if chain is not chains.own)):
            newest_first, link = [], chain.last
            while link.older is not None:
                newest_first.append(link)
                link = link.older
            links += newest_first[::-1]
        return links


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
