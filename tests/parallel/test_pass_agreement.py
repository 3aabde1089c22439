"""Ranks that differ: where that is right their gradients are those of one process, and elsewhere all of them say who differs in what.

Four processes (gloo) run all cases at one start, over the four ranks as equals, and some of them as two nodes of two.

Layers and tokens are those of test_peer_agreement.py. Here no rank maps memory.
"""

import functools
import logging
import re
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gbmoe.parallel import peer_memory
from tests import rank_groups
from tests.parallel import test_peer_agreement as of_peers
from tests.parallel.test_peer_agreement import EXPERTS, HIDDEN, compare, expected, mine, step

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("agreement")]  # one start serves all tests

WORLD = 4
NODES = {"equals": None, "nodes": 2}


def make(ranks_per_node, **changes):
    return of_peers.make(expert_parallel_ranks_per_node=ranks_per_node, **changes)


# --------------------------------------------------------------------------------------------------------- what may differ


def frozen_experts_on_some_ranks(rank, nodes, **changes):
    """Gradients of the other ranks' experts were 2.8 to 3.8 times too large."""
    for frozen in ((0, 1), (3,)):
        layer = make(nodes, **changes)
        layer.requires_grad_(rank not in frozen)
        got = step(layer, rank)
        compare(got, expected(rank))
        assert all((grad is None) == (rank in frozen) for grad in got[3].values())


def nothing_to_train_on_one_rank(rank, nodes, **changes):
    layer = make(nodes, **changes)
    layer.requires_grad_(rank != 2)
    got = step(layer, rank, x_needs=rank not in (1, 2), weights_need=rank != 2)
    compare(got, expected(rank))
    assert (got[1] is None) == (rank in (1, 2)) and (got[2] is None) == (rank == 2)


def no_gradient_of_tokens_anywhere(rank, nodes, **changes):
    """As in a first layer after frozen embeddings. Nobody computes dx, nor sends it, and a rank with frozen experts
    holds up no other."""
    layer = make(nodes, **changes)
    compare(step(layer, rank, x_needs=False, weights_need=False), expected(rank))
    layer.requires_grad_(rank != 1)
    compare(step(layer, rank, x_needs=False, weights_need=False), expected(rank))


def shadows_with_frozen_experts_on_one_rank(rank, nodes):
    layer = make(nodes, expert_parallel_shadows=3, ffn_hidden_size=2)
    layer.requires_grad_(rank != 1)
    compare(step(layer, rank, tokens=(40, 40, 40, 40)), expected(rank, tokens=(40, 40, 40, 40), ffn_hidden_size=2))


def another_implementation_on_one_rank(rank, nodes):
    layer = make(nodes, mlp_impl=("gbmoe", "bmm", "reference", "gbmoe")[rank])
    compare(step(layer, rank), expected(rank))


def an_activation_without_a_kernel_on_one_rank(rank, nodes):
    layer = make(nodes, activation_fn=F.silu if rank else lambda x: x * x.sigmoid())
    compare(step(layer, rank), expected(rank))


def compiled_on_some_ranks(rank, nodes):
    layer = make(nodes)
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True) if rank % 2 else layer
    compare(step(graph, rank), expected(rank))
    layer.requires_grad_(rank != 1)
    compare(step(graph, rank, x_needs=rank != 3), expected(rank))
    torch.compiler.reset()


def a_rank_beyond_its_recompile_limit(rank, nodes):
    """It went eager alone, and gradients of experts' weights were wrong by 40 to 110 % from then on."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    layer = make(nodes)
    graph = torch.compile(layer, backend="aot_eager", dynamic=False) if rank in (0, 2) else layer
    with torch._dynamo.config.patch(recompile_limit=1, cache_size_limit=1):
        for more in range(3):  # the tokens of the first rank alone are others each time
            tokens = (6 + more, 3, 5, 2)
            compare(step(graph, rank, tokens, seed=more), expected(rank, tokens, seed=more))
    torch.compiler.reset()


def an_error_of_one_rank_before_its_rows_travel(rank, nodes):
    layer = make(nodes)
    if rank == 1:
        with pytest.raises(TypeError, match="experts: expected dtype"):
            layer(torch.zeros(3, HIDDEN), torch.zeros(3, EXPERTS), torch.zeros(3, 3), torch.zeros(3, 3))
    compare(step(layer, rank), expected(rank))


def only_some_ranks_could_map_memory(rank, nodes):
    """They waited for the others in each other's memory, while the others exchanged."""
    for changes in (dict(mlp_impl="bmm" if rank == 1 else "gbmoe"), dict(activation_fn=F.silu if rank else lambda x: x * x.sigmoid())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_memory, "unavailable", lambda *_: None)
            layer = make(None, **changes)
        assert not layer._prepared.maps
        compare(step(layer, rank), expected(rank))


def activations_that_cannot_be_compared(rank, nodes):
    """A module with parameters that are not equal yet, and one that draws; the generator's state stays."""
    states = []
    for activation in (F.silu, torch.nn.PReLU(init=0.1 * rank), torch.nn.RReLU()):
        make(None, activation_fn=activation)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def another_implementation_under_autocast(rank, nodes, **changes):
    """Its sums may have another dtype than those of the other ranks, which these do not expect: here as on GPUs, where autocast sums in
    float32."""
    layer = make(nodes, **{"mlp_impl": "bmm" if rank == 1 else "gbmoe", **changes})
    if rank == 1:
        layer.mlp.register_forward_hook(lambda module, given, out: out.float())
    x, ids, weights, grad = mine(rank, of_peers.tokens_of_ranks())
    with torch.autocast("cpu", torch.bfloat16):
        out = of_peers.call(layer, x.requires_grad_(), ids, weights)
    out.backward(grad.bfloat16())
    want = expected(rank)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(x.grad, want[1], rtol=0.05, atol=0.05)


def exact_layers_whose_ranks_need_different_gradients(rank, nodes):
    """With kernels, whose backward multiplies by router weights, and without, where the exchange does."""
    for implementation in ("gbmoe", "reference"):
        for differ in (frozen_experts_on_some_ranks, nothing_to_train_on_one_rank, no_gradient_of_tokens_anywhere,
                       another_implementation_under_autocast):
            differ(rank, None, expert_parallel_exact=True, mlp_impl=implementation)


RIGHT = [
    another_implementation_under_autocast, exact_layers_whose_ranks_need_different_gradients,
    only_some_ranks_could_map_memory, activations_that_cannot_be_compared, frozen_experts_on_some_ranks, nothing_to_train_on_one_rank,
    no_gradient_of_tokens_anywhere, shadows_with_frozen_experts_on_one_rank, another_implementation_on_one_rank,
    an_activation_without_a_kernel_on_one_rank, compiled_on_some_ranks, a_rank_beyond_its_recompile_limit,
    an_error_of_one_rank_before_its_rows_travel]


# ----------------------------------------------------------------------------------------------------- what may not differ


def layers_in_another_order(rank, nodes, **changes):
    """Layers of one shape gave each other's outputs, without a word."""
    first, second = make(nodes, **changes), make(nodes, **changes)
    step(second if rank == 3 else first, rank)


def exact_layers_in_another_order(rank, nodes):
    layers_in_another_order(rank, None, expert_parallel_exact=True)


def a_layer_left_out_once(rank, nodes):
    first, second = make(nodes), make(nodes)
    for layer in (second,) if rank == 1 else (first, second):
        step(layer, rank)


def autocast_on_one_rank(rank, nodes):
    layer = make(nodes)
    x, ids, weights, _ = mine(rank, of_peers.tokens_of_ranks())
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        layer(x.bfloat16() if rank == 0 else x, x.new_zeros(x.size(0), EXPERTS), weights, ids)


def autocast_of_one_rank_made_sums_that_others_did_not_expect(rank, nodes):
    """Tokens were of one dtype, and so were the rows. gloo aborted the process."""
    options = {"expert_parallel_chunks": 2}, {}, {"expert_parallel_shadows": 2}, {"expert_parallel_exact": True}
    for fields in options if nodes is None else options[:1]:
        layer = make(nodes, **fields)
        x, ids, weights, _ = mine(rank, of_peers.tokens_of_ranks())
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 2), pytest.raises(ValueError, match="path is .*bfloat16") as error:
            of_peers.call(layer, x, ids, weights)
    raise error.value


def gradients_recorded_on_one_rank(rank, nodes):
    with torch.no_grad() if rank else nullcontext():
        step(make(nodes), rank)


def compiled_gradients_recorded_on_one_rank(rank, nodes):
    graph = torch.compile(make(nodes), backend="aot_eager")
    try:
        with torch.no_grad() if rank else nullcontext():
            step(graph, rank)
    finally:
        torch.compiler.reset()


def checkpointed_on_one_rank(rank, nodes):
    layer = make(nodes)
    x, ids, weights, grad = mine(rank, of_peers.tokens_of_ranks())
    x = x.requires_grad_()
    call = functools.partial(checkpoint, layer, use_reentrant=False) if rank == 2 else layer
    call(x, x.new_zeros(x.size(0), EXPERTS), weights, ids).backward(grad)


def another_exact_implementation_on_one_rank(rank, nodes):
    step(make(None, expert_parallel_exact=True, mlp_impl="reference" if rank == 1 else "gbmoe"), rank)


def another_activation_on_one_rank(rank, nodes):
    make(None, activation_fn=F.relu if rank == 2 else F.silu)


def another_callable_on_one_rank(rank, nodes):
    """Functions of one name, without kernels."""
    factor = 2 if rank == 0 else 1
    make(None, activation_fn=lambda x: factor * x.tanh())


WRONG = {
    another_activation_on_one_rank: r"activation_fn is 'silu' on ranks 0, 1, 3, 'relu' on rank 2$",
    another_callable_on_one_rank: r"functions of one name that give different results$",
    layers_in_another_order: r"layer is \d+ on ranks 0, 1, 2, \d+ on rank 3$",
    exact_layers_in_another_order: r"layer is \d+ on ranks 0, 1, 2, \d+ on rank 3$",
    a_layer_left_out_once: r"layer is \d+ on ranks 0, 2, 3, \d+ on rank 1$",
    autocast_on_one_rank: r"path is .*bfloat16.* on rank 0, .* on ranks 1, 2, 3$",
    autocast_of_one_rank_made_sums_that_others_did_not_expect: r"path is .*float32.* on ranks 0, 1, 3, .*bfloat16.* on rank 2$",
    gradients_recorded_on_one_rank: r"torch.is_grad_enabled\(\) is True on rank 0, False on ranks 1, 2, 3$",
    compiled_gradients_recorded_on_one_rank: r"torch.is_grad_enabled\(\) is True on rank 0, False on ranks 1, 2, 3$",
    checkpointed_on_one_rank: r"torch.utils.checkpoint is False on ranks 0, 1, 3, True on rank 2$",
    another_exact_implementation_on_one_rank: r"path is .* on ranks 0, 2, 3, .* on rank 1$",
}


# Cases that run over nodes as well, where headers take two trips.
OVER_NODES = {frozen_experts_on_some_ranks, nothing_to_train_on_one_rank, no_gradient_of_tokens_anywhere,
              layers_in_another_order, a_layer_left_out_once, autocast_of_one_rank_made_sums_that_others_did_not_expect}
ALL = [(case, name) for case in (*RIGHT, *WRONG) for name in NODES if name == "equals" or case in OVER_NODES]


def worker(rank, store, folder):
    of_peers.WORLD = WORLD
    rank_groups.join(rank, WORLD, store, timeout=timedelta(seconds=120))
    results = {}
    for case, name in ALL:
        nodes = NODES[name]
        if case in RIGHT:
            case(rank, nodes)  # an error ends all processes, and is shown
            continue
        try:
            case(rank, nodes)
            results[case.__name__, name] = "no error"
        except Exception as error:
            results[case.__name__, name] = f"{type(error).__name__}: {error}"
        compare(step(make(nodes), rank), expected(rank))  # the ranks go on together
    torch.save(results, folder / f"{rank}.pt")
    rank_groups.leave()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return rank_groups.files_of_ranks(worker, WORLD, tmp_path_factory.mktemp("agreement"))


def test_ranks_may_differ_in_what_is_nobody_elses(ran):
    assert all(result for result in ran)  # the processes compared their results themselves, and ended well


@pytest.mark.parametrize("case, name", [each for each in ALL if each[0] in WRONG], ids=lambda part: getattr(part, "__name__", part))
def test_all_ranks_say_which_of_them_differ(ran, case, name):
    for rank, result in enumerate(ran):
        text = result[case.__name__, name]
        assert re.match("ValueError: .*: expected (all ranks of the group to make the same pass|the same function)", text), (rank, text)
        assert re.search(WRONG[case], text), (rank, text)
