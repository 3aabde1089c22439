"""The experts' weights, and the three ways to compute with them.

Shape suffixes: T tokens, K slots a token, E experts on this rank, H hidden, F ffn hidden on this rank, C capacity, P padded rows.
"""

from __future__ import annotations

import torch

from gbmoe._checks import require
from gbmoe.layers import mpu
from gbmoe.layers.arguments import Arguments
from gbmoe.ops import expert_mlp, padded_gather, padded_scatter
from gbmoe.routing import RoutingPlan


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The tensor to compute with: a DTensor's local shard, where there is one."""
    if type(weight) is torch.nn.Parameter:
        return weight
    return weight.to_local() if hasattr(weight, "to_local") else weight


class ExpertWeights(torch.nn.Module):
    """w1, w2 and, for a GLU, v1: each [E*F,H], row-major, expert-major; MegaBlocks' names, shapes and checkpoint.

    Subclasses compute: forward(x_TH, plan, weights_TK or None) -> out_TH, the weighted sum of each token's experts.
    """

    def __init__(self, args: Arguments):
        super().__init__()
        self.args = args
        parallel = args.moe_expert_model_parallelism
        # Under expert parallelism every rank sees the gradients of all ranks' tokens; data parallelism would have averaged.
        self.gradient_scale = 1 / mpu.expert_parallel_world_size(args) if parallel else None
        # The order in which MegaBlocks draws them.
        methods = {"w1": args.init_method, "w2": args.output_layer_init_method}
        if args.mlp_type == "glu":
            methods["v1"] = args.init_method
        self.experts = mpu.experts_per_rank(args)
        self.rows = self.experts * mpu.features_per_rank(args)
        for name, init_method in methods.items():
            weight = torch.nn.Parameter(torch.empty(self.rows, args.hidden_size, device=args.device, dtype=args.dtype))
            with torch.no_grad():
                _initialise(weight, args, init_method)
            mpu.set_expert_model_parallel_attributes(weight, parallel)
            self.register_parameter(name, weight)

    def weights_EFH(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(w1, w2, v1 or None) as [E,F,H], local and with the gradient scale of expert parallelism."""
        def view(name):
            weight = getattr(self, name)
            if self.gradient_scale is not None:
                weight = _ScaleGradient.apply(weight, self.gradient_scale)
            weight = _local(weight)
            # A shard of fully_shard's could be viewed as other experts without a word.
            require(weight.size(0) == self.rows, "dMoE", name,
                    lambda: f"{self.rows} rows on this rank (fully_shard gathers them when the module that it was given is called,"
                    " not for a part of it)", weight.size(0))
            return weight.view(self.experts, -1, self.args.hidden_size)
        return view("w1"), view("w2"), view("v1") if self.args.mlp_type == "glu" else None

    def extra_repr(self) -> str:
        a = self.args
        return (f"{a.mlp_type}, experts={mpu.experts_per_rank(a)}, hidden={a.hidden_size}, ffn={mpu.features_per_rank(a)},"
                f" engine={a.engine}")


def _initialise(weight: torch.Tensor, args: Arguments, init_method) -> None:
    """Draw the weights of all experts and keep this rank's part, so that a seed gives one model at any world size."""
    shape = (args.moe_num_experts, args.ffn_hidden_size, args.hidden_size)
    if not args.moe_expert_model_parallelism:
        init_method(weight.view(shape))
        return
    every_EFH = torch.empty(shape, device=args.device, dtype=args.dtype)
    init_method(every_EFH)
    rank, degree = mpu.expert_parallel_rank(args), mpu.expert_sharding_degree(args)
    experts, features = mpu.experts_per_rank(args), mpu.features_per_rank(args)
    first_expert, first_row = rank % degree * experts, rank // degree * features
    mine = every_EFH[first_expert : first_expert + experts, first_row : first_row + features]
    weight.copy_(mine.reshape(weight.shape))


class GroupedExperts(ExpertWeights):
    """mlp_impl='gbmoe': gather, grouped products, weighted scatter; see gbmoe.ops.expert_mlp."""

    def forward(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None) -> torch.Tensor:
        w1_EFH, w2_EFH, v1_EFH = self.weights_EFH()
        return expert_mlp(x_TH, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK=weights_TK, activation=self.args.activation_fn,
                          engine=self.args.engine, recompute_activation=self.args.memory_optimized_mlp)


class BmmExperts(ExpertWeights):
    """mlp_impl='bmm': every expert padded to the largest and multiplied by torch.bmm; the article's baseline.

    Drops no token: the capacity C is the largest expert's count, read back from the device. Unbalanced routing costs it
    memory and products of zeros.
    """

    def forward(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None) -> torch.Tensor:
        w1_EFH, w2_EFH, v1_EFH = self.weights_EFH()
        experts, hidden = w1_EFH.size(0), x_TH.size(1)
        capacity = int(plan.padded_counts_E.max()) if plan.num_rows else 0
        # Slot (t,j) sits at place `row - first row of its expert` of expert e's C places; one more row is for the dropped.
        row_R = plan.row_of_slot_TK.reshape(-1).long()
        expert_R = torch.searchsorted(plan.offsets_E1[1:].long(), row_R.clamp(min=0), right=True).clamp(max=experts - 1)
        place_R = expert_R * capacity + row_R - plan.offsets_E1.long()[expert_R]
        place_R = torch.where(row_R >= 0, place_R, experts * capacity)
        x_RH = x_TH.repeat_interleave(plan.top_k, dim=0)
        x_ECH = x_TH.new_zeros(experts * capacity + 1, hidden).index_copy(0, place_R, x_RH)[:-1].view(experts, capacity, hidden)
        a_ECF = self.args.activation_fn(torch.bmm(x_ECH, w1_EFH.transpose(1, 2)))
        if v1_EFH is not None:
            a_ECF = a_ECF * torch.bmm(x_ECH, v1_EFH.transpose(1, 2))
        y_ECH = torch.bmm(a_ECF, w2_EFH)
        y_RH = torch.cat([y_ECH.flatten(0, 1), y_ECH.new_zeros(1, hidden)])[place_R]
        y_TKH = y_RH.view(plan.num_tokens, plan.top_k, hidden)
        if weights_TK is not None:
            y_TKH = y_TKH * weights_TK.unsqueeze(-1).to(y_TKH.dtype)
        return y_TKH.sum(dim=1)


class ReferenceExperts(ExpertWeights):
    """mlp_impl='reference': a loop over the experts in plain PyTorch, with PyTorch's own gradients."""

    def forward(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None) -> torch.Tensor:
        w1_EFH, w2_EFH, v1_EFH = self.weights_EFH()
        xp_PH = padded_gather(x_TH, plan)
        sizes = plan.host_sizes().tolist()
        y_PH = []
        for e, rows in enumerate(xp_PH[: sum(sizes)].split(sizes)):  # type: ignore[union-attr]
            a = self.args.activation_fn(rows @ w1_EFH[e].t())
            if v1_EFH is not None:
                a = a * (rows @ v1_EFH[e].t())
            y_PH.append(a @ w2_EFH[e])
        y_PH.append(y_PH[0].new_zeros(plan.num_rows - sum(sizes), x_TH.size(1)))
        return padded_scatter(torch.cat(y_PH), plan, weights_TK)


_IMPLEMENTATIONS = {"gbmoe": GroupedExperts, "bmm": BmmExperts, "reference": ReferenceExperts}


def make_experts(args: Arguments) -> ExpertWeights:
    """The experts that args.mlp_impl names."""
    return _IMPLEMENTATIONS[args.mlp_impl](args)
