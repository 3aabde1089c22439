"""What a loan costs, and how the host reads what was decided.

Shape suffixes: W ranks, A experts of all ranks.
"""

import pytest
import torch

from gbmoe.parallel import loans
from gbmoe.plain import plain_loans
from tests.plain.test_plain_loans import drawn


@pytest.mark.parametrize("backward", [False, True])
def test_the_price_grows_with_the_bytes_and_not_with_the_products(backward):
    """Both a row's products and a loan's bytes are proportional to an expert's elements: what is left are the rates, and launches."""
    small, large = (loans.price_in_rows(elements, 2, "cuda", backward) for elements in (3 * 2048 * 1024, 3 * 14336 * 4096))
    assert 0 < large.loan < small.loan and 0 < large.entry < small.entry
    one, twice = (loans.price_in_rows(10**9, itemsize, "cuda", backward) for itemsize in (2, 4))
    assert twice.loan == pytest.approx(2 * one.loan, rel=0.05) and twice.entry == one.entry
    assert loans.price_in_rows(10**9, 2, "cpu", backward) == (0, 0)


def test_a_row_without_a_backward_saved_three_times_as_much_as_it_does():
    forward, training = (loans.price_in_rows(10**9, 2, "cuda", backward) for backward in (False, True))
    assert all(alone > 1.5 * with_backward for alone, with_backward in zip(forward, training))


@pytest.mark.parametrize("seed", range(50))
def test_the_host_reads_what_was_decided(seed):
    counts_WA, each, most, price = drawn(seed)
    made = plain_loans.choose(counts_WA, each, most, price)
    ranks_WA = plain_loans.ranks_of(made, len(counts_WA), each)
    assert loans.read(len(made), ranks_WA, each) == made
    assert loans.read(0, torch.empty(0, dtype=torch.int32), each) == []
