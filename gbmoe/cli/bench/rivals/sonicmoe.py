"""SonicMoE (PyPI: sonic-moe, 0.1.2 and newer): CuTe DSL kernels of quack for Hopper and Blackwell, router included; compiled anew for
every shape, which takes minutes.

Its router takes the softmax of the chosen logits, its default, so that each token's weights sum to one; the oracle is told so.
"""

from __future__ import annotations

import importlib
import inspect

import torch

from gbmoe.cli.bench.rivals.rival import Layer, Rival, needs_cuda, not_importable, versions

_MODULE = "sonicmoe.functional"
# What 0.1.2 has brought: routing by an argument, and weights of either layout.
_ARGUMENTS = {"is_softmax_over_topk", "concat_layout"}


class _Router(torch.nn.Module):
    """SonicMoE's softmax and top-k as a module, so that a hook can see its choice."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)

    def apply(self, *arguments):  # the name by which SonicMoE's layer calls it
        return self(*arguments)


class _Layer(Layer):
    """moe_TC_softmax_topk_layer with gbmoe's weights, in its default layout: gate and up rows take turns in one matrix [E,2F,H]; down
    is [E,H,F]. It gets both as views with the experts last."""

    normalized = True

    def __init__(self, case, weights):
        from sonicmoe.enums import ActivationType

        super().__init__()
        self.functional, self.top_k = importlib.import_module(_MODULE), case.top_k
        self.router = _Router(self.functional.TC_Softmax_Topk_Router_Function.apply)
        self.router_weight = torch.nn.Parameter(weights.router_EH)
        self.first = torch.nn.Parameter(torch.stack([weights.w1_EFH, weights.v1_EFH], dim=2).flatten(1, 2))
        self.second = torch.nn.Parameter(weights.w2_EFH.transpose(1, 2).contiguous())
        self.activation, self.stream = ActivationType.SWIGLU, torch.cuda.current_stream().cuda_stream

    def forward(self, x_TH):
        theirs = self.functional.TC_Softmax_Topk_Router_Function
        self.functional.TC_Softmax_Topk_Router_Function = self.router
        try:
            out_TH, *_ = self.functional.moe_TC_softmax_topk_layer(
                x=x_TH, router_w=self.router_weight, w1=self.first.permute(1, 2, 0), b1=None, w2=self.second.permute(1, 2, 0), b2=None,
                K=self.top_k, stream_id=self.stream, activation_type=self.activation,
                is_inference_mode_enabled=not torch.is_grad_enabled(), is_softmax_over_topk=True, concat_layout=False)
        finally:
            self.functional.TC_Softmax_Topk_Router_Function = theirs
        return out_TH

    def weight_gradients(self):
        first_EFTH = self.first.grad.unflatten(1, (-1, 2))
        return {"router": self.router_weight.grad, "w1": first_EFTH[:, :, 0], "v1": first_EFTH[:, :, 1],
                "w2": self.second.grad.transpose(1, 2)}


class SonicMoe(Rival):
    def unavailable(self, device):
        reason = needs_cuda(device) or not_importable(_MODULE)
        if reason is None:
            known = inspect.signature(importlib.import_module(_MODULE).moe_TC_softmax_topk_layer).parameters
            if not set(known) >= _ARGUMENTS:
                reason = f"expected sonic-moe 0.1.2 or newer, whose layer takes {' and '.join(sorted(_ARGUMENTS))}"
        return reason

    def about(self):
        return versions("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")

    def refuses(self, case, dtype):
        if case.mlp_type != "glu":
            return "has no plain MLP"
        if case.hidden % 8 or case.ffn % 8:
            return f"takes row lengths that are multiples of 8, not {case.hidden} and {case.ffn}"
        return None if dtype in (torch.bfloat16, torch.float16) else "takes bfloat16 and float16 only"

    def layer(self, case, weights):
        return _Layer(case, weights)
