"""Windows: where rows are bounded, the tokens of all ranks are divided so that each part's rows fit, and computed part by part.

All rows of a token here are in one window. So its sum, its gradient and those of its router weights are made by one launch, as where all
rows fit; only the gradients of weights are sums over windows. How many windows there are follows from shapes alone, and which tokens each
has is found out on the device: no host waits, and a CUDA graph holds all of them.

What is computed of the further windows is in further_windows.py.

Shape suffixes: W ranks, C the most tokens that a rank has room for, S = W * C tokens of all ranks, K slots a token, P rows of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap


@dataclass(frozen=True)
class Windows:
    """How the rows of one forward are divided.

    Attributes:
        count: at least 2.
        step: a token is in the window n for which its first row, in the order in which tokens are divided, lies in [n step, (n + 1) step).
        rows: P, which is enough for a step and the other rows of its last token.
        experts: those of this rank.
    """

    count: int
    step: int
    rows: int
    experts: int

    @classmethod
    def of(cls, room: int, tokens: int, top_k: int, experts: int) -> Windows | None:
        """Those of S `tokens` where there is room for so many rows; None where all of them fit in any case."""
        slots, step = tokens * top_k, room - top_k + 1
        if slots <= room:
            return None
        count = math.ceil(slots / room)
        if step * count < slots:  # a few rows more cost less than a window
            step = room
        return cls(count, step, min(step + top_k - 1, slots), experts)

    def divided(self, ids_SK: torch.Tensor, ranks: int) -> torch.Tensor:
        """The ids of this rank's experts, int32, -1 for none, with `experts` times the token's window added to them."""
        here_SK = ids_SK >= 0
        # One token of each rank in turns, so that each window has tokens of all ranks, and their links are busy at the same time.
        rows_CW = here_SK.sum(1, dtype=torch.int32).view(ranks, -1).t()
        rows = rows_CW.flatten()
        first_CW = (rows.cumsum(0, dtype=torch.int32) - rows).view(rows_CW.shape)
        window_WC = first_CW.div(self.step, rounding_mode="floor").t()
        moved_WCK = torch.add(ids_SK.view(*window_WC.shape, -1), window_WC.unsqueeze(2), alpha=self.experts)
        return torch.where(here_SK, moved_WCK.reshape(ids_SK.shape), -1)

    def further(self, divided_SK: torch.Tensor) -> Iterator[tuple[SlotMap, torch.Tensor]]:
        """(slots, rows of each expert) of each window after the first."""
        for window in range(1, self.count):
            # Ids of other windows are out of range, and count as none.
            plan = RoutingPlan.from_experts(divided_SK - window * self.experts, self.experts, check="none")
            yield SlotMap(plan.row_of_slot_TK, plan.slot_of_row_P[: self.rows]), plan.padded_counts_E
