"""Kept: what the layers leave behind in a step for the auxiliary losses."""

from __future__ import annotations

from typing import Any


class _Link:
    def __init__(self, older: _Link | None, item: Any):
        self.older, self.item = older, item


class Kept:
    """An append-only list that a compiled graph appends to without looking at what is in it.

    torch.compile guards the length of a list: layers that are compiled one by one would each get a graph of their own, until
    torch refuses more. Of a chain of objects a graph sees no more than the type of its end.
    """

    def __init__(self):
        self.clear()

    def append(self, item: Any) -> None:
        """Keep one more item."""
        self._last = _Link(self._last, item)

    def clear(self) -> None:
        """Forget them all."""
        self._last = _Link(None, None)

    def items(self) -> list[Any]:
        """What has been kept since the last clear, in the order in which it came."""
        items, link = [], self._last
        while link.older is not None:
            items.append(link.item)
            link = link.older
        return items[::-1]
