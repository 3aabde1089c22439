"""Ranks that do not come: collectives and waits whose errors name them. Only here is a rank that hangs noticed on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gbmoe.parallel import roll_call

ROLL_CALL_SECONDS = 5.0  # how long a rank that saw a collective fail waits for the others to answer
_MOST_NAMED = 16  # groups of more ranks are named by their number

# How long the host asks without a pause; how long it then lets other threads of Python run between its questions, but does not sleep,
# because a thread that sleeps is woken late, and the device has nothing to do meanwhile; and how long it sleeps afterwards.
_SPIN_SECONDS = 0.01
_AWAKE_SECONDS = 1.0
_PAUSE_SECONDS = 1e-4


def timeout_or_none(group: dist.ProcessGroup) -> timedelta | None:
    """The time after which the group's collectives fail; None, which is torch's default, where it cannot be told."""
    try:
        return group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """The seconds after which the collectives of a group fail (None: the default group)."""
    found: Any = dist.group.WORLD if group is None else group
    return (timeout_or_none(found) or dist.default_pg_timeout).total_seconds()


def named(ranks: list[int]) -> str:
    """"rank 3" or "ranks 3, 5"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class CollectiveFailed(RuntimeError):
    """A collective of several ranks failed; the message names the ranks that are missing."""


def guarded(collective: Callable[[], Any], group: dist.ProcessGroup | None, what: str = "exchange",
            whose: str = "expert parallelism") -> Any:
    """Call `collective`. Where torch.distributed raises, raise CollectiveFailed, which names the group's ranks and the missing ones."""
    calls = roll_call.of_default_group(group)
    if calls is not None:
        calls.enter(group)
    try:
        return collective()
    except torch.OutOfMemoryError:  # of this rank alone
        raise
    except RuntimeError as error:  # torch.distributed's errors are subclasses of it
        raise failure(group, error, what, whose) from error
    finally:
        if calls is not None:
            calls.leave()


class Waiting:
    """`with Waiting(group):` this thread waits for other ranks of the group. Only inside may `failure` be called."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group, self._calls = group, roll_call.of_default_group(group)

    def __enter__(self) -> None:
        if self._calls is not None:
            self._calls.enter(self._group)

    def __exit__(self, *error: object) -> None:
        if self._calls is not None:
            self._calls.leave()


def failure(group: dist.ProcessGroup | None, why: object, what: str = "exchange", whose: str = "expert parallelism") -> CollectiveFailed:
    """The error of a rank that got no answer from the others of its group. Calls the roll of all ranks, for ROLL_CALL_SECONDS."""
    return CollectiveFailed(f"{whose}: {what} with {_who(group)} failed: {why}")


def _who(group: dist.ProcessGroup | None) -> str:
    try:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        calls = roll_call.of_default_group()
        missing = None if calls is None else calls.missing(ROLL_CALL_SECONDS)
    except Exception as error:  # after a failure torch.distributed's own calls may fail in any way
        return f"the ranks of the group (which of them are left cannot be told: {type(error).__name__})"
    who = named(ranks) if len(ranks) <= _MOST_NAMED else f"the {len(ranks)} ranks"
    if missing is None:
        said = "; which of them are left cannot be told, as the store of the process group does not answer"
    else:
        said = f"; {named(missing)} did not report it, and may have died or hang" if missing else ""
    return f"{who} of the group (this is rank {dist.get_rank()}{said})"


def wait_for_ranks(there: Callable[[], bool], group: dist.ProcessGroup | None, look: Callable[[], None] | None = None,
                   give_up: Callable[[Exception], None] | None = None) -> None:
    """Wait until `there` says so, shortly before the group's timeout at the longest. Meanwhile `look` is called again and again; what it
    raises ends the wait. `give_up` is called with the error before the roll is called, which takes seconds.

    NCCL's watchdog ends the process at the timeout without saying which rank it waited for; until then the ranks that wait can
    still call each other.

    Raises:
        CollectiveFailed: naming the ranks that do not answer, or do not wait, too.
    """
    begin, limit = time.monotonic(), None
    with Waiting(group):
        while not there():
            waited = time.monotonic() - begin
            if waited <= _SPIN_SECONDS:
                continue
            if look is not None:
                look()
            if limit is None:  # torch takes as long as a few kernels to tell it, and most waits are shorter than that
                timeout = timeout_of(group)
                limit = max(timeout - 2 * ROLL_CALL_SECONDS, timeout / 2)
            if waited > limit:
                why = f"no answer within {limit:.0f} s"
                if give_up is not None:
                    give_up(CollectiveFailed(why))
                raise failure(group, why)
            time.sleep(0 if waited < _AWAKE_SECONDS else _PAUSE_SECONDS)
