"""Which layout a layer is in, by its names and shapes, and what of it does not fit.

Shape suffixes: E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gbmoe._atomic_files import one_line
from gbmoe.compat.checkpoints.layouts import FRAMEWORKS, MEGABLOCKS, OTHERS, ROUTER, Layout, Matrices, pattern_of
from gbmoe.compat.checkpoints.models import MODEL_TYPES

# Every layout that is recognised, the likeliest first; and of those with the same places of experts' matrices the first. Llama-4's before
# gpt-oss', which only biases tell from it.
_KNOWN = [*MODEL_TYPES["mixtral"].loads.values(), MEGABLOCKS, *MODEL_TYPES["llama4_text"].loads.values(),
          *(layout for kind in MODEL_TYPES.values() for layout in kind.loads.values()), *FRAMEWORKS.values()]
_HOMES = [layout for place, layout in enumerate(_KNOWN) if layout.experts not in [before.experts for before in _KNOWN[:place]]]
# Dtypes with several values in a byte, by the names of files and of torch. No layout here says what their rows and columns mean.
_PACKED = ("F4", "F6_E2M3", "F6_E3M2", "torch.float4_e2m1fn_x2")

# (shape, dtype) of every tensor; dtypes are only compared with each other, so files and torch may name them differently.
Signatures = Mapping[str, tuple[list[int], object]]


class BrokenCheckpoint(ValueError):
    """Raised, with a message of one line, where something is not a checkpoint in any layout: an incomplete file, a broken index, a
    layer with a size of zero, a dtype that cannot be read. A sound layer that has no counterpart in the other layout raises a plain
    ValueError."""


@dataclass(frozen=True)
class Layer:
    """The sizes and dtypes of one layer, and which of layouts.OTHERS it has. shared_ffn is None without a shared expert; dtypes are
    those of the Signatures. `biased`: its experts have biases."""
    prefix: str
    experts: int
    hidden: int
    ffn: int
    shared_ffn: int | None
    gated: bool
    biased: bool
    others: frozenset[str]
    dtype: object
    router_dtype: object


class FoundLayer:
    """A layer of a source. Its experts, its shared expert and each of the OTHERS may have the names of different layouts.

    Attributes:
        layer: its sizes.
        experts: where the matrices of its experts are.
        shared: where those of its shared expert are, or None.
        others: for each of the OTHERS that it has, and for the router in any case, a layout in which it has this name.
    """

    def __init__(self, prefix: str, tensors: Signatures):
        """Raises BrokenCheckpoint for sizes of zero and dtypes that pack values."""
        self._prefix, self._tensors = prefix, tensors
        self._require_sound()
        home = max(_HOMES, key=lambda layout: self._likeness(layout.experts))
        layouts = [home, *_KNOWN]
        self.experts, self.shared = home.experts, self._find_shared(layouts)
        found = {other: self._find(other, layouts) for other in OTHERS}
        self.others: dict[str, Layout] = {other: layout for other, layout in found.items() if layout} | {ROUTER: found[ROUTER] or home}
        experts, hidden = self._experts_and_hidden()
        ffn, _ = self.experts.sizes_of_down(self._shape(self.experts.down.format(0)), experts)
        shared_ffn = None if self.shared is None else self.shared.sizes_of_down(self._shape(self.shared.down), 1)[0]
        dtype = next((dtype for name, (_, dtype) in tensors.items() if self.experts.matches(name)), None)
        _, router_dtype = tensors.get(self.others[ROUTER].name(ROUTER), (None, None))
        self.layer = Layer(prefix, experts, hidden, ffn, shared_ffn, self._is_gated(ffn),
                           any(name in tensors for name in self.experts.bias_names), frozenset(self.others), dtype, router_dtype)

    def faults(self) -> list[str]:
        """What differs from the expected shapes. Names are reported first, and shapes only if all names fit, then dtypes, because a
        fault in one causes faults in the next."""
        tensors, expected = self._tensors, self._expected()
        quantised = [f"{name}: quantised (MXFP4), of which no layout here is: save the model dequantised first" for name in tensors
                     if name.startswith("experts.") and name.endswith(("_proj_blocks", "_proj_scales"))]
        if quantised:
            return quantised
        names = [f"{name}: missing" for name in expected if name not in tensors]
        names += [f"{name}: unexpected, shape {shape}" for name, (shape, _) in tensors.items() if name not in expected]
        shapes = [f"{name}: expected shape {shape}, got {tensors[name][0]}" for name, shape in expected.items()
                  if not names and tensors[name][0] != shape]
        return names or shapes or [f"{name}: expected {self.layer.dtype}, as of the layer's other experts, got {dtype}"
                                   for name, (_, dtype) in tensors.items()
                                   if self.experts.matches(name) and dtype != self.layer.dtype]

    def nameless(self, target: Layout) -> list[str]:
        """What the target has no names for."""
        names = [layout.name(other) for other, layout in self.others.items() if other not in target.others]
        if self.shared is not None and (target.shared is None or (target.shared.plain is None and not self.layer.gated)):
            names.append(self.shared.down)
        if self.layer.biased and target.experts.biases is None:
            names += [name for name in self.experts.bias_names if name in self._tensors]
        return [f"{name}: the layout to write has no name for it" for name in names]

    def _likeness(self, experts: Matrices) -> tuple[int, bool, int]:
        """How well this layout of experts fits: how many matrices have its names, then whether the first one has the rows that the one
        after the activation has (only their shapes tell transposed ones under the same names), then how many biases have its names."""
        named = [name for name in self._tensors if experts.matches(name)]
        biases = sum(name in experts.bias_names for name in named)
        down = self._shape(experts.down.format(0))
        ffn, hidden = experts.sizes_of_down(down, down[0] if len(down) == 3 else 1)
        up, matrices = experts.tensors(gated=True)[0]
        shape = experts.shape(matrices, down[0] if len(down) == 3 else 1, ffn, hidden)
        return len(named) - biases, self._shape(up.format(0)) == shape, biases

    def _require_sound(self) -> None:
        for name, (shape, dtype) in self._tensors.items():
            if 0 in shape:
                raise BrokenCheckpoint(one_line(f"{self._prefix}{name}: expected sizes above 0, got shape {shape}"))
            if str(dtype) in _PACKED:
                raise BrokenCheckpoint(one_line(f"{self._prefix}{name}: expected a dtype of whole bytes, got {dtype}"))

    def _shape(self, name: str) -> list[int]:
        return self._tensors[name][0] if name in self._tensors else []

    def _find(self, other: str, layouts: Iterable[Layout]) -> Layout | None:
        """The first layout under whose name the tensor is there; one in which it has as many dimensions, if there is one."""
        named = [layout for layout in layouts if other in layout.others and layout.name(other) in self._tensors]
        fitting = (layout for layout in named if len(layout.shape(other, 1, 1)) == len(self._shape(layout.name(other))))
        return next(fitting, named[0] if named else None)

    def _find_shared(self, layouts: Iterable[Layout]) -> Matrices | None:
        places = dict.fromkeys(layout.shared for layout in layouts if layout.shared)
        best = max(places, key=self._number_of)
        return best if self._number_of(best) else None

    def _number_of(self, shared: Matrices) -> int:
        return sum(name in self._tensors for name, _ in shared.tensors(gated=True))

    def _experts_and_hidden(self) -> tuple[int, int]:
        """Both sizes, from the router; zeros where that has another number of dimensions, which is a fault."""
        layout = self.others[ROUTER]
        shape, dimensions = self._shape(layout.name(ROUTER)), layout.shape(ROUTER, 1, 1)
        if len(shape) != len(dimensions):
            return 0, 0
        if len(shape) == 1:  # flat, of H elements an expert
            _, hidden = self.experts.sizes_of_down(self._shape(self.experts.down), 1)
            return shape[0] // max(1, hidden), hidden
        experts, hidden = shape
        if self.experts.one_each and experts > len(self._tensors):
            # A wrong router is then one fault, not a missing name for each of its rows.
            experts = len({match[1] for match in map(self.experts.matches, self._tensors) if match})
        return experts, hidden

    def _is_gated(self, ffn: int) -> bool:
        """Whether experts have a gate: some name tells, or else the number of rows."""
        plain = self.experts.plain
        if plain is None:
            return True
        only_gated = [pattern_of(name) for name in self.experts.gate_up if name != plain]
        if not only_gated:
            return self._shape(plain.format(0))[:1] == [2 * ffn]
        return any(map(re.compile("|".join(only_gated)).fullmatch, self._tensors))

    def _expected(self) -> dict[str, list[int]]:
        """The shapes that the tensors should have according to the sizes found."""
        layer = self.layer
        expected: dict[str, list[int]] = {}
        for name, matrices in self.experts.tensors(layer.gated, layer.biased):
            shape = self.experts.shape(matrices, layer.experts, layer.ffn, layer.hidden)
            expected |= dict.fromkeys((name.format(e) for e in range(layer.experts)) if self.experts.one_each else (name,), shape)
        expected |= {layout.name(other): layout.shape(other, layer.experts, layer.hidden) for other, layout in self.others.items()}
        if self.shared is not None:
            expected |= {name: self.shared.shape(matrices, 1, layer.shared_ffn or 0, layer.hidden)
                         for name, matrices in self.shared.tensors(layer.gated)}
        return expected
