"""megablocks.ops' names on gbmoe: MegaBlocks' own cases at a CPU's size, gradients, dropped slots, wrong arguments.

Shape suffixes: T tokens, K slots a token, R = T * K slots, E experts, H hidden, P padded rows, C rows of a bin.
"""

import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

from gbmoe.compat.megablocks import kernels, ops
from gbmoe.testing import exact_inputs
from tests.compat import checked
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

# (tokens, hidden, experts, top_k)
SHAPES = [(4, 2, 2, 1), (4, 2, 2, 2), (4, 2, 2, 4), (64, 1, 4, 2), (64, 1, 64, 4), (128, 96, 4, 1), (128, 96, 64, 2),
          (64, 40, 128, 4), (33, 7, 5, 3), (1, 8, 1, 1), (0, 8, 4, 2)]
INTS = [torch.int16, torch.int32, torch.int64]

Routed = namedtuple("Routed", "ids indices bin_ids bins padded_bins")


@pytest.fixture(autouse=True)
def maps_agree(monkeypatch):
    """Every call of an operator in these tests gets its maps checked."""
    monkeypatch.setattr(ops, "gather_slots", checked(ops.gather_slots))
    monkeypatch.setattr(ops, "scatter_slots", checked(ops.scatter_slots))


def route(ids_R, experts, align=128):
    bin_ids, indices = ops.sort(ids_R, max(1, math.ceil(math.log2(experts))))
    counts = ops.histogram(ids_R, experts)
    bins, padded_bins = (ops.inclusive_cumsum(t, 0) for t in (counts, ops.round_up(counts, align)))
    return Routed(ids_R, indices, bin_ids, bins, padded_bins)


def random_ids(tokens, experts, top_k, device):
    return torch.randint(experts, (tokens * top_k,), generator=exact_inputs.generator(device, tokens + experts), device=device).int()


def slots_of_rows(routed, rows, first_rows_E, capacity=None):
    """The slot of each row or -1, made by hand: the slots of expert e stand in order from row first_rows_E[e] on."""
    slot_of_row = [-1] * rows
    for e, first in enumerate(first_rows_E):
        for place, slot in enumerate((routed.ids == e).nonzero().flatten().tolist()[:capacity]):
            slot_of_row[first + place] = slot
    return torch.tensor(slot_of_row, dtype=torch.int64, device=routed.ids.device)


def plain_gather(x_TH, slot_of_row_P, top_k):
    """The rows of the slots' tokens, and for -1 the zero row that stands after the last."""
    return F.pad(x_TH, (0, 0, 0, 1))[torch.where(slot_of_row_P >= 0, slot_of_row_P // top_k, -1)]


def plain_scatter(y_PH, weights_R, slot_of_row_P, tokens, top_k):
    live_P = slot_of_row_P >= 0
    slot_P, y_PH = slot_of_row_P[live_P], y_PH[live_P]
    terms_PH = y_PH if weights_R is None else y_PH * weights_R[slot_P, None]
    return y_PH.new_zeros(tokens, y_PH.size(1)).index_add(0, slot_P // top_k, terms_PH)


def check_against_plain(function, plain, inputs, grad):
    """Results and gradients of function(*inputs), as accurate as plain's in float32, both against plain's in float64."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    got = (out.detach(), *torch.autograd.grad(out, leaves, grad))

    def in_dtype(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out = plain(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype)))

    wide = in_dtype(torch.float64)
    narrow = wide if inputs[0].dtype == torch.float64 else in_dtype(torch.float32)
    for what, result, reference, baseline in zip(("out", *(f"grad {i}" for i in range(len(inputs)))), got, wide, narrow):
        assert_as_accurate_as(result, baseline.to(result.dtype), reference, what)
    return got


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "plain"])
def test_gather_and_scatter(device, shape, dtype, padded):
    tokens, hidden, experts, top_k = shape
    routed = route(random_ids(tokens, experts, top_k, device), experts, align=16)
    ends = (routed.padded_bins if padded else routed.bins).reshape(-1).tolist()
    slot_of_row = slots_of_rows(routed, ends[-1], [0, *ends[:-1]])
    bins = (routed.bins, routed.padded_bins) if padded else (routed.bins,)
    gather, scatter = (ops.padded_gather, ops.padded_scatter) if padded else (ops.gather, ops.scatter)

    x = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=1)
    y = exact_inputs.exact_values(ends[-1], hidden, dtype=dtype, device=device, seed=2)
    grad = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=3)
    exact_inputs.poison(device)
    out, _ = check_against_plain(lambda x: gather(x, routed.indices, routed.bin_ids, *bins, top_k),
                                 lambda x: plain_gather(x, slot_of_row, top_k), [x], y)
    assert torch.equal(out[slot_of_row >= 0], x[slot_of_row[slot_of_row >= 0] // top_k])
    assert bool((out[slot_of_row < 0] == 0).all())

    for weights_dtype in {None, dtype, torch.float32}:
        inputs = [y] if weights_dtype is None else \
            [y, exact_inputs.exact_values(tokens * top_k, dtype=weights_dtype, device=device, seed=4)]
        results = check_against_plain(
            lambda y, w=None: scatter(y, routed.indices, routed.bin_ids, w, *bins, top_k),
            lambda y, w=None: plain_scatter(y, w, slot_of_row, tokens, top_k), inputs, grad)
        assert bool((results[1][slot_of_row < 0] == 0).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_binned_gather_and_scatter(device, shape, dtype):
    tokens, hidden, experts, top_k = shape
    capacity = tokens * top_k // experts  # factor 1, so that unlucky experts drop slots
    routed = route(random_ids(tokens, experts, top_k, device), experts)
    slot_of_row = slots_of_rows(routed, experts * capacity, [e * capacity for e in range(experts)], capacity)
    x = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=1)
    y = exact_inputs.exact_values(experts, capacity, hidden, dtype=dtype, device=device, seed=2)
    grad = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=3)
    weights = exact_inputs.exact_values(tokens * top_k, dtype=dtype, device=device, seed=4)
    exact_inputs.poison(device)
    out, _ = check_against_plain(
        lambda x: ops.binned_gather(x, routed.indices, routed.bins, capacity, top_k),
        lambda x: plain_gather(x, slot_of_row, top_k).view(experts, capacity, hidden), [x], y)
    assert out.shape == (experts, capacity, hidden) and bool((out.view(-1, hidden)[slot_of_row < 0] == 0).all())
    _, _, grad_weights = check_against_plain(
        lambda y, w: ops.binned_scatter(y, routed.indices, w, routed.bins, top_k),
        lambda y, w: plain_scatter(y.flatten(0, 1), w, slot_of_row, tokens, top_k), [y, weights], grad)
    dropped = torch.ones_like(weights, dtype=torch.bool)
    dropped[slot_of_row[slot_of_row >= 0]] = False
    assert bool((grad_weights[dropped] == 0).all())


def test_one_expert_with_everything_and_empty_experts(device):
    x = torch.randn(24, 8, device=device)
    for expert in (0, 2, 4):
        routed = route(torch.full((24,), expert, dtype=torch.int32, device=device), 5, align=16)
        out = ops.padded_gather(x, routed.indices, routed.bin_ids, routed.bins, routed.padded_bins, 1)
        assert out.shape == (32, 8) and torch.equal(out[:24], x) and bool((out[24:] == 0).all())


def test_ids_without_a_bin_have_no_row(device):
    ids = torch.tensor([1, -1, 0, 7, 1, -1], dtype=torch.int32, device=device)
    bins = ops.inclusive_cumsum(ops.histogram(ids, 4), 0)
    padded_bins = ops.inclusive_cumsum(ops.round_up(ops.histogram(ids, 4), 128), 0)
    order = torch.tensor([2, 0, 4, 1, 3, 5], dtype=torch.int32, device=device)  # those without a bin last
    x = torch.randn(3, 4, device=device, requires_grad=True)
    out = ops.padded_gather(x, order, ids[order.long()], bins, padded_bins, 2)
    assert torch.equal(out[:1], x[1:2]) and torch.equal(out[128:130], x[[0, 2]]) and int((out != 0).any(1).sum()) == 3
    weights = torch.full((6,), float("nan"), device=device)
    weights[[0, 2, 4]] = 0.5
    weights.requires_grad_()
    back = ops.padded_scatter(out, order, ids[order.long()], weights, bins, padded_bins, 2)
    assert torch.equal(back, 0.5 * x)
    grad_x, grad_weights = torch.autograd.grad(back.sum(), (x, weights))
    assert torch.equal(grad_x, torch.full_like(x, 0.5)) and bool((grad_weights[[1, 3, 5]] == 0).all())


def test_nan_stays_with_its_token(device):
    routed = route(random_ids(20, 4, 2, device), 4, align=16)
    x = torch.ones(20, 8, device=device)
    x[7] = float("nan")
    arguments = (routed.indices, routed.bin_ids)
    out = ops.padded_gather(x, *arguments, routed.bins, routed.padded_bins, 2)
    assert int(out.isnan().any(1).sum()) == 2
    back = ops.padded_scatter(out, *arguments, torch.rand(40, device=device), routed.bins, routed.padded_bins, 2)
    assert back.isnan().any(1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=dtype_id)
def test_float8_rows_travel_as_they_are(device, dtype):
    routed = route(random_ids(20, 4, 2, device), 4, align=16)
    x = torch.randn(20, 16, device=device).to(dtype)
    arguments = (routed.indices, routed.bin_ids, routed.bins, routed.padded_bins, 2)
    out = ops.padded_gather(x, *arguments)
    assert out.dtype == dtype and torch.equal(out.float(), ops.padded_gather(x.float(), *arguments))


def test_repeats_give_the_same_bits(device):
    routed = route(random_ids(100, 8, 4, device), 8, align=16)
    x = torch.randn(100, 40, device=device).bfloat16().requires_grad_()
    weights = torch.rand(400, device=device, requires_grad=True)
    arguments = (routed.indices, routed.bin_ids)

    def run():
        y = ops.padded_gather(x, *arguments, routed.bins, routed.padded_bins, 4)
        out = ops.padded_scatter(y, *arguments, weights, routed.bins, routed.padded_bins, 4)
        return out, *torch.autograd.grad(out.float().square().sum(), (x, weights))

    first = run()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, run()))


# --------------------------------------------------------------------------------------------------------------- the others


@pytest.mark.parametrize("size", [0, 1, 32, 1024, 16384])
@pytest.mark.parametrize("dtype", INTS, ids=dtype_id)
@pytest.mark.parametrize("most", [None, 128])
def test_sort(device, size, dtype, most):
    most = most or torch.iinfo(dtype).max
    x = torch.randint(most, (size,), generator=exact_inputs.generator(device, size), device=device).to(dtype)
    for end_bit in (None, math.ceil(math.log2(most))):
        values, indices = ops.sort(x, end_bit)
        expected = torch.sort(x, stable=True)
        assert values.dtype == indices.dtype == dtype
        assert torch.equal(values, expected.values) and torch.equal(indices.long(), expected.indices)


def test_sort_reads_the_low_bits_only(device):
    values, indices = ops.sort(torch.tensor([5, 4, 1, 8, -1], dtype=torch.int32, device=device), 2)
    assert values.tolist() == [4, 8, 5, 1, -1] and indices.tolist() == [1, 3, 0, 2, 4]
    assert ops.sort(torch.tensor([3, -2, 0], dtype=torch.int16, device=device))[0].tolist() == [-2, 0, 3]


@pytest.mark.parametrize("shape", [(0,), (32,), (1024,), (1, 32), (2, 1024), (8, 4096)], ids=str)
@pytest.mark.parametrize("dtype", INTS, ids=dtype_id)
@pytest.mark.parametrize("bins", [1, 128, 1024])
def test_histogram(device, shape, dtype, bins):
    x = torch.randint(-3, bins + 3, shape, generator=exact_inputs.generator(device, bins), device=device).to(dtype)
    out = ops.histogram(x, bins)
    assert out.dtype == torch.int32 and out.is_contiguous()
    assert torch.equal(out, (x.unsqueeze(-1) == torch.arange(bins, device=device)).sum(-2).int())


@pytest.mark.parametrize("shape", [(1, 32), (2, 1024), (128, 64), (3, 1), (40,), (0,)], ids=str)
@pytest.mark.parametrize("dtype", INTS, ids=dtype_id)
def test_cumsums(device, shape, dtype):
    x = torch.randint(2, shape, generator=exact_inputs.generator(device, 5), device=device).to(dtype)
    expected = torch.cumsum(x.long(), -1).to(dtype)
    for out, values in ((ops.inclusive_cumsum(x, 1), expected), (ops.exclusive_cumsum(x, 1), expected - x)):
        assert out.dtype == dtype and torch.equal(out, values)


def test_cumsum_of_one_element_is_0_d(device):
    x = torch.tensor([7], device=device)
    assert ops.inclusive_cumsum(x, 0).shape == ops.exclusive_cumsum(x, 0).shape == ()
    assert int(ops.inclusive_cumsum(x, 0)) == 7 and int(ops.exclusive_cumsum(x, 0)) == 0


@pytest.mark.parametrize("case", [(8, 1, 1), (8, 2, 2), (8, 8, 8), (1024, 4, 1), (1024, 128, 4), (0, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int16, torch.int32], ids=dtype_id)
def test_replicate(device, case, dtype):
    outputs, centers, batch = case
    counts = ops.histogram(torch.randint(centers, (outputs,), generator=exact_inputs.generator(device, 1), device=device), centers)
    bins = ops.inclusive_cumsum(counts, 0)
    x = exact_inputs.exact_values(batch, centers, dtype=torch.float32, device=device, seed=2)
    x = x.to(dtype) if dtype.is_floating_point else (x * 64).to(dtype)
    out = ops.replicate(x, bins, outputs)
    assert torch.equal(out, x.repeat_interleave(counts.long(), 1))
    if dtype.is_floating_point:
        grad = exact_inputs.exact_values(batch, outputs, dtype=dtype, device=device, seed=3)
        check_against_plain(lambda x: ops.replicate(x, bins, outputs), lambda x: x.repeat_interleave(counts.long(), 1), [x],
                            grad)


def test_replicate_behind_the_last_bin_is_zero_and_nan_stays_in_its_bin(device):
    x = torch.ones(2, 3, device=device, requires_grad=True)
    out = ops.replicate(x, torch.tensor([2, 2, 5], device=device), 7)
    assert torch.equal(out, torch.tensor([[1.0] * 5 + [0.0] * 2] * 2, device=device))
    grad = torch.ones_like(out)
    grad[0, 3] = grad[1, 6] = float("nan")
    grad_x, = torch.autograd.grad(out, x, grad)
    assert grad_x.isnan().nonzero().tolist() == [[0, 2]] and grad_x[1].tolist() == [2, 0, 3]


@pytest.mark.parametrize("case", [(64, 1536, 2), (256, 768, 16), (100, 256, 512), (8, 14336, 8)], ids=str)
def test_topology(device, case):
    tokens, ffn, experts = case
    padded_bins = route(random_ids(tokens, experts, 1, device), experts).padded_bins
    rows, columns = int(padded_bins[-1]) // 128, ffn // 128
    expected = [e * columns + j for e, size in enumerate(padded_bins.diff(prepend=padded_bins.new_zeros(1)).tolist())
                for _ in range(size // 128) for j in range(columns)]
    out = ops.topology(padded_bins, 128, rows + 1, columns)
    assert out.dtype == torch.int16 and torch.equal(out, torch.tensor(expected + [0] * columns, device=device).to(torch.int16))


def test_round_up_repeat_and_sum(device):
    x = torch.tensor([0, 1, 128, 129], dtype=torch.int32, device=device)
    assert ops.round_up(x, 128).tolist() == [0, 128, 128, 256] and ops.round_up(x, 128).dtype == torch.int32
    y = torch.arange(6.0, device=device).view(1, 6)
    assert ops.repeat(y, (1, 1)) is y and torch.equal(ops.repeat(y, (2, 1)), y.repeat(2, 1))
    assert torch.equal(ops.sum(y), y[0]) and torch.equal(ops.sum(y, 1), y.sum(1))


X, INDICES, IDS, BINS = torch.zeros(2, 4), torch.arange(4).int(), torch.tensor([0, 0, 1, 1]).int(), torch.tensor([2, 4]).int()


@pytest.mark.parametrize("call, words", [
    (lambda: ops.gather(X, INDICES, IDS, BINS, 1), r"gather: indices: expected x.size\(0\) \* top_k == 2 entries, got 4"),
    (lambda: ops.gather(X[0], INDICES, IDS, BINS, 2), r"gather: x: expected 2 dimensions, got \[4\]"),
    (lambda: ops.gather(X.int(), INDICES, IDS, BINS, 2), "gather: x: expected dtype .*, got torch.int32"),
    (lambda: ops.gather(X, INDICES, IDS[:3], BINS, 2), "gather: bin_ids: expected 4 entries, as in indices, got 3"),
    (lambda: ops.gather(X, INDICES.float(), IDS, BINS, 2), "gather: indices: expected dtype .*, got torch.float32"),
    (lambda: ops.padded_gather(X, INDICES, IDS, BINS, BINS[:1], 2),
     "padded_gather: padded_bins: expected 2 entries, as in bins, got 1"),
    (lambda: ops.padded_gather(X, INDICES.to("meta"), IDS, BINS, BINS, 2),
     "padded_gather: indices: expected device cpu, got meta"),
    (lambda: ops.scatter(X, INDICES, IDS, torch.ones(3), BINS, 2), "scatter: weights: expected 4 entries, one a slot, got 3"),
    (lambda: ops.padded_scatter(X, INDICES, IDS, None, BINS, BINS, 3),
     "padded_scatter: indices: expected a multiple of top_k == 3"),
    (lambda: ops.padded_scatter(X, INDICES, IDS, None, BINS, BINS, 0),
     "padded_scatter: top_k: expected an int of at least 1, got 0"),
    (lambda: ops.binned_gather(X, INDICES, BINS, -1, 2), "binned_gather: bin_size: expected an int of at least 0, got -1"),
    (lambda: ops.binned_scatter(X[None], INDICES, None, BINS, 2), "binned_scatter: x: expected 2 bins, as in bins, got 1"),
    (lambda: ops.sort(INDICES, 33), "sort: end_bit: expected None or 0 to 32 for torch.int32, got 33"),
    (lambda: ops.histogram(X, 4), "histogram: x: expected dtype int16, int32, int64, got torch.float32"),
    (lambda: ops.inclusive_cumsum(IDS[None], 0), "inclusive_cumsum: dim: expected 1, the last dimension, got 0"),
    (lambda: ops.replicate(X, BINS, 4), r"replicate: x: expected one column a bin \(2\), at least one, got 4"),
    (lambda: ops.topology(BINS, 0, 1, 1), "topology: block_size: expected an int of at least 1, got 0"),
    (lambda: ops.topology(BINS, 2, 2, 2**14 + 1), "topology: output_block_columns: expected at most 16384, since .* int16, got 16385"),
    (lambda: ops.sort(torch.zeros(2**15 + 1, dtype=torch.int16)), "sort: x: expected at most 32768 entries, .* got 32769"),
    (lambda: ops.round_up(X, 2), "round_up: x: expected dtype int32, int64, got torch.float32"),
])
def test_bad_arguments(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


# What was silent: rows lost, rows that came twice, or an "index out of bounds" that names nothing.
Y = torch.zeros(4, 4)


@pytest.mark.parametrize("call, words", [
    (lambda: ops.gather(X, INDICES - 1, IDS, BINS, 2), r"gather: indices: expected slots in \[0, 4\), got slots from -1 to 2"),
    (lambda: ops.scatter(Y, INDICES + 1, IDS, None, BINS, 2), r"scatter: indices: expected slots in \[0, 4\), got slots from 1 to 4"),
    (lambda: ops.padded_gather(X, INDICES // 2, IDS, BINS, BINS, 2),
     "padded_gather: indices: expected every slot once, got slot 0 2 times"),
    (lambda: ops.binned_gather(X, INDICES // 2, BINS, 2, 2), "binned_gather: indices: expected every slot once, got slot 0 2 times"),
    (lambda: ops.binned_scatter(Y.view(2, 2, 4), INDICES // 2, None, BINS, 2), "binned_scatter: indices: expected every slot once"),
    (lambda: ops.gather(X, INDICES, IDS, BINS + 1, 2), r"gather: bins: expected ascending .* at most 4, the number of slots, got \[3, 5\]"),
    (lambda: ops.gather(X, INDICES, IDS, BINS.flip(0), 2), r"gather: bins: expected ascending .*, got \[4, 2\]"),
    (lambda: ops.binned_gather(X, INDICES, BINS - 3, 2, 2), r"binned_gather: bins: expected ascending .*, got \[-1, 1\]"),
    (lambda: ops.gather(X, INDICES, IDS.flip(0), BINS, 2), "gather: bin_ids: expected 0 at entry 0, as bins have it, got 1"),
    (lambda: ops.gather(X, INDICES, IDS, BINS - 1, 2), "gather: bin_ids: expected 1 at entry 1, as bins have it, got 0"),
    (lambda: ops.gather(X, INDICES, IDS, (BINS - 1).clamp(max=2), 2), "gather: bin_ids: expected 1 at entry 1"),
    (lambda: ops.gather(X, INDICES, IDS, torch.tensor([2, 3]), 2), "gather: bin_ids: expected none at entry 3, as bins have it, got 1"),
    (lambda: ops.padded_gather(X, INDICES, IDS, BINS, torch.tensor([1, 4]), 2),
     r"padded_gather: padded_bins: expected room for the bins' \[2, 2\] rows, got \[1, 3\]"),
    (lambda: ops.padded_gather(X, INDICES, IDS, BINS, torch.tensor([2, -4]), 2),
     "padded_gather: padded_bins: expected a last entry of at least 0 and below .*, got -4"),
    (lambda: ops.padded_gather(X, INDICES, IDS, BINS, torch.tensor([8, 4]), 2), "padded_gather: padded_bins: expected ascending entries"),
    (lambda: ops.padded_scatter(Y, INDICES, IDS, None, BINS, BINS + 2, 2),
     r"padded_scatter: padded_bins: expected ascending .* at most 4, the number of rows, got \[4, 6\]"),
    (lambda: ops.scatter(Y[:3], INDICES, IDS, None, BINS, 2), r"scatter: bins: expected ascending .* at most 3, the number of rows"),
    (lambda: ops.replicate(X[:, :2], BINS, 3), r"replicate: bins: expected ascending .* at most 3, num_outputs, got \[2, 4\]"),
    (lambda: ops.replicate(X[:, :2], BINS.flip(0), 4), r"replicate: bins: expected ascending .*, got \[4, 2\]"),
    (lambda: ops.topology(BINS, 2, 1, 1), r"topology: padded_bins: expected ascending .* at most 2, block_size \* output_block_rows"),
    (lambda: ops.topology(BINS + 1, 2, 4, 1), r"topology: padded_bins: expected multiples of 2, got \[3, 5\]"),
    (lambda: kernels.padded_gather(X, INDICES // 2, IDS, None, BINS, BINS, 2), "padded_gather: indices: expected every slot once"),
    (lambda: kernels.binned_gather(X, INDICES, None, BINS + 1, 2, 2), "binned_gather: bins: expected ascending"),
    (lambda: kernels.padded_scatter_wgrad(Y, X, INDICES, IDS.flip(0), BINS, BINS, 2), "padded_scatter: bin_ids: expected 0 at entry 0"),
    (lambda: kernels.binned_scatter_wgrad(Y.view(2, 2, 4), X, INDICES // 2, BINS, 2), "binned_scatter: indices: expected every slot once"),
])
def test_indices_and_bins_that_would_lose_rows(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_bins_that_would_lose_rows_are_found_in_a_graph_too():
    compiled = torch.compile(lambda bins: ops.gather(X, INDICES, IDS, bins, 2), backend="aot_eager", fullgraph=True)
    assert compiled(BINS).shape == (4, 4)
    with pytest.raises(ValueError, match="gather: bins: expected ascending entries"):
        compiled(BINS + 1)


@pytest.mark.memcheck
@pytest.mark.gpu
@pytest.mark.parametrize("indices", [[0, 0, 1, 2], [4, -1, 2, 1], [2**31 - 1, -2**31, 0, 3]], ids=str)
@pytest.mark.parametrize("bins", [[2, 4], [4, 2], [-7, 4], [2**31 - 1, 5], [5, 9]], ids=str)
def test_indices_and_bins_on_a_device_touch_nothing_outside(monkeypatch, indices, bins):
    """On a device their values are not checked; every row of the result is one of x's rows, or zero."""
    monkeypatch.undo()  # such maps name a row twice
    indices, bins = (torch.tensor(t, dtype=torch.int32, device="cuda") for t in (indices, bins))
    bin_ids, padded_bins = IDS.cuda(), torch.tensor([3, 8], device="cuda")
    around = torch.full((22, 8), float("nan"), device="cuda")
    x = around[10:12].copy_(torch.tensor([[1.0], [2.0]], device="cuda")).requires_grad_()
    weights = torch.ones(4, device="cuda", requires_grad=True)
    exact_inputs.poison("cuda")
    for rows, out in (
        (lambda: ops.gather(x, indices, bin_ids, bins, 2), lambda y: ops.scatter(y, indices, bin_ids, weights, bins, 2)),
        (lambda: ops.padded_gather(x, indices, bin_ids, bins, padded_bins, 2),
         lambda y: ops.padded_scatter(y, indices, bin_ids, weights, bins, padded_bins, 2)),
        (lambda: ops.binned_gather(x, indices, bins, 3, 2), lambda y: ops.binned_scatter(y, indices, weights, bins, 2)),
    ):
        y = rows()
        assert bool(torch.isin(y, torch.tensor([0.0, 1.0, 2.0], device="cuda")).all())
        z = out(y)
        grads = torch.autograd.grad(z.sum(), (x, weights))
        assert all(bool(t.isfinite().all()) for t in (z, *grads))
    out = ops.replicate(x, torch.cat((bins, bins, bins, bins)), 6)
    assert all(bool(t.isfinite().all()) for t in (out, *torch.autograd.grad(out.sum(), x)))
    assert ops.topology(bins, 2, 3, 2).shape == (6,)
    torch.cuda.synchronize()
