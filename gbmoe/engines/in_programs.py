"""An engine whose methods run as programs (gbmoe/programs/), each one: for passes that are no operator of their own, because ranks meet
between their products. A pass over mapped memory of few tokens waits for the host otherwise.

Shape suffixes: E experts, H hidden, F ffn hidden, P rows, T tokens, K slots a token.
"""

from __future__ import annotations

from typing import Any

import torch

from gbmoe._define_operator import is_unseen
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.programs import Programs
from gbmoe.slot_map import SlotMap


def in_programs(engine: Engine, x_TH: torch.Tensor, *weights: torch.Tensor | None) -> Any:
    """`engine`, or what does the same in programs where it decides by the kind of call and nothing has to see its launches on the tokens'
    device, nor takes them over as a subclass of tensors does that `weights` are of; for the rest of one pass."""
    return InPrograms(engine) if engine.decides_by_kind and is_unseen(x_TH, *weights) else engine


class InPrograms:
    """All that `engine` is, but that the methods of a pass over rows that lie gathered in memory are programs."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def up(self, x: GatheredRows, w1_EFH, v1_EFH, sizes_E, activation, save):
        if not x.are_gathered:
            return self._engine.up(x, w1_EFH, v1_EFH, sizes_E, activation, save)
        result = _up([*_parts(x), w1_EFH, v1_EFH, sizes_E, self._engine, activation, save])
        x.forget()
        return result

    def down(self, a_PF, w2_EFH, sizes_E):
        return _down([a_PF, w2_EFH, sizes_E, self._engine])

    def down_backward(self, dz: GatheredRows, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation):
        if not dz.are_gathered:
            return self._engine.down_backward(dz, w2_EFH, sizes_E, h_PF, g_PF, weights_TK, activation)
        return _down_backward([*_parts(dz), w2_EFH, sizes_E, h_PF, g_PF, weights_TK, self._engine, activation])

    def up_backward(self, dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E):
        return _up_backward([dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E, self._engine])

    def weight_gradient(self, left_PF, rows: GatheredRows, sizes_E, out_EFH=None, only=False):
        if out_EFH is None or not rows.are_gathered:
            return self._engine.weight_gradient(left_PF, rows, sizes_E, out_EFH, only)
        _weight_gradient([left_PF, *_parts(rows), sizes_E, out_EFH, self._engine])
        return out_EFH

    def two_weight_gradients(self, left_PF, left2_PF, rows: GatheredRows, sizes_E, out_EFH, out2_EFH):
        if not rows.are_gathered:
            return self._engine.two_weight_gradients(left_PF, left2_PF, rows, sizes_E, out_EFH, out2_EFH)
        return _two_weight_gradients([left_PF, left2_PF, *_parts(rows), sizes_E, out_EFH, out2_EFH, self._engine])


def _parts(rows: GatheredRows) -> tuple[torch.Tensor, ...]:
    return rows.rows_PH(), rows.slots.row_of_slot_TK, rows.slots.slot_of_row_P


def _rows(rows_PH: torch.Tensor, row_of_slot_TK: torch.Tensor, slot_of_row_P: torch.Tensor) -> GatheredRows:
    return GatheredRows(None, SlotMap(row_of_slot_TK, slot_of_row_P), rows_PH)


# What is recorded, each a function of a list. Those that have rows to free after their first product empty it.


def _run_up(inputs: list):
    rows_PH, row_of_slot_TK, slot_of_row_P, w1_EFH, v1_EFH, sizes_E, engine, activation, save = inputs
    inputs.clear()
    x = _rows(rows_PH, row_of_slot_TK, slot_of_row_P)
    del rows_PH
    return engine.up(x, w1_EFH, v1_EFH, sizes_E, activation, save)


def _run_down(inputs: list):
    *operands, engine = inputs
    return engine.down(*operands)


def _run_down_backward(inputs: list):
    rows_PH, row_of_slot_TK, slot_of_row_P, *operands, engine, activation = inputs
    inputs.clear()
    return engine.down_backward(_rows(rows_PH, row_of_slot_TK, slot_of_row_P), *operands, activation)


def _run_up_backward(inputs: list):
    *operands, engine = inputs
    return engine.up_backward(*operands)


def _run_weight_gradient(inputs: list) -> None:
    left_PF, rows_PH, row_of_slot_TK, slot_of_row_P, sizes_E, out_EFH, engine = inputs
    engine.weight_gradient(left_PF, _rows(rows_PH, row_of_slot_TK, slot_of_row_P), sizes_E, out_EFH)


def _run_two_weight_gradients(inputs: list) -> None:
    left_PF, left2_PF, rows_PH, row_of_slot_TK, slot_of_row_P, *others, engine = inputs
    engine.two_weight_gradients(left_PF, left2_PF, _rows(rows_PH, row_of_slot_TK, slot_of_row_P), *others)


_up, _down = Programs(_run_up, "up"), Programs(_run_down, "down")
_down_backward, _up_backward = Programs(_run_down_backward, "down_backward"), Programs(_run_up_backward, "up_backward")
_weight_gradient = Programs(_run_weight_gradient, "weight_gradient")
_two_weight_gradients = Programs(_run_two_weight_gradients, "two_weight_gradients")
