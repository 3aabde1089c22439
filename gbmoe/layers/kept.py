"""What layers keep in forward for a call that comes after all of them, as the losses' is: from any thread, and from compiled graphs."""

from __future__ import annotations

import collections
import threading
import warnings
from typing import Any

import torch

from gbmoe import _torch_names
from gbmoe._checks import require


class Source:
    """Stands for the layer that keeps items: layers that are not the same have different ones. It holds nothing, so that no item keeps a
    layer's weights in memory. A copy of a layer gets its own."""


class _Link:
    def __init__(self, older: _Link | None, item: Any = None, source: object | None = None, loses_gradient: bool = False,
                 trace: Any = None):
        self.older, self.item, self.source = older, item, source
        self.loses_gradient, self.trace = loses_gradient, trace


class _Chain:
    """One thread's items, as a linked list that begins with the newest."""

    def __init__(self):
        self.last = _Link(None)


class _Chains(threading.local):
    """`own` is a chain for each thread; `every` is the list of all chains, which the threads share."""

    def __init__(self, every: list[_Chain]):
        # threading.local calls this in every thread that accesses the object, with the same list.
        self.own, self.every = _Chain(), every
        every.append(self.own)


_PILE = 128  # items of one layer without a clear, which is more than the micro-batches of a step


class Kept:
    """An append-only list that threads append to, and that a compiled graph can append to without depending on its contents.

    torch.compile guards the length of a Python list, so that layers which are compiled one by one would each get a graph of their own,
    until torch refuses more. Of a linked list a graph sees only the type of its newest link. Appending reads and writes that link, in a
    compiled graph without a lock, so every thread has a linked list that no other thread appends to.

    A forward that runs while autograd computes gradients is one that torch.utils.checkpoint repeats. Its items have been kept before,
    so append does nothing then. A compiled graph cannot check this: where an eager checkpoint repeats a compiled graph, its items are
    kept a second time during backward. In that case clear after backward, or compile the checkpoint with its contents.

    Nor does append do anything inside transforms of torch.func, whose tensors mean nothing outside. What is kept while torch.export,
    make_fx or torch.jit.trace traces is seen by the same trace alone.

    Args:
        pile: what to say, once, where eager forwards have left more items of one layer than a step has; None says nothing.
    """

    def __init__(self, pile: str | None = None):
        self._chains = _Chains([])
        self._pile, self._appended, self._look_at = pile, 0, _PILE
        self._warned = pile is None

    def append(self, item: Any, source: object | None = None) -> None:
        """Keep one more item, of the layer that `source` stands for."""
        if torch.compiler.is_dynamo_compiling():
            if _torch_names.is_transformed():
                return
            loses_gradient = not torch.is_grad_enabled() and _torch_names.begins_without_gradients()
            if _torch_names.is_in_a_checkpoint():
                # A checkpoint's function may have no side effects except those allowed here. The kept item becomes an additional result
                # of the function, and backward repeats its operators alone.
                _torch_names.with_side_effects(self._append, item, source, loses_gradient, None)
            else:
                self._append(item, source, loses_gradient, None)
        elif not _torch_names.is_in_backward() and not _torch_names.is_transformed():
            self._append(item, source, _torch_names.is_in_a_function(), _torch_names.current_trace())
            self._appended += 1
            if self._appended >= self._look_at:
                self._look_for_a_pile()

    def _append(self, item: Any, source: object | None, loses_gradient: bool, trace: Any) -> None:
        own = self._chains.own
        own.last = _Link(own.last, item, source, loses_gradient, trace)

    def _look_for_a_pile(self) -> None:
        if self._warned:
            return
        # Seldom enough that looking at every link takes nothing from the time of a step.
        links = self._every_link()
        self._look_at = self._appended + max(len(links), _PILE)
        counts = collections.Counter(id(link.source) for link in links if link.source is not None)
        if counts and max(counts.values()) >= _PILE:
            self._warned = True
            warnings.warn(f"{max(counts.values())} forwards of one layer in training have been kept for {self._pile}", stacklevel=2)

    def clear(self) -> None:
        """Forget the items of all threads."""
        if torch.compiler.is_dynamo_compiling():
            for chain in self._chains.every:
                chain.last = _Link(None)
        else:
            self._chains = _Chains([])  # a thread that is appending at this moment appends to the old chains
            self._appended, self._look_at = 0, _PILE

    def items(self) -> list[Any]:
        """The items kept since the last clear, thread by thread; those of a thread in the order in which they were kept."""
        return [link.item for link in self._links()]

    def is_any_source_repeated(self) -> bool:
        """Whether a layer has kept more than one item."""
        seen: list[object] = []
        for link in self._links():
            if link.source is not None:
                if any(link.source is other for other in seen):
                    return True
                seen.append(link.source)
        return False

    def rounds(self) -> int:
        """How many items each layer has kept, where all have kept as many; 1 elsewhere, and where some item's layer is not known."""
        seen: list[object] = []
        times: list[int] = []
        for link in self._links():
            if link.source is None:
                return 1
            place = next((i for i, other in enumerate(seen) if other is link.source), len(seen))
            if place == len(seen):
                seen.append(link.source)
                times.append(0)
            times[place] += 1
        return times[0] if times and min(times) == max(times) else 1

    def is_any_source_unknown(self) -> bool:
        """Whether it is not known of which layer some item is."""
        return any(link.source is None for link in self._links())

    def require_gradients(self, operator: str) -> None:
        """Raise ValueError if gradients are enabled now, and an item lost its gradient.

        An item that was kept while gradients were off, such as a frozen layer's under torch.no_grad, has none to lose. The reentrant
        torch.utils.checkpoint turns them off too, but its layers are trained. Where a graph of torch.compile begins without gradients
        the two cannot be told apart.
        """
        if torch.is_grad_enabled():
            require(not any(link.loses_gradient for link in self._links()), operator, "what the layers kept in training",
                    "losses with gradients (under torch.utils.checkpoint use use_reentrant=False, because the reentrant one runs its"
                    " function without gradients; for the value alone, compute it under torch.no_grad(); call a compiled layer that is"
                    " frozen in evaluation mode)", "some that were kept while gradients were off")

    def _links(self) -> list[_Link]:
        trace = None if torch.compiler.is_dynamo_compiling() else _torch_names.current_trace()
        return [link for link in self._every_link() if link.trace is trace]

    def _every_link(self) -> list[_Link]:
        chains, links = self._chains, []
        for chain in (chains.own, *(chain for chain in chains.every if chain is not chains.own)):
            newest_first, link = [], chain.last
            while link.older is not None:
                newest_first.append(link)
                link = link.older
            links += newest_first[::-1]
        return links
