"""WeightLayout: where an expert's gate, up and down matrices lie, so that weights of any framework are read where they are.

Shape suffixes: E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from gbmoe._checks import require

_GATE_UP = ("separate", "gate_first", "up_first", "interleaved")


@dataclass(frozen=True)
class WeightLayout:
    """Where the matrices of gated experts lie. The default is MegaBlocks': w1, v1 and w2, each [E,F,H].

    Other layouts than "separate" have gate and up in one tensor, which is handed over as w1, and no v1. Experts without a gate have one
    matrix before the activation, which is "separate".

    Attributes:
        gate_up: "separate": the gate is w1 and up is v1, [E,F,H] each; "gate_first": w1 is [E,2F,H], the gate in rows 0 to F - 1 and
            up in the others; "up_first": the other way round; "interleaved": rows 0, 2, 4, ... are the gate.
        up_transposed: w1 (and v1) are [E,H,F] or [E,H,2F]: what is said of rows above is true of columns.
        down_transposed: w2 is [E,H,F] instead of [E,F,H].

    Raises:
        ValueError: for another gate_up.

    Example:
        >>> # transformers' Mixtral, Qwen3 and others
        >>> layout = WeightLayout("gate_first", down_transposed=True)
        >>> w1, w2 = torch.empty(4, 64, 16), torch.empty(4, 16, 32)
        >>> [tuple(w.shape) for w in layout.matrices(w1, w2, None)]
        [(4, 32, 16), (4, 32, 16), (4, 32, 16)]
    """

    gate_up: str = "separate"
    up_transposed: bool = False
    down_transposed: bool = False

    def __post_init__(self):
        require(self.gate_up in _GATE_UP, "WeightLayout", "gate_up", f"one of {', '.join(_GATE_UP)}", repr(self.gate_up))

    @property
    def is_combined(self) -> bool:
        """Whether gate and up are one tensor."""
        return self.gate_up != "separate"

    @property
    def is_paired(self) -> bool:
        """Whether gate and up lie side by side along the rows of memory, so that a kernel reads both or neither."""
        return self.gate_up == "interleaved" and self.up_transposed

    def pairs(self, w1: torch.Tensor) -> torch.Tensor:
        """w1 as [E,2F,H], whose rows are gate and up in turns, of a paired layout."""
        return w1.transpose(1, 2)

    @property
    def code(self) -> str:
        """A string that stands for this layout where only strings can, as in an operator's arguments; `of_code` reads it."""
        return self.gate_up + (" up_transposed" if self.up_transposed else "") + (" down_transposed" if self.down_transposed else "")

    @staticmethod
    @functools.cache
    def of_code(code: str) -> WeightLayout:
        """The layout whose `code` this is."""
        if code == MEGABLOCKS.code:
            return MEGABLOCKS
        gate_up, *transposed = code.split(" ")
        return WeightLayout(gate_up, "up_transposed" in transposed, "down_transposed" in transposed)

    def matrices(self, w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None,
                 ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(w1, w2, v1), each [E,F,H], as views of the tensors; v1 is None where there is no gate."""
        if self is MEGABLOCKS:
            return w1, w2, v1
        if self.up_transposed:
            w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
        if self.down_transposed:
            w2 = w2.transpose(1, 2)
        if self.gate_up == "interleaved":
            return w1[:, ::2], w2, w1[:, 1::2]
        if self.is_combined:
            ffn = w1.size(1) // 2
            first, second = w1[:, :ffn], w1[:, ffn:]
            return (first, w2, second) if self.gate_up == "gate_first" else (second, w2, first)
        return w1, w2, v1

    def matrix(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix "w1", "w2" or "v1", [E,F,H], as a view of the tensor that has it."""
        if name == "w2":
            return tensor.transpose(1, 2) if self.down_transposed else tensor
        if not self.is_combined:
            return tensor.transpose(1, 2) if self.up_transposed else tensor
        w1_EFH, _, v1_EFH = self.matrices(tensor, tensor, None)
        assert v1_EFH is not None
        return w1_EFH if name == "w1" else v1_EFH

    def parameters(self, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor, v1_EFH: torch.Tensor | None,
                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(w1, w2, v1) in this layout, contiguous, of which `matrices` makes these; no copies of those that lie so already."""
        w1, v1 = w1_EFH, v1_EFH
        if self.is_combined:
            assert v1_EFH is not None
            w1, v1 = self.joined(w1_EFH, v1_EFH), None
        if self.up_transposed:
            w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
        w2 = w2_EFH.transpose(1, 2) if self.down_transposed else w2_EFH
        return w1.contiguous(), w2.contiguous(), None if v1 is None else v1.contiguous()

    def biases(self, w1_bias: torch.Tensor | None, v1_bias: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(gate's, up's), each [E,F], of biases that lie as the rows (or columns) of the weights do; one matrix before the activation has
        the first."""
        if w1_bias is None or not self.is_combined:
            return w1_bias, v1_bias
        if self.gate_up == "interleaved":
            return w1_bias[:, ::2], w1_bias[:, 1::2]
        half = w1_bias.size(1) // 2  # two slices: a program has no name for the list that chunk() returns
        first, second = w1_bias[:, :half], w1_bias[:, half:]
        return (first, second) if self.gate_up == "gate_first" else (second, first)

    def joined(self, gate_EF: torch.Tensor, up_EF: torch.Tensor) -> torch.Tensor:
        """[E,2F], of which `biases` makes these two. Both may have further dimensions, and the result then has them as well."""
        if self.gate_up == "interleaved":
            return torch.stack((gate_EF, up_EF), 2).flatten(1, 2)
        return torch.cat((gate_EF, up_EF) if self.gate_up == "gate_first" else (up_EF, gate_EF), 1)

    def check(self, function: str, w1: torch.Tensor, v1: torch.Tensor | None) -> None:
        """Raise ValueError unless w1 and v1 can be of this layout; their ranks are 3."""
        if self.is_combined:
            require(v1 is None, function, "v1", lambda: f"None, because in layout '{self.code}' it is a part of w1",
                    None if v1 is None else f"a tensor {list(v1.shape)}")
            rows = w1.size(2 if self.up_transposed else 1)
            require(rows % 2 == 0, function, "w1", lambda: f"an even number of {'columns' if self.up_transposed else 'rows'}, gate and up",
                    rows)


MEGABLOCKS = WeightLayout()


class WeightGradients:
    """The gradients of w1, w2 and v1, one tensor for each parameter in the parameter's own layout; each is allocated when a part of it is
    first asked for."""

    def __init__(self, layout: WeightLayout, w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None):
        self._layout = layout
        # Not the weights themselves: copies that autocast made of them are to be freed as soon as they have been used.
        self._like: dict[str, Any] = {"w1": (w1.shape, w1.dtype, w1.device), "w2": (w2.shape, w2.dtype, w2.device)}
        if v1 is not None:
            self._like["v1"] = (v1.shape, v1.dtype, v1.device)
        self._made: dict[str, torch.Tensor] = {}
        self._biases: dict[str, torch.Tensor] = {}

    # Whether w1's and v1's may be made together, and written where they lie.
    takes_two = True

    def are_large_for(self, a_PF: Any, experts: int) -> bool:
        """Whether less memory is in use at a time if w2's is made after those of w1 and v1: all of these is allocated when a part of it is
        first asked for, and a, [P,F], and w2's rows, [P,H], take no more than one of three. False for rows in float8."""
        if not self._layout.is_combined or not isinstance(a_PF, torch.Tensor):
            return False
        of_a, of_rows, of_w2 = self._elements(a_PF, experts)
        return of_a + of_rows <= of_w2

    def need_the_memory_of_rows(self, a_PF: torch.Tensor, experts: int) -> bool:
        """Of gradients that are_large_for a: whether w2's rows, if they are kept, make the moment of gate's and up's gradients (dh, dg, a,
        these rows, those of x, and two gradients) need more memory than that of w2's (a, these rows, three gradients). False where it is
        less than a tenth of w2 more, for which it does not pay to gather rows twice."""
        of_a, of_rows, of_w2 = self._elements(a_PF, experts)
        return 2 * of_a + of_rows > 1.1 * of_w2

    def _elements(self, a_PF: torch.Tensor, experts: int) -> tuple[int, int, int]:
        """Elements of a, of rows [P,H], and of w2."""
        of_w2 = math.prod(self._like["w2"][0])
        return a_PF.numel(), a_PF.size(0) * (of_w2 // max(experts * a_PF.size(1), 1)), of_w2

    def write(self, name: str, experts: Any, left_PF: Any, rows: Any, sizes_E: torch.Tensor, scale: float) -> None:
        """Have the engine `experts` make the gradient of w1, w2, v1 or "pairs", which is left.T @ rows of each expert. Here `scale` waits
        for `tensors`."""
        only = name == "pairs" or (name == "w1" and "v1" not in self._like and not self._layout.is_combined)
        experts.weight_gradient(left_PF, rows, sizes_E, self[name], only)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The part [E,F,H] that is the gradient of the matrix w1, w2 or v1, or [E,2F,H] that of WeightLayout.pairs, to be written."""
        if name == "pairs":
            return self._layout.pairs(self._parameter("w1"))
        if self._layout is MEGABLOCKS:
            return self._parameter(name)
        layout = self._layout
        if name == "w2":
            return self._parameter("w2").transpose(1, 2) if layout.down_transposed else self._parameter("w2")
        if layout.is_combined:
            made = self._parameter("w1")
            w1_EFH, _, v1_EFH = layout.matrices(made, made, None)
            assert v1_EFH is not None
            return w1_EFH if name == "w1" else v1_EFH
        return self._parameter(name).transpose(1, 2) if layout.up_transposed else self._parameter(name)

    def _parameter(self, name: str) -> torch.Tensor:
        if name not in self._made:
            shape, dtype, device = self._like[name]
            self._made[name] = torch.empty(shape, dtype=dtype, device=device)
        return self._made[name]

    def set_bias(self, name: str, gradient: torch.Tensor) -> None:
        """Keep the gradient of a bias: w2's [E,H]; w1's and v1's, each [E,F], or w1's [E,2F] of pairs."""
        self._biases[name] = gradient.to(self._like["w2" if name == "w2" else "w1"][1])

    def biases(self, scale: float = 1.0) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(w1's, w2's, v1's) times `scale`, in the layout of the parameters; None where none was kept."""
        of = {name: gradient if scale == 1 else gradient * scale for name, gradient in self._biases.items()}
        if self._layout.is_combined and "v1" in of:
            of["w1"] = self._layout.joined(of["w1"], of.pop("v1"))
        return of.get("w1"), of.get("w2"), of.get("v1")

    def tensors(self, scale: float = 1.0) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(dw1, dw2, dv1) times `scale`, in the layout of the parameters; None where no part was asked for."""
        made = self._made
        if scale != 1:
            for gradient in made.values():
                gradient.mul_(scale)
        return made.get("w1"), made.get("w2"), made.get("v1")
