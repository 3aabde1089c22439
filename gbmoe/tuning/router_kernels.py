"""Which of the router's kernels computes a call: the one in the first row of a table that takes the call.

A call is E experts, K slots a token and the dtype of the logits. A softmax and top-k has tables of its own, and any other
function has one more. There are few rows, because every kernel makes the extension larger (docs/notes/router-object-size.md):
calls that no known model makes take a neighbour's. A row says how a token's logits are spread over the lanes of a warp: with
fewer lanes each lane sorts more logits, with more lanes they exchange more. More lanes than a row has are slower
(docs/notes/router-longer-lists.md). Numbers of experts that vectors do not divide have rows of their own, without vectors. The
last row of a table takes every call that is left.

A row says what one warp does, so that it is the same for any number of multiprocessors. It was measured on an H200.
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
        longest_vector: the most logits that a lane loads at once: 8 where kernels are for bfloat16, 4 where they are for any dtype, or 1
            for no vectors.
        variant: in forward the length of the sorted list that the lanes share, 4, 8, 16 or 32, or 0 where a whole warp ranks
            candidates; in backward the most slots a lane, or 0 where it is not of a softmax and top-k.
    """
    lanes: int
    numbers_per_lane: int
    longest_vector: int
    variant: int


class _Row(NamedTuple):
    """The calls that a row takes, and the layout that it gives them. `lists` are the lengths of sorted lists that there are; () means that
    candidates are ranked instead."""
    max_experts: int
    multiple: int
    max_slots: int
    lanes: int
    numbers_per_lane: int
    longest_vector: int
    lists: tuple[int, ...] = ()

    def takes(self, experts: int, slots: int) -> bool:
        return experts <= self.max_experts and experts % self.multiple == 0 and slots <= self.max_slots

    @property
    def with_powers(self) -> _Row | None:
        """The row of its kernels that have the code of powers: a whole warp's, and those of logits of any dtype with long lists."""
        if self.lanes == 32 and self.numbers_per_lane in (8, 32):
            return self
        if self.lanes == 8 and self.numbers_per_lane >= 16 and self.longest_vector == 4 and 16 in self.lists:
            return self._replace(lists=(16,))
        return None

    def config(self, slots: int) -> RouterConfig:
        length = next((length for length in self.lists if slots <= length), _CANDIDATES)
        return RouterConfig(self.lanes, self.numbers_per_lane, self.longest_vector, length)


def _with_powers(table: tuple[_Row, ...]) -> tuple[_Row, ...]:
    return tuple(row.with_powers for row in table if row.with_powers is not None)


# Sorted lists are used up to the number of experts from which, as measured, a warp that ranks candidates is faster (docs/notes/
# router-sorted-lists.md, router-longer-lists.md). With float32 logits, whose brief keys must be checked (router-float32-keys.md), that
# number is smaller, unless there are many slots.
#
# Logits in bfloat16: the calls that models make. Where no row takes a call, or one that does would leave more than half of its
# places unused, the table of any logits has it.
_FORWARD_BFLOAT16 = tuple(_Row(*row) for row in (
    # E up to, multiple of, K up to, lanes, logits a lane, longest vector, lists
    (   8, 4,  4,  2,  4,  8, (4,)),
    (  16, 4,  4,  4,  4,  8, (4,)),
    (  32, 8,  8,  4,  8,  8, (4, 8)),
    (  64, 8,  8,  4, 16,  8, (8,)),
    ( 128, 8,  8,  4, 32,  8, (4, 8)),
    ( 160, 8,  8,  4, 40,  8, (8,)),
    ( 192, 8,  8,  4, 48,  8, (8,)),
    ( 256, 8, 16,  8, 32,  8, (8, 16)),
    ( 384, 8,  8,  8, 48,  8, (8,)),
    ( 512, 8, 16, 16, 32,  8, (8, 16)),
    (1024, 8, 32, 32, 32,  8),
))
# Logits of any dtype.
_FORWARD = tuple(_Row(*row) for row in (
    # E up to, multiple of, K up to, lanes, logits a lane, longest vector, lists
    (   8, 4,  4,  2,  4,  4, (4,)),
    (  16, 4,  8,  4,  4,  4, (4, 8)),
    (  16, 1, 16,  8,  2,  1, (8, 16)),
    (  32, 4,  8,  4,  8,  4, (4, 8)),
    (  64, 4,  8,  4, 16,  4, (4, 8)),
    (  64, 1, 16,  8,  8,  1, (8, 16)),
    ( 128, 4,  8,  4, 32,  4, (4, 8)),
    ( 128, 4, 16,  8, 16,  4, (16,)),
    ( 160, 4,  8,  8, 20,  4, (8,)),
    ( 192, 4,  8,  8, 24,  4, (8,)),
    ( 256, 4, 16,  8, 32,  4, (8, 16)),
    ( 384, 4,  8, 16, 24,  4, (8,)),
    ( 384, 4, 16, 32, 12,  4),
    ( 256, 1, 32, 32,  8,  1),
    ( 512, 4, 16, 32, 16,  4),
    ( 512, 4, 32, 16, 32,  4, (32,)),
    (1024, 4, 32, 32, 32,  4),
    (1024, 1, 32, 32, 32,  1),
))
# Of any RouterFunction; logits of any dtype.
_ANY_FUNCTION = tuple(_Row(*row) for row in (
    # E up to, multiple of, K up to, lanes, logits a lane, longest vector, lists
    (  64, 4,  8,  8,  8,  4, (8,)),
    (  64, 1,  8,  8,  8,  1, (8,)),
    ( 128, 4,  8,  8, 16,  4, (8,)),
    ( 256, 4,  8,  8, 32,  4, (8,)),
    ( 512, 4,  8, 16, 32,  4, (8,)),
    ( 256, 1, 32, 32,  8,  1),
    (1024, 4, 32, 32, 32,  4),
    (1024, 1, 32, 32, 32,  1),
))

# Eight lanes share a token up to the number of experts from which, as measured, a warp is faster. Gradients in float32 and those in 16 bits
# differ in that.
_BACKWARD_16_BIT = tuple(_Row(*row) for row in (
    # E up to, multiple of, K up to, lanes, logits a lane, longest vector
    (  16, 1, 16,  8,  2,  1),
    (  32, 4, 16,  8,  4,  4),
    (  64, 4, 16,  8,  8,  4),
    (  64, 1, 16,  8,  8,  1),
    ( 128, 4, 16,  8, 16,  4),
    ( 256, 4, 16,  8, 32,  4),
    ( 128, 4, 32, 32,  4,  4),
    ( 256, 4, 32, 32,  8,  4),
    ( 256, 1, 32, 32,  8,  1),
    ( 512, 4, 32, 32, 16,  4),
    (1024, 4, 32, 32, 32,  4),
    (1024, 1, 32, 32, 32,  1),
))
_BACKWARD_FLOAT32 = tuple(_Row(*row) for row in (
    # E up to, multiple of, K up to, lanes, logits a lane, longest vector
    (  16, 1, 16,  8,  2,  1),
    (  32, 4, 16,  8,  4,  4),
    (  64, 4, 16,  8,  8,  4),
    (  64, 1, 16,  8,  8,  1),
    ( 128, 4,  6,  8, 16,  4),
    ( 128, 4, 32, 32,  4,  4),
    ( 256, 4, 32, 32,  8,  4),
    ( 256, 1, 32, 32,  8,  1),
    ( 512, 4, 32, 32, 16,  4),
    (1024, 4, 32, 32, 32,  4),
    (1024, 1, 32, 32, 32,  1),
))


def serves(experts: int, slots: int) -> bool:
    """Whether there are kernels for these numbers of experts and slots a token; the last row of every table has the largest of both."""
    last = _FORWARD[-1]
    return experts <= last.max_experts and slots <= min(last.max_slots, experts)


@functools.lru_cache(maxsize=1024)
def forward(experts: int, slots: int, bfloat16: bool, any_norm: bool = False) -> RouterConfig:
    """The kernel of a softmax and top-k, for logits in bfloat16 or in another dtype, where `serves` is true; `any_norm`: with a norm
    other than those with p = 1 and 2."""
    narrow, wide = (_with_powers(table) if any_norm else table for table in (_FORWARD_BFLOAT16, _FORWARD))
    if bfloat16:
        for row in narrow:
            if row.takes(experts, slots) and row.lanes * row.numbers_per_lane <= 2 * experts:
                return row.config(slots)
    return next(row for row in wide if row.takes(experts, slots)).config(slots)


@functools.lru_cache(maxsize=1024)
def backward(experts: int, slots: int, float32: bool, any_norm: bool = False) -> RouterConfig:
    """The kernel of the gradient of a softmax and top-k, for a gradient in float32 or in 16 bits, where `serves` is true; `any_norm` as
    forward's."""
    table = _BACKWARD_FLOAT32 if float32 else _BACKWARD_16_BIT
    row = next(row for row in (_with_powers(table) if any_norm else table) if row.takes(experts, slots))
    return RouterConfig(row.lanes, row.numbers_per_lane, row.longest_vector, 2 if row.lanes == 8 else 1)


@functools.lru_cache(maxsize=1024)
def any_function(experts: int, slots: int) -> RouterConfig:
    """The kernel of any RouterFunction, where `serves` is true."""
    return next(row for row in _ANY_FUNCTION if row.takes(experts, slots)).config(slots)


@functools.lru_cache(maxsize=1024)
def any_function_backward(experts: int) -> RouterConfig:
    """The kernel of the gradient of any RouterFunction: its lanes, which keep all logits of a token in shared memory, and its
    vectors."""
    vector = 4 if experts % 4 == 0 else 1
    lanes = 8 if experts <= 256 else 16 if experts <= 512 and vector == 4 else 32
    return RouterConfig(lanes, -(-experts // (lanes * vector)) * vector, vector, 0)
