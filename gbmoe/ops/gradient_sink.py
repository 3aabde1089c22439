"""WeightGradientSink: gradients of experts' weights that are added to float32 tensors of the caller, at once or later.

Trainers that accumulate over micro-batches keep a float32 gradient of each parameter (Megatron-Core's main_grad), and some compute the
gradients of weights apart from those of activations, where the pipeline has time for them (its backward_dw).

Shape suffixes: E experts, H hidden, F ffn hidden, P padded rows of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gbmoe._checks import require, require_tensor
from gbmoe._define_operator import without_autocast
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.separate_weights import SeparateWeights, Stack, StackOrList, like_a_stack, lists_of, require_apart
from gbmoe.weight_layout import WeightGradients, WeightLayout


class WeightGradientSink:
    """Where expert_mlp adds the gradients of its weights, instead of handing them to autograd. One sink serves any number of calls.

    Args:
        w1, w2, v1: float32, with the shape and the device of the parameter; None for a parameter without a gradient. Matrices whose rows
            are not contiguous cost a copy. For parameters that are a matrix for each expert they are lists of E matrices, anywhere in
            memory. Engines that read lists of weights in place add to these in place; for others this costs a float32 gradient of all.
        deferred: backward only keeps what the gradients are made of (a, dz, x, dh and dg of each call); `compute` adds them. Until then x
            and the gradient of the result may not be changed in place.
        hand_back: backward gives autograd an uninitialised tensor for each parameter, so that hooks which wait for its gradient run. Its
            elements mean nothing, and with `deferred` hooks run before `compute` adds. Otherwise it gives None.

    Every pass of backward through a call adds, even that of torch.autograd.grad for other tensors only.

    Raises:
        TypeError, ValueError: for a tensor that is none of these.

    Example:
        >>> x = torch.randn(6, 16)
        >>> w1, w2 = (torch.randn(4, 32, 16, requires_grad=True) for _ in range(2))
        >>> plan = gbmoe.RoutingPlan.from_experts(torch.randint(4, (6, 2)), num_experts=4)
        >>> main_grads = [torch.zeros(4, 32, 16) for _ in range(2)]
        >>> sink = gbmoe.WeightGradientSink(*main_grads, deferred=True)
        >>> gbmoe.expert_mlp(x, plan, w1, w2, gradient_sink=sink).sum().backward()
        >>> sink.compute()
        >>> w1.grad is None and bool(main_grads[0].any())
        True
    """

    def __init__(self, w1: StackOrList | None = None, w2: StackOrList | None = None, v1: StackOrList | None = None, *,
                 deferred: bool = False, hand_back: bool = False):
        self._main: dict[str, Any] = {"w1": w1, "w2": w2, "v1": v1}
        for name, tensors in lists_of("WeightGradientSink", **self._main).items():
            require_tensor(tensors[0], "WeightGradientSink", f"{name}[0]", dtypes=(torch.float32,))
            require_apart(tensors, "WeightGradientSink", name)
            self._main[name] = tuple(tensor.detach() for tensor in tensors)
        for name, main in self._main.items():
            if main is not None and not isinstance(main, tuple):
                require_tensor(main, "WeightGradientSink", name, rank=3, dtypes=(torch.float32,))
        self.deferred, self.hand_back = deferred, hand_back
        self._later: list[Callable[[], None]] = []

    def compute(self) -> None:
        """Add the gradients of every call whose backward has run since the last time, in that order. Without `deferred` there are none.
        RuntimeError where something of which they are made was changed in place since."""
        later, self._later = self._later, []
        later.reverse()
        with torch.no_grad():
            while later:  # what one was made of is free again before the next
                later.pop()()

    def add(self, step: Callable[[], None], of: torch.Tensor) -> None:
        """Take a step: now, or in `compute`. `of` is what it reads that belongs to the caller."""
        if self.deferred:
            self._later.append(partial(_of_unchanged, without_autocast(step), of, _version(of)))
        else:
            step()

    def check(self, parameters: dict[str, torch.Tensor | None], function: str = "expert_mlp") -> None:
        """Raise ValueError unless each parameter that needs a gradient has a tensor of its shape and device here."""
        for name, parameter in parameters.items():
            main = self._main[name]
            if parameter is None or (main is None and not parameter.requires_grad):
                continue
            if main is None:
                require(False, function, "gradient_sink", f"a tensor for {name}, which needs a gradient", None)
                return
            main = like_a_stack(main) if isinstance(main, tuple) else main
            require(main.shape == parameter.shape and main.device == parameter.device, function, "gradient_sink",
                    f"for {name} {list(parameter.shape)} on {parameter.device}", f"{list(main.shape)} on {main.device}")

    def __getitem__(self, name: str) -> Stack:
        main = self._main[name]
        assert main is not None, name  # `check` has seen it
        return SeparateWeights(main) if isinstance(main, tuple) else main


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # tensors of inference mode count no changes


def _of_unchanged(step: Callable[[], None], of: torch.Tensor, version: int) -> None:
    # As autograd refuses tensors that were saved for backward and changed.
    if _version(of) != version:
        raise RuntimeError(f"WeightGradientSink.compute: x, or the gradient of a result, {list(of.shape)}, was changed in place after"
                           " backward, and a gradient of weights is still to be made of it")
    step()


def _add_to_each(experts: Engine, left_PF: Any, rows: GatheredRows, sizes_E: torch.Tensor, main: Any, scale: float) -> None:
    main = main.again()  # its memory may have moved since backward
    if scale == 1 and experts.reads_separate_weights and (experts.adds_in_place(main) or experts.adds_in_place(main.transpose(1, 2))):
        experts.add_weight_gradient(left_PF, rows, sizes_E, main)
        return
    # In float32, so that nothing is rounded before it is added.
    sums_EFH = torch.zeros(main.shape, dtype=torch.float32, device=main.device)
    experts.add_weight_gradient(left_PF, rows, sizes_E, sums_EFH, scale)
    main.add_(sums_EFH)


class SunkGradients(WeightGradients):
    """The gradients of one backward, of which each is added to a sink as soon as it is made, or later."""

    takes_two = False

    def __init__(self, layout: WeightLayout, w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, sink: WeightGradientSink):
        super().__init__(layout, w1, w2, v1)
        self._sink = sink
        self._sunk: set[str] = set()

    def are_large_for(self, a_PF: Any, experts: int) -> bool:
        return False  # their memory is the caller's

    def _parameter(self, name: str) -> Any:
        self._sunk.add(name)
        return self._sink[name]

    def write(self, name: str, experts: Engine, left_PF: Any, rows: GatheredRows, sizes_E: torch.Tensor, scale: float) -> None:
        main = self[name]
        add = partial(_add_to_each, experts) if isinstance(main, SeparateWeights) else experts.add_weight_gradient
        if self._sink.deferred and rows.given.size(0) > rows.num_rows:  # the tokens of other ranks, which need not be kept until then
            rows = GatheredRows(None, rows.slots, rows.rows_PH())
        self._sink.add(partial(add, left_PF, rows, sizes_E, main, scale), rows.given)

    def tensors(self, scale: float = 1.0) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        if not self._sink.hand_back:
            return None, None, None
        likes = (self._like[name] if name in self._sunk else None for name in ("w1", "w2", "v1"))
        make = torch.zeros if torch.is_anomaly_enabled() else torch.empty  # anomaly detection looks for NaN
        one, two, three = (None if like is None else make(like[0], dtype=like[1], device=like[2]) for like in likes)
        return one, two, three
