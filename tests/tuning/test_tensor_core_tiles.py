"""The tiles of the tensor_core engine, on the GPUs that it is for and on those where it was measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gbmoe.tuning import tensor_core_tiles as tuning
from gbmoe.tuning.tensor_core_tiles import LOW, SQUARE, WIDE, TensorCoreConfig
from tests import csrc_operators
from tests.tuning.cards import A100, CARDS, H100, H200, L40S, card_id, devices, multiprocessors

measured = pytest.mark.parametrize("device", [H100, H200], ids=card_id)


@measured
@pytest.mark.parametrize("rows, groups, columns, config", [
    (32768, 8, 14336, WIDE),     # mixtral
    (131072, 128, 768, WIDE),    # qwen3
    (131072, 64, 1408, WIDE),    # half of the last of six tiles is empty
    (131072, 64, 128, SQUARE),   # half of the only one
    (512, 1, 4096, SQUARE),      # 64 wide tiles
    (4096, 128, 2048, LOW),      # 32 rows a group
    (4096, 1, 128, LOW),         # a router's logits
])
def test_rows_gemm(device, rows, groups, columns, config):
    assert tuning.rows_gemm(device, rows, groups, columns) == config


@measured
def test_up_and_weight_gradient_gemm(device):
    assert tuning.up_gemm(device, 32768, 8) == WIDE and tuning.up_gemm(device, 64, 1) == LOW
    assert tuning.weight_gradient_gemm(device, 8, 4096, 14336) == replace(WIDE, panel=8)
    assert tuning.weight_gradient_gemm(device, 8, 512, 512) == replace(SQUARE, panel=8)


@measured
@pytest.mark.parametrize("rows, groups, columns, low", [
    (4096, 1, 128, True), (4097, 1, 128, False), (2048, 1, 256, True), (2048, 2, 128, False)])
def test_few_low_tiles(device, rows, groups, columns, low):
    assert tuning.few_low_tiles(device, rows, groups, columns) == low


@given(device=devices, rows=st.integers(1, 2**31 - 2**10), groups=st.integers(1, 4096), features=st.integers(1, 2**31 - 2**10),
       columns=st.integers(1, 2**31 - 2**10))
def test_every_choice_has_an_instance(device, rows, groups, features, columns):
    """The instances are those of the launches in csrc/tensor_core/."""
    wide, square, low = ((c.tile_m, c.tile_n) for c in (WIDE, SQUARE, LOW))
    for config, instances in ((tuning.rows_gemm(device, rows, groups, columns), (wide, square, low)),
                              (tuning.up_gemm(device, rows, groups), (wide, low)),
                              (tuning.weight_gradient_gemm(device, groups, features, columns), (wide, square))):
        assert (config.tile_m, config.tile_n) in instances and config.panel >= 1


def test_stages_of_every_tile_fit_shared_memory():
    """100 KiB of a multiprocessor, or 164; the tiles and their stages are the ones that csrc/tensor_core/traits.cuh names."""
    text = (Path(__file__).resolve().parents[2] / "csrc" / "tensor_core" / "traits.cuh").read_text()
    for name, config in (("WideTile", WIDE), ("SquareTile", SQUARE), ("LowTile", LOW)):
        numbers = re.search(rf"using {name} = TileShape<([\d, ]+)>", text)[1].split(",")
        m, n, warp_m, warp_n, of_small, of_large = map(int, numbers)
        assert (m, n) == (config.tile_m, config.tile_n)
        ctas = 2 if 32 * (m // warp_m) * (n // warp_n) <= 128 else 1
        for stages, row_bytes, memory in ((of_small, 64, 100), (of_large, 128, 164)):
            assert stages >= 2 and ctas * stages * (m + n) * row_bytes <= memory << 10


@pytest.mark.parametrize("device, least", [(A100, 105), (H100, 128), (H200, 128), (L40S, 138)], ids=card_id)
def test_wide_tiles_leave_as_few_multiprocessors_without_one(device, least):
    """Were they chosen by an H200's number of multiprocessors, an A100 would have square tiles where wide ones fill it, and an
    L40S the reverse."""
    for tiles, tile in ((least - 1, SQUARE), (least, WIDE)):
        assert replace(tuning.weight_gradient_gemm(device, tiles, 128, 256), panel=16) == tile


@pytest.mark.parametrize("device", CARDS, ids=card_id)
def test_low_tiles_of_one_group_leave_half_of_the_multiprocessors_without_one(device):
    most = max(tiles for tiles in range(1, 200) if tuning.few_low_tiles(device, 64 * tiles, 1, 128))
    assert 0.47 * device.multiprocessors <= most <= device.multiprocessors / 2


@given(device=devices, more=multiprocessors, rows=st.integers(1, 1 << 20), groups=st.integers(1, 256),
       columns=st.integers(1, 1 << 14))
def test_larger_gpus_never_take_larger_tiles(device, more, rows, groups, columns):
    larger = device._replace(multiprocessors=max(device.multiprocessors, more))
    one, other = (tuning.rows_gemm(d, rows, groups, columns) for d in (device, larger))
    assert one.tile_m * one.tile_n >= other.tile_m * other.tile_n
    one, other = (tuning.weight_gradient_gemm(d, groups, rows, columns) for d in (device, larger))
    assert one.tile_m * one.tile_n >= other.tile_m * other.tile_n


def test_a_launch_takes_the_fields_in_csrc_s_order():
    config = TensorCoreConfig(64, 128, 9)
    assert config.tiling == tuple(getattr(config, name) for name in csrc_operators.fields("tensor_core/launch.cuh", "Tiling"))
