"""Starts ranks as processes of their own (gloo, on CPUs), some of which may die, and collects what the others return.
"""

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.forked_python import multiprocessing_with_it

LIMIT_SECONDS = 120
_CONTEXT = multiprocessing.get_context("spawn")


def join(rank: int, world: int, folder: Path, timeout: float) -> None:
    """Make the default group. Rank 0 hosts its store, as under init_process_group's env://."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        (folder / "writing").write_text(str(store.port))
        os.replace(folder / "writing", port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))


def _rank(worker, rank: int, world: int, folder: Path, timeout: float, arguments: tuple) -> None:
    torch.set_num_threads(1)
    join(rank, world, folder, timeout)
    torch.save(worker(rank, *arguments), folder / f"{rank}.pt")
    os._exit(0)  # without what the interpreter does at its end, which may wait for ranks that have ended


def run(worker, world: int, folder: Path, *arguments, timeout: float = 30.0, hangs: int | None = None) -> list:
    """What worker(rank, *arguments) returns on each rank, in processes with a default group of that timeout, within which they end where
    that is longer than LIMIT_SECONDS; None for ranks that ended without it, and for the one that hangs, which is killed when all others
    have ended."""
    processes = [_CONTEXT.Process(target=_rank, args=(worker, rank, world, folder, timeout, arguments)) for rank in range(world)]
    with multiprocessing_with_it():
        for process in processes:
            process.start()
    limit = max(LIMIT_SECONDS, timeout)
    until = time.monotonic() + limit
    for rank, process in enumerate(processes):
        if rank != hangs:
            process.join(max(0.0, until - time.monotonic()))
    left = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in left:
        processes[rank].kill()
        processes[rank].join()
    results = [folder / f"{rank}.pt" for rank in range(world)]
    found = [torch.load(path, weights_only=False) if path.exists() else None for path in results]
    assert not set(left) - {hangs}, f"ranks {left} did not end within {limit} s; what ranks found: {found}"
    return found
