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


def save_as_megablocks(module: Any, state_dict: dict, prefix: str, _) -> None:
    """A state dict's hook, of experts whose parameters have one matrix an expert. Of parameters [E,F,H] it has views, so that what is
    loaded into these in place is in the parameters; of other layouts it has copies."""
    layout: WeightLayout = module.layout
    for name in WEIGHTS:
        weight = state_dict.get(prefix + name)
        if weight is None or weight.dim() != 3:
            continue
        if name == "w1" and layout.is_combined:
            _put_after(state_dict, prefix, "w2", "v1", _rows(layout.matrix("v1", weight)))
        state_dict[prefix + name] = _rows(layout.matrix(name, weight))
    bias = state_dict.get(f"{prefix}w1_bias") if layout.is_combined else None
    if bias is not None:
        of_gate_EF, of_up_EF = (of.contiguous() for of in layout.biases(bias, None))  # type: ignore[union-attr]
        state_dict[f"{prefix}w1_bias"] = of_gate_EF
        _put_after(state_dict, prefix, "w2_bias", "v1_bias", of_up_EF)


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


def _put_after(state_dict: dict, prefix: str, before: str, name: str, value: torch.Tensor) -> None:
    """Where a layer of MegaBlocks' layout has it: what follows `before` in the module follows it."""
    names = list(state_dict)
    following = names[names.index(prefix + before) + 1:] if prefix + before in state_dict else []
    state_dict[prefix + name] = value
    for key in following:
        state_dict[key] = state_dict.pop(key)


@torch.no_grad()
def load_as_megablocks(module: Any, state_dict: dict, prefix: str, _metadata: dict, _strict: bool, missing_keys: list[str],
                       _unexpected_keys: list[str], error_msgs: list[str]) -> None:
    """The hook of load_state_dict that puts such tensors into the shapes of the parameters. Those that have a parameter's own shape are
    left as they are, and what has another size is left for load_state_dict to refuse."""
    layout: WeightLayout = module.layout
    experts, rows, hidden = module.num_local_experts, module.rows, module.args.hidden_size
    apart = ("w2",) if layout.is_combined else WEIGHTS
    for name in apart:
        weight = state_dict.get(prefix + name)
        if weight is not None and weight.shape == (rows, hidden):
            weight_EFH = _stack(weight, experts)
            transposed = layout.down_transposed if name == "w2" else layout.up_transposed
            state_dict[prefix + name] = weight_EFH.transpose(1, 2).contiguous() if transposed else weight_EFH
    if layout.is_combined:
        report = missing_keys, error_msgs
        _load_both(module, state_dict, prefix, ("w1", "v1"), (rows, hidden), report)
        _load_both(module, state_dict, prefix, ("w1_bias", "v1_bias"), (experts, rows // experts), report)


def _load_both(module: Any, state_dict: dict, prefix: str, names: tuple[str, str], shape: tuple[int, int],
               report: tuple[list[str], list[str]]) -> None:
    """Replace gate and up by the one tensor that has both. Where one of them is not there, or has another shape, the parameter keeps its
    part, as a parameter would for which there is nothing to load."""
    parameter = module._parameters.get(names[0])
    given = [state_dict.get(prefix + name) for name in names]
    no_gate_alone = given[0] is None or given[0].shape != shape
    if parameter is None or (given[1] is None and no_gate_alone):
        return
    missing_keys, error_msgs = report
    fits = [part is not None and part.shape == shape for part in given]
    for name, part, fit in zip(names, given, fits):
        if part is None:
            missing_keys.append(prefix + name)
        elif not fit:
            error_msgs.append(f"size mismatch for {prefix + name}: copying a param with shape {part.shape} from checkpoint, the shape in"
                              f" current model is {torch.Size(shape)}.")
        state_dict.pop(prefix + name, None)
    if all(fits):
        state_dict[prefix + names[0]] = _joined(module.layout, names[0], given, module.num_local_experts)
    elif not parameter.is_meta:
        own = _taken_apart(module.layout, names[0], parameter)
        parts = [part.to(parameter) if fit else mine for part, fit, mine in zip(given, fits, own)]  # type: ignore[union-attr]
        state_dict[prefix + names[0]] = _joined(module.layout, names[0], parts, module.num_local_experts)


def _joined(layout: WeightLayout, name: str, parts: list, experts: int) -> torch.Tensor:
    if name == "w1_bias":
        return layout.joined(*parts)
    both = layout.joined(*(_stack(part, experts) for part in parts))
    return (both.transpose(1, 2) if layout.up_transposed else both).contiguous()


def _taken_apart(layout: WeightLayout, name: str, parameter: torch.Tensor) -> tuple:
    """What `_joined` made it of."""
    if name == "w1_bias":
        return layout.biases(parameter, None)
    return tuple(_rows(layout.matrix(of, parameter)) for of in ("w1", "v1"))
