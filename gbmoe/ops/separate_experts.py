"""Lists of matrices in the place of w1, w2 and v1 of expert_mlp: which they are, and whether they are read where they lie.

Shape suffixes: T tokens, E experts, F ffn hidden, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from gbmoe._define_operator import may_be_transformed
from gbmoe.engines.resolved import Resolved
from gbmoe.ops.gmm import computed_dtype
from gbmoe.separate_weights import Lists, SeparateWeights, StackOrList, like_a_stack, lists_of, why_stacked, with_one_table
from gbmoe.stacked_weights import lie_as_a_stack, stacked

NAMES = ("w1", "w2", "v1")
NO_TABLE = "kernels read up to 256 matrices of like strides at multiples of 16 bytes, and of w1 and v1 lists or tensors alike"


def stacks_and_lists(w1: StackOrList, w2: StackOrList, v1: StackOrList | None,
                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Lists]:
    """(w1, w2, v1, the lists among them). In the place of a list is a tensor with the shape, dtype and device of its stack, of which there
    is none yet. TypeError or ValueError for a list of others than matrices that are alike."""
    apart = lists_of("expert_mlp", w1=w1, w2=w2, v1=v1)
    one, two, three = (like_a_stack(apart[name]) if name in apart else w for name, w in zip(NAMES, (w1, w2, v1)))
    return one, two, three, apart  # type: ignore[return-value]  # what is left is for check_arguments


def stacks(w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, apart: Lists,
           ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(w1, w2, v1) with the stacks of the lists."""
    one, two, three = (stacked(apart[name]) if name in apart else w for name, w in zip(NAMES, (w1, w2, v1)))
    return one, two, three  # type: ignore[return-value]  # what is no list is for check_arguments


def reads_lists(resolved: Resolved, x_TH: torch.Tensor, apart: Lists) -> bool:
    """Whether lists are taken as they are: engines read them where they lie, or a stack that is made inside. This depends on the kind of
    call, and not on addresses, modes or profilers."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return not traced and not may_be_transformed() and why_stacked(resolved.engine, computed_dtype(x_TH), apart) is None


def with_lists(arguments: Sequence, position_of: dict[str, int], counts: dict[str, int], tensors: Sequence[torch.Tensor],
               as_stacks: bool = False) -> tuple[list, bool]:
    """(an operator's arguments with what stands for so many of the tensors in the places of each name, whether that is SeparateWeights).
    Otherwise it is a stack, differentiable: a view where they lie so, and a copy where kernels have no table for all of them, or with
    `as_stacks`."""
    in_turn, arguments = iter(tensors), list(arguments)
    lists = {name: tuple(islice(in_turn, count)) for name, count in counts.items()}
    others = {name: arguments[position_of[name]] for name in NAMES if name not in lists}
    found = None if as_stacks or all(map(lie_as_a_stack, lists.values())) else in_place(lists, others)
    for name, of_name in lists.items():
        arguments[position_of[name]] = stacked(of_name) if found is None else found[name]
    return arguments, found is not None


def in_place(lists: Lists, others: dict[str, torch.Tensor | None]) -> dict[str, SeparateWeights] | None:
    """SeparateWeights of each list among w1, w2 and v1, or None where kernels cannot read all of them by tables."""
    return with_tables({name: SeparateWeights(tensors) for name, tensors in lists.items()}, others)


def with_tables(found: dict[str, SeparateWeights], others: dict[str, torch.Tensor | None]) -> dict[str, SeparateWeights] | None:
    """`found`, by name, or None where kernels cannot read all of them by tables."""
    one, two = found.get("w1", others.get("w1")), found.get("v1", others.get("v1"))
    if not all(separate.numbers for separate in found.values()):
        return None
    return None if one is not None and two is not None and with_one_table(one, two) is None else found
