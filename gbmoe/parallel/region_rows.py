"""Rows of tokens in the memory that ranks map from each other: in the tokens' dtype or, with a recipe of float8, packed
(gbmoe/launch/packed_rows.py). All ranks have them in the same form.

Shape suffixes: T tokens of this rank, C the most tokens that a rank has room for, S tokens of all ranks, K slots a token, H hidden, P rows
of this rank, X elements of a row as it travels: H, or Y bytes.
"""

from __future__ import annotations

import torch

from gbmoe.engines.base import GatheredRows
from gbmoe.engines.gathered_scaled_rows import GatheredScaledRows
from gbmoe.float8 import Float8BlockScaling
from gbmoe.launch import packed_rows, peers
from gbmoe.launch.peers import PeerRegion
from gbmoe.parallel.regions import Regions
from gbmoe.slot_map import SlotMap


def region_of(regions: Regions, name: str, recipe: Float8BlockScaling | None) -> PeerRegion:
    """[C,X] in each rank's memory, of the region "x" or "grad"."""
    return regions.peers[name] if recipe is None else regions.packed(name)


def publish(x_TH: torch.Tensor, regions: Regions, name: str, rank: int, recipe: Float8BlockScaling | None) -> None:
    """Write this rank's rows to its own memory."""
    own_TX = region_of(regions, name, recipe).of_rank[rank][: x_TH.size(0)]
    if recipe is None:
        own_TX.copy_(x_TH)
    else:
        packed_rows.pack(x_TH, recipe.power_2_scale, own_TX)


def pull_ahead(regions: Regions, name: str, row_of_slot_SK: torch.Tensor, rows: int, like_TH: torch.Tensor, rank: int,
               recipe: Float8BlockScaling | None) -> torch.Tensor:
    """The first `rows` rows of this rank's experts as they travel, [P,X], read from every rank's memory."""
    width = like_TH.size(1) if recipe is None else packed_rows.bytes_of_row(like_TH.size(1))
    rows_PX = like_TH.new_empty(rows, width, dtype=like_TH.dtype if recipe is None else torch.uint8)
    peers.pull_rows(region_of(regions, name, recipe), rank, row_of_slot_SK, rows_PX)
    return rows_PX


def gathered(rows_PX: torch.Tensor, slots: SlotMap, like_TH: torch.Tensor) -> GatheredRows:
    """Rows that were pulled, as engines take them."""
    if rows_PX.dtype == like_TH.dtype:
        return GatheredRows(None, slots, rows_PX)
    return GatheredScaledRows(slots, like_TH.size(1), like_TH.dtype, rows_PY=rows_PX)


def gathered_tokens(x_SX: torch.Tensor, slots: SlotMap, like_TH: torch.Tensor) -> GatheredRows:
    """The same of all ranks' tokens, which are here."""
    if x_SX.dtype == like_TH.dtype:
        return GatheredRows(x_SX, slots)
    return GatheredScaledRows(slots, like_TH.size(1), like_TH.dtype, tokens_TY=x_SX)


def pull_rows(regions: Regions, name: str, slots: SlotMap, like_TH: torch.Tensor, rank: int, recipe: Float8BlockScaling | None = None,
              ) -> GatheredRows:
    """The rows of this rank's experts, read from every rank's memory."""
    return gathered(pull_ahead(regions, name, slots.row_of_slot_TK, slots.num_rows, like_TH, rank, recipe), slots, like_TH)
