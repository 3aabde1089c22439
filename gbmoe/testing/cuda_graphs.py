"""Steps that wait for nothing, and their CUDA graphs, as the tests and `gbmoe bench` capture them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

_T = TypeVar("_T")


def captured(call: Callable[[], _T], warm_up: int = 3) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture a call of `call`: returns (the graph, what the call returned, which a replay writes again).

    It is called `warm_up` times first, on a stream of its own, as torch asks for: what is chosen, compiled or reserved at a first call is
    no part of the graph.

    Raises:
        RuntimeError: from torch, where the call waits for the device.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@contextmanager
def no_host_wait() -> Iterator[None]:
    """In this context a wait of the host for the device raises RuntimeError, as far as torch knows of it; what was enqueued before is
    waited for first."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
