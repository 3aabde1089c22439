"""Which rank holds which experts, and how rows travel to them.

Shape suffixes: T tokens, K slots a token, N destinations that a token may have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.parallel.groups import Nodes


def sharding(world: int, experts: int, ffn: int) -> tuple[int, int]:
    """Divide experts among ranks and, where there are more ranks than experts, each expert's ffn rows, too.

    Returns:
        Into how many groups of whole experts `world` ranks divide them, and into how many shards each expert's `ffn` rows are divided.

    Raises:
        ValueError: where they do not divide evenly.
    """
    degree = min(world, experts)
    if experts % degree:
        require(False, "Arguments", "moe_num_experts", f"a multiple of {degree} ranks", experts)
    if world % degree:
        require(False, "Arguments", "expert_parallel_group", f"a multiple of {degree} ranks", world)
    shards = world // degree
    if ffn % shards:
        require(False, "Arguments", "ffn_hidden_size", f"a multiple of {shards} shards", ffn)
    return degree, shards


@dataclass(frozen=True)
class Placement:
    """Which rank holds which experts: this one, `rank` of `world`, holds `experts_per_rank` of `experts`, from `first_expert` on.

    Where there are more ranks than experts, `shards` ranks hold shards of each expert's ffn rows, and a row goes to all of them.
    Rank r holds shards of the same experts as rank r + world / shards.

    Attributes:
        nodes: the group's nodes, where the exchange divides it into some.
        chunks: in how many chunks the exchange computes a rank's experts.
        shadows: how many of each rank's experts, the last ones, are shadows (gbmoe.parallel.shadowing); the last chunk has these
            alone.
        exact: bring back the row of every slot, and sum rows in slot order. The sums have the same bits as those of one process.
        rows: over mapped memory, the rows for which a rank has room, as a multiple of the mean over ranks; more are computed one part after
            the other (gbmoe/parallel/windows.py). None: as many as there are, for whose number the host waits in each forward.
        loans: over mapped memory, how many experts a rank may lend in a step, and how many borrow (gbmoe/parallel/loans.py).
        timeout_seconds: how long a rank's device waits for the others there; None for the group's own timeout.
    """

    group: dist.ProcessGroup | None
    world: int
    rank: int
    experts: int
    experts_per_rank: int
    shards: int
    nodes: Nodes | None = None
    chunks: int = 1
    shadows: int = 0
    exact: bool = False
    rows: float | None = None
    loans: int = 0
    timeout_seconds: float | None = None

    def __post_init__(self):
        if self.exact:
            require(self.shards == 1, "Placement", "shards", "1 together with exact: the ranks that hold shards of an expert"
                    " would bring their rows to one place", self.shards)
        if self.loans:
            require(self.shards == 1, "Placement", "shards", "1 together with loans, which are whole experts", self.shards)
            require(self.rows is None, "Placement", "rows", "None together with loans, as the host copies what is lent once it knows of it",
                    self.rows)

    @property
    def shard(self) -> int:
        """Which shard of its experts this rank holds."""
        return self.rank // (self.world // self.shards)

    @property
    def first_expert(self) -> int:
        """The first expert of this rank."""
        return self.rank % (self.world // self.shards) * self.experts_per_rank

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The local experts of a chunk: the first, and the one after the last."""
        own = self.experts_per_rank - self.shadows
        if self.shadows and chunk == self.chunks - 1:
            return own, self.experts_per_rank
        chunks = self.chunks - (self.shadows > 0)
        return -(-chunk * own // chunks), -(-(chunk + 1) * own // chunks)

    def with_shadows(self, shadows: int) -> Placement:
        """The same with so many shadows on each rank, after its own experts, as one more chunk. Ranks must hold whole experts."""
        each = self.experts_per_rank + shadows
        return replace(self, experts=self.world * each, experts_per_rank=each, chunks=self.chunks + 1, shadows=shadows)

    def keys(self, experts_TK: torch.Tensor) -> torch.Tensor:
        """The ranks and chunks that compute each token's slots, as rank * chunks + chunk, int32 [T,N]; -1 for an id of no expert."""
        exists_TK = (experts_TK >= 0) & (experts_TK < self.experts)
        if self.shadows:
            local_TK, own = experts_TK % self.experts_per_rank, self.experts_per_rank - self.shadows
            chunk_TK = torch.where(local_TK < own, local_TK * (self.chunks - 1) // own, self.chunks - 1)
            key_TK = torch.where(exists_TK, experts_TK // self.experts_per_rank * self.chunks + chunk_TK, -1).int()
        else:
            key_TK = torch.where(exists_TK, experts_TK * self.chunks // self.experts_per_rank, -1).int()
        if self.shards == 1:
            return key_TK
        step = self.world // self.shards * self.chunks
        return torch.cat([torch.where(key_TK >= 0, key_TK + shard * step, -1) for shard in range(self.shards)], dim=1)
