"""Functions around which a compiler breaks its graph. They are made at their first use, which is in a trace: torch.compiler.disable imports
torch._dynamo, which takes longer than gbmoe."""

import torch

from gbmoe.parallel import peer_experts as _peer_experts


def __getattr__(name: str):
    if name != "peer_experts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    why = "graphs hold no reads of other ranks' memory; expert_parallel_transport='exchange' can be compiled as one graph"
    function = globals()[name] = torch.compiler.disable(_peer_experts, reason=why)
    return function
