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
    Whatever of OLMo-core would compute these experts without calling forward is refused, so that gbmoe is never bypassed in silence.

    Attributes:
        engine: of the products, see gbmoe.engines.
        fp8_recipe: compute products of rows as the recipe says.

    Raises:
        ValueError: for rowwise_fp8, and for OLMO_PROFILE_ROUNDED_WGRAD=1: kernels of OLMo-core's own.
    """

    engine: str = "auto"
    fp8_recipe: Float8BlockScaling | None = None

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self._require_no_kernels_of_olmos()

    def _require_no_kernels_of_olmos(self) -> None:
        require(self.rowwise_fp8 is None or not self.rowwise_fp8.enabled, _ADAPTER, "rowwise_fp8",
                "None, or enabled=False, as OLMo-core computes such experts by kernels of its own (float8 of gbmoe's is"
                " register(fp8_recipe=gbmoe.Float8BlockScaling()))", self.rowwise_fp8)
        require(not self._profile_rounded_wgrad, _ADAPTER, "OLMO_PROFILE_ROUNDED_WGRAD",
                "unset, as OLMo-core then accumulates the weights' gradients in products of its own", "1")

    def apply_ep(self, ep_mesh, **keywords) -> None:
        """OLMo-core's, which keeps this rank's experts.

        Raises:
            ValueError: for a block whose expert parallelism is rowwise_wave: it reads the weights, and does not call its experts.
        """
        block = self.w_up_gate._moe_rowwise_fp8_cache_owner()  # OLMo-core's blocks put themselves there when they have built their experts
        path = getattr(getattr(block, "ep", None), "path", None)
        require(path != "rowwise_wave", _ADAPTER, "ep.path", "sync_1d, no_sync_1d, rowwise_nvshmem or deepep_v2, which call the experts",
                path)
        super().apply_ep(ep_mesh, **keywords)

    def forward(self, x: torch.Tensor, batch_size_per_expert: torch.Tensor, *, down_proj_out: torch.Tensor | None = None,
                up_proj_input_grad_out: torch.Tensor | None = None, row_weights: torch.Tensor | None = None, use_rowwise_fp8: bool = False,
                rowwise_fp8_input_q: torch.Tensor | None = None, rowwise_fp8_input_scales: torch.Tensor | None = None) -> torch.Tensor:
        """The experts of rows in expert order.

        Args:
            x: [R,H] in expert order, dtype of the weights. Rows after the sum of the counts come out as zeros.
            batch_size_per_expert: [E], on the device of x or on the CPU.
            down_proj_out: [R,H], dtype of x, which the results are copied into (of rowwise expert parallelism: what other ranks read).
            up_proj_input_grad_out: [R,H], dtype of x, which the gradient of x is copied into. It may be the memory of x.
            row_weights: [R]. Results are multiplied by them in float32. OLMo-core multiplies the activation by them, which gives the same
                sum.
            use_rowwise_fp8, rowwise_fp8_input_q, rowwise_fp8_input_scales: of rowwise_fp8, which these experts do not have.

        Returns:
            [R,H], dtype of x; with down_proj_out a tensor of its memory.

        Raises:
            NotImplementedError: for row_weights with biases, as in OLMo-core.
            TypeError, ValueError: of grouped_mlp; for a buffer of another shape or dtype than x; for rowwise_fp8 that was set after
                the experts were made.
        """
        self._require_no_kernels_of_olmos()
        for name, buffer in (("down_proj_out", down_proj_out), ("up_proj_input_grad_out", up_proj_input_grad_out)):
            require(buffer is None or (buffer.shape == x.shape and buffer.dtype == x.dtype), _ADAPTER, name,
                    lambda: f"the shape and dtype of x, {tuple(x.shape), x.dtype}",
                    None if buffer is None else (tuple(buffer.shape), buffer.dtype))
        if row_weights is not None and self.b_down is not None:
            raise NotImplementedError(f"{_ADAPTER}: row_weights: expected None for experts with biases, as in OLMo-core, got a tensor")
        if up_proj_input_grad_out is not None:
            x = _WithGradientIn.apply(x, up_proj_input_grad_out)
        layout, activation = _function(self.activation, self.activation_alpha, self.activation_limit)
        out = grouped_mlp(x, batch_size_per_expert, self.w_up_gate, self.w_down, activation=activation, layout=layout,
                          weights_R=None if row_weights is None else row_weights.reshape(-1), w1_bias=self.b_up_gate,
                          w2_bias=self.b_down, engine=self.engine, fp8_recipe=self.fp8_recipe)
        return out if down_proj_out is None else down_proj_out.detach().copy_(out)

    def forward_row_offset(self, *args, **keywords):
        """Raises NotImplementedError: no window of experts. Nothing in OLMo-core 3.0.0 calls it."""
        raise NotImplementedError(f"{_ADAPTER}: forward_row_offset: expected a call of forward, as gbmoe computes all experts of a rank")

    def act_and_down(self, *args, **keywords):
        """Raises NotImplementedError: no half of the experts. Nothing in OLMo-core 3.0.0 calls it."""
        raise NotImplementedError(f"{_ADAPTER}: act_and_down: expected a call of forward, as gbmoe computes both products")


class _WithGradientIn(torch.autograd.Function):
    """x; its gradient is copied into a buffer and handed on there. All that backward reads of x is read before: its gradient is ready."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.copy_(grad), None


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
