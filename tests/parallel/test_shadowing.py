"""Which experts are copied to all ranks, and how their weights are cut; tests/parallel/test_exchange.py runs whole layers with them."""

import pytest
import torch

from gbmoe.layers import Arguments, expert_parallelism
from gbmoe.parallel import automatic_chunks, cost_model, shadowing
from gbmoe.parallel.groups import Nodes
from gbmoe.parallel.placement import Placement

ROW, EXPERT = 10, 1000


def fewest(*rows_WD, owners=(0, 1), **changes):
    """fewest_bytes for the rows of no shadow, one shadow, and so on."""
    return shadowing.fewest_bytes(torch.tensor(rows_WD).permute(1, 2, 0), owners, **{"row_bytes": ROW, "expert_bytes": EXPERT, **changes})


def hot(rows):
    """The rows of four ranks, of which the first receives so many from each of the others."""
    return [[0, 0, 0, 0]] + [[rows, 0, 0, 0]] * 3


def everywhere(rows):
    return [[rows] * 4] * 4


def test_nothing_is_shadowed_where_tokens_are_balanced():
    """A popular expert of a balanced layer has few of a rank's rows."""
    assert fewest(everywhere(1000), everywhere(990), everywhere(980)) == 0
    assert fewest(everywhere(0), everywhere(0), everywhere(0)) == 0


def test_an_expert_with_nearly_all_tokens_is_shadowed():
    assert fewest(hot(1000), hot(10), hot(10)) == 1


def test_weights_that_cost_more_than_rows_stay():
    """The owner's link carries 3 * 3 / 4 times the expert's bytes each way, and 2 * 3 rows each way for each row that others send."""
    even = 3 * 3 / 4 * EXPERT / (2 * 3 * ROW)
    assert fewest(hot(int(even)), hot(0), owners=[0]) == 0
    assert fewest(hot(int(even) + 1), hot(0), owners=[0]) == 1
    assert fewest(hot(int(even) + 1), hot(0), owners=[0], overhead=100.0) == 0


def test_rows_that_a_rank_sends_to_itself_cost_nothing():
    assert fewest([[10**6, 0], [0, 0]], [[0, 0], [0, 0]], owners=[0]) == 0


def test_two_shadows_pay_where_one_does_not():
    """Two experts of one rank that the same tokens choose; and one expert on each of two ranks, both of which are as loaded."""
    assert fewest(hot(1000), hot(1000), hot(0), owners=[0, 0]) == 2
    both = [[[0, 500], [500, 0]], [[0, 500], [0, 0]], [[0, 0], [0, 0]]]
    assert fewest(*both) == 2


def test_a_row_to_another_node_goes_to_the_rank_with_the_same_position():
    """Four ranks on two nodes: from node 1 many rows come to node 0, all of them from rank 3 or spread over ranks 2 and 3."""
    one, two, none = [[0, 0], [0, 0], [0, 0], [60, 0]], [[0, 0], [0, 0], [30, 0], [30, 0]], [[0, 0]] * 4
    limit = dict(owners=[0], expert_bytes=60 * 2 * ROW * 4 / 9 - 1)
    assert fewest(one, none, **limit) == 1
    assert fewest(two, none, **limit) == 0


@pytest.mark.parametrize("chunks, nodes", [(1, None), (2, None), (1, Nodes(2, 2, 0, None, None)), (2, Nodes(2, 2, 0, None, None))])
def test_rows_are_those_of_tokens_with_an_expert_that_is_not_shadowed(chunks, nodes):
    p = Placement(group=None, world=4, rank=1, experts=16, experts_per_rank=4, shards=1, nodes=nodes, chunks=chunks)
    ids_TK = torch.rand(30, 16, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :5].int()
    ids_TK[3], ids_TK[4, 2:], ids_TK[5, 0] = -1, ids_TK[4, 1], 16
    candidates = [7, 0, 3, 12, 2]
    rows_DN = shadowing._rows(ids_TK, torch.tensor(candidates), p)
    size = 1 if nodes is None else 2
    for number in range(len(candidates) + 1):
        expected = [0] * (4 // size)
        for token in ids_TK.tolist():
            left = {e for e in token if 0 <= e < 16 and e not in candidates[:number]}
            for place, _ in {(e // 4 // size, e % 4 * chunks // 4) for e in left}:
                expected[place] += 1
        assert rows_DN[:, number].tolist() == expected


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_shadows_are_one_more_chunk_of_the_tokens_own_rank(chunks):
    p = Placement(group=None, world=2, rank=1, experts=6, experts_per_rank=3, shards=1, chunks=chunks)
    more = p.with_shadows(2)
    assert [more.bounds(chunk) for chunk in range(more.chunks)] == [*(p.bounds(chunk) for chunk in range(chunks)), (3, 5)]
    assert p.with_shadows(1).bounds(chunks) == (3, 4) and p.with_shadows(1).bounds(0) == p.bounds(0)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, -1, 6]], dtype=torch.int32)
    with_shadows = shadowing._ids_with_shadows(ids, [1, 4], p)
    assert with_shadows.tolist() == [[0, 8, 2, 5, 9, 7, -1, -1]]
    before, after = p.keys(ids), more.keys(with_shadows)
    for slot, expert in enumerate(ids[0].tolist()):
        rank, chunk = before[0, slot] // chunks, before[0, slot] % chunks
        if expert in (1, 4):
            rank, chunk = 1, chunks
        assert after[0, slot] == (rank * more.chunks + chunk if 0 <= expert < 6 else -1)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_weights_are_cut_and_put_together(world):
    matrices = [torch.randn(2, 3, 5), torch.randn(2, 1, 4)]
    packed = shadowing._packed(matrices, torch.float32, world)
    assert packed.shape == (2, -(-19 // world) * world)
    whole = shadowing._whole(shadowing._by_piece(packed, world), world)
    for got, expected in zip(shadowing._unpacked(whole, [m.shape[1:] for m in matrices]), matrices):
        assert torch.equal(got, expected) and got.is_contiguous()


def test_latencies_count_where_they_are_known(monkeypatch):
    p = Placement(group=None, world=2, rank=0, experts=2, experts_per_rank=1, shards=1)
    monkeypatch.setattr(automatic_chunks, "SPEEDS", {"cuda": (cost_model.Gpu(), cost_model.Links(exchange=1e9, exchange_latency=1e-3))})
    assert shadowing._overhead(torch.device("cpu"), p) == 0
    assert shadowing._overhead(torch.device("cuda"), p) == 1e6 * shadowing._EXCHANGES


@pytest.mark.parametrize("fields, words", [
    (dict(expert_parallel_shadows=-1), "expert_parallel_shadows: expected an int of at least 0, got -1"),
    (dict(expert_parallel_shadows=None), "expert_parallel_shadows: expected an int of at least 0, got None"),
    (dict(expert_parallel_shadows=1, expert_parallel_exact=True), "expert_parallel_shadows: expected 0 with expert_parallel_exact"),
    (dict(expert_parallel_shadows=1, expert_parallel_transport="peer_memory"),
     "expert_parallel_transport: expected 'auto' or 'exchange' with expert_parallel_shadows")])
def test_what_shadows_exclude_is_refused(fields, words):
    with pytest.raises(ValueError, match="Arguments: " + words):
        Arguments(**fields)


def test_shadows_of_shards_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    args = Arguments(moe_num_experts=2, device="cpu", moe_expert_model_parallelism=True, expert_parallel_shadows=1)
    with pytest.raises(ValueError, match="expert_parallel_shadows: expected 0 where ranks share an expert"):
        expert_parallelism.placement(args)
