"""The kernels as wide as a rank (csrc/low_rank/): on a GPU, and on a CPU that emulates one; and what the engines hand them.

Shape suffixes: E experts, P rows of all groups, K inner, N columns, R rank, T tokens.
"""

import ctypes
import functools

import pytest
import torch

from gbmoe import engines, launch
from gbmoe.engines import own_kernels
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.gathered_scaled_rows import GatheredScaledRows
from gbmoe.engines.lora_products import RankGradient, RankProduct
from gbmoe.launch import packed_rows
from gbmoe.slot_map import SlotMap
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.conftest import HALVES, assert_as_accurate_as, dtype_id
from tests.engines import emulated_gpu
from tests.engines.test_tensor_core import device, devices, drawn, poisoned  # noqa: F401  (a fixture)

DTYPES = pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
RANKS = pytest.mark.parametrize("rank", [8, 16, 24, 32, 40, 64])
SIZES = {"cuda": [[130, 0, 1, 64, 65, 128, 17, 300, 0], [1] * 300, [0] * 200 + [2, 0, 131], [5000], [0, 9, 0], [0, 0]],
         "cpu": [[70, 0, 1, 129, 0, 33], [0] * 130 + [2, 0, 1]]}
LENGTHS = {"cuda": [8, 72, 328, 768, 2048], "cpu": [8, 456]}
ENGINES = ["tensor_core", "tensor_core_batch_invariant", *(pytest.param(name, marks=pytest.mark.gpu) for name in (
    "hopper", "hopper_batch_invariant"))]
BEHIND = 9  # rows after the last group


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels as wide as a rank that were launched."""
    found = []
    for name in ("rank_product", "rank_gradient", "rank_product_and_gradients"):
        launch = getattr(torch.ops.gbmoe_cuda, name)
        monkeypatch.setattr(torch.ops.gbmoe_cuda, name, lambda *args, name=name, launch=launch: found.append(name) or launch(*args))
    return found


def engine_named(name, device):  # noqa: F811
    if name.startswith("hopper"):
        reason = engines.ENGINES[name].unavailable(device) if device.type == "cuda" else "the emulated GPU is none"
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
    return engines.ENGINES[name]


def operands(dtype, device, sizes, *widths):  # noqa: F811
    """Rows [P,width] for each width, with NaN after the last group, and the sizes; int64 for every other number of groups."""
    made = [drawn(sum(sizes) + BEHIND, width, dtype=dtype, device=device, seed=number) for number, width in enumerate(widths)]
    for rows in made:
        rows[sum(sizes):] = float("nan")
    return *made, torch.tensor(sizes, dtype=torch.int64 if len(sizes) % 2 else torch.int32, device=device)


def products(a, b_ERK, sizes, wide):
    return torch.cat([rows.to(wide) @ matrix.to(wide).t() for rows, matrix in zip(a[:sum(sizes)].split(sizes), b_ERK)])


def gradients(left, right, sizes, wide):
    return torch.stack([a.to(wide).t() @ b.to(wide) for a, b in zip(left[:sum(sizes)].split(sizes), right[:sum(sizes)].split(sizes))])


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@RANKS
def test_products_of_one_pair_and_of_two(device, dtype, rank):  # noqa: F811
    """b contiguous along K or along R; rows that are not a group's are neither read nor written."""
    for sizes in SIZES[device.type]:
        for inner in LENGTHS[device.type]:
            a, a2, on_device = operands(dtype, device, sizes, inner, inner)
            b, b2 = (drawn(len(sizes), rank, inner, dtype=dtype, device=device, seed=seed, scale=exact_inputs.fan_in_scale(inner))
                     for seed in (3, 4))
            for two in (False, True):
                exact, baseline = (products(a, b, sizes, wide) + (products(a2, b2, sizes, wide) if two else 0)
                                   for wide in (torch.float64, torch.float32))
                results = []
                for along_r in (False, True):
                    lies = [matrix.mT.contiguous() if along_r else matrix for matrix in (b, b2)]
                    results.append(poisoned(sum(sizes) + BEHIND, rank, dtype=dtype, device=device))
                    torch.ops.gbmoe_cuda.rank_product(
                        a, None, 1, lies[0], a2 if two else None, lies[1] if two else None, on_device, along_r, results[-1])
                    name = f"{len(sizes)} groups of {inner} x {rank}, {two=}, {along_r=}"
                    assert_as_accurate_as(results[-1][:sum(sizes)], baseline.to(dtype), exact, name)
                    assert bool(results[-1][sum(sizes):].isnan().all()), name
                assert torch.equal(*(result[:sum(sizes)] for result in results))
                wide = poisoned(sum(sizes) + BEHIND, rank, dtype=torch.float32, device=device)
                torch.ops.gbmoe_cuda.rank_product(a, None, 1, b, a2 if two else None, b2 if two else None, on_device, False, wide)
                assert torch.equal(wide[:sum(sizes)].to(dtype), results[0][:sum(sizes)]) and bool(wide[sum(sizes):].isnan().all())
                assert_as_accurate_as(wide[:sum(sizes)], baseline, exact, f"{len(sizes)} groups in float32")


@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("in_tokens", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("wants", ["both", "dots"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_bias_goes_back_in_one_launch(device, dtype, in_tokens, wants, name, calls):  # noqa: F811
    """<bias[e], row> in float32, and the sum of rows times their weights: as every other engine makes them, which rounds no dot either."""
    engine, sizes, columns = engine_named(name, device), SIZES[device.type][0], LENGTHS[device.type][1]
    count, rows_behind = sum(sizes), sum(sizes) + BEHIND
    x_TN, slot_of_row, rows_PN = of_tokens(40, columns, rows_behind, dtype, device)
    row_of_slot = torch.full((40, 2), -1, dtype=torch.int32, device=device)
    slots = SlotMap(row_of_slot, slot_of_row)
    wide = GatheredRows(x_TN, slots) if in_tokens else GatheredRows(None, slots, rows_PN)
    bias_EN = drawn(len(sizes), columns, dtype=dtype, device=device, seed=9)
    weights_TK = torch.rand(40, 2, generator=torch.Generator().manual_seed(7)).to(device)
    weights_PB = launch.weights_in_columns(slot_of_row, weights_TK, dtype, 8) if wants == "both" else None
    on_device = torch.tensor(sizes, device=device)
    dots, gradient_EN = engine.bias_backward(wide, bias_EN, on_device, weights_PB)
    assert dots.dtype == torch.float32 and calls == ["rank_product_and_gradients" if wants == "both" else "rank_product"]
    exact = (bias_EN.double().repeat_interleave(on_device, 0) * rows_PN[:count].double()).sum(1)
    baseline = (bias_EN.float().repeat_interleave(on_device, 0) * rows_PN[:count].float()).sum(1)
    assert_as_accurate_as(dots[:count, 0], baseline, exact, "dots", factor=4.0)  # the order of the sums differs
    if wants == "dots":
        assert gradient_EN is None
        return
    live = (slot_of_row[:count] >= 0) & (slot_of_row[:count] < 80)
    weight_P = torch.where(live, weights_TK.flatten()[slot_of_row[:count].clamp(0, 79).long()], 0)
    exact, baseline = (torch.stack([(w[:, None].to(t) * part.to(t)).sum(0) for w, part in zip(
        weight_P.split(sizes), rows_PN[:count].split(sizes))]) for t in (torch.float64, torch.float32))
    assert_as_accurate_as(gradient_EN, baseline.to(dtype), exact, "gradient")


def of_tokens(tokens, columns, rows, dtype, device):  # noqa: F811
    """(tokens [T,columns], the slots of `rows` rows of two each, these rows). Some slots name no token, whose rows are zeros."""
    slots = (torch.arange(rows, device=device) * 7 % (2 * tokens + 6) - 3).int()
    named = (slots >= 0) & (slots < 2 * tokens)
    x_TN = drawn(tokens, columns, dtype=dtype, device=device, seed=5)
    return x_TN, slots, x_TN[slots.clamp(0, 2 * tokens - 1).long() // 2] * named.unsqueeze(1)


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@RANKS
def test_gradients_of_rows_in_memory_and_of_tokens(device, dtype, rank):  # noqa: F811
    """A group's last rows are cut, and an empty group's gradient is 0. A row whose slot names no token is zeros: -1, or one too large."""
    for sizes in SIZES[device.type]:
        rows = sum(sizes) + BEHIND
        for columns in LENGTHS[device.type]:
            left, right, on_device = operands(dtype, device, sizes, rank, columns)
            x_TN, slots, gathered = of_tokens(40, columns, rows, dtype, device)
            for operand, of_slots, these in ((right, None, right), (x_TN, slots, gathered)):
                exact, baseline = (gradients(left, these, sizes, wide) for wide in (torch.float64, torch.float32))
                for apart in (0, 8):
                    whole = poisoned(len(sizes), rank, columns + apart, dtype=dtype, device=device)
                    out, again = whole[..., :columns], torch.empty(len(sizes), rank, columns, dtype=dtype, device=device)
                    for result in (out, again):
                        torch.ops.gbmoe_cuda.rank_gradient(left, operand, of_slots, 2, on_device, result)
                    name = f"{len(sizes)} groups of {rank} x {columns}, {of_slots is None=}, {apart=}"
                    assert_as_accurate_as(out, baseline.to(dtype), exact, name)
                    assert torch.equal(out, again) and bool(whole[..., columns:].isnan().all()), name
                    assert not any(bool(out[e].any()) for e, size in enumerate(sizes) if size == 0), name


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@RANKS
def test_products_of_tokens_have_the_bits_of_gathered_rows(device, dtype, rank):  # noqa: F811
    for sizes in SIZES[device.type]:
        rows, on_device = sum(sizes), torch.tensor(sizes, device=device)
        for inner in LENGTHS[device.type]:
            x, slots, gathered = of_tokens(40, inner, rows + BEHIND, dtype, device)
            for along_r in (False, True):
                b = drawn(len(sizes), *((inner, rank) if along_r else (rank, inner)), dtype=dtype, device=device, seed=3)
                found, expected = (poisoned(rows + BEHIND, rank, dtype=dtype, device=device) for _ in range(2))
                torch.ops.gbmoe_cuda.rank_product(x, slots, 2, b, None, None, on_device, along_r, found)
                torch.ops.gbmoe_cuda.rank_product(gathered, None, 1, b, None, None, on_device, along_r, expected)
                assert torch.equal(found[:rows], expected[:rows]), f"{len(sizes)} groups of {inner} x {rank}, {along_r=}"
                assert bool(found[rows:].isnan().all()) and (rows == 0 or bool(found[:rows].any()))


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.memcheck
@pytest.mark.parametrize("device", devices("late copies, small memory", "late copies, large memory"), indirect=True)
@DTYPES
@pytest.mark.parametrize("ranks", [(8, 16, 8, 8), (16, 16, 16, 16), (32, 8, 32, 24), (16, 32, 8, 40), (64, 16, 64, 64)], ids=str)
def test_a_product_and_gradients_in_one_launch_have_the_bits_of_several(device, dtype, ranks):  # noqa: F811
    """One to three gradients of several widths, next to a product of one pair or of two, of rows in memory or of tokens. Rings go round,
    also those of 8 stages."""
    wide, other, *lefts = 520, 136, *ranks[1:]
    for number, sizes in enumerate([*SIZES[device.type], [300, 3]]):
        rows = sum(sizes) + BEHIND
        a, a2, narrow, *left, on_device = operands(dtype, device, sizes, wide, wide, other, *lefts)
        x, slots, _ = of_tokens(40, wide, rows, dtype, device)
        y = drawn(40, other, dtype=dtype, device=device, seed=8)
        b, b2 = (drawn(len(sizes), wide, ranks[0], dtype=dtype, device=device, seed=seed) for seed in (3, 4))
        for two, tokens, along_r, count in (
                (False, False, True, 1), (True, False, True, 3), (False, True, False, 2), (True, False, False, 2)):
            of_slots, top_k = (slots, 2) if tokens else (None, 1)
            rights = [x, y, x] if tokens else [a, narrow, a2]
            lies = [matrix if along_r else matrix.mT.contiguous() for matrix in (b, b2)]
            of_product = rights[0], of_slots, top_k, lies[0], *((a2, lies[1]) if two else (None, None)), on_device, along_r
            results = []
            for joint in (True, False):
                out = poisoned(rows, ranks[0], dtype=dtype, device=device)
                made = [poisoned(len(sizes), rank, right.size(1), dtype=dtype, device=device)
                        for rank, right in zip(lefts[:count], rights)]
                if joint:
                    of_gradients = [part for pair in zip(left, rights, made) for part in pair]
                    torch.ops.gbmoe_cuda.rank_product_and_gradients(*of_product, out, *of_gradients, *[None] * (9 - len(of_gradients)))
                else:
                    torch.ops.gbmoe_cuda.rank_product(*of_product, out)
                    for one, right, to in zip(left, rights, made):
                        torch.ops.gbmoe_cuda.rank_gradient(one, right, of_slots, top_k, on_device, to)
                assert bool(out[sum(sizes):].isnan().all())
                results.append((out[:sum(sizes)], *made))
            assert all(map(torch.equal, *results)), f"sizes {number}, {two=}, {tokens=}, {along_r=}, {count} gradients"


@pytest.mark.parametrize("name", ENGINES)
def test_sums_do_not_depend_on_other_groups(device, name):  # noqa: F811
    """The bits of a row's product, and of a group's gradient, with other rows before and after, in tiles of other heights."""
    engine, dtype = engine_named(name, device), torch.bfloat16
    alone, among = [77], [5, 77, 0, 90]
    for rank in (16, 64):
        a, left, sizes = operands(dtype, device, among, 264, rank)
        b = drawn(4, rank, 264, dtype=dtype, device=device, seed=6)
        mine, one = slice(5, 82), torch.tensor(alone, device=device)
        product, gradient = engine.rank_product(a, b, sizes), engine.rank_gradient(left, a, sizes)
        assert torch.equal(engine.rank_product(a[mine], b[1:2], one), product[mine])
        assert torch.equal(engine.rank_gradient(left[mine], a[mine], one)[0], gradient[1])


@pytest.mark.parametrize("name", ENGINES)
def test_sizes_of_any_value_stay_in_the_operands(device, name):  # noqa: F811
    engine = engine_named(name, device)
    for sizes in ([-5, 1 << 40, 7], [100, 1 << 62, 1 << 62], [40, -1, 1000]):
        a, left = (drawn(120, width, dtype=torch.bfloat16, device=device, seed=width) for width in (72, 16))
        b = drawn(3, 16, 72, dtype=torch.bfloat16, device=device, seed=1)
        on_device, counted = torch.tensor(sizes, device=device), []
        for size in sizes:
            counted.append(min(max(size, 0), 120 - sum(counted)))
        for got, define, one, other in ((engine.rank_product(a, b, on_device)[:sum(counted)], products, a, b),
                                        (engine.rank_gradient(left, a, on_device), gradients, left, a)):
            baseline, exact = (define(one, other, counted, wide) for wide in (torch.float32, torch.float64))
            assert_as_accurate_as(got, baseline.bfloat16(), exact, f"{define.__name__} of {sizes}")


@pytest.mark.parametrize("name", ENGINES)
def test_operands_of_any_strides(device, name, calls):  # noqa: F811
    """What the kernels do not read or write where it lies is copied."""
    engine, sizes = engine_named(name, device), [70, 0, 40]
    a, left, on_device = operands(torch.bfloat16, device, sizes, 72, 24)
    b = drawn(3, 24, 72, dtype=torch.bfloat16, device=device, seed=6)
    product, gradient = engine.rank_product(a, b, on_device)[:110], engine.rank_gradient(left, a, on_device)
    twice = torch.stack([b, b], 3).flatten(2)
    factors = [twice[..., ::2], b.permute(1, 2, 0).contiguous().permute(2, 0, 1), torch.cat([b, b], 2)[..., :72], b.mT.contiguous().mT,
               torch.cat([b, b], 1).mT.contiguous().mT[:, 24:], torch.cat([b.flatten()[:1], b.flatten()])[1:].view_as(b)]
    for factor in factors:
        assert torch.equal(engine.rank_product(a, factor, on_device)[:110], product)
        two = engine.rank_product(a, factor, on_device, a, b)[:110]
        assert torch.equal(two, engine.rank_product(a, b, on_device, a, factor)[:110])
    unaligned = [torch.cat([rows.flatten()[:1], rows.flatten()])[1:].view_as(rows) for rows in (a, left)]
    assert torch.equal(engine.rank_product(unaligned[0], b, on_device)[:110], product)
    assert torch.equal(engine.rank_gradient(unaligned[1], unaligned[0], on_device), gradient)
    for out in (torch.zeros(3, 24, 144, dtype=torch.bfloat16, device=device)[..., 1::2],
                torch.zeros(3, 72, 24, dtype=torch.bfloat16, device=device).mT,
                torch.zeros(3, 24, 144, dtype=torch.bfloat16, device=device)[..., 72:]):
        assert engine.rank_gradient(left, a, on_device, out) is out and torch.equal(out, gradient)
    assert set(calls) == {"rank_product", "rank_gradient"}


def gathered_later(device):  # noqa: F811
    """(GatheredRows of two groups' 50 rows that nobody has gathered, the rows)."""
    x_TH = drawn(30, 72, dtype=torch.bfloat16, device=device, seed=2)
    slots = (torch.arange(50 + BEHIND, device=device) % 60).int()
    slots[[7, 40]] = -1
    rows_of_slots = torch.full((30, 2), -1, dtype=torch.int32, device=device)
    return GatheredRows(x_TH, SlotMap(rows_of_slots, slots)), x_TH[slots.clamp(min=0).long() // 2] * (slots >= 0).unsqueeze(1)


@pytest.mark.parametrize("name", ENGINES)
def test_rows_are_not_gathered_for_a_product_or_with_gradients(device, name, calls):  # noqa: F811
    engine, (x, rows) = engine_named(name, device), gathered_later(device)
    left, left2, on_device = operands(torch.bfloat16, device, [30, 0, 20], 16, 8)
    b = drawn(3, 16, 72, dtype=torch.bfloat16, device=device, seed=6)
    out, out2 = (torch.zeros(3, rank, 72, dtype=torch.bfloat16, device=device) for rank in (16, 8))
    alone = engine.rank_product(x, b, on_device)[:50]
    joint = engine.rank_product_and_gradients(
        RankProduct(x, b), [RankGradient(left, x, out), RankGradient(left2, x, out2)], on_device)[:50]
    assert not x.are_gathered and calls == ["rank_product", "rank_product_and_gradients"]
    assert torch.equal(alone, engine.rank_product(rows, b, on_device)[:50]) and torch.equal(joint, alone) and bool(alone.any())
    assert torch.equal(out, engine.rank_gradient(left, rows, on_device)) and torch.equal(out2, engine.rank_gradient(left2, rows, on_device))


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_that_came_in_e4m3_were_read_as_they_came(device, name):  # noqa: F811
    """Rows that stand for packed ones: their tokens have the dtype of the rows, and what was given has bytes."""
    engine, (x, _) = engine_named(name, device), gathered_later(device)
    packed_TY = packed_rows.pack(x.tokens_TH.repeat(1, 2)[:, :128].contiguous(), False)
    left, on_device = operands(torch.bfloat16, device, [30, 0, 20], 16)
    b = drawn(3, 16, 128, dtype=torch.bfloat16, device=device, seed=6)
    came, slots = GatheredScaledRows(x.slots, 128, torch.bfloat16, tokens_TY=packed_TY), x.slots.slot_of_row_P
    gathered = came.tokens_TH[slots.clamp(min=0).long() // 2] * (slots >= 0).unsqueeze(1)
    found = [(engine.rank_product(rows, b, on_device)[:50], engine.rank_gradient(left, rows, on_device)) for rows in (came, gathered)]
    assert all(map(torch.equal, *found)) and bool(found[0][0].any())


@pytest.mark.parametrize("name", ENGINES)
def test_gradients_next_to_a_product_have_any_strides(device, name, calls):  # noqa: F811
    """Gate and up in turns, and operands that are not aligned: what is not written or read where it lies is copied."""
    engine, sizes = engine_named(name, device), [70, 0, 40]
    dh, dg, left, on_device = operands(torch.bfloat16, device, sizes, 72, 72, 24)
    b = drawn(3, 24, 144, dtype=torch.bfloat16, device=device, seed=6)
    expected = engine.rank_product(dh, b[..., ::2], on_device, dg, b[..., 1::2])[:110]
    of_gate, of_up = (engine.rank_gradient(left, rows, on_device) for rows in (dh, dg))
    calls.clear()
    for first in (dh, torch.cat([dh.flatten()[:1], dh.flatten()])[1:].view_as(dh)):
        made = torch.zeros_like(b)
        gradients = [RankGradient(left, first, made[..., ::2]), RankGradient(left, dg, made[..., 1::2])]
        found = engine.rank_product_and_gradients(RankProduct(first, b[..., ::2], dg, b[..., 1::2]), gradients, on_device)
        assert torch.equal(found[:110], expected) and torch.equal(made[..., ::2], of_gate) and torch.equal(made[..., 1::2], of_up)
    assert calls == ["rank_product_and_gradients"] * 2


@pytest.mark.parametrize("device", devices("early copies, small memory"), indirect=True)
@pytest.mark.parametrize("why", [
    "ranks of the product", "ranks of a gradient", "four gradients", "no gradient", "few rows", "gathered or not"])
def test_what_is_no_launch_of_all_is_several(device, calls, monkeypatch, why):  # noqa: F811
    engine, (x, rows) = engines.ENGINES["tensor_core"], gathered_later(device)
    rank, of_left = 72 if why == "ranks of the product" else 16, 72 if why == "ranks of a gradient" else 8
    left, on_device = operands(torch.bfloat16, device, [30, 0, 20], of_left)
    b = drawn(3, rank, 72, dtype=torch.bfloat16, device=device, seed=6)
    outs = [torch.zeros(3, of_left, 72, dtype=torch.bfloat16, device=device)
            for _ in range({"four gradients": 4, "no gradient": 0}.get(why, 2))]
    if why == "few rows":
        monkeypatch.setattr(own_kernels.groups_of_few_rows, "few_rows", lambda rows, groups: True)
    rights = [x if why == "gathered or not" and n == 0 else rows for n in range(len(outs))]
    found = engine.rank_product_and_gradients(
        RankProduct(rows, b), [RankGradient(left, right, out) for right, out in zip(rights, outs)], on_device)
    assert "rank_product_and_gradients" not in calls
    expected, of_gradient = engine.rank_product(rows, b, on_device), engine.rank_gradient(left, rows, on_device)
    assert torch.equal(found[:50], expected[:50]) and all(torch.equal(out, of_gradient) for out in outs)


@pytest.mark.parametrize("device", devices("early copies, small memory")[1:], indirect=True)
def test_rings_were_as_shallow_where_few_ctas_have_a_multiprocessor_each(device, kernels):  # noqa: F811
    """The CTAs of a launch, their shared memory in KiB, and the stages of products and of gradients."""
    def launch(multiprocessors, kib, rows, groups, product, gradients):
        sizes, sum_of = torch.zeros(groups, dtype=torch.int32), functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
        of_product = None if product is None else (
            sum_of(rows, product[0]), sum_of(groups, product[1], product[0]), None, None, False, sum_of(rows, product[1]))
        of_gradients = [(sum_of(rows, rank), sum_of(rows, columns), sum_of(groups, rank, columns)) for rank, columns in gradients]
        arguments, ranks = emulated_gpu.low_rank_arguments(sizes, rows, None, 1, of_product, of_gradients)
        if of_product is not None:
            arguments.product.out = 16  # an address that nobody reads
        found = (ctypes.c_int64 * 4)()
        kernels.library("low_rank", 0).low_rank_launch(ranks, ctypes.byref(arguments), multiprocessors, kib << 10, found)
        ctas, shared, *stages = found
        return ctas, shared >> 10, *stages

    h200 = 132, 228
    assert launch(*h200, 32768, 128, (2048, 16), []) == (640, 40, 4, 4)            # of Qwen3: five CTAs on a multiprocessor
    assert launch(*h200, 32768, 128, None, [(16, 2048)]) == (2048, 36, 3, 4)
    assert launch(*h200, 32768, 128, (768, 16), [(16, 768)] * 3) == (640 + 3 * 768, 40, 4, 4)
    assert launch(*h200, 16384, 8, (14336, 16), []) == (264, 80, 8, 8)             # of Mixtral: two
    assert launch(*h200, 16384, 8, (4096, 16), [(16, 4096)]) == (520, 54, 5, 6)    # four
    assert launch(*h200, 16384, 8, (14336, 32), []) == (264, 96, 8, 8)
    assert launch(*h200, 16384, 8, (14336, 64), []) == (136, 96, 4, 8)
    assert launch(*h200, 32768, 128, (2048, 64), [(64, 2048)]) == (384 + 2048, 72, 3, 6)
    assert launch(132, 100, 16384, 8, (14336, 16), []) == (264, 40, 4, 5)          # of GPUs that have less: still two at once
    assert launch(*h200, 0, 4, (64, 16), [])[0] == 0 and launch(*h200, 0, 4, (64, 16), [(8, 128)])[0] == 4


@pytest.mark.parametrize("name", ENGINES)
def test_rows_are_not_gathered_for_a_gradient(device, name, calls):  # noqa: F811
    engine, sizes, (x, rows) = engine_named(name, device), [30, 0, 20], gathered_later(device)
    left, on_device = operands(torch.bfloat16, device, sizes, 16)
    got = engine.rank_gradient(left, x, on_device)
    assert not x.are_gathered and calls == ["rank_gradient"]
    assert torch.equal(got, engine.rank_gradient(left, GatheredRows(None, x.slots, rows), on_device))
    assert_as_accurate_as(got, gradients(left, rows, sizes, torch.float32).bfloat16(), gradients(left, rows, sizes, torch.float64), "")


@pytest.mark.parametrize("device", devices("early copies, small memory"), indirect=True)
def test_what_has_no_such_kernel_is_a_grouped_gemm(device, calls, monkeypatch):  # noqa: F811
    """More than 64 ranks, and products of few rows; these have the kernels for few rows, unless sums may not be made of parts."""
    engine = engines.ENGINES["tensor_core"]
    a, left, wide, sizes = operands(torch.bfloat16, device, [40, 0, 20], 72, 16, 72)
    b = drawn(3, 72, 72, dtype=torch.bfloat16, device=device, seed=6)
    assert engine.rank_product(a, b, sizes).shape == (60 + BEHIND, 72) and engine.rank_gradient(wide, a, sizes).shape == (3, 72, 72)
    assert not calls
    monkeypatch.setattr(own_kernels.groups_of_few_rows, "few_rows", lambda rows, groups: True)
    engine.rank_product(a, b[:, :16], sizes)
    assert not calls
    engines.ENGINES["tensor_core_batch_invariant"].rank_product(a, b[:, :16], sizes)
    engine.rank_gradient(left, a, sizes)
    assert calls == ["rank_product", "rank_gradient"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name.values[0] if not isinstance(name, str) else name for name in ENGINES])
def test_no_wait_and_the_same_bits_in_a_graph(name):
    device = torch.device("cuda")  # noqa: F811
    engine, sizes = engine_named(name, device), [130, 0, 1, 300]
    if engine.unavailable(device) is not None:
        pytest.skip(engine.unavailable(device))
    a, left, on_device = operands(torch.bfloat16, device, sizes, 328, 16)
    b = drawn(4, 16, 328, dtype=torch.bfloat16, device=device, seed=6)

    def call():
        """(two products, two gradients): by themselves, and together."""
        made = torch.empty(4, 16, 328, dtype=torch.bfloat16, device=device)
        joint = engine.rank_product_and_gradients(RankProduct(a, b, a, b), [RankGradient(left, a, made)], on_device)
        return engine.rank_product(a, b, on_device, a, b)[:431], joint[:431], engine.rank_gradient(left, a, on_device), made

    expected = call()
    with cuda_graphs.no_host_wait():
        call()
    graph, results = cuda_graphs.captured(call)
    for other in ([130, 0, 1, 300], [0, 431, 0, 0], [300, 1, 130, 0]):
        on_device.copy_(torch.tensor(other, device=device))
        graph.replay()
        if other == sizes:
            assert all(map(torch.equal, results, expected))
        assert all(map(torch.equal, results, call())) and torch.equal(*results[:2]) and torch.equal(*results[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_products_have_the_bits_of_the_engines_own(device):  # noqa: F811
    """On Hopper: those of its batch-invariant engine's other kernels, and of tensor_core's tiles, which split no sum."""
    name = "hopper_batch_invariant"
    engine = engine_named(name, device)
    a, on_device = operands(torch.bfloat16, device, [130, 0, 1, 300], 776)
    b = drawn(4, 64, 776, dtype=torch.bfloat16, device=device, seed=6, scale=exact_inputs.fan_in_scale(776))
    a = a * 1.01  # sums that are not exact
    for other in (engine, engines.ENGINES["tensor_core_batch_invariant"]):
        assert torch.equal(engine.rank_product(a, b, on_device)[:431], other.product(a, b, on_device, trans_b=True)[:431])
