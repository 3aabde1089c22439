"""gbmoe.kernels where the choice is between a CUDA kernel and plain PyTorch, and the result is the same in each bit."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gbmoe import RoutingPlan, extension, float8, kernels
from gbmoe.testing import exact_inputs

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
    memory = torch.full((rows + 2, length), 3, dtype=dtype, device=device)  # a row before and one behind
    poison = torch.full((rows, length), 5 if dtype == torch.uint8 else float("nan"), device=device).to(dtype)
    live = (slot_of_row >= 0)[:, None]
    memory[1:-1] = torch.where(live, torch.full_like(poison, 7), poison)
    rows_PF = memory[1:-1]
    assert kernels.clear_rows_without_slot(slot_of_row, rows_PF) is None
    assert torch.equal(rows_PF, torch.where(live, torch.full_like(poison, 7), torch.zeros_like(poison)))
    assert bool((memory[[0, -1]] == 3).all())


def test_live_rows_keep_their_nan(device):
    rows_PF = torch.full((9, 16), float("nan"), device=device)
    slot_of_row = some_slots(9, device)
    kernels.clear_rows_without_slot(slot_of_row, rows_PF)
    assert torch.equal(rows_PF.isnan().all(1), slot_of_row >= 0) and torch.equal((rows_PF == 0).all(1), slot_of_row < 0)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("length", [1040, 1041])
def test_rows_beyond_two_to_the_31_elements(length):
    """The offsets of these rows do not fit int32."""
    rows = 2**31 // length + 40
    rows_PF = torch.ones(rows, length, dtype=torch.uint8, device="cuda")
    slot_of_row = torch.zeros(rows, dtype=torch.int32, device="cuda")
    slot_of_row[-3] = slot_of_row[4] = -2
    kernels.clear_rows_without_slot(slot_of_row, rows_PF)
    assert (~rows_PF.view(torch.bool).any(1)).nonzero().flatten().tolist() == [4, rows - 3]
    assert bool(rows_PF[[0, 5, -4, -2, -1]].all())


@pytest.fixture
def no_float8_kernels(monkeypatch):
    """As on a device of compute capability 8.9, where the extension is loaded and has no code for what quantises."""
    kernels._has_float8_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    yield
    kernels._has_float8_kernels.cache_clear()


def assert_same_numbers(got, expected):
    """Of ScaledRows, ScaledWeights or ScaledKBlocks."""
    for name in expected.__dataclass_fields__:
        one, other = getattr(got, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            one, other = (t.cpu().view(torch.uint8).tolist() for t in (one, other))
        assert one == other, name


def some_rows(*shape, device, dtype=torch.bfloat16):
    return exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=3)


@pytest.mark.parametrize("power_2_scale", [False, True])
def test_quantising_kernels_were_reached_where_they_have_no_code(device, no_float8_kernels, monkeypatch, power_2_scale):
    """Their memory then kept what it held before."""
    monkeypatch.setattr(kernels, "_kernels_serve", lambda tensor: True)  # on the CPU as well
    x, w, sizes = some_rows(9, 144, device=device), some_rows(2, 144, 80, device=device), torch.tensor([4, 5], device=device)
    exact_inputs.poison(device)
    assert_same_numbers(kernels.quantize_rows(x, power_2_scale), float8.quantize_rows(x, power_2_scale))
    assert_same_numbers(kernels.quantize_k_blocks(x, sizes, power_2_scale), float8.quantize_k_blocks(x, sizes, power_2_scale))
    for transpose, both in zip((False, True), kernels.quantize_weights_both_ways(w, power_2_scale)):
        expected = float8.quantize_weights(w, power_2_scale, transpose)
        assert_same_numbers(kernels.quantize_weights(w, power_2_scale, transpose), expected)
        assert_same_numbers(both, expected)


class _Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_steps_that_quantise_without_kernels_of_their_own(device, no_float8_kernels):
    """They are the steps that the kernels replace."""
    x, ids = some_rows(9, 144, device=device), torch.tensor([[0], [1], [1], [0], [2], [2], [-1], [0], [1]], device=device)
    slots, sizes = RoutingPlan.from_experts(ids, 3).slot_map, torch.tensor([3, 3, 2], device=device)
    h, g, d = (some_rows(9, 144, device=device) / divisor for divisor in (1, 2, 4))
    with _Operators() as called:
        gathered = kernels.quantize_gathered(x, slots, False)
        blocks = kernels.quantize_gathered_k_blocks(x, slots, sizes, False)
        dh = d.clone()
        a, dg, _, scaled_dh, scaled_dg = kernels.activate_backward_scaled(h, g, dh, slots.slot_of_row_P, None, "silu", False)
        of_k_blocks = kernels.activate_backward_k_blocks(h, g, d.clone(), slots.slot_of_row_P, None, sizes, "silu", False)
    assert not [name for name in called.names if "quantize" in name or "_scaled" in name or "_k_blocks" in name]
    rows = 8  # in use
    assert torch.equal(gathered.values_PK[:rows].view(torch.uint8),
                       float8.quantize_rows(kernels.gather(x, slots)[0][:rows], False).values_PK.view(torch.uint8))
    assert_same_numbers(blocks, float8.quantize_k_blocks(kernels.gather(x, slots)[0], sizes, False))
    for got, of in ((scaled_dh, dh), (scaled_dg, dg)):
        assert_same_numbers(got, float8.quantize_rows(of, False))
    for got, of in zip(of_k_blocks[:3], (a, dh, dg)):
        assert_same_numbers(got, float8.quantize_k_blocks(of, sizes, False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [1, 65535, 65536, 70000, 200000])
def test_more_than_65535_groups_had_no_launch(dtype, groups):
    """The second and third dimension of a grid end there."""
    if not extension.loaded():
        pytest.skip("the extension is not loaded")
    for sizes_dtype in (torch.int32, torch.int64):
        sizes = (torch.arange(groups, device="cuda") % 3 - 1).to(sizes_dtype)  # a negative one counts as 0
        out = torch.full((groups, 4, 6), 7.0, dtype=dtype, device="cuda")
        torch.ops.gbmoe_cuda.zero_empty_groups(sizes, out)
        assert torch.equal(out, torch.where(sizes > 0, 7.0, 0.0).to(dtype)[:, None, None].expand_as(out))
