"""Rows of bytes that hold e4m3 and scales: what is packed comes back, and stands for what it stood for.

Shape suffixes: P rows, K columns, T tokens, Y bytes.
"""

import pytest
import torch

from gbmoe import RoutingPlan, engines, float8, launch
from gbmoe.engines.gathered_scaled_rows import GatheredScaledRows
from gbmoe.launch import packed_rows
from gbmoe.slot_map import SlotMap
from gbmoe.testing import exact_inputs
from tests.conftest import dtype_id

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


@pytest.fixture
def device(request):
    reason = engines.FLOAT8_ENGINES["float8_block"][0].unavailable(torch.device("cuda")) if request.param == "cuda" else None
    if reason is not None:
        pytest.skip(f"float8_block: {reason}")
    exact_inputs.poison(request.param)
    return request.param


def rows_of(rows, columns, dtype, device):
    x_PK = torch.randn(rows, columns, generator=exact_inputs.generator("cpu", 2)).to(dtype)
    x_PK[1::5] *= 1e-3
    x_PK[2::5] = 0
    x_PK[3::5, columns // 2] = float("nan")
    return x_PK.to(device)


def same_bits(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got, expected = got.nan_to_num(nan=77.0), expected.nan_to_num(nan=77.0)
    assert torch.equal(got, expected)


@DEVICES
@HALVES
@pytest.mark.parametrize("rows, columns", [(0, 144), (1, 128), (9, 16), (9, 144), (70, 512), (3, 10)])
def test_packed_rows_hold_what_was_quantised(device, dtype, rows, columns):
    if device == "cuda" and columns % 16:
        pytest.skip("engines refuse such rows")
    x_PK = rows_of(rows, columns, dtype, device)
    packed_PY, expected = packed_rows.pack(x_PK, False), launch.quantize_rows(x_PK, False)
    assert packed_PY.shape == (rows, packed_rows.bytes_of_row(columns)) and packed_PY.size(1) % 16 == 0
    got = packed_rows.unpack(packed_PY, columns)
    same_bits(got.values_PK.float(), expected.values_PK.float())
    same_bits(got.scales_PC, expected.scales_PC)
    assert got.scales_PC.is_contiguous()
    same_bits(launch.dequantize_rows(got, dtype), expected.dequantized().to(dtype))


def test_packed_rows_fit_where_rows_of_16_bits_are():
    for columns in range(8, 2000, 8):
        packed_PY = packed_rows.as_packed(torch.empty(3, columns, dtype=torch.bfloat16))
        assert packed_PY.shape == (3, packed_rows.bytes_of_row(columns)) and packed_PY.is_contiguous()
    assert [packed_rows.bytes_of_row(columns) for columns in (128, 2048, 4096)] == [144, 2112, 4224]


@DEVICES
@HALVES
def test_quantising_and_gathering_may_change_places(device, dtype):
    """Tokens that are quantised once and gathered as bytes are the rows that one kernel makes of both."""
    x_TH = rows_of(50, 144, dtype, device)
    ids = torch.rand(50, 8, generator=exact_inputs.generator("cpu", 4)).topk(3).indices.to(device)
    plan = RoutingPlan.from_experts(ids, 8)
    expected = launch.quantize_gathered(x_TH, plan.slot_map, True)
    rows_in_use = int(plan.padded_counts_E.sum())
    of_experts = expected.dequantized()[:rows_in_use].to(dtype)
    in_blocks = float8.quantize_k_blocks(of_experts, plan.padded_counts_E, True)
    expected_blocks = in_blocks.dequantized()[: int(in_blocks.filled_rows_E.sum())]
    packed_TY = packed_rows.pack(x_TH, True)
    rows_PY = launch.gather(packed_TY, plan.slot_map)[0]
    more_TY = torch.cat([packed_TY, packed_TY.new_empty(200, packed_TY.size(1))])  # than rows
    more_slots = SlotMap(torch.cat([plan.row_of_slot_TK, plan.row_of_slot_TK.new_full((200, 3), -1)]), plan.slot_of_row_P)
    for of_tokens, rows in ((True, GatheredScaledRows(plan.slot_map, 144, dtype, tokens_TY=packed_TY)),
                            (False, GatheredScaledRows(more_slots, 144, dtype, tokens_TY=more_TY)),
                            (False, GatheredScaledRows(plan.slot_map, 144, dtype, rows_PY=rows_PY))):
        assert (rows.tokens_TH is not None) == of_tokens
        for _ in range(2):
            got = rows.scaled()
            same_bits(got.values_PK.float(), expected.values_PK.float())
            same_bits(got.scales_PC, expected.scales_PC)
            assert rows.given.dtype == torch.uint8 and not rows.are_gathered
            blocks = rows.k_blocks(plan.padded_counts_E, True)
            same_bits(blocks.dequantized()[: expected_blocks.size(0)], expected_blocks)
            same_bits(rows.rows_PH(), expected.dequantized().to(dtype))
            assert rows.num_rows == 150 and rows.new_empty(2, 3).dtype == dtype
            rows.forget()


@DEVICES
def test_kernels_take_rows_with_a_pitch(device):
    """The values of packed rows lie Y bytes apart, and their scales are no part of a product."""
    engine = engines.FLOAT8_ENGINES["float8_block"][0 if device == "cuda" else 1]
    x_PK = rows_of(300, 272, torch.bfloat16, device).nan_to_num()
    w_EFH = torch.randn(3, 144, 272, generator=exact_inputs.generator("cpu", 5)).bfloat16().to(device)
    packed, plain = packed_rows.unpack(packed_rows.pack(x_PK, False), 272), launch.quantize_rows(x_PK, False)
    assert not packed.values_PK.is_contiguous()
    sizes, b = torch.tensor([100, 0, 200]).to(device), float8.quantize_weights(w_EFH)
    got, expected = (engine.scaled_product(rows, b, sizes, b.new_rows(300)) for rows in (packed, plain))
    assert torch.equal(got, expected)
    slots = RoutingPlan.from_counts(sizes, 300).slot_map
    scaled = GatheredScaledRows(slots, 272, torch.bfloat16, rows_PY=packed_rows.pack(x_PK, False))
    ups = [engine.up(rows, w_EFH, w_EFH, sizes, "silu", True) for rows in (scaled, engines.base.GatheredRows(None, slots, x_PK))]
    assert torch.equal(ups[0][1], ups[1][1]) and torch.equal(ups[0][0].values_PK.float(), ups[1][0].values_PK.float())
