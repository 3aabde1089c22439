"""The functions of Megatron-Core that take TransformerEngine's where they are told to, as they are where it is not installed."""

import torch

HAVE_TE = False
fused_permute = fused_permute_with_probs = fused_permute_and_pad_with_probs = None
fused_sort_chunks_by_index = fused_sort_chunks_by_index_with_probs = fused_unpermute = None
fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = None


def is_te_min_version(version, check_equality=True):
    return False


def permute(tokens, routing_map, probs=None, num_out_tokens=None, fused=False, drop_and_pad=False, tokens_per_expert=None, align_size=0):
    if fused:
        if not HAVE_TE:
            raise ValueError("fused_permute is not available. Please install TE >= 2.1.0.")
        if probs is None:
            rows, row_map = fused_permute(tokens, routing_map, num_out_tokens=num_out_tokens)
            return rows, None, row_map, None, tokens_per_expert
        if tokens_per_expert is not None and align_size > 0:
            return fused_permute_and_pad_with_probs(tokens, probs, routing_map, tokens_per_expert, align_size)
        return *fused_permute_with_probs(tokens, probs, routing_map, num_out_tokens=num_out_tokens), None, tokens_per_expert
    order = routing_map.bool().T.reshape(-1).argsort(descending=True, stable=True)[:num_out_tokens]
    token = order % tokens.size(0)
    return tokens[token], None if probs is None else probs.T.reshape(-1)[order], token, None, tokens_per_expert


def unpermute(permuted_tokens, sorted_indices, restore_shape, probs=None, routing_map=None, fused=False, drop_and_pad=False,
              pad_offsets=None):
    if fused:
        if not HAVE_TE:
            raise ValueError("fused_unpermute is not available. Please install TE >= 2.1.0.")
        padded = {"pad_offsets": pad_offsets} if is_te_min_version("2.12.0") else {}
        return fused_unpermute(permuted_tokens, sorted_indices, merging_probs=probs, restore_shape=restore_shape, **padded)
    if probs is not None:
        permuted_tokens = permuted_tokens * probs.T.masked_select(routing_map.T).unsqueeze(-1)
    zeros = torch.zeros(restore_shape, dtype=permuted_tokens.dtype)
    return zeros.index_add(0, sorted_indices, permuted_tokens)


def sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs=None, fused=False):
    if fused:
        if not HAVE_TE:
            raise ValueError("fused_sort_chunks_by_index is not available. Please install TE >= 2.1.0.")
        if probs is None:
            return fused_sort_chunks_by_index(input, split_sizes, sorted_idxs), None
        return fused_sort_chunks_by_index_with_probs(input, probs, split_sizes, sorted_idxs)

    def sort(tensor):
        chunks = torch.split(tensor, split_sizes.tolist())
        return torch.cat([chunks[i] for i in sorted_idxs.tolist()])
    return sort(input), None if probs is None else sort(probs)


def topk_routing_with_score_function(logits, topk, use_pre_softmax=False, num_groups=None, group_topk=None, scaling_factor=None,
                                     score_function="softmax", expert_bias=None, fused=False, router_replay=None, dense_output=False,
                                     precomputed_indices=None):
    if fused:
        if not HAVE_TE:
            raise ValueError("fused_topk_with_score_function is not available. Please install TE >= 2.6.0.")
        if score_function == "sqrtsoftplus" and not is_te_min_version("2.13.0"):
            raise ValueError("Fused sqrtsoftplus score function requires TE >= 2.13.0.")
        return fused_topk_with_score_function(
            logits=logits, topk=topk, use_pre_softmax=use_pre_softmax, num_groups=num_groups, group_topk=group_topk,
            scaling_factor=scaling_factor, score_function=score_function, expert_bias=expert_bias)
    if score_function == "softmax":
        scores = torch.softmax(logits, -1) if use_pre_softmax else logits
    else:
        scores = torch.sigmoid(logits) if score_function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    ids = (scores if expert_bias is None else scores + expert_bias).topk(topk).indices
    probs = scores.gather(1, ids)
    if score_function != "softmax":
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    elif not use_pre_softmax:
        probs = torch.softmax(probs, -1)
    probs = probs * (scaling_factor or 1)
    return torch.zeros_like(logits).scatter(1, ids, probs), torch.zeros_like(logits).bool().scatter(1, ids, True)


def compute_routing_scores_for_aux_loss(logits, topk, score_function, fused=False, padding_mask=None):
    if fused:
        if not HAVE_TE:
            raise ValueError("fused_compute_score_for_moe_aux_loss is not available. Please install TE >= 2.6.0.")
        return fused_compute_score_for_moe_aux_loss(logits=logits, topk=topk, score_function=score_function)
    scores = torch.softmax(logits, -1) if score_function == "softmax" else torch.sigmoid(logits)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits).bool().scatter(1, scores.topk(topk).indices, True), scores


def switch_load_balancing_loss_func(probs, tokens_per_expert, total_num_tokens, topk, num_experts, moe_aux_loss_coeff, fused=False,
                                    padding_mask=None):
    if fused:
        if not HAVE_TE:
            raise ValueError("fused_moe_aux_loss is not available. Please install TE >= 2.7.0.")
        return fused_moe_aux_loss(probs=probs, tokens_per_expert=tokens_per_expert, total_num_tokens=total_num_tokens, topk=topk,
                                  num_experts=num_experts, coeff=moe_aux_loss_coeff)
    return (probs.sum(0) * tokens_per_expert).sum() * (num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens))
