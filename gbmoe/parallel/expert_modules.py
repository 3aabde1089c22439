"""Which tensors differ from rank to rank: all those in a module of experts, and parameters that bear the mark `expert_model_parallel`.

MegaBlocks marks the parameters alone. But torch puts other parameters in their places and leaves the attribute behind: a load_state_dict
that swaps (torch.__future__.set_swap_module_params_on_conversion), parametrizations, pruning, fully_shard, a deep copy, and whatever
writes to `module._parameters`. So here the modules are asked what they hold now, and their parameters are marked for other readers of
the attribute. A parameter outside of such modules that bears the mark counts too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

MARK = "expert_model_parallel"  # MegaBlocks' name; optimizers and clipping of others read it


class ExpertModule(torch.nn.Module):
    """A module that holds experts. With args.moe_expert_model_parallelism every tensor in it, at any depth, is of this rank alone.

    Subclasses set `args`, the layer's Arguments, before they register parameters or modules.
    """

    args: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> ExpertModule:
        # Not in __init__, which neither unpickling nor a deep copy calls.
        module = super().__new__(cls)
        _remember(module)
        return module

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_post_hook(_mark_after_loading)

    def expert_root(self) -> torch.nn.Module | None:
        """The module in which everything belongs to experts; None before it is there."""
        return self

    def as_saved(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a state dict has, by names in this module, of a tensor that lies as the parameter `name`: that parameter, or what an
        optimizer keeps for it."""
        return {name: tensor}

    def as_stored(self, name: str, saved: dict[str, torch.Tensor]) -> torch.Tensor:
        """The tensor of which as_saved made these."""
        return saved[name]

    def mark(self) -> None:
        """Mark every parameter as expert-parallel or not."""
        root = self.expert_root()
        for parameter in root.parameters() if root is not None else ():
            setattr(parameter, MARK, self.args.moe_expert_model_parallelism)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.mark()  # copying a parameter loses its attributes

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.mark()  # to() and to_empty() may replace the parameters
        return self


def _mark_after_loading(module: ExpertModule, incompatible_keys: Any) -> None:
    module.mark()


class Holder(NamedTuple):
    """A tensor of experts, and the Arguments of the layer that holds it: None where only a mark tells of it."""
    tensor: torch.Tensor
    args: Any


_modules: weakref.WeakSet[ExpertModule] = weakref.WeakSet()
_modules_lock = threading.Lock()


def _remember(module: ExpertModule) -> None:
    with _modules_lock:
        _modules.add(module)


def _held() -> dict[int, Holder]:
    """What this process's modules of experts hold, where experts are spread, by id(tensor). Marks all parameters that lack it."""
    with _modules_lock:
        modules = list(_modules)
    held = {}
    for module in modules:
        # A module whose construction failed, or has not ended, may have no arguments or experts yet.
        args = getattr(module, "args", None)
        root = module.expert_root() if getattr(args, "moe_expert_model_parallelism", False) else None
        if root is not None:
            module.mark()
            held.update({id(tensor): Holder(tensor, args) for _, tensor in _tensors(root)})
    return held


def _tensors(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, under each of its names. named_parameters can do that for parameters, but gives modules one name."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _is_marked(tensor: torch.Tensor) -> bool:
    return getattr(tensor, MARK, False) is True


class Experts:
    """Tells tensors of experts from others, by what the modules of this process hold when it is made."""

    def __init__(self) -> None:
        self._held = _held()

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and (id(tensor) in self._held or _is_marked(tensor))

    def among(self, model: torch.nn.Module) -> dict[str, Holder]:
        """Parameters and buffers of experts in the model, under each of their names."""
        return {name: self._held.get(id(tensor), Holder(tensor, None)) for name, tensor in _tensors(model) if tensor in self}
