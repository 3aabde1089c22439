"""The peers that gbmoe is compared with, an adapter in one file each. `PEERS` says where each adapter is; benchmarks/peers
adds those that only its suites ask for."""

from __future__ import annotations

import importlib

from gbmoe.cli.bench.peers.base import Peer

PEERS = {
    "bmm": "gbmoe.cli.bench.peers.bmm:Bmm",
    "loop": "gbmoe.cli.bench.peers.loop:Loop",
    "torch-grouped": "gbmoe.cli.bench.peers.torch_grouped:TorchGrouped",
    "torch-grouped-compiled": "gbmoe.cli.bench.peers.torch_grouped:TorchGroupedCompiled",
    "grouped_gemm": "gbmoe.cli.bench.peers.grouped_gemm:GroupedGemm",
    "megablocks-grouped": "gbmoe.cli.bench.peers.megablocks:MegaBlocksGrouped",
    "megablocks-sparse": "gbmoe.cli.bench.peers.megablocks:MegaBlocksSparse",
    "transformers-eager": "gbmoe.cli.bench.peers.transformers:Eager",
    "transformers-batched_mm": "gbmoe.cli.bench.peers.transformers:BatchedMm",
    "transformers-grouped_mm": "gbmoe.cli.bench.peers.transformers:GroupedMm",
    "transformers-gbmoe": "gbmoe.cli.bench.peers.transformers:Gbmoe",
    "scattermoe": "gbmoe.cli.bench.peers.scattermoe:ScatterMoe",
    "sonicmoe": "gbmoe.cli.bench.peers.sonicmoe:SonicMoe",
}


def load(name: str) -> Peer:
    """The adapter of that name. Imports its file, not the peer."""
    module, attribute = PEERS[name].split(":")
    return getattr(importlib.import_module(module), attribute)()


def of_kind(kind: str, names: list[str]) -> list[str]:
    """Those of `names` that compute this kind of measurement."""
    return [name for name in names if kind in load(name).kinds]
