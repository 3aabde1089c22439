"""The shared expert: a dense MLP or GLU for every token; mirrors megablocks.layers.mlp.SharedMLP and SharedGLU."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gbmoe.layers.arguments import Arguments
from gbmoe.ops.activations import gated


class SharedMLP(torch.nn.Module):
    """down_proj(act(up_proj(x))), with linear layers of class args.fc_cls, made with args.fc_kwargs.

    With moe_shared_expert_gate the result is multiplied by the sigmoid of expert_gate(x), a torch.nn.Linear of one output without bias, as
    in Qwen2-MoE and Qwen3.5.
    """

    def __init__(self, args: Arguments):
        super().__init__()
        self.args = args
        self.fc_kwargs: dict[str, Any] = {"bias": args.bias, "device": args.device}
        # MegaBlocks leaves the layers in torch's default dtype, so that a half-precision input fails.
        parameters = inspect.signature(args.fc_cls).parameters
        if "dtype" in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self.fc_kwargs["dtype"] = args.dtype
        self.fc_kwargs.update(args.fc_kwargs)
        self.up_proj = args.fc_cls(args.hidden_size, args.shared_expert_hidden_size, **self.fc_kwargs)
        self.act = args.activation_fn
        self.down_proj = args.fc_cls(args.shared_expert_hidden_size, args.hidden_size, **self.fc_kwargs)
        self.down_proj._is_residual = True  # llm-foundry's initialisation reads this attribute
        self.expert_gate = None
        if args.moe_shared_expert_gate:
            self.expert_gate = torch.nn.Linear(args.hidden_size, 1, bias=False, device=args.device, dtype=args.dtype)

    def add_experts_sharedexpert(self, shared_expert_out: torch.Tensor, expert_out: torch.Tensor) -> torch.Tensor:
        """The sum of both outputs; with shared_expert_weighted_sum their mean over the K + 1 experts of a token."""
        if self.args.shared_expert_weighted_sum:
            experts = self.args.moe_top_k + 1
            return (shared_expert_out / experts).add(expert_out, alpha=self.args.moe_top_k / experts)
        return shared_expert_out + expert_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(x, self.down_proj(self.act(self.up_proj(x))))

    def _gated(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate = self._modules.get("expert_gate")  # which modules that were pickled before there were gates lack
        return out if gate is None else torch.sigmoid(gate(x)) * out


class SharedGLU(SharedMLP):
    """down_proj(act(gate_proj(x)) * up_proj(x)), or what a GatingActivation makes of both."""

    def __init__(self, args: Arguments):
        super().__init__(args)
        self.gate_proj = args.fc_cls(args.hidden_size, args.shared_expert_hidden_size, **self.fc_kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(x, self.down_proj(gated(self.act, self.gate_proj(x), self.up_proj(x))))


def make_shared_expert(args: Arguments) -> SharedMLP:
    """The shared expert of args.mlp_type."""
    return {"mlp": SharedMLP, "glu": SharedGLU}[args.mlp_type](args)
