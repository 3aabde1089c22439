"""A plugin for pytest: gbmoe in torchtitan's own unit tests, of its repository, unchanged.

    git clone https://github.com/pytorch/torchtitan && cd torchtitan
    PYTHONPATH=GBMOE/scripts:GBMOE python -m pytest -p gbmoe_in_torchtitans_tests ./tests/unit_tests/test_moe.py

GBMOE is a checkout of gbmoe. GBMOE_OVERRIDE names the override, "experts" or "moe_layer". Each configuration that it claims is built as if
torchtitan had applied it. Ranks are forked, so that they have gbmoe, too. The last line says how many experts were built and how often they
were called, in all processes.
"""

import multiprocessing
import os

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torchtitan.models.common import moe

from gbmoe.compat import torchtitan

OVERRIDE = os.environ.get("GBMOE_OVERRIDE", "experts")
counted = {what: multiprocessing.Value("q") for what in ("built", "called")}


def _claimed(config):
    if OVERRIDE == "experts":
        return type(config) is moe.GroupedExperts.Config
    return (type(config) is moe.MoE.Config and type(config.routed_experts) is moe.RoutedExperts.Config
            and type(config.routed_experts.inner_experts) is moe.GroupedExperts.Config)


def _counts(function, what):
    def instead(*args, **keywords):
        with counted[what]:
            counted[what].value += 1
        return function(*args, **keywords)
    return instead


target = {"experts": moe.GroupedExperts, "moe_layer": moe.MoE}[OVERRIDE].Config
ours = {"experts": torchtitan.GroupedExperts, "moe_layer": torchtitan.RoutedExperts}[OVERRIDE]
override, build = getattr(torchtitan, OVERRIDE), target.build
target.build = lambda config, *args, **keywords: build(override(config) if _claimed(config) else config, *args, **keywords)
ours.__init__ = _counts(ours.__init__, "built")
ours.forward = _counts(ours.forward, "called")
fork = multiprocessing.get_context("fork").Process
MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)


def pytest_terminal_summary(terminalreporter):
    built, called = (counted[what].value for what in ("built", "called"))
    terminalreporter.write_line(f"gbmoe's {OVERRIDE}: built {built} times, called {called} times")
