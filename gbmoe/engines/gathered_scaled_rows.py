"""Rows that came to this process in e4m3, as engines take them.

Shape suffixes: T tokens, E experts, H hidden, P padded rows of the plan, Y bytes of a packed row.
"""

from __future__ import annotations

import torch

from gbmoe import launch
from gbmoe.engines.base import GatheredRows, device_sizes
from gbmoe.float8 import ScaledKBlocks, ScaledRows
from gbmoe.launch import packed_rows
from gbmoe.launch.alignment import aligned
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
        return self.once("tokens", lambda: launch.dequantize_rows(self._in_place(tokens_TY), self._dtype))

    @property
    def tokens_shape(self) -> torch.Size | None:
        return torch.Size((self._tokens_TY.size(0), self._hidden)) if self._tokens_TY is not None and self._of_tokens else None

    @property
    def given(self) -> torch.Tensor:
        """The packed tokens or rows."""
        given = self._rows_PY if self._tokens_TY is None else self._tokens_TY
        assert given is not None
        return given

    def new_empty(self, *shape: int) -> torch.Tensor:
        return self.given.new_empty(*shape, dtype=self._dtype)

    def rows_PH(self) -> torch.Tensor:
        if "tokens" in self._made:
            return super().rows_PH()
        if self._rows_PH is None:
            packed_PY, slots = self._least_to_read()
            scaled = self._in_place(packed_PY)
            self._rows_PH = (launch.dequantize_rows(scaled, self._dtype) if slots is None
                             else launch.dequantize_gathered(scaled, slots, self._dtype))
        return self._rows_PH

    def k_blocks(self, sizes_E: torch.Tensor, power_2_scale: bool) -> ScaledKBlocks:
        """The rows, rounded to the dtype, quantised along rows."""
        packed_PY, slots = self._least_to_read()
        sizes = device_sizes(sizes_E, packed_PY.device)
        return launch.requantize_k_blocks(self._in_place(packed_PY), slots, sizes, power_2_scale, self._dtype)

    def _in_place(self, packed_PY: torch.Tensor) -> ScaledRows:
        return packed_rows.in_place(aligned(packed_PY), self._hidden)

    def _least_to_read(self) -> tuple[torch.Tensor, SlotMap | None]:
        """(packed tokens, the slots to gather them by), or packed rows that are here already and None."""
        if self._rows_PY is not None and not self._of_tokens:
            return self._rows_PY, None
        assert self._tokens_TY is not None
        return self._tokens_TY, self.slots

    def forget(self) -> None:
        self._made.clear()
        self._rows_PH = None
        if self._tokens_TY is not None:
            self._rows_PY = None
