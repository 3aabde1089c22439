"""What an engine is: one way to compute a grouped product.

Shape suffixes: M rows of all groups, E groups (experts), K inner, N columns. Group e owns sizes[e] consecutive rows; rows
behind the last group belong to nobody and are neither read nor, in the result, defined.

    variable m:  out [M,N],    out[rows of e] = a[rows of e] @ b[e]        b [E,K,N], or [E,N,K] with trans_b
    variable k:  out [E,K,N],  out[e] = a[rows of e].T @ b[rows of e]      a [M,K], b [M,N], with trans_a
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def known(condition: bool) -> bool:
    """`condition`, or False where it hangs on a size that only the data will tell a compiled graph."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    return guard_or_false(condition)


def result_shape(a: torch.Tensor, b: torch.Tensor, groups: int, trans_a: bool, trans_b: bool) -> tuple[int, ...]:
    """Shape of the product of a and b."""
    if trans_a:
        return groups, a.size(1), b.size(1)
    return a.size(0), b.size(1) if trans_b else b.size(2)


@dataclass(frozen=True)
class Problem:
    """What a grouped product is, apart from its data: enough to choose an engine before there are operands.

    sizes_on_host: the rows of each group are known there, so that an engine that wants them there waits for nothing.
    """

    device: torch.device
    dtype: torch.dtype
    rows: int
    groups: int
    inner: int
    columns: int
    variable_k: bool
    sizes_on_host: bool = False

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool, trans_b: bool) -> "Problem":
        """The problem of these operands."""
        columns = result_shape(a, b, sizes.numel(), trans_a, trans_b)[-1]
        return cls(a.device, a.dtype, a.size(0), sizes.numel(), a.size(1), columns, trans_a, sizes.device.type == "cpu")


class Engine:
    """A stateless way to compute grouped products; one instance each in gbmoe.engines.ENGINES.

    Attributes:
        name: what `engine=` takes.
        needs_host_sizes: True where `gmm` reads the sizes on the host; given device sizes it waits for them.
        align: rows each group must be a multiple of; RoutingPlan pads to it.
        fuses_activation: True where the engine also has `gathers`, `up`, `gathers_in_backward`, `rows_gathered`,
            `weights_gathered`, `differentiates`, `down_backward` and `up_backward` (gbmoe/engines/hopper.py).
    """

    name: str
    needs_host_sizes: bool = False
    align: int = 1
    fuses_activation: bool = False

    def unavailable(self, device: torch.device) -> str | None:
        """None where this engine runs on `device`, else why not. Loads the extension if that is what it needs."""
        return None

    def refuses(self, problem: Problem) -> str | None:
        """None where this engine takes operands of that dtype and those shapes, else why not."""
        return None

    def gmm(self, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool, trans_b: bool,
            out: torch.Tensor | None = None, accumulate: bool = False) -> torch.Tensor:
        """Compute the product of contiguous a and b of one dtype on one device.

        Args:
            sizes: rows of each group, integer [E], on the host or on the device of a.
            out: contiguous result to write to; allocated where absent.
            accumulate: add to `out` instead of overwriting it (out must be given).
        """
        raise TypeError(f"{type(self).__name__} does not say how it computes a grouped product")


def host_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """sizes as contiguous int64 on the CPU; waits for the device where they are there."""
    return sizes.to("cpu", torch.int64).contiguous()


def device_sizes(sizes: torch.Tensor, device: torch.device) -> torch.Tensor:
    """sizes contiguous on `device`, without a wait; whoever rewrites them afterwards does not change the result."""
    if sizes.device.type == "cpu":
        # A copy from pinned memory reads it later than this returns. A clone is not pinned, and is staged before.
        sizes = sizes.clone()
    return sizes.to(device, non_blocking=True).contiguous()
