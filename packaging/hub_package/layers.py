"""Layers that `kernels.kernelize` puts in the place of a model's own: they have a forward alone, which uses the model's attributes."""

import torch

from gbmoe.compat.transformers import experts_forward


class MegaBlocksMoeMLP(torch.nn.Module):
    """The router and experts of gpt-oss, GptOssMLP in transformers, which has this name on the hub."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, ids_TK = self.router(x_TH)
        return experts_forward(self.experts, x_TH, ids_TK, weights_TK).reshape(hidden_states.shape), weights_TK
