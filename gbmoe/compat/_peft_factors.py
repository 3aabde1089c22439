"""PEFT's low-rank changes of a transformers experts module's parameters, as adapters of gbmoe.expert_mlp.

Shape suffixes: E experts, R rank.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from typing import Any

import torch
from torch.nn.utils import parametrize

from gbmoe._checks import FLOATING, require
from gbmoe.lora_factors import ExpertLora, LoraFactors
from gbmoe.lora_of_peft import is_of_peft, low_rank_changes

__all__ = ["lora_of", "original", "register_with_peft", "take_factors_of_peft"]


def lora_of(module: Any, up_name: str, is_transposed: bool, function: str) -> ExpertLora | None:
    """The adapters of a module's matrices [E,out,in] (or, transposed, [E,in,out]); None where there are none. Raises TypeError, in the name
    of `function`, for adapters of a parameter that other parametrizations compute, such as those that unpack 4 bits."""
    found = {}
    for name, matrix in ((up_name, "w1"), ("down_proj", "w2")):
        changed = low_rank_changes(module, name)
        if changed is None:
            _require_no_stored_bits(module, name, function)
            continue
        found[matrix] = tuple(
            LoraFactors(lhs.transpose(1, 2), rhs.transpose(1, 2), scale) if is_transposed else LoraFactors(rhs, lhs, scale)
            for lhs, rhs, scale in changed.changes)
    return ExpertLora(**found) if found else None


def _require_no_stored_bits(module: Any, name: str, function: str) -> None:
    """Raise TypeError where PEFT changes a parameter that is not stored as elements to multiply by."""
    parts: Any = module.parametrizations[name] if parametrize.is_parametrized(module, name) else ()
    if not any(is_of_peft(part) for part in parts):
        return
    stored = getattr(parts, "original", None)
    usable = stored is not None and stored.dtype in FLOATING
    require(usable, function, f"{type(module).__name__}.{name}", "adapters of weights in 16 bits or more: 4-bit weights are unpacked to a"
            " copy of their whole size in each forward, which adapters without changed weights are to avoid (choose another"
            " experts_implementation)", f"{type(stored).__name__} of {getattr(stored, 'dtype', None)}", TypeError)


def original(module: Any, name: str) -> torch.Tensor:
    """The module's parameter `name` without low-rank changes; as it is where something else computes it."""
    changed = low_rank_changes(module, name)
    return getattr(module, name) if changed is None else changed.original


def take_factors_of_peft(module: Any) -> None:
    """register_with_peft in the first forward in which PEFT has parametrized a module's parameters."""
    if torch.compiler.is_compiling() or "parametrizations" not in module._modules or _asked:
        return
    if any(is_of_peft(part) for parts in module.parametrizations.values() for part in parts):
        register_with_peft()


def register_with_peft() -> None:
    """Call gbmoe.compat.peft.register where PEFT has been imported, in a release that this was tested with. With another release the
    factors are read as well, but PEFT makes the changed weights once in each forward. A warning says so once."""
    if "peft.tuners.lora.layer" not in sys.modules or _asked:
        return
    _asked.append(True)
    from gbmoe.compat import peft
    version = importlib.metadata.version("peft")
    if version in peft.TESTED:
        peft.register()
    else:
        warnings.warn(f"gbmoe.compat.transformers: peft {version} was not tested ({' or '.join(peft.TESTED)} was): it makes the changed"
                      " weights of experts once in each forward, which gbmoe does not read", stacklevel=3)


_asked: list[bool] = []
