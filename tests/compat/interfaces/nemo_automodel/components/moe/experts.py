"""NeMo Automodel's function of experts in expert order, and the activations that its modules hand to it."""

import torch
import torch.nn.functional as F


def quick_geglu_deepep(x, permuted_probs, alpha=1.702, limit=7.0, linear_offset=1.0):
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + linear_offset) * permuted_probs).to(x.dtype)


def swiglu_oai_deepep(x, permuted_probs, alpha=1.702, limit=7.0):
    gate, up = torch.chunk(x, 2, dim=-1)
    if limit > 0.0:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1.0) * permuted_probs).to(x.dtype)


def relu2_deepep(x, permuted_probs):
    return (F.relu(x).pow(2) * permuted_probs).to(x.dtype)


def swiglu_clamped_deepep(x, permuted_probs, limit):
    gate, up = torch.chunk(x, 2, dim=-1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit) * permuted_probs).to(x.dtype)


def _torch_mm_experts_fwd(
    hidden_states,
    gate_and_up_projs,
    down_projs,
    tokens_per_expert,
    permuted_probs,
    activation_fn,
    use_mxfp8=False,
):
    offs = tokens_per_expert.cumsum(dim=0).to(torch.int32)
    output1 = torch._grouped_mm(hidden_states, gate_and_up_projs, offs=offs)
    output1 = activation_fn(output1, permuted_probs)
    return torch._grouped_mm(output1, down_projs, offs=offs)


def call(*args, **kwargs):
    """As GroupedExperts and GroupedExpertsDeepEP call it: by the module's name."""
    return _torch_mm_experts_fwd(*args, **kwargs)
