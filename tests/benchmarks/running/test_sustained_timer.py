"""The timer of several ranks: the order is rotated, as much is done untimed as timed, and calls are whole."""

import torch

from benchmarks.running.sustained_timer import time_in_turns
from gbmoe.cli.bench.measurements.measurement import Subject
from gbmoe.cli.bench.running.repeat import Sustained

CPU = torch.device("cpu")


class Named(Subject):
    def __init__(self, name, log):
        self.name, self.log = name, log

    def steps(self):
        return [lambda: self.log.append(self.name), lambda: sum(range(2000))]

    def reset(self):
        self.log.append("reset")

    def outputs(self):
        return None

    check = outputs


def test_the_order_is_rotated_from_round_to_round(group_of_one):
    log = []
    time_in_turns([Named(name, log) for name in "abc"], CPU, Sustained(1e-9, 3))
    turns = [name for name, before in zip(log, ["reset", *log]) if name != "reset"]
    runs = [name for name, before in zip(turns, [None, *turns]) if name != before]
    # The numbers of calls are found in one order, and then come the rounds.
    assert "".join(runs) in ("abcabcbcacab", "abc" + "abc" + "bca" + "cab")


def test_each_call_is_reset_and_its_steps_are_timed_apart(group_of_one):
    log = []
    (together, (first, second)), = time_in_turns([Named("a", log)], CPU, Sustained(1e-3, 2))
    assert log.count("reset") >= log.count("a") and together.repetitions * 2 <= log.count("a")
    assert 0 < first.median < second.median and first.median + second.median <= together.high * 1.5
