"""Training where every rank of a group has experts of its own: which parameters are its own, their gradients and their checkpoints.

In a layer with Arguments.moe_expert_model_parallelism the experts' weights differ from rank to rank. Their gradients come out of
backward as the mean over the group already, because each rank's experts saw the tokens of all ranks. All other parameters are the same
everywhere, and their gradients must be averaged over the ranks as without expert parallelism. So torch's tools for data parallel
training must be kept away from the experts' weights:

- DistributedDataParallel: use `data_parallel` instead.
- fully_shard (FSDP2): pass ignored_params in every call, `fully_shard(block, ignored_params=set(expert_parameters(model).values()))`.
- `torch.nn.utils.clip_grad_norm_` would clip each rank by a norm of its own: use `clip_grad_norm_` of this module instead.
- torch.distributed.checkpoint would take weights of the same name on different ranks for the same: give it `sharded_state_dict`.

Checkpoints are in sharded_checkpoint.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.parallel.expert_modules import Experts
from gbmoe.parallel.failures import guarded
from gbmoe.parallel.groups import world_of
from gbmoe.parallel.sharded_checkpoint import ExpertRows, expert_rows, load_sharded_state_dict, sharded_state_dict

__all__ = [
    "ExpertRows", "average_expert_gradients", "clip_grad_norm_", "data_parallel", "expert_parameters", "expert_rows",
    "is_expert_parameter", "load_sharded_state_dict", "other_parameters", "sharded_state_dict"]


def is_expert_parameter(parameter: torch.Tensor) -> bool:
    """Whether other ranks have other values of this parameter: a module of experts of this process holds it, or it bears the mark
    `expert_model_parallel`, MegaBlocks' attribute. For many parameters ask expert_parameters or other_parameters once."""
    return parameter in Experts()


def expert_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters that only this rank has, by name, in the model's order; none without expert parallelism.

    These are all parameters in the layers' experts, whatever has been put in the place of w1, w2 and v1 (a parametrization, pruning, an
    adapter), and parameters elsewhere whose attribute `expert_model_parallel` is True. The call sets the attribute where torch lost it.
    """
    experts = Experts()
    return {name: parameter for name, parameter in model.named_parameters() if parameter in experts}


def other_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters that are the same on all ranks, by name, in the model's order."""
    experts = Experts()
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in experts}


# ------------------------------------------------------------------------------------------------------------- gradients


def data_parallel(model: torch.nn.Module, **options: Any) -> torch.nn.parallel.DistributedDataParallel:
    """`DistributedDataParallel(model, **options)` that neither broadcasts nor averages the experts' weights and buffers.

    The data-parallel ranks (option process_group, by default all) may consist of several expert-parallel groups, each of which holds
    all experts: average_expert_gradients then averages between them.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    for name in Experts().among(model):
        # DDP writes the name of a parameter of the model itself, not of a part of it, in one place without a dot and in one with.
        ignored |= {name} if "." in name else {name, f".{name}"}
    wrapper._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return wrapper(model, **options)


@torch.no_grad()
def average_expert_gradients(parameters: Iterable[torch.Tensor], replicas: dist.ProcessGroup) -> None:
    """Average the experts' gradients, in place, over ranks that hold the same experts. Other parameters are left alone. So are frozen
    ones, even where they still have a gradient from before they were frozen.

    Jobs of several expert-parallel groups call it after backward. Where one group has all ranks, nothing has to be averaged.

    Args:
        parameters: the model's parameters, in the same order on all ranks, and frozen on all of them or on none.
        replicas: the group of the ranks with this rank's position in every expert-parallel group; all of them must call this.

    Raises:
        ValueError: where an expert parameter that is not frozen has no gradient, for which other ranks would wait; on a rank that is no
            member of the group.
        RuntimeError: where the collective fails; it names the ranks that are missing.
    """
    world = world_of(replicas, "average_expert_gradients", "replicas")
    experts = Experts()
    for parameter in parameters:
        if parameter not in experts or not parameter.requires_grad:
            continue
        require(parameter.grad is not None, "average_expert_gradients", "parameters", "gradients of all expert parameters", "none of one")
        gradient: Any = parameter.grad
        guarded(functools.partial(dist.all_reduce, gradient, group=replicas), replicas, "averaging the experts' gradients")
        gradient /= world


@torch.no_grad()
def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None, *,
                    group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` by the norm that one process with all experts would compute; it is the same on all ranks.

    The expert parameters of every rank count, be they whole experts or shards, and all other parameters count once. Gradients may be
    DTensors, such as fully_shard's, next to plain ones. Without expert parameters this is torch's function, without a collective.

    Args:
        parameters: parameters whose gradients have been averaged over the ranks and unscaled. is_expert_parameter tells which of them
            are experts'.
        max_norm, norm_type, error_if_nonfinite, foreach: as for `torch.nn.utils.clip_grad_norm_`.
        group: the expert-parallel group, by default all ranks; all of them must call this.

    Returns:
        The norm before clipping, a scalar of float32 (float64 for float64).

    Raises:
        RuntimeError: where the norm is not finite and error_if_nonfinite is set; where the collective fails, naming the missing ranks.
        ValueError: on a rank that is no member of the group, where there are expert parameters.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    experts = Experts()
    own = [p for p in parameters if p in experts]
    norm = _norm([p for p in parameters if p not in experts], norm_type, foreach)
    if own:
        mine = _norm(own, norm_type, foreach)
        # Gathered rather than summed by an all-reduce, so that every rank adds in the same order.
        every = [torch.empty_like(mine) for _ in range(world_of(group, "clip_grad_norm_", "group"))]
        guarded(lambda: dist.all_gather(every, mine, group=group), group, "adding the gradients' norms")
        norm = torch.linalg.vector_norm(torch.stack([*every, norm.to(mine)]), norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped")
    for alike in _by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm, foreach)
    return norm


def _by_mesh(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters with gradients, in lists that torch's foreach functions can take at once: plain tensors, or DTensors of one mesh."""
    meshes: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    yield from meshes.values()


def _norm(parameters: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor:
    """The norm of all gradients, with a DTensor's elements on other ranks; at least float32, on the parameters' device."""
    norms = []
    for alike in _by_mesh(parameters):
        norm = torch.nn.utils.get_total_norm([p.grad for p in alike], norm_type, foreach=foreach)  # type: ignore[misc]
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norms.append(norm.to(torch.promote_types(norm.dtype, torch.float32)))
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else "cpu")
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
