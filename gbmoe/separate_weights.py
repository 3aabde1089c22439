"""SeparateWeights: the weights of E experts that are tensors of their own, anywhere in memory, as one operand of kernels that read them
where they lie.

Megatron-Core's grouped linear layers have weight0 [2F,H], weight1, ... A kernel finds the matrix of expert e at the lowest address of all
plus number[e] times a distance (csrc/places.cuh), so that one tensor map, or one pointer, serves all of them.

Shape suffixes: E experts, R rows, C columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch

from gbmoe._checks import PLAIN, require, require_tensor

_MOST_PLACES = 256  # as csrc/places.cuh has it
_MOST_DISTANCE = 2**20  # bytes: the distance is a power of two from 16 bytes to this
_MOST_NUMBER = 2**31 - 2  # coordinates of tensor maps are int32
_VECTOR = 16  # bytes, at a multiple of which each matrix begins


class SeparateWeights:
    """E tensors [R,C] of one shape, dtype, device and strides as a stack [E,R,C], with what engines ask of a stack. None is copied.

    Attributes:
        lowest: the tensor with the lowest address as [1,R,C], whose first stride is the distance, in elements; without a table the first.
        numbers: how many distances after it each of the tensors begins; empty where no kernel can read them by a table, because they are
            too many, too far apart, do not begin at multiples of 16 bytes, or have other strides than each other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors: tuple[torch.Tensor, ...] | None = tuple(tensors)
        self._of: tuple[torch.Tensor, ...] = ()  # the stacks that the tensors are parts of, where that is known
        first = self.tensors[0]
        addresses = None
        if len(set(map(torch.Tensor.stride, self.tensors))) == 1:
            addresses = tuple(map(torch.Tensor.data_ptr, self.tensors))
        self._find(first, len(self.tensors), addresses)

    @classmethod
    def of_stacks(cls, *stacks: torch.Tensor) -> SeparateWeights:
        """The matrices of stacks [E,R,C] of one dtype and like strides, one stack's after the other's, in less time than of their parts.
        The first has at least one matrix."""
        made = object.__new__(cls)
        made._tensors, made._of = None, stacks
        first, addresses = stacks[0][0], None
        if len({stack.stride()[1:] for stack in stacks}) == 1:
            addresses = tuple(chain.from_iterable(map(_addresses, stacks)))
        made._find(first, sum(stack.size(0) for stack in stacks), addresses)
        return made

    def _find(self, first: torch.Tensor, number: int, addresses: tuple[int, ...] | None) -> None:
        """Make a table of the addresses, if the matrices have like strides."""
        self._number = number
        self._views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
        self.numbers: tuple[int, ...] = ()
        found = None if addresses is None else _table(addresses, first.element_size())
        if found is None:
            self.lowest = first.detach().unsqueeze(0)
            return
        which, distance, self.numbers = found
        lowest = self._tensors[which] if self._tensors is not None else self._part(which)
        self.lowest = torch.as_strided(lowest.detach(), (1, *first.shape), (distance, *first.stride()))

    def _part(self, which: int) -> torch.Tensor:
        for stack in self._of:
            if which < stack.size(0):
                return stack[which]
            which -= stack.size(0)
        raise IndexError(which)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The E tensors, of which this may be views."""
        if self._tensors is None:
            self._tensors = tuple(matrix for stack in self._of for matrix in stack.unbind(0))
        return self._tensors

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._number, *self.lowest.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.lowest.dtype

    @property
    def device(self) -> torch.device:
        return self.lowest.device

    @property
    def requires_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def dim(self) -> int:
        return 3

    def stride(self, dim: int | None = None):
        return self.lowest.stride() if dim is None else self.lowest.stride(dim)

    def element_size(self) -> int:
        return self.lowest.element_size()

    def data_ptr(self) -> int:
        """The lowest address."""
        return self.lowest.data_ptr()

    def is_contiguous(self) -> bool:
        return False

    def contiguous(self) -> torch.Tensor:
        """A stack [E,R,C], which is a copy."""
        return torch.stack(self.matrices())

    def matrices(self) -> list[torch.Tensor]:
        """The tensors [R,C], as views of what this was made of."""
        return [functools.reduce(lambda one, view: view(one), self._views, tensor.unsqueeze(0)).squeeze(0) for tensor in self.tensors]

    def transpose(self, one: int, other: int) -> SeparateWeights:
        assert 0 not in (one, other)
        return self._viewed(lambda stack: stack.transpose(one, other))

    def __getitem__(self, index: tuple[slice, ...]) -> SeparateWeights:
        assert index[0] == slice(None)
        return self._viewed(lambda stack: stack[index])

    def add_(self, stack: torch.Tensor, *, alpha: float = 1) -> SeparateWeights:
        """Add `alpha` times a stack [E,R,C] to the tensors."""
        for matrix, added in zip(self.matrices(), stack.unbind(0)):
            matrix.add_(added, alpha=alpha)
        return self

    def again(self) -> SeparateWeights:
        """The same of where the tensors are now."""
        return functools.reduce(SeparateWeights._viewed, self._views, SeparateWeights(self.tensors))

    def _viewed(self, view: Callable[[torch.Tensor], torch.Tensor]) -> SeparateWeights:
        return self._like(view(self.lowest), self.numbers, (*self._views, view))

    def _like(self, lowest: torch.Tensor, numbers: tuple[int, ...], views: tuple) -> SeparateWeights:
        made = object.__new__(SeparateWeights)
        made._tensors, made._of, made._number = self._tensors, self._of, self._number
        made._views, made.lowest, made.numbers = views, lowest, numbers
        return made

    def at_distance(self, distance: int) -> SeparateWeights:
        """The same with numbers of a distance of which this one's is a multiple, in elements."""
        lowest, times = self.lowest, self.lowest.stride(0) // distance
        nearer = torch.as_strided(lowest, lowest.shape, (distance, *lowest.stride()[1:]))
        return self._like(nearer, tuple(number * times for number in self.numbers), self._views)


def _addresses(stack: torch.Tensor) -> list[int]:
    """Of its matrices."""
    begin, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
    return [begin + e * step for e in range(stack.size(0))]


@functools.lru_cache(maxsize=1024)
def _table(addresses: tuple[int, ...], element: int) -> tuple[int, int, tuple[int, ...]] | None:
    """(which is the lowest, the distance in elements, the numbers), or None where there is no table. It depends on its arguments alone, so
    that what is kept is right wherever an optimizer or FSDP has put the tensors."""
    if len(addresses) > _MOST_PLACES or any(address % _VECTOR for address in addresses):
        return None
    lowest = min(addresses)
    distance = math.gcd(_MOST_DISTANCE, *(address - lowest for address in addresses))
    numbers = tuple((address - lowest) // distance for address in addresses)
    return (addresses.index(lowest), distance // element, numbers) if max(numbers) <= _MOST_NUMBER else None


Stack = torch.Tensor | SeparateWeights
StackOrList = torch.Tensor | Sequence[torch.Tensor]  # as callers give weights
Lists = dict[str, tuple[torch.Tensor, ...]]  # by the name of the argument


def with_one_table(one: Stack, two: Stack) -> tuple[Stack, Stack] | None:
    """Both, as a launch takes them, whose kernel has one distance for all matrices and one table, of the first's numbers and perhaps the
    second's; None where that is not possible: strides differ, there are too many or too far apart, or one is a stack."""
    if not isinstance(one, SeparateWeights) or not isinstance(two, SeparateWeights):
        both = not isinstance(one, SeparateWeights) and not isinstance(two, SeparateWeights)
        return (one, two) if both and one.stride() == two.stride() else None
    if one.stride()[1:] != two.stride()[1:]:
        return None
    if one.stride(0) == two.stride(0) and one.numbers == two.numbers:
        return one, two
    distance = math.gcd(one.stride(0), two.stride(0))
    one, two = one.at_distance(distance), two.at_distance(distance)
    fits = len(one.numbers) + len(two.numbers) <= _MOST_PLACES and max(*one.numbers, *two.numbers) <= _MOST_NUMBER
    return (one, two) if fits else None


def in_memory(one: Stack, two: Stack | None = None) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """(tensor, second tensor, places) as operators of csrc/ take them: of one stack, of two that `with_one_table` has made, or of one and
    the stack of a second pair of operands, which is no part of the table."""
    if not isinstance(one, SeparateWeights):
        assert not isinstance(two, SeparateWeights)
        return one, two, ()
    if not isinstance(two, SeparateWeights):
        return one.lowest, two, one.numbers
    return one.lowest, two.lowest, one.numbers if one.numbers == two.numbers else one.numbers + two.numbers


_PLAIN, _KIND = frozenset(PLAIN), attrgetter("shape", "dtype", "device")


def are_plain(weights: Sequence) -> bool:
    """Whether all are tensors or parameters, and none of a subclass."""
    return _PLAIN.issuperset(map(type, weights))


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
        # In one pass, without Python's own steps, where all is well: a layer has hundreds of matrices. Dynamo cannot trace an attrgetter.
        if not torch.compiler.is_compiling() and are_plain(tensors) and len(set(map(_KIND, tensors))) == 1 and tensors[0].dim() == 2:
            continue
        for e, weight in enumerate(tensors):
            require_tensor(weight, operator, f"{name}[{e}]", rank=2)
        require_alike(tensors, operator, name)
    return found


def why_stacked(engine: Any, dtype: torch.dtype, apart: Lists) -> str | None:
    """None if the engine (an Engine, or None) takes lists of these matrices as they are where it computes in `dtype`; otherwise why not."""
    if engine is None or not engine.reads_separate_weights:
        return "the engine reads no lists"
    for name, tensors in apart.items():
        if len(tensors) == 1:
            return f"{name} is a list of one matrix"
        if tensors[0].dtype != dtype:
            return f"autocast casts {name}"
        if not are_plain(tensors) or any(map(torch.Tensor.is_neg, tensors)):
            return f"{name} has subclasses of tensors, or negated ones"
    return None


def like_a_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor [E,R,C] with the dtype and device of the matrices, which needs a gradient if one of them does; not with their elements."""
    return next((tensor for tensor in tensors if tensor.requires_grad), tensors[0]).expand(len(tensors), -1, -1)


def require_apart(tensors: Sequence[torch.Tensor], operator: str, argument: str) -> None:
    """Raise ValueError where two of the tensors, to which all is added, share memory."""
    if not all(tensor.data_ptr() for tensor in tensors):  # without memory, as on the meta device, or without elements
        return
    begins = sorted((tensor.data_ptr(), e) for e, tensor in enumerate(tensors))
    for (begin, e), (following, other) in pairwise(begins):
        last = sum((size - 1) * stride for size, stride in zip(tensors[e].shape, tensors[e].stride()))
        require(following > begin + last * tensors[e].element_size(), operator, f"{argument}[{other}]",
                "memory of its own", f"memory of {argument}[{e}]")
