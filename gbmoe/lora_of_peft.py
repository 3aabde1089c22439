"""Reads low-rank changes that PEFT makes of a parameter, so that the changed parameter need not be made.

PEFT's target_parameters registers a parametrization for the time of a forward, whose factors are lhs [E,m,r] and rhs [E,r,n] of a parameter
[E,m,n]; with gbmoe.compat.peft the same factors are attached to the module instead, and no parametrization is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

_ATTRIBUTE = "_gbmoe_low_rank_changes"


class Change(NamedTuple):
    """parameter + scale * lhs @ rhs."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    scale: float


class Changed(NamedTuple):
    """A parameter without its changes, and these."""

    original: torch.Tensor
    changes: tuple[Change, ...]


@contextmanager
def attached(module: torch.nn.Module, name: str, changes: list[Change]) -> Iterator[None]:
    """Within it, `low_rank_changes` of the module's parameter `name` are these."""
    before = module.__dict__.get(_ATTRIBUTE, {})
    module.__dict__[_ATTRIBUTE] = {**before, name: tuple(changes)}
    try:
        yield
    finally:
        if before:
            module.__dict__[_ATTRIBUTE] = before
        else:
            del module.__dict__[_ATTRIBUTE]


def may_have_changes(module: torch.nn.Module) -> bool:
    """Whether to ask `low_rank_changes` at all: a cheap question for each forward."""
    of = module.__dict__
    return _ATTRIBUTE in of or "parametrizations" in of.get("_modules", ())


def low_rank_changes(module: torch.nn.Module, name: str) -> Changed | None:
    """The parameter `name` and its low-rank changes; None where it has none, or where other parametrizations than these compute it."""
    found = module.__dict__.get(_ATTRIBUTE)
    if found is not None and name in found:
        return Changed(module._parameters[name], found[name])  # type: ignore[arg-type]
    if not parametrize.is_parametrized(module, name):
        return None
    parts: Any = module.parametrizations[name]  # type: ignore[index]
    if not all(is_of_peft(part) and hasattr(part, "lhs") for part in parts):
        return None
    return Changed(parts.original, tuple(Change(part.lhs, part.rhs, part.scaling) for part in parts))


def is_of_peft(parametrization: torch.nn.Module) -> bool:
    """Whether PEFT has made this parametrization."""
    return type(parametrization).__module__.partition(".")[0] == "peft"
