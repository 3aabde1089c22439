"""Ranks that share a GPU are started as the GPU's driver and NCCL need it, and only where they are asked for."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import rank_groups


@pytest.fixture
def joined(monkeypatch):
    """What init_process_group gets, where this machine says that it has one GPU; a function of the arguments of a join."""
    got = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: got.update(device=device))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: got.update(options, backend=backend))
    monkeypatch.setattr(rank_groups.peer_memory, "BYTES_FOR_COPY_ENGINES", 0)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0")

    def join(rank, world, maps):
        got.clear()
        returned = (rank_groups.join_and_map_memory if maps else rank_groups.join)(rank, world, "store", "cuda")
        assert returned == got["device"]
        return {name: got.get(name) for name in ("device", "backend", "timeout", "device_id")}

    return join


def overlapping():
    return os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"


@pytest.mark.parametrize("maps", [False, True])
def test_ranks_of_one_gpu_had_a_group_of_nccl_and_a_gpu_that_is_not_there(joined, monkeypatch, maps):
    monkeypatch.setattr(rank_groups, "SHARES_GPUS", True)
    timeout, first = timedelta(seconds=rank_groups.TIMEOUT_SECONDS), torch.device("cuda", 0)
    assert joined(3, 4, maps) == {"device": first, "backend": "gloo", "timeout": timeout, "device_id": None}
    assert overlapping() and rank_groups.have_devices("cuda", 4) and rank_groups.device_of(3, "cpu") == torch.device("cpu")


@pytest.mark.parametrize("shares", [False, True])
def test_ranks_with_a_gpu_each_share_none(joined, monkeypatch, shares):
    monkeypatch.setattr(rank_groups, "SHARES_GPUS", shares)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    timeout, last = timedelta(seconds=rank_groups.TIMEOUT_SECONDS), torch.device("cuda", 3)
    assert joined(3, 4, True) == {"device": last, "backend": "nccl", "timeout": timeout, "device_id": last}
    assert joined(3, 4, False) == {"device": last, "backend": "nccl", "timeout": None, "device_id": None}
    assert not overlapping()


def test_more_ranks_than_gpus_are_skipped_unless_they_may_share_them(joined, monkeypatch):
    monkeypatch.setattr(rank_groups, "SHARES_GPUS", False)
    assert rank_groups.have_devices("cuda", 1) and rank_groups.have_devices("cpu", 8)
    with pytest.raises(pytest.skip.Exception, match="needs 2 GPUs, this machine has 1; ranks share them with GBMOE_TEST_SHARE_GPU=1"):
        rank_groups.skip_without_devices("cuda", 2)
    monkeypatch.setattr(rank_groups, "SHARES_GPUS", True)
    rank_groups.skip_without_devices("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not rank_groups.have_devices("cuda", 2)
