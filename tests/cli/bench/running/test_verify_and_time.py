"""A row's memory limit."""

import pytest
import torch

from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.running import burst_timer
from gbmoe.cli.bench.running.verify_and_time import Conditions, measure
from gbmoe.testing import moe_shapes

QUICK = burst_timer.Effort(0, 2, 2)


@pytest.mark.gpu
def test_a_memory_limit_counts_from_what_was_there():
    """It holds for the layer, its tensors and a call; neither what was there before nor verifying needs to stay below
    it."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    case = moe_shapes.MoeCase("case", 65536, 1024, 2048, 8, 2)  # more than earlier tests have left in the allocator's pools
    for gib, outcome in ((0.01, "out of memory"), (8.0, "verified")):
        limited = LayerMeasurement(case, "gbmoe", "auto", "uniform", "forward+backward", memory_limit=gib)
        row = measure(limited, Conditions(device, torch.bfloat16, QUICK))
        assert row["outcome"] == outcome, row["problem"]
    assert torch.empty(2**31, dtype=torch.uint8, device=device).numel()  # the limit is gone
    del held
