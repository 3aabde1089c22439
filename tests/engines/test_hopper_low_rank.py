"""Products with a second pair of operands of low rank on Hopper: its sums are added before anything is rounded, in every GEMM that takes
one."""

import pytest
import torch

import gbmoe
from gbmoe import engines
from gbmoe.engines import hopper_gemms
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.low_rank import LowRank
from gbmoe.testing import exact_inputs
from gbmoe.tuning.hopper_tiles import NARROW, SQUARE, WIDE, GemmConfig, SplitConfig
from tests.conftest import assert_as_accurate_as

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
REFERENCE = engines.ENGINES["reference"]
SIZES = [200, 0, 129, 64, 1, 400]
E, P = len(SIZES), sum(SIZES) + 40
RANKS = pytest.mark.parametrize("rank", [8, 64, 136])


@pytest.fixture(params=["hopper", "hopper_batch_invariant"])
def engine(request):
    reason = engines.ENGINES[request.param].unavailable(CUDA)
    if reason:
        pytest.skip(reason)
    return engines.ENGINES[request.param]


def draw(*shape, seed, scale=1.0, nan=False):
    """bfloat16; with `nan`, rows of no group are NaN."""
    made = exact_inputs.exact_values(*shape, dtype=torch.bfloat16, device=CUDA, seed=seed, scale=scale)
    if nan:
        made[sum(SIZES):] = float("nan")
    return made


def low_rank(rank, columns, seed=20, two=False):
    b = [draw(E, rank, columns, seed=seed + i, scale=exact_inputs.fan_in_scale(rank)) for i in range(2 if two else 1)]
    return LowRank(draw(P, rank, seed=seed + 2, nan=True), *b)


def wider(values, dtype):
    if isinstance(values, LowRank):
        return LowRank(*(wider(value, dtype) for value in values))
    return values.to(dtype) if isinstance(values, torch.Tensor) and values.is_floating_point() else values


def gathered(rows_PH, slots):
    return GatheredRows(None, slots, rows_PH)


def assert_accurate(method, engine, arguments, rows_at=None):
    """The method of the engine against the reference's in float64; float32's has the error that is allowed. `rows_at`: the argument that
    becomes GatheredRows."""
    sizes = torch.tensor(SIZES, device=CUDA)
    slots = gbmoe.RoutingPlan.from_counts(sizes, P).slot_map

    def run(of, dtype):
        given = [wider(argument, dtype) for argument in arguments(sizes)]
        if rows_at is not None:
            given[rows_at] = gathered(given[rows_at], slots)
        exact_inputs.poison(CUDA)
        results = getattr(of, method)(*given)
        results = results if isinstance(results, tuple) else (results,)
        return [result[:sum(SIZES)] for result in results if isinstance(result, torch.Tensor)]

    got, baseline, exact = run(engine, torch.bfloat16), run(REFERENCE, torch.float32), run(REFERENCE, torch.float64)
    assert len(got) == len(exact)
    for number, (one, of_float, wanted) in enumerate(zip(got, baseline, exact)):
        assert_as_accurate_as(one, of_float.to(torch.bfloat16), wanted, f"{method}, result {number}", factor=4.0)


@RANKS
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inner, columns", [(72, 136), (2048, 768), (4160, 512)])
def test_products(engine, rank, trans_b, bias, inner, columns):
    b = draw(E, *((columns, inner) if trans_b else (inner, columns)), seed=2, scale=exact_inputs.fan_in_scale(inner))
    of_bias, low = draw(E, columns, seed=3) if bias else None, low_rank(rank, columns)
    assert_accurate("product_low_rank", engine, lambda sizes: [
        draw(P, inner, seed=1, nan=True), b, of_bias, sizes, trans_b, low.rows_PR, low.b_ERN])


@pytest.mark.parametrize("config", [
    GemmConfig(SQUARE, 1, 2, ping_pong=True), GemmConfig(SQUARE, 2, 1, ping_pong=True), GemmConfig(SQUARE, ping_pong=True),
    GemmConfig(WIDE), GemmConfig(WIDE, 1, 2), GemmConfig(NARROW, 1, 2),
    GemmConfig(WIDE, 1, 2, tile_counter=True, split=SplitConfig(per_sm=4, min_k_blocks=1, cost=0, most=8))], ids=str)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("pairs", [1, 2])
def test_every_tile(config, trans_b, pairs):
    """Also where sums are cut along K: the pair is a part of the last split. Both factors may lie either way."""
    if engines.ENGINES["hopper"].unavailable(CUDA):
        pytest.skip("no Hopper")
    inner, columns, rank, sizes = 328, 264, 72, torch.tensor(SIZES, device=CUDA)
    a = [draw(P, inner, seed=i, nan=True) for i in range(pairs)]
    shape = (columns, inner) if trans_b else (inner, columns)
    b = [draw(E, *shape, seed=5 + i, scale=exact_inputs.fan_in_scale(inner)) for i in range(pairs)]
    low = low_rank(rank, columns)
    other = low._replace(b_ERN=low.b_ERN.transpose(1, 2).contiguous().transpose(1, 2))
    exact = torch.zeros(sum(SIZES), columns, dtype=torch.float64, device=CUDA)
    for rows, matrices, transposed in [*((x, w, trans_b) for x, w in zip(a, b)), (low.rows_PR, low.b_ERN, False)]:
        for of_rows, matrix, part in zip(rows[:sum(SIZES)].double().split(SIZES), matrices.double(), exact.split(SIZES)):
            part += of_rows @ (matrix.t() if transposed else matrix)
    results = []
    for each in (low, other):
        exact_inputs.poison(CUDA)
        results.append(torch.full((P, columns), float("nan"), dtype=torch.bfloat16, device=CUDA))
        hopper_gemms.launch_rows(config, a[0], b[0], *((a[1], b[1]) if pairs == 2 else (None, None)), sizes, trans_b, results[-1], each)
    assert torch.equal(*(result[:sum(SIZES)] for result in results)) and bool(results[0][sum(SIZES):].isnan().all())
    assert_as_accurate_as(results[0][:sum(SIZES)], exact.float().to(torch.bfloat16), exact)


@RANKS
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("along_f", [False, True])
@pytest.mark.parametrize("inner, ffn", [(72, 136), (2048, 768)])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_up(engine, rank, gate, along_f, inner, ffn, activation):
    weights = [draw(E, ffn, inner, seed=2 + i, scale=exact_inputs.fan_in_scale(inner)) for i in range(2)]
    if along_f:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    assert_accurate("up_low_rank", engine, lambda sizes: [
        draw(P, inner, seed=1, nan=True), weights[0], weights[1] if gate else None, None, None, sizes, activation, True,
        low_rank(rank, ffn, two=gate)], rows_at=0)


@RANKS
@pytest.mark.parametrize("bias", [False, True])
def test_pairs(engine, rank, bias):
    weights = draw(E, 72, 512, seed=2, scale=exact_inputs.fan_in_scale(72)).transpose(1, 2)
    of_bias = draw(E, 512, seed=3) if bias else None
    assert_accurate("up_pairs_low_rank", engine, lambda sizes: [
        draw(P, 72, seed=1, nan=True), weights, of_bias, sizes, "silu", True, low_rank(rank, 512)], rows_at=0)


@RANKS
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("along_f", [False, True])
@pytest.mark.parametrize("hidden, ffn", [(72, 136), (2048, 768)])
def test_down_backward(engine, rank, gate, along_f, hidden, ffn):
    w2 = draw(E, ffn, hidden, seed=2, scale=exact_inputs.fan_in_scale(hidden))
    if along_f:
        w2 = w2.transpose(1, 2).contiguous().transpose(1, 2)
    assert_accurate("down_backward_low_rank", engine, lambda sizes: [
        draw(P, hidden, seed=1, nan=True), w2, sizes, draw(P, ffn, seed=4), draw(P, ffn, seed=5) if gate else None, None, "silu",
        low_rank(rank, ffn)], rows_at=0)


@RANKS
def test_down_backward_of_pairs(engine, rank):
    w2 = draw(E, 768, 2048, seed=2, scale=exact_inputs.fan_in_scale(2048))
    assert_accurate("down_backward_pairs_low_rank", engine, lambda sizes: [
        draw(P, 2048, seed=1, nan=True), w2, sizes, draw(P, 1536, seed=4), None, "silu", low_rank(rank, 768)], rows_at=0)


@RANKS
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("along_f", [False, True])
def test_up_backward(engine, rank, gate, along_f):
    weights = [draw(E, 768, 520, seed=2 + i, scale=exact_inputs.fan_in_scale(768)) for i in range(2)]
    if along_f:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    assert_accurate("up_backward_low_rank", engine, lambda sizes: [
        draw(P, 768, seed=1, nan=True), weights[0], draw(P, 768, seed=4, nan=True) if gate else None, weights[1] if gate else None, sizes,
        low_rank(rank, 520)])


def test_other_rows_change_no_bit():
    """Of a batch-invariant engine, whose few rows are computed by the kernels that take the pair, too."""
    engine = engines.ENGINES["hopper_batch_invariant"]
    if engine.unavailable(CUDA):
        pytest.skip("no Hopper")
    b, low = draw(E, 768, 2048, seed=2, scale=exact_inputs.fan_in_scale(2048)), low_rank(16, 768)
    a = draw(P, 2048, seed=1, nan=True)
    whole = engine.product_low_rank(a, b, None, torch.tensor(SIZES, device=CUDA), True, low.rows_PR, low.b_ERN)
    few = engine.product_low_rank(a[:3], b, None, torch.tensor([3, 0, 0, 0, 0, 0], device=CUDA), True, low.rows_PR[:3], low.b_ERN)
    assert torch.equal(few, whole[:3])
