"""How a signal ends a command: what the command has begun is undone, and the exit status is 128 + the signal's number."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from gbmoe._interrupted_import import INTERRUPTED, is_first_rank

# A second Ctrl-C within this time belongs to the first, so that it does not interrupt the removal of what was written.
_SAME_REQUEST_S = 2.0
# How long a rank may go on after Ctrl-C.
_UNWINDING_S = 2.0


@contextmanager
def _handled(number: signal.Signals, handler: Callable) -> Iterator[None]:
    """Have the signal handled by `handler` inside the block, unless it is ignored; only the main thread can, others change nothing."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def ctrl_c_unwinds() -> Iterator[None]:
    """Inside the block Ctrl-C raises KeyboardInterrupt, once for each time that somebody presses it."""
    last = -_SAME_REQUEST_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_REQUEST_S:
            last = now
            raise KeyboardInterrupt

    with _handled(signal.SIGINT, interrupt):
        yield


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Inside the block SIGTERM, which a batch job gets whose time is over, raises SystemExit, as an error would end it."""
    def terminate(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    with _handled(signal.SIGTERM, terminate):
        yield


def say_interrupted(command: str) -> None:
    """Say so in one line; where there are ranks, only the first one does."""
    if is_first_rank():
        print(f"{command}: interrupted", file=sys.stderr, flush=True)


def end_waiting_rank() -> None:
    """Have this process end soon after a Ctrl-C, even where it waits in C++ for ranks that have ended, and Python runs no handler.

    Python writes the number of each signal to the wake-up descriptor at once, and another thread reads it there.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # set_wakeup_fd requires it
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch(writer: socket.socket) -> None:  # this reference keeps it open
        while reader.recv(1)[0] != signal.SIGINT:
            pass
        time.sleep(_UNWINDING_S)
        say_interrupted("gbmoe")
        os._exit(INTERRUPTED)

    threading.Thread(target=watch, args=(writer,), daemon=True, name="signals").start()
