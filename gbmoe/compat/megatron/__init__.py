"""Megatron-Core 0.19.2 with gbmoe: experts, the functions that it takes from TransformerEngine, and whole MoE layers.

    import gbmoe.compat.megatron
    gbmoe.compat.megatron.install()       # before the model's configuration is made

Importing this package imports Megatron-Core; `install` alone changes it. TransformerEngine may be installed or not.
"""

from gbmoe.compat._releases import require_release

require_release("gbmoe.compat.megatron", "megatron-core", ("0.19.2",))

from gbmoe.compat.megatron.grouped_experts import GroupedExperts  # noqa: E402  # what imports Megatron: after its release is known
from gbmoe.compat.megatron.installation import install  # noqa: E402
from gbmoe.compat.megatron.megakernel import Megakernel, build_megakernel_backend  # noqa: E402
from gbmoe.compat.megatron.moe_layer import GbmoeMoELayer  # noqa: E402
from gbmoe.compat.megatron.spec_provider import GbmoeSpecProvider, with_gbmoe_experts  # noqa: E402

__all__ = ["GbmoeMoELayer", "GbmoeSpecProvider", "GroupedExperts", "Megakernel", "build_megakernel_backend", "install",
           "with_gbmoe_experts"]
