"""Functions around which torch.compile breaks its graph, by the names that they have where they are defined.

They are made at their first use: torch.compiler.disable imports torch._dynamo, which takes longer than gbmoe.
"""

from typing import Any

import torch

from gbmoe.parallel import exact_exchange, pass_agreement, peer_memory, separate_steps, shadowing
from gbmoe.parallel.peer_experts import peer_experts as _peer_experts  # its own name is what is asked for

# The function, and what to tell a user who asked for one graph.
_MADE_OF: dict[str, tuple[Any, str]] = {
    "peer_experts": (_peer_experts, "graphs hold no reads of other ranks' memory; expert_parallel_transport='exchange' can be compiled as"
                                    " one graph"),
    "unavailable": (peer_memory.unavailable, "ranks ask whether they can map each other's memory, of a layer that was made on another type"
                                             " of device; expert_parallel_transport='exchange' can be compiled as one graph"),
    "make_anchor": (pass_agreement.make_anchor, "a compiler makes no new tensor that requires a gradient"),
    "agree_to_exchange": (peer_memory.agree_to_exchange, "the hosts of ranks that map each other's memory meet"),
    "exact_experts_by_exchange": (exact_exchange.exact_experts_by_exchange,
                                  "the host cuts what travels to the numbers that it has received"),
    "dispatch": (separate_steps.dispatch, "the numbers of the steps that ranks take are Python's"),
    "combine": (separate_steps.combine, "the numbers of the steps that ranks take are Python's"),
    "shadowed_experts_by_exchange": (shadowing.shadowed_experts_by_exchange, "the host chooses the experts that get shadows"),
}


def __getattr__(name: str):
    if name not in _MADE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function, why = _MADE_OF[name]
    made = globals()[name] = torch.compiler.disable(function, reason=why)
    return made
