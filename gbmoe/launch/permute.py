"""Between tokens and rows: the plan's sort, gather, weighted scatter and its gradients, maps of slots. The CUDA kernels of csrc/permute/
where they are loaded, otherwise plain PyTorch. No autograd.

The shapes of a SlotMap are not checked. Its entries may hold anything: one outside its range counts as none.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan, M = 2 E + 1.
"""

from __future__ import annotations

import torch

from gbmoe.launch.alignment import aligned
from gbmoe.launch.availability import serves, sorts
from gbmoe.plain import plain_permute, plain_plan
from gbmoe.slot_map import SlotMap
from gbmoe.tuning import permute as tuning
from gbmoe.tuning.device import Device


def routing_plan(experts_TK: torch.Tensor, num_experts: int, align: int) -> tuple[torch.Tensor, ...]:
    """row_of_slot, slot_of_row, counts, offsets and padded counts of a plan, see plain_plan.routing_plan. Ids are not checked: one outside
    [0, num_experts) counts as none."""
    if not sorts(experts_TK.device, num_experts):
        return plain_plan.routing_plan(experts_TK, num_experts, align)
    rows = plain_plan.padded_rows(experts_TK.numel(), num_experts, align)
    most_chunks = tuning.most_chunks(Device.of(experts_TK.device))
    return torch.ops.gbmoe_cuda.routing_plan(experts_TK.contiguous(), num_experts, align, rows, most_chunks)


def mask_row_map(mask_TE: torch.Tensor, pad_offsets_E: torch.Tensor | None, map_TM: torch.Tensor, row_of_slot_TE: torch.Tensor | None,
                 slot_of_row_P: torch.Tensor | None) -> None:
    """Write TransformerEngine's row map of a mask, and with the last two, given both or neither, what map_slots makes of it. Only where
    availability.sorts says so for as many experts.

    Args:
        mask_TE: any integer type or bool.
        pad_offsets_E: int64, or None.
        map_TM, row_of_slot_TE, slot_of_row_P: int32.
    """
    counts_by_chunk = map_TM.new_empty(tuning.most_chunks(Device.of(mask_TE.device)), mask_TE.size(1))
    torch.ops.gbmoe_cuda.mask_row_map(mask_TE.contiguous(), pad_offsets_E, counts_by_chunk, map_TM, row_of_slot_TE, slot_of_row_P)


def gather(
    x_TH: torch.Tensor, slots: SlotMap, *, scale: torch.Tensor | None = None, probs: torch.Tensor | None = None,
    drop_zero_probs: bool = False, clear_behind: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """padded_gather without checks and autograd: (out [P,H], probs [P] or None); the CUDA kernel where it is loaded.

    With `clear_behind` the rows after the last expert are zeros; otherwise they may hold anything.
    """
    if not serves(x_TH):
        out_PH, gathered_P = plain_permute.padded_gather(x_TH, slots, scale=scale, probs=probs, drop_zero_probs=drop_zero_probs)
        return out_PH, None if probs is None else gathered_P
    out_PH = x_TH.new_empty(slots.num_rows, x_TH.size(1))
    probs_P = None if probs is None else probs.new_empty(slots.num_rows)
    torch.ops.gbmoe_cuda.padded_gather(x_TH.contiguous(), *slots, _contiguous(scale), _contiguous(probs), drop_zero_probs, clear_behind,
                                       tuning.SHORT_ROW, out_PH, probs_P)
    return out_PH, probs_P


def scatter(y_PH: torch.Tensor, slots: SlotMap, *, weights: torch.Tensor | None = None) -> torch.Tensor:
    """padded_scatter without checks and autograd; the CUDA kernel where it is loaded."""
    if not serves(y_PH):
        return plain_permute.padded_scatter(y_PH, slots, weights=weights)
    out_TH = y_PH.new_empty(slots.num_tokens, y_PH.size(1))
    torch.ops.gbmoe_cuda.padded_scatter(
        y_PH.contiguous(), slots.row_of_slot_TK, slots.columns_TK, slots.counts_T, _contiguous(weights), out_TH)
    return out_TH


def scatter_backward(
    grad_TH: torch.Tensor, y_PH: torch.Tensor | None, slots: SlotMap, *, weights: torch.Tensor | None = None, need_rows: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of padded_scatter, see plain_permute.padded_scatter_backward; the CUDA kernel where it is loaded.

    Without `need_rows` the first result is empty.
    """
    if not serves(grad_TH):
        rows, dots = plain_permute.padded_scatter_backward(grad_TH, y_PH, slots, weights=weights)
        return rows if need_rows else grad_TH.new_empty(0), dots
    grad_y_PH = grad_TH.new_empty(slots.num_rows, grad_TH.size(1)) if need_rows else None
    grad_weights = None
    if y_PH is not None and weights is not None:
        # Where there are rows, the kernel writes the scalars of all slots of a dense map, but of a ragged map only those in use.
        written = slots.columns_TK is None and grad_TH.numel() > 0
        grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format) if written \
            else torch.zeros_like(weights, memory_format=torch.contiguous_format)
    torch.ops.gbmoe_cuda.padded_scatter_backward(
        grad_TH.contiguous(), _contiguous(y_PH), *slots, _contiguous(weights), True, grad_y_PH, grad_weights)
    return (grad_TH.new_empty(0) if grad_y_PH is None else grad_y_PH,
            grad_TH.new_empty(0) if grad_weights is None else grad_weights)


def map_slots(
    row_TK: torch.Tensor, *, columns_TK: torch.Tensor | None = None, counts_T: torch.Tensor | None = None,
    pad_offsets_E: torch.Tensor | None = None, probs: torch.Tensor | None = None, rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_of_slot [T,K] and slot_of_row [P] of a SlotMap with these rows, see plain_permute.map_slots; the CUDA kernel where it is
    loaded."""
    if not serves(row_TK):
        return plain_permute.map_slots(row_TK, columns_TK=columns_TK, counts_T=counts_T, pad_offsets_E=pad_offsets_E, probs=probs,
                                       rows=rows)
    row_of_slot_TK = torch.empty(row_TK.shape, dtype=torch.int32, device=row_TK.device)
    slot_of_row_P = row_of_slot_TK.new_empty(rows)
    pad_offsets_E = None if pad_offsets_E is None else pad_offsets_E.long().contiguous()
    torch.ops.gbmoe_cuda.map_slots(row_TK, columns_TK, counts_T, pad_offsets_E, _contiguous(probs), row_of_slot_TK, slot_of_row_P)
    return row_of_slot_TK, slot_of_row_P


def clear_rows_without_slot(slot_of_row_P: torch.Tensor, rows_PF: torch.Tensor) -> None:
    """Write zeros to the rows of a contiguous [P,F], of any dtype, whose entry in slot_of_row_P is negative; leave the others."""
    if not serves(rows_PF):
        plain_permute.clear_rows_without_slot(slot_of_row_P, rows_PF)
    else:
        torch.ops.gbmoe_cuda.clear_rows_without_slot(slot_of_row_P, rows_PF)


def weigh_rows(rows_PR: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """rows[r] * weights[slot of r], [P,R], rounded once, or rows[r] without weights; zeros for a row without a slot, and for a slot beyond
    the weights. Weights have any floating dtype."""
    if not serves(rows_PR) or rows_PR.size(1) * rows_PR.element_size() % 16:
        return plain_permute.weigh_rows(rows_PR, slot_of_row_P, weights_TK)
    out_PR = torch.empty_like(rows_PR, memory_format=torch.contiguous_format)
    torch.ops.gbmoe_cuda.weigh_rows(aligned(rows_PR), slot_of_row_P, _contiguous(weights_TK), out_PR)
    return out_PR


def weights_in_columns(slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None, dtype: torch.dtype, columns: int) -> torch.Tensor:
    """[P,columns] in `dtype`: the weight of each row's slot, what that loses in `dtype`, and zeros; without weights 1. Zeros alone for a
    row without a slot, and for a slot beyond the weights. Weights have any floating dtype."""
    if not serves(slot_of_row_P) or dtype not in (torch.bfloat16, torch.float16) or columns != 8:
        return plain_permute.weights_in_columns(slot_of_row_P, weights_TK, dtype, columns)
    out_PC = torch.empty(slot_of_row_P.size(0), columns, dtype=dtype, device=slot_of_row_P.device)
    torch.ops.gbmoe_cuda.weights_in_columns(slot_of_row_P, _contiguous(weights_TK), out_PC)
    return out_PC


def add_dots(dots_PR: torch.Tensor, slots: SlotMap, sizes_E: torch.Tensor, dweights_TK: torch.Tensor) -> torch.Tensor:
    """dweights with dots[r,0] added for each slot's row r, rounded once; it may be done in place. A slot whose row lies after the last
    expert's has none. Sizes are on the device."""
    if not serves(dots_PR) or dots_PR.dtype != torch.float32 or not (dots_PR.is_contiguous() and dweights_TK.is_contiguous()):
        return plain_permute.add_dots(dots_PR, slots, sizes_E, dweights_TK)
    torch.ops.gbmoe_cuda.add_dots(dots_PR, slots.slot_of_row_P, sizes_E, dweights_TK)
    return dweights_TK


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
