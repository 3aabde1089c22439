"""Problem: a grouped GEMM without its data, which is what the choice of an engine and of a configuration depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def known(condition: bool) -> bool:
    """`condition`, or False where a compiled graph cannot know it because it depends on a size that only the data determine."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    return guard_or_false(condition)


def result_shape(a: torch.Tensor, b: torch.Tensor, groups: int, trans_a: bool, trans_b: bool) -> tuple[int, ...]:
    """Shape of the product of a and b."""
    if trans_a:
        return groups, a.size(1), b.size(1)
    return a.size(0), b.size(1) if trans_b else b.size(2)


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether torch may round operands of this dtype to TF32 in a matrix product: float32's, if the user allows it."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


# As gbmoe.engines.choice._unavailable: called, not traced, by torch.compile, which keeps the answer in the graph.
allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Problem:
    """A grouped GEMM without its data: enough to choose an engine before there are operands.

    Attributes:
        rows: the rows of all groups.
        k_grouped: the groups divide the inner dimension (trans_a), not the rows of the result; see gbmoe.engines.base.
        sizes_on_host: the sizes are on the host, so that an engine that needs them there does not have to wait.
        tf32: operands in float32 may be rounded to TF32.
    """

    device: torch.device
    dtype: torch.dtype
    rows: int
    groups: int
    inner: int
    columns: int
    k_grouped: bool
    sizes_on_host: bool = False
    tf32: bool = False

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool, trans_b: bool) -> Problem:
        """The problem of these operands."""
        columns = result_shape(a, b, sizes.numel(), trans_a, trans_b)[-1]
        return cls(a.device, a.dtype, a.size(0), sizes.numel(), a.size(1), columns, trans_a, sizes.device.type == "cpu",
                   allows_tf32(a.dtype))
