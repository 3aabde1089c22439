"""Layers whose experts are spread over the ranks of a job, next to the same layer with all experts on one GPU.

Every rank draws the tokens, gradients and weights of all ranks from the same seeds, and brings its own tokens to the layer. Its
results are compared with float64 on the batch of all ranks' tokens: its tokens' outputs and gradients, and its own experts' weight
gradients, which are those of the whole batch divided by the number of ranks.

Shape suffixes: T tokens of a rank, A tokens of all ranks, K slots a token, E experts, H hidden, F ffn hidden, S sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.gbmoe_itself import dropless_layer
from gbmoe.cli.bench.measurements.layer import (
    BY_TOKEN,
    RIVAL_TOLERANCE,
    SAMPLED_TOKENS,
    LayerInputs,
    LayerMeasurement,
    LayerSubject,
    layer_inputs,
)
from gbmoe.cli.bench.measurements.measurement import TRAINING, Refusal, Subject, require_finite, sample
from gbmoe.cli.bench.rivals.rival import Layer, Weights
from gbmoe.cli.bench.roofline import PASSES, layer_bytes
from gbmoe.parallel import peer_memory
from gbmoe.testing import accuracy
from gbmoe.testing.moe_shapes import MoeCase

# How gbmoe's rows travel, as values of Arguments.expert_parallel_transport. Next to them stand ONE_GPU, all experts on every GPU, and
# LOANS, over mapped memory, where ranks with many rows lend up to a quarter of their experts.
TRANSPORTS = ("auto", "peer_memory", "exchange")
ONE_GPU, LOANS = "one-gpu", "peer_memory-loans"


@dataclass(frozen=True)
class ParallelLayerMeasurement(LayerMeasurement):
    """A layer on every rank: `transport` is ONE_GPU (every rank has all experts), one of TRANSPORTS, LOANS, or None for a rival.

    Tokens and operations are those of one rank; the number of ranks is known only where it runs.
    """

    transport: str | None = None

    @property
    def by(self) -> str:
        return f"{self.implementation}-{self.transport}" if self.transport else self.implementation

    def describe(self) -> dict:
        return super().describe() | {"transport": self.transport}

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return (_OneGpu if self.transport == ONE_GPU else _Spread)(self, device, dtype)


@dataclass(frozen=True)
class Part:
    """The weights that a rank holds: some experts whole or, with more ranks than experts, some ffn rows of some experts."""

    experts: slice
    features: slice

    @classmethod
    def of(cls, case: MoeCase, rank: int, ranks: int) -> Part:
        """This rank's part, as MegaBlocks spreads the experts. Raises Refusal where they cannot be divided evenly."""
        groups = min(ranks, case.experts)
        shards = ranks // groups
        for what, count, divisor in (("experts", case.experts, groups), ("ranks", ranks, groups), ("ffn rows", case.ffn, shards)):
            if count % divisor:
                raise Refusal(f"{count} {what} cannot be divided by {divisor}")
        experts, features = case.experts // groups, case.ffn // shards
        return cls(slice(rank % groups * experts, (rank % groups + 1) * experts),
                   slice(rank // groups * features, (rank // groups + 1) * features))

    def of_weights(self, weights: Weights) -> Weights:
        """The router's weights, and those of the experts that the part names."""
        w1_EFH, w2_EFH, v1_EFH = (w if w is None else w[self.experts, self.features]
                                  for w in (weights.w1_EFH, weights.w2_EFH, weights.v1_EFH))
        return Weights(weights.router_EH, w1_EFH, w2_EFH, v1_EFH, weights.activation)


def all_ranks_inputs(case: MoeCase, routing: str, device: torch.device, dtype: torch.dtype) -> tuple[LayerInputs, slice]:
    """The inputs of all ranks, and which of their tokens are this rank's."""
    first = dist.get_rank() * case.tokens
    everything = replace(case, tokens=case.tokens * dist.get_world_size())
    return layer_inputs(everything, routing, device, dtype), slice(first, first + case.tokens)


def of_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The ranks' tensors, which have the same shape, concatenated in the order of ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class _OneGpu(LayerSubject):
    """A layer with all experts on this rank, for this rank's tokens."""

    def __init__(self, measurement: ParallelLayerMeasurement, device: torch.device, dtype: torch.dtype):
        self.case, self.backward = measurement.case, measurement.computation == TRAINING
        self.tolerance = Subject.tolerance if measurement.implementation == "gbmoe" else RIVAL_TOLERANCE
        self.everything, self.mine = all_ranks_inputs(measurement.case, measurement.routing, device, dtype)
        self.inputs = LayerInputs(self.everything.x_TH[self.mine], self.everything.grad_TH[self.mine], self.everything.weights,
                                  sample(self.case.tokens, SAMPLED_TOKENS, device), self.everything.features)
        self.layer = self._build_layer(measurement)
        self.x_TH = self.inputs.x_TH.detach().requires_grad_(self.backward)
        self.out_TH: torch.Tensor | None = None
        self.counts_E: torch.Tensor | None = None

    def _build_layer(self, measurement: ParallelLayerMeasurement) -> Layer:
        return dropless_layer(self.case, self.inputs.weights)


class _Spread(_OneGpu):
    """A layer whose experts are spread over the ranks, for this rank's tokens."""

    def _build_layer(self, measurement):
        self.part = Part.of(self.case, dist.get_rank(), dist.get_world_size())
        weights, group = self.part.of_weights(self.inputs.weights), dist.group.WORLD
        if measurement.implementation == "gbmoe":
            lends = measurement.transport == LOANS
            transport, lent = ("peer_memory", max(weights.w1_EFH.size(0) // 4, 1)) if lends else (measurement.transport, 0)
            if transport == "peer_memory":
                refuse_peer_memory(self.case, weights.w1_EFH)
            return dropless_layer(self.case, weights, moe_expert_model_parallelism=True, expert_parallel_group=group,
                                  expert_parallel_transport=transport, expert_parallel_loans=lent)
        rival = rivals.load(measurement.implementation)
        reason = rival.refuses(self.case, weights.w1_EFH.dtype)
        if reason is not None:
            raise Refusal(reason)
        return rival.parallel_layer(self.case, weights, group)

    def check(self, outputs: dict[str, torch.Tensor]) -> accuracy.Verdict:
        ids_AK = of_all_ranks(outputs.pop("experts"))
        require_finite(outputs)
        outputs.pop("grad router", None)
        self.counts_E = ids_AK.flatten().bincount(minlength=self.case.experts)
        choice = self.everything.worst_choice(ids_AK)
        if not choice.passed:
            return choice
        everything, part = self.everything, self.part
        tokens_S, features = everything.tokens_S, everything.features
        mine_S = (tokens_S >= self.mine.start) & (tokens_S < self.mine.stop)
        here = (features >= part.features.start) & (features < part.features.stop)

        def of_this_rank(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[mine_S] if name in BY_TOKEN else tensor[part.experts, here]

        def sampled(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in BY_TOKEN:
                return tensor[tokens_S[mine_S] - self.mine.start]
            return tensor[:, features[here] - part.features.start] * dist.get_world_size()

        exact, yardstick = everything.expected(ids_AK, self.layer.normalized, self.backward)
        exact, yardstick = ({name: of_this_rank(name, tensor) for name, tensor in known.items()} for known in (exact, yardstick))
        return accuracy.judge({name: sampled(name, tensor) for name, tensor in outputs.items()}, exact, yardstick, factor=self.tolerance)

    def bytes_moved(self) -> int:
        assert self.counts_E is not None, "it is known after check"
        hit = int((self.counts_E[self.part.experts] > 0).sum())
        return layer_bytes(self.case, hit, self.x_TH.dtype.itemsize) * (PASSES[TRAINING] if self.backward else 1)


def refuse_peer_memory(case: MoeCase, like: torch.Tensor) -> None:
    """Raises Refusal where the ranks cannot pull rows of `like`'s dtype, on its device, from each other's memory."""
    reason = peer_memory.check_rows(like.dtype, case.hidden) or peer_memory.unavailable(None, like.device)
    if reason is not None:
        raise Refusal(reason)
