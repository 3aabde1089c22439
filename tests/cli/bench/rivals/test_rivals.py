"""Every adapter gives its rival the right weights and reads the right gradients back; the others say why they cannot be
used."""

import importlib
import sys
import types

import pytest
import torch

from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement
from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.running.burst_timer import QUICK
from gbmoe.cli.bench.running.rival_process import Worker
from gbmoe.cli.bench.running.verify_and_time import Conditions, measure
from gbmoe.testing.moe_shapes import MoeCase

CPU = torch.device("cpu")
GLU, MLP = MoeCase("glu", 48, 32, 40, 8, 3, "glu"), MoeCase("mlp", 48, 32, 40, 8, 3)
ON_CPU = ["bmm", "loop", "torch-grouped", "transformers-eager", "transformers-batched_mm", "transformers-grouped_mm",
          "transformers-gbmoe"]


def row_of(measurement, dtype=torch.float32):
    return measure(measurement, Conditions(CPU, dtype, QUICK))


@pytest.mark.pairs
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_have_gbmoes_weights_and_gradients(name, routing, dtype):
    rival = rivals.load(name)
    reason = rival.unavailable(CPU)
    if reason is not None:
        pytest.skip(reason)
    for case in (GLU, MLP):
        for computation in ("forward", "forward+backward"):
            row = row_of(LayerMeasurement(case, name, None, routing, computation), dtype)
            refused = rival.refuses(case, dtype)
            assert (row["outcome"], row["problem"]) == (("left out", refused) if refused else ("verified", None))


@pytest.mark.parametrize("name", ["bmm", "loop"])
@pytest.mark.parametrize("computation", ["forward", "weight-gradient"])
def test_products(name, computation):
    assert row_of(ProductMeasurement(MLP, name, None, "skewed", computation))["verified"]


@pytest.mark.parametrize("name", rivals.RIVALS)
def test_every_rival_can_be_loaded_and_says_what_it_needs(name):
    rival = rivals.load(name)
    assert set(rival.kinds) <= {"layer", "parallel", "product", "permutation"}
    if name not in ON_CPU:
        assert rival.unavailable(CPU) == "runs on CUDA devices only, not on cpu"


def test_a_wrong_gradient_is_found(monkeypatch):
    """The gradient is that of an adapter that exchanges the two halves of a GLU."""
    from gbmoe.cli.bench.gbmoe_itself import DroplessLayer

    right = DroplessLayer.weight_gradients
    monkeypatch.setattr(DroplessLayer, "weight_gradients",
                        lambda self: (g := right(self)) | {"w1": g["v1"], "v1": g["w1"]})
    row = row_of(LayerMeasurement(GLU, "bmm", None, "uniform", "forward+backward"))
    assert row["outcome"] == "wrong" and "grad " in row["problem"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", rivals.RIVALS)
def test_on_a_gpu_what_is_available_is_right(name):
    device = torch.device("cuda", torch.cuda.current_device())
    own_process = Worker(name, Conditions(device, torch.bfloat16, QUICK), timeout=300)
    try:
        reason, _ = own_process.unavailable()
        if reason is not None or "layer" not in rivals.load(name).kinds:
            pytest.skip(reason or "has no layer")
        case = MoeCase("case", 512, 256, 256, 8, 2, "glu")
        row = own_process.measure(LayerMeasurement(case, name, None, "uniform", "forward+backward"))
        assert row["verified"] or (row["outcome"] == "crashed" and name == "megablocks-sparse"), row["problem"]
    finally:
        own_process.stop()


def test_megablocks_says_that_a_stand_in_took_its_extensions_place(monkeypatch):
    """Once register() had put the stand-in where the extension is looked for, it was taken for MegaBlocks' own."""
    rival = rivals.load("megablocks-grouped")
    monkeypatch.setitem(sys.modules, "megablocks_ops", importlib.import_module("gbmoe.compat.megablocks.megablocks_ops"))
    assert "stand-in" in rival.about()
    monkeypatch.setitem(sys.modules, "megablocks_ops", types.ModuleType("megablocks_ops"))  # no __spec__
    assert "stand-in" not in rival.about()
