"""A process of its own for each peer: what crashes, hangs or leaks there, ends there, and is the result.

Processes are forked from a server that has imported torch and has never touched a device (multiprocessing's
forkserver), so that a new one takes no longer than its CUDA context. One serves a peer for the whole run; after a
failure the next measurement gets another.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection

import torch

from gbmoe.cli.bench import peers
from gbmoe.cli.bench.measure import (
    CRASHED,
    LEFT_OUT,
    OUT_OF_MEMORY,
    TIMED_OUT,
    VERIFIED,
    WRONG,
    Conditions,
    few_threads,
    forget,
    measure,
    unmeasured,
)
from gbmoe.cli.bench.measurement import GRAPH, Measurement

# How long a peer may take to be imported.
_IMPORT_SECONDS = 300
# How long a process that has closed its connection may take to end.
_END_SECONDS = 10
# After these the process is as good as new; but not after a graph that could not be captured.
_HARMLESS = (VERIFIED, WRONG, OUT_OF_MEMORY, LEFT_OUT)
_LAST_LINES = 3


class _Gone(Exception):
    """The process gave no answer: why, as an outcome and in words."""

    def __init__(self, outcome: str, problem: str):
        super().__init__(problem)
        self.outcome, self.problem = outcome, problem


class Worker:
    """A peer's process, started when it is first asked for something."""

    def __init__(self, peer: str, conditions: Conditions, timeout: float):
        self.peer, self.address, self.conditions, self.timeout = peer, peers.PEERS[peer], conditions, timeout
        self._process, self._connection, self._log = None, None, None

    def unavailable(self) -> tuple[str | None, str | None]:
        """(None where the peer can be used, else why not; what it says about itself)."""
        try:
            return self._ask("unavailable", self.conditions.device, seconds=_IMPORT_SECONDS)
        except _Gone as gone:
            return f"{gone.outcome} when it was imported: {gone.problem}", None

    def measure(self, measurement: Measurement) -> dict:
        """The row, whatever happens."""
        try:
            row = self._ask("measure", measurement, self.conditions, seconds=self.timeout)
        except _Gone as gone:
            return unmeasured(measurement, self.conditions, gone.outcome, gone.problem)
        if row["outcome"] not in _HARMLESS or (measurement.computation == GRAPH and not row["verified"]):
            self.stop()
        return row

    def rest(self) -> None:
        """Have the process free what it keeps between rows."""
        if self._process is not None:
            try:
                self._ask("rest", self.conditions.device, seconds=self.timeout)
            except _Gone:
                pass  # the next measurement gets a new one

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.join()
        self._connection.close()
        os.unlink(self._log)
        self._process = None

    def _ask(self, question: str, *arguments, seconds: float):
        if self._process is None:
            self._start()
        try:
            self._connection.send((question, arguments))
            if not self._connection.poll(seconds):
                raise _Gone(TIMED_OUT, f"no result in {seconds:g} s")
            answer = self._connection.recv()
        except _Gone:
            self.stop()
            raise
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            gone = _Gone(CRASHED, self._last_words())
            self.stop()
            raise gone from None
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        descriptor, self._log = tempfile.mkstemp(prefix="gbmoe-bench-", suffix=".log")
        os.close(descriptor)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._log, self.peer, self.address))
        self._process.start()
        theirs.close()

    def _last_words(self) -> str:
        code = self._process.exitcode
        how = "gave no answer" if code is None else f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        with open(self._log, errors="replace") as log:
            lines = [line.strip() for line in log if line.strip()][-_LAST_LINES:]
        return " | ".join([f"its process {how}", *lines])


def _serve(connection: Connection, log: str, peer: str, address: str) -> None:
    """The process: answers until it is killed or the parent is gone. What it prints goes to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    peers.PEERS[peer] = address
    while True:
        try:
            question, arguments = connection.recv()
        except EOFError:
            return
        connection.send(_ANSWERS[question](peer, *arguments))


def _unavailable(peer: str, device: torch.device) -> tuple[str | None, str | None]:
    adapter = peers.load(peer)
    reason = adapter.unavailable(device)
    return reason, None if reason else adapter.about()


def _measure(peer: str, measurement: Measurement, conditions: Conditions) -> dict:
    with few_threads(conditions.device):
        return measure(measurement, conditions)


def _rest(peer: str, device: torch.device) -> None:
    forget(device)


_ANSWERS = {"unavailable": _unavailable, "measure": _measure, "rest": _rest}
