#!/usr/bin/env python
"""Random layers, router to experts, each compared with float64 and with itself: outputs and all gradients.

    python scripts/fuzz.py --seconds 600 --seed 1            on the CPU
    python scripts/fuzz.py --seconds 600 --seed 1 --cuda     on a GPU, also in graphs, on other streams and in threads

Hypothesis draws sizes, dtypes, strides and offsets, layouts, functions of experts and of routers, padding, and what needs a gradient, and
makes a layer that fails as small as it can. For each the output and the gradients are those of float64, up to the error of the dtype; and
the order of tokens, padding among them, the engine, and two batches in place of one do not change them. The status is 1 if a layer fails,
and then the last lines say which.

Shape suffixes: T tokens, K slots a token, E experts, F ffn hidden, H hidden.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gbmoe
from gbmoe import RouterFunction, WeightLayout, engines
from gbmoe.ops.activations import ClampedSilu, Situ, gated
from gbmoe.testing import cuda_graphs, exact_inputs

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
ACTIVATIONS = (F.silu, F.gelu, F.relu, gbmoe.ops.activations.relu_squared, torch.tanh)  # the last has no kernel
GATED = (ClampedSilu(1.702, 7, 7, 1), ClampedSilu(limit=1.0, gate_limit=1.0), Situ(2.0, 3.0))
WITH_KINKS = (F.relu, *GATED[:2])
A_BATCH = 50  # layers between two looks at the clock


@dataclass(frozen=True)
class Case:
    """A layer and its inputs. `strides` are those of x: "rows" for a contiguous one, "columns" for one whose transpose is, "part" for one
    that lies in a larger tensor. Experts of a `combined` layout have their gate and up in one tensor."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    ffn: int
    dtype: torch.dtype
    strides: str
    layout: WeightLayout
    glu: bool
    activation: object
    biases: bool
    function: RouterFunction
    router_bias: bool
    expert_bias: bool
    padding: bool
    weights_on: str
    keep_rows: bool
    trained: tuple[bool, bool, bool]  # x, the router, the experts
    seed: int


@st.composite
def cases(draw, on_gpu: bool = False) -> Case:
    """Of any layer that the operators take."""
    experts = draw(st.one_of(st.integers(1, 12), st.sampled_from([16, 33, 64, 200])))
    top_k = draw(st.integers(1, min(experts, 9)))
    sizes = st.sampled_from([8, 16, 48, 64, 72, 136, 256]) if on_gpu else st.sampled_from([1, 3, 8, 16, 24, 40])
    function = draw(_functions(experts, top_k))
    glu = draw(st.booleans())
    combined = draw(st.sampled_from(["separate", "gate_first", "up_first", "interleaved"])) if glu else "separate"
    layout = WeightLayout(combined, draw(st.booleans()), draw(st.booleans()))
    activation = draw(st.sampled_from(ACTIVATIONS + (GATED if glu else ())))
    has_kernel = activation is not torch.tanh
    biases = draw(st.booleans()) and has_kernel
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64] if on_gpu else \
        [torch.float64, torch.float32, torch.bfloat16]
    return Case(
        tokens=draw(st.one_of(st.integers(0, 40), st.sampled_from([64, 127, 300] if on_gpu else [64]))), experts=experts, top_k=top_k,
        hidden=draw(sizes), ffn=draw(sizes), dtype=draw(st.sampled_from(dtypes)),
        strides=draw(st.sampled_from(["rows", "columns", "part"])), layout=layout, glu=glu, activation=activation, biases=biases,
        function=function, router_bias=draw(st.booleans()), expert_bias=draw(st.booleans()), padding=draw(st.booleans()),
        weights_on=draw(st.sampled_from(["output", "input"] if biases or not has_kernel else ["output", "between", "input"])),
        keep_rows=draw(st.booleans()), trained=draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        seed=draw(st.integers(0, 2**20)))


@st.composite
def _functions(draw, experts: int, top_k: int) -> RouterFunction:
    score = draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]))
    pre_softmax = score != "softmax" or draw(st.booleans())
    groups = draw(st.sampled_from([g for g in (1, 2, 4, 8) if experts % g == 0]))
    size = experts // groups
    least = -(-top_k // size)  # groups that have so many experts
    return RouterFunction(
        score, pre_softmax, num_groups=groups, group_topk=draw(st.integers(least, groups)), group_best=draw(st.integers(1, min(2, size))),
        normalize=draw(st.sampled_from([None, 1.0])), epsilon=draw(st.sampled_from([0.0, 1e-20])),
        scale=draw(st.sampled_from([1.0, 2.5])))


class Layer:
    """The tensors of a case, and what gbmoe and float64 make of them."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(case.seed)

        def draw(*shape, scale=1.0):
            return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(case.dtype).to(device)

        T, E, F, H = case.tokens, case.experts, case.ffn, case.hidden
        self.grad_TH, self.router_EH = draw(T, H), draw(E, H, scale=H**-0.5)
        self.x_TH = _with_strides(draw(T, H), case.strides)
        self.bias_E = draw(E) if case.router_bias else None
        self.expert_bias_E = draw(E).float() / 4 if case.expert_bias else None
        self.padding_T = (torch.rand(T, generator=generator) < 0.3).to(device) if case.padding else None
        gate, up, down = (draw(E, F, H, scale=H**-0.5 if number < 2 else F**-0.5) for number in range(3))
        biases = [draw(E, F), draw(E, H), draw(E, F)] if case.biases else [None] * 3
        layout = case.layout
        if case.glu and layout.is_combined:
            first, second = _joined(layout, gate, up), None
            if case.biases:
                biases = [layout.joined(biases[0], biases[2]), biases[1], None]
        else:
            first, second = gate, up if case.glu else None
            biases = [*biases[:2], biases[2] if case.glu else None]
        self.w1, self.v1 = (w if w is None else _transposed(w, layout.up_transposed) for w in (first, second))
        self.w2 = _transposed(down, layout.down_transposed)
        self.biases = biases

    def leaves(self) -> dict[str, torch.Tensor]:
        """Every floating tensor, those that are trained with gradients."""
        x, router, experts = self.case.trained
        named = {"x": (self.x_TH, x), "router": (self.router_EH, router), "router bias": (self.bias_E, router),
                 "w1": (self.w1, experts), "w2": (self.w2, experts), "v1": (self.v1, experts),
                 **{f"{name} bias": (bias, experts) for name, bias in zip(("w1", "w2", "v1"), self.biases)}}
        return {name: t.detach().requires_grad_(trained) for name, (t, trained) in named.items() if t is not None}

    def computed(self, leaves: dict[str, torch.Tensor], engine: str = "auto", rows=slice(None), given=None) -> tuple:
        """(out, ids) of gbmoe, of the tokens `rows`."""
        case, padding_T = self.case, None if self.padding_T is None else self.padding_T[rows]
        x_TH = leaves["x"][rows]
        routing = gbmoe.ops.route_tokens(x_TH, leaves["router"], case.top_k, bias=leaves.get("router bias"), function=case.function,
                                         expert_bias=self.expert_bias_E, padding_mask=padding_T, given_experts=given)
        plan = gbmoe.RoutingPlan.from_experts(routing.experts_TK, case.experts)
        out = gbmoe.expert_mlp(
            x_TH, plan, leaves["w1"], leaves["w2"], leaves.get("v1"), weights_TK=routing.weights_TK, activation=case.activation,
            engine=engine, keep_gathered_rows=case.keep_rows, layout=case.layout, w1_bias=leaves.get("w1 bias"),
            w2_bias=leaves.get("w2 bias"), v1_bias=leaves.get("v1 bias"), weights_on=case.weights_on)
        return out, routing.experts_TK

    def waits(self, ids_TK: torch.Tensor) -> bool:
        """Whether the host waits for the device in a forward, which no CUDA graph can record."""
        case, plan = self.case, gbmoe.RoutingPlan.from_experts(ids_TK, self.case.experts)
        w1_bias, w2_bias, v1_bias = self.biases
        return gbmoe.expert_path(self.x_TH, plan, self.w1, self.w2, self.v1, layout=case.layout, activation=case.activation,
                                 weights_on=case.weights_on, w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias).host_waits

    def exact(self, leaves: dict[str, torch.Tensor], ids_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The output of plain PyTorch in `dtype`, for these ids."""
        case = self.case
        of = {name: t.to(dtype) for name, t in leaves.items()}
        logits_TE = self.logits(of)
        weights_TK = _weights(case.function, logits_TE, ids_TK)
        w1, w2, v1 = case.layout.matrices(of["w1"], of["w2"], of.get("v1"))
        bias, up_bias = case.layout.biases(of.get("w1 bias"), of.get("v1 bias"))
        down_bias = of.get("w2 bias")
        out_TH = torch.zeros_like(of["x"])
        for e in range(case.experts):
            t, k = (ids_TK == e).nonzero(as_tuple=True)
            weight, rows = weights_TK[t, k, None], of["x"][t]
            rows = rows * weight if case.weights_on == "input" else rows
            h = rows @ w1[e].t() + (0 if bias is None else bias[e])
            g = None if v1 is None else rows @ v1[e].t() + (0 if up_bias is None else up_bias[e])
            a = case.activation(h) if g is None else gated(case.activation, h, g)
            y = a @ w2[e] + (0 if down_bias is None else down_bias[e])
            out_TH = out_TH.index_add(0, t, y if case.weights_on == "input" else y * weight)
        return out_TH

    def logits(self, of: dict[str, torch.Tensor]) -> torch.Tensor:
        """[T,E], in the dtype of the tensors."""
        return of["x"] @ of["router"].t() + of.get("router bias", 0)


def _with_strides(x_TH: torch.Tensor, strides: str) -> torch.Tensor:
    if strides == "columns":
        return x_TH.t().contiguous().t()
    if strides == "part":
        whole = x_TH.new_full((x_TH.size(0) + 2, 2 * x_TH.size(1) + 3), float("nan"))
        whole[1:-1, 3::2] = x_TH
        return whole[1:-1, 3::2]
    return x_TH


def _joined(layout: WeightLayout, gate_EFH: torch.Tensor, up_EFH: torch.Tensor) -> torch.Tensor:
    if layout.gate_up == "interleaved":
        return torch.stack((gate_EFH, up_EFH), 2).flatten(1, 2)
    return torch.cat((gate_EFH, up_EFH) if layout.gate_up == "gate_first" else (up_EFH, gate_EFH), 1)


def _transposed(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.transpose(1, 2).contiguous() if transposed else weight


def _weights(function: RouterFunction, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """The chosen experts' weights; 0 of slots that are left out."""
    chosen_TK = logits_TE.gather(1, ids_TK.clamp(min=0))
    if not function.pre_softmax:
        weights_TK = chosen_TK.softmax(-1)
    elif function.score == "softmax":
        weights_TK = logits_TE.softmax(-1).gather(1, ids_TK.clamp(min=0))
    else:
        weights_TK = chosen_TK.sigmoid() if function.score == "sigmoid" else F.softplus(chosen_TK).sqrt()
    if function.normalize is not None and function.pre_softmax:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + function.epsilon)
    return torch.where(ids_TK < 0, 0, weights_TK * function.scale)


def _wrong_choice(layer: Layer, ids_TK: torch.Tensor, leaves: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with the choice: an expert, or a group, that is worth less than one that was passed over, by more than rounding."""
    case, function = layer.case, layer.case.function
    with torch.no_grad():
        logits_TE = layer.logits({name: t.double() for name, t in leaves.items()})
        live_T = torch.ones(case.tokens, dtype=torch.bool, device=layer.device) if layer.padding_T is None else ~layer.padding_T
        if not bool((ids_TK[~live_T] == -1).all()):
            return "padding has experts"
        ids_TK, logits_TE = ids_TK[live_T], logits_TE[live_T]
        if not ids_TK.numel():
            return None
        if not bool((ids_TK.sort(-1).values.diff(dim=-1) > 0).all()):
            return "an expert is chosen twice"
        rank_TE = logits_TE
        if function.pre_softmax and (layer.expert_bias_E is not None or function.has_groups):
            rank_TE = {"softmax": lambda: logits_TE.softmax(-1), "sigmoid": logits_TE.sigmoid,
                       "sqrtsoftplus": lambda: F.softplus(logits_TE).sqrt()}[function.score]()
        if layer.expert_bias_E is not None:
            rank_TE = rank_TE + layer.expert_bias_E.double()
        slack = 1e-11 if case.dtype == torch.float64 else 1e-4
        if function.has_groups:
            grouped = rank_TE.unflatten(1, (function.num_groups, -1))
            worth_TG = grouped.topk(function.group_best, -1).values.sum(-1)
            last_T1 = worth_TG.topk(function.group_topk, -1).values[:, -1:]
            sure = worth_TG > last_T1 + slack  # groups that are chosen however sums were rounded
            possible = worth_TG >= last_T1 - slack
            of_group_TK = ids_TK // grouped.size(2)
            if not bool(possible.gather(1, of_group_TK).all()):
                return "an expert is of a group that was not chosen"
            rank_TE = torch.where(sure.repeat_interleave(grouped.size(2), 1), rank_TE, -torch.inf)
            worst_T = grouped.flatten(1).gather(1, ids_TK).amin(-1)
        else:
            worst_T = rank_TE.gather(1, ids_TK).amin(-1)
        passed_over = rank_TE.scatter(1, ids_TK, -torch.inf)
        return None if bool((passed_over.amax(-1) <= worst_T + slack).all()) else "a better expert was passed over"


def problems(case: Case, device: torch.device) -> list[str]:
    """What is wrong with a case; empty where all is right."""
    exact_inputs.poison(device)
    layer, wrong = Layer(case, device), []
    leaves = layer.leaves()

    def gradients(out, grad, of):
        trained = {name: leaf for name, leaf in of.items() if leaf.requires_grad}
        if not out.requires_grad:
            return {}
        found = torch.autograd.grad(out, list(trained.values()), grad.to(out.dtype), allow_unused=True)
        return {name: torch.zeros_like(trained[name]) if g is None else g for name, g in zip(trained, found)}

    # Rounded to 16 bits, what is near a kink may be on its other side, where the gradient is another one.
    may_jump = case.dtype.itemsize == 2 and case.activation in WITH_KINKS

    def compare(what, got, expected, yardstick, factor=4.0):
        for name, value in got.items():
            if may_jump and name != "out":
                continue
            one, exact, own = (t.detach().double().flatten() for t in (value, expected[name], yardstick[name]))
            if value.shape != expected[name].shape:
                wrong.append(f"{what}: {name} has the shape {tuple(value.shape)}")
            elif one.numel():
                norm = max(float(exact.norm()), 1e-2 * one.numel() ** 0.5)
                error, allowed = float((one - exact).norm()), max(TOLERANCES[case.dtype] * norm, factor * float((own - exact).norm()))
                if not error <= allowed:
                    wrong.append(f"{what}: {name} differs by {error / norm:.1e}, allowed {allowed / norm:.1e}")

    def all_of(out, of):
        return {"out": out, **gradients(out, layer.grad_TH, of)}

    out_TH, ids_TK = layer.computed(leaves)
    problem = _wrong_choice(layer, ids_TK, leaves)
    if problem:
        return [problem]
    results = all_of(out_TH, leaves)
    wide = {name: leaf.detach().double().requires_grad_(leaf.requires_grad) for name, leaf in leaves.items()}
    expected = all_of(layer.exact(wide, ids_TK, torch.float64), wide)
    yardstick = all_of(layer.exact(leaves, ids_TK, case.dtype), leaves)
    compare("float64", results, expected, yardstick)

    for engine in engines.ENGINES:
        if engine != "auto" and not _refuses(engine, layer):
            compare(engine, all_of(layer.computed(leaves, engine, given=ids_TK)[0], leaves), expected, yardstick)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(case.seed)).to(device)
    shuffled = layer.computed(leaves, rows=order, given=ids_TK[order])[0]
    compare("another order", {"out": shuffled}, {"out": expected["out"][order]}, {"out": yardstick["out"][order]})
    half = case.tokens // 2
    halves = [layer.computed(leaves, rows=rows, given=ids_TK[rows])[0] for rows in (slice(0, half), slice(half, None))]
    compare("two batches", all_of(torch.cat(halves), leaves), expected, yardstick)
    if device.type == "cuda":
        wrong += _elsewhere(layer, leaves)
    return wrong


def _refuses(engine: str, layer: Layer) -> bool:
    case = layer.case
    if engines.availability(layer.device)[engine] is not None:
        return True
    on_host = engines.ENGINES[engine].needs_host_sizes or layer.device.type == "cpu"
    try:
        engines.resolve(engine, layer.device, case.dtype, case.tokens * case.top_k, (case.experts, case.ffn, case.hidden), on_host)
    except ValueError:
        return True
    return False


def _elsewhere(layer: Layer, leaves: dict[str, torch.Tensor]) -> list[str]:
    """A CUDA graph, another stream and two threads have the same bits."""
    wrong, found = [], []
    case = layer.case
    with torch.no_grad():
        alone, ids_TK = layer.computed(leaves)

        def again():
            with torch.no_grad():
                return layer.computed(leaves)[0]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(("another stream", again()))
        torch.cuda.current_stream().wait_stream(stream)
        threads = [threading.Thread(target=lambda number=number: found.append((f"thread {number}", again()))) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if case.tokens and not layer.waits(ids_TK):
            graph, captured = cuda_graphs.captured(again)
            graph.replay()
            found.append(("a CUDA graph", captured))
    torch.cuda.synchronize()
    if len(found) < 3:
        wrong.append("a thread did not end")
    return wrong + [f"{what} has other bits" for what, got in found if not torch.equal(got, alone)]


def run(seconds: float, seed: int, device: torch.device, most: int | None = None) -> int:
    """Random layers for so many seconds, or `most` of them; returns how many. Raises AssertionError for one that fails."""
    began, tried = time.monotonic(), 0
    while tried < most if most is not None else time.monotonic() - began < seconds:
        tried += _batch(seed + tried, A_BATCH if most is None else min(A_BATCH, most - tried), device)
    return tried


def _batch(seed: int, count: int, device: torch.device) -> int:
    tried: list[Case] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(cases(device.type == "cuda"))
    def all_are_right(case):
        tried.append(case)
        wrong = problems(case, device)
        assert not wrong, "\n    ".join([str(case), *wrong])

    all_are_right()
    return len(tried)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first layers")
    parser.add_argument("--layers", type=int, help="so many layers instead of so many seconds")
    parser.add_argument("--cuda", action="store_true", help="on the current GPU")
    options = parser.parse_args()
    for name in ("seconds", "seed", "layers"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < 2**31:
            parser.error(f"--{name}: expected a number of at least 0, got {value}")
    if options.cuda and not torch.cuda.is_available():
        parser.error("--cuda: torch finds no GPU")
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        tried = run(options.seconds, options.seed, torch.device("cuda" if options.cuda else "cpu"), options.layers)
    except AssertionError as error:
        sys.exit(f"failed: {error}")
    print(f"{tried} layers, none failed; seed {options.seed}, {torch.cuda.get_device_name() if options.cuda else 'CPU'}, torch"
          f" {torch.__version__}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
