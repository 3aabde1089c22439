"""LigerCute (PyPI: liger-kernel with liger-cute-kernels): expert parallelism in one kernel a pass, whose CTAs move rows through NVSHMEM
while they multiply.

Its wheel is made for CUDA 12 and needs that version's NVSHMEM. Where torch brings another one, which it loads first, LD_PRELOAD has to
name libnvshmem_host.so.3 of nvidia-nvshmem-cu12. Router and softmax are plain PyTorch here, as it has none.

Shape suffixes: T tokens of a rank, K slots a token, E experts of a rank, H hidden, F ffn hidden.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rivals.kinds import ParallelRival
from gbmoe.cli.bench.measurements.measurement import Refusal
from gbmoe.cli.bench.rivals.rival import RoutedExperts, needs_cuda, not_importable, versions

_OPERATOR, _PACKAGE = "liger_kernel.ops.cute.ops.moe", "liger_cute_kernels"
_configured: Any = None  # of this process: what its memory, which ranks map from each other, was made for


def _configure(**sizes: int) -> None:
    """Collective: make the memory that the kernels use for a layer of these sizes. It is of one size until it is given back."""
    global _configured
    package = importlib.import_module(_PACKAGE)
    wanted = package.MoEConfig(num_hosts=1, **sizes)
    if wanted == _configured:
        return
    if _configured is not None:
        _configured = None  # also if what follows fails
        torch.cuda.synchronize()
        importlib.import_module(f"{_PACKAGE}.nvshmem").pool_clear_all()
    package.configure(moe=wanted)
    _configured = wanted


class _Experts(torch.nn.Module):
    """This rank's experts: w1 and v1 as they are, [E,F,H], and w2 as [E,H,F]."""

    def __init__(self, case, weights, ranks: int):
        super().__init__()
        self.fused = importlib.import_module(_OPERATOR).moe_fused
        self.experts, self.top_k, self.ranks = case.experts, case.top_k, ranks
        self.w1, self.v1 = torch.nn.Parameter(weights.w1_EFH), torch.nn.Parameter(weights.v1_EFH)
        self.second = torch.nn.Parameter(weights.w2_EFH.transpose(1, 2).contiguous())

    def forward(self, x_TH, weights_TK, experts_TK):
        return self.fused(x_TH, experts_TK.int(), weights_TK, self.w1, self.v1, self.second, self.experts, self.top_k)

    def weight_gradients(self):
        """Divided by the number of ranks, as gbmoe's are. LigerCute's are sums over the ranks' tokens."""
        return {"w1": self.w1.grad / self.ranks, "v1": self.v1.grad / self.ranks,
                "w2": self.second.grad.transpose(1, 2) / self.ranks}


class LigerCute(ParallelRival):
    def unavailable(self, device):
        return needs_cuda(device) or not_importable(_PACKAGE, _OPERATOR)

    def about(self):
        return versions("liger-kernel", "liger-cute-kernels", "nvidia-nvshmem-cu12")

    def refuses(self, case, dtype):
        if case.mlp_type != "glu":
            return "has no plain MLP"
        return None if dtype == torch.bfloat16 else "takes bfloat16 only"

    def parallel_layer(self, case, weights, group):
        ranks = dist.get_world_size(group)
        if ranks > case.experts:
            raise Refusal(f"takes at least one expert for each of {ranks} ranks, not {case.experts}")
        _configure(max_tokens=case.tokens, hidden_size=case.hidden, num_experts=case.experts, top_k=case.top_k, gpus_per_host=ranks)
        return RoutedExperts(case, weights, _Experts(case, weights, ranks))

    def end(self):
        global _configured
        if _configured is not None:
            torch.cuda.synchronize()
            importlib.import_module(f"{_PACKAGE}.nvshmem").finalize()
            _configured = None
