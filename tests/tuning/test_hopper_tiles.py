"""The tiles of Hopper's GEMMs: what is chosen at the shapes that were measured, that every choice can be launched on every GPU,
and that rules follow the GPU."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gbmoe.tuning import hopper_tiles as tuning
from gbmoe.tuning.hopper_tiles import NARROW, SQUARE, WIDE, GemmConfig, SplitConfig
from tests import csrc_operators
from tests.tuning.cards import H20, H100, H100_PCIE, H200, LARGE, MIB, card_id, hoppers, multiprocessors

ROWS = SplitConfig(per_sm=2, min_k_blocks=4, cost=2, most=8)
WEIGHTS = SplitConfig(per_sm=2, min_k_blocks=16, most=127, even=1.05)
CSRC = Path(__file__).resolve().parents[2] / "csrc" / "hopper"
measured = pytest.mark.parametrize("device", [H100, H200], ids=card_id)


@measured
@pytest.mark.parametrize("rows, groups, inner, columns, config", [
    (131072, 128, 768, 2048, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),      # qwen3, short sums
    (131072, 128, 1536, 2048, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),
    (196608, 128, 256, 1536, GemmConfig(SQUARE, cluster_n=2, ping_pong=True)),                         # too short for a counter
    (4096, 64, 768, 2048, GemmConfig(SQUARE, cluster_n=2, ping_pong=True)),                            # too few FLOPs for it
    (131072, 64, 2048, 2048, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),      # olmoe, long ones
    (32768, 8, 14336, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True, most_ahead=4, split=ROWS)),   # mixtral: few tiles, split
    (262144, 8, 14336, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True, most_ahead=4)),          # many
    (1024, 8, 2048, 1024, GemmConfig(WIDE, cluster_n=2, tile_counter=True, split=ROWS)),                   # too few for ping-pong
    (64, 128, 768, 2048, GemmConfig(WIDE, cluster_n=2)),                                               # less than a row a group
    (98304, 64, 2048, 640, GemmConfig(SQUARE, cluster_m=2, ping_pong=True, tile_counter=True)),        # an odd number of tiles along N
    (100, 64, 512, 640, GemmConfig(WIDE)),                                                             # three wide tiles, on their own
    (196608, 8, 4224, 4224, GemmConfig(NARROW, cluster_n=2, tile_counter=True, most_ahead=4)),         # where narrow ones leave less empty
    (2048, 8, 14336, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True, split=ROWS)),              # too few to be kept together
])
def test_rows_gemm(device, rows, groups, inner, columns, config):
    assert tuning.rows_gemm(device, rows, groups, inner, columns) == config


@pytest.mark.parametrize("rows, groups, inner, columns, config", [
    (32768, 128, 2048, 16, GemmConfig(SQUARE, ping_pong=True, tile_counter=True)),  # adapters' ranks: no split, where all CTAs have tiles
    (32768, 128, 768, 16, GemmConfig(SQUARE, ping_pong=True)),
    (32768, 128, 7168, 128, GemmConfig(SQUARE, ping_pong=True, tile_counter=True)),
    (32768, 128, 2048, 136, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),  # two tiles, which share their rows
    (16384, 128, 2048, 16, GemmConfig(WIDE, tile_counter=True, split=ROWS)),  # fewer tiles than multiprocessors
])
def test_products_with_the_columns_of_a_rank(rows, groups, inner, columns, config):
    assert tuning.rows_gemm(H200, rows, groups, inner, columns) == config


@measured
@pytest.mark.parametrize("rows, columns, config", [
    (512, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True)),  # 128 wide tiles, which all run at once
    (768, 6144, GemmConfig(SQUARE, cluster_n=2, ping_pong=True)),
    (1024, 4096, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),
    (4096, 4096, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),
    (16384, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True, most_ahead=4)),
])
def test_long_sums_that_must_not_be_split(device, rows, columns, config):
    assert tuning.rows_gemm(device, rows, 8, 14336, columns, splits=False) == config


# The tiles that csrc/hopper/gemm_rows.cu has instances for.
LAUNCHED = {(SQUARE, 1, 2), (SQUARE, 2, 1), (SQUARE, 1, 1), (NARROW, 1, 2), (WIDE, 1, 2), (WIDE, 1, 1)}


@given(device=hoppers, rows=st.integers(1, 1 << 22), groups=st.integers(1, 1024), inner=st.integers(1, 4096).map(lambda n: 8 * n),
       columns=st.integers(1, 4096).map(lambda n: 8 * n), glu=st.booleans(), gathered=st.booleans(), padded=st.booleans())
def test_configurations_without_splits(device, rows, groups, inner, columns, glu, gathered, padded):
    """They are the same except for the splits, or ping-pong kernels, which have none. The first GEMM never splits a sum."""
    whole = tuning.rows_gemm(device, rows, groups, inner, columns, splits=False)
    splits = tuning.rows_gemm(device, rows, groups, inner, columns)
    assert whole == replace(splits, split=tuning.WHOLE) or (whole.ping_pong and splits.split != tuning.WHOLE and rows >= 4 * groups)
    assert (whole.tile_n, whole.cluster_m, whole.cluster_n) in LAUNCHED
    assert tuning.up_gemm(device, rows, inner, columns, glu, gathered=gathered, padded=padded).split == tuning.WHOLE


@measured
@pytest.mark.parametrize("rows, inner, ffn, glu, config", [
    (16384, 4096, 14336, True, GemmConfig(WIDE, cluster_n=2, panel=20, even_panels=True, tile_counter=True, most_ahead=4)),
    (131072, 2048, 1024, True, GemmConfig(WIDE, cluster_n=2, tile_counter=True)),
    (131072, 1536, 768, True, GemmConfig(WIDE, cluster_n=2, panel=4, tile_counter=True)),
    (16384, 1536, 768, True, GemmConfig(WIDE, cluster_n=2, panel=4)),
    (131072, 1536, 640, True, GemmConfig(WIDE, panel=4, tile_counter=True)),
    (64, 2048, 1024, False, GemmConfig(WIDE, cluster_n=2)),
])
def test_up_gemm(device, rows, inner, ffn, glu, config):
    assert tuning.up_gemm(device, rows, inner, ffn, glu) == config
    in_pairs = config if config.cluster_n == 2 else GemmConfig(WIDE)
    assert tuning.up_gemm(device, rows, inner, ffn, glu, gathered=True) == in_pairs
    assert tuning.up_gemm(device, rows, inner, ffn, glu, gathered=True, padded=True) == GemmConfig(
        WIDE, panel=config.panel if config.even_panels else 16, even_panels=config.even_panels)


@measured
@pytest.mark.parametrize("rows, groups, features, columns, gathered, config", [
    (131072, 64, 1024, 2048, False, GemmConfig(WIDE, cluster_m=2, panel=8, tile_counter=True, split=WEIGHTS)),
    (524288, 8, 1024, 512, False, GemmConfig(WIDE, cluster_m=2, panel=8, tile_counter=True, split=replace(WEIGHTS, per_sm=4))),
    (2048, 64, 640, 2048, False, GemmConfig(WIDE, cluster_n=2, panel=8, tile_counter=True)),
    (196608, 128, 256, 1536, True, GemmConfig(WIDE, cluster_m=2, panel=8, tile_counter=True, split=WEIGHTS)),
    (196608, 128, 512, 1536, True, GemmConfig(WIDE, cluster_n=2, panel=8, tile_counter=True, split=WEIGHTS)),
    (196608, 128, 256, 640, True, GemmConfig(WIDE, panel=8, tile_counter=True, split=replace(WEIGHTS, per_sm=4))),
])
def test_weight_gradient_gemm(device, rows, groups, features, columns, gathered, config):
    assert tuning.weight_gradient_gemm(device, rows, groups, features, columns, gathered=gathered) == config


@measured
@pytest.mark.parametrize("features, padded, clusters", [(768, False, (1, 2)), (8, False, (1, 2)), (768, True, (2, 1))])
def test_two_weight_gradients_always_form_pairs(device, features, padded, clusters):
    config = tuning.weight_gradient_gemm(device, 131072, 128, features, 2048, gathered=True, padded=padded, two=True)
    assert (config.cluster_m, config.cluster_n) == clusters


@measured
@pytest.mark.parametrize("ffn, config", [
    (1024, GemmConfig(WIDE, cluster_n=2, panel=2)), (768, GemmConfig(NARROW, cluster_n=2)), (640, GemmConfig(WIDE)),
    (1536, GemmConfig(WIDE, cluster_n=2)), (512, GemmConfig(WIDE, cluster_n=2)),
])
def test_down_backward_gemm(device, ffn, config):
    assert tuning.down_backward_gemm(device, ffn) == config


sizes = st.integers(1, 2**31 - 2**10)


@given(device=hoppers, rows=sizes, groups=st.integers(1, 4096), inner=sizes, columns=sizes, flag=st.booleans())
def test_every_choice_has_an_instance(device, rows, groups, inner, columns, flag):
    """No launch asks for a tile or cluster that csrc/hopper/ is not compiled for."""
    config = tuning.rows_gemm(device, rows, groups, inner, columns)
    assert (config.tile_n == SQUARE) == config.ping_pong and not (config.ping_pong and config.split.per_sm)
    assert (config.cluster_m, config.cluster_n) in ([(1, 1), (1, 2), (2, 1)] if config.ping_pong else
                                                    [(1, 2)] if config.tile_n == NARROW else [(1, 1), (1, 2)])
    assert not config.most_ahead or (config.tile_counter and not config.ping_pong)
    assert not config.split.per_sm or config.tile_counter
    for gathered in (False, True):
        config = tuning.up_gemm(device, rows, inner, columns, flag, gathered=gathered)
        assert config.tile_n == WIDE and config.cluster_m == 1 and not config.ping_pong and not config.split.per_sm
        assert not config.most_ahead or config.tile_counter
    for of_two in ({}, {"two": True}):
        config = tuning.weight_gradient_gemm(device, rows, groups, inner, columns, gathered=flag, **of_two)
        assert config.tile_n == WIDE and config.tile_counter and config.split.per_sm in (0, 2, 4) and config.split.most <= 127
        assert (config.cluster_m, config.cluster_n) in [(1, 1), (1, 2), (2, 1)] and not config.most_ahead
    config = tuning.down_backward_gemm(device, columns)
    assert config.tile_n in (NARROW, WIDE) and config.cluster_m == 1 and not config.tile_counter
    assert config.tile_n == WIDE or config.cluster_n == 2
    config = tuning.unrounded_rows_gemm(device, rows, inner, columns)
    assert (config.tile_n, config.cluster_m, config.cluster_n, config.ping_pong, config.most_ahead) == (SQUARE, 1, 1, True, 0)
    assert tuning.gathered_rows_gemm(device) == GemmConfig(WIDE, panel=device.panel(16))


@given(device=hoppers, rows=sizes, groups=st.integers(1, 4096), inner=sizes, columns=sizes)
def test_panels_are_as_high_as_a_wave_is_wide(device, rows, groups, inner, columns):
    """Within a half: CTAs that run at once have then about as many rows to read as columns, which is the least."""
    panel = tuning.rows_gemm(device, rows, groups, inner, columns).panel
    high, wide = panel * tuning.TILE_M, device.multiprocessors / panel * WIDE
    assert 2 / 3 < high / wide < 3 / 2
    assert 1 <= tuning.weight_gradient_gemm(device, rows, groups, inner, columns, gathered=False).panel <= panel


def test_stages_of_every_tile_fit_shared_memory():
    """Of a CTA on compute capability 9.0, which may have 227 KiB; the tiles are the ones that csrc/hopper/traits.cuh names."""
    traits = (CSRC / "traits.cuh").read_text()
    rows, terms, *widths = (int(re.search(rf"{name} = (\d+)", traits)[1]) for name in
                            ("kTileM", "kBlockK", "kWideTileN", "kNarrowTileN", "kSquareTileN"))
    stages = int(re.search(r"int kStages = (\d+);", traits)[1])
    assert (rows, *widths) == (tuning.TILE_M, WIDE, NARROW, SQUARE)
    assert all(stages * (rows + width) * terms * 2 <= 227 << 10 for width in widths)


@pytest.mark.parametrize("device, tile", [(H100, WIDE), (H200, WIDE), (LARGE, WIDE), (H100_PCIE, SQUARE), (H20, SQUARE)],
                         ids=card_id)
def test_wide_tiles_that_do_not_all_run_at_once_become_square(device, tile):
    """128 wide tiles, of long sums that must not be split: an H100 PCIe, with 114 multiprocessors, was given an H200's choice."""
    assert tuning.rows_gemm(device, 512, 8, 14336, 4096, splits=False).tile_n == tile


@pytest.mark.parametrize("device, pacing", [(H100, 4104), (H200, 4104), (H100_PCIE, 4376), (H20, 5464), (LARGE, 4104)],
                         ids=card_id)
def test_clusters_stay_together_where_sums_outgrow_the_l2(device, pacing):
    """The multiple of 8 from which they do: fewer CTAs at once read fewer bytes of longer sums. Sums of up to 4,096 terms are in
    ping-pong."""
    def most_ahead(inner):
        return tuning.rows_gemm(device, 1 << 20, 8, inner, 4096).most_ahead

    assert (most_ahead(pacing - 8), most_ahead(pacing), most_ahead(14336)) == (0, 4, 4)


def test_half_the_l2_keeps_clusters_of_first_gemms_together_in_half_as_long_sums():
    """A MIG instance has a part of both; here only the L2 is halved."""
    half = H200._replace(l2_bytes=30 * MIB)
    for device, terms in ((H200, 4096), (half, 2048)):
        assert tuning.up_gemm(device, 1 << 17, terms, 14336, True).most_ahead == 4
        assert tuning.up_gemm(device, 1 << 17, terms - 8, 14336, True).most_ahead == 0


@given(device=hoppers, more=multiprocessors, rows=st.integers(1, 1 << 22), groups=st.integers(1, 1024),
       inner=st.integers(1, 4096).map(lambda n: 8 * n), columns=st.integers(1, 4096).map(lambda n: 8 * n))
def test_choices_for_large_gemms_ask_for_more_on_larger_gpus(device, more, rows, groups, inner, columns):
    """A product that is small on one GPU is small on one with more multiprocessors."""
    larger = device._replace(multiprocessors=max(device.multiprocessors, more))
    one, other = (tuning.rows_gemm(d, rows, groups, inner, columns) for d in (device, larger))
    assert one.ping_pong >= other.ping_pong or one.tile_n == other.tile_n
    if one.ping_pong == other.ping_pong:
        assert one.tile_counter >= other.tile_counter
    one, other = (tuning.up_gemm(d, rows, inner, columns, True) for d in (device, larger))
    assert one.tile_counter >= other.tile_counter
    one, other = (tuning.weight_gradient_gemm(d, rows, groups, inner, columns, gathered=False) for d in (device, larger))
    assert one.split.per_sm <= other.split.per_sm and replace(one, split=other.split, panel=other.panel) == other


@given(device=hoppers, rows=st.integers(1, 1 << 20), more=st.integers(1, 1 << 20),
       inner=st.integers(1, 4096).map(lambda n: 8 * n), ffn=st.integers(1, 4096).map(lambda n: 8 * n), glu=st.booleans())
def test_more_rows_keep_a_tile_counter(device, rows, more, inner, ffn, glu):
    fewer, others = (tuning.up_gemm(device, of, inner, ffn, glu) for of in (rows, rows + more))
    assert others.tile_counter >= fewer.tile_counter


def test_a_launch_takes_the_fields_in_csrc_s_order():
    """Each has another value, and the tuple has them in the order of the struct that it becomes."""
    config = GemmConfig(256, cluster_m=1, cluster_n=2, panel=9, even_panels=True, most_ahead=4, split=SplitConfig(2, 16, 3, 127, 1.05))
    assert config.tiling == tuple(int(getattr(config, name)) for name in csrc_operators.fields("hopper/tiling.cuh", "Tiling"))
    assert config.split.splitting == tuple(getattr(config.split, name) for name in csrc_operators.fields("hopper/tiling.cuh", "Splitting"))
