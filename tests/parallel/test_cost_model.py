"""What of the cost model gbmoe chooses by; tests/test_expert_parallel_costs.py has what goes on from it."""

from itertools import combinations
from math import prod

import pytest

from gbmoe.parallel import cost_model


def expected(loads, top_k, count):
    """The mean of count(the experts of a token), over all its choices, by their odds."""
    odds = [load / (1 - load) for load in loads]
    choices = [(set(chosen), prod(odds[expert] for expert in chosen)) for chosen in combinations(range(len(loads)), top_k)]
    return sum(count(chosen) * weight for chosen, weight in choices) / sum(weight for _, weight in choices)


@pytest.mark.parametrize("experts, held, top_k", [(8, 4, 2), (8, 1, 3), (6, 6, 2), (7, 0, 3), (5, 3, 4)])
def test_reach_is_that_of_distinct_experts(experts, held, top_k):
    """The experts of a token are distinct: 1 - (1 - held / experts) ** top_k would be too low."""
    assert cost_model.reach(experts, held, top_k) == pytest.approx(
        expected([0.5] * experts, top_k, lambda chosen: any(expert < held for expert in chosen)))


@pytest.mark.parametrize("times", [(3, 5, 2), (5, 3, 2), (1, 2, 7), (4, 4, 4)])
def test_pipelined_is_what_a_schedule_gives(times):
    for chunks in range(1, 6):
        free = [0.0] * 3  # when each road is
        for _ in range(chunks):
            done = 0.0
            for road, seconds in enumerate(times):
                free[road] = done = max(done, free[road]) + seconds
        assert cost_model.pipelined(*times, chunks) == pytest.approx(done)


def test_a_chunk_has_an_expert_at_least():
    assert cost_model.chunk_counts(cost_model.Shape(8192, 4096, 14336, 8, 2), 8) == [1]
    assert cost_model.chunk_counts(cost_model.Shape(8192, 4096, 14336, 8, 2), 16) == [1]
    assert cost_model.chunk_counts(cost_model.Shape(8192, 4096, 14336, 48, 2), 4) == [1, 2, 3, 4, 6]


def test_even_loads_are_those_of_every_choice():
    """Expert e is on rank e // 2, in chunk e % 2; a row goes once to each chunk of each rank that needs it, and once to each node."""
    shape, links = cost_model.Shape(1, 4, 4, 8, 3), cost_model.Links(ranks_per_node=2)
    choices = list(combinations(range(8), 3))
    for chunks, place in ((1, lambda e: (e // 2, 0)), (2, lambda e: (e // 2, e % 2))):
        load = cost_model.even_load(shape, links, 4, chunks)
        trips = sum(sum(place(e)[0] == 0 for e in {place(e): e for e in chosen}.values()) for chosen in choices) / len(choices)
        nodes = sum(len({(place(e)[0] // 2, place(e)[1]) for e in chosen}) for chosen in choices) / len(choices)
        assert (load.arriving, load.sent, load.rows) == pytest.approx((4 * trips, nodes, 3))
        assert load.crossing == pytest.approx(nodes / 2)
