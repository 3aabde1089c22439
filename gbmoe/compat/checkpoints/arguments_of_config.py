"""The Arguments with which a dMoE computes a model's layers: from config.json, and in a file of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gbmoe._atomic_files import one_line, read_json
from gbmoe._checks import dtype_name
from gbmoe.compat.checkpoints.layouts import EXPERT_BIAS, ROUTER_BIAS, SHARED_GATE
from gbmoe.compat.checkpoints.model_types import ACTIVATIONS, Condition, Field, When
from gbmoe.compat.checkpoints.models import CONDITIONS, MODEL_TYPES, WITH_TEXT_CONFIG
from gbmoe.compat.checkpoints.recognise import BrokenCheckpoint, Layer
from gbmoe.compat.checkpoints.refused import REFUSED
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.expert_parallel_options import FLAT_NAMES
from gbmoe.ops.activations import ClampedSilu

ARGUMENTS_FILE = "gbmoe_arguments.json"
# Activations by their names in the file: the function, and its Python expression.
_ACTIVATIONS: dict[str, tuple[Any, str]] = {
    "silu": (F.silu, "torch.nn.functional.silu"),
    "gelu": (F.gelu, "torch.nn.functional.gelu"),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), 'functools.partial(torch.nn.functional.gelu, approximate="tanh")'),
    "relu": (F.relu, "torch.nn.functional.relu"),
}
# Keys: the names in safetensors' headers.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
# Tensors that not every layer has, in words, and the fields of Arguments with which a dMoE has them.
_WITH = {EXPERT_BIAS: ("a bias for the choice of experts", "moe_router_enable_expert_bias"),
         ROUTER_BIAS: ("a bias of the router", "moe_router_linear_bias"),
         SHARED_GATE: ("a gate of the shared expert", "moe_shared_expert_gate")}
_FP16_BF16 = {"float16": (True, False), "bfloat16": (False, True), "float32": (False, False), "float64": (False, False)}


def read_arguments(path: str | os.PathLike, **changes: Any) -> Arguments:
    """The Arguments that convert_checkpoint wrote for a checkpoint.

    The file has what determines a layer's output: sizes, router, activation, shared expert, dtype. Everything else (device, weights
    of losses, parallelism, fp8_recipe) has its default.

    Args:
        path: the file, or a directory with gbmoe_arguments.json.
        changes: fields of Arguments that are added, or take the place of those in the file.

    Raises:
        OSError: where the file cannot be read.
        ValueError: where it is not such a file, naming the field; where the layer's dtype is float32 or float64, which Arguments
            take from torch.get_default_dtype(), and that is another one; and as Arguments.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "gbmoe_arguments.json")
        >>> _ = file.write_text('{"hidden_size": 8, "dtype": "bfloat16"}')
        >>> read_arguments(file, moe_loss_weight=0.01).bf16
        True
    """
    path = Path(path)
    path = path / ARGUMENTS_FILE if path.is_dir() else path
    values = read_json(path)
    known = {field.name for field in fields(Arguments)} - {"fp16", "bf16"} | {"dtype"} | FLAT_NAMES.keys()
    if not isinstance(values, dict) or not values.keys() <= known:
        odd = sorted(values.keys() - known) if isinstance(values, dict) else type(values).__name__
        raise ValueError(one_line(f"{path}: expected an object with fields of gbmoe.Arguments and dtype, got {odd}"))
    activation = _activation(values.get("activation_fn"))
    for name, choices, valid in (("activation_fn", (*_ACTIVATIONS, "clamped_silu with four numbers"), activation is not None),
                                 ("dtype", tuple(_FP16_BF16), isinstance(values.get("dtype"), str) and values["dtype"] in _FP16_BF16)):
        if not valid:
            raise ValueError(one_line(f"{path}: {name}: expected one of {', '.join(choices)}, got {values.get(name)!r}"))
    values["activation_fn"] = activation
    dtype = values.pop("dtype")
    if not {"fp16", "bf16"} & changes.keys():
        values["fp16"], values["bf16"] = _FP16_BF16[dtype]
        default = dtype_name(torch.get_default_dtype())
        if dtype in ("float32", "float64") and dtype != default:
            raise ValueError(f"{path}: dtype: expected torch.get_default_dtype(), {default}, or fp16 or bf16 among the changes,"
                             f" got {dtype}")
    return Arguments(**(values | changes))


def _activation(code: Any) -> Callable[..., torch.Tensor] | None:
    """The activation that the file means: a name, or ClampedSilu.code. None where it means none."""
    if not isinstance(code, str):
        return None
    if code in _ACTIVATIONS:
        return _ACTIVATIONS[code][0]
    name, *constants = code.split(" ")
    try:
        return ClampedSilu(*map(float, constants)) if name == "clamped_silu" and len(constants) == 4 else None
    except ValueError:
        return None


def as_source(values: Mapping[str, Any]) -> str:
    """The Python expression for the Arguments, from the values of Config.arguments."""
    fp16, bf16 = _FP16_BF16[values["dtype"]]
    written = {name: repr(value) for name, value in values.items() if name != "dtype"}
    code = values["activation_fn"]
    source = _ACTIVATIONS[code][1] if code in _ACTIVATIONS else f"gbmoe.{_activation(code)!r}"
    written |= {"activation_fn": source, "fp16": repr(fp16), "bf16": repr(bf16)}
    return f"gbmoe.Arguments({', '.join(f'{name}={value}' for name, value in written.items())})"


class Config:
    """A config.json: what it says about the MoE layers, which a dMoE can compute.

    Raises:
        BrokenCheckpoint: where it is not a model's configuration, or a size is not a number.
        ValueError: where no dMoE computes its layers, with the fields, their values and what would be needed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.values = _read(path)
        name = self.values.get("model_type")
        if not isinstance(name, str):
            raise BrokenCheckpoint(one_line(f"{path}: model_type: expected a name, got {name!r}"))
        self.name = name
        if name in WITH_TEXT_CONFIG:
            self._take_text_config(WITH_TEXT_CONFIG[name])
        if self.name in REFUSED:
            raise ValueError(f"{path}: model_type: {self.name!r} is refused: it needs {'; '.join(REFUSED[self.name])}")
        if self.name not in MODEL_TYPES:
            raise ValueError(one_line(f"{path}: model_type: expected one of {', '.join(MODEL_TYPES)}, got {self.name!r}: whether a"
                                      " dMoE computes its layers is not known (gbmoe.compat.checkpoints.to_megablocks and"
                                      " to_transformers convert a state dict without this check)"))
        self.model_type = MODEL_TYPES[self.name]
        self._refuse()
        kind = self.model_type
        self.hidden, self.ffn = (self._count(name) for name in ("hidden_size", kind.ffn))
        self.top_k, self.experts = (self._count(*names, lists=kind.lists) for names in (kind.top_k, kind.experts))
        self.shared_ffn: int | None = None
        if kind.shared_ffn:
            self.shared_ffn = self._count(kind.shared_ffn)
        elif kind.shared_experts:
            self.shared_ffn = self.ffn * self._count(kind.shared_experts, least=0) or None
        self.normalizes = kind.normalizes if isinstance(kind.normalizes, bool) else bool(self._field(kind.normalizes))
        self.others = self._others()
        if self.top_k > self.experts:
            raise BrokenCheckpoint(f"{path}: {kind.top_k[0]}: expected at most the number of experts, {self.experts},"
                                   f" got {self.top_k}")

    def arguments(self, layers: list[Layer]) -> dict[str, Any]:
        """The fields of Arguments that determine the output of these layers, as gbmoe_arguments.json has them.

        Raises:
            BrokenCheckpoint: where the layers have other sizes than config.json, or differ in their dtype.
            ValueError: where a dMoE has no parameters of the dtype.
        """
        dtype = layers[0].dtype
        for layer in layers:
            for what, got, expected, origin in (
                ("experts", layer.experts, self.experts, self.path),
                ("hidden size", layer.hidden, self.hidden, self.path),
                ("ffn hidden size", layer.ffn, self.ffn, self.path),
                ("hidden size of the shared expert", layer.shared_ffn, self.shared_ffn, self.path),
                ("experts with a gate", layer.gated, True, self.path),
                ("biases of the experts", layer.biased, bool(self.others.get("moe_expert_linear_bias")), self.path),
                *((what, other in layer.others, bool(self.others.get(argument)), self.path)
                  for other, (what, argument) in _WITH.items()),
                ("dtype of the experts", layer.dtype, dtype, "the first layer"),
            ):
                if got != expected:
                    raise BrokenCheckpoint(one_line(f"{layer.prefix or 'the layer'}: {what}: expected {expected}, as in {origin},"
                                                    f" got {got}"))
        if dtype not in _DTYPES:
            raise ValueError(f"{layers[0].prefix}experts: expected dtype {', '.join(_DTYPES)}, got {dtype}")
        values = {
            "hidden_size": self.hidden, "ffn_hidden_size": self.ffn, "moe_num_experts": self.experts, "moe_top_k": self.top_k,
            "moe_normalize_expert_weights": 1 if self.normalizes else None, "mlp_type": "glu",
            "activation_fn": self._activation_code(), "bias": False, "dtype": _DTYPES[str(dtype)], **self.others,
        }
        if self.shared_ffn is not None:
            values |= {"shared_expert": True, "shared_expert_hidden_size": self.shared_ffn}
        self._require_arguments(values)
        return values

    def require_loaded(self, experts: str) -> None:
        """Raise ValueError unless from_pretrained finds experts in this layout."""
        if experts not in self.model_type.loads:
            expected = " or ".join(map(repr, self.model_type.loads))
            raise ValueError(f"convert to transformers: experts: expected {expected}, got {experts!r}: under these names from_pretrained"
                             f" does not find the experts of {self.name}, and makes random ones")

    def _take_text_config(self, name: str) -> None:
        """Take the fields of the language model, a model type of its own, that is a part of the model."""
        nested = self.values.get("text_config") or {}
        if not isinstance(nested, dict):
            raise BrokenCheckpoint(one_line(f"{self.path}: text_config: expected an object, got {nested!r}"))
        self.name, self.values = name, {"quantization_config": self.values.get("quantization_config"), **nested}

    def _activation_code(self) -> str:
        fields_of_gate = self.model_type.clamped_silu
        if fields_of_gate is None:
            return ACTIVATIONS[self._field("hidden_act")]
        constants = [self._field(name) for name in fields_of_gate]
        try:
            alpha, limit = map(float, constants)
            return ClampedSilu(alpha, limit, limit, 1.0).code
        except (TypeError, ValueError):
            raise BrokenCheckpoint(one_line(f"{self.path}: {' and '.join(fields_of_gate)}: expected numbers, got {constants}")) from None

    def _refuse(self) -> None:
        activation = Condition("hidden_act", tuple(ACTIVATIONS), self.model_type.defaults["hidden_act"],
                               f"a name for it in {ARGUMENTS_FILE}")
        faults = []
        for condition in (*CONDITIONS, *self.model_type.conditions, *([] if self.model_type.clamped_silu else [activation])):
            value = self.values.get(condition.field, condition.default)
            if value not in condition.values and (condition.only_with is None or self._field(condition.only_with)):
                expected = " or ".join(map(repr, condition.values))
                faults.append(one_line(f"{condition.field}: expected {expected}, got {value!r}: it needs {condition.needs}"))
        if faults:
            raise ValueError("\n  ".join([f"{self.path}: a dMoE does not compute these layers of {self.name}:", *faults]))

    def _require_arguments(self, values: dict[str, Any]) -> None:
        """Raise BrokenCheckpoint for values that no layer can have, such as groups that do not divide the experts."""
        try:
            Arguments(**{name: value for name, value in values.items() if name != "dtype"} | {"activation_fn": F.silu, "device": "cpu"})
        except (TypeError, ValueError) as error:
            raise BrokenCheckpoint(one_line(f"{self.path}: {error}")) from None

    def _others(self) -> dict[str, Any]:
        """The model type's further arguments, except for those that are gbmoe's defaults."""
        default = {field.name: field.default for field in fields(Arguments)}
        values = {}
        for name, value in self.model_type.arguments.items():
            if isinstance(value, When):
                value = value.argument if self._field(value.field) == value.equals else default[name]
            if isinstance(value, Field):
                field, value = value.name, self._field(value.name)
                if value is None:  # the model fails with it, while an argument of None has a meaning of its own
                    raise BrokenCheckpoint(f"{self.path}: {field}: expected a value, got null")
            if value != default[name]:
                values[name] = value
        return values

    def _field(self, name: str) -> Any:
        return self.values.get(name, self.model_type.defaults.get(name))

    def _count(self, *names: str, least: int = 1, lists: bool = False) -> int:
        """The value of the field, or of one of its synonyms; with `lists` it may be a list with this value for each layer.

        Raises ValueError where layers have different values, and BrokenCheckpoint for a value that is no number.
        """
        values = [self.values[name] for name in names if name in self.values] or [self._field(names[0])]
        if lists:
            values = [one for value in values for one in (value if isinstance(value, list) and value else [value])]
        whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values)
        if whole and lists and len(set(values)) > 1:
            raise ValueError(one_line(f"{self.path}: {' and '.join(names)}: expected one number for all layers, got"
                                      f" {', '.join(map(str, sorted(set(values))))}: it needs Arguments for each layer"))
        if not whole or len(set(values)) > 1:
            raise BrokenCheckpoint(one_line(f"{self.path}: {' and '.join(names)}: expected an int of at least {least}, got"
                                            f" {', '.join(map(repr, values))}"))
        return values[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        # Not read_json: transformers writes Infinity for limits that a model does not have.
        values = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(one_line(f"{path}: not JSON: {error}")) from None
    if not isinstance(values, dict):
        raise BrokenCheckpoint(f"{path}: expected an object, got {type(values).__name__}")
    return values
