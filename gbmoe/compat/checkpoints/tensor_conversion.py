"""What becomes of each tensor: every tensor of the result is planned before one is made.

Shape suffixes: E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gbmoe._atomic_files import one_line
from gbmoe.compat.checkpoints.layouts import EXPERTS, FRAMEWORKS, MEGABLOCKS, Layout, Matrices
from gbmoe.compat.checkpoints.models import MODEL_TYPES
from gbmoe.compat.checkpoints.recognise import FoundLayer, Layer, Signatures

LAYOUTS = ("transformers", "megablocks", *FRAMEWORKS)
EXPERT_LAYOUTS = tuple(EXPERTS)
# The largest header that readers of safetensors accept, and a number of bytes that every tensor exceeds in the header.
MOST_HEADER_BYTES, _FEWEST_BYTES_A_TENSOR = 100_000_000, 64
FAULTS_SHOWN = 10
# Names inside a layer. transformers' Granite has no module of experts; its router has the name of MegaBlocks'.
_IN_A_LAYER = re.compile(r"((?:.*?\.)?)(?:(?:routed_)?experts\..+|router\.layer\.weight)")


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


def target_layout(to: str, experts: str, model_type: str) -> Layout:
    """The layout to write. For "transformers" names are those of the model type, which need not load these experts."""
    if to not in LAYOUTS or experts not in EXPERT_LAYOUTS or model_type not in MODEL_TYPES:
        raise ValueError(f"convert: expected to in {LAYOUTS}, experts in {EXPERT_LAYOUTS} and model_type in {tuple(MODEL_TYPES)}, got"
                         f" {to!r}, {experts!r}, {model_type!r}")
    if to != "transformers":
        return MEGABLOCKS if to == "megablocks" else FRAMEWORKS[to]
    loads = MODEL_TYPES[model_type].loads
    if experts not in loads and not EXPERTS[experts].down.startswith("experts."):  # only the model's router tells that this is a layer
        raise ValueError(f"convert to transformers: experts: expected a model type with these names for {experts!r}, got {model_type!r}")
    return loads[experts] if experts in loads else replace(loads["fused"], experts=EXPERTS[experts])


def plan(signatures: Signatures, to: str, experts: str = "fused", model_type: str = "deepseek_v3") -> tuple[list[Output], list[Layer]]:
    """Every tensor of the result, and the layers. Raises ValueError where the other layout cannot hold the layers.

    A shape with a size of zero takes no bytes, so its other sizes may be arbitrarily large. Therefore lists with an entry for each
    expert are made only after such shapes are refused and all shapes fit each other: then there are at most as many experts as bytes.
    """
    target = target_layout(to, experts, model_type)
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
        found = FoundLayer(prefix, tensors)
        faults += [one_line(f"{prefix}{fault}") for fault in found.faults() or found.nameless(target)]
        if not faults:
            _require_expressible(found.layer, target, to, experts)
            layers.append(found.layer)
            outputs += [replace(output, name=prefix + output.name, sources=tuple(prefix + name for name in output.sources))
                        for output in _outputs(found, target)]
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        raise ValueError("\n  ".join([f"convert to {to}: these tensors do not fit:", *faults[:FAULTS_SHOWN], *more]))
    if all(output.build is None and output.sources == (output.name,) for output in outputs):
        raise ValueError(f"convert to {to}: expected layers in another layout, got layers in this one")
    return outputs, layers


def _parents(name: str) -> Iterator[str]:
    """'a.b.c' -> 'a.b.', 'a.', ''."""
    while name:
        name = name[: name[:-1].rfind(".") + 1]
        yield name


def _require_expressible(layer: Layer, target: Layout, to: str, experts: str) -> None:
    """Raise ValueError where the target has no such experts, or too many tensors."""
    if not layer.gated and target.experts.plain is None:
        expected = " or ".join(repr(name) for name, matrices in EXPERTS.items() if matrices.plain)
        what = f"experts: expected {expected} for experts without a gate, got {experts!r}" if to == "transformers" \
            else "expected experts with a gate"
        raise ValueError(f"convert to {to}: {what}")
    if target.experts.one_each and layer.experts * len(target.experts.tensors(layer.gated)) * _FEWEST_BYTES_A_TENSOR > MOST_HEADER_BYTES:
        got = f"expected 'fused' for {layer.experts} experts, got {experts!r}" if to == "transformers" \
            else f"got {layer.experts} experts"
        raise ValueError(f"convert to {to}: experts: {got}: the header of a file has no room for a tensor of each")


def _outputs(found: FoundLayer, target: Layout) -> Iterator[Output]:
    """The target's tensors of a layer that has no faults."""
    layer = found.layer
    parts = [_matrices(found.experts, target.experts, layer.gated, layer.experts, layer.ffn, layer.hidden, layer.biased)]
    if found.shared is not None and target.shared is not None:
        parts.append(_matrices(found.shared, target.shared, layer.gated, 1, layer.shared_ffn or 0, layer.hidden))
    others = []
    for other, layout in found.others.items():
        shape = target.shape(other, layer.experts, layer.hidden)
        same = shape == layout.shape(other, layer.experts, layer.hidden)
        build = None if same else partial(_reshaped, shape=tuple(shape))
        others.append(Output(target.name(other), (layout.name(other),), build, tuple(shape)))
    return itertools.chain(*parts, others)


def _matrices(source: Matrices, target: Matrices, gated: bool, experts: int, ffn: int, hidden: int, biased: bool = False,
              ) -> Iterator[Output]:
    """The target's tensors of E experts' matrices, and with `biased` of their biases."""
    everything = source.tensors(gated, biased)
    if (source.places, source.stacked, source.one_each) == (target.places, target.stacked, target.one_each) \
            and [held for _, held in everything] == [held for _, held in target.tensors(gated, biased)]:
        for (of, _), (name, _) in zip(everything, target.tensors(gated, biased)):
            for number in range(experts) if target.one_each else (0,):
                yield Output(name.format(number), (of.format(number),))
        return
    for name, matrices in target.tensors(gated, biased):
        holding = [(of, held) for of, held in everything if set(held) & set(matrices)]
        shape = tuple(target.shape(matrices, experts, ffn, hidden))
        targets: list[int | None] = list(range(experts)) if target.one_each else [None]
        for e in targets:
            every = (range(experts) if e is None else (e,)) if source.one_each else (0,)
            build = partial(_build, source=source, target=target, matrices=matrices, holding=[held for _, held in holding], e=e,
                            experts=experts, shape=shape)
            yield Output(name.format(e), tuple(of.format(number) for of, _ in holding for number in every), build, shape)


def _build(*sources: torch.Tensor, source: Matrices, target: Matrices, matrices: tuple[str, ...], holding: list[tuple[str, ...]],
           e: int | None, experts: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the target with `matrices`, of expert e or of all. `sources` are, for each of the tensors that hold some of `holding`,
    that tensor, or those of the experts."""
    out = sources[0].new_empty(shape)
    each = len(sources) // len(holding)
    for name in matrices:
        place = next(place for place, held in enumerate(holding) if name in held)
        to_EFH = target.matrix(out, name, matrices, experts if e is None else 1)
        for number, tensor in enumerate(sources[place * each : (place + 1) * each]):
            of_EFH = source.matrix(tensor, name, holding[place], experts)
            if source.one_each:
                to_EFH[number].copy_(of_EFH[0])
            else:
                to_EFH.copy_(of_EFH if e is None else of_EFH[e : e + 1])
    return out


def _reshaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor.reshape(shape).clone()
