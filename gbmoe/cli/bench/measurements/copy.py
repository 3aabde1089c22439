"""A large copy, whose bytes read and written in a second are the limit of all that moves bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from gbmoe.cli.bench.measurements.measurement import Measurement, Subject
from gbmoe.testing import accuracy


class CopyMeasurement(Measurement):
    """A copy of tokens [T,H]."""

    kind = "permutation"

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return Copy(self, device, dtype)


class Copy(Subject):
    hide_host = True

    def __init__(self, measurement: CopyMeasurement, device: torch.device, dtype: torch.dtype):
        case = measurement.case
        self.source = torch.arange(case.tokens * case.hidden * dtype.itemsize // 8, dtype=torch.int64, device=device)
        self.target = torch.empty_like(self.source)

    def steps(self) -> Sequence[Callable[[], object]]:
        return [partial(self.target.copy_, self.source)]

    def outputs(self) -> torch.Tensor:
        """A copy into memory that held something else."""
        return self.target.fill_(-99).copy_(self.source)

    def check(self, outputs: torch.Tensor) -> accuracy.Verdict:
        return accuracy.Verdict("out", float(not torch.equal(outputs, self.source)), 0.0)

    def bytes_moved(self) -> int:
        return 2 * self.source.nbytes
