"""Ranks that map each other's memory and differ: where that is right their gradients are those of one process. Elsewhere, and where a rank
leaves a pass early, all of them say why, and go on together.

One start of a number of processes serves all cases: on the CPU, where they map files (gbmoe.testing.mapped_files), and on GPUs.

Shape suffixes: T tokens, K slots a token, E experts, H hidden.
"""

import functools
import gc
import logging
import os
import re
import sys
import time
import traceback
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune
from torch.utils.checkpoint import checkpoint

from gbmoe.layers import Arguments
from gbmoe.layers.dmoe import ParallelDroplessMLP
from gbmoe.ops import expert_forward_backward
from gbmoe.parallel import check_passes, loans, pass_agreement, peer_memory, peer_transport, region_rows
from gbmoe.parallel.notice_board import PassLost
from gbmoe.plain.plain_loans import Price
from gbmoe.testing import mapped_files
from tests import rank_groups

pytestmark = pytest.mark.slow

EXPERTS, HIDDEN = 8, 64
DEVICE_TYPE, WORLD = "cpu", 2  # of the processes that run the cases


def device():
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE_TYPE == "cuda" else torch.device("cpu")


def tokens_of_ranks():
    return (9, 0, 5, 14)[:WORLD] if WORLD > 2 else (9, 14)


def args(**changes):
    fields = dict(hidden_size=HIDDEN, ffn_hidden_size=96, moe_num_experts=EXPERTS, moe_top_k=3, mlp_type="glu", bias=False, fp16=False,
                  device=device(), activation_fn=F.silu, moe_loss_weight=0,
                  init_method=functools.partial(torch.nn.init.normal_, std=0.1))
    return Arguments(**{**fields, **changes})


def make(**changes):
    torch.manual_seed(0)
    return ParallelDroplessMLP(args(moe_expert_model_parallelism=True, **changes))


def drawn(tokens, seed=1):
    """(x, ids, router weights, gradient) of all ranks' tokens, cut by rank."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(tokens)
    x, grad = (torch.randn(total, HIDDEN, generator=generator) for _ in range(2))
    ids = torch.rand(total, EXPERTS, generator=generator).topk(3).indices
    weights = torch.rand(total, 3, generator=generator)
    return [t.to(device()).split(list(tokens)) for t in (x, ids, weights, grad)]


def mine(rank, tokens, seed=1):
    return [each[rank].clone() for each in drawn(tokens, seed)]


def call(layer, x, ids, weights):
    return layer(x, x.new_zeros(x.size(0), EXPERTS), weights, ids)


def step(layer, rank, tokens=None, x_needs=True, weights_need=True, seed=1):
    """One forward and backward of this rank's tokens: (out, dx, dweights, gradients of the parameters)."""
    x, ids, weights, grad = mine(rank, tokens or tokens_of_ranks(), seed)
    x.requires_grad_(x_needs)
    weights.requires_grad_(weights_need)
    layer.zero_grad()
    out = call(layer, x, ids, weights)
    if out.requires_grad:
        out.backward(grad)
    module = getattr(layer, "_orig_mod", layer)
    return out.detach(), x.grad, weights.grad, {name: p.grad for name, p in module.named_parameters()}


def expected(rank, tokens=None, seed=1, **changes):
    """What one process computes on the tokens of all ranks, cut to this rank's part. Gradients of experts are means over ranks."""
    tokens = tokens or tokens_of_ranks()
    torch.manual_seed(0)
    whole = ParallelDroplessMLP(args(**changes))
    x, ids, weights, grad = (torch.cat(each) for each in drawn(tokens, seed))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = call(whole, x, ids, weights)
    out.backward(grad)
    cut = [t.split(list(tokens))[rank] for t in (out.detach(), x.grad, weights.grad)]
    return *cut, {name: p.grad.chunk(WORLD)[rank] / WORLD for name, p in whole.named_parameters()}


def compare(got, want):
    """Every gradient that there is, against the one process's."""
    for g, w in zip((*got[:3], *got[3].values()), (*want[:3], *want[3].values())):
        if g is not None:
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def maps_memory():
    """Whether a pass has mapped memory since it was released last."""
    return bool(peer_memory._MEMORIES)


CASES, GPUS_ALONE = {}, set()


def case(function):
    CASES[function.__name__] = function
    return function


def of_gpus(function):
    GPUS_ALONE.add(function.__name__)
    return case(function)


# --------------------------------------------------------------------------------------------------------- what may differ


@case
def experts_frozen_on_one_rank_hung_all(rank):
    for fields in ({}, {"expert_parallel_rows": 4.0}, {"expert_parallel_exact": True}, {"expert_parallel_loans": 2}):
        for frozen in ((0,), (WORLD - 1,), tuple(range(1, WORLD))):
            layer = make(**fields)
            layer.requires_grad_(rank not in frozen)
            got = step(layer, rank)
            compare(got, expected(rank))
            assert all((grad is None) == (rank in frozen) for grad in got[3].values())
    assert maps_memory()


@case
def tokens_without_a_gradient_on_one_rank_left_stale_rows(rank):
    for fields in ({}, {"expert_parallel_rows": 4.0}, {"expert_parallel_loans": 2}):
        for seed in (1, 2):  # rows of the first were those of the second
            got = step(make(**fields), rank, x_needs=rank != 0, weights_need=rank != WORLD - 1, seed=seed)
            compare(got, expected(rank, seed=seed))
            assert (got[1] is None) == (rank == 0) and (got[2] is None) == (rank == WORLD - 1)


@case
def nothing_to_train_on_one_rank(rank):
    layer = make()
    layer.requires_grad_(rank != 0)
    got = step(layer, rank, x_needs=rank != 0, weights_need=rank != 0)
    compare(got, expected(rank))
    assert got[1] is None or rank != 0


@case
def no_gradient_of_tokens_anywhere(rank):
    layer = make()
    compare(step(layer, rank, x_needs=False, weights_need=False), expected(rank))
    layer.mlp.w1.requires_grad_(rank == 0)
    layer.mlp.v1.requires_grad_(False)
    compare(step(layer, rank, x_needs=False, weights_need=False), expected(rank))


@case
def more_ranks_than_whole_matrices_are_copied_for(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "RANKS_WITH_COPY_ENGINES", 1)
        experts_frozen_on_one_rank_hung_all(rank)


@case
def compiled_on_one_rank_alone_hung(rank):
    layer = make()
    graph = torch.compile(layer, backend="aot_eager") if rank == 0 else layer
    compare(step(graph, rank), expected(rank))
    compare(step(graph, rank, x_needs=rank != 0), expected(rank))
    torch.compiler.reset()


@case
def a_rank_beyond_its_recompile_limit(rank):
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    graph = torch.compile(make(), backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2, cache_size_limit=2):
        for more in range(4):
            tokens = (6 + more, 3, 5, 2)[:WORLD]
            compare(step(graph, rank, tokens, seed=more), expected(rank, tokens, seed=more))
    torch.compiler.reset()


@case
def only_some_ranks_could_map_memory(rank):
    """They waited for the others in each other's memory, while the others exchanged."""
    for changes in (dict(mlp_impl="bmm" if rank == 0 else "gbmoe"), dict(activation_fn=F.silu if rank else lambda x: x * x.sigmoid())):
        layer = make(**changes)
        assert layer._prepared.maps is False
        compare(step(layer, rank), expected(rank))


@case
def weights_that_hooks_compute_are_exchanged_by_all_ranks(rank):
    layer = make()
    torch.nn.utils.prune.identity(layer.mlp, "w2")
    got = step(layer, rank)
    compare((*got[:3], {}), expected(rank))


def made_elsewhere(on, **changes):
    """make()'s layer, which was made on another type of device."""
    layer = make(device=on, **changes).to_empty(device=device())
    layer.load_state_dict(make(**changes).state_dict())
    return layer


@case
def a_layer_made_on_the_meta_device_exchanged_its_rows(rank):
    for transport in ("auto", "peer_memory"):
        peer_memory.release()
        layer = made_elsewhere("meta", expert_parallel_transport=transport)
        for _ in range(2):
            compare(step(layer, rank), expected(rank))
            assert maps_memory()
    peer_memory.release()
    compare(step(made_elsewhere("meta", expert_parallel_transport="exchange"), rank), expected(rank))
    assert not maps_memory()


@case
def a_layer_made_on_the_meta_device_is_compiled_on_one_rank(rank):
    peer_memory.release()
    layer = made_elsewhere("meta")
    graph = torch.compile(layer, backend="aot_eager") if rank == 0 else layer
    for x_needs in (True, rank != 0):
        compare(step(graph, rank, x_needs=x_needs), expected(rank))
    assert maps_memory()
    torch.compiler.reset()


@case
def ranks_whose_rows_cannot_be_pulled_after_a_layer_was_moved(rank):
    peer_memory.release()
    layer = made_elsewhere("meta")
    torch.nn.utils.prune.identity(layer.mlp, "w2")
    got = step(layer, rank)
    compare((*got[:3], {}), expected(rank))
    layer = made_elsewhere("meta", mlp_impl="bmm" if rank == 0 else "gbmoe")
    compare(step(layer, rank), expected(rank))


@of_gpus
def a_layer_moved_from_cpus_exchanged_its_rows(rank):
    peer_memory.release()
    layer = made_elsewhere("cpu")
    compare(step(layer, rank), expected(rank))
    assert maps_memory()


@case
def rows_and_weights_kept_on_some_ranks(rank):
    layer = make(keep_gathered_rows=rank == 0)
    assert layer.mlp.args.keep_gathered_rows == (rank == 0)
    compare(step(layer, rank), expected(rank))
    compare(step(make(keep_gathered_rows=True), rank), expected(rank))


@case
def an_error_of_one_rank_before_its_pass(rank):
    layer = make()
    if rank == 0:
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            layer(torch.zeros(3, HIDDEN, device=device()), None, torch.zeros(3, 3, device=device()), "no ids")
    compare(step(layer, rank), expected(rank))


# ----------------------------------------------------------------------------------------------------- what may not differ


def refusal_of(do):
    """What `do` raises. torch.utils.checkpoint of some versions leaves its hooks only when the frames of an error in it are freed."""
    with pytest.raises(ValueError, match="expert parallelism: expected all ranks of the group to make the same pass") as error:
        do()
    return str(error.value)


def differs(words, rank, do):
    """`do` raises on all ranks what says in what they differ, and they go on together."""
    said = refusal_of(do)
    assert re.search(words, said), said
    gc.collect()
    compare(step(make(), rank), expected(rank))


def ranks(*which):
    return f"rank {which[0]}" if len(which) == 1 else f"ranks {', '.join(map(str, which))}"


ALL_BUT_LAST = lambda: ranks(*range(WORLD - 1))  # noqa: E731
ALL_BUT_FIRST = lambda: ranks(*range(1, WORLD))  # noqa: E731


@case
def layers_in_another_order_gave_each_others_outputs(rank):
    for fields in ({}, {"expert_parallel_exact": True}):
        first, second = make(**fields), make(**fields)
        step(first, rank)
        differs(rf"layer is \d+ on {ALL_BUT_LAST()}, \d+ on rank {WORLD - 1}$", rank,
                lambda: step(second if rank == WORLD - 1 else first, rank))


@case
def layers_of_other_shapes_in_another_order_at_their_first_call(rank):
    first, second = make(), make(moe_top_k=2)

    def call_one():
        x, ids, weights, _ = mine(rank, tokens_of_ranks())
        if rank == 0:
            return call(second, x, ids[:, :2].contiguous(), weights[:, :2].contiguous())
        return call(first, x, ids, weights)

    peer_memory.release()
    differs(rf"layer is \d+ on rank 0, \d+ on {ALL_BUT_FIRST()}", rank, call_one)
    differs(rf"layer is \d+ on rank 0, \d+ on {ALL_BUT_FIRST()}", rank, call_one)  # once there is room for one of them


@case
def a_layer_left_out_once(rank):
    first, second = make(), make()

    def call_some():
        for layer in (second,) if rank == 0 else (first, second):
            step(layer, rank)

    differs(rf"layer is \d+ on rank 0, \d+ on {ALL_BUT_FIRST()}", rank, call_some)


@case
def gradients_recorded_on_one_rank(rank):
    def call_it():
        with torch.no_grad() if rank else nullcontext():
            step(make(), rank)

    differs(rf"torch.is_grad_enabled\(\) is True on rank 0, False on {ALL_BUT_FIRST()}$", rank, call_it)


@case
def checkpointed_on_one_rank(rank):
    layer = make()

    def call_it():
        x, ids, weights, grad = mine(rank, tokens_of_ranks())
        one = functools.partial(checkpoint, call, use_reentrant=False) if rank == 0 else call
        one(layer, x.requires_grad_(), ids, weights).backward(grad)

    differs(rf"torch.utils.checkpoint is True on rank 0, False on {ALL_BUT_FIRST()}$", rank, call_it)


@case
def autocast_on_one_rank(rank):
    layer = make()

    def call_it():
        x, ids, weights, _ = mine(rank, tokens_of_ranks())
        with torch.autocast(DEVICE_TYPE, torch.bfloat16, enabled=rank == 0):
            call(layer, x.bfloat16() if rank == 0 else x, ids, weights)

    differs(rf"path is .*bfloat16.* on rank 0, .* on {ALL_BUT_FIRST()}$", rank, call_it)


@case
def autocast_on_one_rank_with_tokens_of_one_dtype(rank):
    def call_it():
        with torch.autocast(DEVICE_TYPE, torch.bfloat16, enabled=rank == 0):
            call(make(), *mine(rank, tokens_of_ranks())[:3])

    differs(rf"path is .*bfloat16.* on rank 0, .* on {ALL_BUT_FIRST()}$", rank, call_it)


@case
def a_compiled_rank_that_cannot_pull_rows_hung(rank):
    """It exchanged them without a word, while the others waited for it in each other's memory."""
    layer = make()
    graph = torch.compile(layer, backend="aot_eager") if rank == 0 else layer

    def call_it():
        x, ids, weights, _ = mine(rank, tokens_of_ranks())
        call(graph, x, ids, weights.double() if rank == 0 else weights)

    differs(rf"path is 'exchange.* on rank 0, 'mapped memory.* on {ALL_BUT_FIRST()}", rank, call_it)
    torch.compiler.reset()


@case
def tokens_that_cannot_be_pulled_on_one_rank(rank):
    """With a transport that is named, that rank alone said so."""
    layer = make(expert_parallel_transport="peer_memory")

    def call_it():
        x, ids, weights, _ = mine(rank, tokens_of_ranks())
        call(layer, x.double() if rank == 0 else x, ids, weights)

    lost(rank, call_it, words="rank 0 ended a pass early: ValueError: Arguments: expert_parallel_transport: .* not float64", by=ValueError)


@case
def backward_of_layers_in_another_order(rank):
    """The next forward tells of it."""
    layers = make(), make()

    def call_both():
        x, ids, weights, grad = mine(rank, tokens_of_ranks())
        outs = [call(layer, x, ids, weights) for layer in layers]
        for out in outs if rank == 0 else outs[::-1]:
            out.backward(grad)
        call(layers[0], x, ids, weights)

    differs(rf"(layer|layers of the passes of backward since) is .* on rank 0, .* on {ALL_BUT_FIRST()}$", rank, call_both)


@case
def backward_left_out_on_one_rank(rank):
    layer = make()

    def call_it():
        x, ids, weights, grad = mine(rank, tokens_of_ranks())
        out = call(layer, x, ids, weights)
        if rank:
            out.backward(grad)
        call(layer, x, ids, weights)

    differs(rf"(pass|layers of the passes of backward since) is .* on rank 0, .* on {ALL_BUT_FIRST()}$", rank, call_it)


@case
def weights_that_hooks_compute_on_one_rank(rank):
    """It exchanged rows, while the others pulled them."""
    layer = make()
    if rank == 0:
        torch.nn.utils.prune.identity(layer.mlp, "w2")
    differs(rf"path is 'exchange.* on rank 0, 'mapped memory.* on {ALL_BUT_FIRST()}", rank, lambda: step(layer, rank))


@case
def layers_in_another_order_where_no_host_waits(rank):
    """On GPUs a later pass reports it, on all ranks."""
    first, second = make(expert_parallel_rows=4.0), make(expert_parallel_rows=4.0)
    x, ids, weights, _ = mine(rank, tokens_of_ranks())

    def calls(*layers):
        with torch.no_grad():
            for layer in layers:
                call(layer, x, ids, weights)
        torch.get_device_module(DEVICE_TYPE).synchronize()

    calls(first, second)
    with pytest.raises(ValueError, match="expected all ranks of the group to make the same pass of the same layer"):
        calls(first) if rank == 0 else calls(second)
        calls(first)
    compare(step(first, rank), expected(rank))


# ------------------------------------------------------------------------------------------ passes that a rank leaves early


class Simulated(RuntimeError):
    """As a rank's running out of memory."""


def failing_once(patch, module, name, here):
    """module.name raises at its next call, on a rank where that is `here`."""
    original, armed = getattr(module, name), [here]

    def function(*arguments, **more):
        if armed.pop() if armed else False:
            raise Simulated("no memory is left")
        return original(*arguments, **more)

    patch.setattr(module, name, function)


def lost(rank, do, other=PassLost, words="rank 0 ended a pass early: Simulated: no memory is left", by=Simulated):
    """`do` raises the error itself on rank 0, and on the others what tells of it; once. Then the ranks go on together."""
    with pytest.raises(by if rank == 0 else other, match=None if rank == 0 else words):
        do()
    for seed in (1, 2):
        compare(step(make(), rank, seed=seed), expected(rank, seed=seed))


@case
def an_exception_between_barriers_of_forward_made_later_passes_wrong(rank):
    layer = make()
    with torch.no_grad():
        for fields in ({}, {"expert_parallel_rows": 4.0}, {"expert_parallel_loans": 2}):
            layer = make(**fields)
            step(layer, rank)
            for module, name in ((peer_transport, "push_sums"), (expert_forward_backward, "forward"), (peer_transport, "sum_of_ranks")):
                with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
                    failing_once(patch, module, name, rank == 0)
                    lost(rank, lambda: [step(layer, rank) for _ in range(10)])


@case
def an_exception_between_barriers_of_backward(rank):
    layer = make()
    for module, name in ((region_rows, "pull_rows"), (expert_forward_backward, "compute_gradients"),
                         (expert_forward_backward, "_give_back_dx")):
        x, ids, weights, grad = mine(rank, tokens_of_ranks())
        out = call(layer, x.requires_grad_(), ids, weights)
        with pytest.MonkeyPatch.context() as patch:
            failing_once(patch, module, name, rank == 0)

            def backward_and_more():
                out.backward(grad)
                step(layer, rank)

            lost(rank, backward_and_more)


def goes_on_at_once(rank, do, is_lost):
    """`do` fails on rank 0. Before the next pass, all hosts wait for their devices, and for a collective; then the others know."""
    told = False
    try:
        do()
    except (Simulated, PassLost) as error:
        told = True
        assert isinstance(error, Simulated) == (rank == 0)
    torch.get_device_module(DEVICE_TYPE).synchronize()
    total = torch.ones((), device=device())
    dist.all_reduce(total)
    assert total.item() == WORLD
    if not told:
        assert rank and is_lost()
        with pytest.raises(PassLost, match="rank 0 ended a pass early: Simulated: no memory is left"):
            check_passes() if rank == 1 else step(make(), rank)
    for seed in (1, 2):
        compare(step(make(), rank, seed=seed), expected(rank, seed=seed))


@case
def hosts_that_waited_for_their_devices_after_a_failure_of_another_hung(rank):
    """Their devices waited in a barrier that the rank which had left did not begin."""
    for fields in ({}, {"expert_parallel_rows": 4.0}, {"expert_parallel_exact": True}, {"expert_parallel_loans": 2}):
        for module, name in ((peer_transport, "push_sums"), (peer_transport, "sum_of_ranks"),
                             (expert_forward_backward, "compute_gradients"), (expert_forward_backward, "_give_back_dx")):
            layer = make(**fields)
            x, ids, weights, grad = mine(rank, tokens_of_ranks())
            x.requires_grad_()
            results = []

            def do(layer=layer, x=x, ids=ids, weights=weights, grad=grad, results=results, module=module, name=name):
                with pytest.MonkeyPatch.context() as patch:
                    failing_once(patch, module, name, rank == 0)
                    results.append(call(layer, x, ids, weights))
                    results[0].backward(grad)
                    results.append(x.grad)

            step(layer, rank)
            goes_on_at_once(rank, do, lambda name=name, results=results: name == "sum_of_ranks" or bool(results[-1].isnan().any()))


@case
def a_check_missed_a_rank_that_left_while_it_waited_for_the_device(rank):
    step(make(), rank)
    memory = peer_memory.of_group(None, device())
    board = memory.board

    def wait_for_the_device(_):
        dist.barrier()
        until = time.monotonic() + 20
        while not board.is_broken and time.monotonic() < until:
            time.sleep(0.01)

    def do():
        with memory.passing():
            memory.announce(1, "none", False)
            if rank == 0:
                dist.barrier()
                raise Simulated("no memory is left")
        with pytest.MonkeyPatch.context() as patch:
            streams = SimpleNamespace(synchronize=wait_for_the_device, current_stream=memory._streams.current_stream)
            patch.setattr(memory, "_streams", streams)
            check_passes()

    lost(rank, do)


@case
def a_refusal_at_the_beginning_of_a_pass_lost_the_pass_before(rank):
    """It counted to the pass that the rank had announced last, whose last barrier slower ranks were about to leave."""
    layer = make()
    step(layer, rank)
    x, ids, weights, grad = mine(rank, tokens_of_ranks())
    out = call(layer, x.requires_grad_(), ids, weights)
    arrived = peer_transport.PeerTransport.arrived

    def held(transport):
        board = transport._memory.board
        leave = board.wait_in_barrier

        def wait_in_barrier(channel):
            until = time.monotonic() + 20
            while not board.is_broken and time.monotonic() < until:
                time.sleep(0.01)
            assert board.is_broken
            leave(channel)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(board), "wait_in_barrier", wait_in_barrier)
            return arrived(transport)

    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(peer_transport.PeerTransport, "arrived", held)
        out.backward(grad)
    with pytest.MonkeyPatch.context() as patch:
        failing_once(patch, sys.modules["gbmoe.parallel.peer_experts"], "_check", rank == 0)
        lost(rank, lambda: step(layer, rank))
    assert x.grad.isfinite().all()


@case
def an_exception_in_what_runs_meanwhile(rank):
    layer = make()
    x, ids, weights, _ = mine(rank, tokens_of_ranks())

    def meanwhile():
        if rank == 0:
            raise Simulated("no memory is left")

    def both():
        layer(x, x.new_zeros(x.size(0), EXPERTS), weights, ids, meanwhile=meanwhile)
        call(layer, x, ids, weights)

    lost(rank, both)


@case
def an_exception_while_the_memory_grows(rank):
    layer, empty = make(), mapped_files if DEVICE_TYPE == "cpu" else peer_memory._symmetric_memory()
    step(layer, rank)
    with pytest.MonkeyPatch.context() as patch:
        failing_once(patch, empty, "empty", rank == 0)
        lost(rank, lambda: step(layer, rank, tokens=(700,) * WORLD))
    tokens = (900,) * WORLD
    compare(step(layer, rank, tokens), expected(rank, tokens))


@case
def a_batch_beyond_the_room_left_the_others_waiting(rank):
    layer = make(expert_parallel_rows=4.0)
    tokens = (9,) * WORLD
    step(layer, rank, tokens)
    room = max(number for layers, number in peer_memory.of_group(None, device())._capacities.items() if "rows are bounded" in layers)
    lost(rank, lambda: [step(layer, rank, (room + 1, *tokens[1:])) for _ in range(10)], by=ValueError,
         words=r"rank 0 ended a pass early: ValueError: peer_experts: x: expected at most \d+ tokens")


# ---------------------------------------------------------------------------------------------------------- what is saved


@case
def checkpointing_failed_where_the_room_had_grown_since_forward(rank):
    """Recomputed values had other shapes: those of the memory that all layers share."""
    peer_memory.release()
    for fields in ({}, {"expert_parallel_exact": True}, {"keep_gathered_rows": True}, {"expert_parallel_rows": 0.5},
                   {"expert_parallel_loans": 2}):
        layer, other = make(**fields), make()  # of one kind
        call(layer, *mine(rank, (700,) * WORLD)[:3])  # where rows are bounded, the first call makes the room
        for few, many in (((9, 14, 0, 3), (1100, 7, 0, 3)), ((150, 90, 1, 3), (1700, 300, 80, 3)), ((0, 1, 2, 0), (2400, 1, 2, 0))):
            few, many = few[:WORLD], many[:WORLD]
            x, ids, weights, grad = mine(rank, few)
            x.requires_grad_()
            weights.requires_grad_()
            layer.zero_grad()
            out = checkpoint(call, layer, x, ids, weights, use_reentrant=False)
            with torch.no_grad():
                call(other, *mine(rank, many)[:3])
            out.backward(grad)
            got = out.detach(), x.grad, weights.grad, {name: p.grad for name, p in layer.named_parameters()}
            compare(got, expected(rank, few))


@case
def evaluation_with_parameters_that_need_gradients_stored_pre_activations(rank):
    layer, saves = make(), []
    original = expert_forward_backward.forward
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(expert_forward_backward, "forward", lambda *arguments: saves.append(arguments[-1]) or original(*arguments))
        x, ids, weights, _ = mine(rank, tokens_of_ranks())
        for fields in ({}, {"expert_parallel_rows": 4.0}):
            call(make(**fields), x, ids, weights)
    assert saves == [False, False] and layer.mlp.w1.requires_grad


@of_gpus
def evaluation_takes_no_more_memory_than_without_parameters_that_need_gradients(rank):
    peaks, x = [], torch.randn(4096, HIDDEN, device=device())
    layer = make(ffn_hidden_size=4096)
    ids, weights = torch.rand(4096, EXPERTS, device=device()).topk(3).indices, torch.rand(4096, 3, device=device())
    for needs in (True, False):
        layer.requires_grad_(needs)
        with torch.no_grad():
            for _ in range(3):
                call(layer, x, ids, weights)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call(layer, x, ids, weights)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.05 * peaks[1], peaks


@case
def weights_are_kept_in_float8(rank):
    """Their memory is saved as in one process; the gradients are those without it."""
    from gbmoe import Float8BlockScaling
    results = []
    for kept in (False, True):
        layer = make(fp8_recipe=Float8BlockScaling(keep_weights=kept), bf16=True)
        x, ids, weights, grad = mine(rank, (40,) * WORLD)
        x = x.bfloat16().requires_grad_()
        call(layer, x, ids, weights).backward(grad.bfloat16())
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@case
def no_pass_leaves_an_autograd_graph_behind(rank):
    layer = make()
    gc.collect()
    gc.disable()
    try:
        step(layer, rank)
        assert not any(isinstance(thing, peer_transport.PeerTransport) for thing in gc.get_objects())
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------------- GPUs


@of_gpus
def a_graph_wrote_to_memory_that_a_larger_call_had_freed(rank):
    layer = make(expert_parallel_rows=4.0, bf16=True, engine="hopper")
    graph, out, x, ids, weights = captured_forward(layer, rank)
    graph.replay()
    torch.cuda.synchronize()
    before = out.clone()
    memory = peer_memory.of_group(None, device())
    addresses = list(memory._handle.buffer_ptrs)
    step(make(), rank, tokens=(20000,) * WORLD)
    assert list(memory._handle.buffer_ptrs) != addresses
    junk = [torch.full((1 << 22,), float("nan"), device=device()) for _ in range(8)]  # may take the memory
    out.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, before) and all(t.isnan().all() for t in junk)


@of_gpus
def replays_on_one_stream_and_passes_on_another_were_not_ordered(rank):
    layer, eager = make(expert_parallel_rows=4.0, bf16=True, engine="hopper"), make()
    step(eager, rank, tokens=(4000,) * WORLD)
    graph, out, x, ids, weights = captured_forward(layer, rank)
    graph.replay()
    torch.cuda.synchronize()
    before, side = out.clone(), torch.cuda.Stream()
    wanted = expected(rank)
    for turn in range(30):
        if turn % WORLD == rank:
            torch.cuda._sleep(int(5e6))
        with torch.cuda.stream(side):
            graph.replay()
        got = step(eager, rank)
        torch.cuda.synchronize()
        compare(got, wanted)
        assert torch.equal(out, before), turn


def captured_forward(layer, rank):
    x, ids, weights, _ = mine(rank, (64,) * WORLD)
    x = x.bfloat16()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call(layer, x, ids, weights)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(layer, x, ids, weights)
    return graph, out, x, ids, weights


# -------------------------------------------------------------------------------------------------------------- processes


def worker(rank, store, world, device_type, results):
    global DEVICE_TYPE, WORLD
    DEVICE_TYPE, WORLD = device_type, world
    if device_type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    loans.price_in_rows = lambda *_: Price()  # as on a CPU: passes of few tokens would lend nothing
    rank_groups.join_and_map_memory(rank, world, store, device_type)
    for name, function in CASES.items():
        if device_type == "cpu" and name in GPUS_ALONE:
            continue
        try:
            function(rank)
            torch.get_device_module(device_type).synchronize()
            results[rank, name] = None
        except Exception:
            results[rank, name] = traceback.format_exc()
            time.sleep(2)  # in which others find the same
            os._exit(1)  # the ranks may no longer go together: what waits for this one is ended
    peer_memory.release()


STARTS = [("cpu", 2), ("cpu", 4), ("cuda", 2), ("cuda", 4)]
MARKS = {"cpu": [pytest.mark.xdist_group("mapped-files")], "cuda": [pytest.mark.gpu, pytest.mark.xdist_group("two-gpus")]}
RUNS = [pytest.param(device_type, world, name, marks=MARKS[device_type], id=f"{name}-{device_type}-{world}")
        for device_type, world in STARTS for name in CASES if device_type == "cuda" or name not in GPUS_ALONE]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function from a type of device and a number of ranks to what each of them found; they are started once."""
    @functools.cache
    def start(device_type, world):
        return rank_groups.shared_by_ranks(worker, world, tmp_path_factory.mktemp("store"), world, device_type, device_type=device_type,
                                           may_fail=True)  # a case says why

    return start


@pytest.mark.parametrize("device_type, world, name", RUNS)
def test_ranks_that_map_memory_agree(results_of, device_type, world, name):
    rank_groups.skip_without_devices(device_type, world)
    results = results_of(device_type, world)
    failures = {rank: results.get((rank, name), "did not end") for rank in range(world) if results.get((rank, name), "did not end")}
    assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items())


def test_the_digest_depends_on_all_fields():
    passes = [pass_agreement.Pass(1, "a", True, *rest) for rest in ((None, 3), (True, 3), (None, 3, (2,)))]
    assert len({pass_agreement.digest_of(pass_.text()) for pass_ in passes}) == 3
