"""Rows pulled and sums pushed between ranks give what one process gives on all ranks' tokens: between GPUs, and between processes on the
CPU that map files (gbmoe.testing.mapped_files).

One start of a number of processes serves all cases, these and those of window_cases.py and lending_cases.py.

Shape suffixes: T tokens, K slots a token, E experts of all ranks, H hidden, F ffn hidden.
"""

import contextlib
import functools
import gc
import os
import traceback
import types
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from gbmoe import WeightGradientSink, WeightLayout, extension
from gbmoe.parallel import Placement, arrival, peer_experts, peer_memory, peer_transport
from gbmoe.parallel.peer_transport import sum_of_ranks
from gbmoe.testing import cuda_graphs, exact_inputs
from tests import rank_groups
from tests.parallel import lending_cases, peer_layers, window_cases
from tests.parallel.peer_layers import CASES, OF_GPUS, Layer, case, device, of_gpus, synchronize
from tests.test_weight_layout import laid_out


@case
def glu_mlp_and_dtypes(rank, world):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for glu in (True, False):
            layer = Layer(rank, world, [70, 70], dtype=dtype, glu=glu)
            layer.check(layer.run())


@case
def gradients_of_weights_are_scaled_and_others_are_not(rank, world):
    """By a power of two all bits but the exponents' stay. Where each row is scaled, dx is divided by it again; otherwise gradients of
    weights are multiplied. float16 has no exponents to spare, and rows of slots are summed without a scale."""
    for dtype, changes in ((torch.bfloat16, {}), (torch.float32, {}), (torch.float16, {}), (torch.bfloat16, {"exact": True})):
        for weighted in (True, False):
            layer = Layer(rank, world, [70, 50], experts=8, dtype=dtype, weighted=weighted)
            plain = layer.run(**changes)
            for scale in (0.5, 2.0**-6, 0.3):
                for name, scaled in layer.run(gradient_scale=scale, **changes).items():
                    if name not in ("w1", "w2", "v1"):
                        assert torch.equal(scaled, plain[name]), name
                    elif scale == 0.3 or dtype == torch.float16:
                        torch.testing.assert_close(scaled, plain[name] * scale)
                    else:
                        assert torch.equal(scaled, plain[name] * scale), name


@case
def uneven_and_no_tokens(rank, world):
    for tokens in ([130, 3], [0, 40], [40, 0], [0, 0]):
        layer = Layer(rank, world, tokens)
        layer.check(layer.run())


@case
def more_slots_than_a_pass_has(rank, world):
    layer = Layer(rank, world, [50, 60], experts=32, top_k=20)
    layer.check(layer.run())


@case
def one_expert_gets_all(rank, world):
    """Experts without a row have gradients of exact zeros; a rank may have no row at all."""
    layer = Layer(rank, world, [33, 20], only_expert=3)
    got = layer.run()
    layer.check(got)
    if rank == 0:
        assert not got["w1"].any() and not got["w2"].any()


@case
def no_router_weights(rank, world):
    layer = Layer(rank, world, [64, 64], weighted=False)
    layer.check(layer.run())


@case
def shards_of_one_expert(rank, world):
    """More ranks than experts: each holds a part of the expert's ffn rows, and all get every row."""
    layer = Layer(rank, world, [40, 50], experts=1, top_k=1)
    layer.check(layer.run())


@case
def slots_have_the_bits_of_one_process(rank, world):
    layer = Layer(rank, world, [300, 280], experts=16, top_k=4, hidden=256, ffn=512)
    got, expected = layer.run(exact=True), layer.expected()
    for name in ("out", "x", "weights"):
        assert torch.equal(got[name], expected[name]), name


@case
def the_same_bits_every_time(rank, world):
    layer = Layer(rank, world, [300, 280], experts=16, top_k=4)
    first, second = layer.run(), layer.run()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@case
def memory_grows_with_the_tokens_of_any_rank(rank, world):
    memory = peer_memory.of_group(None, device(rank))
    layer = Layer(rank, world, [10, 64])
    layers = 2, 64, torch.bfloat16, layer.shards, False
    layer.check(layer.run())
    capacity = memory.capacity(layers)
    layer = Layer(rank, world, [10, capacity + 200])
    layer.check(layer.run())
    assert memory.capacity(layers) >= capacity + 200


@case
def tokens_of_one_layer_do_not_count_for_others_of_another_shape(rank, world):
    """Kernels visited and copy engines copied as many tokens of each rank as any layer had brought."""
    memory = peer_memory.of_group(None, device(rank))
    layer = Layer(rank, world, [1500])
    layer.run()
    other = Layer(rank, world, [200], hidden=96)
    other.check(other.run())
    assert memory.capacity((2, 96, torch.bfloat16, other.shards, False)) == 256
    layer.check(layer.run())


@case
def layers_of_different_shapes_share_the_memory(rank, world):
    layers = [Layer(rank, world, [60, 70], hidden=hidden, top_k=top_k, seed=seed)
              for seed, (hidden, top_k) in enumerate([(64, 2), (256, 3), (128, 1)])]
    leaves = [layer.leaves() for layer in layers]
    outs = [layer.forward(of) for layer, of in zip(layers, leaves)]
    torch.autograd.backward(outs, [layer.grad[rank] for layer in layers])  # of the last one first
    for layer, of, out in zip(layers, leaves, outs):
        layer.check({"out": out.detach(), **{name: t.grad for name, t in of.items() if t is not None}})


@case
def memory_that_inference_mode_mapped_serves_training(rank, world):
    """What is made in inference mode can be written to only within it."""
    peer_memory.release()
    layer = Layer(rank, world, [60, 70])
    leaves = layer.leaves()
    with torch.inference_mode():
        layer.forward(leaves)
    layer.check(layer.run())


@case
def an_autocast_around_backward_changes_no_bit(rank, world):
    layer = Layer(rank, world, [60, 70], dtype=torch.float32)
    leaves, expected = layer.leaves(), layer.run()
    out = layer.forward(leaves)
    with torch.autocast(device(rank).type, dtype=torch.bfloat16):
        out.backward(layer.grad[rank])
    assert all(torch.equal(t.grad, expected[name]) for name, t in leaves.items() if t is not None)


@case
def checkpointed(rank, world):
    layer = Layer(rank, world, [60, 70])
    x, w = layer.x[rank].clone().requires_grad_(), [layer.mine(w).requires_grad_() for w in layer.w]
    call = functools.partial(peer_experts, activation="silu", engine="auto", where=layer.where())
    checkpoint(call, x, layer.ids[rank], layer.weights[rank], *w, use_reentrant=False).backward(layer.grad[rank])
    got = layer.run()
    assert torch.equal(x.grad, got["x"]) and torch.equal(w[0].grad, got["w1"])


@case
def saved_tensors_are_packed_on_one_rank(rank, world):
    """That rank's layout was one of its own in backward, and the others read and wrote other places of its memory."""
    Layer(rank, world, [900]).run()  # so that there is more room than the next passes need
    layer = Layer(rank, world, [60, 70])
    expected, leaves = layer.run(), layer.leaves()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t) if rank == 0 else contextlib.nullcontext():
        out = layer.forward(leaves)
    out.backward(layer.grad[rank])
    for name, t in leaves.items():
        assert torch.equal(t.grad, expected[name]), name


@case
def more_ranks_than_whole_matrices_are_copied_for(rank, world):
    """As with eight ranks, kernels pull and push rows in backward too."""
    layer = Layer(rank, world, [90, 120])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "RANKS_WITH_COPY_ENGINES", 1)
        layer.check(layer.run())


@case
def passes_of_few_tokens_have_the_bits_of_those_of_many(rank, world):
    """Copy engines bring and take the rows of many tokens in backward, and kernels those of few. The rank with the most tokens decides for
    all: one that decided by its own would wait in other barriers than the others."""
    layer = Layer(rank, world, [90, 4])
    by_copies = layer.run()
    token_bytes = layer.x[rank].size(1) * layer.x[rank].element_size()
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_transport, "_SumsOnTheirWay", lambda *_: made.append(rank))
        patch.setattr(peer_memory, "BYTES_FOR_COPY_ENGINES", 128 * token_bytes + 1)  # 90 tokens have the room of 128
        by_kernels = layer.run()
    assert not made
    layer.check(by_kernels)
    for name, tensor in by_copies.items():
        assert torch.equal(tensor, by_kernels[name]), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "BYTES_FOR_COPY_ENGINES", 128 * token_bytes)
        used, uses = [], peer_transport._SumsOnTheirWay
        patch.setattr(peer_transport, "_SumsOnTheirWay", lambda *arguments: used.append(rank) or uses(*arguments))
        layer.check(layer.run())
    assert used


@case
def rows_are_pulled_while_the_host_waits_for_their_number(rank, world):
    """As many as are expected, and all of them again where there are more."""
    memory = peer_memory.of_group(None, device(rank))
    for tokens in ([900], [800, 30], [0, 700]):
        layer = Layer(rank, world, tokens, hidden=128)
        memory.expected_rows.clear()
        first, ahead = layer.run(), []
        (kind,) = memory.expected_rows
        with pytest.MonkeyPatch.context() as patch:
            finished = arrival.Arrival.rows_ahead
            patch.setattr(arrival.Arrival, "rows_ahead", lambda self: ahead.append(finished(self)) or ahead[-1])
            for expected in (1, 10**6, memory.expected_rows[kind]):
                memory.expected_rows[kind] = expected
                for name, tensor in layer.run().items():
                    assert torch.equal(tensor, first[name]), name
        layer.check(first)
        few = ahead[1].num_rows <= 1024  # rows are pulled in thousands
        assert (ahead[0] is not None) == few and ahead[1] is not None and ahead[2] is not None
        expected = memory.expected_rows[kind]
        assert expected <= 1.5 * max(ahead[2].num_rows, 1)
        layer.run(rows=2.0)
        assert memory.expected_rows[kind] == expected  # where rows are bounded the host does not know how many there are


@of_gpus
def two_streams(rank, world):
    layer = Layer(rank, world, [600, 500], experts=16, hidden=512)
    expected = layer.run()
    side = torch.cuda.Stream(device(rank))
    for _ in range(10):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = layer.run()
        here = layer.run()
        torch.cuda.current_stream().wait_stream(side)
        for name, tensor in expected.items():
            assert torch.equal(tensor, on_side[name]) and torch.equal(tensor, here[name]), name


@of_gpus
def bounded_rows_wait_for_nothing_and_fit_a_graph(rank, world):
    layer = Layer(rank, world, [256, 256], experts=8, top_k=2)
    where = layer.where(rows=2.0)
    leaves = [t.clone().requires_grad_() for t in (layer.x[rank], layer.weights[rank], *(layer.mine(w) for w in layer.w))]
    ids, grad = layer.ids[rank].clone(), layer.grad[rank]

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
    for seed in (0, 5, 6):
        other = Layer(rank, world, [256, 256], experts=8, top_k=2, seed=seed)
        with torch.no_grad():
            for leaf, new in zip(leaves, (other.x[rank], other.weights[rank], *(other.mine(w) for w in other.w))):
                leaf.copy_(new)
            ids.copy_(other.ids[rank])
            grad.copy_(other.grad[rank])
        graph.replay()
        synchronize()
        names = ("x", "weights", "w1", "w2", "v1")
        other.check({"out": out.detach(), **{name: leaf.grad for name, leaf in zip(names, leaves)}})


@of_gpus
def a_token_has_the_same_bits_whatever_others_there_are(rank, world):
    layer, some = Layer(rank, world, [300, 280], experts=16, top_k=4, hidden=256, ffn=512), slice(0, 17 + rank)
    weights = [layer.mine(w) for w in layer.w]

    def out_of(tokens):
        x, ids, router_weights = (part[rank][tokens].contiguous() for part in (layer.x, layer.ids, layer.weights))
        return peer_experts(x, ids, router_weights, *weights, "silu", "hopper_batch_invariant", layer.where())

    assert torch.equal(out_of(slice(None))[some], out_of(some))


@case
def rows_that_were_pulled_are_kept_for_backward(rank, world):
    """As in one process, and on some ranks alone; with and without a bound."""
    for layer in (Layer(rank, world, [70, 50], experts=8), Layer(rank, world, [70, 50], experts=8, weighted=False)):
        for rows in (None, 4.0):
            plain, leaves = layer.run(rows=rows), layer.leaves()
            w = [leaves[name] for name in ("w1", "w2", "v1")]
            out = peer_experts(leaves["x"], layer.ids[rank], leaves["weights"], *w, "silu", "auto", layer.where(rows=rows),
                               keep_gathered_rows=rank % 2 == 0)
            out.backward(layer.grad[rank])
            for name, leaf in leaves.items():
                assert leaf is None or torch.equal(leaf.grad, plain[name]), name


@case
def layouts_and_sinks(rank, world):
    """Weights as frameworks keep them have the bits of separate ones, and their gradients are in their layout, or added to float32."""
    layer = Layer(rank, world, [40, 33], dtype=torch.float32)
    want = layer.run()
    for layout in (WeightLayout("gate_first", down_transposed=True), WeightLayout("up_first"), WeightLayout(down_transposed=True)):
        of_layout = laid_out(layout, *(layer.mine(w) for w in layer.w))
        gradients = laid_out(layout, *(want[name] for name in ("w1", "w2", "v1")))
        for sunk in (False, True):
            leaves = layer.leaves()
            leaves.update({name: None if w is None else w.clone().requires_grad_() for name, w in zip(("w1", "w2", "v1"), of_layout)})
            mains = [None if w is None else torch.ones_like(w) for w in of_layout]
            sink = WeightGradientSink(*mains) if sunk else None
            exact_inputs.poison(device(rank))
            out = peer_experts(leaves["x"], layer.ids[rank], leaves["weights"], leaves["w1"], leaves["w2"], leaves["v1"], "silu", "auto",
                               layer.where(), layout=layout, gradient_sink=sink)
            out.backward(layer.grad[rank])
            assert torch.equal(out, want["out"]) and torch.equal(leaves["x"].grad, want["x"]), layout
            for name, main, gradient in zip(("w1", "w2", "v1"), mains, gradients):
                if gradient is not None:
                    torch.testing.assert_close(main - 1 if sunk else leaves[name].grad, gradient, rtol=1e-5, atol=1e-5)
                    assert sunk or leaves[name].grad.stride() == leaves[name].stride()


@case
def deferred_gradients_kept_the_tokens_of_all_ranks(rank, world):
    """They are sums over this rank's rows. Copies of whole matrices of tokens, which backward makes, are larger where ranks are more."""
    layer = Layer(rank, world, [1500, 1400], top_k=1)
    want, leaves = layer.run(), layer.leaves()
    mains = [torch.zeros(leaves[name].shape, dtype=torch.float32, device=device(rank)) for name in ("w1", "w2", "v1")]
    sink = WeightGradientSink(*mains, deferred=True)
    out = peer_experts(leaves["x"], layer.ids[rank], leaves["weights"], leaves["w1"], leaves["w2"], leaves["v1"], "silu", "auto",
                       layer.where(), gradient_sink=sink)
    out.backward(layer.grad[rank])
    kept = tensors_kept_by(sink)
    rows = [t.untyped_storage().nbytes() // (64 * t.element_size()) for t in kept.values() if t.dim() == 2 and t.size(1) == 64]
    assert rows and max(rows) <= 2048 < world * 1500
    sink.compute()
    for name, main in zip(("w1", "w2", "v1"), mains):
        torch.testing.assert_close(main, want[name].float(), rtol=2e-2, atol=2e-2 * want[name].abs().max().item())


def tensors_kept_by(thing):
    """The tensors to which references lead from here, by their ids; not through classes, nor the globals of functions."""
    seen, left, tensors = set(), [thing], {}
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            tensors[id(one)] = one
        else:
            left += one.__closure__ or () if isinstance(one, types.FunctionType) else gc.get_referents(one)
    return tensors


@case
def weights_that_the_layout_has_no_place_for_were_not_used(rank, world):
    layer = Layer(rank, world, [20, 13])
    leaves = layer.leaves()
    for layout, sink in ((WeightLayout("gate_first"), None), (WeightLayout(), WeightGradientSink(torch.zeros(1, 2, 3)))):
        with pytest.raises((ValueError, RuntimeError), match="peer_experts: (v1: expected None|gradient_sink)"):
            peer_experts(leaves["x"], layer.ids[rank], leaves["weights"], leaves["w1"], leaves["w2"], leaves["v1"], "silu", "auto",
                         layer.where(), layout=layout, gradient_sink=sink)
    layer.check(layer.run())


@case
def router_weights_of_float64_were_taken_in_float32(rank, world):
    layer = Layer(rank, world, [20, 13])
    leaves = layer.leaves()
    with pytest.raises((ValueError, RuntimeError), match="peer_experts: weights: expected a dtype of 32 or 16 bits .* got torch.float64"):
        peer_experts(leaves["x"], layer.ids[rank], leaves["weights"].double(), leaves["w1"], leaves["w2"], leaves["v1"], "silu", "auto",
                     layer.where())
    layer.check(layer.run())


@case
def autocast_casts_tokens_and_weights(rank, world):
    layer, wide = Layer(rank, world, [40, 33]), Layer(rank, world, [40, 33], dtype=torch.float32)
    leaves = {name: None if t is None else t.detach().float().requires_grad_() for name, t in layer.leaves().items()}
    with torch.autocast(device(rank).type, dtype=torch.bfloat16):
        out = wide.forward(leaves)
    out.backward(layer.grad[rank])
    assert out.dtype == torch.bfloat16 and leaves["w1"].grad.dtype == torch.float32
    of_leaves = {name: t.grad.to(t.dtype if name == "weights" else torch.bfloat16) for name, t in leaves.items()}
    layer.check({"out": out.detach(), **of_leaves})


@case
def second_derivatives_were_lost(rank, world):
    layer = Layer(rank, world, [20, 13])
    leaves = layer.leaves()
    dx, = torch.autograd.grad(layer.forward(leaves).sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.square().sum().backward()


def worker(rank, store, world, device_type, names, results):
    peer_layers.DEVICE_TYPE = device_type
    rank_groups.join_and_map_memory(rank, world, store, device_type)
    for name in names:
        try:
            CASES[name](rank, world)
            synchronize()
            results[rank, name] = None
        except Exception as error:  # the ranks go on together, unless a device is lost
            results[rank, name] = traceback.format_exc()
            if isinstance(error, torch.AcceleratorError):
                os._exit(1)
    peer_memory.release()
    dist.destroy_process_group()


STARTS = [("cpu", 2), ("cpu", 4), ("cuda", 2), ("cuda", 4), ("cuda", 8)]
MARKS = {"cpu": [pytest.mark.xdist_group("mapped-files")], "cuda": [pytest.mark.gpu, pytest.mark.xdist_group("two-gpus")]}
# Four processes on a CPU spend four fifths of their time on these, in which two processes do the same.
LONG = ("glu_mlp_and_dtypes", "gradients_of_weights_are_scaled_and_others_are_not", "slots_have_the_bits_of_one_process", "checkpointed",
        "tokens_of_one_layer_do_not_count_for_others_of_another_shape", "rows_are_pulled_while_the_host_waits_for_their_number",
        *window_cases.LONG, *lending_cases.LONG)


def starts():
    """(type of device, ranks, cases that they run one after the other, marks)."""
    on_cpu = [name for name in CASES if name not in OF_GPUS]
    for device_type, world in STARTS:
        if (device_type, world) == ("cpu", 4):
            yield device_type, world, tuple(name for name in on_cpu if name not in LONG), MARKS["cpu"]
            yield device_type, world, LONG, [*MARKS["cpu"], pytest.mark.slow]
        else:
            yield device_type, world, tuple(on_cpu if device_type == "cpu" else CASES), MARKS[device_type]


RUNS = [pytest.param(device_type, world, names, name, marks=marks, id=f"{name}-{device_type}-{world}")
        for device_type, world, names, marks in starts() for name in names]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function from a type of device, a number of ranks and cases to what each rank found; they are started once."""
    @functools.cache
    def start(device_type, world, names):
        return rank_groups.shared_by_ranks(worker, world, tmp_path_factory.mktemp("store"), world, device_type, names,
                                           device_type=device_type, may_fail=True)  # a case says why

    return start


@pytest.mark.parametrize("device_type, world, names, name", RUNS)
def test_ranks_that_map_memory(results_of, device_type, world, names, name):
    rank_groups.skip_without_devices(device_type, world)
    results = results_of(device_type, world, names)
    failures = {rank: results.get((rank, name), "did not end") for rank in range(world) if results.get((rank, name), "did not end")}
    assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())


@pytest.mark.gpu
def test_ids_with_a_stride_were_read_as_those_of_other_tokens():
    """Ids whose rows do not lie one after the other: the sum over ranks is that of the same ids, copied."""
    extension.load()
    tokens, top_k, hidden = 6, 2, 64
    where = Placement(group=None, world=2, rank=0, experts=4, experts_per_rank=2, shards=1)
    pushed_WCH = torch.randn(2, tokens, hidden, device="cuda")
    pushed = SimpleNamespace(regions=SimpleNamespace(own={"pushed": pushed_WCH}))
    wide = torch.tensor([[0, 1, 3, 3], [2, 3, 0, 0], [0, 2, 1, 1], [1, 1, 2, 2], [3, 3, 0, 1], [2, 0, 3, 3]], device="cuda")
    ids_TK = wide[:, :top_k]
    of_rank = [(ids_TK // 2 == rank).any(1, keepdim=True) for rank in range(2)]
    expected = sum(torch.where(there, part, 0.0) for there, part in zip(of_rank, pushed_WCH))
    assert not ids_TK.is_contiguous()
    assert torch.equal(sum_of_ranks(pushed, torch.empty(tokens, hidden, device="cuda"), ids_TK, None, where), expected)
