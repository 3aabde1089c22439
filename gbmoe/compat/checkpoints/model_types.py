"""How the MoE layers of a model type are described: what config.json's fields mean, and which layouts from_pretrained loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gbmoe.compat.checkpoints.layouts import Layout

# Activations: the names of config.json (hidden_act) to gbmoe's.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "relu": "relu"}


@dataclass(frozen=True)
class Condition:
    """A field with which a dMoE computes the layer only if it has one of these values."""
    field: str
    values: tuple[Any, ...]
    default: Any  # what a config.json without the field means
    needs: str  # what a dMoE lacks for other values
    only_with: str | None = None  # the field that must not be 0 for this one to have an effect


@dataclass(frozen=True)
class Field:
    """An argument that has the value of a field."""
    name: str


@dataclass(frozen=True)
class When:
    """An argument that is set only if a field has a value."""
    field: str
    equals: Any
    argument: Any  # a value or a Field


@dataclass(frozen=True)
class ModelType:
    """One model type. Its experts have a gate.

    `defaults` are transformers' values of the fields that a config.json leaves out.
    """
    experts: tuple[str, ...]  # the field with the number of experts, and its synonym in transformers' attribute_map
    ffn: str  # the field with an expert's width
    defaults: Mapping[str, Any]
    normalizes: bool | str  # whether the chosen experts' weights are divided by their sum: always, never, or as the field says
    loads: Mapping[str, Layout]  # the layouts of experts that from_pretrained loads, by the names of layouts.EXPERTS
    top_k: tuple[str, ...] = ("num_experts_per_tok",)  # the field with the number of a token's experts, and its synonym
    shared_experts: str | None = None  # the field with the number of shared experts, which are one GLU, as wide as so many experts
    shared_ffn: str | None = None  # the field with the width of a shared expert that every layer has
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further fields of gbmoe.Arguments: a value, a Field or a When
    conditions: tuple[Condition, ...] = ()
    clamped_silu: tuple[str, str] | None = None  # fields with alpha and limit of gpt-oss' gate, if the experts have that, not hidden_act
    lists: bool = False  # whether the numbers of experts may be lists, with a number for each layer
