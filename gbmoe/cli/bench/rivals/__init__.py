"""The rivals that gbmoe is compared with, an adapter in one file each. `RIVALS` says where each adapter is; benchmarks/rivals
adds those that only its suites ask for."""

from __future__ import annotations

import importlib

from gbmoe.cli.bench.rivals.rival import Rival

RIVALS = {
    "bmm": "gbmoe.cli.bench.rivals.bmm:Bmm",
    "loop": "gbmoe.cli.bench.rivals.loop:Loop",
    "torch-grouped": "gbmoe.cli.bench.rivals.torch_pipeline:TorchGrouped",
    "torch-grouped-compiled": "gbmoe.cli.bench.rivals.torch_pipeline:TorchGroupedCompiled",
    "grouped_gemm": "gbmoe.cli.bench.rivals.grouped_gemm:GroupedGemm",
    "megablocks-grouped": "gbmoe.cli.bench.rivals.megablocks:MegaBlocksGrouped",
    "megablocks-sparse": "gbmoe.cli.bench.rivals.megablocks:MegaBlocksSparse",
    "transformers-eager": "gbmoe.cli.bench.rivals.transformers:Eager",
    "transformers-batched_mm": "gbmoe.cli.bench.rivals.transformers:BatchedMm",
    "transformers-grouped_mm": "gbmoe.cli.bench.rivals.transformers:GroupedMm",
    "transformers-gbmoe": "gbmoe.cli.bench.rivals.transformers:Gbmoe",
    "scattermoe": "gbmoe.cli.bench.rivals.scattermoe:ScatterMoe",
    "sonicmoe": "gbmoe.cli.bench.rivals.sonicmoe:SonicMoe",
}


def load(name: str) -> Rival:
    """The adapter of that name. Imports its file, not the rival."""
    module, attribute = RIVALS[name].split(":")
    return getattr(importlib.import_module(module), attribute)()


def of_kind(kind: str, names: list[str]) -> list[str]:
    """Those of `names` that compute this kind of measurement."""
    return [name for name in names if kind in load(name).kinds]
