"""dMoE: the dropless Mixture-of-Experts layer, with MegaBlocks' interface, and its load-balancing loss.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.kept import Kept
from gbmoe.layers.mlp import make_experts
from gbmoe.layers.parallel import parallel_experts
from gbmoe.layers.router import LearnedRouter
from gbmoe.layers.shared_expert import make_shared_expert
from gbmoe.routing import RoutingPlan

_LOAD_BALANCING_LOSS = Kept()  # of (tokens_per_expert [E], scores [T,E])


def save_load_balancing_loss(loss: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep one layer's (tokens_per_expert [E], scores [T,E]) for batched_load_balancing_loss.

    Not in a forward that torch.utils.checkpoint repeats in backward: it was kept when it ran first.
    """
    _LOAD_BALANCING_LOSS.append(loss)


def get_load_balancing_loss() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the layers have kept since the last clear, in the order in which they ran; of several threads one after the other."""
    return _LOAD_BALANCING_LOSS.items()


def clear_load_balancing_loss() -> None:
    """Forget it; call it once a step, after the loss."""
    _LOAD_BALANCING_LOSS.clear()


def batched_load_balancing_loss(args: Arguments) -> torch.Tensor | float:
    """moe_loss_weight * E / (layers * T * K) * sum over layers of <tokens_per_expert, mean score>.

    Mirrors megablocks.layers.moe.batched_load_balancing_loss (Switch Transformers, arXiv 2101.03961, summed over layers). The
    dtype is that of the scores, float32 with moe_lbl_in_fp32; in float16, where a count of 65,520 is infinite, it is computed in
    float32 and rounded once.

    Raises:
        ValueError: where the number of layers that ran is not the number that args say this pipeline stage has, and where
            gradients are on but were off when a layer ran, as under the reentrant torch.utils.checkpoint.
    """
    if args.moe_loss_weight == 0:
        return 0.0
    layers = args.num_layers // args.pipeline_model_parallel_size
    if args.num_layers_per_virtual_pipeline_stage is not None:
        layers = args.num_layers_per_virtual_pipeline_stage
    kept = get_load_balancing_loss()
    require(len(kept) == layers, "batched_load_balancing_loss", "layers that ran in training since the last clear",
            f"{layers} (num_layers {args.num_layers}, pipeline_model_parallel_size {args.pipeline_model_parallel_size},"
            f" num_layers_per_virtual_pipeline_stage {args.num_layers_per_virtual_pipeline_stage};"
            " call gbmoe.clear_load_balancing_loss() once a step, and run the layers in training mode)", len(kept))
    _LOAD_BALANCING_LOSS.require_gradients("batched_load_balancing_loss")
    counts, each_scores = zip(*kept)
    tokens = each_scores[0].size(0)
    for count_E, score_TE in kept:
        require(list(count_E.shape) == [args.moe_num_experts], "batched_load_balancing_loss", "tokens_per_expert",
                lambda: f"shape [{args.moe_num_experts}]", list(count_E.shape))
        require(list(score_TE.shape) == [tokens, args.moe_num_experts], "batched_load_balancing_loss", "scores",
                lambda: f"shape [{tokens}, {args.moe_num_experts}]", list(score_TE.shape))
    scores = torch.cat(each_scores, dim=1)
    if args.moe_lbl_in_fp32:
        scores = scores.float()
    dtype, scores = scores.dtype, scores.mean(dim=0) if tokens else scores.sum(dim=0)
    if dtype == torch.float16:
        scores = scores.float()  # neither a count nor a sum of such is sure to fit
    scale = args.moe_num_experts * args.moe_loss_weight / (args.num_layers * max(tokens, 1) * args.moe_top_k)
    return (scale * torch.dot(torch.cat(counts).to(scores.dtype), scores)).to(dtype)


class ParallelDroplessMLP(torch.nn.Module):
    """The experts and what is around them: plan, all-to-all where experts are spread, output bias, load-balancing loss.

    forward(x [..., H], scores [T,E], expert_weights [T,K], top_experts [T,K]) follows MegaBlocks' return convention: out;
    (out, bias) with bias and return_bias; out + bias with bias alone. The bias is one vector [H] a layer.
    """

    def __init__(self, args: Arguments):
        super().__init__()
        self.args = args
        self.num_experts, self.top_k = args.moe_num_experts, args.moe_top_k
        self.mlp = make_experts(args)
        if args.bias:
            self.bias = torch.nn.Parameter(torch.zeros(args.hidden_size, device=args.device, dtype=args.dtype))
        else:
            self.register_parameter("bias", None)

    def forward(self, x, scores, expert_weights, top_experts):
        x_TH = x.reshape(-1, x.size(-1))
        if self.args.moe_expert_model_parallelism:
            out_TH, counts_E = parallel_experts(self.mlp, x_TH, top_experts, expert_weights, self.args)
        else:
            # The router's ids are in range by construction.
            plan = RoutingPlan.from_experts(top_experts, self.num_experts, check="none")
            out_TH, counts_E = self.mlp(x_TH, plan, expert_weights), plan.counts_E
        if self.training and self.args.moe_loss_weight > 0:
            save_load_balancing_loss((counts_E, scores))
        # Not a view, to autograd: fully_shard gathers the weights for backward in a hook on what its unit returns, and a
        # view's hook is lost where the caller adds to it in place.
        out = torch.ops.aten._unsafe_view.default(out_TH, x.shape)
        if self.bias is None:
            return out
        if not self.args.return_bias:
            return out + self.bias
        # The parameters of such a unit, and of the modules in it, lose their memory when it returns.
        return out, self.bias.clone() if "_is_fsdp_managed_module" in self.__dict__ else self.bias


class dMoE(torch.nn.Module):
    """Dropless Mixture of Experts: router -> experts -> optional shared expert. Mirrors megablocks.layers.dmoe.dMoE.

    Parameters, all under MegaBlocks' names and shapes, so that its checkpoints load with strict=True: router.layer.weight
    [E,H]; experts.mlp.w1, w2 and (glu) v1 [E*F,H]; experts.bias [H]; shared_expert.{up,down,gate}_proj.

    Args:
        args: see Arguments.

    Example:
        >>> layer = dMoE(Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2, bias=False,
        ...                        fp16=False, device="cpu"))
        >>> layer(torch.randn(7, 3, 32)).shape
        torch.Size([7, 3, 32])
    """

    def __init__(self, args: Arguments):
        super().__init__()
        self.router = LearnedRouter(args)
        self.experts: Any = self._init_experts_mlp(args)
        self.shared_expert = make_shared_expert(args) if args.shared_expert else None

    def _init_experts_mlp(self, args: Arguments) -> torch.nn.Module:
        return ParallelDroplessMLP(args)

    def forward(self, x: torch.Tensor):
        """x [sl, bs, H] (any leading dimensions) -> the same shape, or (that, bias [H]); see ParallelDroplessMLP.

        Under autocast x may have any floating dtype; a float64 layer takes float64 and computes in it, as torch's own do.
        router.layer may be any module that maps [T,H] to [T,E], such as an adapter round the linear layer or a quantised one.

        Raises:
            TypeError, ValueError: naming what was expected of x and what came.
        """
        weight = self._weight()
        require_tensor(x, "dMoE", "x", dtypes=FLOATING, device=weight.device)
        require(x.dim() >= 1 and x.size(-1) == weight.size(1), "dMoE", "x",
                lambda: f"last dimension hidden_size == {weight.size(1)}", list(x.shape))
        device_type = x.device.type
        if autocast_enabled(device_type) and weight.dtype != torch.float64:
            # Before the tokens are permuted, to move half the bytes.
            x = x.to(torch.get_autocast_dtype(device_type))
        else:
            require(x.dtype == weight.dtype, "dMoE", "x",
                    lambda: f"the layer's dtype {weight.dtype}{'' if weight.dtype == torch.float64 else ', or autocast'}",
                    x.dtype, TypeError)
        scores, expert_weights, top_experts = self.router(x)
        out = self.experts(x, scores, expert_weights, top_experts)
        if self.shared_expert is None:
            return out
        out, *bias = out if isinstance(out, tuple) else (out,)
        out = self.shared_expert.add_experts_sharedexpert(self.shared_expert(x), out)
        return (out, *bias) if bias else out

    def _weight(self) -> torch.Tensor:
        """A weight [..., H] that tells the layer's dtype and device."""
        # The router's first: where fully_shard was given the experts apart, theirs is not gathered yet. What a user puts in the
        # place of router.layer may have none, a method of that name, or one of packed integers.
        weight = getattr(self.router.layer, "weight", None)
        return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else self.experts.mlp.w1
