"""OLMo-core's RoutedExperts (v2): its parameters and what a subclass of it overrides."""

import os
import weakref
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch


@dataclass
class RoutedExpertsConfig:
    d_model: int
    hidden_size: int
    num_experts: int
    bias: bool
    dtype: object
    rowwise_fp8: object = None
    activation: str = "swiglu"
    activation_alpha: float = 1.702
    activation_limit: float | None = None

    def as_dict(self):
        return asdict(self)

    def build(self, init_device="cpu"):
        return RoutedExperts(init_device=init_device, **self.as_dict())


class RoutedExperts(torch.nn.Module):
    def __init__(self, d_model, hidden_size, num_experts, bias, dtype, rowwise_fp8=None, activation="swiglu", activation_alpha=1.702,
                 activation_limit=None, init_device="cpu"):
        super().__init__()
        self.activation, self.activation_alpha, self.activation_limit = activation, activation_alpha, activation_limit
        self.rowwise_fp8 = SimpleNamespace(**rowwise_fp8) if isinstance(rowwise_fp8, dict) else rowwise_fp8
        self._profile_rounded_wgrad = os.environ.get("OLMO_PROFILE_ROUNDED_WGRAD", "0") == "1"
        rows = hidden_size if activation == "relu2" else 2 * hidden_size

        def made(*shape):
            return torch.nn.Parameter(torch.empty(num_experts, *shape, dtype=dtype.as_pt(), device=init_device))

        self.w_up_gate, self.w_down = made(rows, d_model), made(hidden_size, d_model)
        self.b_up_gate, self.b_down = (made(rows), made(d_model)) if bias else (None, None)

        for weight in (self.w_up_gate, self.w_down):
            weight._moe_rowwise_fp8_cache_owner = weakref.ref(self)  # until a block takes its place

    def forward(self, x, batch_size_per_expert, *, down_proj_out=None, up_proj_input_grad_out=None, row_weights=None, use_rowwise_fp8=False,
                rowwise_fp8_input_q=None, rowwise_fp8_input_scales=None):
        return "OLMo-core's own"

    def forward_row_offset(self, x, batch_size_per_expert, *, expert_start, expert_end, row_start, down_proj_out=None):
        return "OLMo-core's own"

    def act_and_down(self, up_gate, batch_size_per_expert_tensor):
        return "OLMo-core's own"

    def apply_ep(self, ep_mesh, **kwargs):
        self.ep_mesh = ep_mesh["ep_dp", "ep_mp"]
