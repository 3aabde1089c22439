"""OLMo-core 3.0.0: the routed experts of its MoE v2 computed by gbmoe.

    import gbmoe.compat.olmo_core
    gbmoe.compat.olmo_core.register()

Experts that are built afterwards are of the subclass below. Routers, expert parallelism, parameters and checkpoints remain OLMo-core's own.
Its older DroplessMoEMLP calls grouped_gemm, for which gbmoe.compat.grouped_gemm stands in. Importing this module imports OLMo-core.

Shape suffixes: R rows, E experts of this rank, H d_model, F hidden_size.
"""

from __future__ import annotations

import math

import torch

from gbmoe._checks import require
from gbmoe.compat._releases import require_parameters, require_release
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops import grouped_mlp
from gbmoe.ops.activations import ClampedSilu
from gbmoe.weight_layout import WeightLayout

__all__ = ["RoutedExperts", "register"]

_ADAPTER = "gbmoe.compat.olmo_core"
_PARAMETERS = ("self", "x", "batch_size_per_expert", "down_proj_out", "up_proj_input_grad_out", "row_weights", "use_rowwise_fp8",
               "rowwise_fp8_input_q", "rowwise_fp8_input_scales")

require_release(_ADAPTER, "ai2-olmo-core", ("3.0.0",))

from olmo_core.nn.moe.v2 import routed_experts as _theirs  # noqa: E402

require_parameters(_ADAPTER, _theirs.RoutedExperts.forward, _PARAMETERS)


class RoutedExperts(_theirs.RoutedExperts):
    """OLMo-core's RoutedExperts, with its parameters w_up_gate, w_down, b_up_gate, b_down and its state dict, on gbmoe.grouped_mlp.

    Weights are read where they lie, biases and activation are computed with the products, and the host does not wait for the counts.

    Attributes:
        engine: of the products, see gbmoe.engines.
        fp8_recipe: compute products of rows as the recipe says; not together with OLMo-core's own rowwise_fp8.
    """

    engine: str = "auto"
    fp8_recipe: Float8BlockScaling | None = None

    def forward(self, x: torch.Tensor, batch_size_per_expert: torch.Tensor, *, down_proj_out: torch.Tensor | None = None,
                up_proj_input_grad_out: torch.Tensor | None = None, row_weights: torch.Tensor | None = None, use_rowwise_fp8: bool = False,
                rowwise_fp8_input_q: torch.Tensor | None = None, rowwise_fp8_input_scales: torch.Tensor | None = None) -> torch.Tensor:
        """The experts of rows in expert order. OLMo-core itself computes experts with its rowwise_fp8, and calls that name buffers for
        results (its rowwise expert parallelism).

        Args:
            x: [R,H] in expert order, dtype of the weights. Rows after the sum of the counts come out as zeros.
            batch_size_per_expert: [E], on the device of x or on the CPU.
            row_weights: [R]. Results are multiplied by them in float32. OLMo-core multiplies the activation by them, which gives the same
                sum.
            down_proj_out, up_proj_input_grad_out, use_rowwise_fp8, rowwise_fp8_input_q, rowwise_fp8_input_scales: OLMo-core's.

        Returns:
            [R,H], dtype of x.

        Raises:
            NotImplementedError: for row_weights with biases, as in OLMo-core.
            TypeError, ValueError: of grouped_mlp.
        """
        rowwise = self.rowwise_fp8 is not None and self.rowwise_fp8.enabled
        if rowwise or down_proj_out is not None or up_proj_input_grad_out is not None:
            return super().forward(x, batch_size_per_expert, down_proj_out=down_proj_out, up_proj_input_grad_out=up_proj_input_grad_out,
                                   row_weights=row_weights, use_rowwise_fp8=use_rowwise_fp8, rowwise_fp8_input_q=rowwise_fp8_input_q,
                                   rowwise_fp8_input_scales=rowwise_fp8_input_scales)
        if row_weights is not None and self.b_down is not None:
            raise NotImplementedError(f"{_ADAPTER}: row_weights: expected None for experts with biases, as in OLMo-core, got a tensor")
        layout, activation = _function(self.activation, self.activation_alpha, self.activation_limit)
        return grouped_mlp(x, batch_size_per_expert, self.w_up_gate, self.w_down, activation=activation, layout=layout,
                           weights_R=None if row_weights is None else row_weights.reshape(-1), w1_bias=self.b_up_gate,
                           w2_bias=self.b_down, engine=self.engine, fp8_recipe=self.fp8_recipe)


def _function(activation: str, alpha: float, limit: float | None) -> tuple[WeightLayout, str | ClampedSilu]:
    """The layout of w_up_gate and the activation of OLMo-core's ExpertActivation."""
    if activation == "swiglu":
        return WeightLayout("up_first"), "silu"
    if activation == "gpt_oss_swiglu":
        most = math.inf if limit is None else limit
        return WeightLayout("interleaved"), ClampedSilu(alpha, most, most, 1.0)
    require(activation == "relu2", _ADAPTER, "activation", "swiglu, gpt_oss_swiglu or relu2", repr(activation))
    return WeightLayout(), "relu_squared"


def register(engine: str = "auto", fp8_recipe: Float8BlockScaling | None = None) -> None:
    """Let RoutedExpertsConfig.build make the experts above, in this process. Experts that are there already stay as they are.

    Args:
        engine, fp8_recipe: of all experts that are built from now on. A later call takes the place of this one.
    """
    def build(self, init_device: str = "cpu") -> RoutedExperts:
        made = RoutedExperts(init_device=init_device, **self.as_dict())
        made.engine, made.fp8_recipe = engine, fp8_recipe
        return made

    _theirs.RoutedExpertsConfig.build = build
