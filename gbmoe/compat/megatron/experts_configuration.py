"""What a TransformerConfig asks of its experts, in gbmoe's words, and what of it gbmoe does not compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu

from gbmoe._checks import require
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops.activations import ClampedSilu, activation_name
from gbmoe.weight_layout import WeightLayout

ADAPTER = "gbmoe.compat.megatron"
_QUICK = (activations.quick_gelu, fused_bias_geglu.quick_gelu)
# Megatron's own functions that have kernels; torch's are known to gbmoe.
_NAMES = {activations.squared_relu: "relu_squared", activations.fast_gelu: "gelu_tanh"}
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}

# Fields that change what experts compute or keep: the values that gbmoe's experts take, and why they take no others.
_FIELDS: dict[str, tuple[tuple, str]] = {
    "fp4": ((None, False), "there is no fp4 on the GPUs that gbmoe has kernels for"),
    "fp8_param": ((None, False), "parameters stay in params_dtype and are quantised when they are read"),
    "first_last_layers_bf16": ((None, False), "experts do not know the number of their layer"),
    "quant_recipe": ((None,), "it names TransformerEngine's recipes for single modules"),
    "use_kitchen": ((None, False), "kitchen's linear layers compute the experts then"),
    "use_te_activation_func": ((None, False), "activation_func is computed in the epilogue of linear_fc1"),
    "activation_func_fp8_input_store": ((None, False), "what backward needs is kept in params_dtype"),
    "moe_paged_stash": ((None, False), "what backward needs is kept by autograd"),
    "expert_gtp_weight_remat_size": ((None, 1), "weights are read where they lie, and not gathered first"),
    "moe_mlp_glu_interleave_size": ((None, 1), "gate and up are two halves, or rows in turns"),
}


@dataclass(frozen=True)
class ExpertsConfiguration:
    """What gbmoe.grouped_mlp is told: see its arguments of these names."""

    layout: WeightLayout
    activation: str | ClampedSilu
    fp8_recipe: Float8BlockScaling | None


def configuration(config: Any, expert_tensor_parallel: int) -> ExpertsConfiguration:
    """Read a TransformerConfig.

    Raises:
        ValueError: naming the field, what gbmoe's experts take and why, and what it is.
    """
    for name, (taken, reason) in _FIELDS.items():
        value = getattr(config, name, None)
        require(value in taken, ADAPTER, name, f"{' or '.join(str(each) for each in taken if each is not None) or None} ({reason})", value)
    offloaded = _OFFLOADED & set(config.offload_modules or ()) if config.fine_grained_activation_offloading else ()
    require(not offloaded, ADAPTER, "offload_modules", "none of the experts' (what backward needs is kept by autograd)", sorted(offloaded))
    require(not (config.add_bias_linear and expert_tensor_parallel > 1), ADAPTER, "add_bias_linear",
            "False with expert_tensor_parallel_size above 1 (each rank would add linear_fc2's bias)", config.add_bias_linear)
    require(not config.moe_apply_probs_on_input or config.moe_router_topk == 1, ADAPTER, "moe_apply_probs_on_input",
            f"False with a moe_router_topk of {config.moe_router_topk}", config.moe_apply_probs_on_input)
    gate_up = "interleaved" if config.moe_mlp_glu_interleave_size == 1 else "gate_first"
    layout = WeightLayout(gate_up if config.gated_linear_unit else "separate", down_transposed=True)
    return ExpertsConfiguration(layout, _activation(config), _recipe(config))


def _activation(config: Any) -> str | ClampedSilu:
    function, clamp, offset = config.activation_func, config.activation_func_clamp_value, config.glu_linear_offset
    gated = config.gated_linear_unit
    alpha = 1.702 if any(function is each for each in _QUICK) else 1.0
    name = next((name for each, name in _NAMES.items() if each is function), None) or _known(function)
    if name == "silu" or alpha != 1.0:
        if not gated:
            clamp, offset = None, 0.0  # Megatron clamps and offsets gated units alone
        if alpha == 1.0 and clamp is None and offset == 0:
            return "silu"
        limit = math.inf if clamp is None else float(clamp)
        return ClampedSilu(alpha, limit, limit, float(offset))
    if name is None:
        require(False, ADAPTER, "activation_func", "silu, gelu, relu, squared_relu, quick_gelu or fast_gelu, which have kernels",
                getattr(function, "__name__", function))
    for field, value, neutral in (("activation_func_clamp_value", clamp, None), ("glu_linear_offset", offset, 0)):
        require(not gated or value == neutral, ADAPTER, field, f"{neutral} with {name} (silu and quick_gelu are clamped and offset)", value)
    return name  # type: ignore[return-value]


def _known(function: Callable) -> str | None:
    return activation_name(function) if callable(function) else None


def _recipe(config: Any) -> Float8BlockScaling | None:
    """gbmoe's recipe for Megatron's blockwise one, as TransformerEngine computes it by default: scales of powers of two."""
    if not config.fp8:
        return None
    require(config.fp8_recipe == "blockwise", ADAPTER, "fp8_recipe", "blockwise, with which gbmoe has kernels", config.fp8_recipe)
    require(config.fp8 == "e4m3", ADAPTER, "fp8", "e4m3, as blockwise scaling has it", config.fp8)
    return Float8BlockScaling(power_2_scale=True, float8_weight_gradients=bool(config.fp8_wgrad))
