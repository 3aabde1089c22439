"""Formulas by which torch.utils.flop_counter counts gbmoe's operators, and when it gets them.

Importing gbmoe hands nothing over, because it changes nothing in other packages, and does not import the counter, because that imports
Triton, which takes longer than gbmoe. The formulas are handed over by register(), and where an operator is called or traced in a process
that has imported the counter: nobody counts without it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from gbmoe._torch_names import dispatch_modes

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[torch._ops.OpOverloadPacket, Callable[..., int]] = {}

def add_formula(operator: torch._ops.OpOverloadPacket, formula: Callable[..., int]) -> None:
    """Keep the formula of an operator, which is given shapes where the operator is given tensors."""
    _formulas[operator] = formula


def register() -> None:
    """Hand the formulas to torch.utils.flop_counter, which is imported if it is not yet. Calling it again changes nothing.

    FlopCounterMode counts gbmoe's operators without this call. It is for code that reads torch's registry itself, or that counts
    operators of torch.ops.gbmoe in a compiled graph before this process has called or traced one. A formula that is registered already
    stays.
    """
    _register(importlib.import_module(_COUNTER))


def hand_over() -> None:
    """Register the formulas if the counter is imported, also with the counters that are counting, whose formulas are a copy."""
    counter: Any = sys.modules.get(_COUNTER)
    count_mode = getattr(counter, "FlopCounterMode", None)  # the module's last definition: without it, the import is still going on
    if count_mode is None:
        return
    _register(counter)
    # A torch that tells no modes reaches the counters that are made after this alone.
    for mode in dispatch_modes():
        counting = getattr(mode, "counter", None)
        if isinstance(counting, count_mode):
            for operator in _formulas:
                counting.flop_registry.setdefault(operator, counter.flop_registry[operator])


def _register(counter: Any) -> None:
    for operator in _formulas.keys() - counter.flop_registry.keys():
        counter.register_flop_formula(operator)(_formulas[operator])
