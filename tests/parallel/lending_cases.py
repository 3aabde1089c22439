"""Cases of test_peer_experts.py: ranks with many rows lend experts to ranks with few, with the results of one process.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

import contextlib
import dataclasses
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from gbmoe import Float8BlockScaling, WeightGradientSink, WeightLayout
from gbmoe.engines.reference import Reference
from gbmoe.engines.resolved import Resolved
from gbmoe.launch import peers
from gbmoe.parallel import arrival, lent_experts, loans, peer_experts, peer_memory
from gbmoe.plain.plain_loans import Price
from gbmoe.separate_weights import SeparateWeights
from gbmoe.testing import exact_inputs
from tests.parallel.peer_layers import Layer, case, device, of_gpus, synchronize
from tests.parallel.window_cases import Skewed


class Popular(Layer):
    """Each token's first slot names the experts `to` in turn, and its others whatever they do."""

    def __init__(self, rank, world, tokens, to=(0,), **options):
        super().__init__(rank, world, tokens, **options)
        for ids_TK in self.ids:
            ids_TK[:, 0] = torch.tensor(to, device=device(rank)).repeat(ids_TK.size(0))[: ids_TK.size(0)]


@contextlib.contextmanager
def lending():
    """A loan costs nothing, as on a CPU. Gives a list, to which the loans of each forward are added."""
    made, read = [], loans.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loans, "price_in_rows", lambda *_: Price())
        patch.setattr(loans, "read", lambda *arguments: made.append(read(*arguments)) or made[-1])
        yield made


def poison(rank):
    """Nothing that a pass left in this rank's memory may be read by the next one. No other rank reads or writes it between them."""
    memory = peer_memory.of_group(None, device(rank))
    if memory._allocation is not None:
        memory._allocation.own.fill_(0xFF)
    exact_inputs.poison(device(rank))


def run_lending(layer, most=1, **changes):
    """(what layer.run returns, the loans of its forward)."""
    leaves = layer.leaves()
    with lending() as made:
        poison(layer.rank)
        out = layer.forward(leaves, loans=most, **changes)
        poison(layer.rank)
        out.backward(layer.grad[layer.rank])
    assert len(made) == 1
    return {"out": out.detach(), **{name: t.grad for name, t in leaves.items() if t is not None}}, made[0]


@case
def lent_experts_give_what_one_process_gives(rank, world):
    """Whoever has the tokens, and whatever the popular experts are; where a rank brings none, or computes none of its own experts' rows."""
    for most in (1, 2):
        for layer in (Popular(rank, world, [90, 120], experts=8, dtype=torch.float32), Popular(rank, world, [70, 64], experts=8, glu=False),
                      Popular(rank, world, [60, 50], to=(1, 5, 1), experts=16, top_k=3, weighted=False),
                      Skewed(rank, world, [64, 90], world - 1, experts=8, dtype=torch.float32),
                      Skewed(rank, world, [90, 0], world - 1, experts=8, top_k=3, dtype=torch.float16),
                      Skewed(rank, world, [0, 100], world - 1, every=2, experts=8),
                      Layer(rank, world, [60, 50], only_expert=3, dtype=torch.float32)):
            got, made = run_lending(layer, most)
            layer.check(got)
            assert made and all(0 < sum(loan.borrower == other for loan in made) <= most for other in {loan.borrower for loan in made})


@case
def nothing_is_lent_where_experts_are_equally_popular(rank, world):
    """And then every bit is that of the same layer without loans."""
    layer = Layer(rank, world, [64], experts=8, top_k=2)
    for ids_TK in layer.ids:
        ids_TK.copy_(torch.arange(ids_TK.numel(), device=device(rank)).view(ids_TK.shape) % 8)
    got, made = run_lending(layer, 2)
    assert not made
    for name, tensor in layer.run().items():
        assert torch.equal(got[name], tensor), name
    layer.check(got)


@case
def lent_experts_have_the_same_bits_every_time(rank, world):
    layer = Popular(rank, world, [300, 280], experts=16, top_k=4)
    (first, made), (second, again) = run_lending(layer, 2), run_lending(layer, 2)
    assert made and made == again
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@case
def steps_with_loans_and_without_follow_one_another(rank, world):
    """Rows are pulled ahead in the steps after those without."""
    skewed, even = Popular(rank, world, [400, 380], experts=8, hidden=128), Layer(rank, world, [390], experts=8, hidden=128)
    even.ids = [(ids_TK + torch.arange(ids_TK.size(0), device=device(rank)).unsqueeze(1)) % 8 for ids_TK in even.ids]
    for layer in (even, skewed, skewed, even, even, skewed):
        got, made = run_lending(layer)
        layer.check(got)
        assert made or layer is even


@case
def lent_experts_checkpointed(rank, world):
    layer = Popular(rank, world, [60, 70], experts=8)
    want, made = run_lending(layer)
    leaves = layer.leaves()
    call = functools.partial(peer_experts, activation="silu", engine="auto", where=layer.where(loans=1))
    with lending() as decided:
        weights = [leaves[name] for name in ("weights", "w1", "w2", "v1")]
        out = checkpoint(call, leaves["x"], layer.ids[rank], *weights, use_reentrant=False)
        Popular(rank, world, [900], experts=8).run(loans=1)  # the memory grows, and holds what others lend, between both forwards
        out.backward(layer.grad[rank])
    assert made and decided[0] == decided[-1] == made and len(decided) == 3
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, want[name]), name


@case
def layers_that_lend_share_the_memory(rank, world):
    """What a layer has borrowed was overwritten by the next layer's before its backward."""
    layers = [Popular(rank, world, [60, 70], experts=8, ffn=ffn, seed=seed) for seed, ffn in enumerate((96, 64, 128))]
    leaves = [layer.leaves() for layer in layers]
    with lending() as made:
        outs = [layer.forward(of, loans=1) for layer, of in zip(layers, leaves)]
    assert all(made)
    torch.autograd.backward(outs, [layer.grad[rank] for layer in layers])
    for layer, of, out in zip(layers, leaves, outs):
        layer.check({"out": out.detach(), **{name: t.grad for name, t in of.items()}})


@case
def gradients_of_lent_experts_are_scaled_once(rank, world):
    for dtype, scale in ((torch.bfloat16, 0.5), (torch.float32, 0.3)):
        layer = Popular(rank, world, [70, 50], experts=8, dtype=dtype)
        plain, _ = run_lending(layer)
        with lending() as made:
            leaves = layer.leaves()
            layer.forward(leaves, gradient_scale=scale, loans=1).backward(layer.grad[rank])
        assert made[0]
        for name, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, plain[name] * (scale if name in ("w1", "w2", "v1") else 1), rtol=1e-6, atol=1e-6)


@case
def borrowers_did_not_compute_gradients_that_they_do_not_need(rank, world):
    """The owner of an expert needs them: where a borrower's own experts are frozen, or one matrix on one rank is all that is trained; with
    rows kept for backward on some ranks."""
    layer = Popular(rank, world, [70, 90], to=(0, 0, 7), experts=8, dtype=torch.float32)
    want, made = run_lending(layer)
    assert made
    for trained in ({"w2"}, {"w1", "w2", "v1"}, {"v1"}, set()):
        for trains in ((0,), range(world)):
            for keeps in ((), (0,), range(1, world), range(world)):
                leaves, mine = layer.leaves(), trained if rank in trains else set()
                for name in {"w1", "w2", "v1"} - mine:
                    leaves[name].requires_grad_(False)
                poison(rank)
                with lending() as again:
                    out = peer_experts(leaves["x"], layer.ids[rank], leaves["weights"], leaves["w1"], leaves["w2"], leaves["v1"], "silu",
                                       "auto", layer.where(loans=1), keep_gathered_rows=rank in keeps)
                poison(rank)
                out.backward(layer.grad[rank])
                assert again == [made]
                for name in {"x", "weights"} | mine:
                    torch.testing.assert_close(leaves[name].grad, want[name], rtol=1e-5, atol=1e-5)


@case
def lent_experts_in_inference_and_under_autocast(rank, world):
    layer = Popular(rank, world, [40, 33], experts=8)
    want, _ = run_lending(layer)
    leaves = {name: t.detach().float().requires_grad_() for name, t in layer.leaves().items()}
    leaves["x"] = leaves["x"].detach().bfloat16().requires_grad_()
    with lending() as made:
        with torch.inference_mode():
            assert torch.equal(layer.forward(layer.leaves(), loans=1), want["out"])
        with torch.autocast(device(rank).type, dtype=torch.bfloat16):
            out = layer.forward(leaves, loans=1)
    assert all(made)
    out.backward(layer.grad[rank])
    assert torch.equal(out, want["out"])
    for name in ("w1", "w2", "v1"):
        assert torch.equal(leaves[name].grad, want[name].float()), name


@case
def saved_tensors_of_a_borrower_are_packed(rank, world):
    Popular(rank, world, [900], experts=8).run(loans=1)  # so that there is more room than the next passes need
    layer = Popular(rank, world, [60, 70], experts=8)
    (want, made), leaves = run_lending(layer), layer.leaves()
    assert made
    with lending(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t) if rank else contextlib.nullcontext():
        out = layer.forward(leaves, loans=1)
    out.backward(layer.grad[rank])
    for name, t in leaves.items():
        assert torch.equal(t.grad, want[name]), name


class OfLists(Reference):
    """Takes lists of matrices, and counts those that it gets."""

    reads_separate_weights, decides_by_kind = True, False

    def __init__(self, mapped):
        self.read, self.written, self._begin, self._end = 0, 0, mapped.data_ptr(), mapped.data_ptr() + mapped.nbytes

    def readable(self, matrices):
        return matrices, False

    def writes_in_place(self, out_EKN):
        return True

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        self.read += isinstance(b, SeparateWeights)
        if isinstance(out, SeparateWeights):  # for which mapped memory may lie too far from other memory
            self.written += not any(self._begin <= matrix.data_ptr() < self._end for matrix in out.tensors)
        b = b.contiguous() if isinstance(b, SeparateWeights) else b
        if not isinstance(out, SeparateWeights):
            return super().gmm(a, b, sizes, trans_a, trans_b, out, accumulate)
        for matrix, product in zip(out.matrices(), super().gmm(a, b, sizes, trans_a, trans_b)):
            matrix.copy_(product)
        return out


@case
def borrowed_matrices_are_read_and_written_where_they_lie(rank, world):
    """By engines that take lists; others get copies, with the same results."""
    layer = Popular(rank, world, [60, 70], experts=8, dtype=torch.float32)
    run_lending(layer)
    engine = OfLists(peer_memory.of_group(None, device(rank))._allocation.own)
    results = []
    for lists in (False, True):
        with pytest.MonkeyPatch.context() as patch, lending() as made:
            if lists:
                patch.setattr(arrival.engines, "resolve", lambda name, *_: Resolved(name, engine))
            leaves = layer.leaves()
            weights = [leaves[name] for name in ("weights", "w1", "w2", "v1")]
            out = peer_experts(leaves["x"], layer.ids[rank], *weights, "silu", "reference", layer.where(loans=1))
        out.backward(layer.grad[rank])
        results.append([out.detach(), *(t.grad for t in leaves.values())])
        layer.check({"out": out.detach(), **{name: t.grad for name, t in leaves.items()}})
    assert all(torch.equal(one, other) for one, other in zip(*results))
    borrows = any(loan.borrower == rank for loan in made[0])
    found = engine.read, engine.written
    assert found == ((6, 3) if borrows else (0, 0)), (made, found)  # three products each in forward and in backward


@case
def a_rank_that_failed_while_it_lent_left_others_waiting(rank, world):
    """Before it has copied its weights, after that, while gradients are computed, and before they are added."""
    layer = Popular(rank, world, [60, 70], experts=8)
    want, made = run_lending(layer)

    def fails(*_, **__):
        raise MemoryError("none left")

    lenders, borrowers = {loan.expert // (8 // world) for loan in made}, {loan.borrower for loan in made}
    assert lenders and borrowers
    for failing in (0, world - 1):
        for of, name in ((lent_experts.Ledger, "lent"), *[(peers, "copy_experts")] * (failing in lenders),
                         *[(lent_experts.BorrowedWeights, "_copy")] * (failing in borrowers), (lent_experts.BorrowedWeights, "wait"),
                         (lent_experts.LentGradients, "__init__"), (lent_experts.LentGradients, "write"),
                         (lent_experts.LentGradients, "_fetch"), (lent_experts.LentGradients, "settle")):
            with pytest.MonkeyPatch.context() as patch, lending(), pytest.raises((RuntimeError, MemoryError)) as error:
                if rank == failing:
                    patch.setattr(of, name, fails)
                layer.run(loans=1)
                peer_memory.check_passes()  # a rank may have ended the pass before another failed in it
            assert (rank == failing) == isinstance(error.value, MemoryError), error.value
            got, _ = run_lending(layer)
            for of_name, tensor in want.items():
                assert torch.equal(got[of_name], tensor), of_name


@of_gpus
def copies_of_a_pass_that_was_lost_wrote_to_memory_that_was_free_again(rank, world):
    """A rank fails before it has waited for the weights that copy engines bring it."""
    layer, copy = Popular(rank, world, [60, 70], experts=8), lent_experts.BorrowedWeights._copy
    want, made = run_lending(layer)
    copied = []

    def copies_late(self, weights_BFH, place, runs):
        torch.cuda._sleep(int(1e8))
        copy(self, weights_BFH, place, runs)
        copied.append(weights_BFH.shape)

    def fails(*_):
        dist.barrier()  # each rank has begun its copies
        raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patch, lending(), pytest.raises(MemoryError):
        patch.setattr(lent_experts.BorrowedWeights, "_copy", copies_late)
        patch.setattr(lent_experts.BorrowedWeights, "wait", fails)
        layer.forward(layer.leaves(), loans=1)
    gc.collect()
    blocks = [torch.full(shape, 7.0, dtype=torch.bfloat16, device=device(rank)) for shape in copied for _ in range(16)]
    synchronize()
    assert bool(copied) == any(loan.borrower == rank for loan in made) and all(bool((block == 7).all()) for block in blocks)
    got, _ = run_lending(layer)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@of_gpus
def layers_on_two_streams_lend(rank, world):
    layer = Popular(rank, world, [600, 500], experts=16, hidden=512)
    (expected, made), side = run_lending(layer), torch.cuda.Stream(device(rank))
    assert made
    with lending():
        for _ in range(5):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                on_side = layer.run(loans=1)
            here = layer.run(loans=1)
            torch.cuda.current_stream().wait_stream(side)
            for name, tensor in expected.items():
                assert torch.equal(tensor, on_side[name]) and torch.equal(tensor, here[name]), name


@case
def slots_of_lent_experts_have_the_bits_of_one_process(rank, world):
    layer = Popular(rank, world, [300, 280], experts=16, top_k=4, hidden=256, ffn=512)
    (got, made), expected = run_lending(layer, 2, exact=True), layer.expected()
    assert made
    for name in ("out", "x", "weights"):
        assert torch.equal(got[name], expected[name]), name
    layer.check(got)


@case
def what_loans_exclude_is_refused(rank, world):
    layer = Popular(rank, world, [60, 70], experts=8)
    weights = [layer.leaves()[name] for name in ("weights", "w1", "w2", "v1")]
    sink = WeightGradientSink(*(torch.zeros_like(w, dtype=torch.float32) for w in weights[1:]))
    for changes, words in ((dict(layout=WeightLayout(down_transposed=True)), "layout, gradient_sink: expected the defaults"),
                           (dict(gradient_sink=sink), "layout, gradient_sink: expected the defaults"),
                           (dict(engine=Float8BlockScaling().engine), "engine: expected one without a recipe")):
        with pytest.raises((ValueError, RuntimeError), match=f"peer_experts: {words}"):
            peer_experts(layer.x[rank], layer.ids[rank], *weights, "silu", where=layer.where(loans=1), **{"engine": "auto", **changes})
    for changes in (dict(rows=2.0), dict(shards=2)):
        with pytest.raises(ValueError, match=f"Placement: {next(iter(changes))}: expected .* together with loans"):
            dataclasses.replace(layer.where(loans=1), **changes)
    layer.check(run_lending(layer)[0])


@case
def ranks_with_other_loans_are_refused(rank, world):
    layer = Popular(rank, world, [60, 70], experts=8)
    with pytest.raises(ValueError, match="expected all ranks of the group to make the same pass.* at most 2 experts of"):
        layer.run(loans=1 + (rank == 0))
    layer.check(run_lending(layer)[0])


LONG = ("borrowers_did_not_compute_gradients_that_they_do_not_need", "lent_experts_give_what_one_process_gives")
