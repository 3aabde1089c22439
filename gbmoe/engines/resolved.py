"""What the name of an engine stands for in one kind of call, and the tables that keep it.

A kind of call is everything that the choice of an engine depends on: the name that was asked for, the device, the dtype, the shapes, where
the sizes are, and whether float32 may be rounded to TF32. Two calls of one kind have the same engine, and a layer's steps are of few kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from gbmoe.engines.base import Engine

_T = TypeVar("_T")


@dataclass(frozen=True)
class Resolved:
    """What computes a layer's experts in one kind of call.

    Operators take it where they take the name of an engine. Only the name crosses the dispatcher, inside of which it is looked up again.

    Attributes:
        name: what was asked for, or the engine that stands for it in a batch-invariant layer: what an operator's schema takes.
        engine: computes all products of the layer; None on the meta device, where nothing is computed.
    """

    name: str
    engine: Engine | None

    @property
    def needs_host_sizes(self) -> bool:
        """As Engine says."""
        return self.engine is not None and self.engine.needs_host_sizes

    @property
    def decides_by_kind(self) -> bool:
        """As Engine says."""
        return self.engine is not None and self.engine.decides_by_kind

    def gathers_before_up(self, ffn: int, activation: str, token_bytes: int) -> bool:
        """As Engine says."""
        return self.engine is not None and self.engine.gathers_before_up(ffn, activation, token_bytes)


def decides_by_kind(engine: str | Resolved) -> bool:
    """Resolved.decides_by_kind; not of an engine that is looked up by its name."""
    return not isinstance(engine, str) and engine.decides_by_kind


class ByKind(Generic[_T]):
    """What was resolved, by the kind of call, for at most `most` kinds; the one that has been there longest makes room.

    Threads share it: an entry is complete before it can be found. Two that resolve one kind at the same time may each get an object of
    their own, and these are equal.
    """

    def __init__(self, most: int = 1024):
        self._most, self._lock = most, threading.Lock()
        self._entries: dict[tuple, _T] = {}

    def of(self, kind: tuple, resolve: Callable[..., _T]) -> _T:
        """The entry of this kind, which is resolve(*kind) the first time."""
        # A compiler traces the choice itself, so that its graph has guards for the sizes.
        if torch.compiler.is_compiling():
            return resolve(*kind)
        entries = self._entries
        try:
            found = entries.get(kind)
        except TypeError:  # a symbolic size has no hash
            return resolve(*kind)
        if found is not None:
            return found
        found = resolve(*kind)
        if not any(isinstance(part, torch.Tensor) for part in kind):  # torch.jit.trace makes tensors of sizes
            with self._lock:
                if len(entries) >= self._most:
                    del entries[next(iter(entries))]
                entries[kind] = found
        return found

    def forget(self) -> None:
        """Empty the table. A thread that resolves meanwhile puts its entry into the table of before."""
        self._entries = {}

    def __len__(self) -> int:
        return len(self._entries)
