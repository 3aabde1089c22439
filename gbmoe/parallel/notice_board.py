"""What the ranks of one host tell each other without their devices: which pass each of them makes, and that one has ended early.

Between ranks that map each other's memory a device waits for another's, and the host does not see it. So hosts have a page of memory that
they share. A rank that leaves a pass early, by an exception between two barriers, says so there; every other rank sees it at its next
barrier, pass or wait, and raises as well. Whoever leaves begins the barriers that others have begun and it has not, so that no device
waits for a rank that has left: a host that waits for its device, or for a collective on it, goes on. Nobody begins a barrier after that
(`enters`), so that all ranks have begun equally many once each of them has seen the failure. The next pass of each rank then begins with
a recovery (PeerMemory._recover), for which all ranks meet.

A failure belongs to an epoch, and each recovery begins the next one. Writers and readers need no locks: each word but
the page's first, to which all write the same, has one writer, and a rank first writes what it does and then reads what others say.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gbmoe.parallel import failures, pass_agreement
from gbmoe.parallel.failures import CollectiveFailed, wait_for_ranks

CHANNELS = 2  # of barriers
_PAUSE_SECONDS = 5e-5
_WORD, _FIRST_WORDS, _WORDS, _TEXT = 8, 8, 16, 4096
_BYTES = _WORDS * _WORD + 3 * _TEXT  # of one rank: its words, what it does in passes of even and of odd numbers, and why it failed
_WHY = 2  # the text of why
_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None  # memory, where the system has it as a folder
# The words of a rank. The first CHANNELS count barriers that it has begun.
_MEETINGS, _SAID, _NUMBER, _DIGEST, _FORWARDS = 2, 3, 5, 6, 8  # _SAID and _DIGEST are two: of even and of odd numbers
_RECOVERS, _RECOVERED, _FAILED, _LOST, _WAS_LATE, _DIFFERS, _ENTERS = 9, 10, 11, 12, 13, 14, 15
_SECONDS_TO_ENTER = 1.0  # far more than a host takes that is not stopped


class PassLost(CollectiveFailed):
    """Another rank ended a pass early, so that this rank's results of it are lost."""


class NoticeBoard:
    """The page of one group. Each rank has words and texts of its own, which it alone writes.

    Attributes:
        epoch: from how many failures this rank has recovered.
        told: whether this rank's caller knows of the failure that is open.
    """

    def __init__(self, page: mmap.mmap, group: dist.ProcessGroup):
        self._bytes = memoryview(page)
        self._words = self._bytes.cast("q")
        self._group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._at = [(_FIRST_WORDS * _WORD + rank * _BYTES) // _WORD for rank in range(self.ranks)]
        self._mine = self._at[self.rank]
        self.epoch, self.told = 0, False

    # ---------------------------------------------------------------------------------------------------------- passes

    def begins(self, forwards: int, digest: int, text: str) -> None:
        """This rank begins a pass, forward or backward; `digest` and `text` are what must be equal on all ranks. It has then begun so many
        forwards."""
        words, at = self._words, self._mine
        number = self.number + 1
        self._write(number % 2, text)  # a rank that is ahead leaves what it said of the pass before
        words[at + _FORWARDS] = forwards
        words[at + _DIGEST + number % 2] = digest
        words[at + _NUMBER] = number

    def texts(self) -> list[str]:
        """What each rank has said of the pass with this rank's number. A rank may be one pass ahead."""
        number = self.number
        return [self._read(rank, number % 2) for rank in range(self.ranks)]

    def differ(self) -> bool:
        """Whether a rank makes another pass than this one, with the same number; once no rank is in an earlier one, so that all see the
        same."""
        words, number = self._words, self.number
        at_once = [(words[at + _NUMBER], words[at + _DIGEST + number % 2], words[at + _NUMBER]) for at in self._at]
        digests = {digest for before, digest, after in at_once if before == after == number}
        return len(digests) > 1 and all(before >= number for before, *_ in at_once)

    # -------------------------------------------------------------------------------------------------------- failures

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed in this epoch."""
        return self._words[0] > self.epoch

    @property
    def number(self) -> int:
        """Of the pass that this rank has begun last."""
        return self._words[self._mine + _NUMBER]

    def fail(self, error: BaseException, number: int | None = None) -> None:
        """This rank leaves a pass early, because of `error`: that of `number`, or the one that it has begun last."""
        words, at = self._words, self._mine
        differ = isinstance(error, ValueError) and str(error).startswith(pass_agreement.PASSES_DIFFER)
        if words[at + _FAILED] <= self.epoch:
            late = isinstance(error, CollectiveFailed)
            self._write(_WHY, str(error) if differ or late else f"{type(error).__name__}: {error}")
            words[at + _LOST], words[at + _WAS_LATE] = self.number if number is None else number, late
            words[at + _DIFFERS] = differ
            words[at + _FAILED] = self.epoch + 1
        words[0] = self.epoch + 1
        self.told = True

    def check(self) -> None:
        """Raise, once for each failure, where a rank has left the pass early that this rank makes, or an earlier one.

        Raises:
            ValueError: where ranks made different passes.
            CollectiveFailed: where others gave up waiting for ranks; it names these.
            PassLost: otherwise. It says which rank failed, and why.
        """
        if self._words[0] > self.epoch and not self.told:  # is_broken, without a call
            self._raise_for(self._failed_until(self.number))

    def must_recover(self) -> bool:
        """Whether all ranks have to meet before the pass that this rank is about to begin. Raises as `check` does if that pass is lost."""
        if not self.is_broken:
            return False
        if not self.told:
            self.check()
            failed = self._failed_until(self.number + 1)
            # A rank that is late has lost nothing where the others gave up waiting for it before it began the pass.
            self._raise_for([rank for rank in failed if not self._words[self._at[rank] + _WAS_LATE]])
            return bool(failed)  # otherwise another rank is ahead, and failed in a later pass
        return True

    def _failed_until(self, number: int) -> list[int]:
        """The ranks that have failed in this epoch, in a pass up to this one: all ranks can still end those before."""
        words = self._words
        return [rank for rank, at in enumerate(self._at) if words[at + _FAILED] > self.epoch and words[at + _LOST] <= number]

    def _raise_for(self, failed: list[int]) -> None:
        if not failed:
            return
        words = self._words
        self.told = True
        differ = [rank for rank in failed if words[self._at[rank] + _DIFFERS]]
        if differ:
            raise ValueError(self._read(differ[0], _WHY))
        left = [rank for rank in failed if not words[self._at[rank] + _WAS_LATE]]
        if not left:
            with failures.Waiting(self._group):
                raise failures.failure(self._group, self._read(failed[0], _WHY))
        names = dist.get_process_group_ranks(self._group)
        each = "; ".join(f"rank {names[rank]} ended a pass early: {self._read(rank, _WHY)}" for rank in left)
        raise PassLost(f"expert parallelism over mapped memory: {each}. What this rank has computed since with layers whose experts are"
                       " spread over this group may hold anything")

    # ----------------------------------------------------------------------------------------------------------- waits

    def enters(self, channel: int) -> None:
        """This rank begins one more barrier, unless `check` raises."""
        words, at = self._words, self._mine
        words[at + _ENTERS] = 1
        try:
            self.check()
            words[at + channel] += 1
        finally:
            words[at + _ENTERS] = 0

    def most_barriers(self) -> list[int]:
        """The most barriers that any rank has begun, by channel. After a failure no rank begins more, as those that have not seen it are
        waited for where they are about to begin one."""
        until = time.monotonic() + _SECONDS_TO_ENTER
        while any(self._words[at + _ENTERS] for at in self._at) and time.monotonic() < until:
            time.sleep(0)
        return [max(self._words[at + channel] for at in self._at) for channel in range(CHANNELS)]

    def closes(self, channel: int, barriers: int) -> None:
        """This rank has begun as many barriers as others have begun in a pass that is lost."""
        self._words[self._mine + channel] = barriers

    def wait_in_barrier(self, channel: int) -> None:
        """Wait until all ranks have begun the barrier that this rank has begun last; where no device waits. Raises as `look` does."""
        mine = self._words[self._mine + channel]
        self._wait(lambda: all(self._words[at + channel] >= mine for at in self._at), self.look)
        self.check()  # a rank that has left begins barriers, too

    def meet(self, said: int) -> list[int]:
        """Wait for all ranks, and return what each of them says: a number of 63 bits. Raises as `look` does."""
        words, at = self._words, self._mine
        number = words[at + _MEETINGS] + 1
        # A rank may be one meeting ahead of another that has not read yet, and not two.
        words[at + _SAID + number % 2] = said
        words[at + _MEETINGS] = number
        self._wait(lambda: all(words[of + _MEETINGS] >= number for of in self._at), self.look)
        self._refuse_if_they_differ()  # ranks that never waited may have met in different passes
        return [words[of + _SAID + number % 2] for of in self._at]

    def look(self) -> None:
        """What a rank does while it waits: raise as `check` does, and ValueError where it sees that ranks make different passes."""
        self.check()
        self._refuse_if_they_differ()

    def _refuse_if_they_differ(self) -> None:
        if self.differ():
            raise pass_agreement.refusal(self.texts(), self._group)

    def recover(self, close: Callable[[], None]) -> int:
        """Meet all ranks after a failure, call `close` when none of them begins a barrier any more, and meet them again. Returns the most
        forwards that any of them has begun until then.

        Raises:
            CollectiveFailed: where ranks do not come; it names them.
        """
        words, at, epoch = self._words, self._mine, self.epoch + 1
        words[at + _RECOVERS] = epoch
        self._wait(lambda: all(words[of + _RECOVERS] >= epoch for of in self._at))
        close()
        agreed = {word: max(words[of + word] for of in self._at) for word in (_NUMBER, _FORWARDS, _MEETINGS)}
        words[at + _RECOVERED] = epoch
        self._wait(lambda: all(words[of + _RECOVERED] >= epoch for of in self._at))
        words[at + _DIGEST] = words[at + _DIGEST + 1] = 0
        for word, number in agreed.items():
            words[at + word] = number
        self.epoch, self.told = epoch, False
        return agreed[_FORWARDS]

    def _wait(self, there: Callable[[], bool], look: Callable[[], None] | None = None) -> None:
        def asked() -> bool:
            if there():
                return True
            time.sleep(_PAUSE_SECONDS)  # ranks may be more than the host's cores
            return False
        wait_for_ranks(asked, self._group, look, None if look is None else self.fail)

    # ----------------------------------------------------------------------------------------------------------- texts

    def _write(self, which: int, text: str) -> None:
        encoded = text.encode()[: _TEXT - 1] + b"\0"
        begin = self._mine * _WORD + _WORDS * _WORD + which * _TEXT
        self._bytes[begin : begin + len(encoded)] = encoded

    def _read(self, rank: int, which: int) -> str:
        begin = self._at[rank] * _WORD + _WORDS * _WORD + which * _TEXT
        return bytes(self._bytes[begin : begin + _TEXT]).split(b"\0", 1)[0].decode(errors="ignore")


def open_board(group: dist.ProcessGroup) -> tuple[NoticeBoard | None, str | None]:
    """(the group's board, None), or (None, why the ranks cannot share a page). Collective; the first rank makes the page."""
    what, size = "sharing a page of the host", _FIRST_WORDS * _WORD + dist.get_world_size(group) * _BYTES
    path, fault, page = None, None, None
    if dist.get_rank(group) == 0:
        try:
            handle, path = tempfile.mkstemp(prefix="gbmoe-", dir=_FOLDER)
            os.ftruncate(handle, size)
            os.close(handle)
        except OSError as error:
            fault = str(error)
    each: list[Any] = [None] * dist.get_world_size(group)
    failures.guarded(lambda: dist.all_gather_object(each, (path, fault), group=group), group, what)
    name, fault = each[0]
    if fault is None:
        try:
            with open(name, "r+b") as file:
                page = mmap.mmap(file.fileno(), size)
        except OSError as error:  # as in another container with the same name of the host
            fault = str(error)
    failures.guarded(lambda: dist.all_gather_object(each, fault, group=group), group, what)
    if path is not None:
        Path(path).unlink(missing_ok=True)
    faults = [f"rank {rank}: {fault}" for rank, fault in enumerate(each) if fault is not None]
    if faults or page is None:
        return None, "the ranks cannot share a page of the host's memory: " + "; ".join(faults)
    return NoticeBoard(page, group), None
