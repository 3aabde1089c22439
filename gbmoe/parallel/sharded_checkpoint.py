"""Checkpoints of models whose ranks have experts of their own: which rows of a weight are on which rank, and state dicts for
torch.distributed.checkpoint, which resume on other numbers of ranks.

Shape suffixes: E all experts, F ffn hidden, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.parallel.agreement import of_all_ranks_unless_alike
from gbmoe.parallel.expert_modules import ExpertModule, Experts, Holder
from gbmoe.parallel.failures import guarded
from gbmoe.parallel.groups import world_of

# Parts of a parameter's name that wrappers add and that state dicts leave out.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


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
        if leaf in module._non_persistent_buffers_set:
            continue
        saved = {leaf: holder.tensor}
        if isinstance(module, ExpertModule) and not hasattr(holder.tensor, "to_local"):
            saved = module.as_saved(leaf, torch.empty_like(holder.tensor, device="meta"))
        for each, tensor in saved.items():
            of_state = f"{prefix}.{each}" if prefix else each
            found[_state_dict_name(model, of_state)] = _rows_of(of_state, Holder(tensor, holder.args), module)
    return found


class _Stored(NamedTuple):
    """A parameter that state dicts have as other tensors: its module, its name there, and their names in the state dict by those there;
    its shape, and theirs."""
    module: ExpertModule
    leaf: str
    names: dict[str, str]
    shape: torch.Size
    saved_shape: torch.Size


def _stored_otherwise(model: torch.nn.Module) -> dict[str, _Stored]:
    """Parameters of experts that state dicts have in other shapes, or as several tensors, by the names that they would have in one."""
    found = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items() if isinstance(module, ExpertModule) else ():
            if parameter is None:
                continue
            saved = module.as_saved(leaf, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
            if saved.keys() != {leaf} or saved[leaf].shape != parameter.shape:
                names = {each: _state_dict_name(model, f"{prefix}.{each}" if prefix else each) for each in saved}
                found[names[leaf]] = _Stored(module, leaf, names, parameter.shape, saved[leaf].shape)
    return found


def _in_other_names(kept: dict[str, Any], names: dict[str, list[str]]) -> list[dict[str, Any]]:
    """The groups of an optimizer's state with other names of parameters, each once."""
    return [{**group, "params": list(dict.fromkeys(each for name in group["params"] for each in names.get(name, [name])))}
            for group in kept["param_groups"]]


def _as_saved(kept: dict[str, Any], stored: dict[str, _Stored]) -> dict[str, Any]:
    """An optimizer's state with what it keeps for parameters in the shapes that state dicts have. Other tensors are kept for each."""
    state = dict(kept["state"])
    for name, of in stored.items():
        for key, value in state.pop(name, {}).items():
            whole = isinstance(value, torch.Tensor) and value.shape == of.shape
            saved = of.module.as_saved(of.leaf, value) if whole else dict.fromkeys(of.names, value)
            for each, tensor in saved.items():
                state.setdefault(of.names[each], {})[key] = tensor
    return {**kept, "state": state, "param_groups": _in_other_names(kept, {name: list(of.names.values()) for name, of in stored.items()})}


def _as_stored(kept: dict[str, Any], stored: dict[str, _Stored]) -> dict[str, Any]:
    """What _as_saved took apart."""
    state = dict(kept["state"])
    for name, of in stored.items():
        saved = {each: state.pop(of_state) for each, of_state in of.names.items() if of_state in state}
        if len(saved) < len(of.names):
            continue
        state[name] = {}
        for key, value in saved[of.leaf].items():
            whole = isinstance(value, torch.Tensor) and value.shape == of.saved_shape
            parts = {each: values[key] for each, values in saved.items()}
            state[name][key] = of.module.as_stored(of.leaf, parts) if whole else value
    back = {of_state: [name] for name, of in stored.items() for of_state in of.names.values()}
    return {**kept, "state": state, "param_groups": _in_other_names(kept, back)}


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

    Tensors share their memory with the model and the optimizer, except for those of parameters that are stored in another layout
    (Arguments.weight_layout): what an optimizer keeps for these is saved as for MegaBlocks' w1, w2 and v1, too, so that it moves between
    layouts. Where ranks share one expert, the DTensors work for checkpoints alone, not for collectives such as full_tensor.

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
        kept = _as_saved(state_dict.get_optimizer_state_dict(model, optimizer), _stored_otherwise(model))
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

    stored = _stored_otherwise(model)
    weights = {name: local(name, value) for name, value in state["model"].items()}
    for name, of in stored.items():  # torch's function knows the names of parameters alone, and adds to these what wrappers add
        parts = {each: weights[of_state] for each, of_state in of.names.items() if of_state in weights}
        if len(parts) == len(of.names):
            weights = {key: value for key, value in weights.items() if key not in of.names.values()}
            weights[name] = of.module.as_stored(of.leaf, parts)
    state_dict.set_model_state_dict(model, weights)
    if optimizer is not None:
        kept = {name: {key: local(name, value) for key, value in values.items()} for name, values in state["optimizer"]["state"].items()}
        loaded = _as_stored({**state["optimizer"], "state": kept}, stored)
        state_dict.set_optimizer_state_dict(model, optimizer, loaded)
