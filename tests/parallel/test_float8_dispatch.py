"""Rows travel between ranks in e4m3, half the bytes, over both transports; results have the bits of one process with the same recipe.

One start of two processes serves all cases: each is a function of the rank that raises where something is wrong.

Shape suffixes: T tokens, K slots a token, H hidden.
"""

import contextlib
import dataclasses
import functools
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from gbmoe import Float8BlockScaling
from gbmoe.launch import packed_rows, peers
from gbmoe.layers import Arguments, expert_parallelism
from gbmoe.layers.dmoe import ParallelDroplessMLP
from gbmoe.parallel import arrival, experts_by_exchange, further_windows, peer_experts, peer_memory
from gbmoe.parallel.exact_exchange import exact_experts_by_exchange
from gbmoe.parallel.placement import Placement
from tests import rank_groups

WORLD, EXPERTS, HIDDEN, FFN = 2, 8, 144, 96  # a row has a tile that is not full
TOKENS = (40, 31)
BYTES = packed_rows.bytes_of_row(HIDDEN)
DEVICE_TYPE = "cpu"
TRANSPORTS = ("exchange", "peer_memory")
PLAIN, DISPATCH = Float8BlockScaling(), Float8BlockScaling(float8_dispatch=True)
RECIPES = (PLAIN, DISPATCH, Float8BlockScaling(float8_weight_gradients=True),
           Float8BlockScaling(power_2_scale=True, float8_weight_gradients=True, float8_dispatch=True))
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def device():
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE_TYPE == "cuda" else torch.device("cpu")


def make(recipe=DISPATCH, spread=True, **changes):
    torch.manual_seed(0)
    fields = dict(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=1, mlp_type="glu", bias=False, fp16=False,
                  bf16=True, device=device(), activation_fn=torch.nn.functional.silu, moe_loss_weight=0, fp8_recipe=recipe,
                  init_method=functools.partial(torch.nn.init.normal_, std=0.1), moe_expert_model_parallelism=spread)
    return ParallelDroplessMLP(Arguments(**{**fields, **changes}))


def drawn(tokens, top_k):
    """(x, ids, router weights, gradient) of all ranks' tokens, cut by rank; values of many magnitudes."""
    generator, total = torch.Generator().manual_seed(1), sum(tokens)
    x, grad = (torch.randn(total, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    x[::3] *= 1e-3
    grad[1::4] *= 300
    x[5:6] = 0
    ids = torch.rand(total, EXPERTS, generator=generator).topk(top_k).indices
    weights = torch.rand(total, top_k, generator=generator)
    return [t.to(device()).split(list(tokens)) for t in (x, ids, weights, grad)]


def step(layer, parts, x_needs=True, weights_need=True, call=lambda f, *arguments: f(*arguments)):
    x, ids, weights, grad = (part.clone() for part in parts)
    x = x.to(layer.args.dtype).requires_grad_(x_needs)
    weights.requires_grad_(weights_need)
    layer.zero_grad()
    out = call(layer, x, x.new_zeros(x.size(0), EXPERTS), weights, ids)
    if out.requires_grad:
        out.backward(grad.to(out.dtype))
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def mine(rank, tokens=TOKENS, top_k=1):
    return [part[rank] for part in drawn(tokens, top_k)]


def expected(rank, recipe, tokens=TOKENS, top_k=1, **changes):
    whole = step(make(recipe, spread=False, moe_top_k=top_k, **changes), [torch.cat(part) for part in drawn(tokens, top_k)])
    cut = {name: whole.pop(name).split(list(tokens))[rank] for name in ("out", "x", "weights")}
    return cut | {name: gradient.chunk(WORLD)[rank] / WORLD for name, gradient in whole.items()}


def same(got, wanted):
    """Gradients of weights on a GPU are summed in parts that follow the number of rows."""
    for name, t in got.items():
        if t is None or t.numel() == 0:
            continue
        if DEVICE_TYPE == "cuda" and name.startswith("mlp."):
            assert (t - wanted[name]).float().norm() <= 0.01 * wanted[name].float().norm(), name
        else:
            assert torch.equal(t, wanted[name]), (name, (t - wanted[name]).float().norm() / wanted[name].float().norm())


@contextlib.contextmanager
def travelling():
    """What rows travel meanwhile: a list of (dtype, elements a row). Over the exchange it has sums, too, and small messages."""
    seen, exchange, pull = [], dist.all_to_all_single, peers.pull_rows

    def exchanging(out, x, *args, **kwargs):
        if x.dim() == 2 and x.size(1) >= HIDDEN:
            seen.append((x.dtype, x.size(1)))
        return exchange(out, x, *args, **kwargs)

    def pulling(of_ranks, rank, row_of_slot, out):
        seen.append((out.dtype, out.size(1)))
        pull(of_ranks, rank, row_of_slot, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchanging)
        patch.setattr(peers, "pull_rows", pulling)
        patch.setattr(peer_memory, "BYTES_FOR_COPY_ENGINES", 1 << 40)  # all rows by pull_rows
        yield seen


SCALED, WIDE = (torch.uint8, BYTES), (torch.bfloat16, HIDDEN)


@case
def results_have_the_bits_of_one_process(rank):
    for transport in TRANSPORTS:
        for recipe in RECIPES:
            same(step(make(recipe, expert_parallel_transport=transport), mine(rank)), expected(rank, recipe))
        fields = dict(bf16=False, fp16=True, mlp_type="mlp")
        same(step(make(expert_parallel_transport=transport, **fields), mine(rank)), expected(rank, DISPATCH, **fields))


@case
def exact_sums_have_the_bits_of_one_process(rank):
    for transport in TRANSPORTS:
        for recipe in (PLAIN, DISPATCH):
            layer = make(recipe, expert_parallel_transport=transport, expert_parallel_exact=True, moe_top_k=3)
            same(step(layer, mine(rank, top_k=3)), expected(rank, recipe, top_k=3))


@case
def sums_over_ranks_have_the_bits_of_rows_in_16_bits(rank):
    """Which rank has which part of a token's sum decides the rounding, and not the form in which rows came."""
    layer = make(moe_top_k=3, expert_parallel_transport="exchange")
    with travelling() as seen:
        scaled = step(layer, mine(rank, top_k=3))
    assert seen == [SCALED, WIDE] * 2
    with pytest.MonkeyPatch.context() as patch, travelling() as seen:
        if rank == 1:  # as under torch.compile: then no rank sends e4m3
            patch.setattr(expert_parallelism, "_over_scaled_rows", lambda *_: None)
        wide = step(layer, mine(rank, top_k=3))
    assert seen == [WIDE] * 4
    assert all(torch.equal(t, wide[name]) for name, t in scaled.items())


@case
def half_the_bytes_travel(rank):
    for transport, each in (("exchange", [SCALED, WIDE, SCALED, WIDE]), ("peer_memory", [SCALED, SCALED, SCALED])):
        with travelling() as seen:
            step(make(expert_parallel_transport=transport), mine(rank))
        assert seen == each, (transport, seen)
    assert packed_rows.bytes_of_row(4096) == 4096 + 128 and packed_rows.bytes_of_row(2048) == 2048 + 64


@case
def what_reads_rows_in_16_bits_gets_them(rank):
    """Gradients of weights, with a recipe that does not say otherwise: over mapped memory those rows travel once more."""
    for transport, each in (("exchange", [WIDE] * 4), ("peer_memory", [SCALED, WIDE, WIDE])):
        with travelling() as seen:
            step(make(PLAIN, expert_parallel_transport=transport), mine(rank))
        assert seen == each, (transport, seen)


@case
def without_gradients_of_weights_e4m3_travels(rank):
    wanted = expected(rank, PLAIN)
    for transport in TRANSPORTS:
        layer = make(PLAIN, expert_parallel_transport=transport)
        with torch.no_grad(), travelling() as seen:
            same({"out": step(layer, mine(rank))["out"]}, wanted)
        assert seen[0] == SCALED and SCALED not in seen[1:]
        layer.requires_grad_(False)
        with travelling() as seen:
            same(step(layer, mine(rank)), wanted)
        assert seen.count(SCALED) == 2 and len(seen) == (4 if transport == "exchange" else 2)


@case
def what_one_rank_needs_all_send(rank):
    """Experts frozen on one rank, and tokens without a gradient on the other."""
    wanted = expected(rank, PLAIN)
    for transport in TRANSPORTS:
        for recipe in (PLAIN, DISPATCH):
            layer = make(recipe, expert_parallel_transport=transport)
            layer.requires_grad_(rank == 1)
            got = step(layer, mine(rank), x_needs=rank == 0)
            assert (got["x"] is None) == (rank == 1) and got["weights"] is not None
            same({name: got[name] for name in ("out", "x", "weights")}, wanted)
            assert recipe is DISPATCH or rank == 0 or len(got) == 6
            if recipe is PLAIN:
                same(got, wanted)


@case
def a_rank_that_needed_no_gradient_left_others_waiting(rank):
    wanted = expected(rank, DISPATCH)
    for transport in TRANSPORTS:
        layer = make(expert_parallel_transport=transport).requires_grad_(rank == 0)
        got = step(layer, mine(rank), x_needs=rank == 0, weights_need=rank == 0)
        assert all((got[name] is None) == (rank == 1) for name in ("x", "weights", "mlp.w1"))
        same(got, wanted)


@case
def weights_were_kept_in_float8_that_no_backward_reads(rank):
    def bytes_saved(keep, x_needs):
        layer, saved = make(dataclasses.replace(DISPATCH, keep_weights=keep), expert_parallel_transport="exchange"), {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
            step(layer, mine(rank), x_needs)
        return sum(saved.values())

    assert bytes_saved(True, True) > bytes_saved(False, True)
    assert bytes_saved(True, False) == bytes_saved(False, False)


@case
def a_matrix_that_alone_is_trained_had_no_gradient(rank):
    """On one rank alone, and on both; the others are frozen."""
    wanted = expected(rank, DISPATCH)
    for transport in TRANSPORTS:
        for name in ("mlp.w1", "mlp.w2", "mlp.v1"):
            for trains in ((1,), (0, 1)):
                layer = make(expert_parallel_transport=transport)
                for of, parameter in layer.named_parameters():
                    parameter.requires_grad_(of == name and rank in trains)
                got = step(layer, mine(rank))
                assert {of for of, t in got.items() if of.startswith("mlp.") and t is not None} == ({name} if rank in trains else set())
                same(got, wanted)


@case
def ranks_without_tokens(rank):
    for tokens in ((0, 25), (25, 0), (0, 0)):
        wanted = expected(rank, DISPATCH, tokens)
        for transport in TRANSPORTS:
            same(step(make(expert_parallel_transport=transport), mine(rank, tokens)), wanted)


@case
def options_change_no_bit(rank):
    for recipe in (PLAIN, DISPATCH):
        wanted, fields = expected(rank, recipe), dict(fp8_recipe=dataclasses.replace(recipe, keep_weights=False))
        for transport, changes in (("exchange", fields), ("peer_memory", fields), ("peer_memory", dict(keep_gathered_rows=True)),
                                   ("exchange", dict(keep_gathered_rows=True)), ("peer_memory", dict(expert_parallel_rows=4.0)),
                                   ("exchange", dict(expert_parallel_chunks=2))):
            same(step(make(recipe, expert_parallel_transport=transport, **changes), mine(rank)), wanted)
        with travelling():  # sets copy engines aside
            same(step(make(recipe, expert_parallel_transport="peer_memory"), mine(rank)), wanted)


@case
def further_windows_change_no_bit(rank):
    """But those of gradients of weights, which are sums over the windows."""
    tokens = (400, 310)
    for recipe in RECIPES:
        wanted = expected(rank, recipe, tokens)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrival, "_ROWS_TOGETHER", 1)
            for rows in (0.3, 4.0):
                made = []
                patch.setattr(further_windows, "forward", lambda *args, of=further_windows.forward: made.append(1) or of(*args))
                peer_memory.release()
                got = step(make(recipe, expert_parallel_transport="peer_memory", expert_parallel_rows=rows), mine(rank, tokens))
                assert bool(made) == (rows < 1)
                same({name: got.pop(name) for name in ("out", "x", "weights")}, wanted)
                for name, t in got.items():
                    assert (t - wanted[name]).float().norm() <= 0.05 * wanted[name].float().norm(), name


@case
def checkpointed_and_many_times(rank):
    for transport in TRANSPORTS:
        layer = make(expert_parallel_transport=transport)
        first = step(layer, mine(rank))
        for call in (functools.partial(checkpoint, use_reentrant=False), lambda f, *arguments: f(*arguments)):
            again = step(layer, mine(rank), call=call)
            assert all(torch.equal(t, again[name]) for name, t in first.items())


@case
def a_rank_with_another_recipe_is_refused(rank):
    """Layers compare recipes when they are made. So do passes, also those of callers without a layer."""
    with pytest.raises(ValueError, match=r"fp8_recipe is .*float8_dispatch=True.* on rank 0, .*float8_dispatch=False.* on rank 1"):
        make((DISPATCH, PLAIN)[rank])
    x, ids, weights, _ = mine(rank)
    w = torch.zeros(EXPERTS // WORLD, FFN, HIDDEN, dtype=torch.bfloat16, device=device())
    where = Placement(None, WORLD, rank, EXPERTS, EXPERTS // WORLD, 1, timeout_seconds=60)
    recipes = DISPATCH, None
    engine = [recipe.engine if recipe else "auto" for recipe in recipes][rank]
    def compute(rows, plan, weights):
        return rows

    for call in (lambda: peer_experts(x, ids, weights, w, w, w, "silu", engine, where),
                 lambda: experts_by_exchange([compute], x, ids, weights, where, recipe=recipes[rank]),
                 lambda: exact_experts_by_exchange(compute, x, ids, weights, where, weighs_later=False, recipe=recipes[rank])):
        with pytest.raises(ValueError, match="a row quantised by float8_block_dispatch and .* on rank 0, .* a row and .* on rank 1"):
            call()
    for transport in TRANSPORTS:  # the ranks go on together
        same(step(make(expert_parallel_transport=transport), mine(rank)), expected(rank, DISPATCH))


def worker(rank, store, device_type, results):
    global DEVICE_TYPE
    DEVICE_TYPE = device_type
    rank_groups.join_and_map_memory(rank, WORLD, store, device_type)
    for name, function in CASES.items():
        try:
            function(rank)
            torch.get_device_module(device_type).synchronize()
            results[rank, name] = None
        except Exception:
            results[rank, name] = traceback.format_exc()
    peer_memory.release()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function from a type of device to what each rank found; they are started once."""
    @functools.cache
    def start(device_type):
        return rank_groups.shared_by_ranks(worker, WORLD, tmp_path_factory.mktemp("store"), device_type, device_type=device_type,
                                           may_fail=True)  # a case says why

    return start


MARKS = {"cpu": [pytest.mark.slow, pytest.mark.xdist_group("mapped-files")], "cuda": [pytest.mark.gpu, pytest.mark.xdist_group("two-gpus")]}


@pytest.mark.parametrize("device_type, name", [pytest.param(device_type, name, marks=marks, id=f"{name}-{device_type}")
                                               for device_type, marks in MARKS.items() for name in CASES])
def test_rows_travel_in_e4m3(results_of, device_type, name):
    results = results_of(device_type)
    failures = {rank: results.get((rank, name), "did not end") for rank in range(WORLD) if results.get((rank, name), "did not end")}
    assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())
