"""Alignment of operands for kernels that read 16 bytes at a time."""

from __future__ import annotations

import torch

from gbmoe.separate_weights import SeparateWeights, Stack, with_one_table


def aligned(tensor: Stack) -> torch.Tensor:
    """`tensor` if it is contiguous and starts at a multiple of 16 bytes, otherwise a copy that is and does; a copy of SeparateWeights."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def has_aligned_rows(matrices: Stack) -> bool:
    """Whether the rows of a stack [E,R,C] are contiguous, and all of them start at multiples of 16 bytes, as TMA and copies of 16 bytes
    need it. They may lie further apart than they are long, but not overlap. Rows of contiguous matrices are multiples of 16 bytes: engines
    take no others."""
    if isinstance(matrices, SeparateWeights):
        return bool(matrices.numbers) and has_aligned_rows(matrices.lowest)
    if matrices.is_contiguous():
        return matrices.data_ptr() % 16 == 0
    return (matrices.stride(2) == 1 or matrices.size(2) == 1) and matrices.data_ptr() % 16 == 0 and _rows_lie_apart(matrices, 1)


def has_pairs_in_aligned_rows(matrices: Stack) -> bool:
    """Whether the rows of a stack [E,R,C] are the first elements of all pairs in aligned rows, or the second ones: gate and up in turns."""
    if isinstance(matrices, SeparateWeights):
        return bool(matrices.numbers) and has_pairs_in_aligned_rows(matrices.lowest)
    begins = matrices.data_ptr() % 16 in (0, matrices.element_size())
    return matrices.stride(2) == 2 and begins and _rows_lie_apart(matrices, 2)


def _rows_lie_apart(matrices: torch.Tensor, step: int) -> bool:
    """Whether rows of elements that lie `step` apart begin at multiples of 16 bytes after the first, and do not overlap."""
    experts, rows, columns = matrices.shape
    of_expert, of_row, _ = matrices.stride()
    in_16_bytes = 16 // matrices.element_size()  # elements
    return ((rows == 1 or (of_row >= step * columns and of_row % in_16_bytes == 0))
            and (experts == 1 or (of_expert >= step * columns and of_expert % in_16_bytes == 0)))


def lies_transposed(matrices: Stack) -> bool | None:
    """False for a stack [E,R,C] whose rows our kernels read where they lie, True where they read its columns, and None where they read
    neither: rows_or_columns_in_place copies it."""
    return False if has_aligned_rows(matrices) else True if has_aligned_rows(matrices.transpose(1, 2)) else None


def rows_or_columns_in_place(matrices: Stack) -> tuple[Stack, bool]:
    """(matrices, False) of a stack [E,R,C] whose rows our kernels read where they lie, or its transposed matrices [E,C,R] and True where
    they read its columns; otherwise a copy and False."""
    if matrices.is_contiguous() and matrices.data_ptr() % 16 == 0:  # asked in every product: one call less
        return matrices, False
    if has_aligned_rows(matrices):
        return matrices, False
    transposed = matrices.transpose(1, 2)
    return (transposed, True) if has_aligned_rows(transposed) else (aligned(matrices), False)


def two_in_place(one: Stack, two: Stack | None) -> tuple[Stack, Stack | None, bool]:
    """rows_or_columns_in_place of two stacks of one shape, of which one kernel reads both in the same way: copies, if they differ."""
    one_here, is_transposed = rows_or_columns_in_place(one)
    if two is None:
        return one_here, None, is_transposed
    two_here, two_is_transposed = rows_or_columns_in_place(two)
    both = with_one_table(one_here, two_here) if two_is_transposed == is_transposed else None
    return (aligned(one), aligned(two), False) if both is None else (*both, is_transposed)
