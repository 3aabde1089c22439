"""The memory that ranks of an expert-parallel group map from each other: how large it is, and who waits for whom.

A group has one allocation of torch's symmetric memory (torch.distributed._symmetric_memory) for each device, shared by all layers. A
pass through a layer, forward or backward, uses it inside of `passing`. Passes follow one another in the order of the calls, which
must be the same on all ranks, as for every collective. Within a pass a barrier stands between one rank's write and another's read.
The last barrier of a pass comes after every access to another rank's memory, so that the next pass may write to its own rank's
memory at once.

When the memory grows, the layers go on with new memory. Memory that a CUDA graph has captured is kept, as its replays go on using it.

A pass that a rank leaves by an exception breaks the memory for all ranks: each of them raises (gbmoe.parallel.notice_board), and begins
the barriers that others have begun and it has not, so that no device waits for it. The next pass of each begins with all ranks together.

What lies where in it is gbmoe/parallel/regions.py.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gbmoe._checks import dtype_name, require
from gbmoe.launch import availability
from gbmoe.parallel import failures, groups, pass_agreement
from gbmoe.parallel.failures import wait_for_ranks
from gbmoe.parallel.late_report import LateReport
from gbmoe.parallel.notice_board import CHANNELS, NoticeBoard, open_board
from gbmoe.parallel.regions import Layout, Regions

MOST_RANKS = 64  # kMostPeers of csrc/peer/memory.cuh
# The most ranks of a node with which backward's tokens and sums travel by the copy engines; peer_transport.py says why.
RANKS_WITH_COPY_ENGINES = 4
# And the least bytes of a rank's tokens for which they do. Copies need a stream of their own, barriers and events, which take the host
# longer than fewer bytes are on their way.
BYTES_FOR_COPY_ENGINES = 8 << 20


def _symmetric_memory() -> Any:
    import torch.distributed._symmetric_memory as symmetric_memory
    return symmetric_memory


# What maps memory between ranks, by type of device: a function that returns an object with `empty` and `rendezvous` as those of
# torch.distributed._symmetric_memory. Tests put gbmoe.testing.mapped_files in for "cpu": this is the one switch, and no way to be fast.
MAPPERS: dict[str, Callable[[], Any]] = {"cuda": _symmetric_memory}


@dataclass
class _Allocation:
    """Memory of one size, mapped by all ranks: this rank's, torch's handle of it, and that of each rank, all of them [bytes]."""

    own: torch.Tensor
    handle: Any
    of_rank: list[torch.Tensor]
    captured: bool = False
    regions: dict[Layout, Regions] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.own.numel()


class PeerMemory:
    """One group's memory on this rank's device, mapped by all its ranks.

    Attributes:
        board: what the hosts of the ranks tell each other.
        expected_rows: how many rows a forward is likely to have on this rank, by the kind of layer; Arrival keeps it.
        report: what passes have found out for which no host waits.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: NoticeBoard, timeout_seconds: float | None = None):
        self.group, self.device, self.board = group, device, board
        self.rank, self.ranks = board.rank, board.ranks
        self._capacities: dict[Hashable, int] = {}
        self.expected_rows: dict[Hashable, int] = {}
        self.report = LateReport(group, device)
        self._timeout_ms = int((failures.timeout_of(group) if timeout_seconds is None else timeout_seconds) * 1000)
        self._allocation: _Allocation | None = None
        self._kept: list[_Allocation] = []  # those that CUDA graphs have captured, and which have become too small since
        self._streams = torch.get_device_module(device)
        self._index = device if device.index is None else device.index  # an int, of which torch takes no time to make one
        # The end of the last pass. In a graph it is external: replays wait for the pass before them, and are waited for.
        self._used: Any = torch.cuda.Event(external=True) if device.type == "cuda" else torch.cpu.Event()
        self._used.record(self.stream())
        self._used_on: Any = None
        self._side: Any = None
        self._begun = [0] * CHANNELS  # barriers outside of graphs, by channel
        self._begun_before = 0  # those of channel 0 that the passes before this one had
        self._in_pass = False
        self._captures = False  # whether a graph captures the pass
        self._forward_text = "\n"  # of the last forward

    @property
    def _handle(self) -> Any:
        """torch's _SymmetricMemory of the memory in use."""
        assert self._allocation is not None
        return self._allocation.handle

    def stream(self) -> Any:
        """The current stream of the memory's device."""
        return self._streams.current_stream(self._index)

    def _capturing(self) -> bool:
        return self._captures if self._in_pass else capturing(self.device)

    # ------------------------------------------------------------------------------------------------------------ room

    def capacity(self, layers: Hashable) -> int:
        """The most tokens of a rank for which these layers have room, the same on all ranks; 0 before the first call of `reserve`.

        Kernels visit as many tokens of each rank, so that layers of another kind have a number of their own.
        """
        return self._capacities.get(layers, 0)

    def others(self) -> list[int]:
        """The other ranks, from the one after this on. Each is at another place in every rank's list: where all ranks copy from, or to,
        the ranks of their lists one after the other, no rank's links serve two of them at a time."""
        return [(self.rank + place) % self.ranks for place in range(1, self.ranks)]

    def reserve(self, layers: Hashable, tokens: int) -> None:
        """Make room for the most tokens that any rank brings to these layers. All ranks meet; no device is waited for."""
        require(not self._capturing(), "peer_experts", "x", "a first call outside of a CUDA graph, in which ranks make room for its tokens",
                "one that is being captured")
        self.make_room(layers, max(self.board.meet(tokens)))

    def make_room(self, layers: Hashable, most: int) -> None:
        """Make room for `most` tokens, which is the same number on all ranks."""
        self._capacities[layers] = max(self.capacity(layers), rounded_up(most))

    def regions(self, layout: Layout) -> Regions:
        """The regions of a layer. Where the memory is too small for them it grows, collectively: all ranks have equal layouts."""
        allocation = self._allocation
        regions = None if allocation is None else allocation.regions.get(layout)
        if allocation is None or regions is None:
            needed = layout.offsets["end"]
            with torch.inference_mode(False):  # later steps may train: what inference mode makes can be written to only within it
                if allocation is None or needed > allocation.bytes:
                    allocation = self._grow(needed)
                regions = allocation.regions[layout] = Regions(allocation.of_rank, self.rank, layout)
        if self._capturing():
            allocation.captured = True
        return regions

    def _grow(self, needed: int) -> _Allocation:
        require(not self._capturing(), "peer_experts", "x", "as much memory as a call outside of a CUDA graph has made room for", "more")
        mapper = MAPPERS[self.device.type]()
        self._synchronize()
        self.board.meet(needed)  # afterwards no device reads the old memory
        self._set_aside()
        own = mapper.empty(needed, dtype=torch.uint8, device=self.device)
        self.board.meet(needed)  # no rank has run out of memory
        with failures.Waiting(self.group):
            handle = mapper.rendezvous(own, self.group)
        of_rank = [own if rank == self.rank else handle.get_buffer(rank, (needed,), torch.uint8) for rank in range(self.ranks)]
        self._allocation = _Allocation(own, handle, of_rank)
        return self._allocation

    def _synchronize(self) -> None:
        """Wait for all passes on this rank's device. Raises CollectiveFailed where other ranks do not let them end."""
        stream = self.stream()
        stream.wait_event(self._used)
        stream.wait_stream(self.side_stream())
        done = torch.cuda.Event() if self.device.type == "cuda" else torch.cpu.Event()
        done.record(stream)
        wait_for_ranks(done.query, self.group, self.board.check, self.board.fail)

    # ---------------------------------------------------------------------------------------------------------- passes

    @contextlib.contextmanager
    def passing(self, backward_of: int | None = None) -> Iterator[None]:
        """A pass on the current stream, which waits for the previous pass if that ran on another stream.

        An exception inside breaks the memory for all ranks. The first pass after that waits for all of them.

        Args:
            backward_of: the number of the layer of which this is the backward, if it is one.

        Raises:
            PassLost, ValueError: where another rank has left a pass early; it says which, and why.
        """
        if self._in_pass:  # within `meanwhile` or a hook, on one thread: barriers would be those of another pass
            raise RuntimeError("peer_experts: expected no layer with experts over the same group to be called inside another one's pass")
        try:
            self._begin()
        except Exception:  # which tells this rank of a failure
            self._close_barriers()
            raise
        self._in_pass = True
        number = self.board.number + 1
        try:
            if backward_of is not None:
                self._announce_backward(backward_of)
            yield
            self.end()
        except BaseException as error:
            if self._in_pass:
                if not self.board.told:  # by the board itself
                    self.board.fail(error, number)  # which this rank may not have announced: others can still end the pass before
                self._close_barriers()
                with contextlib.suppress(RuntimeError):  # of a device that is lost
                    if self._side is not None and not self._captures:
                        # Its copies may be under way to tensors of this stream, which are freed before anything has waited for them.
                        self.stream().wait_stream(self._side)
                    self.end()
            raise
        finally:
            self._in_pass = False

    def end(self) -> None:
        """End the pass before `passing` does: all its barriers are begun, and what is raised from here on breaks nothing. Records on the
        current stream what the next pass has to wait for."""
        if self._in_pass:
            stream = self.stream()
            self._used.record(stream)
            if not self._captures:
                self._used_on = stream
            self._in_pass = False

    def _begin(self) -> None:
        captures = self._captures = self._capturing()
        self._begun_before = self._begun[0]
        if not captures and self.board.must_recover():
            self._recover()
            self._begun_before = self._begun[0]
        stream = self.stream()
        # A graph is replayed on streams that are not known here.
        if captures or self._kept or stream != self._used_on or (self._allocation is not None and self._allocation.captured):
            stream.wait_event(self._used)

    def announce(self, layer: int, path: str, records: bool) -> int:
        """Count a forward, and tell the other ranks' hosts what it is. Returns its digest, which is equal on all ranks."""
        pass_ = pass_agreement.count(layer, path, self.group, records=records)
        text = pass_.text()
        digest, self._forward_text = pass_agreement.digest_of(text), text
        self.board.begins(pass_.number, digest, text + "\nforward")
        return digest

    def _announce_backward(self, layer: int) -> None:
        """Tell the other ranks' hosts of a backward. Their devices do not look at it: the next forward's header tells of it, too."""
        forwards = pass_agreement.count_backward(layer, self.group)
        of_forward = self._forward_text.split("\n", 1)[1]
        self.board.begins(forwards, -layer - 1, f"{layer}\n{of_forward}\nbackward")

    def refuse(self) -> None:
        """Raise ValueError, which says in what the passes of the ranks differ; on all ranks, as their headers tell all of them so."""
        raise pass_agreement.refusal(self.board.texts(), self.group)

    def barrier(self, channel: int = 0) -> None:
        """Let the current stream wait for the other ranks: what any rank wrote before, all ranks can read afterwards. The host does not
        wait.

        If a rank does not come within the timeout, the device raises an error that names it. Streams that run side by side need
        different channels.

        Raises:
            PassLost, ValueError: where another rank has left a pass early.
        """
        if self._capturing():
            self._launch_barrier(channel)
            return
        self.board.enters(channel)
        self._begun[channel] += 1
        self._launch_barrier(channel)
        if self.device.type != "cuda":
            self.board.wait_in_barrier(channel)

    def side_stream(self) -> Any:
        """A stream for copies that run while the current stream computes."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else torch.cpu.Stream()
        return self._side

    def on(self, stream: Any) -> contextlib.AbstractContextManager:
        """`with memory.on(stream):` work goes to that stream."""
        return self._streams.stream(stream)

    def check(self) -> None:
        """Raise what later passes would raise: that another rank has left a pass early, or what passes have reported for which no host
        waited. Waits for the device, and so until no rank can leave a pass any more that this rank has made. Not within a pass."""
        try:
            self.board.check()
            self._streams.synchronize(self.device)
            self.board.check()  # of ranks for which the device has waited
        except Exception:  # which tells this rank of a failure
            self._close_barriers()
            raise
        self.report.check()

    # ------------------------------------------------------------------------------------------------------- recoveries

    def _recover(self) -> None:
        """Go on after a failure, with all ranks together: no barrier is open any more, and none has been begun by some ranks alone. What
        ranks have agreed about is forgotten, as a part of them may have failed while they did."""
        pass_agreement.go_on(self.board.recover(self._end_passes), self.group)
        self.report.forget()
        self._set_aside()
        self._capacities.clear()
        self.expected_rows.clear()

    def _set_aside(self) -> None:
        """Free the memory, which no device uses any more, or keep it for the graphs that have captured it."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None and allocation.captured:
            self._kept.append(allocation)

    def _end_passes(self) -> None:
        """Wait until this rank's device has ended what it has begun of passes that are lost."""
        self._close_barriers()
        done = torch.cuda.Event() if self.device.type == "cuda" else torch.cpu.Event()
        self.stream().wait_event(self._used)
        self.stream().wait_stream(self.side_stream())
        done.record(self.stream())
        wait_for_ranks(done.query, self.group)

    def _close_barriers(self) -> None:
        """After a failure, begin the barriers that other ranks have begun and this one has not. Passes that are under way on other ranks
        then end; they read NaN and no expert where this rank has not written. Does not wait."""
        if not self.board.is_broken or self._capturing():
            return
        most, begun = self.board.most_barriers(), self._begun
        missing = [there - here for there, here in zip(most, begun)]
        self._begun = most
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            if any(missing) and self._allocation is not None:
                self._meet_without_rows(self._allocation, missing, reached=begun[0] > self._begun_before)
        for channel, barriers in enumerate(most):
            self.board.closes(channel, barriers)

    def _meet_without_rows(self, allocation: _Allocation, missing: list[int], reached: bool) -> None:
        """Begin so many barriers of each channel, with 0xFF in all that this rank would have written. `reached`: whether it has begun a
        barrier of this pass. Before that, another rank may still read what the pass before has brought it.

        No stream waits for the other: another rank's may be the one that has to go on first. What others read after a barrier of channel 1
        is this rank's own memory.
        """
        for channel, stream in enumerate((self.stream(), self.side_stream())):
            if missing[channel]:
                stream.wait_event(self._used)
                with self.on(stream):
                    allocation.own.fill_(0xFF)
                    for number in range(missing[channel]):
                        if channel == 0 and number == (0 if reached else 1):
                            self._fill_others(allocation)
                        self._launch_barrier(channel)

    def _fill_others(self, allocation: _Allocation) -> None:
        for rank in self.others():
            allocation.of_rank[rank].fill_(0xFF)

    def _launch_barrier(self, channel: int) -> None:
        if self.device.type == "cuda":
            self._handle.barrier(channel=channel, timeout_ms=self._timeout_ms)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched on the current stream now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def rounded_up(tokens: int) -> int:
    """The capacity for so many tokens. It is rounded up, so that tokens whose number varies from step to step soon stop being a reason to
    grow."""
    return math.ceil(max(tokens, 1) / 128) * 128


_MEMORIES: dict[tuple[str, torch.device], PeerMemory] = {}


def of_group(group: dist.ProcessGroup | None, device: torch.device, timeout_seconds: float | None = None) -> PeerMemory:
    """The memory of a group (None: the default group), made at the first call and shared by all callers. The first call's timeout holds
    for all of them. Collective at the first call, where `unavailable` was not called before; then it raises ValueError for its reason."""
    group = groups.whole(group)
    key = (group.group_name, device)
    memory = _MEMORIES.get(key)
    if memory is None or memory.group is not group:
        reason = unavailable(group, device)
        require(reason is None, "PeerMemory", "group", "ranks that can map each other's memory", reason)
        memory = _MEMORIES[key] = PeerMemory(group, device, _BOARDS[key], timeout_seconds)
    return memory


def agree_to_exchange(group: dist.ProcessGroup | None, device: torch.device, layer: int) -> None:
    """Wait for the other ranks where this one's rows cannot be pulled in a call, although all ranks map memory.

    Raises:
        ValueError: on all ranks, where other ranks pull theirs.
    """
    if torch.compiler.is_compiling():
        from gbmoe.parallel import uncompiled
        return uncompiled.agree_to_exchange(group, device, layer)
    memory = of_group(group, device)
    with memory.passing():
        memory.announce(layer, "exchange, as rows cannot be pulled", torch.is_grad_enabled())
        memory.board.meet(0)


def refuse_to_exchange(operator: str, argument: str, reason: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ValueError where `argument`, which is 'peer_memory', asks for rows that are pulled, and they cannot be. Where other ranks' rows
    can, these ranks are told."""
    with contextlib.nullcontext() if unavailable(group, device) else of_group(group, device).passing():
        require(False, operator, argument, f"'auto' or 'exchange', as rows cannot be pulled from other ranks' memory: {reason}",
                "'peer_memory'")


def release() -> None:
    """Free the memory of all groups, also that which CUDA graphs use. Call it on all ranks, before the process groups are destroyed. Waits
    for the device."""
    for memory in _MEMORIES.values():
        torch.get_device_module(memory.device).synchronize(memory.device)
    for known in (_MEMORIES, _REASONS, _BOARDS):
        known.clear()


def check_passes() -> None:
    """Raise ValueError if a step since the last report was another one than that of other ranks. RuntimeError if another rank has left a
    step early. Waits for the device.

    Eager calls raise the same error by themselves in a later step. Replays of a CUDA graph cannot: call this after them.
    """
    for memory in _MEMORIES.values():
        memory.check()


def unavailable(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """None if the ranks of a group can map each other's memory, otherwise the reason why not. Decided once a group, collectively."""
    group = groups.whole(group)
    key = (group.group_name, device)
    known = _REASONS.get(key)
    if known is not None and known[0] is group:
        return known[1]
    found: list[Any] = [None] * dist.get_world_size(group)
    mine = (_local_reason(group, device), socket.gethostname())
    failures.guarded(lambda: dist.all_gather_object(found, mine, group=group), group,
                     "finding out whether ranks can map each other's memory")
    hosts = {host for _, host in found}
    faults = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(found) if reason is not None]
    reason = "; ".join(faults) or (f"the group spans {len(hosts)} hosts" if len(hosts) > 1 else None)
    if reason is None:
        board, reason = open_board(group)
        if board is not None:
            _BOARDS[key] = board
    _REASONS[key] = group, reason
    return reason


# By the name of a group and its device. A later group may have the same name, so the group itself is kept to compare with.
_REASONS: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, str | None]] = {}
_BOARDS: dict[tuple[str, torch.device], NoticeBoard] = {}


def _local_reason(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type not in MAPPERS:
        return f"memory is mapped on CUDA devices only, not on {device.type}"
    if dist.get_world_size(group) > MOST_RANKS:
        return f"at most {MOST_RANKS} ranks can map each other's memory, and the group has {dist.get_world_size(group)}"
    if device.type != "cuda":
        return None
    if availability.why_not() is not None:
        return f"it {availability.why_not()}"
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
