"""How fast it could be at best: floating-point operations over the rate of a large dense product, or bytes over the
rate of a large copy, whichever takes longer; both rates measured in the same run.

With R = T * K slots, c = 2 for a GLU and 1 for a plain MLP, b bytes an element, and E' experts that any slot goes to, a
layer's forward has 2RHF(c+1) operations and moves at the least

    weights         b * E'HF(c+1)          first product   b * R(H + cF + F)
    gather          b * H(T + R)           second product  b * R(F + H)
    combine         b * H(R + T)

Backward is twice both: two products for each one of forward, and the same rows there and back. A grouped product moves
its operands and its result; bytes of the permutation's steps are in permutation.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gbmoe.cases import MoeCase

# How much forward, backward and both are, in forward's operations and bytes.
PASSES = {"forward": 1, "backward": 2, "forward+backward": 3}


@dataclass(frozen=True)
class Limits:
    """Rates of a large dense product and a large copy (read + written), per second; None where it could not be
    measured."""
    flops: float | None = None
    bytes: float | None = None

    def describe(self) -> dict:
        return asdict(self)

    def seconds(self, flops: int | None, moved: int | None) -> tuple[float, str] | None:
        """The least time and what it is bound by, "compute" or "memory"; None where nothing is known."""
        times = []
        if flops and self.flops:
            times.append((flops / self.flops, "compute"))
        if moved and self.bytes:
            times.append((moved / self.bytes, "memory"))
        return max(times, default=None)


def layer_bytes(case: MoeCase, experts_hit: int, itemsize: int) -> int:
    """The fewest bytes of a layer's forward, with weights of `experts_hit` experts."""
    firsts = 2 if case.mlp_type == "glu" else 1
    weights = experts_hit * case.hidden * case.ffn * (firsts + 1)
    permutation = 2 * case.hidden * (case.tokens + case.slots)
    products = case.slots * (2 * case.hidden + (firsts + 2) * case.ffn)
    return itemsize * (weights + permutation + products)
