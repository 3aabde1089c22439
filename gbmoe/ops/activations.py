"""Which activations have kernels: names, torch's own functions and modules that are recognised, and gates with constants.

Shape suffixes: P rows, F ffn hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.modules import module as modules

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import require
from gbmoe.plain import plain_activation


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x) ** 2, the function of the activation "relu_squared", for what takes a callable."""
    return F.relu(x).square()


class GatingActivation:
    """An activation that changes what it is multiplied by, too: called with h it is the activation, with h and g the whole gated unit."""

    @property
    def code(self) -> str:
        """Its name and constants, as gbmoe.plain.plain_activation.functions takes them."""
        raise TypeError(f"{type(self).__name__} does not say what it is")

    def __call__(self, h_PF: torch.Tensor, g_PF: torch.Tensor | None = None) -> torch.Tensor:
        """act(h), or act(h) * gate(g), in float32 (float64 for float64) and rounded once; differentiable."""
        value, gate = plain_activation.functions(self.code)
        wide = accumulate_dtype(h_PF.dtype)
        a_PF = value(h_PF.to(wide), False)
        return (a_PF if g_PF is None else a_PF * gate(g_PF.to(wide), False)).to(h_PF.dtype)


@dataclass(frozen=True)
class ClampedSilu(GatingActivation):
    """y * sigmoid(alpha * y) with y = min(h, limit), times min(max(g, -gate_limit), gate_limit) + gate_offset.

    DeepSeek-V4, GLM-5 and Hunyuan-4 clamp both branches; gpt-oss and MiniMax-M3 have alpha = 1.702 and an offset of 1 besides. Beyond a
    limit a branch's gradient is 0; at the limit it is that below it, as torch.clamp's is up to torch 2.13 (0 from 2.14 on).

    Raises:
        ValueError: for an alpha or an offset that is not finite, and for a limit that is not above 0.

    Example:
        >>> x, ids = torch.randn(6, 16), torch.randint(4, (6, 2))
        >>> w1, w2, v1 = (torch.randn(4, 32, 16) for _ in range(3))
        >>> plan = gbmoe.RoutingPlan.from_experts(ids, num_experts=4)
        >>> gpt_oss = ClampedSilu(alpha=1.702, limit=7, gate_limit=7, gate_offset=1)
        >>> gbmoe.expert_mlp(x, plan, w1, w2, v1, activation=gpt_oss).shape
        torch.Size([6, 16])
    """

    alpha: float = 1.0
    limit: float = math.inf
    gate_limit: float = math.inf
    gate_offset: float = 0.0

    def __post_init__(self):
        for name in ("alpha", "gate_offset"):
            value = getattr(self, name)
            require(math.isfinite(value), "ClampedSilu", name, "a finite number", value)
        for name in ("limit", "gate_limit"):
            value = getattr(self, name)
            require(value > 0, "ClampedSilu", name, "a number above 0", value)

    @property
    def code(self) -> str:
        return f"clamped_silu {float(self.alpha)!r} {float(self.limit)!r} {float(self.gate_limit)!r} {float(self.gate_offset)!r}"


@dataclass(frozen=True)
class Situ(GatingActivation):
    """beta * tanh(h / beta) * sigmoid(h), times gate_beta * tanh(g / gate_beta): Kimi-K3's.

    Raises:
        ValueError: for a beta that is not above 0 or not finite.
    """

    beta: float
    gate_beta: float

    def __post_init__(self):
        for name in ("beta", "gate_beta"):
            value = getattr(self, name)
            require(0 < value < math.inf, "Situ", name, "a finite number above 0", value)

    @property
    def code(self) -> str:
        return f"situ {float(self.beta)!r} inf {float(self.gate_beta)!r} 0.0"


def gated(activation: Callable, h_PF: torch.Tensor, g_PF: torch.Tensor) -> torch.Tensor:
    """The gated unit of any activation: what a GatingActivation makes of h and g, or activation(h) * g."""
    return activation(h_PF, g_PF) if isinstance(activation, GatingActivation) else activation(h_PF) * g_PF


# Modules and functions for which there are kernels; modules with the forward method that the kernels stand for.
_MODULES = {torch.nn.SiLU: ("silu", torch.nn.SiLU.forward), torch.nn.ReLU: ("relu", torch.nn.ReLU.forward),
            torch.nn.Identity: ("identity", torch.nn.Identity.forward), torch.nn.GELU: ("gelu", torch.nn.GELU.forward)}
_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", relu_squared: "relu_squared"}
_GELUS = {"tanh": "gelu_tanh", "none": "gelu"}  # by `approximate`


def activation_name(activation: str | Callable, more_modules: dict[type, tuple[str, Callable]] | None = None) -> str | None:
    """The name in plain_activation.ACTIVATIONS, or the code of a GatingActivation, of an activation that has a kernel; None for any other
    callable.

    Only torch's own functions and modules and relu_squared count: no subclass, and no module that has hooks or a `forward` of its own.
    `more_modules`: classes that count too, with their names and the forward methods that the kernels stand for.
    """
    if isinstance(activation, str):
        if activation not in plain_activation.ACTIVATIONS:
            require(False, "expert_mlp", "activation", f"a callable or one of {', '.join(plain_activation.ACTIVATIONS)}", repr(activation))
        return activation
    if isinstance(activation, GatingActivation):
        return activation.code
    for function, known_name in _FUNCTIONS.items():  # compared by identity, as a callable need not have a hash
        if function is activation:
            return known_name
    if not callable(activation):
        require(False, "expert_mlp", "activation", f"a callable or one of {', '.join(plain_activation.ACTIVATIONS)}", repr(activation),
                TypeError)
    if type(activation) is partial:
        known = activation.func is F.gelu and not activation.args and set(activation.keywords) <= {"approximate"}
        return _GELUS.get(activation.keywords.get("approximate", "none")) if known else None
    if isinstance(activation, torch.nn.Module) and type(activation) in _MODULES:
        name, forward = _MODULES[type(activation)]
        # Comparing a bound method's __func__ would do the same, but torch.compile cannot trace it.
        if _is_hooked(activation) or "forward" in activation.__dict__ or type(activation).forward is not forward:
            return None
        return _GELUS.get(str(activation.approximate)) if name == "gelu" else name
    if more_modules and isinstance(activation, torch.nn.Module) and type(activation) in more_modules:
        name, forward = more_modules[type(activation)]
        altered = _is_hooked(activation) or "forward" in activation.__dict__ or type(activation).forward is not forward
        return None if altered else name
    return None


def _is_hooked(module: torch.nn.Module) -> bool:
    """True where calling the module would call more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                or modules._global_forward_hooks or modules._global_forward_pre_hooks or modules._global_backward_hooks
                or modules._global_backward_pre_hooks)
