"""NeMo Automodel 0.7.0: the experts of `BackendConfig(experts="torch_mm")` computed by gbmoe.

    import gbmoe.compat.automodel
    gbmoe.compat.automodel.register()

It replaces nemo_automodel.components.moe.experts._torch_mm_experts_fwd, which GroupedExperts and GroupedExpertsDeepEP call with rows in
expert order. Routers, dispatchers, parameters and checkpoints remain Automodel's own, and so do experts with biases, which do not call it.

LoRA of experts (nemo_automodel.components._peft.lora_experts) computes its products itself: there the method
GroupedExpertsLoRA._forward_grouped_mm and GroupedExpertsDeepEPLoRA.forward are replaced, with and without biases.

Shape suffixes: T tokens, K slots a token, R rows, E experts, H hidden, F ffn hidden (twice that before a gate).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from functools import partial

import torch

from gbmoe._checks import require
from gbmoe.compat._releases import require_parameters, require_release
from gbmoe.float8 import Float8BlockScaling
from gbmoe.lora_factors import ExpertLora, LoraFactors
from gbmoe.ops import expert_mlp, grouped_mlp
from gbmoe.ops.activations import ClampedSilu
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import WeightLayout

__all__ = ["experts_forward", "fused_function", "register"]

_ADAPTER = "gbmoe.compat.automodel"
_LORA_PARAMETERS = ("self", "x", "token_mask", "weights", "indices", "gate_and_up_projs", "down_projs", "lora_gate_and_up_A",
                    "lora_gate_and_up_B", "lora_down_A", "lora_down_B", "n_local_experts", "experts_start_idx")
_PARAMETERS = ("hidden_states", "gate_and_up_projs", "down_projs", "tokens_per_expert", "permuted_probs", "activation_fn", "use_mxfp8")


def register(fp8_recipe: Float8BlockScaling | None = None) -> None:
    """Let Automodel's grouped experts without biases be computed by gbmoe, in this process. Calling it again changes nothing.

    Activations that `fused_function` does not know, and experts="torch_mm_mxfp8", stay with Automodel's own function. For experts with
    LoRA no sum of weights and adapters is made. Where only the adapters are trained, no gradients of the weights are computed.

    Args:
        fp8_recipe: compute products of rows as the recipe says, except for experts with LoRA. A later call with another recipe takes its
            place.

    Raises:
        ImportError: for another release than 0.7.0, and where the function has other parameters.
    """
    require_release(_ADAPTER, "nemo-automodel", ("0.7.0",))
    from nemo_automodel.components.moe import experts
    theirs = inspect.unwrap(experts._torch_mm_experts_fwd)
    require_parameters(_ADAPTER, theirs, _PARAMETERS)

    @functools.wraps(theirs)
    def forward(hidden_states, gate_and_up_projs, down_projs, tokens_per_expert, permuted_probs, activation_fn, use_mxfp8=False):
        rows = (hidden_states, gate_and_up_projs, down_projs, tokens_per_expert, permuted_probs)
        function = None if use_mxfp8 else fused_function(activation_fn)
        if function is None:
            return theirs(*rows, activation_fn, use_mxfp8=use_mxfp8)
        return _experts(*rows, *function, fp8_recipe=fp8_recipe)

    experts._torch_mm_experts_fwd = forward
    _register_lora()


def _register_lora() -> None:
    from nemo_automodel.components._peft import lora_experts
    local_class, dispatched_class = lora_experts.GroupedExpertsLoRA, lora_experts.GroupedExpertsDeepEPLoRA
    theirs, theirs_dispatched = (inspect.unwrap(f) for f in (local_class._forward_grouped_mm, dispatched_class.forward))
    require_parameters(_ADAPTER, theirs, _LORA_PARAMETERS)
    require_parameters(_ADAPTER, theirs_dispatched, ("self", "x", "token_mask", "weights", "indices"))

    @functools.wraps(theirs)
    def forward(self, x, token_mask, weights, indices, *tensors_and_experts):
        function = fused_function(self.expert_activation_grouped)
        if function is None:
            return theirs(self, x, token_mask, weights, indices, *tensors_and_experts)
        *tensors, experts, first = tensors_and_experts
        ids_TK = torch.where(token_mask.unsqueeze(-1) & (indices >= first) & (indices < first + experts), indices - first, -1)
        plan = RoutingPlan.from_experts(ids_TK, experts, check="none")
        out_TH = expert_mlp(x, plan, *tensors[:2], weights_TK=weights, **_with_lora(self, function, tensors[2:], x.dtype))
        return out_TH.float()  # which the caller sums over ranks

    @functools.wraps(theirs_dispatched)
    def forward_dispatched(self, x, token_mask, weights, indices):
        function = fused_function(self.expert_activation)
        if function is None:
            return theirs_dispatched(self, x, token_mask, weights, indices)
        x_RH, counts_E, probs_R1 = self._dispatch_tokens(x, token_mask, weights, indices)
        up_EHF, down_EFH, *factors = (_local(getattr(self, name)).to(x.dtype) for name in _LORA_TENSORS)
        out_RH = grouped_mlp(x_RH, counts_E, up_EHF, down_EFH, weights_R=probs_R1.reshape(-1),
                             **_with_lora(self, function, factors, x.dtype))
        return self.token_dispatcher.token_unpermutation(out_RH)

    local_class._forward_grouped_mm, dispatched_class.forward = forward, forward_dispatched


_LORA_TENSORS = ("gate_and_up_projs", "down_projs", "lora_gate_and_up_A", "lora_gate_and_up_B", "lora_down_A", "lora_down_B")


def _with_lora(module, function, factors, dtype: torch.dtype) -> dict:
    """The keywords by which grouped_mlp and expert_mlp compute a module with LoRA, of its factors A [E,in,r] and B [E,r,out]."""
    layout, activation = function
    up_a, up_b, down_a, down_b = (factor.transpose(1, 2) for factor in factors)
    lora = ExpertLora(w1=LoraFactors(up_a, up_b, module.scale), w2=LoraFactors(down_a, down_b, module.scale))
    biases = {}
    if module.expert_bias:
        biases = {"w1_bias": _local(module.gate_up_proj_bias).to(dtype), "w2_bias": _local(module.down_proj_bias).to(dtype)}
    return {"activation": activation, "layout": layout, "lora": lora, **biases}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def experts_forward(
    hidden_states: torch.Tensor, gate_and_up_projs: torch.Tensor, down_projs: torch.Tensor, tokens_per_expert: torch.Tensor,
    permuted_probs: torch.Tensor, activation_fn: Callable, *, engine: str = "auto", fp8_recipe: Float8BlockScaling | None = None,
) -> torch.Tensor:
    """What _torch_mm_experts_fwd computes, by gbmoe.grouped_mlp: out[r] = activation(x[r] @ up[e], probs[r]) @ down[e].

    Automodel multiplies the activation by the probabilities. gbmoe multiplies the result by them, in float32, which is equal except for
    the rounding. Differentiable in the rows, both weights and the probabilities.

    Args:
        hidden_states: [R,H] in expert order, any floating dtype. Rows after the sum of the counts come out as zeros.
        gate_and_up_projs: [E,H,F], dtype of the rows; the gate in the first half of the columns, for quick_geglu in the even ones.
        down_projs: [E,F,H].
        tokens_per_expert: [E], int32 or int64, on the device of the rows. The host does not wait for it.
        permuted_probs: [R,1], any floating dtype.
        activation_fn: one that `fused_function` knows.
        engine, fp8_recipe: see grouped_mlp.

    Returns:
        [R,H], dtype of the rows.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    function = fused_function(activation_fn)
    if function is None:
        require(False, _ADAPTER, "activation_fn", f"one of Automodel's {', '.join(_FUNCTIONS)}", repr(activation_fn))
    layout, activation = function  # type: ignore[misc]
    return _experts(hidden_states, gate_and_up_projs, down_projs, tokens_per_expert, permuted_probs, layout, activation, engine=engine,
                    fp8_recipe=fp8_recipe)


def _experts(x_RH, up_EHF, down_EFH, counts_E, probs_R1, layout, activation, **options):
    return grouped_mlp(x_RH, counts_E, up_EHF, down_EFH, weights_R=probs_R1.reshape(-1), activation=activation, layout=layout, **options)


_GATE_FIRST = WeightLayout("gate_first", up_transposed=True)
_INTERLEAVED = WeightLayout("interleaved", up_transposed=True)
_NO_GATE = WeightLayout(up_transposed=True)


def _clamped(alpha: float, limit: float, offset: float) -> ClampedSilu:
    return ClampedSilu(float(alpha), float(limit), float(limit), float(offset))


# What Automodel's get_expert_activation_for_deepep returns: the layout of up's weights and the activation, by the keywords of a partial.
_FUNCTIONS: dict[str, Callable[..., tuple[WeightLayout, str | ClampedSilu]]] = {
    "weighted_bias_swiglu_impl": lambda: (_GATE_FIRST, "silu"),
    "weighted_bias_geglu_impl": lambda: (_GATE_FIRST, "gelu_tanh"),
    "relu2_deepep": lambda: (_NO_GATE, "relu_squared"),
    "swiglu_clamped_deepep": lambda limit: (_GATE_FIRST, _clamped(1.0, limit, 0.0)),
    "swiglu_oai_deepep": lambda alpha=1.702, limit=7.0: (_GATE_FIRST, _clamped(alpha, limit if limit > 0 else math.inf, 1.0)),
    "quick_geglu_deepep": lambda alpha=1.702, limit=7.0, linear_offset=1.0: (_INTERLEAVED, _clamped(alpha, limit, linear_offset)),
}


def fused_function(activation_fn: Callable) -> tuple[WeightLayout, str | ClampedSilu] | None:
    """The layout of up's weights and the activation by which gbmoe.grouped_mlp computes Automodel's activation_fn, or None.

    Args:
        activation_fn: as an experts module of Automodel keeps it: one of its functions, or a functools.partial of one.
    """
    function, keywords = activation_fn, {}
    if isinstance(activation_fn, partial):
        if activation_fn.args:
            return None
        function, keywords = activation_fn.func, activation_fn.keywords
    name = getattr(function, "__name__", "")
    if name not in _FUNCTIONS or not function.__module__.startswith("nemo_automodel.components.moe."):
        return None
    try:
        return _FUNCTIONS[name](**keywords)
    except (TypeError, ValueError):  # other keywords than those above, or a limit that ClampedSilu does not take
        return None
