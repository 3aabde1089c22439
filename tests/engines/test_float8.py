"""Experts in blockwise-scaled e4m3: products against float64 products of what the numbers stand for, and layers against bfloat16."""

import contextlib
import copy
import dataclasses
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from gbmoe import (
    Arguments,
    ClampedSilu,
    Float8BlockScaling,
    RoutingPlan,
    WeightGradientSink,
    dMoE,
    engines,
    expert_mlp,
    float8,
    gmm,
    grouped_mlp,
    launch,
)
from gbmoe.engines import hopper
from gbmoe.engines.float8 import Float8
from gbmoe.float8 import ScaledKBlocks, ScaledRows, ScaledWeights, weight_cache
from gbmoe.plain import plain_plan
from gbmoe.slot_map import SlotMap
from gbmoe.testing import cuda_graphs, exact_inputs, oracle
from gbmoe.testing.accuracy import relative_error
from gbmoe.weight_layout import WeightLayout
from tests.conftest import assert_as_accurate_as, dtype_id
from tests.scattered import scattered
from tests.test_weight_layout import laid_out

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
RECIPES = pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8BlockScaling(power_2_scale=True)], ids=["scale", "power-2"])
WITH_WEIGHTS = Float8BlockScaling(float8_weight_gradients=True)
WEIGHTS = pytest.mark.parametrize("recipe", [Float8BlockScaling(), WITH_WEIGHTS], ids=["bf16-weights", "float8-weights"])
ALL_RECIPES = pytest.mark.parametrize(
    "recipe", [Float8BlockScaling(), Float8BlockScaling(power_2_scale=True), WITH_WEIGHTS, Float8BlockScaling(True, True)],
    ids=["scale", "power-2", "scale-weights", "power-2-weights"])
SIZES = {"uneven": [130, 0, 1, 64, 65, 128, 17, 300], "one-row": [1] * 70, "one-group": [1000], "empty": [0, 9, 0],
         "all-empty": [0] * 5}


def shapes(cpu, gpu):
    """The first ones on both devices, the others on a GPU alone."""
    both = [pytest.param("cuda", shape, marks=pytest.mark.gpu, id=f"cuda-{shape}") for shape in (*cpu, *gpu)]
    return pytest.mark.parametrize("device, shape", [pytest.param("cpu", shape, id=f"cpu-{shape}") for shape in cpu] + both,
                                   indirect=["device"])


@pytest.fixture
def device(request):
    if request.param == "cuda":
        reason = engines.FLOAT8_ENGINES["float8_block"][0].unavailable(torch.device("cuda"))
        if reason is not None:
            pytest.skip(f"float8_block: {reason}")
    exact_inputs.poison(request.param)
    return torch.device(request.param)


@pytest.fixture
def device_with_float8():
    """For tests that only a GPU can run."""
    reason = engines.FLOAT8_ENGINES["float8_block"][0].unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"float8_block: {reason}")
    exact_inputs.poison("cuda")


def engine_on(device, name="float8_block"):
    return engines.FLOAT8_ENGINES[name][0 if device.type == "cuda" else 1]


def values(*shape, seed, device, dtype=torch.bfloat16):
    return exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=seed)


# On a GPU also: a tile counter, and sums that go round the ring of stages; as many tiles along N as clusters of two may have odd ones.
@shapes(cpu=[(128, 256), (144, 400)], gpu=[(16, 16), (2048, 48), (512, 768), (4112, 512), (144, 3600)])
@HALVES
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("pairs", [1, 2])
def test_products_are_those_of_the_numbers_stored(device, dtype, shape, sizes, pairs):
    inner, columns = shape
    rows = sum(sizes) + 7
    a = [float8.quantize_rows(values(rows, inner, seed=i, device=device)) for i in range(pairs)]
    b = [float8.quantize_weights(values(len(sizes), columns, inner, seed=5 + i, device=device)) for i in range(pairs)]
    exact_inputs.poison(device)
    second = (a[1], b[1]) if pairs == 2 else ()
    out = torch.full((rows, columns), torch.nan, device=device, dtype=dtype)
    engine_on(device).scaled_product(a[0], b[0], torch.tensor(sizes, device=device), out, *second)
    in_use = sum(sizes)
    exact = sum(oracle.product(x.dequantized()[:in_use].double(), w.dequantized(), sizes, trans_b=True) for x, w in zip(a, b))
    assert_as_accurate_as(out[:in_use], exact.to(dtype), exact)
    assert torch.isnan(out[in_use:]).all(), "rows after the last group are written"


@shapes(cpu=[("silu", 256, 272), ("gelu", 144, 80)],
        gpu=[("gelu_tanh", 144, 256), ("relu", 4224, 256), ("relu_squared", 16, 1808), ("identity", 16, 8192)])
@HALVES
@RECIPES
@pytest.mark.parametrize("glu", [True, False], ids=["glu", "mlp"])
def test_the_first_product_quantizes_its_activation(device, dtype, recipe, glu, shape):
    (activation, hidden, ffn), sizes = shape, [130, 0, 1, 64, 65]
    tokens = sum(sizes)
    x = values(tokens, hidden, seed=1, device=device, dtype=dtype)
    w1, v1 = (values(len(sizes), ffn, hidden, seed=i, device=device, dtype=dtype) / 16 for i in (2, 3))
    ids = torch.arange(len(sizes), device=device).repeat_interleave(torch.tensor(sizes, device=device)).unsqueeze(1)
    plan = RoutingPlan.from_experts(ids, len(sizes))
    gathered = engines.base.GatheredRows(x, plan.slot_map)
    engine = engine_on(device, recipe.engine)
    exact_inputs.poison(device)
    a, h, g = engine.up(gathered, w1, v1 if glu else None, plan.padded_counts_E, activation, True)
    without, none_h, none_g = engine.up(gathered, w1, v1 if glu else None, plan.padded_counts_E, activation, False)
    assert none_h is None and none_g is None
    assert torch.equal(a.values_PK.view(torch.uint8), without.values_PK.view(torch.uint8)) and torch.equal(a.scales_PC, without.scales_PC)
    expected = launch.quantize_rows(launch.activate(h, g, activation), recipe.power_2_scale)
    # The activation's own kernel may round differently in the last place, which moves few numbers to a neighbour.
    assert torch.allclose(a.scales_PC, expected.scales_PC, rtol=2**-7 if not recipe.power_2_scale else 1)
    assert relative_error(a.dequantized(), launch.activate(h, g, activation).double()) < 0.04


def uneven_values(rows, columns, *, seed, device):
    """Values whose magnitude differs from column to column and along the rows, so that no scale stands for its neighbour.

    Along the rows it does so little that the tensor cores, which add in fewer bits than float32 has, add terms of about one magnitude.
    """
    of_columns, of_rows = (torch.arange(size, device=device) for size in (columns, rows))
    factors = torch.exp2(of_columns % 5 - 3.0) * (1 + of_rows.unsqueeze(1) // 100 % 3 / 4)
    return (values(rows, columns, seed=seed, device=device) * factors).to(torch.bfloat16)


# On a GPU also: sums that go round the ring of stages, and as many tiles that every CTA makes several.
@shapes(cpu=[(128, 256), (144, 80)], gpu=[(16, 16), (768, 2048), (80, 4112), (4112, 272)])
@HALVES
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_gradients_of_weights_are_those_of_the_numbers_stored(device, dtype, shape, sizes):
    features, columns = shape
    rows, sizes_E = sum(sizes) + 7, torch.tensor(sizes, device=device)
    a, b = (launch.quantize_k_blocks(uneven_values(rows, size, seed=i, device=device), sizes_E, False)
            for i, size in enumerate((features, columns)))
    exact_inputs.poison(device)
    out = torch.full((len(sizes), features, columns), torch.nan, device=device, dtype=dtype)
    assert engine_on(device, WITH_WEIGHTS.engine).scaled_weight_gradient(a, b, out) is out
    filled = a.filled_rows_E.tolist()
    exact = oracle.product(*(rows.dequantized()[: sum(filled)].double() for rows in (a, b)), filled, trans_a=True)
    assert_as_accurate_as(out, exact.to(dtype), exact)
    assert not out[sizes_E == 0].any()
    for made in (torch.full((len(sizes), 2 * features, columns), 7.0, device=device, dtype=dtype)[:, features:],
                 torch.full((len(sizes), features, 2 * columns), 7.0, device=device, dtype=dtype)[:, :, :columns]):
        around = made._base.clone()
        engine_on(device, WITH_WEIGHTS.engine).scaled_weight_gradient(a, b, made)
        assert torch.equal(made, out)
        made.fill_(7.0)
        assert torch.equal(made._base, around)  # what lies between its rows belongs to another part


@DEVICES
@RECIPES
@pytest.mark.parametrize("sizes", [[3] * 1100, [5, 2**31 - 1, 3, -2], [0, 2**40]], ids=["many-groups", "beyond-the-rows", "no-bound"])
@pytest.mark.parametrize("in_order", [True, False], ids=["rows", "tokens"])
def test_gradients_of_weights_of_any_sizes(device, recipe, sizes, in_order):
    rows = 3300
    left, x = uneven_values(rows, 32, seed=1, device=device), uneven_values(rows, 48, seed=2, device=device)
    slot_of_row = torch.randperm(rows, generator=exact_inputs.generator("cpu", 1)).int().to(device)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row.long()] = torch.arange(rows, dtype=torch.int32, device=device)
    gathered = engines.base.GatheredRows(None if in_order else x, SlotMap(row_of_slot.unsqueeze(1), slot_of_row), x if in_order else None)
    engine = engine_on(device, Float8BlockScaling(recipe.power_2_scale, True).engine)
    exact_inputs.poison(device)
    out = engine.weight_gradient(left, gathered, torch.tensor(sizes, device=device))
    right, bounded = x if in_order else x[slot_of_row.long()], plain_plan.bounded_counts(torch.tensor(sizes), rows)
    a, b = (float8.quantize_k_blocks(rows.cpu(), bounded, recipe.power_2_scale).dequantized().double() for rows in (left, right))
    filled = ((bounded + 127) // 128 * 128).tolist()
    exact = oracle.product(a[: sum(filled)], b[: sum(filled)], filled, trans_a=True)
    assert_as_accurate_as(out.cpu(), exact.to(out.dtype), exact)


@DEVICES
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("of_left", [True, False], ids=["left", "rows"])
def test_gradients_of_weights_show_what_is_not_finite(device, number, of_left):
    left, x = values(300, 32, seed=1, device=device), values(300, 48, seed=2, device=device)
    (left if of_left else x)[140, 7] = number
    sizes = torch.tensor([100, 150, 50], device=device)
    slots = RoutingPlan.from_counts(sizes, 300).slot_map
    out = engine_on(device, WITH_WEIGHTS.engine).weight_gradient(left, engines.base.GatheredRows(None, slots, x), sizes)
    seen = torch.isnan(out[1])
    assert (seen[7] if of_left else seen[:, 7]).all() and int(seen.sum()) == (48 if of_left else 32)
    assert torch.isfinite(out[[0, 2]]).all()


@DEVICES
@WEIGHTS
@pytest.mark.parametrize("in_order", [False, True], ids=["tokens", "rows"])
def test_gradients_of_weights_from_rows_quantised_once(device, recipe, in_order):
    """They are those of a recipe without float8_dispatch for a batch, and a gradient, of what e4m3 stands for. Nothing else changes."""
    tokens, hidden, ffn, experts, top_k = 90, 144, 96, 4, 1 if in_order else 2
    x, grad = (values(tokens, hidden, seed=seed, device=device) for seed in (1, 2))
    ids = torch.rand(tokens, experts, generator=exact_inputs.generator("cpu", 3)).topk(top_k).indices.to(device)
    plan = RoutingPlan.from_counts(torch.tensor([40, 0, 27, 23], device=device), tokens) if in_order \
        else RoutingPlan.from_experts(ids, experts, align=16)
    weights, biases = values(tokens, top_k, seed=4, device=device), [values(experts, n, seed=5, device=device) for n in (ffn, hidden, ffn)]
    matrices = [values(experts, ffn, hidden, seed=seed, device=device) / 8 for seed in (6, 7, 8)]

    def gradients(x, grad, recipe):
        leaves = [t.clone().requires_grad_() for t in (x, *matrices, *biases)]
        out = expert_mlp(leaves[0], plan, *leaves[1:4], weights_TK=weights, fp8_recipe=recipe,
                         **dict(zip(("w1_bias", "w2_bias", "v1_bias"), leaves[4:])))
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    once = dataclasses.replace(recipe, float8_dispatch=True)
    got, plain = gradients(x, grad, once), gradients(x, grad, recipe)
    stand_ins = [float8.quantize_rows(t.cpu()).dequantized().bfloat16().to(device) for t in (x, grad)]
    expected = gradients(*stand_ins, recipe)
    assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1])
    for number, (one, other, without) in enumerate(zip(got[2:], expected[2:], plain[2:])):
        assert torch.equal(one, other), number
        assert not torch.equal(one, without) or number in (3, 5), number  # biases of the first products have no row of either


# Scales of a and b, and the numbers in e4m3 that they scale: the product of the scales leaves float32's range, which that of what they
# stand for does not; or one scale alone is near an end of it. Factors with many bits show what a subnormal product has lost.
FAR_SCALES = {"overflow": (1.3 * 2.0**65, 1.7 * 2.0**64, 2.0**-9), "underflow": (1.3 * 2.0**-74, 1.7 * 2.0**-75, 64.0),
              "large-and-small": (1.3 * 2.0**110, 1.7 * 2.0**-115, 1.0), "small-and-large": (1.3 * 2.0**-115, 1.7 * 2.0**110, 1.0)}


def far_numbers(*shape, largest, seed, device):
    """Non-negative numbers in e4m3, so that sums lose nothing to cancellation, and every fifth line, whose sums are 0, of zeros."""
    drawn = torch.randint(0, 8, shape, generator=exact_inputs.generator("cpu", seed)).float() * largest
    drawn[..., ::5, :] = 0
    return drawn.to(float8.FLOAT8).to(device)


def far_scales(*shape, scale, every, device):
    """1, and the scale for each `every`-th."""
    scales = torch.ones(shape)
    scales.view(-1)[::every] = scale
    return scales.to(device)


def assert_near_products(out, exact):
    """To bfloat16, and to what the tensor cores keep of a sum of 128 terms."""
    torch.testing.assert_close(out.double().cpu(), exact.cpu(), rtol=0.02, atol=2.0**-133)


# On a GPU a CTA's first tile is looked through by other threads than those after it.
FEW_AND_MANY_TILES = pytest.mark.parametrize(
    "device, times", [pytest.param("cpu", 1, id="cpu"), pytest.param("cuda", 1, marks=pytest.mark.gpu, id="cuda"),
                      pytest.param("cuda", 60, marks=pytest.mark.gpu, id="many-tiles-cuda")], indirect=["device"])


@FEW_AND_MANY_TILES
@pytest.mark.parametrize("columns", [384, 208], ids=["many columns", "few columns"])
@pytest.mark.parametrize("every", [1, 3, 1009], ids=["all", "some", "few"])
@pytest.mark.parametrize("kind", FAR_SCALES)
def test_the_product_of_two_scales_left_the_range_of_float32(device, times, kind, every, columns):
    """0 times infinity was NaN, and a product with a scale of few bits was wrong by some percent."""
    (of_a, of_b, largest), sizes, inner = FAR_SCALES[kind], [130, 0, 67] * times, 400
    rows, experts = sum(sizes), len(sizes)
    a = float8.ScaledRows(far_numbers(rows, inner, largest=largest, seed=1, device=device),
                          far_scales(rows, 4, scale=of_a, every=every, device=device))
    b = float8.ScaledWeights(far_numbers(experts, columns, inner, largest=largest, seed=2, device=device),
                             far_scales(experts, -(-columns // 128), 4, scale=of_b, every=every, device=device))
    exact_inputs.poison(device)
    out = torch.full((rows, columns), torch.nan, device=device, dtype=torch.bfloat16)
    engine_on(device).scaled_product(a, b, torch.tensor(sizes, device=device), out)
    assert_near_products(out, oracle.product(a.dequantized().double(), b.dequantized().double(), sizes, trans_b=True))


@FEW_AND_MANY_TILES
@pytest.mark.parametrize("every", [1, 3, 1009], ids=["all", "some", "few"])
@pytest.mark.parametrize("kind", FAR_SCALES)
def test_the_product_of_two_scales_left_the_range_in_gradients_of_weights(device, times, kind, every):
    (of_a, of_b, largest), blocks, shape = FAR_SCALES[kind], [2, 0, 1] * times, (144, 272)
    of_scale = {144: of_a, 272: of_b}
    a, b = (float8.ScaledKBlocks(far_numbers(sum(blocks), size, 128, largest=largest, seed=size, device=device),
                                 far_scales(sum(blocks), size, scale=of_scale[size], every=every, device=device),
                                 torch.tensor([128 * count for count in blocks], dtype=torch.int32, device=device)) for size in shape)
    exact_inputs.poison(device)
    out = torch.full((len(blocks), *shape), torch.nan, device=device, dtype=torch.bfloat16)
    engine_on(device, WITH_WEIGHTS.engine).scaled_weight_gradient(a, b, out)
    filled = a.filled_rows_E.tolist()
    assert_near_products(out, oracle.product(*(rows.dequantized().double() for rows in (a, b)), filled, trans_a=True))


@FEW_AND_MANY_TILES
@pytest.mark.parametrize("glu", [True, False], ids=["glu", "mlp"])
def test_a_product_of_0_by_large_scales_was_nan(device, times, glu):
    """The first product of an expert: rows of 3e24 by weights of 3e24 where all terms are 0."""
    rows = 130 * times
    x, w1 = torch.zeros(rows, 144, device=device, dtype=torch.bfloat16), torch.zeros(1, 528, 144, device=device, dtype=torch.bfloat16)
    x[:, 0], w1[0, :, 1] = 3e24, 3e24
    sizes = torch.tensor([rows], device=device)
    gathered = engines.base.GatheredRows(None, RoutingPlan.from_counts(sizes, rows).slot_map, x)
    a, h, g = engine_on(device).up(gathered, w1, w1 if glu else None, sizes, "identity", True)
    assert not h.any() and (g is None or not g.any())
    assert not a.dequantized().any()


@FEW_AND_MANY_TILES
@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("far", [1e-35, 1e36, 0.0, float("nan")])
def test_a_far_scale_changed_no_other_result(device, times, far, pairs):
    """Tiles that are multiplied carefully have the same bits wherever the product of scales is a normal number."""
    sizes = torch.tensor([130, 0, 67], device=device).repeat(times)
    rows, inner, columns, experts = 197 * times, 400, 384, 3 * times
    a = float8.quantize_rows(values(rows, inner, seed=1, device=device))
    b = float8.quantize_weights(values(experts, columns, inner, seed=2, device=device))
    b = dataclasses.replace(b, scales=b.scales * (2.0**-30 if far < 1 else 2.0**30))

    def product(a):
        out = torch.full((rows, columns), torch.nan, device=device, dtype=torch.bfloat16)
        return engine_on(device).scaled_product(a, b, sizes, out, *((a, b) if pairs == 2 else ()))

    scales_PC = a.scales_PC.clone()
    scales_PC[::197, 1] = far
    others = torch.arange(rows, device=device) % 197 != 0
    assert torch.equal(product(dataclasses.replace(a, scales_PC=scales_PC))[others], product(a)[others])


@FEW_AND_MANY_TILES
@pytest.mark.parametrize("far", [1e-35, 1e36, 0.0, float("nan")])
def test_a_far_scale_changed_no_other_gradient_of_weights(device, times, far):
    sizes = torch.tensor([130, 0, 67], device=device).repeat(times)
    a, b = (launch.quantize_k_blocks(values(197 * times, size, seed=size, device=device), sizes, False) for size in (144, 272))
    b = dataclasses.replace(b, scales_BK=b.scales_BK * (2.0**-30 if far < 1 else 2.0**30))

    def product(a):
        out = torch.full((len(sizes), 144, 272), torch.nan, device=device, dtype=torch.bfloat16)
        return engine_on(device, WITH_WEIGHTS.engine).scaled_weight_gradient(a, b, out)

    scales_BK = a.scales_BK.clone()
    scales_BK[::2, 5] = far
    others = torch.arange(144, device=device) != 5
    assert torch.equal(product(dataclasses.replace(a, scales_BK=scales_BK))[:, others], product(a)[:, others])


@DEVICES
def test_a_scale_of_0_by_a_large_one_was_nan(device):
    """A sum times the large one may be infinite, which 0 made NaN of."""
    ones_PK, ones_ENK = (torch.full(shape, 448.0, device=device).to(float8.FLOAT8) for shape in ((130, 128), (1, 128, 128)))
    for of_a, of_b in ((0.0, 1e38), (1e38, 0.0)):
        a = ScaledRows(ones_PK, torch.full((130, 1), of_a, device=device))
        b = ScaledWeights(ones_ENK, torch.full((1, 1, 1), of_b, device=device))
        out = torch.full((130, 128), torch.nan, device=device, dtype=torch.bfloat16)
        assert not engine_on(device).scaled_product(a, b, torch.tensor([130], device=device), out).any()


@DEVICES
def test_a_scale_of_few_bits_lost_what_a_large_one_restores(device):
    """2^-149 by 2^22: a sum times the first one alone has lost its bits."""
    lines = far_numbers(130, 128, largest=1.0, seed=1, device=device)
    units = torch.zeros(1, 128, 128, device=device)
    units[0, :, 0] = 1.0
    for of_a, of_b in ((2.0**-149, 2.0**22), (2.0**22, 2.0**-149)):
        a = ScaledRows(lines, torch.full((130, 1), of_a, device=device))
        b = ScaledWeights((units * 1.5).to(float8.FLOAT8), torch.full((1, 1, 1), of_b, device=device))
        out = torch.full((130, 128), torch.nan, device=device, dtype=torch.bfloat16)
        engine_on(device).scaled_product(a, b, torch.tensor([130], device=device), out)
        assert torch.equal(out, (lines.double()[:, :1] * 1.5 * 2.0**-127).expand(130, 128).to(torch.bfloat16))


@DEVICES
@WEIGHTS
def test_rows_are_quantized_once_for_all_gradients_of_weights(device, recipe, monkeypatch):
    _, layer = layers(device, recipe)
    calls = []
    for name in ("quantize_k_blocks", "quantize_gathered_k_blocks", "activate_backward_k_blocks"):
        original = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *args, name=name, original=original: calls.append(name) or original(*args))
    step(layer, torch.randn(40, 1, 256, device=device, dtype=torch.bfloat16))
    # The activation's result and the gradients of both pre-activations; the gradient of the output and x.
    expected = ["activate_backward_k_blocks", "quantize_gathered_k_blocks", "quantize_gathered_k_blocks"]
    assert sorted(calls) == (expected if recipe is WITH_WEIGHTS else [])


@DEVICES
def test_gmm_of_gradients_of_weights(device):
    a, b, sizes = values(300, 32, seed=1, device=device), values(300, 48, seed=2, device=device), torch.tensor([130, 0, 166], device=device)
    exact = oracle.product(a[:296].double(), b[:296].double(), [130, 0, 166], trans_a=True)
    for name in ("float8_block", "float8_block_weights"):
        out = torch.full((3, 32, 48), 7.0, dtype=torch.bfloat16, device=device)
        result = engines.product(a, b, sizes, trans_a=True, engine=name, out=out)
        assert result is out and not out[1].any()
        assert (relative_error(out, exact) > 0.01) == (name == "float8_block_weights") and relative_error(out, exact) < 0.06
        added = engines.product(a, b, sizes, trans_a=True, engine=name, out=out.clone(), accumulate=True)
        assert torch.allclose(added.float(), 2 * out.float(), rtol=2**-7)
        assert torch.equal(gmm(a[:296], b[:296], sizes, trans_a=True, engine=name), out)


def lines_of_any_scale(lines, columns, *, of_left, device):
    """[lines, columns] in e4m3. Of three lines one has numbers everywhere, one tiny ones, and one numbers where those of the other side
    have zeros; so its products with these are 0, whatever their scales."""
    line, column = torch.arange(lines, device=device).unsqueeze(1), torch.arange(columns, device=device)
    x = values(lines, columns, seed=1 + of_left, device=device, dtype=torch.float32) * torch.where(line % 3 == 1, 2**-8, 64)
    return torch.where((line % 3 == 2) & (column % 2 == int(of_left)), 0, x).clamp(-448, 448).to(float8.FLOAT8)


def any_scales(lines, tiles, *, device):
    """[lines, tiles], a magnitude for each line: from 1e-39, the scale of tiny numbers, to 1e36, that of the largest."""
    exponent = torch.arange(lines, dtype=torch.float64, device=device).unsqueeze(1) * 31 % 75 - 39
    return (10 ** (exponent + torch.arange(tiles, dtype=torch.float64, device=device) / 8)).float()


def assert_near_where_in_range(out, exact, magnitude):
    """`out` is near the exact sums where not even a partial sum is out of range; `magnitude` has the sums of the terms' magnitudes, of
    which the tensor cores lose a part."""
    info = torch.finfo(out.dtype)
    smallest_subnormal = info.smallest_normal * info.eps
    in_range = magnitude < info.max * 0.99
    near = (out.double() - exact).abs() <= magnitude / 128 + smallest_subnormal
    wrong = in_range & ~near
    assert not wrong.any(), f"{int(wrong.sum())} of {int(in_range.sum())}: {out[wrong][:4].tolist()}, exact {exact[wrong][:4].tolist()}"
    assert in_range.sum() > out.numel() / 3 and (in_range & (magnitude > smallest_subnormal * 100)).any()


@DEVICES
@HALVES
@pytest.mark.parametrize("pairs", [1, 2])
def test_products_in_range_of_scales_whose_product_is_not(device, dtype, pairs):
    """The product of two scales may be infinite, 0 or subnormal where the result is in range: 0 * inf was NaN."""
    sizes, columns, inner = [77, 0, 150], 1296, 272
    rows, runs, tiles = sum(sizes), -(-columns // 128), -(-inner // 128)
    lines_a = lines_of_any_scale(rows, inner, of_left=True, device=device)
    lines_b = lines_of_any_scale(len(sizes) * columns, inner, of_left=False, device=device).view(-1, columns, inner)
    scales_a, scales_b = any_scales(rows, tiles, device=device), any_scales(len(sizes) * runs, tiles, device=device)
    a = [ScaledRows(lines_a, scales_a.roll(i, 0)) for i in range(pairs)]
    b = [ScaledWeights(lines_b, scales_b.roll(i, 0).view(-1, runs, tiles)) for i in range(pairs)]
    exact_inputs.poison(device)
    out = torch.full((rows, columns), torch.nan, device=device, dtype=dtype)
    engine_on(device).scaled_product(a[0], b[0], torch.tensor(sizes, device=device), out, *((a[1], b[1]) if pairs == 2 else ()))

    def product(of):
        total = 0
        for x, w in zip(a, b):
            scale_x = x.scales_PC.double().repeat_interleave(128, 1)[:, :inner]
            scale_w = w.scales.double().repeat_interleave(128, 1)[:, :columns].repeat_interleave(128, 2)[..., :inner]
            total += oracle.product(of(x.values_PK.double() * scale_x), of(w.values_ENK.double() * scale_w), sizes, trans_b=True)
        return total

    assert_near_where_in_range(out, product(torch.clone), product(torch.abs))


@DEVICES
@HALVES
def test_gradients_of_weights_in_range_of_scales_whose_product_is_not(device, dtype):
    filled, features, columns = torch.tensor([256, 0, 128], dtype=torch.int32, device=device), 144, 272
    a, b = (ScaledKBlocks(lines_of_any_scale(4 * size, 128, of_left=of_left, device=device).view(4, size, 128),
                          any_scales(size, 4, device=device).t().contiguous(), filled)
            for size, of_left in ((features, True), (columns, False)))
    exact_inputs.poison(device)
    out = torch.full((3, features, columns), torch.nan, device=device, dtype=dtype)
    engine_on(device, WITH_WEIGHTS.engine).scaled_weight_gradient(a, b, out)
    exact, magnitude = (oracle.product(
        *(made_of((x.values_BKR.double() * x.scales_BK.double().unsqueeze(-1)).transpose(1, 2).reshape(512, -1))[:384] for x in (a, b)),
        filled.tolist(), trans_a=True) for made_of in (torch.clone, torch.abs))
    assert_near_where_in_range(out, exact, magnitude)


@DEVICES
@ALL_RECIPES
@pytest.mark.parametrize("of_a, of_b", [(3e24, 3e24), (1e38, 1e38), (1e-20, 1e-14), (1e-30, 1e-7), (1e-37, 1.0)])
def test_gmm_of_the_largest_and_the_smallest_numbers(device, recipe, of_a, of_b):
    """0 where all products are 0, and near where the result is in range."""
    a, b = (torch.zeros(128, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    a[:, 0], b[:, 1] = of_a, of_b
    a[1], b[2] = 0, 0
    sizes = torch.tensor([128], device=device)

    def products():
        yield gmm(a, b.unsqueeze(0), sizes, trans_b=True, engine=recipe.engine)
        yield gmm(a.t().contiguous(), b.t().contiguous(), sizes, trans_a=True, engine=recipe.engine)[0]

    assert not any(product.any() for product in products())
    a[:, 1] = a[:, 0]
    if of_a < 1:
        assert all(torch.allclose(product.double(), a.double() @ b.double().t(), rtol=1 / 8, atol=0) for product in products())
    b[:, 0] = -b[:, 1]  # the terms of a k-block cancel each other before they are multiplied by scales
    in_float8 = list(products())[: 1 + recipe.float8_weight_gradients]
    assert not any(product.any() for product in in_float8)


def layers(device, recipe, **changes):
    torch.manual_seed(0)
    experts = 8 if torch.device(device).type == "cuda" else 3
    arguments = dict(hidden_size=256, ffn_hidden_size=384, moe_num_experts=experts, moe_top_k=2, mlp_type="glu", activation_fn=F.silu,
                     fp16=False, bf16=True, bias=False, device=device) | changes
    plain = dMoE(Arguments(**arguments))
    scaled = dMoE(Arguments(**arguments, fp8_recipe=recipe))
    scaled.load_state_dict(plain.state_dict())
    return plain, scaled


def step(layer, x):
    x = x.detach().requires_grad_()
    out = layer(x)
    out.float().square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad = None
    return {"out": out.detach(), "x": x.grad, **grads}


@pytest.mark.pairs
@DEVICES
@ALL_RECIPES
@pytest.mark.parametrize("changes", [{}, {"mlp_type": "mlp"}, {"activation_fn": F.mish},
                                     {"moe_top_k": 8, "moe_num_experts": 8, "ffn_hidden_size": 80}],
                         ids=["glu", "mlp", "callable", "every-expert"])
def test_a_layer_is_near_the_one_in_bfloat16(device, recipe, changes):
    plain, scaled = layers(device, recipe, **changes)
    x = torch.randn(300, 1, 256, device=device, dtype=torch.bfloat16)
    expected, results = step(plain, x), step(scaled, x)
    for name, result in results.items():
        # Each number of e4m3 is off by 2.6 % (root mean square), each product by 3.7 %, and each result passes through up to four.
        assert relative_error(result, expected[name].double()) < 0.12, name


@pytest.mark.gpu
@ALL_RECIPES
@pytest.mark.parametrize("glu", [True, False], ids=["glu", "mlp"])
def test_the_kernels_agree_with_plain_pytorch(recipe, glu):
    device = torch.device("cuda")
    exact_inputs.poison(device)
    _, on_cpu = layers("cpu", recipe, mlp_type="glu" if glu else "mlp")
    on_gpu = copy.deepcopy(on_cpu).cuda()
    x = torch.randn(300, 1, 256, dtype=torch.bfloat16)
    expected, results = step(on_cpu, x), step(on_gpu, x.cuda())
    for name, result in results.items():
        # A number that the other side rounds to its neighbour in 16 bits may be rounded to its neighbour in e4m3, too.
        assert relative_error(result.cpu(), expected[name].double()) < (0.05 if recipe.float8_weight_gradients else 0.03), name


@DEVICES
@WEIGHTS
def test_runs_have_the_same_bits(device, recipe):
    _, layer = layers(device, recipe)
    x = torch.randn(300, 1, 256, device=device, dtype=torch.bfloat16)
    first = step(layer, x)
    exact_inputs.poison(device)
    second = step(layer, x)
    assert all(torch.equal(first[name], second[name]) for name in first)


@DEVICES
@WEIGHTS
def test_no_tokens_and_experts_without_tokens(device, recipe):
    _, layer = layers(device, recipe, moe_num_experts=8)
    nothing = step(layer, torch.zeros(0, 1, 256, device=device, dtype=torch.bfloat16))
    assert nothing["out"].shape == (0, 1, 256) and not nothing["experts.mlp.w1"].any()
    one = step(layer, torch.randn(1, 1, 256, device=device, dtype=torch.bfloat16))
    used = one["experts.mlp.w2"].view(8, -1).abs().amax(1) > 0
    assert int(used.sum()) == 2 and torch.isfinite(one["x"]).all()


@DEVICES
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(device, number):
    x = values(64, 256, seed=1, device=device)
    x[3, 7] = number
    w1, w2 = (values(1, 256, 256, seed=i, device=device) for i in (2, 3))
    plan = RoutingPlan.from_experts(torch.zeros(64, 1, dtype=torch.int64, device=device), 1)
    out = expert_mlp(x, plan, w1, w2, fp8_recipe=Float8BlockScaling())
    assert torch.isnan(out[3]).all() and torch.isfinite(out[:3]).all() and torch.isfinite(out[4:]).all()


def test_an_outlier_costs_its_own_tile_alone():
    x = values(4, 512, seed=1, device="cpu")
    usual = float8.quantize_rows(x).dequantized()
    x[:, 5] = 2**20
    scaled = float8.quantize_rows(x).dequantized()
    assert torch.equal(scaled[:, 128:], usual[:, 128:])
    assert (scaled[:, 5] == 2**20).all() and scaled[:, :128].count_nonzero() == 4


@DEVICES
def test_gmm_writes_to_its_output(device):
    a, b, sizes = values(6, 32, seed=1, device=device), values(1, 32, 16, seed=2, device=device), torch.tensor([4], device=device)
    out = torch.full((6, 16), 7.0, dtype=torch.bfloat16, device=device)
    result = engines.product(a, b, sizes, engine="float8_block", out=out)
    assert result.data_ptr() == out.data_ptr() and (out[4:] == 7).all()
    assert relative_error(out[:4], a[:4].double() @ b[0].double()) < 0.06
    added = engines.product(a, b, sizes, engine="float8_block", out=out.clone(), accumulate=True)
    assert torch.allclose(added[:4].float(), 2 * out[:4].float(), rtol=2**-7)


@DEVICES
@WEIGHTS
def test_grouped_mlp(device, recipe):
    w1, w2, v1 = (values(3, 64, 32, seed=i, device=device) for i in range(3))
    x, counts = values(9, 32, seed=5, device=device), torch.tensor([4, 0, 3], device=device)
    results, gradients = [], []
    for fp8_recipe in (None, recipe):
        leaf, *weights = (t.clone().requires_grad_() for t in (x, w1, w2, v1))
        out = grouped_mlp(leaf, counts, *weights, fp8_recipe=fp8_recipe)
        out.float().square().sum().backward()
        results.append((out, leaf.grad))
        gradients.append([w.grad for w in weights])
    for expected, result in zip(*results):
        assert 0.001 < relative_error(result, expected.double()) < 0.12 and not result[7:].any()
    for expected, result in zip(*gradients):
        assert 0.001 < relative_error(result, expected.double()) < 0.12 and not result[1].any()


@DEVICES
@WEIGHTS
def test_a_compiled_layer_is_the_layer(device, recipe):
    _, layer = layers(device, recipe)
    x = torch.randn(60, 1, 256, device=device, dtype=torch.bfloat16)
    expected = step(layer, x)
    results = step(torch.compile(layer, backend="aot_eager", fullgraph=True), x)
    assert all(torch.equal(result, expected[name.removeprefix("_orig_mod.")]) for name, result in results.items())


@pytest.mark.gpu
@WEIGHTS
def test_a_graph_is_replayed_with_other_sizes(recipe):
    device = torch.device("cuda")
    exact_inputs.poison(device)
    _, layer = layers(device, recipe)
    layer.router.layer.weight.requires_grad_(False)
    x = torch.randn(300, 1, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    before = layer.router(x)[2].clone()

    weights = [layer.experts.mlp.w1, layer.experts.mlp.w2, layer.experts.mlp.v1]

    def run():
        for leaf in (x, *weights):
            leaf.grad = None
        out = layer(x)
        out.backward(torch.ones_like(out))
        return out

    graph, out = cuda_graphs.captured(run)
    with torch.no_grad():
        x.copy_(torch.randn_like(x) * (torch.arange(256, device=device) % 3))
    assert not torch.equal(layer.router(x)[2], before)
    gradients = [leaf.grad for leaf in (x, *weights)]
    graph.replay()
    got, got_gradients = out.clone(), [gradient.clone() for gradient in gradients]
    assert torch.equal(got, run())
    assert all(torch.equal(gradient, leaf.grad) for gradient, leaf in zip(got_gradients, (x, *weights)))


# ------------------------------------------------------------------------------------------------- weights quantised once


@pytest.fixture
def quantizations(monkeypatch):
    """The names of the functions that quantise weights, once for each call."""
    calls = []

    def count(name, function):
        monkeypatch.setattr(launch, name, lambda *args: calls.append(name) or function(*args))

    for name in ("quantize_weights", "quantize_weights_both_ways"):
        count(name, getattr(launch, name))
    return calls


@DEVICES
@RECIPES
@pytest.mark.parametrize("mlp_type", ["glu", "mlp"])
def test_micro_batches_share_the_weights_that_a_context_keeps(device, recipe, mlp_type, quantizations):
    _, layer = layers(device, recipe, mlp_type=mlp_type)
    weights = 3 if mlp_type == "glu" else 2
    batches = torch.randn(3, 100, 1, 256, device=device, dtype=torch.bfloat16)
    expected = [step(layer, x) for x in batches]
    assert quantizations == ["quantize_weights_both_ways"] * (weights * len(batches))
    quantizations.clear()
    with float8.cached_weights(layer):
        results = [step(layer, x) for x in batches]
        with torch.no_grad():
            assert torch.equal(layer(batches[0]), expected[0]["out"])
        assert quantizations == ["quantize_weights_both_ways"] * weights
        with torch.no_grad():
            layer.experts.mlp.w1.mul_(0.5)
        changed = step(layer, batches[0])
        assert len(quantizations) == weights + 1
    assert all(torch.equal(got[name], want[name]) for got, want in zip(results, expected) for name in want)
    quantizations.clear()
    assert all(torch.equal(value, changed[name]) for name, value in step(layer, batches[0]).items())
    assert quantizations == ["quantize_weights_both_ways"] * weights


@DEVICES
@pytest.mark.parametrize("kind", ["parts", "lists", "lists in a buffer"])
def test_a_context_keeps_parts_of_tensors_and_lists(device, kind, quantizations):
    """A list in one buffer is read as a stack, of which torch counts no changes of the list's tensors: they were not seen."""
    layout = WeightLayout("gate_first", down_transposed=True)
    stacks = laid_out(layout, *(values(3, 48, 32, seed=seed, device=device) for seed in (1, 2, 3)))[:2]
    lying = {"parts": lambda w: [w.clone()], "lists": scattered, "lists in a buffer": lambda w: [*w.clone()]}[kind]
    parameters = [list(map(torch.nn.Parameter, lying(w))) for w in stacks]
    weights, every = [of_stack[0] if kind == "parts" else of_stack for of_stack in parameters], [*parameters[0], *parameters[1]]
    plan = RoutingPlan.from_experts(torch.arange(80, device=device).view(40, 2) % 3, 3)
    x = values(40, 32, seed=4, device=device).requires_grad_()

    def run(*weights):
        out = expert_mlp(x, plan, *weights, layout=layout, fp8_recipe=Float8BlockScaling())
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    expected = run(*stacks)
    quantizations.clear()
    assert all(map(torch.equal, run(*weights), expected))
    assert quantizations == ["quantize_weights_both_ways"] * 3  # for forward and backward
    quantizations.clear()
    with float8.cached_weights(every):
        for _ in range(2):
            assert all(map(torch.equal, run(*weights), expected))
        assert quantizations == ["quantize_weights_both_ways"] * 3
        with torch.no_grad():
            parameters[0][-1].mul_(-2)
            stacks[0][0 if kind == "parts" else -1:].mul_(-2)
        changed = run(*weights)
        assert quantizations == ["quantize_weights_both_ways"] * 5  # gate and up
    assert all(map(torch.equal, changed, run(*stacks))) and not torch.equal(changed[0], expected[0])
    with float8.cached_weights(every, check=True), pytest.raises(RuntimeError, match=r"cached_weights: weights\[0\]"):
        run(*weights)
        parameters[0][-1].data.mul_(3)
        run(*weights)


@DEVICES
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_layer_whose_weights_a_fused_optimizer_changes(device, optimizer):
    """Within a context that spans steps, each step is the one without a context."""
    _, expected_layer = layers(device, Float8BlockScaling())
    layer = copy.deepcopy(expected_layer)
    batches = torch.randn(3, 50, 1, 256, device=device, dtype=torch.bfloat16)

    def train(layer):
        stepper = optimizer(layer.parameters(), lr=0.1, fused=True)
        for x in batches:
            for half in x.split(25):
                layer(half.requires_grad_()).float().square().sum().backward()
            stepper.step()
            stepper.zero_grad()
            yield layer(x).detach()

    with float8.cached_weights(layer, check=True):
        results = list(train(layer))
    assert all(torch.equal(*pair) for pair in zip(results, train(expected_layer), strict=True))


@DEVICES
@ALL_RECIPES
@pytest.mark.parametrize("mlp_type", ["glu", "mlp"])
def test_weights_that_forward_keeps_for_backward(device, recipe, mlp_type, quantizations):
    """They have the bits of those that backward quantises, and nothing is kept where no gradient of rows is to come."""
    _, keeping = layers(device, recipe, mlp_type=mlp_type)
    _, other = layers(device, dataclasses.replace(recipe, keep_weights=False), mlp_type=mlp_type)
    other.load_state_dict(keeping.state_dict())
    weights = 3 if mlp_type == "glu" else 2
    x = torch.randn(100, 1, 256, device=device, dtype=torch.bfloat16)
    kept, quantised_anew = step(keeping, x), step(other, x)
    assert quantizations == ["quantize_weights_both_ways"] * weights + ["quantize_weights"] * (2 * weights)
    assert all(torch.equal(kept[name], quantised_anew[name]) for name in kept)
    quantizations.clear()
    keeping(x).sum().backward()  # x needs no gradient, so that backward multiplies by w2 alone
    assert quantizations == ["quantize_weights"] * (weights + 1)


@DEVICES
def test_kept_weights_are_freed_once_they_have_been_used(device, monkeypatch):
    _, layer = layers(device, Float8BlockScaling())
    memories, alive = [], []
    quantize, gradient, two_gradients = launch.quantize_weights_both_ways, Float8.weight_gradient, Float8.two_weight_gradients

    def remember(w_EFH, power_2_scale, of_both):
        memories.extend(weakref.ref(tensor.untyped_storage()) for tensor in of_both if tensor is not None)
        return quantize(w_EFH, power_2_scale, of_both)

    def count(self, *args):
        alive.append(sum(memory() is not None for memory in memories))
        return gradient(self, *args)

    def count_two(self, *args):
        two_gradients(self, *args)
        alive.extend([sum(memory() is not None for memory in memories)] * 2)

    monkeypatch.setattr(launch, "quantize_weights_both_ways", remember)
    monkeypatch.setattr(Float8, "weight_gradient", count)
    monkeypatch.setattr(Float8, "two_weight_gradients", count_two)
    out = layer(torch.randn(50, 1, 256, device=device, dtype=torch.bfloat16, requires_grad=True))
    assert len(memories) == 3
    out.float().sum().backward()
    assert alive == [2, 0, 0]  # w2's has been used, then w1's and v1's
    alive.clear()
    memories.clear()
    out = checkpoint(layer, torch.randn(50, 1, 256, device=device, dtype=torch.bfloat16, requires_grad=True), use_reentrant=False)
    assert len(memories) == 3 and all(memory() is None for memory in memories)
    out.float().sum().backward()
    assert alive == [2, 0, 0]


@DEVICES
def test_the_operator_with_kept_weights(device):
    x, w1, w2, v1 = (exact_inputs.exact_values(*shape, dtype=torch.bfloat16, device=device, seed=seed).requires_grad_()
                     for seed, shape in enumerate(((12, 32), (3, 48, 32), (3, 48, 32), (3, 48, 32))))
    plan = RoutingPlan.from_experts(torch.arange(24, device=device).view(12, 2) % 3, 3)
    torch.library.opcheck(torch.ops.gbmoe.expert_mlp.default, (
        x, None, plan.row_of_slot_TK, plan.slot_of_row_P, plan.host_sizes(), w1, w2, v1, None, None, None, "silu", "float8_block",
        True, False, True, 1.0, "separate"))


@DEVICES
def test_forward_inside_of_a_context_and_backward_behind_it(device):
    _, layer = layers(device, Float8BlockScaling())
    x = torch.randn(50, 1, 256, device=device, dtype=torch.bfloat16)
    expected = step(layer, x)
    leaf = x.clone().requires_grad_()
    with float8.cached_weights(layer):
        out = layer(leaf)
    out.float().square().sum().backward()
    assert torch.equal(out, expected["out"]) and torch.equal(leaf.grad, expected["x"])


@DEVICES
def test_weights_that_autocast_casts_are_not_kept(device, quantizations):
    """Their copies would stay in memory, one for each forward."""
    _, layer = layers(device, Float8BlockScaling(), bf16=False)
    x = torch.randn(50, 1, 256, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16), float8.cached_weights(layer):
        for _ in range(2):
            layer(x).float().sum().backward()
    assert quantizations == ["quantize_weights_both_ways"] * 6  # for each forward's own backward


@DEVICES
def test_a_context_of_other_weights_changes_nothing(device, quantizations):
    _, layer = layers(device, Float8BlockScaling())
    x = torch.randn(50, 1, 256, device=device, dtype=torch.bfloat16)
    with float8.cached_weights([torch.zeros(3, device=device)]):
        step(layer, x)
    assert quantizations == ["quantize_weights_both_ways"] * 3


@DEVICES
def test_contexts_do_not_compile_a_layer_again_and_again(device):
    """Once within contexts and once outside, however many there are."""
    _, layer = layers(device, Float8BlockScaling())
    x = torch.randn(60, 1, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    compiled(x)
    for depth in (1, 2, 3, 1):
        with contextlib.ExitStack() as contexts:
            for _ in range(depth):
                contexts.enter_context(float8.cached_weights(layer))
            compiled(x)
    compiled(x)
    assert counter.frame_count == 2


@DEVICES
def test_a_compiled_layer_in_a_context_and_around_one(device, quantizations):
    _, layer = layers(device, Float8BlockScaling())
    x = torch.randn(60, 1, 256, device=device, dtype=torch.bfloat16)
    expected = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x)
    quantizations.clear()
    with float8.cached_weights(layer):
        assert torch.equal(compiled(x), expected) and torch.equal(compiled(x), expected)
    assert quantizations == ["quantize_weights_both_ways"] * 3

    @torch.compile(backend="aot_eager", fullgraph=True)
    def around(x):
        with float8.cached_weights(layer):
            return layer(x)

    assert torch.equal(around(x), expected)
    assert not weight_cache._caches


@pytest.mark.parametrize("recipe, kernel, first", [(Float8BlockScaling(), "activate_backward_scaled", 3),
                                                   (WITH_WEIGHTS, "activate_backward_k_blocks", 4)], ids=["bf16-weights", "float8-weights"])
def test_the_scaled_gradients_of_rows_are_freed_before_the_gradients_of_w1_and_v1(monkeypatch, recipe, kernel, first):
    rows, alive = [], []
    activate_backward, weight_gradient = getattr(launch, kernel), Float8.weight_gradient

    def watched(*args):
        result = activate_backward(*args)
        rows.extend(weakref.ref(scaled.values_PK) for scaled in result[first:])
        return result

    def watching(self, *args):
        alive.append(sum(row() is not None for row in rows))
        return weight_gradient(self, *args)

    monkeypatch.setattr(launch, kernel, watched)
    monkeypatch.setattr(Float8, "weight_gradient", watching)
    _, layer = layers("cpu", recipe)
    step(layer, torch.randn(50, 1, 256, dtype=torch.bfloat16))
    assert alive == [2, 0, 0]


GPT_OSS = WeightLayout("interleaved", up_transposed=True)


@DEVICES
@WEIGHTS
@pytest.mark.parametrize("added", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("layout", [GPT_OSS, WeightLayout("gate_first", down_transposed=True),
                                    WeightLayout("up_first", up_transposed=True)], ids=lambda layout: layout.code)
def test_gradients_of_parts_of_a_weight_were_products_that_were_copied(device, recipe, layout, added, monkeypatch):
    experts, hidden, ffn, tokens = 4, 64, 48, 150
    matrices = [values(experts, ffn, hidden, seed=seed, device=device) / 8 for seed in (1, 2, 3)]
    biases = [values(experts, ffn, seed=seed, device=device) for seed in (4, 5)]
    x, grad = (values(tokens, hidden, seed=seed, device=device) for seed in (6, 7))
    ids = torch.randint(-1, experts - 1, (tokens, 2), generator=exact_inputs.generator("cpu", 8)).to(device)  # the last has no rows
    plan, activation = RoutingPlan.from_experts(ids, experts), ClampedSilu(1.702, 7, 7, 1)

    def run(layout):
        parameters = laid_out(layout, *(w.clone() for w in matrices))
        of_biases = {"w1_bias": biases[0].clone(), "v1_bias": biases[1].clone()} if layout == WeightLayout() else {
            "w1_bias": layout.joined(*biases)}
        leaves = [t.requires_grad_() for t in (x.clone(), *parameters, *of_biases.values()) if t is not None]
        sink = None
        if added:
            sink = WeightGradientSink(*(None if w is None else torch.full_like(w, 2.0, dtype=torch.float32) for w in parameters))
        exact_inputs.poison(device)
        out = expert_mlp(leaves[0], plan, *parameters, activation=activation, layout=layout, fp8_recipe=recipe, gradient_sink=sink,
                         **of_biases)
        dx, *rest = torch.autograd.grad(out, leaves, grad, allow_unused=added)
        count = sum(w is not None for w in parameters)
        of_weights = [sink[name] for name in ("w1", "w2", "v1")[:count]] if added else rest[:count]
        return out.detach(), dx, of_weights, rest[count:]

    engine, made = engine_on(device, recipe.engine), set()
    name, of = ("scaled_weight_gradient", engine) if recipe is WITH_WEIGHTS else ("gmm", engine.unscaled)
    original = getattr(type(of), name)

    def watched(self, *args, **kwargs):
        out = args[-1] if recipe is WITH_WEIGHTS else kwargs.get("out", args[5] if len(args) > 5 else None)
        if out is not None:
            made.add(out.untyped_storage().data_ptr())
        return original(self, *args, **kwargs)

    def watched_gathering(*args):  # a GEMM that reads rows from the tokens
        made.add(args[5].untyped_storage().data_ptr())
        return gathering(*args)

    out, dx, of_weights, of_biases = run(WeightLayout())
    gathering = hopper.weight_gradient_gemm_gathered
    monkeypatch.setattr(hopper, "weight_gradient_gemm_gathered", watched_gathering)
    monkeypatch.setattr(type(of), name, watched)
    got_out, got_dx, got, got_biases = run(layout)
    assert torch.equal(got_out, out) and torch.equal(got_dx, dx)
    expected = [w for w in laid_out(layout, *of_weights) if w is not None]
    for one, other in zip((*got, *got_biases), (*expected, layout.joined(*of_biases)), strict=True):
        assert one.is_contiguous() and relative_error(one, other.double()) <= 4e-3  # sums may be made in another order
    if recipe is WITH_WEIGHTS and device.type == "cuda":
        assert all(map(torch.equal, got, expected))  # no sum is divided
    # What is added to a sink is a product of its own, unless a kernel adds in float32; gradients in 16 bits are the other engine's matter,
    # but that of pairs.
    in_place = not added if recipe is WITH_WEIGHTS else layout == GPT_OSS and (not added or device.type == "cuda")
    assert (got[0].untyped_storage().data_ptr() in made) or not in_place


@pytest.mark.gpu
def test_a_graph_captured_in_a_context_reads_the_weights_of_its_replay(device_with_float8):
    _, layer = layers("cuda", Float8BlockScaling())
    x = torch.randn(100, 1, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        with float8.cached_weights(layer):
            graph, out = cuda_graphs.captured(lambda: layer(x))
        layer.experts.mlp.w1.mul_(0.5)
        graph.replay()
        assert torch.equal(out, layer(x))


@pytest.mark.gpu
def test_streams_do_not_share_what_is_kept(device_with_float8, quantizations):
    _, layer = layers("cuda", Float8BlockScaling())
    x = torch.randn(100, 1, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), float8.cached_weights(layer):
        expected, stream = layer(x), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, expected) and len(quantizations) == 6


@pytest.mark.gpu
def test_kept_weights_take_two_bytes_for_each_number_until_the_context_ends(device_with_float8):
    _, layer = layers("cuda", Float8BlockScaling(), hidden_size=1024, ffn_hidden_size=1024)
    layer.eval()  # in training it keeps what the losses need
    x = torch.randn(4, 1, 1024, device="cuda", dtype=torch.bfloat16)
    numbers = sum(w.numel() for w in layer.experts.parameters())
    with torch.no_grad():
        layer(x)
        torch.cuda.empty_cache()  # torch counts up to 1 MiB more where a block that it has kept is a little too large
        before = torch.cuda.memory_allocated()
        with float8.cached_weights(layer):
            layer(x)
            assert 2 * numbers <= torch.cuda.memory_allocated() - before <= 2.01 * numbers
        assert torch.cuda.memory_allocated() <= before


def test_a_recipe_says_what_it_excludes():
    recipe = Float8BlockScaling()
    for changes, message in (({"engine": "reference"}, "engine: expected auto with a recipe"),
                             ({"mlp_impl": "bmm"}, "mlp_impl: expected 'gbmoe'"),
                             ({"batch_invariant": True}, "batch_invariant: expected False"),
                             ({"fp8_recipe": "hybrid"}, "recipe: expected a Float8BlockScaling, got str")):
        with pytest.raises((ValueError, TypeError), match=message):
            Arguments(**({"fp8_recipe": recipe} | changes))


@DEVICES
def test_what_is_not_taken_is_an_error(device):
    x, sizes = torch.zeros(8, 24, device=device, dtype=torch.bfloat16), torch.tensor([8], device=device)
    with pytest.raises(ValueError, match="multiples of 16, not 24"):
        gmm(x, x.new_zeros(1, 24, 16), sizes, engine="float8_block")
    plain, scaled = layers(device, Float8BlockScaling(), bf16=False)
    with pytest.raises(ValueError, match="Float8BlockScaling, cannot serve this product: takes bfloat16 and float16, not float32"):
        scaled(torch.zeros(8, 1, 256, device=device))
    with torch.autocast(device.type, torch.bfloat16):
        error = relative_error(scaled(torch.ones(8, 1, 256, device=device)), plain(torch.ones(8, 1, 256, device=device)).double())
    assert 0.001 < error < 0.12


def test_a_recipe_excludes_batch_invariance():
    x, plan = values(4, 32, seed=1, device="cpu"), RoutingPlan.from_experts(torch.zeros(4, 1, dtype=torch.int64), 1)
    w = values(1, 16, 32, seed=2, device="cpu")
    with pytest.raises(ValueError, match="expert_mlp: batch_invariant: expected False with fp8_recipe, got True"):
        expert_mlp(x, plan, w, w, fp8_recipe=Float8BlockScaling(), batch_invariant=True)


# ------------------------------------------------------------------------------------------------------- gmm with scales


def scaled_operands(device, rows=9, inner=144, columns=48, experts=3):
    a = float8.quantize_rows(values(rows, inner, seed=1, device=device))
    b = float8.quantize_weights(values(experts, columns, inner, seed=2, device=device))
    return a, b


@DEVICES
@HALVES
@pytest.mark.parametrize("sizes_on", ["cpu", "operands"])
def test_gmm_takes_scales(device, dtype, sizes_on):
    a, b = scaled_operands(device)
    sizes = [4, 0, 5]
    batch_sizes = torch.tensor(sizes, device="cpu" if sizes_on == "cpu" else device)
    call = functools.partial(gmm, a.values_PK, b.values_ENK, trans_b=True, scale_a=a.scales_PC, scale_b=b.scales, out_dtype=dtype)
    exact = oracle.product(a.dequantized().double(), b.dequantized(), sizes, trans_b=True)
    out = call(batch_sizes)
    assert_as_accurate_as(out, exact.to(dtype), exact)
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(batch_sizes), out)
    nothing = gmm(a.values_PK[:0], b.values_ENK, torch.zeros(3, dtype=torch.int64), trans_b=True, scale_a=a.scales_PC[:0], scale_b=b.scales)
    assert nothing.shape == (0, 48) and nothing.dtype == torch.bfloat16


def test_gmm_says_which_scales_it_takes():
    a, b = scaled_operands("cpu")
    sizes = torch.tensor([4, 0, 5])
    arguments = dict(a=a.values_PK, b=b.values_ENK, batch_sizes=sizes, trans_b=True, scale_a=a.scales_PC, scale_b=b.scales)
    for changes, error, message in (
        ({"scale_b": None}, TypeError, "scale_b: expected a tensor"),
        ({"trans_b": False}, ValueError, "trans_b: expected True with scales"),
        ({"engine": "reference"}, ValueError, "engine: expected 'auto' with scales, got 'reference'"),
        ({"batch_invariant": True}, ValueError, "batch_invariant: expected False with scales, got True"),
        ({"a": a.dequantized()}, TypeError, "a: expected dtype float8_e4m3fn"),
        ({"scale_a": a.scales_PC[:, :1]}, ValueError, r"scale_a: expected shape \[9, 2\], a scale for each 128, got \[9, 1\]"),
        ({"scale_b": b.scales.half()}, TypeError, "scale_b: expected dtype float32"),
        ({"out_dtype": torch.float32}, ValueError, "out_dtype: expected bfloat16 or float16"),
        ({"batch_sizes": torch.tensor([4, 0, 4])}, ValueError, "batch_sizes: expected sum"),
    ):
        with pytest.raises(error, match=message):
            gmm(**(arguments | changes))


def test_finite_rows_became_infinite_in_float16():
    """64,000 is 250 in e4m3 times 256, which is 256 times 256 when it is rounded to e4m3."""
    x, w = torch.full((20, 64), 64000.0).half(), torch.ones(2, 32, 64).half()
    plan = RoutingPlan.from_experts(torch.zeros(20, 1, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="with float8_dispatch and power_2_scale takes bfloat16"):
        expert_mlp(x, plan, w, w, fp8_recipe=Float8BlockScaling(power_2_scale=True, float8_dispatch=True))
