"""What ranks do in each other's memory: publish and collect slots, pull rows, push sums. CUDA kernels where the memory is a GPU's
(csrc/peer/), otherwise plain PyTorch on memory that processes share, which serves tests. No autograd.

None of these functions waits for another rank: the caller puts a barrier between one rank's write and another's read. The tokens of all
ranks have one numbering, rank * C + index.

Shape suffixes: T tokens of this rank, C the most tokens that a rank has room for, W ranks, S = W * C tokens of all ranks, K slots a
token, H hidden, P rows of this rank, Z shards of an expert, N numbers of a header, A experts of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gbmoe.plain import plain_loans, plain_permute, plain_plan
from gbmoe.plain.plain_loans import Price
from gbmoe.slot_map import SlotMap

HEADER_NUMBERS = 4  # N
TOKENS, DIGEST, NEEDS = range(3)  # of a header; the digest is the same on all ranks where they make the same pass


@dataclass(frozen=True)
class PeerRegion:
    """One region in the memory of all ranks: a tensor of each rank's, and their addresses as kernels take them, int64 [W] on the CPU."""

    of_rank: Sequence[torch.Tensor]
    addresses: torch.Tensor

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PeerRegion:
        """The region of which these are the ranks' tensors."""
        return cls(tensors, torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device="cpu"))


def publish_slots(ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, header: Sequence[int], ids_CK: torch.Tensor,
                  weights_CK: torch.Tensor | None, header_N: torch.Tensor) -> None:
    """Write this rank's ids, int32, its router weights, float32, and its header into its own memory. Ids after the last token are -1.

    Args:
        ids_TK: int32 or int64, contiguous.
        weights_TK: any floating dtype, contiguous, or None.
        header: N numbers of 32 bits.
    """
    if ids_CK.device.type == "cuda":
        numbers = torch.tensor(header, dtype=torch.int64, device="cpu")
        torch.ops.gbmoe_cuda.publish_slots(ids_TK, weights_TK, numbers, ids_CK, weights_CK, header_N)
        return
    tokens = ids_TK.size(0)
    ids_CK[:tokens] = torch.where((ids_TK >= 0) & (ids_TK < 2**31), ids_TK, -1)
    ids_CK[tokens:] = -1
    if weights_TK is not None and weights_CK is not None:
        weights_CK[:tokens] = weights_TK
    header_N.copy_(torch.tensor(header, dtype=torch.int32, device="cpu"))


def collect_slots(ids: PeerRegion, weights: PeerRegion | None, headers: PeerRegion, first_expert: int, experts: int, only_differing: bool,
                  ids_SK: torch.Tensor, weights_SK: torch.Tensor | None, headers_WN: torch.Tensor) -> None:
    """Read the ids, router weights and headers of all ranks. Ids are counted from first_expert, and -1 where they name none of `experts`;
    such slots have the weight 0. With `only_differing` headers_WN is not written where the digests of all headers are equal."""
    if ids_SK.device.type == "cuda":
        torch.ops.gbmoe_cuda.collect_slots(ids.addresses, None if weights is None else weights.addresses, headers.addresses, first_expert,
                                           experts, only_differing, ids_SK, weights_SK, headers_WN)
        return
    local_SK = torch.cat(list(ids.of_rank)) - first_expert
    here_SK = (local_SK >= 0) & (local_SK < experts)
    ids_SK.copy_(torch.where(here_SK, local_SK, -1))
    if weights is not None and weights_SK is not None:
        weights_SK.copy_(torch.where(here_SK, torch.cat(list(weights.of_rank)), 0.0))
    each_WN = torch.stack(list(headers.of_rank))
    if not only_differing or bool((each_WN[:, DIGEST] != each_WN[0, DIGEST]).any()):
        headers_WN.copy_(each_WN)


def lend_experts(ids_SK: torch.Tensor, weights_SK: torch.Tensor | None, ranks: int, experts_per_rank: int, most: int, price: Price,
                 rank: int) -> torch.Tensor:
    """Decide which experts ranks lend each other, from the slots that each rank's tokens have of each expert: the same on all ranks.

    Args:
        ids_SK: int32 ids among the experts of all ranks, or -1. They become those of this rank's own and then borrowed experts, and -1
            where another rank computes the slot.
        weights_SK: float32 router weights, which become 0 there, or None.
        most: a rank lends at most so many experts, and borrows at most so many.
        price: in rows of a rank.

    Returns:
        int32 [1 + W * A]: the number of loans, and the rank that computes the slots that each rank's tokens have of each expert.
    """
    if ids_SK.device.type != "cuda":
        ranks_WA, number = plain_loans.lend_experts(ids_SK, weights_SK, ranks, experts_per_rank, most, price, rank)
        return torch.cat([ranks_WA.new_tensor([number]), ranks_WA.flatten()])
    experts = ranks * experts_per_rank
    decided = ids_SK.new_empty(1 + ranks * experts)
    scratch = torch.empty(experts + ranks * experts, dtype=torch.int64, device=ids_SK.device)
    torch.ops.gbmoe_cuda.lend_experts(ranks, experts_per_rank, most, *price, rank, ids_SK, weights_SK, scratch, decided)
    return decided


def copy_experts(experts: Sequence[int], matrices: Sequence[torch.Tensor | None], lent_MLFH: torch.Tensor) -> None:
    """Write the matrices of these experts, in this order, to the first places of `lent_MLFH`.

    Args:
        matrices: w1, w2 and v1 or None, [E,F,H] each, of the dtype of `lent_MLFH`.
        lent_MLFH: contiguous, for 2 or 3 matrices of up to L experts.
    """
    if lent_MLFH.device.type == "cuda":
        w1, w2, v1 = (None if matrix is None else matrix.contiguous() for matrix in matrices)
        torch.ops.gbmoe_cuda.copy_experts(experts, w1, w2, v1, lent_MLFH)
        return
    for lent_LFH, matrix in zip(lent_MLFH, (matrix for matrix in matrices if matrix is not None)):
        lent_LFH[: len(experts)] = matrix[list(experts)]


def ids_of_computing_ranks(ids_TK: torch.Tensor, ranks_A: torch.Tensor, experts_per_rank: int) -> torch.Tensor:
    """The ids of one rank's tokens, int64, contiguous, each replaced by that of an expert which the rank that computes the slot holds; -1
    for an id of no expert. What looks from ids for ranks (sum_pushed_rows) then finds those that have pushed."""
    if ids_TK.device.type == "cuda":
        out_TK = torch.empty_like(ids_TK)
        torch.ops.gbmoe_cuda.ids_of_computing_ranks(ids_TK, ranks_A, experts_per_rank, out_TK)
        return out_TK
    exists_TK = (ids_TK >= 0) & (ids_TK < ranks_A.size(0))
    return torch.where(exists_TK, ranks_A.long()[ids_TK.clamp(0, ranks_A.size(0) - 1)] * experts_per_rank, -1)


def pull_rows(x: PeerRegion, rank: int, row_of_slot_SK: torch.Tensor, out_PH: torch.Tensor) -> None:
    """Write each row of out whose token has a slot here: the token's row, read from its owner's memory. Others stay as they are."""
    if out_PH.device.type == "cuda":
        torch.ops.gbmoe_cuda.pull_rows(x.addresses, rank, row_of_slot_SK, out_PH)
        return
    token_R, _, row_R = _slots_with_rows(row_of_slot_SK, out_PH.size(0))
    if token_R.numel():
        out_PH[row_R] = torch.cat(list(x.of_rank))[token_R]


def push_row_sums(y_PH: torch.Tensor, row_of_slot_SK: torch.Tensor, weights_SK: torch.Tensor | None, to: PeerRegion, rank: int) -> None:
    """Write the weighted sum of each token's rows here to its place in the memory of its owner, and nothing for tokens without a row here.

    Args:
        to: the place of this rank's sums, [C,H] in the memory of each rank. Its addresses are those of [W,C,H], in which it is the part
            of this rank.
    """
    if y_PH.device.type == "cuda":
        torch.ops.gbmoe_cuda.push_row_sums(y_PH, row_of_slot_SK, weights_SK, to.addresses, rank)
        return
    here_S = (row_of_slot_SK >= 0).any(1)
    slots = SlotMap(row_of_slot_TK=row_of_slot_SK, slot_of_row_P=_slot_of_row(row_of_slot_SK, y_PH.size(0)))
    sums_SH = plain_permute.padded_scatter(y_PH, slots, weights=weights_SK)
    for sums_CH, into_CH, here_C in zip(sums_SH.chunk(len(to.of_rank)), to.of_rank, here_S.chunk(len(to.of_rank))):
        into_CH[here_C] = sums_CH[here_C]


def push_slot_rows(y_PH: torch.Tensor, slot_of_row_P: torch.Tensor, top_k: int, capacity: int, to: PeerRegion) -> None:
    """Write each row that has a slot to the slot's place in [C*K,H] in the memory of the slot's owner."""
    if y_PH.device.type == "cuda":
        torch.ops.gbmoe_cuda.push_slot_rows(y_PH, slot_of_row_P, top_k, capacity, to.addresses)
        return
    slots = capacity * top_k
    for rank, into_QH in enumerate(to.of_rank):
        mine_P = (slot_of_row_P >= rank * slots) & (slot_of_row_P < (rank + 1) * slots)
        into_QH[slot_of_row_P[mine_P].long() - rank * slots] = y_PH[mine_P]


def sum_pushed_rows(pushed_WCH: torch.Tensor, ids_TK: torch.Tensor, experts: int, experts_per_rank: int, scale: float,
                    out_TH: torch.Tensor) -> None:
    """out[t] = `scale` times the sum, in the order of ranks, in float32, of what the ranks that hold the token's experts have pushed."""
    if out_TH.device.type == "cuda":
        torch.ops.gbmoe_cuda.sum_pushed_rows(pushed_WCH, ids_TK, experts, experts_per_rank, scale, out_TH)
        return
    degree, tokens = experts // experts_per_rank, out_TH.size(0)
    of_T = torch.where((ids_TK >= 0) & (ids_TK < experts), ids_TK // experts_per_rank, -1)
    sum_TH = torch.zeros(out_TH.shape, dtype=torch.float32, device=out_TH.device)
    for rank, pushed_CH in enumerate(pushed_WCH):
        sum_TH += torch.where((of_T == rank % degree).any(1, keepdim=True), pushed_CH[:tokens].float(), 0.0)
    out_TH.copy_(sum_TH * scale)


def push_slot_scalars(scalars_SK: torch.Tensor, row_of_slot_SK: torch.Tensor, rows: int, shard: int, to: PeerRegion) -> None:
    """Write the scalar, float32, of each slot that has a row here to [shard, index, slot] of [Z,C,K] in the memory of the slot's owner; 0
    where the row is not one of the first `rows`."""
    if scalars_SK.device.type == "cuda":
        torch.ops.gbmoe_cuda.push_slot_scalars(scalars_SK, row_of_slot_SK, rows, shard, to.addresses)
        return
    scalars_SK = torch.where(row_of_slot_SK < rows, scalars_SK, 0.0)
    ranks = len(to.of_rank)
    for scalars_CK, row_CK, into_ZCK in zip(scalars_SK.chunk(ranks), row_of_slot_SK.chunk(ranks), to.of_rank):
        into_ZCK[shard][row_CK >= 0] = scalars_CK[row_CK >= 0]


def sum_pushed_scalars(pushed_ZCK: torch.Tensor, ids_TK: torch.Tensor, ranks: int, experts: int, experts_per_rank: int,
                       out_TK: torch.Tensor) -> None:
    """out[t,j] = the sum of the scalars of the slot's shards, in their order; 0 for an id of no expert."""
    if out_TK.device.type == "cuda":
        torch.ops.gbmoe_cuda.sum_pushed_scalars(pushed_ZCK, ids_TK, ranks, experts, experts_per_rank, out_TK)
        return
    exists_TK = (ids_TK >= 0) & (ids_TK < experts)
    out_TK.copy_(torch.where(exists_TK, pushed_ZCK[:, : ids_TK.size(0)].sum(0), 0.0))


def _slots_with_rows(row_of_slot_SK: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """(token, slot of the token, row) of each slot whose row is one of the first `rows`."""
    token_R, slot_R = ((row_of_slot_SK >= 0) & (row_of_slot_SK < rows)).nonzero(as_tuple=True)
    return token_R, slot_R, row_of_slot_SK[token_R, slot_R].long()


def _slot_of_row(row_of_slot_SK: torch.Tensor, rows: int) -> torch.Tensor:
    token_R, slot_R, row_R = _slots_with_rows(row_of_slot_SK, rows)
    slot_of_row_P = row_of_slot_SK.new_full((rows,), plain_plan.PADDING)
    slot_of_row_P[row_R] = (token_R * row_of_slot_SK.size(1) + slot_R).int()
    return slot_of_row_P
