"""Plain PyTorch: the engine of the CPU, which runs on every device."""

from __future__ import annotations

from gbmoe.engines.base import Engine
from gbmoe.plain import plain_gmm
from gbmoe.problem import result_shape


class Reference(Engine):
    """One matrix product for each group, in plain PyTorch, for every dtype and on any device."""

    name = "reference"
    needs_host_sizes = True

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        if out is None:
            out = a.new_empty(result_shape(a, b, sizes.numel(), trans_a, trans_b))
        plain_gmm.gmm(a, b, sizes.tolist(), trans_a, trans_b, out, accumulate)  # waits for sizes on a device
        return out
