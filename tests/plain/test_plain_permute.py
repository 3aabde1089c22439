"""gbmoe.plain.plain_permute, the oracle, against loops that cannot be misread."""

import pytest
import torch

from gbmoe import RoutingPlan
from gbmoe.plain import plain_permute
from gbmoe.slot_map import SlotMap
from gbmoe.testing import exact_inputs
from tests.conftest import FLOATS, dtype_id


def inputs(dtype=torch.float64, tokens=23, hidden=6, experts=4, top_k=3, align=4):
    ids = exact_inputs.expert_ids(tokens, experts, top_k, device="cpu", seed=1)
    ids[3] = -1
    ids[5, 1] = -1
    plan = RoutingPlan.from_experts(ids, experts, align=align)
    x = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device="cpu", seed=2)
    weights = exact_inputs.exact_values(tokens, top_k, dtype=dtype, device="cpu", seed=3)
    return plan, x, weights


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_padded_gather(dtype):
    plan, x, _ = inputs(dtype)
    out, _ = plain_permute.padded_gather(x, plan.slot_map)
    for row, slot in enumerate(plan.slot_of_row_P.tolist()):
        assert torch.equal(out[row], x[slot // plan.top_k] if slot >= 0 else torch.zeros_like(x[0]))


def test_padded_scatter_and_its_backward_are_what_autograd_says():
    plan, x, weights = inputs()
    y = exact_inputs.exact_values(plan.num_rows, x.size(1), dtype=torch.float64, device="cpu", seed=4).requires_grad_()
    weights.requires_grad_()
    out = torch.stack([
        sum((weights[t, j] * y[row] for j, row in enumerate(rows) if row >= 0), start=torch.zeros(x.size(1), dtype=torch.float64))
        for t, rows in enumerate(plan.row_of_slot_TK.tolist())])
    grad = torch.randn_like(out)
    grad_y, grad_weights = torch.autograd.grad(out, (y, weights), grad)
    torch.testing.assert_close(plain_permute.padded_scatter(y.detach(), plan.slot_map, weights=weights.detach()), out.detach())
    got = plain_permute.padded_scatter_backward(grad, y.detach(), plan.slot_map, weights=weights.detach())
    torch.testing.assert_close(got, (grad_y, grad_weights))


@pytest.mark.parametrize("tokens, rows", [(1, 1), (1, 2), (2, 1)])
def test_one_token_or_one_row(tokens, rows):
    """Neither is none."""
    x, row_of_slot, slot_of_row = torch.ones(tokens, 3), torch.full((tokens, 1), -1).int(), torch.full((rows,), -2).int()
    row_of_slot[-1], slot_of_row[0] = 0, tokens - 1
    assert plain_permute.padded_gather(x, SlotMap(row_of_slot, slot_of_row))[0].sum(1).tolist() == [3, 0][:rows]


def test_no_rows_give_weights_no_gradient():
    slots = SlotMap(torch.full((4, 2), -1).int(), torch.empty(0, dtype=torch.int32))
    grad_y, grad_weights = plain_permute.padded_scatter_backward(torch.ones(4, 3), torch.empty(0, 3), slots, weights=torch.ones(4, 2))
    assert grad_y.shape == (0, 3) and not bool(grad_weights.any())
