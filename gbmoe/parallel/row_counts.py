"""How many rows go where: what each rank tells the others before rows travel, and the one wait of the host for what it is told.

Shape suffixes: W ranks, N nodes, D ranks of a node, C chunks, E experts on this rank, A elements of a header
(gbmoe.parallel.pass_agreement), X = A + C + E elements of a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gbmoe.parallel import pass_agreement
from gbmoe.parallel.differentiable_all_to_all import all_to_all
from gbmoe.parallel.groups import Nodes
from gbmoe.parallel.host_copy import to_host
from gbmoe.parallel.pass_agreement import Needs
from gbmoe.parallel.placement import Placement
from gbmoe.plan import RoutingPlan


@dataclass(frozen=True)
class RowCounts:
    """The numbers of rows that the host must know in a layer call; it waits for all of them once.

    sends, receives: rows by chunk and rank. Over several nodes they are by chunk and node, and `inside` has those of the second trip.
    sizes: rows of each local expert, int64 on the CPU.
    needs: which gradients any rank needs.
    slots: the slots sent to and received from each rank, int64 [W] each, on the CPU; empty over several nodes.
    """

    sends: list[list[int]]
    receives: list[list[int]]
    sizes: torch.Tensor
    needs: Needs
    inside: tuple[list[list[int]], list[list[int]]] | None = None
    slots: tuple[torch.Tensor, ...] = ()


def _exchange_counts(message: torch.Tensor, group) -> torch.Tensor:
    out = torch.empty_like(message)
    all_to_all(out, message, None, None, group)
    return out


def _lists(counts_WC: torch.Tensor) -> list[list[int]]:
    return counts_WC.t().tolist()


def message_of(header_A: torch.Tensor, to_ranks: RoutingPlan, plan: RoutingPlan, p: Placement) -> torch.Tensor:
    """What each rank is told: the header, the rows that go to it, by chunk, and the slots of each of its experts; int32 [W, X]."""
    slots_WE = plan.counts_E.repeat(p.shards).view(p.world, p.experts_per_rank)
    return torch.cat([header_A.expand(p.world, -1), to_ranks.counts_E.view(p.chunks, p.world).t(), slots_WE], dim=1)


def exchanged_counts(message_WX: torch.Tensor, p: Placement) -> RowCounts:
    """The counts where rows make a single trip."""
    sent, received = to_host(torch.stack([message_WX, _exchange_counts(message_WX, p.group)]), p.group)
    received, needs = pass_agreement.checked(received, p.group)
    sent, c = sent[:, pass_agreement.NUMBERS :], p.chunks
    slots = (sent[:, c:].sum(1), received[:, c:].sum(1))
    return RowCounts(_lists(sent[:, :c]), _lists(received[:, :c]), received[:, c:].sum(0), needs, slots=slots)


def exchanged_counts_by_node(message_WX: torch.Tensor, to_nodes: RoutingPlan, p: Placement, nodes: Nodes) -> RowCounts:
    """The counts where rows make two trips. This rank hands on, inside its node, the rows that the ranks with its position in every node
    send to it: the sum of their messages, and of their headers the largest of each element."""
    a, c, x = pass_agreement.NUMBERS, p.chunks, message_WX.size(1)
    rows_NC = to_nodes.counts_E.view(c, nodes.count).t()
    across = torch.cat([rows_NC, message_WX.view(nodes.count, nodes.size * x)], dim=1)
    came = _exchange_counts(across, nodes.across)
    came_NDX = came[:, c:].view(nodes.count, nodes.size, x)
    inside = torch.cat([came_NDX[:, :, :a].amax(0), came_NDX[:, :, a:].sum(0, dtype=torch.int32)], dim=1)
    handed = _exchange_counts(inside, nodes.inside)
    parts = (rows_NC, came[:, :c], inside[:, a : a + c], handed)
    host = to_host(torch.cat([part.flatten() for part in parts]), p.group).split([part.numel() for part in parts])
    sent, received, passed, handed = (flat.view(part.shape) for flat, part in zip(host, parts))
    handed, needs = pass_agreement.checked(handed, p.group)
    return RowCounts(_lists(sent), _lists(received), handed[:, c:].sum(0), needs, (_lists(passed), _lists(handed[:, :c])))
