"""The arguments of expert_mlp: what it takes, and the errors for all else.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gbmoe import engines
from gbmoe._checks import FLOATING, PLAIN, autocast_enabled, require, require_tensor
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops.activations import activation_name
from gbmoe.ops.permute import check_plan, check_slot_scalars
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout

# [E,F,H] of the kinds of arguments that have been found right. Two threads that find the same kind write the same.
_SHAPE_OF_KIND: dict[tuple, tuple[int, int, int]] = {}
_MOST_KINDS = 1024
_PLAIN = frozenset(PLAIN)


def checked_shape(x_TH: torch.Tensor, plan: RoutingPlan, layout: WeightLayout, w1: torch.Tensor, w2: torch.Tensor,
                  v1: torch.Tensor | None, weights_TK: torch.Tensor | None) -> tuple[int, int, int]:
    """[E,F,H] of arguments that expert_mlp takes. Raises TypeError or ValueError for others.

    Plain tensors of a kind that has been found right are not looked at again: the questions below take the host as long as several
    launches.
    """
    tensors: list[Any] = [x_TH, w1, w2]
    if v1 is not None:
        tensors.append(v1)
    if weights_TK is not None:
        tensors.append(weights_TK)
    traces = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traces or not isinstance(plan, RoutingPlan) or not _PLAIN.issuperset(map(type, tensors)):
        return _shape_EFH(x_TH, plan, layout, w1, w2, v1, weights_TK)
    plan.check()
    of_plan = plan.row_of_slot_TK
    kind = (layout, v1 is None, weights_TK is None, plan.num_experts, of_plan.shape, of_plan.device, autocast_enabled(of_plan.device.type),
            *[(t.shape, t.dtype, t.device) for t in tensors])
    try:
        found = _SHAPE_OF_KIND.get(kind)
    except TypeError:  # a layout that is none, or a size without a hash
        return _shape_EFH(x_TH, plan, layout, w1, w2, v1, weights_TK)
    if found is None:
        found = _shape_EFH(x_TH, plan, layout, w1, w2, v1, weights_TK)
        if len(_SHAPE_OF_KIND) >= _MOST_KINDS:
            _SHAPE_OF_KIND.clear()
        _SHAPE_OF_KIND[kind] = found
    return found


def checked_call(x_TH: torch.Tensor, plan: RoutingPlan, layout: WeightLayout, w1: torch.Tensor, w2: torch.Tensor,
                 v1: torch.Tensor | None, weights_TK: torch.Tensor | None, biases: Sequence[torch.Tensor | None],
                 activation: str | Callable, weights_on: str, fp8_recipe: Float8BlockScaling | None, engine: str, batch_invariant: bool,
                 ) -> tuple[tuple[int, int, int], str | None, str]:
    """([E,F,H], the activation's name, the engine or the one that computes the recipe). expert_mlp and expert_path both call this, so that
    they refuse alike. Raises TypeError or ValueError for all that expert_mlp does not take, except what an engine refuses, and the
    arguments that expert_path does not have."""
    w1_bias, w2_bias, v1_bias = biases
    if weights_on != "output":
        require(weights_on in ("input", "between"), "expert_mlp", "weights_on", "output, between or input", repr(weights_on))
        require(weights_on == "input" or w2_bias is None, "expert_mlp", "w2_bias", "None where weights are on what is between the products",
                "a tensor")
    shape_EFH = checked_shape(x_TH, plan, layout, w1, w2, v1, weights_TK)
    name = activation_name(activation)
    if w1_bias is not None or w2_bias is not None or v1_bias is not None:
        check_biases(x_TH, shape_EFH, v1, biases, layout)
        require(name is not None, "expert_mlp", "activation", "one that has a kernel, with biases", activation)
    if fp8_recipe is not None:
        require(not batch_invariant, "expert_mlp", "batch_invariant", "False with fp8_recipe", batch_invariant)
        engine = engines.float8(fp8_recipe, engine)
    return shape_EFH, name, engine


def _shape_EFH(x_TH, plan, layout, w1, w2, v1, weights_TK) -> tuple[int, int, int]:
    of_matrices = matrices(layout, w1, w2, v1)
    check_arguments(x_TH, plan, *of_matrices, weights_TK)
    return tuple(of_matrices[0].shape)  # type: ignore[return-value]


def matrices(layout: WeightLayout, w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, function: str = "expert_mlp",
             ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """layout.matrices of an operator's arguments, whose shapes are those that callers write. Raises TypeError or ValueError where they
    cannot be of this layout; what is left is for check_arguments."""
    if layout is MEGABLOCKS:
        return w1, w2, v1
    if not isinstance(layout, WeightLayout):
        require(False, function, "layout", "a gbmoe.WeightLayout", repr(layout), TypeError)
    for argument, weight in (("w1", w1), ("w2", w2), ("v1", v1)):
        if weight is not None or argument != "v1":
            require_tensor(weight, function, argument, rank=3)
    layout.check(function, w1, v1)
    return layout.matrices(w1, w2, v1)


def check_arguments(x_TH, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK) -> None:
    """Raise TypeError or ValueError for what expert_mlp does not take."""
    check_plan(plan, "expert_mlp")
    device = plan.row_of_slot_TK.device
    autocast = autocast_enabled(device.type)
    require_tensor(x_TH, "expert_mlp", "x", rank=2, dtypes=FLOATING, device=device)
    if x_TH.size(0) != plan.num_tokens:
        require(False, "expert_mlp", "x", lambda: f"{plan.num_tokens} rows, as in the plan", x_TH.size(0))
    require_tensor(w1_EFH, "expert_mlp", "w1", rank=3, dtypes=FLOATING, device=device)
    expected = [plan.num_experts, w1_EFH.size(1), x_TH.size(1)]
    for argument, weight in (("w1", w1_EFH), ("w2", w2_EFH), ("v1", v1_EFH)):
        if weight is None and argument == "v1":
            continue
        if argument != "w1":  # whose shape is known
            require_tensor(weight, "expert_mlp", argument, rank=3, dtypes=FLOATING, device=device)
        if list(weight.shape) != expected:
            require(False, "expert_mlp", argument, lambda: f"shape [E,F,H] == {expected}", list(weight.shape))
        if not autocast and weight.dtype != x_TH.dtype:
            require(False, "expert_mlp", argument, f"the dtype of x, {x_TH.dtype}", weight.dtype, TypeError)
    if weights_TK is not None:
        check_slot_scalars(weights_TK, "expert_mlp", "weights", plan)


def check_biases(x_TH: torch.Tensor, shape_EFH: Sequence[int], v1: torch.Tensor | None, biases: Sequence[torch.Tensor | None],
                 layout: WeightLayout) -> None:
    """Raise TypeError or ValueError for biases of w1, w2 and v1 that expert_mlp does not take; the weights are checked."""
    experts, ffn, hidden = shape_EFH
    for name, bias, columns in zip(("w1_bias", "w2_bias", "v1_bias"), biases, (2 * ffn if layout.is_combined else ffn, hidden, ffn)):
        if bias is None:
            continue
        require(name != "v1_bias" or v1 is not None, "expert_mlp", name, "None without v1", "a tensor")
        require_tensor(bias, "expert_mlp", name, rank=2, dtypes=FLOATING, device=x_TH.device)
        require(list(bias.shape) == [experts, columns], "expert_mlp", name, f"shape {[experts, columns]}", list(bias.shape))
        if not autocast_enabled(x_TH.device.type):
            require(bias.dtype == x_TH.dtype, "expert_mlp", name, f"the dtype of x, {x_TH.dtype}", bias.dtype, TypeError)
