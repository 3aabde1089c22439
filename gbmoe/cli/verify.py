"""`gbmoe verify`: every operator and every engine of this machine against float64, in under a minute.

A row of the table is one operator, engine and dtype over all its cases. An error is a norm over all cases together, because the few
elements of a small case have no statistics of their own. The limits are those of gbmoe/testing/accuracy.py. Free memory is filled with
NaN before each call, so that a value which is read before it is written shows up.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, P padded rows.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle

import torch

from gbmoe import RoutingPlan, engines, expert_mlp, gmm, padded_gather, padded_scatter
from gbmoe._checks import dtype_name
from gbmoe.cli.describe_system import DTYPES, device_argument, refusal
from gbmoe.cli.progress import StatusLine
from gbmoe.cli.text_table import print_table
from gbmoe.layers import Arguments, dMoE
from gbmoe.layers.arguments import default_device
from gbmoe.testing import accuracy, exact_inputs, moe_shapes, oracle
from gbmoe.testing.exact_inputs import exact_values, fan_in_scale

_HIDDEN, _FFN, _TOP_K = 64, 96, 2
_ALIGNMENTS = (1, 16, 128)

EXAMPLES = """\
python -m gbmoe verify                 # every GPU architecture has kernels of its own: run it on the node that will train
python -m gbmoe verify --device cpu
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --device."""
    parser.add_argument("--device", type=device_argument, help="cpu or cuda (default: cuda where there is a device)")


def run(arguments: argparse.Namespace) -> int:
    """Print the table, with PASS or FAIL as the last line. Return 1 where anything fails."""
    device = arguments.device or default_device()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products gain nothing from more threads, and lose much on a busy machine
    try:
        with StatusLine("gbmoe verify") as status:
            rows, notes = verify(device, lambda done, total, what: status.show(f"{done} of {total}: {what}"))
    finally:
        torch.set_num_threads(threads)
    print_table(
        [("operator", "<"), ("engine", "<"), ("dtype", "<"), ("cases", ">"), ("worst error", ">"), ("limit", ">"), ("", "<")],
        [(row.operator, row.engine, row.dtype, str(row.cases), f"{row.error:.2e}", f"{row.limit:.2e}",
          "FAIL" if row.problem else "PASS") for row in rows])
    for note in notes:
        print(note)
    failed = [row for row in rows if row.problem]
    for row in failed:
        print(f"FAIL: {row.operator}, engine {row.engine}, {row.dtype}: {row.problem}")
    print(f"{'FAIL' if failed else 'PASS'}: {len(rows) - len(failed)} of {len(rows)} on {device}")
    return 1 if failed else 0


@dataclass(frozen=True)
class Row:
    """One line of the table; `problem` says what is wrong, and is None otherwise."""
    operator: str
    engine: str
    dtype: str
    cases: int
    error: float
    limit: float
    problem: str | None


@dataclass(frozen=True)
class Trial:
    """One case of an operator: its inputs, and the functions that are called with them by name. `ours` takes the engine first.

    `yardstick` defaults to the plain formulation. `product` is (rows, groups, inner, columns), by which an engine may refuse the case.
    """
    name: str
    inputs: dict[str, torch.Tensor]
    plain: Callable
    ours: Callable
    product: tuple[int, int, int, int] | None = None
    yardstick: Callable | None = None

    @cached_property
    def expected(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The outputs of the oracle and of the yardstick."""
        exact = _outputs(self.plain, {name: tensor.double() for name, tensor in self.inputs.items()})
        return exact, _outputs(self.yardstick or self.plain, self.inputs)


@dataclass(frozen=True)
class Operator:
    """The trials of one operator. Outputs named in `copies` are moved, not computed, and must be right to the last bit."""
    name: str
    trials: list[Trial] = field(repr=False)
    copies: tuple[str, ...] = ()

    @property
    def uses_engines(self) -> bool:
        return any(trial.product for trial in self.trials)


def verify(device: torch.device, report: Callable[[int, int, str], object] = lambda done, total, what: None
           ) -> tuple[list[Row], list[str]]:
    """Verify everything that runs on `device`. Returns the table's rows, and a note for each engine or dtype that is left out.

    `report` is called before each row with its number, the number of all, and its operator, engine and dtype.
    """
    available = engines.availability(device)
    notes = {f"engine {name} is not available: {reason}": None for name, reason in available.items() if reason}
    usable = ["auto", *(name for name, reason in available.items() if not reason)]
    rows = [_verify_plan(device)]
    done = 1
    for dtype in DTYPES.values():
        operators = list(_operators(device, dtype))
        total = 1 + len(DTYPES) * sum(len(usable) if operator.uses_engines else 1 for operator in operators)
        for operator in operators:
            for engine in usable if operator.uses_engines else ["-"]:
                done += 1
                report(done, total, f"{operator.name}, engine {engine}, {dtype_name(dtype)}")
                refusals = [trial.product and refusal(engine, device, dtype, *trial.product) for trial in operator.trials]
                trials = [trial for trial, reason in zip(operator.trials, refusals) if reason is None]
                if trials:
                    rows.append(_verify(operator, engine, dtype, trials))
                else:
                    notes[f"engine {engine} refuses {dtype_name(dtype)}: {refusals[0]}"] = None
    return rows, list(notes)


def _outputs(function: Callable, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The function's result, and the gradients of its inputs for a fixed gradient of the result."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves)
    out.backward(exact_values(*out.shape, dtype=out.dtype, device=out.device, seed=99))
    return {"out": out.detach(), **{f"grad {name}": leaf.grad for name, leaf in leaves.items()}}


def _verify(operator: Operator, engine: str, dtype: torch.dtype, trials: list[Trial]) -> Row:
    row = partial(Row, operator.name, engine, dtype_name(dtype), len(trials))
    results, exacts, yardsticks = defaultdict(list), defaultdict(list), defaultdict(list)
    for trial in trials:
        try:
            exact, yardstick = trial.expected
            exact_inputs.poison(exact["out"].device)
            outputs = _outputs(partial(trial.ours, engine), trial.inputs)
            for name, result in outputs.items():
                got, expected = (result.dtype, result.shape), (dtype, exact[name].shape)
                if got != expected:
                    raise ValueError(f"{name}: expected {expected}, got {got}")
        except Exception as error:  # an operator that raises is a result, and the other rows are still to be made
            return row(float("inf"), 0.0, f"case {trial.name}: {type(error).__name__}: {error}")
        for name, result in outputs.items():
            for pile, tensor in ((results, result), (exacts, exact[name]), (yardsticks, yardstick[name])):
                pile[name].append(tensor.flatten())
    together = ({name: torch.cat(tensors) for name, tensors in pile.items()} for pile in (results, exacts, yardsticks))
    verdict = accuracy.judge(*together, copies=operator.copies)
    return row(verdict.error, verdict.limit, None if verdict.passed else str(verdict))


# ------------------------------------------------------------------------------------------------------------------ cases


def _routed(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Ids [T,K] that give expert e sizes[e] slots, in random order, with three or four dropped slots among them."""
    slots = sum(sizes)
    host = {"dtype": torch.int64, "device": "cpu"}
    ids = torch.full((slots // _TOP_K * _TOP_K + 2 * _TOP_K,), -1, **host)
    ids[:slots] = torch.repeat_interleave(torch.arange(len(sizes), **host), torch.tensor(sizes, **host))
    return ids[torch.randperm(len(ids), generator=exact_inputs.generator("cpu", slots), **host)].view(-1, _TOP_K).to(device)


def _routings(device: torch.device) -> Iterator[tuple[str, int, torch.Tensor, int]]:
    """Yield (name, E, ids [T,K], alignment); the alignments take turns."""
    for index, (name, sizes) in enumerate(moe_shapes.GROUP_SIZES.items()):
        yield name, len(sizes), _routed(sizes, device), _ALIGNMENTS[index % len(_ALIGNMENTS)]


def _verify_plan(device: torch.device) -> Row:
    """Compare the plan with plain Python. The error is the number of tensors that differ."""
    trials = [(name, num_experts, ids, align) for name, num_experts, ids, _ in _routings(device) for align in _ALIGNMENTS]
    row, wrong = partial(Row, "routing plan", "-", "int32", len(trials)), []
    for name, num_experts, ids, align in trials:
        exact_inputs.poison(device)
        try:
            plan = RoutingPlan.from_experts(ids, num_experts, align=align)
            expected = oracle.routing(ids, num_experts, align)
            wrong += [f"case {name}, align {align}: {attribute}" for attribute, values in expected.items()
                      if getattr(plan, attribute).flatten().tolist() != values]
        except Exception as error:
            return row(float("inf"), 0.0, f"case {name}, align {align}: {type(error).__name__}: {error}")
    return row(float(len(wrong)), 0.0, f"{wrong[0]} is wrong" if wrong else None)


def _operators(device: torch.device, dtype: torch.dtype) -> Iterator[Operator]:
    values = partial(exact_values, dtype=dtype, device=device)
    for name, trans_a, trans_b in (("gmm a @ b", False, False), ("gmm a @ b.T", False, True), ("gmm a.T @ b", True, False)):
        yield Operator(name, [_gmm_trial(case, sizes, trans_a, trans_b, values) for case, sizes in moe_shapes.GROUP_SIZES.items()])
    yield Operator("padded_gather", [_gather_trial(*routing, values) for routing in _routings(device)], copies=("out",))
    for name, weighted in (("padded_scatter", False), ("padded_scatter, weighted", True)):
        yield Operator(name, [_scatter_trial(*routing, weighted, values) for routing in _routings(device)])
    for mlp_type in ("mlp", "glu"):
        yield Operator(f"expert_mlp, {mlp_type}", [_experts_trial(*routing, activation, mlp_type, values)
                                                   for routing, activation in zip(_routings(device), cycle(oracle.ACTIVATIONS))])
    for mlp_type in ("mlp", "glu"):
        layers = [case for case in moe_shapes.SMOKE_CASES if case.mlp_type == mlp_type]
        yield Operator(f"dMoE, {mlp_type}", [_layer_trial(case, values) for case in layers])


def _gmm_trial(name, sizes, trans_a, trans_b, values) -> Trial:
    rows, groups = sum(sizes), len(sizes)
    b_shape = (rows, _FFN) if trans_a else (groups, _FFN, _HIDDEN) if trans_b else (groups, _HIDDEN, _FFN)
    inputs = {"a": values(rows, _HIDDEN, seed=1), "b": values(*b_shape, seed=2, scale=fan_in_scale(_HIDDEN))}
    batch_sizes = torch.tensor(sizes, dtype=torch.int64, device=inputs["a"].device)

    def ours(engine, a, b):
        return gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)

    return Trial(name, inputs, partial(oracle.product, sizes=sizes, trans_a=trans_a, trans_b=trans_b), ours,
                 (rows, groups, _HIDDEN, _FFN))


def _plain_rows(ids_TK: torch.Tensor, num_experts: int, align: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token of each row [P], row of each slot [T,K]), made by plain Python, with -1 where there is none."""
    plan = oracle.routing(ids_TK, num_experts, align)
    token_P = torch.tensor(plan["slot_of_row_P"], dtype=torch.int64, device=ids_TK.device).div(_TOP_K, rounding_mode="floor")
    return token_P, torch.tensor(plan["row_of_slot_TK"], dtype=torch.int64, device=ids_TK.device).view(ids_TK.shape)


def _gather_trial(name, num_experts, ids_TK, align, values) -> Trial:
    token_P, _ = _plain_rows(ids_TK, num_experts, align)

    def ours(_, x):
        return padded_gather(x, RoutingPlan.from_experts(ids_TK, num_experts, align=align))

    return Trial(name, {"x": values(len(ids_TK), _HIDDEN, seed=1)}, lambda x: oracle.take(x, token_P), ours)


def _scatter_trial(name, num_experts, ids_TK, align, weighted, values) -> Trial:
    token_P, row_of_slot_TK = _plain_rows(ids_TK, num_experts, align)
    inputs = {"y": values(len(token_P), _HIDDEN, seed=1)}
    if weighted:
        inputs["weights"] = values(*ids_TK.shape, seed=2)

    def ours(_, y, weights=None):
        return padded_scatter(y, RoutingPlan.from_experts(ids_TK, num_experts, align=align), weights)

    def plain_scatter(y, weights=None):
        return oracle.scatter(y, row_of_slot_TK, weights)

    return Trial(name, inputs, plain_scatter, ours)


def _experts_trial(name, num_experts, ids_TK, align, activation, mlp_type, values) -> Trial:
    shape = (num_experts, _FFN, _HIDDEN)
    inputs = {"x": values(len(ids_TK), _HIDDEN, seed=1), "weights": values(*ids_TK.shape, seed=2),
              "w1": values(*shape, seed=3, scale=fan_in_scale(_HIDDEN)), "w2": values(*shape, seed=4, scale=fan_in_scale(_FFN))}
    if mlp_type == "glu":
        inputs["v1"] = values(*shape, seed=5, scale=fan_in_scale(_HIDDEN))

    def ours(engine, x, weights, w1, w2, v1=None):
        plan = RoutingPlan.from_experts(ids_TK, num_experts, align=align)
        return expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=activation, engine=engine)

    def plain_experts(x, weights, w1, w2, v1=None):
        return oracle.experts(x, ids_TK, weights, oracle.ACTIVATIONS[activation], w1, w2, v1)

    return Trial(name, inputs, plain_experts, ours, (ids_TK.numel(), num_experts, _HIDDEN, _FFN))


def _layer_trial(case: moe_shapes.MoeCase, values) -> Trial:
    """The dMoE layer, with the bmm implementation as yardstick. The oracle is given the experts that the router chooses in this dtype."""
    shape = (case.experts * case.ffn, case.hidden)
    inputs = {"x": values(case.tokens, case.hidden, seed=1),
              "router.layer.weight": values(case.experts, case.hidden, seed=2, scale=fan_in_scale(case.hidden)),
              "experts.mlp.w1": values(*shape, seed=3, scale=fan_in_scale(case.hidden)),
              "experts.mlp.w2": values(*shape, seed=4, scale=fan_in_scale(case.ffn))}
    if case.mlp_type == "glu":
        inputs["experts.mlp.v1"] = values(*shape, seed=5, scale=fan_in_scale(case.hidden))
    arguments = partial(Arguments, hidden_size=case.hidden, ffn_hidden_size=case.ffn, moe_num_experts=case.experts,
                        moe_top_k=case.top_k, mlp_type=case.mlp_type, bias=False, fp16=False, moe_loss_weight=0,
                        device=inputs["x"].device)

    def layer(engine, mlp_impl="gbmoe", **tensors):
        x = tensors.pop("x")
        return torch.func.functional_call(dMoE(arguments(engine=engine, mlp_impl=mlp_impl)), tensors, (x,))

    with torch.no_grad():
        router = dMoE(arguments()).router
        ids_TK = torch.func.functional_call(router, {"layer.weight": inputs["router.layer.weight"]}, (inputs["x"],))[2]

    def plain_layer(**tensors):
        x, router_EH, *weights = tensors.values()
        weights = (w.view(case.experts, case.ffn, case.hidden) for w in weights)
        return oracle.experts(x, ids_TK, oracle.router_weights(x, router_EH, ids_TK), oracle.ACTIVATIONS["gelu_tanh"], *weights)

    return Trial(case.name, inputs, plain_layer, layer, (case.slots, case.experts, case.hidden, case.ffn),
                 yardstick=partial(layer, "auto", "bmm"))
