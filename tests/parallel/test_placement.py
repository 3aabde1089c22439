"""Which rank, chunk and node computes a slot, against plain Python."""

from dataclasses import replace

import pytest
import torch

from gbmoe.parallel.dispatch_combine import plan_of_destinations
from gbmoe.parallel.exchange import _of_ranks_inside, keys_of_nodes
from gbmoe.parallel.groups import Nodes
from gbmoe.parallel.placement import Placement, sharding
from gbmoe.parallel.row_counts import message_of
from gbmoe.plan import RoutingPlan


def placements(world, experts, chunks):
    degree, shards = sharding(world, experts, 12)
    return [Placement(None, world, rank, experts, experts // degree, shards, chunks=chunks) for rank in range(world)]


def computed_by(each, expert):
    """(rank, chunk) of every rank that holds the expert, or a shard of it."""
    return [(p.rank, chunk) for p in each for chunk in range(p.chunks)
            if p.bounds(chunk)[0] <= expert - p.first_expert < p.bounds(chunk)[1] and 0 <= expert < p.experts]


GROUPS = [(4, 8, 1), (4, 12, 2), (4, 20, 3), (2, 14, 7), (6, 3, 1), (4, 2, 1), (1, 5, 2)]


@pytest.mark.parametrize("world, experts, chunks", GROUPS)
def test_a_slot_goes_to_the_ranks_and_chunks_of_its_expert(world, experts, chunks):
    each = placements(world, experts, chunks)
    ids = torch.arange(-2, experts + 2).view(-1, 1)
    for p in each:
        for expert, key_N in zip(ids.flatten().tolist(), p.keys(ids).tolist()):
            wanted = [rank * chunks + chunk for rank, chunk in computed_by(each, expert)]
            assert key_N == (wanted or [-1] * p.shards) and len(wanted) in (0, p.shards)
        sizes = [end - first for first, end in map(p.bounds, range(chunks))]
        assert sum(sizes) == p.experts_per_rank and max(sizes) - min(sizes) <= 1
        assert p.shard == [q.rank for q in each if q.first_expert == p.first_expert].index(p.rank)


@pytest.mark.parametrize("arguments, words", [((3, 8, 1), "moe_num_experts: expected a multiple of 3 ranks, got 8"),
                                              ((5, 2, 1), "expert_parallel_group: expected a multiple of 2 ranks, got 5"),
                                              ((10, 2, 12), "ffn_hidden_size: expected a multiple of 5 shards, got 12")])
def test_experts_that_do_not_divide(arguments, words):
    with pytest.raises(ValueError, match=words):
        sharding(*arguments)


def test_shards_do_not_bring_the_rows_of_one_process():
    Placement(None, 4, 0, 8, 2, 1, exact=True)
    with pytest.raises(ValueError, match="Placement: shards: expected 1 together with exact: .* got 2"):
        Placement(None, 4, 0, 2, 1, 2, exact=True)


@pytest.mark.parametrize("world, experts, chunks", GROUPS)
@pytest.mark.parametrize("count, top_k", [(20, 1), (20, 2), (20, 3), (1, 4)])
def test_a_row_goes_once_to_each_chunk_of_each_rank_that_needs_it(world, experts, chunks, count, top_k):
    each = placements(world, experts, chunks)
    ids_TK = torch.randint(-1, experts + 1, (count, top_k), generator=torch.Generator().manual_seed(world)).int()
    to_ranks = plan_of_destinations(each[0].keys(ids_TK), world, chunks)
    wanted = [[chunk * world + rank for rank, chunk in sorted({pair for expert in ids_K for pair in computed_by(each, expert)})]
              for ids_K in ids_TK.tolist()]
    tokens = [[t for t, destinations in enumerate(wanted) if destination in destinations] for destination in range(world * chunks)]
    assert to_ranks.counts_E.tolist() == [len(t) for t in tokens]
    slots = to_ranks.slot_of_row_P[: sum(map(len, tokens))] // to_ranks.top_k
    assert slots.tolist() == [t for of_destination in tokens for t in of_destination]

    plan = RoutingPlan.from_experts(ids_TK, experts, check="none")
    message_WX = message_of(torch.tensor([7, 8], dtype=torch.int32), to_ranks, plan, each[0])
    for p, message in zip(each, message_WX.tolist()):
        own = range(p.first_expert, p.first_expert + p.experts_per_rank)
        assert message == [7, 8, *(len(tokens[chunk * world + p.rank]) for chunk in range(chunks)),
                           *((ids_TK == expert).sum().item() for expert in own)]


def test_a_node_hands_rows_on_to_those_of_its_ranks_that_need_them():
    each = placements(6, 12, 2)
    ids_SK = torch.arange(-1, 13).int().view(-1, 1)
    for node in range(3):
        nodes = Nodes(size=2, count=3, node=node, inside=None, across=None)
        for p in (replace(p, nodes=nodes) for p in each):
            to_nodes = keys_of_nodes(p.keys(ids_SK), p, nodes)
            inside = [_of_ranks_inside(ids_SK, chunk, p, nodes) for chunk in range(2)]
            for row, expert in enumerate(ids_SK.flatten().tolist()):
                (rank, chunk), = computed_by(each, expert) or [(-1, -1)]
                assert to_nodes[row].item() == (rank // 2 * 2 + chunk if rank >= 0 else -1)
                for other in range(2):
                    assert inside[other][row].item() == (rank % 2 if rank // 2 == node and chunk == other else -1)
