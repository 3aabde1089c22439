"""What `gbmoe bench` measures: a measurement makes one row; a configuration is a shape with everything that competes on it.

Results are compared with float64 on samples, so that no case needs much more memory than its own tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch

from gbmoe.testing import accuracy
from gbmoe.testing.exact_inputs import generator
from gbmoe.testing.moe_shapes import MoeCase

SEED = 0
FORWARD, TRAINING, GRAPH = "forward", "forward+backward", "forward, CUDA graph"
MICRO_BATCHES = "forward+backward, four micro-batches"
# The kinds of measurements that move bytes; and those that take microseconds: the others compute and take milliseconds.
MOVING = ("permutation", "link")
IN_MICROSECONDS = (*MOVING, "host", "host-parts")
_Function = TypeVar("_Function", bound=Callable)


class Refusal(Exception):
    """Raised where an implementation is not made for a measurement. That is no failure: its row is marked as left out."""


class Subject(ABC):
    """A measurement with its tensors: what is timed, and how it is verified."""

    # Whether the time excludes the host's work: for kernels that are shorter than their launch from Python.
    hide_host: ClassVar[bool] = False
    # Whether the time is the host's alone, until the calls return: `reset` waits until the device has nothing to do.
    of_host: ClassVar[bool] = False
    # The error that is allowed, as a multiple of the yardstick's; see accuracy.judge.
    tolerance: float = 2.0

    @abstractmethod
    def steps(self) -> Sequence[Callable[[], object]]:
        """The calls that are timed together, in this order, and each also by itself."""

    def reset(self) -> None:  # noqa: B027  (most have nothing to do)
        """Prepare a call; this is not timed."""

    @abstractmethod
    def outputs(self) -> object:
        """Make one call and return its result."""

    @abstractmethod
    def check(self, outputs: object) -> accuracy.Verdict:
        """Compare a result with the oracle. Raises ValueError where the result is not finite."""

    def forget_oracle(self) -> None:  # noqa: B027  (most keep none)
        """Free the results that `check` kept for the next implementation."""

    def bytes_moved(self) -> int | None:
        """The fewest bytes that a call must read and write; None where bytes do not matter for it."""
        return None

    def facts(self) -> dict:
        """Further fields of the row, which are known after `check`."""
        return {}

    def further(self, seconds: float) -> dict:
        """Further fields of the row, which are measured after its time, `seconds`."""
        return {}


@dataclass(frozen=True)
class Measurement(ABC):
    """One row of a suite: a shape, what computes it (an implementation and, for gbmoe's own, an engine), how tokens or
    rows are spread over the experts, and which computation it is.

    `memory_limit` is the most device memory it may take, in GiB.
    """

    case: MoeCase
    implementation: str
    engine: str | None
    routing: str
    computation: str
    memory_limit: float | None = None

    kind: ClassVar[str]

    @property
    def setting(self) -> str:
        """Text that is the same for all measurements of one configuration."""
        return f"{self.kind}/{self.case.name}/{self.routing}"

    @property
    def contest(self) -> str:
        """Text that is the same for all measurements that compute the same thing, and so compete."""
        cap = f"/{self.memory_limit:g}GiB" if self.memory_limit else ""
        return f"{self.setting}/{self.computation}{cap}"

    @property
    def by(self) -> str:
        """The name of the implementation, with its engine."""
        return f"{self.implementation}-{self.engine}" if self.engine else self.implementation

    @property
    def name(self) -> str:
        """A name that is unique in the suite and the same in every run."""
        return f"{self.contest}/{self.by}"

    def describe(self) -> dict:
        """The row's fields that are known before anything runs."""
        sizes = ("tokens", "hidden", "ffn", "experts", "top_k", "mlp_type")
        return {"name": self.name, "setting": self.setting, "contest": self.contest, "kind": self.kind,
                "case": self.case.name, **{size: getattr(self.case, size) for size in sizes},
                "routing": self.routing, "computation": self.computation, "by": self.by,
                "implementation": self.implementation, "engine": self.engine, "memory_limit": self.memory_limit}

    def flops(self) -> int | None:
        """Useful multiplications and additions of a call, without padding; None where they do not matter for it."""
        return None

    @abstractmethod
    def build(self, device: torch.device, dtype: torch.dtype) -> Subject:
        """Make the subject, with tensors drawn from SEED. Raises Refusal where the implementation is not made for this."""


@dataclass(frozen=True)
class Configuration:
    """The measurements that are compared with each other; `--config` runs them together, on one machine."""

    name: str
    measurements: tuple[Measurement, ...]

    def contests(self) -> list[list[Measurement]]:
        """The measurements of each contest, in the order of its first."""
        together: dict[str, list[Measurement]] = {}
        for measurement in self.measurements:
            together.setdefault(measurement.contest, []).append(measurement)
        return list(together.values())


def configurations(measurements: Sequence[Measurement]) -> list[Configuration]:
    """Group the measurements by their setting, in the order in which settings first occur."""
    by_setting: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_setting.setdefault(measurement.setting, []).append(measurement)
    return [Configuration(name, tuple(together)) for name, together in by_setting.items()]


# ----------------------------------------------------------------------------------------------------------------- kept

_KEPT: list[Any] = []


def kept(function: _Function) -> _Function:
    """A function whose last result is kept for the next row, which is often given the same arguments."""
    _KEPT.append(lru_cache(maxsize=1)(function))
    return _KEPT[-1]


def forget_kept() -> None:
    """Free what is kept for the next row."""
    for function in _KEPT:
        function.cache_clear()


# -------------------------------------------------------------------------------------------------------------- samples


def sample(count: int, most: int, device: torch.device) -> torch.Tensor:
    """Ascending indices below `count`: all of them, or at most `most`, with the first and the last among them."""
    if count <= most:
        return torch.arange(count, dtype=torch.int64, device=device)
    inner = torch.randperm(count - 2, generator=generator("cpu", SEED), dtype=torch.int64, device="cpu")[: most - 2] + 1
    return torch.cat([torch.tensor([0, count - 1], dtype=torch.int64, device="cpu"), inner]).sort().values.to(device)


def random_values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(device, seed), dtype=torch.float32, device=device).mul_(std).to(dtype)


def require_finite(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinity")
