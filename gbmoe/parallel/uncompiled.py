"""Functions around which a compiler breaks its graph. A module of their own, because torch.compiler.disable imports torch._dynamo, which
takes longer than gbmoe: only a trace imports it."""

import torch

from gbmoe.parallel import peer_experts as _peer_experts

peer_experts = torch.compiler.disable(_peer_experts, reason="graphs hold no reads of other ranks' memory; expert_parallel_transport"
                                      "='exchange' can be compiled as one graph")
