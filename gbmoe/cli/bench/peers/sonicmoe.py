"""SonicMoE (github.com/Dao-AILab/sonic-moe): CuTe DSL kernels for Hopper, router included; compiled anew for every
shape.

Its router takes the softmax of the chosen logits, so that each token's weights sum to one; the oracle is told so.
"""

from __future__ import annotations

import inspect

import torch

from gbmoe.cli.bench.peers.base import Layer, Peer, needs_cuda, not_importable, versions


class _Router(torch.nn.Module):
    """Its softmax and top-k as a module, so that its choice can be seen."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments):
        return self.function(*arguments)

    def apply(self, *arguments):  # as its layer calls it
        return self(*arguments)


class _Layer(Layer):
    """moe_TC_softmax_topk_layer with gbmoe's weights: gate and up rows take turns in one matrix [E,2F,H]; down is
    [E,H,F]."""

    normalized = True

    def __init__(self, case, weights):
        import sonicmoe.functional
        from sonicmoe.enums import ActivationType

        super().__init__()
        self.functional, self.top_k = sonicmoe.functional, case.top_k
        self.router = _Router(sonicmoe.functional.TC_Softmax_Topk_Router_Function.apply)
        self.router_weight = torch.nn.Parameter(weights.router_EH)
        self.first = torch.nn.Parameter(torch.stack([weights.w1_EFH, weights.v1_EFH], dim=2).flatten(1, 2))
        self.second = torch.nn.Parameter(weights.w2_EFH.transpose(1, 2).contiguous())
        parameters = inspect.signature(sonicmoe.functional.moe_TC_softmax_topk_layer).parameters
        options = {"stream_id": torch.cuda.current_stream().cuda_stream, "activation_type": ActivationType.SWIGLU}
        self.options = {name: value for name, value in options.items() if name in parameters}
        self.inference_option = "is_inference_mode_enabled" if "is_inference_mode_enabled" in parameters else None

    def forward(self, x_TH):
        options = dict(self.options)
        if self.inference_option:
            options[self.inference_option] = not torch.is_grad_enabled()
        theirs = self.functional.TC_Softmax_Topk_Router_Function
        self.functional.TC_Softmax_Topk_Router_Function = self.router
        try:
            out_TH, *_ = self.functional.moe_TC_softmax_topk_layer(
                x=x_TH, router_w=self.router_weight, w1=self.first.permute(1, 2, 0), b1=None,
                w2=self.second.permute(1, 2, 0), b2=None, K=self.top_k, **options)
        finally:
            self.functional.TC_Softmax_Topk_Router_Function = theirs
        return out_TH

    def weight_gradients(self):
        first_EFTH = self.first.grad.unflatten(1, (-1, 2))
        return {"router": self.router_weight.grad, "w1": first_EFTH[:, :, 0], "v1": first_EFTH[:, :, 1],
                "w2": self.second.grad.transpose(1, 2)}


class SonicMoe(Peer):
    def unavailable(self, device):
        return needs_cuda(device) or not_importable("sonicmoe.functional")

    def about(self):
        return versions("sonicmoe", "quack-kernels", "nvidia-cutlass-dsl")

    def refuses(self, case, dtype):
        if case.mlp_type != "glu":
            return "its plain MLP has another GELU"
        if case.experts % 8:
            return f"its router takes a multiple of 8 experts, not {case.experts}"
        return None if dtype in (torch.bfloat16, torch.float16) else "takes bfloat16 and float16 only"

    def layer(self, case, weights):
        return _Layer(case, weights)
