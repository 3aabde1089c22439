"""The experts of a group of ranks with the bits of a single process: every slot has a row of its own, which the token's rank sums.

Shape suffixes: T tokens, K slots a token, S rows received, H hidden, W ranks, E experts on this rank, U slots of this rank's tokens, V
slots of this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from gbmoe._define_operator import differentiable_once
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops import padded_gather, padded_scatter
from gbmoe.ops.permute import gather_slots
from gbmoe.parallel import pass_agreement
from gbmoe.parallel.differentiable_all_to_all import AllToAll
from gbmoe.parallel.dispatch_combine import Trip, first_rows_of, plan_of_destinations
from gbmoe.parallel.exchange import Compute, as_it_travels, total_rows, with_sizes
from gbmoe.parallel.pass_agreement import joined
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.row_counts import exchanged_counts, message_of
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap


@dataclass(frozen=True)
class _WholeRows:
    """Gives every slot a row of its own, as a single process does: a row travels once to a rank, and is repeated there for its slots;
    every slot's row travels back.

    Both sides order the rows of slots by rank, token and slot. `slots` is the plan of the tokens' rank, which sorts its slots by the
    rank that computes them; `here` is the plan of the computing rank, which repeats the rows that came for their slots.
    """

    trip: Trip
    slots: RoutingPlan
    here: RoutingPlan
    sent: list[int]
    received: list[int]

    def out(self, x_TH):
        return padded_gather(self.trip.send(0, self.trip.rows(x_TH)[0]).wait(), self.here)

    def back(self, y_VH, weights_TK=None):
        return padded_scatter(AllToAll.apply(y_VH, self.sent, self.received, self.trip.group), self.slots, weights_TK)

    def scalars_out(self, weights_TK):
        """Each slot's router weight at the rank that computes the slot, [V,1]."""
        flat = SlotMap(row_of_slot_TK=self.slots.row_of_slot_TK.view(-1, 1), slot_of_row_P=self.slots.slot_of_row_P)
        weights_U1, _ = gather_slots(weights_TK.reshape(-1, 1), flat)
        return AllToAll.apply(weights_U1, self.received, self.sent, self.trip.group)


class _OutWhole(torch.autograd.Function):
    """Forward sends rows out. In backward the token's rank sums the gradients of its slots' rows, in slot order."""

    @staticmethod
    def forward(ctx, x_TH, rows):
        ctx.rows = rows
        return rows.out(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_VH):
        return ctx.rows.back(grad_VH), None


class _BackWeighed(torch.autograd.Function):
    """Forward brings rows back, weighs and sums them. Backward hands on the gradient of the weighed rows, not that of the rows
    themselves, because the experts multiply by the weights in their own backward."""

    @staticmethod
    def forward(ctx, y_VH, weights_TK, rows):
        ctx.rows = rows
        return rows.back(y_VH, weights_TK)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_TH):
        return ctx.rows.out(grad_TH), None, None


def exact_experts_by_exchange(
    compute: Compute, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, p: Placement, *, weighs_later: bool,
    layer: int = 0, trains: bool = True, recipe: Float8BlockScaling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """experts_by_exchange with the same bits that one process gives: every slot's row comes back, and the token's rank sums them.

    A row still travels only once to each rank that needs it, but one row for every slot comes back. It works in one chunk and one trip.
    It is not compiled: torch.compile breaks its graph around it.

    Args:
        compute: a function of rows with one slot each: (rows [V,H], plan, weights [V,1] or None) -> rows [V,H].
        weighs_later: `compute` is given the weights but returns rows without them, and in backward expects the gradient of the weighed
            rows. Otherwise it is given None.
        layer, trains, recipe: as in experts_by_exchange. Rows travel in their dtype.
    """
    x_TH = as_it_travels("exact_experts_by_exchange", x_TH, experts_TK, weights_TK)
    plan = RoutingPlan.from_experts(experts_TK, p.experts, check="none")
    ids_TK = experts_TK.int().contiguous()
    key_TK = p.keys(ids_TK)
    to_ranks = plan_of_destinations(key_TK, p.world, 1)
    path = "exact exchange" if weighs_later else "exact exchange without gbmoe's kernels"
    header_A = pass_agreement.header(path, layer, x_TH, weights_TK, trains, p.group, None if recipe is None else recipe.engine)
    counts = exchanged_counts(message_of(header_A, to_ranks, plan, p), p)
    needs, trip = counts.needs, Trip(first_rows_of(to_ranks, total_rows(counts.sends)).slot_map, counts.sends, counts.receives, p.group)
    x_TH, weights_TK = joined(x_TH, needs.x), joined(weights_TK, needs.weights)
    (_, ids_SK), = trip.slots(ids_TK, weights_TK.detach())

    local_SK = ids_SK - p.first_expert
    here_SK = (local_SK >= 0) & (local_SK < p.experts_per_rank)
    sent, received = (slots_W.tolist() for slots_W in counts.slots)
    here = first_rows_of(RoutingPlan.from_experts(torch.where(here_SK, 0, -1), 1, check="none"), sum(received))
    slots = first_rows_of(RoutingPlan.from_experts(key_TK, p.world, check="none"), sum(sent))
    rows = _WholeRows(trip, slots, here, sent, received)
    expert_V = local_SK.reshape(-1)[here.slot_of_row_P.long()]
    of_slots = with_sizes(RoutingPlan.from_experts(expert_V, p.experts_per_rank, check="none"), counts.sizes)

    x_VH = _OutWhole.apply(x_TH, rows)
    if weighs_later:
        y_VH = compute(x_VH, of_slots, rows.scalars_out(weights_TK)).to(x_VH.dtype)
        return _BackWeighed.apply(joined(y_VH, needs.any), weights_TK.detach(), rows), plan.counts_E
    return rows.back(joined(compute(x_VH, of_slots, None).to(x_VH.dtype), needs.any), weights_TK), plan.counts_E
