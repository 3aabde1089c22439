import math
import re

import pytest
import torch

from gbmoe import extension, separate_weights
from gbmoe.launch.alignment import aligned, has_aligned_rows, rows_or_columns_in_place, two_in_place
from gbmoe.separate_weights import SeparateWeights, in_memory, require_apart, with_one_table
from tests.scattered import scattered

E, R, C = 5, 24, 16


def stack_of(dtype=torch.bfloat16, rows=R, seed=1):
    return torch.randn(E, rows, C, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_table(lowest, numbers):
    """The matrices as a kernel finds them."""
    return torch.stack([torch.as_strided(lowest, lowest.shape[1:], lowest.stride()[1:], lowest.storage_offset() + number * lowest.stride(0))
                        for number in numbers])


VIEWS = {"whole": lambda w: w, "transposed": lambda w: w.transpose(1, 2), "first half": lambda w: w[:, :R // 2],
         "second half": lambda w: w[:, R // 2:], "every other": lambda w: w[:, 1::2],
         "columns of transposed": lambda w: w.transpose(1, 2)[:, 8:]}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sizes", [(E,), (3, 0), (1, 2), (2, 1, 4)])
def test_stacks_are_taken_as_the_lists_of_their_parts(sizes, view):
    stacks = [stack_of(seed=seed)[:size] for seed, size in enumerate(sizes)]
    parts = [matrix for stack in stacks for matrix in stack]
    one, two = SeparateWeights.of_stacks(*stacks), SeparateWeights(parts)
    for of_stacks, of_parts in ((one, two), (VIEWS[view](one), VIEWS[view](two)), (VIEWS[view](one).again(), VIEWS[view](two))):
        assert of_stacks.numbers == of_parts.numbers and of_stacks.stride() == of_parts.stride()
        assert of_stacks.shape == of_parts.shape and of_stacks.data_ptr() == of_parts.data_ptr()
        assert torch.equal(of_stacks.contiguous(), of_parts.contiguous())
    distance = one.stride(0) * one.element_size()
    assert [one.data_ptr() + number * distance for number in one.numbers] == [part.data_ptr() for part in parts]
    assert not SeparateWeights.of_stacks(stacks[0], stack_of(rows=R).transpose(1, 2).reshape(E, R, C).mT.contiguous().mT).numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("view", VIEWS)
def test_the_table_finds_every_matrix(view, dtype):
    stack = stack_of(dtype)
    expected, separate = VIEWS[view](stack), VIEWS[view](SeparateWeights(scattered(stack)))
    assert separate.shape == expected.shape and separate.dtype == dtype and separate.dim() == 3 and separate.size(1) == expected.size(1)
    assert len(separate.numbers) == E and min(separate.numbers) == 0 and separate.data_ptr() == separate.lowest.data_ptr()
    assert torch.equal(by_table(separate.lowest, separate.numbers), expected) and torch.equal(separate.contiguous(), expected)
    assert separate.stride()[1:] == VIEWS[view](scattered(stack)[0].unsqueeze(0)).stride()[1:]


def test_engines_read_rows_or_columns_where_they_lie():
    stack = stack_of()
    separate = SeparateWeights(scattered(stack))
    assert has_aligned_rows(separate) and rows_or_columns_in_place(separate) == (separate, False)
    columns, is_transposed = rows_or_columns_in_place(separate.transpose(1, 2))
    assert is_transposed and isinstance(columns, SeparateWeights) and torch.equal(columns.contiguous(), stack)
    copy, is_transposed = rows_or_columns_in_place(separate[:, :, 4:])  # begins at no multiple of 16 bytes
    assert not is_transposed and torch.equal(copy, stack[:, :, 4:]) and torch.equal(aligned(separate), stack)


@pytest.mark.parametrize("tensors", [
    scattered(stack_of(), step=4), [w.t().contiguous().t() if e == 2 else w for e, w in enumerate(scattered(stack_of()))],
    scattered(torch.zeros(257, 1, 8)),
], ids=["at 4 bytes", "strides differ", "too many"])
def test_without_a_table_there_is_a_copy(tensors):
    separate = SeparateWeights(tensors)
    assert separate.numbers == () and not has_aligned_rows(separate)
    copy, _ = rows_or_columns_in_place(separate)
    assert isinstance(copy, torch.Tensor) and torch.equal(copy, torch.stack(tensors))


def test_distances_are_what_tensor_maps_take():
    table = separate_weights._table
    assert table((4096, 1024, 1536), 2) == (1, 256, (6, 0, 1))
    assert table((0, 2**45 + 2**20), 2) == (0, 2**19, (0, 2**25 + 1))
    assert table((16, 2**35 + 32), 2) is None and table((16, 2**34 + 32), 2) == (0, 8, (0, 2**30 + 1))
    assert table((8, 32), 2) is None


def test_two_tensors_share_a_table_or_have_two():
    stack, other = stack_of(), stack_of(seed=2)
    whole = SeparateWeights(scattered(stack))
    halves = whole[:, :R // 2], whole[:, R // 2:]
    one, two = with_one_table(*halves)
    assert in_memory(one, two)[2] == whole.numbers
    one, two, transposed = two_in_place(whole, SeparateWeights(scattered(other, step=64)))
    first, second, places = in_memory(one, two)
    assert not transposed and len(places) == 2 * E and first.stride() == second.stride() and first.stride(0) == math.gcd(8, first.stride(0))
    assert torch.equal(by_table(first, places[:E]), stack) and torch.equal(by_table(second, places[E:]), other)


def test_a_tensor_and_a_list_are_copied_alike():
    stack, other = stack_of(), stack_of(seed=2)
    for pair in ((stack, SeparateWeights(scattered(other))), (SeparateWeights(scattered(stack)), other)):
        one, two, transposed = two_in_place(*pair)
        assert not transposed and torch.equal(one, stack) and torch.equal(two, other)


def test_more_than_a_table_holds_of_both_is_copied():
    many = torch.arange(129 * 8.0).view(129, 1, 8)
    assert with_one_table(SeparateWeights(scattered(many)), SeparateWeights(scattered(many, step=64))) is None
    one, two, _ = two_in_place(SeparateWeights(scattered(many)), SeparateWeights(scattered(many, step=64)))
    assert torch.equal(one, many) and torch.equal(two, many)


def test_a_stack_is_added_to_the_tensors():
    stack, added = stack_of(torch.float32), stack_of(torch.float32, seed=3)
    tensors = scattered(stack)
    SeparateWeights(tensors).transpose(1, 2).add_(added.transpose(1, 2), alpha=0.5)
    assert torch.equal(torch.stack(tensors), stack + 0.5 * added)


def test_tensors_that_share_memory_take_no_gradients():
    buffer = torch.zeros(40)
    require_apart([buffer[20:].view(4, 5), buffer[:20].view(4, 5)], "f", "w")
    with pytest.raises(ValueError, match=r"f: w\[0\]: expected memory of its own, got memory of w\[1\]"):
        require_apart([buffer[19:39].view(4, 5), buffer[:20].view(4, 5)], "f", "w")


def test_kernels_have_room_for_as_many():
    source = (extension.source_folder() / "places.cuh").read_text()
    assert int(re.search(r"kMostPlaces = (\d+)\b", source)[1]) == separate_weights._MOST_PLACES
