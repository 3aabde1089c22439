"""LearnedRouter: scores, weights and ids of each token's experts; mirrors megablocks.layers.router.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe._checks import require
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.losses import Source, save_router_logsumexp
from gbmoe.ops.router_logits import router_logits
from gbmoe.ops.router_softmax_topk import kernels_take, route


class LearnedRouter(torch.nn.Module):
    """A bias-free linear layer, softmax over the experts, and the K highest scores.

    forward(x [..., H]) returns scores [T,E], expert_weights [T,K] and expert_indices [T,K] (int64). In training the input is
    jittered (moe_jitter_eps), and the logits' logsumexp is kept for the z-loss where that has a weight. MegaBlocks keeps logits in
    evaluation too, where they pile up because nothing clears them. Experts are ranked by their logits; MegaBlocks ranks scores that
    are rounded to the layer's dtype, and so may choose other experts where scores are nearly equal.
    """

    _source: Source | None = None  # in modules that were pickled before 0.3

    def __init__(self, args: Arguments):
        super().__init__()
        experts, top_k, p = args.moe_num_experts, args.moe_top_k, args.moe_normalize_expert_weights or None
        require(not args.batch_invariant or kernels_take(experts, top_k, p), "dMoE", "batch_invariant",
                "False where no router kernel takes moe_num_experts, moe_top_k and moe_normalize_expert_weights",
                f"{experts}, {top_k} and {p}")
        self.args, self._source = args, Source()
        self.layer = torch.nn.Linear(args.hidden_size, args.moe_num_experts, bias=False, dtype=args.dtype, device=args.device)
        args.init_method(self.layer.weight)

    def jitter(self, x: torch.Tensor) -> torch.Tensor:
        """Random factors, uniform in [1 - eps, 1 + eps), with the shape and dtype of x."""
        eps = self.args.moe_jitter_eps or 0.0
        low, high = 1.0 - eps, 1.0 + eps
        return low + torch.rand_like(x) * (high - low)

    def _batch_invariant_logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        require(type(self.layer) is torch.nn.Linear and self.layer.bias is None, "dMoE", "router.layer",
                "a torch.nn.Linear without bias beside batch_invariant", type(self.layer).__name__, TypeError)
        return router_logits(x_TH, self.layer.weight, engines.batch_invariant(self.args.engine, x_TH.device))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.training and self.args.moe_jitter_eps is not None:
            x = x * self.jitter(x)
        x_TH = x.reshape(-1, x.size(-1))
        logits_TE = self._batch_invariant_logits(x_TH) if self.args.batch_invariant else self.layer(x_TH)
        require(logits_TE.size(-1) == self.args.moe_num_experts, "dMoE", "router.layer",
                f"a module that maps [T,H] to [T,E] with E == {self.args.moe_num_experts}", list(logits_TE.shape))
        scores_TE, weights_TK, experts_TK, logsumexp_T = route(
            logits_TE, self.args.moe_top_k, normalize=self.args.moe_normalize_expert_weights or None)
        if self.training and self.args.moe_zloss_weight != 0:
            # MegaBlocks keeps logits, whose logsumexp has their dtype, or is computed in float32 if that is asked for.
            save_router_logsumexp(logsumexp_T if self.args.moe_zloss_in_fp32 else logsumexp_T.to(logits_TE.dtype), self._source)
        if self.args.uniform_expert_assignment:
            slots = torch.arange(experts_TK.numel(), device=experts_TK.device)
            experts_TK = torch.remainder(slots, self.args.moe_num_experts).view_as(experts_TK)
        return scores_TE, weights_TK, experts_TK
