"""The tiles of Hopper's GEMMs in float8."""

import pytest
from hypothesis import given, strategies as st

from gbmoe.tuning import float8_tiles as tuning
from gbmoe.tuning.hopper_tiles import NARROW, WIDE, GemmConfig
from tests.tuning.cards import H20, H100, H100_PCIE, H200, LARGE, card_id, hoppers


@pytest.mark.parametrize("device", [H100, H200], ids=card_id)
@pytest.mark.parametrize("rows, inner, columns, config", [
    (4096, 4096, 14336, GemmConfig(NARROW, tile_counter=True)), (4096, 2048, 768, GemmConfig(NARROW, tile_counter=True)),
    (4096, 14336, 4096, GemmConfig(WIDE, tile_counter=True)), (4096, 768, 2048, GemmConfig(WIDE)),
    (131072, 768, 2048, GemmConfig(WIDE, tile_counter=True)), (1 << 20, 256, 2048, GemmConfig(WIDE)),
    (16, 16, 16, GemmConfig(NARROW)),
])
def test_rows_gemm(device, rows, inner, columns, config):
    assert tuning.rows_gemm(device, rows, inner, columns) == config


@pytest.mark.parametrize("device", [H100, H200], ids=card_id)
def test_up_and_weight_gradient_gemm(device):
    many = GemmConfig(WIDE, cluster_n=2, panel=20, even_panels=True, tile_counter=True)
    assert tuning.up_gemm(device, 32768, 4096, 14336, True) == many
    assert tuning.up_gemm(device, 131072, 1536, 768, True) == GemmConfig(WIDE, cluster_n=2, panel=4)
    assert tuning.weight_gradient_gemm(device) == GemmConfig(WIDE, panel=8, tile_counter=True)


@pytest.mark.parametrize("device, least", [(H20, 0.591e11), (H100_PCIE, 0.864e11), (H200, 1e11), (LARGE, 1.212e11)], ids=card_id)
def test_a_counter_pays_for_short_sums_that_take_as_long(device, least):
    for share, counter in ((0.98, False), (1.02, True)):
        assert tuning.rows_gemm(device, round(share * least / (2 * 1024 * 1024)), 1024, 1024).tile_counter == counter


sizes = st.integers(1, 2**31 - 2**10)


@given(device=hoppers, rows=sizes, inner=sizes, columns=sizes, glu=st.booleans())
def test_every_choice_has_an_instance(device, rows, inner, columns, glu):
    """No launch asks for a tile or cluster that csrc/hopper/ is not compiled for."""
    configs = (tuning.rows_gemm(device, rows, inner, columns), tuning.up_gemm(device, rows, inner, columns, glu),
               tuning.weight_gradient_gemm(device))
    for config in configs:
        assert config.tile_n in (NARROW, WIDE) and config.cluster_m == 1 and not config.ping_pong and not config.split.per_sm
        assert not config.most_ahead and config.panel >= 1
    assert [config.tile_n for config in configs[1:]] == [WIDE, WIDE] and configs[0].cluster_n == configs[2].cluster_n == 1
