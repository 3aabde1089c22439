"""Layouts of Megatron-Core, torchtitan and OLMo-core: what lies where, and there and back."""

import pytest
import torch

from gbmoe.compat.checkpoints import to_framework, to_megablocks, to_transformers
from gbmoe.compat.checkpoints.layouts import FRAMEWORKS
from tests.compat.checkpoints.examples import EXPERTS, FFN, GLU, HIDDEN, MLP, SHARED, assert_same, bits, block, model

BIAS, GATE = {"gate.e_score_correction_bias": [EXPERTS]}, {"shared_expert_gate.weight": [1, HIDDEN]}


# Where expert e of a layer lies: (tensor, rows) for w1, v1 and the transposed w2, written out as the frameworks index them.
PLACES = {
    "megatron_grouped": lambda layer, e: (
        *layer[f"experts.linear_fc1.weight{e}"].split(FFN), layer[f"experts.linear_fc2.weight{e}"].t()),
    "megatron_sequential": lambda layer, e: (
        *layer[f"experts.local_experts.{e}.linear_fc1.weight"].split(FFN), layer[f"experts.local_experts.{e}.linear_fc2.weight"].t()),
    "torchtitan": lambda layer, e: (layer["experts.w1"][e], layer["experts.w3"][e], layer["experts.w2"][e].t()),
    "torchtitan_0.3": lambda layer, e: (
        *(layer[f"routed_experts.inner_experts.{name}"][e] for name in ("w1_EFD", "w3_EFD")),
        layer["routed_experts.inner_experts.w2_EDF"][e].t()),
    "olmo_core": lambda layer, e: tuple(
        layer[f"experts.mlp.{name}"].view(EXPERTS, FFN, HIDDEN)[e] for name in ("w1", "w3", "w2")),
}
ROUTERS = {  # the router's weight, the bias for the choice, and the shared expert's gate, up and down
    "megatron_grouped": ("router.weight", "router.expert_bias", "shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"),
    "torchtitan": ("router.gate.weight", "expert_bias", *(f"shared_experts.{name}.weight" for name in ("w1", "w3", "w2"))),
    "torchtitan_0.3": ("router.gate.weight", "expert_bias_E", *(f"shared_experts.{name}.weight" for name in ("w1", "w3", "w2"))),
    "olmo_core": ("router.weight", "router.score_bias", *(f"shared_mlp.{name}.weight" for name in ("w1", "w3", "w2"))),
}
ROUTERS["megatron_sequential"] = ROUTERS["megatron_grouped"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_tensor_is_where_the_framework_looks_for_it(framework):
    ours = to_megablocks(block(GLU | SHARED | BIAS))
    layer = to_framework(ours, framework)
    for e in range(EXPERTS):
        rows = slice(e * FFN, (e + 1) * FFN)
        for name, matrix in zip(("w1", "v1", "w2"), PLACES[framework](layer, e), strict=True):
            assert torch.equal(bits(matrix), bits(ours[f"experts.mlp.{name}"][rows])), (e, name)
    router, bias, *shared = ROUTERS[framework]
    assert torch.equal(bits(layer[router].view(EXPERTS, HIDDEN)), bits(ours["router.layer.weight"]))
    assert torch.equal(bits(layer[bias]), bits(ours["router.expert_bias"]))
    *inward, down = (layer[name] for name in shared)
    assert torch.equal(bits(torch.cat(inward)), bits(torch.cat([ours[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up")])))
    assert torch.equal(bits(down), bits(ours["shared_expert.down_proj.weight"]))
    assert all(value.is_contiguous() for value in layer.values())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_there_and_back_is_bit_exact(framework, dtype):
    """From a whole model of transformers, in each layout of its experts, and from one framework's layout to another's."""
    original = model(shapes=GLU | SHARED | BIAS, dtype=dtype)
    there = to_framework(original, framework)
    assert_same(to_megablocks(there), to_megablocks(original))
    assert_same(to_transformers(there), original)
    for experts in ("gate_proj", "w1"):
        assert_same(to_framework(to_transformers(original, experts), framework), there)
    with pytest.raises(ValueError, match=f"convert to {framework}: expected layers in another layout, got layers in this one"):
        to_framework(there, framework)
    for other in FRAMEWORKS.keys() - {framework}:
        assert_same(to_framework(to_framework(there, other), framework), there)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_experts_without_a_gate_are_megatrons_alone(framework):
    ours = to_megablocks(block(MLP))
    if not framework.startswith("megatron"):
        with pytest.raises(ValueError, match=f"convert to {framework}: expected experts with a gate"):
            to_framework(ours, framework)
        return
    layer = to_framework(ours, framework)
    assert {tuple(value.shape) for name, value in layer.items() if "linear_fc1" in name} == {(FFN, HIDDEN)}
    assert_same(to_megablocks(layer), ours)


def test_what_a_framework_has_no_name_for_is_refused():
    ours = to_megablocks(block(GLU | {name.replace("experts", "expert"): shape for name, shape in SHARED.items()} | GATE, prefix="m."))
    assert_same(to_megablocks(to_framework(ours, "megatron_grouped")), ours)
    assert "m.shared_experts.gate_weight" in to_framework(ours, "megatron_sequential")
    with pytest.raises(ValueError, match="m.shared_expert.expert_gate.weight: the layout to write has no name for it"):
        to_framework(ours, "torchtitan")
    with pytest.raises(ValueError, match="got 'megatron', 'fused'"):
        to_framework(ours, "megatron")


def test_extra_states_of_transformer_engine_are_left_out():
    layer = to_framework(block(prefix="m."), "megatron_grouped")
    extra = {"m.experts.linear_fc1._extra_state": None, "norm._extra_state": torch.zeros(1)}
    assert_same(to_megablocks(layer | extra), to_megablocks(layer))


def test_a_layer_of_one_rank_is_refused_by_its_shapes():
    layer = to_framework(block(), "megatron_grouped")
    with pytest.raises(ValueError, match="experts.linear_fc1.weight3: missing"):
        to_megablocks({name: value for name, value in layer.items() if not name.endswith("3")})
    flat = to_framework(block(), "olmo_core")
    with pytest.raises(ValueError, match=r"experts.mlp.w1: expected shape \[80, 24\], got \[160, 24\]"):
        to_megablocks(flat | {"router.weight": flat["router.weight"][: 2 * HIDDEN], "experts.mlp.w2": flat["experts.mlp.w2"][:80]})
