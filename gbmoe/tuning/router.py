"""Which of the router's kernels computes a call: the one in the first row of a table that takes the call.

A call is E experts, K slots a token and the dtype of the logits. A row says how a token's logits are spread over the lanes of a warp:
with fewer lanes each lane sorts more numbers, with more lanes they exchange more. More lanes than a row has are 4 to 20 % slower
(docs/notes/router-longer-lists.md). Numbers of experts that vectors do not divide have rows of their own, with shorter vectors or
none. The last row of a table takes every call that is left.

A row says what one warp does, which no number of multiprocessors changes: it was measured on an H200, and is the same on every GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

MOST_GROUPS = 64  # of experts that kernels choose from, a bit each

_CANDIDATES = 0  # the variant, instead of a list's length, where the warp ranks candidates


class RouterConfig(NamedTuple):
    """How one call of the router is laid out; the launches take these fields by name.

    Attributes:
        lanes: the lanes of a warp that share a token; 32 is the whole warp.
        numbers_per_lane: how many logits a lane keeps in registers.
        longest_vector: the most numbers that a lane loads at once; 16 is no limit, 1 means no vectors.
        variant: in forward the length of the sorted list that the lanes share, 4, 8, 16 or 32, or 0 where a whole warp ranks
            candidates; in backward the number of slots a lane.
    """
    lanes: int
    numbers_per_lane: int
    longest_vector: int
    variant: int


class _Row(NamedTuple):
    """The calls that a row takes, and the layout that it gives them; `ranked` means ranked candidates instead of sorted lists."""
    max_experts: int
    multiple: int
    min_slots: int
    max_slots: int
    lanes: int
    numbers_per_lane: int
    longest_vector: int
    ranked: bool = False

    def takes(self, experts: int, slots: int) -> bool:
        return experts <= self.max_experts and experts % self.multiple == 0 and self.min_slots <= slots <= self.max_slots


# Sorted lists are used up to the number of experts from which, as measured, a warp that ranks candidates is faster. With float32
# logits, whose brief keys must be checked, that number is smaller, unless there are many slots. (A token has at most as many slots as
# there are experts, so the rows for 8 and 16 experts need no more.)
_FORWARD_16_BIT = tuple(_Row(*row) for row in (
    # E up to, multiple of, K from, to, lanes, numbers a lane, longest vector, ranked
    (   8, 4,  1,  8,  2,  4, 16),
    (  16, 4,  1, 16,  4,  4, 16),
    (  16, 1,  1, 16,  8,  2,  1),
    (  32, 8, 17, 32,  8,  4, 16),  # lists of 32 places are spread over more lanes
    (  64, 8, 17, 32,  8,  8, 16),
    (  64, 4, 17, 32,  8,  8,  4),
    (  32, 8,  1, 16,  4,  8, 16),
    (  64, 8,  1, 16,  4, 16, 16),
    (  64, 4,  1, 16,  4, 16,  4),
    (  64, 1,  1, 32,  8,  8,  1),
    ( 128, 8,  1, 32,  4, 32, 16),
    ( 160, 8,  1, 32,  4, 40, 16),
    ( 192, 8,  1, 32,  4, 48, 16),
    ( 256, 8,  1, 32,  8, 32, 16),
    ( 384, 8,  1, 32,  8, 48, 16),
    ( 512, 8,  1, 32, 16, 32, 16),
    ( 128, 4,  1, 32, 32,  4, 16, True),
    ( 256, 1,  1, 32, 32,  8,  1, True),
    (1024, 8,  1, 32, 32, 32, 16, True),
    (1024, 1,  1, 32, 32, 32,  1, True),
))
_FORWARD_FLOAT32 = tuple(_Row(*row) for row in (
    # E up to, multiple of, K from, to, lanes, numbers a lane, longest vector, ranked
    (   8, 4,  1,  8,  2,  4, 16),
    (  16, 4,  1, 16,  4,  4, 16),
    (  16, 1,  1, 16,  8,  2,  1),
    (  32, 8,  1, 32,  4,  8, 16),
    (  64, 8,  1, 32,  4, 16, 16),
    (  64, 4,  1, 32,  4, 16,  4),
    (  64, 1,  1, 32,  8,  8,  1),
    ( 128, 4,  1, 16,  4, 32, 16),
    ( 128, 4, 17, 32,  8, 16, 16),
    ( 160, 4,  1, 32,  8, 20, 16),
    ( 192, 4,  1, 32,  8, 24, 16),
    ( 256, 4, 17, 32, 16, 16, 16),
    ( 256, 4,  1, 16,  8, 32, 16),
    ( 384, 4,  1,  8, 16, 24, 16),
    ( 384, 4, 17, 32, 16, 24, 16),
    ( 384, 4,  9, 16, 32, 12, 16, True),
    ( 512, 4, 17, 32, 16, 32, 16),
    ( 256, 1,  1, 32, 32,  8,  1, True),
    ( 512, 8,  1, 32, 32, 16, 16, True),
    (1024, 8,  1, 32, 32, 32, 16, True),
    (1024, 1,  1, 32, 32, 32,  1, True),
))

# By the dtype of the logits' gradient. Eight lanes share a token up to the number of experts from which, as measured, a warp is faster.
_BACKWARD_16_BIT = tuple(_Row(*row) for row in (
    # E up to, multiple of, K from, to, lanes, numbers a lane, longest vector
    (  16, 1,  1, 16,  8,  2,  1),
    (  32, 4,  1, 16,  8,  4, 16),
    (  64, 8,  1, 16,  8,  8, 16),
    (  64, 1,  1, 16,  8,  8,  1),
    ( 128, 8,  1, 16,  8, 16, 16),
    ( 256, 8,  1, 16,  8, 32, 16),
    (  64, 1,  1, 32, 32,  2,  1),
    ( 128, 4,  1, 32, 32,  4, 16),
    ( 256, 8,  1, 32, 32,  8, 16),
    ( 256, 1,  1, 32, 32,  8,  1),
    ( 512, 8,  1, 32, 32, 16, 16),
    (1024, 8,  1, 32, 32, 32, 16),
    (1024, 1,  1, 32, 32, 32,  1),
))
_BACKWARD_FLOAT32 = tuple(_Row(*row) for row in (
    # E up to, multiple of, K from, to, lanes, numbers a lane, longest vector
    (  16, 1,  1, 16,  8,  2,  1),
    (  32, 4,  1, 16,  8,  4, 16),
    (  64, 8,  1, 16,  8,  8, 16),
    (  64, 1,  1, 16,  8,  8,  1),
    ( 128, 8,  1,  6,  8, 16, 16),
    (  64, 1,  1, 32, 32,  2,  1),
    ( 128, 4,  1, 32, 32,  4, 16),
    ( 256, 8,  1, 32, 32,  8, 16),
    ( 256, 1,  1, 32, 32,  8,  1),
    ( 512, 8,  1, 32, 32, 16, 16),
    (1024, 8,  1, 32, 32, 32, 16),
    (1024, 1,  1, 32, 32, 32,  1),
))


def serves(experts: int, slots: int) -> bool:
    """Whether there are kernels for these numbers of experts and slots a token; the last row of every table has the largest of both."""
    last = _FORWARD_16_BIT[-1]
    return experts <= last.max_experts and slots <= min(last.max_slots, experts)


@functools.lru_cache(maxsize=1024)
def forward(experts: int, slots: int, float32: bool) -> RouterConfig:
    """The kernel of route() for logits in float32 or in 16 bits, where `serves` is true."""
    row = next(row for row in (_FORWARD_FLOAT32 if float32 else _FORWARD_16_BIT) if row.takes(experts, slots))
    list_length = _CANDIDATES if row.ranked else next(length for length in (4, 8, 16, 32) if slots <= length)
    return RouterConfig(row.lanes, row.numbers_per_lane, row.longest_vector, list_length)


@functools.lru_cache(maxsize=1024)
def backward(experts: int, slots: int, float32: bool) -> RouterConfig:
    """The kernel of route()'s gradient, for a gradient in float32 or in 16 bits, where `serves` is true."""
    row = next(row for row in (_BACKWARD_FLOAT32 if float32 else _BACKWARD_16_BIT) if row.takes(experts, slots))
    return RouterConfig(row.lanes, row.numbers_per_lane, row.longest_vector, -(-slots // row.lanes))
