"""dMoE: the dropless Mixture-of-Experts layer, with MegaBlocks' interface.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.expert_parallelism import parallel_experts, prepare
from gbmoe.layers.expert_weights import make_experts
from gbmoe.layers.losses import Source, save_load_balancing_loss
from gbmoe.layers.router import LearnedRouter
from gbmoe.layers.shared_expert import make_shared_expert
from gbmoe.plan import RoutingPlan


class ParallelDroplessMLP(torch.nn.Module):
    """The experts with their plan, the all-to-all where they are spread over ranks, the output bias and the load-balancing loss.

    forward(x [..., H], scores [T,E], expert_weights [T,K], top_experts [T,K]) follows MegaBlocks' return convention: out;
    (out, bias) with bias and return_bias; out + bias with bias alone. The bias is one vector [H] a layer.

    With experts spread over a group, construction and forward are collective: every rank of the group must call them, in the
    same order, with any number of tokens.
    """

    _source: Source | None = None  # in modules that were pickled before 0.3

    def __init__(self, args: Arguments):
        super().__init__()
        self.args, self._source = args, Source()
        self.num_experts, self.top_k = args.moe_num_experts, args.moe_top_k
        prepare(args)
        self.mlp = make_experts(args)
        if args.bias:
            self.bias = torch.nn.Parameter(torch.zeros(args.hidden_size, device=args.device, dtype=args.dtype))
        else:
            self.register_parameter("bias", None)

    def forward(self, x, scores, expert_weights, top_experts, *, meanwhile=None):
        """Shapes and results are those of the class.

        With expert parallelism `meanwhile` is called once. Work that it starts on the device runs there while the host waits for the
        numbers of rows. Without expert parallelism it is not called.
        """
        x_TH = x.reshape(-1, x.size(-1))
        if self.args.moe_expert_model_parallelism:
            out_TH, counts_E = parallel_experts(self.mlp, x_TH, top_experts, expert_weights, self.args, meanwhile)
        else:
            # The router's ids are in range by construction.
            plan = RoutingPlan.from_experts(top_experts, self.num_experts, check="none")
            out_TH, counts_E = self.mlp(x_TH, plan, expert_weights), plan.counts_E
        if self.training and self.args.moe_loss_weight > 0:
            save_load_balancing_loss((counts_E, scores), self._source)
        # To autograd this is not a view. fully_shard gathers the weights for backward in a hook on the result of its unit, and the
        # hook of a view is lost where the caller adds to it in place.
        # torch.jit.trace records the sizes of a view, but would make those of this operator constants.
        out = out_TH.view(x.shape) if torch.jit.is_tracing() else torch.ops.aten._unsafe_view.default(out_TH, x.shape)
        if self.bias is None:
            return out
        if not self.args.return_bias:
            return out + self.bias.to(out.dtype)  # under autocast out has autocast's dtype, as a Linear with a bias does
        # A clone under fully_shard, which frees the memory of a unit's parameters when the unit returns.
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
        router.layer may be any module that maps [T,H] to [T,E], such as an adapter around the linear layer or a quantised one.

        Raises:
            TypeError, ValueError: naming what x should be, and what it is.
        """
        weight = self._weight()
        require_tensor(x, "dMoE", "x", dtypes=FLOATING, device=weight.device)
        require(x.dim() >= 1 and x.size(-1) == weight.size(1), "dMoE", "x",
                lambda: f"last dimension hidden_size == {weight.size(1)}", list(x.shape))
        device_type = x.device.type
        if autocast_enabled(device_type) and weight.dtype != torch.float64:
            # Cast before the tokens are permuted, so that half as many bytes are moved.
            x = x.to(torch.get_autocast_dtype(device_type))
        else:
            require(x.dtype == weight.dtype, "dMoE", "x",
                    lambda: f"the layer's dtype {weight.dtype}{'' if weight.dtype == torch.float64 else ', or autocast'}",
                    x.dtype, TypeError)
        scores, expert_weights, top_experts = self.router(x)
        if self.shared_expert is None:
            return self.experts(x, scores, expert_weights, top_experts)
        shared: list[torch.Tensor] = []
        if self.router.args.moe_expert_model_parallelism:  # the shared expert hides the host's wait
            out = self.experts(x, scores, expert_weights, top_experts, meanwhile=lambda: shared.append(self.shared_expert(x)))
        else:
            out = self.experts(x, scores, expert_weights, top_experts)
            shared.append(self.shared_expert(x))
        out, *bias = out if isinstance(out, tuple) else (out,)
        out = self.shared_expert.add_experts_sharedexpert(shared[0], out)
        return (out, *bias) if bias else out

    def _weight(self) -> torch.Tensor:
        """A weight [..., H] that tells the layer's dtype and device."""
        # The router's weight comes first, because that of experts which fully_shard was given separately is not gathered yet. But a
        # module that a user puts in place of router.layer may have no weight, a method of that name, or packed integers.
        weight = getattr(self.router.layer, "weight", None)
        return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else self.experts.mlp.w1
