"""What expert_mlp and expert_mlp_low_rank have in common as autograd sees them: what forward saves, and how backward is called.

Both return the sums first, and after them what is kept for backward alone. ctx.options are their arguments that are no tensors, as
backward takes them: the activation, the engine, and others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gbmoe._checks import require
from gbmoe._define_operator import is_unseen, is_watched
from gbmoe.engines.resolved import decides_by_kind
from gbmoe.programs import Programs


def save(ctx, tensors: Sequence[torch.Tensor | None], output: tuple, options: tuple, saves: bool) -> None:
    """Save the tensors among the arguments, and all results but the first, which have no gradients. Raises ValueError unless forward was
    told to save."""
    if not saves:
        require(False, "expert_mlp", "save", "True where a gradient is needed", saves)
    ctx.options = options
    _, *for_backward = output
    ctx.mark_non_differentiable(*for_backward)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *for_backward)


def gradients_by_name(ctx, grad: torch.Tensor | None, leaves: Sequence[str], position_of: dict[str, int], operator: Callable,
                      function: Callable[[list], tuple], programs: Programs | None = None) -> dict[str, torch.Tensor | None]:
    """The gradients of the arguments named in `leaves`, each None where it is not needed.

    Args:
        operator: (grad, *saved, *options, *needed) -> gradients, where something watches this call, or will differentiate it again.
        function: of the list (grad, *saved, *options, needed), which it empties, to the gradients.
        programs: of this function, or None where it is not recorded.
    """
    if grad is None:
        return {}
    needed = tuple([ctx.needs_input_grad[position_of[name]] for name in leaves])
    saved = list(ctx.saved_tensors)
    unseen = grad.is_cuda and is_unseen(grad, *saved)
    if torch.is_grad_enabled() or (not unseen and is_watched(grad, *saved)):
        computed = operator(grad, *saved, *ctx.options, *needed)
    else:
        # Not through the operator, whose caller would hold the pre-activations until it ends. Here autograd drops the saved tensors,
        # unless it was asked to retain the graph.
        ctx.maybe_clear_saved_tensors()
        inputs = [grad, *saved, *ctx.options, needed]
        saved.clear()
        computed = function(inputs) if programs is None or not unseen or not decides_by_kind(ctx.options[1]) else programs(inputs)
    return {name: gradient if need else None for name, gradient, need in zip(leaves, computed, needed)}


def fake_gradients(grad: torch.Tensor, leaves: Sequence[torch.Tensor], needed: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """Results of an operator of backward without their values: like the leaves, and empty where they are not needed."""
    return tuple(like.new_empty(like.shape) if need else grad.new_empty(0) for like, need in zip(leaves, needed))
