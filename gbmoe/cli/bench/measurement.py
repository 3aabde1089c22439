"""What `gbmoe bench` measures: a measurement makes one row; a configuration is a shape with all that compete on it.

Subjects are compared with float64 on samples, so that no case needs much more memory than its own tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gbmoe.cases import MoeCase, generator
from gbmoe.cli import plain

SEED = 0
FORWARD, TRAINING, GRAPH = "forward", "forward+backward", "forward, CUDA graph"


class Refusal(Exception):
    """Raised where an implementation is not made for a measurement: no finding, its row is left out."""


class Subject(ABC):
    """A measurement with its tensors: what is timed, and how it is verified."""

    # Whether the host's share of a call is kept out of its time: for kernels shorter than their launch from Python.
    hide_host: ClassVar[bool] = False
    # How often the yardstick's error is allowed; see plain.judge.
    tolerance: float = 2.0

    @abstractmethod
    def steps(self) -> Sequence[Callable[[], object]]:
        """What is timed, in this order, each step also by itself."""

    def reset(self) -> None:  # noqa: B027  (most have nothing to do)
        """What precedes each call, untimed."""

    @abstractmethod
    def outputs(self) -> object:
        """One call, and what it gave."""

    @abstractmethod
    def check(self, outputs: object) -> plain.Verdict:
        """Compare with the oracle. Raises where the result is not even finite."""

    def bytes_moved(self) -> int | None:
        """What a call reads and writes at the least; None where memory is not its measure."""
        return None

    def facts(self) -> dict:
        """Further fields of the row, known after `check`."""
        return {}


@dataclass(frozen=True)
class Measurement(ABC):
    """One row of a suite: a shape, who computes it (an implementation and, for gbmoe's own, an engine), how tokens or
    rows are spread over the experts, and which computation it is.

    `memory_limit` caps the device memory, in GiB. What is not `timed` is only verified.
    """

    case: MoeCase
    implementation: str
    engine: str | None
    routing: str
    computation: str
    memory_limit: float | None = None
    timed: bool = True

    kind: ClassVar[str]

    @property
    def setting(self) -> str:
        """The same for all that belong to one configuration."""
        return f"{self.kind}/{self.case.name}/{self.routing}"

    @property
    def contest(self) -> str:
        """The same for all that compute the same."""
        cap = f"/{self.memory_limit:g}GiB" if self.memory_limit else ""
        return f"{self.setting}/{self.computation}{cap}"

    @property
    def by(self) -> str:
        """Who computes it."""
        return f"{self.implementation}-{self.engine}" if self.engine else self.implementation

    @property
    def name(self) -> str:
        """Unique in the suite and the same in every run."""
        return f"{self.contest}/{self.by}"

    def describe(self) -> dict:
        """The row's fields that are known before anything runs."""
        sizes = ("tokens", "hidden", "ffn", "experts", "top_k", "mlp_type")
        return {"name": self.name, "setting": self.setting, "contest": self.contest, "kind": self.kind,
                "case": self.case.name, **{size: getattr(self.case, size) for size in sizes},
                "routing": self.routing, "computation": self.computation, "by": self.by,
                "implementation": self.implementation, "engine": self.engine, "memory_limit": self.memory_limit}

    def flops(self) -> int | None:
        """Useful multiplications and additions a call: padding does not count. None where they are not its measure."""
        return None

    @abstractmethod
    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        """The tensors, drawn from SEED. Raises Refusal where the implementation is not made for this."""


@dataclass(frozen=True)
class Configuration:
    """What `--config` runs in one go, on one machine: everything that is compared with each other."""

    name: str
    measurements: tuple[Measurement, ...]


def configurations(measurements: Sequence[Measurement]) -> list[Configuration]:
    """The measurements by their setting, in the order of their first."""
    by_setting: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_setting.setdefault(measurement.setting, []).append(measurement)
    return [Configuration(name, tuple(together)) for name, together in by_setting.items()]


# -------------------------------------------------------------------------------------------------------------- samples


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
