"""What the engines do with weights in each layout: the table that `gbmoe info` prints, the same on every machine.

Shape suffixes: E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import torch

from gbmoe import engines
from gbmoe.ops.expert_path import of_weights
from gbmoe.weight_layout import WeightLayout

# The layouts that frameworks have, and whether their experts have biases.
LAYOUTS = {
    "w1, v1, w2 [E,F,H]": (WeightLayout(), False),
    "the same with biases": (WeightLayout(), True),
    "w1, v1 [E,F,H], w2 [E,H,F]": (WeightLayout(down_transposed=True), False),
    "[E,2F,H], gate first or up first": (WeightLayout("gate_first"), False),
    "[E,2F,H], gate first, w2 [E,H,F]": (WeightLayout("gate_first", down_transposed=True), False),
    "[E,2F,H], gate and up in turns": (WeightLayout("interleaved"), False),
    "[E,H,2F], gate first or up first": (WeightLayout("gate_first", up_transposed=True), False),
    "[E,H,2F], gate and up in turns": (WeightLayout("interleaved", up_transposed=True), False),
    "the same with biases (gpt-oss)": (WeightLayout("interleaved", up_transposed=True), True),
}
ENGINES = ("hopper", "tensor_core", "float8_block", "others")  # those that read weights in the same way are one
_EXPERTS, _FFN, _HIDDEN, _ROWS = 8, 64, 128, 8 * 1024


def layouts_by_engine() -> dict[str, dict[str, str]]:
    """For each layout and engine "in place" or "copied", and "fused" where forward's first product computes the activation too: of
    bfloat16, SwiGLU, rows in multiples of 16 bytes and many rows an expert. gbmoe.expert_path tells of given tensors."""
    instances = {"hopper": engines.ENGINES["hopper"], "tensor_core": engines.ENGINES["tensor_core"],
                 "float8_block": engines.FLOAT8_ENGINES["float8_block"][0], "others": engines.ENGINES["cublas_loop"]}
    return {name: {engine: _cell(instances[engine], *of) for engine in ENGINES} for name, of in LAYOUTS.items()}


def _cell(experts: engines.base.Engine, layout: WeightLayout, biased: bool) -> str:
    def weight(rows: int, transposed: bool) -> torch.Tensor:
        shape = (_HIDDEN, rows) if transposed else (rows, _HIDDEN)
        return torch.empty(_EXPERTS, *shape, dtype=torch.bfloat16, device="meta")

    w1 = weight(2 * _FFN if layout.is_combined else _FFN, layout.up_transposed)
    v1 = None if layout.is_combined else weight(_FFN, layout.up_transposed)
    reasons = list(of_weights(experts, layout, w1, weight(_FFN, layout.down_transposed), v1, "silu", _ROWS, biased, biased))
    copied, composed = (any(word in reason for reason in reasons) for word in ("copied", "kernel of its own"))
    return ("copied" if copied else "in place") + ("" if composed else ", fused")
