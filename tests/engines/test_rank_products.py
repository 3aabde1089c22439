"""The kernels as wide as a rank (csrc/low_rank/): on a GPU, and on a CPU that emulates one; and what the engines hand them.

Shape suffixes: E experts, P rows of all groups, K inner, N columns, R rank, T tokens.
"""

import functools

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import own_kernels
from gbmoe.engines.base import GatheredRows
from gbmoe.slot_map import SlotMap
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.conftest import HALVES, assert_as_accurate_as, dtype_id
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
    for name in ("rank_product", "rank_gradient"):
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


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@RANKS
def test_gradients_of_rows_in_memory_and_of_tokens(device, dtype, rank):  # noqa: F811
    """A group's last rows are cut, and an empty group's gradient is 0. A row whose slot names no token is zeros: -1, or one too large."""
    top_k, tokens = 2, 40
    for sizes in SIZES[device.type]:
        rows = sum(sizes) + BEHIND
        slots = (torch.arange(rows, device=device) * 7 % (top_k * tokens + 6) - 3).int()
        named = (slots >= 0) & (slots < top_k * tokens)
        for columns in LENGTHS[device.type]:
            left, right, on_device = operands(dtype, device, sizes, rank, columns)
            x_TN = drawn(tokens, columns, dtype=dtype, device=device, seed=5)
            gathered = x_TN[slots.clamp(0, top_k * tokens - 1).long() // top_k] * named.unsqueeze(1)
            for operand, of_slots, these in ((right, None, right), (x_TN, slots, gathered)):
                exact, baseline = (gradients(left, these, sizes, wide) for wide in (torch.float64, torch.float32))
                for apart in (0, 8):
                    whole = poisoned(len(sizes), rank, columns + apart, dtype=dtype, device=device)
                    out, again = whole[..., :columns], torch.empty(len(sizes), rank, columns, dtype=dtype, device=device)
                    for result in (out, again):
                        torch.ops.gbmoe_cuda.rank_gradient(left, operand, of_slots, top_k, on_device, result)
                    name = f"{len(sizes)} groups of {rank} x {columns}, {of_slots is None=}, {apart=}"
                    assert_as_accurate_as(out, baseline.to(dtype), exact, name)
                    assert torch.equal(out, again) and bool(whole[..., columns:].isnan().all()), name
                    assert not any(bool(out[e].any()) for e, size in enumerate(sizes) if size == 0), name


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


@pytest.mark.parametrize("name", ENGINES)
def test_rows_are_not_gathered_for_a_gradient(device, name, calls):  # noqa: F811
    engine, sizes = engine_named(name, device), [30, 0, 20]
    left, on_device = operands(torch.bfloat16, device, sizes, 16)
    x_TH = drawn(30, 72, dtype=torch.bfloat16, device=device, seed=2)
    slots = (torch.arange(50 + BEHIND, device=device) % 60).int()
    slots[[7, 40]] = -1
    rows_of_slots = torch.full((30, 2), -1, dtype=torch.int32, device=device)
    x = GatheredRows(x_TH, SlotMap(rows_of_slots, slots))
    got = engine.rank_gradient(left, x, on_device)
    assert not x.are_gathered and calls == ["rank_gradient"]
    rows = x_TH[slots.clamp(min=0).long() // 2] * (slots >= 0).unsqueeze(1)
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
    call = functools.partial(lambda: (engine.rank_product(a, b, on_device, a, b), engine.rank_gradient(left, a, on_device)))
    expected = call()
    with cuda_graphs.no_host_wait():
        call()
    graph, results = cuda_graphs.captured(call)
    for other in ([130, 0, 1, 300], [0, 431, 0, 0], [300, 1, 130, 0]):
        on_device.copy_(torch.tensor(other, device=device))
        graph.replay()
        if other == sizes:
            assert torch.equal(results[0][:431], expected[0][:431]) and torch.equal(results[1], expected[1])
        direct = call()
        assert torch.equal(results[0][:431], direct[0][:431]) and torch.equal(results[1], direct[1])


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
