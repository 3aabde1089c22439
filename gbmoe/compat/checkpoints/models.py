"""What the MoE layers of transformers' model types compute, by the fields of config.json, and which layouts they load. Data only.

Every entry was compared with transformers 5.24: with its routers and blocks, with the defaults of its configuration classes, and
with its conversion_mapping, by which from_pretrained finds experts under other names than those of its modules.
tests/compat/checkpoints/test_models.py repeats the comparison with the installed release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gbmoe.compat.checkpoints.layouts import TRANSPOSED, TRANSPOSED_IN_TURNS, transformers_layouts
from gbmoe.compat.checkpoints.model_types import Condition, Field, ModelType, When

_AMBIGUOUS = "one meaning: transformers ignores the field, the model's own code does not"
_AVERAGE = "the mean of both outputs"
_JITTER = "jitter of what the experts get, not only of what the router gets"
_SHARED_BIASES = "biases of the shared expert alone"

_NO_MLP_BIAS = Condition("mlp_bias", (False,), False, _SHARED_BIASES)

# Of every model type.
CONDITIONS = (Condition("quantization_config", (None,), None, "weights that are not quantised: save the model dequantised"
                        " first"),)

_EACH, _W1 = ("fused", "gate_proj"), ("fused", "w1")

_MIXTRAL = ModelType(
    experts=("num_local_experts", "num_experts"), ffn="intermediate_size", normalizes=True, loads=transformers_layouts(*_W1),
    defaults={"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
              "hidden_act": "silu"},
    conditions=(Condition("router_jitter_noise", (0,), 0.0, _JITTER),))

_CHOICE_BY_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}

_GROUPS_BY_TWO = {"moe_router_num_groups": Field("n_group"), "moe_router_group_topk": Field("topk_group"), "moe_router_group_best": 2,
                  "moe_router_topk_scaling_factor": Field("routed_scaling_factor")}


def _like(kind: ModelType, defaults: Mapping[str, Any], **changes: Any) -> ModelType:
    """The model type with other defaults, and other descriptions if they are given."""
    return replace(kind, defaults={**kind.defaults, **defaults}, **changes)


_MIMO_V2_FLASH = ModelType(
    experts=("n_routed_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
    loads=transformers_layouts(*_EACH, expert_bias="gate.e_score_correction_bias"), arguments=_CHOICE_BY_SIGMOID | _GROUPS_BY_TWO,
    defaults={"hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
              "hidden_act": "silu", "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    conditions=(
        Condition("scoring_func", ("sigmoid",), "sigmoid", _AMBIGUOUS),
        Condition("topk_method", ("noaux_tc",), "noaux_tc", _AMBIGUOUS)))

_GLM4_MOE = _like(
    _MIMO_V2_FLASH, {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1}, shared_experts="n_shared_experts",
    loads=transformers_layouts(*_EACH, shared="shared_experts", expert_bias="gate.e_score_correction_bias"))

_DEEPSEEK_V3 = _like(_GLM4_MOE, {
    "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5})

_QWEN2_MOE = ModelType(
    experts=("num_experts",), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
    loads=transformers_layouts(*_EACH, shared="shared_expert", shared_gate="shared_expert_gate.weight"),
    shared_ffn="shared_expert_intermediate_size", arguments={"moe_shared_expert_gate": True},
    defaults={"hidden_size": 2048, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
              "hidden_act": "silu", "shared_expert_intermediate_size": 5632})

_GRANITE_MOE = ModelType(
    experts=("num_local_experts",), ffn="intermediate_size", normalizes=False,
    loads=transformers_layouts("fused", router="router.weight") | transformers_layouts("input_linear", router="router.layer.weight"),
    arguments={"moe_router_pre_softmax": False},
    defaults={"hidden_size": 4096, "intermediate_size": 11008, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"})

# Models whose config.json has a language model in text_config, and the model type of that.
WITH_TEXT_CONFIG = {"llama4": "llama4_text"}

MODEL_TYPES: Mapping[str, ModelType] = {
    "cohere2_moe": ModelType(
        experts=("num_experts",), ffn="intermediate_size", normalizes="norm_topk_prob",
        loads=transformers_layouts(*_EACH, shared="shared_experts"), shared_experts="num_shared_experts",
        arguments={"moe_router_score_function": Field("expert_selection_fn"), "moe_router_pre_softmax": False},
        defaults={"hidden_size": 8192, "intermediate_size": 22528, "num_experts": 8, "num_experts_per_tok": 2,
                  "hidden_act": "silu", "num_shared_experts": 0, "expert_selection_fn": "softmax", "norm_topk_prob": True},
        conditions=(
            Condition("expert_selection_fn", ("softmax", "sigmoid"), "softmax", "a function that transformers has"),
            Condition("shared_expert_combination_strategy", ("sum",), "average", _AVERAGE, "num_shared_experts"))),
    "deepseek_v2": ModelType(
        experts=("n_routed_experts", "num_experts"), ffn="moe_intermediate_size", normalizes=False,
        loads=transformers_layouts(*_EACH, shared="shared_experts"), shared_experts="n_shared_experts",
        arguments={
            "moe_router_num_groups": When("topk_method", "group_limited_greedy", Field("n_group")),
            "moe_router_group_topk": When("topk_method", "group_limited_greedy", Field("topk_group")),
            "moe_router_group_best": When("topk_method", "group_limited_greedy", 1),
            "moe_router_topk_scaling_factor": Field("routed_scaling_factor"), "moe_router_dtype": "fp32"},
        defaults={"hidden_size": 4096, "moe_intermediate_size": 1407, "n_routed_experts": 64, "num_experts_per_tok": None,
                  "hidden_act": "silu", "n_shared_experts": 2, "topk_method": "greedy", "n_group": None, "topk_group": None,
                  "routed_scaling_factor": 1.0},
        conditions=(
            Condition("topk_method", ("greedy", "group_limited_greedy"), "greedy", "a method that transformers has"),
            Condition("scoring_func", ("softmax",), "softmax", _AMBIGUOUS),
            Condition("norm_topk_prob", (False, None), False, _AMBIGUOUS),
            _NO_MLP_BIAS)),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(_DEEPSEEK_V3, conditions=(*_DEEPSEEK_V3.conditions, _NO_MLP_BIAS)),
    "dots1": _like(_GLM4_MOE, {
        "hidden_size": 4608, "n_routed_experts": None, "num_experts_per_tok": None, "n_shared_experts": None, "norm_topk_prob": False},
        conditions=(Condition("scoring_func", ("sigmoid", "noaux_tc"), "sigmoid", _AMBIGUOUS),)),
    "ernie4_5_moe": ModelType(
        experts=("moe_num_experts", "num_experts"), ffn="moe_intermediate_size", normalizes=True, top_k=("moe_k", "num_experts_per_tok"),
        loads=transformers_layouts("fused", shared="shared_experts", expert_bias=("gate.moe_statics.e_score_correction_bias", "1 E"))
        | transformers_layouts("gate_proj", shared="shared_experts", expert_bias=("moe_statics.e_score_correction_bias", "1 E")),
        shared_experts="moe_num_shared_experts", arguments={"moe_router_enable_expert_bias": True},
        defaults={"hidden_size": 2560, "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "hidden_act": "silu",
                  "moe_num_shared_experts": 2},
        conditions=(
            Condition("moe_norm_min", (1e-12, 0), 1e-12, "a bound for the sum that weights are divided by"),
            Condition("use_bias", (False, None), False, _SHARED_BIASES, "moe_num_shared_experts"))),
    "exaone_moe": replace(
        _DEEPSEEK_V3, experts=("num_experts",), shared_experts="num_shared_experts",
        loads=transformers_layouts("fused", shared="shared_experts", expert_bias="gate.e_score_correction_bias")
        | transformers_layouts("gate_proj", shared="shared_experts", expert_bias="e_score_correction_bias"),
        defaults={"hidden_size": 4096, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "hidden_act": "silu",
                  "num_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}),
    "flex_olmo": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes="norm_topk_prob",
        loads=transformers_layouts(*_EACH),
        defaults={"hidden_size": 4096, "intermediate_size": 11008, "num_experts": 7, "num_experts_per_tok": 5,
                  "hidden_act": "silu", "norm_topk_prob": False}),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": _like(_GLM4_MOE, {
        "hidden_size": 2048, "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8}),
    "glm_moe_dsa": _like(_GLM4_MOE, {
        "hidden_size": 6144, "moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 2.5},
        conditions=(*_GLM4_MOE.conditions, _NO_MLP_BIAS)),
    "gpt_oss": ModelType(
        experts=("num_local_experts", "num_experts"), ffn="intermediate_size", normalizes=False,
        loads=transformers_layouts("fused", router="router.weight", router_bias="router.bias", fused=TRANSPOSED_IN_TURNS),
        arguments={"moe_router_pre_softmax": False, "moe_router_linear_bias": True, "moe_expert_linear_bias": True},
        clamped_silu=("swiglu_alpha", "swiglu_limit"),
        defaults={"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
                  "hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_MOE,  # whose shared expert is no part of the layer, like that of the next
    "granitemoeshared": _GRANITE_MOE,
    "hunyuan_v1_moe": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes=True, top_k=("moe_topk", "num_experts_per_tok"),
        loads=transformers_layouts(*_EACH, shared="shared_mlp", router="gate.wg.weight"), shared_ffn="intermediate_size", lists=True,
        defaults={"hidden_size": 4096, "intermediate_size": 11008, "num_experts": 1, "moe_topk": 1, "hidden_act": "silu"},
        conditions=(Condition("norm_topk_prob", (True,), True, _AMBIGUOUS),)),
    "jamba": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes=False,
        loads=transformers_layouts(*_EACH, router="router.weight"),
        defaults={"hidden_size": 4096, "intermediate_size": 14336, "num_experts": 16, "num_experts_per_tok": 2,
                  "hidden_act": "silu"}),
    "kimi_k2": _DEEPSEEK_V3,  # which is what its own code is, too; transformers 5.24 loads it under that name
    "llama4_text": ModelType(
        experts=("num_local_experts",), ffn="intermediate_size", normalizes=False, shared_ffn="intermediate_size",
        loads=transformers_layouts("fused", router="router.weight", shared="shared_expert", fused=TRANSPOSED),
        arguments={"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
        defaults={"hidden_size": 5120, "intermediate_size": 8192, "num_local_experts": 16, "num_experts_per_tok": 1,
                  "hidden_act": "silu"}),
    "mellum": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
        loads=transformers_layouts(*_EACH),
        defaults={"hidden_size": 2304, "moe_intermediate_size": 896, "num_experts": 64, "num_experts_per_tok": 8,
                  "hidden_act": "silu", "norm_topk_prob": True}),
    "mimo_v2_flash": _MIMO_V2_FLASH,
    "minimax": _MIXTRAL,
    "minimax_m2": ModelType(
        experts=("num_local_experts", "num_experts"), ffn="intermediate_size", normalizes=True,
        loads=transformers_layouts(*_W1, expert_bias="e_score_correction_bias"), arguments=_CHOICE_BY_SIGMOID,
        defaults={"hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8,
                  "hidden_act": "silu"},
        conditions=(
            *_MIXTRAL.conditions,
            Condition("scoring_func", ("sigmoid",), "sigmoid", _AMBIGUOUS),
            Condition("use_routing_bias", (True,), True, _AMBIGUOUS),
            Condition("shared_intermediate_size", (0,), 0, _AMBIGUOUS))),
    "mistral4": ModelType(
        experts=("n_routed_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
        loads=transformers_layouts("fused", shared="shared_experts"), shared_experts="n_shared_experts",
        arguments=_GROUPS_BY_TWO,
        defaults={"hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4,
                  "hidden_act": "silu", "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
                  "routed_scaling_factor": 1.0}),
    "mixtral": _MIXTRAL,
    "olmoe": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="intermediate_size", normalizes="norm_topk_prob",
        loads=transformers_layouts(*_EACH),
        defaults={"hidden_size": 2048, "intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8,
                  "hidden_act": "silu", "norm_topk_prob": False}),
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": ModelType(
        experts=("num_experts", "num_local_experts"), ffn="moe_intermediate_size", normalizes="norm_topk_prob",
        loads=transformers_layouts(*_EACH),
        defaults={"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                  "hidden_act": "silu", "norm_topk_prob": False}),
    "qwen3_5_moe_text": _like(_QWEN2_MOE, {
        "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512},
        normalizes=True),
    "qwen3_next": _like(_QWEN2_MOE, {
        "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512}),
    "solar_open": _like(_GLM4_MOE, {"moe_intermediate_size": 1280}),
}
