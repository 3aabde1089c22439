"""Compilers that end together with the process that started them. Standard library only: setup.py runs this file before gbmoe can be
imported.

A build runs for minutes, and a batch system may end it at any moment: by SIGTERM, which ends Python without any clean-up, or by SIGKILL.
Its compilers run in sessions of their own and would go on. Therefore a second process watches: it holds the reading end of a pipe whose
writing end only the build has. When that closes, for whatever reason, it kills the compilers and removes the temporary files.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from .toolkit import CompileError, checked_output

# Reads "+12" when the process group 12 is started and "-12" when it has ended; its arguments are the paths to remove at the end.
_WATCHER = """
import os, shutil, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
for path in sys.argv[1:]:
    for attempt in range(100):  # what has just been killed may still be writing
        shutil.rmtree(path, ignore_errors=True)
        try:
            os.unlink(path)
        except OSError:
            pass
        if not os.path.lexists(path):
            break
        time.sleep(0.05)
"""
# The compiler's own process announces its number before it begins, so that no end of the build can come in between. Until then the pipe
# is its standard input, so that no unannounced process keeps it open.
_ANNOUNCED = 'echo "+$$" >&0; exec "$@" </dev/null'


class Compilers:
    """Runs compilers in process groups that are killed when the `with` block is left by an error, or when this process dies in it. The
    files and folders `temporary` are removed in any case. Several threads may use it."""

    def __init__(self, *temporary: Path):
        self._temporary = temporary
        self._lock = threading.Lock()  # so that nobody uses the pipe's number after it was closed

    def __enter__(self) -> Compilers:
        command = [sys.executable, "-I", "-S", "-c", _WATCHER, *map(str, self._temporary)]
        self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                         start_new_session=True, cwd="/")
        assert self._watcher.stdin is not None
        self._pipe = self._watcher.stdin
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the compilers that run, remove the temporary files, and let no other compiler start."""
        with self._lock, contextlib.suppress(OSError):
            self._pipe.close()
        self._watcher.wait()

    def run(self, command: list[str], scratch: Path) -> str:
        """Run a compiler, with its temporary files in `scratch`, and return what it printed. Raises CompileError where it fails."""
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with self._lock:
            if self._pipe.closed:
                raise CompileError("the build has been ended")
            # nvcc prints text in the encoding of its locale; bytes that are not UTF-8 must not stop the build.
            process = subprocess.Popen(["/bin/sh", "-c", _ANNOUNCED, "sh", *command], stdin=self._pipe, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, encoding="utf-8", errors="replace", env=environment,
                                       start_new_session=True)
        with process:
            printed, errors = process.communicate()
        with self._lock:
            if not self._pipe.closed:
                os.write(self._pipe.fileno(), b"-%d\n" % process.pid)
        return checked_output(command, process.returncode, printed + errors)
