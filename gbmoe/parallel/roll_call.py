"""Which rank is missing when a collective fails.

The rank that sees a collective fail cannot tell why. In a ring only the neighbours of a rank that died see it at once. The others wait
for these neighbours; when the neighbours end, because they saw a failure, the next ones see them end. So every process has a thread that
answers roll calls while the other threads wait, through the store of the default process group:

- A rank whose collective failed calls the roll, or takes part in a call that is open. Every process answers that it is there, and whether
  it waits in a collective, or has seen one fail.
- Missing are ranks that do not answer. A rank that saw a failure says so first, and is not missing if it ends afterwards, as it ends
  because of that failure.
- Where all ranks answer, those of the group are missing that do not wait: they are alive, and do not come.
- Every process draws its conclusion, also one whose threads still wait. It needs no other call when its collective fails in turn, nor a
  store, which may have ended with rank 0.

A rank that goes on after a failure, by entering another collective, leaves the failure behind: the next one is of ranks that are missing
by then.

Keys in the store, of the call n = 1, 2, ...:

    gbmoe_call/n             how many seconds ranks have to answer
    gbmoe_call/n/answers     how many ranks have answered
    gbmoe_call/n/here/r      rank r has answered
    gbmoe_call/n/waits/r     rank r waits in a collective, or has seen one fail
    gbmoe_call/n/known       how many ranks have drawn their conclusion
    gbmoe_failed/r           the last call in which rank r saw a collective fail; 0 once it has gone on
    gbmoe_there/r            rank r has a thread that answers
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gbmoe import _torch_names

_PERIOD_SECONDS = 0.2  # how often the thread looks for calls
_LOOKS_PER_SECOND = 8192  # of all ranks together, at most: the store has to answer them
_CLOSING_SECONDS = 0.3  # in which a process that ends closes all its connections, of which a failed collective saw one
_LINGER_SECONDS = 3.0  # how long the process that keeps the store waits for others to read the answers, before it may end
_SPARE_SECONDS = 3.0  # how long beyond that a thread waits for the one that answers, which waits for a store that does not answer
_STORE_SECONDS = 10.0
_RECENT_SECONDS = 60.0

# The ranks that have to come to the collectives of a group which was made for a part of another group's trips: those of the whole group.
_RANKS_OF_WHOLE: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def make_part_of(part: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Have all ranks of `whole` called where a collective of `part` fails: its ranks may wait for one that waits in another part."""
    _RANKS_OF_WHOLE[part] = dist.get_process_group_ranks(whole)


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    whole: Any = dist.group.WORLD if group is None else group
    return _RANKS_OF_WHOLE.get(whole) or dist.get_process_group_ranks(whole)


class _Waiting:
    """A thread's stay in a collective. When it asks who is missing it sets `told`, an event that is set when `missing` is known."""

    __slots__ = ("group", "missing", "seconds", "told")

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.missing: list[int] | None = None
        self.seconds = 0.0  # that ranks have to answer
        self.told: threading.Event | None = None


@dataclass
class _Call:
    """An open roll call: until when ranks may answer, and whether this process has said that it waits."""
    number: int
    until: float
    said_to_wait: bool = False


class RollCall:
    """This process's part in the roll calls of a default process group. A thread waits in a collective from `enter` to `leave`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = weakref.ref(group)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._period = max(_PERIOD_SECONDS, self.world / _LOOKS_PER_SECOND)
        self._waiting: dict[int, _Waiting] = {}  # by thread
        self._failed = False   # a collective failed, and none was entered since
        self._survived = 0     # the last call before this process went on after a failure
        self._named: set[int] = set()  # who was missing then
        self._latest = 0       # the last call that was seen
        self._reported = 0     # what gbmoe_failed of this rank says
        self._call: _Call | None = None
        self._known: tuple[float, list[int]] | None = None  # when a call last found ranks missing, and which
        self._lost = False     # the store does not answer
        self._wake, self._stop = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self._server: _Server | None = None
        self._keeper = False   # whether the store ends with rank 0: it is not in a file, and not torchrun's, which its agent keeps
        if self.world > 1:
            self._begin()

    def _begin(self) -> None:
        """Start the thread that answers. Where that cannot be, collectives work without it, and their errors name no rank."""
        try:
            default_store: Any = _torch_names.default_store()
            over_tcp = _over_tcp(default_store)
            if over_tcp is not None:
                self._server = _Server(over_tcp.host, over_tcp.port)
                self._keeper = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            self._store = default_store.clone()  # so that no thread that waits for the store holds up this one
            self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
            thread = threading.Thread(target=self._answer_calls, daemon=True, name="gbmoe roll call")
            thread.start()
            self.thread = thread
        except (AttributeError, NotImplementedError, RuntimeError):  # a store that cannot be cloned, or no further thread
            self._lost = True

    # ------------------------------------------------------------------------------------------- the threads that wait

    def enter(self, group: dist.ProcessGroup | None) -> None:
        """The calling thread enters a collective of the group."""
        if self._failed:
            self._failed, self._survived, self._known = False, self._latest, None
        self._waiting[threading.get_ident()] = _Waiting(group)

    def leave(self) -> None:
        """The calling thread leaves the collective."""
        self._waiting.pop(threading.get_ident(), None)

    def missing(self, seconds: float) -> list[int] | None:
        """The ranks that are missing in the collective which the calling thread has entered, and which failed; None where that cannot be
        told. Other ranks have `seconds` to answer."""
        me = self._waiting.get(threading.get_ident())
        if me is None or self.thread is None:
            return None
        self._failed = True
        me.seconds, me.told = seconds, threading.Event()
        self._wake.set()
        if not self._lost:
            me.told.wait(seconds + _SPARE_SECONDS + (_LINGER_SECONDS if self.rank == 0 else 0.0))
        missing = self._without_store(me) if me.missing is None else me.missing
        if missing:
            self._named |= set(missing)
        return missing

    def _without_store(self, me: _Waiting) -> list[int] | None:
        """Who is missing where the store does not answer: those of the group whom the last call found, if that is not long ago, else the
        rank that keeps the store."""
        found_at, found = self._known or (-_RECENT_SECONDS, [])
        recent = found if time.monotonic() - found_at < _RECENT_SECONDS else []
        of_group = [rank for rank in recent if rank in _ranks_of(me.group)]
        return of_group or ([0] if self._keeper and self.rank else None)

    # ---------------------------------------------------------------------------------------- the thread that answers

    def stop(self) -> None:
        """End the thread. Not at the interpreter's end: a thread that comes out of the store there aborts the process."""
        self._stop.set()
        self._wake.set()
        if self.thread is not None:
            self.thread.join(1.0)

    def _answer_calls(self) -> None:
        try:
            self._store.set(f"gbmoe_there/{self.rank}", "1")
            while self._store.check([f"gbmoe_call/{self._latest + 1}"]):  # calls of ranks that were faster, or of another default group
                self._latest += 1
                self._answer(self._latest)
            while not self._stop.is_set() and dist.group.WORLD is self.group():
                self._step()
                if self._wake.wait(self._period if self._call is None else self._period / 2):
                    self._wake.clear()
                    self._stop.wait(_CLOSING_SECONDS)
        except Exception:  # the store is gone; at the end of a process nothing need be there any more
            pass
        self._lost = True
        if self._server is not None:
            self._server.leave()
        for waiting in self._waiting_now():
            if waiting.told is not None:
                waiting.told.set()

    def _waiting_now(self) -> list[_Waiting]:
        return list(self._waiting.copy().values())

    def _step(self) -> None:
        if self._server is not None:
            self._server.require()
        asking = []
        for waiting in self._waiting_now():
            if waiting.told is None or waiting.told.is_set():
                continue
            if waiting.missing is None:
                asking.append(waiting)
            else:  # an earlier call found it, while the thread still waited
                self._report(self._latest)
                self._tell(waiting)
        self._look_for_calls()
        if asking and self._call is None:
            self._store.set(f"gbmoe_call/{self._latest + 1}", str(asking[0].seconds))
            self._look_for_calls()
        if not self._failed and self._reported:
            self._report(0)
        if self._call is not None:
            self._collect(self._call)

    def _report(self, call: int) -> None:
        if self._reported != call:
            self._store.set(f"gbmoe_failed/{self.rank}", str(call))
            self._reported = call

    def _look_for_calls(self) -> None:
        while self._store.check([f"gbmoe_call/{self._latest + 1}"]):
            number = self._latest + 1
            seconds = float(self._store.get(f"gbmoe_call/{number}"))
            self._answer(number)
            self._call, self._latest = _Call(number, time.monotonic() + seconds), number

    def _answer(self, number: int) -> None:
        self._store.set(f"gbmoe_call/{number}/here/{self.rank}", "1")
        self._store.add(f"gbmoe_call/{number}/answers", 1)

    def _collect(self, call: _Call) -> None:
        waiting = self._waiting_now()
        if not call.said_to_wait and (waiting or self._failed):
            self._store.set(f"gbmoe_call/{call.number}/waits/{self.rank}", "1")
            call.said_to_wait = True
        if self._failed and any(one.told is not None for one in waiting):
            self._report(call.number)
        over = time.monotonic() >= call.until
        if over:
            self._call = None
        if self._store.add(f"gbmoe_call/{call.number}/answers", 0) >= self.world:
            silent: list[int] = []
        elif over:
            silent = self._lacking(f"gbmoe_call/{call.number}/here", range(self.world))
        else:
            return
        told = []
        for one in waiting:
            ranks = _ranks_of(one.group)
            missing = self._missing(call.number, silent, ranks, over)
            if missing is None:
                continue
            if missing:
                self._known = time.monotonic(), missing
            if one.told is not None:
                one.missing = missing
                told.append(one)
            elif missing and set(missing) <= set(silent).intersection(ranks):
                one.missing = missing  # why this collective will fail, too
        if over:
            self._store.add(f"gbmoe_call/{call.number}/known", 1)
        for one in told:
            self._tell(one)

    def _tell(self, one: _Waiting) -> None:
        """Let the thread go on whose collective failed, with which its process may end. If the store ends with it, others first have to
        know what it knows."""
        until = time.monotonic() + (_LINGER_SECONDS if self._keeper and self.rank == 0 and one.missing else 0.0)
        call = f"gbmoe_call/{self._latest}"
        while time.monotonic() < until and self._store.add(f"{call}/known", 0) < self._store.add(f"{call}/answers", 0):
            self._stop.wait(self._period / 4)
        if one.told is not None:
            one.told.set()

    def _missing(self, call: int, silent: list[int], ranks: Sequence[int], over: bool) -> list[int] | None:
        """Who is missing in a collective of `ranks`, given who does not answer; None where more answers may come."""
        failed_in = {rank: self._failed_in(rank) for rank in silent}
        gone = [rank for rank in silent if failed_in[rank] <= self._survived]
        if gone:
            here = [rank for rank in gone if rank in ranks]
            return self._surely(here or [rank for rank in gone if rank not in self._named] or gone)
        waits = f"gbmoe_call/{call}/waits"
        if not over and not self._store.check([f"{waits}/{rank}" for rank in ranks]):
            return None
        elsewhere = [rank for rank in self._lacking(waits, ranks) if rank not in silent]
        # If all that are silent saw a failure, the first of them may have been its cause.
        return elsewhere or [rank for rank in silent if failed_in[rank] == min(failed_in.values())]

    def _failed_in(self, rank: int) -> int:
        """The call in which a rank that does not answer saw a collective fail; 0 where it saw none, or went on."""
        key = f"gbmoe_failed/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _surely(self, gone: list[int]) -> list[int]:
        """Those that once had a thread which answers. The others may not have come so far."""
        return [rank for rank in gone if self._store.check([f"gbmoe_there/{rank}"])] or gone

    def _lacking(self, prefix: str, ranks: Sequence[int]) -> list[int]:
        """The ranks without a key. Asks for many at once, as hardly any are without."""
        if self._store.check([f"{prefix}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return self._lacking(prefix, ranks[:half]) + self._lacking(prefix, ranks[half:])


class _Server:
    """A connection to the TCP store's server, over which nothing is sent. It tells that the server has ended, as it does with rank 0 at the
    end of every run, without the warnings that torch's client prints where it asks a server that is not there."""

    def __init__(self, host: str, port: int):
        self._connection: socket.socket | None = None
        with contextlib.suppress(OSError):  # then there are warnings
            self._connection = socket.create_connection((host, port), timeout=_STORE_SECONDS)
            self._connection.setblocking(False)

    def require(self) -> None:
        """Raise OSError where the server has ended."""
        with contextlib.suppress(BlockingIOError):  # which says that the connection is there, and nothing came
            if self._connection is not None and not self._connection.recv(1):
                raise ConnectionError("the store's server has ended")

    def leave(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


def _over_tcp(store: Any) -> Any:
    """The TCPStore under a store, which has host and port; None where it is of another kind."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store if type(store).__name__ == "TCPStore" else None


_current: RollCall | None = None
_lock = threading.Lock()


def of_default_group(group: dist.ProcessGroup | None = None) -> RollCall | None:
    """The roll calls of the default process group, whose thread the first call starts; None without a default group. `group` is what the
    caller takes for the default group, if it does: torch.distributed is not asked for it where it was the last one."""
    global _current
    current = _current
    if current is not None and group is not None and current.group() is group:
        return current
    group = dist.group.WORLD
    if current is not None and current.group() is group:
        return current
    if group is None:
        return None
    with _lock:
        if _current is None or _current.group() is not group:
            if _current is None:
                atexit.register(_stop)
            _current = RollCall(group)
        return _current


def _stop() -> None:
    if _current is not None:
        _current.stop()
