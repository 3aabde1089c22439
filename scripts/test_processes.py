"""Prints in how many processes the tests run: one more than there are cores, and on a GPU no more than cores and than its memory is
enough for.

Tests wait for a sixth of their time, most of it for jobs of Slurm and for ranks that hang; another process computes meanwhile.
Between tests a process keeps at most 4 GiB of the first GPU's memory (tests/conftest.py), a few tests take up to 24 for a moment. With 13
for each process, which is six on an 80 GB card, all tests found what they need; when a process kept what it had once taken, some did not.
"""

import os

import torch

GIB_OF_A_PROCESS = 13


def processes(cores: int, gpu_bytes: int | None) -> int:
    """For this many cores, and a GPU with this much memory or none."""
    if gpu_bytes is None:
        return cores + 1
    return max(1, min(cores, gpu_bytes // (GIB_OF_A_PROCESS << 30)))


if __name__ == "__main__":
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    print(processes(len(os.sched_getaffinity(0)), memory))
