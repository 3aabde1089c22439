"""What must be known of an expert-parallel group: its ranks and its nodes."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gbmoe import _torch_names
from gbmoe._checks import require
from gbmoe.parallel import failures, roll_call


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a group whose ranks are numbered node by node, `size` ranks each.

    `inside` is the group of the ranks of this process's node; `across` the group of the ranks with its position in every node.
    """

    size: int
    count: int
    node: int
    inside: dist.ProcessGroup
    across: dist.ProcessGroup


# The nodes of each group, kept as long as the group lives: the key is weak, and the value does not refer to the group. The two process
# groups of a Nodes belong to torch.distributed; destroy_process_group() without arguments ends them together with all others.
_NODES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int | None, Nodes | None]] = weakref.WeakKeyDictionary()


def whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself; the default group for None. With it torch.distributed need not look for the default group in every call."""
    found: Any = dist.group.WORLD if group is None else group
    return found


def world_of(group: dist.ProcessGroup | None, operator: str = "Arguments", argument: str = "expert_parallel_group") -> int:
    """The number of ranks of a group (None: the default group).

    Raises:
        ValueError: where this rank is no member of the group. torch.distributed then counts -1 ranks, and its collectives do nothing.
    """
    if isinstance(group, dist.ProcessGroup):  # which only its members have
        return group.size()
    world = dist.get_world_size(group)
    require(world > 0, operator, argument, "a group of which this rank is a member", "a group of other ranks")
    return world


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank's number in a group of which it is a member (None: the default group)."""
    return group.rank() if isinstance(group, dist.ProcessGroup) else dist.get_rank(group)


def ranks_per_node(group: dist.ProcessGroup | None, asked: int | None) -> int | None:
    """Ranks of the group on each of its nodes where there are several nodes with several ranks each, else None.

    Args:
        group: None for the default group.
        asked: what the caller says it is. None takes LOCAL_WORLD_SIZE, which torchrun sets, provided that the group has equally many
            ranks of each node. Without it nothing is known of nodes, and all ranks count as equally near.

    Raises:
        ValueError: where `asked` does not divide the ranks of the group.
    """
    world = dist.get_world_size(group)
    if asked is not None:
        require(world % min(asked, world) == 0, "Arguments", "expert_parallel_ranks_per_node",
                f"a divisor of the group's {world} ranks", asked)
        return asked if 1 < asked < world else None
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or int(local) < 2 or world <= 2:
        return None
    nodes = [rank // int(local) for rank in dist.get_process_group_ranks(group)]
    size = nodes.count(nodes[0])
    regular = all(len(set(nodes[first : first + size])) == 1 for first in range(0, world, size))
    return size if regular and len(set(nodes)) * size == world and 1 < size < world else None


def nodes_of(group: dist.ProcessGroup | None, asked: int | None = None) -> Nodes | None:
    """The group's nodes, or None where it lies on one node or has one rank on each; `asked` is as in ranks_per_node.

    The first call for a group is collective: its ranks compare what each of them takes for its nodes, and make the process groups of
    the nodes. Every rank of the group, and no other, must make that call: layers do so at construction. The groups are made with
    use_local_synchronization, as the other ranks of the job take no part. A graph of torch.compile cannot ask: a group of which nothing
    is known yet has no nodes there.

    Raises:
        ValueError: where this rank is no member of the group; where `asked` does not divide its ranks; where the caller asks for nodes
            and their groups cannot be made.
    """
    group = whole(group)
    world = world_of(group)
    known = _NODES.setdefault(group, {})
    if asked not in known:
        if torch.compiler.is_compiling():
            return None
        size = ranks_per_node(group, asked)
        # Two ranks have no nodes, nor has a group whose caller says so: there is nothing to compare.
        may_have = world > 2 if asked is None else size is not None
        known[asked] = _make(group, size) if may_have and _can_be_made(group, asked, size) and size is not None else None
    return known[asked]


def _can_be_made(group: dist.ProcessGroup, asked: int | None, size: int | None) -> bool:
    """Whether the ranks can make the groups of nodes; False, with a warning, where they would wait for each other for ever. Collective.

    Ranks on nodes of different sizes have different LOCAL_WORLD_SIZE, and see different nodes. And torch.distributed names a group by how
    many groups the rank belongs to already: ranks that belong to different numbers of groups would look for the same group under
    different names. Raises ValueError where the caller asked for nodes.
    """
    from gbmoe.parallel.agreement import of_all_ranks_unless_alike  # which needs this module
    local = os.environ.get("LOCAL_WORLD_SIZE")
    each = of_all_ranks_unless_alike((size, _torch_names.number_of_process_groups(), local), group, "finding nodes")
    sizes, counts, locals_ = zip(*each) if each is not None else ((), (), ())
    if len(set(sizes)) <= 1 and (size is None or len(set(counts)) <= 1):
        return size is not None
    if len(set(sizes)) > 1:
        expected, which = "nodes of as many ranks each, by LOCAL_WORLD_SIZE", locals_
    else:
        expected = "ranks that all belong to the same number of process groups when the first layer is made, to make the groups of nodes"
        which = counts
    got = dict(zip(dist.get_process_group_ranks(group), which))
    require(asked is None, "Arguments", "expert_parallel_group", expected, got)
    warnings.warn(f"expert parallelism: rows will cross to another node once for each rank there: expected {expected}, got {got}",
                  RuntimeWarning, stacklevel=2)
    return False


def _make(group: dist.ProcessGroup, size: int) -> Nodes:
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    require(ranks == sorted(ranks), "Arguments", "expert_parallel_group", "ranks in ascending order, with several nodes", ranks)
    node, place = divmod(me, size)
    options: dict[str, Any] = dict(backend=dist.get_backend(group), timeout=failures.timeout_or_none(group), use_local_synchronization=True)
    # All ranks make the group inside the node first: two ranks that made the groups in different orders would wait for one another.
    inside, across = (failures.guarded(functools.partial(dist.new_group, members, **options), group, "making the groups of nodes")
                      for members in (ranks[node * size : (node + 1) * size], ranks[place::size]))
    for part in (inside, across):
        roll_call.make_part_of(part, group)
    return Nodes(size, len(ranks) // size, node, inside, across)
