"""TransformerEngine's permutation functions: its own cases at a CPU's size, gradients, ragged masks, padding, wrong arguments.

Shape suffixes: T tokens, E experts, K slots a token, H hidden, P permuted rows, S chunks, G groups.
"""

import pytest
import torch
import torch.nn.functional as F

from gbmoe.compat.transformer_engine import permutation as te
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.compat import checked
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

ALIGNS = [0, 16, 32, 128, 256]
# (tokens, experts, hidden, top_k)
SHAPES = [(64, 8, 40, 2), (64, 16, 24, 5), (48, 64, 16, 6), (33, 7, 7, 2), (1, 1, 8, 1), (0, 8, 16, 2)]


@pytest.fixture(autouse=True)
def maps_agree(monkeypatch):
    """Every call of an operator in these tests gets its maps checked."""
    monkeypatch.setattr(te, "gather_slots", checked(te.gather_slots))
    monkeypatch.setattr(te, "scatter_slots", checked(te.scatter_slots))


def random_mask(tokens, experts, top_k, device, seed=0):
    """TransformerEngine's ragged masks, tokens * top_k entries anywhere, with a token of all experts and one of none."""
    places = torch.randperm(tokens * experts, generator=exact_inputs.generator(device, seed), device=device)
    mask = (places < tokens * top_k).view(tokens, experts)
    if tokens > 4:
        mask[2], mask[3] = True, False
    return mask


def random_probs(mask, dtype, seed=1):
    """Multiples of 1/64 above 0 where routed, NaN elsewhere: what nobody may read."""
    probs = exact_inputs.exact_values(*mask.shape, dtype=dtype, device=mask.device, seed=seed).abs() + 1 / 64
    return torch.where(mask, probs, float("nan"))


def padded_counts(mask, align):
    count_E = mask.sum(0)
    return count_E if align == 0 else -(-count_E // align) * align


def rows_of_mask(mask, align):
    """(token, expert) of each row, made by hand, with -1 for padding; rows are expert-major with ascending tokens."""
    token_of_row, expert_of_row = [], []
    for e, target in enumerate(padded_counts(mask, align).tolist()):
        tokens = mask[:, e].nonzero().flatten().tolist()
        token_of_row += tokens + [-1] * (target - len(tokens))
        expert_of_row += [e] * len(tokens) + [-1] * (target - len(tokens))
    return tuple(torch.tensor(t, dtype=torch.int64, device=mask.device) for t in (token_of_row, expert_of_row))


def plain_rows(x_TH, token_P):
    """x[token], and for -1 the zero row that stands after the last."""
    return F.pad(x_TH, (0, 0, 0, 1))[token_P]


def plain_sums(y_PH, token_P, tokens):
    """Each token's rows, summed."""
    live_P = token_P >= 0
    return y_PH.new_zeros(tokens, y_PH.size(1)).index_add(0, token_P[live_P], y_PH[live_P])


def plain_probs(probs_TE, token_P, expert_P):
    return F.pad(probs_TE.flatten(), (0, 1))[torch.where(token_P >= 0, token_P * probs_TE.size(1) + expert_P, -1)]


def plain_permute(x_TH, probs_TE, token_P, expert_P):
    """(rows, probs), a routed probability of 0 clearing its row."""
    rows_PH = plain_rows(x_TH, token_P)
    if probs_TE is None:
        return rows_PH, None
    probs_P = plain_probs(probs_TE, token_P, expert_P)
    return torch.where(probs_P[:, None] != 0, rows_PH, 0), probs_P


def plain_unpermute(y_PH, probs_TE, tokens, token_P, expert_P):
    return plain_sums(y_PH if probs_TE is None else y_PH * plain_probs(probs_TE, token_P, expert_P)[:, None], token_P, tokens)


def check_against_plain(function, plain, inputs, grads):
    """All results and gradients of function(*inputs), as accurate as plain's in float32, both against plain's in float64."""
    def run(function, dtype=None):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        gradients = torch.autograd.grad(outs, leaves, [g.to(dtype or g.dtype) for g in grads])
        return [*(out.detach() for out in outs), *gradients]

    wide = run(plain, torch.float64)
    narrow = wide if inputs[0].dtype == torch.float64 else run(plain, torch.float32)
    got = run(function)
    for i, (result, baseline, reference) in enumerate(zip(got, narrow, wide)):
        assert_as_accurate_as(result, baseline.to(result.dtype), reference, f"result {i}")
    return got


# ---------------------------------------------------------------------------------------------------------------- the map


def test_row_map_of_a_small_mask(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]], device=device)
    expected = [[0, 3, -1, 0, 1, -1, 2], [1, 5, -1, 0, 2, -1, 2], [6, -1, -1, 2, -1, -1, 1], [2, 4, -1, 0, 1, -1, 2],
                [-1, -1, -1, -1, -1, -1, 0]]
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        row_map = te.mask_row_map(mask.to(dtype))
        assert row_map.dtype == torch.int32 and row_map.tolist() == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_map(device, shape):
    tokens, experts, _, top_k = shape
    mask = random_mask(tokens, experts, top_k, device)
    token_P, expert_P = rows_of_mask(mask, 0)
    row_map = te.mask_row_map(mask).tolist()
    assert len(row_map) == tokens
    for t, entries in enumerate(row_map):
        rows = (token_P == t).nonzero().flatten().tolist()
        assert entries[-1] == len(rows) and entries[:len(rows)] == rows
        assert entries[experts:experts + len(rows)] == expert_P[rows].tolist()


@pytest.mark.parametrize("tokens, experts", [(300, 31), (70, 33), (40, 256), (9, 1000), (5, 1030), (200, 1), (0, 4)])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_maps_are_the_reference_s(device, tokens, experts, density):
    """Map, slots and padded slots of masks of every dtype and layout, against plain PyTorch on the CPU."""
    drawn = torch.rand(tokens, experts, generator=exact_inputs.generator("cpu", 1)) < density
    pad_offsets = torch.arange(experts) * 3
    rows = int(drawn.sum()) + 3 * experts - 2  # the last expert's last rows may lie after it
    expected_map = te._mask_row_map_reference(drawn)
    row_TE, _, count_T = te._columns(expected_map)
    used_TE = torch.arange(experts) < count_T.unsqueeze(1)
    for i, dtype in enumerate((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)):
        mask = drawn.to(dtype) * (1 if dtype.itemsize == 1 else 256)  # entries whose lowest byte is 0
        mask = mask.to(device)
        mask = mask.t().contiguous().t() if i % 2 else mask
        for pad in (None, pad_offsets):
            exact_inputs.poison(device)
            row_map, row_of_slot, slot_of_row = te._mask_rows(mask, None if pad is None else pad.to(device), rows)
            padded_TE = torch.where(used_TE, row_TE if pad is None else row_TE + pad[te._columns(expected_map)[1]].int(), -1)
            padded_TE = torch.where(padded_TE < rows, padded_TE, -1)
            expected_P = torch.full((rows,), -1, dtype=torch.int32)
            expected_P[padded_TE[padded_TE >= 0].long()] = 0
            assert torch.equal(row_map.cpu(), expected_map) and torch.equal(te.mask_row_map(mask).cpu(), expected_map)
            assert torch.equal(torch.where(used_TE, row_of_slot.cpu(), -1), padded_TE)
            assert torch.equal(slot_of_row.cpu(), expected_P)


@pytest.mark.memcheck
def test_a_map_that_leads_outside_touches_nothing(device):
    x = torch.randn(9, 8, device=device, requires_grad=True)
    row_map = torch.tensor([[0, 99, -5, 1, 2, 0, 3],  # rows that are not there
                            [1, 2, 3, 7, -1, 2, 3],   # experts that are not there
                            [4, 5, 6, 0, 1, 2, 70],   # more slots than experts
                            [7, 8, 0, 0, 1, 2, -3]], dtype=torch.int32, device=device)
    probs = torch.ones(4, 3, device=device, requires_grad=True)
    out = te.moe_unpermute(x, row_map, probs)
    torch.testing.assert_close(out, torch.stack((x[0], x[3], x[4:7].sum(0), torch.zeros_like(x[0]))))
    grad_x, grad_probs = torch.autograd.grad(out.sum(), (x, probs))
    assert grad_x.sum(1).tolist() == [8, 0, 0, 8, 8, 8, 8, 0, 0]
    assert (grad_probs != 0).tolist() == [[False, True, False], [False, False, True], [True] * 3, [False] * 3]


# ------------------------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("probs_kind", ["none", "same", "float32"])
def test_permute_and_unpermute_a_mask(device, shape, dtype, probs_kind):
    tokens, experts, hidden, top_k = shape
    mask = random_mask(tokens, experts, top_k, device)
    token_P, expert_P = rows_of_mask(mask, 0)
    rows = token_P.numel()
    x = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=1)
    y = exact_inputs.exact_values(rows, hidden, dtype=dtype, device=device, seed=2)
    grad = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=3)
    probs = [] if probs_kind == "none" else [random_probs(mask, dtype if probs_kind == "same" else torch.float32)]
    grad_probs = [exact_inputs.exact_values(rows, dtype=p.dtype, device=device, seed=4) for p in probs]
    exact_inputs.poison(device)

    def permute(x, p=None):
        if p is None:
            out, _ = te.moe_permute(x, mask, num_out_tokens=rows)
            return out
        return te.moe_permute_with_probs(x, p, mask, num_out_tokens=rows)[:2]

    def plain(x, p=None):
        out, probs_P = plain_permute(x, p, token_P, expert_P)
        return out if p is None else (out, probs_P)

    got = check_against_plain(permute, plain, [x, *probs], [y, *grad_probs])
    assert torch.equal(got[0], x[token_P])
    _, row_id_map = te.moe_permute(x, mask, rows)
    got = check_against_plain(
        lambda y, p=None: te.moe_unpermute(y, row_id_map, merging_probs=p, restore_shape=x.shape, pad_offsets=None),
        lambda y, p=None: plain_unpermute(y, p, tokens, token_P, expert_P), [y, *probs], [grad])
    if probs:
        assert bool((got[2][~mask] == 0).all())


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_permute_and_pad(device, shape, align, dtype):
    tokens, experts, hidden, top_k = shape
    mask = random_mask(tokens, experts, top_k, device)
    token_P, expert_P = rows_of_mask(mask, align)
    rows = token_P.numel()
    x = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=1)
    probs = random_probs(mask, torch.float32)
    y = exact_inputs.exact_values(rows, hidden, dtype=dtype, device=device, seed=2)
    y[token_P < 0] = float("nan")  # in forward as in backward, nobody may read the padding
    grad_probs = exact_inputs.exact_values(rows, dtype=torch.float32, device=device, seed=4)
    grad_probs[token_P < 0] = float("nan")
    grad = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=3)
    counts = mask.sum(0).cpu()
    exact_inputs.poison(device)

    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    out, probs_P, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(*leaves, mask, counts, align)
    expected = padded_counts(mask, align)
    assert torch.equal(target, expected) and target.dtype == torch.int64 and target.device == x.device
    results = (out, probs_P, row_id_map, pad_offsets, target)
    counted_there = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0).int(), align)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(counted_there, results))
    if torch.equal(expected, mask.sum(0)):
        assert pad_offsets is None
    else:
        padding = expected - mask.sum(0)
        assert torch.equal(pad_offsets, padding.cumsum(0) - padding) and pad_offsets.device == x.device
    clean = [torch.nan_to_num(t) for t in (y, grad_probs)]
    plain = plain_permute(x.double(), probs.double(), token_P, expert_P)
    assert torch.equal(out.double(), plain[0]) and torch.equal(probs_P.double(), plain[1])
    grad_x, grad_p = torch.autograd.grad((out, probs_P), leaves, (y, grad_probs))
    _, _, exact_x, exact_p = check_against_plain(lambda x, p: te.moe_permute_and_pad_with_probs(x, p, mask, counts, align)[:2],
                                                 lambda x, p: plain_permute(x, p, token_P, expert_P), [x, probs], clean)
    assert torch.equal(grad_x, exact_x) and torch.equal(grad_p, exact_p)

    def unpermute(y, p=None):
        return te.moe_unpermute(y, row_id_map, p, x.shape, pad_offsets=pad_offsets)

    for merging in ([], [probs]):
        got = check_against_plain(unpermute, lambda y, p=None: plain_unpermute(y, p, tokens, token_P, expert_P),
                                  [clean[0], *merging], [grad])
        assert torch.equal(unpermute(y, *merging), got[0])
        assert bool((got[1][token_P < 0] == 0).all())
        if merging:
            y_, p_ = y.clone().requires_grad_(), probs.clone().requires_grad_()
            assert torch.equal(torch.autograd.grad(unpermute(y_, p_), p_, grad)[0], got[2])


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("columns", [[0, 3], [1], [0, 1, 2, 3], []], ids=str)
def test_empty_experts_and_one_with_everything(device, align, columns):
    mask = torch.zeros(32, 4, dtype=torch.bool, device=device)
    mask[:, columns] = True
    x = torch.randn(32, 8, device=device, requires_grad=True)
    probs = random_probs(mask, torch.float32)
    out, probs_P, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), align)
    assert target.tolist() == [(-(-32 // max(align, 1)) * max(align, 1)) * (e in columns) for e in range(4)]
    assert (pad_offsets is None) == (align <= 32 or not columns)
    back = te.moe_unpermute(out, row_id_map, None, x.shape, pad_offsets=pad_offsets)
    assert torch.allclose(back, len(columns) * x)
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], torch.full_like(x, len(columns)))


def test_a_probability_of_zero_clears_its_row(device):
    mask = random_mask(40, 8, 3, device)
    token_P, expert_P = rows_of_mask(mask, 16)
    probs = random_probs(mask, torch.float32)
    probs[0, mask[0]] = 0.0
    probs[2, :4] = -0.0
    x = torch.randn(40, 24, device=device, dtype=torch.float64)
    x[0] = float("inf")  # a factor of 0 would make NaN of it
    x, probs = x.requires_grad_(), probs.requires_grad_()
    out, probs_P, row_id_map, pad_offsets, _ = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    cleared = (token_P == 0) | ((token_P == 2) & (expert_P < 4))
    assert bool((out[cleared] == 0).all()) and bool((probs_P[cleared] == 0).all())
    live = (token_P >= 0) & ~cleared
    assert torch.equal(out[live], x[token_P[live]])
    grad_x, grad_probs = torch.autograd.grad((out, probs_P), (x, probs), (torch.ones_like(out), torch.ones_like(probs_P)))
    assert bool((grad_x[0] == 0).all()) and torch.equal(grad_x[2], torch.full_like(x[2], 4))
    assert torch.equal(grad_probs, mask.to(grad_probs.dtype))  # the probability itself still has its gradient


def test_nan_of_an_expert_stays_with_its_tokens(device):
    mask = random_mask(40, 8, 2, device)
    token_P, expert_P = rows_of_mask(mask, 32)
    probs = random_probs(mask, torch.float32)
    x = torch.ones(40, 16, device=device)
    out, _, row_id_map, pad_offsets, _ = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 32)
    out[expert_P == 5] = float("nan")
    back = te.moe_unpermute(out, row_id_map, probs, pad_offsets=pad_offsets)
    assert torch.equal(back.isnan().any(1), mask[:, 5])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=dtype_id)
def test_bytes_travel_as_they_are(device, dtype):
    mask = random_mask(40, 8, 2, device)
    payload = torch.randint(256, (40, 32), generator=exact_inputs.generator(device, 1), device=device).to(torch.uint8)
    probs = random_probs(mask, torch.float32)
    probs[2, 3] = 0.0
    probs.requires_grad_()
    arguments = (probs, mask, mask.sum(0), 16)
    out, probs_P, *_ = te.moe_permute_and_pad_with_probs(payload.view(dtype), *arguments)
    expected, expected_probs, *_ = te.moe_permute_and_pad_with_probs(payload.float(), *arguments)
    assert out.dtype == dtype and torch.equal(out.view(torch.uint8), expected.to(torch.uint8))
    assert torch.equal(probs_P, expected_probs)
    grad_probs, = torch.autograd.grad(probs_P.sum(), probs)
    assert torch.equal(grad_probs, mask.float())
    split_sizes, order = torch.tensor([10, 30]), torch.tensor([1, 0])
    sorted_rows = te.moe_sort_chunks_by_index(payload.view(dtype), split_sizes, order)
    assert torch.equal(sorted_rows.view(torch.uint8), payload.roll(30, 0))


@pytest.mark.memcheck
def test_rows_behind_and_slots_beyond_num_out_tokens(device):
    mask = random_mask(20, 4, 2, device)
    x = torch.randn(20, 8, device=device, requires_grad=True)
    full, row_id_map = te.moe_permute(x, mask)  # counts the rows itself
    assert full.size(0) == int(mask.sum())
    longer, _ = te.moe_permute(x, mask, full.size(0) + 5)
    assert torch.equal(longer[:-5], full) and bool((longer[-5:] == 0).all())
    for rows in (full.size(0) - 3, 0, torch.tensor(full.size(0) - 7)):
        shorter, _ = te.moe_permute(x, mask, rows)
        assert torch.equal(shorter, full[:int(rows)])
        back = te.moe_unpermute(shorter, row_id_map, restore_shape=x.shape)
        token_P = rows_of_mask(mask, 0)[0][:int(rows)]
        torch.testing.assert_close(back, plain_sums(shorter, token_P, 20))
        torch.testing.assert_close(torch.autograd.grad(shorter.sum(), x)[0], plain_sums(torch.ones_like(shorter), token_P, 20))


def test_padded_rows_that_inp_lacks_count_as_dropped(device):
    mask = random_mask(20, 4, 2, device)
    token_P, _ = rows_of_mask(mask, 16)
    x = torch.randn(20, 8, device=device)
    probs = random_probs(mask, torch.float32)
    out, _, row_id_map, pad_offsets, _ = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    short = out[:int((token_P >= 0).nonzero()[-3])]
    back = te.moe_unpermute(short, row_id_map, pad_offsets=pad_offsets)
    torch.testing.assert_close(back, plain_sums(short, token_P[:short.size(0)], 20))


# -------------------------------------------------------------------------------------------------------------- index maps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("dropped", ["none", "ids", "capacity"])
def test_permute_and_unpermute_ids(device, shape, dtype, dropped):
    tokens, experts, hidden, top_k = shape
    ids = exact_inputs.expert_ids(tokens, experts, top_k, device=device, seed=1)
    if dropped == "ids" and tokens > 4:
        ids[1], ids[3, 0] = -1, -1
    slot_P = torch.tensor([s for e in range(experts) for s in (ids.flatten() == e).nonzero().flatten().tolist()],
                          dtype=torch.int64, device=device)
    num_out_tokens = -1 if dropped == "none" else slot_P.numel() * (3 if dropped == "capacity" else 4) // 4
    slot_P = slot_P[:num_out_tokens] if num_out_tokens > 0 else slot_P
    x = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=2)
    probs = exact_inputs.exact_values(tokens, top_k, dtype=torch.float32, device=device, seed=3)
    gone = torch.ones(tokens * top_k, dtype=torch.bool, device=device)
    gone[slot_P] = False
    probs[gone.view(tokens, top_k)] = float("nan")
    y = exact_inputs.exact_values(slot_P.numel(), hidden, dtype=dtype, device=device, seed=4)
    grad = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=5)
    exact_inputs.poison(device)

    out, row_id_map = te.moe_permute(x, ids.int(), num_out_tokens, map_type="index")
    assert torch.equal(out, x[slot_P // top_k])
    expected_map = torch.full((tokens * top_k,), -1, dtype=torch.int32, device=device)
    expected_map[slot_P] = torch.arange(slot_P.numel(), dtype=torch.int32, device=device)
    assert torch.equal(row_id_map, expected_map.view(tokens, top_k).t().flatten())  # all first choices, then all second ones

    token_P = slot_P // top_k
    check_against_plain(lambda x: te.moe_permute(x, ids, num_out_tokens, map_type="index")[0],
                        lambda x: plain_rows(x, token_P), [x], [y])

    def plain(y, p=None):
        return plain_sums(y if p is None else y * p.flatten()[slot_P, None], token_P, tokens)

    got = check_against_plain(lambda y, p: te.moe_unpermute(y, row_id_map, p, map_type="index"), plain, [y, probs], [grad])
    assert bool((got[2].flatten()[gone] == 0).all())
    check_against_plain(lambda y: te.moe_unpermute(y, row_id_map, restore_shape=x.shape, map_type="index"), plain, [y], [grad])


def test_ids_without_probs_and_shape_count_every_slot_by_itself(device):
    ids = torch.tensor([[1, 0], [0, 2]], device=device)
    x = torch.tensor([[1.0], [2.0]], device=device)
    out, row_id_map = te.moe_permute(x, ids, map_type="index")
    assert te.moe_unpermute(out, row_id_map, map_type="index").flatten().tolist() == [1, 2, 1, 2]


# ------------------------------------------------------------------------------------------------------------- chunk sorts


def random_chunks(tokens, ranks, experts, seed=0):
    """Sizes of ranks * experts chunks, rank-major, and the order that puts an expert's chunks side by side."""
    chunk_T = torch.randint(ranks * experts, (tokens,), generator=exact_inputs.generator("cpu", seed))
    sizes = torch.bincount(chunk_T, minlength=ranks * experts)
    return sizes.int(), torch.arange(ranks * experts).view(ranks, experts).T.flatten().int()


def plain_sort(x, sizes, order):
    chunks = x.split(sizes.tolist())
    return torch.cat([chunks[i] for i in order.tolist()])


@pytest.mark.pairs
@pytest.mark.parametrize("case", [(64, 1, 7), (64, 2, 7), (100, 8, 16), (3, 2, 4), (0, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("align", [None, *ALIGNS])
def test_sort_chunks(device, case, dtype, align):
    tokens, ranks, experts = case
    sizes, order = random_chunks(tokens, ranks, experts)
    x = exact_inputs.exact_values(tokens, 12, dtype=dtype, device=device, seed=1)
    probs = exact_inputs.exact_values(tokens, dtype=torch.float32, device=device, seed=2)
    counts = sizes[order.long()].view(experts, ranks).sum(1).tolist()
    targets = [-(-n // align) * align if align else n for n in counts]

    def pad(t):
        return torch.cat([torch.cat((part, part.new_zeros(target - n, *part.shape[1:])))
                          for part, n, target in zip(t.split(counts), counts, targets)])

    def plain(x, probs):
        return pad(plain_sort(x, sizes, order)), pad(plain_sort(probs, sizes, order))

    grads = [exact_inputs.exact_values(sum(targets), 12, dtype=dtype, device=device, seed=3),
             exact_inputs.exact_values(sum(targets), dtype=torch.float32, device=device, seed=4)]
    exact_inputs.poison(device)
    if align is None:
        def sort(x, p):
            return te.moe_sort_chunks_by_index_with_probs(x, p, sizes, order)

        for places in ((sizes, order), (sizes.to(device), order), (sizes.to(device), order.to(device))):
            assert torch.equal(te.moe_sort_chunks_by_index(x, *places), plain_sort(x, sizes, order))
    else:
        def sort(x, p):
            return te.moe_sort_chunks_and_pad_by_index_with_probs(x, p, sizes, order, align, experts)[:2]

        out, none, row_id_map, target_G = te.moe_sort_chunks_and_pad_by_index_with_probs(
            x, None, sizes.to(device), order, align, experts)
        assert none is None and target_G.tolist() == targets and target_G.dtype == torch.int64 and target_G.device == x.device
        assert torch.equal(te.moe_unpermute(out, row_id_map, map_type="index"), x)
    got = check_against_plain(sort, plain, [x, probs], grads)
    assert torch.equal(got[0], plain(x, probs)[0]) and torch.equal(got[1], plain(x, probs)[1])


def test_sorting_there_and_back_is_the_identity(device):
    """TransformerEngine's own round trip: permute, sort, weigh, sort back, unpermute."""
    mask = random_mask(40, 8, 2, device)
    x = torch.randn(40, 16, dtype=torch.float64, device=device, requires_grad=True)
    probs = random_probs(mask, torch.float64).requires_grad_()
    rows = int(mask.sum())
    sizes, order = random_chunks(rows, 2, 4)
    out, probs_P, row_id_map = te.moe_permute_with_probs(x, probs, mask, rows)
    out, probs_P = te.moe_sort_chunks_by_index_with_probs(out, probs_P, sizes, order)
    out = te.moe_sort_chunks_by_index(out * probs_P.unsqueeze(-1), sizes[order.long()], order.long().argsort().int())
    out = te.moe_unpermute(out, row_id_map, restore_shape=x.shape)
    weight_T = torch.where(mask, probs, 0).sum(1)
    torch.testing.assert_close(out, x * weight_T[:, None])
    grad_x, grad_probs = torch.autograd.grad(out.sum(), (x, probs))
    torch.testing.assert_close(grad_x, weight_T[:, None].expand_as(x))
    torch.testing.assert_close(grad_probs, torch.where(mask, x.sum(1, keepdim=True), 0))


def test_rows_behind_the_last_chunk(device):
    x = torch.randn(10, 4, device=device, requires_grad=True)
    sizes, order = torch.tensor([2, 0, 4]), torch.tensor([2, 0, 1])
    out = te.moe_sort_chunks_by_index(x, sizes, order)
    assert torch.equal(out, x[[2, 3, 4, 5, 0, 1, 6, 7, 8, 9]])
    out, _, row_id_map, target = te.moe_sort_chunks_and_pad_by_index_with_probs(x, None, sizes, order, 4, 3)
    assert target.tolist() == [4, 4, 0] and torch.equal(out[:6], x[[2, 3, 4, 5, 0, 1]]) and bool((out[6:] == 0).all())
    assert row_id_map.tolist() == [4, 5, 0, 1, 2, 3, -1, -1, -1, -1]
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0].sum(1), torch.tensor([4.0] * 6 + [0.0] * 4, device=device))


SORTS = [
    lambda x, sizes, order: te.moe_sort_chunks_by_index(x, sizes, order),
    lambda x, sizes, order: te.moe_sort_chunks_by_index_with_probs(x, x[:, 0].float(), sizes, order)[0],
    lambda x, sizes, order: te.moe_sort_chunks_and_pad_by_index_with_probs(x, None, sizes, order, 4, 3)[0],
]
WRONG_TABLES = [
    ([4, 4, 4], [0, 1, 2], r"split_sizes: expected a sum of at most inp.size\(0\) == 10, got 12"),
    ([4, 8, -2], [0, 1, 2], "split_sizes: expected no negative size, got -2"),
    ([2**62, 2**62, 2**63 - 1], [0, 1, 2], "split_sizes: expected a sum of at most"),  # the sum of which is -1
    ([4, 4, 2], [0, 0, 2], r"sorted_index: expected each of 0 to 2 once, got \[0, 0, 2\]"),
    ([4, 4, 2], [0, 1, 3], r"sorted_index: expected each of 0 to 2 once, got \[0, 1, 3\]"),
    ([4, 4, 2], [-1, 1, 2], r"sorted_index: expected each of 0 to 2 once, got \[-1, 1, 2\]"),
]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("sizes, order, words", WRONG_TABLES)
def test_tables_on_the_cpu_that_would_lose_rows(device, sort, sizes, order, words):
    with pytest.raises(ValueError, match=words):
        sort(torch.ones(10, 8, device=device), torch.tensor(sizes), torch.tensor(order))


def test_tables_that_would_lose_rows_are_found_in_a_graph_too():
    compiled = torch.compile(te.moe_sort_chunks_by_index, backend="aot_eager", fullgraph=True)
    x, order = torch.randn(10, 4), torch.tensor([1, 0])
    assert torch.equal(compiled(x, torch.tensor([4, 6]), order), x.roll(6, 0))
    with pytest.raises(ValueError, match="split_sizes: expected a sum of at most"):
        compiled(x, torch.tensor([4, 7]), order)


@pytest.mark.memcheck
@pytest.mark.gpu
@pytest.mark.parametrize("sizes, order", [
    *((sizes, order) for sizes, order, _ in WRONG_TABLES[:2] + WRONG_TABLES[3:]),
    ([4, 4, 2], [2**40, -2**40, 7]), ([2**31 + 3, -2**31, 5], [2, 1, 0]), ([10**6, -10**6, 10], [2, 0, 1]),
])
def test_tables_on_a_device_touch_nothing_outside(monkeypatch, sizes, order):
    """On a device their values are not checked; every row of the result is one of inp's rows, or zero."""
    monkeypatch.undo()  # such maps name a row twice
    tables = torch.tensor(sizes, device="cuda"), torch.tensor(order, device="cuda")
    around = torch.full((30, 8), float("nan"), device="cuda")
    x = around[10:20].copy_(torch.arange(1.0, 11, device="cuda").unsqueeze(1)).requires_grad_()
    for sort in SORTS:
        exact_inputs.poison("cuda")
        try:
            out = sort(x, *tables)
        except ValueError as error:  # the padded sort has the number of rows read back
            assert "split_sizes" in str(error)
            continue
        assert bool(((out >= 0) & (out <= 10)).all())
        grad_x, = torch.autograd.grad(out.sum(), x)
        assert bool(grad_x.isfinite().all())
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------------- all of them


def test_repeats_give_the_same_bits(device):
    mask = random_mask(200, 16, 4, device)
    x = torch.randn(200, 40, device=device).bfloat16().requires_grad_()
    probs = random_probs(mask, torch.float32).requires_grad_()

    def run():
        out, probs_P, row_id_map, pad_offsets, _ = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
        back = te.moe_unpermute(out, row_id_map, probs, x.shape, pad_offsets=pad_offsets)
        return out, back, *torch.autograd.grad(back.float().square().sum() + probs_P.sum(), (x, probs))

    first = run()
    assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, run()))


def there_and_back(x, probs, mask, rows):
    out, probs_P, row_id_map = te.moe_permute_with_probs(x, probs, mask, rows)
    back = te.moe_unpermute(out, row_id_map, probs, x.shape)
    return out, probs_P, row_id_map, back, *torch.autograd.grad(back.square().sum() + probs_P.sum(), (x, probs))


def there_and_back_inputs(seed, device="cuda"):
    mask = random_mask(200, 16, 4, device, seed)
    x = torch.randn(200, 40, generator=exact_inputs.generator(device, seed), device=device).bfloat16()
    return x.requires_grad_(), random_probs(mask, torch.float32, seed).requires_grad_(), mask


@pytest.mark.gpu
def test_no_host_wait(monkeypatch):
    monkeypatch.undo()  # the check of the maps waits
    inputs = there_and_back_inputs(1)
    there_and_back(*inputs, 900)
    with cuda_graphs.no_host_wait():
        there_and_back(*inputs, 900)


@pytest.mark.gpu
def test_one_cuda_graph_serves_every_mask(monkeypatch):
    monkeypatch.undo()
    inputs = there_and_back_inputs(1)
    graph, captured = cuda_graphs.captured(lambda: there_and_back(*inputs, 900))
    for seed in (1, 2, 3):
        new = there_and_back_inputs(seed)
        with torch.no_grad():
            for static, value in zip(inputs, new):
                static.copy_(value)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, there_and_back(*new, 900))), f"seed {seed}"


def test_opcheck(device):
    # All entries in use: what is not, a kernel does not write.
    mask, pad_offsets = torch.ones(6, 3, dtype=torch.bool, device=device), torch.tensor([0, 2, 2], device=device)
    row_map, *_ = te._mask_rows(mask, None, None)
    for arguments in ((mask, None, None), (mask, pad_offsets, 21)):
        torch.library.opcheck(torch.ops.gbmoe.mask_rows.default, arguments)
    probs = torch.tensor([0.0, 1.0, 2.0], device=device).expand(6, 3)
    for arguments in ((*te._columns(row_map), pad_offsets, probs, 21), (row_map, None, None, None, None, 9)):
        torch.library.opcheck(torch.ops.gbmoe.map_slots.default, arguments)
    x, sizes, order = torch.randn(6, 3, device=device), torch.tensor([2, 0, 3, 1]), torch.tensor([2, 0, 1, 3])
    for arguments in ((sizes, order, 0, 0), (sizes.to(device), order, 2, 4), (sizes.to(device), order.to(device), 4, 0)):
        torch.library.opcheck(torch.ops.gbmoe.chunk_rows.default, (x, *arguments, "moe_sort_chunks_by_index"))


def test_compiles_without_a_graph_break(device):
    mask = random_mask(20, 4, 2, device)
    x, probs = torch.randn(20, 8, device=device), random_probs(mask, torch.float32)
    rows = int(mask.sum())

    def there_and_back_again(x, probs, mask):
        out, probs_P, row_id_map = te.moe_permute_with_probs(x, probs, mask, rows)
        return te.moe_unpermute(out * probs_P[:, None], row_id_map, restore_shape=x.shape)

    compiled = torch.compile(there_and_back_again, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, probs, mask), there_and_back_again(x, probs, mask))


def test_the_old_name_of_merging_probs(device):
    mask = random_mask(8, 4, 2, device)
    out, row_id_map = te.moe_permute(torch.randn(8, 4, device=device), mask)
    probs = random_probs(mask, torch.float32)
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        assert torch.equal(te.moe_unpermute(out, row_id_map, probs=probs), te.moe_unpermute(out, row_id_map, probs))


X, MASK, PROBS, SIZES = torch.zeros(3, 4), torch.ones(3, 2, dtype=torch.bool), torch.ones(3, 2), torch.tensor([1, 2])
MAP = te.mask_row_map(MASK)


@pytest.mark.parametrize("call, words", [
    (lambda: te.moe_permute(X[0], MASK, 6), r"moe_permute: inp: expected 2 dimensions, got \[4\]"),
    (lambda: te.moe_permute(X.int(), MASK, 6), "moe_permute: inp: expected dtype .*, got torch.int32"),
    (lambda: te.moe_permute(X, MASK[:2], 6), r"moe_permute: routing_map: expected shape \[3, E\], E at least 1, got \[2, 2\]"),
    (lambda: te.moe_permute(X, MASK.float(), 6), "moe_permute: routing_map: expected dtype .*, got torch.float32"),
    (lambda: te.moe_permute(X, MASK.to("meta"), 6), "moe_permute: routing_map: expected device cpu, got meta"),
    (lambda: te.moe_permute(X, MASK, -2), "moe_permute: num_out_tokens: expected at least -1, got -2"),
    (lambda: te.moe_permute(X, MASK, 6, map_type="both"), "moe_permute: map_type: expected 'mask' or 'index', got 'both'"),
    (lambda: te.moe_permute(X, MASK[:2].int(), 6, map_type="index"),
     "moe_permute: routing_map: expected 3 tokens, as in inp, got 2"),
    (lambda: te.moe_permute_with_probs(X, None, MASK, 6),
     "moe_permute_with_probs: probs: expected a torch.Tensor, got NoneType"),
    (lambda: te.moe_permute_with_probs(X, PROBS[:, :1], MASK, 6),
     r"moe_permute_with_probs: probs: expected shape \[3, 2\], got \[3, 1\]"),
    (lambda: te.moe_permute_and_pad_with_probs(X, PROBS, MASK, None, 16),
     "tokens_per_expert: expected a torch.Tensor, got NoneType"),
    (lambda: te.moe_permute_and_pad_with_probs(X, PROBS, MASK, SIZES[:1], 16),
     r"tokens_per_expert: expected shape \[2\], got \[1\]"),
    (lambda: te.moe_permute_and_pad_with_probs(X, PROBS, MASK, SIZES, 16),
     r"tokens_per_expert: expected the mask's \[3, 3\], got \[1, 2\]"),
    (lambda: te.moe_permute_and_pad_with_probs(X, PROBS, MASK, SIZES, -1), "align_size: expected an int of at least 0, got -1"),
    (lambda: te.moe_unpermute(X.to(torch.float8_e5m2), MAP), "moe_unpermute: inp: expected dtype .*, got torch.float8_e5m2"),
    (lambda: te.moe_unpermute(X, MAP.long()), "moe_unpermute: row_id_map: expected dtype int32, got torch.int64"),
    (lambda: te.moe_unpermute(X, MAP[:, :4]), r"moe_unpermute: row_id_map: expected 2 \* E \+ 1 columns, got 4"),
    (lambda: te.moe_unpermute(X, MAP, PROBS[:2]), r"moe_unpermute: merging_probs: expected shape \[3, 2\], got \[2, 2\]"),
    (lambda: te.moe_unpermute(X, MAP, PROBS, probs=PROBS),
     "moe_unpermute: probs: expected None together with merging_probs, got both"),
    (lambda: te.moe_unpermute(X, MAP, restore_shape=(3, 5)), r"moe_unpermute: restore_shape: expected \(3, 4\), got \(3, 5\)"),
    (lambda: te.moe_unpermute(X, MAP, pad_offsets=SIZES[:1]),
     r"moe_unpermute: pad_offsets: expected shape \[2\], got \[1\]"),
    (lambda: te.moe_unpermute(X, MAP[0], PROBS, map_type="index"),
     "moe_unpermute: merging_probs: expected 5 entries, as in row_id_map, got 6"),
    (lambda: te.moe_sort_chunks_by_index(X, SIZES, SIZES[:1]), "sorted_index: expected 2 chunks, as in split_sizes, got 1"),
    (lambda: te.moe_sort_chunks_by_index(X, SIZES.to("meta"), SIZES), "split_sizes: expected device cpu, got meta"),
    (lambda: te.moe_sort_chunks_by_index_with_probs(X, None, SIZES, SIZES), "probs: expected a torch.Tensor, got NoneType"),
    (lambda: te.moe_sort_chunks_by_index_with_probs(X, PROBS[:2, 0], SIZES, SIZES), r"probs: expected shape \[3\], got \[2\]"),
    (lambda: te.moe_sort_chunks_and_pad_by_index_with_probs(X, None, SIZES, SIZES, 16, 3),
     "num_groups: expected a divisor of the 2 chunks, got 3"),
    (lambda: te.moe_permute_and_pad_with_probs(X, PROBS, MASK, torch.tensor([7, -1]), 16),
     r"tokens_per_expert: expected 0 to 3, the number of tokens, for every expert, got \[7, -1\]"),
])
def test_bad_arguments(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
