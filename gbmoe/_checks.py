"""Argument errors that name the argument, what was expected and what came."""

from __future__ import annotations

import torch

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def require(condition: bool, operator: str, argument: str, expected: str, got: object, error: type[Exception] = ValueError) -> None:
    """Raise `error` ("operator: argument: expected ..., got ...") unless `condition` holds."""
    if not condition:
        raise error(f"{operator}: {argument}: expected {expected}, got {got}")


def require_tensor(value: object, operator: str, argument: str, *, rank: int | tuple[int, ...] | None = None,
                   dtypes: tuple[torch.dtype, ...] | None = None, device: torch.device | None = None) -> None:
    """Raise TypeError or ValueError unless `value` is a tensor of that rank, one of those dtypes and on that device."""
    require(isinstance(value, torch.Tensor), operator, argument, "a torch.Tensor", type(value).__name__, TypeError)
    if rank is not None:
        ranks = (rank,) if isinstance(rank, int) else rank
        require(value.dim() in ranks, operator, argument, f"{' or '.join(map(str, ranks))} dimensions", list(value.shape))
    if dtypes is not None:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        require(value.dtype in dtypes, operator, argument, f"dtype {names}", value.dtype, TypeError)
    if device is not None:
        require(value.device == device, operator, argument, f"device {device}", value.device)
