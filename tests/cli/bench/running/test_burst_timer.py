"""Times of steps, together and each, with the host's share or without: on clocks that nothing but the test moves."""

from types import SimpleNamespace

import pytest
import torch

from gbmoe.cli.bench.running import burst_timer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeMachine:
    """A host and a device, each with the time until which it is busy. The device begins what the host has enqueued as soon as it may."""

    def __init__(self):
        self.host = self.device = 0.0

    def wait(self, seconds):
        self.host += seconds

    def enqueue(self, seconds):
        self.device = max(self.device, self.host) + seconds

    def synchronize(self, device=None):
        self.host = max(self.host, self.device)

    def event(self, *, enable_timing):
        assert enable_timing
        taken = SimpleNamespace(seconds=None)

        def record():
            self.enqueue(0)
            taken.seconds = self.device

        return SimpleNamespace(record=record, seconds=lambda: taken.seconds,
                               elapsed_time=lambda end: 1e3 * (end.seconds() - taken.seconds))


@pytest.fixture
def machine(monkeypatch):
    """The machine whose clocks the timer reads; a flush keeps its device busy for 100 us and its host for none."""
    machine = FakeMachine()
    monkeypatch.setattr(burst_timer, "time", SimpleNamespace(perf_counter=lambda: machine.host))
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronize)
    monkeypatch.setattr(burst_timer, "_flush_with", lambda device: lambda: machine.enqueue(100e-6))
    return machine


def test_steps_are_timed_together_and_each(machine):
    calls = []
    steps = [lambda: (calls.append("first"), machine.wait(0.001)), lambda: (calls.append("second"), machine.wait(0.003))]
    together, each = burst_timer.time_steps(steps, CPU, lambda: calls.append("reset"), effort=burst_timer.Effort(0, 4, 4))
    assert together.repetitions == 4
    assert [timing.median for timing in (together, *each)] == pytest.approx([0.004, 0.001, 0.003])
    assert calls == ["reset", "first", "second"] * (len(calls) // 3)


@pytest.mark.parametrize("hidden, seconds", [(False, 400e-6), (True, 5e-6)])
def test_a_slow_host_can_be_kept_out_of_the_time(machine, hidden, seconds):
    """Of the host's 500 us one flush covers 105, because it begins when the device is done with the call before, 5 us after the host.
    As many as cover all of them leave the device's 5."""
    def call():
        machine.wait(500e-6)
        machine.enqueue(5e-6)

    assert burst_timer.time_steps([call], CUDA, hide_host=hidden)[0].median == pytest.approx(seconds)


@pytest.mark.gpu
def test_on_a_gpu_the_time_of_more_work_is_longer():
    tensor = torch.ones(1 << 26, device="cuda")  # 256 MiB, read once or sixteen times
    (few, _), (many, each) = (burst_timer.time_steps([tensor.sum] * count, tensor.device) for count in (1, 16))
    assert 0 < few.low <= few.median < many.median and len(each) == 16 and all(step.low > 0 for step in each)
