"""Makes gbmoe the default of transformers' experts in unedited programs: Python runs this file when it starts, if its folder is on
PYTHONPATH (`python -m gbmoe transformers` prints the line to set).

It loads nothing until a program imports what transformers' models are made of. GBMOE_TRANSFORMERS=gbmoe_float8 computes their products of
rows in float8; =off leaves everything as it is. A sitecustomize that this one hides is run as well.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings

# Every model imports it. After it the modules that `register` imports are complete, in whatever order the program
# imports them.
_AFTER = "transformers.modeling_utils"
_CHOICES = ("gbmoe", "gbmoe_float8", "off")
_CHOSEN = os.environ.get("GBMOE_TRANSFORMERS") or "gbmoe"


def _register():
    try:
        if _CHOSEN not in _CHOICES:
            raise ValueError(f"GBMOE_TRANSFORMERS: expected one of {', '.join(_CHOICES)}, got {_CHOSEN!r}")
        from gbmoe import Float8BlockScaling
        from gbmoe.compat import transformers as adapter
        adapter.register(Float8BlockScaling() if _CHOSEN == "gbmoe_float8" else None, as_default=True)
    except Exception as error:  # the program runs without gbmoe, too
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
    def __init__(self):
        self._asks_the_others = False

    def find_spec(self, name, path=None, target=None):
        if name != _AFTER or self._asks_the_others:
            return None
        self._asks_the_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks_the_others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_the_hidden_one():
    here = os.path.dirname(os.path.abspath(__file__))
    folders = [os.path.abspath(entry) for entry in sys.path]
    # Only entries after this one: another copy of this file, which looks for what it hides as well, would find this one again.
    after = folders.index(here) + 1 if here in folders else 0
    others = [entry for entry, folder in zip(sys.path[after:], folders[after:]) if folder != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _CHOSEN != "off":
    sys.meta_path.insert(0, _Finder())
_run_the_hidden_one()
