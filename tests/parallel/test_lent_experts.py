"""The tables by which ranks tell who computes a slot, against a walk over the loans; lending_cases.py has what ranks compute by them.

Shape suffixes: S tokens of all ranks, K slots a token, W ranks, A experts of all ranks, E experts of one rank.
"""

import pytest
import torch

from gbmoe.launch import peers
from gbmoe.parallel.lent_experts import Ledger, counts_of, ids_of_computing_ranks, local_ids
from gbmoe.parallel.loans import Loan, choose

WORLD, EACH, TOKENS, TOP_K = 4, 3, 40, 3
EXPERTS = WORLD * EACH


def drawn(seed):
    """(ids [S,K] with some of no expert, the ledger of the loans that they lead to)."""
    scores_SA = torch.rand(WORLD * TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)) + torch.linspace(0.6, 0, EXPERTS)
    ids_SK = scores_SA.topk(TOP_K).indices.int()
    ids_SK[::7, 1] = -1
    made = choose(counts_of(ids_SK, WORLD, EXPERTS).tolist(), EACH, 2)
    assert len(made) > 1
    return ids_SK, Ledger(tuple(made), WORLD, EACH)


def computed_by(ledger, source, expert):
    return next((loan.borrower for loan in ledger.loans if loan.expert == expert and source in loan.sources), expert // EACH)


@pytest.mark.parametrize("seed", range(5))
def test_each_slot_is_computed_once_by_the_expert_that_it_names(seed):
    ids_SK, ledger = drawn(seed)
    local_WSK = torch.stack([local_ids(ids_SK, ledger.local_WA(rank)) for rank in range(WORLD)])
    experts = [[*range(rank * EACH, (rank + 1) * EACH), *ledger.borrowed(rank)] for rank in range(WORLD)]
    for token, ids_K in enumerate(ids_SK.tolist()):
        for slot, expert in enumerate(ids_K):
            found = {rank: experts[rank][local] for rank, local in enumerate(local_WSK[:, token, slot].tolist()) if local >= 0}
            assert found == ({} if expert < 0 else {computed_by(ledger, token // TOKENS, expert): expert})


@pytest.mark.parametrize("seed", range(5))
def test_the_host_knows_the_rows_that_devices_find(seed):
    ids_SK, ledger = drawn(seed)
    counts_WA = counts_of(ids_SK, WORLD, EXPERTS)
    assert counts_WA.tolist() == [[int((of_rank == expert).sum()) for expert in range(EXPERTS)] for of_rank in ids_SK.chunk(WORLD)]
    for rank in range(WORLD):
        local_SK = local_ids(ids_SK, ledger.local_WA(rank))
        assert ledger.counts_E(rank, counts_WA).tolist() == [int((local_SK == e).sum()) for e in range(ledger.experts(rank))]
        assert ledger.changes(rank) or ledger.experts(rank) == EACH


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_read_from_the_ranks_that_compute(seed):
    """A rank that has nothing of a token has pushed nothing: what lies there may be anything."""
    ids_SK, ledger = drawn(seed)
    for source, ids_TK in enumerate(ids_SK.long().chunk(WORLD)):
        ranks_K = [{computed_by(ledger, source, expert) for expert in ids_K if expert >= 0} for ids_K in ids_TK.tolist()]
        pushed_WTH = torch.tensor([[[1.0 if rank in ranks else float("nan")] for ranks in ranks_K] for rank in range(WORLD)])
        of_ranks_TK, out_TH = ids_of_computing_ranks(ids_TK, ledger.ranks_WA()[source], EACH), torch.empty(TOKENS, 1)
        peers.sum_pushed_rows(pushed_WTH, of_ranks_TK, EXPERTS, EACH, 1.0, out_TH)
        assert out_TH.flatten().tolist() == [len(ranks) for ranks in ranks_K]
    beyond = ids_of_computing_ranks(torch.tensor([[-1, EXPERTS, 2**40]]), ledger.ranks_WA()[0], EACH)
    assert beyond.tolist() == [[-1, -1, -1]]


def test_experts_follow_in_the_order_in_which_both_ranks_have_them():
    ledger = Ledger((Loan(0, 2, (2,)), Loan(1, 2, (0, 2)), Loan(1, 3, (3,)), Loan(4, 2, (1,))), WORLD, EACH)
    assert [ledger.lent(rank) for rank in range(WORLD)] == [[0, 1], [4], [], []]
    assert [ledger.borrowed(rank) for rank in range(WORLD)] == [[], [], [0, 1, 4], [1]]
    assert ledger.borrowers(1) == [2, 3] and [ledger.changes(rank) for rank in range(WORLD)] == [True] * 4
    assert ledger.ranks_WA()[:, 1].tolist() == [2, 0, 2, 3]
