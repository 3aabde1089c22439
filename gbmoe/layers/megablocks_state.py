"""State dicts of experts' weights: MegaBlocks' w1, w2 and v1 [E*F,H], whatever shapes and layout the parameters have.

Shape suffixes: E experts on this rank, H hidden, F ffn hidden on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gbmoe.weight_layout import WeightLayout

WEIGHTS = ("w1", "w2", "v1")
BIASES = ("w1_bias", "w2_bias", "v1_bias")


def saved_tensors(layout: WeightLayout, name: str, stored: torch.Tensor) -> dict[str, torch.Tensor]:
    """What MegaBlocks has, by its names, of a tensor that lies as the parameter w1, w2, v1, or one of their biases: of [E,F,H] a view,
    of other layouts copies."""
    if name in WEIGHTS and stored.dim() == 3:
        both = name == "w1" and layout.is_combined
        return {each: _rows(layout.matrix(each, stored)) for each in (("w1", "v1") if both else (name,))}
    if name == "w1_bias" and layout.is_combined:
        return {each: bias.contiguous() for each, bias in zip(("w1_bias", "v1_bias"), layout.biases(stored, None)) if bias is not None}
    return {name: stored}


def stored_tensor(layout: WeightLayout, name: str, saved: dict[str, Any], experts: int) -> Any:
    """The tensor of which saved_tensors made these, for a parameter that has one matrix an expert."""
    if name in BIASES:
        return layout.joined(saved["w1_bias"], saved["v1_bias"]) if name == "w1_bias" and layout.is_combined else saved[name]
    parts = {each: _stack(rows, experts) for each, rows in saved.items()}
    tensor = layout.joined(parts["w1"], parts["v1"]) if name == "w1" and layout.is_combined else parts[name]
    transposed = layout.down_transposed if name == "w2" else layout.up_transposed
    return (tensor.transpose(1, 2) if transposed else tensor).contiguous()


def _rows(matrix_EFH: torch.Tensor) -> torch.Tensor:
    """[E*F,H]"""
    return _reshaped(matrix_EFH.contiguous(), matrix_EFH.size(0), lambda tensor: tensor.flatten(0, 1))


def _stack(rows: torch.Tensor, experts: int) -> torch.Tensor:
    """[E,F,H] of [E*F,H]"""
    return _reshaped(rows, experts, lambda tensor: tensor.unflatten(0, (experts, -1)))


def _reshaped(tensor: Any, experts: int, reshape: Callable[[Any], Any]) -> Any:
    """reshape(tensor), which may be a DTensor. One whose shards are not of whole experts, as where fully_shard's ranks do not divide them,
    is gathered for it: then it is collective."""
    if not hasattr(tensor, "placements"):
        return reshape(tensor)
    from torch.distributed.tensor import Replicate, Shard
    mesh, placements = tensor.device_mesh, tensor.placements
    shards = math.prod(mesh.size(place) for place, placement in enumerate(placements) if placement == Shard(0))
    if experts % shards == 0 and all(placement in (Shard(0), Replicate()) for placement in placements):
        return reshape(tensor)
    return reshape(tensor.redistribute(mesh, [Replicate()] * mesh.ndim)).redistribute(mesh, placements)


def save_as_megablocks(module: Any, state_dict: dict, prefix: str, _) -> None:
    """A state dict's hook, of experts whose parameters have one matrix an expert. Of parameters [E,F,H] it has views, so that what is
    loaded into these in place is in the parameters; of other layouts it has copies."""
    for name in ("w1", "w2", "v1", "w1_bias"):
        stored = state_dict.get(prefix + name)
        if stored is None:
            continue
        saved = saved_tensors(module.layout, name, stored)
        state_dict[prefix + name] = saved.pop(name)
        for other, tensor in saved.items():
            _put_after(state_dict, prefix, other.replace("v1", "w2"), other, tensor)


def _put_after(state_dict: dict, prefix: str, before: str, name: str, value: torch.Tensor) -> None:
    """Where a layer of MegaBlocks' layout has it: what follows `before` in the module follows it."""
    names = list(state_dict)
    following = names[names.index(prefix + before) + 1:] if prefix + before in state_dict else []
    state_dict[prefix + name] = value
    for key in following:
        if key != prefix + name:
            state_dict[key] = state_dict.pop(key)


@torch.no_grad()
def load_as_megablocks(module: Any, state_dict: dict, prefix: str, _metadata: dict, _strict: bool, missing_keys: list[str],
                       _unexpected_keys: list[str], error_msgs: list[str]) -> None:
    """The hook of load_state_dict that puts such tensors into the shapes of the parameters. Those that have a parameter's own shape are
    left as they are, and what has another size is left for load_state_dict to refuse."""
    layout: WeightLayout = module.layout
    experts, rows, hidden = module.num_local_experts, module.rows, module.args.hidden_size
    for name in ("w2",) if layout.is_combined else WEIGHTS:
        weight = state_dict.get(prefix + name)
        if weight is not None and weight.shape == (rows, hidden):
            state_dict[prefix + name] = stored_tensor(layout, name, {name: weight}, experts)
    if layout.is_combined:
        report = missing_keys, error_msgs
        _load_both(module, state_dict, prefix, ("w1", "v1"), (rows, hidden), report)
        _load_both(module, state_dict, prefix, ("w1_bias", "v1_bias"), (experts, rows // experts), report)


def _load_both(module: Any, state_dict: dict, prefix: str, names: tuple[str, str], shape: tuple[int, int],
               report: tuple[list[str], list[str]]) -> None:
    """Replace gate and up by the one tensor that has both. Where one of them is not there, or has another shape, the parameter keeps its
    part, as a parameter would for which there is nothing to load."""
    parameter, layout = module._parameters.get(names[0]), module.layout
    given = {name: state_dict.get(prefix + name) for name in names}
    fitting = {name: part for name, part in given.items() if part is not None and part.shape == shape}
    if parameter is None or (given[names[1]] is None and not fitting):
        return
    missing_keys, error_msgs = report
    for name, part in given.items():
        if part is None:
            missing_keys.append(prefix + name)
        elif name not in fitting:
            error_msgs.append(f"size mismatch for {prefix + name}: copying a param with shape {part.shape} from checkpoint, the shape in"
                              f" current model is {torch.Size(shape)}.")
        state_dict.pop(prefix + name, None)
    if len(fitting) < 2:
        if parameter.is_meta:  # it has no part to keep
            return
        own = saved_tensors(layout, names[0], parameter)
        fitting = {name: fitting[name].to(own[name]) if name in fitting else own[name] for name in names}
    state_dict[prefix + names[0]] = stored_tensor(layout, names[0], fitting, module.num_local_experts)
