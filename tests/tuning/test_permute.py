"""How many CTAs sort a plan."""

import pytest
from hypothesis import given

from gbmoe.tuning import permute
from tests.tuning.cards import H20, H100, H100_PCIE, H200, LARGE, card_id, devices


@pytest.mark.parametrize("device, chunks", [(H100, 128), (H200, 128), (H100_PCIE, 110), (H20, 75), (LARGE, 155)], ids=card_id)
def test_most_chunks(device, chunks):
    assert permute.most_chunks(device) == chunks


@given(device=devices)
def test_all_ctas_of_a_sort_run_at_once(device):
    assert 1 <= permute.most_chunks(device) <= device.multiprocessors
    assert permute.most_chunks(device._replace(multiprocessors=1)) == 1
