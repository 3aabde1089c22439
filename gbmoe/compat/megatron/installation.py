"""install: gbmoe in the places where Megatron-Core looks for TransformerEngine's functions and for its grouped experts."""

from __future__ import annotations

import functools
import sys
from typing import Any

from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules

from gbmoe.compat import transformer_engine as functions
from gbmoe.compat.megatron.grouped_experts import GroupedExperts, require_options
from gbmoe.compat.megatron.spec_provider import in_place_of

# Megatron's name -> gbmoe's function of TransformerEngine's interface.
_PERMUTATION = {
    "fused_permute": functions.moe_permute,
    "fused_permute_with_probs": functions.moe_permute_with_probs,
    "fused_permute_and_pad_with_probs": functions.moe_permute_and_pad_with_probs,
    "fused_sort_chunks_by_index": functions.moe_sort_chunks_by_index,
    "fused_sort_chunks_by_index_with_probs": functions.moe_sort_chunks_by_index_with_probs,
    "fused_unpermute": functions.moe_unpermute,
}
_ROUTER = {name: getattr(functions, name) for name in
           ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")}
# Where Megatron makes specifications while it is imported, with TransformerEngine's modules: hybrid_stack_spec and its like.
_SPECIFICATIONS = "megatron.core.models.hybrid.hybrid_layer_specs"


def install(*, experts: bool = True, permutation: bool = True, router: bool = True, **options: Any) -> None:
    """Let Megatron-Core take gbmoe's experts and functions, in this process. Calling it again changes the options of experts alone.

    Call it before the configuration and the specifications are made: the configuration asks whether there is a fused permutation.

    Args:
        experts: with moe_grouped_gemm, layers that are specified with Megatron's own modules or with TransformerEngine's have
            GroupedExperts. Without moe_grouped_gemm they stay as they are.
        permutation: moe_permute_fusion is computed by gbmoe: fused_permute, fused_unpermute and their like, with and without padding.
        router: moe_router_fusion is computed by gbmoe: fused_topk_with_score_function and the two of the auxiliary loss.
        options: keywords of GroupedExperts.

    Raises:
        TypeError: for a keyword that GroupedExperts does not take. The whole layer is taken by with_gbmoe_experts alone.
    """
    require_options("install", options)
    if experts:
        for provider in _providers():
            _take_experts(provider, options)
        _take_experts_of_specifications(options)
    for wanted, functions_by_name, version in ((permutation, _PERMUTATION, "2.12.0"), (router, _ROUTER, "2.13.0")):
        if wanted:
            for name, function in functions_by_name.items():
                setattr(extension, name, function)
                setattr(moe_utils, name, function)
            _claim_version(version)
            moe_utils.HAVE_TE = True  # moe_utils reads it before it calls one of these functions, and nowhere else


def _claim_version(version: str) -> None:
    """Let moe_utils have this version of TransformerEngine: it asks for 2.12.0 before it unpads, and for 2.13.0 before sqrtsoftplus."""
    theirs = moe_utils.is_te_min_version

    @functools.wraps(theirs)
    def is_te_min_version(wanted: str, check_equality: bool = True) -> bool:
        return wanted == version or theirs(wanted, check_equality)

    if not theirs(version):
        moe_utils.is_te_min_version = is_te_min_version


def _providers() -> list[Any]:
    providers: list[Any] = [LocalSpecProvider]
    if extension.HAVE_TE:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
        providers.append(TESpecProvider)
    return providers


def _take_experts(provider: Any, options: dict[str, Any]) -> None:
    theirs = getattr(provider.grouped_mlp_modules, "__wrapped__", provider.grouped_mlp_modules)

    @functools.wraps(theirs)
    def grouped_mlp_modules(self, moe_use_grouped_gemm):
        if moe_use_grouped_gemm:
            return in_place_of(theirs(self, moe_use_grouped_gemm), options)
        return theirs(self, moe_use_grouped_gemm)

    provider.grouped_mlp_modules = grouped_mlp_modules


def _take_experts_of_specifications(options: dict[str, Any]) -> None:
    """Where they have been imported already. They change in place, because others may have imported them by name."""
    for value in vars(sys.modules.get(_SPECIFICATIONS, object)).values():
        submodules = value.keywords.get("submodules") if isinstance(value, functools.partial) else None
        if isinstance(submodules, MoESubmodules) and getattr(submodules.experts, "func", None) in (TEGroupedMLP, GroupedExperts):
            submodules.experts = in_place_of(submodules.experts, options)
