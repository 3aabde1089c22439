"""What lies where in the memory that ranks map from each other.

Shape suffixes: C capacity, the most tokens that a rank has room for; W ranks; K slots a token; H hidden; Z shards of an expert; N
elements of a header; L experts that a rank may lend or borrow; M matrices of an expert; F ffn hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gbmoe.launch.packed_rows import as_packed
from gbmoe.launch.peers import HEADER_NUMBERS, PeerRegion

_ALIGNMENT = 256


@dataclass(frozen=True)
class Layout:
    """How one layer divides the memory: a header, ids and weights, tokens and gradients that others pull, rows and scalars that others
    push, and matrices of lent experts, or their gradients, that others read. Every layer's regions begin at the start of the memory, as
    passes follow one another.

    Attributes:
        tokens: C.
        top_k: K.
        hidden: H.
        dtype: the dtype of the rows.
        ranks: W.
        shards: Z.
        by_slot: the pushed rows are one for every slot, [C * K, H]; otherwise they are one sum for every rank, [W, C, H].
        lent: [M, L, F, H] where experts may be lent, otherwise empty.
    """

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    ranks: int
    shards: int
    by_slot: bool
    lent: tuple[int, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each region by its name, in the order in which they lie in memory."""
        C, K, H = self.tokens, self.top_k, self.hidden
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "header": ((HEADER_NUMBERS,), torch.int32),
            "ids": ((C, K), torch.int32),
            "weights": ((C, K), torch.float32),
            "pushed_scalars": ((self.shards, C, K), torch.float32),
            "x": ((C, H), self.dtype),
            "grad": ((C, H), self.dtype),
            "pushed": ((C * K, H) if self.by_slot else (self.ranks, C, H), self.dtype),
        }
        return {**shapes, "lent": (self.lent, self.dtype)} if self.lent else shapes

    @property
    def offsets(self) -> dict[str, int]:
        """The byte at which each region begins; "end" is the size of all of them."""
        offsets, at = {}, 0
        for name, (shape, dtype) in self.shapes.items():
            offsets[name] = at
            at += math.ceil(math.prod(shape) * dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
        return {**offsets, "end": at}


class Regions:
    """A layout's regions: `own` are tensors in this rank's memory, `peers` those of all ranks. `sums` is, in the memory of each rank, the
    part [C,H] of the region of pushed sums that this rank fills; None with by_slot."""

    def __init__(self, memory_of_rank: list[torch.Tensor], rank: int, layout: Layout):
        self.layout = layout
        of_rank = [self._divided(memory, layout) for memory in memory_of_rank]
        self.own = of_rank[rank]
        self.peers = {name: PeerRegion.of([theirs[name] for theirs in of_rank]) for name in layout.shapes}
        pushed = self.peers["pushed"]
        self.sums = None if layout.by_slot else PeerRegion([sums_WCH[rank] for sums_WCH in pushed.of_rank], pushed.addresses)
        self._packed: dict[str, PeerRegion] = {}

    def packed(self, name: str) -> PeerRegion:
        """The region "x" or "grad" of rows of 16 bits, as packed rows [C,Y] of float8 (gbmoe/launch/packed_rows.py). They begin where it
        does, and are no longer."""
        if name not in self._packed:
            region = self.peers[name]
            self._packed[name] = PeerRegion([as_packed(rows_CH) for rows_CH in region.of_rank], region.addresses)
        return self._packed[name]

    @staticmethod
    def _divided(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
        offsets = layout.offsets
        return {name: memory[offsets[name]:][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for name, (shape, dtype) in layout.shapes.items()}
