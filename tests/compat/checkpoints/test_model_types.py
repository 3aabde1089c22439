"""model_types.py against the installed transformers: what its blocks compute, its defaults, and what from_pretrained loads."""

import functools

import pytest
import torch

import gbmoe
from gbmoe.compat.checkpoints import EXPERT_LAYOUTS, convert_checkpoint, read_arguments, to_megablocks, to_transformers
from gbmoe.compat.checkpoints.arguments import _ACTIVATIONS
from gbmoe.compat.checkpoints.model_types import ACTIVATIONS, MODEL_TYPES, REFUSED
from gbmoe.testing import accuracy
from tests.compat.checkpoints.examples import EXPERTS, FFN, HIDDEN, assert_same

transformers = pytest.importorskip("transformers", minversion="5.24", reason="model_types.py describes transformers 5.24")
safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

COMMON = {"vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "num_experts_per_tok": 2, "experts_implementation": "eager"}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LOCAL, GLOBAL = {"num_local_experts": EXPERTS, "intermediate_size": FFN}, {"num_experts": EXPERTS, "intermediate_size": FFN}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1}  # the defaults are outside of this vocabulary
# For each model type a small model: fields of its configuration.
TINY = {
    "cohere2_moe": GLOBAL | TOKENS | {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum"},
    "deepseek_v2": MLA | {"moe_intermediate_size": FFN, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1},
    "flex_olmo": GLOBAL | TOKENS,
    "jamba": GLOBAL | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mellum": {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "head_dim": 8},
    "minimax": LOCAL | {"head_dim": 8},
    "mistral4": MLA | {"moe_intermediate_size": FFN, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "pad_token_id": 0,
                       "max_position_embeddings": 64},
    "mixtral": LOCAL,
    "olmoe": GLOBAL | TOKENS,
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "head_dim": 8, "mlp_only_layers": [0]},
}
# The same with other values of the fields that change what the layer computes.
VARIANTS = {
    "cohere2_moe without a shared expert": GLOBAL | TOKENS | {"num_shared_experts": 0},
    "deepseek_v2 of three experts a token": TINY["deepseek_v2"] | {"num_experts_per_tok": 3, "n_shared_experts": 1},
    "flex_olmo normalised": TINY["flex_olmo"] | {"norm_topk_prob": True},
    "jamba with gelu": TINY["jamba"] | {"hidden_act": "gelu"},
    "mellum not normalised": TINY["mellum"] | {"norm_topk_prob": False},
    "mistral4 not normalised": TINY["mistral4"] | {"norm_topk_prob": False},
    "mixtral with the gelu of gbmoe": TINY["mixtral"] | {"hidden_act": "gelu_pytorch_tanh"},
    "olmoe normalised": TINY["olmoe"] | {"norm_topk_prob": True, "hidden_act": "relu"},
    "qwen3_moe normalised": TINY["qwen3_moe"] | {"norm_topk_prob": True},
}


def model_class(model_type):
    if model_type == "mistral4":  # AutoModelForCausalLM does not list it
        return transformers.Mistral4ForCausalLM
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model_type]]


def tiny(name):
    options = COMMON | (TINY | VARIANTS)[name]
    config = transformers.AutoConfig.for_model(name.partition(" ")[0], **options)
    torch.manual_seed(1)
    model = model_class(config.model_type)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def moe_block(model):
    name = next(name for name, _ in model.named_modules() if name.endswith(".experts"))
    return model.get_submodule(name.removesuffix(".experts"))


def first_layer(path):
    tensors = safetensors.load_file(path / "model.safetensors")
    prefix = min(name for name in tensors if name.endswith("experts.mlp.w1")).removesuffix("experts.mlp.w1")
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", [*TINY, *VARIANTS])
def test_a_dmoe_with_the_written_arguments_computes_the_block(name, tmp_path):
    """Output and gradients in float32, from the files that save_pretrained wrote."""
    model = tiny(name)
    block = moe_block(model)
    model.save_pretrained(tmp_path / "saved")
    lines = []
    convert_checkpoint(tmp_path / "saved", tmp_path / "megablocks", "megablocks", report=lines.append)
    arguments = read_arguments(tmp_path / "megablocks", device="cpu")
    layer = gbmoe.dMoE(arguments)
    layer.load_state_dict(first_layer(tmp_path / "megablocks"))
    printed = lines[-1].removeprefix("each MoE layer is gbmoe.dMoE(").removesuffix(")")
    evaluated = eval(printed, {"gbmoe": gbmoe, "torch": torch, "functools": functools})
    assert str(evaluated) == str(read_arguments(tmp_path / "megablocks"))
    assert not any(line.startswith("warning") for line in lines)

    x = torch.randn(2, 7, HIDDEN)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = layer(ours), block(theirs.clone())
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    assert accuracy.relative_error(out, expected) < 1e-5
    assert accuracy.relative_error(ours.grad, theirs.grad) < 1e-5
    gradients = to_megablocks({name: parameter.grad for name, parameter in block.named_parameters()})
    for parameter_name, parameter in layer.named_parameters():
        assert accuracy.relative_error(parameter.grad, gradients[parameter_name]) < 1e-5, parameter_name


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_from_pretrained_loads_every_layout_that_is_written(model_type, max_shard_size, tmp_path):
    """No key is missing or made anew, every weight has the bits of the original, and what was saved comes back file by file."""
    original = tiny(model_type)
    original.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    convert_checkpoint(tmp_path / "saved", tmp_path / "megablocks", "megablocks")
    for experts in MODEL_TYPES[model_type].loads:
        convert_checkpoint(tmp_path / "megablocks", tmp_path / experts, "transformers", experts=experts)
        assert not (tmp_path / experts / "gbmoe_arguments.json").exists()
        loaded, info = model_class(model_type).from_pretrained(tmp_path / experts, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(dict(loaded.state_dict()), dict(original.state_dict()))
    files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    if max_shard_size == "1GB":
        assert (tmp_path / experts / files[0]).read_bytes() == (tmp_path / "saved" / files[0]).read_bytes()


@pytest.mark.parametrize("model_type, experts", [(name, experts) for name, kind in MODEL_TYPES.items()
                                                 for experts in EXPERT_LAYOUTS if experts not in kind.loads])
def test_a_layout_that_from_pretrained_does_not_load_is_refused(model_type, experts, tmp_path):
    original = tiny(model_type)
    original.save_pretrained(tmp_path / "saved")
    convert_checkpoint(tmp_path / "saved", tmp_path / "megablocks", "megablocks")
    with pytest.raises(ValueError, match=f"experts: expected 'fused'.*, got '{experts}': under these names .* {model_type}"):
        convert_checkpoint(tmp_path / "megablocks", tmp_path / "refused", "transformers", experts=experts)
    assert not (tmp_path / "refused").exists()
    # That is so: the same tensors, written without asking, are not found.
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "config.json").write_text((tmp_path / "saved" / "config.json").read_text())
    tensors = safetensors.load_file(tmp_path / "megablocks" / "model.safetensors")
    tensors = to_transformers(tensors, experts, MODEL_TYPES[model_type].router)
    safetensors.save_file(tensors, tmp_path / "random" / "model.safetensors", metadata={"format": "pt"})
    _, info = model_class(model_type).from_pretrained(tmp_path / "random", output_loading_info=True)
    assert any("experts" in name for name in info["missing_keys"]), info


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_fields_and_defaults_are_those_of_transformers(model_type):
    kind, config = MODEL_TYPES[model_type], transformers.CONFIG_MAPPING[model_type]()
    for name, default in kind.defaults.items():
        assert getattr(config, name) == default, name
    assert kind.defaults.keys() >= {"hidden_size", kind.ffn, kind.experts[0], "num_experts_per_tok", "hidden_act"}
    for condition in kind.conditions:
        assert getattr(config, condition.field, condition.default) == condition.default, condition.field
    for name in kind.experts:  # synonyms, which a config.json may have instead
        assert getattr(transformers.CONFIG_MAPPING[model_type](**{name: 5}), kind.experts[0]) == 5


def test_activations_are_those_of_transformers():
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for theirs, ours in ACTIVATIONS.items():
        torch.testing.assert_close(_ACTIVATIONS[ours][0](x), ACT2FN[theirs](x))


def test_refused_model_types_are_transformers_own_names():
    assert not REFUSED.keys() & MODEL_TYPES.keys()
    assert not REFUSED.keys() - transformers.CONFIG_MAPPING.keys()
    assert all(REFUSED.values())
