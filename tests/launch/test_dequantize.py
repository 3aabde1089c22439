"""What packed rows stand for, to the bit: in 16 bits, gathered, and quantised again along tokens.

Shape suffixes: P rows, K columns, T tokens, E experts, Y bytes.
"""

import pytest
import torch

from gbmoe import RoutingPlan, float8, launch
from gbmoe.float8 import FLOAT8, ScaledKBlocks, ScaledRows
from gbmoe.launch import packed_rows
from gbmoe.plain import plain_permute
from gbmoe.slot_map import SlotMap
from gbmoe.testing import exact_inputs
from tests.conftest import dtype_id
from tests.launch.test_packed_rows import DEVICES, HALVES, device  # noqa: F401 (a fixture)

FINITE = [1.0, 2.0**-9, 0.0, 1e-40, 3.1e-7, 0.37, 19.0]
SIZES = {"uneven": [130, 0, 1, 64, 127, 128, 17], "beyond-the-rows": [5, 2**31 - 1, 3, -2, 7], "all-empty": [0] * 3, "no-experts": []}


def packed(rows, columns):
    """Packed rows of any bytes on the CPU. Some of rows 40 to 43 are NaN, infinite, or too large for float16."""
    generator = exact_inputs.generator("cpu", 7)
    packed_PY = torch.randint(256, (rows, packed_rows.bytes_of_row(columns)), generator=generator).to(torch.uint8)
    scaled = packed_rows.in_place(packed_PY, columns)
    codes = packed_PY[:, :columns]
    codes[(codes & 0x7F) == 0x7F] = 0x12
    codes[1::9] = 0
    scaled.scales_PC.copy_(torch.tensor(FINITE)[torch.randint(len(FINITE), scaled.scales_PC.shape, generator=generator)])
    if rows > 43:
        codes[40, 3::50] = 0x7F
        for row, scale in ((41, torch.nan), (42, 3e38), (43, torch.inf)):
            scaled.scales_PC[row, -1] = scale
    return packed_PY


def on(packed_PY, columns, device):  # noqa: F811
    """The same bytes on the device, in place, after its memory was poisoned."""
    moved = packed_PY.to(device)
    exact_inputs.poison(device)
    return packed_rows.in_place(moved, columns)


def defined(packed_PY, columns, dtype):
    """Each value times its scale in float32, rounded once."""
    values, scales = packed_PY[:, :columns].view(FLOAT8).float(), packed_rows.unpack(packed_PY, columns).scales_PC
    return (values * scales.repeat_interleave(128, 1)[:, :columns]).to(dtype)


def assert_same_bits(got, expected):
    got, bits = got.cpu(), {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert got.dtype == expected.dtype and got.shape == expected.shape and got.is_contiguous()
    numbers = ~expected.float().isnan()
    assert torch.equal(~got.float().isnan(), numbers)
    assert torch.equal(got.view(bits)[numbers], expected.view(bits)[numbers])


def assert_same_k_blocks(got, expected):
    """In the k-blocks that are in use; the others may hold anything."""
    assert torch.equal(got.filled_rows_E.cpu(), expected.filled_rows_E)
    in_use = int(expected.filled_rows_E.sum()) // 128
    assert got.values_BKR.shape == expected.values_BKR.shape and got.scales_BK.shape == expected.scales_BK.shape
    assert_same_bits(got.values_BKR[:in_use], expected.values_BKR[:in_use])
    assert_same_bits(got.scales_BK[:in_use], expected.scales_BK[:in_use])


@DEVICES
@HALVES
@pytest.mark.parametrize("rows, columns", [(0, 144), (1, 128), (44, 16), (45, 144), (51, 2064), (3, 7168)])
def test_packed_rows_are_dequantised_where_they_lie(device, dtype, rows, columns):  # noqa: F811
    packed_PY = packed(rows, columns)
    expected, scaled = defined(packed_PY, columns, dtype), on(packed_PY, columns, device)
    assert not rows or scaled.scales_PC.data_ptr() - scaled.values_PK.data_ptr() == columns, "the scales were copied"
    assert_same_bits(launch.dequantize_rows(scaled, dtype), expected)
    contiguous = ScaledRows(scaled.values_PK.contiguous(), scaled.scales_PC.contiguous())
    assert_same_bits(launch.dequantize_rows(contiguous, dtype), expected)


@DEVICES
@HALVES
@pytest.mark.parametrize("tokens, columns, experts, top_k, align", [(70, 144, 4, 2, 16), (1, 4096, 8, 3, 1), (300, 16, 5, 1, 8)])
def test_packed_tokens_are_gathered_as_their_numbers_are(device, dtype, tokens, columns, experts, top_k, align):  # noqa: F811
    packed_TY = packed(tokens, columns)
    ids = exact_inputs.expert_ids(tokens, experts, top_k, device="cpu", seed=5)
    plan, there = (RoutingPlan.from_experts(i, experts, align=align) for i in (ids, ids.to(device)))
    expected = plain_permute.padded_gather(defined(packed_TY, columns, dtype), plan.slot_map)[0]
    scaled, in_use = on(packed_TY, columns, device), int(plan.padded_counts_E.sum())
    got = launch.dequantize_gathered(scaled, there.slot_map, dtype)
    assert got.shape == expected.shape
    assert_same_bits(got[:in_use], expected[:in_use])
    blocks = launch.requantize_k_blocks(scaled, there.slot_map, there.padded_counts_E, False, dtype)
    assert_same_k_blocks(blocks, float8.quantize_k_blocks(expected, plan.padded_counts_E))


@DEVICES
@HALVES
@pytest.mark.parametrize("power_2_scale", [False, True], ids=["scale", "power-2"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("columns, sizes_dtype", [(16, torch.int32), (144, torch.int64), (400, torch.int32)], ids=dtype_id)
def test_packed_rows_are_quantised_along_tokens(device, dtype, power_2_scale, sizes, columns, sizes_dtype):  # noqa: F811
    packed_PY = packed(8 + sum(size for size in sizes if 0 < size < 1000), columns)
    sizes_E = torch.tensor(sizes, dtype=sizes_dtype)
    expected = float8.quantize_k_blocks(defined(packed_PY, columns, dtype), sizes_E, power_2_scale)
    sizes_there = sizes_E.to(device)
    got = launch.requantize_k_blocks(on(packed_PY, columns, device), None, sizes_there, power_2_scale, dtype)
    assert isinstance(got, ScaledKBlocks)
    assert_same_k_blocks(got, expected)


@pytest.mark.gpu
@HALVES
def test_the_kernels_of_packed_rows_agree_with_two_steps(dtype):
    """With many k-blocks, of which some experts have none, and against the kernel that reads 16 bits."""
    rows, columns = 3000, 1040
    sizes = torch.tensor([0, 700, 0, 1, 1500, 129, 600, 0], device="cuda")
    scaled = on(packed(rows, columns), columns, "cuda")
    expected = launch.quantize_k_blocks(launch.dequantize_rows(scaled, dtype), sizes, False)
    expected = ScaledKBlocks(expected.values_BKR.cpu(), expected.scales_BK.cpu(), expected.filled_rows_E.cpu())
    assert_same_k_blocks(launch.requantize_k_blocks(scaled, None, sizes, False, dtype), expected)


@pytest.mark.gpu
def test_a_slot_that_does_not_exist_is_a_row_of_zeros():
    x_TK = torch.ones(4, 32, dtype=torch.bfloat16, device="cuda")
    slot_of_row = torch.tensor([0, -1, 8, 2**31 - 1, -(2**31), 7], dtype=torch.int32, device="cuda")
    slots = SlotMap(row_of_slot_TK=torch.full((4, 2), -1, dtype=torch.int32, device="cuda"), slot_of_row_P=slot_of_row)
    scaled = packed_rows.in_place(packed_rows.pack(x_TK, False), 32)
    exact_inputs.poison("cuda")
    assert launch.dequantize_gathered(scaled, slots, torch.bfloat16).ne(0).all(1).tolist() == [True, *[False] * 4, True]
    assert not launch.dequantize_gathered(scaled, slots, torch.bfloat16)[1:5].any()
    rows = launch.requantize_k_blocks(scaled, slots, torch.tensor([6], device="cuda"), False, torch.bfloat16).dequantized()
    assert rows[:128].ne(0).any(1).nonzero().flatten().tolist() == [0, 5]
