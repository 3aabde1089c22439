"""The numbers of blockwise-scaled e4m3, to the bit: as they are defined, and on a GPU as the kernels compute them."""

import pytest
import torch

from gbmoe import Float8BlockScaling, RoutingPlan, engines, float8, kernels
from gbmoe.slot_map import SlotMap
from gbmoe.testing import exact_inputs
from tests.conftest import dtype_id

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
POWER_2 = pytest.mark.parametrize("power_2_scale", [False, True], ids=["scale", "power-2"])


def hard_rows(rows, columns, dtype, device="cpu"):
    """Rows whose tiles are ordinary, full of zeros, tiny, huge, with one outlier, or of one number alone."""
    x = torch.randn(rows, columns, generator=exact_inputs.generator("cpu", 3))
    finfo = torch.finfo(dtype)
    x[1::7] = 0
    x[2::7] *= finfo.tiny
    x[3::7] *= finfo.max / 8
    x[4::7, 1::50] *= 1000
    x[5::7] = 3.1
    x[6::7] *= finfo.tiny * finfo.eps * 4  # subnormal in every dtype
    return x.clamp(finfo.min, finfo.max).to(dtype).to(device)


def tiles_of(x):
    """x [P,K] cut into tiles of 128 columns, in Python's order, for a definition that shares nothing with float8.py."""
    return [[row[k : k + 128] for k in range(0, len(row), 128)] for row in x]


@DTYPES
@POWER_2
def test_each_number_is_the_nearest_of_its_tile(dtype, power_2_scale):
    x = hard_rows(14, 300, dtype)
    scaled = float8.quantize_rows(x, power_2_scale)
    assert scaled.values_PK.dtype == torch.float8_e4m3fn and scaled.values_PK.is_contiguous()
    assert scaled.scales_PC.shape == (14, 3) and scaled.scales_PC.dtype == torch.float32
    for row, (tiles, values) in enumerate(zip(tiles_of(x.double()), tiles_of(scaled.values_PK.double()))):
        for c, (tile, stored) in enumerate(zip(tiles, values)):
            decode = scaled.scales_PC[row, c].double()
            largest = tile.abs().max()
            if largest == 0:
                assert decode == 1 and not stored.any()
                continue
            # The largest number takes the end of e4m3's range; with powers of two at least its half.
            at_least = 447 if not power_2_scale else 224
            if largest > 1e-36:
                assert at_least * decode <= largest <= 449 * decode
            # Nearest: half a unit of the three bits behind the point, or half of the smallest subnormal, 2**-9.
            error = (stored * decode - tile).abs()
            assert (error <= torch.maximum(tile.abs() / 16, decode * 2**-10) * (1 + 1e-6)).all()


def test_power_2_scales_are_powers_of_two():
    scales = float8.quantize_rows(hard_rows(14, 300, torch.float32), True).scales_PC
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_tile_that_is_not_finite_has_no_scale(number):
    x = torch.ones(3, 256)
    x[1, 130] = number
    scales = float8.quantize_rows(x).scales_PC
    assert torch.isnan(scales).nonzero().tolist() == [[1, 1]]
    assert torch.isnan(float8.quantize_rows(x).dequantized()[1, 128:]).all()


@DTYPES
@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 144, 80), (1, 16, 400), (2, 0, 16), (0, 16, 16)])
def test_weights_have_a_scale_for_each_block(dtype, shape):
    w = exact_inputs.exact_values(*shape, dtype=dtype, device="cpu", seed=1)
    natural, transposed = float8.quantize_weights(w), float8.quantize_weights(w, transpose=True)
    assert torch.equal(natural.values_ENK.float(), transposed.values_ENK.transpose(1, 2).float())
    assert torch.equal(natural.scales, transposed.scales.transpose(1, 2))
    for e in range(shape[0]):
        for i in range(0, shape[1], 128):
            for j in range(0, shape[2], 128):
                block = w[e, i : i + 128, j : j + 128]
                alone = float8.quantize_weights(block[None])
                assert torch.equal(alone.scales[0, 0, 0], natural.scales[e, i // 128, j // 128])
                assert torch.equal(alone.values_ENK[0].float(), natural.values_ENK[e, i : i + 128, j : j + 128].float())


SIZES = {"uneven": [130, 0, 1, 64, 127, 128, 17, 300], "one-row": [1] * 40, "one-group": [256], "empty": [0, 9, 0], "all-empty": [0] * 3,
         "no-experts": [], "beyond-the-rows": [5, 2**31 - 1, 3, -2, 7]}


@DTYPES
@POWER_2
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_k_blocks_have_a_scale_for_each_column(dtype, power_2_scale, sizes):
    rows, columns = 8 + sum(size for size in sizes if 0 < size < 1000), 48
    x = hard_rows(rows, columns, dtype)
    scaled = float8.quantize_k_blocks(x, torch.tensor(sizes, dtype=torch.int64), power_2_scale)
    blocks = -(-rows // 128) + len(sizes)
    assert scaled.values_BKR.shape == (blocks, columns, 128) and scaled.values_BKR.dtype == torch.float8_e4m3fn
    assert scaled.values_BKR.is_contiguous() and scaled.scales_BK.shape == (blocks, columns) and scaled.scales_BK.dtype == torch.float32
    row = block = 0
    for size, filled in zip(sizes, scaled.filled_rows_E.tolist(), strict=True):
        end = min(row + max(size, 0), rows)
        assert filled == -(-(end - row) // 128) * 128
        for first in range(row, end, 128):
            # A column of a k-block is quantised as a row of as many numbers.
            alone = float8.quantize_rows(x[first : min(first + 128, end)].t(), power_2_scale)
            count = alone.values_PK.size(1)
            assert torch.equal(scaled.scales_BK[block], alone.scales_PC[:, 0])
            assert torch.equal(scaled.values_BKR[block, :, :count].view(torch.uint8), alone.values_PK.view(torch.uint8))
            assert not scaled.values_BKR[block, :, count:].view(torch.uint8).any(), "the k-block is not filled up with zeros"
            assert torch.equal(scaled.dequantized()[block * 128 : block * 128 + count], alone.dequantized().t())
            block += 1
        row = end
    assert block <= blocks


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_column_that_is_not_finite_has_no_scale(number):
    x = torch.ones(300, 32)
    x[140, 3] = number
    scales = float8.quantize_k_blocks(x, torch.tensor([10, 290])).scales_BK
    assert torch.isnan(scales).nonzero().tolist() == [[2, 3]]


def test_the_recipe_says_what_it_does_not_take():
    for name in ("power_2_scale", "float8_weight_gradients"):
        with pytest.raises(TypeError, match=f"Float8BlockScaling: {name}: expected a bool, got 1"):
            Float8BlockScaling(**{name: 1})


def test_each_recipe_has_an_engine():
    recipes = [Float8BlockScaling(power_2, weights) for weights in (False, True) for power_2 in (False, True)]
    assert [recipe.engine for recipe in recipes] == list(engines.FLOAT8_ENGINES)
    for recipe in recipes:
        for engine in engines.FLOAT8_ENGINES[recipe.engine]:
            assert (engine.power_2_scale, engine.float8_weight_gradients) == (recipe.power_2_scale, recipe.float8_weight_gradients)


# ------------------------------------------------------------------------------------------------------------ the kernels


def assert_same_numbers(got, expected, where=slice(None)):
    values, scales = (got.values_PK, got.scales_PC) if hasattr(got, "values_PK") else (got.values_ENK, got.scales)
    of_values, of_scales = (expected.values_PK, expected.scales_PC) if hasattr(got, "values_PK") else (expected.values_ENK, expected.scales)
    assert torch.equal(scales.cpu()[where], of_scales[where])
    assert torch.equal(values.cpu()[where].view(torch.uint8), of_values[where].view(torch.uint8))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("shape", [(14, 128), (257, 16), (1, 144), (700, 2048), (0, 64)])
def test_kernel_of_rows(dtype, power_2_scale, shape):
    x = hard_rows(*shape, dtype)
    exact_inputs.poison("cuda")
    assert_same_numbers(kernels.quantize_rows(x.cuda(), power_2_scale), float8.quantize_rows(x, power_2_scale))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("tokens, hidden, experts, top_k, align", [(70, 144, 4, 2, 16), (33, 2048, 8, 8, 128), (300, 16, 5, 1, 1),
                                                                    (9, 128, 12, 12, 8), (1, 4096, 8, 3, 1)])
def test_kernel_of_the_gather(dtype, power_2_scale, tokens, hidden, experts, top_k, align):
    x, ids = hard_rows(tokens, hidden, dtype), exact_inputs.expert_ids(tokens, experts, top_k, device="cpu", seed=5)
    plan = RoutingPlan.from_experts(ids, experts, align=align)
    on_gpu = RoutingPlan.from_experts(ids.cuda(), experts, align=align)
    expected = kernels.quantize_gathered(x, plan.slot_map, power_2_scale)
    exact_inputs.poison("cuda")
    in_use = int(plan.offsets_E1[-1])  # rows behind the last expert may hold anything
    assert_same_numbers(kernels.quantize_gathered(x.cuda(), on_gpu.slot_map, power_2_scale), expected, slice(in_use))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 144, 80), (1, 16, 400), (8, 768, 2048), (0, 16, 16)])
@pytest.mark.parametrize("transpose", [False, True], ids=["natural", "transposed"])
def test_kernel_of_weights(dtype, power_2_scale, shape, transpose):
    w = hard_rows(shape[0] * shape[1], shape[2], dtype).view(shape)
    expected = float8.quantize_weights(w, power_2_scale, transpose)
    exact_inputs.poison("cuda")
    assert_same_numbers(kernels.quantize_weights(w.cuda(), power_2_scale, transpose), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_kernels_see_what_is_not_finite(number):
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    x[1, 130] = number
    scales = kernels.quantize_rows(x.cuda(), False).scales_PC.cpu()
    assert torch.isnan(scales).nonzero().tolist() == [[1, 1]]
    for transpose in (False, True):
        weights = kernels.quantize_weights(x.cuda()[None], False, transpose)
        assert torch.isnan(weights.scales.cpu()).nonzero().tolist() == [[0, 1, 0] if transpose else [0, 0, 1]]


def assert_same_k_blocks(got, expected):
    """The same numbers in the k-blocks that are in use; the others may hold anything."""
    assert torch.equal(got.filled_rows_E.cpu(), expected.filled_rows_E)
    assert got.values_BKR.shape == expected.values_BKR.shape and got.scales_BK.shape == expected.scales_BK.shape
    in_use = int(expected.filled_rows_E.sum()) // 128
    assert torch.equal(got.scales_BK[:in_use].cpu(), expected.scales_BK[:in_use])
    assert torch.equal(got.values_BKR[:in_use].cpu().view(torch.uint8), expected.values_BKR[:in_use].view(torch.uint8))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("columns", [16, 144, 2048])
@pytest.mark.parametrize("sizes_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_kernel_of_k_blocks(dtype, power_2_scale, sizes, columns, sizes_dtype):
    x = hard_rows(8 + sum(size for size in sizes if 0 < size < 1000), columns, dtype)
    sizes_E = torch.tensor(sizes, dtype=sizes_dtype)
    expected = float8.quantize_k_blocks(x, sizes_E, power_2_scale)
    exact_inputs.poison("cuda")
    assert_same_k_blocks(kernels.quantize_k_blocks(x.cuda(), sizes_E.cuda(), power_2_scale), expected)


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("tokens, hidden, experts, top_k, align", [(70, 144, 4, 2, 16), (33, 2048, 8, 8, 128), (300, 16, 5, 1, 1),
                                                                    (500, 256, 70, 3, 8), (1, 4096, 8, 3, 1), (300, 80, 3, 3, 1)])
def test_kernel_of_gathered_k_blocks(dtype, power_2_scale, tokens, hidden, experts, top_k, align):
    x, ids = hard_rows(tokens, hidden, dtype), exact_inputs.expert_ids(tokens, experts, top_k, device="cpu", seed=5)
    plan = RoutingPlan.from_experts(ids, experts, align=align)
    on_gpu = RoutingPlan.from_experts(ids.cuda(), experts, align=align)
    expected = kernels.quantize_gathered_k_blocks(x, plan.slot_map, plan.padded_counts_E, power_2_scale)
    exact_inputs.poison("cuda")
    assert_same_k_blocks(kernels.quantize_gathered_k_blocks(x.cuda(), on_gpu.slot_map, on_gpu.padded_counts_E, power_2_scale), expected)


@pytest.mark.gpu
def test_a_slot_that_does_not_exist_is_a_row_of_zeros():
    x = torch.ones(4, 32, dtype=torch.bfloat16, device="cuda")
    slot_of_row = torch.tensor([0, -1, 8, 2**31 - 1, -(2**31), 7], dtype=torch.int32, device="cuda")
    slots = SlotMap(row_of_slot_TK=torch.full((4, 2), -1, dtype=torch.int32, device="cuda"), slot_of_row_P=slot_of_row)
    exact_inputs.poison("cuda")
    rows = kernels.quantize_gathered_k_blocks(x, slots, torch.tensor([6], device="cuda"), False).dequantized()
    assert rows[:128].ne(0).any(1).nonzero().flatten().tolist() == [0, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_kernel_of_k_blocks_sees_what_is_not_finite(number):
    x = torch.ones(300, 32, dtype=torch.bfloat16)
    x[140, 3] = number
    sizes = torch.tensor([10, 290])
    scales = kernels.quantize_k_blocks(x.cuda(), sizes.cuda(), False).scales_BK[:4].cpu()
    assert torch.isnan(scales).nonzero().tolist() == [[2, 3]]
