"""Experts spread over ranks by all-to-all: several processes give what one gives on the gathered batch, and say what fails.

Four processes (gloo) run all cases at one start, which takes longer than they do; a case of two ranks runs in both halves at once.
On GPUs two processes (NCCL) run those that two can.
"""

import functools
import gc
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe.layers import Arguments
from gbmoe.parallel import (
    automatic_chunks,
    cost_model,
    differentiable_all_to_all,
    dispatch_combine,
    groups,
    peer_memory,
    shadowing,
)
from tests import rank_groups
from tests.forked_python import spawn

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("exchange")]  # one start serves all tests

HIDDEN, FFN = 16, 32


@dataclass(frozen=True)
class Case:
    """`tokens`: tokens of each rank; `only`: the experts that may be chosen; `checks`: what is checked besides the results."""
    tokens: tuple = (12, 12)
    fields: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    layers: int = 1
    steps: int = 1  # gradients of so many batches are summed
    only: int | None = None
    checkpointed: bool = False

    @property
    def world(self):
        return len(self.tokens)


FOUR, UNEVEN = (12,) * 4, (9, 0, 1, 14)
NODES = dict(expert_parallel_ranks_per_node=2)
GLU = dict(mlp_type="glu", bias=False)
SMALL = dict(ffn_hidden_size=2, expert_parallel_shadows=3)  # experts whose weights cost less to move than the rows of a few tokens
CASES = {
    "mlp": Case(),
    "glu": Case(fields=GLU),
    "glu of one expert a rank": Case(FOUR, dict(GLU, moe_num_experts=4)),
    "bias added": Case(fields=dict(return_bias=False)),
    "shared expert": Case(fields=dict(GLU, shared_expert=True)),
    "shards of experts": Case(FOUR, dict(GLU, moe_num_experts=2)),
    "shards of one expert": Case(FOUR, dict(moe_num_experts=1, moe_top_k=1)),
    "shards, uneven": Case(UNEVEN, dict(moe_num_experts=2, moe_top_k=1)),
    "four ranks, top 4": Case(FOUR, dict(GLU, moe_top_k=4, moe_num_experts=16)),
    "uneven": Case(UNEVEN, GLU),
    "uneven on two": Case((0, 13), GLU),
    "no tokens": Case((0, 0)),
    "a single row of one slot in bfloat16": Case((0, 1), dict(moe_top_k=1), dtype=torch.bfloat16),
    "empty experts": Case((2, 1), dict(GLU, moe_num_experts=16)),
    "all to one rank": Case(FOUR, GLU, only=2),
    "float64": Case(fields=GLU, dtype=torch.float64),
    "bfloat16": Case(FOUR, GLU, dtype=torch.bfloat16),
    "float16": Case(fields=dict(), dtype=torch.float16),
    "bmm": Case(fields=dict(mlp_impl="bmm")),
    "reference": Case(UNEVEN, dict(mlp_impl="reference")),
    "another activation": Case(fields=dict(activation_fn=torch.tanh, memory_optimized_mlp=True)),
    "two layers": Case(fields=GLU, layers=2),
    "checkpointed": Case(UNEVEN, GLU, layers=2, checkpointed=True),
    "accumulated": Case(FOUR, GLU, steps=3),
    "nodes": Case(FOUR, dict(GLU, moe_top_k=4, **NODES)),
    "nodes, mlp in bfloat16": Case(FOUR, NODES, dtype=torch.bfloat16),
    "nodes, uneven": Case(UNEVEN, dict(GLU, **NODES)),
    "nodes, no tokens": Case((0, 0, 0, 0), NODES),
    "nodes, all to one rank": Case(FOUR, dict(GLU, **NODES), only=2),
    "nodes, shards": Case(UNEVEN, dict(GLU, moe_num_experts=2, **NODES)),
    "nodes, checkpointed": Case(UNEVEN, dict(GLU, **NODES), layers=2, checkpointed=True),
    "chunks": Case(fields=dict(GLU, expert_parallel_chunks=2)),
    "chunks that do not divide": Case(FOUR, dict(GLU, moe_num_experts=20, moe_top_k=4, expert_parallel_chunks=3)),
    "chunks, chosen in one node": Case(fields=dict(GLU, expert_parallel_chunks=None)),
    "chunks, chosen": Case(UNEVEN, dict(GLU, moe_num_experts=16, expert_parallel_chunks=None, **NODES), layers=2),
    "chunks, more than experts": Case(fields=dict(expert_parallel_chunks=7)),
    "chunks, uneven": Case(UNEVEN, dict(GLU, expert_parallel_chunks=2), layers=2),
    "chunks, shards": Case(FOUR, dict(GLU, moe_num_experts=2, expert_parallel_chunks=2)),
    "chunks, checkpointed": Case(fields=dict(GLU, expert_parallel_chunks=2), checkpointed=True),
    "chunks and nodes": Case(UNEVEN, dict(GLU, moe_top_k=3, moe_num_experts=16, expert_parallel_chunks=2, **NODES)),
    "exact": Case(FOUR, dict(GLU, expert_parallel_exact=True), layers=2),
    "shadows": Case(FOUR, dict(GLU, **SMALL), only=2),
    "shadows, mlp on two": Case((13, 40), SMALL, only=2),
    "shadows, uneven": Case(UNEVEN, dict(GLU, **SMALL), only=2),
    "shadows of several ranks": Case((40,) * 4, dict(GLU, **SMALL, moe_num_experts=4)),
    "shadows, top 1 in bfloat16": Case(FOUR, dict(GLU, **SMALL, moe_top_k=1), dtype=torch.bfloat16, only=1),
    "shadows, float64": Case((0, 30), dict(GLU, **SMALL), dtype=torch.float64, only=2),
    "shadows, bmm": Case((0, 30), dict(SMALL, mlp_impl="bmm"), only=2),
    "shadows, reference": Case((8, 30), dict(SMALL, mlp_impl="reference"), only=2),
    "shadows, accumulated": Case(FOUR, dict(GLU, **SMALL), steps=3, only=2),
    "shadows, checkpointed": Case((40,) * 4, dict(GLU, **SMALL, moe_num_experts=4), layers=2, checkpointed=True),
    "shadows and chunks": Case((40,) * 4, dict(GLU, **SMALL, expert_parallel_chunks=2), only=2),
    "shadows and nodes": Case((40,) * 4, dict(GLU, **SMALL, **NODES), only=2),
    "shadows, chunks and nodes": Case((60, 0, 1, 40), dict(GLU, **SMALL, expert_parallel_chunks=2, **NODES), only=3),
    "shadows that do not pay": Case(FOUR, dict(GLU, expert_parallel_shadows=3)),
    "shadows, no tokens": Case((0, 0), SMALL),
}
# The experts that have shadows in the first forward. In most cases all tokens have the same two, which one rank holds.
SHADOWED = {name: [0, 1] for name in CASES if name.startswith("shadows")} | {
    "shadows of several ranks": [0, 2, 3], "shadows, checkpointed": [0, 2, 3], "shadows, top 1 in bfloat16": [0],
    "shadows, chunks and nodes": [0, 1, 2], "shadows that do not pay": [], "shadows, no tokens": []}
EXACT = {
    "glu": Case(FOUR, dict(GLU, moe_top_k=4)),
    "mlp": Case(dtype=torch.bfloat16, fields=dict(moe_top_k=3)),
    "glu in bfloat16": Case(UNEVEN, dict(GLU, moe_top_k=4, moe_num_experts=16), dtype=torch.bfloat16),
    "one expert a rank": Case(UNEVEN, dict(moe_num_experts=4), dtype=torch.float16),
    "another activation": Case(UNEVEN, dict(GLU, activation_fn=torch.tanh, moe_top_k=4), dtype=torch.bfloat16),
    "reference": Case(FOUR, dict(mlp_impl="reference", moe_top_k=4), dtype=torch.bfloat16),
    "no tokens": Case((0, 0)),
}
BYTES = {
    "a row once a rank": Case(UNEVEN, dict(GLU, moe_top_k=6)),
    "shards": Case(FOUR, dict(GLU, moe_num_experts=2)),
    "nodes": Case(FOUR, dict(GLU, moe_top_k=3, **NODES)),
    "chunks": Case(FOUR, dict(GLU, moe_top_k=3, expert_parallel_chunks=2)),
    "exact": Case(FOUR, dict(GLU, moe_top_k=3, expert_parallel_exact=True)),
    "shadows": Case((60, 40, 0, 50), dict(GLU, **SMALL, moe_num_experts=4)),
}
COMPILED = ("chunks and nodes", "exact", "shadows")
DIFFERING = {
    "ffn_hidden_size": (dict(ffn_hidden_size=64), "ffn_hidden_size is 32 on rank 0, 64 on rank 1"),
    "dtype": (dict(bf16=True), "dtype is 'torch.float32' on rank 0, 'torch.bfloat16' on rank 1"),
    "two of them": (dict(moe_top_k=1, expert_parallel_exact=True),
                    "moe_top_k is 2 on rank 0, 1 on rank 1; expert_parallel_exact is False on rank 0, True on rank 1"),
    "one that is wrong": (dict(moe_num_experts=7), "moe_num_experts is 8 on rank 0, 7 on rank 1"),
}


TRANSPORT = "auto"  # of this process; on the CPU an exchange
# Speeds with which a layer's rows take as long to travel as to be computed, and the number of chunks that they make fastest.
BALANCED = cost_model.Gpu(flops=1e12, bandwidth=1e12, launch=0), cost_model.Links(
    exchange=1e15, exchange_latency=0, network=2e10, network_latency=0, message=0, moving=0)
CHOSEN = 4


def arguments(case, device, **changes):
    fields = dict(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=8, moe_top_k=2, fp16=case.dtype == torch.float16,
                  bf16=case.dtype == torch.bfloat16, device=device, init_method=functools.partial(torch.nn.init.normal_, std=0.3),
                  expert_parallel_transport=TRANSPORT)
    return Arguments(**{**fields, **case.fields, **changes})


def make(case, device, **changes):
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if case.dtype == torch.float64 else torch.float32)
    try:
        model = torch.nn.Sequential(*(gbmoe.dMoE(arguments(case, device, **changes)) for _ in range(case.layers)))
    finally:
        torch.set_default_dtype(default)
    if case.only is not None:  # inputs are positive
        with torch.no_grad():
            for layer in model:
                layer.router.layer.weight[case.only :] = -10
    return model


def inputs(case, step, device):
    """The tokens of each rank, [T,1,H]."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(case.tokens), 1, HIDDEN, generator=generator, dtype=torch.float64).to(device, case.dtype)
    return list((x if case.only is None else x.abs()).split(case.tokens))


def total(out):
    """One tensor made of what a layer returns: with a bias it returns two."""
    return out[0] + out[1] if isinstance(out, tuple) else out


def run(model, case, xs):
    """Forward and backward of each step's tokens; (outs, gradients of the tokens)."""
    outs, grads = [], []
    for x in xs:
        x = h = x.clone().requires_grad_()
        for layer in model:
            h = h + total(checkpoint(layer, h, use_reentrant=False) if case.checkpointed else layer(h))
        (h.double().square().sum() / 100).backward()
        outs.append(h.detach())
        grads.append(x.grad)
    return outs, grads


def optimise(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, foreach=False)
    optimizer.step()


def train(case, device, group):
    model = make(case, device, moe_expert_model_parallelism=True, expert_parallel_group=group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    xs = [inputs(case, step, device)[rank] for step in range(case.steps)]
    outs, grads = run(model, case, xs)
    counts = [counts.cpu() for counts, _ in gbmoe.get_load_balancing_loss()[: case.layers * case.steps]]
    gbmoe.clear_load_balancing_loss()
    first = {n: p.grad.clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    again = run(model, case, xs)
    gbmoe.clear_load_balancing_loss()
    same = all(torch.equal(a, b) for a, b in zip(outs + grads, again[0] + again[1])) and all(
        torch.equal(first[n], p.grad) for n, p in model.named_parameters())
    for p in model.parameters():
        if not getattr(p, "expert_model_parallel", False):
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
    result = {"outs": outs, "grads": grads, "counts": counts, "same": same, "gradients": {n: p.grad for n, p in model.named_parameters()}}
    optimise(model)
    return {**result, "parameters": {n: p.detach() for n, p in model.named_parameters()}}


def chosen(case, device):
    """Made-up tokens, router weights and experts of each rank: a real router rounds its logits differently for another batch."""
    generator = torch.Generator().manual_seed(3)
    args = arguments(case, device)
    draw = torch.rand(sum(case.tokens), args.moe_num_experts, generator=generator)
    ids = draw.argsort(1)[:, : args.moe_top_k].to(device)
    weights = torch.rand(ids.shape, generator=generator).to(device, case.dtype)
    return [list(t.split(case.tokens)) for t in (inputs_of(case, device), weights, ids)]


def inputs_of(case, device):
    return torch.cat(inputs(case, 0, device)).squeeze(1)


def experts_alone(case, device, x, weights, ids, **changes):
    """The experts without a router, under a gradient that is no power of two."""
    layer = make(case, device, **changes)[0].experts
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = total(layer(x, weights.new_zeros(x.size(0), layer.num_experts), weights, ids))
    out.backward(torch.sin(100 * x.detach()))
    gbmoe.clear_load_balancing_loss()
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad}


def rows_sent(case, device, group):
    """Rows of H that one forward and backward sends, in order, and those of ids and router weights."""
    parts = [part[dist.get_rank(group)] for part in chosen(case, device)]
    sent, original = [], dist.all_to_all_single

    def counting(out, x, *args, **kwargs):
        if x.dim() == 2 and x.size(1) == HIDDEN and x.is_floating_point():
            sent.append(x.size(0))
        return original(out, x, *args, **kwargs)

    dist.all_to_all_single = counting
    try:
        experts_alone(case, device, *parts, moe_expert_model_parallelism=True, expert_parallel_group=group)
    finally:
        dist.all_to_all_single = original
    return sent


def compiled(name, device, group):
    """Outputs and gradients of a layer and of its graph, on one rank of each node; the exact mode and shadows break the graph."""
    case = CASES[name]
    model = make(case, device, moe_expert_model_parallelism=True, expert_parallel_group=group)[:1]
    xs, results = inputs(case, 0, device)[dist.get_rank(group) :][:1], []
    graph = model[0]
    if dist.get_rank() in (0, 3):
        graph = torch.compile(graph, backend="aot_eager", fullgraph=name == "chunks and nodes")
    for layers in (model, [graph]):
        model.zero_grad()
        results.append([*run(layers, case, xs), [p.grad for p in model.parameters()]])
    gbmoe.clear_load_balancing_loss()
    torch.compiler.reset()
    return results


def recorded(function, into):
    """The function, which appends the first of what it returns to `into`."""
    def recording(*args):
        result = function(*args)
        into.append(result[0])
        return result
    return recording


def without_shadows(device):
    """Results of experts that are spread evenly, without shadows and where shadows are allowed and do not pay."""
    case = Case(FOUR, GLU)
    parts = [part[dist.get_rank()] for part in chosen(case, device)]
    return [experts_alone(case, device, *parts, moe_expert_model_parallelism=True, expert_parallel_shadows=most) for most in (0, 3)]


def without_gradients(device):
    """Outputs of a layer with shadows, with a graph of gradients, without one, and where no gradient of experts is asked for."""
    case = CASES["shadows"]
    layer, x = make(case, device, moe_expert_model_parallelism=True)[0], inputs(case, 0, device)[dist.get_rank()].requires_grad_()
    outs = [layer(x).detach()]
    with torch.no_grad():
        outs.append(layer(x))
    layer.experts.requires_grad_(False)
    outs.append(layer(x))
    outs[-1].sum().backward()
    gbmoe.clear_load_balancing_loss()
    return [out.detach() for out in outs]


def left_behind(device, group):
    """Objects of an exchange that live on after a step, in cycles."""
    gc.collect()
    gc.disable()
    try:
        train(Case(fields=dict(GLU, expert_parallel_chunks=2)), device, group)
        return sum(isinstance(thing, differentiable_all_to_all.Travelling) for thing in gc.get_objects())
    finally:
        gc.enable()


def uneven_groups(rank, world):
    """What nodes_of does where one rank belongs to one more group than the others, without and with nodes that the caller asks for."""
    dist.new_group([0])
    group = dist.new_group(range(world))
    with pytest.MonkeyPatch.context() as patch, pytest.warns(RuntimeWarning, match="once for each rank there"):
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        found = groups.nodes_of(group)
    try:
        groups.nodes_of(group, 2)
    except ValueError as error:
        return found, str(error)


def refused(group, rank, changes):
    try:
        make(Case(), "cpu", moe_expert_model_parallelism=True, expert_parallel_group=group, **(changes if rank % 2 else {}))
    except ValueError as error:
        return str(error)


def worker(rank, store, device_type, transport, world, folder):
    global TRANSPORT
    TRANSPORT = transport
    automatic_chunks.SPEEDS[device_type] = BALANCED
    device = rank_groups.join(rank, world, store, device_type)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    group_of = {2: pairs[rank // 2], world: None}
    results, shadowed = {}, []
    shadowing.choose = recorded(shadowing.choose, shadowed)
    for name, case in CASES.items():
        if case.world in group_of:
            shadowed.clear()
            results["train", name] = train(case, device, group_of[case.world])
            results["shadowed", name] = list(shadowed)
    for name, case in EXACT.items():
        if case.world in group_of:
            group = group_of[case.world]
            parts = [part[dist.get_rank(group)] for part in chosen(case, device)]
            results["exact", name] = experts_alone(case, device, *parts, moe_expert_model_parallelism=True, expert_parallel_group=group,
                                                   expert_parallel_exact=True)
    exchanged = results["exchanged"] = device_type == "cpu" or transport == "exchange"
    for name, case in BYTES.items() if exchanged else ():
        if case.world in group_of:
            shadowed.clear()
            results["bytes", name] = rows_sent(case, device, group_of[case.world])
            results["bytes", name, "shadowed"] = [expert for each in shadowed for expert in each]
    for name in COMPILED if exchanged else ():
        if CASES[name].world in group_of:
            results["compiled", name] = compiled(name, device, group_of[CASES[name].world])
    results["left behind"] = left_behind(device, pairs[rank // 2])
    assert exchanged or peer_memory._MEMORIES, "no layer mapped memory"
    for name, (changes, _) in DIFFERING.items():
        results["differing", name] = refused(pairs[rank // 2], rank, changes)
    results["chunks"] = [count for chosen in automatic_chunks._CHOSEN.values() for count in chosen.values()]
    results["groups"] = len(groups._NODES), len(dist.distributed_c10d._world.pg_map)
    if world == 4:
        results["without shadows"], results["without gradients"] = without_shadows(device), without_gradients(device)
        results["uneven groups"] = uneven_groups(rank, world)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    peer_memory.release()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["cpu", *(pytest.param(of, marks=pytest.mark.gpu) for of in ("cuda", "cuda, memory mapped"))])
def ran(request, tmp_path_factory):
    """(device type, what each process found)."""
    device_type, transport = request.param.split(",")[0], "exchange" if request.param == "cuda" else "auto"
    world = 4 if rank_groups.have_devices(device_type, 4) else 2
    return device_type, rank_groups.files_of_ranks(worker, world, tmp_path_factory.mktemp("exchange"), device_type, transport, world,
                                             device_type=device_type, map_location=device_type)


def results_of(ran, what, name, case):
    device, results = ran
    if case.world > len(results):
        pytest.skip(f"needs {case.world} GPUs")
    if (what, name) not in results[0]:
        pytest.skip("of the exchange")
    return device, [result[what, name] for result in results]


TOLERANCE = {torch.float64: dict(rtol=1e-10, atol=1e-10), torch.float32: dict(rtol=1e-4, atol=1e-5),
             torch.float16: dict(rtol=1e-2, atol=1e-2), torch.bfloat16: dict(rtol=5e-2, atol=5e-2)}


def shard_of(case, whole, shape, rank):
    """The rows of a weight of experts that this rank holds."""
    if whole.shape == shape:
        return whole
    experts = case.fields.get("moe_num_experts", 8)
    degree = min(case.world, experts)
    whole = whole.view(degree, experts // degree, case.world // degree, -1, HIDDEN)
    return whole[rank % degree, :, rank // degree].reshape(-1, HIDDEN)


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_train_as_one_process(ran, name):
    case = CASES[name]
    device, results = results_of(ran, "train", name, case)
    model = make(case, device)
    xs = [torch.cat(inputs(case, step, device)) for step in range(case.steps)]
    outs, grads = run(model, case, xs)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad / case.world
    expected = {"gradients": {n: p.grad for n, p in model.named_parameters()}}
    optimise(model)
    expected["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
    close = functools.partial(torch.testing.assert_close, **TOLERANCE[case.dtype])
    for process, result in enumerate(results):
        rank = process % case.world
        for got, whole in zip(result["outs"] + result["grads"], outs + grads):
            close(got, whole.split(case.tokens)[rank])
        for what in ("gradients", "parameters"):
            assert result[what].keys() == expected[what].keys()
            for parameter, got in result[what].items():
                close(got, shard_of(case, expected[what][parameter], got.shape, rank), msg=lambda text: f"{what}, {parameter}: {text}")
        top_k = case.fields.get("moe_top_k", 2)
        assert [int(counts.sum()) for counts in result["counts"]] == [case.tokens[rank] * top_k] * case.layers * case.steps


@pytest.mark.parametrize("name", CASES)
def test_two_runs_give_the_same_bits(ran, name):
    _, results = results_of(ran, "train", name, CASES[name])
    assert all(result["same"] for result in results)


@pytest.mark.parametrize("name", EXACT)
def test_exact_gives_the_bits_of_one_process(ran, name):
    case = EXACT[name]
    device, results = results_of(ran, "exact", name, case)
    x, weights, ids = (torch.cat(part) for part in chosen(case, device))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes: the order of a product's sums may depend on it
    expected = experts_alone(case, device, x, weights, ids)
    torch.set_num_threads(threads)
    for process, result in enumerate(results):
        for what, got in result.items():
            assert torch.equal(got, expected[what].split(case.tokens)[process % case.world]), what


@pytest.mark.parametrize("name", BYTES)
def test_a_row_travels_once_to_each_rank_that_needs_it(ran, name):
    case = BYTES[name]
    _, results = results_of(ran, "bytes", name, case)
    experts = case.fields.get("moe_num_experts", 8)
    degree = min(case.world, experts)
    local, chunks = experts // degree, case.fields.get("expert_parallel_chunks", 1)
    # needs[r][t] is the set of (rank, chunk) that token t of rank r needs
    stay = ran[1][0]["bytes", name, "shadowed"]
    assert bool(stay) == (name == "shadows")
    needs = [[{(e // local + shard * degree, e % local * chunks // local) for e in token if e not in stay
               for shard in range(case.world // degree)} for token in ids.tolist()] for ids in chosen(case, "cpu")[2]]
    for rank, sent in enumerate(results):
        out = sum(map(len, needs[rank]))
        received = sum((rank, chunk) in token for tokens in needs for token in tokens for chunk in range(chunks))
        if "nodes" in name:
            to_nodes = sum(len({r // 2 for r, _ in token}) for token in needs[rank])
            passing = [token for r in range(rank % 2, case.world, 2) for token in needs[r]]
            handed = sum(r // 2 == rank // 2 for token in passing for r, _ in token)
            came = sum(any(r // 2 == rank // 2 for r, _ in token) for token in passing)
            forward = [to_nodes, handed, received, came]
            assert sent == forward + forward
        elif "exact" in name:
            slots_here = sum(e // local == rank for ids in chosen(case, "cpu")[2] for e in ids.flatten().tolist())
            assert sent == [out, slots_here] * 2
        elif chunks > 1:
            assert len(sent) == 4 * chunks and sum(sent) == 2 * (out + received)
        else:
            assert sent == [out, received] * 2


def test_ranks_with_different_numbers_of_tokens_choose_the_same_number_of_chunks(ran):
    device_type, results = ran
    # One of the two cases is of two ranks, which may map each other's memory; one is of four, in nodes of two.
    expected = [1] * results[0]["exchanged"] + [CHOSEN] * (len(results) == 4)
    assert all(sorted(result["chunks"]) == expected for result in results)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_it_computes_the_same(ran, name):
    _, results = results_of(ran, "compiled", name, CASES[name])
    for plain, graph in results:
        torch.testing.assert_close(graph, plain)


@pytest.mark.parametrize("name", SHADOWED)
def test_all_ranks_shadow_the_same_popular_experts(ran, name):
    case = CASES[name]
    device, results = results_of(ran, "shadowed", name, case)
    for first in range(0, len(results), case.world):
        assert all(result == results[first] for result in results[first : first + case.world])
        if device == "cpu" or case.only is not None:
            assert results[first][0] == SHADOWED[name]
        else:  # the router's weights decide which experts are popular, and a GPU draws others
            assert len(results[first][0]) == len(SHADOWED[name])
        calls = case.layers * case.steps * 2  # train runs twice, and checkpointing repeats each forward
        assert len(results[first]) == calls * (2 if case.checkpointed else 1)


def test_without_shadows_an_option_that_allows_them_changes_no_bit(ran):
    for result in ran[1]:
        for off, on in [result["without shadows"]] if "without shadows" in result else []:
            assert off.keys() == on.keys() and all(torch.equal(off[what], on[what]) for what in off)


def test_shadows_are_the_same_without_gradients(ran):
    for result in ran[1]:
        assert all(torch.equal(result["without gradients"][0], out) for out in result.get("without gradients", []))


def test_no_step_leaves_anything_behind(ran):
    """Rows under way and their autograd graph refer to each other, but only until the wait."""
    _, results = ran
    assert [result["left behind"] for result in results] == [0] * len(results)


@pytest.mark.parametrize("name", DIFFERING)
def test_arguments_that_differ_are_reported_on_all_ranks(ran, name):
    _, results = ran
    words = DIFFERING[name][1]
    for process, result in enumerate(results):
        said = words.replace("rank 1", f"rank {process // 2 * 2 + 1}").replace("rank 0", f"rank {process // 2 * 2}")
        assert result["differing", name] == f"Arguments: expert_parallel_group: expected the same arguments on all its ranks, got {said}"


def test_ids_of_one_slot_were_refused_where_their_slots_have_a_stride():
    ids_TK = torch.tensor([[2, 0, 1, 0, 2]], dtype=torch.int32).t()
    weights_TK = torch.rand(1, 5).t()
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(5, 1, dtype=torch.int32), 1)
    ((weights_RK, ids_RK),) = dispatch_combine.Trip(plan.slot_map, [[5]], [[5]], None, kept=0).slots(ids_TK, weights_TK)
    assert torch.equal(ids_RK, ids_TK) and torch.equal(weights_RK, weights_TK)


def test_groups_of_nodes_are_made_once(ran):
    """The process groups are the default one, a pair, and those inside and across a node, for any number of layers."""
    _, results = ran
    for result in results:
        assert result["groups"] == (2, 4 if len(results) == 4 else 2)


def test_ranks_of_unequally_many_groups_do_not_wait_for_each_other(ran):
    """Where only its members make a group, torch.distributed names it by how many groups a rank belongs to."""
    _, results = ran
    if len(results) < 4:
        pytest.skip("needs four ranks")
    for result in results:
        found, error = result["uneven groups"]
        assert found is None
        assert error.startswith("Arguments: expert_parallel_group: expected ranks that all belong to the same number of process groups")
        assert error.endswith("got {0: 6, 1: 5, 2: 5, 3: 5}")


def dying(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=20))
    model = make(Case(fields=GLU), "cpu", moe_num_experts=6, moe_expert_model_parallelism=True)
    x = torch.ones(3, 1, HIDDEN)
    model(x)
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    try:
        model(x)
    except RuntimeError as error:
        torch.save((str(error), time.monotonic() - start), folder / f"{rank}.pt")


def test_a_rank_that_dies_is_named_by_the_others(tmp_path):
    spawn(dying, (tmp_path / "store", tmp_path), nprocs=3)
    for rank in (0, 2):
        error, seconds = torch.load(tmp_path / f"{rank}.pt")
        words = (f"expert parallelism: exchange with ranks 0, 1, 2 of the group (this is rank {rank}; rank 1 did not report it,"
                 " and may have died or hang) failed: ")
        assert error.startswith(words), error
        assert seconds < 40  # the timeout, and the roll call


@pytest.mark.parametrize("local, ranks, asked, expected", [
    (4, range(8), None, 4), (8, range(8), None, None), (1, range(8), None, None), (None, range(8), None, None),
    (4, range(2, 6), None, 2), (4, range(3, 7), None, None), (4, range(0, 32, 4), None, None), (4, range(0, 16, 2), None, 2),
    (4, range(8), 2, 2), (4, range(8), 1, None), (None, range(8), 4, 4), (None, range(4), 8, None)])
def test_nodes_are_told_by_the_ranks_of_each(monkeypatch, local, ranks, asked, expected):
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(ranks))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(ranks))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert groups.ranks_per_node(None, asked) == expected


def test_nodes_that_do_not_divide_the_group_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 8)
    with pytest.raises(ValueError, match="expert_parallel_ranks_per_node: expected a divisor of the group's 8 ranks, got 3"):
        groups.ranks_per_node(None, 3)


@pytest.mark.parametrize("fields, words", [
    (dict(expert_parallel_ranks_per_node=0), "expert_parallel_ranks_per_node: expected None or an int of at least 1, got 0"),
    (dict(expert_parallel_chunks=-1), "expert_parallel_chunks: expected None or an int of at least 0, got -1"),
    (dict(expert_parallel_chunks=1.5), "expert_parallel_chunks: expected None or an int of at least 0, got 1.5")])
def test_arguments_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Arguments(**fields)
