"""Names and shapes of the layouts, and what becomes of each tensor.

Shape suffixes: E experts, H hidden, F ffn hidden, N columns of one expert's matrices: F or, fused with a gate, 2F.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gbmoe._atomic_files import one_line

LAYOUTS = ("transformers", "megablocks")
# The names of gate, up and down in transformers' layouts with a tensor for each expert.
_PER_EXPERT = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}
EXPERT_LAYOUTS = ("fused", *_PER_EXPERT)
# The module that is the router in transformers' layouts.
ROUTERS = ("gate", "router")
# The largest header that readers of safetensors accept, and a number of bytes that every tensor exceeds in the header.
MOST_HEADER_BYTES, _FEWEST_BYTES_A_TENSOR = 100_000_000, 64
FAULTS_SHOWN = 10


class BrokenCheckpoint(ValueError):
    """Raised, with a message of one line, where something is not a checkpoint in any layout: an incomplete file, a broken index, a
    layer with a size of zero, a dtype that cannot be read. A sound layer that has no counterpart in the other layout raises a plain
    ValueError."""


def to_megablocks(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in MegaBlocks' layout, for gbmoe.dMoE and for MegaBlocks.

    Whether a dMoE computes what the model computes is not asked, see convert_checkpoint.

    Args:
        state_dict: of a transformers model or of one MoE block; any dtype and device.

    Returns:
        A new dict. Converted tensors are copies, all others are those of `state_dict`.

    Raises:
        ValueError: where there is no MoE layer, or with the names that do not fit. BrokenCheckpoint, a subclass, for a layer with a
            size of zero or with a dtype that packs several values into a byte.

    Example:
        >>> block = {"gate.weight": torch.zeros(4, 8), "experts.gate_up_proj": torch.zeros(4, 2 * 16, 8),
        ...          "experts.down_proj": torch.zeros(4, 8, 16)}
        >>> {name: list(value.shape) for name, value in to_megablocks(block).items()}
        {'router.layer.weight': [4, 8], 'experts.mlp.w1': [64, 8], 'experts.mlp.v1': [64, 8], 'experts.mlp.w2': [64, 8]}
    """
    return _converted(state_dict, "megablocks", "fused", "gate")


def to_transformers(state_dict: Mapping[str, torch.Tensor], experts: str = "fused", router: str = "gate",
                    ) -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in transformers' layout; the inverse of to_megablocks.

    A model in memory has the experts "fused". Which layouts from_pretrained loads depends on the model type, see
    gbmoe.compat.checkpoints.

    Args:
        state_dict: that of a model with gbmoe.dMoE or MegaBlocks' layers, or of one such layer; any dtype and device. The number of
            experts is that of the router's rows.
        experts: "fused", "gate_proj" or "w1"; see gbmoe.compat.checkpoints.
        router: the module that is the router, "gate" or, in Jamba, "router".

    Returns, Raises: as to_megablocks.
    """
    return _converted(state_dict, "transformers", experts, router)


def _converted(state_dict, to, experts, router):
    outputs, _ = plan({name: (list(value.shape), value.dtype) for name, value in state_dict.items()}, to, experts, router)
    return {output.name: output.value(state_dict) if output.build is None
            else output.value(state_dict).clone(memory_format=torch.contiguous_format) for output in outputs}


# ----------------------------------------------------------------------------------------------- names, shapes, dtypes

# (shape, dtype) of every tensor; dtypes are only compared with each other, so files and torch may name them differently.
Signatures = Mapping[str, tuple[list[int], object]]

_ROUTER = "router.layer.weight"  # in MegaBlocks' layout
_SHARED = {"megablocks": "shared_expert.", "transformers": "shared_experts."}
_IN_A_LAYER = re.compile(r"((?:.*?\.)?)experts\..+")
_ONE_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)\.weight")
# Dtypes with several values in a byte, by the names of files and of torch. No layout here says what their rows and columns mean.
_PACKED = ("F4", "F6_E2M3", "F6_E3M2", "torch.float4_e2m1fn_x2")


@dataclass(frozen=True)
class Output:
    """A tensor of the result: build(*sources), with the given shape, possibly a view. Without `build` it is its one source."""
    name: str
    sources: tuple[str, ...]
    build: Callable[..., torch.Tensor] | None = None
    shape: tuple[int, ...] = ()

    def value(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        sources = [tensors[name] for name in self.sources]
        return sources[0] if self.build is None else self.build(*sources)


@dataclass(frozen=True)
class Layer:
    """The sizes and dtypes of one layer. shared_ffn is None without a shared expert; dtypes are those of the Signatures."""
    prefix: str
    experts: int
    hidden: int
    ffn: int
    shared_ffn: int | None
    gated: bool
    dtype: object
    router_dtype: object


def plan(signatures: Signatures, to: str, experts: str, router: str) -> tuple[list[Output], list[Layer]]:
    """Every tensor of the result, and the layers. Raises ValueError where the other layout cannot hold the layers.

    A shape with a size of zero takes no bytes, so its other sizes may be arbitrarily large. Therefore lists with an entry for each
    expert are made only after such shapes are refused and all shapes fit each other: then there are at most as many experts as bytes.
    """
    if to not in LAYOUTS or experts not in EXPERT_LAYOUTS or router not in ROUTERS:
        raise ValueError(f"convert: expected to in {LAYOUTS}, experts in {EXPERT_LAYOUTS} and router in {ROUTERS}, got {to!r},"
                         f" {experts!r}, {router!r}")
    prefixes = dict.fromkeys(match[1] for match in map(_IN_A_LAYER.fullmatch, signatures) if match)
    if not prefixes:
        raise ValueError(f"convert to {to}: there is no MoE layer: no name holds 'experts.'")
    tensors_of: dict[str, dict[str, Any]] = {prefix: {} for prefix in prefixes}
    outputs: list[Output] = []
    layers: list[Layer] = []
    faults: list[str] = []
    for name, signature in signatures.items():
        prefix = next((parent for parent in _parents(name) if parent in tensors_of), None)
        if prefix is None:
            outputs.append(Output(name, (name,)))
        else:
            tensors_of[prefix][name.removeprefix(prefix)] = signature
    for prefix, tensors in tensors_of.items():
        _require_sound(prefix, tensors)
        expected, converted, layer = _layer(prefix, tensors, to, experts, router)
        faults += [one_line(f"{prefix}{fault}") for fault in _faults(tensors, expected)]
        if not faults:
            layers.append(layer)
            outputs += [replace(output, name=prefix + output.name, sources=tuple(prefix + name for name in output.sources))
                        for output in converted]
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        raise ValueError("\n  ".join([f"convert to {to}: these tensors do not fit:", *faults[:FAULTS_SHOWN], *more]))
    return outputs, layers


def _parents(name: str) -> Iterator[str]:
    """'a.b.c' -> 'a.b.', 'a.', ''."""
    while name:
        name = name[: name[:-1].rfind(".") + 1]
        yield name


def _require_sound(prefix: str, tensors: Signatures) -> None:
    for name, (shape, dtype) in tensors.items():
        if 0 in shape:
            raise BrokenCheckpoint(one_line(f"{prefix}{name}: expected sizes above 0, got shape {shape}"))
        if str(dtype) in _PACKED:
            raise BrokenCheckpoint(one_line(f"{prefix}{name}: expected a dtype of whole bytes, got {dtype}"))


def _faults(tensors: Signatures, expected: Mapping[str, list[int]]) -> list[str]:
    """What differs from the expected shapes. Names are reported first, and shapes only if all names fit, then dtypes, because a fault in
    one causes faults in the next."""
    names = [f"{name}: missing" for name in expected if name not in tensors]
    names += [f"{name}: unexpected, shape {shape}" for name, (shape, _) in tensors.items() if name not in expected]
    shapes = [f"{name}: expected shape {shape}, got {tensors[name][0]}" for name, shape in expected.items()
              if not names and tensors[name][0] != shape]
    dtypes = {name: dtype for name, (_, dtype) in tensors.items() if name.startswith("experts.")}
    first = next(iter(dtypes.values()), None)
    return names or shapes or [f"{name}: expected {first}, as of the layer's other experts, got {dtype}"
                               for name, dtype in dtypes.items() if dtype != first]


def _layer(prefix: str, tensors: Signatures, to: str, layout: str, router: str,
           ) -> tuple[dict[str, list[int]], Iterable[Output], Layer]:
    """The shapes that one layer should have according to the sizes found in it, and the outputs made of it if it has them."""
    source = "transformers" if to == "megablocks" else "megablocks"
    if to == "transformers":
        router_source, router_target = _ROUTER, f"{router}.weight"
    else:
        router_source, router_target = _transformers_router(tensors), _ROUTER
    experts, hidden = _shape(tensors, router_source, 2)
    found = [match for match in map(_ONE_EXPERT.fullmatch, tensors) if match]
    kinds = {match[2] for match in found}
    if kinds and experts > len(tensors):
        experts = len({match[1] for match in found})  # a wrong router is then one fault, not a missing name for each of its rows
    gated = bool(tensors.keys() & {"experts.mlp.v1", "experts.gate_up_proj"} or kinds & {"gate_proj", "w1", "w3"})
    if to == "transformers":
        ffn, expected, outputs = _experts_from_megablocks(tensors, experts, hidden, gated, layout)
    elif kinds:
        layout = "w1" if "w2" in kinds else "gate_proj"
        ffn, expected, outputs = _experts_from_one_each(tensors, experts, hidden, gated, layout)
    else:
        ffn, expected, outputs = _experts_from_fused(tensors, experts, hidden, gated)
    dtype = next((dtype for name, (_, dtype) in tensors.items() if name.startswith("experts.")), None)
    expected[router_source] = [experts, hidden]
    others = [Output(router_target, (router_source,))]
    shared, shared_target, shared_ffn = _SHARED[source], _SHARED[to], None
    if any(name.startswith(shared) for name in tensors):
        shared_ffn = _shape(tensors, f"{shared}up_proj.weight", 2)[0]
        for name in ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj"):
            expected[f"{shared}{name}.weight"] = [hidden, shared_ffn] if name == "down_proj" else [shared_ffn, hidden]
            others.append(Output(f"{shared_target}{name}.weight", (f"{shared}{name}.weight",)))
    router_dtype = tensors[router_source][1] if router_source in tensors else None
    return expected, itertools.chain(outputs, others), Layer(prefix, experts, hidden, ffn, shared_ffn, gated, dtype, router_dtype)


def _transformers_router(tensors: Signatures) -> str:
    names = [f"{router}.weight" for router in ROUTERS]
    return next((name for name in names if name in tensors), names[0])


def _shape(tensors: Signatures, name: str, rank: int) -> list[int]:
    """The tensor's shape, or zeros where it is absent or has another rank, which _faults then reports."""
    shape = tensors[name][0] if name in tensors else []
    return shape if len(shape) == rank else [0] * rank


def _experts_from_fused(tensors, experts, hidden, gated):
    up, inward = ("experts.gate_up_proj", ("w1", "v1")) if gated else ("experts.up_proj", ("w1",))
    down = "experts.down_proj"
    ffn = _shape(tensors, down, 3)[2]
    expected = {up: [experts, len(inward) * ffn, hidden], down: [experts, hidden, ffn]}
    rows = (experts * ffn, hidden)
    outputs = [Output(f"experts.mlp.{name}", (up,), partial(_rows_of_part, part=part, parts=len(inward)), rows)
               for part, name in enumerate(inward)]
    return ffn, expected, [*outputs, Output("experts.mlp.w2", (down,), _rows_of_transposed, rows)]


def _experts_from_one_each(tensors, experts, hidden, gated, layout):
    gate, up, down = _PER_EXPERT[layout]
    ffn = _shape(tensors, f"experts.0.{down}.weight", 2)[1]
    expected, outputs = {}, []
    for target, kind in (("w1", gate), ("v1", up), ("w2", down)) if gated else (("w1", up), ("w2", down)):
        names = tuple(f"experts.{e}.{kind}.weight" for e in range(experts))
        expected |= dict.fromkeys(names, [hidden, ffn] if kind == down else [ffn, hidden])
        build = _stacked_transposed if kind == down else _stacked
        outputs.append(Output(f"experts.mlp.{target}", names, build, (experts * ffn, hidden)))
    return ffn, expected, outputs


def _experts_from_megablocks(tensors, experts, hidden, gated, layout):
    inward, w2 = tuple(f"experts.mlp.{name}" for name in ("w1", "v1")[: 1 + gated]), "experts.mlp.w2"
    ffn = _shape(tensors, w2, 2)[0] // max(1, experts)
    expected = {name: [experts * ffn, hidden] for name in (*inward, w2)}
    if layout == "fused":
        up = "experts.gate_up_proj" if gated else "experts.up_proj"
        return ffn, expected, [
            Output(up, inward, partial(_fused, experts=experts), (experts, len(inward) * ffn, hidden)),
            Output("experts.down_proj", (w2,), partial(_transposed, experts=experts), (experts, hidden, ffn)),
        ]
    if layout == "w1" and not gated:
        raise ValueError("convert to transformers: experts: expected 'fused' or 'gate_proj' for experts without a gate,"
                         f" got {layout!r}")
    if experts * (2 + gated) * _FEWEST_BYTES_A_TENSOR > MOST_HEADER_BYTES:
        raise ValueError(f"convert to transformers: experts: expected 'fused' for {experts} experts, got {layout!r}: the header"
                         " of a file has no room for a tensor of each")
    return ffn, expected, _one_each_from_megablocks(inward, w2, experts, hidden, ffn, layout)


def _one_each_from_megablocks(inward, w2, experts, hidden, ffn, layout) -> Iterator[Output]:
    gate, up, down = _PER_EXPERT[layout]
    for e in range(experts):
        for kind, name in zip((gate, up) if len(inward) == 2 else (up,), inward):
            yield Output(f"experts.{e}.{kind}.weight", (name,), partial(_one, e=e, experts=experts), (ffn, hidden))
        build = partial(_one_transposed, e=e, experts=experts)
        yield Output(f"experts.{e}.{down}.weight", (w2,), build, (hidden, ffn))


# The `build` of an Output.


def _rows_of_part(stack_ENH, part, parts):
    return stack_ENH.chunk(parts, dim=1)[part].flatten(0, 1)


def _rows_of_transposed(stack_EHF):
    return stack_EHF.transpose(1, 2).flatten(0, 1)


def _stacked(*matrices_FH):
    return torch.cat(matrices_FH)


def _stacked_transposed(*matrices_HF):
    return torch.cat([matrix.t() for matrix in matrices_HF])


def _fused(*stacks, experts):
    return torch.cat([rows.unflatten(0, (experts, -1)) for rows in stacks], dim=1)


def _transposed(rows, experts):
    return rows.unflatten(0, (experts, -1)).transpose(1, 2)


def _one(rows, e, experts):
    return rows.unflatten(0, (experts, -1))[e]


def _one_transposed(rows, e, experts):
    return _one(rows, e, experts).t()
