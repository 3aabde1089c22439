"""The engines and the table that chooses one.

`engine="auto"` takes the first engine of the table's row that is available and does not refuse the operands, and
`reference` where there is none. A name forces that engine and raises where it cannot serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gbmoe._checks import require
from gbmoe.engines.base import Engine, Problem, known
from gbmoe.engines.cublas import CublasGrouped, CublasLoop
from gbmoe.engines.hopper import Hopper
from gbmoe.engines.reference import Reference
from gbmoe.engines.torch_grouped import TorchGrouped

ENGINES: dict[str, Engine] = {e.name: e for e in (Hopper(), CublasLoop(), CublasGrouped(), TorchGrouped(), Reference())}


@dataclass(frozen=True)
class _Rule:
    """One row of the table: which products, and the engines to try for them in this order."""
    dtypes: tuple[torch.dtype, ...]
    at_least_flops_a_group: float
    order: tuple[str, ...]
    sizes_on_host: bool = False      # for them alone
    variable_k: bool | None = None   # for these, or those, alone


_HALF_OR_SINGLE = (torch.float16, torch.float32)
# Measured on an H200 (cuBLAS 13.1, torch 2.11; results/h200/gemm.json, `python -m gbmoe bench --suite gemm`). The loop pays
# some 10 us a group, so it wins where one group's product lasts longer than that; below, torch's persistent kernel does in
# bfloat16, and cuBLAS' grouped one where torch has none. Our Hopper kernel beats them nearly everywhere. The loop is up to 6 %
# faster on a few groups of some 400 GFLOP and more (700, where rows are summed over): it is taken there if nobody has to wait for
# the sizes. So it is (734 to 760 against 639 to 684 TFLOP/s) for weight gradients of so few groups that their tiles do not fill the
# multiprocessors evenly, if groups are uneven, and in some runs if they are equal, which only the data tell. Looked through from the top.
_TABLE = (
    _Rule((torch.bfloat16, torch.float16), 4e11, ("cublas_loop", "hopper"), sizes_on_host=True, variable_k=False),
    _Rule((torch.bfloat16, torch.float16), 7e11, ("cublas_loop", "hopper"), sizes_on_host=True),
    _Rule((torch.bfloat16,), 1.2e10, ("hopper", "cublas_loop", "torch")),
    _Rule((torch.bfloat16,), 0, ("hopper", "torch", "cublas_grouped")),
    _Rule(_HALF_OR_SINGLE, 2.5e9, ("hopper", "cublas_loop")),
    _Rule(_HALF_OR_SINGLE, 0, ("hopper", "cublas_grouped")),
    _Rule((torch.float64,), 0, ("cublas_loop",)),
)


def _preference(problem: Problem) -> tuple[str, ...]:
    """Engines in the order in which "auto" tries them; the caller falls back on `reference`."""
    if problem.device.type != "cuda":
        return ()
    flops_a_group = 2 * problem.rows * problem.inner * problem.columns / max(1, problem.groups)
    return next(rule.order for rule in _TABLE if problem.dtype in rule.dtypes
                and (problem.sizes_on_host or not rule.sizes_on_host)
                and rule.variable_k in (None, problem.variable_k)
                and (rule.at_least_flops_a_group == 0 or known(flops_a_group >= rule.at_least_flops_a_group)))


def names() -> list[str]:
    """What `engine=` takes."""
    return ["auto", *ENGINES]


def _unavailable(engine: str, device: torch.device) -> str | None:
    return ENGINES[engine].unavailable(device)


# torch.compile asks and does not trace: the answer may take building and loading the extension. This is the mark that
# torch.compiler.assume_constant_result leaves, without the second that calling it adds to an import.
_unavailable._dynamo_marked_constant = True


_MEMORIES = []


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
    for name in _preference(problem):
        candidate = ENGINES[name]
        if _unavailable(name, problem.device) is None and candidate.refuses(problem) is None:
            return candidate
    return ENGINES["reference"]


def availability(device: torch.device) -> dict[str, str | None]:
    """For every engine None where it runs on `device`, else the reason why not."""
    return {name: engine.unavailable(device) for name, engine in ENGINES.items()}
