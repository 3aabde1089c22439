"""Plain PyTorch, one matrix product a group: right everywhere, and the CPU's engine."""

from __future__ import annotations

from gbmoe import reference
from gbmoe.engines.base import Engine, host_sizes, result_shape


class Reference(Engine):
    name = "reference"
    needs_host_sizes = True

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if out is None:
            out = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b))
        reference.gmm(a, b, host_sizes(sizes).tolist(), trans_a, trans_b, out, accumulate)
        return out
