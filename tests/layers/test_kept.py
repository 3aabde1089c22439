"""Kept: what is appended while threads, checkpoints and backward run."""

import sys
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from gbmoe.layers.kept import Kept


def in_threads(count, function):
    threads = [threading.Thread(target=function, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def hasty_threads():
    """The interpreter goes from thread to thread as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_lose_none_of_each_others_items(hasty_threads):
    kept = Kept()
    in_threads(8, lambda thread: [kept.append((thread, number)) for number in range(5000)])
    items = kept.items()
    assert len(items) == 8 * 5000
    for thread in range(8):
        assert [number for owner, number in items if owner == thread] == list(range(5000))


def test_threads_that_run_a_compiled_graph_lose_no_items(hasty_threads):
    torch.compiler.reset()
    kept = Kept()
    counter = CompileCounter()
    # Not with fullgraph: torch 2.13 counts the compiled frames of all threads in one place, and raises where another thread took one.
    compiled = torch.compile(lambda x: kept.append(x + 1), backend=counter)
    compiled(torch.zeros(2))
    assert counter.frame_count == 1
    in_threads(8, lambda thread: [compiled(torch.full((2,), float(thread))) for _ in range(500)])
    assert sorted(int(item[0]) for item in kept.items()) == sorted([1] + [thread + 1 for thread in range(8) for _ in range(500)])


def test_clear_forgets_the_items_of_every_thread():
    kept = Kept()
    kept.append(0)
    in_threads(3, kept.append)
    assert len(kept.items()) == 4
    kept.clear()
    assert kept.items() == []
    kept.append(5)
    assert kept.items() == [5]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_repeats_in_backward_is_not_kept_again(use_reentrant):
    kept = Kept()

    def function(x):
        y = x.exp()
        kept.append(y)
        return y.sin().cos()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert len(kept.items()) == 1
    kept.append(x)
    assert len(kept.items()) == 2
