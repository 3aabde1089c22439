"""Matrices of experts that are tensors of their own, anywhere in memory, as Megatron-Core's weight0 [2F,H], weight1, ...

Shape suffixes: E experts, R rows, C columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from gbmoe._checks import PLAIN, require, require_tensor

StackOrList = torch.Tensor | Sequence[torch.Tensor]  # as callers give weights


class SeparateWeights:
    """E tensors [R,C] of one shape, dtype and device that are written to as a stack [E,R,C]: what a gradient sink asks of a tensor.

    No kernel writes to them in place: engines make the stack's gradient, which `add_` adds.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()):
        self._tensors, self._views = tuple(tensors), views
        self._first = self._viewed_of(self._tensors[0])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._tensors), *self._first.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def stride(self, dim: int | None = None):
        strides = (0, *self._first.stride())
        return strides if dim is None else strides[dim]

    def transpose(self, one: int, other: int) -> SeparateWeights:
        assert 0 not in (one, other)
        return SeparateWeights(self._tensors, (*self._views, lambda stack: stack.transpose(one, other)))

    def __getitem__(self, index: tuple[slice, ...]) -> SeparateWeights:
        assert index[0] == slice(None)
        return SeparateWeights(self._tensors, (*self._views, lambda stack: stack[index]))

    def add_(self, stack: torch.Tensor, *, alpha: float = 1) -> SeparateWeights:
        """Add `alpha` times a stack [E,R,C] to the tensors."""
        for tensor, added in zip(self._tensors, stack.unbind(0)):
            self._viewed_of(tensor).add_(added, alpha=alpha)
        return self

    def _viewed_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda one, view: view(one), self._views, tensor.unsqueeze(0)).squeeze(0)


def require_alike(weights: Sequence[torch.Tensor], operator: str, argument: str) -> None:
    """Raise ValueError unless there are tensors, all of one shape, dtype and device."""
    require(len(weights) > 0, operator, argument, "at least one tensor", 0)
    first = weights[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    for e, weight in enumerate(weights):
        if not (weight.shape == shape and weight.dtype == dtype and weight.device == device):
            require(False, operator, f"{argument}[{e}]", lambda: f"{list(shape)} of {dtype} on {device}, as {argument}[0]",
                    f"{list(weight.shape)} of {weight.dtype} on {weight.device}")


def lists_of(operator: str, **weights: StackOrList | None) -> dict[str, tuple[torch.Tensor, ...]]:
    """Those of an operator's arguments that are lists of matrices, by name. Raises TypeError or ValueError, naming which, unless they are
    matrices of one shape, dtype and device."""
    found = {}
    for name, given in weights.items():
        if given is None or isinstance(given, torch.Tensor) or not isinstance(given, (list, tuple, torch.nn.ParameterList)):
            continue
        found[name] = tensors = tuple(given)
        for e, weight in enumerate(tensors):
            if type(weight) not in PLAIN or weight.dim() != 2:
                require_tensor(weight, operator, f"{name}[{e}]", rank=2)
        require_alike(tensors, operator, name)
    return found


def require_apart(tensors: Sequence[torch.Tensor], operator: str, argument: str) -> None:
    """Raise ValueError where two of the tensors, to which all is added, share memory."""
    begins = sorted((tensor.data_ptr(), e) for e, tensor in enumerate(tensors))
    for (begin, e), (following, other) in pairwise(begins):
        last = sum((size - 1) * stride for size, stride in zip(tensors[e].shape, tensors[e].stride()))
        require(following > begin + last * tensors[e].element_size(), operator, f"{argument}[{other}]",
                "memory of its own", f"memory of {argument}[{e}]")
