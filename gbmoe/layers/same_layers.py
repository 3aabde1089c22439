"""Whether all ranks whose tokens a loss counts together ran the same layers.

Whatever they know, all ranks take part in one reduction of two elements in each call, so that none is in another collective than the
others. The host looks at its result at once where nobody waits for that (on the CPU) and in the first call with these layers; later ones
look at the call before, whose result has arrived meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.parallel import failures, groups
from gbmoe.parallel.agreement import digests
from gbmoe.parallel.host_copy import HostCopy, to_host

_WHAT, _WHOSE = "comparing the layers", "the load-balancing loss"


class _Known:
    """What one group's ranks have agreed about, each with its digests on a device, to which sending them would be a wait; and what of the
    calls after that was not looked at yet."""

    def __init__(self) -> None:
        self.layers: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}
        self.sent: list[tuple[HostCopy, tuple[int, ...]]] = []


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, _Known] = weakref.WeakKeyDictionary()


def require_same_layers(experts: Sequence[int], device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError, on all ranks, unless all of them bring layers with these numbers of experts, in this order. Collective.

    On a GPU with layers that the ranks have agreed about before it is the next call that raises. While a CUDA graph is captured nothing is
    compared.

    Args:
        experts: of each layer.
        device: of the tensors that are to be summed.
        group: None for the default group.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    whole = groups.whole(group)
    known, mine = _OF_GROUP.setdefault(whole, _Known()), tuple(experts)
    while known.sent and (arrived := known.sent[0][0].if_there()) is not None:
        _, theirs = known.sent.pop(0)
        _check(arrived, theirs, whole, "in an earlier step, in which no host waited, ")
    agreed = known.layers.get((mine, device))
    own = digests(mine, device) if agreed is None else agreed
    most = own.clone()
    failures.guarded(lambda: dist.all_reduce(most, op=dist.ReduceOp.MAX, group=whole), whole, _WHAT, _WHOSE)
    if _is_free(device) or agreed is None:
        _check(to_host(most, whole), mine, whole)
        known.layers[mine, device] = own
    else:
        known.sent.append((HostCopy(most), mine))


def _is_free(device: torch.device) -> bool:
    """Whether the host has the result without a wait for the device."""
    return device.type != "cuda"


def _check(most: torch.Tensor, layers: tuple[int, ...], group: dist.ProcessGroup, when: str = "") -> None:
    of_all, minus_least = most.tolist()
    require(of_all == -minus_least, "batched_load_balancing_loss", "layers that ran in training",
            f"the same on all {dist.get_world_size(group)} ranks of the group, with the same numbers of experts in the same order",
            f"{when}{len(layers)} layers with {', '.join(map(str, layers))} experts on rank {dist.get_rank()}, and others on other ranks")
