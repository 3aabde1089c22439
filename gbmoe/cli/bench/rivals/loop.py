"""One expert after the other in plain PyTorch: gbmoe's mlp_impl='reference' as a layer, and a product for each group."""

from __future__ import annotations

from functools import partial

from gbmoe.cli.bench.gbmoe_itself import dropless_layer
from gbmoe.cli.bench.rivals.rival import Prepared, Rival
from gbmoe.testing import oracle


class Loop(Rival):
    kinds = ("layer", "product")

    def layer(self, case, weights):
        return dropless_layer(case, weights, mlp_impl="reference")

    def product(self, a, b, sizes, trans_a):
        return Prepared(partial(oracle.product, a, b, sizes, trans_a))
