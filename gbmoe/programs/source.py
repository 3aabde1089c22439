"""A recorded call as a function of Python: a straight line of calls.

It serves what encoding.py cannot write down for the extension, and tells how a program was meant where one is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gbmoe import _torch_names as names
from gbmoe.programs.recording import ALLOCATIONS, Name, Recorded, Statement


def compiled(recorded: Recorded, name: str) -> Callable[[list], Any]:
    """The function of a list of inputs, which it empties, that does what was recorded. `name` is for tracebacks."""
    text = _Text()
    lines = [f"{', '.join(recorded.inputs)}, = inputs", "inputs.clear()", *_freed(recorded.freed_first)]
    for statement, freed in zip(recorded.statements, recorded.freed):
        lines += [text.of_statement(statement, recorded.needed), *_freed(freed)]
    lines.append(f"return {text.of_value(recorded.results)}")
    return text.function("inputs", lines, name)


def results_of(recorded: Recorded, name: str) -> Callable[[list], Any]:
    """The function of the list of recorded.returned that makes what the recorded function returned of them."""
    text = _Text()
    names_of = f"{', '.join(recorded.returned)}, = tensors" if recorded.returned else "pass"
    return text.function("tensors", [names_of, f"return {text.of_value(recorded.results)}"], name)


class _Text:
    """Writes source, and keeps the constants that it names."""

    def __init__(self) -> None:
        self._constants: dict[str, Any] = {"empty": torch.empty, "zeros": torch.zeros}

    def function(self, argument: str, lines: list[str], name: str) -> Callable[[list], Any]:
        source = f"def program({argument}):\n" + "".join(f"    {line}\n" for line in lines)
        namespace = dict(self._constants)
        exec(compile(source, f"<gbmoe: program of {name}>", "exec"), namespace)
        return namespace["program"]

    def of_statement(self, statement: Statement, needed: set[str]) -> str:
        call = self._call(statement)
        if needed.isdisjoint(statement.results):
            return call
        targets = [result if result in needed else "_" for result in statement.results]
        return f"{', '.join(targets)}{',' if statement.is_tuple else ''} = {call}"

    def _call(self, statement: Statement) -> str:
        if statement.operator is None:
            return statement.arguments[0]
        if statement.operator in ALLOCATIONS:
            memory = statement.memory
            assert memory is not None
            return (f"{self._constant(statement.operator)}({memory.shape}, dtype={self._constant(memory.dtype)},"
                    f" device={self._constant(memory.device)})")
        arguments = [self.of_value(value, as_list=True) for value in statement.arguments]
        arguments += [f"{name}={self.of_value(value, as_list=True)}" for name, value in statement.keywords.items()]
        return f"{self._constant(names.called_by(statement.operator))}({', '.join(arguments)})"

    def of_value(self, value: Any, as_list: bool = False) -> str:
        """The expression for names, None and constants; tuples that have names in them are lists where an operator takes them."""
        if isinstance(value, Name):
            return value
        if isinstance(value, tuple):
            parts = [self.of_value(part, as_list) for part in value]
            if not as_list:
                return f"({''.join(part + ', ' for part in parts)})"
            return f"[{', '.join(parts)}]" if any(isinstance(part, Name) for part in value) else self._constant(value)
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        for name, known in self._constants.items():
            if known is value or (isinstance(value, torch.device) and known == value):
                return name
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name


def _freed(tensors: list[str]) -> list[str]:
    return [f"del {', '.join(tensors)}"] if tensors else []
