"""The transport of tokens that are here: their rows are gathered and their sums scattered, or they lie in expert order already.

Shape suffixes: T tokens, K slots a token, H hidden, P padded rows of the plan.
"""

from __future__ import annotations

import torch

from gbmoe.engines.base import GatheredRows
from gbmoe.launch import clear_rows_without_slot, scatter
from gbmoe.launch.alignment import aligned
from gbmoe.ops.expert_forward_backward import Transport
from gbmoe.slot_map import SlotMap


class LocalTransport(Transport):
    """Gathers rows of x [T,H] and scatters sums.

    Args:
        x_TH: the tokens.
        slots: of the plan.
        weights_TK: the router's, or None.
        grad_TH: in backward, the gradient of the result.
        kept_PH: in backward, the rows of x that forward has kept, if it has; they are handed out once.
    """

    def __init__(self, x_TH: torch.Tensor, slots: SlotMap, weights_TK: torch.Tensor | None, grad_TH: torch.Tensor | None = None,
                 kept_PH: torch.Tensor | None = None):
        self.dtype, self.slots, self.weights_TK = x_TH.dtype, slots, weights_TK
        self._x_TH, self._grad_TH, self._kept_PH = x_TH, grad_TH, kept_PH
        self._dx_TH: torch.Tensor | None = None
        self._dweights_TK: torch.Tensor | None = None

    def rows(self) -> GatheredRows:
        # Rows that are kept come without the tokens, so that the rows are what counts, and are not forgotten.
        return self._gathered(self._x_TH) if self._kept_PH is None else GatheredRows(None, self.slots, self._kept_PH)

    def keep_rows(self) -> torch.Tensor | None:
        """Gather the rows of x [P,H] for backward as well: `rows` then returns these. None where there is nothing to gather."""
        self._kept_PH = self._gathered(self._x_TH).rows_PH()
        return self._kept_PH

    def combine(self, y_PH: torch.Tensor) -> torch.Tensor:
        return self._scattered(y_PH, self.weights_TK)

    def gradient_rows(self) -> GatheredRows:
        grad_TH, self._grad_TH = self._grad_TH, None
        assert grad_TH is not None
        return self._gathered(grad_TH)

    def rows_again(self) -> GatheredRows:
        rows, self._kept_PH = self.rows(), None
        return rows

    def ones_TK(self) -> torch.Tensor:
        return torch.ones_like(self.slots.row_of_slot_TK, dtype=torch.float32)

    def give_back(self, dx_PH: torch.Tensor, factor: float) -> None:
        self._dx_TH = self._scattered(dx_PH, None if factor == 1 else self.ones_TK() * factor)

    def give_back_router_gradient(self, dweights_TK: torch.Tensor | None) -> None:
        self._dweights_TK = dweights_TK

    def arrived(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._dx_TH, self._dweights_TK

    def _gathered(self, tokens_TH: torch.Tensor) -> GatheredRows:
        return GatheredRows(tokens_TH, self.slots)

    def _scattered(self, rows_PH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        return scatter(rows_PH, self.slots, weights=weights_TK)


class InExpertOrder(LocalTransport):
    """Tokens with one slot each, of which token r is row r or has no expert: nothing is gathered, and without weights nothing is scattered.
    The rows are then the result, with zeros in those that have no expert."""

    def __init__(self, x_TH: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None,
                 grad_TH: torch.Tensor | None = None):
        # A map that keeps every row in its place is its own inverse.
        super().__init__(x_TH, SlotMap(row_of_slot_TK=slot_of_row_P.unsqueeze(1), slot_of_row_P=slot_of_row_P), weights_TK, grad_TH)

    def keep_rows(self) -> None:
        return None

    def _gathered(self, tokens_TH: torch.Tensor) -> GatheredRows:
        return GatheredRows(None, self.slots, aligned(tokens_TH))

    def _scattered(self, rows_PH: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
        if weights_TK is not None:
            return super()._scattered(rows_PH, weights_TK)
        clear_rows_without_slot(self.slots.slot_of_row_P, rows_PH)
        return rows_PH


def local_transport(x_TH: torch.Tensor, row_of_slot_TK: torch.Tensor | None, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None,
                    grad_TH: torch.Tensor | None = None, kept_PH: torch.Tensor | None = None) -> LocalTransport:
    """The transport of one process's tokens; without row_of_slot they are in expert order."""
    if row_of_slot_TK is None:
        return InExpertOrder(x_TH, slot_of_row_P, weights_TK, grad_TH)
    slots = SlotMap(row_of_slot_TK=row_of_slot_TK, slot_of_row_P=slot_of_row_P)
    return LocalTransport(x_TH, slots, weights_TK, grad_TH, kept_PH)
