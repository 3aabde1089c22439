"""What register() adds to MegaBlocks: experts for mlp_impl='gbmoe', and branches that call them instead of its permutations.

Importing this module imports MegaBlocks; install() changes it.

Shape suffixes: T tokens, K slots a token, R expert-major rows, E experts and F ffn hidden on this rank, H hidden.
"""

from __future__ import annotations

import functools
import importlib

import torch
from megablocks import grouped_gemm_util
from megablocks.layers import arguments, dmlp_registry, dmoe, glu, mlp, mpu

from gbmoe._checks import require
from gbmoe.layers.expert_parallelism import parallel_experts
from gbmoe.layers.expert_weights import local_weight
from gbmoe.ops import expert_mlp
from gbmoe.ops.activations import activation_name
from gbmoe.parallel.expert_modules import ExpertModule
from gbmoe.plan import RoutingPlan


class _FusedExperts(ExpertModule):
    """The computation, to be mixed into a MegaBlocks class that has the parameters, their initialisation and scale_grad."""

    def forward(
        self, x: torch.Tensor, plan: RoutingPlan | torch.Tensor, weights_TK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """With x [T,H], a plan and the router's weights, return [T,H]. With expert-major rows [R,H] and tokens_per_expert, int [E] on
        the host or the device, as MegaBlocks calls the classes of its registry, return [R,H]."""
        if not isinstance(plan, RoutingPlan):
            plan = _plan_of_sorted_rows(x, plan)
        w1_EFH, w2_EFH, v1_EFH = (self._weight_EFH(name) for name in ("w1", "w2", "v1"))
        return expert_mlp(x, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK=weights_TK, activation=self.args.activation_fn,
                          recompute_activation=self.args.memory_optimized_mlp, fp8_recipe=getattr(self.args, "fp8_recipe", None))

    def _weight_EFH(self, name):
        weight = getattr(self, name, None)
        if weight is None:
            return None
        shape = (mpu.experts_per_rank(self.args), mpu.features_per_rank(self.args), self.args.hidden_size)
        scaled = self.scale_grad(weight)
        one_operator = activation_name(self.args.activation_fn) is not None
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and scaled is not weight and not one_operator:
            scaled = scaled.clone()  # as in with_scaled_gradients: the activation may end the graph
        return local_weight(scaled).view(shape)


class FusedMLP(_FusedExperts, mlp.SparseMLP):
    """mlp_impl='gbmoe' with mlp_type='mlp'."""


class FusedGLU(_FusedExperts, glu.SparseGLU):
    """mlp_impl='gbmoe' with mlp_type='glu'."""


def _plan_of_sorted_rows(x_RH: torch.Tensor, counts_E: torch.Tensor) -> RoutingPlan:
    rows = x_RH.size(0)
    if counts_E.device.type == "cpu" and not torch.compiler.is_compiling():
        counts = counts_E.tolist()  # Python's sums do not overflow
        require(min(counts, default=0) >= 0 and sum(counts) == rows, "forward", "tokens_per_expert",
                f"no negative entry and a sum of x.size(0) == {rows}", counts)
    return RoutingPlan.from_counts(counts_E, rows, device=x_RH.device, check="none")


def _forward_once(self, x, expert_weights, top_experts):
    plan = RoutingPlan.from_experts(top_experts, self.num_experts, check="none")
    return self.mlp(x.reshape(-1, x.size(-1)), plan, expert_weights), plan.counts_E


def _parallel_forward_once(self, x, expert_weights, top_experts):
    return parallel_experts(self.mlp, x.reshape(-1, x.size(-1)), top_experts, expert_weights, self.args)


def _branch(method_name, fused):
    """Let ParallelDroplessMLP's method call `fused` where args.mlp_impl is 'gbmoe', and the original method elsewhere."""
    original = getattr(dmoe.ParallelDroplessMLP, method_name)

    @functools.wraps(original)
    def method(self, x, expert_weights, top_experts):
        chosen = fused if self.args.mlp_impl == "gbmoe" else original
        return chosen(self, x, expert_weights, top_experts)

    setattr(dmoe.ParallelDroplessMLP, method_name, method)


def install() -> None:
    """Add 'gbmoe' to MegaBlocks' registry and the branches to it. Idempotent."""
    if not grouped_gemm_util.grouped_gemm_is_available():  # MegaBlocks was imported before there was a grouped_gemm
        importlib.reload(grouped_gemm_util)
    if "gbmoe" in dmlp_registry._REGISTRY["mlp"]:
        return
    dmlp_registry._REGISTRY["mlp"]["gbmoe"] = FusedMLP
    dmlp_registry._REGISTRY["glu"]["gbmoe"] = FusedGLU
    _branch("forward_once", _forward_once)
    _branch("parallel_forward_once", _parallel_forward_once)

    make_arguments = arguments.Arguments.__init__

    @functools.wraps(make_arguments)
    def __init__(self, *args, **kwargs):
        # MegaBlocks' default, torch.cuda.current_device(), raises where there is no CUDA device.
        if not torch.cuda.is_available():
            kwargs.setdefault("device", "cpu")
        make_arguments(self, *args, **kwargs)

    arguments.Arguments.__init__ = __init__
