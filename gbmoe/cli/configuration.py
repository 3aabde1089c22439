"""What a line of `gbmoe bench` is: a configuration, the subject that it builds, and the samples that this is verified on.

Subjects are compared with float64 on samples, so that no case needs much more memory than its own tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from gbmoe.cases import MoeCase, generator
from gbmoe.cli import plain

SEED = 0


class Subject(ABC):
    """A configuration with its tensors: what is timed, and how it is verified."""

    # Whether the host's share of a call is kept out of its time: for kernels shorter than their launch from Python.
    hide_host: ClassVar[bool] = False

    @abstractmethod
    def call(self) -> object:
        """What is timed."""

    def reset(self) -> None:
        """What precedes each call, untimed."""

    @abstractmethod
    def check(self) -> plain.Verdict:
        """Call and compare with the oracle. Raises where the result is not even finite."""

    def bytes_moved(self) -> int | None:
        """What a call reads and writes at the least; None where memory is not its measure."""
        return None


@dataclass(frozen=True)
class Configuration(ABC):
    """One line of a suite: a shape, who computes it (an implementation and, for gbmoe's own, an engine), how tokens or rows
    are spread over the experts, and which computation it is."""

    case: MoeCase
    implementation: str
    engine: str | None
    routing: str
    computation: str

    kind: ClassVar[str]

    @property
    def contest(self) -> str:
        """The same for all that compute the same."""
        return f"{self.kind}/{self.case.name}/{self.routing}/{self.computation}"

    @property
    def name(self) -> str:
        """Unique in the suite and the same in every run."""
        return f"{self.contest}/{self.implementation}{f'-{self.engine}' if self.engine else ''}"

    def describe(self) -> dict:
        """The row's fields that are known before anything runs."""
        return {"name": self.name, "contest": self.contest, "kind": self.kind, "case": self.case.name,
                **{field: getattr(self.case, field) for field in ("tokens", "hidden", "ffn", "experts", "top_k", "mlp_type")},
                "routing": self.routing, "computation": self.computation, "implementation": self.implementation,
                "engine": self.engine}

    @abstractmethod
    def flops(self) -> int | None:
        """Useful multiplications and additions a call: padding does not count. None where they are not its measure."""

    @abstractmethod
    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        """The tensors, drawn from SEED."""


# --------------------------------------------------------------------------------------------------------------- samples


def sample(count: int, most: int, device: torch.device) -> torch.Tensor:
    """Ascending indices below `count`: all of them, or `most` with the first and the last among them."""
    if count <= most:
        return torch.arange(count, device=device)
    inner = torch.randperm(count - 2, generator=generator("cpu", SEED))[: most - 2] + 1
    return torch.cat([torch.tensor([0, count - 1]), inner]).sort().values.to(device)


def random_values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(device, seed), device=device).mul_(std).to(dtype)


def require_finite(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinity")
