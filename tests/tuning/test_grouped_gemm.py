"""The one table of configurations: what is chosen at the shapes that were measured, and that every choice can be launched."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from gbmoe.problem import Problem
from gbmoe.tuning import grouped_gemm as tuning
from gbmoe.tuning.grouped_gemm import NARROW, SQUARE, WIDE, GemmConfig, SplitConfig

ROWS = SplitConfig(per_sm=2, min_k_blocks=4, cost=2, most=8)
WEIGHTS = SplitConfig(per_sm=2, min_k_blocks=16, most=127, even=1.05)


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
def test_rows_gemm(rows, groups, inner, columns, config):
    assert tuning.rows_gemm(rows, groups, inner, columns) == config


@pytest.mark.parametrize("rows, columns, config", [
    (512, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True)),  # 128 wide tiles, which all run at once
    (768, 6144, GemmConfig(SQUARE, cluster_n=2, ping_pong=True)),
    (1024, 4096, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),
    (4096, 4096, GemmConfig(SQUARE, cluster_n=2, ping_pong=True, tile_counter=True)),
    (16384, 4096, GemmConfig(WIDE, cluster_n=2, tile_counter=True, most_ahead=4)),
])
def test_long_sums_that_must_not_be_split(rows, columns, config):
    assert tuning.rows_gemm(rows, 8, 14336, columns, splits=False) == config


# The tiles that csrc/hopper/gemm_rows.cu has instances for.
LAUNCHED = {(SQUARE, 1, 2), (SQUARE, 2, 1), (SQUARE, 1, 1), (NARROW, 1, 2), (WIDE, 1, 2), (WIDE, 1, 1)}


@given(rows=st.integers(1, 1 << 22), groups=st.integers(1, 1024), inner=st.integers(1, 4096).map(lambda n: 8 * n),
       columns=st.integers(1, 4096).map(lambda n: 8 * n), glu=st.booleans(), gathered=st.booleans(), padded=st.booleans())
def test_configurations_without_splits(rows, groups, inner, columns, glu, gathered, padded):
    """They are the same but for the splits, or ping-pong kernels, which have none. The first GEMM never splits a sum."""
    whole = tuning.rows_gemm(rows, groups, inner, columns, splits=False)
    splits = tuning.rows_gemm(rows, groups, inner, columns)
    assert whole == replace(splits, split=tuning.WHOLE) or (whole.ping_pong and splits.split != tuning.WHOLE and rows >= 4 * groups)
    assert (whole.tile_n, whole.cluster_m, whole.cluster_n) in LAUNCHED
    assert tuning.up_gemm(rows, inner, columns, glu, gathered=gathered, padded=padded).split == tuning.WHOLE


@pytest.mark.parametrize("rows, inner, ffn, glu, config", [
    (16384, 4096, 14336, True, GemmConfig(WIDE, cluster_n=2, panel=20, even_panels=True, tile_counter=True, most_ahead=4)),
    (131072, 2048, 1024, True, GemmConfig(WIDE, cluster_n=2, tile_counter=True)),
    (131072, 1536, 768, True, GemmConfig(WIDE, cluster_n=2, panel=4, tile_counter=True)),
    (16384, 1536, 768, True, GemmConfig(WIDE, cluster_n=2, panel=4)),
    (131072, 1536, 640, True, GemmConfig(WIDE, panel=4, tile_counter=True)),
    (64, 2048, 1024, False, GemmConfig(WIDE, cluster_n=2)),
])
def test_up_gemm(rows, inner, ffn, glu, config):
    assert tuning.up_gemm(rows, inner, ffn, glu) == config
    in_pairs = config if config.cluster_n == 2 else GemmConfig(WIDE)
    assert tuning.up_gemm(rows, inner, ffn, glu, gathered=True) == in_pairs
    assert tuning.up_gemm(rows, inner, ffn, glu, gathered=True, padded=True) == GemmConfig(
        WIDE, panel=config.panel if config.even_panels else 16, even_panels=config.even_panels)


@pytest.mark.parametrize("rows, groups, features, columns, gathered, config", [
    (131072, 64, 1024, 2048, False, GemmConfig(WIDE, cluster_m=2, panel=8, tile_counter=True, split=WEIGHTS)),
    (524288, 8, 1024, 512, False, GemmConfig(WIDE, cluster_m=2, panel=8, tile_counter=True, split=replace(WEIGHTS, per_sm=4))),
    (2048, 64, 640, 2048, False, GemmConfig(WIDE, cluster_n=2, panel=8, tile_counter=True)),
    (196608, 128, 256, 1536, True, GemmConfig(WIDE, cluster_m=2, panel=8, tile_counter=True, split=WEIGHTS)),
    (196608, 128, 512, 1536, True, GemmConfig(WIDE, cluster_n=2, panel=8, tile_counter=True, split=WEIGHTS)),
    (196608, 128, 256, 640, True, GemmConfig(WIDE, panel=8, tile_counter=True, split=replace(WEIGHTS, per_sm=4))),
])
def test_weight_gradient_gemm(rows, groups, features, columns, gathered, config):
    assert tuning.weight_gradient_gemm(rows, groups, features, columns, gathered=gathered) == config


@pytest.mark.parametrize("features, padded, clusters", [(768, False, (1, 2)), (8, False, (1, 2)), (768, True, (2, 1))])
def test_two_weight_gradients_always_form_pairs(features, padded, clusters):
    config = tuning.weight_gradient_gemm(131072, 128, features, 2048, gathered=True, padded=padded, two=True)
    assert (config.cluster_m, config.cluster_n) == clusters


@pytest.mark.parametrize("ffn, config", [
    (1024, GemmConfig(WIDE, cluster_n=2, panel=2)), (768, GemmConfig(NARROW, cluster_n=2)), (640, GemmConfig(WIDE)),
    (1536, GemmConfig(WIDE, cluster_n=2)), (512, GemmConfig(WIDE, cluster_n=2)),
])
def test_down_backward_gemm(ffn, config):
    assert tuning.down_backward_gemm(ffn) == config


@pytest.mark.parametrize("rows, inner, columns, config", [
    (4096, 4096, 14336, GemmConfig(NARROW, tile_counter=True)), (4096, 2048, 768, GemmConfig(NARROW, tile_counter=True)),
    (4096, 14336, 4096, GemmConfig(WIDE, tile_counter=True)), (4096, 768, 2048, GemmConfig(WIDE)),
    (131072, 768, 2048, GemmConfig(WIDE, tile_counter=True)), (1 << 20, 256, 2048, GemmConfig(WIDE)), (16, 16, 16, GemmConfig(NARROW)),
])
def test_scaled_rows_gemm(rows, inner, columns, config):
    assert tuning.scaled_rows_gemm(rows, inner, columns) == config


@pytest.mark.parametrize("rows, groups, few", [(8, 128, True), (256, 128, True), (257, 128, False), (2, 1, True), (3, 1, False),
                                               (2048, 1024, True), (8, 1025, False)])
def test_few_rows(rows, groups, few):
    assert tuning.few_rows(rows, groups) == few


@pytest.mark.parametrize("rows, columns, few", [(1, 8, True), (4096, 8, True), (4097, 8, False), (512, 128, True), (513, 128, False)])
def test_few_rows_linear(rows, columns, few):
    assert tuning.few_rows_linear(rows, columns) == few


@pytest.mark.parametrize("rows, groups, few", [(1024, 128, True), (1025, 128, False), (8, 1, True), (9, 1, False), (8192, 1024, True),
                                               (8, 1025, False)])
def test_few_rows_on_hopper(rows, groups, few):
    assert tuning.few_rows_on_hopper(rows, groups) == few


@pytest.mark.parametrize("rows, groups, columns, low", [
    (4096, 1, 128, True), (4097, 1, 128, False), (2048, 1, 256, True), (2048, 2, 128, False)])
def test_low_tiles_of_one_group(rows, groups, columns, low):
    assert tuning.low_tiles_of_one_group(rows, groups, columns) == low


@pytest.mark.parametrize("hidden, ffn, glu, activation, gather_up, padded, gather_down_backward, gather_weight_gradient, two, fuse", [
    (1536, 256, True, "silu", True, True, True, True, True, True),             # "fine"
    (2048, 512, True, "gelu_tanh", True, True, False, True, True, True),
    (2048, 512, True, "relu", False, False, False, True, True, True),
    (2048, 768, True, "silu", True, False, False, False, True, True),          # qwen3
    (2048, 768, True, "gelu", False, False, False, False, True, True),
    (2048, 768, False, "silu", False, False, False, False, True, True),        # three tiles, which do not form pairs
    (2048, 1024, True, "silu", True, False, False, False, True, True),         # olmoe
    (2048, 1408, True, "silu", False, False, False, False, False, True),       # eleven
    (7168, 2048, True, "silu", True, False, False, False, False, True),
    (2048, 2304, True, "silu", False, False, False, False, False, True),
    (1024, 4096, False, "silu", False, False, False, False, False, False),
])
def test_experts(hidden, ffn, glu, activation, gather_up, padded, gather_down_backward, gather_weight_gradient, two, fuse):
    """`padded`: whether it gathers in the first GEMM where rows may have no token; `two`: whether one GEMM gathers for the gradients of
    both w1 and v1, where all rows have a token."""
    for rows_are_padded, in_up in ((False, gather_up), (True, padded)):
        assert tuning.experts(hidden, ffn, glu, activation, 1 << 30, rows_are_padded) == tuning.ExpertsConfig(
            in_up, gather_down_backward, gather_weight_gradient, two and not rows_are_padded, fuse)


@pytest.mark.parametrize("rows, groups, ffn, pay", [(32768, 128, 768, True), (32767, 128, 768, False), (512, 128, 512, True)])
def test_rows_pay_for_two(rows, groups, ffn, pay):
    assert tuning.rows_pay_for_two(rows, groups, ffn) == pay


sizes = st.integers(1, 2**31 - 2**10)


@given(rows=sizes, groups=st.integers(1, 4096), inner=sizes, columns=sizes, flag=st.booleans())
def test_every_choice_has_an_instance(rows, groups, inner, columns, flag):
    """No launch asks for a tile or cluster that csrc/hopper/ is not compiled for."""
    config = tuning.rows_gemm(rows, groups, inner, columns)
    assert (config.tile_n == SQUARE) == config.ping_pong and not (config.ping_pong and config.split.per_sm)
    assert (config.cluster_m, config.cluster_n) in ([(1, 1), (1, 2), (2, 1)] if config.ping_pong else
                                                    [(1, 2)] if config.tile_n == NARROW else [(1, 1), (1, 2)])
    assert not config.most_ahead or (config.tile_counter and not config.ping_pong)
    for gathered in (False, True):
        config = tuning.up_gemm(rows, inner, columns, flag, gathered=gathered)
        assert config.tile_n == WIDE and config.cluster_m == 1 and not config.ping_pong and not config.split.per_sm
        assert not config.most_ahead or config.tile_counter
    for of_two in ({}, {"two": True}):
        config = tuning.weight_gradient_gemm(rows, groups, inner, columns, gathered=flag, **of_two)
        assert config.tile_n == WIDE and config.tile_counter and config.split.per_sm in (0, 2, 4) and config.split.most <= 127
        assert (config.cluster_m, config.cluster_n) in [(1, 1), (1, 2), (2, 1)] and not config.most_ahead
    for config in (tuning.scaled_rows_gemm(rows, inner, columns), tuning.scaled_up_gemm(rows, inner, columns, flag)):
        assert config.tile_n in (NARROW, WIDE) and config.cluster_m == 1 and not config.ping_pong and not config.split.per_sm
        assert not config.most_ahead
    assert tuning.scaled_up_gemm(rows, inner, columns, flag).tile_n == WIDE
    config = tuning.down_backward_gemm(columns)
    assert config.tile_n in (NARROW, WIDE) and config.cluster_m == 1 and not config.tile_counter
    assert config.tile_n == WIDE or config.cluster_n == 2


@given(rows=sizes, groups=st.integers(1, 4096), features=sizes, columns=sizes)
def test_every_choice_of_the_tensor_core_engine_has_an_instance(rows, groups, features, columns):
    """The instances are those of the launches in csrc/tensor_core/."""
    wide, square, low = ((c.tile_m, c.tile_n) for c in (tuning.TENSOR_CORE_WIDE, tuning.TENSOR_CORE_SQUARE, tuning.TENSOR_CORE_LOW))
    for config, instances in ((tuning.tensor_core_rows_gemm(rows, groups, columns), (wide, square, low)),
                              (tuning.tensor_core_up_gemm(rows, groups), (wide, low)),
                              (tuning.tensor_core_weight_gradient_gemm(groups, features, columns), (wide, square))):
        assert (config.tile_m, config.tile_n) in instances and config.panel >= 1


def test_engine_order_of_other_devices_is_empty():
    assert tuning.engine_order(Problem(torch.device("cpu"), torch.bfloat16, 64, 2, 8, 8, False), None) == ()


def problem_of(dtype, rows=131072, **fields):
    return Problem(torch.device("cuda", 0), dtype, rows, 128, 2048, 768, False, **fields)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [128, 131072, 1 << 22])
def test_engine_order_where_hopper_does_not_serve_begins_with_tensor_core(capability, dtype, rows):
    assert tuning.engine_order(problem_of(dtype, rows), capability)[:2] == ("hopper", "tensor_core")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("rows", [1024, 131072])
def test_engine_order_has_torch_before_tensor_core_where_its_kernels_are_for_newer_tensor_cores(capability, rows):
    assert tuning.engine_order(problem_of(torch.bfloat16, rows), capability)[:3] == ("hopper", "torch", "tensor_core")
    assert tuning.engine_order(problem_of(torch.float16, rows), capability)[:2] == ("hopper", "tensor_core")


@pytest.mark.parametrize("k_grouped", [False, True])  # one engine for all of a layer's products
@pytest.mark.parametrize("rows, order", [(16, ("hopper", "tensor_core", "torch")), (17, ("hopper", "torch", "tensor_core"))])
def test_engine_order_on_data_centre_blackwell_keeps_the_kernels_for_few_rows(rows, order, k_grouped):
    problem = Problem(torch.device("cuda", 0), torch.bfloat16, rows, 8, 4096, 4096, k_grouped)
    assert tuning.engine_order(problem, (10, 0))[:3] == order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_engine_order_on_hopper_compared_the_number_of_rows_for_nothing(monkeypatch, dtype):
    """torch.compile then makes a graph for each answer."""
    monkeypatch.setattr(tuning, "few_rows", lambda rows, groups: pytest.fail("asked"))
    for rows in (1, 1 << 20):
        assert tuning.engine_order(problem_of(dtype, rows), (9, 0))[0] == "hopper"


def test_engine_order_on_data_centre_blackwell_takes_the_loop_where_it_does_not_wait():
    for rows, order in ((131072, ("hopper", "cublas_loop", "tensor_core")), (128, ("hopper", "tensor_core", "cublas_grouped"))):
        assert tuning.engine_order(problem_of(torch.float16, rows, sizes_on_host=True), (10, 0)) == order


def test_engine_order_in_float32_begins_with_the_loop_where_it_does_not_wait():
    assert tuning.engine_order(problem_of(torch.float32, sizes_on_host=True), (9, 0)) == ("cublas_loop", "tensor_core")


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0), (10, 0)])
def test_engine_order_of_large_groups_on_the_host_begins_with_the_loop(capability):
    assert tuning.engine_order(problem_of(torch.bfloat16, 1 << 25, sizes_on_host=True), capability)[0] == "cublas_loop"


@pytest.mark.parametrize("rows, groups, columns, config", [
    (32768, 8, 14336, tuning.TENSOR_CORE_WIDE),     # mixtral
    (131072, 128, 768, tuning.TENSOR_CORE_WIDE),    # qwen3
    (131072, 64, 1408, tuning.TENSOR_CORE_WIDE),    # half of the last of six tiles is empty
    (131072, 64, 128, tuning.TENSOR_CORE_SQUARE),   # half of the only one
    (512, 1, 4096, tuning.TENSOR_CORE_SQUARE),      # 64 wide tiles
    (4096, 128, 2048, tuning.TENSOR_CORE_LOW),      # 32 rows a group
])
def test_tensor_core_rows_gemm(rows, groups, columns, config):
    assert tuning.tensor_core_rows_gemm(rows, groups, columns) == config
