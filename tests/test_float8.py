"""The numbers of blockwise-scaled e4m3, to the bit: as they are defined, and on a GPU as the kernels compute them."""

import pytest
import torch

from gbmoe import Float8BlockScaling, RoutingPlan, float8, kernels
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


def test_the_recipe_says_what_it_does_not_take():
    with pytest.raises(TypeError, match="Float8BlockScaling: power_2_scale: expected a bool, got 1"):
        Float8BlockScaling(power_2_scale=1)


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
