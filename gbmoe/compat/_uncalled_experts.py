"""Modules of transformers' models that compute experts and call no implementation, so that they are never gbmoe's."""

from __future__ import annotations

import re
import warnings

import torch

from gbmoe._checks import FLOATING
from gbmoe._torch_names import wraps_tensors

_HOLDS_EXPERTS = re.compile(r"(?<!Shared)Experts?(GLU|MLP|FFN)?$")  # shared experts are no routed ones: every token takes them
_told: set[str] = set()


def uncalled(model: torch.nn.Module) -> dict[str, str]:
    """The modules of experts of a loaded model that gbmoe will not compute, by their names, with the reason: classes that call no
    implementation (Llama-4's, which take the setting and ignore it), experts that are modules of their own, and quantised ones."""
    found: dict[str, str] = {}
    blocks, last, modules = {}, None, dict(model.named_modules())
    called = [name for name, module in modules.items() if _calls(module)]
    for name, module in modules.items():
        kind = type(module).__name__
        if last is not None and _within(name, last):
            continue
        reason = None
        if _calls(module):
            up = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
            up = getattr(up, "_local_tensor", up)  # FSDP gives forward the whole of its DTensors
            if not isinstance(up, torch.Tensor) or up.dtype not in FLOATING or wraps_tensors(up):
                reason = f"{kind} has quantised weights"
        elif isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            is_experts = name.rpartition(".")[2] == "experts" or _HOLDS_EXPERTS.search(kind)
            if is_experts and not any(_within(other, name) for other in called):
                reason = "its experts are modules of their own, which call no implementation"
        elif _HOLDS_EXPERTS.search(kind) and any(p.dim() >= 2 for p in module.parameters(recurse=False)):
            reason = f"{kind} computes them itself, whatever implementation is set"
        elif re.search("(MoE|Moe)$", kind):
            blocks[name] = f"{kind} computes its experts itself, whatever implementation is set"
        if reason is not None:
            found[name], last = reason, name
    # Of a block with experts that are no module that the above knows, such as Doge's embeddings, the block is named.
    known = [*called, *found]
    return found | {name: reason for name, reason in blocks.items() if not any(_within(other, name) for other in known)}


def warn_of_built_models() -> None:
    """From here on a warning names the modules of `uncalled` when transformers has built a model with them; once for each reason."""
    from transformers.modeling_utils import PreTrainedModel

    original = PreTrainedModel.post_init
    if original.__module__ == __name__:
        return

    def post_init(self):
        original(self)
        missed = uncalled(self)
        if not _told.issuperset(missed.values()):
            _told.update(missed.values())
            warn(self, missed, stacklevel=3)

    PreTrainedModel.post_init = post_init


def warn(model: torch.nn.Module, missed: dict[str, str], stacklevel: int) -> None:
    names = ", ".join([*list(missed)[:3], *(["..."] if len(missed) > 3 else [])])
    warnings.warn(f"gbmoe.compat.transformers.register: {len(missed)} modules of {type(model).__name__} will not be computed by gbmoe"
                  f" ({names}): {next(iter(missed.values()))}", stacklevel=stacklevel + 1)


def _calls(module: torch.nn.Module) -> bool:
    """Whether its class is decorated with transformers' use_experts_implementation."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def _within(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(outer + ".")
