"""Ranks that map memory and do not come, or come late: they are named, and those that give up waiting go on with them later.

The ranks are processes on the CPU that map files (gbmoe.testing.mapped_files).
"""

import re
import time

import pytest
import torch
import torch.distributed as dist

from gbmoe.parallel import failures, peer_memory
from gbmoe.testing import mapped_files
from tests.parallel import test_peer_agreement as agreement
from tests.parallel.processes import run

pytestmark = pytest.mark.xdist_group("mapped-files")

MISSING = re.compile(r"\(this is rank (\d+); ranks? ([\d, ]+) did not report it, and may have died or hang\) failed: ")


def begin(world):
    agreement.WORLD, agreement.DEVICE_TYPE = world, "cpu"
    peer_memory.MAPPERS["cpu"] = lambda: mapped_files


def missing(function):
    """The ranks that the error names."""
    try:
        function()
    except failures.CollectiveFailed as error:
        found = MISSING.search(str(error))
        return [int(rank) for rank in found[2].split(", ")] if found else str(error)


def hangs_before(rank, what):
    """Rank 1 hangs before its first call, before one for which the memory grows, in backward, or while others recover."""
    failures.ROLL_CALL_SECONDS = 1.0
    begin(4)
    layer = agreement.make()
    x, ids, weights, grad = agreement.mine(rank, (9, 14, 5, 0))
    many = agreement.mine(rank, (300, 200, 700, 1))[:3]
    if what != "first call":
        out = agreement.call(layer, x.requires_grad_(), ids, weights)
    if rank == 1:
        time.sleep(1000)
    if what == "backward":
        return missing(lambda: out.backward(grad))
    if what == "recovery":
        memory = peer_memory.of_group(None, torch.device("cpu"))
        time.sleep(0.5 if rank == 0 else 2.0)  # all have ended the pass before
        if rank == 0:
            memory.board.fail(RuntimeError("as if it had left a pass early"))
        if rank > 1:
            with pytest.raises(failures.CollectiveFailed, match="rank 0 ended a pass early: RuntimeError: as if"):
                agreement.call(layer, x, ids, weights)
    return missing(lambda: agreement.call(layer, *(many if what == "growth" else (x, ids, weights))))


@pytest.mark.parametrize("what", ["first call", "growth", "backward", "recovery"])
def test_a_rank_that_hangs_before_a_pass_was_not_named(tmp_path, what):
    """Where there was no room yet, or too little, the host waited without an end for it."""
    results = run(hangs_before, 4, tmp_path, what, timeout=6.0, hangs=1)
    assert results[0] == results[2] == results[3] == [1]


def is_late(rank):
    """The last rank is late by more than the others wait. They catch the error, and go on with the next batch; the late rank leaves out the
    batch that they lost."""
    begin(4)
    layer, said = agreement.make(), []
    batches = [(9, 14, 5, 0), (3, 4, 5, 6), (6, 0, 7, 1), (40, 1, 2, 3)]
    agreement.step(layer, rank, batches[0])
    if rank == 3:
        time.sleep(9)
    for seed, batch in enumerate(batches):
        if rank == 3 and seed == 0:
            continue
        try:
            agreement.compare(agreement.step(layer, rank, batch, seed=seed), agreement.expected(rank, batch, seed=seed))
            said.append("right")
        except failures.CollectiveFailed as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_a_rank_that_comes_late_paired_with_another_pass(tmp_path):
    *others, late = run(is_late, 4, tmp_path, timeout=12.0)
    assert late == ["right"] * 3
    for said in others:
        assert said[1:] == late and "no answer within" in said[0]


def test_the_page_keeps_texts_and_failures_apart(tmp_path):
    results = run(one_fails, 2, tmp_path)
    assert results[0] == [None, None]
    assert re.match("expert parallelism over mapped memory: rank 0 ended a pass early: RuntimeError: why", results[1][0]), results[1]
    assert results[1][1] is None  # it is told once


def one_fails(rank):
    begin(2)
    board = peer_memory.of_group(None, torch.device("cpu")).board if peer_memory.unavailable(None, torch.device("cpu")) is None else None
    board.begins(1, 5, "a text of " + "many " * 2000 + "words")
    assert board.meet(rank + 10) == [10, 11] and board.meet(rank + 20) == [20, 21]
    assert board.texts()[1 - rank].startswith("a text of many") and not board.differ()
    if rank == 0:
        board.fail(RuntimeError("why"))
    dist.barrier()
    said = []
    for _ in range(2):
        try:
            board.check()
            said.append(None)
        except failures.CollectiveFailed as error:
            said.append(str(error))
    assert board.recover(lambda: None) == 1 and not board.is_broken
    assert board.meet(rank) == [0, 1]
    return said


def test_a_rank_that_was_ahead_was_named_for_its_next_pass(tmp_path):
    """What ranks differ in was read from passes of different numbers, so that a rank stood with others that it did not agree with."""
    results = run(one_is_ahead, 2, tmp_path)
    assert results[0] == ["first pass of rank 0", "first pass of rank 1"] and results[1][1] == "second pass"


def one_is_ahead(rank):
    begin(2)
    assert peer_memory.unavailable(None, torch.device("cpu")) is None
    board = peer_memory.of_group(None, torch.device("cpu")).board
    board.begins(1, rank + 1, f"first pass of rank {rank}")
    dist.barrier()
    if rank == 1:
        board.begins(2, 9, "second pass")
    dist.barrier()
    return board.texts()
