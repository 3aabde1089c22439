"""The least time that a computation can take: its floating-point operations over the rate of a large dense product, or its bytes over
the rate of a large copy, whichever is longer. Both rates are measured in the same run.

With R = T * K slots, c = 2 for a GLU and 1 for a plain MLP, b bytes an element, and E' experts that at least one slot goes to, a
layer's forward has 2RHF(c+1) operations and moves, if its rows are gathered before the first product,

    weights         b * E'HF(c+1)          first product   b * R(H + cF + F)
    gather          b * H(T + R)           second product  b * R(F + H)
    combine         b * H(R + T)

Backward has twice the operations and bytes: two products for each one of forward, with rows moved for both. A grouped GEMM moves
its operands and its result. benchmarks/measurements/plan_and_permutation.py has the bytes of the permutation's steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gbmoe.testing.moe_shapes import MoeCase

# The operations and bytes of each pass, as multiples of forward's.
PASSES = {"forward": 1, "backward": 2, "forward+backward": 3}


@dataclass(frozen=True)
class Limits:
    """The rates a second of a large dense product, and of a large copy (bytes read and written); None where a rate could not be
    measured."""
    flops: float | None = None
    bytes: float | None = None

    def describe(self) -> dict:
        return asdict(self)

    def seconds(self, flops: int | None, moved: int | None) -> tuple[float, str] | None:
        """The least time, and whether "compute" or "memory" bounds it; None where neither rate is known."""
        times = []
        if flops and self.flops:
            times.append((flops / self.flops, "compute"))
        if moved and self.bytes:
            times.append((moved / self.bytes, "memory"))
        return max(times, default=None)


def layer_bytes(case: MoeCase, experts_hit: int, itemsize: int) -> int:
    """The fewest bytes that a layer's forward can move, with the weights of `experts_hit` experts."""
    firsts = 2 if case.mlp_type == "glu" else 1
    weights = experts_hit * case.hidden * case.ffn * (firsts + 1)
    permutation = 2 * case.hidden * (case.tokens + case.slots)
    products = case.slots * (2 * case.hidden + (firsts + 2) * case.ffn)
    return itemsize * (weights + permutation + products)
