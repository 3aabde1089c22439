"""The memory that ranks of an expert-parallel group map from each other: what it holds, how large it is, and who waits for whom.

A group has one allocation of torch's symmetric memory (torch.distributed._symmetric_memory) for each device, shared by all layers. A
pass through a layer, forward or backward, uses it from `begin` to `end`. Passes follow one another in the order of the calls, which
must be the same on all ranks, as for every collective. Within a pass a barrier stands between one rank's write and another's read.
The last barrier of a pass comes after every access to another rank's memory, so that the next pass may write to its own rank's
memory at once.

Shape suffixes: C capacity, the most tokens that a rank has room for; W ranks; K slots a token; H hidden; Z shards of an expert.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gbmoe import extension
from gbmoe._checks import dtype_name, require
from gbmoe.parallel import groups

MOST_RANKS = 64  # kMostPeers of csrc/peer_memory.cuh
# The most ranks of a node with which backward's tokens and sums travel by the copy engines; peer_experts.py says why.
RANKS_WITH_COPY_ENGINES = 4
_ALIGNMENT = 256


@dataclass(frozen=True)
class Layout:
    """How one layer divides the memory: a header, ids and weights, tokens and gradients that others pull, and rows and scalars that
    others push. Every layer's regions begin at the start of the memory, as passes follow one another.

    Attributes:
        tokens: C.
        top_k: K.
        hidden: H.
        dtype: the dtype of the rows.
        ranks: W.
        shards: Z.
        by_slot: the pushed rows are one for every slot, [C * K, H]; otherwise they are one sum for every rank, [W, C, H].
    """

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    ranks: int
    shards: int
    by_slot: bool

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each region by its name, in the order in which they lie in memory."""
        C, K, H = self.tokens, self.top_k, self.hidden
        return {
            "header": ((4,), torch.int32),
            "ids": ((C, K), torch.int32),
            "weights": ((C, K), torch.float32),
            "pushed_scalars": ((self.shards, C, K), torch.float32),
            "x": ((C, H), self.dtype),
            "grad": ((C, H), self.dtype),
            "pushed": ((C * K, H) if self.by_slot else (self.ranks, C, H), self.dtype),
        }

    @property
    def offsets(self) -> dict[str, int]:
        """The byte at which each region begins; "end" is the size of all of them."""
        offsets, at = {}, 0
        for name, (shape, dtype) in self.shapes.items():
            offsets[name] = at
            at += math.ceil(math.prod(shape) * dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
        return {**offsets, "end": at}


class PeerMemory:
    """One group's memory on this rank's device, mapped by all its ranks.

    Attributes:
        expected_rows: how many rows a forward is likely to have on this rank, by the kind of layer; Arrival keeps it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float | None = None):
        require(extension.loaded(), "PeerMemory", "device", "one that the CUDA extension serves", extension.status().reason)
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._capacities: dict[Hashable, int] = {}
        self.expected_rows: dict[Hashable, int] = {}
        self._timeout_ms = int((groups.timeout_of(group) if timeout_seconds is None else timeout_seconds) * 1000)
        self._bytes = 0
        self._memory: torch.Tensor | None = None
        self._handle: Any = None  # torch's _SymmetricMemory of self._memory
        self._used: torch.cuda.Event | None = None
        self._used_on: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        self._regions: dict[Layout, Regions] = {}

    def capacity(self, layers: Hashable) -> int:
        """The most tokens of a rank for which these layers have room, the same on all ranks; 0 before the first call of `reserve`.

        Kernels visit as many tokens of each rank, so that layers of another kind have a number of their own.
        """
        return self._capacities.get(layers, 0)

    def others(self) -> list[int]:
        """The other ranks, from the one behind this on. Each is at another place in every rank's list: where all ranks copy from, or to,
        the ranks of their lists one after the other, no rank's links serve two of them at a time."""
        return [(self.rank + place) % self.ranks for place in range(1, self.ranks)]

    def reserve(self, layers: Hashable, tokens: int) -> None:
        """Make room for the most tokens that any rank brings to these layers. Collective, and waits for the device."""
        most = torch.tensor([tokens], dtype=torch.int64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        # Rounded up, so that numbers of tokens that vary from step to step soon stop being a reason to grow.
        self._capacities[layers] = max(self.capacity(layers), math.ceil(max(int(most), 1) / 128) * 128)

    def regions(self, layout: Layout) -> Regions:
        """The regions of a layer. Where the memory is too small for them it grows, collectively: all ranks have equal layouts."""
        needed = layout.offsets["end"]
        if needed > self._bytes or layout not in self._regions:
            with torch.inference_mode(False):  # later steps may train: what inference mode makes can be written to only within it
                if needed > self._bytes:
                    self._grow(needed)
                assert self._memory is not None
                self._regions[layout] = Regions(self._memory, self._handle, layout)
        return self._regions[layout]

    def _grow(self, needed: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory
        torch.cuda.synchronize(self.device)  # afterwards nothing reads the old memory
        dist.barrier(self.group)
        self._regions.clear()
        self._memory = self._handle = None
        self._memory = symmetric_memory.empty(needed, dtype=torch.uint8, device=self.device)
        self._handle = symmetric_memory.rendezvous(self._memory, self.group)
        self._bytes = needed

    def begin(self) -> None:
        """Begin a pass on the current stream, which waits for the previous pass if that ran on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if self._used is not None and self._used_on != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._used)

    def barrier(self, channel: int = 0) -> None:
        """Let the current stream wait for the other ranks: what any rank wrote before, all ranks can read afterwards. The host does not
        wait.

        If a rank does not come within the timeout, the device raises an error that names it. Streams that run side by side need
        different channels.
        """
        self._handle.barrier(channel=channel, timeout_ms=self._timeout_ms)

    def side_stream(self) -> torch.cuda.Stream:
        """A stream for copies that run while the current stream computes."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        return self._side

    def end(self) -> None:
        """End the pass: record on the current stream what the next pass has to wait for."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self._used is None:
            self._used = torch.cuda.Event()
        self._used_on = torch.cuda.current_stream(self.device)
        self._used.record(self._used_on)


class Regions:
    """A layout's regions: `own` are tensors in this rank's memory; `peers` are their addresses on all ranks, int64 [W] on the CPU, as
    kernels take them."""

    def __init__(self, memory: torch.Tensor, handle, layout: Layout):
        self.layout = layout
        offsets = layout.offsets
        self.own = {name: memory[offsets[name]:][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                    for name, (shape, dtype) in layout.shapes.items()}
        self.peers = {name: torch.tensor([address + offsets[name] for address in handle.buffer_ptrs], dtype=torch.int64, device="cpu")
                      for name in layout.shapes}
        # The other ranks' memory as tensors, for the copy engines: their tokens, and the regions that this rank pushes its sums to.
        others = [rank for rank in range(layout.ranks) if rank != handle.rank]
        shape, dtype = layout.shapes["x"]
        self.x_of_rank = {rank: handle.get_buffer(rank, shape, dtype, offsets["x"] // dtype.itemsize) for rank in others}
        self.pushed_of_rank = {}
        if not layout.by_slot:
            here = offsets["pushed"] // dtype.itemsize + handle.rank * math.prod(shape)
            self.pushed_of_rank = {rank: handle.get_buffer(rank, shape, dtype, here) for rank in others}


_MEMORIES: dict[tuple[str, torch.device], PeerMemory] = {}


def of_group(group: dist.ProcessGroup | None, device: torch.device, timeout_seconds: float | None = None) -> PeerMemory:
    """The memory of a group (None: the default group), made at the first call and shared by all callers. The first call's timeout holds
    for all of them."""
    group = _the(group)
    key = (group.group_name, device)
    memory = _MEMORIES.get(key)
    if memory is None or memory.group is not group:
        memory = _MEMORIES[key] = PeerMemory(group, device, timeout_seconds)
    return memory


def release() -> None:
    """Free the memory of all groups. Call it on all ranks, before the process groups are destroyed. Waits for the device."""
    for memory in _MEMORIES.values():
        torch.cuda.synchronize(memory.device)
    _MEMORIES.clear()
    _REASONS.clear()


def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """None if the ranks of a group can map each other's memory, otherwise the reason why not. Decided once a group, collectively."""
    group = _the(group)
    key = (group.group_name, device)
    known = _REASONS.get(key)
    if known is not None and known[0] is group:
        return known[1]
    found: list[Any] = [None] * dist.get_world_size(group)
    mine = (_local_reason(group, device), socket.gethostname())
    groups.guarded(lambda: dist.all_gather_object(found, mine, group=group), group, "finding out whether ranks can map each other's memory")
    hosts = {host for _, host in found}
    faults = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(found) if reason is not None]
    reason = "; ".join(faults) or (f"the group spans {len(hosts)} hosts" if len(hosts) > 1 else None)
    _REASONS[key] = group, reason
    return reason


# By the name of a group and its device. A later group may have the same name, so the group itself is kept to compare with.
_REASONS: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, str | None]] = {}


def _the(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return group


def _local_reason(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"memory is mapped on CUDA devices only, not on {device.type}"
    if not extension.loaded():
        return f"the CUDA extension is needed: {extension.status().reason}"
    if dist.get_world_size(group) > MOST_RANKS:
        return f"at most {MOST_RANKS} ranks can map each other's memory, and the group has {dist.get_world_size(group)}"
    try:
        import torch.distributed._symmetric_memory
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    peers = [d for d in range(torch.cuda.device_count()) if d != device.index]
    cut_off = [d for d in peers if not torch.cuda.can_device_access_peer(device.index, d)]
    if cut_off:
        return f"device {device.index} cannot read the memory of device {cut_off[0]}"
    return None


def check_rows(dtype: torch.dtype, hidden: int) -> str | None:
    """None if rows of `hidden` elements of `dtype` can be pulled and pushed, otherwise the reason why not."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"rows may be bfloat16, float16 or float32, not {dtype_name(dtype)}"
    if hidden * dtype.itemsize % 16:
        return f"the bytes of a row must be a multiple of 16, and are {hidden * dtype.itemsize}"
    return None

