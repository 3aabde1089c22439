"""What must be known of an expert-parallel group: its nodes, whether its ranks agree, and which of them are missing when it fails."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gbmoe import _torch_names
from gbmoe._checks import require
from gbmoe.parallel import roll_call

ROLL_CALL_SECONDS = 5.0  # how long a rank that saw a collective fail waits for the others to answer
_MOST_NAMED = 16  # groups of more ranks are named by their number


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
    require(ranks == sorted(ranks), "Arguments", "expert_parallel_group", "ranks in ascending order, beside several nodes", ranks)
    node, place = divmod(me, size)
    options: dict[str, Any] = dict(backend=dist.get_backend(group), timeout=_timeout(group), use_local_synchronization=True)
    # All ranks make the group inside the node first: two ranks that made the groups in different orders would wait for one another.
    inside, across = (guarded(functools.partial(dist.new_group, members, **options), group, "making the groups of nodes")
                      for members in (ranks[node * size : (node + 1) * size], ranks[place::size]))
    for part in (inside, across):
        roll_call.make_part_of(part, group)
    return Nodes(size, len(ranks) // size, node, inside, across)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The time after which the group's collectives fail; None, which is torch's default, where it cannot be told."""
    try:
        return group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """The seconds after which the collectives of a group fail (None: the default group)."""
    return (_timeout(whole(group)) or dist.default_pg_timeout).total_seconds()


def named(ranks: list[int]) -> str:
    """"rank 3" or "ranks 3, 5"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class CollectiveFailed(RuntimeError):
    """A collective of several ranks failed; the message names the ranks that are missing."""


def guarded(collective: Callable[[], Any], group: dist.ProcessGroup | None, what: str = "exchange",
            whose: str = "expert parallelism") -> Any:
    """Call `collective`. Where torch.distributed raises, raise CollectiveFailed, which names the group's ranks and the missing ones."""
    calls = roll_call.of_default_group(group)
    if calls is not None:
        calls.enter(group)
    try:
        return collective()
    except torch.OutOfMemoryError:  # of this rank alone
        raise
    except RuntimeError as error:  # torch.distributed's errors are subclasses of it
        raise failure(group, error, what, whose) from error
    finally:
        if calls is not None:
            calls.leave()


class Waiting:
    """`with Waiting(group):` this thread waits for other ranks of the group. Only inside may `failure` be called."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group, self._calls = group, roll_call.of_default_group(group)

    def __enter__(self) -> None:
        if self._calls is not None:
            self._calls.enter(self._group)

    def __exit__(self, *error: object) -> None:
        if self._calls is not None:
            self._calls.leave()


def failure(group: dist.ProcessGroup | None, why: object, what: str = "exchange", whose: str = "expert parallelism") -> CollectiveFailed:
    """The error of a rank that got no answer from the others of its group. Calls the roll of all ranks, for ROLL_CALL_SECONDS."""
    return CollectiveFailed(f"{whose}: {what} with {_who(group)} failed: {why}")


def _who(group: dist.ProcessGroup | None) -> str:
    try:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        calls = roll_call.of_default_group()
        missing = None if calls is None else calls.missing(ROLL_CALL_SECONDS)
    except Exception as error:  # after a failure torch.distributed's own calls may fail in any way
        return f"the ranks of the group (which of them are left cannot be told: {type(error).__name__})"
    who = named(ranks) if len(ranks) <= _MOST_NAMED else f"the {len(ranks)} ranks"
    if missing is None:
        said = "; which of them are left cannot be told, as the store of the process group does not answer"
    else:
        said = f"; {named(missing)} did not report it, and may have died or hang" if missing else ""
    return f"{who} of the group (this is rank {dist.get_rank()}{said})"
