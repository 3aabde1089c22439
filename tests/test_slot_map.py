"""SlotMap: one order of a map's tensors everywhere, and nothing besides it that could be taken for one of them."""

import inspect
import re

import pytest
import torch

import gbmoe
from gbmoe import launch
from gbmoe.compat.transformer_engine import mask_row_map
from gbmoe.ops import permute
from gbmoe.plain import plain_permute
from gbmoe.slot_map import SlotMap
from tests import csrc_operators

FIELDS = [field.rsplit("_", 1)[0] for field in SlotMap._fields]  # without their shapes
WITH_A_MAP = [launch.gather, launch.scatter, launch.scatter_backward, plain_permute.padded_gather, plain_permute.padded_scatter,
              plain_permute.padded_scatter_backward, permute.gather_slots, permute.scatter_slots]
OF_PARTS = [launch.map_slots, plain_permute.map_slots, permute.make_slot_map, plain_permute.dense_slots]


@pytest.mark.parametrize("function", WITH_A_MAP + OF_PARTS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_scatter_took_columns_counts_and_weights_in_two_orders(function):
    """The kernels expected (columns, counts, weights), plain PyTorch (weights, columns, counts). After the map, or the rows of one that
    is to be, everything has a name."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    first = names.index("slots") if function in WITH_A_MAP else 0
    rest = [parameter for parameter in parameters[first + 1:] if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    assert rest and {parameter.kind for parameter in rest} == {inspect.Parameter.KEYWORD_ONLY}
    if function in WITH_A_MAP:
        assert not {"columns_TK", "counts_T", "row_of_slot_TK", "slot_of_row_P"} & set(names)


def schemas():
    """(name, names of the arguments) of each operator that has a map's tensors among its arguments, our own and csrc's."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("gbmoe::"):
            schema = getattr(torch.ops.gbmoe, name.removeprefix("gbmoe::")).default._schema
            yield name, [argument.name for argument in schema.arguments]
    for name, schema in csrc_operators.schemas().items():
        arguments = re.match(r"\w+\((.*)\) ->", schema).group(1)
        yield f"gbmoe_cuda::{name}", [argument.split()[-1] for argument in arguments.split(",") if argument]


def test_every_schema_has_a_map_s_tensors_in_the_order_of_its_fields():
    """Calls pass the map as `*slots`."""
    seen = set()
    for name, arguments in schemas():
        places = [(arguments.index(field), field) for field in FIELDS if field in arguments]
        if places:
            seen.add(name)
            first = places[0][0]
            assert arguments[first:first + len(places)] == [field for _, field in places], name
    both = {"padded_gather", "padded_scatter", "padded_scatter_backward"}
    assert {f"{space}::{name}" for space in ("gbmoe", "gbmoe_cuda") for name in both} <= seen
    assert {"gbmoe::expert_mlp", "gbmoe::expert_mlp_backward"} <= seen


def test_a_plan_s_map_is_its_own_tensors():
    plan = gbmoe.RoutingPlan.from_experts(torch.tensor([[1, 0], [1, 2]]), 3, align=2)
    slots = plan.slot_map
    assert slots.row_of_slot_TK is plan.row_of_slot_TK and slots.slot_of_row_P is plan.slot_of_row_P
    assert slots.columns_TK is None and slots.counts_T is None
    assert (slots.num_tokens, slots.top_k, slots.num_rows) == (plan.num_tokens, plan.top_k, plan.num_rows)


def test_a_ragged_map_reads_each_slot_s_own_column(device):
    """Columns and counts differ here in every entry that counts, and so would the results if one were taken for the other."""
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]], dtype=torch.bool, device=device)
    experts = mask.size(1)
    map_TM = mask_row_map(mask)
    slots = permute.make_slot_map(map_TM[:, :experts], rows=int(mask.sum()), columns_TK=map_TM[:, experts:-1], counts_T=map_TM[:, -1])
    weights = torch.arange(1.0, 17, device=device, dtype=torch.float64).view(4, 4).requires_grad_()
    x = torch.tensor([[1.0], [10], [100], [1000]], device=device, dtype=torch.float64).requires_grad_()
    token_P = torch.tensor([2, 0, 2, 2, 3, 0, 2], device=device)  # expert-major
    expert_P = torch.tensor([0, 1, 1, 2, 2, 3, 3], device=device)

    out, weights_P = permute.gather_slots(x, slots, scale=weights, probs=weights)
    assert torch.equal(weights_P, weights[token_P, expert_P])
    assert torch.equal(out, x[token_P] * weights_P[:, None])
    y = torch.arange(1.0, 8, device=device, dtype=torch.float64)[:, None].requires_grad_()
    summed = permute.scatter_slots(y, slots, weights=weights)
    expected = torch.zeros_like(x).index_add(0, token_P, y * weights[token_P, expert_P, None])
    assert torch.equal(summed, expected)
    for got, want in zip(torch.autograd.grad(summed.square().sum() + out.square().sum(), (y, weights, x)),
                         torch.autograd.grad(expected.square().sum() + (x[token_P] * weights[token_P, expert_P, None]).square().sum(),
                                             (y, weights, x))):
        assert torch.equal(got, want)


def test_columns_outside_their_range_have_no_row(device):
    row, columns, counts, offsets = (torch.tensor(values, dtype=torch.int32, device=device)
                                     for values in ([[0, 1], [2, 3]], [[0, 2], [-1, 1]], [2, 2], [5, 10]))
    slots = permute.make_slot_map(row, rows=14, columns_TK=columns, counts_T=counts, pad_offsets_E=offsets)
    assert slots.row_of_slot_TK.tolist() == [[5, -1], [-1, 13]]
    assert (slots.slot_of_row_P == 0).nonzero().flatten().tolist() == [5, 13]
