"""models.py against the installed transformers: what its blocks compute, its defaults, and what from_pretrained loads."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

import gbmoe
from gbmoe.compat.checkpoints import EXPERT_LAYOUTS, convert_checkpoint, read_arguments, to_megablocks, to_transformers
from gbmoe.compat.checkpoints.arguments_of_config import _ACTIVATIONS
from gbmoe.compat.checkpoints.layouts import EXPERT_BIAS
from gbmoe.compat.checkpoints.model_types import ACTIVATIONS, Field
from gbmoe.compat.checkpoints.models import MODEL_TYPES
from gbmoe.compat.checkpoints.refused import REFUSED
from gbmoe.testing import accuracy
from tests.compat.checkpoints.examples import EXPERTS, FFN, HIDDEN, assert_same

transformers = pytest.importorskip("transformers", minversion="5.24", reason="models.py describes transformers 5.24")
safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

COMMON = {"vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "num_experts_per_tok": 2, "experts_implementation": "eager"}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LOCAL, GLOBAL = {"num_local_experts": EXPERTS, "intermediate_size": FFN}, {"num_experts": EXPERTS, "intermediate_size": FFN}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1}  # the defaults are outside of this vocabulary
EACH = {"moe_intermediate_size": FFN}
GROUPS = {"n_group": 2, "topk_group": 1}
SHARED_GATE = EACH | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}
DEEPSEEK_V3 = MLA | EACH | GROUPS | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1,
                                     "max_position_embeddings": 64}
UNGROUPED = EACH | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1,
                    "topk_group": 1, "routed_scaling_factor": 2.5, "max_position_embeddings": 64}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
# For each model type a small model: fields of its configuration. Where layers may be dense, the first one is.
TINY = {
    "cohere2_moe": GLOBAL | TOKENS | {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum"},
    "deepseek_v2": MLA | EACH | {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3 | INDEXER,
    "dots1": UNGROUPED,
    "ernie4_5_moe": EACH | {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    "exaone_moe": EACH | TOKENS | {"num_experts": EXPERTS, "num_shared_experts": 1, "head_dim": 8, "first_k_dense_replace": 1},
    "flex_olmo": GLOBAL | TOKENS,
    "glm4_moe": UNGROUPED,
    "glm4_moe_lite": DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1},
    "glm_moe_dsa": DEEPSEEK_V3 | INDEXER | {"n_group": 1, "topk_group": 1},
    "gpt_oss": LOCAL | {"head_dim": 8, "swiglu_limit": 0.5},
    "granitemoe": LOCAL,
    "granitemoehybrid": LOCAL | {"layer_types": ["attention", "attention"], "shared_intermediate_size": 16, "mamba_n_heads": 6},
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 16},
    "hunyuan_v1_moe": GLOBAL | TOKENS | {"moe_topk": [2, 2], "head_dim": 8},
    "jamba": GLOBAL | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "llama4_text": LOCAL | TOKENS | {"head_dim": 8, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "mellum": EACH | {"num_experts": EXPERTS, "head_dim": 8},
    "mimo_v2_flash": UNGROUPED | {"v_head_dim": 8, "swa_head_dim": 8, "swa_v_head_dim": 8},
    "minimax": LOCAL | {"head_dim": 8},
    "minimax_m2": LOCAL | TOKENS | {"head_dim": 8, "bos_token_id": 2},
    "mistral4": MLA | EACH | {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "pad_token_id": 0, "max_position_embeddings": 64},
    "mixtral": LOCAL,
    "olmoe": GLOBAL | TOKENS,
    "qwen2_moe": SHARED_GATE,
    "qwen3_moe": EACH | {"num_experts": EXPERTS, "head_dim": 8, "mlp_only_layers": [0]},
    "qwen3_5_moe_text": SHARED_GATE | {"head_dim": 8, "layer_types": ["full_attention", "full_attention"]},
    "qwen3_next": SHARED_GATE | {"head_dim": 8, "layer_types": ["full_attention", "full_attention"]},
    "solar_open": UNGROUPED,
}
TINY["kimi_k2"] = TINY["deepseek_v3"] | {"n_group": 1, "routed_scaling_factor": 2.827}
# The same with other values of the fields that change what the layer computes.
VARIANTS = {
    "cohere2_moe without a shared expert": GLOBAL | TOKENS | {"num_shared_experts": 0},
    "cohere2_moe with sigmoid scores": TINY["cohere2_moe"] | {"expert_selection_fn": "sigmoid"},
    "cohere2_moe with sigmoid scores, not normalised": TINY["cohere2_moe"] | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    "deepseek_v2 of three experts a token": TINY["deepseek_v2"] | {"num_experts_per_tok": 3, "n_shared_experts": 1},
    "deepseek_v2 of groups": TINY["deepseek_v2"] | GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "deepseek_v3 not normalised": TINY["deepseek_v3"] | {"norm_topk_prob": False},
    "ernie4_5_moe without a shared expert": TINY["ernie4_5_moe"] | {"moe_num_shared_experts": 0},
    "flex_olmo normalised": TINY["flex_olmo"] | {"norm_topk_prob": True},
    "gpt_oss with other constants": TINY["gpt_oss"] | {"swiglu_alpha": 1.0, "swiglu_limit": 7.0},
    "llama4_text of two experts a token": TINY["llama4_text"] | {"num_experts_per_tok": 2},
    "jamba with gelu": TINY["jamba"] | {"hidden_act": "gelu"},
    "mellum not normalised": TINY["mellum"] | {"norm_topk_prob": False},
    "mistral4 not normalised": TINY["mistral4"] | {"norm_topk_prob": False},
    "mistral4 of groups": TINY["mistral4"] | GROUPS | {"routed_scaling_factor": 2.5},
    "mixtral with the gelu of gbmoe": TINY["mixtral"] | {"hidden_act": "gelu_pytorch_tanh"},
    "olmoe normalised": TINY["olmoe"] | {"norm_topk_prob": True, "hidden_act": "relu"},
    "qwen2_moe normalised": TINY["qwen2_moe"] | {"norm_topk_prob": True},
    "qwen3_moe normalised": TINY["qwen3_moe"] | {"norm_topk_prob": True},
}
# Model types that transformers 5.24 does not have, and the one whose class loads them.
LOADED_AS = {"kimi_k2": "deepseek_v3"}


def configuration(model_type):
    return transformers.CONFIG_MAPPING[LOADED_AS.get(model_type, model_type)]


def model_class(model_type):
    if model_type == "mistral4":  # AutoModelForCausalLM does not list it
        return transformers.Mistral4ForCausalLM
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[configuration(model_type)]


def rename(config, old, new):
    config.write_text(config.read_text().replace(f'"model_type": "{old}"', f'"model_type": "{new}"'))


def moe_block(model):
    name = next(name for name, _ in model.named_modules() if name.endswith(".experts"))
    return model.get_submodule(name.removesuffix(".experts"))


@dataclasses.dataclass
class Case:
    """A tiny model with random weights, the files that save_pretrained wrote, and these as a dMoE's."""
    model_type: str
    model: torch.nn.Module
    saved: Path
    megablocks: Path
    lines: list


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    model_type = request.param.partition(" ")[0]
    folder = tmp_path_factory.mktemp(model_type)
    torch.manual_seed(1)
    model = model_class(model_type)(configuration(model_type)(**COMMON | (TINY | VARIANTS)[request.param]))
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for tensor in (*model.parameters(), *biases):
        torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder / "saved")
    rename(folder / "saved" / "config.json", LOADED_AS.get(model_type, model_type), model_type)
    lines = []
    convert_checkpoint(folder / "saved", folder / "megablocks", "megablocks", report=lines.append)
    return Case(model_type, model, folder / "saved", folder / "megablocks", lines)


def first_layer(path):
    tensors = safetensors.load_file(path / "model.safetensors")
    prefix = min(name for name in tensors if name.endswith("experts.mlp.w1")).removesuffix("experts.mlp.w1")
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("case", [*TINY, *VARIANTS], indirect=True)
def test_a_dmoe_with_the_written_arguments_computes_the_block(case):
    """Output and gradients in float32, from the files that save_pretrained wrote."""
    block = moe_block(case.model)
    layer = gbmoe.dMoE(read_arguments(case.megablocks, device="cpu"))
    layer.load_state_dict(first_layer(case.megablocks))
    printed = case.lines[-1].removeprefix("each MoE layer is gbmoe.dMoE(").removesuffix(")")
    evaluated = eval(printed, {"gbmoe": gbmoe, "torch": torch, "functools": functools})
    assert str(evaluated) == str(read_arguments(case.megablocks))
    assert not any(line.startswith("warning") for line in case.lines)

    x = torch.randn(2, 40, HIDDEN)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = layer(ours), block(theirs.clone())
    if isinstance(expected, tuple):  # with scores or logits
        expected = expected[0].view(x.shape)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    assert accuracy.relative_error(out, expected) < 1e-5
    assert accuracy.relative_error(ours.grad, theirs.grad) < 1e-5
    # What has no gradient, the bias for the choice, is needed for the layout alone.
    gradients = to_megablocks({name: getattr(value, "grad", None) if getattr(value, "grad", None) is not None else value
                               for name, value in block.state_dict(keep_vars=True).items()})
    for parameter_name, parameter in layer.named_parameters():
        assert accuracy.relative_error(parameter.grad, gradients[parameter_name]) < 1e-5, parameter_name
    case.model.zero_grad()
    if EXPERT_BIAS in gradients:  # the bias must have decided something
        layer.router.expert_bias.zero_()
        assert accuracy.relative_error(layer(x), expected) > 1e-2


@pytest.mark.parametrize("case", MODEL_TYPES, indirect=True)
def test_from_pretrained_loads_every_layout_that_is_written_and_no_other(case, tmp_path):
    """No key is missing or made anew, every weight has the bits of the original, and what was saved comes back file by file. Experts
    under other names are refused, and would not be found."""
    loads, original = MODEL_TYPES[case.model_type].loads, dict(case.model.state_dict())
    for experts in EXPERT_LAYOUTS:
        target = tmp_path / experts
        if experts in loads:
            convert_checkpoint(case.megablocks, target, "transformers", experts=experts)
            assert not (target / "gbmoe_arguments.json").exists()
            same = (target / "model.safetensors").read_bytes() == (case.saved / "model.safetensors").read_bytes()
            assert same == (experts == list(loads)[-1])  # what save_pretrained writes
        else:
            with pytest.raises(ValueError, match=f"experts: expected 'fused'.*, got '{experts}': under these names .* {case.model_type}"):
                convert_checkpoint(case.megablocks, target, "transformers", experts=experts)
            assert not target.exists()
            tensors = safetensors.load_file(case.megablocks / "model.safetensors")
            if experts == "input_linear":
                with pytest.raises(ValueError, match="expected a model type with these names"):
                    to_transformers(tensors, experts, case.model_type)
                continue
            if MODEL_TYPES[case.model_type].arguments.get("moe_expert_linear_bias"):
                with pytest.raises(ValueError, match="w1_bias: the layout to write has no name for it"):
                    to_transformers(tensors, experts, case.model_type)
                continue
            target.mkdir()
            tensors = to_transformers(tensors, experts, case.model_type)
            safetensors.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
            (target / "config.json").write_text((case.saved / "config.json").read_text())
        rename(target / "config.json", case.model_type, LOADED_AS.get(case.model_type, case.model_type))
        loaded, info = model_class(case.model_type).from_pretrained(target, output_loading_info=True)
        if experts in loads:
            assert not any(info.values()), info
            assert_same(dict(loaded.state_dict()), original)
        else:
            assert any("experts" in name for name in info["missing_keys"]), info


def test_shards_are_converted_one_by_one_and_loaded(tmp_path):
    model = model_class("deepseek_v3")(configuration("deepseek_v3")(**COMMON | TINY["deepseek_v3"]))
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    convert_checkpoint(tmp_path / "saved", tmp_path / "megablocks", "megablocks")
    convert_checkpoint(tmp_path / "megablocks", tmp_path / "back", "transformers", experts="gate_proj")
    loaded, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_fields_and_defaults_are_those_of_transformers(model_type):
    kind, config = MODEL_TYPES[model_type], configuration(model_type)()
    for name, default in kind.defaults.items():
        assert getattr(config, name) == default, name
    assert kind.defaults.keys() >= {"hidden_size", kind.ffn, kind.experts[0], kind.top_k[0], "hidden_act"}
    arguments = [getattr(value, "argument", value) for value in kind.arguments.values()]
    assert kind.defaults.keys() >= {value.name for value in arguments if isinstance(value, Field)}
    for condition in kind.conditions:
        assert getattr(config, condition.field, condition.default) == condition.default, condition.field
    for names in (kind.experts, kind.top_k):
        for name in names:  # synonyms, which a config.json may have instead
            assert getattr(configuration(model_type)(**{name: 5}), names[0]) == 5


def test_activations_are_those_of_transformers():
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    for theirs, ours in ACTIVATIONS.items():
        torch.testing.assert_close(_ACTIVATIONS[ours][0](x), ACT2FN[theirs](x))


def test_refused_model_types_are_transformers_own_names():
    assert not REFUSED.keys() & MODEL_TYPES.keys()
    assert not REFUSED.keys() - transformers.CONFIG_MAPPING.keys()
    assert all(REFUSED.values())
