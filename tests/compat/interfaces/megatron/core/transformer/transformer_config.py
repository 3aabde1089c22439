"""TransformerConfig: the fields that its experts read, with their defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F


@dataclass
class TransformerConfig:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_moe_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_grouped_gemm: bool = False
    moe_single_grouped_weight: bool = False
    moe_apply_probs_on_input: bool = False
    moe_latent_size: int | None = None
    moe_mlp_glu_interleave_size: int | None = None
    moe_paged_stash: bool = False
    add_bias_linear: bool = True
    gated_linear_unit: bool = False
    activation_func: Callable = F.gelu
    activation_func_clamp_value: float | None = None
    activation_func_fp8_input_store: bool = False
    glu_linear_offset: float = 0.0
    use_te_activation_func: bool = False
    use_cpu_initialization: bool = False
    perform_initialization: bool = True
    init_method: Callable = partial(torch.nn.init.normal_, std=0.02)
    output_layer_init_method: Callable = partial(torch.nn.init.normal_, std=0.02)
    params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    expert_gtp_weight_remat_size: int = 1
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    fine_grained_activation_offloading: bool = False
    offload_modules: list | None = None
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp8_param: bool = False
    fp8_wgrad: bool = True
    fp4: str | None = None
    first_last_layers_bf16: bool = False
    quant_recipe: object | None = None
    use_kitchen: bool = False
