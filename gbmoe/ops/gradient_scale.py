"""The scale of the gradients of experts' weights, such as 1 / ranks, which makes them the mean over the ranks' losses."""

from __future__ import annotations

import math

import torch


class ScaleGradient(torch.autograd.Function):
    """apply(x, scale) is x, of any shape and dtype; its gradient is multiplied by `scale`."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


def scales_exactly(scale: float, dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype keep their bits if they are multiplied by `scale` and later divided by it: a power of two changes
    the exponent alone, of which float16 has too few."""
    return math.frexp(scale)[0] == 0.5 and dtype != torch.float16


def with_scaled_gradients(scale: float, *weights: torch.Tensor | None, one_operator: bool = False) -> list[torch.Tensor | None]:
    """The weights, whose gradients are multiplied by `scale`: a pass over each. `one_operator`: the caller gives them to one operator, so
    that no graph of a compiler ends between them and it."""
    if scale == 1:
        return list(weights)
    scaled = [None if w is None else ScaleGradient.apply(w, scale) for w in weights]
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and not one_operator:
        # A view of a graph's input that leaves the graph is made anew after it, without the scale.
        return [None if w is None else w.clone() for w in scaled]
    return scaled
