"""Where the tensors of a layer lie in each layout: names, shapes and the places of matrices. Data, and views of it.

Shape suffixes: E experts, H hidden, F ffn hidden, N rows of a tensor with one or two matrices: F or 2F.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gbmoe.weight_layout import WeightLayout

# The tensors of a gbmoe.dMoE other than matrices of experts, with their dimensions.
ROUTER, ROUTER_BIAS, EXPERT_BIAS, SHARED_GATE = OTHERS = (
    "router.layer.weight", "router.layer.bias", "router.expert_bias", "shared_expert.expert_gate.weight")
_DIMENSIONS = {ROUTER: "E H", ROUTER_BIAS: "E", EXPERT_BIAS: "E", SHARED_GATE: "1 H"}


def pattern_of(name: str) -> str:
    """The regular expression for names with the number of an expert in the place of `{}`, which is its group."""
    return re.escape(name).replace(r"\{\}", r"(\d+)")


@dataclass(frozen=True)
class Matrices:
    """Where the matrices of experts lie, or of a shared expert, which is one of E = 1.

    Attributes:
        gate_up: the names of the gate and of up, or of the one tensor that has both. `{}` stands for the number of an expert: then each
            expert has a tensor of its own.
        down: the name of the matrix after the activation.
        plain: the name of the matrix before the activation where there is no gate; None if the layout has no such experts.
        places: where matrices lie in a tensor [E,...].
        stacked: how the experts' matrices are one tensor: "experts" [E,F,H], "rows" [E*F,H], or "no", [F,H] of a single expert.
        biases: the names of the biases of gate and up (or of the one tensor with both, in the order of the rows) and of the down matrix,
            [E,F] or [E,2F] and [E,H]; None if the layout has no names for them.
    """
    gate_up: tuple[str, ...]
    down: str
    plain: str | None = None
    places: WeightLayout = WeightLayout("gate_first", down_transposed=True)
    stacked: str = "experts"
    biases: tuple[tuple[str, ...], str] | None = None
    patterns: tuple[re.Pattern, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self):
        names = dict.fromkeys((*self.gate_up, self.down, *([self.plain] if self.plain else ()), *self.bias_names))
        object.__setattr__(self, "patterns", tuple(re.compile(pattern_of(name)) for name in names))

    @property
    def bias_names(self) -> tuple[str, ...]:
        """The names of all biases."""
        return () if self.biases is None else (*self.biases[0], self.biases[1])

    @property
    def one_each(self) -> bool:
        """Whether each expert has tensors of its own."""
        return "{}" in self.down

    def matches(self, name: str) -> re.Match | None:
        """Whether this is the name of one of the tensors; its group is the number of the expert if each has tensors of its own."""
        return next((match for pattern in self.patterns if (match := pattern.fullmatch(name))), None)

    def tensors(self, gated: bool, biased: bool = False) -> list[tuple[str, tuple[str, ...]]]:
        """The name of each tensor, and which of the matrices w1, v1 and w2 are in it, or of their biases, w1_bias and so on."""
        inward: tuple[tuple[str, ...], ...] = (("w1",),) if not gated else (("w1",), ("v1",)) if len(self.gate_up) == 2 else (("w1", "v1"),)
        of_up = self.gate_up if gated else (self.plain or self.gate_up[0],)
        tensors = [*zip(of_up, inward), (self.down, ("w2",))]
        if biased and self.biases is not None:
            tensors += [(name, tuple(f"{matrix}_bias" for matrix in of)) for name, of in zip(self.biases[0], inward)]
            tensors.append((self.biases[1], ("w2_bias",)))
        return tensors

    def shape(self, matrices: tuple[str, ...], experts: int, ffn: int, hidden: int) -> list[int]:
        """The shape of a tensor with these matrices, or biases."""
        if matrices[0].endswith("_bias"):
            return [experts, hidden if "w2_bias" in matrices else len(matrices) * ffn]
        rows, transposed = len(matrices) * ffn, self.places.down_transposed if "w2" in matrices else self.places.up_transposed
        if self.stacked == "rows":
            return [experts * rows, hidden]
        return [*([experts] if self.stacked == "experts" else []), *((hidden, rows) if transposed else (rows, hidden))]

    def sizes_of_down(self, shape: list[int], experts: int) -> tuple[int, int]:
        """(F, H) of a down matrix's shape; zeros where it has another number of dimensions."""
        if len(shape) != (3 if self.stacked == "experts" else 2):
            return 0, 0
        ffn, hidden = shape[:-3:-1] if self.places.down_transposed else shape[-2:]
        return ffn // max(1, experts) if self.stacked == "rows" else ffn, hidden

    def matrix(self, tensor: torch.Tensor, name: str, matrices: tuple[str, ...], experts: int) -> torch.Tensor:
        """The matrix w1, v1 or w2 of a tensor that has `matrices`, as a view [E,F,H]; a bias as [E,F] or [E,H]."""
        if name.endswith("_bias"):
            of_gate, of_up = self.places.biases(tensor, None) if len(matrices) == 2 else (tensor, None)
            bias = of_up if name == "v1_bias" and of_up is not None else of_gate
            assert bias is not None
            return bias
        if self.stacked == "rows":
            tensor = tensor.unflatten(0, (experts, -1))
        elif self.stacked == "no":
            tensor = tensor.unsqueeze(0)
        if len(matrices) == 2:
            w1_EFH, _, v1_EFH = self.places.matrices(tensor, tensor, None)
            assert v1_EFH is not None
            return w1_EFH if name == "w1" else v1_EFH
        transposed = self.places.down_transposed if name == "w2" else self.places.up_transposed
        return tensor.transpose(1, 2) if transposed else tensor


@dataclass(frozen=True)
class Layout:
    """The names of a layer's tensors, after the layer's prefix.

    `others` has the names that OTHERS have here, and their dimensions where they differ: "E*H" is a vector of so many elements.
    """
    experts: Matrices
    others: Mapping[str, str | tuple[str, str]]
    shared: Matrices | None = None

    def name(self, other: str) -> str:
        """What the tensor is called here."""
        value = self.others[other]
        return value if isinstance(value, str) else value[0]

    def shape(self, other: str, experts: int, hidden: int) -> list[int]:
        """The shape that the tensor has here."""
        value, sizes = self.others[other], {"E": experts, "H": hidden, "1": 1}
        dimensions = _DIMENSIONS[other] if isinstance(value, str) else value[1]
        return [math.prod(sizes[size] for size in dimension.split("*")) for dimension in dimensions.split()]


_TRANSPOSED_DOWN = WeightLayout(down_transposed=True)


def _linear_layers(gate: str, up: str, down: str, plain: bool = True) -> Matrices:
    """Matrices that are the weights of torch's linear layers of these names."""
    gate, up, down = (f"{name}.weight" for name in (gate, up, down))
    return Matrices((gate, up), down, up if plain else None, _TRANSPOSED_DOWN, stacked="no")


def _shared(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Matrices:
    return _linear_layers(f"{module}.{gate}", f"{module}.{up}", f"{module}.{down}")


MEGABLOCKS = Layout(
    Matrices(("experts.mlp.w1", "experts.mlp.v1"), "experts.mlp.w2", "experts.mlp.w1", WeightLayout(), "rows",
             (("experts.mlp.w1_bias", "experts.mlp.v1_bias"), "experts.mlp.w2_bias")),
    {other: other for other in OTHERS}, _shared("shared_expert"))

# The experts of transformers' models: all of a layer in one tensor, or a tensor for each.
EXPERTS = {
    "fused": Matrices(("experts.gate_up_proj",), "experts.down_proj", "experts.up_proj"),
    "gate_proj": _linear_layers("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj"),
    "w1": _linear_layers("experts.{}.w1", "experts.{}.w3", "experts.{}.w2", plain=False),
    "input_linear": Matrices(("input_linear.weight",), "output_linear.weight"),
}
# Llama-4's and gpt-oss' experts, under the names of the fused ones: [E,H,2F] and [E,F,H].
TRANSPOSED = Matrices(("experts.gate_up_proj",), "experts.down_proj", places=WeightLayout("gate_first", up_transposed=True))
TRANSPOSED_IN_TURNS = Matrices(
    ("experts.gate_up_proj",), "experts.down_proj", places=WeightLayout("interleaved", up_transposed=True),
    biases=(("experts.gate_up_proj_bias",), "experts.down_proj_bias"))
_MEGATRON = {ROUTER: "router.weight", ROUTER_BIAS: "router.bias", EXPERT_BIAS: "router.expert_bias",
             SHARED_GATE: "shared_experts.gate_weight"}
_MEGATRON_SHARED = Matrices(("shared_experts.linear_fc1.weight",), "shared_experts.linear_fc2.weight",
                            "shared_experts.linear_fc1.weight", stacked="no")


def _megatron(linear: str, number: str = "") -> Layout:
    up, down = (f"experts.{linear}{layer}.weight{number}" for layer in ("linear_fc1", "linear_fc2"))
    return Layout(Matrices((up,), down, up, stacked="no"), _MEGATRON, _MEGATRON_SHARED)


def _torchtitan(experts: str, suffixes: tuple[str, str, str], expert_bias: str) -> Layout:
    w1, w2, w3 = (f"{experts}.{name}{suffix}" for name, suffix in zip(("w1", "w2", "w3"), suffixes))
    return Layout(Matrices((w1, w3), w2, places=_TRANSPOSED_DOWN),
                  {ROUTER: "router.gate.weight", ROUTER_BIAS: "router.gate.bias", EXPERT_BIAS: expert_bias},
                  _shared("shared_experts", "w1", "w3", "w2"))


# Layouts of training frameworks, by the names that `to` has for them.
FRAMEWORKS = {
    "megatron_grouped": _megatron("", "{}"),
    "megatron_sequential": _megatron("local_experts.{}."),
    "torchtitan": _torchtitan("experts", ("", "", ""), "expert_bias"),
    "torchtitan_0.3": _torchtitan("routed_experts.inner_experts", ("_EFD", "_EDF", "_EFD"), "expert_bias_E"),
    "olmo_core": Layout(
        Matrices(("experts.mlp.w1", "experts.mlp.w3"), "experts.mlp.w2", places=WeightLayout(), stacked="rows"),
        {ROUTER: ("router.weight", "E*H"), EXPERT_BIAS: "router.score_bias"}, _shared("shared_mlp", "w1", "w3", "w2")),
}


Name = str | tuple[str, str]  # with the dimensions, where they are not those of a dMoE's tensor


def transformers_layouts(*experts: str, router: Name = "gate.weight", expert_bias: Name | None = None, shared: str | None = None,
                         shared_gate: Name | None = None, router_bias: Name | None = None, fused: Matrices = EXPERTS["fused"],
                         ) -> dict[str, Layout]:
    """A layout for each of these names in EXPERTS, with the other names in it; `shared` is the module of the shared expert. `fused` is
    where the model type has the fused experts."""
    names = {ROUTER: router, EXPERT_BIAS: expert_bias, SHARED_GATE: shared_gate, ROUTER_BIAS: router_bias}
    others = {other: name for other, name in names.items() if name}
    return {name: Layout(fused if name == "fused" else EXPERTS[name], others, _shared(shared) if shared else None) for name in experts}
