"""Programs: what an operator launches for one kind of call, recorded once and run from then on without the Python that chose it.

A layer of few tokens is host-bound, and most of what the host does there decides what is decided in the same way in every step:
engines, tiles, layouts, which of two kernels. A kind of call has all that such decisions depend on: of every tensor the dtype, the device,
the shape, the strides and the alignment, and every other argument. A kind that comes again is recorded: a mode of torch's dispatcher
notes each operator, allocations among them, with the tensors that it takes and returns. From then on the same operators are called one
after the other, on the tensors of the new call: by the extension (encoding.py) or by Python (source.py).
Torch allocates and frees memory where it did before, or frees it earlier.

A function may be recorded if it decides by nothing else. A number of a tensor on a GPU cannot get to the host unseen: calls in which one
does are not recorded. Nor are those that use tensors from elsewhere, as caches do, or get one on the host, next to those of a device.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gbmoe.programs.encoding import Encoded, NotEncodable, kinds_of
from gbmoe.programs.recording import Recorded, is_recording, is_seen_by_recordings_alone, record, refuse
from gbmoe.programs.source import compiled

__all__ = ["Programs", "forget_all", "is_on", "is_seen_by_recordings_alone", "kind_of", "refuse"]

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


class _Table:
    """The programs of the extension that differ in the kinds of tensors alone, by their numbers."""

    def __init__(self, number: int):
        self.number, self.programs = number, dict[int, Encoded]()


_numbers = itertools.count(1)


class Programs:
    """The programs of one function, which takes a list of tensors and constants, empties it as it likes, and returns a tensor or a tuple
    of tensors, None and constants.

    Args:
        function: decides by the kind of call alone. No result is in the memory of an input, and two are in the same memory only where they
            are one tensor. It may write to inputs.
        name: in tracebacks.
        most: kinds of call that are kept; the one that has been there longest makes room.
    """

    def __init__(self, function: Callable[[list], Any], name: str, most: int = 1024):
        self.function, self._name, self._most = function, name, most
        # Programs, or None where there can be none; and kinds that came once. Threads share both: what is put there is complete.
        self._of_kind: dict[tuple, Callable[[list], Any] | None] = {}
        self._lately: dict[tuple, bool] = {}
        self._tables: dict[tuple, _Table] = {}  # by what is no tensor in a call
        self._lock = threading.Lock()
        _all.add(self)

    def __call__(self, inputs: list) -> Any:
        if not IS_ON or is_recording():  # of what calls this, its launches are recorded
            return self.function(inputs)
        if self._tables and (encoded := self._found(inputs)) is not None:
            inputs.clear()
            return encoded.run()
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
        return self._recorded(inputs, kind, programs, self._tables)

    def _found(self, inputs: list) -> Encoded | None:
        """The program of the extension for these inputs, whose tensors it then has."""
        tensors, others = _split(inputs)
        try:
            table = self._tables.get(others)
        except TypeError:
            return None
        if table is None or _extension_differs():
            return None
        number = torch.ops.gbmoe_cuda.find_program(table.number, tensors)
        encoded = table.programs.get(number)
        if encoded is None or (encoded.precision is not None and encoded.precision != _precision()):
            torch.ops.gbmoe_cuda.leave_program(number)
            return None
        return encoded

    def _recorded(self, inputs: list, kind: tuple, programs: dict, tables: dict[tuple, _Table]) -> Any:
        """The function's results, which are recorded on the way."""
        tensors, others = _split(inputs)
        has_float32 = any(tensor.dtype is torch.float32 for tensor in tensors)
        kinds, device = None if _extension_differs() else kinds_of(tensors), tensors[0].device if tensors else torch.device("meta")
        del tensors
        # A compiler that has been loaded may look at each function that runs.
        recorder = torch.compiler.disable(record) if "torch._dynamo" in sys.modules else record
        results, recorded = recorder(self.function, inputs)
        program = None if recorded is None else compiled(recorded, self._name)
        with self._lock:
            if len(programs) >= self._most:
                del programs[next(iter(programs))]
            programs[kind] = program
            if recorded is not None and kinds is not None:
                self._file(recorded, kinds, device, tables, others, _precision() if has_float32 else None)
        return results

    def _file(self, recorded: Recorded, kinds: list[int], device: torch.device, tables: dict[tuple, _Table], others: tuple,
              precision: str | None) -> None:
        """Make it a program of the extension, if it can be one. The lock is held."""
        if tables is not self._tables:  # forgotten meanwhile
            return
        if sum(len(table.programs) for table in tables.values()) >= self._most:
            self._drop_tables()
        table = self._tables.get(others)
        if table is None:
            table = self._tables[others] = _Table(next(_numbers))
        try:
            encoded = Encoded(recorded, table.number, kinds, device, self._name, precision)
        except (NotEncodable, RuntimeError):  # what the extension does not know is an error of its own
            return
        table.programs[encoded.number] = encoded

    def _drop_tables(self) -> None:
        tables, self._tables = self._tables, {}
        for table in tables.values():
            torch.ops.gbmoe_cuda.forget_programs(table.number)

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
        with self._lock:
            self._drop_tables()
            self._of_kind, self._lately = {}, {}


_all: weakref.WeakSet[Programs] = weakref.WeakSet()


def forget_all() -> None:
    """Drop all programs of all functions, as after a function that they were recorded of was replaced."""
    for programs in list(_all):
        programs.forget()


# Whether torch's products of two matrices are tuned, for which some are asked for in another way.
_tunes: Callable[[], bool] = torch.cuda.tunable.is_enabled if torch.version.cuda or torch.version.hip else lambda: False


def _extension_differs() -> bool:
    """Whether torch does something for Python's programs that the extension's do not do: products that are tuned are asked for in another
    way, and new memory is filled where algorithms are to be deterministic."""
    return _tunes() or torch.are_deterministic_algorithms_enabled()


def _precision() -> str:
    """How products of float32 are computed; asking takes several us."""
    return torch.backends.cuda.matmul.fp32_precision


def _split(inputs: list) -> tuple[list[torch.Tensor], tuple]:
    """(the tensors, all else, with the type of tensors in their places)."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    tensor = torch.Tensor
    for value in inputs:
        if value is not None and isinstance(value, tensor):
            tensors.append(value)
            others.append(tensor)
        else:
            others.append(value)
    return tensors, tuple(others)


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
    if has_float32:
        add(_precision())
    if len(set(tensors)) < len(tensors):
        kind.append(tuple(map(tensors.index, tensors)))
    return tuple(kind)
