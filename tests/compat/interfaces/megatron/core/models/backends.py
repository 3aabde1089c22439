from functools import partial
from types import SimpleNamespace

from megatron.core.transformer.moe.experts import SequentialMLP


class LocalSpecProvider:
    def fuse_layernorm_and_linear(self):
        return False

    def grouped_mlp_modules(self, moe_use_grouped_gemm):
        return partial(SequentialMLP, submodules=SimpleNamespace(linear_fc1="ColumnParallelLinear", linear_fc2="RowParallelLinear"))
