"""Grouped GEMMs: the sizes of the groups, and that samples find what is wrong."""

import torch

from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement, group_sizes
from gbmoe.cli.bench.running import burst_timer
from gbmoe.cli.bench.running.verify_and_time import Conditions, measure
from gbmoe.engines.reference import Reference
from gbmoe.testing import moe_shapes

CPU = torch.device("cpu")
QUICK = burst_timer.Effort(0, 2, 2)
FP32 = Conditions(CPU, torch.float32, QUICK)


def test_samples_find_one_missing_row_in_a_large_product(monkeypatch):
    case = moe_shapes.MoeCase("case", tokens=4096, hidden=128, ffn=128, experts=4, top_k=1)
    right = Reference.gmm

    def last_row_forgotten(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        result = right(self, a, b, sizes, trans_a, trans_b, out, accumulate)
        if not trans_a:
            result[int(sizes[0]) - 1] = 0
        return result

    for computation in ("forward", "weight-gradient"):
        assert measure(ProductMeasurement(case, "gbmoe", "reference", "skewed", computation), FP32)["verified"]
    monkeypatch.setattr(Reference, "gmm", last_row_forgotten)
    assert not measure(ProductMeasurement(case, "gbmoe", "reference", "skewed", "forward"), FP32)["verified"]


def test_group_sizes_sum_to_the_slots():
    for case in moe_shapes.GEMM_CASES:
        equal, skewed = group_sizes(case, "equal"), group_sizes(case, "skewed")
        assert sum(equal) == sum(skewed) == case.slots
        assert set(equal) == {case.slots // case.experts} and max(skewed) > 2 * min(skewed)
