from dataclasses import dataclass

import torch
from torchtitan.config import Configurable


class Linear(torch.nn.Linear, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config):
        super().__init__(config.in_features, config.out_features, bias=config.bias)
