"""Experts that ranks have lent each other for a step: how weights and their gradients travel. plain_loans.py says which are lent.

A lender copies the matrices of the experts that it lends to its own mapped memory, and each borrower copies them from there: one matrix
of all these experts after the other, while the rows are pulled, and w2 while the first products run. To the experts' pass they are further
experts of the borrower, after its own E. In backward a borrower writes its gradients of them to its own mapped memory, and the owner adds
them to its own gradient, in the order of ranks, in float32, and rounds once. Each matrix but the last travels while the next one's gradient
is computed. All devices wait for hosts that have just learned of the loans, so that in forward these do as little as that takes.

Shape suffixes: T tokens, K slots a token, W ranks, A experts of all ranks, E experts of this rank, B experts that it has borrowed, L
experts that a rank may lend or borrow, M matrices of an expert, F ffn hidden, H hidden, P rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.launch import peers
from gbmoe.ops import separate_experts
from gbmoe.ops.expert_forward_backward import Weights
from gbmoe.parallel.peer_memory import PeerMemory
from gbmoe.parallel.regions import Regions
from gbmoe.plain.plain_loans import Loan
from gbmoe.separate_weights import SeparateWeights
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients

_NAMES = ("w1", "w2", "v1")  # in the order in which mapped memory has the matrices
_READ, _WRITTEN = ("w1", "v1", "w2"), ("w2", "v1", "w1")  # in which forward reads them, and in which backward makes their gradients


@dataclass(frozen=True)
class Ledger:
    """The loans of one pass, the same on all ranks; rank r holds the experts from r * experts_per_rank on."""

    loans: tuple[Loan, ...]
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


# ---------------------------------------------------------------------------------------------------------------- weights


class BorrowedWeights:
    """Lends this rank's experts, and borrows others'; collective, within a pass.

    Args:
        matrices: w1, w2 and v1 of this rank's own experts, [E,F,H] each.
        decided: the event of the current stream after which weights may be lent. A lender does not wait for what came to the stream
            since, such as rows that are pulled; a borrower waits for it before it copies.

    Attributes:
        weights_MBFH: of the experts that this rank has borrowed, once `wait` was called: copies that belong to it alone. None if there are
            no such experts.
    """

    def __init__(self, memory: PeerMemory, regions: Regions, ledger: Ledger, matrices: Sequence[torch.Tensor | None], decided: Any):
        self._memory, self._regions = memory, regions
        self._came: dict[str, Any] = {}  # by the name of a matrix, the event after which it is here
        lent, borrowed = ledger.lent(memory.rank), ledger.borrowed(memory.rank)
        own_MLFH, current, stream = regions.own["lent"], memory.stream(), memory.side_stream()
        self.weights_MBFH: torch.Tensor | None = None
        if borrowed:  # allocated on the current stream, which waits for the copies within this pass: no record_stream is needed
            self.weights_MBFH = own_MLFH.new_empty(own_MLFH.size(0), len(borrowed), *own_MLFH.shape[2:])
        stream.wait_event(decided)
        with memory.on(stream):
            if lent:
                peers.copy_experts([expert % ledger.experts_per_rank for expert in lent], matrices, own_MLFH)
            memory.barrier(channel=1)
            if self.weights_MBFH is None:
                self._came["what is lent"] = stream.record_event()
                return
            stream.wait_stream(current)  # the memory may be one that the current stream still reads
            runs = _runs(ledger, borrowed)
            for name in _READ:
                place = _NAMES.index(name)
                if matrices[place] is not None:
                    self._copy(self.weights_MBFH[place], place, runs)
                    self._came[name] = stream.record_event()

    def _copy(self, weights_BFH: torch.Tensor, place: int, runs: list[tuple[int, int, int, int]]) -> None:
        """By copy engines, each of the `_runs` in one copy."""
        for owner, first, here, number in runs:
            lent_LFH = self._regions.peers["lent"].of_rank[owner][place]
            weights_BFH[here : here + number].copy_(lent_LFH[first : first + number], non_blocking=True)

    def wait(self, *names: str) -> None:
        """Let the current stream wait for these of the matrices; for all of them, and for what is lent, without names."""
        for name in names or self._came:
            if name in self._came:
                self._memory.stream().wait_event(self._came[name])


def _runs(ledger: Ledger, borrowed: list[int]) -> list[tuple[int, int, int, int]]:
    """(owner, place of the first among what it lends, place among what is borrowed, number of them) of borrowed experts that follow one
    another in both."""
    runs: list[tuple[int, int, int, int]] = []
    for here, expert in enumerate(borrowed):
        owner = ledger.owner(expert)
        there = ledger.lent(owner).index(expert)
        if runs and runs[-1][0] == owner and runs[-1][1] + runs[-1][3] == there:
            runs[-1] = (*runs[-1][:3], runs[-1][3] + 1)
        else:
            runs.append((owner, there, here, 1))
    return runs


class WeightsWithBorrowed(Weights):
    """w1, w2 and v1 [E+B,F,H] of this rank's own experts and those that it has borrowed: where they lie, if the engine reads lists of
    matrices, and otherwise copies. In forward each waits for what is `borrowed` when it is asked for."""

    def __init__(self, engine: Engine, matrices: Sequence[torch.Tensor | None], weights_MBFH: torch.Tensor,
                 borrowed: BorrowedWeights | None = None):
        self._borrowed = borrowed
        stacks = {name: (matrix, weights_MBFH[place]) for place, (name, matrix) in enumerate(zip(_NAMES, matrices)) if matrix is not None}
        found: dict[str, Any] | None = None
        if engine.reads_separate_weights:
            found = separate_experts.with_tables({name: SeparateWeights.of_stacks(*of_name) for name, of_name in stacks.items()}, {})
        if found is None:
            if borrowed is not None:
                borrowed.wait()
            found = {name: torch.cat(of_name) for name, of_name in stacks.items()}
        super().__init__(found["w1"], found["w2"], found.get("v1"))

    def forward(self, experts: Engine, name: str):
        if self._borrowed is not None:
            self._borrowed.wait(name)
        return super().forward(experts, name)


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
        self._to_fetch = [name for name in _WRITTEN[:-1] if name in self._like]
        self._came: dict[str, list[torch.Tensor]] = {}  # what borrowers have computed, in the order of _lent, by the matrices' names
        self._arrived: Any = None  # the event after which all of it is here
        # This rank's experts that are lent, each with its borrowers and its place among what these have borrowed.
        self._lent = [(expert % ledger.experts_per_rank, borrower, ledger.borrowed(borrower).index(expert))
                      for expert in ledger.lent(memory.rank) for borrower in ledger.borrowers(expert)]

    def write(self, name: str, experts: Any, left_PF: Any, rows: GatheredRows, sizes_E: torch.Tensor, scale: float) -> None:
        if self._borrowed:
            self._write_with_borrowed(name, experts, left_PF, rows, sizes_E)
        else:
            super().write(name, experts, left_PF, rows, sizes_E, scale)
        self._fetch(name)

    def _write_with_borrowed(self, name: str, experts: Any, left_PF: Any, rows: GatheredRows, sizes_E: torch.Tensor) -> None:
        own_EFH, mapped_BFH = self[name], self._regions.own["lent"][_NAMES.index(name), : self._borrowed]
        # Not where their owners find them: mapped memory may lie too far from the rest for a table of both.
        borrowed_BFH = own_EFH.new_empty(mapped_BFH.shape)
        out = SeparateWeights.of_stacks(own_EFH, borrowed_BFH)
        if experts.reads_separate_weights and experts.writes_in_place(out):
            experts.write_gradient(left_PF, rows.rows_PH(), sizes_E, out)  # no kernel that gathers writes lists
        else:
            made = experts.weight_gradient(left_PF, rows, sizes_E)
            own_EFH.copy_(made[: own_EFH.size(0)])
            borrowed_BFH = made[own_EFH.size(0):]
        mapped_BFH.copy_(borrowed_BFH)

    def _fetch(self, name: str) -> None:
        """Have copy engines bring what borrowers have computed of a matrix, while the current stream goes on. All ranks fetch the same
        matrices in the same order, those that they do not need before the next one, or at last in `settle`."""
        memory, stream = self._memory, self._memory.side_stream()
        while name in self._to_fetch:
            first = self._to_fetch.pop(0)
            stream.wait_stream(memory.stream())
            with memory.on(stream):
                memory.barrier(channel=1)
                shape, dtype, device = self._like[first]
                parts_XFH = torch.empty(len(self._lent) if first in self._made else 0, *shape[1:], dtype=dtype, device=device)
                for part_FH, (_, borrower, place) in zip(parts_XFH, self._lent):
                    part_FH.copy_(self._mapped(first, borrower, place), non_blocking=True)
                self._arrived = stream.record_event()
            if memory.device.type == "cuda":
                parts_XFH.record_stream(memory.stream())
            self._came[first] = list(parts_XFH)

    def _mapped(self, name: str, borrower: int, place: int) -> torch.Tensor:
        return self._regions.peers["lent"].of_rank[borrower][_NAMES.index(name), place]

    def settle(self) -> None:
        """Add what borrowers have computed; collective, after all `write`. Until the pass's last barrier their memory is read."""
        if self._to_fetch:
            self._fetch(self._to_fetch[-1])
        if self._arrived is not None:
            self._memory.stream().wait_event(self._arrived)
        self._memory.barrier()
        parts_of: dict[torch.Tensor, list[torch.Tensor]] = {}
        for name, made_EFH in self._made.items():
            parts = self._came.pop(name, None) or [self._mapped(name, borrower, place) for _, borrower, place in self._lent]
            of_experts = {expert: made_EFH[expert] for expert, *_ in self._lent}
            for (expert, *_), part_FH in zip(self._lent, parts):
                parts_of.setdefault(of_experts[expert], []).append(part_FH)
        _add(parts_of)


def _add(parts_of: dict[torch.Tensor, list[torch.Tensor]]) -> None:
    """Add to each tensor its parts in their order, in float32, and round once."""
    single = [tensor for tensor, parts in parts_of.items() if len(parts) == 1]
    if single:
        torch._foreach_add_(single, [parts_of[tensor][0] for tensor in single])  # which adds in float32
    for tensor, parts in parts_of.items():
        if len(parts) > 1:
            exact = tensor.float()
            for part in parts:
                exact = exact + part
            tensor.copy_(exact)
