"""Makes gbmoe the default of transformers' experts in programs that nobody edits: Python runs this file at its start where its folder is
on PYTHONPATH (`python -m gbmoe transformers` prints the line to set).

It loads nothing until a program imports transformers' experts. GBMOE_TRANSFORMERS=gbmoe_float8 computes their products of rows in float8;
=off leaves everything as it is. A sitecustomize that this one hides is run as well.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings

_AFTER = "transformers.integrations.moe"


def _register():
    chosen = os.environ.get("GBMOE_TRANSFORMERS", "gbmoe")
    try:
        from gbmoe import Float8BlockScaling
        from gbmoe.compat import transformers as adapter
        adapter.register(Float8BlockScaling() if chosen == "gbmoe_float8" else None, as_default=True)
    except ImportError as error:
        warnings.warn(f"gbmoe does not compute the experts of transformers here: {error}", stacklevel=2)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _AFTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_the_hidden_one():
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("GBMOE_TRANSFORMERS", "gbmoe") != "off":
    sys.meta_path.insert(0, _Finder())
_run_the_hidden_one()
