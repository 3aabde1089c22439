"""Programs: what an operator launches for one kind of call, recorded once and run from then on without the Python that chose it.

A layer of few tokens waits for the host, and most of what the host does there decides what is decided in the same way in every step:
engines, tiles, layouts, which of two kernels. A kind of call has all that such decisions depend on: of every tensor the dtype, the device,
the shape, the strides and the alignment, and every other argument. A kind that comes again is recorded: a mode of torch's dispatcher
notes each operator, allocations among them, with the tensors that it takes and returns. From then on the same operators are called one
after the other, on the tensors of the new call. Torch allocates and frees memory where it did before, or frees it earlier.

A function may be recorded if it decides by nothing else. A number of a tensor on a GPU cannot get to the host unseen: calls in which one
does are not recorded. Nor are those that use tensors from elsewhere, as caches do, or get one on the host, next to those of a device.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gbmoe import _torch_names as names

# A kind is recorded when it comes again before so many others have come for the first time. Numbers of rows that change from step to step,
# as where experts are spread over ranks, would otherwise be recorded again and again, which takes longer than it saves. A model with more
# kinds of layers than that has no programs.
_LATELY = 32


def is_on(value: str | None) -> bool:
    """What the environment variable GBMOE_PROGRAMS says, which turns programs off with 0."""
    if value not in (None, "", "0", "1"):
        raise ValueError(f"GBMOE_PROGRAMS: expected 0 or 1, got {value!r}")
    return value != "0"


IS_ON = is_on(os.environ.get("GBMOE_PROGRAMS"))

_thread = threading.local()


def _recordings() -> list[_Recording]:
    """Those that this thread is in, the innermost one last."""
    return _thread.__dict__.setdefault("recordings", [])


def is_seen_by_recordings_alone() -> bool:
    """Whether all modes of torch's dispatcher are recordings. Operators that run inside of one are called as if there were no mode: their
    launches are what is recorded."""
    depth = len(_recordings())
    return depth > 0 and names.len_torch_dispatch_stack() == depth


def refuse(problem: str) -> None:
    """Called by a function that is being recorded: there can be no program of this kind of call. Without effect elsewhere."""
    for recording in _recordings():
        recording.problem = problem


class Programs:
    """The programs of one function, which takes a list of tensors and constants, empties it as it likes, and returns a tensor or a tuple
    of tensors, None and constants.

    Args:
        function: decides by the kind of call alone, and changes no tensor but those that it allocates.
        name: in tracebacks.
        most: kinds of call that are kept; the one that has been there longest makes room.
    """

    def __init__(self, function: Callable[[list], Any], name: str, most: int = 1024):
        self.function, self._name, self._most = function, name, most
        # Programs, or None where there can be none; and kinds that came once. Threads share both: what is put there is complete.
        self._of_kind: dict[tuple, Callable[[list], Any] | None] = {}
        self._lately: dict[tuple, bool] = {}
        self._lock = threading.Lock()
        _all.add(self)

    def __call__(self, inputs: list) -> Any:
        if not IS_ON:
            return self.function(inputs)
        programs = self._of_kind  # as it is now: what is recorded of a function that is then replaced must not get into the next one
        try:
            kind = kind_of(inputs)
            found = programs.get(kind, self)
        except (TypeError, RuntimeError):  # no hash, or a tensor without memory: for the function to refuse
            return self.function(inputs)
        if found is None:
            return self.function(inputs)
        if found is not self:
            return found(inputs)
        if not self._came_lately(kind):
            return self.function(inputs)
        # A compiler that has been loaded may look at each function that runs.
        recorder = torch.compiler.disable(record) if "torch._dynamo" in sys.modules else record
        results, program = recorder(self.function, inputs, self._name)
        with self._lock:
            if len(programs) >= self._most:
                del programs[next(iter(programs))]
            programs[kind] = program
        return results

    def _came_lately(self, kind: tuple) -> bool:
        with self._lock:
            if self._lately.pop(kind, False):
                return True
            self._lately[kind] = True
            if len(self._lately) > _LATELY:
                del self._lately[next(iter(self._lately))]
            return False

    def forget(self) -> None:
        """Drop all programs."""
        self._of_kind, self._lately = {}, {}


_all: weakref.WeakSet[Programs] = weakref.WeakSet()


def forget_all() -> None:
    """Drop all programs of all functions, as after a function that they were recorded of was replaced."""
    for programs in list(_all):
        programs.forget()


# Whether torch's products of two matrices are tuned, for which some are asked for in another way.
_tunes: Callable[[], bool] = torch.cuda.tunable.is_enabled if torch.version.cuda or torch.version.hip else lambda: False


def kind_of(inputs: Sequence[Any]) -> tuple:
    """All that a recorded function may decide by; hashable if the inputs other than tensors are. Of tensors with the same identity, which a
    recording could not tell apart, it is another kind."""
    kind: list[Any] = [_tunes()]
    tensors, add, has_float32 = [], kind.append, False
    for value in inputs:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            add(value.shape)
            add(value.stride())
            add(dtype)
            add((value.data_ptr() & 15, value.get_device()))
            tensors.append(id(value))
            has_float32 = has_float32 or dtype is torch.float32
        else:
            add(value)
    if has_float32:  # asking takes several us
        add(torch.backends.cuda.matmul.fp32_precision)
    if len(set(tensors)) < len(tensors):
        kind.append(tuple(map(tensors.index, tensors)))
    return tuple(kind)


def record(function: Callable[[list], Any], inputs: list, name: str) -> tuple[Any, Callable[[list], Any] | None]:
    """(function(inputs), a program that does the same for other inputs of their kind, or None where there can be none)."""
    recording = _Recording(inputs)
    _recordings().append(recording)
    try:
        with recording:
            results = function(inputs)
    finally:
        _recordings().pop()
    return results, recording.program(results, name)


class _Statement:
    """One call of an operator: `results` = `call`(`arguments`). A launch is one of the extension's operators, which keep no tensor."""

    def __init__(self, call: str, arguments: str, reads: list[str], results: list[str], is_tuple: bool = False, must_run: bool = False,
                 is_launch: bool = False):
        self.call, self.arguments, self.reads, self.results = call, arguments, reads, results
        self.is_tuple, self.must_run, self.is_launch = is_tuple, must_run, is_launch

    @property
    def allocates(self) -> bool:
        """Whether the result is memory that nothing was written to."""
        return self.call == "empty"

    def take_over(self, tensor: str) -> None:
        """Instead of memory of its own, have that of a tensor that nobody reads any more."""
        self.call, self.arguments, self.reads = "", tensor, [tensor]

    def mentioned(self, needed: set[str]) -> list[str]:
        """The tensors that the text names."""
        return list(dict.fromkeys([*self.reads, *(result for result in self.results if result in needed)]))

    def text(self, needed: set[str]) -> str:
        call = f"{self.call}({self.arguments})" if self.call else self.arguments
        if needed.isdisjoint(self.results):
            return call
        targets = [result if result in needed else "_" for result in self.results]
        return f"{', '.join(targets)}{',' if self.is_tuple else ''} = {call}"


def _reuse_memory(statements: list[_Statement], returned: list[str]) -> None:
    """Let an allocation take the memory of a tensor of the same kind that has just been read for the last time. Nothing but allocations may
    lie between, so that as much memory is in use at the next launch as without. What an operator of torch has read may have a view."""
    last = {tensor: number for number, statement in enumerate(statements) for tensor in statement.reads}
    kept = {*returned, *(tensor for statement in statements if not statement.is_launch for tensor in statement.reads)}
    kind_of_memory: dict[str, str] = {}
    free: dict[str, list[str]] = {}
    for number, statement in enumerate(statements):
        if statement.allocates:
            kind = kind_of_memory[statement.results[0]] = statement.arguments
            if free.get(kind):
                statement.take_over(free[kind].pop())
        else:
            free = {}
            for tensor in dict.fromkeys(statement.reads):
                if tensor in kind_of_memory and last[tensor] == number and tensor not in kept:
                    free.setdefault(kind_of_memory[tensor], []).append(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch.empty makes the same of the tensor's shape, dtype and device."""
    return tensor.layout is torch.strided and tensor.stride() == torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()


def _freed(tensors: list[str]) -> list[str]:
    return [f"del {', '.join(tensors)}"] if tensors else []


class _Unknown(Exception):
    """A tensor that is neither of the inputs nor made of them."""


class _Recording(TorchDispatchMode):
    """Notes operators, and holds none of their tensors: memory is freed in a recorded call as in any other."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch, which by default loads its compiler, and with it 800 modules in 2 to 6 s, when a mode sees its first operator."""
        return False

    def __init__(self, inputs: Sequence[Any]):
        super().__init__()
        self._names: dict[int, tuple[weakref.ref, str]] = {}
        self._constants: dict[str, Any] = {"empty": torch.empty, "zeros": torch.zeros}
        self._statements: list[_Statement] = []
        self.problem: str | None = None  # why there can be no program
        self._inputs = [f"t{number}" for number in range(len(inputs))]
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
        if self.problem is not None:
            return operator(*args, **kwargs)
        try:
            reads: list[str] = []
            arguments = [self._text(value, reads) for value in args]
            arguments += [f"{name}={self._text(value, reads)}" for name, value in kwargs.items()]
        except _Unknown:
            self.problem = f"{operator} takes a tensor from elsewhere"
            return operator(*args, **kwargs)
        results = operator(*args, **kwargs)
        self._note(operator, ", ".join(arguments), reads, results)
        return results

    def _note(self, operator, arguments: str, reads: list[str], results: Any) -> None:
        is_tuple = isinstance(results, (tuple, list))
        tensors = list(results) if is_tuple else [] if results is None else [results]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            if reads and operator.namespace != "gbmoe_cuda":  # whose numbers are about the device
                self.problem = f"{operator} reads a number from a tensor"
            return
        if any(tensor.device.type == "cpu" for tensor in tensors) and self._is_of_device:
            self.problem = f"the host may read what {operator} gives it"
            return
        made = [self._new(tensor) for tensor in tensors]
        if not is_tuple and operator in _ALLOCATIONS and _is_plain(tensors[0]):
            (tensor,) = tensors
            arguments = f"{tuple(tensor.shape)}, dtype={self._constant(tensor.dtype)}, device={self._constant(tensor.device)}"
            self._statements.append(_Statement(_ALLOCATIONS[operator], arguments, [], made))
            return
        draws = torch.Tag.nondeterministic_seeded in operator.tags  # the random numbers after it depend on it
        must_run = names.writes_to_arguments(operator) or not tensors or draws
        call = self._constant(names.called_by(operator))
        is_launch = operator.namespace == "gbmoe_cuda"
        self._statements.append(_Statement(call, arguments, reads, made, is_tuple, must_run, is_launch))

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

    def _constant(self, value: Any) -> str:
        for name, known in self._constants.items():
            if known is value or (isinstance(value, torch.device) and known == value):
                return name
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _text(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, torch.Tensor):
            name = self._known(value)
            if name is None:
                raise _Unknown
            reads.append(name)
            return name
        if isinstance(value, (list, tuple)):
            if not any(isinstance(part, torch.Tensor) for part in value):
                return self._constant(tuple(value))
            return f"[{', '.join(self._text(part, reads) for part in value)}]"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        return self._constant(value)

    def program(self, results: Any, name: str) -> Callable[[list], Any] | None:
        """The function that does what was recorded, of which `results` came."""
        if self.problem is not None:
            return None
        returned: list[str] = []
        try:
            returns = self._returned(results, returned)
        except _Unknown:
            self.problem = "a result is a tensor from elsewhere"
            return None
        needed, kept = set(returned), []
        for statement in reversed(self._statements):
            if statement.must_run or not needed.isdisjoint(statement.results):
                kept.append(statement)
                needed.update(statement.reads)
        kept.reverse()
        _reuse_memory(kept, returned)
        lines = [f"{', '.join(self._inputs)}, = inputs", "inputs.clear()"]
        last = {tensor: number for number, statement in enumerate(kept) for tensor in statement.mentioned(needed)}
        lines += _freed([tensor for tensor in self._inputs if tensor not in last and tensor not in returned])
        for number, statement in enumerate(kept):
            lines.append(statement.text(needed))
            lines += _freed([tensor for tensor in statement.mentioned(needed) if last[tensor] == number and tensor not in returned])
        lines.append(f"return {returns}")
        source = "def program(inputs):\n" + "".join(f"    {line}\n" for line in lines)
        namespace = dict(self._constants)
        exec(compile(source, f"<gbmoe: program of {name}>", "exec"), namespace)
        return namespace["program"]

    def _returned(self, results: Any, reads: list[str]) -> str:
        if isinstance(results, (tuple, list)):
            return f"({''.join(self._returned(part, reads) + ', ' for part in results)})"
        return self._text(results, reads)


_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format: "empty", _aten.new_empty.default: "empty", _aten.empty_like.default: "empty",
    _aten.zeros.default: "zeros", _aten.new_zeros.default: "zeros", _aten.zeros_like.default: "zeros",
}
