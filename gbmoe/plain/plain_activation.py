"""The experts' activations in plain PyTorch, values and slopes, and the names and constants by which kernels know them: the path of every
device without a kernel, and the oracle of the tests. csrc/activation_formulas.cuh has the same formulas.

Shape suffixes: T tokens, K slots a token, F ffn hidden, G columns of pairs, 2F, P padded rows (see gbmoe/plan.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from gbmoe._accumulate_dtype import accumulate_dtype

# The most elements that an elementwise step widens to fp32 at a time, which bounds the memory of temporaries.
_CHUNK_ELEMENTS = 1 << 18

# 1 less the sigmoid of x is the sigmoid of -x: the subtraction would leave few bits where the sigmoid is near 1.


def _silu(x, slope):
    s = torch.sigmoid(x)
    return s * (1 + x * torch.sigmoid(-x)) if slope else x * s


def _gelu_tanh(x, slope):
    # (1 + tanh(u / 2)) / 2 is the sigmoid of u.
    linear, cubic = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
    u = x * (linear + cubic * x.square())
    s = torch.sigmoid(u)
    # From |x| = 64 on the second term is 0, and x * x must not be infinite.
    return s + x * s * torch.sigmoid(-u) * (linear + 3 * cubic * x.clamp(-64, 64).square()) if slope else x * s


def _gelu(x, slope):
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) if slope else x * cdf


def _relu(x, slope):
    return (~(x <= 0)).to(x.dtype) if slope else torch.relu(x)  # 1 at NaN, as torch's gradient


def _relu_squared(x, slope):
    return 2 * torch.relu(x) if slope else torch.relu(x).square()


def _identity(x, slope):
    return torch.ones_like(x) if slope else x


# The activations that have kernels and no constants, in the order of the enum Activation of csrc/activation_formulas.cuh. Called as
# f(x, slope): the value, or with slope the derivative.
ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "gelu": _gelu, "relu": _relu, "relu_squared": _relu_squared,
               "identity": _identity}


def _plain_gate(g, slope):
    return torch.ones_like(g) if slope else g


def _clamped(x, low, high):
    """x.clamp(low, high), whose slope is 1 at the limits, as it is in the kernels. That of torch's clamp is 0 there from torch 2.14 on."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def _clamped_silu(alpha, limit, gate_limit, gate_offset):
    def value(x, slope):
        y = _clamped(x, -math.inf, limit)
        s = torch.sigmoid(alpha * y)
        return torch.where(x <= limit, s + alpha * (y * s) * torch.sigmoid(-alpha * y), 0) if slope else y * s

    def gate(g, slope):
        return (g.abs() <= gate_limit).to(g.dtype) if slope else _clamped(g, -gate_limit, gate_limit) + gate_offset

    return value, gate


def _situ(beta, _, gate_beta, __):
    def value(x, slope):
        t, s = torch.tanh(x / beta), torch.sigmoid(x)
        return (1 - t * t) * s + beta * t * s * torch.sigmoid(-x) if slope else beta * t * s

    def gate(g, slope):
        t = torch.tanh(g / gate_beta)
        return 1 - t * t if slope else gate_beta * t

    return value, gate


# Those with constants, after the others in the enum. Their functions make (value, gate) of the constants; a gate is called as a value.
_WITH_CONSTANTS = {"clamped_silu": _clamped_silu, "situ": _situ}
ACTIVATION_INDEX = {name: index for index, name in enumerate((*ACTIVATIONS, *_WITH_CONSTANTS))}


@functools.cache
def _parsed(activation: str) -> tuple[str, list[float]]:
    name, *constants = activation.split(" ")
    return name, [float(constant) for constant in constants]


def functions(activation: str) -> tuple[Callable, Callable]:
    """(value, gate) of an activation: a name in ACTIVATIONS, or one with constants followed by them, separated by spaces."""
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation], _plain_gate
    name, constants = _parsed(activation)
    return _WITH_CONSTANTS[name](*constants)


@functools.cache
def kernel_arguments(activation: str) -> tuple[float, ...]:
    """The activation as the kernels take it (activation_of in csrc/activation_formulas.cuh): its number in the enum, and its constants."""
    name, constants = _parsed(activation)
    return float(ACTIVATION_INDEX[name]), *constants


def _row_chunks(h_PF: torch.Tensor):
    step = max(1, _CHUNK_ELEMENTS // max(1, h_PF.size(1)))
    return [slice(first, first + step) for first in range(0, h_PF.size(0), step)]


def activate(h_PF: torch.Tensor, g_PF: torch.Tensor | None, activation: str) -> torch.Tensor:
    """act(h), times the gate that `functions` makes of g where there is one, rounded once."""
    wide, out_PF = accumulate_dtype(h_PF.dtype), torch.empty_like(h_PF)
    value_of, gate_of = functions(activation)
    for rows in _row_chunks(h_PF):
        value = value_of(h_PF[rows].to(wide), False)
        out_PF[rows] = value if g_PF is None else value * gate_of(g_PF[rows].to(wide), False)
    return out_PF


def activate_pairs(pairs_PG: torch.Tensor, activation: str) -> torch.Tensor:
    """`activate` of h and g that lie element by element in pairs [P,2F]: [P,F]."""
    return activate(pairs_PG[:, ::2], pairs_PG[:, 1::2], activation).contiguous()


def activate_pairs_backward(
    pairs_PG: torch.Tensor, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`activate_backward` of pairs: (weight * a [P,F], the pairs of dh and dg [P,2F], grad_weights [T,K] or None). d is overwritten."""
    a_PF, dg_PF, grad_weights_TK = activate_backward(pairs_PG[:, ::2], pairs_PG[:, 1::2], d_PF, slot_of_row_P, weights_TK, activation)
    assert dg_PF is not None
    return a_PF.contiguous(), torch.stack((d_PF, dg_PF), -1).flatten(1), grad_weights_TK


def activate_backward(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The activation's share of the experts' backward; the formulas stand at the top of csrc/activation_kernels.cu.

    d_PF is the gradient of the activation before the router weight, and is overwritten with dh. Returns (weight * a [P,F],
    dg [P,F] or None, grad_weights [T,K] or None). Rows without a slot are zero; a slot beyond the weights counts as none.
    """
    wide = accumulate_dtype(h_PF.dtype)
    a_PF = torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    dot_P = torch.zeros(h_PF.size(0), dtype=wide, device=h_PF.device)
    value_of, gate_of = functions(activation)
    # Rows without a slot use one spare slot after the last.
    spare = 2**31 if weights_TK is None else weights_TK.numel()
    slot_P = slot_of_row_P.long()
    slot_P = torch.where((slot_P >= 0) & (slot_P < spare), slot_P, spare)
    weight_R = None if weights_TK is None else F.pad(weights_TK.reshape(-1), (0, 1))
    for rows in _row_chunks(h_PF):
        h, d = h_PF[rows].to(wide), d_PF[rows].to(wide)
        value, slope = value_of(h, False), value_of(h, True)
        gate = 1 if g_PF is None else gate_of(g_PF[rows].to(wide), False)
        slot = slot_P[rows]
        live = (slot < spare).unsqueeze(1)
        weight: torch.Tensor | int = 1
        if weight_R is not None:
            weight = weight_R.index_select(0, slot).unsqueeze(1).to(wide)
            dot_P[rows] = (value * gate * d).sum(1)
        a_PF[rows] = torch.where(live, weight * value * gate, 0).to(h_PF.dtype)
        if dg_PF is not None:
            of_gate = value * gate_of(g_PF[rows].to(wide), True)  # type: ignore[index]
            dg_PF[rows] = torch.where(live, weight * d * of_gate, 0).to(h_PF.dtype)
        d_PF[rows] = torch.where(live, weight * d * slope * gate, 0).to(h_PF.dtype)  # written last, because d may be a view of d_PF
    if weights_TK is None:
        return a_PF, dg_PF, None
    spread = torch.zeros(spare + 1, dtype=wide, device=h_PF.device)
    spread[slot_P] = dot_P
    return a_PF, dg_PF, spread[:-1].view(weights_TK.shape).to(weights_TK.dtype, copy=True)
