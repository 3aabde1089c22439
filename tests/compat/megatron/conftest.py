"""Megatron-Core 0.19.2 where it is installed, elsewhere its interface as tests/compat/interfaces has it, and the adapter."""

import importlib
from types import SimpleNamespace

import pytest

from tests.compat import interfaces

ADAPTER = "gbmoe.compat.megatron"
CORE = ("activations", "extensions.transformer_engine", "fusions.fused_bias_geglu", "models.backends", "models.gpt.moe_module_specs",
        "transformer.moe.experts", "transformer.moe.moe_layer", "transformer.moe.moe_utils", "transformer.transformer_config")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron-Core's modules by their last names, and the adapter."""
    with interfaces.installed("megatron-core", ADAPTER, tmp_path_factory.mktemp("megatron")):
        found = {name.rpartition(".")[2]: importlib.import_module(f"megatron.core.{name}") for name in CORE}
        yield SimpleNamespace(**found, adapter=importlib.import_module(ADAPTER))
