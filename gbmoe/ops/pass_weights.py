"""The weights of a pass, of an operator's parameters and the code of their layout."""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe.engines.resolved import Resolved
from gbmoe.ops.expert_forward_backward import Biases, Weights
from gbmoe.weight_layout import WeightLayout


def is_paired(layout: str, engine: str | Resolved) -> bool:
    """Whether h and g are computed as one tensor of pairs. Recipes of float8 quantise gate and up apart."""
    return WeightLayout.of_code(layout).is_paired and (engine if isinstance(engine, str) else engine.name) not in engines.FLOAT8_ENGINES


def weights_of_pass(layout: str, engine: str | Resolved, w1: torch.Tensor, matrices: tuple, biases: tuple, **of_pass) -> Weights:
    """The weights of a pass, of the parameter w1 and the layout's matrices; biases are parameters, of w1, w2 and v1."""
    where = WeightLayout.of_code(layout)
    if is_paired(layout, engine):
        return Weights(where.pairs(w1), matrices[1], None, biases=Biases(*biases), paired=True, **of_pass)
    if all(bias is None for bias in biases):
        return Weights(*matrices, lies_in_pairs=where.is_paired, **of_pass)
    of_gate, of_up = where.biases(biases[0], biases[2])
    return Weights(*matrices, biases=Biases(of_gate, biases[1], of_up), lies_in_pairs=where.is_paired, **of_pass)
