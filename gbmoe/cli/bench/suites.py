"""Suites: which shapes, who computes them, and how they are routed. Those of a checkout are in benchmarks/known_suites.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gbmoe import engines
from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.grouped_product import ProductMeasurement
from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.measurements.measurement import FORWARD, TRAINING, Configuration, Measurement, configurations
from gbmoe.cli.bench.running.processes import OneProcess
from gbmoe.cli.bench.running.verify_and_time import BURSTS, SUSTAINED
from gbmoe.cli.describe_system import refusal
from gbmoe.testing import moe_shapes
from gbmoe.testing.moe_shapes import MoeCase

# Those that compute a whole layer.
EXPERTS = ("bmm", "loop", "torch-grouped", "torch-grouped-compiled", "grouped_gemm", "megablocks-grouped",
           "megablocks-sparse", "transformers-eager", "transformers-batched_mm", "transformers-grouped_mm",
           "scattermoe", "sonicmoe")
# The suite whose layers --shape names, where it names no suite.
OF_SHAPES = "layers"


@dataclass(frozen=True)
class Choice:
    """What takes part, and on which device: the named engines (None: every engine that can compute the case) and the named rivals.

    `memory_limit`, in GiB, caps every measurement. `shapes` are layers in place of the suite's, which are
    not scaled down.
    """
    device: torch.device
    dtype: torch.dtype
    engines: Sequence[str] | None = None
    rivals: Sequence[str] = ()
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
        return [*(("gbmoe", name) for name in names), *((name, None) for name in rivals.of_kind(kind, self.rivals))]


def of_layer(choice: Choice, case: MoeCase, routings=("uniform",), computations=(FORWARD, TRAINING)) -> list[Measurement]:
    """Whole layers of one shape, by all that take part."""
    return [LayerMeasurement(case, *way, routing, computation)
            for routing in routings for way in choice.ways(case, "layer") for computation in computations]


def of_products(choice: Choice, case: MoeCase) -> list[Measurement]:
    """Grouped GEMMs of one shape, by all that take part, and the dense product of as many rows."""
    ways = choice.ways(case, "product")
    return [ProductMeasurement(case, *way, routing, computation)
            for routing in ("equal", "skewed") for way in ([*ways, ("dense", None)] if routing == "equal" else ways)
            for computation in ("forward", "weight-gradient")]


def _smoke(choice: Choice) -> list[Measurement]:
    layers = [m for case in moe_shapes.SMOKE_CASES for m in of_layer(choice, case)]
    return layers + of_products(choice, moe_shapes.SMOKE_CASES[-1])


def _layers_of_shapes(choice: Choice) -> list[Measurement]:
    return [m for case in choice.shapes for m in of_layer(choice, case, ("uniform", "skewed"))]


@dataclass(frozen=True)
class Suite:
    """What `--suite` names: what it measures, which rivals belong to it, what speed-ups refer to, and how it is timed on CUDA by
    default; `timings` are all ways in which it can be."""
    summary: str
    measurements: Callable[[Choice], list[Measurement]]
    rivals: tuple[str, ...]
    baseline: str = "bmm"
    needs_cuda: bool = True
    uses_engines: bool = True
    processes: OneProcess = OneProcess()
    timing_on_cuda: str = SUSTAINED
    timings: tuple[str, ...] = (BURSTS, SUSTAINED)
    dtype: str | None = None  # the default
    # Whether it can measure a user's own layers, and whether it has no others.
    takes_shapes: bool = False
    of_shapes_alone: bool = False

    def timing(self, device: torch.device) -> str:
        """How it is timed by default: on a CPU in bursts, where it can be."""
        return self.timing_on_cuda if device.type == "cuda" else self.timings[0]

    def configurations(self, choice: Choice) -> list[Configuration]:
        """The configurations to run, in an order that depends on nothing but the suite."""
        measurements = self.measurements(choice)
        return configurations([replace(m, memory_limit=choice.memory_limit) for m in measurements])


SUITES = {
    # In bursts, because it is for any machine.
    "smoke": Suite("small layers and products, for any machine", _smoke, ("bmm", "loop"), needs_cuda=False, timing_on_cuda=BURSTS),
    OF_SHAPES: Suite("layers of --shape, evenly and unevenly routed", _layers_of_shapes, EXPERTS, takes_shapes=True, of_shapes_alone=True),
}
