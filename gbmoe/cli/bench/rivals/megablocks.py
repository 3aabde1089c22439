"""MegaBlocks (github.com/databricks/megablocks): its dMoE with grouped and with block-sparse products.

Router, gathers, scatters and products are MegaBlocks' own. Its CUDA extension does not compile with CUDA 13; where it is missing,
gbmoe.compat.megablocks replaces the extension's sort, histogram and sums.
"""

from __future__ import annotations

import sys

import torch

from gbmoe._importable import is_importable
from gbmoe.cli.bench.gbmoe_itself import DroplessLayer, layer_arguments
from gbmoe.cli.bench.rivals.rival import Rival, needs_cuda, not_importable, versions

_STAND_IN = "gbmoe.compat.megablocks.megablocks_ops"


def _own_extension() -> bool:
    """False also where the stand-in has taken the extension's place, so that `about` names it."""
    return is_importable("megablocks_ops") and getattr(sys.modules.get("megablocks_ops"), "__name__", None) != _STAND_IN


def stand_in() -> None:
    """Register the stand-in for the extension where it is missing. Every process does so before it measures: one that replaces a
    crashed process has not been asked whether the rival is available."""
    if not _own_extension():
        from gbmoe.compat.megablocks import register
        register()


def import_reason(device: torch.device) -> str | None:
    """None if MegaBlocks can be imported, otherwise the reason. A stand-in may replace its extension, but not its Triton kernels."""
    reason = needs_cuda(device) or not_importable("triton")
    if reason is None and not is_importable("megablocks"):
        reason = "megablocks is not installed"
    if reason is not None:
        return reason
    try:
        stand_in()
    except Exception as error:
        return f"megablocks_ops is missing, and there is no stand-in: {type(error).__name__}: {error}"
    return not_importable("megablocks.layers.dmoe")


class MegaBlocks(Rival):
    impl: str

    def about(self):
        extension = "" if _own_extension() else ", with gbmoe's stand-in for the extension megablocks_ops"
        return versions("megablocks", "stanford-stk") + extension

    def layer(self, case, weights, **more):
        """`more` are further Arguments."""
        stand_in()
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        # With a recent Triton, Arguments refuses 'sparse': mlp_impl is set after it, and "later" is a name that it does not check.
        arguments = Arguments(**layer_arguments(case, weights), mlp_impl="later", device=torch.device("meta"), **more)
        arguments.mlp_impl = self.impl
        return DroplessLayer(dMoE(arguments), weights)


class MegaBlocksGrouped(MegaBlocks):
    impl = "grouped"

    def unavailable(self, device):
        # grouped_gemm is asked for before MegaBlocks, whose stand-in would otherwise provide gbmoe.compat.grouped_gemm.
        return needs_cuda(device) or not_importable("grouped_gemm_backend", "grouped_gemm") or import_reason(device)

    def refuses(self, case, dtype):
        return None if dtype == torch.bfloat16 else "takes bfloat16 only"


class MegaBlocksSparse(MegaBlocks):
    impl = "sparse"

    def unavailable(self, device):
        return import_reason(device)

    def refuses(self, case, dtype):
        if case.ffn % 128:
            return f"takes an ffn that is a multiple of 128, not {case.ffn}"
        return None if dtype in (torch.bfloat16, torch.float16) else "takes bfloat16 and float16 only"
