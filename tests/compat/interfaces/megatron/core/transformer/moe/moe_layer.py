from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.transformer.moe.experts import MegatronModule


@dataclass
class MoESubmodules:
    experts: Callable
    shared_experts: Callable | None = None
    router: Callable | None = None


class MoELayer(MegatronModule):
    def __init__(self, config, submodules=None, layer_number=None, pg_collection=None, is_mtp_layer=False, name=None):
        super().__init__(config)
