"""Layers, products, limits and timing: what a row's numbers are, and that samples find what is wrong."""

import time

import pytest
import torch

from gbmoe import cases
from gbmoe.cli.bench import layer, limits, timing
from gbmoe.cli.bench.layer import LayerMeasurement, layer_inputs
from gbmoe.cli.bench.measure import Conditions, measure
from gbmoe.cli.bench.product import ProductMeasurement, group_sizes
from gbmoe.engines.reference import Reference

CPU = torch.device("cpu")
QUICK = timing.Effort(0, 2, 2)
FP32 = Conditions(CPU, torch.float32, QUICK)


def test_flops_are_those_of_the_products():
    case = cases.MoeCase("case", tokens=10, hidden=3, ffn=5, experts=4, top_k=2, mlp_type="glu")
    forward = LayerMeasurement(case, "bmm", None, "uniform", "forward")
    assert forward.flops() == 2 * 10 * 2 * 3 * 5 * 3
    assert LayerMeasurement(case, "bmm", None, "uniform", "forward+backward").flops() == 3 * forward.flops()
    assert LayerMeasurement(case, "bmm", None, "uniform", "forward, CUDA graph").flops() == forward.flops()
    assert ProductMeasurement(case, "bmm", None, "equal", "forward").flops() == 2 * 10 * 2 * 3 * 5


def test_limits_are_those_of_the_formulas():
    case = cases.MoeCase("case", tokens=10, hidden=3, ffn=5, experts=4, top_k=2, mlp_type="glu")
    weights, gather, combine = 4 * 3 * 5 * 3, 3 * (10 + 20), 3 * (20 + 10)
    products = 20 * (3 + 2 * 5 + 5) + 20 * (5 + 3)
    assert limits.layer_bytes(case, 4, 2) == 2 * (weights + gather + products + combine)
    assert limits.layer_bytes(case, 1, 2) == 2 * (weights // 4 + gather + products + combine)
    known = limits.Limits(flops=1000, bytes=10)
    assert known.seconds(5000, 40) == (5, "compute") and known.seconds(5000, 60) == (6, "memory")
    assert known.seconds(None, 60) == (6, "memory") and limits.Limits().seconds(5000, 60) is None


def test_samples_find_one_missing_row_in_a_large_product(monkeypatch):
    case = cases.MoeCase("case", tokens=4096, hidden=128, ffn=128, experts=4, top_k=1)
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
    for case in cases.GEMM_CASES:
        equal, skewed = group_sizes(case, "equal"), group_sizes(case, "skewed")
        assert sum(equal) == sum(skewed) == case.slots
        assert set(equal) == {case.slots // case.experts} and max(skewed) > 2 * min(skewed)
    assert tuple(group_sizes(cases.NYU_SPLIT_CASE, "uneven")) == cases.NYU_UNEVEN_SPLIT
    assert len(group_sizes(cases.scaled_down(cases.NYU_SPLIT_CASE), "uneven")) == 8


def test_a_skewed_router_prefers_some_experts():
    case = cases.MoeCase("case", tokens=512, hidden=32, ffn=16, experts=16, top_k=2)
    uniform, skewed = (measure(LayerMeasurement(case, "gbmoe", "auto", routing, "forward"), FP32)["imbalance"]
                       for routing in ("uniform", "skewed"))
    assert uniform < 1.5 < 2 < skewed


def test_the_oracle_is_computed_once_for_all_that_choose_alike(monkeypatch):
    computed, right = [], layer.LayerInputs._compute
    monkeypatch.setattr(layer.LayerInputs, "_compute", lambda *args: computed.append(args[-1]) or right(*args))
    layer_inputs.cache_clear()
    for engine in ("auto", "reference"):
        measurement = LayerMeasurement(cases.SMOKE_CASES[0], "gbmoe", engine, "uniform", "forward")
        measure(measurement, Conditions(CPU, torch.bfloat16, QUICK))
    assert computed == [torch.float64, torch.bfloat16]


def test_the_routers_choice_must_be_among_the_best():
    case = cases.SMOKE_CASES[0]
    inputs = layer_inputs(case, "uniform", CPU, torch.float32)
    best_TK = (inputs.x_TH @ inputs.weights.router_EH.t()).topk(case.top_k).indices
    assert inputs.worst_choice(best_TK).passed and inputs.worst_choice(best_TK.flip(1)).passed
    other_TK = best_TK.clone()
    other_TK[0] = (inputs.x_TH[0] @ inputs.weights.router_EH.t()).argsort()[: case.top_k]
    assert not inputs.worst_choice(other_TK).passed
    assert not inputs.worst_choice(best_TK[:, :1].expand(-1, case.top_k)).passed  # twice the same


def test_steps_are_timed_together_and_each():
    calls = []
    steps = [lambda: (calls.append("first"), time.sleep(0.001)), lambda: (calls.append("second"), time.sleep(0.003))]
    together, each = timing.time_steps(steps, CPU, lambda: calls.append("reset"), effort=timing.Effort(0, 4, 4))
    assert together.repetitions == 4 and 0 < together.low <= together.median <= together.high
    assert calls == ["reset", "first", "second"] * (len(calls) // 3)
    assert each[0].median < each[1].median < together.median


@pytest.mark.gpu
def test_a_slow_host_can_be_kept_out_of_the_time():
    tensor = torch.zeros(1024, device="cuda")

    def call():
        time.sleep(5e-4)
        tensor.add_(1)

    shown, hidden = (timing.time_steps([call], tensor.device, hide_host=hide)[0].median for hide in (False, True))
    assert hidden < 1e-4 < shown


@pytest.mark.gpu
def test_a_graph_follows_the_tokens_and_not_the_capture():
    device = torch.device("cuda", torch.cuda.current_device())
    case = cases.MoeCase("few", 8, 256, 256, 16, 2, "glu")
    row, of_host = (measure(LayerMeasurement(case, "gbmoe", engine, "uniform", "forward, CUDA graph"),
                            Conditions(device, torch.bfloat16, QUICK)) for engine in ("torch", "cublas_loop"))
    assert row["verified"] or row["outcome"] == "left out", row["problem"]
    assert of_host["outcome"] == "left out" and "on the host" in of_host["problem"]


@pytest.mark.gpu
def test_a_memory_limit_counts_from_what_was_there():
    """It holds for the layer, its tensors and a call; neither what was there before nor verifying needs to stay below
    it."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    case = cases.MoeCase("case", 65536, 1024, 2048, 8, 2)  # more than earlier tests have left in the allocator's pools
    for gib, outcome in ((0.01, "out of memory"), (8.0, "verified")):
        limited = LayerMeasurement(case, "gbmoe", "auto", "uniform", "forward+backward", memory_limit=gib)
        row = measure(limited, Conditions(device, torch.bfloat16, QUICK))
        assert row["outcome"] == outcome, row["problem"]
    assert torch.empty(2**31, dtype=torch.uint8, device=device).numel()  # the limit is gone
    del held
