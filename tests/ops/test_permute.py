"""padded_gather and padded_scatter: forward and gradients, in every dtype, on poisoned memory."""

import pytest
import torch

import gbmoe
from gbmoe import RoutingPlan, cases, reference
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

# (tokens, experts, top_k, hidden): odd hidden sizes take the path of single elements.
SHAPES = [(64, 8, 2, 64), (33, 5, 3, 7), (1, 1, 1, 8), (0, 4, 2, 16), (200, 4, 1, 129), (40, 16, 8, 256), (17, 40, 33, 24), (9, 3, 2, 2056)]


def make_plan(tokens, experts, top_k, device, align=1, drop=True, skew=1.0):
    ids = cases.expert_ids(tokens, experts, top_k, device=device, seed=tokens + top_k, skew=skew)
    if drop and tokens > 4:
        ids[1] = -1
        ids[3, 0] = -1
    return RoutingPlan.from_experts(ids, experts, align=align)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("align", [1, 16, 128])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_gather_is_a_copy_to_the_bit(device, shape, align, dtype):
    tokens, experts, top_k, hidden = shape
    plan = make_plan(tokens, experts, min(top_k, experts), device, align)
    x = cases.exact_values(tokens, hidden, dtype=dtype, device=device, seed=1)
    cases.poison(device)
    out = gbmoe.padded_gather(x, plan)
    assert torch.equal(out, reference.padded_gather(x, plan.row_of_slot_TK, plan.slot_of_row_P)[0])
    assert bool((out[plan.slot_of_row_P < 0] == 0).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("weights_kind", ["none", "same", "float32"])
def test_scatter_and_all_gradients(device, shape, align, dtype, weights_kind):
    tokens, experts, top_k, hidden = shape
    top_k = min(top_k, experts)
    plan = make_plan(tokens, experts, top_k, device, align)
    y = cases.exact_values(plan.num_rows, hidden, dtype=dtype, device=device, seed=1)
    y[plan.slot_of_row_P < 0] = float("nan")  # what nobody may read
    y.requires_grad_()
    weights = None
    if weights_kind != "none":
        weights_dtype = dtype if weights_kind == "same" else torch.float32
        weights = cases.exact_values(tokens, top_k, dtype=weights_dtype, device=device, seed=2)
        weights[plan.row_of_slot_TK < 0] = float("nan")  # the weight of a dropped slot counts for nothing
        weights.requires_grad_()
    x = cases.exact_values(tokens, hidden, dtype=dtype, device=device, seed=3).requires_grad_()
    grad_out = cases.exact_values(tokens, hidden, dtype=dtype, device=device, seed=4)
    grad_xp = cases.exact_values(plan.num_rows, hidden, dtype=dtype, device=device, seed=5)
    grad_xp[plan.slot_of_row_P < 0] = float("nan")
    cases.poison(device)
    out = gbmoe.padded_scatter(y, plan, weights)
    inputs = (y,) if weights is None else (y, weights)
    got = {"out": out.detach(), **dict(zip(("grad_y", "grad_weights"), torch.autograd.grad(out, inputs, grad_out)))}
    got["grad_x"], = torch.autograd.grad(gbmoe.padded_gather(x, plan), x, grad_xp)

    def expected(wide):
        row, slot = plan.row_of_slot_TK, plan.slot_of_row_P
        y_, w_ = y.detach().to(wide), None if weights is None else weights.detach().to(wide)
        result = {"out": reference.padded_scatter(y_, row, w_), "grad_x": reference.padded_scatter(grad_xp.to(wide), row, None)}
        grads = reference.padded_scatter_backward(grad_out.to(wide), y_, row, slot, w_)
        return {**result, **dict(zip(("grad_y", "grad_weights"), grads))}

    exact = expected(torch.float64)
    single = expected(torch.float64 if dtype == torch.float64 else torch.float32)
    for what, result in got.items():
        assert_as_accurate_as(result, single[what].to(result.dtype), exact[what], what)
    assert bool((got["grad_y"][plan.slot_of_row_P < 0] == 0).all())
    if weights is not None:
        assert bool((got["grad_weights"][plan.row_of_slot_TK < 0] == 0).all())


def test_scatter_sums_in_float32_and_rounds_once(device):
    """Rounding each of the K terms to bfloat16 first, as MegaBlocks does, would lose the small ones here."""
    top_k = 8
    plan = RoutingPlan.from_experts(torch.arange(top_k, device=device)[None], top_k)
    y = torch.full((top_k, 8), 2.0**-9, dtype=torch.bfloat16, device=device)
    y[0] = 1
    out = gbmoe.padded_scatter(y, plan)
    assert bool((out == torch.tensor(1 + 7 * 2.0**-9).bfloat16().item()).all()) and float(out[0, 0]) > 1


def test_gather_then_scatter_is_the_identity(device):
    plan = make_plan(50, 6, 1, device, align=16, drop=False)
    x = torch.randn(50, 24, device=device)
    assert torch.equal(gbmoe.padded_scatter(gbmoe.padded_gather(x, plan), plan), x)


def test_nan_stays_with_its_token(device):
    plan = make_plan(64, 8, 2, device, align=16, drop=False)
    x = torch.ones(64, 16, device=device)
    x[5] = float("nan")
    xp = gbmoe.padded_gather(x, plan)
    assert set(xp.isnan().any(1).nonzero().flatten().tolist()) == set(plan.row_of_slot_TK[5].tolist())
    out = gbmoe.padded_scatter(xp, plan, torch.rand(64, 2, device=device))
    assert out.isnan().any(1).nonzero().flatten().tolist() == [5]


def test_gradcheck(device):
    plan = make_plan(9, 4, 2, device, align=4)
    x = torch.randn(9, 5, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(plan.num_rows, 5, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.randn(9, 2, dtype=torch.float64, device=device, requires_grad=True)
    torch.autograd.gradcheck(lambda x: gbmoe.padded_gather(x, plan), x)
    torch.autograd.gradcheck(lambda y, w: gbmoe.padded_scatter(y, plan, w), (y, weights))


def test_frozen_inputs_get_no_gradient(device):
    plan = make_plan(9, 4, 2, device)
    y, weights = torch.randn(plan.num_rows, 5, device=device), torch.randn(9, 2, device=device)
    for need_y, need_weights in ((True, False), (False, True)):
        y_, w_ = y.clone().requires_grad_(need_y), weights.clone().requires_grad_(need_weights)
        gbmoe.padded_scatter(y_, plan, w_).sum().backward()
        assert (y_.grad is not None) == need_y and (w_.grad is not None) == need_weights


def test_non_contiguous_rows(device):
    plan = make_plan(20, 4, 2, device, align=4)
    x = torch.randn(12, 20, device=device).t()
    assert torch.equal(gbmoe.padded_gather(x, plan), gbmoe.padded_gather(x.contiguous(), plan))
    y = torch.randn(plan.num_rows, 24, device=device)[:, ::2]
    weights = torch.rand(2, 20, device=device).t()
    assert torch.equal(gbmoe.padded_scatter(y, plan, weights), gbmoe.padded_scatter(y.contiguous(), plan, weights.contiguous()))


def test_autocast_moves_rows_as_they_are(device):
    plan = make_plan(20, 4, 2, device)
    x = torch.randn(20, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = gbmoe.padded_scatter(gbmoe.padded_gather(x, plan), plan)
    assert out.dtype == torch.float32


def test_opcheck(device):
    plan = make_plan(20, 4, 2, device, align=4)
    x = torch.randn(20, 8, device=device, requires_grad=True)
    y = torch.randn(plan.num_rows, 8, device=device, requires_grad=True)
    weights = torch.rand(20, 2, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.gbmoe.padded_gather.default, (x, plan.row_of_slot_TK, plan.slot_of_row_P, None, None, None, None, False))
    torch.library.opcheck(torch.ops.gbmoe.padded_scatter.default, (y, plan.row_of_slot_TK, plan.slot_of_row_P, None, None, weights))
    torch.library.opcheck(torch.ops.gbmoe.routing_plan.default, (torch.randint(4, (20, 2), device=device), 4, 8))


def test_repeats_give_the_same_bits(device):
    plan = make_plan(300, 8, 4, device, align=16)
    y = torch.randn(plan.num_rows, 72, device=device).bfloat16().requires_grad_()
    weights = torch.rand(300, 4, device=device, requires_grad=True)
    grad = torch.randn(300, 72, device=device).bfloat16()

    def run():
        out = gbmoe.padded_scatter(y, plan, weights)
        return out, *torch.autograd.grad(out, (y, weights), grad)

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


PLAN = RoutingPlan.from_experts(torch.tensor([[0, 1], [1, 2], [2, 0]]), 3)


@pytest.mark.parametrize("call, words", [
    (lambda: gbmoe.padded_gather(torch.zeros(4, 8), PLAN), "padded_gather: x: expected 3 rows, as in the plan, got 4"),
    (lambda: gbmoe.padded_gather(torch.zeros(3), PLAN), "padded_gather: x: expected 2 dimensions, got \\[3\\]"),
    (lambda: gbmoe.padded_gather(torch.zeros(3, 8, dtype=torch.int8), PLAN), "padded_gather: x: expected dtype .*, got torch.int8"),
    (lambda: gbmoe.padded_gather(torch.zeros(3, 8, device="meta"), PLAN), "padded_gather: x: expected device cpu, got meta"),
    (lambda: gbmoe.padded_scatter(torch.zeros(5, 8), PLAN), "padded_scatter: y: expected 6 rows, as in the plan, got 5"),
    (lambda: gbmoe.padded_scatter(torch.zeros(6, 8), PLAN, torch.zeros(3, 3)),
     "padded_scatter: weights: expected shape \\[3, 2\\], one a slot, got \\[3, 3\\]"),
    (lambda: gbmoe.padded_scatter(torch.zeros(6, 8), PLAN, torch.zeros(6)), "padded_scatter: weights: expected 2 dimensions, got \\[6\\]"),
])
def test_bad_arguments(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    tokens, hidden = (1 << 31) // 8192 // 2 + 1024, 8192
    ids = torch.stack([torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, dtype=torch.int64)], 1).cuda()
    plan = RoutingPlan.from_experts(ids, 2)
    x = cases.exact_values(tokens, hidden, dtype=torch.bfloat16, device="cuda", seed=1)
    xp = gbmoe.padded_gather(x, plan)
    assert xp.numel() > 2**31 and torch.equal(xp[:tokens], x) and torch.equal(xp[tokens:], x)
    weights = torch.tensor([[0.25, 0.5]], device="cuda").repeat(tokens, 1).requires_grad_()
    xp.requires_grad_()
    out = gbmoe.padded_scatter(xp, plan, weights)
    assert torch.equal(out, (x.float() * 0.75).bfloat16())
    grad_y, grad_weights = torch.autograd.grad(out, (xp, weights), x)
    assert torch.equal(grad_y[tokens:], x * 0.5) and torch.equal(grad_y[:tokens], x * 0.25)
    torch.testing.assert_close(grad_weights[-1], x[-1].float().square().sum().expand(2))
