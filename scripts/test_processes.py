"""Prints the number of processes for the tests: one more than there are cores; with a GPU at most one
for each core and no more than its memory suffices for.

Tests wait for a sixth of their time, most of it for jobs of Slurm and for ranks that hang; another process computes meanwhile.
Between tests a process keeps at most 4 GiB of the first GPU's memory (tests/conftest.py), a few tests take up to 24 for a moment. With 13
for each process, which is six on an 80 GB card, all tests found what they need.
"""

import os

import torch

GIB_OF_A_PROCESS = 13


def processes(cores: int, gpu_bytes: int | None) -> int:
    """The number of processes for so many cores, and a GPU with so much memory, or none."""
    if gpu_bytes is None:
        return cores + 1
    return max(1, min(cores, gpu_bytes // (GIB_OF_A_PROCESS << 30)))


if __name__ == "__main__":
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    print(processes(len(os.sched_getaffinity(0)), memory))
