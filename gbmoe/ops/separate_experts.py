"""Lists of matrices in the place of w1, w2 and v1 of expert_mlp: which they are, and whether they are read where they lie.

Shape suffixes: T tokens, E experts, F ffn hidden, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from gbmoe._define_operator import is_watched, may_be_transformed
from gbmoe.engines.resolved import Resolved
from gbmoe.ops.gmm import computed_dtype
from gbmoe.separate_weights import Lists, SeparateWeights, StackOrList, like_a_stack, lists_of, why_stacked
from gbmoe.stacked_weights import lie_as_a_stack, stacked

NAMES = ("w1", "w2", "v1")


def stacks_and_lists(w1: StackOrList, w2: StackOrList, v1: StackOrList | None,
                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Lists]:
    """(w1, w2, v1, the lists among them). In the place of a list is a tensor with the shape, dtype and device of its stack, of which there
    is none yet. Where all lists are views of a stack each, as gbmoe.stacked makes them, they are that, and no lists are left. TypeError or
    ValueError for a list of others than matrices that are alike."""
    apart = lists_of("expert_mlp", w1=w1, w2=w2, v1=v1)
    if all(lie_as_a_stack(tensors) for tensors in apart.values()):
        return *stacks(w1, w2, v1, apart), {}  # type: ignore[arg-type]
    one, two, three = (like_a_stack(apart[name]) if name in apart else w for name, w in zip(NAMES, (w1, w2, v1)))
    return one, two, three, apart  # type: ignore[return-value]  # what is left is for check_arguments


def stacks(w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, apart: Lists,
           ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(w1, w2, v1) with the stacks of the lists."""
    one, two, three = (stacked(apart[name]) if name in apart else w for name, w in zip(NAMES, (w1, w2, v1)))
    return one, two, three  # type: ignore[return-value]  # what is no list is for check_arguments


def reads_lists(resolved: Resolved, x_TH: torch.Tensor, apart: Lists) -> bool:
    """Whether the engine reads these matrices where they lie, and nothing has to see a call of an operator."""
    return why_stacked(resolved.engine, computed_dtype(x_TH), apart) is None and not is_watched(x_TH) and not may_be_transformed()


def with_lists(arguments: Sequence, position_of: dict[str, int], counts: dict[str, int], tensors: Sequence[torch.Tensor],
               as_stacks: bool = False) -> list:
    """An operator's arguments with SeparateWeights, or the stack, of so many of the tensors in the places of each name."""
    in_turn, arguments = iter(tensors), list(arguments)
    for name, count in counts.items():
        of_name = list(islice(in_turn, count))
        arguments[position_of[name]] = torch.stack(of_name) if as_stacks else SeparateWeights(of_name)
    return arguments
