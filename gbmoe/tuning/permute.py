"""How the threads of the padded gather share a row, and how many CTAs share the sort of a plan."""

from __future__ import annotations

import functools

from gbmoe.tuning.device import Device

# Where a token's row is written to several slots, each thread copies two vectors (of 16 bytes, if these divide the row) of rows
# that have at most this many vectors, and four of longer rows (docs/notes/gather-write-streams.md). The number of
# multiprocessors does not matter for it.
SHORT_ROW = 256


@functools.cache
def most_chunks(device: Device) -> int:
    """In how many chunks a plan, and the row map of a mask, sort slots or tokens at most, with a CTA for each: 128 on an H200, so
    that all run at once. Every CTA reads the counts of all chunks, so that more chunks do not always take less time."""
    return max(1, int(device.tiles(128)))
