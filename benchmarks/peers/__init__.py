"""Peers that only the suites of this folder ask for. Importing this package adds them to the others."""

from __future__ import annotations

from gbmoe.cli.bench import peers

peers.PEERS |= {
    "megablocks-grouped": "benchmarks.peers.megablocks:ParallelMegaBlocks",  # in place of the one that has no expert parallelism
    "megablocks": "benchmarks.peers.megablocks:MegaBlocksKernels",
    "ligercute": "benchmarks.peers.ligercute:LigerCute",
    "transformer_engine": "benchmarks.peers.transformer_engine:TransformerEngine",
}
