"""Records what a function launches: a mode of torch's dispatcher notes each operator, with the names of the tensors that it takes and
returns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gbmoe import _torch_names as names


class _Thread(threading.local):
    """`recordings` are those that this thread is in, the innermost one last."""

    recordings: tuple[Recording, ...] = ()


_thread = _Thread()


def is_seen_by_recordings_alone() -> bool:
    """Whether all modes of torch's dispatcher are recordings. Operators that run inside of one are called as if there were no mode: their
    launches are what is recorded."""
    depth = len(_thread.recordings)
    return depth > 0 and names.len_torch_dispatch_stack() == depth


def is_recording() -> bool:
    """Whether this thread is in a function that is being recorded."""
    return bool(_thread.recordings)


def refuse(problem: str) -> None:
    """Called by a function that is being recorded: there can be no program of this kind of call. Without effect elsewhere."""
    for recording in _thread.recordings:
        recording.problem = problem


class Name(str):
    """The name of a tensor, in the place of the tensor."""


class Memory(NamedTuple):
    """What a tensor is, apart from what is in it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Memory:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass
class Statement:
    """results = operator(*arguments).

    Attributes:
        operator: an overload, torch.empty or torch.zeros of `memory`, or None: then the result is another name for the tensor read.
        arguments: in the place of tensors their names.
        results: names; "_" for a tensor that has one already.
        is_tuple: whether the operator returns a tuple, also of one.
        must_run: also where nobody reads its results.
        memory: of the result of an allocation or a view.
        offset: of a view, in elements after the first one of what it is a view of; None if it is no view.
    """

    operator: Any
    arguments: tuple = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    is_tuple: bool = False
    must_run: bool = False
    memory: Memory | None = None
    offset: int | None = None

    @property
    def reads(self) -> list[Name]:
        """The tensors that it takes, each once."""
        return list(dict.fromkeys(_names_in((self.arguments, tuple(self.keywords.values())))))

    @property
    def allocates(self) -> bool:
        """Whether the result is memory that nothing was written to."""
        return self.operator is torch.empty

    @property
    def is_launch(self) -> bool:
        """Whether it is one of the extension's operators, which keep no tensor."""
        return getattr(self.operator, "namespace", None) == "gbmoe_cuda"

    def take_over(self, tensor: str) -> None:
        """Instead of memory of its own, have that of a tensor that nobody reads any more."""
        self.operator, self.arguments = None, (Name(tensor),)

    def perform(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """The results, with the tensors of `reads` by their names."""
        if self.operator in ALLOCATIONS:
            assert self.memory is not None
            return [self.operator(self.memory.shape, dtype=self.memory.dtype, device=self.memory.device)]
        arguments = _with_tensors(self.arguments, tensors)
        results = arguments[0] if self.operator is None else self.operator(*arguments, **{
            name: _with_tensors(value, tensors) for name, value in self.keywords.items()})
        return list(results) if self.is_tuple else [] if results is None else [results]


ALLOCATIONS = (torch.empty, torch.zeros)


def _names_in(value: Any) -> Iterator[Name]:
    if isinstance(value, Name):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _names_in(part)


def _with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, Name):
        return tensors[value]
    return type(value)(_with_tensors(part, tensors) for part in value) if isinstance(value, (tuple, list)) else value


@dataclass
class Recorded:
    """What a function did for one kind of call.

    Attributes:
        inputs: a name for each, and whether it is a tensor.
        results: tensors' names, None and constants, in tuples as the function returned them.
        freed_first: inputs that nothing reads.
        freed: for each statement the tensors that nothing reads after it.
    """

    inputs: dict[str, bool]
    statements: list[Statement]
    results: Any
    freed_first: list[str] = field(default_factory=list)
    freed: list[list[str]] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        returned = self.returned
        self.needed, kept = set(returned), []
        for statement in reversed(self.statements):
            if statement.must_run or not self.needed.isdisjoint(statement.results):
                kept.append(statement)
                self.needed.update(statement.reads)
        self.statements = kept[::-1]
        _reuse_memory(self.statements, returned)
        mentioned = [[*statement.reads, *(name for name in statement.results if name in self.needed)] for statement in self.statements]
        last = {tensor: number for number, tensors in enumerate(mentioned) for tensor in tensors}
        self.freed_first = [name for name in self.inputs if name not in last and name not in returned]
        self.freed = [[name for name in dict.fromkeys(tensors) if last[name] == number and name not in returned]
                      for number, tensors in enumerate(mentioned)]

    @property
    def returned(self) -> list[str]:
        """The names of the tensors among the results, each once."""
        return list(dict.fromkeys(_names_in(self.results)))


def _reuse_memory(statements: list[Statement], returned: Sequence[str]) -> None:
    """Let an allocation take the memory of a tensor of the same kind that has just been read for the last time. Nothing but allocations may
    lie between, so that as much memory is in use at the next launch as without. What an operator of torch has read may have a view."""
    last = {tensor: number for number, statement in enumerate(statements) for tensor in statement.reads}
    kept = {*returned, *(tensor for statement in statements if not statement.is_launch for tensor in statement.reads)}
    memory_of: dict[str, Any] = {}
    free: dict[Any, list[str]] = {}
    for number, statement in enumerate(statements):
        if statement.allocates:
            memory = memory_of[statement.results[0]] = statement.memory
            if free.get(memory):
                statement.take_over(free[memory].pop())
        else:
            free = {}
            for tensor in statement.reads:
                if tensor in memory_of and last[tensor] == number and tensor not in kept:
                    free.setdefault(memory_of[tensor], []).append(tensor)


def record(function: Callable[[list], Any], inputs: list) -> tuple[Any, Recorded | None]:
    """(function(inputs), what it did for inputs of their kind, or None where that cannot be said)."""
    recording = Recording(inputs)
    outer, _thread.recordings = _thread.recordings, (*_thread.recordings, recording)
    try:
        with recording:
            results = function(inputs)
    finally:
        _thread.recordings = outer
    return results, recording.recorded(results)


class _Unknown(Exception):
    """A tensor that is neither of the inputs nor made of them."""


class Recording(TorchDispatchMode):
    """Notes operators, and holds none of their tensors: memory is freed in a recorded call as in any other.

    `problem` is why there can be no program, or None.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch, which by default loads its compiler, and with it 800 modules in 2 to 6 s, when a mode sees its first operator."""
        return False

    def __init__(self, inputs: Sequence[Any]):
        super().__init__()
        self._names: dict[int, tuple[weakref.ref, str]] = {}
        self._statements: list[Statement] = []
        self.problem: str | None = None
        self._inputs = {f"t{number}": isinstance(value, torch.Tensor) for number, value in enumerate(inputs)}
        self._made = 0
        self._is_of_device = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs)
        for name, value in zip(self._inputs, inputs):
            if isinstance(value, torch.Tensor):
                if self._known(value) is not None:
                    self.problem = "two arguments are one tensor"
                if self._is_of_device and value.device.type == "cpu" and value.numel():
                    self.problem = "the host may read an argument"
                self._names[id(value)] = weakref.ref(value), name

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if names.is_composed_of_others(operator):  # as in inference mode, where it has not been taken apart before
            with self:
                return operator.decompose(*args, **kwargs)
        if self.problem is not None:
            return operator(*args, **kwargs)
        try:
            statement = Statement(operator, self._named(tuple(args)), {name: self._named(value) for name, value in kwargs.items()})
        except _Unknown:
            self.problem = f"{operator} takes a tensor from elsewhere"
            return operator(*args, **kwargs)
        results = operator(*args, **kwargs)
        self._note(statement, args, results)
        return results

    def _note(self, statement: Statement, args: tuple, results: Any) -> None:
        operator = statement.operator
        statement.is_tuple = isinstance(results, (tuple, list))
        tensors = list(results) if statement.is_tuple else [] if results is None else [results]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            if statement.reads and operator.namespace != "gbmoe_cuda":  # whose numbers are about the device
                self.problem = f"{operator} reads a number from a tensor"
            return
        if any(tensor.device.type == "cpu" for tensor in tensors) and self._is_of_device:
            self.problem = f"the host may read what {operator} gives it"
            return
        statement.results = [self._new(tensor) for tensor in tensors]
        if operator in _ALLOCATED_BY and _is_plain(tensors[0]):
            statement.operator, statement.arguments, statement.keywords = _ALLOCATED_BY[operator], (), {}
            statement.memory = Memory.of(tensors[0])
        elif len(tensors) == 1 and names.is_view(operator) and names.share_memory(tensors[0], args[0]):
            statement.memory, statement.offset = Memory.of(tensors[0]), tensors[0].storage_offset() - args[0].storage_offset()
        else:
            draws = torch.Tag.nondeterministic_seeded in operator.tags  # the random numbers after it depend on it
            statement.must_run = names.writes_to_arguments(operator) or not tensors or draws
        self._statements.append(statement)

    def _known(self, tensor: torch.Tensor) -> str | None:
        reference, name = self._names.get(id(tensor), (None, None))
        return name if reference is not None and reference() is tensor else None

    def _new(self, tensor: torch.Tensor) -> str:
        """A name for an operator's result; "_" for one that has a name, as what an operator has written to."""
        if self._known(tensor) is not None:
            return "_"
        self._made += 1
        name = f"v{self._made}"
        self._names[id(tensor)] = weakref.ref(tensor), name
        return name

    def _named(self, value: Any) -> Any:
        """The value, in which names take the place of tensors."""
        if isinstance(value, torch.Tensor):
            name = self._known(value)
            if name is None:
                raise _Unknown
            return Name(name)
        return tuple(self._named(part) for part in value) if isinstance(value, (tuple, list)) else value

    def recorded(self, results: Any) -> Recorded | None:
        """What was noted, of which `results` came."""
        if self.problem is not None:
            return None
        try:
            return Recorded(self._inputs, self._statements, self._named(results))
        except _Unknown:
            self.problem = "a result is a tensor from elsewhere"
            return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch.empty makes the same of the tensor's shape, dtype and device."""
    return tensor.layout is torch.strided and tensor.stride() == torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()


_aten = torch.ops.aten
_ALLOCATED_BY = {
    _aten.empty.memory_format: torch.empty, _aten.new_empty.default: torch.empty, _aten.empty_like.default: torch.empty,
    _aten.zeros.default: torch.zeros, _aten.new_zeros.default: torch.zeros, _aten.zeros_like.default: torch.zeros,
}
