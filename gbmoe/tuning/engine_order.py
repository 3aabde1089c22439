"""Which engines "auto" tries for a product, and in which order.

A group's FLOP stand for the time that its GEMM takes, next to the fixed costs of a launch, and are scaled to other GPUs as such
(gbmoe/tuning/device.py). They were fitted on an H200 (`python -m gbmoe bench --suite gemm`, cuBLAS 13.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gbmoe.problem import Problem, known
from gbmoe.tuning import groups_of_few_rows
from gbmoe.tuning.device import Device


@dataclass(frozen=True)
class _Rule:
    """One row of the table: the products that it is for, and the engines to try for them in this order."""
    dtypes: tuple[torch.dtype, ...]
    at_least_flops_a_group: float
    order: tuple[str, ...]
    sizes_on_host: bool = False      # True: only for products whose sizes are on the host
    k_grouped: bool | None = None    # True or False: only for products whose groups do, or do not, divide the inner dimension


_HALVES = (torch.bfloat16, torch.float16)
_HALF_OR_SINGLE = (torch.float16, torch.float32)
_LONGER_THAN_A_LAUNCH = 2.5e9  # FLOP of a group from which a loop over cublasGemmEx is faster than cuBLAS' grouped GEMM

# The first row that takes a product counts. gbmoe's Hopper kernels are the fastest nearly everywhere. A loop over cublasGemmEx is
# faster with few very large groups, next to whose GEMMs its launches are short, and is taken where the sizes are on the host
# anyway. For smaller groups torch's persistent kernel is faster in bfloat16, and cuBLAS' grouped GEMM where torch has none
# (docs/notes/cublas-grouped-speed.md, cublas-loop-of-large-groups.md).
#
# Where Hopper's kernels do not serve, tensor_core is next. That is a decision, not a measurement: it does not wait for the host,
# so that a step can be one CUDA graph, and it was run on Hopper alone. In float32, where it needs TF32, the loop is faster for
# large groups and slower for small ones (docs/notes/tensor-core-speed.md), and is taken where it does not have to wait.
_ORDER = (
    _Rule(_HALVES, 4e11, ("cublas_loop", "hopper"), sizes_on_host=True, k_grouped=False),
    _Rule(_HALVES, 7e11, ("cublas_loop", "hopper"), sizes_on_host=True),
    _Rule((torch.bfloat16,), 1.2e10, ("hopper", "tensor_core", "cublas_loop", "torch")),
    _Rule((torch.bfloat16,), 0, ("hopper", "tensor_core", "torch", "cublas_grouped")),
    _Rule((torch.float32,), _LONGER_THAN_A_LAUNCH, ("cublas_loop", "tensor_core"), sizes_on_host=True),
    _Rule(_HALF_OR_SINGLE, _LONGER_THAN_A_LAUNCH, ("hopper", "tensor_core", "cublas_loop")),
    _Rule(_HALF_OR_SINGLE, 0, ("hopper", "tensor_core", "cublas_grouped")),
    _Rule((torch.float64,), 0, ("cublas_loop",)),
)
# torch's bfloat16 kernels leave the sizes on the device too, and multiply with wgmma on Hopper and with tcgen05.mma on
# data-centre Blackwell (compute capability 10), where mma.sync is slower: measured on Hopper (docs/notes/tensor-core-speed.md),
# and decided by NVIDIA's documentation for Blackwell (docs/engines.md). cuBLAS' loop uses tcgen05.mma there too, in every dtype, and is
# taken where it does not have to wait. Where groups have so few rows that reading the weights takes most of the time, tensor_core
# has kernels for that, and stays first.
_TORCH_BEFORE_TENSOR_CORE = (9, 10)
_TCGEN05 = 10


def engine_order(problem: Problem, device: Device | None) -> tuple[str, ...]:
    """The engines in the order in which "auto" tries them; where none can, the caller takes `reference`.

    `device` is the CUDA device of the problem, None where a graph is made for one and there is none; it is ignored for other
    devices.
    """
    if problem.device.type != "cuda":
        return ()
    generation = None if device is None else device.capability[0]
    flops_a_group = 2 * problem.rows * problem.inner * problem.columns / max(1, problem.groups)

    def is_long(fitted: float) -> bool:
        return known(flops_a_group >= (fitted if device is None else device.flops(fitted)))

    order = next(rule.order for rule in _ORDER if problem.dtype in rule.dtypes
                 and (problem.sizes_on_host or not rule.sizes_on_host)
                 and rule.k_grouped in (None, problem.k_grouped)
                 and (rule.at_least_flops_a_group == 0 or is_long(rule.at_least_flops_a_group)))
    # The number of rows is asked for only where it matters: torch.compile makes a graph of its own for each answer.
    if generation in _TORCH_BEFORE_TENSOR_CORE and problem.dtype == torch.bfloat16 and (
            generation != _TCGEN05 or not known(groups_of_few_rows.few_rows(problem.rows, problem.groups))):
        order = _moved_ahead("torch", order)
    if generation == _TCGEN05 and problem.sizes_on_host and is_long(_LONGER_THAN_A_LAUNCH):
        order = _moved_ahead("cublas_loop", order)
    return order


def _moved_ahead(name: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """The order with that engine directly before tensor_core, if it has both."""
    if name not in order or "tensor_core" not in order:
        return order
    others = [other for other in order if other != name]
    place = others.index("tensor_core")
    return (*others[:place], name, *others[place:])
