"""prime-rl's functions of experts in expert order. Its decorator, which pads rows and takes shards, is not written down here."""

import torch
import torch.nn.functional as F


def _run_experts_grouped_mm(w1, w2, w3, x, num_tokens_per_expert):
    return _run_experts_grouped_mm_impl(w1, w2, w3, x, num_tokens_per_expert)


def _run_experts_fp8_grouped_mm(w1, w2, w3, x, num_tokens_per_expert):
    return _run_experts_grouped_mm_impl(w1, w2, w3, x, num_tokens_per_expert, fp8=True)


def _run_experts_grouped_mm_impl(w1, w2, w3, x, num_tokens_per_expert, fp8=False):
    if fp8:
        raise NotImplementedError("DeepGEMM")
    offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
    h = F.silu(torch._grouped_mm(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=offsets))
    h = h * torch._grouped_mm(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=offsets)
    return torch._grouped_mm(h, w2.bfloat16().transpose(-2, -1), offs=offsets).type_as(x)
