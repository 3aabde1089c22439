"""Sums and copies of gbmoe/launch/sums_and_copies.py: a CUDA kernel's, and torch's, have the same bits."""

import itertools

import pytest
import torch

from gbmoe import launch
from gbmoe.testing import exact_inputs
from tests.conftest import FLOATS


@pytest.mark.memcheck
def test_what_is_added_to_rows_is_rounded_once_and_nothing_next_to_them_is_touched(device):
    for dtype, (rows, columns) in itertools.product(FLOATS, [(0, 8), (1, 8), (3, 5), (131, 264)]):
        memory = torch.full((rows + 2, columns), 3, dtype=dtype, device=device)
        to, added = memory[1:-1], exact_inputs.exact_values(rows, columns, dtype=dtype, device=device, seed=1)
        to.copy_(exact_inputs.exact_values(rows, columns, dtype=dtype, device=device, seed=2))
        expected = to + added
        assert launch.add_to_rows(to, added) is to and torch.equal(to, expected)
        assert bool((memory[[0, -1]] == 3).all())


@pytest.mark.memcheck
@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 33, 24), (3, 1, 40), (129, 70, 16), (8, 264, 12), (2, 0, 8)], ids=str)
def test_copies_in_every_order_of_dimensions(device, shape):
    for dtype, to_dtype, scale in [(torch.float32, torch.bfloat16, 0.75), (torch.bfloat16, torch.float32, 2.0),
                                   (torch.float16, torch.float16, 1.0), (torch.float64, torch.float32, 0.5)]:
        values = exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=3)
        for order, to_order in itertools.product(itertools.permutations(range(3)), repeat=2):
            lying, back = (torch.empty([shape[dim] for dim in one], dtype=kind, device=device).permute([one.index(dim) for dim in range(3)])
                           for one, kind in ((order, dtype), (to_order, to_dtype)))
            lying.copy_(values)
            exact_inputs.poison(device)
            back.fill_(float("nan"))
            assert launch.copy_scaled(lying, scale, back) is back and torch.equal(back, (values * scale).to(to_dtype)), (order, to_order)


@pytest.mark.memcheck
@pytest.mark.parametrize("cut", [(0, 0, 4), (0, 3, 0), (1, 0, 1), (2, 4, 3)], ids=str)
def test_copies_of_parts_of_tensors_took_two_dimensions_for_one(device, cut):
    """Nothing between the parts of what is written is touched."""
    shape = (36, 20, 32)
    values = exact_inputs.exact_values(*shape, dtype=torch.bfloat16, device=device, seed=3)
    whole, part = [size + gap for size, gap in zip(shape, cut)], tuple(slice(gap, None) for gap in cut)
    for orders in itertools.product(itertools.permutations(range(3)), repeat=2):
        lying, back = (torch.full([whole[dim] for dim in order], 7.0, dtype=torch.bfloat16, device=device)
                       .permute([order.index(dim) for dim in range(3)]) for order in orders)
        lying[part] = values
        expected = back.clone()
        expected[part] = values * 0.5
        launch.copy_scaled(lying[part], 0.5, back[part])
        assert torch.equal(back, expected), orders


def test_rows_are_aligned_or_copied():
    matrices = torch.arange(3 * 8 * 16.0).view(3, 8, 16)
    assert launch.with_aligned_rows(matrices) is matrices and launch.with_aligned_rows(matrices[:, :, :8]).stride() == (128, 16, 1)
    for other in (matrices.mT, matrices[..., ::2], matrices.view(-1)[1:-127].view(2, 8, 16)):
        copy = launch.with_aligned_rows(other)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, other)
