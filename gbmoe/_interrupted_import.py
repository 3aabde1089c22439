"""Ctrl-C while the command line still imports torch, which takes seconds: a line and status 130 instead of a traceback.

`python -m gbmoe` and the program `gbmoe` import the package before anything of their own runs, so gbmoe/__init__.py imports this first. In
any other program it changes nothing. gbmoe.cli.main puts handlers of its own in place of this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

INTERRUPTED = 128 + signal.SIGINT  # the exit status


def is_first_rank() -> bool:
    """Whether this process is the one of torchrun's that reports, or one that torchrun has not started."""
    return os.environ.get("RANK", "0") == "0"


def _is_the_program() -> bool:
    """Whether the command line of gbmoe is what this process was started for."""
    argv = getattr(sys, "argv", None) or [""]  # an interpreter inside another program may have none
    if argv[0] == "-m":  # as long as runpy looks for the module, whose name then precedes the arguments
        return sys.orig_argv[-len(argv)] in ("gbmoe", "-mgbmoe")
    return os.path.basename(argv[0]) in ("gbmoe", "gbmoe.exe")


def _end(number: int, frame: object) -> None:
    """The handler. There is nothing to undo yet: no process was started, and no file opened for writing."""
    command = [word for word in sys.argv[1:2] if word.replace("-", "").isalpha()]
    if is_first_rank():
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, f"{' '.join(['gbmoe', *command])}: interrupted\n".encode())
    os._exit(INTERRUPTED)


# Not where the signal is ignored, as in a background process of a shell.
if _is_the_program() and threading.current_thread() is threading.main_thread() \
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
