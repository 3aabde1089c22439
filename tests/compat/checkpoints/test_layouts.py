"""State dicts from one layout to the other: bit for bit, or refused by name."""

import tracemalloc

import pytest
import torch

from gbmoe.compat.checkpoints import to_megablocks, to_transformers
from tests.compat.checkpoints.examples import EXPERTS, FFN, GLU, HIDDEN, MLP, SHARED, assert_same, bits, block, model
from tests.conftest import FLOATS, dtype_id


@pytest.mark.parametrize("shapes", [GLU, MLP, GLU | SHARED], ids=["glu", "mlp", "shared"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=dtype_id)
def test_there_and_back_is_bit_exact(shapes, dtype):
    original = model(shapes=shapes, dtype=dtype)
    converted = to_megablocks(original)
    names = {name.rpartition("mlp.")[2] for name in converted if ".experts." in name}
    assert names == {"w1", "w2"} | ({"v1"} if shapes is not MLP else set())
    assert_same(to_transformers(converted), original)
    separate = to_transformers(converted, "gate_proj")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in separate
    assert_same(to_megablocks(separate), converted)
    if shapes is not MLP:
        assert_same(to_megablocks(to_transformers(converted, "w1")), converted)
    assert all(converted[name] is original[name] for name in original if name in converted)
    assert all(value.is_contiguous() for value in (converted | separate).values())


def test_every_matrix_is_where_the_layouts_say():
    original = block()
    up_ENH, down_EHF = original["experts.gate_up_proj"], original["experts.down_proj"]
    converted = to_megablocks(original)
    separate, mixtral = to_transformers(converted, "gate_proj"), to_transformers(converted, "w1")
    for e in range(EXPERTS):
        rows = slice(e * FFN, (e + 1) * FFN)
        matrices = {"gate_proj w1 w1": up_ENH[e, :FFN], "up_proj w3 v1": up_ENH[e, FFN:],
                    "down_proj w2 w2": down_EHF[e]}
        for names, matrix in matrices.items():
            separate_name, mixtral_name, ours = names.split()
            assert torch.equal(bits(separate[f"experts.{e}.{separate_name}.weight"]), bits(matrix))
            assert torch.equal(bits(mixtral[f"experts.{e}.{mixtral_name}.weight"]), bits(matrix))
            matrix = matrix.t() if ours == "w2" else matrix
            assert torch.equal(bits(converted[f"experts.mlp.{ours}"][rows]), bits(matrix))
    assert converted["router.layer.weight"] is original["gate.weight"]


def test_jambas_router_has_another_name():
    common = model()
    original = {name.replace("gate.weight", "router.weight"): value for name, value in common.items()}
    converted = to_megablocks(original)
    assert_same(converted, to_megablocks(common))
    assert_same(to_transformers(converted, model_type="jamba"), original)
    with pytest.raises(ValueError, match="m.router.weight: unexpected"):
        to_megablocks(block(prefix="m.") | {"m.router.weight": torch.zeros(EXPERTS, HIDDEN)})
    with pytest.raises(ValueError, match="got 'transformers', 'fused', 'wg'"):
        to_transformers(converted, model_type="wg")


# What is put into a block, or taken out, and what the message has to say about it.
MISFITS = {
    "no router": ({"gate.weight": None}, ["m.gate.weight: missing"]),
    "no down": ({"experts.down_proj": None}, ["m.experts.down_proj: missing"]),
    "a bias for the choice, of another size": ({"gate.e_score_correction_bias": [5]},
                                               ["m.gate.e_score_correction_bias: expected shape [4], got [5]"]),
    "biases": ({"experts.gate_up_proj_bias": [4, 80], "experts.down_proj_bias": [4, 24]},
               ["m.experts.gate_up_proj_bias: unexpected", "m.experts.down_proj_bias: unexpected"]),
    "scales": ({"experts.down_proj_scale_inv": [4]}, ["m.experts.down_proj_scale_inv: unexpected"]),
    "shared gate": ({"shared_expert_gate.weight": [2, 24]}, ["m.shared_expert_gate.weight: expected shape [1, 24], got [2, 24]"]),
    "part of a shared expert": ({"shared_experts.up_proj.weight": [16, 24]}, [
        "m.shared_experts.gate_proj.weight: missing", "m.shared_experts.down_proj.weight: missing"]),
    "both layouts": ({"experts.mlp.w2": [160, 24]}, ["m.experts.mlp.w2: unexpected"]),
    "transposed": ({"experts.gate_up_proj": [4, 24, 80]},
                   ["m.experts.gate_up_proj: expected shape [4, 80, 24], got [4, 24, 80]"]),
    "one expert less": ({"experts.down_proj": [3, 24, 40]},
                        ["m.experts.down_proj: expected shape [4, 24, 40], got [3, 24, 40]"]),
    "a flat router": ({"gate.weight": [4]}, ["m.gate.weight: expected shape [0, 0], got [4]"]),
}


@pytest.mark.parametrize("change, messages", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused_by_name(change, messages):
    tensors = block() | {name: shape and torch.zeros(shape) for name, shape in change.items()}
    tensors = {f"m.{name}": value for name, value in tensors.items() if value is not None} | block(prefix="fits.")
    with pytest.raises(ValueError, match="convert to megablocks: these tensors do not fit") as refused:
        to_megablocks(tensors)
    assert all(message in str(refused.value) for message in messages), refused.value
    assert "fits." not in str(refused.value)


# The same of MegaBlocks' layout, and of that with a tensor for each expert.
OTHER_MISFITS = {
    "output bias": ("m.experts.bias", [HIDDEN], "m.experts.bias: unexpected"),
    "rows": ("m.experts.mlp.v1", [159, HIDDEN], "m.experts.mlp.v1: expected shape [160, 24], got [159, 24]"),
    "no multiple": ("m.router.layer.weight", [3, HIDDEN], "m.experts.mlp.w1: expected shape [159, 24], got [160, 24]"),
    "no router": ("m.router.layer.weight", None, "m.router.layer.weight: missing"),
    "a gap": ("m.experts.2.up_proj.weight", None, "m.experts.2.up_proj.weight: missing"),
    "one too many": ("m.experts.4.up_proj.weight", [FFN, HIDDEN], "m.experts.4.up_proj.weight: unexpected"),
    "another width": ("m.experts.3.up_proj.weight", [FFN - 1, HIDDEN],
                      "m.experts.3.up_proj.weight: expected shape [40, 24], got [39, 24]"),
}


@pytest.mark.parametrize("name, shape, message", OTHER_MISFITS.values(), ids=OTHER_MISFITS)
def test_other_layouts_are_refused_by_name_too(name, shape, message):
    tensors, convert = to_megablocks(block(prefix="m.")), to_transformers
    if name.endswith("up_proj.weight"):
        tensors, convert = to_transformers(tensors, "gate_proj"), to_megablocks
    tensors[name] = shape and torch.zeros(shape)
    with pytest.raises(ValueError) as refused:
        convert({name: value for name, value in tensors.items() if value is not None})
    assert message in str(refused.value)


@pytest.mark.parametrize("convert", [to_megablocks, to_transformers])
def test_mixed_dtypes_are_refused_by_name(convert):
    tensors = block() if convert is to_megablocks else to_megablocks(block())
    name = next(name for name in tensors if name in ("experts.down_proj", "experts.mlp.v1"))
    tensors[name] = tensors[name].bfloat16()
    with pytest.raises(ValueError, match=f"{name}: expected torch.float32, .*, got torch.bfloat16"):
        convert(tensors)


def test_no_layer_and_unknown_layouts_are_refused():
    with pytest.raises(ValueError, match="no MoE layer"):
        to_megablocks({"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="got 'transformers', 'w4'"):
        to_transformers(to_megablocks(block()), "w4")
    with pytest.raises(ValueError, match="expected 'fused' or 'gate_proj' for experts without a gate, got 'w1'"):
        to_transformers(to_megablocks(block(MLP)), "w1")
    with pytest.raises(ValueError, match="and 2 more"):
        to_megablocks(block() | {f"extra.{i}": torch.zeros(1) for i in range(12)})


MANY = 200_000
DECLARED = {
    "one each": (to_megablocks, {"gate.weight": [MANY, 0], "experts.0.up_proj.weight": [3, 0],
                                 "experts.0.down_proj.weight": [0, 3]},
                 "gate.weight: expected sizes above 0, got shape \\[200000, 0\\]"),
    "one each, of a byte": (to_megablocks, {"gate.weight": [MANY, 1], "experts.0.up_proj.weight": [3, 1],
                                            "experts.0.down_proj.weight": [1, 3]},
                            "gate.weight: expected shape \\[1, 1\\], got \\[200000, 1\\]"),
    "MegaBlocks": (lambda tensors: to_transformers(tensors, "gate_proj"), {
        "router.layer.weight": [MANY, 0], "experts.mlp.w1": [3 * MANY, 0], "experts.mlp.w2": [3 * MANY, 0]},
                   "router.layer.weight: expected sizes above 0"),
    "MegaBlocks, shapes that differ": (lambda tensors: to_transformers(tensors, "gate_proj"), {
        "router.layer.weight": [MANY, 1], "experts.mlp.w1": [1, 1], "experts.mlp.w2": [1, 1]}, "expected shape \\[0, 1\\]"),
}


@pytest.mark.parametrize("convert, shapes, message", DECLARED.values(), ids=DECLARED)
def test_nothing_is_listed_for_experts_that_a_router_only_declares(convert, shapes, message):
    tensors = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in shapes.items()}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            convert(tensors)
        assert tracemalloc.get_traced_memory()[1] < MANY
    finally:
        tracemalloc.stop()


def test_a_file_for_more_tensors_than_a_header_holds_is_refused():
    tensors = dict.fromkeys(("experts.mlp.w1", "experts.mlp.w2", "router.layer.weight"), torch.zeros(1, 1).expand(10**6, 1))
    with pytest.raises(ValueError, match="expected 'fused' for 1000000 experts, got 'gate_proj'"):
        to_transformers(tensors, "gate_proj")
