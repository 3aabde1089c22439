"""The host's wait for numbers that depend on all ranks: a rank that hangs is named before the group's timeout."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gbmoe.parallel import failures, host_copy
from tests.forked_python import spawn

TIMEOUT = 6


def hanging(rank, store, folder):
    failures.ROLL_CALL_SECONDS = 1.0
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=TIMEOUT))
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(TIMEOUT)
        return
    try:
        failures.wait_for_ranks(lambda: False, None)
    except failures.CollectiveFailed as error:
        torch.save((str(error), time.monotonic() - start), folder / f"{rank}.pt")


def test_a_rank_that_hangs_is_named_before_the_timeout(tmp_path):
    spawn(hanging, (tmp_path / "store", tmp_path), nprocs=3)
    for rank in (0, 2):
        error, seconds = torch.load(tmp_path / f"{rank}.pt")
        assert error == (f"expert parallelism: exchange with ranks 0, 1, 2 of the group (this is rank {rank}; rank 1 did not report it,"
                         " and may have died or hang) failed: no answer within 4 s")
        assert seconds < TIMEOUT


@pytest.mark.parametrize("timeout, limit", [(600, 590), (20, 10), (4, 2)])
def test_the_wait_ends_so_early_that_ranks_can_still_be_asked(monkeypatch, timeout, limit):
    now = [0.0]
    monkeypatch.setattr(failures, "timeout_of", lambda group: timeout)
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(failures.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 0.5))
    monkeypatch.setattr(failures, "failure", lambda group, why: RuntimeError(why))
    asked = []

    def there():
        asked.append(now[0])
        now[0] += 0.5
        return False

    with pytest.raises(RuntimeError, match=f"no answer within {limit} s"):
        failures.wait_for_ranks(there, None)
    assert limit - 1 < asked[-1] <= limit + 1


def test_a_short_wait_asked_torch_for_the_groups_timeout(monkeypatch):
    def timeout_of(group):
        raise AssertionError("a wait that has just begun needs no limit, which torch takes longer to tell than a few kernels take")

    monkeypatch.setattr(failures, "timeout_of", timeout_of)
    answers = iter([False, True])
    failures.wait_for_ranks(lambda: next(answers), None)
    assert next(answers, None) is None


def test_numbers_on_the_cpu_are_not_waited_for():
    numbers = torch.arange(3)
    assert torch.equal(host_copy.to_host(numbers, None), numbers)
