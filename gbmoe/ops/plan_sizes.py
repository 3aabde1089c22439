"""Where the sizes of a plan's experts are read: on the host, for engines that need them there, or on the device.

Shape suffixes: T tokens, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe.ops.gmm import computed_dtype
from gbmoe.plan import RoutingPlan
from gbmoe.problem import Problem, allows_tf32


def plan_sizes(plan: RoutingPlan, x_TH: torch.Tensor, w_EFH: torch.Tensor, engine: str) -> torch.Tensor:
    """The plan's rows per expert: on the host, at the cost of one wait for each plan, if the engine needs them there, or on the device."""
    if x_TH.is_meta:
        return plan.padded_counts_E
    dtype = computed_dtype(x_TH)
    rows, *shape = plan.num_rows, *w_EFH.shape
    # While torch traces, sizes are tensors; the choice of an engine is made for those of the trace.
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        rows, *shape = map(int, (rows, *shape))
    wanted = wants_host_sizes(engine, x_TH.device, dtype, rows, *shape, plan.has_host_sizes, allows_tf32(dtype))
    return plan.host_sizes() if wanted else plan.padded_counts_E


@engines.remembered
def wants_host_sizes(engine, device, dtype, rows, experts, ffn, hidden, on_host, tf32) -> bool:
    """Whether the engine of a layer with `rows` rows and weights [experts,ffn,hidden] reads its sizes on the host."""
    problems = (Problem(device, dtype, rows, experts, hidden, ffn, k_grouped, on_host, tf32) for k_grouped in (False, True))
    return any(engines.select(engine, problem).needs_host_sizes for problem in problems)
