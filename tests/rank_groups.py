"""What starts ranks, their default group, and what they found."""

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gbmoe.parallel import peer_memory
from gbmoe.testing import mapped_files
from tests.forked_python import spawn


def join(rank, world, store, device_type="cpu", **options):
    """Make the default group, of gloo or of NCCL, and return this rank's device."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                            **options)
    return device


def join_and_map_memory(rank, world, store, device_type):
    """The same for ranks that map each other's memory: on a CPU they map files."""
    peer_memory.BYTES_FOR_COPY_ENGINES = 0  # tests have few tokens, and copy engines are for many
    options = {"device_id": torch.device("cuda", rank)} if device_type == "cuda" else {}
    if device_type == "cpu":
        peer_memory.MAPPERS["cpu"] = lambda: mapped_files
    return join(rank, world, store, device_type, timeout=timedelta(seconds=60), **options)


def leave():
    """End the default group after all ranks have come here."""
    dist.barrier()
    dist.destroy_process_group()


def files_of_ranks(worker, world, folder, *arguments, device_type="cpu", map_location=None):
    """What each rank has saved in folder/RANK.pt in worker(rank, store, *arguments, folder)."""
    if device_type == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, this machine has {torch.cuda.device_count()}")
    spawn(worker, (folder / "store", *arguments, folder), nprocs=world, device=device_type)
    return [torch.load(folder / f"{rank}.pt", map_location=map_location, weights_only=False) for rank in range(world)]


def shared_by_ranks(worker, world, folder, *arguments, device_type="cpu", may_fail=False):
    """The dictionary that all ranks write to in worker(rank, store, *arguments, dictionary)."""
    if device_type == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, this machine has {torch.cuda.device_count()}")
    failures = (mp.ProcessExitedException, mp.ProcessRaisedException) if may_fail else ()
    with mp.Manager() as manager:
        shared = manager.dict()
        with contextlib.suppress(*failures):
            spawn(worker, (folder / "store", *arguments, shared), nprocs=world, device=device_type)
        return dict(shared)
