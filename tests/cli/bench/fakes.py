"""Rivals that misbehave, each to be run in a process of its own."""

import os
import signal
import subprocess
import sys
import time

import torch

from gbmoe.cli.bench.rivals.bmm import Bmm
from gbmoe.cli.bench.rivals.rival import Rival


class Crashing(Rival):
    """Dies as a process does that accesses memory which is not its own."""

    def layer(self, case, weights):
        print("about to touch what is not mine", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class CrashingOnce(Bmm):
    """Dies in the forward computation, and works in the other."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        layer.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else os.abort())
        return layer


class Hanging(Rival):
    def layer(self, case, weights):
        time.sleep(600)


def _logged(words):
    """To the file that the test names: which process is at what."""
    path = os.environ.get("GBMOE_TEST_LOG")
    if path:
        with open(path, "a") as log:
            log.write(f"{os.getpid()} {words}\n")


class Logging(Bmm):
    """Writes down when it is made and when it is called."""

    name = "Logging"

    def layer(self, case, weights):
        _logged(f"{self.name} made")
        layer = super().layer(case, weights)
        layer.register_forward_hook(lambda *_: _logged(f"{self.name} called"))
        return layer


class LoggingToo(Logging):
    name = "LoggingToo"


class _FailingLater(Bmm):
    """Once it has been verified."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        self.calls = 0

        def count(*_):
            self.calls += 1
            if self.calls > 3:
                self.fail()

        layer.register_forward_hook(count)
        return layer


class CrashingLater(_FailingLater):
    def fail(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class OutOfMemoryLater(_FailingLater):
    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


class Wrong(Bmm):
    """Returns outputs that are five per cent too large."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        layer.register_forward_hook(lambda _module, _inputs, out: out * 1.05)
        return layer


class WrongChoice(Bmm):
    """Sends every token to the first experts."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        first_K = torch.arange(case.top_k)
        layer.router.register_forward_hook(
            lambda _module, _inputs, outputs: (*outputs[:-1], first_K.expand_as(outputs[-1]).clone()))
        return layer


class Raising(Rival):
    def layer(self, case, weights):
        raise RuntimeError("the rival is broken")


class OutOfMemory(Rival):
    def layer(self, case, weights):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


class Absent(Rival):
    def unavailable(self, device):
        return "it is not here"


class CrashingImport(Rival):
    def unavailable(self, device):
        os._exit(3)


class Slow(Rival):
    """Starts a program, says which, and takes long."""

    def layer(self, case, weights):
        child = subprocess.Popen(["sleep", "600"])
        with open(os.environ["GBMOE_TEST_LOG"], "w") as log:
            log.write(f"{os.getpid()} {child.pid}\n")
        time.sleep(600)
