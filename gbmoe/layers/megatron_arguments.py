"""What Megatron-LM's options are in a layer's Arguments, and which of them no layer can do.

Megatron-LM has these names in its parsed arguments (an argparse.Namespace), and Megatron-Core in TransformerConfig. Both were read at
core 0.20. An option that the object lacks says nothing, and the field keeps the default of Arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gbmoe._checks import require
from gbmoe.float8 import Float8BlockScaling
from gbmoe.layers.arguments import DEFAULT_ACTIVATION_FN, LOAD_BALANCING_TYPES, Arguments
from gbmoe.layers.expert_parallel_options import FLAT_NAMES
from gbmoe.ops.activations import activation_name, relu_squared
from gbmoe.router_function import SCORES

_FIELDS = frozenset({*(field.name for field in dataclasses.fields(Arguments)), *FLAT_NAMES})
_EXPERTS = ("num_experts", "num_moe_experts")

# Fields whose names Megatron has for something wider: a dense layer's size, layers that are not MoE, the model's dtype. Such a value
# need not be that of the field.
_OF_THE_MODEL = frozenset({"ffn_hidden_size", "num_layers", "num_layers_per_virtual_pipeline_stage", "fp16", "bf16", "init_method",
                           "output_layer_init_method", "fp8_recipe"})


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), Megatron's quick_gelu. It has no kernel."""
    return x * torch.sigmoid(1.702 * x)


# ---------------------------------------------------------------------------------------------------- what cannot be done


def _unset(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (int, float)) and value == 0)


def _is_one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


# Option, whether a layer can do it at this value, and the value in words.
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moe_router_score_function": (_is_one_of(None, *SCORES), "one of " + ", ".join(SCORES)),
    "moe_router_dtype": (_is_one_of(None, "fp32"), "None or 'fp32': logits are float32 in either case"),
    "moe_router_topk_limited_devices": (_unset, "None: experts are not chosen by groups"),
    "moe_router_force_load_balancing": (_unset, "False"),
    "moe_router_force_biased": (_unset, "None"),
    "moe_enable_routing_replay": (_unset, "False"),
    "moe_token_dropping": (_unset, "False: no token is dropped"),
    "moe_expert_capacity_factor": (lambda value: value is None or value < 0, "None: no token is dropped"),
    "moe_expert_rank_capacity_factor": (_unset, "None: no token is dropped"),
    "moe_dispatch_fwd_dtype": (_is_one_of(None, "bf16"), "'bf16': rows travel in the layer's dtype"),
    "moe_combine_bwd_dtype": (_is_one_of(None, "bf16"), "'bf16': rows travel in the layer's dtype"),
    "moe_latent_size": (_unset, "None"),
    "moe_extended_tp": (_unset, "False: experts are not divided among tensor-parallel ranks"),
    "add_bias_linear": (_unset, "False (--disable-bias-linear): experts have no biases"),
    "disable_bias_linear": (lambda value: value is None or bool(value), "True: experts have no biases"),
    "activation_func_clamp_value": (lambda value: value is None, "None"),
    "glu_linear_offset": (_unset, "0"),
    "activation_func_fp8_input_store": (_unset, "False"),
    "fp4": (_unset, "None"),
    "use_mup": (_unset, "False"),
    "init_method_xavier_uniform": (_unset, "False"),
}

# Options of Megatron's kernels, memory, communication, logging, and of the layout and origin of its checkpoints: the layer is the same.
WITHOUT_EFFECT = frozenset({
    "moe_router_quantile_balancing_ema", "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8", "moe_router_fusion", "moe_permute_fusion", "moe_grouped_gemm",
    "moe_use_legacy_grouped_gemm", "moe_use_grouped_tensor", "moe_single_grouped_weight", "moe_single_grouped_bias",
    "moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_permute_fusion_into_hybridep",
    "moe_hybridep_pad_uneven_dispatch_inputs", "moe_per_layer_logging", "moe_pad_expert_input_to_capacity",
    "moe_pad_experts_for_cuda_graph_inference", "moe_token_drop_policy", "moe_layer_recompute", "moe_flex_dispatcher_num_sms",
    "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute",
    "moe_hybridep_num_sms_preprocessing", "moe_ncclep_zero_copy",
    "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "moe_shared_expert_overlap", "moe_paged_stash",
    "moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu",
    "moe_use_upcycling", "moe_upcycling_granularity", "moe_grad_scale_func", "moe_megakernel_backend",
})

# Options that _Translation reads.
TRANSLATED = frozenset({
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_shared_expert_gate",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_layer_freq",
})


# ------------------------------------------------------------------------------------------------------- what is translated


def translate(options: Any) -> dict[str, Any]:
    """Fields of Arguments, by name, from any object with Megatron's names, MegaBlocks' names, or both.

    Raises:
        TypeError: for None, and for a dictionary whose entries are no attributes.
        ValueError: naming every option that is set to what no layer can do, that contradicts another one, or that is not known.
    """
    _require_attributes(options)
    values = {name: getattr(options, name) for name in _FIELDS if hasattr(options, name)}
    if not isinstance(values.get("fp8_recipe"), Float8BlockScaling):
        values.pop("fp8_recipe", None)  # Megatron-LM has an argument of this name, for TransformerEngine, which is always set
    named = [name for name in _EXPERTS if hasattr(options, name)]
    if named and all(not getattr(options, name) for name in named):
        if "moe_num_experts" not in values:
            raise ValueError(f"from_megatron: {named[0]}: expected the number of experts, got {getattr(options, named[0])!r}")
        # Megatron's own mixture is off, and what it says of it means nothing: these are options of MegaBlocks.
        return {name: value for name, value in values.items() if name not in TRANSLATED | REFUSED.keys()}
    translation = _Translation(options)
    translation.check_names()
    for name, value in translation.fields().items():
        given = None if name in _OF_THE_MODEL or name in TRANSLATED else values.get(name)
        if given is not None and not _same(name, given, value):
            translation.problem(name, f"{value!r}, as Megatron's options say", given)
        values[name] = value
    if translation.problems:
        raise ValueError("from_megatron: " + "; ".join(translation.problems))
    return values


def _require_attributes(options: Any) -> None:
    """Raise TypeError for what can have no options as attributes, of which every field would keep its default."""
    by_key = isinstance(options, Mapping) and any(not hasattr(options, str(key)) for key in options)
    require(options is not None and not by_key, "from_megatron", "megatron_args",
            "an object with options as attributes, such as argparse.Namespace(**options)", type(options).__name__, TypeError)


def _names(options: Any) -> set[str]:
    """The names that the object has: attributes, and the keys of a dictionary that has them as attributes, too."""
    return {*dir(options), *(map(str, options) if isinstance(options, Mapping) else ())}


def _same(field: str, given: Any, value: Any) -> bool:
    if field == "activation_fn" and callable(given):
        return given is value or (activation_name(given) is not None and activation_name(given) == activation_name(value))
    return given == value


def _single(value: Any) -> Any:
    """The value of an option that argparse reads as a list (nargs="+"), where it has one."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


class _Translation:
    """The fields that Megatron's options in `options` say something of, and what is wrong with them."""

    def __init__(self, options: Any):
        self._options, self.problems = options, []  # type: Any, list[str]

    def problem(self, name: str, expected: str, got: Any) -> None:
        self.problems.append(f"{name}: expected {expected}, got {got!r}")

    def has(self, *names: str) -> bool:
        return any(getattr(self._options, name, None) is not None for name in names)

    def get(self, name: str, default: Any = None) -> Any:
        """The option's value, or the default where the object lacks it or has None."""
        value = getattr(self._options, name, None)
        return default if value is None else value

    def check_names(self) -> None:
        for name, (possible, expected) in REFUSED.items():
            if hasattr(self._options, name) and not possible(getattr(self._options, name)):
                self.problem(name, expected, getattr(self._options, name))
        known = REFUSED.keys() | WITHOUT_EFFECT | TRANSLATED | _FIELDS
        for name in sorted(name for name in _names(self._options) if name.startswith("moe_") and name not in known):
            if not _unset(getattr(self._options, name)):
                self.problem(name, "an option that gbmoe knows, or that is off", getattr(self._options, name))

    def fields(self) -> dict[str, Any]:
        return {**self._experts(), **self._sizes(), **self._router(), **self._losses(), **self._activation(), **self._shared_expert(),
                **self._dtype(), **self._initial_values(), **self._parallelism()}

    def _experts(self) -> dict[str, Any]:
        found = {name: _single(self.get(name)) for name in _EXPERTS if self.has(name)}
        if len(found) == 2 and found["num_experts"] != found["num_moe_experts"]:
            self.problem("num_moe_experts", f"num_experts == {found['num_experts']}", found["num_moe_experts"])
        if found and not self.has("moe_router_topk") and not self.has("moe_top_k"):
            self.problem("moe_router_topk", "the number of experts a token", None)
        return {"moe_num_experts": next(iter(found.values()))} if found else {}

    def _sizes(self) -> dict[str, Any]:
        result = {}
        for name in ("hidden_size", "ffn_hidden_size"):
            if hasattr(self._options, name) and not self.has(name) and not (name == "ffn_hidden_size" and self.has("moe_ffn_hidden_size")):
                self.problem(name, "a size", None)
        if self.has("moe_ffn_hidden_size"):
            result["ffn_hidden_size"] = self.get("moe_ffn_hidden_size")
        if self.has("add_bias_linear", "disable_bias_linear"):
            result["bias"] = False  # the layer's own bias, which Megatron has not either
        return result

    def _router(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        score, biased = self.get("moe_router_score_function", "softmax"), bool(self.get("moe_router_enable_expert_bias", False))
        groups, chosen = self.get("moe_router_num_groups"), self.get("moe_router_group_topk")
        if chosen and not groups:
            self.problem("moe_router_num_groups", "the number of groups with moe_router_group_topk", groups)
        limited = bool(chosen and groups and chosen != groups)
        if self.has("moe_router_num_groups", "moe_router_group_topk"):
            result |= {"moe_router_num_groups": groups if limited else None, "moe_router_group_topk": chosen if limited else None}
        if self.has("moe_router_topk"):
            top_k = result["moe_top_k"] = self.get("moe_router_topk")
            result |= self._normalisation(score, top_k, biased or limited)
        if hasattr(self._options, "moe_router_topk_scaling_factor"):
            result["moe_router_topk_scaling_factor"] = self.get("moe_router_topk_scaling_factor") or None
        for name, value in (("moe_router_score_function", score), ("moe_router_enable_expert_bias", biased),
                            ("moe_router_bias_update_rate", self.get("moe_router_bias_update_rate", 1e-3))):
            if hasattr(self._options, name):
                result[name] = value
        if self.has("moe_input_jitter_eps"):
            result["moe_jitter_eps"] = self.get("moe_input_jitter_eps")
        if self.get("batch_invariant_mode", False):
            result["batch_invariant"] = True
        return result

    def _normalisation(self, score: str, top_k: int, ranks_scores: bool) -> dict[str, Any]:
        """How a token's weights are normalised. `ranks_scores`: the choice has biases or groups."""
        if score != "softmax":  # Megatron's sigmoids are divided by their sum where there are several, and have no softmax
            return {"moe_normalize_expert_weights": 1 if top_k > 1 else None, "moe_router_pre_softmax": True}
        if self.get("moe_router_pre_softmax", False):
            if self.get("moe_normalize_expert_weights"):
                self.problem("moe_normalize_expert_weights", "None or 0 where moe_router_pre_softmax is set",
                             self.get("moe_normalize_expert_weights"))
            return {"moe_router_pre_softmax": True}
        if top_k == 1:
            self.problem("moe_router_pre_softmax", "True where moe_router_topk is 1: the softmax of one logit has no gradient",
                         self.get("moe_router_pre_softmax"))
        # The softmax of the chosen logits is that of all of them, divided by its sum over those chosen. Biases and groups see the logits.
        return {"moe_normalize_expert_weights": 1, "moe_router_pre_softmax": not ranks_scores}

    # ------------------------------------------------------------------------------------------------------------- losses

    def _losses(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        layers = None if self._pattern is None else sum(self._pattern)
        if layers is not None:
            result["num_layers"] = layers
        kinds, coefficients = (value if isinstance(value, (list, tuple)) else [value] for value in (
            self.get("moe_router_load_balancing_type", "aux_loss"), self.get("moe_aux_loss_coeff")))
        if len(coefficients) != len(kinds):
            self.problem("moe_aux_loss_coeff", f"a value for each moe_router_load_balancing_type, {list(kinds)}", list(coefficients))
        kind, chosen = kinds[0], 0
        for each, coefficient in zip(kinds, coefficients):
            if each not in LOAD_BALANCING_TYPES:
                self.problem("moe_router_load_balancing_type", f"one of {', '.join(LOAD_BALANCING_TYPES)}", each)
            elif each == "none" or (coefficient is None and each != "aux_loss"):
                result.setdefault("moe_loss_weight", 0.0)
            elif coefficient:
                kind, chosen = each, chosen + 1
                if layers is None:
                    self.problem("num_layers", "the number of layers with moe_aux_loss_coeff", None)
                # Megatron adds the loss of every layer, times the coefficient; batched_load_balancing_loss is the mean over layers.
                result["moe_loss_weight"] = float(coefficient) * (layers or 1)
            elif coefficient is not None:
                result.setdefault("moe_loss_weight", 0.0)
            if each not in ("none", None) and coefficient is not None and not self.has("moe_lbl_in_fp32"):
                result["moe_lbl_in_fp32"] = True
        if chosen > 1:
            self.problem("moe_router_load_balancing_type", "one loss with a coefficient", list(kinds))
        if hasattr(self._options, "moe_router_load_balancing_type"):
            result["moe_router_load_balancing_type"] = kind
        if result.get("moe_loss_weight"):
            for name in ("tensor_model_parallel_size", "context_parallel_size"):
                if self.get(name, 1) > 1:
                    self.problem(name, "1 with moe_aux_loss_coeff: tokens are not counted over these ranks", self.get(name))
        if hasattr(self._options, "moe_z_loss_coeff"):
            result["moe_zloss_weight"] = self.get("moe_z_loss_coeff", 0)
            if self.get("moe_router_dtype") == "fp32" and not self.has("moe_zloss_in_fp32"):
                result["moe_zloss_in_fp32"] = True
        return result

    @functools.cached_property
    def _pattern(self) -> list[bool] | None:
        """Whether each of the model's layers has experts; None where the object does not say."""
        frequency, layers = self.get("moe_layer_freq", 1), self.get("num_layers")
        if isinstance(frequency, int) and frequency >= 1:
            return None if layers is None else [layer % frequency == 0 for layer in range(layers)]
        if not isinstance(frequency, (list, tuple)) or (layers is not None and len(frequency) != layers):
            self.problem("moe_layer_freq", "an int of at least 1, or a list of 0 and 1 for each of num_layers", frequency)
            return None
        return [bool(entry) for entry in frequency]

    # ------------------------------------------------------------------------------------------------------------ experts

    def _activation(self) -> dict[str, Any]:
        flags = {"swiglu": ("glu", F.silu), "squared_relu": ("mlp", relu_squared), "quick_geglu": ("glu", quick_gelu),
                 "openai_gelu": ("mlp", DEFAULT_ACTIVATION_FN)}
        if not self.has(*flags, "gated_linear_unit", "activation_func"):
            return {}
        chosen = [flag for flag in flags if self.get(flag, False)]
        if len(chosen) > 1:
            self.problem(chosen[1], f"False with {chosen[0]}", self.get(chosen[1]))
        if self.has("activation_func"):
            function = _own_activation(self.get("activation_func"))
            mlp_type = "glu" if self.get("gated_linear_unit", bool(chosen) and flags[chosen[0]][0] == "glu") else "mlp"
            if chosen and not (mlp_type == flags[chosen[0]][0] and _same("activation_fn", function, flags[chosen[0]][1])):
                self.problem("activation_func", f"that of {chosen[0]}", self.get("activation_func"))
            return {"mlp_type": mlp_type, "activation_fn": function}
        mlp_type, function = flags[chosen[0]] if chosen else ("glu" if self.get("gated_linear_unit", False) else "mlp", F.gelu)
        if chosen and self.get("gated_linear_unit", mlp_type == "glu") != (mlp_type == "glu"):
            self.problem("gated_linear_unit", f"{mlp_type == 'glu'} with {chosen[0]}", self.get("gated_linear_unit"))
        return {"mlp_type": mlp_type, "activation_fn": function}

    def _shared_expert(self) -> dict[str, Any]:
        size = self.get("moe_shared_expert_intermediate_size")
        if not size:
            return {}
        if self.get("tensor_model_parallel_size", 1) > 1:
            self.problem("tensor_model_parallel_size", "1 with moe_shared_expert_intermediate_size: the shared expert is not divided",
                         self.get("tensor_model_parallel_size"))
        return {"shared_expert": True, "shared_expert_hidden_size": size, "bias": False,
                "moe_shared_expert_gate": bool(self.get("moe_shared_expert_gate", False))}

    def _dtype(self) -> dict[str, Any]:
        if not self.has("fp16", "bf16", "params_dtype"):
            return {}
        half, brain, parameters = bool(self.get("fp16", False)), bool(self.get("bf16", False)), self.get("params_dtype", torch.float32)
        if half and brain:
            self.problem("bf16", "False with fp16", True)
        # Megatron converts parameters of float32 once the model is built.
        dtype = torch.float16 if half else torch.bfloat16 if brain else parameters
        if parameters not in (dtype, torch.float32):
            self.problem("params_dtype", f"{dtype}, as fp16 and bf16 say, or torch.float32", parameters)
        if dtype not in (torch.float16, torch.bfloat16, torch.get_default_dtype()):
            self.problem("params_dtype", f"torch's default dtype {torch.get_default_dtype()}, torch.bfloat16 or torch.float16", dtype)
        return {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}

    def _initial_values(self) -> dict[str, Any]:
        given = {name: self.get(name) for name in ("init_method", "output_layer_init_method") if self.has(name)}
        if self.has("init_method_std"):
            std, layers = self.get("init_method_std"), self.get("num_layers")
            given.setdefault("init_method", partial(torch.nn.init.normal_, mean=0.0, std=std))
            if layers is None and "output_layer_init_method" not in given:
                self.problem("num_layers", "the number of layers with init_method_std", None)
            depth = (1 if self.get("is_hybrid_model", False) else 2) * (layers or 1)
            given.setdefault("output_layer_init_method", partial(torch.nn.init.normal_, mean=0.0, std=std / math.sqrt(depth)))
        return given

    # -------------------------------------------------------------------------------------------------------- parallelism

    def _parallelism(self) -> dict[str, Any]:
        if not _unset(self.get("fp8")) and not isinstance(self.get("fp8_recipe"), Float8BlockScaling):
            self.problem("fp8", "None, or an fp8_recipe that is a gbmoe.Float8BlockScaling", self.get("fp8"))
        sharded = "expert_tensor_parallel_size" if self.has("expert_tensor_parallel_size") else "tensor_model_parallel_size"
        if self.get(sharded, 1) > 1:
            self.problem(sharded, "1 (--expert-tensor-parallel-size 1): experts are not divided among tensor-parallel ranks",
                         self.get(sharded))
        return {**self._expert_parallelism(), **self._virtual_stages()}

    def _expert_parallelism(self) -> dict[str, Any]:
        if not self.has("expert_model_parallel_size"):
            return {}
        size, group = self.get("expert_model_parallel_size"), self.get("expert_parallel_group")
        if size > 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) != size:
            self.problem("expert_parallel_group", f"the group of the expert_model_parallel_size == {size} ranks"
                         " (megatron.core.parallel_state.get_expert_model_parallel_group())",
                         f"{'the default group, of' if group is None else 'one of'} {dist.get_world_size(group)}")
        return {"moe_expert_model_parallelism": size > 1}

    def _virtual_stages(self) -> dict[str, Any]:
        """The number of layers with experts in each virtual stage, which must be the same in all."""
        per_stage, stages = self.get("num_layers_per_virtual_pipeline_stage"), self.get("virtual_pipeline_model_parallel_size")
        pattern = self._pattern
        if (per_stage is None and stages is None) or not pattern:
            return {}
        if per_stage is None:
            chunks = self.get("pipeline_model_parallel_size", 1) * stages
            if len(pattern) % chunks:
                self.problem("virtual_pipeline_model_parallel_size", f"stages of equal size of num_layers == {len(pattern)}", stages)
            per_stage = len(pattern) // chunks or 1
        counts = {sum(pattern[first : first + per_stage]) for first in range(0, len(pattern), per_stage)}
        if len(counts) > 1:
            self.problem("moe_layer_freq", "as many layers with experts in each virtual stage as in the others",
                         self.get("moe_layer_freq", 1))
        return {"num_layers_per_virtual_pipeline_stage": max(counts)}


def _own_activation(function: Any) -> Any:
    """gbmoe's function for one of Megatron's own, which has a kernel or can be traced; others as they are."""
    name = getattr(function, "__name__", getattr(function, "name", None))
    own = {"squared_relu": relu_squared, "quick_gelu": quick_gelu, "fast_gelu": DEFAULT_ACTIVATION_FN}
    return own.get(str(name), function)
