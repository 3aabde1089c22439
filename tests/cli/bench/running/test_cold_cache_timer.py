"""Times of steps, together and each, with the host's share or without."""

import time

import pytest
import torch

from gbmoe.cli.bench.running import cold_cache_timer

CPU = torch.device("cpu")


def test_steps_are_timed_together_and_each():
    calls = []
    steps = [lambda: (calls.append("first"), time.sleep(0.001)), lambda: (calls.append("second"), time.sleep(0.003))]
    together, each = cold_cache_timer.time_steps(steps, CPU, lambda: calls.append("reset"), effort=cold_cache_timer.Effort(0, 4, 4))
    assert together.repetitions == 4 and 0 < together.low <= together.median <= together.high
    assert calls == ["reset", "first", "second"] * (len(calls) // 3)
    assert each[0].median < each[1].median < together.median


@pytest.mark.gpu
def test_a_slow_host_can_be_kept_out_of_the_time():
    tensor = torch.zeros(1024, device="cuda")

    def call():
        time.sleep(5e-4)
        tensor.add_(1)

    shown, hidden = (cold_cache_timer.time_steps([call], tensor.device, hide_host=hide)[0].median for hide in (False, True))
    assert hidden < 1e-4 < shown
