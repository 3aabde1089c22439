"""The kernels for groups of few rows read gate and up in every layout where they lie, with the bits of the separate layout, and add biases.

Shape suffixes: E experts, H hidden, F ffn hidden, G columns of pairs, 2F, P rows.
"""

import functools

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import hopper
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.own_kernels import HOPPER_FEW_ROWS
from gbmoe.plain import plain_activation
from gbmoe.plan import RoutingPlan
from gbmoe.separate_weights import SeparateWeights
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.conftest import assert_as_accurate_as
from tests.engines.test_few_rows import DTYPES, HOPPER, SIZES, each_group, few, in_memory, numbers_that_cancel, poisoned  # noqa: F401
from tests.scattered import scattered

pytestmark = pytest.mark.slow

# (H, F): less than a tile and a k-block, tiles and k-blocks that are not full, many of them
SHAPES = {"cuda": [(8, 8), (72, 136), (584, 40), (2048, 768), (776, 2056)], "cpu": [(8, 8), (296, 40), (584, 72)]}
CLAMPED = "clamped_silu 1.702 7.0 7.0 1.0"


def amid_nan(stack_ERC, before, after):
    """A copy whose rows have so many columns of NaN before and after them, which no kernel may read."""
    experts, rows, columns = stack_ERC.shape
    whole = torch.full((experts, rows, before + columns + after), float("nan"), dtype=stack_ERC.dtype, device=stack_ERC.device)
    return whole[:, :, before:before + columns].copy_(stack_ERC)


def transposed(w1_EFH, v1_EFH):
    """[E,H,F] each."""
    return [None if w is None else amid_nan(w.mT, 8, 16).mT for w in (w1_EFH, v1_EFH)]


def in_halves(w1_EFH, v1_EFH):
    """[E,H,2F], gate first."""
    ffn, whole = w1_EFH.size(1), amid_nan(torch.cat([w1_EFH, w1_EFH if v1_EFH is None else v1_EFH], 1).mT, 8, 16).mT
    return whole[:, :ffn], None if v1_EFH is None else whole[:, ffn:]


def in_lists(w1_EFH, v1_EFH):
    """A tensor [H,F] for each expert."""
    return [None if w is None else SeparateWeights(scattered(w.mT.contiguous())).transpose(1, 2) for w in (w1_EFH, v1_EFH)]


def in_two_lists(w1_EFH, v1_EFH):
    """With tables of their own."""
    return [None if w is None else SeparateWeights(scattered(w.mT.contiguous(), step)).transpose(1, 2)
            for w, step in ((w1_EFH, 16), (v1_EFH, 64))]


LIES = {lies.__name__: lies for lies in (transposed, in_halves, in_lists, in_two_lists)}


def interleaved(w1_EFH, v1_EFH):
    """[E,2F,H], rows of gate and up in turns."""
    return torch.stack([w1_EFH, v1_EFH], 2).flatten(1, 2)


def arguments(device, dtype, sizes, hidden, ffn):
    """(x, w1, v1, sizes) whose sums have other bits in any other order."""
    x, w = numbers_that_cancel(device, dtype, sum(sizes), hidden, len(sizes), 2 * ffn)
    w = w / 64
    return x, w[:, :ffn].contiguous(), w[:, ffn:].contiguous(), torch.tensor(sizes, device=device)


def cases(device):
    return [(sizes, hidden, ffn) for sizes in SIZES[device.type] if sum(sizes) for hidden, ffn in SHAPES[device.type]
            if len(sizes) < 100 or hidden < 600]


def assert_same(results, expected, in_use):
    for got, wanted in zip(results, expected, strict=True):
        assert (got is None and wanted is None) or torch.equal(got[:in_use], wanted[:in_use])


@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("lies", LIES)
def test_transposed_weights_were_multiplied_and_activated_apart(few, dtype, glu, lies):  # noqa: F811
    device, few = few
    for sizes, hidden, ffn in cases(device):
        if (lies == "in_two_lists" and 2 * len(sizes) > 256) or (lies == "in_lists" and len(sizes) > 256):
            continue
        x, w1, v1, on_device = arguments(device, dtype, sizes, hidden, ffn)
        v1 = v1 if glu else None
        expected = few.up(in_memory(x), w1, v1, on_device, CLAMPED if glu else "silu", True)
        assert all(bool(one.isfinite().all()) for one in expected if one is not None)
        exact_inputs.poison(device)
        for save in (True, False):
            results = few.up(in_memory(x), *LIES[lies](w1, v1), on_device, CLAMPED if glu else "silu", save)
            assert_same(results, expected if save else (expected[0], None, None), sum(sizes))


@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lies", ["in place", "in lists", "copied"])
def test_pairs_were_multiplied_and_activated_apart(few, dtype, lies, biased):  # noqa: F811
    """Gate and up in turns: a has the bits of two matrices, and the pairs those of h and g, with biases too."""
    device, few = few
    for sizes, hidden, ffn in cases(device):
        if len(sizes) > 256 and lies == "in lists":  # more than a table has
            continue
        x, w1, v1, on_device = arguments(device, dtype, sizes, hidden, ffn)
        bias = torch.randn(len(sizes), 2 * ffn, device=device).to(dtype) if biased else None
        of_two = (bias[:, ::2].contiguous(), bias[:, 1::2].contiguous()) if biased else (None, None)
        w = interleaved(w1, v1)
        if lies != "copied":
            w = amid_nan(w.mT, 16, 8).mT if lies == "in place" else SeparateWeights(scattered(w.mT.contiguous())).transpose(1, 2)
        a, h, g = few.up(in_memory(x), w1, v1, on_device, CLAMPED, True, *of_two)
        exact_inputs.poison(device)
        got, pairs = few.up_pairs(in_memory(x), w, bias, on_device, CLAMPED, True)
        assert_same([got, pairs[:, ::2], pairs[:, 1::2]], [a, h, g], sum(sizes))
        alone, nothing = few.up_pairs(in_memory(x), w, bias, on_device, CLAMPED, False)
        assert_same([alone], [a], sum(sizes))
        assert nothing is None


@pytest.mark.memcheck
@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_transposed_weights_against_float64(few, activation):  # noqa: F811
    """Also of rows that are read from their tokens, with slots that are dropped and rows that are padding."""
    device, few = few
    hidden, ffn, draw = 72, 40, functools.partial(exact_inputs.exact_values, dtype=torch.bfloat16, device=device)
    ids = torch.tensor([[0, 3], [3, -1], [4, 3], [-1, -1], [0, 4], [3, 0]], dtype=torch.int32, device=device)
    plan, x = RoutingPlan.from_experts(ids, 5, align=4), draw(6, hidden, seed=1)
    w1, v1 = (draw(5, ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
    taken, sizes = plan.slot_of_row_P >= 0, plan.padded_counts_E.tolist()
    rows = torch.zeros(plan.num_rows, hidden, dtype=x.dtype, device=device)
    rows[taken] = x[plan.slot_of_row_P[taken].long() // 2]
    halves = in_halves(w1, v1)
    exact_inputs.poison(device)
    a, h, g = few.up(GatheredRows(x, plan.slot_map), *halves, plan.padded_counts_E, activation, True)
    b, pairs = few.up_pairs(GatheredRows(x, plan.slot_map), interleaved(w1, v1).mT.contiguous().mT, None, plan.padded_counts_E, activation,
                            True)
    in_use = taken[:sum(sizes)]
    for name, weights, got in (("h", w1, h), ("g", v1, g), ("h of pairs", w1, pairs[:, ::2]), ("g of pairs", v1, pairs[:, 1::2])):
        baseline, exact = (each_group(rows, weights, sizes, wide)[in_use] for wide in (torch.float32, torch.float64))
        assert_as_accurate_as(got[:sum(sizes)][in_use], baseline.to(got.dtype), exact, name)
    for got in (a, b):
        baseline, exact = (plain_activation.activate(h.to(wide), g.to(wide), activation)[:sum(sizes)][in_use]
                           for wide in (torch.float32, torch.float64))
        assert_as_accurate_as(got[:sum(sizes)][in_use], baseline.to(got.dtype), exact, "a")


@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("which", ["w1", "v1", "both"])
@pytest.mark.parametrize("lies", ["as it is", "transposed"])
def test_a_bias_was_added_to_a_product_that_was_rounded(few, dtype, which, lies):  # noqa: F811
    """In float32 and before, on Hopper with the bits of its large tiles; of another column's or group's bias nothing."""
    device, few = few
    sizes, (hidden, ffn) = SIZES[device.type][0], SHAPES[device.type][1]
    x, w1, v1, on_device = arguments(device, dtype, sizes, hidden, ffn)
    wide = torch.randn(len(sizes), 2 * ffn, device=device).to(dtype)
    biases = [bias if which in (name, "both") else None for name, bias in (("w1", wide[:, :ffn]), ("v1", wide[:, ffn:]))]
    weights = transposed(w1, v1) if lies == "transposed" else (w1, v1)
    exact_inputs.poison(device)
    a, h, g = few.up(in_memory(x), *weights, on_device, CLAMPED, True, *biases)
    for weight, bias, got in zip((w1, v1), biases, (h, g)):
        alone, own = (poisoned(sum(sizes), ffn, dtype=dtype, device=device) for _ in range(2))
        of_rows = torch.zeros(sum(sizes), ffn, device=device) if bias is None else bias.float().repeat_interleave(on_device, 0)
        few.gemm(x, weight, on_device, True, alone)
        few.gemm(x, weight, on_device, True, own, bias)
        assert torch.equal(own, got) and (bias is not None or torch.equal(own, alone))
        exact = each_group(x, weight, sizes, torch.float64) + of_rows
        assert_as_accurate_as(got, (each_group(x, weight, sizes, torch.float32) + of_rows).to(dtype), exact, which)
        if few is HOPPER_FEW_ROWS and bias is not None:
            assert torch.equal(got, hopper.biased_rows_gemm(x, weight, bias, on_device, True, splits=False))
    b, _, _ = few.up(in_memory(x), w1, v1, on_device, CLAMPED, False, *biases)
    assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("ffn", [8, 64, 4128])
def test_sums_of_another_cta_were_read_before_they_had_come(rows, ffn):
    """Of few terms, so that CTAs in pairs do little else than to exchange sums; also where one of a pair stores nothing. In a graph kernels
    begin before the one before them has ended."""
    device = torch.device("cuda")
    if reason := engines.ENGINES["hopper"].unavailable(device):
        pytest.skip(f"hopper: {reason}")
    x, w1, v1, on_device = arguments(device, torch.bfloat16, [rows, 0] * 24, 72, ffn)
    expected = HOPPER_FEW_ROWS.up(in_memory(x), w1, v1, on_device, CLAMPED, True)
    weights = transposed(w1, v1)
    for _ in range(20):
        exact_inputs.poison(device)
        assert_same(HOPPER_FEW_ROWS.up(in_memory(x), *weights, on_device, CLAMPED, True), expected, 24 * rows)
    graph, results = cuda_graphs.captured(
        lambda: [HOPPER_FEW_ROWS.up(in_memory(x), *weights, on_device, CLAMPED, True) for _ in range(4)])
    for _ in range(20):
        for result in results:
            result[0].fill_(float("nan"))
        graph.replay()
        for result in results:
            assert_same(result, expected, 24 * rows)


@pytest.mark.memcheck
def test_a_nan_of_one_column_stays_in_it(few):  # noqa: F811
    """Of gate or up, in the first and last columns and in the middle, in the first and last terms."""
    device, few = few
    sizes, (hidden, ffn) = SIZES[device.type][0], (72, 136)
    x, w1, v1, on_device = arguments(device, torch.bfloat16, sizes, hidden, ffn)
    expected = few.up(in_memory(x), w1, v1, on_device, "silu", True)
    hit = torch.zeros(2, ffn, dtype=torch.bool, device=device)
    for matrix, column, term in ((0, 0, 0), (1, 1, 71), (0, 31, 40), (1, 32, 8), (1, 63, 0), (0, 100, 71), (1, 135, 71)):
        (w1, v1)[matrix][:, column, term] = float("nan")
        hit[matrix, column] = True
    got = [few.up(in_memory(x), *lies(w1, v1), on_device, "silu", True) for lies in (transposed, in_halves)]
    a, pairs = few.up_pairs(in_memory(x), interleaved(w1, v1).mT.contiguous().mT, None, on_device, "silu", True)
    for results in (*got, (a, pairs[:, ::2], pairs[:, 1::2])):
        for result, wanted, columns in zip(results, expected, (hit.any(0), hit[0], hit[1])):
            assert bool(result[:, columns].isnan().all()) and torch.equal(result[:, ~columns], wanted[:, ~columns])


def test_sizes_beyond_the_rows_stay_inside_of_every_tensor(few):  # noqa: F811
    device, few = few
    for sizes in ([2**40, 5], [-7, 2**62, 3], [10, 10, 2**31]):
        x, w1, v1, _ = arguments(device, torch.bfloat16, [1] * len(sizes), 72, 40)
        on_device, guarded = torch.tensor(sizes, device=device), torch.full((13 + 64, 80), 7.0, dtype=torch.bfloat16, device=device)
        kept, rows = guarded[:13], x[:1].expand(13, -1).contiguous()
        few._launch_up(in_memory(rows), interleaved(w1, v1).mT.contiguous().mT, None, None, None, on_device, "silu",
                       rows.new_empty(13, 40), kept[:, ::2], kept[:, 1::2])
        assert bool((guarded[13:] == 7).all())


@pytest.mark.parametrize("name", ["tensor_core", pytest.param("hopper", marks=pytest.mark.gpu),
                                  pytest.param("hopper_batch_invariant", marks=pytest.mark.gpu)])
def test_engines_hand_every_layout_to_them(few, name, monkeypatch):  # noqa: F811
    """Without a copy, and with biases, before the activation and after it."""
    device, few = few
    engine = engines.ENGINES[name]
    if (few is HOPPER_FEW_ROWS) != name.startswith("hopper"):
        pytest.skip("the other's kernels")
    monkeypatch.setattr("gbmoe.engines.own_kernels.aligned", lambda tensor: tensor)
    x, w1, v1, on_device = arguments(device, torch.bfloat16, [1, 0, 2, 1], 72, 40)
    bias = torch.randn(4, 80, device=device).bfloat16()
    read, up, gemm = [], few.op("up"), few.op("gemm")
    monkeypatch.setattr(torch.ops.gbmoe_cuda, f"{few.prefix}_up", lambda *args: (read.append(args[3].data_ptr()), up(*args))[1])
    monkeypatch.setattr(torch.ops.gbmoe_cuda, f"{few.prefix}_gemm", lambda *args: (read.append(args[1].data_ptr()), gemm(*args))[1])
    pairs, halves, w2 = interleaved(w1, v1).mT.contiguous().mT, in_halves(w1, v1), w1
    a = engine.up(in_memory(x), *halves, on_device, "gelu", False)[0]
    of_pairs = engine.up_pairs(in_memory(x), pairs, None, on_device, "gelu", False)[0]
    assert torch.equal(a, of_pairs) and read == [halves[0].data_ptr(), pairs.data_ptr()]
    one, two = bias[:, ::2], bias[:, 1::2]
    a = engine.up_biased(in_memory(x), *halves, one, two, on_device, CLAMPED, True)[0]
    of_pairs = engine.up_pairs(in_memory(x), pairs, bias, on_device, CLAMPED, True)[0]
    y = engine.down_biased(a, w2, bias[:, :72], on_device)
    assert torch.equal(a, of_pairs) and torch.equal(y, engine.biased_product(a, w2, bias[:, :72], on_device))
    assert read[2:] == [halves[0].data_ptr(), pairs.data_ptr(), w2.data_ptr(), w2.data_ptr()]
    assert engine.adds_bias_in_kernel(4, w2)
