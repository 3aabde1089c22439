"""As it is where TransformerEngine is not installed."""

import re

HAVE_TE = False
fused_permute = fused_permute_with_probs = fused_permute_and_pad_with_probs = None
fused_sort_chunks_by_index = fused_sort_chunks_by_index_with_probs = fused_unpermute = None
fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = None


def _set_expert_parameter_attributes(module, parallel_mode, use_expert_pgs):
    for name, parameter in module.named_parameters(recurse=False):
        parameter.allreduce = not use_expert_pgs
        weight = re.fullmatch(r"weight\d*", name) is not None
        parameter.tensor_model_parallel = weight or parallel_mode == "column"
        if parameter.tensor_model_parallel:
            parameter.partition_dim, parameter.partition_stride = int(parallel_mode == "row"), 1
