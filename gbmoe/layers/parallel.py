"""Experts spread over the ranks of a group: tokens travel to them and back by all-to-all.

Shape suffixes: T tokens, K slots a token, R slots sent, S rows received, H hidden, W ranks, E experts on this rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from gbmoe.layers import mpu
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.mlp import ExpertWeights
from gbmoe.ops import padded_gather, padded_scatter
from gbmoe.routing import RoutingPlan


class _AllToAll(torch.autograd.Function):
    """Send row blocks of the sizes `sends` to the ranks in order, receive blocks of the sizes `receives`."""

    @staticmethod
    def forward(ctx, x, receives, sends, group):
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        out = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), output_split_sizes=receives, input_split_sizes=sends, group=group)
        return out.view_as(out)  # of `out` itself, written to in here, torch 2.11's compiler loses the gradient

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.sends, ctx.receives, ctx.group), None, None, None


def parallel_experts(experts: ExpertWeights, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor,
                     args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the layer with experts spread over args.expert_parallel_group; mirrors ParallelMLP.parallel_forward_once.

    Waits for the device once, for the numbers of rows to send and receive.

    Returns:
        out [T,H] and tokens_per_expert [all experts], int32, of this rank's tokens.
    """
    group, world = args.expert_parallel_group, mpu.expert_parallel_world_size(args)
    local, shards = mpu.experts_per_rank(args), mpu.hidden_sharding_degree(args)
    plan = RoutingPlan.from_experts(experts_TK, args.moe_num_experts, check="none")

    # Ranks that hold shards of the same experts all get those experts' rows.
    send_WE = plan.counts_E.repeat(shards).view(world, local)
    receive_WE = torch.empty_like(send_WE)
    dist.all_to_all_single(receive_WE, send_WE, group=group)
    send, receive = torch.stack([send_WE, receive_WE]).cpu()
    sends, receives = send.sum(1).tolist(), receive.sum(1).tolist()

    rows_RH = padded_gather(x_TH, plan).repeat(shards, 1)  # type: ignore[union-attr]
    rows_SH = _AllToAll.apply(rows_RH, receives, sends, group)

    # They arrive by rank and, within a rank, by expert.
    expert_of_block = torch.arange(local, device=x_TH.device).repeat(world)
    expert_S = torch.repeat_interleave(expert_of_block, receive_WE.flatten().long(), output_size=sum(receives))
    here = RoutingPlan.from_experts(expert_S, local, align=1, check="none")
    # The engines that want their sizes on the host need not wait again: without padding they are what was received.
    here = replace(here, _host_sizes_E=receive.sum(0), _trusted=True)
    out_SH = experts(rows_SH, here, None)

    out_RH = _AllToAll.apply(out_SH, sends, receives, group)
    if torch.compiler.is_compiling():
        torch._check(out_RH.size(0) == rows_RH.size(0))  # which it cannot know: as many rows come back as were sent
    if shards > 1:
        out_RH = out_RH.view(shards, plan.num_rows, x_TH.size(1)).sum(0)
    return padded_scatter(out_RH, plan, weights_TK), plan.counts_E
