"""What operators and engines compute with: the CUDA kernels where they are loaded, plain PyTorch elsewhere, without autograd.

Maps from slots to rows are dense (columns and counts None) or ragged; see reference.padded_gather. Their shapes are taken on trust,
their entries are not: what lies outside its range counts as none.

Shape suffixes: T tokens, K slots a token, H hidden, F ffn hidden, P padded rows of the plan.
"""

from __future__ import annotations

import torch

from gbmoe import extension, reference


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` contiguous and on a 16-byte boundary: a copy where it is a view that is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _kernels_serve(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and extension.loaded()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def gather(x_TH, row_of_slot_TK, slot_of_row_P, columns_TK=None, counts_T=None, scale=None, probs=None, drop_zero_probs=False,
           *, clear_behind=False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """padded_gather without checks and autograd: (out [P,H], probs [P] where given); the CUDA kernel where it is loaded.

    The rows behind the last expert are zeros with `clear_behind`, and otherwise whatever was there.
    """
    if not _kernels_serve(x_TH):
        return reference.padded_gather(x_TH, row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, scale, probs, drop_zero_probs)
    out_PH = x_TH.new_empty(slot_of_row_P.size(0), x_TH.size(1))
    probs_P = None if probs is None else probs.new_empty(slot_of_row_P.size(0))
    torch.ops.gbmoe_cuda.padded_gather(x_TH.contiguous(), row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, _contiguous(scale),
                                       _contiguous(probs), drop_zero_probs, clear_behind, out_PH, probs_P)
    return out_PH, probs_P


def scatter(y_PH, row_of_slot_TK, columns_TK=None, counts_T=None, weights=None) -> torch.Tensor:
    """padded_scatter without checks and autograd; the CUDA kernel where it is loaded."""
    if not _kernels_serve(y_PH):
        return reference.padded_scatter(y_PH, row_of_slot_TK, weights, columns_TK, counts_T)
    out_TH = y_PH.new_empty(row_of_slot_TK.size(0), y_PH.size(1))
    torch.ops.gbmoe_cuda.padded_scatter(y_PH.contiguous(), row_of_slot_TK, columns_TK, counts_T, _contiguous(weights), out_TH)
    return out_TH


def scatter_backward(grad_TH, y_PH, row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, weights, *,
                     need_rows=True) -> tuple[torch.Tensor, ...]:
    """Gradients of padded_scatter, see reference.padded_scatter_backward; the CUDA kernel where it is loaded.

    Without `need_rows` the first result is empty.
    """
    if not _kernels_serve(grad_TH):
        rows, dots = reference.padded_scatter_backward(grad_TH, y_PH, row_of_slot_TK, slot_of_row_P, weights, columns_TK, counts_T)
        return rows if need_rows else grad_TH.new_empty(0), dots
    grad_y_PH = grad_TH.new_empty(slot_of_row_P.size(0), grad_TH.size(1)) if need_rows else None
    grad_weights = None
    if y_PH is not None and weights is not None:
        # The kernel writes the scalars of all slots of a dense map, and of a ragged one those in use, where there are rows.
        written = columns_TK is None and grad_TH.numel() > 0
        grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format) if written \
            else torch.zeros_like(weights, memory_format=torch.contiguous_format)
    torch.ops.gbmoe_cuda.padded_scatter_backward(
        grad_TH.contiguous(), _contiguous(y_PH), row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, _contiguous(weights), True,
        grad_y_PH, grad_weights)
    return tuple(grad_TH.new_empty(0) if t is None else t for t in (grad_y_PH, grad_weights))


def map_slots(row_TK, columns_TK, counts_T, pad_offsets_E, probs, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """row_of_slot [T,K] and slot_of_row [P] of a map's rows; the CUDA kernel where it is loaded. P is `rows`.

    A slot has its row, plus pad_offsets_E of its column; or -1 where that is not in [0, P), where the column is none, and with
    probs where its probability is 0. Beyond a ragged map's counts anything may stand. slot_of_row is 0 for rows that a slot
    has and PADDING for others: the operators below read its sign only.
    """
    if _kernels_serve(row_TK):
        row_of_slot_TK = torch.empty(row_TK.shape, dtype=torch.int32, device=row_TK.device)
        slot_of_row_P = row_of_slot_TK.new_empty(rows)
        pad_offsets_E = None if pad_offsets_E is None else pad_offsets_E.long().contiguous()
        torch.ops.gbmoe_cuda.map_slots(
            row_TK, columns_TK, counts_T, pad_offsets_E, _contiguous(probs), row_of_slot_TK, slot_of_row_P)
        return row_of_slot_TK, slot_of_row_P
    slots = row_TK.size(1)
    if columns_TK is not None:
        row_TK = torch.where((columns_TK >= 0) & (columns_TK < slots), row_TK, -1)
    row_TK, columns_TK, probs = reference.dense_slots(row_TK, columns_TK, counts_T, torch.iinfo(torch.int32).max, probs)
    if pad_offsets_E is not None:
        row_TK = torch.where(row_TK >= 0, row_TK + pad_offsets_E.long()[columns_TK], -1)
    exists_TK = (row_TK >= 0) & (row_TK < rows)
    if probs is not None:
        exists_TK &= probs != 0
    row_TK = torch.where(exists_TK, row_TK, -1).int()
    # Slots without a row write behind the last one, each column to its own place: one place for all would be a queue.
    target_TK = torch.where(exists_TK, row_TK, rows + torch.arange(slots, device=row_TK.device))
    slot_of_row_P = torch.full((rows + slots,), reference.PADDING, dtype=torch.int32, device=row_TK.device)
    return row_TK, slot_of_row_P.scatter_(0, target_TK.flatten().long(), 0)[:rows].clone()


def activate(h_PF: torch.Tensor, g_PF: torch.Tensor | None, activation: str) -> torch.Tensor:
    """act(h), times g where there is one, [P,F]; see reference.activate. `activation` is a name in reference.ACTIVATIONS."""
    if not _kernels_serve(h_PF):
        return reference.activate(h_PF, g_PF, activation)
    a_PF = torch.empty_like(h_PF)
    torch.ops.gbmoe_cuda.activate(h_PF, g_PF, reference.ACTIVATION_INDEX[activation], a_PF)
    return a_PF


def activate_backward(
    h_PF: torch.Tensor, g_PF: torch.Tensor | None, d_PF: torch.Tensor, slot_of_row_P: torch.Tensor,
    weights_TK: torch.Tensor | None, activation: str,
) -> tuple[torch.Tensor, ...]:
    """The activation's share of the experts' backward, (weight * a, dg, grad_weights); see reference.activate_backward.

    dh is written over d. dg is empty without g, grad_weights without weights.
    """
    if not _kernels_serve(h_PF):
        return reference.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, activation)
    a_PF = torch.empty_like(h_PF)
    dg_PF = None if g_PF is None else torch.empty_like(h_PF)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    grad_weights_TK = None if weights_TK is None else torch.zeros_like(weights_TK)
    torch.ops.gbmoe_cuda.activate_backward(h_PF, g_PF, d_PF, slot_of_row_P, weights_TK, reference.ACTIVATION_INDEX[activation],
                                           a_PF, dg_PF, grad_weights_TK)
    return a_PF, *(h_PF.new_empty(0) if t is None else t for t in (dg_PF, grad_weights_TK))
