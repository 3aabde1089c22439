"""What an adapter to a rival has to be: a small file that gives the rival gbmoe's weights, so that results can be compared.

An adapter imports the rival only inside its methods. These run in a process of their own (gbmoe/cli/bench/running/rival_process.py),
so that a rival may crash, hang or change global state.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from gbmoe.testing.moe_shapes import MoeCase


@dataclass(frozen=True)
class Weights:
    """A layer's weights: router [E,H]; w1, w2 and for a GLU v1, each [E,F,H], as in gbmoe.expert_mlp."""
    router_EH: torch.Tensor
    w1_EFH: torch.Tensor
    w2_EFH: torch.Tensor
    v1_EFH: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def glu(self) -> bool:
        return self.v1_EFH is not None

    def tensors(self) -> list[torch.Tensor]:
        """Router, w1, w2 and, of a GLU, v1."""
        return [self.router_EH, self.w1_EFH, self.w2_EFH, *([self.v1_EFH] if self.glu else [])]


class Layer(torch.nn.Module):
    """A whole layer: forward(x_TH) -> out_TH.

    `router` is a module, called once a forward, whose outputs end with the slots' weights and experts, both [T,K].
    """

    # Whether the router scales each token's weights so that they sum to one.
    normalized: ClassVar[bool] = False
    router: torch.nn.Module

    def weight_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients "w1", "w2" and, for a GLU, "v1", each [E,F,H], and "router", [E,H]."""
        raise TypeError(f"{type(self).__name__} does not say where its gradients are")


@dataclass(frozen=True)
class Prepared:
    """A computation with its operands: `call` is timed, and `read` turns its result into what is compared."""
    call: Callable[[], Any]
    read: Callable[[Any], Any] = lambda result: result


class Rival:
    """An adapter. `kinds` names what it computes: "layer", "product"; benchmarks/rivals/kinds.py has more."""

    kinds: ClassVar[tuple[str, ...]] = ("layer",)

    def unavailable(self, device: torch.device) -> str | None:
        """None if the rival can be used on `device`, otherwise the reason why not."""
        return None

    def about(self) -> str | None:
        """The rival's version, and what else a reader of its figures must know."""
        return None

    def refuses(self, case: MoeCase, dtype: torch.dtype) -> str | None:
        """None if the rival is made for this case, otherwise the reason why not."""
        return None

    def layer(self, case: MoeCase, weights: Weights) -> Layer:
        """The layer with these weights."""
        raise TypeError(f"{type(self).__name__} has no layer")

    def product(self, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], trans_a: bool) -> Prepared:
        """The grouped GEMM of gbmoe.gmm."""
        raise TypeError(f"{type(self).__name__} has no grouped GEMM")


# --------------------------------------------------------------------------------------------------------- for adapters


def needs_cuda(device: torch.device) -> str | None:
    """The reason why a rival with kernels for CUDA alone cannot be used on `device`, or None on CUDA."""
    return None if device.type == "cuda" else f"runs on CUDA devices only, not on {device.type}"


def not_importable(*modules: str) -> str | None:
    """The reason why one of these modules cannot be imported, in the words of the failure, or None."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # packages built against another CUDA or torch raise more than ImportError
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def versions(*packages: str) -> str:
    """The packages with their versions, as far as their metadata tells them."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} of unknown version")
    return ", ".join(found)


class Router(torch.nn.Module):
    """The router in plain PyTorch, for rivals without one: linear, softmax, top-k."""

    def __init__(self, weights: Weights, top_k: int):
        super().__init__()
        self.weight, self.top_k = torch.nn.Parameter(weights.router_EH), top_k

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, experts_TK = F.linear(x_TH, self.weight).softmax(-1).topk(self.top_k, dim=-1)
        return weights_TK, experts_TK


class RoutedExperts(Layer):
    """A layer of the plain router and of `experts`, a module with forward(x_TH, weights_TK, experts_TK) -> out_TH and
    weight_gradients()."""

    def __init__(self, case: MoeCase, weights: Weights, experts: torch.nn.Module):
        super().__init__()
        self.router, self.experts = Router(weights, case.top_k), experts

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.experts(x_TH, *self.router(x_TH))

    def weight_gradients(self) -> dict[str, torch.Tensor]:
        return {"router": self.router.weight.grad, **self.experts.weight_gradients()}


class SeparateWeights(torch.nn.Module):
    """Parameters w1, w2 and, for a GLU, v1 in gbmoe's layout, and their gradients."""

    def __init__(self, weights: Weights):
        super().__init__()
        self.w1, self.w2 = torch.nn.Parameter(weights.w1_EFH), torch.nn.Parameter(weights.w2_EFH)
        self.v1 = torch.nn.Parameter(weights.v1_EFH) if weights.glu else None
        self.activation = weights.activation

    def weight_gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad for name, parameter in self.named_parameters()}


def sorted_slots(experts_TK: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots in the order of their experts, [R], and the end of each expert's slots, int32 [E]; the host does not wait."""
    ids_R, order_R = experts_TK.reshape(-1).sort(stable=True)
    every_E = torch.arange(experts, dtype=torch.int64, device=ids_R.device)
    return order_R, torch.searchsorted(ids_R, every_E, right=True, out_int32=True)


def combine(y_RH: torch.Tensor, order_R: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's rows, which are in the order of `sorted_slots`."""
    y_TKH = torch.empty_like(y_RH).index_copy(0, order_R, y_RH).view(*weights_TK.shape, -1)
    return (y_TKH * weights_TK.unsqueeze(-1).to(y_TKH.dtype)).sum(1)
