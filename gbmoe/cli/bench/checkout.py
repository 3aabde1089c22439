"""Where the rest of `gbmoe bench` is: a checkout has it in the folder benchmarks/, next to this package's folder; a wheel has none of it.

benchmarks/ has the suites of known results, the rivals and measurements that only these need, and merge, plot and report. GBMOE_CHECKOUT
names the checkout of a package that is installed elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

# What benchmarks/ has, so that a wheel can say where it is.
SUITES = ("nyu", "layers", "gemm", "float8", "transformers", "permute", "scaling", "inference", "host", "parallel")
COMMANDS = ("merge", "plot", "report")


def root() -> Path:
    """The folder that GBMOE_CHECKOUT names, otherwise the one that holds this package: that of a checkout, or site-packages."""
    named = os.environ.get("GBMOE_CHECKOUT")
    return Path(named).resolve() if named else Path(__file__).resolve().parents[3]


def benchmarks() -> ModuleType | None:
    """The package in the folder benchmarks/ of the checkout; None where there is no checkout.

    It is imported from there, whatever other package of that name sys.path leads to.
    """
    file = root() / "benchmarks" / "__init__.py"
    if not (file.is_file() and (root() / "pyproject.toml").is_file()):
        return None
    loaded = sys.modules.get("benchmarks")
    if loaded is None or getattr(loaded, "__file__", None) != str(file):
        spec = importlib.util.spec_from_file_location("benchmarks", file, submodule_search_locations=[str(file.parent)])
        loaded = sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


def absent(what: str) -> str:
    """What to say where `what` is asked for and there is no checkout."""
    return (f"{what} is in the checkout's folder benchmarks/, which is not next to this package (in {root()}): clone the repository, and"
            " install it with pip install -e or name its folder in GBMOE_CHECKOUT")
