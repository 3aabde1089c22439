"""A stand-in for `stk.backend.triton_kernels` where there is no Triton: its products say what is missing."""

from __future__ import annotations


def _refuse(*args, **kwargs):
    raise ModuleNotFoundError(
        "stk's block-sparse products, and so MegaBlocks' mlp_impl='sparse', are written in Triton, which is not"
        " installed; mlp_impl='gbmoe' does without", name="triton")


dds = dsd = sdd = row_indices = _refuse
