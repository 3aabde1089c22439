"""What an adapter has to be whose rival spreads experts over ranks, or permutes rows (gbmoe/cli/bench/rivals/rival.py has the others).

Shape suffixes: T tokens, K slots a token, H hidden, P padded rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from gbmoe.cli.bench.measurements.measurement import Refusal
from gbmoe.cli.bench.rivals.rival import Layer, Prepared, Rival, Weights
from gbmoe.testing.moe_shapes import MoeCase


class ParallelRival(Rival):
    """One whose `kinds` name "parallel": a layer over several ranks."""

    kinds: ClassVar[tuple[str, ...]] = ("parallel",)

    def parallel_layer(self, case: MoeCase, weights: Weights, group: dist.ProcessGroup) -> Layer:
        """The layer with this rank's experts, whose weights these are; all ranks of the group construct and call it."""
        raise TypeError(f"{type(self).__name__} has no expert parallelism")

    def end(self) -> None:
        """Give back what all ranks of a job hold together; called once on each of them, after its last parallel layer."""


class PermutationRival(Rival):
    """One whose `kinds` name "permutation"."""

    kinds: ClassVar[tuple[str, ...]] = ("permutation",)

    def permutation(self, ids_TK: torch.Tensor, experts: int, align: int) -> Permutation:
        """The permutation to the rows of these experts, each padded to a multiple of `align`."""
        raise TypeError(f"{type(self).__name__} has no permutation")


class Permutation:
    """The steps of a permutation for one routing, each as a Prepared.

    Rows are expert-major and, inside an expert, in token order, as in RoutingPlan. A rival's matrices have `rows` rows, which may end
    with the last row of the last expert. A step that the rival does not have raises Refusal.
    """

    rows: int

    def plan(self) -> Prepared:
        """Everything from ids to index maps. It reads as the maps, by the names of RoutingPlan."""
        raise Refusal("has no plan alone")

    def gather(self, x_TH: torch.Tensor) -> Prepared:
        """The gather as a layer calls it, which may leave rows after the last expert unwritten. It reads as out [rows,H]."""
        raise Refusal("has no gather but the padded one")

    def padded_gather(self, x_TH: torch.Tensor) -> Prepared:
        """The gather with all padding zero. It reads as out [rows,H]."""
        raise Refusal("has no gather alone")

    def plan_and_gather(self, x_TH: torch.Tensor) -> Prepared:
        """Plan and padded gather together, for rivals that have one operator for both. It reads as out [rows,H]."""
        raise Refusal("has no plan and gather")

    def scatter(self, y_PH: torch.Tensor, weights_TK: torch.Tensor) -> Prepared:
        """The weighted sum of each token's rows. It reads as out [T,H]."""
        raise Refusal("has no scatter")

    def scatter_backward(self, grad_TH: torch.Tensor, y_PH: torch.Tensor, weights_TK: torch.Tensor) -> Prepared:
        """The scatter's backward. It reads as the gradients of y, [rows,H], and of the weights, [T,K]."""
        raise Refusal("has no backward")
