"""What SIGTERM and SIGUSR1 do to train_lm.py.

Either asks it to save after the current step and to end. SIGTERM ends it at once where there is nothing to save yet, that is
before the first step has ended, and where it comes a second time. SIGUSR1 is a scheduler's warning that time is running out: it
may come at any moment, repeated, and never ends the run before a step is saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
# One request may arrive several times: `timeout` signals a process and its group; Slurm every process of a step, of which
# torchrun passes it on. Within this time a SIGTERM is still the one before it.
SAME_REQUEST_S = 3.0
# What unwinding may take (a file that is being written is removed, a compiler ended) until the process ends without it.
UNWINDING_S = 2.0


class Ended(SystemExit):
    """Raised in the main thread where SIGTERM ends the process at once; its code is the exit status, 128 + the signal."""


class StopSignals:
    """Receives the signals, from its creation on. To be made once, in the main thread.

    Python runs a handler in the main thread, between two bytecodes: not while that computes, or waits in C++ for other ranks. So
    another thread reads the signals from the interpreter's wake-up socket, decides, and ends the process where the main thread
    does not come to it.

    Attributes:
        asked: name of the first signal that came, or None.
        worth_saving: to be set when the first step has ended.
    """

    def __init__(self):
        self.asked: str | None = None
        self.worth_saving = False
        self._ending = False
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # as set_wakeup_fd wants it
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="signals").start()
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            signal.signal(number, self._unwind)

    def ignore(self) -> None:
        """From here on. An interpreter that ends takes its handlers away, and a signal sent once more would kill it."""
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)

    def _unwind(self, number: int, frame: object) -> None:
        """Called in the main thread at every signal."""
        if self._ending:
            self._ending = False  # once: nothing is to interrupt the unwinding
            raise Ended(128 + signal.SIGTERM)

    def _watch(self, reader: socket.socket) -> None:
        """The other thread: reads signals until one ends the process, then sees to it that it ends."""
        terminated_at = None
        while True:
            number = reader.recv(1)[0]
            if number not in STOPPING:
                continue
            if number == signal.SIGTERM:
                again = terminated_at is not None and time.monotonic() - terminated_at > SAME_REQUEST_S
                if again or not self.worth_saving:
                    break
                terminated_at = terminated_at or time.monotonic()
            self.asked = self.asked or signal.Signals(number).name
        why = "it came a second time" if self.worth_saving else "nothing to save before the first step has ended"
        with contextlib.suppress(OSError):  # nobody may read it any more
            os.write(2, f"train_lm: ended at once by SIGTERM: {why}\n".encode())
        self._ending = True
        # Runs _unwind, and interrupts a system call in which the main thread may wait.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        time.sleep(UNWINDING_S)
        os._exit(128 + signal.SIGTERM)
