"""The suites: which shapes, who computes them, and how they are routed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gbmoe import engines
from gbmoe.cli.bench import peers
from gbmoe.cli.bench.measurements.base import (
    FORWARD,
    GRAPH,
    MICRO_BATCHES,
    TRAINING,
    Configuration,
    Measurement,
    configurations,
)
from gbmoe.cli.bench.measurements.float8_layer import Float8LayerMeasurement
from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement
from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.measurements.link import COMBINE, DISPATCH, LinkMeasurement
from gbmoe.cli.bench.measurements.parallel_layer import ONE_GPU, TRANSPORTS, ParallelLayerMeasurement
from gbmoe.cli.bench.measurements.permutation import SKEWS, PermutationMeasurement
from gbmoe.cli.bench.running.verify_and_time import BURSTS, SUSTAINED
from gbmoe.cli.describe_system import refusal
from gbmoe.float8 import Float8BlockScaling
from gbmoe.testing import moe_shapes
from gbmoe.testing.moe_shapes import MoeCase

# The alignments of the permutation suite: 16 is what FP8 GEMMs need, 128 what the Hopper kernel needs.
_ALIGNMENTS = (16, 128)
_STEPS = ("plan", "gather", "padded_gather", "plan+gather", "scatter", "scatter-backward")
_EXPERTS = ("bmm", "loop", "torch-grouped", "torch-grouped-compiled", "grouped_gemm", "megablocks-grouped",
            "megablocks-sparse", "transformers-eager", "transformers-batched_mm", "transformers-grouped_mm",
            "scattermoe", "sonicmoe")


@dataclass(frozen=True)
class Choice:
    """What takes part, and on which device: the named engines (None: every engine that can compute the case) and the named peers.

    `memory_limit`, in GiB, caps every measurement. `shapes` are layers in place of the suite's, which are
    not scaled down.
    """
    device: torch.device
    dtype: torch.dtype
    engines: Sequence[str] | None = None
    peers: Sequence[str] = ()
    memory_limit: float | None = None
    shapes: Sequence[MoeCase] = ()

    def case(self, case: MoeCase) -> MoeCase:
        """The case, scaled down where the device is not a GPU."""
        if self.device.type == "cuda":
            return case
        small = moe_shapes.scaled_down(case)
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
        """The (implementation, engine) pairs that take part in this kind of measurement."""
        unable = self.unable(case)
        names = [name for name in engines.names() if name not in unable and self._wanted(name)]
        if kind == "product":
            names = [name for name in names if name != "auto"]
        return [*(("gbmoe", name) for name in names), *((name, None) for name in peers.of_kind(kind, self.peers))]


def _layer(choice: Choice, case: MoeCase, routings=("uniform",), computations=(FORWARD, TRAINING)) -> list[Measurement]:
    return [LayerMeasurement(case, *way, routing, computation)
            for routing in routings for way in choice.ways(case, "layer") for computation in computations]


def _products(choice: Choice, case: MoeCase) -> list[Measurement]:
    ways = choice.ways(case, "product")
    return [ProductMeasurement(case, *way, routing, computation)
            for routing in ("equal", "skewed") for way in ([*ways, ("dense", None)] if routing == "equal" else ways)
            for computation in ("forward", "weight-gradient")]


def _smoke(choice: Choice) -> list[Measurement]:
    layers = [m for case in moe_shapes.SMOKE_CASES for m in _layer(choice, case)]
    return layers + _products(choice, moe_shapes.SMOKE_CASES[-1])


def _nyu(choice: Choice) -> list[Measurement]:
    return [m for case in moe_shapes.NYU_CASES for m in _layer(choice, choice.case(case))]


def _layers(choice: Choice) -> list[Measurement]:
    cases = choice.shapes or map(choice.case, moe_shapes.LAYER_CASES)
    return [m for case in cases for m in _layer(choice, case, ("uniform", "skewed"))]


def _float8(choice: Choice) -> list[Measurement]:
    default, of_weights = Float8BlockScaling(), Float8BlockScaling(float8_weight_gradients=True)
    recipes = {FORWARD: (None, default), TRAINING: (None, default, of_weights, Float8BlockScaling(keep_weights=False)),
               MICRO_BATCHES: (None, default, of_weights)}
    return [Float8LayerMeasurement(case, "gbmoe", "auto", "uniform", computation, recipe=recipe)
            for case in choice.shapes or map(choice.case, moe_shapes.FLOAT8_CASES)
            for computation, of_computation in recipes.items() for recipe in of_computation]


def _gemm(choice: Choice) -> list[Measurement]:
    return [m for case in moe_shapes.GEMM_CASES for m in _products(choice, choice.case(case))]


def _scaling(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in dict.fromkeys(case for sweep in moe_shapes.SCALING_CASES.values() for case in sweep):
        if choice.device.type != "cuda":
            case = replace(case, name=f"{case.name}-small", tokens=max(16, case.tokens // 256),
                           hidden=case.hidden // 32, ffn=case.ffn // 32)
        measurements += _layer(choice, case)
    return measurements


def _inference(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in moe_shapes.INFERENCE_CASES:
        measurements += _layer(choice, replace(choice.case(case), tokens=case.tokens), computations=(FORWARD, GRAPH))
    return measurements


def _permute(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in moe_shapes.PLAN_CASES:
        whole, case = case in moe_shapes.PERMUTE_CASES, choice.case(case)
        if whole:
            measurements += [PermutationMeasurement(case, "gbmoe", None, "random", computation)
                             for computation in ("route", "route-backward")]
        by_all, steps = ("gbmoe", *peers.of_kind("permutation", choice.peers)), _STEPS if whole else _STEPS[:1]
        measurements += [PermutationMeasurement(case, by, None, routing, step, align=align)
                         for routing in SKEWS for align in _ALIGNMENTS for by in by_all for step in steps]
    return measurements


def _parallel(choice: Choice) -> list[Measurement]:
    measurements: list[Measurement] = []
    rivals = [*(("gbmoe", "auto", transport) for transport in (ONE_GPU, *TRANSPORTS)),
              *((name, None, None) for name in peers.of_kind("parallel", choice.peers))]
    cases = [(choice.case(case), routing) for case in moe_shapes.PARALLEL_CASES for routing in ("uniform", "skewed")]
    for case, routing in cases:
        measurements += [ParallelLayerMeasurement(case, by, engine, routing, computation, transport=transport)
                         for computation in (FORWARD, TRAINING) for by, engine, transport in rivals]
    return measurements + [LinkMeasurement(case, "gbmoe", None, routing, trip, transport=transport)
                           for case, routing in cases for trip in (DISPATCH, COMBINE) for transport in TRANSPORTS[1:]]


@dataclass(frozen=True)
class Suite:
    """What `--suite` names: what it measures, which peers belong to it, what speed-ups are over, and how it is timed on CUDA, unless
    something else is asked; `timings` are the ways in which it can be."""
    summary: str
    measurements: Callable[[Choice], list[Measurement]]
    peers: tuple[str, ...]
    baseline: str = "bmm"
    needs_cuda: bool = True
    uses_engines: bool = True
    # Whether it runs in all processes of torchrun together.
    on_ranks: bool = False
    timing_on_cuda: str = SUSTAINED
    timings: tuple[str, ...] = (BURSTS, SUSTAINED)
    # Whether it can measure a user's own layers.
    takes_shapes: bool = False

    def timing(self, device: torch.device) -> str:
        """How it is timed unless something else is asked: on a CPU in bursts, where it can be."""
        return self.timing_on_cuda if device.type == "cuda" else self.timings[0]

    def configurations(self, choice: Choice) -> list[Configuration]:
        """The configurations to run, in an order that depends on nothing but the suite."""
        measurements = self.measurements(choice)
        return configurations([replace(m, memory_limit=choice.memory_limit) for m in measurements])


# Bursts: of a few tokens it is the cold cache that counts, and smoke is for any machine.
_IN_BURSTS: dict[str, Any] = {"timing_on_cuda": BURSTS}
_IN_BURSTS_ALONE: dict[str, Any] = {"timing_on_cuda": BURSTS, "timings": (BURSTS,)}

SUITES = {
    "smoke": Suite("small layers and products, for any machine", _smoke, ("bmm", "loop"), needs_cuda=False, **_IN_BURSTS),
    "nyu": Suite("the cases of an article from NYU: plain MLPs of few experts", _nyu, _EXPERTS),
    "layers": Suite("layers of known models, evenly and unevenly routed, or those of --shape", _layers, _EXPERTS, takes_shapes=True),
    "gemm": Suite("single grouped GEMMs, each engine, equal and skewed groups", _gemm,
                  ("bmm", "loop", "grouped_gemm")),
    "float8": Suite("layers with float8 recipes, beside bf16", _float8, (), baseline="gbmoe-auto", uses_engines=False,
                    takes_shapes=True),
    "permute": Suite("plan, router operator, gather and scatter, each against what a copy of its bytes takes", _permute,
                     ("megablocks", "transformer_engine"), baseline="megablocks", uses_engines=False, **_IN_BURSTS_ALONE),
    "scaling": Suite("how cost grows with experts, tokens and hidden size, each alone", _scaling,
                     ("bmm", "torch-grouped", "megablocks-grouped", "scattermoe")),
    "inference": Suite("few tokens, with and without a CUDA graph", _inference, _EXPERTS, **_IN_BURSTS),
    "parallel": Suite("experts spread over the ranks of torchrun, beside all of them on one GPU", _parallel,
                      ("megablocks-grouped", "ligercute"),
                      baseline=f"gbmoe-{ONE_GPU}", uses_engines=False, on_ranks=True, timings=(SUSTAINED,)),
}
