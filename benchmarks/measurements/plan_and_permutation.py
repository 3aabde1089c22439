"""What `gbmoe bench --suite permute` measures: the plan, the router's operator, and the permutation there and back.

All of it is bound by memory, so each time is compared with a limit: the fewest bytes that must be moved, over the bandwidth of a large
copy in the same run. With b bytes an element, R = T * K slots, P rows of the plan and P_used rows up to the end of the last expert,
the bytes are:

    plan              no limit: it moves few bytes
    route             logits, scores b*T*E each; weights b*T*K, ids 8*T*K, logsumexp 4*T (8*T for float64)
    route-backward    the same: scores, ids and the gradients of scores, weights and logsumexp read, that of the logits
                      written, and b*T*E more, because the scores have a gradient besides their value
    gather            b*H*(T + P_used): as a layer calls it; rows after the last expert are not written
    padded_gather     b*H*(T + P): the public operator, which clears those rows too
    plan+gather       as padded_gather, with the plan built in the same call
    scatter           b*H*(R + T) + weights 4*R
    scatter-backward  b*H*(T + 2*R) + padding zeros b*H*(P - R) + weights and their gradient 8*R

The bytes of index maps are not counted, and a rival's P is P_used. The maps that results are verified with come from oracle.routing,
not from the plan. Plans and gathers must be right to the last bit, everywhere; the other results are compared with float64 on sampled
tokens. Every result is verified in memory that held NaN before.

Shape suffixes: T tokens, K slots a token, R = T * K, E experts, H hidden, P padded rows, S sampled tokens, N other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.rivals.kinds import Permutation
from gbmoe import RoutingPlan, launch
from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.layer import RIVAL_TOLERANCE
from gbmoe.cli.bench.measurements.measurement import SEED, Measurement, Subject, kept, random_values, require_finite, sample
from gbmoe.cli.bench.rivals.rival import Prepared
from gbmoe.ops import padded_gather, padded_scatter, route
from gbmoe.testing import accuracy, exact_inputs, oracle
from gbmoe.testing.moe_shapes import MoeCase

# The most tokens that are compared with float64, and the rows of a gather that are compared at a time.
_SAMPLED_TOKENS, _ROWS_AT_A_TIME = 512, 4096
# The share of the expert of rank r is proportional to 1 / r to this power.
SKEWS = {"uniform": 0.0, "zipf": 1.0}


@dataclass(frozen=True)
class PermutationMeasurement(Measurement):
    """One step of the way to the experts' rows and back. All steps but "route" and "route-backward" depend on the routing and the
    alignment."""

    align: int | None = None

    kind = "permutation"

    @property
    def setting(self) -> str:
        return super().setting + (f"/align{self.align}" if self.align else "")

    def describe(self) -> dict:
        return super().describe() | {"align": self.align}

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return _SUBJECTS[self.computation](self, device, dtype)


@kept
def routed(
    case: MoeCase, routing: str, align: int, device: torch.device,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Expert ids [T,K], and the tensors that their plan must hold, by the names of its attributes."""
    ids_TK = exact_inputs.expert_ids(case.tokens, case.experts, case.top_k, device=device, seed=SEED, skew=SKEWS[routing])
    expected = oracle.routing(ids_TK, case.experts, align)
    return ids_TK, {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in expected.items()}


class PlannedPermutation(Permutation):
    """gbmoe's plan, gather and scatter."""

    _MAPS = ("row_of_slot_TK", "slot_of_row_P", "counts_E", "offsets_E1", "padded_counts_E")

    def __init__(self, ids_TK: torch.Tensor, experts: int, align: int):
        self._build = partial(RoutingPlan.from_experts, ids_TK, experts, align=align, check="none")
        self._plan = self._build()
        self.rows = self._plan.num_rows

    def plan(self) -> Prepared:
        return Prepared(self._build, lambda plan: {name: getattr(plan, name) for name in self._MAPS})

    def gather(self, x_TH):
        return Prepared(partial(launch.gather, x_TH, self._plan.slot_map), lambda out: out[0])

    def padded_gather(self, x_TH):
        return Prepared(partial(padded_gather, x_TH, self._plan))

    def plan_and_gather(self, x_TH):
        return Prepared(lambda: padded_gather(x_TH, self._build()))

    def scatter(self, y_PH, weights_TK):
        return Prepared(partial(padded_scatter, y_PH, self._plan, weights_TK))

    def scatter_backward(self, grad_TH, y_PH, weights_TK):
        return Prepared(partial(launch.scatter_backward, grad_TH, y_PH, self._plan.slot_map, weights=weights_TK))


class _Step(Subject):
    """A step whose `prepared` computation is timed. Its result is a tensor, a tuple of tensors, or a dict of them."""

    hide_host = True
    prepared: Prepared

    def steps(self):
        return [self.prepared.call]

    def outputs(self) -> object:
        """Make a call after memory of the same sizes was filled with NaN and freed, so that its results lie there if the allocator
        reuses it."""
        result = self.prepared.read(self.prepared.call())
        result = [result] if isinstance(result, torch.Tensor) else result
        for tensor in result.values() if isinstance(result, dict) else result:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -99)
        del result, tensor
        return self.prepared.read(self.prepared.call())


class _Route(_Step):
    """Router logits to scores, weights, ids and logsumexp."""

    def __init__(self, measurement: PermutationMeasurement, device: torch.device, dtype: torch.dtype):
        case = measurement.case
        self.top_k = case.top_k
        self.logits_TE = random_values(case.tokens, case.experts, dtype=dtype, device=device, seed=SEED)
        self.tokens_S = sample(case.tokens, _SAMPLED_TOKENS, device)
        self.prepared = Prepared(partial(route, self.logits_TE, self.top_k))

    def check(self, outputs: tuple[torch.Tensor, ...]) -> accuracy.Verdict:
        scores_TE, weights_TK, ids_TK, logsumexp_T = outputs
        named = {"scores": scores_TE, "weights": weights_TK, "logsumexp": logsumexp_T}
        require_finite(named)
        logits_SE = self.logits_TE[self.tokens_S]
        ids_SK = oracle.best_experts(logits_SE, self.top_k)
        wrong = (ids_TK[self.tokens_S] != ids_SK).any(1)
        if wrong.any():
            return accuracy.Verdict("ids", float(wrong.double().mean()), 0.0)
        exact, yardstick = (dict(zip(named, oracle.route(logits_SE.to(dtype), ids_SK)))
                            for dtype in (torch.float64, self.logits_TE.dtype))
        return accuracy.judge({name: output[self.tokens_S] for name, output in named.items()}, exact, yardstick)

    def bytes_moved(self) -> int:
        return sum(tensor.nbytes for tensor in (self.logits_TE, *self.prepared.call()))


class _RouteBackward(_Step):
    """The gradient of the logits from those of scores, weights and logsumexp."""

    def __init__(self, measurement: PermutationMeasurement, device: torch.device, dtype: torch.dtype):
        case = measurement.case
        logits_TE = random_values(case.tokens, case.experts, dtype=dtype, device=device, seed=SEED)
        self.logits_TE = logits_TE.requires_grad_()
        scores_TE, weights_TK, self.ids_TK, logsumexp_T = route(self.logits_TE, case.top_k)
        self.forward_outputs = scores_TE, weights_TK, logsumexp_T
        self.grads = tuple(random_values(*output.shape, dtype=output.dtype, device=device, seed=SEED + 1)
                           for output in self.forward_outputs)
        self.tokens_S = sample(case.tokens, _SAMPLED_TOKENS, device)
        self.prepared = Prepared(partial(torch.autograd.grad, self.forward_outputs, self.logits_TE, self.grads,
                                         retain_graph=True))

    def check(self, outputs: tuple[torch.Tensor, ...]) -> accuracy.Verdict:
        grad_TE, = outputs
        require_finite({"grad logits": grad_TE})
        exact, yardstick = (self._expected(dtype) for dtype in (torch.float64, grad_TE.dtype))
        return accuracy.judge({"grad logits": grad_TE[self.tokens_S]}, {"grad logits": exact}, {"grad logits": yardstick})

    def _expected(self, dtype: torch.dtype) -> torch.Tensor:
        logits_SE = self.logits_TE.detach()[self.tokens_S].to(dtype).requires_grad_()
        outputs = oracle.route(logits_SE, self.ids_TK[self.tokens_S])
        grads = [grad[self.tokens_S].to(output.dtype) for grad, output in zip(self.grads, outputs)]
        return torch.autograd.grad(outputs, logits_SE, grads)[0]

    def bytes_moved(self) -> int:
        scores_TE, _, _ = self.forward_outputs
        return sum(tensor.nbytes for tensor in (scores_TE, self.ids_TK, *self.grads, self.logits_TE))


class _Routed(_Step):
    """A step that depends on the routing."""

    def __init__(self, measurement: PermutationMeasurement, device: torch.device, dtype: torch.dtype):
        self.case, align = measurement.case, measurement.align or 1
        self.ids_TK, self.expected = routed(self.case, measurement.routing, align, device)
        self.dtype, self.device = dtype, device
        own = measurement.implementation == "gbmoe"
        self.tolerance = Subject.tolerance if own else RIVAL_TOLERANCE
        make = PlannedPermutation if own else rivals.load(measurement.implementation).permutation
        self.permutation: Permutation = make(self.ids_TK, self.case.experts, align)
        self.rows = self.permutation.rows
        self.prepared = self.prepare()

    def prepare(self) -> Prepared:
        """The step with its operands."""
        raise TypeError(f"{type(self).__name__} does not say what it times")

    @property
    def used_rows(self) -> int:
        return int(self.expected["offsets_E1"][-1])

    def row_bytes(self, rows: int) -> int:
        return rows * self.case.hidden * self.dtype.itemsize

    def draw(self, rows: int, seed: int) -> torch.Tensor:
        return random_values(rows, self.case.hidden, dtype=self.dtype, device=self.device, seed=seed)

    def draw_weights(self) -> torch.Tensor:
        shape, generator = (self.case.tokens, self.case.top_k), exact_inputs.generator(self.device, SEED + 3)
        return torch.rand(shape, generator=generator, dtype=torch.float32, device=self.device)

    def draw_expert_rows(self) -> torch.Tensor:
        """y [P,H], with NaN in all rows without a slot, which no implementation may read."""
        y_PH = self.draw(self.rows, SEED + 1)
        y_PH[self.expected["slot_of_row_P"][: self.rows] < 0] = float("nan")
        return y_PH

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some tokens [S], and the rows [S,K] of their slots."""
        tokens_S = sample(self.case.tokens, _SAMPLED_TOKENS, self.device)
        return tokens_S, self.expected["row_of_slot_TK"].view(self.ids_TK.shape)[tokens_S].long()


class _Plan(_Routed):
    def prepare(self) -> Prepared:
        return self.permutation.plan()

    def check(self, outputs: dict[str, torch.Tensor]) -> accuracy.Verdict:
        wrong = [name for name, tensor in outputs.items() if not torch.equal(tensor.flatten(), self.expected[name])]
        return accuracy.Verdict(" and ".join(wrong) or "plan", float(len(wrong)), 0.0)


class _Gather(_Routed):
    """The gather as a layer calls it."""

    def prepare(self) -> Prepared:
        self.x_TH = self.draw(self.case.tokens, SEED)
        return self.permutation.gather(self.x_TH)

    @property
    def written_rows(self) -> int:
        return self.used_rows

    def check(self, outputs: torch.Tensor) -> accuracy.Verdict:
        if outputs.shape != (self.rows, self.case.hidden):
            raise ValueError(f"out: expected shape {[self.rows, self.case.hidden]}, got {list(outputs.shape)}")
        slot_P = self.expected["slot_of_row_P"][: self.written_rows].long()
        token_P = slot_P.div(self.case.top_k, rounding_mode="floor").clamp(min=-1)
        wrong = sum(int((out_NH != oracle.take(self.x_TH, token_N)).any(1).sum()) for out_NH, token_N in zip(
            outputs[: self.written_rows].split(_ROWS_AT_A_TIME), token_P.split(_ROWS_AT_A_TIME)))
        return accuracy.Verdict("rows of out", wrong / self.written_rows, 0.0)

    def bytes_moved(self) -> int:
        return self.row_bytes(self.case.tokens + self.written_rows)


class _PaddedGather(_Gather):
    """The public operator, which writes all rows because its caller sees them."""

    def prepare(self) -> Prepared:
        self.x_TH = self.draw(self.case.tokens, SEED)
        return self.permutation.padded_gather(self.x_TH)

    @property
    def written_rows(self) -> int:
        return self.rows


class _PlanAndGather(_PaddedGather):
    def prepare(self) -> Prepared:
        self.x_TH = self.draw(self.case.tokens, SEED)
        return self.permutation.plan_and_gather(self.x_TH)


class _Scatter(_Routed):
    def prepare(self) -> Prepared:
        self.y_PH, self.weights_TK = self.draw_expert_rows(), self.draw_weights()
        return self.permutation.scatter(self.y_PH, self.weights_TK)

    def check(self, outputs: torch.Tensor) -> accuracy.Verdict:
        require_finite({"out": outputs})
        tokens_S, rows_SK = self.sampled()
        y_SKH, weights_SK1 = self.y_PH[rows_SK], self.weights_TK[tokens_S].unsqueeze(-1)
        exact_SH = (y_SKH.double() * weights_SK1.double()).sum(1)
        yardstick_SH = (y_SKH * weights_SK1).sum(1).to(self.dtype)
        return accuracy.judge({"out": outputs[tokens_S]}, {"out": exact_SH}, {"out": yardstick_SH}, factor=self.tolerance)

    def bytes_moved(self) -> int:
        return self.row_bytes(self.case.slots + self.case.tokens) + self.weights_TK.nbytes


class _ScatterBackward(_Routed):
    """The gradients of y and of the weights."""

    def prepare(self) -> Prepared:
        self.y_PH, self.weights_TK = self.draw_expert_rows(), self.draw_weights()
        self.grad_TH = self.draw(self.case.tokens, SEED + 2)
        return self.permutation.scatter_backward(self.grad_TH, self.y_PH, self.weights_TK)

    def check(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> accuracy.Verdict:
        grad_y_PH, grad_weights_TK = outputs
        require_finite({"grad y": grad_y_PH, "grad weights": grad_weights_TK})
        tokens_S, rows_SK = self.sampled()
        empty_P = self.expected["slot_of_row_P"][: len(grad_y_PH)] < 0
        largest_P = grad_y_PH.abs().amax(1)
        named = {"grad y": grad_y_PH[rows_SK].flatten(0, 1), "grad weights": grad_weights_TK[tokens_S],
                 "padding of grad y": largest_P[empty_P]}
        exact, yardstick = (self._expected(tokens_S, rows_SK, dtype) for dtype in (torch.float64, self.dtype))
        padding = {"padding of grad y": torch.zeros_like(named["padding of grad y"])}
        return accuracy.judge(named, exact | padding, yardstick | padding, copies=tuple(padding), factor=self.tolerance)

    def _expected(self, tokens_S: torch.Tensor, rows_SK: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        grad_S1H, y_SKH = self.grad_TH[tokens_S].unsqueeze(1).to(dtype), self.y_PH[rows_SK].to(dtype)
        grad_y_SKH = (grad_S1H * self.weights_TK[tokens_S].unsqueeze(-1)).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return {"grad y": grad_y_SKH.flatten(0, 1), "grad weights": (grad_S1H * y_SKH).sum(-1, dtype=wide)}

    def bytes_moved(self) -> int:
        slots, empty = self.case.slots, self.rows - self.case.slots
        return self.row_bytes(self.case.tokens + 2 * slots + empty) + 2 * self.weights_TK.nbytes


_SUBJECTS = {
    "route": _Route, "route-backward": _RouteBackward, "plan": _Plan, "gather": _Gather,
    "padded_gather": _PaddedGather, "plan+gather": _PlanAndGather, "scatter": _Scatter,
    "scatter-backward": _ScatterBackward,
}
