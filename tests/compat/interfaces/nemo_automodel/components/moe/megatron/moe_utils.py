import torch
import torch.nn.functional as F


def weighted_bias_swiglu_impl(input, weights, fp8_input_store=False):
    gate, up = torch.chunk(input, 2, -1)
    return (F.silu(gate) * up * weights).to(input.dtype)


def weighted_bias_geglu_impl(input, weights, fp8_input_store=False):
    gate, up = torch.chunk(input, 2, -1)
    return (F.gelu(gate, approximate="tanh") * up * weights).to(input.dtype)
