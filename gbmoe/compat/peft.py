"""PEFT 0.21.0 and 0.21.2: LoRA on parameters of experts (LoraConfig.target_parameters) without changed weights.

    import gbmoe.compat.peft
    gbmoe.compat.peft.register()

In each forward PEFT's ParamWrapper registers a parametrization, which makes W + scale * B @ A of all experts twice: when torch checks it,
and when it is read. For modules whose experts gbmoe computes, this module hands over the factors instead. gbmoe.compat.transformers calls
it in the first forward with adapters, if this release of PEFT is there.

What it replaces is peft.tuners.lora.layer.ParamWrapper._activate_lora; other modules keep PEFT's own. Adapters, their names, activation,
merging, checkpoints and configurations remain PEFT's.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import Any

import torch

from gbmoe._checks import FLOATING
from gbmoe._torch_names import wraps_tensors
from gbmoe.compat._releases import require_parameters, require_release
from gbmoe.layers.expert_weights import ExpertWeights
from gbmoe.lora_of_peft import Change, attached

__all__ = ["register"]

_ADAPTER = "gbmoe.compat.peft"
TESTED = ("0.21.0", "0.21.2")


def register() -> None:
    """Let PEFT's LoRA on experts' parameters be computed by gbmoe, in this process. Calling it again changes nothing.

    It concerns experts of transformers models with experts_implementation="gbmoe", and gbmoe.dMoE with one_matrix_per_expert
    or a weight_layout.

    Raises:
        ImportError: for another release than these, and where the function has other parameters.
    """
    require_release(_ADAPTER, "peft", TESTED)
    from peft.tuners.lora.layer import ParamWrapper
    theirs = inspect.unwrap(ParamWrapper._activate_lora, stop=lambda function: not hasattr(function, "_of_gbmoe"))
    theirs = getattr(theirs, "_of_gbmoe", theirs)
    require_parameters(_ADAPTER, theirs, ("self", "active_adapters"))

    @functools.wraps(theirs)
    @contextmanager
    def activate(self, active_adapters):
        names = [name for name in active_adapters or () if name in self.lora_A]
        if not names or not takes_factors(self.get_base_layer(), self.parameter_name):
            with theirs(self, active_adapters):
                yield
            return
        with attached(self.get_base_layer(), self.parameter_name, [_change(self, name) for name in names]):
            yield

    activate._of_gbmoe = theirs  # type: ignore[attr-defined]
    ParamWrapper._activate_lora = activate


def _change(wrapper: Any, name: str) -> Change:
    """What ParamWrapper.get_delta_factors(name) gives, in the dtype of the factors: the products cast them once, with the scale."""
    a, b, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a_ERK, b_ENR = a.reshape(experts, -1, a.size(-1)), b.reshape(b.size(0), -1, experts).permute(2, 0, 1)
    if wrapper._did_swap_in_out_features:
        return Change(b_ENR, a_ERK, wrapper.scaling[name])
    return Change(a_ERK.transpose(1, 2), b_ENR.transpose(1, 2), wrapper.scaling[name])


def takes_factors(module: Any, name: str) -> bool:
    """Whether gbmoe computes this module's experts from its parameter `name`, one matrix for each expert, and low-rank changes of it."""
    parameter = getattr(module, "_parameters", {}).get(name)
    if parameter is None or parameter.dim() != 3 or parameter.dtype not in FLOATING or wraps_tensors(parameter):
        return False
    if isinstance(module, ExpertWeights):
        return name in ("w1", "w2", "v1") and module.takes_adapters
    return name in ("gate_up_proj", "up_proj", "down_proj") and _is_gbmoes_in_transformers(module)


def _is_gbmoes_in_transformers(module: torch.nn.Module) -> bool:
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation is None or not hasattr(module, "has_gate"):
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from gbmoe.compat import transformers as adapter
    function: Any = ALL_EXPERTS_FUNCTIONS.get_interface(implementation, None)
    return getattr(function, "func", function) is adapter.experts_forward
