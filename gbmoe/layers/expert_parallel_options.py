"""The options of experts that are spread over ranks: one value of Arguments, which checks how they go together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from gbmoe._checks import require, require_choice

T = TypeVar("T")
TRANSPORTS = ("auto", "peer_memory", "exchange")
_PREFIX = "expert_parallel_"


@dataclasses.dataclass(frozen=True)
class ExpertParallelOptions:
    """How the rows of experts on other ranks travel; Arguments.expert_parallel.

    Each is also an argument and an attribute of Arguments, with `expert_parallel_` before its name. None of them is MegaBlocks'.

    Attributes:
        exact: asks for the bits of a single process; one row for every slot then travels back.
        ranks_per_node: the number of the group's ranks on each node, so that a row crosses to another node once. None takes
            LOCAL_WORLD_SIZE, which torchrun sets; 1 treats all ranks as equally near.
        chunks: divides each rank's experts into chunks; between nodes the rows of one travel while the one before it computes. 0 or None
            leaves the number to gbmoe, see gbmoe.parallel.automatic_chunks.
        transport: "auto", "peer_memory" (ranks of one node map each other's memory) or "exchange" (torch.distributed's all-to-all).
        rows: room for the rows that a rank computes, as a multiple of their mean. Then no forward over mapped memory waits for the device,
            and a CUDA graph can record the step. Where there are more rows, they are computed one part after the other.
        shadows: the weights of at most so many experts are copied to all ranks for a step, if less travels then than with the rows of
            their tokens. 0 is off. It needs rows that are exchanged and ranks that hold whole experts, and excludes exact.
        loans: over mapped memory, ranks that have many rows to compute lend experts to ranks that have few, for a step: each lends at most
            so many, and borrows at most so many. 0 is off. It needs ranks that hold whole experts, and excludes rows and shadows.

    Raises:
        ValueError: naming the argument of Arguments, what was expected and what came.

    Example:
        >>> ExpertParallelOptions(transport="exchange", chunks=2).exact
        False
    """

    exact: bool = False
    ranks_per_node: int | None = None
    chunks: int | None = 1
    transport: str = "auto"
    rows: float | None = None
    shadows: int = 0
    loans: int = 0

    def __post_init__(self) -> None:
        for name, least in (("ranks_per_node", 1), ("chunks", 0)):
            value = getattr(self, name)
            self._require(value is None or (isinstance(value, int) and value >= least), name, f"None or an int of at least {least}")
        require_choice("Arguments", _PREFIX + "transport", self.transport, TRANSPORTS)
        self._require(self.rows is None or (isinstance(self.rows, (int, float)) and self.rows > 0), "rows",
                      "None or a positive number, how many times the mean")
        for name in ("shadows", "loans"):
            value = getattr(self, name)
            self._require(isinstance(value, int) and value >= 0, name, "an int of at least 0")
        self._require(not self.exact or not self.shadows, "shadows",
                      "0 with expert_parallel_exact, as gradients of shadows are rounded on each rank")
        self._require(not self.shadows or self.transport != "peer_memory", "transport",
                      "'auto' or 'exchange' with expert_parallel_shadows, as only rows that are exchanged can stay where they are")
        if self.loans:
            self._require(self.transport != "exchange", "transport",
                          "'auto' or 'peer_memory' with expert_parallel_loans, as experts are lent over mapped memory")
            self._require(self.rows is None, "rows", "None with expert_parallel_loans, as the host copies what is lent once it knows of it")
            self._require(not self.shadows, "shadows", "0 with expert_parallel_loans, as shadows are for rows that are exchanged")

    def _require(self, holds: bool, name: str, expected: str) -> None:
        require(holds, "Arguments", _PREFIX + name, expected, repr(getattr(self, name)))


DEFAULTS = ExpertParallelOptions()
FLAT_NAMES = {_PREFIX + field.name: field.name for field in dataclasses.fields(ExpertParallelOptions)}


def with_flat_names(cls: type[T]) -> type[T]:
    """Decorates a dataclass that has a field `expert_parallel`, ExpertParallelOptions or a mapping of their names: each option is also a
    keyword, which wins over the field's, and an attribute, which can be set."""
    generated = cls.__init__

    @functools.wraps(generated)
    def __init__(self, *args, **kwargs):
        flat = {FLAT_NAMES[name]: kwargs.pop(name) for name in list(kwargs) if name in FLAT_NAMES}
        options = kwargs.get("expert_parallel", DEFAULTS)
        options = ExpertParallelOptions(**options) if isinstance(options, Mapping) else options
        require(isinstance(options, ExpertParallelOptions), cls.__name__, "expert_parallel", "ExpertParallelOptions, or a mapping of them",
                type(options).__name__, TypeError)
        kwargs["expert_parallel"] = dataclasses.replace(options, **flat)
        generated(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    for flat, name in FLAT_NAMES.items():
        setattr(cls, flat, _attribute(name))
    return cls


def _attribute(name: str) -> property:
    def get(self: Any) -> Any:
        return getattr(self.expert_parallel, name)

    def set_(self: Any, value: Any) -> None:
        self.expert_parallel = dataclasses.replace(self.expert_parallel, **{name: value})

    return property(get, set_, doc=f"expert_parallel.{name}")


def of(args: Any) -> ExpertParallelOptions:
    """Those of `args`, or the defaults where they are MegaBlocks' own Arguments, which have none."""
    return getattr(args, "expert_parallel", DEFAULTS)
