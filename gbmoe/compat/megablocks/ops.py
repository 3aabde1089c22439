"""megablocks.ops by name and signature, on gbmoe's operators: CPU and CUDA, every floating dtype, deterministic.

All arguments mean what they do in MegaBlocks, and padded_gather has the same one host wait. This differs: sums are kept in
float32 and rounded once, gradients have the dtype of their input, rows that nothing writes are zero, and wrong arguments raise
TypeError or ValueError with the argument, what was expected and what came. The values of indices and bins are checked on the CPU. On a
device that would need a host wait; entries outside their range then have no row.

Shape suffixes: T tokens, K slots a token (top_k), R = T * K slots, E experts (bins), H hidden, P padded rows, C rows of a
bin with a capacity, B rows of a batch.

    indices_R      the slots in the order of their rows, each once; slot t * K + j is token
                   t's j-th choice
    bin_ids_R      the expert of each of these slots, ascending; slots with ids outside [0, E)
                   come last and have no row
    bins_E         inclusive sums of the experts' counts (for a single expert it may be 0-d,
                   as inclusive_cumsum returns it)
    padded_bins_E  the same with every count rounded up
"""

from __future__ import annotations

import torch

from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe._define_operator import define
from gbmoe.ops.permute import FLOAT8, gather_slots, scatter_slots
from gbmoe.plain.plain_plan import PADDING
from gbmoe.slot_map import SlotMap

__all__ = ["binned_gather", "binned_scatter", "exclusive_cumsum", "gather", "histogram", "inclusive_cumsum", "padded_gather",
           "padded_scatter", "repeat", "replicate", "round_up", "scatter", "sort", "sum", "topology"]

_BITS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}
_INTEGERS = tuple(_BITS)


# -------------------------------------------------------------------------------------------------------------- permute


def gather(
    x: torch.Tensor, indices: torch.Tensor, bin_ids: torch.Tensor, bins: torch.Tensor, top_k: int,
) -> torch.Tensor:
    """Copy tokens to their slots' rows, expert-major and without padding. Mirrors megablocks.ops.gather.

    Args:
        x: [T,H], bfloat16, float16, float32 or float64 (differentiable), float8_e4m3fn or float8_e5m2 (not).
        indices, bin_ids: int [R], R = T * top_k, on x's device.
        bins: int [E], on x's device.
        top_k: K.

    Returns:
        [R,H], dtype of x. No host wait.
    """
    _check_slots("gather", x, indices, top_k, dtypes=FLOATING + FLOAT8, bin_ids=bin_ids, bins=bins)
    slots = slot_map_of_bins("gather", indices, bin_ids=bin_ids, bins=bins, padded_bins=bins, top_k=top_k, rows=indices.numel())
    return gather_slots(x, slots)[0]


def padded_gather(
    x: torch.Tensor, indices: torch.Tensor, bin_ids: torch.Tensor, bins: torch.Tensor, padded_bins: torch.Tensor, top_k: int,
) -> torch.Tensor:
    """Copy tokens to their slots' rows, each expert's rows padded with zeros. Mirrors megablocks.ops.padded_gather.

    Args:
        x, indices, bin_ids, bins, top_k: as in gather.
        padded_bins: int [E], on x's device.

    Returns:
        [P,H], dtype of x, P = padded_bins[-1]: reading that number is the one host wait.
    """
    _check_slots("padded_gather", x, indices, top_k, dtypes=FLOATING + FLOAT8, bin_ids=bin_ids, bins=bins,
                 padded_bins=padded_bins)
    slots = slot_map_of_bins("padded_gather", indices, bin_ids=bin_ids, bins=bins, padded_bins=padded_bins, top_k=top_k,
                             rows=padded_rows(padded_bins, "padded_gather"))
    return gather_slots(x, slots)[0]


def scatter(
    x: torch.Tensor, indices: torch.Tensor, bin_ids: torch.Tensor, weights: torch.Tensor | None, bins: torch.Tensor, top_k: int,
) -> torch.Tensor:
    """Sum each token's rows, weighted, where rows have no padding. Mirrors megablocks.ops.scatter."""
    _check_slots("scatter", x, indices, top_k, bin_ids=bin_ids, bins=bins, weights=weights)
    slots = slot_map_of_bins("scatter", indices, bin_ids=bin_ids, bins=bins, padded_bins=bins, top_k=top_k, rows=x.size(0))
    return _scatter_rows(x, slots, weights)


def padded_scatter(
    x: torch.Tensor, indices: torch.Tensor, bin_ids: torch.Tensor, weights: torch.Tensor | None, bins: torch.Tensor,
    padded_bins: torch.Tensor, top_k: int,
) -> torch.Tensor:
    """Sum each token's rows, weighted, back to token order. Mirrors megablocks.ops.padded_scatter.

    Differentiable in x and weights, without a host wait in either direction. Padding rows are never read and get zero
    gradients.

    Args:
        x: [P,H], bfloat16, float16, float32 or float64.
        indices, bin_ids: int [R], on x's device.
        weights: [R] in slot order, any of those dtypes (float32 with bfloat16 rows is allowed); None gives every slot the weight one.
        bins, padded_bins: int [E], on x's device.
        top_k: K.

    Returns:
        [T,H], T = R // top_k, dtype of x.
    """
    _check_slots("padded_scatter", x, indices, top_k, bin_ids=bin_ids, bins=bins, padded_bins=padded_bins, weights=weights)
    slots = slot_map_of_bins("padded_scatter", indices, bin_ids=bin_ids, bins=bins, padded_bins=padded_bins, top_k=top_k,
                             rows=x.size(0))
    return _scatter_rows(x, slots, weights)


def binned_gather(
    x: torch.Tensor, indices: torch.Tensor, bins: torch.Tensor, bin_size: int, top_k: int,
) -> torch.Tensor:
    """Copy tokens to bins of equal size; slots beyond an expert's capacity are dropped. Mirrors megablocks.ops.binned_gather.

    Args:
        x, indices, bins, top_k: as in gather.
        bin_size: C, rows of each expert.

    Returns:
        [E,C,H], dtype of x, zero rows where an expert has fewer slots. Dropped slots give no gradient. No host wait.
    """
    _check_slots("binned_gather", x, indices, top_k, dtypes=FLOATING + FLOAT8, bins=bins)
    require(isinstance(bin_size, int) and bin_size >= 0, "binned_gather", "bin_size", "an int of at least 0", bin_size)
    out_PH, _ = gather_slots(x, slot_map_of_capacity("binned_gather", indices, bins=bins, capacity=bin_size, top_k=top_k))
    return out_PH.view(bins.numel(), bin_size, x.size(1))


def binned_scatter(
    x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None, bins: torch.Tensor, top_k: int,
) -> torch.Tensor:
    """Sum each token's rows, weighted, from bins of equal size. Mirrors megablocks.ops.binned_scatter.

    Args:
        x: [E,C,H], bfloat16, float16, float32 or float64.
        indices, weights, bins, top_k: as in padded_scatter.

    Returns:
        [T,H], dtype of x. A dropped slot adds nothing and its weight's gradient is zero. No host wait.
    """
    _check_slots("binned_scatter", x, indices, top_k, rank=3, bins=bins, weights=weights)
    require(x.size(0) == bins.numel(), "binned_scatter", "x", f"{bins.numel()} bins, as in bins", x.size(0))
    slots = slot_map_of_capacity("binned_scatter", indices, bins=bins, capacity=x.size(1), top_k=top_k)
    return _scatter_rows(x.flatten(0, 1), slots, weights)


def _check_slots(operator, x, indices, top_k, *, rank=2, dtypes=FLOATING, weights=None, bin_ids=None, **bins) -> None:
    require_tensor(x, operator, "x", rank=rank, dtypes=dtypes)
    require_tensor(indices, operator, "indices", rank=1, dtypes=_INTEGERS, device=x.device)
    require(isinstance(top_k, int) and top_k >= 1, operator, "top_k", "an int of at least 1", top_k)
    slots = indices.numel()
    if operator.endswith("gather"):
        require(slots == x.size(0) * top_k, operator, "indices", f"x.size(0) * top_k == {x.size(0) * top_k} entries", slots)
    else:
        require(slots % top_k == 0, operator, "indices", f"a multiple of top_k == {top_k} entries", slots)
    if bin_ids is not None:
        require_tensor(bin_ids, operator, "bin_ids", rank=1, dtypes=_INTEGERS, device=x.device)
        require(bin_ids.numel() == slots, operator, "bin_ids", f"{slots} entries, as in indices", bin_ids.numel())
    for argument, tensor in bins.items():
        require_tensor(tensor, operator, argument, rank=(0, 1), dtypes=_INTEGERS, device=x.device)
        require(tensor.numel() >= 1, operator, argument, "at least one bin", 0)
        require(tensor.numel() == bins["bins"].numel(), operator, argument, f"{bins['bins'].numel()} entries, as in bins",
                tensor.numel())
    if weights is not None:
        require_tensor(weights, operator, "weights", rank=1, dtypes=FLOATING, device=x.device)
        require(weights.numel() == slots, operator, "weights", f"{slots} entries, one a slot", weights.numel())


def _scatter_rows(x_PH, slots: SlotMap, weights_R):
    return scatter_slots(x_PH, slots, weights=None if weights_R is None else weights_R.view(slots.row_of_slot_TK.shape))


def padded_rows(padded_bins_E: torch.Tensor, operator: str) -> int:
    """The number of rows, which is the last entry of padded_bins. Waits for the device."""
    rows = int(padded_bins_E.reshape(-1)[-1])
    require(0 <= rows < 2**31, operator, "padded_bins", "a last entry of at least 0 and below 2**31", rows)
    return rows


def _check_bins(operator: str, argument: str, bins_E: torch.Tensor, most: int, what: str) -> None:
    """Raise if bins on the CPU do not ascend from at least 0 to at most `most`; `what` says what that number is."""
    if bins_E.device.type == "cpu" and bins_E.numel() > 0:
        bins_E = bins_E.reshape(-1)
        ascends = bool((bins_E[1:] >= bins_E[:-1]).all())
        require(ascends and int(bins_E[0]) >= 0 and int(bins_E[-1]) <= most, operator, argument,
                lambda: f"ascending entries from at least 0 to at most {most}, {what}", bins_E.tolist())


def _check_slots_once(operator: str, indices_R: torch.Tensor) -> None:
    if indices_R.device.type == "cpu" and indices_R.numel() > 0:
        slots = indices_R.numel()
        low, high = map(int, indices_R.aminmax())
        require(low >= 0 and high < slots, operator, "indices", lambda: f"slots in [0, {slots})", f"slots from {low} to {high}")
        count_R = torch.bincount(indices_R, minlength=slots)
        most = int(count_R.argmax())
        require(int(count_R[most]) == 1, operator, "indices", "every slot once", f"slot {most} {int(count_R[most])} times")


def _check_bins_fit(operator: str, bin_ids_R: torch.Tensor, bins_E: torch.Tensor, padded_bins_E: torch.Tensor) -> None:
    """Raise if, on the CPU, padded_bins have too little room for bins, or bin_ids differ from bins."""
    if bins_E.device.type == "cpu":
        bins_E, padded_bins_E, bin_R = bins_E.reshape(-1).long(), padded_bins_E.reshape(-1).long(), bin_ids_R.long()
        none = bins_E.numel()
        count_E, padded_E = (t.diff(prepend=t.new_zeros(1)) for t in (bins_E, padded_bins_E))
        require(bool((padded_E >= count_E).all()), operator, "padded_bins", lambda: f"room for the bins' {count_E.tolist()} rows",
                padded_E.tolist())
        expected_R = torch.searchsorted(bins_E, torch.arange(bin_R.numel(), dtype=torch.int64, device=bin_R.device), right=True)
        wrong = (torch.where((bin_R >= 0) & (bin_R < none), bin_R, none) != expected_R).nonzero().flatten()
        if wrong.numel():
            entry = int(wrong[0])
            expected = int(expected_R[entry])
            require(False, operator, "bin_ids", f"{'none' if expected == none else expected} at entry {entry}, as bins have it",
                    int(bin_R[entry]))


def _starts(bins_E):
    """First entry of each bin, int64."""
    bins_E = bins_E.reshape(-1).long()
    return torch.cat((bins_E.new_zeros(1), bins_E[:-1]))


def _binned_maps_kernel(indices_R, bin_ids_R, bins_E, padded_bins_E, top_k, rows, operator):
    _check_slots_once(operator, indices_R)
    _check_bins(operator, "bins", bins_E, indices_R.numel(), "the number of slots")
    _check_bins(operator, "padded_bins" if operator.startswith("padded") else "bins", padded_bins_E, rows, "the number of rows")
    _check_bins_fit(operator, bin_ids_R, bins_E, padded_bins_E)
    shift_E = _starts(padded_bins_E) - _starts(bins_E)
    bin_R = bin_ids_R.long()
    entry_R = torch.arange(bin_R.numel(), dtype=torch.int64, device=bin_R.device)
    row_R = entry_R + shift_E[bin_R.clamp(0, shift_E.numel() - 1)]
    return _maps(indices_R, entry_R, row_R, (bin_R >= 0) & (bin_R < shift_E.numel()), top_k, rows)


def _binned_maps_fake(indices_R, bin_ids_R, bins_E, padded_bins_E, top_k, rows, operator):
    return _maps_fake(indices_R, top_k, rows)


# Values are checked inside the operators, which have them, so that a compiled graph checks them too.
_binned_maps = define(
    "binned_maps(Tensor indices, Tensor bin_ids, Tensor bins, Tensor padded_bins, int top_k, SymInt rows, str operator)"
    " -> (Tensor, Tensor)", reference=_binned_maps_kernel, fake=_binned_maps_fake,
)


def slot_map_of_bins(
    operator: str, indices_R: torch.Tensor, *, bin_ids: torch.Tensor, bins: torch.Tensor, padded_bins: torch.Tensor, top_k: int,
    rows: int,
) -> SlotMap:
    """The dense map of MegaBlocks' sorted slots: a slot's row is the first row of its padded bin plus its position in the bin.

    Args:
        operator: the operator whose arguments these are, for errors.
        indices_R, bin_ids, bins, padded_bins, top_k: as in padded_gather; without padding, padded_bins is bins.
        rows: P. A slot whose row would lie after the last one has no row.

    Returns:
        the map of R // top_k tokens, int32, on the device of the indices. No host wait.

    Raises:
        ValueError: on the CPU, for indices that do not name every slot once, and for bins that do not ascend or do not fit each other.
            On a device this is not checked; slots that then have no position get no row, and no row outside the map is ever named.
    """
    row_of_slot_TK, slot_of_row_P = _binned_maps(indices_R, bin_ids, bins, padded_bins, top_k, rows, operator)
    return SlotMap(row_of_slot_TK=row_of_slot_TK, slot_of_row_P=slot_of_row_P)


def _capacity_maps_kernel(indices_R, bins_E, capacity, top_k, operator):
    _check_slots_once(operator, indices_R)
    _check_bins(operator, "bins", bins_E, indices_R.numel(), "the number of slots")
    starts_E, ends_E = _starts(bins_E), bins_E.reshape(-1).long()
    entry_R = torch.arange(indices_R.numel(), dtype=torch.int64, device=indices_R.device)
    bin_R = torch.searchsorted(ends_E, entry_R, right=True)
    place_R = entry_R - starts_E[bin_R.clamp(max=ends_E.numel() - 1)]
    in_a_bin_R = (bin_R < ends_E.numel()) & (place_R < capacity)
    return _maps(indices_R, entry_R, bin_R * capacity + place_R, in_a_bin_R, top_k, ends_E.numel() * capacity)


def _capacity_maps_fake(indices_R, bins_E, capacity, top_k, operator):
    return _maps_fake(indices_R, top_k, bins_E.numel() * capacity)


_capacity_maps = define(
    "capacity_maps(Tensor indices, Tensor bins, SymInt capacity, int top_k, str operator) -> (Tensor, Tensor)",
    reference=_capacity_maps_kernel, fake=_capacity_maps_fake,
)


def slot_map_of_capacity(operator: str, indices_R: torch.Tensor, *, bins: torch.Tensor, capacity: int, top_k: int) -> SlotMap:
    """The dense map of bins of equal size: a slot's row is its position in its bin; slots from position `capacity` on have no row.

    Args:
        operator: the operator whose arguments these are, for errors.
        indices_R, bins, top_k: as in gather.
        capacity: C, the rows of each bin.

    Returns:
        the map of R // top_k tokens and E * C rows, int32, on the device of the indices. No host wait.

    Raises:
        ValueError: as slot_map_of_bins.
    """
    row_of_slot_TK, slot_of_row_P = _capacity_maps(indices_R, bins, capacity, top_k, operator)
    return SlotMap(row_of_slot_TK=row_of_slot_TK, slot_of_row_P=slot_of_row_P)


def _maps(indices_R, entry_R, row_R, routed_R, top_k, rows):
    """Both directions of the map between slot indices[i] and row[i]. Whatever the tables hold, no row outside [0, rows) is named.

    slot_of_row is made from row_of_slot: if an index occurs twice, the row that the slot does not keep becomes padding.
    """
    slot_R = indices_R.long()
    if slot_R.device.type != "cpu":
        slot_R = slot_R.clamp(0, max(slot_R.numel() - 1, 0))  # an index out of range would destroy the process's CUDA context
    # Slots without a row all write to one spare row after the last one.
    row_R = torch.where(routed_R & (row_R >= 0) & (row_R < rows), row_R, rows)
    row_of_slot_R = torch.full_like(row_R, rows).scatter_(0, slot_R, row_R)
    slot_of_row = torch.full((rows + 1,), PADDING, dtype=torch.int64, device=row_R.device)
    slot_of_row.scatter_(0, row_of_slot_R, entry_R)
    row_of_slot_R = torch.where(row_of_slot_R < rows, row_of_slot_R, -1)
    return row_of_slot_R.view(slot_R.numel() // top_k, top_k).int(), slot_of_row[:rows].int()


def _maps_fake(indices_R, top_k, rows):
    return (indices_R.new_empty((indices_R.numel() // top_k, top_k), dtype=torch.int32),
            indices_R.new_empty((rows,), dtype=torch.int32))


# ------------------------------------------------------------------------------------------ sort, count, sum, replicate


def sort(x: torch.Tensor, end_bit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(sorted, indices) of x [R], both in x's dtype. Stable. Mirrors megablocks.ops.sort.

    Args:
        x: int16, int32 or int64 [R].
        end_bit: compare bits [0, end_bit) only; None, or all bits of the dtype, compares the signed values.
    """
    require_tensor(x, "sort", "x", rank=1, dtypes=_INTEGERS)
    bits = _BITS[x.dtype]
    require(x.numel() <= 1 << (bits - 1), "sort", "x", lambda: f"at most {1 << (bits - 1)} entries, whose indices are {x.dtype}",
            x.numel())
    require(end_bit is None or 0 <= end_bit <= bits, "sort", "end_bit", f"None or 0 to {bits} for {x.dtype}", end_bit)
    key = x if end_bit is None or end_bit == bits else x & ((1 << end_bit) - 1)
    indices = torch.sort(key, stable=True).indices
    return x[indices], indices.to(x.dtype)


def histogram(x: torch.Tensor, max_val: int) -> torch.Tensor:
    """How often each of 0 .. max_val - 1 occurs: int32 [max_val] of x [R], [B,max_val] of x [B,R]. Other values do not count.

    Mirrors megablocks.ops.histogram. x is int16, int32 or int64. No host wait, unlike torch.bincount.
    """
    require_tensor(x, "histogram", "x", rank=(1, 2), dtypes=_INTEGERS)
    bins = int(max_val)
    require(bins >= 0, "histogram", "max_val", "at least 0", max_val)
    bin_BR = torch.where((x >= 0) & (x < bins), x.long(), bins)
    counts = torch.zeros(*x.shape[:-1], bins + 1, dtype=torch.int32, device=x.device)
    # Sums of integers do not depend on their order.
    counts.scatter_add_(-1, bin_BR, torch.ones_like(bin_BR, dtype=torch.int32))
    return counts[..., :bins].contiguous()


def inclusive_cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums of all entries up to and including each one, in x's dtype. Mirrors megablocks.ops.inclusive_cumsum.

    Args:
        x: int16, int32 or int64, [R] or [B,R].
        dim: the last dimension; without effect for [R].

    Returns:
        A tensor with the shape of x, but 0-d for an x [1].
    """
    _check_cumsum("inclusive_cumsum", x, dim)
    out = x.cumsum(-1, dtype=x.dtype)
    return out.squeeze() if x.dim() == 1 else out


def exclusive_cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums of all entries before each one; otherwise like inclusive_cumsum. Mirrors megablocks.ops.exclusive_cumsum."""
    _check_cumsum("exclusive_cumsum", x, dim)
    out = x.cumsum(-1, dtype=x.dtype) - x
    return out.squeeze() if x.dim() == 1 else out


def _check_cumsum(operator, x, dim) -> None:
    require_tensor(x, operator, "x", rank=(1, 2), dtypes=_INTEGERS)
    require(x.dim() == 1 or dim in (1, -1), operator, "dim", "1, the last dimension", dim)


def _replicate_kernel(x_BE, bins_E, num_outputs):
    _check_bins("replicate", "bins", bins_E, num_outputs, "num_outputs")
    bin_N = torch.searchsorted(bins_E, torch.arange(num_outputs, dtype=torch.int64, device=x_BE.device), right=True)
    out_BN = x_BE.index_select(1, bin_N.clamp(max=bins_E.numel() - 1))
    return torch.where(bin_N < bins_E.numel(), out_BN, torch.zeros((), dtype=x_BE.dtype, device=x_BE.device))


def _replicate_setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


# No other operator of gbmoe copies one row to any number of rows, so this one has a gradient of its own.
_replicate = define(
    "replicate(Tensor x, Tensor bins, SymInt num_outputs) -> Tensor", reference=_replicate_kernel,
    fake=lambda x, bins, num_outputs: x.new_empty(x.size(0), num_outputs),
    setup_context=_replicate_setup_context, backward=lambda ctx, grad: {"x": sum_bins(grad, *ctx.saved_tensors)},
)


def sum_bins(grad_BN: torch.Tensor, bins_E: torch.Tensor) -> torch.Tensor:
    """The sum of each bin's columns, [B,N] to [B,E], which is replicate's gradient: in order, in float32, rounded once."""
    offsets_E1 = torch.cat((bins_E.new_zeros(1), bins_E)).long().clamp(0, grad_BN.size(1))
    if offsets_E1.is_cuda:  # not checked on a device, where a bin that ends before it begins would destroy the process's CUDA context
        offsets_E1 = offsets_E1.cummax(0).values
    # unsafe=True leaves out a check of the offsets that would wait for the device.
    grad_NB = grad_BN.t().to(accumulate_dtype(grad_BN.dtype)).contiguous()
    sums_EB = torch.segment_reduce(grad_NB, "sum", offsets=offsets_E1, unsafe=True, initial=0)
    return sums_EB.t().to(grad_BN.dtype)


def replicate(x: torch.Tensor, bins: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Repeat x[:, e] as often as bin e is long: [B,E] to [B,num_outputs]. Mirrors megablocks.ops.replicate.

    Columns after the last bin are zero. Differentiable for floating x: each bin's gradients are summed in order, in float32,
    and rounded once. No host wait.

    Args:
        x: [B,E], any dtype.
        bins: int [E], inclusive sums of the bins' lengths, at most num_outputs, on x's device. On a device larger ones are cut off.
        num_outputs: columns of the result.
    """
    require_tensor(x, "replicate", "x", rank=2)
    require_tensor(bins, "replicate", "bins", rank=(0, 1), dtypes=_INTEGERS, device=x.device)
    require(x.size(1) == bins.numel() >= 1, "replicate", "x", f"one column a bin ({bins.numel()}), at least one", x.size(1))
    require(isinstance(num_outputs, int) and num_outputs >= 0, "replicate", "num_outputs", "an int of at least 0", num_outputs)
    return _replicate(x, bins.reshape(-1).long(), num_outputs)


def topology(
    padded_bins: torch.Tensor, block_size: int, output_block_rows: int, output_block_columns: int,
) -> torch.Tensor:
    """Column indices of the block-sparse activation matrix, int16 [rows * columns]. Mirrors megablocks.ops.topology.

    Block row r of expert e holds block columns e * columns .. (e + 1) * columns - 1; rows after the last expert are zeros.
    gbmoe's own layers use no topology; this serves code that builds stk matrices. No host wait.

    Args:
        padded_bins: int [E], multiples of block_size.
        block_size: rows of a block.
        output_block_rows, output_block_columns: block rows in all, block columns of one expert.
    """
    require_tensor(padded_bins, "topology", "padded_bins", rank=(0, 1), dtypes=_INTEGERS)
    for argument, value, least in (("block_size", block_size, 1), ("output_block_rows", output_block_rows, 0),
                                   ("output_block_columns", output_block_columns, 0)):
        require(isinstance(value, int) and value >= least, "topology", argument, f"an int of at least {least}", value)
    require(padded_bins.numel() * output_block_columns <= 2**15, "topology", "output_block_columns",
            lambda: f"at most {2**15 // padded_bins.numel()}, since the columns of all bins are int16", output_block_columns)
    return _topology(padded_bins, block_size, output_block_rows, output_block_columns)


def _topology_kernel(padded_bins, block_size, output_block_rows, output_block_columns):
    _check_bins("topology", "padded_bins", padded_bins, output_block_rows * block_size, "block_size * output_block_rows")
    bins_E = padded_bins.reshape(-1).long()
    if bins_E.device.type == "cpu":
        require(bool((bins_E % block_size == 0).all()), "topology", "padded_bins", f"multiples of {block_size}", bins_E.tolist())
    end_E = bins_E // block_size
    row, column = (torch.arange(n, dtype=torch.int64, device=end_E.device) for n in (output_block_rows, output_block_columns))
    expert = torch.searchsorted(end_E, row, right=True).unsqueeze(1)
    return torch.where(expert < end_E.numel(), expert * output_block_columns + column, 0).flatten().to(torch.int16)


_topology = define(
    "topology(Tensor padded_bins, int block_size, SymInt output_block_rows, SymInt output_block_columns) -> Tensor",
    reference=_topology_kernel,
    fake=lambda padded_bins, block_size, rows, columns: padded_bins.new_empty(rows * columns, dtype=torch.int16),
)


def round_up(x: torch.Tensor, value: int) -> torch.Tensor:
    """x, int32 or int64, rounded up to multiples of `value`. Mirrors megablocks.ops.round_up."""
    require_tensor(x, "round_up", "x", dtypes=(torch.int32, torch.int64))
    require(isinstance(value, int) and value >= 1, "round_up", "value", "an int of at least 1", value)
    return torch.div(x + (value - 1), value, rounding_mode="trunc") * value


def repeat(x: torch.Tensor, tiling: torch.Size) -> torch.Tensor:
    """`x.repeat(*tiling)`, or x itself where nothing repeats. Mirrors megablocks.ops.repeat."""
    return x if all(times == 1 for times in tiling) else x.repeat(*tiling)


def sum(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """x.sum(dim), or a view of x where that dimension is one long. Mirrors megablocks.ops.sum."""
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)
