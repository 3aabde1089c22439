"""Experts that ranks have lent each other for a step (loans.py): who computes which slots, and how weights and their gradients travel.

A lender copies the matrices of the experts that it lends to its own mapped memory, and each borrower copies them from there. To the
experts' pass they are further experts of the borrower, after its own E. In backward a borrower writes its gradients of them to its own
mapped memory, and the owner adds them to its own gradient, in the order of ranks, in float32, and rounds once.

Shape suffixes: S tokens of all ranks, K slots a token, W ranks, A experts of all ranks, E experts of this rank, B experts that it has
borrowed, L experts that a rank may lend or borrow, M matrices of an expert, F ffn hidden, H hidden, P rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.ops import separate_experts
from gbmoe.parallel.loans import Loan
from gbmoe.parallel.peer_memory import PeerMemory
from gbmoe.parallel.regions import Regions
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

    def experts(self, rank: int) -> int:
        """E + B, the experts that a rank computes."""
        return self.experts_per_rank + len(self.borrowed(rank))

    def changes(self, rank: int) -> bool:
        """Whether a rank computes other rows than those of its own experts."""
        return bool(self.lent(rank) or self.borrowed(rank))

    def ranks_WA(self) -> torch.Tensor:
        """The rank that computes the slots that each rank's tokens have of each expert, int64 on the CPU."""
        experts_A = torch.arange(self.ranks * self.experts_per_rank, dtype=torch.int64, device="cpu")
        ranks_WA = (experts_A // self.experts_per_rank).repeat(self.ranks, 1)
        for loan in self.loans:
            ranks_WA[list(loan.sources), loan.expert] = loan.borrower
        return ranks_WA

    def local_WA(self, rank: int) -> torch.Tensor:
        """Which of a rank's E + B experts computes these slots, int32 on the CPU; -1 where another rank does."""
        borrowed, own, experts = self.borrowed(rank), self.experts_per_rank, self.experts(rank)
        local_A = torch.full((self.ranks * own,), -1, dtype=torch.int32, device="cpu")
        local_A[rank * own : (rank + 1) * own] = torch.arange(own, dtype=torch.int32, device="cpu")
        local_A[borrowed] = torch.arange(own, experts, dtype=torch.int32, device="cpu")
        return torch.where(self.ranks_WA() == rank, local_A, -1)

    def counts_E(self, rank: int, counts_WA: torch.Tensor) -> torch.Tensor:
        """The slots of each expert that a rank computes, int64 [E+B] on the CPU, of those of each rank's tokens."""
        local_WA, counts_E = self.local_WA(rank), torch.zeros(self.experts(rank), dtype=torch.int64, device="cpu")
        here_WA = local_WA >= 0
        return counts_E.scatter_add_(0, local_WA[here_WA].long(), counts_WA[here_WA].long())


def counts_of(ids_SK: torch.Tensor, ranks: int, experts: int) -> torch.Tensor:
    """The slots that each rank's tokens have of each of all experts, int32 [W,A]; an id of -1 counts for none."""
    rank_S1 = torch.arange(ids_SK.size(0), dtype=torch.int64, device=ids_SK.device).unsqueeze(1) // (ids_SK.size(0) // ranks)
    entry_SK = torch.where(ids_SK >= 0, rank_S1 * experts + ids_SK, ranks * experts)
    counts = torch.zeros(ranks * experts + 1, dtype=torch.int32, device=ids_SK.device)
    counts.scatter_add_(0, entry_SK.flatten(), torch.ones_like(ids_SK, dtype=torch.int32).flatten())
    return counts[:-1].view(ranks, experts)


def local_ids(ids_SK: torch.Tensor, local_WA: torch.Tensor) -> torch.Tensor:
    """What the table has for each slot, int32 [S,K]; -1 for an id of -1. The tokens are those of W ranks, equally many of each."""
    ranks, experts = local_WA.shape
    ids_WX = ids_SK.view(ranks, -1)
    local_WX = local_WA.gather(1, ids_WX.clamp(0, experts - 1).long())
    return torch.where(ids_WX >= 0, local_WX, -1).view(ids_SK.shape)


def ids_of_computing_ranks(ids_TK: torch.Tensor, ranks_A: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    """The ids of one rank's tokens, each replaced by that of an expert which the rank that computes the slot holds; -1 for an id of no
    expert. What looks from ids for ranks (peers.sum_pushed_rows) then finds those that have pushed."""
    exists_TK = (ids_TK >= 0) & (ids_TK < ranks_A.size(0))
    return torch.where(exists_TK, ranks_A[ids_TK.clamp(0, ranks_A.size(0) - 1)] * experts_per_rank, -1)


# ---------------------------------------------------------------------------------------------------------------- weights


class BorrowedWeights:
    """The weights of the experts that this rank has borrowed, [B,M,F,H], once `wait` was called: copies that belong to it alone."""

    def __init__(self, memory: PeerMemory, regions: Regions, ledger: Ledger, matrices: Sequence[torch.Tensor | None]):
        """Lend and borrow; collective, within a pass. `matrices` are w1, w2 and v1 of this rank's own experts, [E,F,H] each."""
        self._memory = memory
        given = [matrix for matrix in matrices if matrix is not None]
        own_LMFH, borrowed = regions.own["lent"], ledger.borrowed(memory.rank)
        for lent_MFH, expert in zip(own_LMFH, ledger.lent(memory.rank)):
            for lent_FH, matrix in zip(lent_MFH, given):
                lent_FH.copy_(matrix[expert % ledger.experts_per_rank])
        memory.barrier()
        self._weights_BMFH = own_LMFH.new_empty(len(borrowed), *own_LMFH.shape[1:])
        if borrowed:
            self._copy([_lent_by(regions, ledger, expert) for expert in borrowed])

    def _copy(self, lent: list[torch.Tensor]) -> None:
        """By copy engines, while the current stream pulls rows."""
        stream = self._memory.side_stream()
        stream.wait_stream(self._memory.stream())
        with self._memory.on(stream):
            for weights_MFH, lent_MFH in zip(self._weights_BMFH, lent):
                weights_MFH.copy_(lent_MFH, non_blocking=True)
            self._copied = stream.record_event()
        # _weights_BMFH was allocated on the current stream, which waits for the copies within this pass: no record_stream is needed.

    def wait(self) -> torch.Tensor | None:
        """Let the current stream wait for the copies; None if nothing was borrowed."""
        if not self._weights_BMFH.size(0):
            return None
        self._memory.stream().wait_event(self._copied)
        return self._weights_BMFH


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
                sum_FH = made_FH.float()
                for part_MFH in parts:
                    sum_FH = sum_FH + part_MFH[place]
                made_FH.copy_(sum_FH)
