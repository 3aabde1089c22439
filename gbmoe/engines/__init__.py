"""The engines and the table that chooses one.

`engine="auto"` takes the first engine of the table's row that is available and does not refuse the operands; `reference`
closes every row. A name forces that engine and raises where it cannot serve.
"""

from __future__ import annotations

import torch

from gbmoe._checks import require
from gbmoe.engines.base import Engine, Problem
from gbmoe.engines.cublas import CublasGrouped, CublasLoop
from gbmoe.engines.reference import Reference
from gbmoe.engines.torch_grouped import TorchGrouped

ENGINES: dict[str, Engine] = {e.name: e for e in (CublasLoop(), CublasGrouped(), TorchGrouped(), Reference())}


def _preference(problem: Problem) -> tuple[str, ...]:
    """Engines in the order in which "auto" tries them."""
    if problem.device.type != "cuda":
        return ("reference",)
    rows_a_group = problem.rows / max(1, problem.groups)
    if problem.dtype == torch.bfloat16 and rows_a_group < 4096:
        return ("torch", "cublas_loop", "reference")
    return ("cublas_loop", "torch", "reference")


def names() -> list[str]:
    """What `engine=` takes."""
    return ["auto", *ENGINES]


def select(engine: str, problem: Problem) -> Engine:
    """The engine for this product. Raises ValueError for an unknown name or a forced engine that cannot serve."""
    require(engine in ENGINES or engine == "auto", "gmm", "engine", f"one of {', '.join(names())}", repr(engine))
    if engine != "auto":
        chosen = ENGINES[engine]
        reason = chosen.unavailable(problem.device) or chosen.refuses(problem)
        if reason is not None:
            raise ValueError(f"gmm: engine {engine!r} cannot serve this product: {reason}")
        return chosen
    for name in _preference(problem):
        candidate = ENGINES[name]
        if candidate.unavailable(problem.device) is None and candidate.refuses(problem) is None:
            return candidate
    return ENGINES["reference"]


def availability(device: torch.device) -> dict[str, str | None]:
    """For every engine None where it runs on `device`, else the reason why not."""
    return {name: engine.unavailable(device) for name, engine in ENGINES.items()}
