"""Whether the ranks of a group were given the same activation: by name where torch's own are recognised, else by what it computes.

Shape suffixes: P rows, F ffn hidden on this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from gbmoe._checks import require
from gbmoe.layers import mpu
from gbmoe.layers.arguments import Arguments
from gbmoe.ops.activations import activation_name
from gbmoe.parallel import agreement

_WHAT = "comparing the activations"


def require_same_activation(args: Arguments) -> None:
    """Compare the activations of the ranks of args.expert_parallel_group. Collective.

    One that has a kernel is the same as a function without one that computes the same. So where any rank has a function that is not
    recognised, all ranks call theirs and compare results. What cannot be compared so passes: a module with parameters or buffers, which
    ranks may not have made equal yet, a function that gives another result at every call, and one that cannot be called here.

    Raises:
        ValueError: on all ranks; it says which ranks have which.
    """
    name = activation_name(args.activation_fn)
    names = agreement.of_all_ranks_unless_alike(name, args.expert_parallel_group, _WHAT)
    if names is None and name is not None:
        return
    if names is not None and None not in names:
        _refuse(names, args)
    each = agreement.of_all_ranks_unless_alike((name or _shown(args.activation_fn), _results(args)), args.expert_parallel_group, _WHAT)
    known = [results for _, results in each or () if results is not None]
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(args.dtype, 1e-3)
    if not all(_close(results, known[0], tolerance) for results in known):
        _refuse([shown for shown, _ in each or ()], args)


def _refuse(shown: list[str], args: Arguments) -> None:
    said = [{"activation_fn": repr(one)} for one in shown]
    require(False, "Arguments", "expert_parallel_group", "the same function as activation_fn on all its ranks",
            "; ".join(agreement.differences(said, args.expert_parallel_group)) or "functions of one name that give different results")


def _shown(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _results(args: Arguments) -> list[float] | None:
    """What the activation gives for a few elements, or None where that says nothing."""
    function = args.activation_fn
    if isinstance(function, torch.nn.Module) and any(True for of in (function.parameters(), function.buffers()) for _ in of):
        return None
    device = torch.device(args.device)
    if device.type == "meta":
        return None
    points = torch.cat([torch.linspace(-bound, bound, 16, dtype=torch.float32, device="cpu") for bound in (4, 50)])
    like_PF = points.unsqueeze(1).expand(-1, mpu.features_per_rank(args))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        try:
            first, second = (function(like_PF.to(device, args.dtype or torch.float32, copy=True).contiguous()) for _ in range(2))
            return first[:, 0].tolist() if torch.equal(first, second) and first.shape == like_PF.shape else None
        except Exception:  # whatever a user's function raises; the layer's first call shows it
            return None


def _close(a: list[float], b: list[float], tolerance: float) -> bool:
    first, second = (torch.tensor(results, dtype=torch.float64, device="cpu") for results in (a, b))
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True)
