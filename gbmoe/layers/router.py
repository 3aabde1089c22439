"""LearnedRouter: scores, weights and ids of each token's experts; mirrors megablocks.layers.router.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import warnings

import torch

from gbmoe._checks import require
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.kept import Kept
from gbmoe.ops.route import route

_ROUTER_LOGSUMEXP = Kept()  # of logsumexp [T]


def clear_router_zloss() -> None:
    """Forget what the routers kept for the z-loss; call it once a step, after the loss."""
    _ROUTER_LOGSUMEXP.clear()


def batched_router_zloss(args: Arguments) -> torch.Tensor | int:
    """moe_zloss_weight * mean over tokens of logsumexp(logits)**2, one entry a router that ran in training since the last clear.

    Mirrors megablocks.layers.router.batched_router_zloss (ST-MoE, arXiv 2202.08906), but for routers in evaluation, which keep
    nothing here. 0, with a warning, where the weight is 0; an entry of 0 for a router that got no token. The dtype is that of
    the logits, float32 with moe_zloss_in_fp32; float16, in which the square of 256 is infinite, is computed in float32 and
    rounded once.

    Raises:
        ValueError: where no router ran, and where gradients are on but were off when one ran, as under the reentrant
            torch.utils.checkpoint.
    """
    if args.moe_zloss_weight == 0:
        warnings.warn("batched_router_zloss was called, but moe_zloss_weight is 0", stacklevel=2)
        return 0
    kept = _ROUTER_LOGSUMEXP.items()
    require(len(kept) > 0, "batched_router_zloss", "routers that ran in training since the last clear",
            "at least 1 (run the layers in training mode, with moe_zloss_weight in the Arguments that they are built from)", 0)
    _ROUTER_LOGSUMEXP.require_gradients("batched_router_zloss")
    dtype = torch.float32 if args.moe_zloss_in_fp32 else kept[0].dtype
    if args.moe_zloss_in_fp32 or dtype == torch.float16:
        kept = [logsumexp_T.float() for logsumexp_T in kept]
    squares = [logsumexp_T.square() for logsumexp_T in kept]
    means = [square_T.mean() if square_T.size(0) else square_T.sum() for square_T in squares]
    return (args.moe_zloss_weight * torch.stack(means)).to(dtype)


class LearnedRouter(torch.nn.Module):
    """A bias-free linear layer, softmax over the experts, and the K highest scores.

    forward(x [..., H]) returns scores [T,E], expert_weights [T,K] and expert_indices [T,K] (int64). In training the input is
    jittered (moe_jitter_eps), and the logits' logsumexp is kept for the z-loss where it has a weight; MegaBlocks keeps logits in
    evaluation too, where nobody clears them and they pile up. Experts are ranked by their logits; MegaBlocks ranks scores that
    are rounded to the layer's dtype, and so chooses otherwise between near equals.
    """

    def __init__(self, args: Arguments):
        super().__init__()
        self.args = args
        self.layer = torch.nn.Linear(args.hidden_size, args.moe_num_experts, bias=False, dtype=args.dtype, device=args.device)
        args.init_method(self.layer.weight)

    def jitter(self, x: torch.Tensor) -> torch.Tensor:
        """Factors uniform in [1 - eps, 1 + eps), shape and dtype of x."""
        eps = self.args.moe_jitter_eps or 0.0
        low, high = 1.0 - eps, 1.0 + eps
        return low + torch.rand_like(x) * (high - low)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.training and self.args.moe_jitter_eps is not None:
            x = x * self.jitter(x)
        logits_TE = self.layer(x.reshape(-1, x.size(-1)))
        scores_TE, weights_TK, experts_TK, logsumexp_T = route(
            logits_TE, self.args.moe_top_k, normalize=self.args.moe_normalize_expert_weights or None)
        if self.training and self.args.moe_zloss_weight != 0:
            _ROUTER_LOGSUMEXP.append(logsumexp_T.to(logits_TE.dtype))
        if self.args.uniform_expert_assignment:
            slots = torch.arange(experts_TK.numel(), device=experts_TK.device)
            experts_TK = torch.remainder(slots, self.args.moe_num_experts).view_as(experts_TK)
        return scores_TE, weights_TK, experts_TK
