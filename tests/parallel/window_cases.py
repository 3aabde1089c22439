"""Cases of test_peer_experts.py: where ranks have more rows than there is room for, they compute them window after window, with the results
of one.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gbmoe import Float8BlockScaling
from gbmoe.parallel import arrival, peer_experts, peer_memory
from gbmoe.parallel.windows import Windows
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.parallel.peer_layers import CASES, OF_GPUS, Layer, case, device, of_gpus, synchronize

ROWS = 0.6


class Skewed(Layer):
    """Every slot, or every second one of a token's, names an expert of one rank."""

    def __init__(self, rank, world, tokens, to, every=1, **options):
        super().__init__(rank, world, tokens, **options)
        first = to % self.degree * self.local
        for ids_TK in self.ids:
            ids_TK[:, ::every] = first + ids_TK[:, ::every] % self.local


@contextlib.contextmanager
def small_rooms():
    """The room is a multiple of 16 rows, not of 1,024, and that for tokens is made anew. On a CPU new memory is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        peer_memory.release()
        patch.setattr(arrival, "_ROWS_TOGETHER", 16)
        torch.use_deterministic_algorithms(device(0).type == "cpu")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def further_rows(layer, **changes):
    """(what layer.run returns, the rows of each window after the first in forward)."""
    sizes, further = [], Windows.further

    def kept(*of):
        for window in further(*of):
            sizes.append(window[1])
            yield window

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Windows, "further", kept)
        exact_inputs.poison(layer.x[0].device)
        got = layer.run(**changes)
    return got, [int(sizes_E.sum()) for sizes_E in sizes[: len(sizes) // 2]]


@case
def rows_beyond_the_room_were_dropped(rank, world):
    """Whoever has them: all ranks, one, or one expert; where each token names an expert twice; with ranks that bring no tokens."""
    with small_rooms():
        for layer in (Layer(rank, world, [128, 110], experts=8, top_k=3),
                      Layer(rank, world, [120, 90], only_expert=3, dtype=torch.float32),
                      Skewed(rank, world, [90, 64], world - 1, experts=8, dtype=torch.float32),
                      Skewed(rank, world, [0, 100], 0, experts=8, top_k=3, glu=False),
                      Skewed(rank, world, [100, 0], world - 1, every=2, experts=8, weighted=False),
                      Layer(rank, world, [60, 50], experts=1, top_k=1), Layer(rank, world, [0, 0])):
            got, further = further_rows(layer, rows=ROWS)
            layer.check(got)
            slots, top_k = world * 128, layer.ids[0].size(1)  # a rank has room for 128 tokens
            room = -(-ROWS * 128 * top_k * layer.shards // 16) * 16
            assert len(further) == -(-slots * top_k // room) - 1 <= world / ROWS
            rows = sum(int((ids // layer.local == rank % layer.degree).sum()) for ids in layer.ids)
            assert any(further) == (rows > room) or room - top_k < rows <= room
            assert sum(further) >= rows - room


@case
def windows_without_rows_change_no_bit(rank, world):
    """Those of a step whose rows fit into the first one, which is the room of most steps."""
    with small_rooms():
        for options in (dict(), dict(dtype=torch.float32, glu=False), dict(weighted=False)):
            layer = Layer(rank, world, [128, 100], experts=8, **options)
            expected = layer.run()
            for rows in (1.5, world):
                got, further = further_rows(layer, rows=rows, gradient_scale=1.0)
                assert len(further) == -(-world // rows) - 1 and not any(further)
                layer.check(got)
                for name, tensor in expected.items():  # on GPUs the room decides about tiles, and these about splits of sums
                    assert torch.equal(got[name], tensor) or device(rank).type == "cuda", name


@case
def windows_give_the_same_bits_every_time_and_with_kernels_instead_of_copies(rank, world):
    with small_rooms():
        layer = Skewed(rank, world, [100, 120], 0)
        expected = layer.run(rows=ROWS)
        for ranks in (64, 1):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(peer_memory, "RANKS_WITH_COPY_ENGINES", ranks)
                for name, tensor in layer.run(rows=ROWS).items():
                    assert torch.equal(tensor, expected[name]), name


@case
def slots_of_windows_are_summed_by_their_owner(rank, world):
    """expert_parallel_exact excluded a bound, as dropped rows were not written."""
    with small_rooms():
        layer = Skewed(rank, world, [100, 120], world - 1, experts=8, top_k=3)
        got, further = further_rows(layer, rows=ROWS, exact=True)
        assert any(further) == (rank == world - 1)
        layer.check(got)


@case
def options_of_forward_hold_with_windows(rank, world):
    """Without gradients, with rows kept on some ranks, repeated by a checkpoint, with gradients that are scaled, and added to others."""
    with small_rooms():
        layer = Skewed(rank, world, [100, 120], 0)
        expected = layer.run(rows=ROWS)
        with torch.no_grad():
            assert torch.equal(layer.forward(layer.leaves(), rows=ROWS), expected["out"])
        call = functools.partial(peer_experts, activation="silu", engine="auto", where=layer.where(rows=ROWS))
        for wrapped in (functools.partial(call, keep_gathered_rows=rank == 0), functools.partial(checkpoint, call, use_reentrant=False)):
            leaves = layer.leaves()
            arguments = leaves["x"], layer.ids[rank], *(leaves[name] for name in ("weights", "w1", "w2", "v1"))
            for times in (1, 2)[: 1 if wrapped.func is checkpoint else 2]:
                wrapped(*arguments).backward(layer.grad[rank])
                for name, leaf in leaves.items():
                    assert torch.equal(leaf.grad, times * expected[name]), name
        for scale in (0.5, 0.3):
            for name, tensor in layer.run(rows=ROWS, gradient_scale=scale).items():
                if name not in ("w1", "w2", "v1"):
                    assert torch.equal(tensor, expected[name]), name
                else:
                    torch.testing.assert_close(tensor, expected[name] * scale)


@case
def a_rank_whose_experts_are_frozen_recomputes_its_windows(rank, world):
    """It asked no copy engine for the rows of tokens."""
    with small_rooms():
        layer = Skewed(rank, world, [100, 120], 0)
        expected, leaves = layer.run(rows=ROWS), layer.leaves()
        for name in ("w1", "w2", "v1") if rank == 0 else ("x", "weights"):
            leaves[name].requires_grad_(False)
        layer.forward(leaves, rows=ROWS).backward(layer.grad[rank])
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, expected[name]) if leaf.requires_grad else leaf.grad is None, name


@case
def float8_takes_windows(rank, world):
    """Whether forward keeps weights in float8 for the first of them or not. Where they do not share a k-block they have the bits of one."""
    with small_rooms():
        layer = Skewed(rank, world, [100, 120], 0)
        results = []
        for rows, keeps in ((world, False), (ROWS, False), (ROWS, True)):
            leaves = layer.leaves()
            out = peer_experts(leaves["x"], layer.ids[rank], *(leaves[name] for name in ("weights", "w1", "w2", "v1")), "silu",
                               Float8BlockScaling().engine, layer.where(rows=rows), keep_weights=keeps)
            out.backward(layer.grad[rank])
            results.append({"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
        for name, tensor in results[0].items():
            assert torch.equal(results[1][name], results[2][name]), name
            torch.testing.assert_close(results[1][name], tensor, rtol=0.02, atol=0.02 * float(tensor.abs().max()))


@of_gpus
def one_graph_computes_any_skew(rank, world):
    """Captured once, where all rows fit into the first window."""
    with small_rooms():
        of = functools.partial(dict, experts=8, hidden=128, ffn=256, top_k=2)
        layer = Layer(rank, world, [512, 512], **of())
        where = layer.where(rows=1.2)
        leaves = [t.clone().requires_grad_() for t in (layer.x[rank], layer.weights[rank], *(layer.mine(w) for w in layer.w))]
        ids, grad = layer.ids[rank].clone(), layer.grad[rank].clone()

        def step():
            for leaf in leaves:
                leaf.grad = None
            x, weights, *w = leaves
            out = peer_experts(x, ids, weights, *w, "silu", "hopper", where)
            out.backward(grad)
            return out

        step()
        with cuda_graphs.no_host_wait():
            step()
        graph, out = cuda_graphs.captured(step)
        others = [Layer(rank, world, [512], only_expert=world - 1, **of(seed=5)), Layer(rank, world, [512], **of(seed=3))]
        others += [Skewed(rank, world, [512], to, every, **of(seed=to)) for to in (0, world - 1) for every in (1, 2)]
        for other in others:
            with torch.no_grad():
                for leaf, new in zip(leaves, (other.x[rank], other.weights[rank], *(other.mine(w) for w in other.w))):
                    leaf.copy_(new)
                ids.copy_(other.ids[rank])
                grad.copy_(other.grad[rank])
            exact_inputs.poison(device(rank))
            graph.replay()
            synchronize()
            names = ("x", "weights", "w1", "w2", "v1")
            other.check({"out": out.detach(), **{name: leaf.grad for name, leaf in zip(names, leaves)}})


# Two processes on a CPU do in these what four would.
LONG = tuple(name for name in CASES if CASES[name].__module__ == __name__ and name not in {*OF_GPUS, "rows_beyond_the_room_were_dropped"})
