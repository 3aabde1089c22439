"""Weights in e4m3 (gbmoe/launch/quantize.py) have the same bits wherever and however they lie, and are read there.

Shape suffixes: E experts, F and H the sides of a weight.
"""

import itertools

import pytest
import torch

from gbmoe import WeightLayout, float8, launch
from gbmoe.launch import quantize
from gbmoe.separate_weights import SeparateWeights
from gbmoe.testing import exact_inputs
from tests.conftest import dtype_id
from tests.scattered import scattered
from tests.test_weight_layout import laid_out

LAYOUTS = [WeightLayout(*of) for of in itertools.product(("separate", "gate_first", "up_first", "interleaved"), *[(False, True)] * 2)]
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


@pytest.fixture(params=[("cpu", (2, 16, 144)), *[pytest.param(("cuda", shape), marks=pytest.mark.gpu)
                                                 for shape in ((2, 16, 144), (3, 144, 272), (5, 768, 2048))]], ids=str)
def place(request, monkeypatch):
    """A device whose kernel quantises weights, and [E,F,H], of which some have blocks that are not full. On the CPU a function is in the
    kernel's place, which reads the same memory."""
    device, shape = request.param
    if device == "cpu":
        monkeypatch.setattr(quantize, "float8_serves", lambda tensor: True)
        monkeypatch.setattr(torch.ops.gbmoe_cuda, "quantize_weights", stand_in, raising=False)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no float8 kernels")
    exact_inputs.poison(device)
    return torch.device(device), shape


def stand_in(weights, places, power_of_two, *results):
    size, (of_matrix, of_line, step), element = weights.shape[1:], weights.stride(), weights.element_size()
    assert step in (1, 2) and of_line * element % 16 == 0 and of_matrix * element % 16 == 0
    assert weights.data_ptr() % 16 in ((0,) if step == 1 else (0, element))
    begins = [weights.storage_offset() + number * of_matrix for number in places or range(weights.size(0))]
    stack = torch.stack([weights.as_strided(size, (of_line, step), begin) for begin in begins])
    for transpose, (values, scales) in enumerate((results[:2], results[2:])):
        if values is not None:
            made = float8.quantize_weights(stack, power_of_two, bool(transpose))
            values.copy_(made.values_ENK)
            scales.copy_(made.scales)


@pytest.fixture
def copied(monkeypatch):
    """A list to which the shapes of weights go that are copied."""
    shapes, original = [], quantize.aligned
    monkeypatch.setattr(quantize, "aligned", lambda w: shapes.append(tuple(w.shape)) or original(w))
    return shapes


def matrices(place, dtype):
    """gate, down and up [E,F,H], whose blocks have scales of their own."""
    device, shape = place
    of_line, of_column = (torch.arange(size, device=device) // 128 for size in shape[1:])
    blocks = torch.exp2(3.0 * (of_line % 2).unsqueeze(1) - of_column % 5)
    return [(exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=seed) * blocks).to(dtype) for seed in (1, 2, 3)]


def assert_quantised_as(w_EFH, expected_EFH, power_2_scale=False):
    """In either orientation, alone and in both at once."""
    both = launch.quantize_weights_both_ways(w_EFH, power_2_scale)
    for transpose in (False, True):
        expected = float8.quantize_weights(expected_EFH, power_2_scale, transpose)
        for got in (both[transpose], launch.quantize_weights(w_EFH, power_2_scale, transpose)):
            assert got.values_ENK.is_contiguous() and got.dtype == expected.dtype
            assert torch.equal(got.values_ENK.view(torch.uint8), expected.values_ENK.view(torch.uint8))
            assert torch.equal(got.scales, expected.scales)


@pytest.mark.pairs
@HALVES
@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.code)
def test_weights_of_every_layout_were_copied_before_they_were_quantised(layout, power_2_scale, dtype, place, copied):
    gate, down, up = matrices(place, dtype)
    for w_EFH, expected_EFH in zip(layout.matrices(*laid_out(layout, gate, down, up)), (gate, down, up)):
        assert launch.reads_weights_in_place(w_EFH)
        assert_quantised_as(w_EFH, expected_EFH, power_2_scale)
    assert not copied


@pytest.mark.memcheck
@HALVES
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5], LAYOUTS[12], LAYOUTS[14]], ids=lambda layout: layout.code)
def test_lists_of_matrices_were_copied_before_they_were_quantised(layout, dtype, place, copied, monkeypatch):
    gate, down, up = matrices(place, dtype)
    lists = [None if w is None else SeparateWeights(scattered(w)) for w in laid_out(layout, gate, down, up)]
    monkeypatch.setattr(SeparateWeights, "contiguous", lambda self: pytest.fail("a copy of a list"))
    for w_EFH, expected_EFH in zip(layout.matrices(*lists), (gate, down, up)):
        assert_quantised_as(w_EFH, expected_EFH)
    assert not copied


def off_by(elements, stack):
    memory = torch.full((stack.numel() + 16,), float("nan"), dtype=stack.dtype, device=stack.device)
    return memory[elements:elements + stack.numel()].view(stack.shape).copy_(stack)


@pytest.mark.parametrize("lies", [
    lambda gate, up: off_by(4, gate), lambda gate, up: off_by(1, gate),
    lambda gate, up: torch.nn.functional.pad(gate, (0, 4))[:, :, :-4],
    lambda gate, up: off_by(2, torch.stack((gate, up), 3).flatten(2))[:, :, ::2],
    lambda gate, up: torch.stack((gate, up, up), 3).flatten(2)[:, :, ::3],
    lambda gate, up: SeparateWeights([*scattered(gate)[:-1], off_by(4, gate[-1])]),
], ids=["8 bytes", "an element", "pitch", "pairs", "threes", "a list"])
def test_what_vectors_do_not_reach_is_copied(lies, place, copied):
    gate, _, up = matrices(place, torch.bfloat16)
    w_EFH = lies(gate, up)
    assert not launch.reads_weights_in_place(w_EFH)
    assert_quantised_as(w_EFH, gate)
    assert copied == [tuple(gate.shape)] * 3
