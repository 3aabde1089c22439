"""Peers that misbehave, for a process of their own."""

import os
import signal
import sys
import time

import torch

from gbmoe.cli.bench.peers.base import Peer
from gbmoe.cli.bench.peers.bmm import Bmm


class Crashing(Peer):
    """Dies as a process does that touches memory which is not its own."""

    def layer(self, case, weights):
        print("about to touch what is not mine", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class CrashingOnce(Bmm):
    """Dies in forward alone."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        layer.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else os.abort())
        return layer


class Hanging(Peer):
    def layer(self, case, weights):
        time.sleep(600)


class Wrong(Bmm):
    """Five per cent too much."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        layer.register_forward_hook(lambda _module, _inputs, out: out * 1.05)
        return layer


class WrongChoice(Bmm):
    """Every token to the first experts."""

    def layer(self, case, weights):
        layer = super().layer(case, weights)
        first_K = torch.arange(case.top_k)
        layer.router.register_forward_hook(
            lambda _module, _inputs, outputs: (*outputs[:-1], first_K.expand_as(outputs[-1]).clone()))
        return layer


class Raising(Peer):
    def layer(self, case, weights):
        raise RuntimeError("the peer is broken")


class OutOfMemory(Peer):
    def layer(self, case, weights):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


class Absent(Peer):
    def unavailable(self, device):
        return "it is not here"


class CrashingImport(Peer):
    def unavailable(self, device):
        os._exit(3)
