"""TransformerEngine's MoE functions by name and signature, on gbmoe's operators: permutation (.permutation) and router (.router).

TransformerEngine need not be installed. Everything here runs on CPU and CUDA, is differentiable, and gives the same bits on every run.
"""

from gbmoe.compat.transformer_engine.permutation import (
    mask_row_map,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_and_pad_by_index_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from gbmoe.compat.transformer_engine.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

__all__ = [
    "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function", "mask_row_map", "moe_permute",
    "moe_permute_and_pad_with_probs", "moe_permute_with_probs", "moe_sort_chunks_and_pad_by_index_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute",
]
