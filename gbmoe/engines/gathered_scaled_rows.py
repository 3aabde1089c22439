"""Rows that came to this process in e4m3, as engines take them.

Shape suffixes: T tokens, H hidden, P padded rows of the plan, Y bytes of a packed row.
"""

from __future__ import annotations

import torch

from gbmoe import launch
from gbmoe.engines.base import GatheredRows
from gbmoe.float8 import ScaledRows
from gbmoe.launch import packed_rows
from gbmoe.slot_map import SlotMap


class GatheredScaledRows(GatheredRows):
    """GatheredRows of packed tokens (gbmoe/launch/packed_rows.py), [T,Y] or, where they were gathered before, [P,Y].

    An engine of float8 takes the values and scales as they came. `tokens_TH` and `rows_PH` are what these stand for, rounded to `dtype`.
    """

    def __init__(self, slots: SlotMap, hidden: int, dtype: torch.dtype, *, tokens_TY: torch.Tensor | None = None,
                 rows_PY: torch.Tensor | None = None):
        # Each token is then multiplied by its scales once, and not once for each of its rows.
        self._of_tokens = tokens_TY is not None and tokens_TY.size(0) <= slots.num_rows
        self._tokens_TY, self._rows_PY, self._hidden, self._dtype = tokens_TY, rows_PY, hidden, dtype
        self.slots, self._rows_PH, self._made = slots, None, {}

    def scaled(self) -> ScaledRows:
        """The rows [P,H] in e4m3."""
        return self.once("scaled", lambda: packed_rows.unpack(self.packed_PY(), self._hidden))

    def packed_PY(self) -> torch.Tensor:
        """The same packed."""
        if self._rows_PY is None:
            assert self._tokens_TY is not None
            self._rows_PY, _ = launch.gather(self._tokens_TY, self.slots)
        return self._rows_PY

    @property
    def num_rows(self) -> int:
        return self.slots.num_rows if self._rows_PY is None else self._rows_PY.size(0)

    @property
    def tokens_TH(self) -> torch.Tensor | None:  # type: ignore[override]
        """None also where more tokens are here than rows."""
        tokens_TY = self._tokens_TY
        if tokens_TY is None or not self._of_tokens:
            return None
        return self.once("tokens", lambda: packed_rows.dequantize_rows(packed_rows.unpack(tokens_TY, self._hidden), self._dtype))

    def new_empty(self, *shape: int) -> torch.Tensor:
        like = self._rows_PY if self._tokens_TY is None else self._tokens_TY
        assert like is not None
        return like.new_empty(*shape, dtype=self._dtype)

    def rows_PH(self) -> torch.Tensor:
        if self._of_tokens:
            return super().rows_PH()
        if self._rows_PH is None:
            self._rows_PH = packed_rows.dequantize_rows(self.scaled(), self._dtype)
        return self._rows_PH

    def forget(self) -> None:
        self._made.clear()
        self._rows_PH = None
        if self._tokens_TY is not None:
            self._rows_PY = None
