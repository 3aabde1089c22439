"""One expert after the other in plain PyTorch: gbmoe's mlp_impl='reference', and one product a group."""

from __future__ import annotations

from functools import partial

from gbmoe.cli import plain
from gbmoe.cli.bench.own import dropless_layer
from gbmoe.cli.bench.peers.base import Peer, Prepared


class Loop(Peer):
    kinds = ("layer", "training", "product")

    def layer(self, case, weights):
        return dropless_layer(case, weights, mlp_impl="reference")

    def product(self, a, b, sizes, trans_a):
        return Prepared(partial(plain.product, a, b, sizes, trans_a))
