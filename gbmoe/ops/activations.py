"""Which activations have kernels: names, and torch's own functions and modules that are recognised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules

from gbmoe._checks import require
from gbmoe.kernels import plain_torch


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x) ** 2, the function of the activation "relu_squared", for what takes a callable."""
    return F.relu(x).square()


# Modules and functions for which there are kernels; modules with the forward method that the kernels stand for.
_MODULES = {torch.nn.SiLU: ("silu", torch.nn.SiLU.forward), torch.nn.ReLU: ("relu", torch.nn.ReLU.forward),
            torch.nn.Identity: ("identity", torch.nn.Identity.forward), torch.nn.GELU: ("gelu", torch.nn.GELU.forward)}
_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", relu_squared: "relu_squared"}
_GELUS = {"tanh": "gelu_tanh", "none": "gelu"}  # by `approximate`


def activation_name(activation: str | Callable) -> str | None:
    """The name in plain_torch.ACTIVATIONS of an activation that has a kernel; None for any other callable.

    Only torch's own functions and modules and relu_squared count: no subclass, and no module that has hooks or a `forward` of its own.
    """
    if isinstance(activation, str):
        require(activation in plain_torch.ACTIVATIONS, "expert_mlp", "activation",
                f"a callable or one of {', '.join(plain_torch.ACTIVATIONS)}", repr(activation))
        return activation
    require(callable(activation), "expert_mlp", "activation", f"a callable or one of {', '.join(plain_torch.ACTIVATIONS)}",
            repr(activation), TypeError)
    if type(activation) is partial:
        known = activation.func is F.gelu and not activation.args and set(activation.keywords) <= {"approximate"}
        return _GELUS.get(activation.keywords.get("approximate", "none")) if known else None
    if isinstance(activation, torch.nn.Module) and type(activation) in _MODULES:
        name, forward = _MODULES[type(activation)]
        # Comparing a bound method's __func__ would do the same, but torch.compile cannot trace it.
        if _is_hooked(activation) or "forward" in activation.__dict__ or type(activation).forward is not forward:
            return None
        return _GELUS.get(str(activation.approximate)) if name == "gelu" else name
    return next((name for function, name in _FUNCTIONS.items() if function is activation), None)


def _is_hooked(module: torch.nn.Module) -> bool:
    """True where calling the module would call more than its forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
             modules._global_forward_hooks, modules._global_forward_pre_hooks, modules._global_backward_hooks,
             modules._global_backward_pre_hooks)
    return any(len(of) > 0 for of in hooks)
