"""`python -m gbmoe`, and the program `gbmoe`; see gbmoe/cli."""

import os
import signal
import sys
from typing import NoReturn

from gbmoe._interrupted_import import INTERRUPTED
from gbmoe.cli import main
from gbmoe.cli.signals import end_waiting_rank, say_interrupted

# Of a program that writes to a pipe which nobody reads any more, as a shell shows it.
_BROKEN_PIPE = 141  # 128 + SIGPIPE


def program() -> NoReturn:
    """Run the command of sys.argv and end the process with its exit status."""
    among_ranks = os.environ.get("WORLD_SIZE", "1") != "1"
    if among_ranks:
        end_waiting_rank()
    try:
        status = _status()
        _flush()
    except BrokenPipeError:  # as in `gbmoe info | head -1`
        _discard_output()
        status = _BROKEN_PIPE
    except OSError as error:  # as for > /dev/full
        _discard_output()
        print(f"gbmoe: standard output: {error.strerror}", file=sys.stderr)
        status = 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; a signal must not disturb how the interpreter ends
    if among_ranks:
        # Without what the interpreter does at its end: gloo's thread was seen to abort there, after all was done.
        os._exit(status)
    sys.exit(status)


def _status() -> int:
    try:
        return main()
    except KeyboardInterrupt as interrupted:
        say_interrupted(str(interrupted) or "gbmoe")
        return INTERRUPTED
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is where the file descriptor is closed
            stream.flush()


def _discard_output() -> None:
    """Have what is still in the buffer of standard output go nowhere, so that it is no error at the interpreter's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)


if __name__ == "__main__":
    program()
