"""torch.bmm with every expert padded to the largest: the article's baseline, as gbmoe's mlp_impl='bmm' computes it."""

from __future__ import annotations

from functools import partial

import torch

from gbmoe.cli.bench.gbmoe_itself import dropless_layer
from gbmoe.cli.bench.rivals.rival import Prepared, Rival


class Bmm(Rival):
    kinds = ("layer", "product")

    def layer(self, case, weights):
        return dropless_layer(case, weights, mlp_impl="bmm")

    def product(self, a, b, sizes, trans_a):
        """One torch.bmm. Padding its operands is not timed."""
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        left = pad(a.split(sizes))
        if trans_a:
            return Prepared(partial(torch.bmm, left.transpose(1, 2), pad(b.split(sizes))))
        return Prepared(partial(torch.bmm, left, b),
                        lambda out: torch.cat([rows[:size] for rows, size in zip(out, sizes)]))
