"""How train_lm.py reacts to SIGTERM, SIGINT (Ctrl-C) and SIGUSR1.

Each asks it to save after the current step and to end. SIGTERM and SIGINT end it at once if one of them comes a second time, or before
the first step has ended, when there is nothing to save. SIGUSR1 is a scheduler's warning that time is running out: it may come at any
moment and repeatedly, and never ends the run before a step is saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One request may arrive several times: `timeout` signals both a process and its group, and Slurm signals every process of a step, among
# them torchrun, which passes it on. Such a signal within this time after another one belongs to the same request. Nobody who presses
# Ctrl-C twice is as fast as `timeout`, and nobody wants to wait.
SAME_REQUEST_S = {signal.SIGTERM: 3.0, signal.SIGINT: 0.1}
# How long unwinding may take (removing a file that is being written, ending a compiler) before the process ends without it.
UNWINDING_S = 2.0


class Ended(SystemExit):
    """Raised in the main thread where SIGTERM ends the process at once; its code is the exit status, 128 + the signal."""


class StopSignals:
    """Receives the signals from its creation on. It must be created once, in the main thread. SIGINT stays ignored where it is, as in a
    background process of a shell.

    Python runs signal handlers in the main thread, between two bytecodes, and so not while that thread computes or waits in C++ for
    other ranks. Therefore another thread reads the signals from the interpreter's wake-up socket, decides what to do, and ends the
    process if the main thread does not.

    Attributes:
        asked: the name of the first signal that came, or None.
        worth_saving: the trainer sets it when the first step has ended.
    """

    def __init__(self):
        self.asked: str | None = None
        self.worth_saving = False
        self._ending: signal.Signals | None = None
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # set_wakeup_fd requires it
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="signals").start()
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._unwind)

    def ignore(self) -> None:
        """Ignore the signals from here on. An ending interpreter removes its handlers, so that a repeated signal would kill it."""
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)

    def _unwind(self, number: int, frame: object) -> None:
        """Called in the main thread at every signal."""
        ending, self._ending = self._ending, None  # raise only once, so that nothing interrupts the unwinding
        if ending:
            raise Ended(128 + ending)

    def _watch(self, reader: socket.socket) -> None:
        """The other thread's function: reads signals until one has to end the process, and then makes sure that it ends."""
        asked_at = None
        while True:
            number = reader.recv(1)[0]
            if number not in STOPPING:
                continue
            if number in SAME_REQUEST_S:
                again = asked_at is not None and time.monotonic() - asked_at > SAME_REQUEST_S[number]
                if again or not self.worth_saving:
                    break
                asked_at = asked_at or time.monotonic()
            self.asked = self.asked or signal.Signals(number).name
        number = signal.Signals(number)
        why = "it came a second time" if self.worth_saving else "nothing to save before the first step has ended"
        # Ctrl-C reaches all ranks, of which one says so.
        if number != signal.SIGINT or os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(2, f"train_lm: ended at once by {number.name}: {why}\n".encode())
        self._ending = number
        # Runs _unwind, and interrupts a system call in which the main thread may wait.
        signal.pthread_kill(threading.main_thread().ident, number)
        time.sleep(UNWINDING_S)
        os._exit(128 + number)
