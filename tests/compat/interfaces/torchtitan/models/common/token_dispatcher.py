"""torchtitan's dispatchers, as far as a layer that does not call them touches them."""

from dataclasses import dataclass

from torchtitan.config import Configurable


class LocalTokenDispatcher(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config):
        self.num_experts, self.top_k = config.num_experts, config.top_k

    def wire_meshes(self, *, ep_mesh):
        pass


class AllToAllTokenDispatcher(LocalTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass
