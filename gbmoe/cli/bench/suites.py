"""The suites: which shapes, who computes them, and how they are routed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gbmoe import cases, engines
from gbmoe.cases import MoeCase
from gbmoe.cli.bench import peers
from gbmoe.cli.bench.layer import LayerMeasurement
from gbmoe.cli.bench.measurement import FORWARD, GRAPH, TRAINING, Configuration, Measurement, configurations
from gbmoe.cli.bench.permutation import SKEWS, PermutationMeasurement
from gbmoe.cli.bench.product import ProductMeasurement
from gbmoe.cli.bench.training import TrainingMeasurement
from gbmoe.cli.machine import refusal

# Of the permutation: what FP8 consumers need, and what the Hopper kernel does.
_ALIGNMENTS = (16, 128)
_STEPS = ("plan", "gather", "padded_gather", "plan+gather", "scatter", "scatter-backward")
# What stands for the article's card.
ARTICLE_GIB = 16
_EXPERTS = ("bmm", "loop", "torch-grouped", "torch-grouped-compiled", "grouped_gemm", "megablocks-grouped",
            "megablocks-sparse", "transformers-eager", "transformers-batched_mm", "transformers-grouped_mm",
            "scattermoe", "sonicmoe")


@dataclass(frozen=True)
class Choice:
    """Who takes part, and where: the named engines (None: every one that is able) and the named peers.

    `memory_limit`, in GiB, caps every measurement that has no cap of its own.
    """
    device: torch.device
    dtype: torch.dtype
    engines: Sequence[str] | None = None
    peers: Sequence[str] = ()
    memory_limit: float | None = None

    def case(self, case: MoeCase) -> MoeCase:
        """The case, scaled down where the device is no GPU."""
        if self.device.type == "cuda":
            return case
        small = cases.scaled_down(case)
        return small if case.ffn else replace(small, ffn=0)

    def unable(self, case: MoeCase) -> dict[str, str]:
        """The engines that cannot compute the case, with the reason."""
        sizes = case.slots, case.experts, case.hidden, case.ffn
        reasons = {name: unavailable or refusal(name, self.device, self.dtype, *sizes)
                   for name, unavailable in engines.availability(self.device).items()}
        return {name: reason for name, reason in reasons.items() if reason and self._wanted(name)}

    def _wanted(self, engine: str) -> bool:
        return self.engines is None or engine in self.engines

    def ways(self, case: MoeCase, kind: str) -> list[tuple[str, str | None]]:
        """(implementation, engine) of all that take part in this kind of measurement."""
        unable = self.unable(case)
        names = [name for name in engines.names() if name not in unable and self._wanted(name)]
        if kind == "product":
            names = [name for name in names if name != "auto"]
        return [*(("gbmoe", name) for name in names), *((name, None) for name in peers.of_kind(kind, self.peers))]


def _layer(choice: Choice, case: MoeCase, routings=("uniform",), computations=(FORWARD, TRAINING),
           **fields) -> list[Measurement]:
    return [LayerMeasurement(case, *way, routing, computation, **fields)
            for routing in routings for way in choice.ways(case, "layer") for computation in computations]


def _products(choice: Choice, case: MoeCase, routings=("equal", "skewed"),
              computations=("forward", "weight-gradient")) -> list[Measurement]:
    ways = choice.ways(case, "product")
    return [ProductMeasurement(case, *way, routing, computation)
            for routing in routings for way in ([*ways, ("dense", None)] if routing == "equal" else ways)
            for computation in computations]


def _smoke(choice: Choice) -> list[Measurement]:
    layers = [m for case in cases.SMOKE_CASES for m in _layer(choice, case)]
    return layers + _products(choice, cases.SMOKE_CASES[-1])


def _nyu(choice: Choice) -> list[Measurement]:
    return [m for case in cases.NYU_CASES for m in _layer(choice, choice.case(case))]


def _layers(choice: Choice) -> list[Measurement]:
    return [m for case in cases.LAYER_CASES for m in _layer(choice, choice.case(case), ("uniform", "skewed"))]


def _gemm(choice: Choice) -> list[Measurement]:
    return [m for case in cases.GEMM_CASES for m in _products(choice, choice.case(case))]


def _scaling(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in dict.fromkeys(case for sweep in cases.SCALING_CASES.values() for case in sweep):
        if choice.device.type != "cuda":
            case = replace(case, name=f"{case.name}-small", tokens=max(16, case.tokens // 256),
                           hidden=case.hidden // 32, ffn=case.ffn // 32)
        measurements += _layer(choice, case)
    return measurements


def _inference(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in cases.INFERENCE_CASES:
        measurements += _layer(choice, replace(choice.case(case), tokens=case.tokens), computations=(FORWARD, GRAPH))
    return measurements


def _permute(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in cases.PLAN_CASES:
        whole, case = case in cases.PERMUTE_CASES, choice.case(case)
        if whole:
            measurements += [PermutationMeasurement(case, "gbmoe", None, "random", computation)
                             for computation in ("route", "route-backward")]
        by_all, steps = ("gbmoe", *peers.of_kind("permutation", choice.peers)), _STEPS if whole else _STEPS[:1]
        measurements += [PermutationMeasurement(case, by, None, routing, step, align=align)
                         for routing in SKEWS for align in _ALIGNMENTS for by in by_all for step in steps]
    return measurements


def _article(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in map(choice.case, cases.NYU_CASES):
        measurements += _layer(choice, case, computations=(FORWARD,))
        measurements += _layer(choice, case, memory_limit=ARTICLE_GIB, timed=False)
    measurements += _products(choice, choice.case(cases.NYU_SPLIT_CASE), ("equal", "uneven"), ("forward",))
    for case in map(choice.case, cases.NYU_LOSS_CASES):
        measurements += [TrainingMeasurement(case, *way, "uniform", "one step", timed=False)
                         for way in choice.ways(case, "training")]
    return measurements


@dataclass(frozen=True)
class Suite:
    """What `--suite` names: what it measures, which peers belong to it, and what speed-ups are over unless something
    else is asked."""
    summary: str
    measurements: Callable[[Choice], list[Measurement]]
    peers: tuple[str, ...]
    baseline: str = "bmm"
    needs_cuda: bool = True
    uses_engines: bool = True

    def configurations(self, choice: Choice) -> list[Configuration]:
        """In an order that depends on nothing but the suite."""
        measurements = self.measurements(choice)
        if choice.memory_limit:
            measurements = [replace(m, memory_limit=m.memory_limit or choice.memory_limit) for m in measurements]
        # Under a common cap a suite's own capped rows are the same as the others.
        return configurations(list({m.name: m for m in reversed(measurements)}.values())[::-1])


SUITES = {
    "smoke": Suite("small layers and products, for any machine", _smoke, ("bmm", "loop"), needs_cuda=False),
    "nyu": Suite("the article's cases", _nyu, _EXPERTS),
    "layers": Suite("layers of known models, evenly and unevenly routed", _layers, _EXPERTS),
    "gemm": Suite("single grouped products, each engine, equal and skewed groups", _gemm,
                  ("bmm", "loop", "grouped_gemm")),
    "permute": Suite("plan, router operator, gather and scatter, each against what a copy of its bytes takes", _permute,
                     ("megablocks", "transformer_engine"), baseline="megablocks", uses_engines=False),
    "scaling": Suite("how cost grows with experts, tokens and hidden size, each alone", _scaling,
                     ("bmm", "torch-grouped", "megablocks-grouped", "scattermoe")),
    "inference": Suite("few tokens, with and without a CUDA graph", _inference, _EXPERTS),
    "article": Suite("the article's findings, each with a verdict", _article,
                     ("bmm", "grouped_gemm", "megablocks-grouped", "megablocks-sparse")),
}
