"""A rank that dies or hangs is named by all others, and no other rank is: in every pass, with nodes and without, once and again."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gbmoe.parallel import failures, training
from tests.parallel.processes import run
from tests.parallel.test_groups import make

pytestmark = pytest.mark.xdist_group("roll_call")  # many processes at a time

NODES = dict(expert_parallel_ranks_per_node=2)
MISSING = re.compile(r"\(this is rank (\d+); ranks? ([\d, ]+) did not report it, and may have died or hang\) failed: ")


def tokens():
    return torch.randn(5, 1, 16, requires_grad=True)


def failing(function):
    """The ranks that the error names."""
    try:
        function()
    except failures.CollectiveFailed as error:
        me, missing = MISSING.search(str(error)).groups()
        assert int(me) == dist.get_rank()
        return [int(rank) for rank in missing.split(", ")]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def raises():
    raise SystemExit(1)  # as an error that nobody catches, without its traceback


# What fails in turn, in the group of all ranks that are left: which of them die before it, and how; the layer's nodes. The survivors catch
# the failure, and go on with the next.
STEPS = (
    ("forward", {5: killed}, {}),
    ("clipping", {2: raises}, {}),
    ("forward", {7: killed}, NODES),
    ("construction", {6: killed}, {}),
    ("backward", {3: raises}, NODES),
    ("backward", {0: killed}, {}),  # which keeps the store
)


def acting(what, layer, group):
    """A function that does what is to fail."""
    out = layer(tokens())
    if what == "forward":
        return lambda: layer(tokens())
    if what == "backward":
        return lambda: out.sum().backward()
    if what == "clipping":
        out.sum().backward()
        return lambda: training.clip_grad_norm_(layer.parameters(), 1.0, group=group)
    return lambda: make(expert_parallel_group=group, moe_num_experts=dist.get_world_size(group))


def one_after_another(rank, folder):
    """What each step's error names on this rank, which may die on the way: in a file, as long as it lives."""
    failures.ROLL_CALL_SECONDS = 1.0
    alive, found = list(range(8)), []
    for what, dying, changes in STEPS:
        group = dist.new_group(alive, use_local_synchronization=True, timeout=timedelta(seconds=3))
        layer = make(expert_parallel_group=group, moe_num_experts=len(alive), **changes)
        act = acting(what, layer, group)
        if rank in dying:
            dying[rank]()
        found.append(failing(act))
        torch.save(found, folder / f"{rank}.pt")
        alive = [each for each in alive if each not in dying]
    return found


def in_a_ring(rank, nodes):
    """Which ranks the error names where all ranks end with it, and how long that takes them."""
    failures.ROLL_CALL_SECONDS = 1.0
    layer = make(moe_num_experts=8, **nodes)
    act = acting("clipping" if not nodes else "backward", layer, None)
    if rank == 5:
        killed()
    begin = time.monotonic()
    return failing(act), time.monotonic() - begin


def hanging(rank, how):
    """Rank 2 comes to no further collective; its process is alive, or stopped."""
    failures.ROLL_CALL_SECONDS = 1.0
    layer = make(moe_num_experts=4, **NODES)
    act = acting("forward", layer, None)
    if rank == 2:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
        return None
    return failing(act)


@pytest.mark.slow
def test_after_a_caught_failure_later_deaths_were_not_named(tmp_path):
    """What ranks had reported stayed in the store. And errors named healthy ranks, or none: those of a part of the group, with nodes."""
    results, alive = run(one_after_another, 8, tmp_path, tmp_path), set(range(8))
    for step, (what, dying, changes) in enumerate(STEPS):
        alive -= dying.keys()
        for rank in alive:
            assert results[rank][step] == list(dying), (what, changes, rank)


@pytest.mark.parametrize("nodes", [{}, NODES], ids=["one trip", "nodes"])
def test_a_rank_that_died_in_a_ring_was_named_with_healthy_ones(tmp_path, nodes):
    """The neighbours of rank 5 see it at once. The others see the neighbours end, one after the other, and rank 0 with the store."""
    results = run(in_a_ring, 8, tmp_path, nodes)
    for rank, result in enumerate(results):
        if rank != 5:
            missing, seconds = result
            assert missing == [5], rank
            assert seconds < 30  # the group's timeout


@pytest.mark.parametrize("how", [pytest.param("alive", marks=pytest.mark.slow), "stopped"])
def test_a_rank_that_hangs_is_named_where_its_neighbour_waits_in_another_part(tmp_path, how):
    """Ranks 0 and 2 exchange rows across nodes. Rank 1 waits for rank 0, and rank 3 for rank 1, inside and across."""
    results = run(hanging, 4, tmp_path, how, timeout=3.0, hangs=2)
    assert [results[rank] for rank in (0, 1, 3)] == [[2]] * 3
