"""What `gbmoe bench` measures: layers and grouped products (the permutation's steps have a file of their own), and suites.

Layers and products are compared with float64 on samples: some tokens through the whole layer, forward and backward; some ffn
rows of every expert's weight gradient, over all tokens; some rows, or a block, of every group of a grouped product. Limits are
those of gbmoe/cli/plain.py.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, S sampled tokens, M rows of all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from gbmoe import cases, engines
from gbmoe.cases import MoeCase, generator
from gbmoe.cli import plain
from gbmoe.cli.configuration import SEED, Configuration, Subject, random_values, require_finite, sample
from gbmoe.cli.machine import refusal
from gbmoe.cli.permutation import SKEWS, PermutationConfiguration, peers_left_out
from gbmoe.layers import Arguments, dMoE
from gbmoe.ops.gmm import product

# At most so many tokens, ffn rows, rows (beside each group's first and last) and columns are compared with the oracle.
_SAMPLED_TOKENS, _SAMPLED_FEATURES, _SAMPLED_ROWS, _SAMPLED_COLUMNS = 512, 128, 512, 64
# A group's share in skewed products falls as 1 / rank to this power.
_SKEW = 0.5
# Of the permutation: what FP8 consumers need, and what the Hopper kernel does.
_ALIGNMENTS = (16, 128)


# ---------------------------------------------------------------------------------------------------------------- layers


class LayerConfiguration(Configuration):
    """A whole dMoE layer, router included: "forward", without autograd, or "forward+backward", with every gradient.

    Routing is the random router's own choice ("real") or the same number of slots for each expert ("uniform").
    """

    kind = "layer"

    def flops(self) -> int:
        return self.case.forward_flops() * (3 if self.computation == "forward+backward" else 1)

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return _Layer(self, device, dtype)


class _Layer(Subject):
    def __init__(self, configuration: LayerConfiguration, device: torch.device, dtype: torch.dtype):
        case, self.backward = configuration.case, configuration.computation == "forward+backward"
        self.activation = "silu" if case.mlp_type == "glu" else "gelu_tanh"
        init = partial(torch.nn.init.normal_, generator=generator(device, SEED))
        self.layer = dMoE(Arguments(
            hidden_size=case.hidden, ffn_hidden_size=case.ffn, moe_num_experts=case.experts, moe_top_k=case.top_k,
            mlp_type=case.mlp_type, mlp_impl=configuration.implementation, engine=configuration.engine or "auto",
            activation_fn=plain.ACTIVATIONS[self.activation], uniform_expert_assignment=configuration.routing == "uniform",
            fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, device=device, bias=False, moe_loss_weight=0,
            init_method=partial(init, std=case.hidden**-0.5), output_layer_init_method=partial(init, std=case.ffn**-0.5),
        )).to(dtype)
        self.top_k = case.top_k
        draw = partial(random_values, case.tokens, case.hidden, dtype=dtype, device=device)
        self.x_TH = draw(seed=SEED + 1).requires_grad_(self.backward)
        self.grad_TH = draw(seed=SEED + 2) if self.backward else None
        self.tokens_S = sample(case.tokens, _SAMPLED_TOKENS, device)
        self.features = sample(case.ffn, _SAMPLED_FEATURES, device)

    def call(self) -> torch.Tensor:
        with torch.set_grad_enabled(self.backward):
            out_TH = self.layer(self.x_TH)
        if self.backward:
            out_TH.backward(self.grad_TH)
        return out_TH.detach()

    def reset(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x_TH.grad = None

    def check(self) -> plain.Verdict:
        routed = {}

        def keep(_module, _inputs, outputs):
            _, routed["weights"], routed["experts"] = outputs
            if self.backward:
                routed["weights"].retain_grad()

        def keep_logits(_module, _inputs, logits):
            routed["logits"] = logits.detach()

        self.reset()
        hooks = [self.layer.router.register_forward_hook(keep), self.layer.router.layer.register_forward_hook(keep_logits)]
        try:
            out_TH = self.call()
        finally:
            for hook in hooks:
                hook.remove()
        outputs = {"out": out_TH}
        if self.backward:
            outputs |= {"grad x": self.x_TH.grad, "grad expert weights": routed["weights"].grad}
            outputs |= {f"grad {name}": self._by_expert(p.grad) for name, p in self.layer.experts.mlp.named_parameters()}
            require_finite({"grad router": self.layer.router.layer.weight.grad})
        require_finite(outputs)
        everything = slice(None)
        yardstick = self._expected(routed, self.x_TH.dtype, everything, everything)
        exact = self._expected(routed, torch.float64, self.tokens_S, self.features)
        verdict = plain.judge(self._sampled(outputs), exact, self._sampled(yardstick))
        self.reset()
        return verdict

    def _by_expert(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().view(self.layer.router.layer.weight.size(0), -1, self.x_TH.size(1))

    def _sampled(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_token = ("out", "grad x", "grad expert weights")
        return {name: t[self.tokens_S] if name in by_token else t[:, self.features] for name, t in outputs.items()}

    def _expected(self, routed: dict, dtype: torch.dtype, tokens, features) -> dict[str, torch.Tensor]:
        """These tokens' outputs and these ffn rows' gradients in plain PyTorch, for the experts that the router chose."""
        # As the router does, because with uniform routing the weights are not those of the experts that get the tokens.
        chosen_TK = plain.best_experts(routed["logits"], self.top_k)
        activation = plain.ACTIVATIONS[self.activation]
        weights_EFH = {name: self._by_expert(p) for name, p in self.layer.experts.mlp.named_parameters()}
        x_SH = self.x_TH.detach()[tokens].to(dtype).requires_grad_(self.backward)
        weights_SK = plain.router_weights(x_SH, self.layer.router.layer.weight.detach(), chosen_TK[tokens])
        out_SH = plain.experts(x_SH, routed["experts"][tokens], weights_SK, activation, **weights_EFH)
        if not self.backward:
            return {"out": out_SH}
        grad_x, grad_weights = torch.autograd.grad(out_SH, (x_SH, weights_SK), self.grad_TH[tokens].to(dtype))
        return {"out": out_SH.detach(), "grad x": grad_x, "grad expert weights": grad_weights} | plain.weight_gradients(
            self.x_TH.detach(), self.grad_TH, routed["experts"], routed["weights"].detach(), activation,
            {name: w[:, features] for name, w in weights_EFH.items()}, dtype)


# -------------------------------------------------------------------------------------------------------------- products


class ProductConfiguration(Configuration):
    """One grouped product: "forward" a[M,H] @ b[E][H,F], or the "weight-gradient" a[M,H].T @ b[M,F] of each group.

    Groups are "equal" or "skewed". Implementations: "gmm" by an engine; "bmm", every group padded to the largest, the padding
    not timed; "dense", one group that has all rows.
    """

    kind = "product"

    def flops(self) -> int:
        return 2 * self.case.slots * self.case.hidden * self.case.ffn

    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        return _Product(self, device, dtype)


def group_sizes(case: MoeCase, routing: str) -> list[int]:
    """Rows of each expert, summing to the case's slots; skewed ones in a fixed random order."""
    skew = _SKEW if routing == "skewed" else 0.0
    share_E = torch.arange(1, case.experts + 1, dtype=torch.float64).pow(-skew)
    ends_E = (share_E.cumsum(0) / share_E.sum() * case.slots).round().long()
    sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    return sizes_E[torch.randperm(case.experts, generator=generator("cpu", SEED))].tolist()


class _Product(Subject):
    def __init__(self, configuration: ProductConfiguration, device: torch.device, dtype: torch.dtype):
        case, self.trans_a = configuration.case, configuration.computation == "weight-gradient"
        self.implementation, self.engine = configuration.implementation, configuration.engine
        self.sizes = [case.slots] if self.implementation == "dense" else group_sizes(case, configuration.routing)
        draw = partial(random_values, dtype=dtype, device=device)
        self.a = draw(case.slots, case.hidden, seed=SEED + 1)
        if self.trans_a:
            self.b = draw(case.slots, case.ffn, seed=SEED + 2)
        else:
            self.b = draw(len(self.sizes), case.hidden, case.ffn, seed=SEED + 2, std=case.hidden**-0.5)
        on_host = self.engine in engines.ENGINES and engines.ENGINES[self.engine].needs_host_sizes
        self.engine_sizes = torch.tensor(self.sizes, device="cpu" if on_host else device)
        if self.implementation == "bmm":
            pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
            self.left = pad(self.a.split(self.sizes))
            self.right = pad(self.b.split(self.sizes)) if self.trans_a else self.b
            self.left = self.left.transpose(1, 2) if self.trans_a else self.left

    def call(self) -> torch.Tensor:
        if self.implementation == "gmm":
            return product(self.a, self.b, self.engine_sizes, trans_a=self.trans_a, engine=self.engine)
        if self.implementation == "bmm":
            return torch.bmm(self.left, self.right)
        return self.a.t() @ self.b if self.trans_a else self.a @ self.b[0]

    def check(self) -> plain.Verdict:
        out = self.call()
        if self.implementation == "bmm" and not self.trans_a:
            out = torch.cat([rows[:size] for rows, size in zip(out, self.sizes)])
        require_finite({"out": out})
        yardstick = plain.product(self.a, self.b, self.sizes, self.trans_a)
        sampled, exact = self._columns() if self.trans_a else self._rows()
        return plain.judge({"out": sampled(out)}, {"out": exact}, {"out": sampled(yardstick)})

    def _columns(self) -> tuple[Callable, torch.Tensor]:
        """A block of every group's gradient: the function that takes it from the result, and its exact value."""
        first, second = (sample(matrix.size(1), _SAMPLED_COLUMNS, matrix.device) for matrix in (self.a, self.b))
        exact = plain.product(self.a[:, first].double(), self.b[:, second].double(), self.sizes, trans_a=True)
        return lambda out: out.view(len(self.sizes), self.a.size(1), -1)[:, first][:, :, second], exact

    def _rows(self) -> tuple[Callable, torch.Tensor]:
        """The same for some rows of all, and the first and the last row of every group."""
        count, ends = len(self.a), torch.tensor(self.sizes, device=self.a.device).cumsum(0)
        borders = torch.cat([ends - torch.tensor(self.sizes, device=ends.device), ends - 1]).clamp(0, count - 1)
        rows = torch.cat([sample(count, _SAMPLED_ROWS, ends.device), borders]).unique()
        sizes = torch.bucketize(rows, ends, right=True).bincount(minlength=len(self.sizes)).tolist()
        return lambda out: out[rows], plain.product(self.a[rows].double(), self.b, sizes)


# ---------------------------------------------------------------------------------------------------------------- suites


_LAYER = ("forward", "forward+backward")


@dataclass(frozen=True)
class Suite:
    """What `--suite` names: its configurations on a device, for a dtype."""
    summary: str
    configurations: Callable[[torch.device, torch.dtype], list[Configuration]]
    needs_cuda: bool = True
    uses_engines: bool = True
    peers_left_out: Callable[[], Mapping[str, str]] = dict


def left_out(case: MoeCase, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The engines that cannot compute the case, with the reason."""
    reasons = {name: unavailable or refusal(name, device, dtype, case.slots, case.experts, case.hidden, case.ffn)
               for name, unavailable in engines.availability(device).items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _engines(case: MoeCase, device: torch.device, dtype: torch.dtype) -> list[str]:
    unable = left_out(case, device, dtype)
    return ["auto", *(name for name in engines.ENGINES if name not in unable)]


def _for_device(case: MoeCase, device: torch.device) -> MoeCase:
    if device.type == "cuda":
        return case
    small = cases.scaled_down(case)
    return small if case.ffn else replace(small, ffn=0)


def _smoke(device: torch.device, dtype: torch.dtype) -> list[Configuration]:
    configurations = []
    for case in cases.SMOKE_CASES:
        ways = [*(("gbmoe", engine) for engine in _engines(case, device, dtype)), ("bmm", None), ("reference", None)]
        configurations += [LayerConfiguration(case, *way, "real", computation) for computation in _LAYER for way in ways]
    case = cases.SMOKE_CASES[-1]
    return configurations + _products(case, _engines(case, device, dtype)[1:])


def _products(case: MoeCase, names: list[str]) -> list[Configuration]:
    ways = [*(("gmm", engine) for engine in names), ("bmm", None)]
    return [ProductConfiguration(case, *way, routing, computation)
            for computation in ("forward", "weight-gradient") for routing in ("equal", "skewed")
            for way in ([*ways, ("dense", None)] if routing == "equal" else ways)]


def _ceiling(device: torch.device) -> Configuration:
    """The dense product whose rate the others are held against."""
    case = _for_device(MoeCase("dense-8192", 8192, 8192, 8192, 1, 1), device)
    return ProductConfiguration(case, "dense", None, "equal", "forward")


def _layers(device: torch.device, dtype: torch.dtype) -> list[Configuration]:
    configurations = [_ceiling(device)]
    for case in (_for_device(case, device) for case in cases.LAYER_CASES):
        ways = [*(("gbmoe", engine) for engine in _engines(case, device, dtype)), ("bmm", None)]
        configurations += [LayerConfiguration(case, *way, routing, computation)
                           for routing in ("uniform", "real") for computation in _LAYER for way in ways]
    return configurations


def _gemm(device: torch.device, dtype: torch.dtype) -> list[Configuration]:
    configurations = [_ceiling(device)]
    for case in (_for_device(case, device) for case in cases.GEMM_CASES):
        configurations += _products(case, _engines(case, device, dtype)[1:])
    return configurations


def _permute(device: torch.device, dtype: torch.dtype) -> list[Configuration]:
    def step(case: MoeCase, routing: str, computation: str, align: int | None = None) -> Configuration:
        return PermutationConfiguration(case, "gbmoe", None, routing, computation, align)

    # Four GiB of bf16, read and written; on a CPU a 128th of that.
    tokens = 2**20 if device.type == "cuda" else 2**13
    copy = MoeCase("copy", tokens, 2048, 0, 1, 1)
    configurations = [PermutationConfiguration(copy, "torch", None, "none", "copy")]
    for case in cases.PLAN_CASES:
        steps = ("plan", "gather", "padded_gather", "scatter", "scatter-backward") if case in cases.PERMUTE_CASES else ("plan",)
        case = _for_device(case, device)
        if "gather" in steps:
            configurations += [step(case, "random", computation) for computation in ("route", "route-backward")]
        configurations += [step(case, routing, computation, align)
                           for routing in SKEWS for align in _ALIGNMENTS for computation in steps]
    return configurations


SUITES = {
    "smoke": Suite("small layers and products, for any machine", _smoke, needs_cuda=False),
    "layers": Suite("the layers that the peers are measured on, each engine, balanced and really routed", _layers),
    "gemm": Suite("single grouped products, each engine, equal and skewed groups", _gemm),
    "permute": Suite("plan, router operator, gather and scatter, each against what a copy of its bytes takes", _permute,
                     uses_engines=False, peers_left_out=peers_left_out),
}
