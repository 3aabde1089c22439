"""A turn: as much work as is asked for before as much that is timed, without a pause; its time a call, and its energy."""

import itertools

import pytest

from gbmoe.cli.bench.measurements.measurement import Subject
from gbmoe.cli.bench.running.repeat import repeat
from gbmoe.cli.bench.running.sustained_turn import take_turn


class Device:
    """A clock, and the device whose it is: `times` of a second, step after step, for as long as there are any, and the last from then on.

    Work begins when the one before has ended, or, where the device has nothing to do, when it comes; the host takes no time for it.
    """

    def __init__(self, *times):
        self.times, self.done, self.waits, self.log = itertools.chain(times, itertools.repeat(times[-1])), 100.0, 0, []

    def work(self, name):
        self.done += next(self.times)
        self.log.append(name)

    def mark(self):
        self.log.append("mark")
        return self.done

    def wait(self):
        self.waits += 1
        self.log.append("wait")

    def seconds(self, start, end):
        return end - start


class Work(Subject):
    def __init__(self, device, names="a"):
        self.device, self.names = device, names

    def steps(self):
        return [lambda name=name: self.device.work(name) for name in self.names]

    def reset(self):
        self.device.log.append("reset")

    def outputs(self):
        return None

    check = outputs


class Counter:
    """Of a device that takes so many watts."""

    def __init__(self, watts):
        self.of, self.asked = watts, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def watts(self, begin, end):
        self.asked = begin, end
        return self.of


def test_calls_that_count_follow_those_that_do_not_without_a_wait():
    device = Device(1.0)
    found = repeat(Work(device), device, before=2, timed=3)
    assert device.log == ["mark", *["reset", "a"] * 2, "mark", *["reset", "a"] * 3, "mark", "wait"]
    assert (found.before, found.timed, found.steps) == (2.0, 3.0, [1.0])


def test_each_step_is_timed_apart_and_together_they_are_the_call():
    device = Device(1.0, 3.0, 1.0, 3.0, 2.0, 4.0, 2.0, 4.0)
    found = repeat(Work(device, "fb"), device, before=2, timed=2)
    assert (found.before, found.timed, found.steps) == (8.0, 12.0, [2.0, 4.0])


@pytest.mark.parametrize("once", [0.004, 0.03, 0.7, 1e-6])
def test_a_turn_lasts_as_long_as_is_asked(once):
    device = Device(once)
    turn = take_turn(Work(device), device, 0.5)
    assert turn.seconds == pytest.approx(once) and turn.steps == [turn.seconds] and turn.joules is None
    last = device.log[max(place for place, what in enumerate(["wait", *device.log[:-1]]) if what == "wait"):]
    assert last.count("wait") == 1 and last.count("mark") == 3, "between work that counts and work that does not nothing is waited for"
    assert last.count("a") == 2 * turn.calls and turn.calls * once >= 0.5


def test_a_device_that_becomes_faster_is_asked_again():
    """Of slow first calls fewer seemed enough than it takes."""
    device = Device(*[0.1] * 4, *[0.01] * 14, 0.001)
    turn = take_turn(Work(device), device, 0.5)
    assert turn.seconds == pytest.approx(0.001) and turn.calls >= 500
    again = take_turn(Work(device), device, 0.5, turn.calls)
    assert again.calls == turn.calls, "the next turn begins where this one ended"


def test_what_came_before_lasted_as_long_as_what_is_timed():
    """Calls that were slow when they were timed had been quick before: the device had worked for too short a time."""
    device = Device(*[0.001] * 50, *[0.01] * 50, 0.01)
    turn = take_turn(Work(device), device, 0.5, 50)
    assert device.log.count("wait") == 2 and turn.calls > 500


def test_energy_is_the_power_of_what_was_timed_for_as_long_as_a_call_takes():
    device, counter = Device(0.01), Counter(700.0)
    turn = take_turn(Work(device), device, 0.5, 50, counter, now=lambda: device.done)
    begin, end = counter.asked
    assert end == device.done and end - begin == pytest.approx(50 * 0.01)
    assert turn.joules == pytest.approx(7.0)
    assert take_turn(Work(device), device, 0.5, 50, Counter(None)).joules is None
