"""update_expert_bias: which tokens are counted, over micro-batches, checkpoints, graphs and ranks, and where the biases go."""

import contextlib
import copy
import functools
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe.layers import Arguments, token_counts
from gbmoe.testing import cuda_graphs, exact_inputs
from tests import rank_groups

HIDDEN = 16


def make(device="cpu", seed=0, **fields):
    torch.manual_seed(seed)
    return gbmoe.dMoE(Arguments(**{
        **dict(hidden_size=HIDDEN, ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2, fp16=False, bias=False, device=device,
               mlp_type="glu", moe_loss_weight=0, moe_router_score_function="sigmoid", moe_normalize_expert_weights=1,
               moe_router_enable_expert_bias=True, init_method=functools.partial(torch.nn.init.normal_, std=0.3)), **fields}))


def tokens(count=20, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(count, 1, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def counts_of(layer, *inputs, padding_mask=None):
    """How many tokens each expert of the layer gets, by the router's own ids."""
    with torch.no_grad():
        ids = torch.cat([layer.router(x, padding_mask=padding_mask)[2].flatten() for x in inputs])
    return torch.bincount(ids[ids >= 0], minlength=layer.args.moe_num_experts)


def step_of(counts_E, rate=1e-3):
    """Megatron-Core's update of a bias."""
    return torch.sign(counts_E.double().mean() - counts_E.double()).float() * rate


def test_a_step_is_deepseeks():
    layer = make(moe_router_bias_update_rate=0.25)
    start = torch.rand(8)
    layer.router.expert_bias.copy_(start)
    micro_batches = [tokens(seed=1), tokens(7, seed=2)]
    expected = counts_of(layer, *micro_batches)
    for x in micro_batches:
        layer(x).sum().backward()
    assert torch.equal(layer.experts.tokens_per_expert, expected)
    gbmoe.update_expert_bias(layer)
    assert torch.equal(layer.router.expert_bias, start + step_of(expected, 0.25))
    assert not layer.router.expert_bias.requires_grad and not layer.experts.tokens_per_expert.any()
    after = layer.router.expert_bias.clone()
    gbmoe.update_expert_bias(layer)  # of no tokens
    assert torch.equal(layer.router.expert_bias, after)


def test_a_load_that_is_the_mean_to_the_last_token_moves_nothing():
    """Means of counts beyond 2**24 are not integers of float32, nor are some of the counts."""
    layer = make(moe_num_experts=3)
    for high, expected in ((0, [0, 0, 0]), (1, [1e-3, 1e-3, -1e-3])):
        layer.router.expert_bias.zero_()
        layer.experts.tokens_per_expert.copy_(torch.tensor([2**25 + 1, 2**25 + 1, 2**25 + 1 + high]))
        gbmoe.update_expert_bias(layer)
        torch.testing.assert_close(layer.router.expert_bias, torch.tensor(expected, dtype=torch.float32))


def test_it_balances():
    layer, x = make(moe_router_bias_update_rate=0.01), tokens(512)
    first = counts_of(layer, x)
    for _ in range(100):
        layer(x)
        gbmoe.update_expert_bias(layer)
    last = counts_of(layer, x)
    assert last.max() - last.min() < 0.3 * (first.max() - first.min())


@pytest.mark.filterwarnings("ignore:Arguments. moe_normalize_expert_weights")
def test_layers_of_other_sizes_and_rates():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([make(seed=1), make(seed=2, moe_num_experts=4, moe_top_k=1), make(seed=3),
                                               make(seed=4, moe_router_enable_expert_bias=False),
                                               make(seed=5, moe_router_bias_update_rate=0.5)])

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    model, x = Model(), tokens()
    biased = [layer for layer in model.layers if layer.args.moe_router_enable_expert_bias]
    expected = [step_of(counts_of(layer, x), layer.args.moe_router_bias_update_rate) for layer in biased]
    model(x)
    biased[0].args.moe_router_bias_update_rate = 0.0  # as at the end of DeepSeek-V3's training
    gbmoe.update_expert_bias(model)
    assert not biased[0].router.expert_bias.any() and model.layers[3].router.expert_bias is None
    for layer, step in list(zip(biased, expected))[1:]:
        assert torch.equal(layer.router.expert_bias, step)


def test_padding_is_not_counted():
    layer, x = make(), tokens()
    padding = torch.arange(20)[:, None] % 3 == 0
    layer(x, padding_mask=padding)
    assert layer.experts.tokens_per_expert.sum() == 2 * 13
    assert torch.equal(layer.experts.tokens_per_expert, counts_of(layer, x, padding_mask=padding))


@pytest.mark.parametrize("how, counted", [("eval", 0), ("no_grad", 0), ("inference_mode", 0), ("eval and no_grad", 0), ("train", 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_not_trained_is_not_counted(how, counted, compiled, device):
    torch.compiler.reset()
    layer, x = make(device), tokens(device=device)
    layer.train("eval" not in how)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how.split()[-1], contextlib.nullcontext)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    with context():
        function(x)
    assert layer.experts.tokens_per_expert.sum() == 40 * counted


def test_a_frozen_layer_stays_as_it_is():
    frozen, other = make(seed=1).requires_grad_(False), make(seed=2)
    model = torch.nn.Sequential(frozen, other)
    model(tokens()).sum().backward()
    gbmoe.update_expert_bias(model)
    assert not frozen.router.expert_bias.any() and other.router.expert_bias.any()
    frozen.requires_grad_(True)
    gbmoe.update_expert_bias(model)  # what it got while it was frozen counts no more
    assert not frozen.router.expert_bias.any()


WRAPPED = {
    "plain": lambda layer: layer,
    "checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    "reentrant checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=True),
    "nested checkpoints": lambda layer: lambda x: checkpoint(lambda x: checkpoint(layer, x, use_reentrant=False), x, use_reentrant=False),
    "compiled": lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True),
    "checkpoint of a compiled layer": lambda layer: functools.partial(
        checkpoint, torch.compile(layer, backend="aot_eager", fullgraph=True), use_reentrant=False),
    "reentrant checkpoint of a compiled layer": lambda layer: functools.partial(
        checkpoint, torch.compile(layer, backend="aot_eager", fullgraph=True), use_reentrant=True),
    "compiled checkpoint": lambda layer: torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_a_checkpoint_repeats_is_counted_once(name, device):
    torch.compiler.reset()
    layer = make(device)
    function, expected = WRAPPED[name](layer), torch.zeros(8, dtype=torch.int64, device=device)
    for seed in range(3):
        x = tokens(seed=seed, device=device).requires_grad_()
        expected += counts_of(layer, x)
        function(x).sum().backward()
        assert torch.equal(layer.experts.tokens_per_expert, expected)
    assert bool(x.grad.any()) and bool(layer.router.layer.weight.grad.any())


@pytest.mark.gpu
def test_a_cuda_graph_counts_in_every_replay():
    layer, x = make("cuda", bf16=True), tokens(device="cuda", dtype=torch.bfloat16)
    exact_inputs.poison("cuda")
    graph, _ = cuda_graphs.captured(lambda: layer(x))
    layer.experts.tokens_per_expert.zero_()
    for _ in range(3):
        graph.replay()
    assert torch.equal(layer.experts.tokens_per_expert, 3 * counts_of(layer, x))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_what_inductor_compiles_counts_in_every_call(device, mode):
    torch.compiler.reset()
    layer, x = make(device), tokens(device=device)
    compiled, expected = torch.compile(layer, fullgraph=True, mode=mode), counts_of(layer, x)
    for calls in range(1, 6):
        torch.compiler.cudagraph_mark_step_begin()  # results of the step before may be overwritten
        compiled(x).sum().backward()
        layer.zero_grad()
        assert torch.equal(layer.experts.tokens_per_expert, calls * expected)


def test_layers_compiled_one_by_one_share_a_graph():
    torch.compiler.reset()
    counter, layers = CompileCounterWithBackend("aot_eager"), [make(seed=seed) for seed in range(3)]
    for compiled in [torch.compile(layer, backend=counter, fullgraph=True) for layer in layers]:
        compiled(tokens())
    assert counter.frame_count == 1
    for layer in layers:
        assert torch.equal(layer.experts.tokens_per_expert, counts_of(layer, tokens()))


@pytest.mark.gpu
def test_a_cuda_graph_moves_the_bias():
    layer, x = make("cuda", bf16=True), tokens(device="cuda", dtype=torch.bfloat16)

    def step():
        layer(x)
        gbmoe.update_expert_bias(layer)

    exact_inputs.poison("cuda")
    graph, _ = cuda_graphs.captured(step)
    layer.router.expert_bias.zero_()
    expected = step_of(counts_of(layer, x))
    graph.replay()
    assert torch.equal(layer.router.expert_bias, expected) and not layer.experts.tokens_per_expert.any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["vmap", "export", "strict export", "make_fx", "real make_fx", "jit.trace"])
def test_a_traced_or_transformed_layer_counts_nothing(how):
    torch.compiler.reset()
    layer, x = make(), torch.randn(3, 5, 1, HIDDEN)
    weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    by_weights = lambda x, w: torch.func.functional_call(layer, w, (x,))  # noqa: E731
    {"vmap": lambda: torch.vmap(layer)(x),
     "export": lambda: torch.export.export(layer, (x,), strict=False).module()(x),
     "strict export": lambda: torch.export.export(layer, (x,), strict=True).module()(x),
     "make_fx": lambda: make_fx(by_weights, tracing_mode="symbolic")(x, weights),
     "real make_fx": lambda: make_fx(layer, tracing_mode="real")(x),
     "jit.trace": lambda: torch.jit.trace(layer, x, check_trace=False)}[how]()
    assert type(layer.experts.tokens_per_expert) is torch.Tensor and not layer.experts.tokens_per_expert.any()
    layer(x)
    assert layer.experts.tokens_per_expert.sum() == 30


def test_a_compiled_transform_counts_nothing():
    torch.compiler.reset()
    total_E = torch.zeros(4, dtype=torch.int64)
    count = torch.compile(torch.vmap(lambda x: token_counts.add(x, total_E) or x + 1), backend="eager")
    count(torch.ones(3, 4, dtype=torch.int32))
    assert not total_E.any()


# ------------------------------------------------------------------------------------------- checkpoints, copies and devices


def test_the_bias_is_in_checkpoints_and_the_counts_are_not():
    layer, other = make(), make(seed=1)
    layer(tokens())
    assert {name for name in layer.state_dict() if "router" in name} == {"router.expert_bias", "router.layer.weight"}
    assert not any("tokens_per_expert" in name for name in layer.state_dict())
    gbmoe.update_expert_bias(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other.router.expert_bias, layer.router.expert_bias) and layer.router.expert_bias.any()


def test_copies_count_for_themselves():
    layer, x = make(), tokens()
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    layer(x)
    assert not copied.experts.tokens_per_expert.any() and not pickled.experts.tokens_per_expert.any()
    copied(x)
    assert torch.equal(copied.experts.tokens_per_expert, layer.experts.tokens_per_expert)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to(torch.float16),
                                  lambda m: m.type(torch.float64)])
def test_counts_stay_integers(cast):
    layer = make()
    layer(tokens())
    before = layer.experts.tokens_per_expert.clone()
    assert torch.equal(cast(layer).experts.tokens_per_expert, before) and layer.experts.tokens_per_expert.dtype == torch.int64


def test_a_layer_that_began_on_the_meta_device():
    layer = make("meta").to_empty(device="cpu")
    layer.load_state_dict(make().state_dict())
    assert not layer.experts.tokens_per_expert.any()
    layer(tokens())
    gbmoe.update_expert_bias(layer)
    assert torch.equal(layer.router.expert_bias, step_of(counts_of(make(), tokens())))


# ------------------------------------------------------------------------------------------------------- the optimizer's hook


def test_a_hook_moves_the_bias_after_each_step():
    model, x = torch.nn.Sequential(make(seed=1), make(seed=2)), tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gbmoe.update_expert_bias_after(optimizer, model)
    model(x).sum().backward()
    expected = [step_of(layer.experts.tokens_per_expert) for layer in model]
    optimizer.step()
    assert all(torch.equal(layer.router.expert_bias, step) for layer, step in zip(model, expected))
    handle.remove()
    model(x).sum().backward()
    optimizer.step()
    assert all(torch.equal(layer.router.expert_bias, step) for layer, step in zip(model, expected))


def test_what_cannot_be_updated_says_so():
    optimizer = torch.optim.SGD(make().parameters(), lr=0.1)
    for model in (torch.nn.Linear(2, 2), make(moe_router_enable_expert_bias=False)):
        for call in (gbmoe.update_expert_bias, functools.partial(gbmoe.update_expert_bias_after, optimizer)):
            with pytest.raises(ValueError, match=r"update_expert_bias: model: expected .* moe_router_enable_expert_bias, got a .* without"):
                call(model)
    with pytest.raises(TypeError, match="update_expert_bias_after: optimizer: expected a torch.optim.Optimizer.*, got Linear"):
        gbmoe.update_expert_bias_after(torch.nn.Linear(2, 2), make())


def test_a_router_of_ones_own_has_its_bias_moved():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(HIDDEN, 8)
            self.register_buffer("expert_bias", torch.zeros(8))

        def forward(self, x):
            scores_TE = self.gate(x.flatten(0, -2)).sigmoid()
            ids_TK = (scores_TE + self.expert_bias).topk(2).indices
            return scores_TE, scores_TE.gather(1, ids_TK), ids_TK

    layer = make()
    layer.router = Own()
    layer(tokens())
    expected = step_of(layer.experts.tokens_per_expert)
    gbmoe.update_expert_bias(layer)
    assert torch.equal(layer.router.expert_bias, expected) and expected.any()


# -------------------------------------------------------------------------------------------------------------------- ranks

WORLD = 2


def worker(rank, store, results):
    rank_groups.join(rank, WORLD, store)
    for parallel in (False, True):
        model = torch.nn.Sequential(*(make(seed=seed, moe_num_experts=experts, moe_expert_model_parallelism=parallel)
                                      for seed, experts in ((1, 8), (2, 4))))
        wrapped = model if parallel else torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gbmoe.update_expert_bias_after(optimizer, model)
        for step in range(2):
            for micro_batch in range(2):
                wrapped(tokens(20 - 7 * rank, seed=10 * step + 2 * micro_batch + rank)).sum().backward()
            optimizer.step()
        results[rank, parallel] = [layer.router.expert_bias.clone() for layer in model]
    try:
        gbmoe.update_expert_bias(make(moe_num_experts=4 + 4 * rank))
    except ValueError as error:
        results[rank, "differ"] = str(error)
    alone = dist.new_group([0])
    try:
        gbmoe.update_expert_bias(make(), alone)
    except ValueError as error:
        results[rank, "member"] = str(error)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return rank_groups.shared_by_ranks(worker, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.xdist_group("expert_bias")
@pytest.mark.parametrize("parallel", [False, True], ids=["data parallel", "expert parallel"])
def test_ranks_count_together_and_over_micro_batches(results, parallel):
    """DistributedDataParallel, which gives all ranks the first one's buffers before each forward, lost the others' counts."""
    model = torch.nn.Sequential(make(seed=1), make(seed=2, moe_num_experts=4))
    for step in range(2):
        for micro_batch in range(2):
            for rank in range(WORLD):
                model(tokens(20 - 7 * rank, seed=10 * step + 2 * micro_batch + rank))
        gbmoe.update_expert_bias(model)
    for rank in range(WORLD):
        for got, layer in zip(results[rank, parallel], model, strict=True):
            assert torch.equal(got, layer.router.expert_bias) and got.any()


@pytest.mark.xdist_group("expert_bias")
def test_ranks_with_other_layers_are_named(results):
    for rank in range(WORLD):
        assert "experts of each is [4] on rank 0, [8] on rank 1" in results[rank, "differ"]
    assert (0, "member") not in results
    assert "group: expected a group of which this rank is a member" in results[1, "member"]
