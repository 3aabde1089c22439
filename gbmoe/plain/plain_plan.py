"""Routing plans in plain PyTorch: which row a slot has, from the experts of the slots or from counts.

Shape suffixes: T tokens, K slots a token, E experts, P padded rows (see gbmoe/plan.py), R rows in expert order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The values of RoutingPlan.slot_of_row_P for rows without a slot: an expert's padding, and rows after the last expert.
PADDING, BEHIND_THE_LAST = -1, -2


def padded_rows(slots: int, num_experts: int, align: int) -> int:
    """The number of rows that is enough for `slots` slots with any routing, each expert's rows being rounded up to `align`."""
    if align == 1:
        return slots
    if not torch.compiler.is_compiling() and type(slots) is type(num_experts) is int:
        least = min(slots, num_experts)
    else:
        # min() would make torch.compile decide for one of the two where it keeps the number of slots variable. sym_min of plain numbers
        # takes the host as long as an operator.
        least = torch.sym_min(slots, num_experts)
    return (slots + least * (align - 1)) // align * align


def routing_plan(experts_TK: torch.Tensor, num_experts: int, align: int) -> tuple[torch.Tensor, ...]:
    """Where every slot goes; see RoutingPlan for the five tensors. Runs on any device without a host wait.

    Ids outside [0, num_experts) belong to no expert: their slots get row -1.
    """
    device, slots = experts_TK.device, experts_TK.numel()
    rows = padded_rows(slots, num_experts, align)
    ids = experts_TK.reshape(-1).long()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order]
    starts = torch.searchsorted(sorted_ids, torch.arange(num_experts + 1, dtype=torch.int64, device=device))
    counts = starts.diff()
    padded = (counts + align - 1) // align * align
    offsets = F.pad(padded.cumsum(0), (1, 0))
    within = torch.arange(slots, dtype=torch.int64, device=device) - starts[sorted_ids]
    routed = sorted_ids < num_experts
    row = torch.where(routed, offsets[sorted_ids.clamp(max=num_experts - 1)] + within, -1)

    row_of_slot = torch.empty(slots, dtype=torch.int32, device=device)
    row_of_slot[order] = row.int()
    # Dropped slots all write to one spare row after the last, which the slice removes.
    slot_of_row = torch.where(torch.arange(rows + 1, dtype=torch.int64, device=device) < offsets[-1], PADDING, BEHIND_THE_LAST).int()
    slot_of_row[torch.where(routed, row, rows)] = order.int()
    return (row_of_slot.view(experts_TK.shape), slot_of_row[:rows].clone(), counts.int(), offsets.int(),
            padded.to(torch.int32, copy=True))


def bounded_counts(counts_E: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of each expert, int64: of counts that go beyond the rows only the rows that are there, and of negative ones none."""
    # Bounded before they are summed, too, so that no sum wraps.
    ends_E = counts_E.long().clamp(min=0, max=rows).cumsum(0).clamp(max=rows)
    return F.pad(ends_E, (1, 0)).diff()


def plan_of_counts(counts_E: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """The plan of `rows` rows in expert order, each a token's one slot, of bounded counts; see RoutingPlan for the five tensors."""
    offsets_E1 = F.pad(bounded_counts(counts_E, rows).cumsum(0), (1, 0)).int()
    row_R = torch.arange(rows, dtype=torch.int32, device=counts_E.device)
    named_R = row_R < offsets_E1[-1]
    return (torch.where(named_R, row_R, -1).unsqueeze(1), torch.where(named_R, row_R, BEHIND_THE_LAST), offsets_E1.diff(), offsets_E1,
            offsets_E1.diff())
