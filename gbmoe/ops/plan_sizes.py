"""Where the sizes of a plan's experts are read, on the host or on the device, and what computes these experts: one asks the other.

Shape suffixes: T tokens, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gbmoe import engines
from gbmoe.engines.resolved import Resolved
from gbmoe.ops.gmm import computed_dtype
from gbmoe.plan import RoutingPlan


def plan_sizes(plan: RoutingPlan, x_TH: torch.Tensor, w_EFH: torch.Tensor, engine: str) -> torch.Tensor:
    """The plan's rows per expert: on the host, at the cost of one wait for each plan, if the engine needs them there, or on the device."""
    return sizes_and_engine(plan, x_TH, w_EFH.shape, engine)[0]


def sizes_and_engine(plan: RoutingPlan, x_TH: torch.Tensor, shape_EFH: Sequence[int], engine: str, batch_invariant: bool = False,
                     ) -> tuple[torch.Tensor, Resolved]:
    """(plan_sizes, the engine of a layer that has its sizes there). Raises ValueError where `engine` cannot compute the layer."""
    device = x_TH.device
    if x_TH.is_meta:
        return plan.padded_counts_E, Resolved(engines.batch_invariant(engine, device) if batch_invariant else engine, None)
    dtype, on_cpu = computed_dtype(x_TH), device.type == "cpu"
    rows, shape_EFH = plan.num_rows, tuple(shape_EFH)
    # While torch traces, sizes are tensors; the choice of an engine is made for those of the trace.
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        rows, shape_EFH = int(rows), tuple(map(int, shape_EFH))
    were_on_host = on_cpu or plan.has_host_sizes
    resolved = engines.resolve(engine, device, dtype, rows, shape_EFH, were_on_host, batch_invariant)
    if resolved.needs_host_sizes:
        sizes_E, on_host = plan.host_sizes(), True
    else:
        sizes_E, on_host = plan.padded_counts_E, on_cpu
    if on_host != were_on_host:  # that they are elsewhere now may decide between engines which take them there
        resolved = engines.resolve(engine, device, dtype, rows, shape_EFH, on_host, batch_invariant)
    return sizes_E, resolved
