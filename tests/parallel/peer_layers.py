"""Layers whose ranks map each other's memory, for cases that start with a number of processes: each is a function of (rank, world) that
raises where something is wrong.

Shape suffixes: T tokens, K slots a token, E experts of all ranks, H hidden, F ffn hidden.
"""

import functools

import torch

from gbmoe import RoutingPlan, expert_mlp
from gbmoe.parallel import Placement, peer_experts
from tests import rank_groups

CASES, OF_GPUS = {}, set()
DEVICE_TYPE = "cuda"


def case(function):
    CASES[function.__name__] = function
    return function


def of_gpus(function):
    """A case that asks for streams or graphs."""
    OF_GPUS.add(function.__name__)
    return case(function)


def device(rank):
    return rank_groups.device_of(rank, DEVICE_TYPE)


def synchronize():
    torch.get_device_module(DEVICE_TYPE).synchronize()


class Layer:
    """One layer's tensors, the same on all ranks, and the results that one process computes with them. `tokens` are those of the first
    ranks, and of the next ones again."""

    def __init__(self, rank, world, tokens, experts=4, top_k=2, hidden=64, ffn=96, dtype=torch.bfloat16, glu=True, seed=0, weighted=True,
                 only_expert=None):
        generator = torch.Generator(device(rank)).manual_seed(seed)
        draw = functools.partial(torch.randn, device=device(rank), generator=generator)
        tokens = [tokens[of % len(tokens)] for of in range(world)]
        self.rank, self.world, self.tokens, self.experts = rank, world, tokens, experts
        self.w = [draw(experts, ffn, hidden).mul(0.2).to(dtype) for _ in range(3 if glu else 2)]
        self.x = [draw(t, hidden).to(dtype) for t in tokens]
        self.grad = [draw(t, hidden).to(dtype) for t in tokens]
        self.ids = [draw(t, experts).topk(top_k, dim=1).indices for t in tokens]
        if only_expert is not None:
            self.ids = [torch.where(torch.arange(top_k, device=device(rank)) == 0, only_expert, -1).expand(t, top_k) for t in tokens]
        self.weights = [draw(t, top_k).abs() if weighted else None for t in tokens]
        self.degree = min(world, experts)
        self.local, self.shards = experts // self.degree, world // self.degree

    def where(self, **changes):
        return Placement(None, self.world, self.rank, self.experts, self.local, self.shards, timeout_seconds=rank_groups.TIMEOUT_SECONDS,
                         **changes)

    def mine(self, t_EFH):
        """This rank's experts, or shards of them."""
        shard = t_EFH.chunk(self.shards, dim=1)[self.rank // self.degree]
        return shard[self.rank % self.degree * self.local:][: self.local].contiguous()

    def leaves(self):
        """This rank's inputs that need gradients, by name; None where there is none."""
        leaves = {"x": self.x[self.rank], "weights": self.weights[self.rank], "w1": self.mine(self.w[0]), "w2": self.mine(self.w[1]),
                  "v1": self.mine(self.w[2]) if len(self.w) == 3 else None}
        return {name: None if t is None else t.clone().requires_grad_() for name, t in leaves.items()}

    def forward(self, leaves, gradient_scale=1.0, **changes):
        return peer_experts(leaves["x"], self.ids[self.rank], leaves["weights"], leaves["w1"], leaves["w2"], leaves["v1"], "silu", "auto",
                            self.where(**changes), gradient_scale=gradient_scale)

    def run(self, **changes):
        """{name: tensor} of the output and of all gradients of this rank."""
        leaves = self.leaves()
        out = self.forward(leaves, **changes)
        out.backward(self.grad[self.rank])
        return {"out": out.detach(), **{name: t.grad for name, t in leaves.items() if t is not None}}

    def expected(self, dtype=None):
        """The same tensors, computed in one process with all tokens, in `dtype`."""
        cast = (lambda t: t) if dtype is None else (lambda t: t.to(dtype))
        x = cast(torch.cat(self.x)).requires_grad_()
        weights = None if self.weights[0] is None else torch.cat(self.weights).requires_grad_()
        w1, w2, *v1 = (cast(w).clone().requires_grad_() for w in self.w)
        plan = RoutingPlan.from_experts(torch.cat(self.ids), self.experts, check="none")
        out = expert_mlp(x, plan, w1, w2, v1[0] if v1 else None, weights_TK=weights, activation="silu")
        out.backward(cast(torch.cat(self.grad)))
        first = sum(self.tokens[: self.rank])
        here = slice(first, first + self.tokens[self.rank])
        all_ = {"out": out.detach()[here], "x": x.grad[here], "w1": self.mine(w1.grad), "w2": self.mine(w2.grad)}
        if weights is not None:
            all_["weights"] = weights.grad[here]
        return all_ | dict.fromkeys(["v1"][: len(v1)], self.mine(v1[0].grad) if v1 else None)

    def check(self, got):
        """Allow twice the error that one process has against float64 in the same dtype, and one rounding more."""
        exact, plain = self.expected(torch.float64), self.expected()
        assert set(got) == set(exact)
        for name, reference in exact.items():
            if reference.numel() == 0:
                assert got[name].shape == reference.shape
                continue
            scale = reference.norm().clamp(min=1e-30)
            error, allowed = (got[name].double() - reference).norm() / scale, (plain[name].double() - reference).norm() / scale
            assert error <= 2 * allowed + torch.finfo(got[name].dtype).eps, f"{name}: error {error:.2e}, one process {allowed:.2e}"
