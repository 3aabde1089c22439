"""gbmoe's own side of measurements: its layer with any mlp_impl and engine, and its grouped GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gbmoe import engines
from gbmoe.cli.bench.rivals.rival import Layer, Prepared, Weights
from gbmoe.layers import Arguments, dMoE
from gbmoe.testing.moe_shapes import MoeCase


class DroplessLayer(Layer):
    """A dMoE of gbmoe or of MegaBlocks, which have the same names and shapes. Its parameters are the given weights and share their
    memory."""

    def __init__(self, moe: torch.nn.Module, weights: Weights):
        super().__init__()
        self.moe, self.router = moe, moe.router
        self.takes_rows = isinstance(moe, dMoE)  # MegaBlocks' takes [sl, bs, H]
        moe.router.layer.weight = torch.nn.Parameter(weights.router_EH)
        self.experts, self.shape_EFH = moe.experts.mlp, weights.w1_EFH.shape
        for name in ("w1", "w2", *(["v1"] if weights.glu else ())):
            setattr(self.experts, name, torch.nn.Parameter(getattr(weights, f"{name}_EFH").flatten(0, 1)))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.moe(x_TH) if self.takes_rows else self.moe(x_TH.unsqueeze(1)).squeeze(1)

    def weight_gradients(self) -> dict[str, torch.Tensor]:
        experts = {name: parameter.grad.view(self.shape_EFH) for name, parameter in self.experts.named_parameters()}
        return {"router": self.router.layer.weight.grad, **experts}


def layer_arguments(case: MoeCase, weights: Weights) -> dict:
    """The arguments that gbmoe's and MegaBlocks' Arguments have in common."""
    dtype = weights.w1_EFH.dtype
    return {"hidden_size": case.hidden, "ffn_hidden_size": case.ffn, "moe_num_experts": case.experts,
            "moe_top_k": case.top_k, "mlp_type": case.mlp_type, "activation_fn": weights.activation, "bias": False,
            "moe_loss_weight": 0, "fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}


def dropless_layer(case: MoeCase, weights: Weights, mlp_impl: str = "gbmoe", engine: str = "auto", **more) -> DroplessLayer:
    """gbmoe's layer with these weights; `more` are further Arguments. With arguments of expert parallelism the weights are those of one
    rank. With a batch-invariant engine the whole layer is, its router too."""
    more = {"batch_invariant": True, **more} if engine in engines.BATCH_INVARIANT.values() else more
    # On the meta device, because the weights that it would draw are replaced.
    arguments = Arguments(**layer_arguments(case, weights), mlp_impl=mlp_impl, engine=engine,
                          device=torch.device("meta"), **more)
    return DroplessLayer(dMoE(arguments), weights)


def grouped_product(engine: str, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], trans_a: bool) -> Prepared:
    """gbmoe's product, with the sizes on the host or the device as the engine needs them."""
    on_host = engine in engines.ENGINES and engines.ENGINES[engine].needs_host_sizes
    sizes_E = torch.tensor(sizes, dtype=torch.int64, device="cpu" if on_host else a.device)
    return Prepared(partial(engines.product, a, b, sizes_E, trans_a=trans_a, engine=engine))
