"""Hugging Face transformers 5: experts_implementation="gbmoe".

    import gbmoe.compat.transformers
    gbmoe.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="gbmoe")
    model.set_experts_implementation("eager")   # and back: "gbmoe"

    gbmoe.compat.transformers.register(fp8_recipe=gbmoe.Float8BlockScaling())
    model.set_experts_implementation("gbmoe_float8")

It works for every model whose experts dispatch through transformers' ExpertsInterface: gated and plain experts, biases,
weights [E,out,in] and transposed [E,in,out], concatenated and interleaved gates, a norm after the experts, and transformers' expert
parallelism. Parameters are not copied, transposed or renamed, and checkpoints do not change.

Experts without a norm, whose activation and gate have kernels (`fused_function`), are one operator, gbmoe.expert_mlp, which reads the
weights where they lie. The others are composed of gather, products, the model's own gate function and scatter.

Rows are multiplied by the factors of PEFT's LoRA (target_parameters), which are not added to the weights; see gbmoe/compat/peft.py.

Shape suffixes: T tokens, K slots a token, E experts on this rank, H hidden, F ffn hidden (twice that before a gate),
P rows of the plan, N columns, B columns of ones.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.parametrize import type_before_parametrizations

from gbmoe import engines
from gbmoe._checks import FLOATING, require
from gbmoe._torch_names import wraps_tensors
from gbmoe.compat._peft_factors import lora_of, original, register_with_peft, take_factors_of_peft
from gbmoe.compat._uncalled_experts import uncalled, warn, warn_of_built_models
from gbmoe.float8 import Float8BlockScaling
from gbmoe.lora_factors import ExpertLora, LoraFactors, joined_operands
from gbmoe.lora_of_peft import may_have_changes
from gbmoe.ops import expert_mlp, padded_gather, padded_scatter
from gbmoe.ops.activations import ClampedSilu, activation_name
from gbmoe.ops.gmm import computed_dtype, grouped
from gbmoe.ops.plan_sizes import plan_sizes
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import WeightLayout

__all__ = ["experts_forward", "fused_function", "register", "uncalled"]

_NAME = 'experts_implementation="gbmoe"'
_DEFAULT = "grouped_mm"  # what transformers takes where no implementation is named
_DEFAULT_OF_DECODING = "batched_mm"  # what `generate` puts in its place for decode steps, except on a CPU
# Biases are added by a product with a matrix of ones, of this many columns, because engines need rows of multiples of 16 bytes.
_BIAS_WIDTH = 8


def register(fp8_recipe: Float8BlockScaling | None = None, *, as_default: bool = False, model: torch.nn.Module | None = None) -> None:
    """Add "gbmoe" to the experts implementations of the installed transformers. Calling it again changes nothing.

    Args:
        fp8_recipe: add "gbmoe_float8" as well, which computes products of rows as the recipe says. A later call with another recipe
            takes its place.
        as_default: models that name no implementation take it too, and so do models that name "grouped_mm", transformers' default, or
            "batched_mm", which `generate` puts in its place to decode on a GPU (not in torch.export, for which transformers' exporters
            choose it); with the recipe if there is one. A warning names the modules of models built later that call no
            implementation, once for each reason. For programs that nobody edits see `python -m gbmoe transformers`.
        model: a loaded model. A warning names its modules that call no implementation, whatever is set (see `uncalled`).

    Raises:
        ImportError: without transformers 5.8 or newer, or where it cannot be imported; the message has the cause.
    """
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
        from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward
    except ImportError as error:
        raise ImportError(_why_not_importable(error), name=error.name, path=error.path) from error
    register_with_peft()
    ExpertsInterface.register("gbmoe", experts_forward)
    _recognise_activations()
    default: Callable = experts_forward
    if fp8_recipe is not None:
        engines.float8(fp8_recipe, "auto")  # raises for what is no recipe
        default = partial(experts_forward, fp8_recipe=fp8_recipe)
        ExpertsInterface.register("gbmoe_float8", default)
    if as_default:
        ExpertsInterface.register(_DEFAULT, default)
        ExpertsInterface.register(_DEFAULT_OF_DECODING, _unless_exported(default, batched_mm_experts_forward))
        warn_of_built_models()
    # Float8 experts use a table of their own. The function is registered there too, so that it can say why it does not take them.
    FP8ExpertsInterface.register("gbmoe", experts_forward)
    missed = {} if model is None else uncalled(model)
    if model is not None and missed:
        warn(model, missed, stacklevel=2)


def _unless_exported(function: Callable, own: Callable) -> Callable:
    """`function`, and transformers' `own` in torch.export, whose targets (ONNX Runtime, ExecuTorch) know no operators of gbmoe."""
    def forward(self, *args, **kwargs):
        return (own if torch.compiler.is_exporting() else function)(self, *args, **kwargs)
    return forward


def _why_not_importable(error: ImportError) -> str:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None:  # not installed; or a checkout on the path that cannot be imported because another package is missing
        unfit = (error.name or "").partition(".")[0] == "transformers"
    else:
        unfit = tuple(map(int, re.findall(r"\d+", version)[:2])) < (5, 8)
    if unfit:
        return ("gbmoe.compat.transformers needs transformers 5.8 or newer: pip install 'gbmoe[transformers]', or pip install"
                f" 'transformers>=5.8' (installed: {version or 'none'})")
    return (f"gbmoe.compat.transformers: transformers {version or 'of unknown version'} is installed, but its import failed:"
            f" {error}")


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *, engine: str = "auto",
    fp8_recipe: Float8BlockScaling | None = None,
) -> torch.Tensor:
    """The experts of a transformers model. transformers calls this instead of the experts module's own forward.

    Differentiable in the hidden states, the router's weights and every parameter. An id outside [0,E), such as the
    sentinel of transformers' expert parallelism, drops its slot: it adds nothing, its gradients are zero, and its row
    is never read.

    Args:
        self: a module decorated with transformers' use_experts_implementation. Its parameters are gate_up_proj (up_proj
            where it has no gate) and down_proj, [E,out,in] or, transposed, [E,in,out], and their biases [E,out];
            bfloat16, float16, float32 or float64.
        hidden_states: [T,H], the parameters' dtype, or any under autocast.
        top_k_index: [T,K], int32 or int64.
        top_k_weights: [T,K], any floating dtype.
        engine: of the products of rows, see gbmoe.engines.
        fp8_recipe: compute products of rows in float8, see gbmoe.Float8BlockScaling; not together with a named engine.

    Returns:
        [T,H], dtype of hidden_states.

    Raises:
        TypeError: for quantised parameters and for other tensors that do not hold plain elements, by name; and for adapters of parameters
            that are kept in 4 bits.
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    up_name = "gate_up_proj" if self.has_gate else "up_proj"
    names = [up_name, "down_proj", *([f"{up_name}_bias", "down_proj_bias"] if self.has_bias else ())]
    lora = _adapters(self, up_name) if may_have_changes(self) else None
    # Cast under autocast before the tokens are copied, so that half as many bytes are moved.
    x_TH = hidden_states.to(computed_dtype(hidden_states))
    up, down, *biases = (_plain(self, name, x_TH.dtype) for name in names)
    up_bias, down_bias = biases or (None, None)

    plan = RoutingPlan.from_experts(top_k_index, up.size(0), check="none")
    function = fused_function(self)
    if function is not None:
        out_TH = expert_mlp(x_TH, plan, up, down, weights_TK=top_k_weights, activation=function, engine=engine, fp8_recipe=fp8_recipe,
                            layout=_layout(self), w1_bias=up_bias, w2_bias=down_bias, lora=lora)
        return out_TH.to(hidden_states.dtype)
    if fp8_recipe is not None:
        engine = engines.float8(fp8_recipe, engine)
    # Separately for each product, because its row lengths decide which engine computes it and where that engine needs the sizes.
    up_sizes_E, down_sizes_E = (plan_sizes(plan, x_TH, w.transpose(1, 2) if self.is_transposed else w, engine) for w in (up, down))
    # Rows of dropped slots may hold anything. If the gradient of another parameter (of a norm or an activation) sums over rows, they
    # must be zero.
    sums_over_rows = any(True for _ in _others(self))
    live_P1 = plan.slot_of_row_P.unsqueeze(1) >= 0 if sums_over_rows else None

    of_up, of_down = ((), ()) if lora is None else (lora.of("w1"), lora.of("w2"))
    h_PF = _linear(padded_gather(x_TH, plan), up, up_bias, up_sizes_E, self.is_transposed, live_P1, engine, of_up)
    a_PF = _live(live_P1, self._apply_gate(h_PF) if self.has_gate else self.act_fn(h_PF))
    y_PH = _linear(a_PF, down, down_bias, down_sizes_E, self.is_transposed, live_P1, engine, of_down)
    if getattr(self, "has_post_expert_norm", False):  # older releases do not know it
        y_PH = self.post_expert_norm(y_PH)
    return padded_scatter(y_PH, plan, top_k_weights).to(hidden_states.dtype)


def _clamped(limit: str, alpha: str | None = None, gate_offset: float = 0.0) -> Callable[[Any], ClampedSilu]:
    """A gate that clamps both branches to the module's attribute `limit`; `alpha` names an attribute, too."""
    def of(module: Any) -> ClampedSilu:
        bound = float(getattr(module, limit))
        return ClampedSilu(1.0 if alpha is None else float(getattr(module, alpha)), bound, bound, gate_offset)
    return of


# Gate functions of transformers' models that have kernels, by the class that defines them. "silu": where the model calls act_fn, it has to
# be that.
_GATES: dict[str, tuple[str, Callable[[Any], ClampedSilu]]] = {
    "DeepseekV4Experts": ("silu", _clamped("limit")),
    "GptOssExperts": ("", _clamped("limit", "alpha", 1.0)),
    "OpenAIPrivacyFilterExperts": ("", _clamped("limit", "alpha", 1.0)),
    "Glm5NextTextExperts": ("", _clamped("swiglu_limit")),
    "HYV4Experts": ("", _clamped("swiglu_limit")),
    "HYV4VLExperts": ("", _clamped("swiglu_limit")),
    "MiniMaxM3VLExperts": ("", _clamped("swiglu_limit", "swiglu_alpha", 1.0)),
}


def fused_function(module: Any) -> str | ClampedSilu | None:
    """The activation by which gbmoe.expert_mlp computes what this experts module does, or None where it does not.

    Args:
        module: decorated with transformers' use_experts_implementation.
    """
    if getattr(module, "has_post_expert_norm", False) or any(True for _ in _others(module)):
        return None
    activation = activation_name(module.act_fn, _ACTIVATIONS) if callable(getattr(module, "act_fn", None)) else None
    if not module.has_gate:
        return activation
    if "_apply_gate" in module.__dict__:
        return None
    kind = _gate_of(type_before_parametrizations(module))
    if kind == "default":
        return activation if _is_concatenated(module) else None  # it takes halves, also where a module says that it does not have them
    needs, function = _GATES.get(kind, ("", None))
    return function(module) if function is not None and needs in ("", activation) else None


def _gate_of(experts: type) -> str:
    """Which gate function a class of experts has: "default", a key of _GATES, or ""; asked once, when `register` or a forward first meets
    the class. Parametrizations make a class of their own for a module, PEFT in each forward: not those."""
    if experts not in _KNOWN_GATES:
        gate: Any = experts._apply_gate  # type: ignore[attr-defined]
        where, owner = gate.__module__, gate.__qualname__.removesuffix("._apply_gate")
        default = where == "transformers.integrations.moe" and gate.__name__ == "_default_apply_gate"
        _KNOWN_GATES[experts] = "default" if default else owner if where.startswith("transformers.models.") and owner in _GATES else ""
    return _KNOWN_GATES[experts]


_KNOWN_GATES: dict[type, str] = {}
# A compiler calls it instead of tracing it.
_gate_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
# transformers' own modules for activations with kernels; filled by `register`, which imports transformers.
_ACTIVATIONS: dict[type, tuple[str, Callable]] = {}


def _recognise_activations() -> None:
    from transformers import activations
    for owner, name in (("SiLUActivation", "silu"), ("NewGELUActivation", "gelu_tanh"), ("PytorchGELUTanh", "gelu_tanh"),
                        ("GELUTanh", "gelu_tanh"), ("GELUActivation", "gelu"), ("ReLUSquaredActivation", "relu_squared"),
                        ("LinearActivation", "identity")):
        found: Any = getattr(activations, owner, None)
        if found is not None:
            _ACTIVATIONS[found] = (name, found.forward)


def _others(module: torch.nn.Module) -> Iterator[str]:
    """Names of parameters that are no expert's matrix or bias, and none of which these are computed (as PEFT does with LoRA on experts):
    of a norm, or of an activation."""
    if module._parameters.keys() <= _OWN_PARAMETERS and not any(
            child is not None and (child._parameters or child._modules) for child in module._modules.values()):
        return  # the usual case, in a tenth of the time
    for name, _ in module.named_parameters():
        of = name.split(".")[1] if name.startswith("parametrizations.") else name
        if of not in _OWN_PARAMETERS:
            yield name


_OWN_PARAMETERS = {name + kind for name in ("gate_up_proj", "up_proj", "down_proj") for kind in ("", "_bias")}


def _is_concatenated(module: Any) -> bool:
    return getattr(module, "is_concatenated", True)  # older releases do not know it


def _layout(module: Any) -> WeightLayout:
    gate_up = "separate" if not module.has_gate else "gate_first" if _is_concatenated(module) else "interleaved"
    return _LAYOUTS[gate_up, bool(module.is_transposed)]


# By the order of gate and up and by is_transposed.
_LAYOUTS = {(gate_up, transposed): WeightLayout(gate_up, up_transposed=transposed, down_transposed=not transposed)
            for gate_up in ("separate", "gate_first", "interleaved") for transposed in (False, True)}


def _plain(module: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The parameter `name`, without low-rank changes. Raises TypeError where it does not hold plain elements to multiply by, of `dtype` or
    cast to it by autocast."""
    tensor = original(module, name) if may_have_changes(module) else getattr(module, name)
    if tensor.dtype not in FLOATING or wraps_tensors(tensor):
        require(False, _NAME, f"{type(module).__name__}.{name}", "a plain tensor of bfloat16, float16, float32 or float64"
                " (choose another experts_implementation for quantised experts)",
                f"{type(tensor).__name__} of {tensor.dtype}", TypeError)
    if tensor.dtype != dtype and computed_dtype(tensor) != dtype:
        require(False, _NAME, f"{type(module).__name__}.{name}", f"the dtype of the hidden states, {dtype} (load the model in one dtype, or"
                " compute under torch.autocast)", tensor.dtype, TypeError)
    return tensor


def _adapters(module: Any, up_name: str) -> ExpertLora | None:
    take_factors_of_peft(module)
    return lora_of(module, up_name, bool(module.is_transposed), _NAME)


def _linear(rows_P, weight, bias_EN, sizes_E, is_transposed, live_P1, engine, adapters: tuple[LoraFactors, ...]):
    """rows @ weight[e] + bias[e], [P,N], with e the expert of each row, and what its adapters add."""
    out_PN = _grouped(rows_P, weight, sizes_E, not is_transposed, engine)
    if adapters:
        a_ERK, b_ERN = joined_operands(adapters, computed_dtype(rows_P))
        # Few columns, which other engines may take than that of the weights.
        out_PN = out_PN + _grouped(_grouped(rows_P, a_ERK, sizes_E, True, engine), b_ERN, sizes_E, False, engine)
    if bias_EN is not None:
        # The bias is added by a product with ones. Then its gradient is a grouped GEMM too, which sums in float32 and in a fixed
        # order, and does not read the rows of dropped slots.
        ones_PB = rows_P.new_ones(rows_P.size(0), _BIAS_WIDTH)
        out_PN.add_(_grouped(ones_PB, F.pad(bias_EN.unsqueeze(1), (0, 0, 0, _BIAS_WIDTH - 1)), sizes_E, False, "auto"))
    return _live(live_P1, out_PN)


def _grouped(a, b, sizes_E, trans_b, engine):
    return grouped(a, b, sizes_E, False, trans_b, engine=engine)  # the groups do not fill all rows where slots are dropped


def _live(live_P1, rows):
    """The rows, with zeros in those without a slot; unchanged where live_P1 is None."""
    return rows if live_P1 is None else torch.where(live_P1, rows, 0)
