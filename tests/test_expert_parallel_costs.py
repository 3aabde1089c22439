"""scripts/expert_parallel_costs.py: its closed forms against enumeration of all choices of small layers, its choices where they are beyond
doubt, and that gbmoe.parallel.cost_model, which lacks what is only simulated, agrees with it."""

import sys
from dataclasses import replace
from itertools import combinations
from math import inf, prod
from pathlib import Path

import pytest

from gbmoe.parallel import cost_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
import expert_parallel_costs as costs
from expert_parallel_costs import Gpu, Links, Shape, Trips

GPU, FINE, COARSE = Gpu(), Shape(4096, 7168, 2048, 256, 8), Shape(8192, 4096, 14336, 8, 2)
FREE = Links(pull=inf, push=inf, barrier=0, plan=0, exchange=inf, exchange_latency=0, network=inf, network_latency=0, message=0)


def expected(loads, top_k, count):
    """The mean of count(the experts of a token), over all its choices, by their odds."""
    odds = [load / (1 - load) for load in loads]
    choices = [(set(chosen), prod(odds[expert] for expert in chosen)) for chosen in combinations(range(len(loads)), top_k)]
    return sum(count(chosen) * weight for chosen, weight in choices) / sum(weight for _, weight in choices)


@pytest.mark.parametrize("experts, top_k, skew", [(8, 2, 0), (8, 2, 1), (8, 2, 4), (4, 4, 2), (256, 8, 1.5), (3, 2, 50)])
def test_loads_are_shares_of_a_tokens_slots(experts, top_k, skew):
    loads = costs.expert_loads(experts, top_k, skew)
    assert len(loads) == experts and sum(loads) == pytest.approx(top_k) and 0 <= loads[-1] and loads[0] <= 1
    assert loads == sorted(loads, reverse=True)
    if loads[0] < 1:
        assert loads[0] / loads[-1] == pytest.approx(experts**skew)


def test_reach_of_uneven_loads():
    loads = costs.expert_loads(7, 3, 0.7)
    for held in ({0}, {2, 5}, {0, 1, 6}, set(), set(range(7))):
        assert costs.reach_of(loads, held) == pytest.approx(expected(loads, 3, lambda chosen: bool(chosen & held)), abs=1e-12)


@pytest.mark.parametrize("skew", [0.0, 0.6])
@pytest.mark.parametrize("ranks, per_node, chunks, shadows", [
    (2, 2, 1, 0), (4, 4, 1, 0), (4, 2, 1, 0), (4, 2, 2, 0), (2, 1, 4, 0), (8, 2, 1, 0), (4, 2, 1, 3), (8, 4, 1, 8)])
def test_trips_are_counted_as_rows_travel(skew, ranks, per_node, chunks, shadows):
    """Expert e is on rank e % ranks, in chunk e // ranks % chunks; rows of one chunk travel once to each rank, and to each node."""
    loads = costs.expert_loads(8, 3, skew)
    trips = Trips.of(loads, ranks, per_node, chunks, shadows)
    places = [(expert % ranks, expert // ranks % chunks) for expert in range(8)]
    travelling = set(range(shadows, 8))

    def of_ranks(chosen):
        return {places[expert] for expert in chosen & travelling}

    def of_nodes(chosen):
        return {(rank // per_node, chunk) for rank, chunk in of_ranks(chosen)}

    def most(of, count):
        return max(expected(loads, 3, lambda chosen: sum(place == at for place, _ in of(chosen))) for at in range(count))

    assert trips.ranks == pytest.approx(expected(loads, 3, lambda chosen: len(of_ranks(chosen))))
    assert trips.nodes == pytest.approx(expected(loads, 3, lambda chosen: len(of_nodes(chosen))))
    assert trips.to_rank == pytest.approx(most(of_ranks, ranks)) and trips.to_node == pytest.approx(most(of_nodes, ranks // per_node))
    busiest = max(sum(loads[expert] for expert in travelling if expert % ranks == rank) for rank in range(ranks))
    assert trips.rows == pytest.approx(busiest * ranks)


def test_a_row_goes_to_all_ranks_that_hold_a_part_of_an_expert():
    whole, parts = (Trips.of(costs.expert_loads(8, 2), ranks, 4) for ranks in (8, 32))
    assert parts.ranks == pytest.approx(4 * whole.ranks) and parts.nodes == pytest.approx(4 * whole.nodes)
    assert (parts.to_rank, parts.rows) == pytest.approx((whole.to_rank, whole.rows))


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_free_links_leave_one_chunk_and_no_shadow(ranks):
    assert costs.best_chunks(FINE, GPU, FREE, ranks) == 1
    assert costs.best_shadows(FINE, GPU, Links(), ranks, skew=0.0) == 0


def test_slow_links_are_hidden_behind_chunks():
    links = Links(ranks_per_node=1, network=100e9)
    chunks = costs.best_chunks(FINE, GPU, links, 64)
    assert chunks > 1
    one, best = (costs.layer(FINE, GPU, links, 64, chunks=count) for count in (1, chunks))
    assert best.seconds < one.seconds and best.network_rows > one.network_rows


def test_a_chunk_has_an_expert_at_least():
    assert costs.best_chunks(COARSE, GPU, Links(), 8) == 1
    assert costs.layer(COARSE, GPU, Links(ranks_per_node=1), 4, chunks=8).chunks == 2


def test_popular_experts_have_shadows_where_moving_weights_costs_less_than_moving_tokens():
    skew, links = 1.0, Links()
    few, many = (replace(Shape(1, 4096, 2048, 64, 4), tokens=tokens) for tokens in (64, 65536))
    assert costs.best_shadows(few, GPU, links, 16, skew) == 0
    count = costs.best_shadows(many, GPU, links, 16, skew)
    assert count > 0
    without, having = (costs.layer(many, GPU, links, 16, skew, shadows=n) for n in (0, count))
    assert having.seconds < without.seconds and having.imbalance < without.imbalance and having.weights > 0 == without.weights


def test_costs_grow_with_skew_and_shrink_with_faster_links():
    seconds = [costs.layer(FINE, GPU, Links(), 8, skew).seconds for skew in (0.0, 0.3, 0.6, 0.9)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    seconds = [costs.layer(FINE, GPU, Links(network=rate * 1e9), 64).seconds for rate in (400, 100, 50, 25)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


def test_a_rank_with_few_experts_has_fewer_weights_to_read_and_as_many_rows():
    cost, one = costs.layer(FINE, GPU, FREE, 8), costs.one_gpu(FINE, GPU)
    assert cost.products < one and cost.imbalance == pytest.approx(1) and cost.others > 0


def test_the_rate_of_a_pull_goes_by_the_length_of_rows():
    links = Links(pull={4096: 300e9, 8192: 200e9})
    assert [links.pull_of(length) / 1e9 for length in (16, 4096, 6144, 8192, 10**6)] == [300, 300, 250, 200, 200]


@pytest.mark.parametrize("links", [Links(peer_memory=False), Links(network=100e9), Links(ranks_per_node=1, network=200e9)])
def test_what_gbmoe_chooses_is_what_the_simulation_finds_best(links):
    """gbmoe knows even loads and the exchange alone; what it leaves out is the same for every number of chunks."""
    speeds = cost_model.Gpu(), cost_model.Links(links.ranks_per_node, network=links.network)
    for shape in (FINE, COARSE, Shape(16384, 2048, 768, 128, 8), Shape(100, 64, 32, 16, 4)):
        for ranks in (ranks for ranks in (2, 4, 8, 16, 32, 64, 256) if shape.experts % min(ranks, shape.experts) == 0):
            assert cost_model.best_chunks(shape, *speeds, ranks) == costs.best_chunks(shape, GPU, links, ranks) or (
                links.peer_memory and ranks <= links.ranks_per_node)
            load = cost_model.even_load(shape, links, ranks)
            trips = Trips.of(costs.expert_loads(shape.experts, shape.top_k), ranks, min(ranks, links.ranks_per_node))
            assert load.arriving == pytest.approx(shape.tokens * ranks * trips.to_rank)
            assert load.rows * load.share == pytest.approx(shape.tokens * trips.rows)


def test_more_ranks_than_can_map_memory_exchange_rows():
    links = Links(ranks_per_node=72)
    exchanged = costs.layer(FINE, GPU, replace(links, peer_memory=False), 72 * 4)
    assert costs.layer(FINE, GPU, links, 72 * 4).seconds == exchanged.seconds
    assert costs.layer(replace(FINE, experts=72), GPU, links, 72).seconds == costs.layer(
        replace(FINE, experts=72), GPU, replace(links, peer_memory=False), 72).seconds
    assert costs.layer(FINE, GPU, links, 64).seconds < costs.layer(FINE, GPU, replace(links, peer_memory=False), 64).seconds
