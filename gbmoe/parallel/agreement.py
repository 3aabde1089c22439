"""What the ranks of a group compare with each other: values that have to be the same, and where they are not, which ranks have which."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.parallel import failures
from gbmoe.parallel.host_copy import to_host


def require_same_on_all_ranks(values: dict[str, Any], group: dist.ProcessGroup | None, operator: str = "Arguments",
                              argument: str = "expert_parallel_group") -> None:
    """Compare plain values over the ranks of a group, by their repr. Collective: all of its ranks must call it.

    Raises:
        ValueError: on every rank, of `argument` of `operator`; it names each value that differs, and which ranks have which.
    """
    said = {name: repr(value) for name, value in values.items()}
    each = of_all_ranks_unless_alike(said, group, "comparing the arguments")
    if each is not None:
        require(False, operator, argument, "the same arguments on all its ranks", "; ".join(differences(each, group)))


def differences(each: list[dict[str, str]], group: dist.ProcessGroup | None) -> list[str]:
    """A line for each value that differs between the ranks of a group, which says which ranks have which."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    differing = []
    for name in dict.fromkeys(name for theirs in each for name in theirs):
        having: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, each):
            having.setdefault(theirs.get(name, "unknown"), []).append(rank)
        if len(having) > 1:
            differing.append(f"{name} is " + ", ".join(f"{value} on {failures.named(ranks)}" for value, ranks in having.items()))
    return differing


def of_all_ranks_unless_alike(mine: Any, group: dist.ProcessGroup | None, what: str) -> list[Any] | None:
    """None where all ranks of the group bring the same, by its repr; otherwise what each of them brings. Collective.

    Ranks first compare digests, in one reduction of two elements, which costs the host as little with 4,096 ranks as with two. Only where
    these differ, which all ranks see, do they tell each other what they have.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    most = digests(mine, device)
    failures.guarded(lambda: dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group), group, what)
    most_of_all, minus_least = to_host(most, group).tolist()
    if most_of_all == -minus_least:
        return None
    each: list[Any] = [None] * dist.get_world_size(group)
    failures.guarded(lambda: dist.all_gather_object(each, mine, group=group), group, what)
    return each


def digests(mine: Any, device: torch.device) -> torch.Tensor:
    """int64 [2], a digest of `mine` by its repr, and minus it: where the maximum over all ranks is the same again, all bring the same."""
    digest = int.from_bytes(hashlib.blake2b(repr(mine).encode(), digest_size=7).digest(), "little")
    return torch.tensor([digest, -digest], dtype=torch.int64, device=device)
