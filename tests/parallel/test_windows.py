"""How rows are divided into windows, and gradients of weights added over them. What is computed with them: window_cases.py.

Shape suffixes: S tokens of all ranks, K slots a token, E experts, H hidden, F ffn hidden, P rows.
"""

import random

import pytest
import torch

from gbmoe import extension
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.engines.reference import Reference
from gbmoe.parallel.further_windows import AddedGradients
from gbmoe.parallel.windows import Windows
from gbmoe.testing import exact_inputs
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients


def test_a_token_has_all_its_rows_in_one_window_and_each_window_fits():
    draw = random.Random(0)
    for _ in range(60):
        ranks, top_k, experts = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 3)
        tokens, room, absent = ranks * draw.randint(1, 12), draw.randint(1, 20), draw.choice([0, 0.3, 0.9, 1])
        ids = [[-1 if draw.random() < absent else draw.randrange(experts) for _ in range(top_k)] for _ in range(tokens)]
        ids_SK, windows = torch.tensor(ids, dtype=torch.int32), Windows.of(room, tokens, top_k, experts)
        assert (windows is None) == (tokens * top_k <= room)
        if windows is None:
            continue
        assert windows.count == -(-tokens * top_k // room)
        divided_SK, there_SK = windows.divided(ids_SK, ranks), ids_SK >= 0
        window_SK = divided_SK.div(experts, rounding_mode="floor")
        assert divided_SK.dtype == torch.int32 and divided_SK.is_contiguous()
        assert torch.equal(divided_SK - experts * window_SK.clamp(min=0), ids_SK)
        assert all(len(set(window_K[there_K].tolist())) <= 1 for window_K, there_K in zip(window_SK, there_SK))
        rows = window_SK[there_SK].bincount(minlength=windows.count)
        assert len(rows) == windows.count and int(rows.max()) <= windows.rows <= room + top_k - 1
        assert int(there_SK.sum()) > windows.step or not rows[1:].any()
        fits = (room - top_k + 1) * windows.count >= tokens * top_k  # whatever the last token of each window brings
        assert windows.step * windows.count >= tokens * top_k and (windows.rows <= room) == (fits or top_k == 1)
        further = list(windows.further(divided_SK))
        assert len(further) == windows.count - 1
        for number, (slots, sizes_E) in enumerate(further, 1):
            assert torch.equal(slots.row_of_slot_TK >= 0, there_SK & (window_SK == number)) and int(sizes_E.sum()) == rows[number]
            assert slots.num_rows == windows.rows and int((slots.slot_of_row_P >= 0).sum()) == rows[number]


def test_windows_that_fit_exactly_took_more_room():
    assert Windows.of(4, 3, 2, 1) == Windows(count=2, step=3, rows=4, experts=1)


def test_each_window_has_tokens_of_all_ranks():
    windows = Windows.of(32, 4 * 20, 2, 3)
    window_WC = windows.divided(torch.zeros(80, 2, dtype=torch.int32), 4).view(4, 20, 2)[:, :, 0] // 3
    counts = torch.stack([window_C.bincount(minlength=windows.count) for window_C in window_WC])
    assert windows.count == 5 and int((counts.amax(0) - counts.amin(0)).max()) <= 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_experts_without_rows_are_neither_read_nor_written(device, dtype):
    if device == "cuda":
        extension.load()
    shape, sizes_E = (4, 24, 16), torch.tensor([3, 0, 1, 0], dtype=torch.int32, device=device)
    left_PF, rows_PH = (torch.randn(6, size, device=device).to(dtype) for size in shape[1:])
    w_EFH = torch.empty(shape, dtype=dtype, device=device)
    to = WeightGradients(MEGABLOCKS, w_EFH, w_EFH, None)
    before_EFH = torch.randn(shape, device=device).to(dtype)
    before_EFH[1], before_EFH[3] = -0.0, float("nan")
    to["w2"].copy_(before_EFH)
    engine, rows = Reference(), GatheredRows(None, None, rows_PH)
    exact_inputs.poison(device)
    AddedGradients(to, sizes_E, w_EFH.shape).write("w2", engine, left_PF, rows, sizes_E, 1.0)
    expected_EFH = before_EFH.float() + Engine.weight_gradient(engine, left_PF, rows, sizes_E).float()
    assert torch.equal(to["w2"][::2], expected_EFH.to(dtype)[::2])
    assert torch.equal(to["w2"][1::2].view(torch.uint8), before_EFH[1::2].view(torch.uint8))
