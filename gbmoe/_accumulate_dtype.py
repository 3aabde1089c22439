"""The dtype that everything is summed in."""

from __future__ import annotations

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float32, but float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
