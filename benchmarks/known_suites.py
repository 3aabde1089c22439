"""The suites of known results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.measurements.float8_layer import Float8LayerMeasurement
from benchmarks.measurements.host_parts import HostPartsMeasurement
from benchmarks.measurements.host_time import COMPUTATIONS, LINEAR, HostMeasurement
from benchmarks.measurements.link import COMBINE, DISPATCH, LinkMeasurement
from benchmarks.measurements.parallel_layer import LOANS, ONE_GPU, TRANSPORTS, ParallelLayerMeasurement
from benchmarks.measurements.plan_and_permutation import SKEWS, PermutationMeasurement
from benchmarks.running.rank_processes import Ranks
from gbmoe.cli.bench import rivals, suites
from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.measurements.measurement import FORWARD, GRAPH, MICRO_BATCHES, TRAINING, Measurement
from gbmoe.cli.bench.running.verify_and_time import BURSTS, SUSTAINED
from gbmoe.cli.bench.suites import EXPERTS, Choice, Suite, of_layer, of_products
from gbmoe.float8 import Float8BlockScaling
from gbmoe.testing import moe_shapes

# The alignments of the permutation suite: 16 is what FP8 GEMMs need, 128 what the Hopper kernel needs.
_ALIGNMENTS = (16, 128)
_STEPS = ("plan", "gather", "padded_gather", "plan+gather", "scatter", "scatter-backward")


def _nyu(choice: Choice) -> list[Measurement]:
    return [m for case in moe_shapes.NYU_CASES for m in of_layer(choice, choice.case(case))]


def _layers(choice: Choice) -> list[Measurement]:
    cases = choice.shapes or map(choice.case, moe_shapes.LAYER_CASES)
    return [m for case in cases for m in of_layer(choice, case, ("uniform", "skewed"))]


def _float8(choice: Choice) -> list[Measurement]:
    default, of_weights = Float8BlockScaling(), Float8BlockScaling(float8_weight_gradients=True)
    recipes = {FORWARD: (None, default), TRAINING: (None, default, of_weights, Float8BlockScaling(keep_weights=False)),
               MICRO_BATCHES: (None, default, of_weights)}
    return [Float8LayerMeasurement(case, "gbmoe", "auto", "uniform", computation, recipe=recipe)
            for case in choice.shapes or map(choice.case, moe_shapes.FLOAT8_CASES)
            for computation, of_computation in recipes.items() for recipe in of_computation]


def _transformers(choice: Choice) -> list[Measurement]:
    ways = [("gbmoe", "auto"), *((name, None) for name in rivals.of_kind("layer", choice.rivals))]
    return [LayerMeasurement(case, *way, "uniform", computation)
            for case in choice.shapes or map(choice.case, moe_shapes.TRANSFORMERS_CASES)
            for way in ways for computation in (FORWARD, TRAINING)]


def _gemm(choice: Choice) -> list[Measurement]:
    return [m for case in moe_shapes.GEMM_CASES for m in of_products(choice, choice.case(case))]


def _scaling(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in dict.fromkeys(case for sweep in moe_shapes.SCALING_CASES.values() for case in sweep):
        if choice.device.type != "cuda":
            case = replace(case, name=f"{case.name}-small", tokens=max(16, case.tokens // 256),
                           hidden=case.hidden // 32, ffn=case.ffn // 32)
        measurements += of_layer(choice, case)
    return measurements


def _inference(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in moe_shapes.INFERENCE_CASES:
        measurements += of_layer(choice, replace(choice.case(case), tokens=case.tokens), computations=(FORWARD, GRAPH))
    return measurements


def _host(choice: Choice) -> list[Measurement]:
    cases = list(map(choice.case, moe_shapes.HOST_CASES))
    ways = [("gbmoe", "auto"), (LINEAR, None), *((name, None) for name in rivals.of_kind("layer", choice.rivals))]
    measurements: list[Measurement] = [HostMeasurement(case, *way, "uniform", computation)
                                       for case in cases for way in ways for computation in COMPUTATIONS]
    return measurements + [HostPartsMeasurement(case, *ways[0], "uniform", computation) for case in cases for computation in COMPUTATIONS]


def _permute(choice: Choice) -> list[Measurement]:
    measurements = []
    for case in moe_shapes.PLAN_CASES:
        whole, case = case in moe_shapes.PERMUTE_CASES, choice.case(case)
        if whole:
            measurements += [PermutationMeasurement(case, "gbmoe", None, "random", computation)
                             for computation in ("route", "route-backward")]
        by_all, steps = ("gbmoe", *rivals.of_kind("permutation", choice.rivals)), _STEPS if whole else _STEPS[:1]
        measurements += [PermutationMeasurement(case, by, None, routing, step, align=align)
                         for routing in SKEWS for align in _ALIGNMENTS for by in by_all for step in steps]
    return measurements


def _parallel(choice: Choice) -> list[Measurement]:
    measurements: list[Measurement] = []
    by_rivals = [(name, None, None) for name in rivals.of_kind("parallel", choice.rivals)]
    cases = [(choice.case(case), routing) for case in moe_shapes.PARALLEL_CASES for routing in ("uniform", "skewed")]
    for case, routing in cases:
        transports = (ONE_GPU, *TRANSPORTS, *((LOANS,) if routing == "skewed" else ()))  # with a balanced router nothing is lent
        ways = [*(("gbmoe", "auto", transport) for transport in transports), *by_rivals]
        measurements += [ParallelLayerMeasurement(case, by, engine, routing, computation, transport=transport)
                         for computation in (FORWARD, TRAINING) for by, engine, transport in ways]
    return measurements + [LinkMeasurement(case, "gbmoe", None, routing, trip, transport=transport)
                           for case, routing in cases for trip in (DISPATCH, COMBINE) for transport in TRANSPORTS[1:]]


# In bursts: of a few tokens it is the cold cache that counts.
_IN_BURSTS: dict[str, Any] = {"timing_on_cuda": BURSTS}
_IN_BURSTS_ALONE: dict[str, Any] = {"timing_on_cuda": BURSTS, "timings": (BURSTS,)}

SUITES = {
    "smoke": suites.SUITES["smoke"],
    "nyu": Suite("the cases of an article from NYU: plain MLPs of few experts", _nyu, EXPERTS),
    "layers": Suite("layers of known models, evenly and unevenly routed, or those of --shape", _layers, EXPERTS, takes_shapes=True),
    "gemm": Suite("single grouped GEMMs, each engine, equal and skewed groups", _gemm,
                  ("bmm", "loop", "grouped_gemm")),
    "float8": Suite("layers with float8 recipes, next to bf16", _float8, (), baseline="gbmoe-auto", uses_engines=False,
                    dtype="bf16", takes_shapes=True),
    "transformers": Suite("transformers' experts by gbmoe and by grouped_mm, next to gbmoe's own layer", _transformers,
                          ("transformers-gbmoe", "transformers-grouped_mm", "sonicmoe"), baseline="transformers-grouped_mm",
                          uses_engines=False, dtype="bf16", takes_shapes=True),
    "permute": Suite("plan, router operator, gather and scatter, each against what a copy of its bytes takes", _permute,
                     ("megablocks", "transformer_engine"), baseline="megablocks", uses_engines=False, **_IN_BURSTS_ALONE),
    "scaling": Suite("how cost grows with experts, tokens and hidden size, each alone", _scaling,
                     ("bmm", "torch-grouped", "megablocks-grouped", "scattermoe")),
    "inference": Suite("few tokens, with and without a CUDA graph", _inference, EXPERTS, **_IN_BURSTS),
    "host": Suite("the host's microseconds for small layers and where they go, next to one nn.Linear and to the kernels alone", _host,
                  ("torch-grouped", "torch-grouped-compiled", "megablocks-grouped", "megablocks-sparse", "sonicmoe"),
                  baseline="torch-grouped", uses_engines=False, dtype="bf16", **_IN_BURSTS_ALONE),
    "parallel": Suite("experts spread over the ranks of torchrun, next to all of them on one GPU", _parallel,
                      ("megablocks-grouped", "ligercute"),
                      baseline=f"gbmoe-{ONE_GPU}", uses_engines=False, processes=Ranks(), timings=(SUSTAINED,)),
}
