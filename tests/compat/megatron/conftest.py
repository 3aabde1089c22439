"""Megatron-Core 0.19.2 where it is installed, elsewhere its interface as tests/compat/interfaces has it, and the adapter."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from tests.compat import interfaces
from tests.compat.megatron.parts import providers

ADAPTER = "gbmoe.compat.megatron"
CORE = ("activations", "extensions.transformer_engine", "fusions.fused_bias_geglu", "models.backends", "models.gpt.moe_module_specs",
        "transformer.moe.experts", "transformer.moe.moe_layer", "transformer.moe.moe_utils", "transformer.transformer_config")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron-Core's modules by their last names, and the adapter."""
    with interfaces.installed("megatron-core", ADAPTER, tmp_path_factory.mktemp("megatron")):
        found = {name.rpartition(".")[2]: importlib.import_module(f"megatron.core.{name}") for name in CORE}
        yield SimpleNamespace(**found, adapter=importlib.import_module(ADAPTER))


@pytest.fixture
def installed(megatron, monkeypatch):
    """`install`, whose effects end with the test."""
    for module in (megatron.moe_utils, megatron.transformer_engine):
        for name in [name for name in vars(module) if name.startswith("fused_")] + ["HAVE_TE", "is_te_min_version"]:
            monkeypatch.setattr(module, name, getattr(module, name, None), raising=False)
    for provider in providers(megatron):
        monkeypatch.setattr(provider, "grouped_mlp_modules", provider.grouped_mlp_modules)
    for name in ("moe", "moe_inference"):
        made = getattr(sys.modules.get("megatron.core.models.hybrid.hybrid_layer_specs"), name, None)
        if made is not None:
            monkeypatch.setattr(made.keywords["submodules"], "experts", made.keywords["submodules"].experts)
    megatron.theirs = {provider: provider.grouped_mlp_modules for provider in providers(megatron)}
    megatron.adapter.install(engine="torch")
    return megatron
