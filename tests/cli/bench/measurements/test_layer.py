"""Layers: what a row's numbers are, and that samples find what is wrong."""

import itertools
from dataclasses import replace

import pytest
import torch

from gbmoe import engines
from gbmoe.cli.bench.measurements import layer
from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement
from gbmoe.cli.bench.measurements.layer import LayerMeasurement, layer_inputs
from gbmoe.cli.bench.running import burst_timer
from gbmoe.cli.bench.running.verify_and_time import Conditions, measure
from gbmoe.testing import moe_shapes

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = burst_timer.Effort(0, 2, 2)
FP32 = Conditions(CPU, torch.float32, QUICK)


def test_flops_are_those_of_the_products():
    case = moe_shapes.MoeCase("case", tokens=10, hidden=3, ffn=5, experts=4, top_k=2, mlp_type="glu")
    forward = LayerMeasurement(case, "bmm", None, "uniform", "forward")
    assert forward.flops() == 2 * 10 * 2 * 3 * 5 * 3
    assert LayerMeasurement(case, "bmm", None, "uniform", "forward+backward").flops() == 3 * forward.flops()
    assert LayerMeasurement(case, "bmm", None, "uniform", "forward, CUDA graph").flops() == forward.flops()
    assert ProductMeasurement(case, "bmm", None, "equal", "forward").flops() == 2 * 10 * 2 * 3 * 5


@pytest.mark.parametrize("case, dtype", [*zip(moe_shapes.NEWER_CASES, itertools.cycle([torch.float32, torch.bfloat16]))],
                         ids=lambda value: getattr(value, "name", str(value)))
def test_layers_of_newer_models_are_right(case, dtype):
    """Up to 896 experts and top 16; most experts have no token here."""
    row = measure(LayerMeasurement(moe_shapes.scaled_down(case), "gbmoe", "auto", "skewed", "forward+backward"),
                  Conditions(CPU, dtype, QUICK))
    assert row["verified"], row["problem"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", moe_shapes.NEWER_CASES, ids=lambda case: case.name)
def test_on_a_gpu_layers_of_newer_models_are_right(case):
    """Their widths, of which 640, 2,304 and 2,880 are no multiples of 256, and top-k, with experts that fit next to other processes."""
    device, few = torch.device("cuda", torch.cuda.current_device()), replace(case, tokens=1024, experts=2 * case.top_k)
    for engine in (name for name, reason in engines.availability(device).items() if reason is None):
        row = measure(LayerMeasurement(few, "gbmoe", engine, "skewed", "forward+backward"), Conditions(device, torch.bfloat16, QUICK))
        assert row["verified"], (engine, row["problem"])


def test_newer_models_are_in_the_suite_after_the_layers_that_results_name():
    names = [case.name for case in moe_shapes.LAYER_CASES]
    assert names[:7] == ["mixtral", "olmoe", "qwen3", "fine", "wide", "megablocks", "nyu-512"]
    assert len(set(names)) == len(names) == 15 and moe_shapes.LAYER_CASES[7:] == moe_shapes.NEWER_CASES


def test_a_skewed_router_prefers_some_experts():
    case = moe_shapes.MoeCase("case", tokens=512, hidden=32, ffn=16, experts=16, top_k=2)
    uniform, skewed = (measure(LayerMeasurement(case, "gbmoe", "auto", routing, "forward"), FP32)["imbalance"]
                       for routing in ("uniform", "skewed"))
    assert uniform < 1.5 < 2 < skewed


def test_the_oracle_is_computed_once_for_all_that_choose_alike(monkeypatch):
    computed, right = [], layer.LayerInputs._compute
    monkeypatch.setattr(layer.LayerInputs, "_compute", lambda *args: computed.append(args[-1]) or right(*args))
    layer_inputs.cache_clear()
    for engine in ("auto", "reference"):
        measurement = LayerMeasurement(moe_shapes.SMOKE_CASES[0], "gbmoe", engine, "uniform", "forward")
        measure(measurement, Conditions(CPU, torch.bfloat16, QUICK))
    assert computed == [torch.float64, torch.bfloat16]


def test_the_routers_choice_must_be_among_the_best():
    case = moe_shapes.SMOKE_CASES[0]
    inputs = layer_inputs(case, "uniform", CPU, torch.float32)
    best_TK = (inputs.x_TH @ inputs.weights.router_EH.t()).topk(case.top_k).indices
    assert inputs.worst_choice(best_TK).passed and inputs.worst_choice(best_TK.flip(1)).passed
    other_TK = best_TK.clone()
    other_TK[0] = (inputs.x_TH[0] @ inputs.weights.router_EH.t()).argsort()[: case.top_k]
    assert not inputs.worst_choice(other_TK).passed
    assert not inputs.worst_choice(best_TK[:, :1].expand(-1, case.top_k)).passed  # twice the same


@pytest.mark.gpu
def test_a_graph_follows_the_tokens_and_not_the_capture():
    device = torch.device("cuda", torch.cuda.current_device())
    case = moe_shapes.MoeCase("few", 8, 256, 256, 16, 2, "glu")
    row, of_host = (measure(LayerMeasurement(case, "gbmoe", engine, "uniform", "forward, CUDA graph"),
                            Conditions(device, torch.bfloat16, QUICK)) for engine in ("torch", "cublas_loop"))
    assert row["verified"] or row["outcome"] == "left out", row["problem"]
    assert of_host["outcome"] == "left out" and "on the host" in of_host["problem"]
