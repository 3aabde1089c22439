"""Layers with a float8 recipe, next to the same layer without one: forward, forward and backward, and a step of several micro-batches.

What is computed from numbers of e4m3 is no nearer to float64 than these are. So a recipe's results are not held against a yardstick in
the layer's dtype: their relative error may be up to LARGEST_ERROR.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gbmoe import engines, float8
from gbmoe.cli.bench.gbmoe_itself import dropless_layer
from gbmoe.cli.bench.measurements.layer import LayerMeasurement, LayerSubject
from gbmoe.cli.bench.measurements.measurement import FORWARD, MICRO_BATCHES, Refusal, Subject
from gbmoe.cli.bench.rivals.rival import Layer
from gbmoe.float8 import Float8BlockScaling
from gbmoe.problem import Problem
from gbmoe.testing import accuracy

# Each number of e4m3 is off by 2.6 % (root mean square), each product by 3.7 %, and each result passes through up to four.
LARGEST_ERROR = 0.12
STEPS_TOGETHER = 4  # the micro-batches of MICRO_BATCHES


@dataclass(frozen=True)
class Float8LayerMeasurement(LayerMeasurement):
    """A layer of gbmoe's with `recipe`, or without one for None. Its computation may also be MICRO_BATCHES: forward and backward of
    STEPS_TOGETHER micro-batches, for which weights are quantised once."""

    recipe: Float8BlockScaling | None = None

    @property
    def by(self) -> str:
        if self.recipe is None:
            return super().by
        return f"{self.implementation}-{self.recipe.engine}" + ("" if self.recipe.keep_weights else "_quantised_twice")

    def describe(self) -> dict:
        return super().describe() | {"engine": self.engine if self.recipe is None else self.recipe.engine}

    def flops(self) -> int:
        return self.case.forward_flops() * 3 * STEPS_TOGETHER if self.computation == MICRO_BATCHES else super().flops()

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        if self.recipe is not None:
            problem = Problem(device, dtype, self.case.slots, self.case.experts, self.case.hidden, self.case.ffn, False)
            on_cuda, elsewhere = engines.FLOAT8_ENGINES[self.recipe.engine]
            engine = on_cuda if device.type == "cuda" else elsewhere
            reason = engine.unavailable(device) or engine.refuses(problem)
            if reason is not None:
                raise Refusal(f"{self.recipe.engine}: {reason}")
        return _Float8Layer(self, device, dtype)


class _Float8Layer(LayerSubject):
    def __init__(self, measurement: Float8LayerMeasurement, device: torch.device, dtype: torch.dtype):
        super().__init__(measurement, device, dtype)
        self.recipe, self.in_micro_batches = measurement.recipe, measurement.computation == MICRO_BATCHES
        self.backward = measurement.computation != FORWARD
        self.x_TH.requires_grad_(self.backward)

    def _build_layer(self, measurement) -> Layer:
        return dropless_layer(self.case, self.inputs.weights, engine=measurement.engine, fp8_recipe=measurement.recipe)

    def steps(self):
        return [self._micro_batches] if self.in_micro_batches else super().steps()

    def call_once(self) -> None:
        """Of several micro-batches the last one's results, for which no weight is quantised: the oracle's gradients are of one."""
        self._micro_batches(before_last=self.layer.zero_grad) if self.in_micro_batches else super().call_once()

    def _micro_batches(self, before_last: Callable[[], object] = lambda: None) -> None:
        with contextlib.nullcontext() if self.recipe is None else float8.cached_weights(self.layer):
            for number in range(STEPS_TOGETHER):
                if number + 1 == STEPS_TOGETHER:
                    before_last()
                self.x_TH.grad = None
                self._forward()
                self._backward()

    def judge(self, sampled, exact, yardstick):
        if self.recipe is None:
            return super().judge(sampled, exact, yardstick)
        verdicts = [accuracy.Verdict(name, accuracy.error(result, exact[name]), LARGEST_ERROR) for name, result in sampled.items()]
        return max(verdicts, key=lambda verdict: verdict.error)

    def bytes_moved(self):
        return super().bytes_moved() * (STEPS_TOGETHER if self.in_micro_batches else 1)
