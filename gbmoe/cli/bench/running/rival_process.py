"""A process of its own for each rival: if the rival crashes, hangs or leaks memory, only that process ends, and its row says so.

Processes are forked from a server that has imported torch and has never touched a device (multiprocessing's
forkserver), so that a new one takes no longer than its CUDA context. One serves a rival for the whole run; after a
failure the next measurement gets another. Ctrl-C reaches the parent alone. However the parent ends, a rival's process ends with it, and
with it the compilers that the rival has started.

Timed in bursts, a measurement is one question. Timed sustained it is several: the process makes a subject ready and keeps it, takes its
turns with it, and lets go of it; and gbmoe's implementations have such a process, too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from contextlib import suppress
from multiprocessing import connection as connections, forkserver, resource_tracker
from multiprocessing.connection import Connection

import torch

from gbmoe.cli.bench import checkout, rivals
from gbmoe.cli.bench.measurements.measurement import GRAPH, Measurement, Subject
from gbmoe.cli.bench.running.energy import EnergyCounter, counter_of
from gbmoe.cli.bench.running.repeat import clock_of
from gbmoe.cli.bench.running.sustained_turn import Turn, take_turn
from gbmoe.cli.bench.running.verify_and_time import (
    CRASHED,
    LEFT_OUT,
    OUT_OF_MEMORY,
    TIMED_OUT,
    VERIFIED,
    WRONG,
    Conditions,
    extra_peak_bytes,
    failure,
    few_threads,
    forget,
    is_lost,
    measure,
    unmeasured,
    verify,
)

# What each process would import, for seconds. torch.utils.checkpoint, which the oracle uses, imports torch._dynamo when it is called.
_PRELOADED = [__name__, "torch._dynamo"]
# How long importing a rival may take.
_IMPORT_SECONDS = 300
# How long a process that has closed its connection may take to end.
_END_SECONDS = 10
# Outcomes after which the process can go on; it cannot after a failed capture of a CUDA graph, which also counts as left out.
_HARMLESS = (VERIFIED, WRONG, OUT_OF_MEMORY, LEFT_OUT)
_LAST_LINES = 3


class _Gone(Exception):
    """The process gave no answer. It carries the reason as an outcome and in words."""

    def __init__(self, outcome: str, problem: str):
        super().__init__(problem)
        self.outcome, self.problem = outcome, problem


class Worker:
    """A rival's process, or another implementation's, started when it is first asked for something."""

    def __init__(self, rival: str, conditions: Conditions, timeout: float):
        self.rival, self.address, self.conditions, self.timeout = rival, rivals.RIVALS.get(rival), conditions, timeout
        self._process, self._connection, self._log = None, None, None

    def unavailable(self) -> tuple[str | None, str | None]:
        """(None if the rival can be used, otherwise the reason why not; what the rival says about itself)."""
        try:
            return self._ask("unavailable", self.conditions.device, seconds=_IMPORT_SECONDS)
        except _Gone as gone:
            return f"{gone.outcome} while it was imported: {gone.problem}", None

    def measure(self, measurement: Measurement) -> dict:
        """The measurement's row; where the process fails, a row that says so."""
        try:
            row = self._ask("measure", measurement, self.conditions, seconds=self.timeout)
        except _Gone as gone:
            return unmeasured(measurement, self.conditions, gone.outcome, gone.problem)
        failed_capture = row.pop("capture_failed", False) or (measurement.computation == GRAPH and not row["verified"])
        if row["outcome"] not in _HARMLESS or failed_capture:
            self.stop()
        return row

    def make_ready(self, measurement: Measurement) -> tuple[dict, int | None]:
        """(the row without a time, the bytes that a call moves); the subject of a row that is verified stays in the process."""
        try:
            row, moved = self._ask("make_ready", measurement, self.conditions, seconds=self.timeout)
        except _Gone as gone:
            return unmeasured(measurement, self.conditions, gone.outcome, gone.problem), None
        if row["outcome"] not in _HARMLESS or (measurement.computation == GRAPH and not row["verified"]):
            self.stop()
        return row, moved

    def take_turn(self, seconds: float) -> Turn | dict:
        """The turn with what is ready; or the outcome and the problem, where it failed, and with it what was ready."""
        try:
            taken = self._ask("take_turn", self.conditions.device, seconds, seconds=self.timeout)
        except _Gone as gone:
            return {"outcome": gone.outcome, "problem": gone.problem}
        if isinstance(taken, dict) and taken["outcome"] not in _HARMLESS:
            self.stop()
        return taken

    def rest(self) -> None:
        """Let the process free the memory that it keeps between rows."""
        if self._process is not None:
            try:
                self._ask("rest", self.conditions.device, seconds=self.timeout)
            except _Gone:
                pass  # the next measurement gets a new process

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has just begun, and has no group yet
                os.killpg(self._process.pid, signal.SIGKILL)
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
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            gone = _Gone(CRASHED, self._last_words())
            self.stop()
            raise gone from None
        except BaseException:  # no answer in time, or Ctrl-C
            self.stop()
            raise
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        _start_server()
        descriptor, self._log = tempfile.mkstemp(prefix="gbmoe-bench-", suffix=".log")
        os.close(descriptor)
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._log, self.rival, self.address))
        try:
            process.start()
        except BaseException:  # Ctrl-C, while the server imports torch
            self._connection.close()
            os.unlink(self._log)
            raise
        finally:
            theirs.close()
        self._process = process

    def _last_words(self) -> str:
        code = self._process.exitcode
        how = "gave no answer" if code is None else f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        with open(self._log, errors="replace") as log:
            lines = [line.strip() for line in log if line.strip()][-_LAST_LINES:]
        return " | ".join([f"its process {how}", *lines])


def _start_server() -> None:
    """Start the server, unless it runs, with SIGINT blocked in it and in all that it forks."""
    resource_tracker.ensure_running()  # which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Wait for the parent's end, and then kill this process with all that it has started."""
    connections.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def _serve(connection: Connection, log: str, rival: str, address: str | None) -> None:
    """The process: answers until it is killed or the parent is gone. What it prints goes to the log."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # the parent was interrupted before this began
        return
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    checkout.benchmarks()  # its measurements may be asked for
    if address is not None:
        rivals.RIVALS[rival] = address
    while True:
        try:
            question, arguments = connection.recv()
        except EOFError:
            return
        connection.send(_ANSWERS[question](rival, *arguments))


def _unavailable(rival: str, device: torch.device) -> tuple[str | None, str | None]:
    adapter = rivals.load(rival)
    reason = adapter.unavailable(device)
    return reason, None if reason else adapter.about()


def _measure(rival: str, measurement: Measurement, conditions: Conditions) -> dict:
    with few_threads(conditions.device):
        return measure(measurement, conditions)


class _Ready:
    """What is resident in this process between its turns: weights and inputs, and no result of a call."""

    subject: Subject | None = None
    calls = 2  # what the next turn begins with
    counter: EnergyCounter | None = None


def _make_ready(rival: str, measurement: Measurement, conditions: Conditions) -> tuple[dict, int | None]:
    device = conditions.device
    _Ready.subject, _Ready.calls = None, 2
    with few_threads(device):
        row, subject = verify(measurement, conditions)
        if subject is None:
            forget(device)
            return row, None
        try:
            subject.forget_oracle()
            row["extra_peak_bytes"] = extra_peak_bytes(measurement, subject, device)  # this calls once more
            moved = subject.bytes_moved()
            _leave_between_turns(subject, device)
        except Exception as error:
            return row | {"verified": False} | failure(error, device), None
    _Ready.subject, (_Ready.counter, _) = subject, counter_of(device)
    return row, moved


def _take_turn(rival: str, device: torch.device, seconds: float) -> Turn | dict:
    try:
        with few_threads(device):
            turn = take_turn(_Ready.subject, clock_of(device), seconds, _Ready.calls, _Ready.counter)
            _leave_between_turns(_Ready.subject, device)
    except Exception as error:
        found = failure(error, device)
        _Ready.subject = None
        forget(device)
        return found
    _Ready.calls = turn.calls
    return turn


def _leave_between_turns(subject: Subject, device: torch.device) -> None:
    """Hand back the memory that only a call needs: other processes need it for their calls."""
    subject.reset()
    if device.type == "cuda" and not is_lost(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _rest(rival: str, device: torch.device) -> None:
    _Ready.subject = None
    forget(device)


_ANSWERS = {"unavailable": _unavailable, "measure": _measure, "make_ready": _make_ready, "take_turn": _take_turn, "rest": _rest}
