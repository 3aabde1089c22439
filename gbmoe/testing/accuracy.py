"""The rule of accuracy that the tests, `gbmoe verify` and `gbmoe bench` share.

The yardstick is the obvious PyTorch in the same dtype as the result. The result's error against the float64 oracle may be `factor`
times the yardstick's. Where the yardstick has almost no error, a few units in the last place are allowed instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# The units in the last place by which a float64 result may differ from the oracle, which has the same precision.
_FLOAT64_ULPS = 8


def allowed_error(yardstick_error: float, dtype: torch.dtype, *, factor: float = 2.0, scale: float = 1.0) -> float:
    """The largest error that a result of `dtype` may have if the yardstick's error, in that dtype, is `yardstick_error`.

    It is `factor` times the yardstick's. Where the yardstick is exact, one unit in the last place is allowed. In float32 at least that
    much is always allowed, because for sums of a few terms smaller errors are a matter of luck. In float64 at least _FLOAT64_ULPS units
    are allowed, because the oracle is no more precise than the result.

    Args:
        yardstick_error: against float64. It is infinite or NaN where the yardstick overflowed, and then so is the allowed error.
        dtype: the floating dtype of the result and the yardstick.
        factor: at least 1.
        scale: the size of the numbers whose errors these are, 1 for relative errors: a unit in the last place is `scale` times the
            dtype's epsilon.
    """
    allowed = factor * yardstick_error
    if allowed and dtype not in (torch.float32, torch.float64):
        return allowed
    return max(allowed, (_FLOAT64_ULPS if dtype == torch.float64 else 1) * torch.finfo(dtype).eps * scale)


@dataclass(frozen=True)
class Verdict:
    """The output whose error is the largest in relation to its limit."""
    output: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        # The limit is not finite where the yardstick overflowed: then nothing was measured.
        return self.error <= self.limit < math.inf

    def __str__(self) -> str:
        return f"{self.output}: relative error {self.error:.2e}, limit {self.limit:.2e}"


def judge(results: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], yardstick: Mapping[str, torch.Tensor],
          copies: Sequence[str] = (), factor: float = 2.0) -> Verdict:
    """Compare every output with the oracle's. The limit is allowed_error of the yardstick's error; outputs named in `copies` must agree
    bit for bit.
    """
    verdicts = []
    for name, result in results.items():
        limit = allowed_error(error(yardstick[name], exact[name]), result.dtype, factor=factor)
        verdicts.append(Verdict(name, error(result, exact[name]), 0.0 if name in copies else limit))
    return max(verdicts, key=lambda v: (not v.passed, v.error / v.limit if v.limit else math.inf if v.error else 0.0))


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error of an output. For a stack of matrices it is that of the worst matrix, because over all of them one wrong row
    would not show."""
    if result.dim() == 3 and result.shape == exact.shape:
        return max(map(relative_error, result, exact), default=0.0)
    return relative_error(result, exact)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """||result - reference|| / ||reference||, in float64; infinite where either holds NaN or the shapes differ."""
    if result.shape != reference.shape:
        return float("inf")
    difference = (result.detach().double() - reference.detach().double()).norm()
    error = float(difference / reference.detach().double().norm()) if float(difference) else 0.0
    return error if error == error else float("inf")
