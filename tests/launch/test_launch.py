"""gbmoe.launch where the choice is between a CUDA kernel and plain PyTorch, and the result is the same in each bit."""

from types import SimpleNamespace

import pytest
import torch

import gbmoe
from gbmoe import launch
from gbmoe.launch import availability
from gbmoe.slot_map import SlotMap
from gbmoe.testing import exact_inputs
from tests.conftest import FLOATS, dtype_id

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.uint8]


def some_slots(rows, device):
    """Slots for most rows, none for single ones and for a long run at the end; a slot's number does not matter."""
    slot_of_row = torch.arange(rows, dtype=torch.int32)
    slot_of_row[2::7] = -1
    slot_of_row[5::11] = -(2**31)
    slot_of_row[6::13] = 2**31 - 1
    slot_of_row[rows - rows // 4:] = -2
    return slot_of_row.to(device)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 33, 1000])
@pytest.mark.parametrize("length", [0, 1, 7, 64, 264, 4100])
def test_rows_without_a_slot_are_zeros_and_others_are_not_touched(device, dtype, rows, length):
    slot_of_row = some_slots(rows, device)
    memory = torch.full((rows + 2, length), 3, dtype=dtype, device=device)  # a row before and one after
    poison = torch.full((rows, length), 5 if dtype == torch.uint8 else float("nan"), device=device).to(dtype)
    live = (slot_of_row >= 0)[:, None]
    memory[1:-1] = torch.where(live, torch.full_like(poison, 7), poison)
    rows_PF = memory[1:-1]
    assert launch.clear_rows_without_slot(slot_of_row, rows_PF) is None
    assert torch.equal(rows_PF, torch.where(live, torch.full_like(poison, 7), torch.zeros_like(poison)))
    assert bool((memory[[0, -1]] == 3).all())


def test_live_rows_keep_their_nan(device):
    rows_PF = torch.full((9, 16), float("nan"), device=device)
    slot_of_row = some_slots(9, device)
    launch.clear_rows_without_slot(slot_of_row, rows_PF)
    assert torch.equal(rows_PF.isnan().all(1), slot_of_row >= 0) and torch.equal((rows_PF == 0).all(1), slot_of_row < 0)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("weights_dtype", [None, *FLOATS], ids=str)
def test_rows_times_weights_had_anything_in_rows_without_a_slot(device, dtype, weights_dtype):
    for rows, length, slots in ((0, 8, 4), (1, 8, 1), (33, 5, 20), (1000, 24, 900), (300, 80, 301)):
        memory = torch.full((rows + 2, length), float("nan"), dtype=dtype, device=device)
        memory[1:-1] = exact_inputs.exact_values(rows, length, dtype=dtype, device=device, seed=1)
        weights = None if weights_dtype is None else exact_inputs.exact_values(slots, 1, dtype=weights_dtype, device=device, seed=2)
        slot_of_row = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).int().to(device)
        slot_of_row[::7] = -1
        slot_of_row[1::9] = -2
        live = (slot_of_row >= 0) & ((slot_of_row < slots) | (weights is None))
        memory[1:-1][~live] = float("nan")
        expected = torch.zeros(rows, length, dtype=dtype, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        scale = 1 if weights is None else weights.flatten()[slot_of_row[live].long()].unsqueeze(1).to(wide)
        expected[live] = (memory[1:-1][live].to(wide) * scale).to(dtype)
        exact_inputs.poison(torch.device(device))
        assert torch.equal(launch.weigh_rows(memory[1:-1], slot_of_row, weights), expected)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("weights_dtype", [None, *FLOATS], ids=str)
def test_weights_in_columns_keep_what_rounding_takes(device, dtype, weights_dtype):
    for rows, slots in ((0, 4), (1, 1), (33, 20), (1000, 900), (300, 301)):
        drawn = torch.rand(slots, 1, generator=torch.Generator().manual_seed(2))
        weights = None if weights_dtype is None else drawn.to(device, weights_dtype)
        slot_of_row = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).int().to(device)
        slot_of_row[::7], slot_of_row[1::9] = -1, -2
        live = (slot_of_row >= 0) & ((slot_of_row < slots) | (weights is None))
        exact_inputs.poison(torch.device(device))
        got = launch.weights_in_columns(slot_of_row, weights, dtype, 8)
        assert got.shape == (rows, 8) and got.dtype == dtype and not bool(got[:, 2:].any()) and not bool(got[~live].any())
        expected = torch.ones(int(live.sum()), 1, device=device) if weights is None else weights[slot_of_row[live].long()]
        assert torch.equal(got[live, 0], expected[:, 0].to(dtype))
        error = (got[live].double().sum(1) - expected[:, 0].double()).abs()
        assert bool((error <= torch.finfo(dtype).eps ** 2).all())


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("int64", [False, True])
def test_dots_are_added_to_the_weights_of_rows_that_a_group_has(device, dtype, int64):
    for tokens, experts, top_k, cut in ((1, 1, 1, 0), (40, 5, 2, 0), (700, 300, 3, 1), (300, 4, 2, 1)):
        ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(4), dtype=torch.int32).to(device)
        slots = gbmoe.RoutingPlan.from_experts(ids, experts, align=4).slot_map
        sizes = torch.bincount(ids[ids >= 0].flatten().long(), minlength=experts).add(3) // 4 * 4
        sizes[-1] *= 1 - cut  # then rows that slots have lie after the last group
        rows, row_of_slot = int(sizes.sum()), slots.row_of_slot_TK.long()
        dots = torch.full((slots.num_rows, 8), float("nan"), device=device)
        dots[:rows, 0] = torch.rand(rows, generator=torch.Generator().manual_seed(5)).to(device)
        gradient = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(6)).to(device, dtype)
        has_row = (row_of_slot >= 0) & (row_of_slot < rows)
        expected = gradient.clone()
        expected[has_row] = (gradient[has_row] + dots[row_of_slot[has_row], 0]).to(dtype)
        got = launch.add_dots(dots, slots, sizes if int64 else sizes.int(), gradient)
        assert torch.equal(got, expected)


def test_dots_of_no_rows_and_of_rows_out_of_range_raised_an_index_error(device):
    gradient = torch.ones(1, 2, device=device)
    for rows, row_of_slot, slot_of_row, sizes, expected in ((0, [-1, -1], [], [0], [1, 1]), (0, [0, 1], [], [2], [1, 1]),
                                                            (2, [0, 7], [0, -1], [9], [3, 1])):
        slots = SlotMap(torch.tensor([row_of_slot], dtype=torch.int32, device=device),
                        torch.tensor(slot_of_row, dtype=torch.int32, device=device))
        dots = torch.full((rows, 8), 2.0, device=device)
        got = launch.add_dots(dots, slots, torch.tensor(sizes, device=device), gradient.clone())
        assert got.tolist() == [expected]


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("length", [1040, 1041])
def test_rows_beyond_two_to_the_31_elements(length):
    """The offsets of these rows do not fit int32."""
    rows = 2**31 // length + 40
    rows_PF = torch.ones(rows, length, dtype=torch.uint8, device="cuda")
    slot_of_row = torch.zeros(rows, dtype=torch.int32, device="cuda")
    slot_of_row[-3] = slot_of_row[4] = -2
    launch.clear_rows_without_slot(slot_of_row, rows_PF)
    assert (~rows_PF.view(torch.bool).any(1)).nonzero().flatten().tolist() == [4, rows - 3]
    assert bool(rows_PF[[0, 5, -4, -2, -1]].all())


@pytest.mark.parametrize("found, built, expected", [((8, 0), True, "compute capability 9.0, got cuda:0 of 8.0"),
                                                    ((9, 0), False, "an extension compiled for 9.0, got one without")])
def test_float8_kernels_did_nothing_where_they_were_not_compiled(monkeypatch, found, built, expected):
    availability._has_float8.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.ops, "gbmoe_cuda", SimpleNamespace(**{"hopper_rows": None} if built else {}), raising=False)
    with pytest.raises(RuntimeError, match=expected):
        availability._has_float8(torch.device("cuda", 0))
    availability._has_float8.cache_clear()
