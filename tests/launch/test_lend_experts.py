"""Which experts are lent and who then computes which slot, against a walk over the loans; the kernel against its twin in plain PyTorch.
tests/plain/test_plain_loans.py has what is decided, and tests/parallel/lending_cases.py what ranks compute by it.

Shape suffixes: S tokens of all ranks, T of one, K slots a token, W ranks, A experts of all ranks.
"""

import random

import pytest
import torch

from gbmoe import extension
from gbmoe.launch import peers
from gbmoe.parallel import loans
from gbmoe.parallel.lent_experts import Ledger
from gbmoe.plain import plain_loans
from gbmoe.plain.plain_loans import Loan, Price

WORLD, EACH, TOKENS, TOP_K = 4, 3, 40, 3
EXPERTS = WORLD * EACH
FREE = Price()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.memcheck])]


def drawn(seed, world=WORLD, each=EACH, tokens=TOKENS, top_k=TOP_K, skew=0.6):
    """ids [S,K], some of no expert, of which the first ranks' experts are the most popular."""
    generator = torch.Generator().manual_seed(seed)
    scores_SA = torch.rand(world * tokens, world * each, generator=generator) + torch.linspace(skew, 0, world * each)
    ids_SK = scores_SA.topk(top_k).indices.int()
    ids_SK[::7, -1] = -1
    return ids_SK


def lent(ids_SK, rank, device, world=WORLD, each=EACH, most=2, price=FREE, weighted=True):
    """(local ids [S,K], weights [S,K] that were 1 or None, the loans as the host reads them), on the CPU."""
    if device == "cuda":
        extension.load()
    ids_SK = ids_SK.to(device, copy=True)
    weights_SK = torch.ones(ids_SK.shape, dtype=torch.float32, device=device) if weighted else None
    decided = peers.lend_experts(ids_SK, weights_SK, world, each, most, price, rank).cpu()
    assert decided.shape == (1 + world * world * each,) and decided.dtype == torch.int32
    made = loans.read(int(decided[0]), decided[1:].view(world, -1), each)
    assert len(made) == int(decided[0])
    return ids_SK.cpu(), None if weights_SK is None else weights_SK.cpu(), made


def computed_by(made, source, expert, each=EACH):
    return next((loan.borrower for loan in made if loan.expert == expert and source in loan.sources), expert // each)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_each_slot_is_computed_once_by_the_expert_that_it_names(seed, device):
    ids_SK = drawn(seed)
    of_ranks = [lent(ids_SK, rank, device) for rank in range(WORLD)]
    made = of_ranks[0][2]
    assert len(made) > 1 and all(of_rank[2] == made for of_rank in of_ranks)
    ledger = Ledger(tuple(made), EACH)
    experts = [[*range(rank * EACH, (rank + 1) * EACH), *ledger.borrowed(rank)] for rank in range(WORLD)]
    for token, ids_K in enumerate(ids_SK.tolist()):
        for slot, expert in enumerate(ids_K):
            local_W = [int(local_SK[token, slot]) for local_SK, _, _ in of_ranks]
            found = {rank: experts[rank][local] for rank, local in enumerate(local_W) if local >= 0}
            assert found == ({} if expert < 0 else {computed_by(made, token // TOKENS, expert): expert})
            assert [float(weights_SK[token, slot]) for _, weights_SK, _ in of_ranks] == [float(local >= 0) for local in local_W]


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_decides_as_its_twin(seed):
    draw = random.Random(seed)
    world, each = draw.choice([(1, 4), (2, 4), (2, 64), (3, 5), (4, 32), (8, 1), (8, 16), (8, 300), (64, 4)])
    tokens, top_k = draw.choice([0, 1, 17, 300, 2000]), draw.choice([1, 2, 4])
    ids_SK = drawn(seed, world, each, tokens, top_k, draw.choice([0.0, 0.3, 1.0]))
    options = dict(world=world, each=each, most=draw.choice([1, 2, 8]), weighted=draw.random() < 0.7,
                   price=Price(draw.choice([0, 0, 3, 50]), draw.choice([0, 0, 5, 100])))
    for rank in {0, world - 1, draw.randrange(world)}:
        expected, got = (lent(ids_SK, rank, device, **options) for device in ("cpu", "cuda"))
        assert got[2] == expected[2] and torch.equal(got[0], expected[0])
        assert got[1] is expected[1] is None or torch.equal(got[1], expected[1])


@pytest.mark.gpu
@pytest.mark.memcheck
def test_the_kernel_names_the_ranks_that_compute_as_its_twin():
    extension.load()
    ids_TK = torch.randint(-2, 40, (3000, 5), generator=torch.Generator().manual_seed(0))
    ids_TK[0, 0] = 2**40
    ranks_A = torch.randint(4, (37,), dtype=torch.int32)
    got, expected = (peers.ids_of_computing_ranks(ids_TK.to(device), ranks_A.to(device), 9).cpu() for device in ("cuda", "cpu"))
    assert got.dtype == torch.int64 and torch.equal(got, expected)


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_read_from_the_ranks_that_compute(seed):
    """A rank that has nothing of a token has pushed nothing: what lies there may be anything."""
    ids_SK = drawn(seed)
    made = lent(ids_SK, 0, "cpu")[2]
    ranks_WA = plain_loans.ranks_of(made, WORLD, EACH)
    for source, ids_TK in enumerate(ids_SK.long().chunk(WORLD)):
        ranks_K = [{computed_by(made, source, expert) for expert in ids_K if expert >= 0} for ids_K in ids_TK.tolist()]
        pushed_WTH = torch.tensor([[[1.0 if rank in ranks else float("nan")] for ranks in ranks_K] for rank in range(WORLD)])
        of_ranks_TK, out_TH = peers.ids_of_computing_ranks(ids_TK, ranks_WA[source], EACH), torch.empty(TOKENS, 1)
        assert of_ranks_TK.dtype == torch.int64, "as kernels read them"
        peers.sum_pushed_rows(pushed_WTH, of_ranks_TK, EXPERTS, EACH, 1.0, out_TH)
        assert out_TH.flatten().tolist() == [len(ranks) for ranks in ranks_K]
    beyond = peers.ids_of_computing_ranks(torch.tensor([[-1, EXPERTS, 2**40]]), ranks_WA[0], EACH)
    assert beyond.tolist() == [[-1, -1, -1]]


def test_experts_follow_in_the_order_in_which_both_ranks_have_them():
    made = [Loan(0, 2, (2,)), Loan(1, 2, (0, 2)), Loan(1, 3, (3,)), Loan(4, 2, (1,))]
    ledger = Ledger(tuple(made), EACH)
    assert [ledger.lent(rank) for rank in range(WORLD)] == [[0, 1], [4], [], []]
    assert [ledger.borrowed(rank) for rank in range(WORLD)] == [[], [], [0, 1, 4], [1]]
    assert ledger.borrowers(1) == [2, 3]
    assert plain_loans.ranks_of(made, WORLD, EACH)[:, 1].tolist() == [2, 0, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("matrices, dtype, shape, misplaced", [
    (3, torch.bfloat16, (72, 40), 0), (2, torch.float32, (5, 7), 0), (3, torch.float16, (3, 5), 0), (2, torch.bfloat16, (16, 24), 1),
    (3, torch.bfloat16, (300, 1000), 0), (3, torch.bfloat16, (0, 8), 0)])
def test_matrices_of_lent_experts_are_copied_in_one_launch(device, matrices, dtype, shape, misplaced):
    """Of any number of experts, whose matrices do not begin at multiples of 16 bytes; places after the last expert are not written."""
    if device == "cuda":
        extension.load()
    held, room, size = 300, 290, shape[0] * shape[1]
    held, room = (held, room) if size < 1000 else (9, 5)
    stacks = [torch.randn(misplaced + held * size, device=device).to(dtype)[misplaced:].view(held, *shape) for _ in range(matrices)]
    for experts in ([], [held - 1], list(range(held - 1, 0, -1))[:room - 1], list(range(room))):
        lent_MLFH = torch.full((matrices, room, *shape), float("nan"), dtype=dtype, device=device)
        peers.copy_experts(experts, [*stacks, None][:3], lent_MLFH)
        for stack, lent_LFH in zip(stacks, lent_MLFH):
            assert torch.equal(lent_LFH[: len(experts)], stack[experts]) and bool(lent_LFH[len(experts):].isnan().all())


@pytest.mark.gpu
def test_more_experts_than_there_is_room_for_are_refused():
    extension.load()
    stack = torch.zeros(4, 8, 8, dtype=torch.bfloat16, device="cuda")
    for experts, expected in (([0, 1, 2], "at most 2 experts"), ([4], "experts below 4"), ([-1], "experts below 4")):
        with pytest.raises(RuntimeError, match=expected):
            peers.copy_experts(experts, [stack, stack, None], stack.new_empty(2, 2, 8, 8))
