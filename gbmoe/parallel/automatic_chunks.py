"""In how many chunks a rank's experts are computed where the caller leaves that to gbmoe: the number that the cost model finds fastest.

Between nodes rows of one chunk travel while another is computed, but a row travels once to every chunk that needs it. Inside a node
nothing overlaps, and there is one chunk. The speeds were measured on NVIDIA H200s (cost_model.Gpu and cost_model.Links); between nodes
they are assumed, and so is that trips and GEMMs overlap. On another GPU the speed of GEMMs is scaled by what its tensor cores do in a
cycle (gbmoe/tuning/device.py). Memory and links count as an H200's, as torch does not tell how fast these are.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gbmoe.parallel import cost_model, failures
from gbmoe.parallel.host_copy import to_host
from gbmoe.parallel.placement import Placement
from gbmoe.tuning.device import Device

# Of an H200, by the type of device: on any other there is one chunk.
SPEEDS = {"cuda": (cost_model.Gpu(), cost_model.Links())}

# What was chosen, by group: a layer must not change it between forward and the backward's recomputation, and ranks must agree.
_CHOSEN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, int]] = weakref.WeakKeyDictionary()


def choose(where: Placement, tokens: int, hidden: int, ffn: int, top_k: int, matrices: int, dtype: torch.dtype,
           device: torch.device) -> int:
    """The number of chunks for a layer of this shape in this group, the same on all ranks and in every later call.

    The first call for a shape is collective over the group, as forward is: it asks for the most tokens and the slowest GPU of any rank. A
    graph of torch.compile cannot ask, and takes one chunk where no call outside of a graph came before.

    Args:
        where: which rank holds which experts, and the group's nodes.
        tokens: of this rank.
        matrices: weights of an expert, 3 for a GLU and 2 for a plain MLP.
        dtype, device: of the rows.
    """
    if device.type not in SPEEDS or where.experts_per_rank == 1:
        return 1
    group: Any = dist.group.WORLD if where.group is None else where.group
    chosen = _CHOSEN.setdefault(group, {})
    key = (where.experts, where.experts_per_rank, hidden, ffn, top_k, matrices, device.type)  # all of them equal on all ranks
    if key not in chosen:
        if torch.compiler.is_compiling():
            return 1
        gpu, links = SPEEDS[device.type]
        # The most tokens, negative the slowest GEMMs of all ranks, whose GPUs may differ, and the bytes of the largest elements.
        most = torch.tensor([tokens, -int(Device.of(device).flops(gpu.flops)), dtype.itemsize], dtype=torch.int64, device=device)
        failures.guarded(lambda: dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group), group, "choosing a number of chunks")
        most_tokens, flops, itemsize = to_host(most, group).tolist()
        shape = cost_model.Shape(max(most_tokens, 1), hidden, ffn, where.experts, top_k, matrices, itemsize)
        links = replace(links, ranks_per_node=where.nodes.size if where.nodes is not None else _ranks_per_host(group))
        chosen[key] = cost_model.best_chunks(shape, replace(gpu, flops=-flops), links, where.world)
    return chosen[key]


def _ranks_per_host(group: dist.ProcessGroup) -> int:
    """How many of the group's ranks run on each host, of a group that is not divided into nodes; 1 where hosts have different numbers.
    Collective."""
    hosts: list[Any] = [None] * dist.get_world_size(group)
    failures.guarded(lambda: dist.all_gather_object(hosts, socket.gethostname(), group=group), group, "choosing a number of chunks")
    numbers = {hosts.count(host) for host in hosts}
    return numbers.pop() if len(numbers) == 1 else 1
