"""Energy from a counter that jumps, and why there is none."""

import sys
import time
import types

import pytest
import torch

from gbmoe.cli.bench.running import energy


def jumping(watts, every, until, step=0.005):
    """What a counter shows that is brought up to date now and then."""
    samples, at = [], 0.0
    while at < until:
        samples.append((at, watts * (at // every * every)))
        at += step
    return samples


@pytest.mark.parametrize("every", [0.02, 0.1])
def test_jumps_of_the_counter_did_not_spoil_the_power(every):
    """From first to last reading it would be off by up to a jump."""
    samples = jumping(700.0, every, 2.0)
    assert energy.power(samples, 0.63, 1.31) == pytest.approx(700.0, rel=0.03)


def test_what_came_before_and_behind_does_not_count():
    quiet, busy = jumping(100.0, 0.02, 1.0), jumping(700.0, 0.02, 1.0)
    samples = quiet + [(1 + at, 100.0 + joules) for at, joules in busy] + [(2 + at, 800.0 + joules) for at, joules in quiet]
    assert energy.power(samples, 1.0, 2.0) == pytest.approx(700.0, rel=0.05)


@pytest.mark.parametrize("samples", [[], [(0.0, 1.0)], [(0.1 * i, 5.0) for i in range(20)], jumping(700.0, 0.6, 1.0)], ids=len)
def test_without_two_jumps_there_is_no_power(samples):
    assert energy.power(samples, 0.0, 1.0) is None


def test_a_counter_is_read_while_it_is_entered():
    with energy.EnergyCounter(lambda: 300 * time.perf_counter()) as counter:
        begin = time.perf_counter()
        while counter.watts(begin, time.perf_counter()) is None:
            time.sleep(0.001)
    assert counter.watts(begin, time.perf_counter()) == pytest.approx(300, rel=0.2)
    samples = list(counter._samples)
    time.sleep(0.02)
    assert counter._samples == samples


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Stands for pynvml, next to a GPU that torch knows."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError, fake.asked = NVMLError, []
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: fake.asked.append(uuid) or "handle"
    fake.nvmlDeviceGetTotalEnergyConsumption = lambda handle: {"handle": 12_500}[handle]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="0123-45"))
    return fake


def test_the_counter_is_that_of_torchs_device_in_joules(nvml):
    counter, reason = energy.counter_of(torch.device("cuda", 1))
    assert reason is None and counter._joules() == 12.5 and nvml.asked == ["GPU-0123-45"]


def test_a_device_without_a_counter_says_so(nvml, monkeypatch):
    def unsupported(handle):
        raise NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", unsupported)
    assert energy.counter_of(torch.device("cuda", 0)) == (None, "NVML: Not Supported")


def test_without_nvml_it_is_said_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counter, reason = energy.counter_of(torch.device("cuda", 0))
    assert counter is None and "needs nvidia-ml-py (pip install 'gbmoe[bench]')" in reason
    counter, reason = energy.counter_of(torch.device("cpu"))
    assert counter is None and reason == "NVML counts the energy of CUDA devices only, not of cpu"
