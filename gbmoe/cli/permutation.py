"""What `gbmoe bench --suite permute` measures: the plan, the router's operator, and the permutation there and back.

Everything here is bound by memory, so that beside each time stands its bound: the fewest bytes that can be moved, over the
bandwidth of a device-to-device copy in the same run. With b bytes an element, R = T * K slots, P rows of the plan and P_used
those up to the end of the last expert:

    copy              twice the buffer: read and written
    plan              no bound, what it moves is small
    route             logits, scores b*T*E each; weights b*T*K, ids 8*T*K, logsumexp 4*T (8*T for float64)
    route-backward    the same: scores, ids and the gradients of scores, weights and logsumexp read, that of the logits written
                      and b*T*E more, because the scores have a gradient beside their value
    gather            b*H*(T + P_used): as the layer calls it, rows behind the last expert are not written
    padded_gather     b*H*(T + P): the public operator clears those as well
    scatter           b*H*(R + T) + weights 4*R
    scatter-backward  b*H*(T + 2*R) + padding zeros b*H*(P - R) + weights and their gradient 8*R

Index maps do not count. The maps that a result is verified with come from plain.routing, not from the plan. Plans and gathers
must be right to the last bit, in whole; the others are compared with float64 on sampled tokens. Every result is verified in
memory that held NaN before.

Shape suffixes: T tokens, K slots a token, R = T * K, E experts, H hidden, P padded rows, S sampled tokens, N other rows.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch

from gbmoe import RoutingPlan, cases
from gbmoe.cases import MoeCase
from gbmoe.cli import plain
from gbmoe.cli.configuration import SEED, Configuration, Subject, random_values, require_finite, sample
from gbmoe.ops import padded_gather, padded_scatter, permute, route

# Of each computation at most so many tokens are compared with float64, and a gather so many rows at a time.
_SAMPLED_TOKENS, _ROWS_AT_A_TIME = 512, 4096
# The share of the expert of rank r is in proportion to 1 / r to this power.
SKEWS = {"uniform": 0.0, "zipf": 1.0}
_PEERS = {"MegaBlocks": "megablocks.ops", "TransformerEngine": "transformer_engine.pytorch"}


@dataclass(frozen=True)
class PermutationConfiguration(Configuration):
    """One step of the way to the experts' rows and back. "plan", "gather" and "scatter" depend on routing and alignment."""

    align: int | None = None

    kind = "permutation"

    @property
    def contest(self) -> str:
        return super().contest + (f"/align{self.align}" if self.align else "")

    def describe(self) -> dict:
        return super().describe() | {"align": self.align}

    def flops(self) -> None:
        return None

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return _SUBJECTS[self.computation](self, device, dtype)


def peers_left_out() -> dict[str, str]:
    """The peers, none of which has rows in the suite yet, with the reason."""
    reasons = {}
    for name, module in _PEERS.items():
        try:
            importlib.import_module(module)
            reasons[name] = "importable, but without rows in this suite"
        except Exception as error:  # packages built against another CUDA or torch raise more than ImportError
            reasons[name] = f"not importable: {type(error).__name__}: {error}"
    return reasons


@lru_cache(maxsize=1)
def _routed(case: MoeCase, routing: str, align: int, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Expert ids [T,K], and what their plan must hold, under its attributes' names."""
    ids_TK = cases.expert_ids(case.tokens, case.experts, case.top_k, device=device, seed=SEED, skew=SKEWS[routing])
    expected = plain.routing(ids_TK, case.experts, align)
    return ids_TK, {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in expected.items()}


class _Step(Subject):
    hide_host = True

    @abstractmethod
    def call(self) -> tuple[torch.Tensor, ...]:
        """What is timed."""

    def call_in_poisoned_memory(self) -> tuple[torch.Tensor, ...]:
        """A call whose results lie, as far as the allocator gives the same memory again, where there was rubbish before."""
        for tensor in self.call():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -99)
        return self.call()


class _Copy(_Step):
    def __init__(self, configuration: PermutationConfiguration, device: torch.device, dtype: torch.dtype):
        case = configuration.case
        self.source = torch.arange(case.tokens * case.hidden * dtype.itemsize // 8, device=device)
        self.target = torch.empty_like(self.source)

    def call(self) -> tuple[torch.Tensor, ...]:
        return (self.target.copy_(self.source),)

    def check(self) -> plain.Verdict:
        out, = self.call_in_poisoned_memory()
        return plain.Verdict("out", float(not torch.equal(out, self.source)), 0.0)

    def bytes_moved(self) -> int:
        return 2 * self.source.nbytes


class _Route(_Step):
    """Router logits to scores, weights, ids and logsumexp."""

    def __init__(self, configuration: PermutationConfiguration, device: torch.device, dtype: torch.dtype):
        case = configuration.case
        self.top_k = case.top_k
        self.logits_TE = random_values(case.tokens, case.experts, dtype=dtype, device=device, seed=SEED)
        self.tokens_S = sample(case.tokens, _SAMPLED_TOKENS, device)

    def call(self) -> tuple[torch.Tensor, ...]:
        return route(self.logits_TE, self.top_k)

    def check(self) -> plain.Verdict:
        scores_TE, weights_TK, ids_TK, logsumexp_T = self.call_in_poisoned_memory()
        outputs = {"scores": scores_TE, "weights": weights_TK, "logsumexp": logsumexp_T}
        require_finite(outputs)
        logits_SE = self.logits_TE[self.tokens_S]
        ids_SK = plain.best_experts(logits_SE, self.top_k)
        wrong = (ids_TK[self.tokens_S] != ids_SK).any(1)
        if wrong.any():
            return plain.Verdict("ids", float(wrong.double().mean()), 0.0)
        exact, yardstick = (dict(zip(outputs, plain.route(logits_SE.to(dtype), ids_SK)))
                            for dtype in (torch.float64, self.logits_TE.dtype))
        return plain.judge({name: output[self.tokens_S] for name, output in outputs.items()}, exact, yardstick)

    def bytes_moved(self) -> int:
        return sum(tensor.nbytes for tensor in (self.logits_TE, *self.call()))


class _RouteBackward(_Step):
    """The gradient of the logits from those of scores, weights and logsumexp."""

    def __init__(self, configuration: PermutationConfiguration, device: torch.device, dtype: torch.dtype):
        case = configuration.case
        self.logits_TE = random_values(case.tokens, case.experts, dtype=dtype, device=device, seed=SEED).requires_grad_()
        scores_TE, weights_TK, self.ids_TK, logsumexp_T = route(self.logits_TE, case.top_k)
        self.outputs = scores_TE, weights_TK, logsumexp_T
        self.grads = tuple(random_values(*output.shape, dtype=output.dtype, device=device, seed=SEED + 1)
                           for output in self.outputs)
        self.tokens_S = sample(case.tokens, _SAMPLED_TOKENS, device)

    def call(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.outputs, self.logits_TE, self.grads, retain_graph=True)

    def check(self) -> plain.Verdict:
        grad_TE, = self.call_in_poisoned_memory()
        require_finite({"grad logits": grad_TE})
        exact, yardstick = (self._expected(dtype) for dtype in (torch.float64, grad_TE.dtype))
        return plain.judge({"grad logits": grad_TE[self.tokens_S]}, {"grad logits": exact}, {"grad logits": yardstick})

    def _expected(self, dtype: torch.dtype) -> torch.Tensor:
        logits_SE = self.logits_TE.detach()[self.tokens_S].to(dtype).requires_grad_()
        outputs = plain.route(logits_SE, self.ids_TK[self.tokens_S])
        grads = [grad[self.tokens_S].to(output.dtype) for grad, output in zip(self.grads, outputs)]
        return torch.autograd.grad(outputs, logits_SE, grads)[0]

    def bytes_moved(self) -> int:
        scores_TE, _, _ = self.outputs
        return sum(tensor.nbytes for tensor in (scores_TE, self.ids_TK, *self.grads, self.logits_TE))


class _Routed(_Step):
    """A step that depends on the routing."""

    def __init__(self, configuration: PermutationConfiguration, device: torch.device, dtype: torch.dtype):
        self.case, self.align = configuration.case, configuration.align
        self.ids_TK, self.expected = _routed(self.case, configuration.routing, self.align, device)
        self.dtype, self.device = dtype, device

    def build_plan(self) -> RoutingPlan:
        return RoutingPlan.from_experts(self.ids_TK, self.case.experts, align=self.align, check="none")

    @property
    def rows(self) -> int:
        return self.expected["slot_of_row_P"].numel()

    @property
    def used_rows(self) -> int:
        return int(self.expected["offsets_E1"][-1])

    def row_bytes(self, rows: int) -> int:
        return rows * self.case.hidden * self.dtype.itemsize

    def draw(self, rows: int, seed: int) -> torch.Tensor:
        return random_values(rows, self.case.hidden, dtype=self.dtype, device=self.device, seed=seed)

    def draw_weights(self) -> torch.Tensor:
        shape, generator = (self.case.tokens, self.case.top_k), cases.generator(self.device, SEED + 3)
        return torch.rand(shape, generator=generator, device=self.device)

    def draw_expert_rows(self) -> torch.Tensor:
        """y [P,H], NaN in all rows without a slot, which nobody may read."""
        y_PH = self.draw(self.rows, SEED + 1)
        y_PH[self.expected["slot_of_row_P"] < 0] = float("nan")
        return y_PH

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some tokens [S], and the rows [S,K] that must be those of their slots."""
        tokens_S = sample(self.case.tokens, _SAMPLED_TOKENS, self.device)
        return tokens_S, self.expected["row_of_slot_TK"].view(self.ids_TK.shape)[tokens_S].long()


class _Plan(_Routed):
    def call(self) -> tuple[torch.Tensor, ...]:
        plan = self.build_plan()
        return tuple(getattr(plan, name) for name in self.expected)

    def check(self) -> plain.Verdict:
        outputs = dict(zip(self.expected, self.call_in_poisoned_memory()))
        wrong = [name for name, tensor in outputs.items() if not torch.equal(tensor.flatten(), self.expected[name])]
        return plain.Verdict(" and ".join(wrong) or "plan", float(len(wrong)), 0.0)


class _Gather(_Routed):
    """The gather as a layer calls it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.plan, self.x_TH = self.build_plan(), self.draw(self.case.tokens, SEED)

    def call(self) -> tuple[torch.Tensor, ...]:
        return permute.gather(self.x_TH, self.plan.row_of_slot_TK, self.plan.slot_of_row_P)

    @property
    def written_rows(self) -> int:
        return self.used_rows

    def check(self) -> plain.Verdict:
        out_PH = self.call_in_poisoned_memory()[0]
        if out_PH.shape != (self.rows, self.case.hidden):
            raise ValueError(f"out: expected shape {[self.rows, self.case.hidden]}, got {list(out_PH.shape)}")
        slot_P = self.expected["slot_of_row_P"][: self.written_rows].long()
        token_P = slot_P.div(self.case.top_k, rounding_mode="floor").clamp(min=-1)
        wrong = sum(int((out_NH != plain.take(self.x_TH, token_N)).any(1).sum()) for out_NH, token_N in zip(
            out_PH[: self.written_rows].split(_ROWS_AT_A_TIME), token_P.split(_ROWS_AT_A_TIME)))
        return plain.Verdict("rows of out", wrong / self.written_rows, 0.0)

    def bytes_moved(self) -> int:
        return self.row_bytes(self.case.tokens + self.written_rows)


class _PaddedGather(_Gather):
    """The public operator, which a caller sees all rows of."""

    def call(self) -> tuple[torch.Tensor, ...]:
        return (padded_gather(self.x_TH, self.plan),)

    @property
    def written_rows(self) -> int:
        return self.rows


class _Scatter(_Routed):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.plan, self.y_PH, self.weights_TK = self.build_plan(), self.draw_expert_rows(), self.draw_weights()

    def call(self) -> tuple[torch.Tensor, ...]:
        return (padded_scatter(self.y_PH, self.plan, self.weights_TK),)

    def check(self) -> plain.Verdict:
        out_TH, = self.call_in_poisoned_memory()
        require_finite({"out": out_TH})
        tokens_S, rows_SK = self.sampled()
        y_SKH, weights_SK1 = self.y_PH[rows_SK], self.weights_TK[tokens_S].unsqueeze(-1)
        exact_SH = (y_SKH.double() * weights_SK1.double()).sum(1)
        yardstick_SH = (y_SKH * weights_SK1).sum(1).to(self.dtype)
        return plain.judge({"out": out_TH[tokens_S]}, {"out": exact_SH}, {"out": yardstick_SH})

    def bytes_moved(self) -> int:
        return self.row_bytes(self.case.slots + self.case.tokens) + self.weights_TK.nbytes


class _ScatterBackward(_Routed):
    """The gradients of y and of the weights."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.plan, self.y_PH, self.weights_TK = self.build_plan(), self.draw_expert_rows(), self.draw_weights()
        self.grad_TH = self.draw(self.case.tokens, SEED + 2)

    def call(self) -> tuple[torch.Tensor, ...]:
        return permute.scatter_backward(
            self.grad_TH, self.y_PH, self.plan.row_of_slot_TK, self.plan.slot_of_row_P, None, None, self.weights_TK)

    def check(self) -> plain.Verdict:
        grad_y_PH, grad_weights_TK = self.call_in_poisoned_memory()
        require_finite({"grad y": grad_y_PH, "grad weights": grad_weights_TK})
        tokens_S, rows_SK = self.sampled()
        empty_P = self.expected["slot_of_row_P"] < 0
        largest_P = grad_y_PH.abs().amax(1)
        outputs = {"grad y": grad_y_PH[rows_SK].flatten(0, 1), "grad weights": grad_weights_TK[tokens_S],
                   "padding of grad y": largest_P[empty_P]}
        exact, yardstick = (self._expected(tokens_S, rows_SK, dtype) for dtype in (torch.float64, self.dtype))
        padding = {"padding of grad y": torch.zeros_like(outputs["padding of grad y"])}
        return plain.judge(outputs, exact | padding, yardstick | padding, copies=tuple(padding))

    def _expected(self, tokens_S: torch.Tensor, rows_SK: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        grad_S1H, y_SKH = self.grad_TH[tokens_S].unsqueeze(1).to(dtype), self.y_PH[rows_SK].to(dtype)
        grad_y_SKH = (grad_S1H * self.weights_TK[tokens_S].unsqueeze(-1)).to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return {"grad y": grad_y_SKH.flatten(0, 1), "grad weights": (grad_S1H * y_SKH).sum(-1, dtype=wide)}

    def bytes_moved(self) -> int:
        slots, empty = self.case.slots, self.rows - self.case.slots
        return self.row_bytes(self.case.tokens + 2 * slots + empty) + 2 * self.weights_TK.nbytes


_SUBJECTS = {
    "copy": _Copy, "route": _Route, "route-backward": _RouteBackward, "plan": _Plan, "gather": _Gather,
    "padded_gather": _PaddedGather, "scatter": _Scatter, "scatter-backward": _ScatterBackward,
}
