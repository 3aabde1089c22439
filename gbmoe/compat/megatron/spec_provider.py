"""Where Megatron-Core chooses its experts: a backend's provider of submodules, and specifications that are already made."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

from gbmoe._checks import require
from gbmoe.compat.megatron.experts_configuration import ADAPTER
from gbmoe.compat.megatron.grouped_experts import GroupedExperts, require_options
from gbmoe.compat.megatron.moe_layer import GbmoeMoELayer


class GbmoeSpecProvider:
    """A BackendSpecProvider whose experts are gbmoe's; everything else is that of another one.

    Args:
        fallback: LocalSpecProvider(), TESpecProvider() or another one; None for the first.
        options: keywords of GroupedExperts. TypeError for others.
    """

    def __init__(self, fallback: Any = None, **options: Any):
        require_options("GbmoeSpecProvider", options)
        self._fallback = LocalSpecProvider() if fallback is None else fallback
        self._options = options

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial:
        """The ExpertsBuilder, whether GEMMs are to be grouped or not."""
        return in_place_of(self._fallback.grouped_mlp_modules(True), self._options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied or unpickled there is no fallback yet
            raise AttributeError(name)
        return getattr(self._fallback, name)


def in_place_of(builder: Any, options: dict[str, Any]) -> partial:
    """The ExpertsBuilder of GroupedExperts with these keywords.

    It has the submodules of the one in whose place it is, since Megatron's get_submodules reads them from specifications.
    """
    submodules = builder.keywords.get("submodules") if isinstance(builder, partial) else getattr(builder, "submodules", None)
    return partial(GroupedExperts, submodules=submodules, **options)


def with_gbmoe_experts(spec: Any, *, whole_layer: bool = False, **options: Any) -> Any:
    """A specification like this one, of a layer, a block or a whole model, whose MoE layers have gbmoe's experts; this one stays as it is.

    Args:
        spec: what get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec, get_gpt_decoder_block_spec and their like return.
        whole_layer: MoELayers become GbmoeMoELayers, whose rows gbmoe brings to the experts and back.
        options: keywords of GroupedExperts.

    Raises:
        ValueError: where there are no MoE layers in it.
        TypeError: for a keyword that GroupedExperts does not take.
    """
    require_options("with_gbmoe_experts", options)
    replaced = _replaced(spec, options, whole_layer)
    require(replaced is not spec, ADAPTER, "spec", "one with MoESubmodules in it", spec)
    return replaced


def _replaced(spec: Any, options: dict[str, Any], whole_layer: bool) -> Any:
    """The same object where nothing in it changes."""
    if spec is MoELayer and whole_layer:
        return GbmoeMoELayer
    if isinstance(spec, MoESubmodules):
        return dataclasses.replace(spec, experts=in_place_of(spec.experts, options))
    if isinstance(spec, partial):
        function = _replaced(spec.func, options, whole_layer)
        keywords = {name: _replaced(value, options, whole_layer) for name, value in spec.keywords.items()}
        changed = any(keywords[name] is not value for name, value in spec.keywords.items())
        return partial(function, *spec.args, **keywords) if changed or function is not spec.func else spec
    if isinstance(spec, (list, tuple)):
        items = [_replaced(each, options, whole_layer) for each in spec]
        return type(spec)(items) if any(new is not old for new, old in zip(items, spec)) else spec
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        old = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        new = {name: _replaced(value, options, whole_layer) for name, value in old.items()}
        return dataclasses.replace(spec, **new) if any(new[name] is not value for name, value in old.items()) else spec
    return spec
