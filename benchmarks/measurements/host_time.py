"""The host's time for a layer: until the calls have returned that give a device the layer's work, which has none when they begin.

A layer whose kernels take less than this is as slow as the host. So a row has next to it, in `kernels`, the time of the same kernels in a
CUDA graph, which the host starts at once; or in `uncaptured` why they cannot be captured. On a CPU the calls return when all is
computed, and the time is that of both.

Shape suffixes: T tokens, H hidden, F ffn hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gbmoe.cli.bench.measurements.layer import LayerMeasurement, LayerSubject, refuse_host_sizes
from gbmoe.cli.bench.measurements.measurement import SEED, TRAINING, Refusal, Subject, random_values, require_finite
from gbmoe.cli.bench.running.burst_timer import Effort, time_steps
from gbmoe.cli.bench.running.verify_and_time import in_words
from gbmoe.testing import accuracy, cuda_graphs

WITHOUT_GRADIENTS, WITH_GRADIENTS = "forward, no gradients", "forward"
# Of these each row has one; TRAINING is a step, forward and backward.
COMPUTATIONS = (WITHOUT_GRADIENTS, WITH_GRADIENTS, TRAINING)
LINEAR = "nn.Linear"
_REPLAYS = Effort(0.1, 10, 50)


class HostMeasurement(LayerMeasurement):
    """The host's time for a layer of gbmoe's or of a rival's, or for LINEAR: one torch.nn.Linear(H, F) of the layer's tokens."""

    kind = "host"

    def flops(self) -> None:
        return None  # what the host does depends on none

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return (_HostOfLinear if self.implementation == LINEAR else HostOfLayer)(self, device, dtype)


class HostOfLayer(LayerSubject):
    of_host = True

    def __init__(self, measurement: HostMeasurement, device: torch.device, dtype: torch.dtype):
        super().__init__(measurement, device, dtype)
        self.measurement, self.device = measurement, device
        self.backward = measurement.computation != WITHOUT_GRADIENTS
        self.x_TH.requires_grad_(self.backward)

    def steps(self):
        return super().steps()[: 1 if self.measurement.computation == WITH_GRADIENTS else None]

    def call_once(self) -> None:
        """With backward wherever there are gradients, which are verified too."""
        for step in super().steps():
            step()

    def reset(self) -> None:
        super().reset()
        wait(self.device)

    def bytes_moved(self) -> None:
        return None

    def further(self, seconds: float) -> dict:
        ours = self.measurement.implementation == "gbmoe"
        if ours and self.device.type == "cuda":
            try:
                refuse_host_sizes(self.measurement, self.device, self.x_TH.dtype)
            except Refusal as refusal:
                return {"uncaptured": str(refusal)}
        return kernels_in_a_graph(self.steps(), super().reset, self.device, foreign=not ours)


class _HostOfLinear(Subject):
    of_host = True

    def __init__(self, measurement: HostMeasurement, device: torch.device, dtype: torch.dtype):
        case, self.device = measurement.case, device
        self.computation = measurement.computation
        self.layer = torch.nn.Linear(case.hidden, case.ffn, bias=False, device="meta", dtype=dtype)
        self.layer.weight = torch.nn.Parameter(random_values(case.ffn, case.hidden, dtype=dtype, device=device, seed=SEED + 4))
        self.x_TH = random_values(case.tokens, case.hidden, dtype=dtype, device=device, seed=SEED + 1)
        self.grad_TF = random_values(case.tokens, case.ffn, dtype=dtype, device=device, seed=SEED + 2)
        self.x_TH.requires_grad_(self.computation != WITHOUT_GRADIENTS)
        self.out_TF: torch.Tensor | None = None

    def steps(self):
        return [self._forward, self._backward] if self.computation == TRAINING else [self._forward]

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.computation != WITHOUT_GRADIENTS):
            self.out_TF = self.layer(self.x_TH)

    def _backward(self) -> None:
        assert self.out_TF is not None  # of _forward
        self.out_TF.backward(self.grad_TF)

    def _clear(self) -> None:
        self.layer.weight.grad = self.x_TH.grad = self.out_TF = None

    def reset(self) -> None:
        self._clear()
        wait(self.device)

    def outputs(self) -> torch.Tensor:
        self.reset()
        return self.layer(self.x_TH).detach()

    def check(self, outputs: torch.Tensor) -> accuracy.Verdict:
        require_finite({"out": outputs})
        x_TH, weight_FH = self.x_TH.detach(), self.layer.weight.detach()
        exact, yardstick = x_TH.double() @ weight_FH.double().t(), x_TH @ weight_FH.t()
        return accuracy.judge({"out": outputs}, {"out": exact}, {"out": yardstick}, factor=self.tolerance)

    def further(self, seconds: float) -> dict:
        return kernels_in_a_graph(self.steps(), self._clear, self.device, foreign=False)


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_in_a_graph(steps: list[Callable[[], None]], clear: Callable[[], None], device: torch.device, foreign: bool) -> dict:
    """The seconds of the steps' kernels in a CUDA graph, with a cold L2 cache; or why they have none, if they are `foreign`: many rivals
    wait for the device, which no graph can contain. It is found out without a capture where torch knows of the wait, because the process
    is of no use after a capture that failed (`capture_failed`). Nothing on a CPU. `clear` frees what an earlier call left, and does not
    wait."""
    if device.type != "cuda":
        return {}

    def call() -> None:
        clear()
        for step in steps:
            step()

    if foreign:
        try:
            with cuda_graphs.no_host_wait():
                call()
        except RuntimeError as error:
            return {"uncaptured": f"waits for the device: {in_words(error)}"}
        try:
            graph, _ = cuda_graphs.captured(call)
        except Exception as error:
            return {"uncaptured": f"cannot be captured: {in_words(error)}", "capture_failed": True}
    else:
        graph, _ = cuda_graphs.captured(call)
    together, _ = time_steps([graph.replay], device, hide_host=True, effort=_REPLAYS)
    clear()
    return {"kernels": together.median}
