"""Whole MoE layers, router included: forward, forward and backward, and forward as a CUDA graph.

A layer is compared with float64 on samples, given the experts that its own router chose: some tokens through the whole layer, forward
and backward, and some ffn rows of every expert's weight gradient, over all tokens. The router's choice is checked separately: a chosen
expert may not be worse than one that was passed over, except for rounding.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, S sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from gbmoe import engines
from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.gbmoe_itself import dropless_layer
from gbmoe.cli.bench.measurements.measurement import (
    GRAPH,
    SEED,
    TRAINING,
    Measurement,
    Refusal,
    Subject,
    kept,
    random_values,
    require_finite,
    sample,
)
from gbmoe.cli.bench.rivals.rival import Layer, Weights
from gbmoe.cli.bench.roofline import PASSES, layer_bytes
from gbmoe.problem import Problem, allows_tf32
from gbmoe.testing import accuracy, cuda_graphs, oracle
from gbmoe.testing.exact_inputs import generator
from gbmoe.testing.moe_shapes import MoeCase

# The most tokens and the most ffn rows that are compared with the oracle.
SAMPLED_TOKENS, SAMPLED_FEATURES = 512, 128
# The outputs that have a row for each token; the others have one for each ffn row of each expert.
BY_TOKEN = ("out", "grad x", "grad expert weights")
# A skewed router adds -ln(r) times this to the logit of the expert of rank r; logits have a standard deviation of one.
_SKEW = 0.5
# Rivals may round once more than gbmoe: their error may be up to this multiple of the yardstick's.
RIVAL_TOLERANCE = 4.0


class LayerMeasurement(Measurement):
    """A layer. Its computation is "forward" (without autograd), "forward+backward" (with every gradient) or "forward, CUDA graph".

    The router is a real one, freshly initialised. Its experts are equally popular with the routing "uniform", and not with "skewed".
    """

    kind = "layer"

    def flops(self) -> int:
        return self.case.forward_flops() * PASSES.get(self.computation, 1)

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return (_GraphedLayer if self.computation == GRAPH else LayerSubject)(self, device, dtype)


def build_layer(measurement: Measurement, weights: Weights) -> Layer:
    """The layer of a measurement's implementation, gbmoe's or a rival's."""
    if measurement.implementation == "gbmoe":
        return dropless_layer(measurement.case, weights, engine=measurement.engine)
    rival = rivals.load(measurement.implementation)
    reason = rival.refuses(measurement.case, weights.w1_EFH.dtype)
    if reason is not None:
        raise Refusal(reason)
    return rival.layer(measurement.case, weights)


@dataclass(eq=False)
class LayerInputs:
    """The tensors that all implementations are given, and the results that are expected of them."""
    x_TH: torch.Tensor
    grad_TH: torch.Tensor
    weights: Weights
    tokens_S: torch.Tensor
    features: torch.Tensor
    _oracles: dict = field(default_factory=dict)

    def expected(self, ids_TK: torch.Tensor, normalized: bool, backward: bool) -> tuple[dict, dict]:
        """(exact, yardstick) results for these experts, by name. They are kept for the next implementation that chooses the same."""
        key = normalized, backward
        if key not in self._oracles or not torch.equal(self._oracles[key][0], ids_TK):
            self._oracles[key] = ids_TK, *(
                self._compute(ids_TK, normalized, backward, dtype) for dtype in (torch.float64, self.x_TH.dtype))
        return self._oracles[key][1:]

    def forget_oracles(self) -> None:
        """Free what expected() has kept."""
        self._oracles.clear()

    def _compute(self, ids_TK, normalized, backward, dtype) -> dict[str, torch.Tensor]:
        weights, ids_SK = self.weights, ids_TK[self.tokens_S]
        experts = {"w1": weights.w1_EFH, "w2": weights.w2_EFH, **({"v1": weights.v1_EFH} if weights.glu else {})}
        x_SH = self.x_TH[self.tokens_S].to(dtype).requires_grad_(backward)
        slot_weights_SK = self._slot_weights(x_SH, ids_SK, normalized)
        out_SH = oracle.experts(x_SH, ids_SK, slot_weights_SK, weights.activation, **experts)
        if not backward:
            return {"out": out_SH}
        grads = torch.autograd.grad(out_SH, (x_SH, slot_weights_SK), self.grad_TH[self.tokens_S].to(dtype))
        with torch.no_grad():
            slot_weights_TK = self._slot_weights(self.x_TH.to(dtype), ids_TK, normalized)
        return {"out": out_SH.detach(), "grad x": grads[0], "grad expert weights": grads[1]} | oracle.weight_gradients(
            self.x_TH, self.grad_TH, ids_TK, slot_weights_TK, weights.activation,
            {name: w_EFH[:, self.features] for name, w_EFH in experts.items()}, dtype)

    def _slot_weights(self, x_TH, ids_TK, normalized) -> torch.Tensor:
        weights_TK = oracle.router_weights(x_TH, self.weights.router_EH, ids_TK)
        return weights_TK / weights_TK.sum(-1, keepdim=True) if normalized else weights_TK

    def worst_choice(self, ids_TK: torch.Tensor) -> accuracy.Verdict:
        """How far the logit of the worst chosen expert lies below the k-th best one, at most, over the sampled tokens. It is infinite
        where a token has chosen an expert twice."""
        logits_SE = self.x_TH[self.tokens_S].double() @ self.weights.router_EH.double().t()
        best_SK, ids_SK = logits_SE.topk(ids_TK.size(1), dim=-1).values, ids_TK[self.tokens_S]
        distinct = bool((ids_SK.sort(-1).values.diff(dim=-1) != 0).all())
        shortfall = float((best_SK[:, -1] - logits_SE.gather(1, ids_SK).amin(-1)).max()) if distinct else float("inf")
        # Logits and their products are rounded to the layer's dtype.
        rounding = 4 * torch.finfo(self.x_TH.dtype).eps * float(logits_SE.abs().max())
        return accuracy.Verdict("router's choice", shortfall, rounding)


@kept
def layer_inputs(case: MoeCase, routing: str, device: torch.device, dtype: torch.dtype) -> LayerInputs:
    """Tokens, gradient and weights, drawn from SEED so that outputs and logits have a standard deviation near one."""
    draw = partial(random_values, dtype=dtype, device=device)
    shape, glu = (case.experts, case.ffn, case.hidden), case.mlp_type == "glu"
    weights = Weights(
        draw(case.experts, case.hidden, seed=SEED + 3, std=case.hidden**-0.5),
        draw(*shape, seed=SEED + 4, std=case.hidden**-0.5),
        draw(*shape, seed=SEED + 5, std=case.ffn**-0.5),
        draw(*shape, seed=SEED + 6, std=case.hidden**-0.5) if glu else None,
        oracle.ACTIVATIONS["silu" if glu else "gelu_tanh"])
    x_TH = draw(case.tokens, case.hidden, seed=SEED + 1)
    if routing == "skewed":  # a constant feature carries each expert's popularity
        rank_E = torch.randperm(case.experts, generator=generator("cpu", SEED), dtype=torch.int64, device="cpu").to(device) + 1
        x_TH[:, 0] = 1
        weights.router_EH[:, 0] = -_SKEW * rank_E.log()
    return LayerInputs(x_TH, draw(case.tokens, case.hidden, seed=SEED + 2), weights,
                       sample(case.tokens, SAMPLED_TOKENS, device), sample(case.ffn, SAMPLED_FEATURES, device))


class LayerSubject(Subject):
    def __init__(self, measurement: LayerMeasurement, device: torch.device, dtype: torch.dtype):
        self.case, self.backward = measurement.case, measurement.computation == TRAINING
        self.tolerance = Subject.tolerance if measurement.implementation == "gbmoe" else RIVAL_TOLERANCE
        self.inputs = layer_inputs(measurement.case, measurement.routing, device, dtype)
        self.layer = self._build_layer(measurement)
        self.x_TH = self.inputs.x_TH.detach().requires_grad_(self.backward)
        self.out_TH, self.counts_E = None, None

    def _build_layer(self, measurement: LayerMeasurement) -> Layer:
        return build_layer(measurement, self.inputs.weights)

    def steps(self):
        return [self._forward, self._backward] if self.backward else [self._forward]

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.backward):
            self.out_TH = self.layer(self.x_TH)

    def _backward(self) -> None:
        self.out_TH.backward(self.inputs.grad_TH)

    def reset(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.out_TH = self.x_TH.grad = None

    def outputs(self) -> dict[str, torch.Tensor]:
        routed = {}

        def keep(_module, _inputs, outputs):
            *_, routed["weights"], routed["experts"] = outputs
            if self.backward:
                routed["weights"].retain_grad()

        self.reset()
        hook = self.layer.router.register_forward_hook(keep)
        try:
            self.call_once()
        finally:
            hook.remove()
        outputs = {"experts": routed["experts"].detach().long(), "out": self.out_TH.detach()}
        if self.backward:
            outputs |= {"grad x": self.x_TH.grad, "grad expert weights": routed["weights"].grad}
            outputs |= {f"grad {name}": gradient for name, gradient in self.layer.weight_gradients().items()}
        return outputs

    def call_once(self) -> None:
        for step in self.steps():
            step()

    def check(self, outputs: dict[str, torch.Tensor]) -> accuracy.Verdict:
        ids_TK = outputs.pop("experts")
        require_finite(outputs)
        outputs.pop("grad router", None)  # it follows from that of the expert weights
        self.counts_E = ids_TK.flatten().bincount(minlength=self.case.experts)
        choice = self.inputs.worst_choice(ids_TK)
        if not choice.passed:
            return choice
        sampled = {name: tensor[self.inputs.tokens_S] if name in BY_TOKEN else tensor[:, self.inputs.features]
                   for name, tensor in outputs.items()}
        exact, yardstick = self.inputs.expected(ids_TK, self.layer.normalized, self.backward)
        return self.judge(sampled, exact, yardstick)

    def judge(self, sampled: dict, exact: dict, yardstick: dict) -> accuracy.Verdict:
        """Whether sampled results are near enough to the exact ones, by name."""
        return accuracy.judge(sampled, exact, yardstick, factor=self.tolerance)

    def forget_oracle(self) -> None:
        self.inputs.forget_oracles()

    def bytes_moved(self) -> int:
        forward = layer_bytes(self.case, int((self.counts_E > 0).sum()), self.x_TH.dtype.itemsize)
        return forward * (PASSES[TRAINING] if self.backward else 1)

    def facts(self) -> dict:
        return {"imbalance": float(self.counts_E.max() / self.counts_E.double().mean())}


class _GraphedLayer(LayerSubject):
    """A layer captured once in a CUDA graph, with other tokens, and replayed with those that are verified: this shows whether the sizes
    of the capture stay in the graph."""

    def __init__(self, measurement: LayerMeasurement, device: torch.device, dtype: torch.dtype):
        if device.type != "cuda":
            raise Refusal("CUDA graphs need CUDA")
        if measurement.implementation == "gbmoe":
            refuse_host_sizes(measurement, device, dtype)
        super().__init__(measurement, device, dtype)
        self.foreign = measurement.implementation != "gbmoe"
        self.graph = None

    def steps(self):
        return [self.graph.replay] if self.graph else super().steps()

    def call_once(self) -> None:
        x_TH = self.inputs.x_TH
        self.x_TH = random_values(*x_TH.shape, dtype=x_TH.dtype, device=x_TH.device, seed=SEED + 7)
        try:
            self.graph, _ = cuda_graphs.captured(super().call_once)
        except Exception as error:
            if self.foreign:  # left out, not failed: many rivals wait for the device, which a graph cannot contain
                raise Refusal(f"cannot be captured: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
            raise
        self.x_TH.copy_(x_TH)
        self.graph.replay()

    def reset(self) -> None:
        if self.graph is None:
            super().reset()


def refuse_host_sizes(measurement: LayerMeasurement, device: torch.device, dtype: torch.dtype) -> None:
    """Raise Refusal where the engine of a layer of gbmoe's reads the sizes on the host, which no graph can contain."""
    case = measurement.case
    problem = Problem(device, dtype, case.slots, case.experts, case.hidden, case.ffn, False, tf32=allows_tf32(dtype))
    chosen = engines.select(measurement.engine, problem)
    if chosen.needs_host_sizes:
        raise Refusal(f"engine {chosen.name} reads the group sizes on the host")
