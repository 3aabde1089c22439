"""stacked: one tensor of E experts' weights that are parameters of their own, without a copy where they lie at equal distances.

Megatron-Core's grouped linear layers have weight0 [2F,H], weight1, ...; its distributed optimizer keeps parameters, and their main_grads,
one after the other in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gbmoe.separate_weights import SeparateWeights, Stack, are_plain, require_alike


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[E, ...] of E tensors of one shape, dtype and device, differentiable: each gets its part of the gradient, a view of one tensor.

    It is a view, for which nothing is copied or allocated, where the tensors are contiguous, in one storage, in order, and each begins as
    many elements after the one before as the second after the first. Elsewhere it is a copy, as torch.stack makes it, also of subclasses
    of tensors, and inside of torch.compile, whose graphs know no addresses. Autograd does not see that a parameter of which it is a view
    was changed between forward and backward.

    Raises:
        ValueError: for no tensors, and for tensors that differ in shape, dtype or device.

    Example:
        >>> buffer = torch.arange(24.0)
        >>> weights = [buffer[8 * e : 8 * e + 6].view(2, 3) for e in range(3)]
        >>> one = stacked(weights)
        >>> tuple(one.shape), one.stride(), one.data_ptr() == buffer.data_ptr()
        ((3, 2, 3), (8, 3, 1), True)
    """
    require_alike(weights, "stacked", "weights")
    if torch.compiler.is_compiling():
        return torch.stack(tuple(weights))
    return _Stacked.apply(*weights)


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *weights):
        ctx.set_materialize_grads(False)
        ctx.count = len(weights)
        view = _as_view(weights)
        return torch.stack(weights) if view is None else view

    @staticmethod
    def backward(ctx, grad):
        return (None,) * ctx.count if grad is None else grad.unbind(0)


def lie_as_a_stack(weights: Sequence[torch.Tensor]) -> bool:
    """Whether `stacked` makes a view of these tensors, which are alike."""
    return _as_view(weights) is not None


def stack_or_separate(weights: Sequence[torch.Tensor], as_stack: bool = False) -> Stack:
    """What stands for a list of alike matrices in kernels that take SeparateWeights: these; or their stack, differentiable, where they lie
    so, have no table, or with `as_stack`."""
    if not as_stack and not lie_as_a_stack(weights):
        separate = SeparateWeights(weights)
        if separate.numbers:
            return separate
    return stacked(weights)


def _as_view(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if not are_plain(weights):
        return None
    first, storage = weights[0], weights[0].untyped_storage().data_ptr()
    if weights[-1].untyped_storage().data_ptr() != storage:  # most lists: a layer has hundreds of matrices
        return None
    distance = weights[1].storage_offset() - first.storage_offset() if len(weights) > 1 else first.numel()
    if distance < first.numel():
        return None
    begins = [weight.storage_offset() for weight in weights]
    in_one_place = all(
        weight.is_contiguous() and weight.untyped_storage().data_ptr() == storage and begin == begins[0] + e * distance
        for e, (weight, begin) in enumerate(zip(weights, begins)))
    if not in_one_place:
        return None
    # From the storage, because autograd takes a view of one of its inputs for a view of that input alone.
    view = torch.empty(0, dtype=first.dtype, device=first.device)
    return view.set_(first.untyped_storage(), begins[0], (len(weights), *first.shape), (distance, *first.stride()))
