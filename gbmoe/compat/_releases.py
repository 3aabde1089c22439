"""What an adapter requires of a package whose private functions or classes it replaces: a release that it was tested with."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable

__all__ = ["require_parameters", "require_release"]


def require_release(adapter: str, package: str, tested: tuple[str, ...]) -> None:
    """Raise ImportError unless the installed release of `package` is one of `tested`. A local version, as in 0.3.0+cu130, does not count.

    Args:
        adapter: the module that asks, for the message.
        package: as pip names it.
    """
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or version.partition("+")[0] not in tested:
        raise ImportError(f"{adapter}: {package}: expected {' or '.join(tested)}, with which it was tested, got"
                          f" {version or 'none that is installed'}; gbmoe.grouped_mlp computes the same of any release's weights, see"
                          " docs/switching/grouped_experts.md", name=package.replace("-", "_"))


def require_parameters(adapter: str, function: Callable, expected: tuple[str, ...]) -> None:
    """Raise ImportError unless the function that the adapter replaces has these parameters: a checkout may be ahead of its version.

    Args:
        adapter: the module that asks, for the message.
        expected: names, in their order.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != expected:
        raise ImportError(f"{adapter}: {function.__module__}.{function.__qualname__}: expected the parameters {', '.join(expected)}, got"
                          f" {', '.join(found)}", name=function.__module__)
