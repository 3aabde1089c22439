"""What starts ranks, their default group, and what they found.

Each rank on a GPU has one of its own, and a test of more ranks than there are GPUs is skipped. With GBMOE_TEST_SHARE_GPU=1 ranks share
the GPUs instead: each is a process, and the GPU runs one of them after the other, a few milliseconds each. A kernel that waits for another
rank's then takes that long, so this shows whether results are right, and nothing about time. NCCL takes no two ranks of one GPU, so their
groups are gloo's, which copies tensors to the host for a collective.
"""

import contextlib
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from gbmoe.parallel import peer_memory
from gbmoe.testing import mapped_files
from tests.forked_python import spawn

SHARES_GPUS = os.environ.get("GBMOE_TEST_SHARE_GPU") == "1"
TIMEOUT_SECONDS = 180 if SHARES_GPUS else 60  # after which a rank of a test has waited too long for another


def share_gpus(world):
    """Whether so many ranks have fewer GPUs than that."""
    return SHARES_GPUS and 0 < torch.cuda.device_count() < world


def device_of(rank, device_type):
    """The device of a rank: on a CPU there is one for all."""
    if device_type != "cuda":
        return torch.device(device_type)
    return torch.device("cuda", rank % torch.cuda.device_count() if SHARES_GPUS else rank)


def have_devices(device_type, world):
    """Whether so many ranks can be started."""
    return device_type != "cuda" or torch.cuda.device_count() >= world or share_gpus(world)


def skip_without_devices(device_type, world):
    """Skip a test of more ranks than have a GPU."""
    if not have_devices(device_type, world):
        pytest.skip(f"needs {world} GPUs, this machine has {torch.cuda.device_count()}; ranks share them with GBMOE_TEST_SHARE_GPU=1")


def join(rank, world, store, device_type="cpu", **options):
    """Make the default group, of gloo or of NCCL, and return this rank's device."""
    device, backend = device_of(rank, device_type), "gloo"
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        if share_gpus(world):
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch reads it when ranks map memory
            options = {"timeout": timedelta(seconds=TIMEOUT_SECONDS), **options}
        else:
            backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, **options)
    return device


def join_and_map_memory(rank, world, store, device_type):
    """The same for ranks that map each other's memory: on a CPU they map files."""
    peer_memory.BYTES_FOR_COPY_ENGINES = 0  # tests have few tokens, and copy engines are for many
    own_gpu = device_type == "cuda" and not share_gpus(world)
    options = {"device_id": device_of(rank, device_type)} if own_gpu else {}
    if device_type == "cpu":
        peer_memory.MAPPERS["cpu"] = lambda: mapped_files
    return join(rank, world, store, device_type, timeout=timedelta(seconds=TIMEOUT_SECONDS), **options)


def mesh_of_all(device_type):
    """A device mesh of the default group. init_device_mesh makes a group of NCCL for GPUs where that is gloo's."""
    return DeviceMesh.from_group(dist.group.WORLD, device_type)


def leave():
    """End the default group after all ranks have come here."""
    dist.barrier()
    dist.destroy_process_group()


def files_of_ranks(worker, world, folder, *arguments, device_type="cpu", map_location=None):
    """What each rank has saved in folder/RANK.pt in worker(rank, store, *arguments, folder)."""
    skip_without_devices(device_type, world)
    spawn(worker, (folder / "store", *arguments, folder), nprocs=world, device=device_type)
    return [torch.load(folder / f"{rank}.pt", map_location=map_location, weights_only=False) for rank in range(world)]


def shared_by_ranks(worker, world, folder, *arguments, device_type="cpu", may_fail=False):
    """The dictionary that all ranks write to in worker(rank, store, *arguments, dictionary)."""
    skip_without_devices(device_type, world)
    failures = (mp.ProcessExitedException, mp.ProcessRaisedException) if may_fail else ()
    with mp.Manager() as manager:
        shared = manager.dict()
        with contextlib.suppress(*failures):
            spawn(worker, (folder / "store", *arguments, shared), nprocs=world, device=device_type)
        return dict(shared)
