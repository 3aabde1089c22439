"""A recorded call as integers, for csrc/program.cpp, which runs it without Python between its statements.

What the stable ABI of torch has no way to pass, such as a Scalar, cannot be written down.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from gbmoe import extension
from gbmoe.programs.recording import Memory, Name, Recorded, Statement
from gbmoe.programs.source import results_of

# As csrc/program.cpp numbers them.
_EMPTY, _ZEROS, _VIEW, _RENAME, _CALL = range(5)
_NONE, _TENSOR, _INTEGER, _BOOL, _REAL, _DTYPE, _MEMORY_FORMAT, _INTEGERS, _REALS = range(9)
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format)
_MOST_ARGUMENTS = 40
_TYPES = {"Tensor": _TENSOR, "int": _INTEGER, "SymInt": _INTEGER, "bool": _BOOL, "float": _REAL, "ScalarType": _DTYPE,
          "MemoryFormat": _MEMORY_FORMAT, "List[int]": _INTEGERS, "List[SymInt]": _INTEGERS, "List[float]": _REALS}


class NotEncodable(Exception):
    """Why a recorded call cannot be written down."""


def kinds_of(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """What find_program knows tensors by; None without the extension, and for tensors that it cannot tell apart."""
    if not tensors or not _serves(tensors[0]):
        return None
    return None if any(tensor.layout is not torch.strided for tensor in tensors) else torch.ops.gbmoe_cuda.kinds_of_tensors(tensors)


def _serves(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and extension.loaded()


class Encoded:
    """A program of the extension, filed under a table and the kinds of its input tensors.

    Attributes:
        number: of the program, as find_program returns it.
        precision: of products of float32, in which it was recorded; None where there are none.
    """

    def __init__(self, recorded: Recorded, table: int, kinds: list[int], device: torch.device, name: str,
                 precision: str | None = None):
        writer = _Writer(recorded, kinds, device)
        names = "".join(f"{name}\n" for name in writer.names)
        self.number: int = torch.ops.gbmoe_cuda.define_program(table, kinds, writer.code, writer.reals, names)
        self.precision = precision
        self._statements, self._results = recorded.statements, results_of(recorded, name)

    def run(self) -> Any:
        """What the recorded function returns for the tensors that find_program was given last in this thread."""
        try:
            tensors = torch.ops.gbmoe_cuda.run_program(self.number)
        except RuntimeError as error:
            stopped = error
        else:
            return self._results(tensors)
        return self._results(self._continued(stopped))

    def _continued(self, stopped: RuntimeError) -> list[torch.Tensor]:
        """The tensors of the results, after the statement at which the program has stopped was done here. Raises the exception of that
        statement, or `stopped` where it is another error."""
        while True:
            number, reads = torch.ops.gbmoe_cuda.stopped_program(self.number)
            if number < 0:
                raise stopped
            statement = self._statements[number]
            try:
                results = statement.perform(dict(zip(statement.reads, reads)))
            except BaseException:
                torch.ops.gbmoe_cuda.leave_program(self.number)
                raise
            del reads
            try:
                return torch.ops.gbmoe_cuda.resume_program(self.number, results)
            except RuntimeError as error:
                stopped = error


class _Writer:
    """The code of a program: `code`, `reals` and `names`, which it refers to by their numbers."""

    def __init__(self, recorded: Recorded, kinds: list[int], device: torch.device):
        self.reals: list[float] = []
        self.names: list[str] = []
        self._device, self._device_code = device, kinds[1:3]
        self._numbers: dict[str, int] = {}
        for name, is_tensor in recorded.inputs.items():
            if is_tensor:
                self._number(name)
        freed_first = [self._number(name) for name in recorded.freed_first if recorded.inputs[name]]
        statements = [number for statement, freed in zip(recorded.statements, recorded.freed)
                      for number in self._statement(statement, freed, recorded.needed)]
        results = [self._number(name) for name in recorded.returned]
        self.code = [len(self._numbers), *_listed(freed_first), *_listed(results), *statements]

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _statement(self, statement: Statement, freed: list[str], needed: set[str]) -> list[int]:
        kind = (_RENAME if statement.operator is None else _EMPTY if statement.operator is torch.empty
                else _ZEROS if statement.operator is torch.zeros else _CALL if statement.offset is None else _VIEW)
        # A view's other arguments are sizes, which are in its memory.
        reads = [self._number(name) for name in statement.reads]
        results = [self._number(name) if name in needed else -1 for name in statement.results]
        lists = [*_listed(results), *_listed(reads), *_listed([self._number(name) for name in freed])]
        if kind == _RENAME:
            return [kind, *lists]
        if kind == _CALL:
            return [kind, *lists, *self._call(statement)]
        assert statement.memory is not None
        return [kind, *lists, statement.offset or 0, *self._memory(statement.memory)]

    def _memory(self, memory: Memory) -> list[int]:
        """As csrc/program.cpp reads a kind."""
        if memory.device != self._device:
            raise NotEncodable(f"memory on another device, {memory.device}")
        return [_code_of(memory.dtype), *self._device_code, 0, len(memory.shape), *memory.shape, *memory.strides]

    def _call(self, statement: Statement) -> list[int]:
        schema = statement.operator._schema
        values = dict(zip([argument.name for argument in schema.arguments], statement.arguments)) | statement.keywords
        if len(schema.arguments) > _MOST_ARGUMENTS or any(str(result.real_type) != "Tensor" for result in schema.returns):
            raise NotEncodable(f"arguments or results of {schema.name}")
        code = [self._name(schema.name), self._name(schema.overload_name), len(schema.arguments)]
        for argument in schema.arguments:
            value = values.get(argument.name, argument.default_value)
            code += self._argument(value, str(argument.real_type), f"{argument.name} of {schema.name}")
        return code

    def _argument(self, value: Any, type_name: str, what: str) -> list[int]:
        optional = type_name.startswith("Optional[")
        if optional:
            type_name = type_name.removeprefix("Optional[").removesuffix("]")
            if value is None:
                return [_NONE, 1]
        kind = _TYPES.get(type_name)
        if kind == _MEMORY_FORMAT and value not in _MEMORY_FORMATS:
            raise NotEncodable(f"{what}: {value}")
        if kind is None or value is None or (kind == _TENSOR) != isinstance(value, Name):  # torch makes tensors of numbers
            raise NotEncodable(f"{what}: {type_name}, {value!r}")
        if kind in (_INTEGERS, _REALS):
            return [kind, optional, *_listed([int(part) if kind == _INTEGERS else self._real(part) for part in value])]
        if kind == _REAL:
            return [kind, optional, self._real(value)]
        if kind == _TENSOR:
            return [kind, optional, self._number(value)]
        if kind == _MEMORY_FORMAT:
            return [kind, optional, _MEMORY_FORMATS.index(value)]
        return [kind, optional, _code_of(value) if kind == _DTYPE else int(value)]

    def _real(self, value: float) -> int:
        self.reals.append(float(value))
        return len(self.reals) - 1

    def _name(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


def _listed(numbers: Sequence[int]) -> list[int]:
    return [len(numbers), *numbers]


@functools.cache
def _code_of(dtype: torch.dtype) -> int:
    """Torch's own number of a dtype."""
    return torch.ops.gbmoe_cuda.kinds_of_tensors([torch.empty(0, dtype=dtype, device="cpu")])[0]
