"""What an adapter to a peer has to be: a small file that gives the peer gbmoe's weights, so that results can be compared.

An adapter imports the peer only inside its methods. These run in a process of their own (gbmoe/cli/bench/running/peer_process.py),
so that a peer may crash, hang or change global state.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gbmoe.cli.bench.measurements.base import Refusal
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


class Peer:
    """An adapter. `kinds` names what it computes: "layer", "parallel" (a layer over several ranks), "product",
    "permutation"."""

    kinds: ClassVar[tuple[str, ...]] = ("layer",)

    def unavailable(self, device: torch.device) -> str | None:
        """None if the peer can be used on `device`, otherwise the reason why not."""
        return None

    def about(self) -> str | None:
        """The peer's version, and what else a reader of its figures must know."""
        return None

    def refuses(self, case: MoeCase, dtype: torch.dtype) -> str | None:
        """None if the peer is made for this case, otherwise the reason why not."""
        return None

    def layer(self, case: MoeCase, weights: Weights) -> Layer:
        """The layer with these weights."""
        raise TypeError(f"{type(self).__name__} has no layer")

    def parallel_layer(self, case: MoeCase, weights: Weights, group: dist.ProcessGroup) -> Layer:
        """The layer with this rank's experts, whose weights these are; all ranks of the group construct and call it."""
        raise TypeError(f"{type(self).__name__} has no expert parallelism")

    def end(self) -> None:
        """Give back what all ranks of a job hold together; called once on each of them, after its last parallel layer."""

    def product(self, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], trans_a: bool) -> Prepared:
        """The grouped GEMM of gbmoe.gmm."""
        raise TypeError(f"{type(self).__name__} has no grouped GEMM")

    def permutation(self, ids_TK: torch.Tensor, experts: int, align: int) -> Permutation:
        """The permutation to the rows of these experts, each padded to a multiple of `align`."""
        raise TypeError(f"{type(self).__name__} has no permutation")


class Permutation:
    """The steps of a permutation for one routing, each as a Prepared.

    Rows are expert-major and, inside an expert, in token order, as in RoutingPlan. A peer's matrices have `rows` rows, which may end
    with the last row of the last expert. A step that the peer does not have raises Refusal.
    """

    rows: int

    def plan(self) -> Prepared:
        """Everything from ids to index maps. It reads as the maps, by the names of RoutingPlan."""
        raise Refusal("has no plan alone")

    def gather(self, x_TH: torch.Tensor) -> Prepared:
        """The gather as a layer calls it, which may leave rows behind the last expert unwritten. It reads as out [rows,H]."""
        raise Refusal("has no gather but the padded one")

    def padded_gather(self, x_TH: torch.Tensor) -> Prepared:
        """The gather with all padding zero. It reads as out [rows,H]."""
        raise Refusal("has no gather alone")

    def plan_and_gather(self, x_TH: torch.Tensor) -> Prepared:
        """Plan and padded gather together, for peers that have one operator for both. It reads as out [rows,H]."""
        raise Refusal("has no plan and gather")

    def scatter(self, y_PH: torch.Tensor, weights_TK: torch.Tensor) -> Prepared:
        """The weighted sum of each token's rows. It reads as out [T,H]."""
        raise Refusal("has no scatter")

    def scatter_backward(self, grad_TH: torch.Tensor, y_PH: torch.Tensor, weights_TK: torch.Tensor) -> Prepared:
        """The scatter's backward. It reads as the gradients of y, [rows,H], and of the weights, [T,K]."""
        raise Refusal("has no backward")


# --------------------------------------------------------------------------------------------------------- for adapters


def needs_cuda(device: torch.device) -> str | None:
    """The reason why a peer with kernels for CUDA alone cannot be used on `device`, or None on CUDA."""
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
    """The router in plain PyTorch, for peers without one: linear, softmax, top-k."""

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
