"""The gather and the scatter of rows, their gradients, and the maps that they take, in plain PyTorch.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows (see gbmoe/plan.py), R = T * K slots.
"""

from __future__ import annotations

import torch

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe.plain.plain_plan import PADDING
from gbmoe.slot_map import SlotMap


def dense_slots(row_of_slot_TK, *scalars, columns_TK, counts_T, rows):
    """The slots of any map in the form of a dense one: (rows in [0, rows), or -1 for none; columns; each of the scalars as [T,K]).

    A slot has no row if it lies after its token's count, or if its row or its scalars' column is out of range.
    """
    exists_TK = (row_of_slot_TK >= 0) & (row_of_slot_TK < rows)
    if counts_T is not None:
        column_K = torch.arange(row_of_slot_TK.size(1), dtype=torch.int64, device=row_of_slot_TK.device)
        exists_TK &= column_K < counts_T.unsqueeze(1)
    if columns_TK is not None:
        for scalar in scalars:
            if scalar is not None:
                exists_TK &= (columns_TK >= 0) & (columns_TK < scalar.size(1))
        columns_TK = torch.where(exists_TK, columns_TK, 0).long()
        scalars = tuple(None if t is None else t.gather(1, columns_TK) for t in scalars)
    return torch.where(exists_TK, row_of_slot_TK, -1), columns_TK, *scalars


def map_slots(
    row_TK: torch.Tensor, *, columns_TK: torch.Tensor | None = None, counts_T: torch.Tensor | None = None,
    pad_offsets_E: torch.Tensor | None = None, probs: torch.Tensor | None = None, rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_of_slot [T,K] and slot_of_row [P] of a SlotMap with these rows, P being `rows`.

    A slot's row is the given one plus pad_offsets_E of its column. It is -1 where that is not in [0, P), where the column is out of
    range and, with probs, where the slot's probability is 0. Entries beyond a ragged map's counts may hold anything. slot_of_row is 0
    for rows that have a slot and PADDING for the others, because gathers and scatters read its sign only.
    """
    slots = row_TK.size(1)
    if columns_TK is not None:
        row_TK = torch.where((columns_TK >= 0) & (columns_TK < slots), row_TK, -1)
    row_TK, columns_TK, probs = dense_slots(
        row_TK, probs, columns_TK=columns_TK, counts_T=counts_T, rows=torch.iinfo(torch.int32).max)
    if pad_offsets_E is not None:
        row_TK = torch.where(row_TK >= 0, row_TK + pad_offsets_E.long()[columns_TK], -1)
    exists_TK = (row_TK >= 0) & (row_TK < rows)
    if probs is not None:
        exists_TK &= probs != 0
    row_TK = torch.where(exists_TK, row_TK, -1).int()
    # Slots without a row write after the last row, each column to an entry of its own: writes to a single entry would be serialised.
    target_TK = torch.where(exists_TK, row_TK, rows + torch.arange(slots, dtype=torch.int64, device=row_TK.device))
    slot_of_row_P = torch.full((rows + slots,), PADDING, dtype=torch.int32, device=row_TK.device)
    return row_TK, slot_of_row_P.scatter_(0, target_TK.flatten().long(), 0)[:rows].clone()


def clear_rows_without_slot(slot_of_row_P: torch.Tensor, rows_PF: torch.Tensor) -> None:
    """Write zeros to the rows of [P,F] whose entry in slot_of_row_P is negative; leave the others."""
    rows_PF.masked_fill_((slot_of_row_P < 0).unsqueeze(1), 0)


def weigh_rows(rows_PR: torch.Tensor, slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """rows[r] * weights[slot of r], rounded once, or rows[r] without weights; zeros for a row without a slot, and for a slot beyond the
    weights."""
    wide, slot_P = accumulate_dtype(rows_PR.dtype), slot_of_row_P.long()
    live_P = slot_P >= 0
    weighed_PR = rows_PR.to(wide)
    if weights_TK is not None:
        live_P = live_P & (slot_P < weights_TK.numel())
        weight_R = torch.nn.functional.pad(weights_TK.reshape(-1), (0, 1))  # the last is that of rows without a slot
        weighed_PR = weighed_PR * weight_R[torch.where(live_P, slot_P, -1)].unsqueeze(1).to(wide)
    return torch.where(live_P.unsqueeze(1), weighed_PR, 0).to(rows_PR.dtype)


def weights_in_columns(slot_of_row_P: torch.Tensor, weights_TK: torch.Tensor | None, dtype: torch.dtype, columns: int) -> torch.Tensor:
    """[P,columns] in `dtype`: the weight of each row's slot, what that loses in `dtype`, and zeros; without weights 1. Zeros alone for a
    row without a slot, and for a slot beyond the weights."""
    slot_P = slot_of_row_P.long()
    out_PC = torch.zeros(slot_P.size(0), columns, dtype=dtype, device=slot_P.device)
    if weights_TK is None:
        out_PC[:, 0] = slot_P >= 0
        return out_PC
    live_P = (slot_P >= 0) & (slot_P < weights_TK.numel())
    weight_R = torch.nn.functional.pad(weights_TK.reshape(-1), (0, 1))  # the last is that of rows without a slot
    weight_P = weight_R[torch.where(live_P, slot_P, -1)]
    out_PC[:, 0] = weight_P
    out_PC[:, 1] = weight_P - out_PC[:, 0]
    return out_PC


def add_dots(dots_PR: torch.Tensor, slots: SlotMap, sizes_E: torch.Tensor, dweights_TK: torch.Tensor) -> torch.Tensor:
    """dweights with dots[r,0] added for each slot's row r, rounded once. A slot whose row lies after the last expert's has none."""
    row_TK = slots.row_of_slot_TK.long()
    has_row_TK = (row_TK >= 0) & (row_TK < sizes_E.sum()) & (row_TK < dots_PR.size(0))
    dot_R = torch.nn.functional.pad(dots_PR[:, 0], (0, 1))  # the last is that of slots without a row
    return (dweights_TK + dot_R[torch.where(has_row_TK, row_TK, -1)]).to(dweights_TK.dtype)


def _dense(slots: SlotMap, *scalars, rows):
    return dense_slots(slots.row_of_slot_TK, *scalars, columns_TK=slots.columns_TK, counts_T=slots.counts_T, rows=rows)


def _slot_of_row(row_of_slot_TK, rows):
    """For each row the index of its slot in the flattened map, or -1. Rows are unique, so no two slots write to one row."""
    flat_R = row_of_slot_TK.reshape(-1).long()
    slot_P = torch.full((rows + 1,), -1, dtype=torch.int64, device=flat_R.device)
    slot_P[torch.where(flat_R >= 0, flat_R, rows)] = torch.arange(flat_R.numel(), dtype=torch.int64, device=flat_R.device)
    return slot_P[:rows]


def padded_gather(
    x_TH: torch.Tensor, slots: SlotMap, *, scale: torch.Tensor | None = None, probs: torch.Tensor | None = None,
    drop_zero_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[row] = scale * x[token of the row's slot], and zeros where a row has no slot. [T,H] -> [P,H].

    Without a scale rows are copied bit for bit. The second result is probs in row order [P] (empty without probs), zero where a row
    has no slot. With `drop_zero_probs` a row whose probability is 0 is zeros. An entry of the map outside its range counts as none.
    """
    rows = slots.num_rows
    row_of_slot_TK, _, scale, probs = _dense(slots, scale, probs, rows=rows)
    if rows == 0 or x_TH.size(0) == 0:
        return x_TH.new_zeros(rows, x_TH.size(1)), x_TH.new_zeros(0) if probs is None else probs.new_zeros(rows)
    slot_P = _slot_of_row(row_of_slot_TK, rows)
    live_P, slot_P = slot_P >= 0, slot_P.clamp(min=0)
    out_PH = x_TH.index_select(0, slot_P // row_of_slot_TK.size(1))
    if scale is not None:
        wide = accumulate_dtype(x_TH.dtype)
        out_PH = (out_PH.to(wide) * scale.reshape(-1)[slot_P, None].to(wide)).to(x_TH.dtype)
    probs_P = x_TH.new_zeros(0)
    keep_P = live_P
    if probs is not None:
        probs_P = torch.where(live_P, probs.reshape(-1)[slot_P], 0)
        if drop_zero_probs:
            keep_P = live_P & (probs_P != 0)
    return torch.where(keep_P.unsqueeze(1), out_PH, torch.zeros((), dtype=out_PH.dtype, device=out_PH.device)), probs_P


def padded_scatter(y_PH: torch.Tensor, slots: SlotMap, *, weights: torch.Tensor | None = None) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * y[row of slot (t,j)], in slot order, rounded once. [P,H] -> [T,H].

    Without weights every routed slot counts once. A slot without a row adds nothing, whatever its weight.
    """
    wide = accumulate_dtype(y_PH.dtype)
    row_of_slot_TK, _, weights_TK = _dense(slots, weights, rows=y_PH.size(0))
    out_TH = torch.zeros(slots.num_tokens, y_PH.size(1), dtype=wide, device=y_PH.device)
    if y_PH.size(0) == 0:
        return out_TH.to(y_PH.dtype)
    for j in range(slots.top_k):
        row_T = row_of_slot_TK[:, j].long()
        term_TH = y_PH.index_select(0, row_T.clamp(min=0)).to(wide)
        if weights_TK is not None:
            term_TH = term_TH * weights_TK[:, j, None].to(wide)
        out_TH += torch.where((row_T >= 0).unsqueeze(1), term_TH, 0)
    return out_TH.to(y_PH.dtype)


def padded_scatter_backward(
    grad_TH: torch.Tensor, y_PH: torch.Tensor | None, slots: SlotMap, *, weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of padded_scatter: grad_y [P,H], and grad_weights in the shape of the weights.

    grad_y[row] = weight * grad[token], zero where a row has no slot; a slot's weight receives <grad[t], y[row]>, zero where it
    has no row. Without y or without weights the second is an empty tensor.
    """
    wide = accumulate_dtype(grad_TH.dtype)
    grad_y_PH, _ = padded_gather(grad_TH, slots, scale=weights)
    if y_PH is None or weights is None:
        return grad_y_PH, grad_TH.new_empty(0)
    row_of_slot_TK, columns_TK, _ = _dense(slots, weights, rows=y_PH.size(0))
    dots_TK = torch.zeros(row_of_slot_TK.shape, dtype=wide, device=grad_TH.device)
    if y_PH.size(0) > 0:
        for j in range(row_of_slot_TK.size(1)):
            row_T = row_of_slot_TK[:, j].long()
            dot_T = (grad_TH.to(wide) * y_PH.index_select(0, row_T.clamp(min=0)).to(wide)).sum(1)
            dots_TK[:, j] = torch.where(row_T >= 0, dot_T, 0)
    if columns_TK is not None:
        # Entries that are not in use are 0, and are added to column 0.
        dots_TK = torch.zeros(weights.shape, dtype=wide, device=weights.device).scatter_add(1, columns_TK, dots_TK)
    return grad_y_PH, dots_TK.to(weights.dtype)
