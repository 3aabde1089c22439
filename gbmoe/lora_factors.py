"""LoraFactors and ExpertLora: low-rank changes of experts' matrices, which are multiplied by instead of added to the weights.

    h = x @ W.T becomes h = x @ W.T + (x @ a.T) @ b.T * scale, of each expert

Shape suffixes: E experts, H hidden, F ffn hidden, G rows of w1 (2F where gate and up are one tensor), R rank (of all adapters, with
padding), K inner, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gbmoe import launch
from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._define_operator import is_watched, may_be_batched, may_be_transformed
from gbmoe.weight_layout import WeightLayout

_RANK_ALIGNMENT = 8  # engines need rows of multiples of 16 bytes; further ranks are zeros


@dataclass(frozen=True)
class LoraFactors:
    """One adapter of one matrix of every expert: x @ W[e].T becomes x @ W[e].T + scale * (x @ a[e].T) @ b[e].T.

    Attributes:
        a: [E,r,in], any strides; Automodel's [E,in,r] is handed over as a.transpose(1, 2).
        b: [E,out,r], any strides.
        scale: alpha / r, or with rank-stabilised LoRA alpha / sqrt(r).

    Both have any floating dtype; they are multiplied in the dtype of the rows.

    Example:
        >>> factors = LoraFactors(torch.randn(4, 2, 16), torch.zeros(4, 32, 2), scale=2.0)
        >>> factors.delta().shape
        torch.Size([4, 32, 16])
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0

    def delta(self) -> torch.Tensor:
        """scale * b @ a, [E,out,in]: what merging adds to the weights."""
        return torch.bmm(self.b, self.a) * self.scale

    def check(self, function: str, argument: str, experts: int, columns: int, inner: int, device: torch.device) -> None:
        """Raise TypeError or ValueError unless a is [experts, r, inner] and b [experts, columns, r], of floating dtypes, on `device`."""
        for name, factor in (("a", self.a), ("b", self.b)):
            require_tensor(factor, function, f"{argument}.{name}", rank=3, dtypes=FLOATING, device=device)
        rank = self.a.size(1)
        for name, factor, shape in (("a", self.a, [experts, rank, inner]), ("b", self.b, [experts, columns, rank])):
            if list(factor.shape) != shape:
                require(False, function, f"{argument}.{name}", f"shape {shape}", list(factor.shape))
        require(rank > 0, function, f"{argument}.a", "a rank of at least 1", rank)


Adapters = LoraFactors | Sequence[LoraFactors] | None


@dataclass(frozen=True)
class ExpertLora:
    """The adapters of a layer's experts: those of w1, w2 and v1, each one, several (their changes are added), or None.

    Inner and outer dimensions are those of the products, whatever the WeightLayout: w1 and v1 have a [E,r,H] and b [E,F,r], w2 has
    a [E,r,F] and b [E,H,r]. Where gate and up are one tensor, w1 has b [E,2F,r] in the order of that tensor's rows (or columns), and v1
    is None.

    Example:
        >>> x, w1, w2 = torch.randn(6, 16), torch.randn(4, 32, 16), torch.randn(4, 32, 16)
        >>> a = torch.randn(4, 2, 16, requires_grad=True)
        >>> b = torch.randn(4, 32, 2, requires_grad=True)
        >>> lora = ExpertLora(w1=LoraFactors(a, b, scale=2.0))
        >>> out = gbmoe.grouped_mlp(x, torch.tensor([3, 0, 1, 2]), w1, w2, lora=lora)
        >>> out.sum().backward()
        >>> a.grad.shape
        torch.Size([4, 2, 16])
    """

    w1: Adapters = None
    w2: Adapters = None
    v1: Adapters = None

    def of(self, name: str) -> tuple[LoraFactors, ...]:
        """The adapters of w1, w2 or v1."""
        found = getattr(self, name)
        return () if found is None else (found,) if isinstance(found, LoraFactors) else tuple(found)

    @property
    def is_empty(self) -> bool:
        return len(self.of("w1")) + len(self.of("w2")) + len(self.of("v1")) == 0


class LowRankOperands(NamedTuple):
    """What the operator takes: factors [E,R,...] in one dtype, the scale in the second ones, ranks padded with zeros to a multiple of 8.
    The factors before the activation share their first one; a gate's and up's columns of the second lie as in the layout, or one after
    the other where those are separate. None where there is no adapter."""

    up_a_ERH: torch.Tensor | None
    up_b_ERG: torch.Tensor | None
    down_a_ERF: torch.Tensor | None
    down_b_ERH: torch.Tensor | None


def low_rank_operands(lora: ExpertLora, layout: WeightLayout, w1_EFH: torch.Tensor, gated: bool, dtype: torch.dtype, function: str,
                      ) -> LowRankOperands:
    """The operands of `lora`, differentiable in its factors. Raises TypeError or ValueError, in the name of `function`, for factors that
    are none of these experts'.

    Args:
        w1_EFH: the gate's matrix, for sizes and device.
        gated: whether there is an up matrix.
    """
    require(isinstance(lora, ExpertLora), function, "lora", "a gbmoe.ExpertLora", type(lora).__name__, TypeError)
    experts, ffn, hidden = w1_EFH.shape
    require(len(lora.of("v1")) == 0 or (gated and not layout.is_combined), function, "lora.v1", "None where there is no v1", "adapters")
    for name, columns, inner in (("w1", 2 * ffn if layout.is_combined else ffn, hidden), ("v1", ffn, hidden), ("w2", hidden, ffn)):
        for factors in lora.of(name):
            require(isinstance(factors, LoraFactors), function, f"lora.{name}", "gbmoe.LoraFactors, or a sequence of them",
                    type(factors).__name__, TypeError)
            factors.check(function, f"lora.{name}", experts, columns, inner, w1_EFH.device)
    if layout.is_combined or not gated:
        return LowRankOperands(*joined_operands(lora.of("w1"), dtype), *joined_operands(lora.of("w2"), dtype))
    pairs = [_operands(factors, dtype) for factors in lora.of("w1")]
    pairs = [(a, F.pad(b, (0, ffn))) for a, b in pairs]
    pairs += [(a, F.pad(b, (ffn, 0))) for a, b in (_operands(factors, dtype) for factors in lora.of("v1"))]
    return LowRankOperands(*_joined(pairs), *joined_operands(lora.of("w2"), dtype))


def joined_operands(adapters: Sequence[LoraFactors], dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(a [E,R,K], b [E,R,N]) of one matrix's adapters, or (None, None) of none: the change is a product with both, one after the other."""
    return _joined([_operands(factors, dtype) for factors in adapters])


def _operands(factors: LoraFactors, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(a [E,R,K], b [E,R,N])."""
    padding = -factors.a.size(1) % _RANK_ALIGNMENT
    a_ERK, b_ERN = _operand(factors.a, 1, dtype), _operand(factors.b, factors.scale, dtype).transpose(1, 2)
    return (a_ERK, b_ERN) if padding == 0 else (F.pad(a_ERK, (0, 0, 0, padding)), F.pad(b_ERN, (0, 0, 0, padding)))


def _operand(factor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """factor * scale in `dtype`, contiguous along one of its last two dimensions, as products read it: PEFT's b [N, r * E] is not, and is
    copied here once."""
    readable = factor.stride(2) == 1 or factor.stride(1) == 1
    if torch.compiler.is_compiling() or may_be_transformed():
        factor = (factor if scale == 1 else factor * scale).to(dtype)
        return factor if readable else factor.contiguous()
    if scale == 1 and factor.dtype == dtype and readable:
        return factor
    return _Scaled.apply(factor, scale, dtype, torch.preserve_format if readable else torch.contiguous_format)


class _Scaled(torch.autograd.Function):
    """factor * scale in another dtype and format, by one kernel where these operators would be three. Its gradient lies as the factor
    does, so that autograd need not copy it into a parameter's order."""

    @staticmethod
    def forward(ctx, factor, scale, dtype, memory_format):
        ctx.scale, ctx.dtype, ctx.strides = scale, factor.dtype, _strides_of_copy(factor)
        return _copy_scaled(factor, scale, torch.empty_like(factor, dtype=dtype, memory_format=memory_format))

    @staticmethod
    def backward(ctx, grad):
        if may_be_batched(grad) or torch.is_grad_enabled():  # create_graph: what writes to an argument has no gradient of its own
            return (grad * ctx.scale).to(ctx.dtype), None, None, None
        made = grad.new_empty_strided(grad.shape, ctx.strides, dtype=ctx.dtype)
        return _copy_scaled(grad, ctx.scale, made), None, None, None


def _copy_scaled(tensor: torch.Tensor, scale: float, to: torch.Tensor) -> torch.Tensor:
    """launch.copy_scaled, but torch's operator where something watches: the kernel has no fake."""
    return torch.mul(tensor, scale, out=to) if is_watched(tensor) else launch.copy_scaled(tensor, scale, to)


def _strides_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of `tensor` if its elements follow one another, in whatever order of its dimensions, otherwise those of a contiguous one."""
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != elements:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        elements *= size
    return tensor.stride()


def _joined(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not pairs:
        return None, None
    return pairs[0] if len(pairs) == 1 else (torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 1))
