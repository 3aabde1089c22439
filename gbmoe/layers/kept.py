"""Kept: what the layers leave behind in a step for the auxiliary losses."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gbmoe._checks import require


class _Link:
    def __init__(self, older: _Link | None, item: Any, with_grad: bool):
        self.older, self.item, self.with_grad = older, item, with_grad


class _Chain:
    """One thread's items: its last link."""

    def __init__(self):
        self.last = _Link(None, None, True)


class _Chains(threading.local):
    """A chain for each thread that looks at it, and the list of them all, which the threads share."""

    def __init__(self, every: list[_Chain]):
        # Called in every thread that comes, with the same list.
        self.own, self.every = _Chain(), every
        every.append(self.own)


def _in_a_checkpoint() -> bool:
    """Asked while torch.compile traces: is this the function of a torch.utils.checkpoint, and of one alone?

    Of checkpoints in one another, and of torch's other functions of functions, what their insides keep does not get out.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        return tracer.description == "torch.utils.checkpoint.checkpoint" and tracer.parent.parent is None
    except (AttributeError, ImportError):  # a torch that names them otherwise: it breaks the graph, as at any side effect
        return False


# torch.compile calls it and does not trace it: the mark that torch.compiler.assume_constant_result leaves.
_in_a_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Kept:
    """An append-only list that threads append to, and that a compiled graph appends to without looking at what is in it.

    torch.compile guards the length of a list: layers that are compiled one by one would each get a graph of their own, until
    torch refuses more. Of a chain of objects a graph sees no more than the type of its end. Appending to a chain reads it and
    writes it, in a compiled graph without a lock: every thread has a chain that no other thread appends to.

    What runs while autograd computes gradients is a forward that torch.utils.checkpoint repeats, of which everything has been
    kept before: append does nothing then. Only where an eager checkpoint repeats a compiled graph, which cannot ask, may items
    come twice, the second time while backward runs: clear behind backward, or compile the checkpoint with what is in it.
    """

    def __init__(self):
        self._chains = _Chains([])

    def append(self, item: Any) -> None:
        """Keep one more item."""
        if not torch.compiler.is_dynamo_compiling():
            if torch._C._current_graph_task_id() == -1:
                self._append(item)
        elif _in_a_checkpoint():
            # Its function may have no side effects, but for those that are allowed: what is kept becomes one more result of
            # it, and what backward repeats is made of operators alone.
            torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(self._append, item)
        else:
            self._append(item)

    def _append(self, item: Any) -> None:
        own = self._chains.own
        own.last = _Link(own.last, item, torch.is_grad_enabled())

    def clear(self) -> None:
        """Forget them all, of all threads."""
        if torch.compiler.is_dynamo_compiling():
            for chain in self._chains.every:
                chain.last = _Link(None, None, True)
        else:
            self._chains = _Chains([])  # a thread in the midst of appending does so to the old ones

    def items(self) -> list[Any]:
        """What has been kept since the last clear, thread by thread, of each in the order in which it came."""
        return [link.item for link in self._links()]

    def require_gradients(self, operator: str) -> None:
        """Raise ValueError where gradients are on now and were off when an item was kept."""
        if torch.is_grad_enabled():
            require(all(link.with_grad for link in self._links()), operator, "what the layers kept in training",
                    "losses with gradients (under torch.utils.checkpoint: use_reentrant=False, because the reentrant one runs its"
                    " function without them; for the value alone: compute it under torch.no_grad())",
                    "some that were kept while gradients were off")

    def _links(self) -> list[_Link]:
        chains, links = self._chains, []
        for chain in (chains.own, *(chain for chain in chains.every if chain is not chains.own)):
            newest_first, link = [], chain.last
            while link.older is not None:
                newest_first.append(link)
                link = link.older
            links += newest_first[::-1]
        return links
