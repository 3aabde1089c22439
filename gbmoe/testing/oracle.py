"""The operators, written in PyTorch in the obvious way, without gbmoe.

Called with float64 tensors these functions are the oracle of `verify` and `bench`; called with the dtype under test
they are the yardstick (see accuracy.py). Nothing here calls an operator of gbmoe.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, M rows of all groups, P padded rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# Torch's own functions, by the names of plain_activation.ACTIVATIONS. They are not taken from there, because they check the formulas there.
ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(), "identity": lambda x: x,
}


# ------------------------------------------------------------------------------------------------------------ operators


def routing(experts_TK: torch.Tensor, num_experts: int, align: int) -> dict[str, list[int]]:
    """The tensors of a RoutingPlan, flattened, by the names of its attributes."""
    ids = experts_TK.flatten().tolist()
    slots_of: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(ids):
        if expert >= 0:
            slots_of[expert].append(slot)
    slot_of_row, counts, offsets, padded_counts = [], [], [0], []
    for mine in slots_of:
        slot_of_row += mine + [-1] * (-len(mine) % align)
        counts.append(len(mine))
        padded_counts.append(len(slot_of_row) - offsets[-1])
        offsets.append(len(slot_of_row))
    bound = (len(ids) + min(len(ids), num_experts) * (align - 1)) // align * align
    slot_of_row += [-2] * (bound - len(slot_of_row))
    row_of_slot = [-1] * len(ids)
    for row, slot in enumerate(slot_of_row):
        if slot >= 0:
            row_of_slot[slot] = row
    return {"row_of_slot_TK": row_of_slot, "slot_of_row_P": slot_of_row, "counts_E": counts, "offsets_E1": offsets,
            "padded_counts_E": padded_counts}


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index], with rows of zeros where the index is -1."""
    return torch.cat([rows, rows.new_zeros(1, rows.size(1))])[index]


def scatter(y_PH: torch.Tensor, row_of_slot_TK: torch.Tensor, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum of each token's rows."""
    y_TKH = take(y_PH, row_of_slot_TK)
    return (y_TKH if weights_TK is None else y_TKH * weights_TK.unsqueeze(-1)).sum(1)


def product(a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], trans_a: bool = False,
            trans_b: bool = False) -> torch.Tensor:
    """The grouped GEMM of gbmoe.gmm; b is cast to a's dtype one group at a time."""
    if trans_a:
        return torch.stack([left.t() @ right for left, right in zip(a.split(sizes), b.split(sizes))])
    weights = (weight.to(a.dtype) for weight in b)
    return torch.cat([rows @ (weight.t() if trans_b else weight) for rows, weight in zip(a.split(sizes), weights)])


def mlp(x: torch.Tensor, activation: Callable, w1: torch.Tensor, w2: torch.Tensor,
        v1: torch.Tensor | None = None) -> torch.Tensor:
    """The MLP or GLU of one expert."""
    hidden = activation(x @ w1.t())
    return (hidden if v1 is None else hidden * (x @ v1.t())) @ w2


def experts(x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, activation: Callable,
            w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None = None) -> torch.Tensor:
    """Each token's weighted sum over its experts; their weights [E,F,H] are cast to x's dtype one expert at a time."""
    def expert(rows, e):
        return mlp(rows, activation, *(w if w is None else w[e].to(rows.dtype) for w in (w1, w2, v1)))

    out_TH = torch.zeros_like(x_TH)
    for e in range(w1.size(0)):
        token, slot = (experts_TK == e).nonzero(as_tuple=True)
        # Each expert is computed again in backward, so that autograd keeps no weights in the wider dtype.
        y = checkpoint(expert, x_TH[token], e, use_reentrant=False, preserve_rng_state=False)
        out_TH = out_TH.index_add(0, token, y * weights_TK[token, slot, None])
    return out_TH


def best_experts(logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """The experts [T,K] with the top_k highest logits; among equal ones the lower expert comes first."""
    return logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


def route(logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, the chosen experts' weights, and the logits' logsumexp in at least float32."""
    scores_TE = logits_TE.softmax(-1)
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    return scores_TE, scores_TE.gather(1, chosen_TK), logits_TE.to(wide).logsumexp(-1)


def router_weights(x_TH: torch.Tensor, router_EH: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """The softmax scores of the experts that the router chose."""
    return (x_TH @ router_EH.to(x_TH.dtype).t()).softmax(-1).gather(1, chosen_TK)


def weight_gradients(
    x_TH: torch.Tensor, grad_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor, activation: Callable,
    weights_EFH: Mapping[str, torch.Tensor], dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Gradients of w1, w2 and v1, computed in `dtype` with one expert in memory at a time.

    The gradient of a row of these matrices depends on no other row, so for a sample of rows only these need to be given.
    """
    gradients = []
    for e in range(next(iter(weights_EFH.values())).size(0)):
        token, slot = (experts_TK == e).nonzero(as_tuple=True)
        leaves = {name: w[e].detach().to(dtype).requires_grad_() for name, w in weights_EFH.items()}
        y = mlp(x_TH[token].to(dtype), activation, **leaves)
        upstream = grad_TH[token].to(dtype) * weights_TK[token, slot, None].to(dtype)
        gradients.append(torch.autograd.grad(y, list(leaves.values()), upstream))
    return {f"grad {name}": torch.stack(per_expert) for name, per_expert in zip(weights_EFH, zip(*gradients))}
