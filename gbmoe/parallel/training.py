"""Training where every rank of a group has experts of its own: which parameters are its own, their gradients and their checkpoints.

In a layer with Arguments.moe_expert_model_parallelism the experts' weights differ from rank to rank. Their gradients come out of
backward as the mean over the group already, because each rank's experts saw the tokens of all ranks. All other parameters are the same
everywhere, and their gradients must be averaged over the ranks as without expert parallelism. So torch's tools for data parallel
training must be kept away from the experts' weights:

- DistributedDataParallel: use `data_parallel` instead.
- fully_shard (FSDP2): pass ignored_params in every call, `fully_shard(block, ignored_params=set(expert_parameters(model).values()))`.
- `torch.nn.utils.clip_grad_norm_` would clip each rank by a norm of its own: use `clip_grad_norm_` of this module instead.
- torch.distributed.checkpoint would take weights of the same name on different ranks for the same: give it `sharded_state_dict`.

Shape suffixes: E all experts, F ffn hidden, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.parallel.agreement import of_all_ranks_unless_alike
from gbmoe.parallel.expert_modules import Experts, Holder
from gbmoe.parallel.failures import guarded
from gbmoe.parallel.groups import world_of

# Parts of a parameter's name that wrappers add and that state dicts leave out.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


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


# ------------------------------------------------------------------------------------------------------------ checkpoints


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Which rows of a weight [E*F,H] of all experts are on which rank.

    Attributes:
        group: the expert-parallel group.
        rows: the number of rows on each of its ranks.
        ranks: the ranks of the group in the order of their rows. Where there are more ranks than experts this is not ascending: the
            shards of one expert follow one another in the weight, and rank r has a shard of expert r % E.
    """

    group: dist.ProcessGroup
    rows: int
    ranks: tuple[int, ...]

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """A tensor of all rows, on every rank, made of each rank's own rows. Collective over the group."""
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in self.ranks]
        guarded(lambda: dist.all_gather(parts, mine.contiguous(), group=self.group), self.group, "gathering the experts")
        return torch.cat([parts[rank] for rank in self.ranks])

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor of all rows, as a view. Raises ValueError where the tensor has another number of rows."""
        require(whole.dim() > 0 and whole.size(0) == self.rows * len(self.ranks), "ExpertRows", "whole",
                f"{self.rows * len(self.ranks)} rows, those of all experts", list(whole.shape))
        return whole.narrow(0, self.ranks.index(dist.get_rank(self.group)) * self.rows, self.rows)

    def dtensor(self, mine: torch.Tensor) -> Any:
        """A DTensor of all rows, whose local tensor is `mine`, with the same memory."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard
        ranks = dist.get_process_group_ranks(self.group)
        if self.ranks == tuple(sorted(self.ranks)):
            mesh = DeviceMesh.from_group(self.group, mine.device.type)
        else:  # for checkpoints alone, which ask which rank has which rows: a group's ranks ascend, so collectives would mix them up
            mesh = DeviceMesh(mine.device.type, [ranks[rank] for rank in self.ranks], _init_backend=False)
        shape = (self.rows * len(self.ranks), *mine.shape[1:])
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=mine.stride())


def expert_rows(model: torch.nn.Module) -> dict[str, ExpertRows]:
    """Which rows each tensor of experts has on which rank, by its name in a state dict: expert parameters, those from which a
    parametrization or pruning computes them, and persistent buffers with them.

    Raises:
        ValueError: where the first dimension of such a tensor is not the rows of this rank's experts, as with a low-rank factor or a
            norm over rows: what it is on another number of ranks cannot be told. Where it is a DTensor. Where the module of a parameter
            that only bears the mark has no `args` with the number of experts and the group.
    """
    found = {}
    for name, holder in Experts().among(model).items():
        prefix, _, leaf = name.rpartition(".")
        module = model.get_submodule(prefix)
        if leaf not in module._non_persistent_buffers_set:
            found[_state_dict_name(model, name)] = _rows_of(name, holder, module)
    return found


def _rows_of(name: str, holder: Holder, module: torch.nn.Module) -> ExpertRows:
    tensor, args = holder
    if args is None:
        args = getattr(module, "args", None)
        require(hasattr(args, "moe_num_experts") and hasattr(args, "expert_parallel_group"), "expert_rows", "model",
                f"the layer's Arguments as attribute args of the module of {name}", type(args).__name__)
    group: Any = args.expert_parallel_group or dist.group.WORLD
    world = world_of(group)
    experts = min(world, args.moe_num_experts)  # ranks that hold different experts; further ranks hold shards of the same
    shards = world // experts
    if holder.args is not None:
        rows = args.moe_num_experts // experts * (args.ffn_hidden_size // shards)
        require(tensor.dim() > 0 and tensor.size(0) == rows, "expert_rows", "model",
                f"{name} to have the {rows} rows of this rank's experts, so that it can be told which part of all ranks' it is",
                list(tensor.shape))
    require(not hasattr(tensor, "to_local"), "expert_rows", "model",
            f"{name} to be a plain tensor: fully_shard must be told to ignore expert parameters", type(tensor).__name__)
    ranks = tuple(place % shards * experts + place // shards for place in range(world))
    return ExpertRows(group, tensor.size(0), ranks)


def _state_dict_name(model: torch.nn.Module, name: str) -> str:
    """A parameter's name without the parts that wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    while isinstance(model := getattr(model, "_orig_mod", model), torch.nn.parallel.DistributedDataParallel):
        model, name = model.module, name.removeprefix("module.")
    return name


def sharded_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves and loads, for any number of ranks: {"model": ..., "optimizer": ...}, by names.

    It is get_state_dict of torch.distributed.checkpoint.state_dict, except that a tensor of experts (see expert_rows), and what the
    optimizer keeps for it, is a DTensor of all experts' rows [E*F,H], of which this rank has some. So a checkpoint can be resumed on
    another number of ranks, and by a process that has all experts::

        dcp.save(sharded_state_dict(model, optimizer), checkpoint_id=folder)

        state = sharded_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        load_sharded_state_dict(state, model, optimizer)

    Tensors share their memory with the model and the optimizer. Where ranks share one expert, the DTensors work for checkpoints alone,
    not for collectives such as full_tensor.

    With an optimizer it is collective over the layers' groups. Where experts are frozen on some of the ranks, their optimizer keeps
    nothing for them. Zeros then stand for what the other ranks keep, so that all rows are there. load_sharded_state_dict leaves them out.

    Args:
        model: a plain model, one in DistributedDataParallel, or one that fully_shard has sharded except for its experts.
        optimizer: the optimizer of its parameters. If it has made no step, its state is made here, as torch's function does.

    Raises:
        ValueError: where the optimizer keeps a tensor for an expert parameter that is neither a scalar nor of the parameter's shape:
            which part of it other ranks have cannot be known. Where expert_rows raises, and where the state dict has a tensor of experts
            under another name than the model.
    """
    from torch.distributed.checkpoint import state_dict
    rows = expert_rows(model)
    weights: dict[str, Any] = state_dict.get_model_state_dict(model)
    _require_names(rows, weights)
    result: dict[str, Any] = {"model": {n: rows[n].dtensor(t) if n in rows else t for n, t in weights.items()}}
    if optimizer is not None:
        kept: dict[str, Any] = state_dict.get_optimizer_state_dict(model, optimizer)
        state: dict[str, dict[str, Any]] = kept["state"]
        for name, missing in _kept_elsewhere(rows, weights, state).items():
            zeros = {key: torch.zeros_like(weights[name], dtype=dtype) for key, dtype in missing.items()}
            state[name] = {**zeros, **state.get(name, {})}
        kept["state"] = {name: {key: _kept(rows[name], weights[name], name, key, value) if name in rows else value
                                for key, value in values.items()} for name, values in state.items()}
        result["optimizer"] = kept
    return result


def _kept_elsewhere(rows: dict[str, ExpertRows], weights: dict[str, Any], state: dict[str, dict[str, Any]],
                    ) -> dict[str, dict[str, torch.dtype]]:
    """What the optimizers of other ranks keep by rows for a tensor of experts, and this rank's does not: dtypes by name and key.
    Collective over the groups of `rows`."""
    mine = {name: {key: value.dtype for key, value in state.get(name, {}).items()
                   if isinstance(value, torch.Tensor) and value.shape == weights[name].shape} for name in rows}
    missing: dict[str, dict[str, torch.dtype]] = {}
    for group in dict.fromkeys(of.group for of in rows.values()):
        here = {name: keys for name, keys in mine.items() if rows[name].group is group}
        for theirs in of_all_ranks_unless_alike(here, group, "collecting what optimizers keep") or ():
            for name, keys in theirs.items():
                missing.setdefault(name, {}).update({key: dtype for key, dtype in keys.items() if key not in mine[name]})
    return {name: keys for name, keys in missing.items() if keys}


def _require_names(rows: dict[str, ExpertRows], weights: dict[str, Any]) -> None:
    """Raise where a tensor of experts would be taken for one that all ranks have."""
    missing = sorted(rows.keys() - weights.keys())
    require(not missing, "sharded_state_dict", "model", f"{', '.join(missing)} in its state dict, as in named_parameters",
            "other names, which a wrapper or a hook gives it")


def _kept(rows: ExpertRows, weight: torch.Tensor, name: str, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or (value.numel() == 1 and value.shape != weight.shape):
        return value
    require(value.shape == weight.shape, "sharded_state_dict", "optimizer",
            f"{key} of {name} to be a scalar or of the parameter's shape {list(weight.shape)}", list(value.shape))
    return rows.dtensor(value)


def load_sharded_state_dict(state: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Put into the model and the optimizer what torch.distributed.checkpoint has loaded into `state`. sharded_state_dict must have made
    `state` from the same objects.

    Raises:
        RuntimeError: where names or shapes are not the model's, as load_state_dict does.
    """
    from torch.distributed.checkpoint import state_dict
    rows = expert_rows(model)

    def local(name: str, value: Any) -> Any:
        return value.to_local() if name in rows and hasattr(value, "to_local") else value

    state_dict.set_model_state_dict(model, {name: local(name, value) for name, value in state["model"].items()})
    if optimizer is not None:
        kept = {name: {key: local(name, value) for key, value in values.items()} for name, values in state["optimizer"]["state"].items()}
        loaded: dict[str, Any] = {**state["optimizer"], "state": kept}
        state_dict.set_optimizer_state_dict(model, optimizer, loaded)
