"""LearnedRouter: scores, weights and ids of each token's experts; mirrors megablocks.layers.router.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import _has_any_global_hook

from gbmoe import engines
from gbmoe._checks import PLAIN, autocast_enabled, require
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.kept import Source
from gbmoe.layers.losses import save_router_logsumexp
from gbmoe.ops.route_tokens import route_tokens
from gbmoe.ops.router_softmax_topk import Routing, kernels_take, route

_LINEAR_FORWARD = torch.nn.Linear.forward


class LearnedRouter(torch.nn.Module):
    """A bias-free linear layer, softmax over the experts, and the K highest scores.

    forward(x [..., H]) returns scores [T,E], expert_weights [T,K] and expert_indices [T,K] (int64). In training the input is
    jittered (moe_jitter_eps), and the logits' logsumexp is kept for the z-loss where that has a weight. MegaBlocks keeps logits in
    evaluation too, where they pile up because nothing clears them.

    Experts are ranked by their logits, which stay in float32 from the product on (float64 in a float64 layer); scores and weights are
    rounded to the layer's dtype afterwards. MegaBlocks has logits in the layer's dtype, and ranks scores that are rounded once more. A
    `layer` that is more than a torch.nn.Linear without bias (a subclass, one with hooks or a forward of its own, a parametrized or
    quantised one) is called, and its logits are taken as they come. So is any while hooks are registered for all modules.
    """

    _source: Source | None = None  # in modules that were pickled before 0.3

    def __init__(self, args: Arguments):
        super().__init__()
        experts, top_k, p = args.moe_num_experts, args.moe_top_k, args.moe_normalize_expert_weights or None
        require(not args.batch_invariant or kernels_take(experts, top_k, p), "dMoE", "batch_invariant",
                "False where no router kernel takes moe_num_experts, moe_top_k and moe_normalize_expert_weights",
                f"{experts}, {top_k} and {p}")
        if top_k == 1 and p is not None and experts > 1:
            _warn_that_weights_are_one()
        self.args, self._source = args, Source()
        self.layer = torch.nn.Linear(args.hidden_size, args.moe_num_experts, bias=False, dtype=args.dtype, device=args.device)
        args.init_method(self.layer.weight)

    def jitter(self, x: torch.Tensor) -> torch.Tensor:
        """Random factors, uniform in [1 - eps, 1 + eps), with the shape and dtype of x."""
        eps = self.args.moe_jitter_eps or 0.0
        low, high = 1.0 - eps, 1.0 + eps
        return low + torch.rand_like(x) * (high - low)

    def _route(self, x_TH: torch.Tensor) -> tuple[Routing, torch.dtype]:
        """What the router decides, and the dtype in which MegaBlocks has the logits."""
        args, layer, engine = self.args, self.layer, None
        top_k, p = args.moe_top_k, args.moe_normalize_expert_weights or None
        if args.batch_invariant:
            require(_is_plain_linear(layer), "dMoE", "router.layer", "a torch.nn.Linear without bias beside batch_invariant, and without"
                    " hooks or a forward of its own", type(layer).__name__, TypeError)
            engine = engines.batch_invariant(args.engine, x_TH.device)
        elif not _is_plain_linear(layer) or _has_any_global_hook():
            logits_TE = layer(_as_weight(layer, x_TH))
            self._require_experts(logits_TE.shape)
            return route(logits_TE, top_k, normalize=p), logits_TE.dtype
        self._require_experts((x_TH.size(0), layer.weight.size(0)))
        return route_tokens(x_TH, layer.weight, top_k, normalize=p, engine=engine), x_TH.dtype

    def _require_experts(self, logits_shape) -> None:
        require(logits_shape[-1] == self.args.moe_num_experts, "dMoE", "router.layer",
                f"a module that maps [T,H] to [T,E] with E == {self.args.moe_num_experts}", list(logits_shape))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.training and self.args.moe_jitter_eps is not None:
            x = x * self.jitter(x)
        (scores_TE, weights_TK, experts_TK, logsumexp_T), dtype = self._route(x.reshape(-1, x.size(-1)))
        if self.training and self.args.moe_zloss_weight != 0:
            # MegaBlocks keeps logits, whose logsumexp has their dtype, or is computed in float32 if that is asked for.
            save_router_logsumexp(logsumexp_T if self.args.moe_zloss_in_fp32 else logsumexp_T.to(dtype), self._source)
        if self.args.uniform_expert_assignment:
            slots = torch.arange(experts_TK.numel(), dtype=torch.int64, device=experts_TK.device)
            experts_TK = torch.remainder(slots, self.args.moe_num_experts).view_as(experts_TK)
        return scores_TE, weights_TK, experts_TK


def _is_plain_linear(layer: torch.nn.Module) -> bool:
    """Whether calling the layer computes x @ weight.T and does nothing else, so that route_tokens may take its place."""
    return (type(layer) is torch.nn.Linear and torch.nn.Linear.forward is _LINEAR_FORWARD and "forward" not in layer.__dict__
            and layer.bias is None and type(layer.weight) in _PLAIN_WEIGHTS
            and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks))


# Weights of other types (DTensor, quantised ones) have products of their own.
_PLAIN_WEIGHTS = (*PLAIN, FakeTensor, FunctionalTensor)


def _as_weight(layer: torch.nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
    """x in the dtype of a linear layer's weight: a router may be of another dtype than the layer, and torch's product takes only one.
    Autocast casts both. A module with a forward of its own gets x as it is."""
    if type(layer).forward is not torch.nn.Linear.forward or "forward" in layer.__dict__:
        return x_TH
    weight: torch.Tensor | None = layer._parameters.get("weight")
    if weight is None:  # parametrized: reading layer.weight would compute it
        weight = next(layer.parameters(), x_TH)
    if weight.dtype == x_TH.dtype or (autocast_enabled(x_TH.device.type) and torch.float64 not in (weight.dtype, x_TH.dtype)):
        return x_TH
    return x_TH.to(weight.dtype)


@functools.cache
def _warn_that_weights_are_one() -> None:
    warnings.warn("Arguments: moe_normalize_expert_weights divides the one weight of a token with moe_top_k=1 by itself: all weights are 1,"
                  " and the router gets no gradient from the layer's output. Use None with moe_top_k=1.", stacklevel=4)
