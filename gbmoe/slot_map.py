"""SlotMap: which row each slot of each token has. Every gather and scatter takes one map instead of its four tensors.

Shape suffixes: T tokens, K slots a token, P rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotMap(NamedTuple):
    """The slots of each token and the rows they lie in, in both directions. RoutingPlan.slot_map is one; adapters make others.

    A map is dense or ragged. In a dense one every token has K slots, and the scalars of slot (t,j) (weight, scale, probability) are at
    [t,j]. In a ragged one token t has only the first counts_T[t] slots, and the scalars of slot (t,j) are in column columns_TK[t,j].
    Tensors are int32 and on one device; an entry outside its range counts as none.

        row_of_slot_TK     row of each slot, -1 where it has none
        slot_of_row_P      negative for a row without a slot, at least 0 for the others;
                           in a plan it is the slot itself
        columns_TK         of a ragged map: the column of each slot's scalars
        counts_T           of a ragged map: how many slots of each token are in use

    Operators' schemas are flat. The arguments that are a map's tensors stand next to one another, in the order of these fields, and are
    passed only as `*slots`: columns and counts, both int32, could otherwise be exchanged without an error.
    """

    row_of_slot_TK: torch.Tensor
    slot_of_row_P: torch.Tensor
    columns_TK: torch.Tensor | None = None
    counts_T: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.row_of_slot_TK.size(0)

    @property
    def top_k(self) -> int:
        """K: the slots of each token, or the most that one can have."""
        return self.row_of_slot_TK.size(1)

    @property
    def num_rows(self) -> int:
        """P."""
        return self.slot_of_row_P.size(0)
