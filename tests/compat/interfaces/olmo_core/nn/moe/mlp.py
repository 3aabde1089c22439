"""OLMo-core's DroplessMoEMLP (v1): its parameters and its calls of grouped_gemm."""

import grouped_gemm
import torch
import torch.nn.functional as F

gmm = grouped_gemm.ops.gmm


class DroplessMoEMLP(torch.nn.Module):
    def __init__(self, *, d_model, hidden_size, num_experts, dtype=torch.float32, init_device="cpu"):
        super().__init__()
        self.shape = num_experts, hidden_size, d_model
        for name in ("w1", "w2", "w3"):
            setattr(self, name, torch.nn.Parameter(torch.empty(num_experts * hidden_size, d_model, dtype=dtype, device=init_device)))

    def gmm(self, x, w, batch_sizes, trans_b=False):
        return gmm(x.to(torch.bfloat16), w.to(torch.bfloat16), batch_sizes, trans_b=trans_b)

    def forward(self, x, batch_size_per_expert):
        w1, w2, w3 = (w.view(self.shape) for w in (self.w1, self.w2, self.w3))
        h = F.silu(self.gmm(x, w1, batch_size_per_expert, trans_b=True)) * self.gmm(x, w3, batch_size_per_expert, trans_b=True)
        return self.gmm(h, w2, batch_size_per_expert)
