"""TransformerEngine's MoE permutation functions by name and signature, on gbmoe's operators; and a chunk sort that pads.

They are differentiable in rows and probabilities, sum in float32 (float64 for float64) in slot order and round once. Rows without a token
are zero, and so are their probabilities and gradients. Whatever the maps hold, no row outside the result is touched: a slot whose row
would lie after the last one is dropped. The values of sizes and indices are checked where they are on the CPU; on a device that
would need a host wait.

The host does not wait, except where a result's number of rows must be read from the device; the functions below say so.

Rows may be bfloat16, float16, float32 or float64; functions that only move rows also take float8_e4m3fn, float8_e5m2 and uint8
(a payload), which are moved as bytes and are not differentiable. Probabilities may have any of the first four dtypes with any rows, and
their gradients have the same dtype.

Shape suffixes: T tokens, E experts, K slots a token, M = 2 * E + 1, H hidden, P permuted rows, S chunks, G groups of chunks.

    routing_map  map_type 'mask': [T,E], a token goes to every expert whose entry is not 0;
                 any number of them, none included.
                 map_type 'index': ids [T,K]; -1 drops a slot. Rows are expert-major, inside
                 an expert in token order.
    row_id_map   of a mask: int32 [T,M], see mask_row_map. Of ids: int32 [K * T], entry
                 k * T + t is slot (t,k)'s row or -1.
                 Of a chunk sort: int32 [T], a token's row or -1.
"""

from __future__ import annotations

import operator
import warnings

import torch

from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.launch import availability, map_slots, permute
from gbmoe.ops.permute import FLOAT8, gather_slots, make_slot_map, scatter_slots
from gbmoe.slot_map import SlotMap

__all__ = ["mask_row_map", "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
           "moe_sort_chunks_and_pad_by_index_with_probs", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs",
           "moe_unpermute"]

_BYTES = (*FLOAT8, torch.uint8)
_IDS = (torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, *_IDS)


def mask_row_map(mask_TE: torch.Tensor) -> torch.Tensor:
    """Rows of a mask's tokens, int32 [T,2E+1], without padding and without a host wait.

    For a token that is routed to n experts, entries 0 .. n-1 are its rows in ascending order of the experts, entries E .. E+n-1 are
    those experts, and the last entry is n. The other entries are -1.
    """
    return _mask_rows(mask_TE, None, None)[0]


def _kernels_serve(mask_TE):
    return mask_TE.size(1) >= 1 and availability.sorts(mask_TE.device, mask_TE.size(1))


def _mask_rows_kernel(mask_TE, pad_offsets_E, rows):
    """(row_id_map [T,M], row_of_slot [T,E], slot_of_row [P]), P being `rows`; with None the last two are empty."""
    tokens, experts = mask_TE.shape
    if not _kernels_serve(mask_TE):
        map_TM = _mask_row_map_reference(mask_TE)
        if rows is None:
            return map_TM, map_TM.new_empty(0), map_TM.new_empty(0)
        row_TE, column_TE, count_T = _columns(map_TM)
        return map_TM, *map_slots(row_TE, columns_TK=column_TE, counts_T=count_T, pad_offsets_E=pad_offsets_E, rows=rows)

    def new(*shape):
        return torch.empty(shape, dtype=torch.int32, device=mask_TE.device)

    map_TM, slots = new(tokens, 2 * experts + 1), None if rows is None else (new(tokens, experts), new(rows))
    permute.mask_row_map(mask_TE, pad_offsets_E, map_TM, *(slots or (None, None)))
    return map_TM, *(slots or (new(0), new(0)))


def _mask_rows_fake(mask_TE, pad_offsets_E, rows):
    tokens, experts = mask_TE.shape
    shapes = ((tokens, 2 * experts + 1), *(((0,), (0,)) if rows is None else ((tokens, experts), (rows,))))
    return tuple(mask_TE.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _mask_row_map_reference(mask_TE):
    tokens, experts = mask_TE.shape
    mask_TE = mask_TE != 0
    count_E = mask_TE.sum(0)
    row_TE = mask_TE.cumsum(0) + (count_E.cumsum(0) - count_E - 1)
    place_TE = mask_TE.cumsum(1) - 1
    map_TM = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32, device=mask_TE.device)
    # Pairs that are not routed write to the last entry, which the count overwrites.
    map_TM.scatter_(1, torch.where(mask_TE, place_TE, 2 * experts), row_TE.int())
    expert_E = torch.arange(experts, dtype=torch.int32, device=mask_TE.device)
    map_TM.scatter_(1, torch.where(mask_TE, place_TE + experts, 2 * experts), expert_E.expand(tokens, experts))
    map_TM[:, -1] = mask_TE.sum(1)
    return map_TM


_mask_rows = define("mask_rows(Tensor mask, Tensor? pad_offsets, SymInt? rows) -> (Tensor, Tensor, Tensor)",
                    reference=_mask_rows_kernel, fake=_mask_rows_fake)


# ----------------------------------------------------------------------------------------------------------------- permute


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int | None = -1, max_token_num: int = -1, map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy each token's row to its experts' rows: (out [P,H], row_id_map).

    Args:
        inp: [T,H].
        routing_map: [T,E] or [T,K] as `map_type` says: bool or integer, int32 or int64; on inp's device.
        num_out_tokens: P. Rows after the routed ones are zero; slots whose rows are not below P are dropped. With a mask, -1
            means the number of routed slots, for which the host waits once; with ids, -1 and 0 mean T * K.
        max_token_num: accepted without effect; nothing here keeps a workspace.
        map_type: 'mask' or 'index'.
    """
    name = "moe_permute"
    _check_map_type(name, map_type)
    if map_type == "mask":
        return _permute_mask(name, inp, None, routing_map, num_out_tokens)[::2]
    _check_rows(name, inp, FLOATING + _BYTES)
    require_tensor(routing_map, name, "routing_map", rank=2, dtypes=_IDS, device=inp.device)
    require(routing_map.size(0) == inp.size(0), name, "routing_map", f"{inp.size(0)} tokens, as in inp", routing_map.size(0))
    id_R = routing_map.reshape(-1)
    rows = _row_count(name, num_out_tokens)
    rows = rows if rows > 0 else id_R.numel()
    dropped_R = id_R < 0
    order_R = torch.argsort(torch.where(dropped_R, torch.iinfo(id_R.dtype).max, id_R), stable=True)
    row_R = torch.empty_like(id_R, dtype=torch.int32)
    row_R.scatter_(0, order_R, torch.arange(id_R.numel(), dtype=torch.int32, device=inp.device))
    slots = make_slot_map(torch.where(dropped_R, -1, row_R).view(routing_map.shape), rows=rows)
    out_PH, _ = _move(inp, slots)
    return out_PH, slots.row_of_slot_TK.t().reshape(-1)


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """moe_permute of a mask with its probabilities: (out [P,H], permuted_probs [P], row_id_map [T,M]).

    Args:
        inp, routing_map, num_out_tokens: as in moe_permute with a mask.
        probs: [T,E], on inp's device. A routed slot whose probability is exactly 0 gets a zero row, and gives inp no gradient;
            entries that are not routed are never read and get zero gradients.
    """
    return _permute_mask("moe_permute_with_probs", inp, probs, routing_map, num_out_tokens)


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, tokens_per_expert: torch.Tensor, align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """moe_permute_with_probs with each expert's rows padded with zeros to a multiple of `align_size`, in one pass.

    Args:
        inp, probs, routing_map: as in moe_permute_with_probs.
        tokens_per_expert: int32 or int64 [E], the sums of the mask's columns. On the CPU there is no host wait; on a device
            there is one, to read the number of the result's rows. Only on the CPU is it compared with the mask.
        align_size: 16, 32, 128, 256 or any other positive number; 0 does not pad.

    Returns:
        out [P,H]; permuted_probs [P]; row_id_map int32 [T,M], whose rows do not count padding; pad_offsets int64 [E], which
        moe_unpermute adds to an expert's rows, or None where nothing was padded; and target_tokens_per_expert int64 [E], the padded
        counts, whose sum is P. All on inp's device.
    """
    name = "moe_permute_and_pad_with_probs"
    _check_permute(name, inp, probs, routing_map)
    experts = routing_map.size(1)
    require_tensor(tokens_per_expert, name, "tokens_per_expert", rank=1, dtypes=_IDS)
    _check_shape(name, "tokens_per_expert", tokens_per_expert, (experts,))
    _check_align(name, align_size)
    count_E = tokens_per_expert.to("cpu", torch.int64)
    wrong = ((count_E < 0) | (count_E > inp.size(0))).nonzero().flatten()
    require(not wrong.numel(), name, "tokens_per_expert", lambda: f"0 to {inp.size(0)}, the number of tokens, for every expert",
            count_E[wrong].tolist())
    if inp.device.type == "cpu":
        routed_E = (routing_map != 0).sum(0)
        require(torch.equal(count_E, routed_E), name, "tokens_per_expert", f"the mask's {routed_E.tolist()}", count_E.tolist())
    target_E, pad_offsets_E = _padded(count_E, align_size)
    rows = int(target_E.sum())
    padded = rows != int(count_E.sum())
    target_E, pad_offsets_E = torch.stack((target_E, pad_offsets_E)).to(inp.device, non_blocking=True)
    pad_offsets_E = pad_offsets_E if padded else None
    row_id_map_TM, slots = _permutation_of_mask(routing_map, pad_offsets_E, rows)
    out_PH, probs_P = _move(inp, slots, probs)
    return out_PH, probs_P, row_id_map_TM, pad_offsets_E, target_E


def moe_unpermute(
    inp: torch.Tensor, row_id_map: torch.Tensor, merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None, map_type: str = "mask", probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's rows, weighted by merging_probs, back to token order: [P,H] to [T,H].

    Args:
        inp: [P,H], bfloat16, float16, float32 or float64. Rows that no slot names are not read and get zero gradients.
        row_id_map: the map that the permutation with the same map_type returned. With 'index' it may be a chunk sort's, which is
            then undone.
        merging_probs: [T,E] for a mask's map, [T,K] for that of ids; None gives every slot the weight one. Entries that are not routed
            are never read and get zero gradients.
        restore_shape: (T,H). It is needed for a map of ids without merging_probs, to know which K slots are summed: without both, each
            of the map's K * T entries is a token of its own, as in TransformerEngine.
        map_type: 'mask' or 'index'.
        probs: the former name of merging_probs, deprecated.
        pad_offsets: int32 or int64 [E], as moe_permute_and_pad_with_probs returned it; None where nothing was padded. Only with masks.
    """
    name = "moe_unpermute"
    _check_map_type(name, map_type)
    _check_rows(name, inp, FLOATING)
    if probs is not None:
        require(merging_probs is None, name, "probs", "None together with merging_probs", "both")
        warnings.warn("moe_unpermute: probs is deprecated, use merging_probs", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    map_rank = 2 if map_type == "mask" else 1
    require_tensor(row_id_map, name, "row_id_map", rank=map_rank, dtypes=(torch.int32,), device=inp.device)
    if merging_probs is not None:
        require_tensor(merging_probs, name, "merging_probs", rank=2, dtypes=FLOATING, device=inp.device)
    if map_type == "mask":
        tokens, experts = row_id_map.size(0), row_id_map.size(1) // 2
        require(row_id_map.size(1) % 2 == 1 and experts >= 1, name, "row_id_map", "2 * E + 1 columns", row_id_map.size(1))
        if merging_probs is not None:
            _check_shape(name, "merging_probs", merging_probs, (tokens, experts))
        if pad_offsets is not None:
            require_tensor(pad_offsets, name, "pad_offsets", rank=1, dtypes=_IDS, device=inp.device)
            _check_shape(name, "pad_offsets", pad_offsets, (experts,))
        slots = _slots_of_mask(row_id_map.contiguous(), pad_offsets, inp.size(0))
    else:
        require(pad_offsets is None, name, "pad_offsets", "None with map_type 'index'", "a tensor")
        entries = row_id_map.numel()
        if merging_probs is not None:
            tokens, top_k = merging_probs.shape
            require(tokens * top_k == entries, name, "merging_probs", f"{entries} entries, as in row_id_map", tokens * top_k)
        elif restore_shape is not None:
            tokens = restore_shape[0]
            top_k = entries // max(tokens, 1)
            require(tokens * top_k == entries, name, "restore_shape", f"a divisor of row_id_map's {entries} entries", tokens)
        else:
            tokens, top_k = entries, 1
        slots = make_slot_map(row_id_map.view(top_k, tokens).t().contiguous(), rows=inp.size(0))
    if restore_shape is not None:
        expected = (tokens, inp.size(1))
        require(tuple(restore_shape) == expected, name, "restore_shape", f"{expected}", tuple(restore_shape))
    return scatter_slots(inp, slots, weights=merging_probs)


def _permute_mask(name, inp, probs, routing_map, num_out_tokens):
    _check_permute(name, inp, probs, routing_map)
    rows = _row_count(name, num_out_tokens)
    if rows < 0:
        row_id_map_TM = mask_row_map(routing_map)
        slots = _slots_of_mask(row_id_map_TM, None, int(row_id_map_TM[:, -1].sum()))
    else:
        row_id_map_TM, slots = _permutation_of_mask(routing_map, None, rows)
    out_PH, probs_P = _move(inp, slots, probs)
    return out_PH, probs_P, row_id_map_TM


def _columns(row_id_map_TM):
    """The parts of a mask's map: rows [T,E], experts [T,E] and counts [T]."""
    experts = row_id_map_TM.size(1) // 2
    return row_id_map_TM[:, :experts], row_id_map_TM[:, experts:-1], row_id_map_TM[:, -1]


def _permutation_of_mask(mask_TE, pad_offsets_E, rows) -> tuple[torch.Tensor, SlotMap]:
    """A mask's map, and the same as a SlotMap, made by one operator."""
    row_id_map_TM, row_of_slot_TE, slot_of_row_P = _mask_rows(mask_TE, pad_offsets_E, rows)
    _, column_TE, count_T = _columns(row_id_map_TM)
    return row_id_map_TM, SlotMap(row_of_slot_TK=row_of_slot_TE, slot_of_row_P=slot_of_row_P, columns_TK=column_TE, counts_T=count_T)


def _slots_of_mask(row_id_map_TM, pad_offsets_E, rows) -> SlotMap:
    row_TE, column_TE, count_T = _columns(row_id_map_TM)
    return make_slot_map(row_TE, rows=rows, columns_TK=column_TE, counts_T=count_T, pad_offsets_E=pad_offsets_E)


def _move(inp, slots: SlotMap, probs=None):
    """(out [P,H], probs [P] or None). With a mask, a probability of 0 makes its row zeros."""
    of_mask = slots.columns_TK is not None
    out_PH, probs_P = gather_slots(inp, slots, probs=probs, drop_zero_probs=of_mask and probs is not None)
    return out_PH, None if probs is None else probs_P


def _padded(counts, align):
    """(counts rounded up to multiples of `align`, the padding in front of each)."""
    target = counts if align == 0 else (counts + (align - 1)) // align * align
    padding = target - counts
    return target, padding.cumsum(0) - padding


# -------------------------------------------------------------------------------------------------------------- chunk sort


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Divide rows into chunks and join these in another order: [T,H] to [T,H], where the i-th chunk of the result is sorted_index[i].

    Args:
        inp: [T,H].
        split_sizes: int32 or int64 [S], rows of each chunk, in order. Rows of inp after their sum stay where they are.
        sorted_index: int32 or int64 [S], a permutation of the chunks. Both on the CPU or on inp's device; no host wait.

    Raises:
        ValueError: on the CPU, for a negative size, sizes whose sum is more than T, or an index that is not a permutation. On a
            device this is not checked, and rows may be lost or hold anything.
    """
    return _sort_chunks("moe_sort_chunks_by_index", inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_sort_chunks_by_index of rows and their probabilities [T]: (out [T,H], permuted_probs [T])."""
    name = "moe_sort_chunks_by_index_with_probs"
    require_tensor(probs, name, "probs")
    return _sort_chunks(name, inp, probs, split_sizes, sorted_index)[:2]


def moe_sort_chunks_and_pad_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor | None, split_sizes: torch.Tensor, sorted_index: torch.Tensor, align_size: int,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Sort chunks and pad the rows of each expert, in one pass. TransformerEngine has no such function; its callers pad separately.

    After an all-to-all a rank holds one chunk for each pair of sender and local expert. Sorted by expert, every S / num_groups
    consecutive chunks belong to one local expert; these groups are padded with zeros to multiples of `align_size`.
    `moe_unpermute(out, row_id_map, map_type='index')` removes the padding and restores the order of inp.

    Args:
        inp: [T,H]. Rows after the sum of split_sizes are left out: they get row -1 and no gradient.
        probs: [T], on inp's device, or None.
        split_sizes, sorted_index: as in moe_sort_chunks_by_index. Where both are on the CPU there is no host wait, otherwise
            one, for the result's row count.
        align_size: a positive number; 0 does not pad.
        num_groups: G, the number of local experts; divides S.

    Returns:
        out [P,H], permuted_probs [P] or None, row_id_map int32 [T] (padding included) and target_rows_per_group int64 [G], whose sum
        is P, on inp's device.
    """
    name = "moe_sort_chunks_and_pad_by_index_with_probs"
    require(isinstance(num_groups, int) and num_groups >= 1, name, "num_groups", "an int of at least 1", num_groups)
    _check_align(name, align_size)
    return _sort_chunks(name, inp, probs, split_sizes, sorted_index, num_groups, align_size)


def _sort_chunks(name, inp, probs, split_sizes, sorted_index, groups=None, align=0):
    """The chunk sorts; with `groups` padded. (out, probs [P] or None, row_id_map [T], rows of each group or None)."""
    _check_rows(name, inp, FLOATING + _BYTES)
    if probs is not None:
        require_tensor(probs, name, "probs", rank=1, dtypes=FLOATING, device=inp.device)
        _check_shape(name, "probs", probs, (inp.size(0),))
    for argument, tensor in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        require_tensor(tensor, name, argument, rank=1, dtypes=_IDS)
        devices = {"cpu", str(inp.device)}
        require(str(tensor.device) in devices, name, argument, f"device {' or '.join(sorted(devices))}", tensor.device)
    chunks = split_sizes.numel()
    require(chunks >= 1, name, "split_sizes", "at least one chunk", 0)
    require(sorted_index.numel() == chunks, name, "sorted_index", f"{chunks} chunks, as in split_sizes", sorted_index.numel())
    require(groups is None or chunks % groups == 0, name, "num_groups", f"a divisor of the {chunks} chunks", groups)

    row_T, target_G = _chunk_rows(inp.detach(), split_sizes, sorted_index, groups or 0, align, name)
    rows = inp.size(0)
    if groups is None:
        target_G = None
    else:
        rows, target_G = int(target_G.sum()), target_G.to(inp.device, non_blocking=True)
        require(0 <= rows < 2**31, name, "split_sizes", "sizes whose padded sum is at least 0 and below 2**31", rows)
    slots = make_slot_map(row_T.unsqueeze(1), rows=rows)
    out_PH, probs_P = _move(inp, slots, None if probs is None else probs.unsqueeze(1))
    return out_PH, probs_P, slots.row_of_slot_TK.squeeze(1), target_G


_NOWHERE = -2**31  # the first row of a chunk that no index names: all of its rows are then negative


def _chunk_rows_kernel(inp, split_sizes, sorted_index, groups, align, name):
    """(the new row of each row of inp, int32 [T]; the rows of each group with padding, int64 [G], on the device of the tables)."""
    _check_chunks(name, inp.size(0), split_sizes, sorted_index)
    # Tables of S entries are made on the CPU if both arguments are there.
    place = split_sizes.device if split_sizes.device == sorted_index.device else inp.device
    size_S, index_S = split_sizes.to(place, torch.int64), sorted_index.to(place, torch.int64)
    chunks = size_S.numel()
    if place.type != "cpu":
        index_S = index_S.clamp(0, chunks - 1)  # an index out of range would destroy the process's CUDA context
    sorted_S = size_S[index_S]
    start_S, target_G = sorted_S.cumsum(0) - sorted_S, size_S.new_empty(groups)
    if groups:
        target_G, pad_offsets_G = _padded(sorted_S.view(groups, -1).sum(1), align)
        start_S = (start_S.view(groups, -1) + pad_offsets_G.unsqueeze(1)).flatten()
    end_S = size_S.cumsum(0)
    shift_S = torch.full_like(start_S, _NOWHERE).scatter_(0, index_S, start_S) - (end_S - size_S)
    end_S, shift_S = torch.stack((end_S, shift_S)).to(inp.device, non_blocking=True)

    token_T = torch.arange(inp.size(0), dtype=torch.int64, device=inp.device)
    chunk_T = torch.searchsorted(end_S, token_T, right=True)
    row_T = token_T + shift_S[chunk_T.clamp(max=chunks - 1)]
    return torch.where(chunk_T < chunks, row_T, -1 if groups else token_T).int(), target_G


def _check_chunks(name, rows, split_sizes, sorted_index):
    # Called inside the operator, which has the values, so that a compiled graph checks them too.
    if split_sizes.device.type == "cpu":
        low, high = split_sizes.aminmax()
        require(int(low) >= 0, name, "split_sizes", "no negative size", int(low))
        # The largest size is compared too, because the sum may overflow.
        total = max(int(high), int(split_sizes.sum()))
        require(total <= rows, name, "split_sizes", lambda: f"a sum of at most inp.size(0) == {rows}", total)
    if sorted_index.device.type == "cpu":
        chunks = sorted_index.numel()
        require(torch.equal(sorted_index.long().sort().values, torch.arange(chunks, dtype=torch.int64, device="cpu")), name, "sorted_index",
                lambda: f"each of 0 to {chunks - 1} once", sorted_index.tolist())


def _chunk_rows_fake(inp, split_sizes, sorted_index, groups, align, name):
    place = split_sizes if split_sizes.device == sorted_index.device else inp
    return inp.new_empty(inp.size(0), dtype=torch.int32), place.new_empty(groups, dtype=torch.int64)


_chunk_rows = define(
    "chunk_rows(Tensor inp, Tensor split_sizes, Tensor sorted_index, int groups, int align, str name) -> (Tensor, Tensor)",
    reference=_chunk_rows_kernel, fake=_chunk_rows_fake,
    waits=lambda inp, split_sizes, sorted_index, *_: "cpu" in (split_sizes.device.type, sorted_index.device.type),
)


# ------------------------------------------------------------------------------------------------------------------ checks


def _check_rows(name, inp, dtypes) -> None:
    require_tensor(inp, name, "inp", rank=2, dtypes=dtypes)


def _check_shape(name, argument, tensor, expected) -> None:
    require(tuple(tensor.shape) == expected, name, argument, f"shape {list(expected)}", list(tensor.shape))


def _check_permute(name, inp, probs, routing_map) -> None:
    _check_rows(name, inp, FLOATING + _BYTES)
    require_tensor(routing_map, name, "routing_map", rank=2, dtypes=_MASKS, device=inp.device)
    require(routing_map.size(0) == inp.size(0) and routing_map.size(1) >= 1, name, "routing_map",
            f"shape [{inp.size(0)}, E], E at least 1", list(routing_map.shape))
    if name != "moe_permute":
        require_tensor(probs, name, "probs", rank=2, dtypes=FLOATING, device=inp.device)
        _check_shape(name, "probs", probs, tuple(routing_map.shape))


def _check_map_type(name, map_type) -> None:
    require(map_type in ("mask", "index"), name, "map_type", "'mask' or 'index'", repr(map_type))


def _row_count(name, num_out_tokens) -> int:
    """num_out_tokens as an int. Callers pass integers, 0-d tensors (which are read back from a device) and None, which means -1."""
    rows = -1 if num_out_tokens is None else operator.index(num_out_tokens)
    require(rows >= -1, name, "num_out_tokens", "at least -1", rows)
    return rows


def _check_align(name, align_size) -> None:
    require(isinstance(align_size, int) and align_size >= 0, name, "align_size", "an int of at least 0", align_size)
