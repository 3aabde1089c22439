import torch


class MegatronModule(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


class TEGroupedMLP(MegatronModule):
    """Its sharded_state_dict, which makes one of those of linear_fc1 and linear_fc2, is Megatron's."""

    def __init__(self, num_local_experts, config, submodules, pg_collection=None, name=None):
        raise AssertionError("it builds TransformerEngine's modules")


class SequentialMLP(MegatronModule):
    def __init__(self, num_local_experts, config, submodules, pg_collection=None, name=None):
        super().__init__(config)
