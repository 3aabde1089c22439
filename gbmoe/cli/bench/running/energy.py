"""The energy of a GPU's work, from NVML's counter of all that the device has consumed.

The counter moves in jumps, some tens of milliseconds apart. It is read every few milliseconds by a thread, and what counts are the
jumps inside the time that is asked for: from the first to the last of them the device took a known energy in a known time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

_EVERY_SECONDS = 0.005


def power(samples: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    """Watts between the first and the last jump of the counter from `begin` to `end`; None where there are not two of them.

    Args:
        samples: (seconds, joules) in the order of time.
    """
    jumps = [after for before, after in pairwise(samples) if after[1] != before[1] and begin <= after[0] <= end]
    if len(jumps) < 2:
        return None
    (first_time, first), (last_time, last) = jumps[0], jumps[-1]
    return (last - first) / (last_time - first_time) if last_time > first_time and last > first else None


class EnergyCounter:
    """Samples of a counter, taken while it is entered.

    Example:
        >>> with EnergyCounter(lambda: 700 * time.perf_counter()) as counter:
        ...     time.sleep(0.1)
        >>> counter.watts(0, time.perf_counter())
    """

    def __init__(self, joules: Callable[[], float], now: Callable[[], float] = time.perf_counter):
        self._joules, self._now = joules, now
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EnergyCounter:
        self._samples, self._ended = [], threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def watts(self, begin: float, end: float) -> float | None:
        """The mean power between two moments of time.perf_counter; None where the counter jumped less than twice."""
        return power(self._samples, begin, end)

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            self._samples.append((self._now(), self._joules()))


def counter_of(device: torch.device) -> tuple[EnergyCounter | None, str | None]:
    """(the counter of a device, None), or (None, why there is none)."""
    if device.type != "cuda":
        return None, f"NVML counts the energy of CUDA devices only, not of {device.type}"
    try:
        import pynvml
    except ImportError as error:
        return None, f"it is read through NVML, which needs nvidia-ml-py (pip install 'gbmoe[bench]'): {error}"
    try:
        pynvml.nvmlInit()
        # By its UUID, because the driver counts its devices otherwise than CUDA_VISIBLE_DEVICES does.
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return EnergyCounter(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3), None
