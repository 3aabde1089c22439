"""Rivals that only the suites of this folder ask for. Importing this package adds them to the others."""

from __future__ import annotations

from gbmoe.cli.bench import rivals

rivals.RIVALS |= {
    "megablocks-grouped": "benchmarks.rivals.parallel_megablocks:ParallelMegaBlocks",  # in place of the one that has no expert parallelism
    "megablocks": "benchmarks.rivals.parallel_megablocks:MegaBlocksKernels",
    "ligercute": "benchmarks.rivals.ligercute:LigerCute",
    "transformer_engine": "benchmarks.rivals.transformer_engine:TransformerEngine",
}
