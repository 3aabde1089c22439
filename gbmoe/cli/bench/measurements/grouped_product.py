"""Single grouped GEMMs, compared with float64 on some rows, or a submatrix, of every group.

Shape suffixes: E experts, H hidden, F ffn hidden, M rows of all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.gbmoe_itself import grouped_product
from gbmoe.cli.bench.measurements.layer import RIVAL_TOLERANCE
from gbmoe.cli.bench.measurements.measurement import SEED, Measurement, Refusal, Subject, random_values, require_finite, sample
from gbmoe.cli.bench.rivals.rival import Prepared
from gbmoe.testing import accuracy, oracle
from gbmoe.testing.exact_inputs import generator
from gbmoe.testing.moe_shapes import MoeCase

# The most rows (in addition to each group's first and last) and the most columns that are compared with the oracle.
_SAMPLED_ROWS, _SAMPLED_COLUMNS = 512, 64
# In skewed products the group of rank r has a share of rows proportional to 1 / r to this power.
_SKEW = 0.5


class ProductMeasurement(Measurement):
    """One grouped GEMM: "forward" a[M,H] @ b[E][H,F], or the "weight-gradient" a[M,H].T @ b[M,F] of each group.

    Groups are "equal" or "skewed". The implementation "dense" is one product of all rows.
    """

    kind = "product"

    def flops(self) -> int:
        return 2 * sum(self.sizes()) * self.case.hidden * self.case.ffn

    def sizes(self) -> list[int]:
        """Rows of each group."""
        return [self.case.slots] if self.implementation == "dense" else group_sizes(self.case, self.routing)

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return _Product(self, device, dtype)


def group_sizes(case: MoeCase, routing: str) -> list[int]:
    """Rows of each expert, which sum to the case's slots. Skewed sizes are in a fixed random order."""
    skew = _SKEW if routing == "skewed" else 0.0
    share_E = torch.arange(1, case.experts + 1, dtype=torch.float64, device="cpu").pow(-skew)
    ends_E = (share_E.cumsum(0) / share_E.sum() * case.slots).round().long()
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    return sizes_E[torch.randperm(case.experts, generator=generator("cpu", SEED), dtype=torch.int64, device="cpu")].tolist()


class _Product(Subject):
    def __init__(self, measurement: ProductMeasurement, device: torch.device, dtype: torch.dtype):
        case, self.sizes = measurement.case, measurement.sizes()
        self.trans_a = measurement.computation == "weight-gradient"
        rows = sum(self.sizes)
        draw = partial(random_values, dtype=dtype, device=device)
        self.a = draw(rows, case.hidden, seed=SEED + 1)
        if self.trans_a:
            self.b = draw(rows, case.ffn, seed=SEED + 2)
        else:
            self.b = draw(len(self.sizes), case.hidden, case.ffn, seed=SEED + 2, std=case.hidden**-0.5)
        self.tolerance = Subject.tolerance if measurement.implementation == "gbmoe" else RIVAL_TOLERANCE
        self.prepared = self._prepare(measurement)

    def _prepare(self, measurement) -> Prepared:
        if measurement.implementation == "gbmoe":
            return grouped_product(measurement.engine, self.a, self.b, self.sizes, self.trans_a)
        if measurement.implementation == "dense":
            operands = (self.a.t(), self.b) if self.trans_a else (self.a, self.b[0])
            return Prepared(partial(torch.matmul, *operands))
        rival = rivals.load(measurement.implementation)
        reason = rival.refuses(measurement.case, self.a.dtype)
        if reason is not None:
            raise Refusal(reason)
        return rival.product(self.a, self.b, self.sizes, self.trans_a)

    def steps(self):
        return [self.prepared.call]

    def outputs(self) -> torch.Tensor:
        return self.prepared.read(self.prepared.call())

    def check(self, outputs: torch.Tensor) -> accuracy.Verdict:
        require_finite({"out": outputs})
        yardstick = oracle.product(self.a, self.b, self.sizes, self.trans_a)
        sampled, exact = self._columns() if self.trans_a else self._rows()
        return accuracy.judge({"out": sampled(outputs)}, {"out": exact}, {"out": sampled(yardstick)},
                              factor=self.tolerance)

    def bytes_moved(self) -> int:
        columns = self.b.size(-1)
        out = len(self.sizes) * self.a.size(1) * columns if self.trans_a else len(self.a) * columns
        return self.a.nbytes + self.b.nbytes + out * self.a.dtype.itemsize

    def _columns(self) -> tuple[Callable, torch.Tensor]:
        """A submatrix of every group's gradient: the function that takes it from the result, and its exact value."""
        first, second = (sample(matrix.size(1), _SAMPLED_COLUMNS, matrix.device) for matrix in (self.a, self.b))
        exact = oracle.product(self.a[:, first].double(), self.b[:, second].double(), self.sizes, trans_a=True)
        return lambda out: out.view(len(self.sizes), self.a.size(1), -1)[:, first][:, :, second], exact

    def _rows(self) -> tuple[Callable, torch.Tensor]:
        """Some rows of the result, with the first and the last row of every group: the function that takes them, and the exact ones."""
        count, sizes_E = len(self.a), torch.tensor(self.sizes, dtype=torch.int64, device=self.a.device)
        ends = sizes_E.cumsum(0)
        borders = torch.cat([ends - sizes_E, ends - 1]).clamp(0, count - 1)
        rows = torch.cat([sample(count, _SAMPLED_ROWS, ends.device), borders]).unique()
        sizes = torch.bucketize(rows, ends, right=True).bincount(minlength=len(self.sizes)).tolist()
        return lambda out: out[rows], oracle.product(self.a[rows].double(), self.b, sizes)
