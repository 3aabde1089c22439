"""Experts that ranks have lent each other for a step: how weights and their gradients travel. plain_loans.py says which are lent.

A lender copies the matrices of the experts that it lends to its own mapped memory, and each borrower copies them from there. To the
experts' pass they are further experts of the borrower, after its own E. In backward a borrower writes its gradients of them to its own
mapped memory, and the owner adds them to its own gradient, in the order of ranks, in float32, and rounds once.

Shape suffixes: T tokens, K slots a token, W ranks, A experts of all ranks, E experts of this rank, B experts that it has borrowed, L
experts that a rank may lend or borrow, M matrices of an expert, F ffn hidden, H hidden, P rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.ops import separate_experts
from gbmoe.parallel.peer_memory import PeerMemory
from gbmoe.parallel.regions import Regions
from gbmoe.plain.plain_loans import Loan
from gbmoe.separate_weights import SeparateWeights, Stack
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients

_NAMES = ("w1", "w2", "v1")  # in the order in which mapped memory has an expert's matrices


# ------------------------------------------------------------------------------------------------------------------ slots


@dataclass(frozen=True)
class Ledger:
    """The loans of one pass, the same on all ranks; rank r holds the experts from r * experts_per_rank on."""

    loans: tuple[Loan, ...]
    ranks: int
    experts_per_rank: int

    def owner(self, expert: int) -> int:
        return expert // self.experts_per_rank

    def lent(self, rank: int) -> list[int]:
        """The experts that a rank lends, in the order in which its mapped memory has them."""
        return sorted({loan.expert for loan in self.loans if self.owner(loan.expert) == rank})

    def borrowed(self, rank: int) -> list[int]:
        """The experts that a rank borrows, in the order in which they follow its own."""
        return sorted(loan.expert for loan in self.loans if loan.borrower == rank)

    def borrowers(self, expert: int) -> list[int]:
        return sorted(loan.borrower for loan in self.loans if loan.expert == expert)


def ids_of_computing_ranks(ids_TK: torch.Tensor, ranks_A: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    """The ids of one rank's tokens, each replaced by that of an expert which the rank that computes the slot holds; -1 for an id of no
    expert. What looks from ids for ranks (peers.sum_pushed_rows) then finds those that have pushed."""
    exists_TK = (ids_TK >= 0) & (ids_TK < ranks_A.size(0))
    return torch.where(exists_TK, ranks_A[ids_TK.clamp(0, ranks_A.size(0) - 1)] * experts_per_rank, -1)


# ---------------------------------------------------------------------------------------------------------------- weights


class BorrowedWeights:
    """The weights of the experts that this rank has borrowed, [B,M,F,H], once `wait` was called: copies that belong to it alone."""

    def __init__(self, memory: PeerMemory, regions: Regions, ledger: Ledger, matrices: Sequence[torch.Tensor | None], decided: Any):
        """Lend and borrow; collective, within a pass.

        Args:
            matrices: w1, w2 and v1 of this rank's own experts, [E,F,H] each.
            decided: the event of the current stream after which weights may be lent. What came to the stream since, such as rows that are
                pulled, is not waited for.
        """
        self._memory, given = memory, [matrix for matrix in matrices if matrix is not None]
        own_LMFH, borrowed = regions.own["lent"], ledger.borrowed(memory.rank)
        stream = memory.side_stream()
        stream.wait_event(decided)
        with memory.on(stream):
            for lent_MFH, expert in zip(own_LMFH, ledger.lent(memory.rank)):
                for lent_FH, matrix in zip(lent_MFH, given):
                    lent_FH.copy_(matrix[expert % ledger.experts_per_rank])
            memory.barrier(channel=1)
            # By copy engines. Allocated on this stream, which may run ahead of what the current one still does in memory that was freed.
            self._weights_BMFH = own_LMFH.new_empty(len(borrowed), *own_LMFH.shape[1:])
            for weights_MFH, expert in zip(self._weights_BMFH, borrowed):
                weights_MFH.copy_(_lent_by(regions, ledger, expert), non_blocking=True)
            self._copied = stream.record_event()
        if memory.device.type == "cuda":
            self._weights_BMFH.record_stream(memory.stream())

    def wait(self) -> torch.Tensor | None:
        """Let the current stream wait for what is lent and borrowed; None if nothing was borrowed here."""
        self._memory.stream().wait_event(self._copied)
        return self._weights_BMFH if self._weights_BMFH.size(0) else None


def _lent_by(regions: Regions, ledger: Ledger, expert: int) -> torch.Tensor:
    """The matrices [M,F,H] of an expert in the mapped memory of its owner."""
    owner = ledger.owner(expert)
    return regions.peers["lent"].of_rank[owner][ledger.lent(owner).index(expert)]


def with_borrowed(engine: Engine, matrices: Sequence[torch.Tensor | None], weights_BMFH: torch.Tensor) -> list[Stack | None]:
    """w1, w2 and v1 [E+B,F,H] of this rank's own experts and those that it has borrowed: where they lie, if the engine reads lists of
    matrices, and otherwise copies."""
    lists = {name: (*matrix.unbind(0), *weights_BMFH[:, place].unbind(0))
             for place, (name, matrix) in enumerate(zip(_NAMES, matrices)) if matrix is not None}
    found: dict[str, Any] | None = separate_experts.in_place(lists, {}) if engine.reads_separate_weights else None
    if found is None:
        found = {name: torch.stack(of_name) for name, of_name in lists.items()}
    return [found.get(name) for name in _NAMES]


# -------------------------------------------------------------------------------------------------------------- gradients


class LentGradients(WeightGradients):
    """The gradients of w1, w2 and v1 of this rank's own experts, in the default layout; those of the ones that it has borrowed are written
    to its mapped memory, where their owners find them."""

    def __init__(self, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor, v1_EFH: torch.Tensor | None, memory: PeerMemory, regions: Regions,
                 ledger: Ledger):
        super().__init__(MEGABLOCKS, w1_EFH, w2_EFH, v1_EFH)
        self._memory, self._regions, self._ledger = memory, regions, ledger
        self._borrowed = len(ledger.borrowed(memory.rank))
        self.takes_two = not self._borrowed

    def write(self, name: str, experts: Any, left_PF: Any, rows: GatheredRows, sizes_E: torch.Tensor, scale: float) -> None:
        if not self._borrowed:
            super().write(name, experts, left_PF, rows, sizes_E, scale)
            return
        own_EFH, mapped_BFH = self[name], self._regions.own["lent"][: self._borrowed, _NAMES.index(name)]
        # Not where their owners find them: mapped memory may lie too far from the rest for a table of both.
        borrowed_BFH = own_EFH.new_empty(mapped_BFH.shape)
        out = SeparateWeights((*own_EFH.unbind(0), *borrowed_BFH.unbind(0)))
        if experts.reads_separate_weights and experts.writes_in_place(out):
            experts.write_gradient(left_PF, rows.rows_PH(), sizes_E, out)  # no kernel that gathers writes lists
        else:
            made = experts.weight_gradient(left_PF, rows, sizes_E)
            own_EFH.copy_(made[: own_EFH.size(0)])
            borrowed_BFH = made[own_EFH.size(0):]
        mapped_BFH.copy_(borrowed_BFH)

    def settle(self) -> None:
        """Add what borrowers have computed; collective, after all `write`. Until the pass's last barrier their memory is read."""
        self._memory.barrier()
        ledger = self._ledger
        for expert in ledger.lent(self._memory.rank):
            parts = [self._regions.peers["lent"].of_rank[borrower][ledger.borrowed(borrower).index(expert)]
                     for borrower in ledger.borrowers(expert)]
            for name, made_EFH in self._made.items():
                made_FH, place = made_EFH[expert % ledger.experts_per_rank], _NAMES.index(name)
                if len(parts) == 1:
                    made_FH.add_(parts[0][place])  # it adds in float32 and rounds once
                    continue
                sum_FH = made_FH.float()
                for part_MFH in parts:
                    sum_FH = sum_FH + part_MFH[place]
                made_FH.copy_(sum_FH)
