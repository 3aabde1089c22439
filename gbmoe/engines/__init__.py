"""The engines and the table that chooses one.

`engine="auto"` takes the first engine of the table's row that is available and does not refuse the operands, and
`reference` where there is none. A name forces that engine and raises where it cannot serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gbmoe._checks import require
from gbmoe.engines import tuning
from gbmoe.engines.base import Engine, Problem
from gbmoe.engines.cublas import CublasGrouped, CublasLoop
from gbmoe.engines.hopper import Hopper
from gbmoe.engines.reference import Reference
from gbmoe.engines.torch_grouped import TorchGrouped

ENGINES: dict[str, Engine] = {e.name: e for e in (Hopper(), CublasLoop(), CublasGrouped(), TorchGrouped(), Reference())}


def names() -> list[str]:
    """What `engine=` takes."""
    return ["auto", *ENGINES]


def _unavailable(engine: str, device: torch.device) -> str | None:
    return ENGINES[engine].unavailable(device)


# torch.compile asks and does not trace: the answer may take building and loading the extension. This is the mark that
# torch.compiler.assume_constant_result leaves, without the second that calling it adds to an import.
_unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


_MEMORIES: list[Any] = []


def remembered(function: Callable) -> Callable:
    """`function`, of devices, dtypes, names and sizes, with a memory: what an engine says of a device does not change.

    A layer's step asks half a dozen times, at some 15 us each.
    """
    memory = functools.lru_cache(maxsize=1024)(function)
    _MEMORIES.append(memory)

    @functools.wraps(function)
    def ask(*args):
        # A compiler traces the choice, and sizes that it does not know have no hash; those that torch.jit traces are tensors.
        if torch.compiler.is_compiling() or any(isinstance(a, (torch.SymInt, torch.Tensor)) for a in args):
            return function(*args)
        return memory(*args)

    return ask


def forget() -> None:
    """Ask every engine anew."""
    for memory in _MEMORIES:
        memory.cache_clear()


def select(engine: str, problem: Problem) -> Engine:
    """The engine for this product. Raises ValueError for an unknown name or a forced engine that cannot serve."""
    p = problem  # by fields, each of which `remembered` looks at
    return _select(engine, p.device, p.dtype, p.rows, p.groups, p.inner, p.columns, p.variable_k, p.sizes_on_host)


@remembered
def _select(engine: str, *of_problem) -> Engine:
    problem = Problem(*of_problem)
    require(engine in ENGINES or engine == "auto", "gmm", "engine", lambda: f"one of {', '.join(names())}", repr(engine))
    if engine != "auto":
        chosen = ENGINES[engine]
        reason = _unavailable(engine, problem.device) or chosen.refuses(problem)
        if reason is not None:
            raise ValueError(f"gmm: engine {engine!r} cannot serve this product: {reason}")
        return chosen
    for name in tuning.engine_order(problem):
        candidate = ENGINES[name]
        if _unavailable(name, problem.device) is None and candidate.refuses(problem) is None:
            return candidate
    return ENGINES["reference"]


def product(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False,
            *, engine: str = "auto", out: torch.Tensor | None = None, accumulate: bool = False) -> torch.Tensor:
    """The grouped product by the engine that `engine` names or stands for; see Engine.gmm for its shapes, out and accumulate.

    Without autograd, checks of sizes or a demand that the groups fill a: what operators call inside. Rows behind the last group are
    neither read nor written.
    """
    return select(engine, Problem.of(a, b, sizes, trans_a, trans_b)).product(a, b, sizes, trans_a, trans_b, out, accumulate)


class _ByProduct(Engine):
    """The engine that "auto", or a name, stands for where it may be another one for every product."""

    def __init__(self, name: str):
        self.name = name

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        chosen = select(self.name, Problem.of(a, b, sizes, trans_a, trans_b))
        return chosen.gmm(a, b, sizes, trans_a, trans_b, out, accumulate)


def for_experts(engine: str, x_TH: torch.Tensor, rows: int, w1_EFH: torch.Tensor, sizes_E: torch.Tensor) -> Engine:
    """The engine that computes a layer's experts, over P = `rows` rows of the plan: one for all, or by product where they differ."""
    return _for_experts(engine, x_TH.device, x_TH.dtype, rows, *w1_EFH.shape, sizes_E.device.type == "cpu")


@remembered
def _for_experts(engine, device, dtype, rows, experts, ffn, hidden, on_host) -> Engine:
    chosen = {select(engine, Problem(device, dtype, rows, experts, *inner_columns, variable_k, on_host))
              for inner_columns in ((hidden, ffn), (ffn, hidden)) for variable_k in (False, True)}
    return chosen.pop() if len(chosen) == 1 else _ByProduct(engine)


def availability(device: torch.device) -> dict[str, str | None]:
    """For every engine None where it runs on `device`, else the reason why not."""
    return {name: engine.unavailable(device) for name, engine in ENGINES.items()}
