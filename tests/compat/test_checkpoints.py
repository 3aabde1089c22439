"""Conversions between MegaBlocks' layout and transformers': bit for bit, the same function, whole files or none."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gbmoe
from gbmoe.compat import checkpoints
from gbmoe.compat.checkpoints import convert_checkpoint, to_megablocks, to_transformers
from gbmoe.testing import accuracy, exact_inputs
from tests.conftest import FLOATS, dtype_id

EXPERTS, HIDDEN, FFN = 4, 24, 40
GLU = {"gate.weight": [EXPERTS, HIDDEN], "experts.gate_up_proj": [EXPERTS, 2 * FFN, HIDDEN],
       "experts.down_proj": [EXPERTS, HIDDEN, FFN]}
MLP = {"gate.weight": [EXPERTS, HIDDEN], "experts.up_proj": [EXPERTS, FFN, HIDDEN],
       "experts.down_proj": [EXPERTS, HIDDEN, FFN]}
SHARED = {f"shared_experts.{name}_proj.weight": shape for name, shape in
          {"gate": [16, HIDDEN], "up": [16, HIDDEN], "down": [HIDDEN, 16]}.items()}


def block(shapes=GLU, dtype=torch.float32, prefix=""):
    """A state dict in which every element has a bit pattern of its own, NaNs and infinities among them."""
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
        values = torch.randint(low, high, shape, dtype=integers, generator=exact_inputs.generator("cpu", seed))
        tensors[prefix + name] = values.view(dtype)
    return tensors


def model(layers=2, **options):
    """Layers of different contents under the names of a model, the other tensors between them."""
    tensors = {"model.embed_tokens.weight": torch.randn(9, HIDDEN),
               "model.layers.0.mlp.up_proj.weight": torch.randn(5, HIDDEN)}
    for layer in range(1, layers + 1):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = torch.randn(HIDDEN)
        tensors |= {name: value.roll(layer) for name, value in block(prefix=f"{prefix}mlp.", **options).items()}
        tensors[f"{prefix}self_attn.count"] = torch.tensor(layer)
    return tensors


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(bits(found[name]), bits(value)), name


# ---------------------------------------------------------------------------------------------------------- state dicts


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


# What is put into a block, or taken out, and what the message has to say about it.
MISFITS = {
    "no router": ({"gate.weight": None}, ["m.gate.weight: missing"]),
    "no down": ({"experts.down_proj": None}, ["m.experts.down_proj: missing"]),
    "router bias": ({"gate.e_score_correction_bias": [4]}, ["m.gate.e_score_correction_bias: unexpected"]),
    "biases": ({"experts.gate_up_proj_bias": [4, 80], "experts.down_proj_bias": [4, 24]},
               ["m.experts.gate_up_proj_bias: unexpected", "m.experts.down_proj_bias: unexpected"]),
    "scales": ({"experts.down_proj_scale_inv": [4]}, ["m.experts.down_proj_scale_inv: unexpected"]),
    "shared gate": ({"shared_expert_gate.weight": [1, 24]}, ["m.shared_expert_gate.weight: unexpected"]),
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


# ---------------------------------------------------------------------------------------------------- the same function


def layer_arguments(config, **options):
    return gbmoe.Arguments(hidden_size=config.hidden_size, ffn_hidden_size=FFN, moe_num_experts=EXPERTS,
                           moe_top_k=config.num_experts_per_tok, mlp_type="glu", activation_fn=F.silu, bias=False,
                           fp16=False, device="cpu", **options)


def assert_computes_the_same(moe_block, arguments):
    torch.manual_seed(0)
    for parameter in moe_block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    layer = gbmoe.dMoE(arguments).double()
    layer.load_state_dict(to_megablocks(moe_block.double().state_dict()), strict=True)
    x = torch.randn(2, 7, arguments.hidden_size, dtype=torch.float64)
    assert accuracy.relative_error(layer(x), moe_block(x)) < 1e-6  # transformers' routers compute in float32
    assert_same(to_transformers(layer.state_dict()), dict(moe_block.state_dict()))


def tiny(transformers, model_type, **options):
    common = {"vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    config = transformers.AutoConfig.for_model(model_type, **common, **options)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", minversion="5.8", reason="needs transformers 5.8 or newer")


def test_a_mixtral_block_is_a_dmoe(transformers):
    mixtral = tiny(transformers, "mixtral", intermediate_size=FFN, num_local_experts=EXPERTS)
    arguments = layer_arguments(mixtral.config, moe_normalize_expert_weights=1)
    assert_computes_the_same(mixtral.model.layers[0].mlp, arguments)


def test_an_olmoe_block_is_a_dmoe(transformers):
    olmoe = tiny(transformers, "olmoe", intermediate_size=FFN, num_experts=EXPERTS)
    assert_computes_the_same(olmoe.model.layers[0].mlp, layer_arguments(olmoe.config))


def test_a_deepseek_v2_block_is_a_dmoe_with_a_shared_expert(transformers):
    deepseek = tiny(transformers, "deepseek_v2", intermediate_size=FFN, moe_intermediate_size=FFN,
                    n_routed_experts=EXPERTS, n_shared_experts=2, first_k_dense_replace=0, topk_method="greedy",
                    routed_scaling_factor=1.0, n_group=1, topk_group=1, norm_topk_prob=False)
    arguments = layer_arguments(deepseek.config, shared_expert=True, shared_expert_hidden_size=2 * FFN)
    assert_computes_the_same(deepseek.model.layers[0].mlp, arguments)


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def save_file():
    return pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file


def load(path):
    from safetensors.torch import load_file

    index = path / "model.safetensors.index.json"
    if not path.is_dir():
        return load_file(path)
    if not index.exists():
        return load_file(path / "model.safetensors")
    loaded = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        loaded[name] = load_file(path / file)[name]
    return loaded


def save_sharded(save_file, tensors, folder, shards=3):
    """A directory as transformers writes it, but cut without regard to layers, and with files beside the weights."""
    folder.mkdir()
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(sorted(tensors.items()))[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt", "shard": str(shard)})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "mixtral"}\n')
    (folder / "pytorch_model.bin").write_bytes(b"the old layout")
    (folder / "original").mkdir()
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_file_there_and_back_is_the_same_file(save_file, tmp_path, dtype):
    """Byte for byte, header and metadata included, with tensors of other widths, scalars and empty ones."""
    tensors = model(dtype=dtype) | {"empty": torch.zeros(0, 3), "flags": torch.tensor([True, False, True])}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "megablocks")
    assert_same(load(tmp_path / "b"), to_megablocks(tensors))
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "transformers")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()
    for experts in ("gate_proj", "w1"):
        convert_checkpoint(tmp_path / "b", tmp_path / experts, "transformers", experts=experts)
        assert_same(load(tmp_path / experts), to_transformers(to_megablocks(tensors), experts))
        convert_checkpoint(tmp_path / experts, tmp_path / f"{experts}-b", "megablocks")
        assert (tmp_path / f"{experts}-b").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_sharded_checkpoint_keeps_its_files_and_metadata(save_file, tmp_path):
    from safetensors import safe_open

    tensors = model(layers=3)
    separate = to_transformers(to_megablocks(tensors), "w1")
    source, lines = save_sharded(save_file, separate, tmp_path / "source"), []
    convert_checkpoint(source, tmp_path / "megablocks", "megablocks", report=lines.append)
    assert_same(load(tmp_path / "megablocks"), to_megablocks(tensors))
    convert_checkpoint(tmp_path / "megablocks", tmp_path / "back", "transformers", experts="w1")
    assert_same(load(tmp_path / "back"), separate)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for folder in (tmp_path / "megablocks", tmp_path / "back"):
        assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert sorted(os.listdir(folder)) == ["config.json", *shards, "model.safetensors.index.json"]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(t.nbytes for t in separate.values())}
        for number, shard in enumerate(shards):
            with safe_open(folder / shard, framework="pt") as file:
                assert file.metadata() == {"format": "pt", "shard": str(number)}
                assert set(file.keys()) == {name for name, path in index["weight_map"].items() if path == shard}
    assert lines == [*(f"wrote {shard}" for shard in shards), "left out original", "left out pytorch_model.bin"]


@pytest.mark.parametrize("model_type, options, separate", [
    ("mixtral", {"intermediate_size": FFN, "num_local_experts": EXPERTS}, "w1"),
    ("qwen3_moe", {"moe_intermediate_size": 16, "num_experts": EXPERTS, "head_dim": 8}, "gate_proj"),
    ("olmoe", {"intermediate_size": FFN, "num_experts": EXPERTS}, "gate_proj"),
])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_from_pretrained_loads_what_was_converted(
        transformers, tmp_path, model_type, options, separate, max_shard_size):
    """Files that save_pretrained wrote are converted to MegaBlocks' layout, and back to both forms that transformers loads."""
    original = tiny(transformers, model_type, **options)
    original.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    convert_checkpoint(tmp_path / "saved", tmp_path / "megablocks", "megablocks")
    assert any(name.endswith("experts.mlp.w1") for name in load(tmp_path / "megablocks"))
    for experts in ("fused", separate):
        convert_checkpoint(tmp_path / "megablocks", tmp_path / experts, "transformers", experts=experts)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / experts, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(dict(loaded.state_dict()), dict(original.state_dict()))
    assert_same(load(tmp_path / separate), load(tmp_path / "saved"))


# ------------------------------------------------------------------------------------ nothing half-written, no surprise


def fail(error, monkeypatch, after):
    """The error in the place of the write number `after`."""
    write, calls = checkpoints._write_bytes, []

    def failing(file, tensor):
        calls.append(tensor)
        if len(calls) > after:
            file.write(b"half")
            raise error
        write(file, tensor)

    monkeypatch.setattr(checkpoints, "_write_bytes", failing)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
@pytest.mark.parametrize("after", [0, 5, 19])
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_an_error_or_interrupt_leaves_nothing_behind(save_file, tmp_path, monkeypatch, error, after, sharded):
    if sharded:
        source = save_sharded(save_file, model(layers=3), tmp_path / "source")
    else:
        source = tmp_path / "source"
        save_file(model(layers=3), source)
    fail(error, monkeypatch, after)
    with pytest.raises(type(error)):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_two_conversions_of_one_process_id_leave_each_other_alone(save_file, tmp_path, monkeypatch, sharded):
    """Containers that share a folder count their processes each from 1."""
    source, target, write = tmp_path / "source", tmp_path / "target", checkpoints._write_bytes
    save_sharded(save_file, model(), source) if sharded else save_file(model(), source)

    def overtaken(file, tensor):
        monkeypatch.setattr(checkpoints, "_write_bytes", write)
        convert_checkpoint(source, target, "megablocks")
        write(file, tensor)

    monkeypatch.setattr(checkpoints, "_write_bytes", overtaken)
    with pytest.raises(FileExistsError, match="target: exists already"):
        convert_checkpoint(source, target, "megablocks")
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]
    convert_checkpoint(target, tmp_path / "back", "transformers")


def test_the_target_has_its_name_only_when_it_is_complete(save_file, tmp_path, monkeypatch):
    source, copy = save_sharded(save_file, model(), tmp_path / "source"), checkpoints._copy_others

    def watched(*arguments):
        copy(*arguments)
        assert not (tmp_path / "target").exists()

    monkeypatch.setattr(checkpoints, "_copy_others", watched)
    convert_checkpoint(source, tmp_path / "target", "megablocks")
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_what_cannot_be_converted_is_refused_before_anything_is_written(save_file, tmp_path):
    source = tmp_path / "source"
    save_file(model() | {"model.layers.1.mlp.experts.gate_up_proj_bias": torch.zeros(4, 80)}, source)
    with pytest.raises(ValueError, match="model.layers.1.mlp.experts.gate_up_proj_bias: unexpected"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    with pytest.raises(FileExistsError, match="source: exists already"):
        convert_checkpoint(source, source, "megablocks")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "target", "megablocks")
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        convert_checkpoint(source, tmp_path / "nowhere" / "target", "megablocks")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "target", "megablocks")
    cut = tmp_path / "cut"
    cut.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut: expected a whole safetensors file"):
        convert_checkpoint(cut, tmp_path / "target", "megablocks")
    assert sorted(os.listdir(tmp_path)) == ["cut", "empty", "source"]


def test_an_index_that_differs_from_its_files_is_refused(save_file, tmp_path):
    source = save_sharded(save_file, model(), tmp_path / "source")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="differs from its files in model.embed_tokens.weight, model.norm.weight"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    first, second = (source / f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: in another file as well: "):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")


def test_a_package_that_safetensors_lacks_is_not_said_to_be_safetensors(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"")
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("import a_package_that_safetensors_needs\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="^No module named 'a_package_that_safetensors_needs'$"):
        convert_checkpoint(tmp_path / "source", tmp_path / "target", "megablocks")


def test_without_safetensors_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="needs safetensors: pip install"):
        convert_checkpoint(tmp_path / "source", tmp_path / "target", "megablocks")


MEMORY_PROBE = """
import sys
import safetensors
from gbmoe.compat import checkpoints

def own():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watched(file, tensor):
    write(file, tensor)
    peaks.append(own())

write, peaks, checkpoints._write_bytes = checkpoints._write_bytes, [], watched
before = own()
checkpoints.convert_checkpoint("source", "there", "megablocks")
checkpoints.convert_checkpoint("there", "back", "transformers")
print(max(peaks) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_number_of_layers(save_file, tmp_path):
    """60 MiB in 16 layers: the memory that is the process' own, and not the mapped source, grows by a few tensors."""
    shapes = {"gate.weight": [4, 128], "experts.gate_up_proj": [4, 1280, 128], "experts.down_proj": [4, 128, 640]}
    tensors = {f"layers.{layer}.mlp.{name}": torch.zeros(shape)
               for layer in range(16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "source")
    root = Path(__file__).parents[2]
    grown = subprocess.run([sys.executable, "-c", MEMORY_PROBE], cwd=tmp_path, capture_output=True, text=True, check=True,
                           env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])})
    assert float(grown.stdout) < 20
