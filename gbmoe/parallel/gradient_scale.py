"""The scale of the gradients of experts' weights: 1 / ranks, so that they are the mean over the ranks' losses."""

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
