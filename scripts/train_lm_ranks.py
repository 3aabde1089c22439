"""The processes that train together under train_lm.py: what they exchange, and which rank has which experts.

With --expert-parallel each rank has a part of every layer's experts. checkpoint.pt holds all experts, so that the file does not
depend on the number of ranks, and can be resumed on any number of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gbmoe.parallel import release
from gbmoe.parallel.failures import guarded
from gbmoe.parallel.training import expert_parameters, expert_rows, other_parameters
from train_lm_files import InputError


def collectively(collective: Callable[[], object], what: str) -> None:
    """Call `collective`; if it fails, the error names the ranks that are missing (gbmoe.parallel.failures.CollectiveFailed)."""
    guarded(collective, None, what, whose="train_lm")


@dataclass(frozen=True)
class Ranks:
    """This process's rank among those that train together; a single process is rank 0 of 1."""

    rank: int
    world: int
    device: torch.device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.world > 1:
            collectively(lambda: dist.all_reduce(values), "a sum")
        return values

    def from_first(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        values = [value]
        if self.world > 1:
            collectively(lambda: dist.broadcast_object_list(values, src=0, device=self.device), "a broadcast")
        return values[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """If any rank raises InputError in this block, all ranks raise it after the block, so that none waits for one that has ended."""
        message = None
        try:
            yield
        except InputError as error:
            message = str(error)
        messages = [message]
        if self.world > 1:
            messages = [None] * self.world
            collectively(lambda: dist.all_gather_object(messages, message), "checking the input")
        message = next(filter(None, messages), None)
        if message:
            raise InputError(message)

    def average_gradients(self, model: torch.nn.Module, scaled: bool) -> None:
        """Average the gradients over the ranks in one all-reduce, except those of experts that only this rank has: they are averages
        already.

        If gradients are `scaled` and an expert's gradient overflowed on one rank, the other gradients become NaN on all ranks, so that
        all of them skip the step.

        DistributedDataParallel is not used, because it changes its buckets after its first step, and with them the order of the sums,
        so that a resumed run would differ in its last bits.
        """
        if self.world == 1:
            return
        gradients = [parameter.grad for parameter in other_parameters(model).values()]
        experts = [parameter.grad for parameter in expert_parameters(model).values()]
        # 0, or NaN where a gradient is not finite.
        overflow = 0 * torch.nn.utils.get_total_norm(experts) if scaled and experts else torch.zeros((), device=self.device)
        flat = torch.cat([*(g.flatten() for g in gradients), overflow.view(1)])
        *averages, overflow = (self.sum(flat) / self.world).split([*(g.numel() for g in gradients), 1])
        for g, average in zip(gradients, averages):
            g.copy_(average.view_as(g))
        if experts:
            gradients[0] += overflow

    def hold_same_weights(self, model: torch.nn.Module) -> bool:
        """Whether every rank's weights equal rank 0's, bit for bit, except those of experts that only one rank has."""
        if self.world == 1:
            return True
        shared = [parameter.detach().flatten() for parameter in other_parameters(model).values()]
        mine = torch.cat(shared)
        first = mine.clone()
        collectively(lambda: dist.broadcast(first, src=0), "comparing the weights")
        return int(self.sum(torch.tensor(int(not torch.equal(mine, first)), device=self.device))) == 0

    def parameters(self, model: torch.nn.Module) -> int:
        """The number of the model's parameters on all ranks; those that are the same on every rank count once."""
        own, shared = (sum(parameter.numel() for parameter in of(model).values()) for of in (expert_parameters, other_parameters))
        return self.world * own + shared


@contextlib.contextmanager
def joined_ranks(name: str, timeout_s: int) -> Iterator[Ranks]:
    """This process's rank, from torchrun's environment. With several processes their process group is open inside the block."""
    device, world = torch.device(name), int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world == 1:
        yield Ranks(0, 1, device)
        return
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s), device_id=device if cuda else None)
    refused = None
    try:
        yield Ranks(dist.get_rank(), world, device)
    except InputError as error:  # raised on all ranks (Ranks.together)
        refused = error
    # Not after another error, when the other ranks may wait in another collective. The barrier keeps all ranks until rank 0 has saved.
    collectively(dist.barrier, "the end")
    release()
    dist.destroy_process_group()
    if refused is not None:
        raise refused


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> tuple[dict, dict]:
    """State dicts of model and optimizer with all experts. All ranks must call it; those without `keep` get None instead of tensors.

    Tensors are gathered one after the other and moved to the CPU, so that all experts need not fit on a rank's device.
    """
    rows = expert_rows(model)
    names = [name for name, _ in model.named_parameters()]

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name in rows and tensor.dim():
            tensor = rows[name].gather(tensor).cpu()
        return tensor if keep else None

    weights = {name: whole(name, tensor) for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    moments = {index: {key: whole(names[index], tensor) for key, tensor in kept.items()} for index, kept in state["state"].items()}
    return weights, {**state, "state": moments}


def own_state(model: torch.nn.Module, weights: dict, optimizer_state: dict) -> tuple[dict, dict]:
    """This rank's part of state dicts of model and optimizer with all experts. They may hold anything, for which this may raise any
    error."""
    rows = expert_rows(model)
    names = [name for name, _ in model.named_parameters()]

    def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return rows[name].mine(tensor).clone() if name in rows and tensor.dim() else tensor  # a view would keep all experts in memory

    moments = {index: {key: own(names[index], tensor) for key, tensor in kept.items()}
               for index, kept in optimizer_state["state"].items()}
    return {name: own(name, tensor) for name, tensor in weights.items()}, {**optimizer_state, "state": moments}
