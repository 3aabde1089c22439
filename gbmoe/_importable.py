"""Whether another package is there, without importing it."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["is_importable"]


def is_importable(name: str) -> bool:
    """True where `import name` would find a module: installed, or put into sys.modules by somebody.

    importlib.util.find_spec raises ValueError for a module in sys.modules that has no __spec__, as stubs have none.

    Args:
        name: of a top-level module.
    """
    if name in sys.modules:
        return sys.modules[name] is not None  # None is Python's mark of a module that must not be imported
    return importlib.util.find_spec(name) is not None
