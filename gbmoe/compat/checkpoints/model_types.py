"""What the MoE layers of transformers' model types compute, by the fields of config.json, and which layouts they load. Data only.

Every entry was compared with transformers 5.24: with its routers and blocks, with the defaults of its configuration classes, and
with its conversion_mapping, by which from_pretrained finds experts under other names than those of its modules.
tests/compat/checkpoints/test_model_types.py repeats the comparison with the installed release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Activations: the names of config.json (hidden_act) to gbmoe's.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "relu": "relu"}


@dataclass(frozen=True)
class Condition:
    """A field with which a dMoE computes the layer only if it has one of these values."""
    field: str
    values: tuple[Any, ...]
    default: Any  # what a config.json without the field means
    needs: str  # what a dMoE lacks for other values
    only_with: str | None = None  # the field that must not be 0 for this one to have an effect


@dataclass(frozen=True)
class ModelType:
    """One model type. Its experts have a gate, and neither they nor its router have biases.

    `defaults` are transformers' values of the fields that a config.json leaves out.
    """
    experts: tuple[str, ...]  # the field with the number of experts, and its synonym in transformers' attribute_map
    ffn: str  # the field with an expert's width
    defaults: Mapping[str, Any]
    normalizes: bool | str  # whether the chosen experts' weights are divided by their sum: always, never, or as the field says
    loads: tuple[str, ...]  # the layouts of experts that from_pretrained loads
    shared_experts: str | None = None  # the field with the number of shared experts, which are one GLU, as wide as so many experts
    router: str = "gate"
    conditions: tuple[Condition, ...] = ()


_SCALE = "a factor on the experts' weights"
_GROUPS = "a choice of experts within groups"
_SIGMOID = "sigmoid scores"
_AMBIGUOUS = "one meaning: transformers ignores the field, DeepSeek's own code does not"
_AVERAGE = "the mean of both outputs"
_JITTER = "jitter of what the experts get, not only of what the router gets"

# Of every model type.
CONDITIONS = (Condition("quantization_config", (None,), None, "weights that are not quantised"),)

_MIXTRAL = ModelType(
    experts=("num_local_experts", "num_experts"), ffn="intermediate_size", normalizes=True, loads=("fused", "w1"),
    defaults={"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
              "hidden_act": "silu"},
    conditions=(Condition("router_jitter_noise", (0,), 0.0, _JITTER),))

MODEL_TYPES: Mapping[str, ModelType] = {
    "cohere2_moe": ModelType(
        experts=("num_experts",), ffn="intermediate_size", normalizes=True, loads=("fused", "gate_proj"),
        shared_experts="num_shared_experts",
        defaults={"hidden_size": 8192, "intermediate_size": 22528, "num_experts": 8, "num_experts_per_tok": 2,
                  "hidden_act": "silu", "num_shared_experts": 0},
        conditions=(
            Condition("expert_selection_fn", ("softmax",), "softmax", _SIGMOID),
            Condition("shared_expert_combination_strategy", ("sum",), "average", _AVERAGE, "num_shared_experts"))),
    "deepseek_v2": ModelType(
        experts=("n_routed_experts", "num_experts"), ffn="moe_intermediate_size", normalizes=False, loads=("fused", "gate_proj"),
        shared_experts="n_shared_experts",
        defaults={"hidden_size": 4096, "moe_intermediate_size": 1407, "n_routed_experts": 64, "num_experts_per_tok": None,
                  "hidden_act": "silu", "n_shared_experts": 2},
        conditions=(
            Condition("topk_method", ("greedy",), "greedy", _GROUPS),
            Condition("routed_scaling_factor", (1,), 1.0, _SCALE),
            Condition("scoring_func", ("softmax",), "softmax", _SIGMOID),
            Condition("norm_topk_prob", (False, None), False, _AMBIGUOUS),
            Condition("mlp_bias", (False,), False, "biases of the shared expert alone"))),
    "flex_olmo": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes="norm_topk_prob",
        loads=("fused", "gate_proj"),
        defaults={"hidden_size": 4096, "intermediate_size": 11008, "num_experts": 7, "num_experts_per_tok": 5,
                  "hidden_act": "silu", "norm_topk_prob": False}),
    "jamba": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes=False, loads=("fused", "gate_proj"),
        router="router",
        defaults={"hidden_size": 4096, "intermediate_size": 14336, "num_experts": 16, "num_experts_per_tok": 2,
                  "hidden_act": "silu"}),
    "mellum": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
        loads=("fused", "gate_proj"),
        defaults={"hidden_size": 2304, "moe_intermediate_size": 896, "num_experts": 64, "num_experts_per_tok": 8,
                  "hidden_act": "silu", "norm_topk_prob": True}),
    "minimax": _MIXTRAL,
    "mistral4": ModelType(
        experts=("n_routed_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
        loads=("fused",), shared_experts="n_shared_experts",
        defaults={"hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4,
                  "hidden_act": "silu", "n_shared_experts": 1, "norm_topk_prob": True},
        conditions=(
            Condition("n_group", (1,), 1, _GROUPS),
            Condition("routed_scaling_factor", (1,), 1.0, _SCALE))),
    "mixtral": _MIXTRAL,
    "olmoe": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes="norm_topk_prob",
        loads=("fused", "gate_proj"),
        defaults={"hidden_size": 2048, "intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8,
                  "hidden_act": "silu", "norm_topk_prob": False}),
    "qwen3_moe": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
        loads=("fused", "gate_proj"),
        defaults={"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                  "hidden_act": "silu", "norm_topk_prob": False}),
}

_BIAS = "a bias for the choice of experts"
_SHARED_GATE = "a gate of the shared expert"
_NAMES = "other names: this model type's experts, router or shared expert have names of their own"
_DEEPSEEK_V3 = (_SIGMOID, _BIAS, _GROUPS, _SCALE)

# Model types whose layers no dMoE computes, whatever their fields are, and what each needs. When one of these needs is met, it
# goes out of the lines below; a line that is then empty becomes an entry of MODEL_TYPES, with the conditions that remain.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "afmoe": (_SIGMOID, _BIAS, _SCALE, _NAMES),
    "aria_text": (_NAMES, "transposed experts"),
    "axk1": _DEEPSEEK_V3,
    "axk2": _DEEPSEEK_V3,
    "bailing_hybrid": _DEEPSEEK_V3,
    "beam": _DEEPSEEK_V3,
    "dbrx": ("no conversion: its layers have MegaBlocks' names and shapes already",),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": ("scores by the root of softplus", _BIAS, _SCALE, "clamped activations"),
    "dots1": _DEEPSEEK_V3,
    "ernie4_5_moe": (_BIAS,),
    "exaone_moe": _DEEPSEEK_V3,
    "flint": (_SIGMOID, _NAMES),
    "glm4_moe": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm_moe_dsa": _DEEPSEEK_V3,
    "gpt_oss": ("biases of the router and the experts", "clamped activations", "transposed experts with interleaved gates"),
    "granitemoe": (_NAMES,),
    "granitemoehybrid": (_NAMES,),
    "granitemoeshared": (_NAMES,),
    "hunyuan_v1_moe": (_NAMES,),
    "hy_v3": (_SIGMOID, _BIAS, _SCALE, _NAMES),
    "jetmoe": (_NAMES,),
    "kimi_linear": _DEEPSEEK_V3,
    "laguna": (_SIGMOID, _BIAS, _SCALE, _NAMES),
    "lfm2_moe": (_SIGMOID, _BIAS, _SCALE),
    "llama4_text": (_SIGMOID, "weights that multiply what the experts get", _NAMES),
    "longcat_flash": (_BIAS, _SCALE, "experts that return what they get", _NAMES),
    "mimo_v2_flash": _DEEPSEEK_V3,
    "minimax_m2": (_SIGMOID, _BIAS),
    "nemotron_h": _DEEPSEEK_V3,
    "phimoe": ("weights by sparsemixer",),
    "qwen2_moe": (_SHARED_GATE,),
    "qwen3_5_moe_text": (_SHARED_GATE,),
    "qwen3_next": (_SHARED_GATE,),
    "qwen3_vl_moe_text": ("transposed experts",),
    "solar_open": _DEEPSEEK_V3,
    "switch_transformers": ("experts that drop tokens beyond their capacity", _NAMES),
    "zaya": ("a router that is more than one matrix",),
}
