from functools import partial

from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules


def get_moe_module_spec_for_backend(backend, num_experts=None, moe_grouped_gemm=False, use_te_activation_func=False):
    return partial(MoELayer, submodules=MoESubmodules(experts=backend.grouped_mlp_modules(moe_grouped_gemm)))
