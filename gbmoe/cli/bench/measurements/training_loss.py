"""What a layer learns: its loss before and after one step of gradient descent, compared with the same in float64.

The loss is the mean squared distance between outputs and fixed targets. Each layer chooses its experts itself, before and after the
step.

Shape suffixes: T tokens, K slots a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gbmoe.cli.bench.measurements.base import Measurement, Subject, require_finite
from gbmoe.cli.bench.measurements.layer import LayerInputs, build_layer, layer_inputs
from gbmoe.cli.bench.peers.base import Weights
from gbmoe.testing import accuracy, oracle

# The step's length as a multiple of the mean gradient over the tokens. The loss falls by some per cent.
_STEP = 0.1


class TrainingMeasurement(Measurement):
    """Two losses of a layer; nothing is timed."""

    kind = "training"

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return _Training(self, device, dtype)


class _Training(Subject):
    def __init__(self, measurement: TrainingMeasurement, device: torch.device, dtype: torch.dtype):
        self.inputs = layer_inputs(measurement.case, measurement.routing, device, dtype)
        self.top_k = measurement.case.top_k
        self.layer = build_layer(measurement, _copied(self.inputs.weights, dtype))
        self.losses: list[float] = []

    def steps(self):
        return []

    def outputs(self) -> list[float]:
        return _losses(self.inputs, self.layer, list(self.layer.parameters()))

    def check(self, outputs: list[float]) -> accuracy.Verdict:
        require_finite({"loss": torch.tensor(outputs, dtype=torch.float64, device="cpu")})  # the maximum of errors below may hide a NaN
        self.losses = outputs
        weights = _copied(self.inputs.weights, torch.float64)
        leaves = [weight.requires_grad_() for weight in weights.tensors()]
        exact = _losses(self.inputs, lambda x_TH: self._plain_layer(x_TH.double(), weights), leaves)
        error = max(abs(loss - right) / right for loss, right in zip(outputs, exact))
        # Half a rounding error of the dtype, as a mean over many outputs is more accurate than each of them. In fp32 at least 1e-6:
        # one token that goes to another expert changes the loss more than all rounding.
        return accuracy.Verdict("loss", error, max(torch.finfo(self.inputs.x_TH.dtype).eps / 2, 1e-6))

    def _plain_layer(self, x_TH: torch.Tensor, weights: Weights) -> torch.Tensor:
        ids_TK = oracle.best_experts((x_TH @ weights.router_EH.t()).detach(), self.top_k)
        slot_weights_TK = oracle.router_weights(x_TH, weights.router_EH, ids_TK)
        return oracle.experts(x_TH, ids_TK, slot_weights_TK, weights.activation,
                              weights.w1_EFH, weights.w2_EFH, weights.v1_EFH)

    def facts(self) -> dict:
        return {"losses": self.losses}


def _copied(weights: Weights, dtype: torch.dtype) -> Weights:
    router_EH, w1_EFH, w2_EFH, *v1_EFH = (tensor.to(dtype, copy=True) for tensor in weights.tensors())
    return Weights(router_EH, w1_EFH, w2_EFH, v1_EFH[0] if v1_EFH else None, weights.activation)


def _losses(inputs: LayerInputs, layer: Callable, parameters: Sequence[torch.Tensor]) -> list[float]:
    """The losses of `layer` before and after the step, which changes `parameters`."""
    out_TH = layer(inputs.x_TH)
    out_TH.backward(out_TH.detach() - inputs.grad_TH)  # not divided by the number of tokens: fp16 would lose it
    with torch.no_grad():
        for parameter in parameters:
            step = parameter.grad.double() * (_STEP / len(inputs.x_TH))
            parameter.copy_(parameter.double() - step)
        after_TH = layer(inputs.x_TH)
    return [float((out.double() - inputs.grad_TH.double()).square().mean()) for out in (out_TH.detach(), after_TH)]
