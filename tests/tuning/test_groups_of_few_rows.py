"""Whether the kernels for groups of few rows compute a product."""

import pytest
from hypothesis import given, strategies as st

from gbmoe.tuning import groups_of_few_rows as tuning
from tests.tuning.cards import H20, H100, H100_PCIE, H200, LARGE, card_id, devices


@pytest.mark.parametrize("rows, groups, few", [(8, 128, True), (256, 128, True), (257, 128, False), (2, 1, True), (3, 1, False),
                                               (2048, 1024, True), (8, 1025, False)])
def test_few_rows(rows, groups, few):
    assert tuning.few_rows(rows, groups) == few


@pytest.mark.parametrize("rows, groups, few", [(1024, 128, True), (1025, 128, False), (8, 1, True), (9, 1, False), (8192, 1024, True),
                                               (8, 1025, False)])
def test_few_rows_on_hopper(rows, groups, few):
    assert tuning.few_rows_on_hopper(rows, groups) == few


@pytest.mark.parametrize("device", [H100, H200], ids=card_id)
@pytest.mark.parametrize("rows, columns, few", [(1, 8, True), (4096, 8, True), (4097, 8, False), (512, 128, True), (513, 128, False)])
def test_few_rows_linear(device, rows, columns, few):
    assert tuning.few_rows_linear(device, rows, columns) == few


@pytest.mark.parametrize("device, most", [(H20, 302), (H100_PCIE, 442), (H200, 512), (LARGE, 620)], ids=card_id)
def test_few_rows_linear_has_as_many_ctas_for_each_multiprocessor(device, most):
    assert tuning.few_rows_linear(device, most, 128) and not tuning.few_rows_linear(device, most + 1, 128)


@given(device=devices, rows=st.integers(1, 1 << 16), fewer=st.integers(0, 1 << 16), columns=st.integers(1, 4096),
       groups=st.integers(1, 2048))
def test_fewer_rows_are_few_too(device, rows, fewer, columns, groups):
    fewer = max(1, rows - fewer)
    assert tuning.few_rows(fewer, groups) or not tuning.few_rows(rows, groups)
    assert tuning.few_rows_on_hopper(fewer, groups) or not tuning.few_rows_on_hopper(rows, groups)
    assert tuning.few_rows_on_hopper(rows, groups) or not tuning.few_rows(rows, groups)
    assert tuning.few_rows_linear(device, fewer, columns) or not tuning.few_rows_linear(device, rows, columns)
