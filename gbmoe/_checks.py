"""Argument errors that name the argument, what was expected and what came."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLAIN = (torch.Tensor, torch.nn.Parameter)  # the types that no __torch_function__ or __torch_dispatch__ intercepts


def require(condition: bool, operator: str, argument: str, expected: str | Callable[[], str], got: object,
            error: type[Exception] = ValueError) -> None:
    """Raise `error` ("operator: argument: expected ..., got ...") unless `condition` holds.

    `expected` may be a function that returns the text, and must be one where the text contains a size: a size that torch.compile
    keeps variable becomes a constant when it is formatted, and the graph is compiled again for every other size.
    """
    if not condition:
        expected = expected() if callable(expected) else expected
        raise error(f"{operator}: {argument}: expected {expected}, got {got}")


def nearest(name: object, names: Iterable[str]) -> str:
    """"; the nearest is ..." with the one of `names` that `name` resembles most, for the end of a message; "" where it resembles none."""
    found = difflib.get_close_matches(name, list(names), n=1) if isinstance(name, str) else []
    return f"; the nearest is {found[0]}" if found else ""


def require_choice(operator: str, argument: str, value: object, choices: tuple[str, ...], hint: str = "") -> None:
    """Raise ValueError unless `value` is one of `choices`; the message ends with `hint`, or else with the nearest of them."""
    if value not in choices:
        require(False, operator, argument, f"one of {', '.join(choices)}", f"{value!r}{hint or nearest(value, choices)}")


def names_the_nearest_field(cls: type[T], further: Iterable[str] = ()) -> type[T]:
    """Decorates a dataclass: a keyword that is none of its fields, or of the `further` ones that it takes, raises a TypeError that names
    the nearest one.

    The signature stays as it is, and dataclasses.replace, which calls the class, names the field as well.
    """
    generated = cls.__init__
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    names += further

    @functools.wraps(generated)
    def __init__(self, *args, **kwargs):
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{cls.__name__}: {name}: expected one of its fields{nearest(name, names)}")
        generated(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def as_device(value: Any, operator: str) -> torch.device:
    """The device that `value` names, as torch.device takes it; ValueError if it names none."""
    if isinstance(value, torch.device):
        return value
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{operator}: device: expected what torch.device takes, got {value!r}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def autocast_enabled(device_type: str) -> bool:
    """torch.is_autocast_enabled, but False for the meta device, for which torch's function raises."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def require_tensor(value: Any, operator: str, argument: str, *, rank: int | tuple[int, ...] | None = None,
                   dtypes: tuple[torch.dtype, ...] | None = None, device: torch.device | None = None) -> None:
    """Raise TypeError or ValueError unless `value` is a plain tensor of the given rank (or one of them), dtypes and device."""
    if type(value) in PLAIN and (rank is None or value.dim() == rank) and (dtypes is None or value.dtype in dtypes) \
            and (device is None or value.device == device):
        return  # the usual case, in a third of the time that the checks below take
    require(isinstance(value, torch.Tensor), operator, argument, "a torch.Tensor", type(value).__name__, TypeError)
    if type(value) not in PLAIN:
        require(not hasattr(value, "to_local"), operator, argument,
                "a plain tensor, such as a DTensor's to_local() or full_tensor()", type(value).__name__, TypeError)
    if rank is not None:
        ranks = (rank,) if isinstance(rank, int) else rank
        require(value.dim() in ranks, operator, argument,
                lambda: f"{' or '.join(map(str, ranks))} dimensions", list(value.shape))
    if dtypes is not None:
        require(value.dtype in dtypes, operator, argument,
                lambda: f"dtype {', '.join(map(dtype_name, dtypes))}", value.dtype, TypeError)
    if device is not None:
        require(value.device == device, operator, argument, lambda: f"device {device}", value.device)
