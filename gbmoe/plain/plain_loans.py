"""Which experts ranks lend each other for a step, and which of a rank's experts then computes a slot: csrc/peer/lend.cu in plain Python and
PyTorch, for memory that is not a GPU's, and for tests.

Where tokens choose some experts more than others, all ranks wait for the one with most rows. A loan moves the rows that some ranks' tokens
have of one expert to a rank with less to do, the borrower, which computes them with a copy of the expert's weights
(gbmoe/parallel/lent_experts.py).

The decision is a pure function of numbers that all ranks have, in integers, so that all ranks decide alike, and a forward that activation
checkpointing repeats decides the same for the same price. Under reentrant checkpointing that is another one (gbmoe/parallel/loans.py).

Shape suffixes: W ranks, E or A experts of all ranks, S tokens of all ranks, K slots a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Loan(NamedTuple):
    """The rank `borrower` computes the rows that the tokens of the ranks `sources` have of `expert`, instead of the rank that holds it."""

    expert: int
    borrower: int
    sources: tuple[int, ...]


class Price(NamedTuple):
    """What loans cost, in rows that a rank could compute meanwhile: `loan` is what each costs both of its ranks, and by `entry` all of them
    together have to lower the most load of a rank, because a pass with loans takes longer than one without."""

    loan: int = 0
    entry: int = 0


_NOTHING = Price()


def lend_experts(ids_SK: torch.Tensor, weights_SK: torch.Tensor | None, ranks: int, experts_per_rank: int, most: int, price: Price,
                 rank: int) -> tuple[torch.Tensor, int]:
    """As gbmoe.launch.peers.lend_experts, with the number of loans as an int."""
    loans = choose(_counts_of(ids_SK, ranks, ranks * experts_per_rank).tolist(), experts_per_rank, most, price)
    ranks_WA = ranks_of(loans, ranks, experts_per_rank)
    local_SK = _local_ids(ids_SK, _local_of(ranks_WA, rank, experts_per_rank))
    ids_SK.copy_(local_SK)
    if weights_SK is not None:
        weights_SK.masked_fill_(local_SK < 0, 0.0)
    return ranks_WA, len(loans)


def _counts_of(ids_SK: torch.Tensor, ranks: int, experts: int) -> torch.Tensor:
    """The slots that each rank's tokens have of each of all experts, int64 [W,A]; an id of -1 counts for none."""
    return torch.stack([ids_CK[ids_CK >= 0].bincount(minlength=experts) for ids_CK in ids_SK.chunk(ranks)])


def ranks_of(loans: Sequence[Loan], ranks: int, experts_per_rank: int) -> torch.Tensor:
    """The rank that computes the slots that each rank's tokens have of each expert, int32 [W,A]."""
    experts_A = torch.arange(ranks * experts_per_rank, dtype=torch.int32, device="cpu")
    ranks_WA = (experts_A // experts_per_rank).repeat(ranks, 1)
    for loan in loans:
        ranks_WA[list(loan.sources), loan.expert] = loan.borrower
    return ranks_WA


def _local_of(ranks_WA: torch.Tensor, rank: int, experts_per_rank: int) -> torch.Tensor:
    """Which of a rank's own and then borrowed experts computes these slots, int32 [W,A]; -1 where another rank does."""
    here_WA = ranks_WA == rank
    experts_A = torch.arange(ranks_WA.size(1), dtype=torch.int32, device="cpu")
    own_A = experts_A // experts_per_rank == rank
    borrowed_A = here_WA.any(0) & ~own_A
    local_A = torch.where(own_A, experts_A - rank * experts_per_rank, experts_per_rank - 1 + borrowed_A.cumsum(0, dtype=torch.int32))
    return torch.where(here_WA, local_A, -1)


def _local_ids(ids_SK: torch.Tensor, local_WA: torch.Tensor) -> torch.Tensor:
    """What the table has for each slot, int32 [S,K]; -1 for an id of -1. The tokens are those of W ranks, equally many of each."""
    ids_WX = ids_SK.view(local_WA.size(0), -1)
    return torch.where(ids_WX >= 0, local_WA.gather(1, ids_WX.clamp(min=0).long()), -1).view(ids_SK.shape)


def choose(counts_WE: Sequence[Sequence[int]], experts_per_rank: int, most: int, price: Price = _NOTHING) -> list[Loan]:
    """The loans of a step, by expert and borrower; none where they do not pay.

    As long as that helps, the rank with most rows lends one of its experts to the rank with fewest that can take it. Of its experts that
    one is lent by which fewest rows are left above the mean, for the tokens of whole ranks: the borrower's own first, whose rows then do
    not travel, and others in rank order. The most rows of a rank, a loan's price included, never become more.

    Args:
        counts_WE: the slots that each rank's tokens have of each expert of all ranks.
        experts_per_rank: rank r holds the experts from r * experts_per_rank on.
        most: a rank lends at most so many experts, and borrows at most so many.
        price: in rows.
    """
    market = _Market(counts_WE, experts_per_rank, most, price.loan)
    most_before = market.most_load()
    while (offer := market.best_offer()) is not None:
        market.agree(offer)
    if most_before - market.most_load() < price.entry:
        return []
    return [Loan(expert, borrower, tuple(sorted(sources))) for (expert, borrower), sources in sorted(market.copies.items())]


@dataclass(frozen=True)
class _Offer:
    """One step of `choose`: `rows` of these sources' tokens go to the borrower, and `cost` is added to both ranks' loads. `above` is what
    both then compute above the mean, times W."""

    expert: int
    lender: int
    borrower: int
    sources: list[int]
    rows: int
    cost: int
    above: int


class _Market:
    """All ranks' rows with the loans so far, and their loads, which are these with what loans cost; `copies` has the sources of each
    (expert, borrower)."""

    def __init__(self, counts_WE: Sequence[Sequence[int]], experts_per_rank: int, most: int, price: int):
        self._counts_WE, self._each, self._most, self._price = counts_WE, experts_per_rank, most, price
        self._ranks = len(counts_WE)
        self._rows = [sum(sum(of_E[rank * experts_per_rank : (rank + 1) * experts_per_rank]) for of_E in counts_WE)
                      for rank in range(self._ranks)]
        self._loads, self._total = list(self._rows), sum(self._rows)
        self._left_of: dict[int, list[int]] = {}  # the rows that an expert's own rank computes, by source; of experts that were asked for
        self.copies: dict[tuple[int, int], list[int]] = {}

    def most_load(self) -> int:
        return max(self._loads)

    def best_offer(self) -> _Offer | None:
        """The next loan, or None where the load of the rank with most cannot be lowered."""
        loads = self._loads
        lender = loads.index(max(loads))
        for borrower in sorted(range(self._ranks), key=loads.__getitem__):
            if loads[lender] - loads[borrower] <= self._price:  # as everywhere where experts are about equally popular
                continue
            offers = list(self._offers(lender, borrower))
            if offers:
                return min(offers, key=lambda offer: (offer.above, offer.borrower not in offer.sources, offer.expert))
        return None

    def agree(self, offer: _Offer) -> None:
        lender, borrower = offer.lender, offer.borrower
        for source in offer.sources:
            self._left(offer.expert)[source] = 0
        self._rows[lender] -= offer.rows
        self._rows[borrower] += offer.rows
        self._loads[lender] += offer.cost - offer.rows
        self._loads[borrower] += offer.cost + offer.rows
        self.copies.setdefault((offer.expert, borrower), []).extend(offer.sources)

    def _left(self, expert: int) -> list[int]:
        if expert not in self._left_of:
            self._left_of[expert] = [of_E[expert] for of_E in self._counts_WE]
        return self._left_of[expert]

    def _above(self, one: int, other: int) -> int:
        """What two ranks' rows are above the mean, times W."""
        return max(one * self._ranks - self._total, 0) + max(other * self._ranks - self._total, 0)

    def _offers(self, lender: int, borrower: int) -> Iterator[_Offer]:
        """Those that lower the lender's load, to which the borrower's does not rise, and what both compute above the mean."""
        there, here = self._loads[lender], self._loads[borrower]
        above = self._above(self._rows[lender], self._rows[borrower])
        borrows_more = sum(of == borrower for _, of in self.copies) < self._most
        lent = {expert for expert, _ in self.copies if expert // self._each == lender}
        for expert in range(lender * self._each, (lender + 1) * self._each):
            has_copy = (expert, borrower) in self.copies
            if not has_copy and not (borrows_more and (expert in lent or len(lent) < self._most)):
                continue
            cost = 0 if has_copy else self._price
            sources, rows, left_above = self._taken(expert, lender, borrower)
            if left_above < above and max(there - rows, here + rows) + cost < there:
                yield _Offer(expert, lender, borrower, sources, rows, cost, left_above)

    def _taken(self, expert: int, lender: int, borrower: int) -> tuple[list[int], int, int]:
        """The sources whose rows of the expert level the two ranks' rows, the number of these rows, and what is left above the mean."""
        there, here = self._rows[lender], self._rows[borrower]
        sources, rows, above, left = [], 0, self._above(there, here), self._left(expert)
        for source in (borrower, *range(borrower), *range(borrower + 1, self._ranks)):
            if left[source]:
                with_it = rows + left[source]
                left_above = self._above(there - with_it, here + with_it)
                if left_above < above:
                    sources.append(source)
                    rows, above = with_it, left_above
        return sources, rows, above
