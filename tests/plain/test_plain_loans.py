"""Which experts are lent, as a function of numbers; tests/parallel/lending_cases.py has what ranks then do.

Shape suffixes: W ranks, E experts of all ranks.
"""

import random

import pytest

from gbmoe.plain.plain_loans import Loan, Price, choose


def loads(counts_WE, each, made, price=0):
    """The rows that each rank computes, with what its loans cost."""
    world, experts = len(counts_WE), len(counts_WE[0])
    rank_of = {(w, e): e // each for w in range(world) for e in range(experts)}
    for expert, borrower, sources in made:
        rank_of.update({(w, expert): borrower for w in sources})
    of_W = [0] * world
    for (w, e), rank in rank_of.items():
        of_W[rank] += counts_WE[w][e]
    for expert, borrower, _ in made:
        of_W[borrower] += price
        of_W[expert // each] += price
    return of_W


def hot(world, experts, share, slots=8000):
    """Each rank's slots, of which one expert gets a share and the others equally many of the rest."""
    others = int(slots * (1 - share) / (experts - 1))
    return [[int(slots * share), *[others] * (experts - 1)] for _ in range(world)]


def drawn(seed):
    draw = random.Random(seed)
    world, each = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 5, 16])
    popular = [draw.paretovariate(1) for _ in range(world * each)]
    counts_WE = [[int(draw.random() * draw.choice([0, 30, 30]) * p) for p in popular] for _ in range(world)]
    return counts_WE, each, draw.choice([1, 2, 4]), Price(draw.choice([0, 0, 10, 100]))


@pytest.mark.parametrize("seed", range(200))
def test_properties_of_any_choice(seed):
    counts_WE, each, most, price = drawn(seed)
    made = choose(counts_WE, each, most, price)
    before, after = loads(counts_WE, each, []), loads(counts_WE, each, made, price.loan)
    assert max(after) <= max(before) and (not made or max(after) < max(before) or before.count(max(before)) > 1)
    assert sum(loads(counts_WE, each, made)) == sum(before)
    for rank in range(len(counts_WE)):
        assert sum(loan.borrower == rank for loan in made) <= most
        assert len({loan.expert for loan in made if loan.expert // each == rank}) <= most
    taken = [(loan.expert, w) for loan in made for w in loan.sources]
    assert len(taken) == len(set(taken)), "a rank's tokens of one expert are computed twice"
    for loan in made:
        assert loan.borrower != loan.expert // each and loan.sources
        assert all(counts_WE[w][loan.expert] for w in loan.sources)
    assert made == sorted(made) and made == choose([tuple(of_E) for of_E in counts_WE], each, most, price)
    assert choose(counts_WE, each, 0, price) == [] and choose(counts_WE, each, most, Price(max(before))) == []
    lower = max(before) - max(after)
    for entry, expected in ((lower, made), (lower + 1, [])):
        assert choose(counts_WE, each, most, price._replace(entry=entry)) == expected


def test_some_of_these_draws_have_loans_and_others_none():
    """Otherwise they would test nothing."""
    found = [len(choose(*drawn(seed))) for seed in range(200)]
    assert found.count(0) > 20 and sum(number > 2 for number in found) > 50


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_nothing_is_lent_where_all_experts_are_equally_popular(world):
    assert choose([[10] * world * 4] * world, 4, 2) == []
    assert choose([[0] * world * 4] * world, 4, 2) == []


@pytest.mark.parametrize("share", [0.15, 0.25, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_one_popular_expert_is_levelled(world, most, share):
    """To less than an eighth above the mean."""
    counts_WE = hot(world, 16, share)
    before, after = (loads(counts_WE, 16 // world, made) for made in ([], choose(counts_WE, 16 // world, most)))
    mean = sum(before) / world
    assert max(after) <= 1.125 * mean < max(before) or share == 0.15, (max(before) / mean, max(after) / mean)


def test_the_borrowers_own_tokens_come_first_and_then_others_in_rank_order():
    counts_WE = [[10, 0, 0, 0]] * 4
    assert choose(counts_WE, 1, 1) == [Loan(0, 1, (1,)), Loan(0, 2, (2,)), Loan(0, 3, (3,))]
    # A third of the rows is the mean, which two sources' rows would pass.
    assert choose([[4, 0, 0], [0, 0, 0], [4, 0, 0]], 1, 1) == [Loan(0, 1, (0,))]
    assert choose([[9, 0], [0, 0]], 1, 1) == []  # nothing less than all of one rank's tokens can be moved


def test_a_loan_has_to_pay_its_price():
    counts_WE = [[50, 0], [50, 0]]
    assert choose(counts_WE, 1, 1, Price(49)) == [Loan(0, 1, (1,))]
    assert choose(counts_WE, 1, 1, Price(50)) == []


def test_few_loans_made_a_step_slower_than_none():
    """What they lower the most load by is compared once for all of them: a pass with loans takes longer, however many they are."""
    counts_WE = [[30, 30, 30, 0, 0, 0], [30, 30, 30, 0, 0, 0]]
    made = choose(counts_WE, 3, 3, Price(5))
    assert len(made) == 2 and loads(counts_WE, 3, made, 5) == [100, 100]
    assert choose(counts_WE, 3, 3, Price(5, 80)) == made and choose(counts_WE, 3, 3, Price(5, 81)) == []


def test_one_row_pays_where_a_loan_costs_nothing():
    assert choose([[1, 0], [1, 0]], 1, 1) == [Loan(0, 1, (1,))]


def test_a_rank_below_the_mean_lent_more():
    """A third of the rows is the mean; what a rank has less than that balances nothing of what another has more."""
    assert choose([[2, 0, 0], [3, 0, 0], [1, 0, 6]], 1, 1) == [Loan(0, 1, (1,))]


def test_a_loan_that_grows_was_paid_for_twice():
    """The first source's only row follows for nothing when the other ranks have lent and borrowed, and levels what that left."""
    counts_WE = [[1, 0, 0], [7, 11, 0], [8, 2, 0]]
    made = choose(counts_WE, 1, 1, Price(1))
    assert made == [Loan(0, 2, (0, 2)), Loan(1, 0, (2,))]
    assert loads(counts_WE, 1, made, price=1) == [11, 12, 10]
