"""The kernels that read and write other ranks' memory give the bits of their twins in plain PyTorch, except for the order of sums.

One device holds the memory of all ranks: no other rank takes part.

Shape suffixes: T tokens, C capacity, W ranks, S = W * C tokens of all ranks, K slots a token, H hidden, P rows, Z shards, N numbers.
"""

import pytest
import torch

from gbmoe import RoutingPlan, extension
from gbmoe.launch import peers
from gbmoe.launch.peers import PeerRegion

W, C, K, H, EXPERTS = 3, 40, 3, 64, 9
TOKENS = (40, 0, 17)
NAN = float("nan")


class Memory:
    """The regions of all ranks on a device, filled with what no kernel may read."""

    def __init__(self, device, dtype=torch.float32, shards=1):
        def region(*shape, dtype=dtype):
            filler = NAN if dtype.is_floating_point else -7
            return PeerRegion.of([torch.full(shape, filler, dtype=dtype, device=device) for _ in range(W)])

        self.headers, self.ids = region(4, dtype=torch.int32), region(C, K, dtype=torch.int32)
        self.weights = region(C, K, dtype=torch.float32)
        self.x, self.pushed, self.scalars = region(C, H), region(W, C, H), region(shards, C, K, dtype=torch.float32)
        self.slot_rows = region(C * K, H)


def inputs(device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(t, EXPERTS, generator=generator).topk(K).indices for t in TOKENS]
    ids[0][3] = -1
    ids[0][4, 1] = 2**40  # names no expert
    weights = [torch.rand(t, K, generator=generator).to(dtype) for t in TOKENS]
    x = [torch.randn(t, H, generator=generator).to(dtype) for t in TOKENS]
    return [[part.to(device) for part in of_ranks] for of_ranks in (ids, weights, x)]


def collected(device, dtype=torch.float32, rank=1, digests=(5, 5, 5), weighted=True, only_differing=False):
    """What a rank knows of all ranks' slots after they have published theirs: (memory, ids, weights, headers)."""
    if device == "cuda":
        extension.load()
    memory, (ids, weights, x) = Memory(device, dtype), inputs(device, dtype)
    for of in range(W):
        peers.publish_slots(ids[of], weights[of] if weighted else None, (TOKENS[of], digests[of], of, 0), memory.ids.of_rank[of],
                            memory.weights.of_rank[of] if weighted else None, memory.headers.of_rank[of])
        memory.x.of_rank[of][: TOKENS[of]] = x[of]
    ids_SK = torch.full((W * C, K), -7, dtype=torch.int32, device=device)
    weights_SK = torch.full((W * C, K), NAN, dtype=torch.float32, device=device) if weighted else None
    headers_WN = torch.zeros(W, 4, dtype=torch.int32, device=device)
    peers.collect_slots(memory.ids, memory.weights if weighted else None, memory.headers, rank * EXPERTS // W, EXPERTS // W, only_differing,
                        ids_SK, weights_SK, headers_WN)
    return memory, ids_SK, weights_SK, headers_WN


def all_steps(device, dtype):
    """Every function once, for rank 1: a list of results on the CPU."""
    rank = 1
    memory, ids_SK, weights_SK, headers_WN = collected(device, dtype)
    plan = RoutingPlan.from_experts(ids_SK.cpu(), EXPERTS // W, check="none")
    row_of_slot, slot_of_row = plan.row_of_slot_TK.to(device), plan.slot_of_row_P.to(device)
    rows = int(plan.offsets_E1[-1]) - 3  # the last ones are beyond a bound
    rows_PH = torch.full((rows, H), 9.0, dtype=dtype, device=device)
    peers.pull_rows(memory.x, rank, row_of_slot, rows_PH)
    sums = PeerRegion([pushed_WCH[rank] for pushed_WCH in memory.pushed.of_rank], memory.pushed.addresses)
    peers.push_row_sums(rows_PH, row_of_slot, weights_SK, sums, rank)
    peers.push_slot_rows(rows_PH, slot_of_row[:rows], K, C, memory.slot_rows)
    peers.push_slot_scalars(weights_SK, row_of_slot, rows, 0, memory.scalars)
    for pushed in (*memory.pushed.of_rank, *memory.scalars.of_rank):
        pushed.nan_to_num_(0.5)  # of ranks that have not pushed
    ids_TK = inputs(device)[0][0]
    out_TH = torch.empty(TOKENS[0], H, dtype=dtype, device=device)
    peers.sum_pushed_rows(memory.pushed.of_rank[0], ids_TK, EXPERTS, EXPERTS // W, 0.25, out_TH)
    out_TK = torch.empty(TOKENS[0], K, dtype=dtype, device=device)
    peers.sum_pushed_scalars(memory.scalars.of_rank[0], ids_TK, W, EXPERTS, EXPERTS // W, out_TK)
    of_ranks = *memory.pushed.of_rank, *memory.slot_rows.of_rank, *memory.scalars.of_rank
    results = ids_SK, weights_SK, headers_WN, rows_PH, *of_ranks, out_TH, out_TK
    return [result.cpu() for result in results]


def test_ids_are_counted_from_the_first_expert_of_a_rank():
    _, ids_SK, weights_SK, headers_WN = collected("cpu")
    ids, weights, _ = inputs("cpu")
    for rank, tokens in enumerate(TOKENS):
        for token in range(C):
            for slot in range(K):
                expert = int(ids[rank][token, slot]) if token < tokens else -1
                here = 3 <= expert < 6
                assert ids_SK[rank * C + token, slot] == (expert - 3 if here else -1)
                assert weights_SK[rank * C + token, slot] == (weights[rank][token, slot] if here else 0)
    assert headers_WN.tolist() == [[40, 5, 0, 0], [0, 5, 1, 0], [17, 5, 2, 0]]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_headers_are_kept_where_nobody_waits_if_they_differ(device):
    assert not collected(device, only_differing=True)[3].any()
    for digests in ((5, 5, 6), (4, 5, 5)):
        assert collected(device, digests=digests, only_differing=True)[3][:, peers.DIGEST].tolist() == list(digests)


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_rank_has_pushed_is_not_read(device):
    for result in all_steps(device, torch.float32)[-2:]:
        assert result.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_give_what_their_twins_give(dtype):
    for kernel, twin in zip(all_steps("cuda", dtype), all_steps("cpu", dtype)):
        torch.testing.assert_close(kernel, twin, equal_nan=True)
