"""Matrices as tensors of their own, in memory as awkward as it may be."""

import torch


def scattered(stack: torch.Tensor, step: int = 16) -> list[torch.Tensor]:
    """The matrices of a stack [E,R,C] as tensors that share no order and no distance: one buffer of NaN has them at multiples of `step`
    bytes, the last expert's first, each further from the next than the one before. A kernel that reads next to a matrix reads NaN."""
    experts, size = stack.size(0), stack[0].numel()
    unit = step // stack.element_size()
    begins, begin = {}, unit
    for number, e in enumerate(reversed(range(experts))):
        begins[e] = begin
        begin += -(-size // unit) * unit + (number % 5 + 1) * unit
    buffer = torch.full((begin + unit,), float("nan"), dtype=stack.dtype, device=stack.device)
    tensors = [buffer[begins[e]:begins[e] + size].view(stack.shape[1:]) for e in range(experts)]
    for tensor, matrix in zip(tensors, stack):
        tensor.copy_(matrix)
    return tensors
