"""torch.compile(fullgraph=True): no graph break, eager's results, one graph for any number of tokens and every layer."""

import ast
import functools
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe import RoutingPlan, engines
from gbmoe.compat.grouped_gemm import ops as grouped_gemm
from gbmoe.compat.megablocks import ops as megablocks
from gbmoe.extension import loader
from gbmoe.layers import Arguments
from gbmoe.ops import route
from gbmoe.ops.experts import backward_operator
from gbmoe.ops.gmm import grouped
from gbmoe.router_function import RouterFunction, softmax_topk_code
from gbmoe.testing import accuracy, cuda_graphs, exact_inputs
from gbmoe.weight_layout import MEGABLOCKS
from tests import rank_groups
from tests.conftest import assert_as_accurate_as

HIDDEN, FFN, EXPERTS, TOP_K = 32, 48, 4, 2


@pytest.fixture(autouse=True)
def from_nothing():
    torch.compiler.reset()


def make(device="cpu", seed=0, **fields):
    sizes = dict(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=TOP_K)
    args = Arguments(**{**sizes, "fp16": False, "device": device,
                        "init_method": functools.partial(torch.nn.init.normal_, std=0.2), **fields})
    torch.manual_seed(seed)
    return gbmoe.dMoE(args), args


def loss_of(out, args):
    out = out[0] + out[1] if isinstance(out, tuple) else out
    loss = out.float().square().sum()
    if args.moe_loss_weight:
        loss = loss + gbmoe.batched_load_balancing_loss(args)
    if args.moe_zloss_weight:
        loss = loss + gbmoe.batched_router_zloss(args).sum()
    return out, loss


def run(layer, function, args, x):
    """Output, losses and every gradient of layer, computed by function."""
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, loss = loss_of(function(x), args)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "loss": loss.detach(), "x": x.grad, **gradients}


def skip_without_compiler(backend):
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("inductor needs a C++ compiler")


def graphs_of(backend="aot_eager"):
    """A backend that keeps the graphs that dynamo gives it, and a list of the operators in each."""
    seen = []

    def keep(module, inputs):
        seen.append([str(node.target) for node in module.graph.nodes if node.op.startswith("call")])
        return torch._dynamo.lookup_backend(backend)(module, inputs)
    return keep, seen


# -------------------------------------------------------------------------------------------------------------- the layer

# On a CPU, inductor precompiles torch's headers for 20 s, once in a process.
INDUCTOR = pytest.mark.xdist_group("inductor")
LAYERS = {
    "mlp": dict(),
    "glu": dict(mlp_type="glu", bias=False),
    "out + bias": dict(return_bias=False),
    "losses": dict(moe_zloss_weight=1e-2, moe_normalize_expert_weights=1, moe_jitter_eps=0.0),
    "no loss": dict(moe_loss_weight=0, uniform_expert_assignment=True),
    "shared expert": dict(mlp_type="glu", shared_expert=True, shared_expert_weighted_sum=True, moe_zloss_weight=1e-2),
    "bfloat16": dict(mlp_type="glu", bf16=True, activation_fn=F.silu),
    "callable": dict(activation_fn=torch.tanh),
    "callable, computed again": dict(activation_fn=lambda h: 1.5 * torch.sigmoid(h), memory_optimized_mlp=True),
    "callable, computed again, glu": dict(mlp_type="glu", activation_fn=torch.tanh, memory_optimized_mlp=True),
    "activation with parameters": dict(activation_fn=torch.nn.PReLU(), memory_optimized_mlp=True),
    "bmm": dict(mlp_impl="bmm", mlp_type="glu"),
    "reference": dict(mlp_impl="reference"),
}
# What other layers have as well: those with losses, with a shared expert, and with an activation that is computed again.
PART_OF_ANOTHER = ("mlp", "glu", "callable", "callable, computed again")


@pytest.mark.parametrize("name, backend", [
    *(pytest.param(name, "aot_eager", marks=pytest.mark.slow if name in PART_OF_ANOTHER else ()) for name in LAYERS),
    *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in ("shared expert", "callable, computed again, glu", "bmm")),
    *(pytest.param(name, "inductor", marks=INDUCTOR) for name in ("shared expert", "callable, computed again, glu")),
])
def test_compiled_layer_is_the_layer(device, name, backend):
    skip_without_compiler(backend)
    fields = LAYERS[name]
    if name == "activation with parameters":
        fields = {**fields, "activation_fn": torch.nn.PReLU(device=device)}
    layer, args = make(device, **fields)
    x = torch.randn(12, 2, HIDDEN, generator=exact_inputs.generator("cpu", 1)).to(device, args.dtype)
    expected = run(layer, layer, args, x)
    compiled = run(layer, torch.compile(layer, backend=backend, fullgraph=True), args, x)
    tolerance = dict(rtol=1e-4, atol=1e-5) if backend == "inductor" else {}
    torch.testing.assert_close(compiled, expected, **tolerance)


class OwnRouter(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, device=device)

    def forward(self, x):
        scores_TE = self.gate(x.float().flatten(0, -2)).sigmoid()
        return scores_TE, *scores_TE.topk(TOP_K)


@pytest.mark.parametrize("change", [pytest.param("float32", marks=pytest.mark.slow), "float32 with bias", "own"])
def test_a_layer_with_another_router_is_one_graph(device, change):
    layer, args = make(device, bf16=True, mlp_type="glu")
    if change == "own":
        layer.router = OwnRouter(device)
    elif change == "float32":
        layer.router.float()
    else:
        layer.router.layer = torch.nn.Linear(HIDDEN, EXPERTS, device=device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (12, 9, 12, 7):
        x = torch.randn(tokens, 2, HIDDEN, generator=exact_inputs.generator("cpu", 1)).to(device, args.dtype)
        torch.testing.assert_close(run(layer, compiled, args, x), run(layer, layer, args, x))


def test_losses_inside_the_graph(device):
    """A whole step is one graph: clearing, layers, both losses."""
    layers, args = [], None
    for seed in range(2):
        layer, args = make(device, seed, num_layers=2, bias=False, moe_zloss_weight=1e-2)
        layers.append(layer)
    model = torch.nn.Sequential(*layers)

    def step(x):
        gbmoe.clear_load_balancing_loss()
        gbmoe.clear_router_zloss()
        return loss_of(model(x), args)[1]

    x = torch.randn(12, 2, HIDDEN, device=device)
    losses, gradients = [], []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        losses.append(function(x))
        losses[-1].backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert len(gbmoe.get_load_balancing_loss()) == 2  # the compiled step's, and not of the step before


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_a_checkpoint_inside_the_graph(device, backend):
    """What the layer keeps for the losses leaves the checkpoint, which torch.compile takes for a function without side effects."""
    skip_without_compiler(backend)
    layer, args = make(device, mlp_type="glu", bias=False, moe_zloss_weight=1e-2)
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend=backend, fullgraph=True)
    x = torch.randn(12, 2, HIDDEN, device=device)
    expected = run(layer, layer, args, x)
    for _ in range(2):
        torch.testing.assert_close(run(layer, compiled, args, x), expected, rtol=1e-4, atol=1e-5)
        assert len(gbmoe.get_load_balancing_loss()) == 1  # backward has kept none


def test_checkpoints_of_several_layers_inside_one_graph():
    layers = [make(seed=seed, num_layers=3, bias=False, moe_zloss_weight=1e-2)[0] for seed in range(3)]
    args, model = layers[0].experts.args, torch.nn.ModuleList(layers)

    def step(function):
        def losses(x):
            gbmoe.clear_load_balancing_loss()
            gbmoe.clear_router_zloss()
            for layer in model:
                x = function(layer, x)
            return loss_of(x, args)[1]
        return losses

    checkpointed = step(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    x, results = torch.randn(12, 2, HIDDEN, requires_grad=True), []
    for function in (step(lambda layer, x: layer(x)), torch.compile(checkpointed, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = function(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_a_checkpoint_in_a_checkpoint_breaks_the_graph_and_no_more():
    """Losses that the inner checkpoint keeps would not leave the outer one."""
    layers = [make(seed=seed, num_layers=2, bias=False, moe_zloss_weight=1e-2)[0] for seed in range(2)]
    args, model = layers[0].experts.args, torch.nn.ModuleList(layers)

    def inner(x):
        return layers[1](checkpoint(layers[0], x, use_reentrant=False))

    compiled = torch.compile(lambda x: checkpoint(inner, x, use_reentrant=False), backend="aot_eager")
    x = torch.randn(12, 2, HIDDEN)
    torch.testing.assert_close(run(model, compiled, args, x), run(model, inner, args, x))


def test_evaluation_without_gradients_keeps_nothing():
    layer, args = make(mlp_type="glu", bias=False)
    layer.eval()
    backend, graphs = graphs_of()
    with torch.no_grad():
        x = torch.randn(5, 1, HIDDEN)
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
    assert len(graphs) == 1 and gbmoe.get_load_balancing_loss() == []


def test_autocast(device):
    layer, args = make(device, mlp_type="glu", shared_expert=True, bias=False)
    x = torch.randn(9, 2, HIDDEN, device=device)
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            results.append(run(layer, function, args, x))
    assert results[1]["out"].dtype == torch.bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", [F.silu, torch.nn.SiLU(), functools.partial(F.gelu, approximate="tanh"), torch.nn.GELU()],
                         ids=["silu", "SiLU", "gelu_tanh", "GELU"])
def test_known_activations_stay_one_operator(activation):
    layer, _ = make(mlp_type="glu", bias=False, activation_fn=activation)
    backend, graphs = graphs_of("eager")
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(5, 1, HIDDEN))
    operators = [name.split(".")[1] for name in graphs[0] if name.startswith("gbmoe.")]
    assert operators == ["route_tokens", "routing_plan", "expert_mlp"]


# ---------------------------------------------------------------------------------------------------- what is compiled again


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(mlp_type="glu", shared_expert=True, moe_zloss_weight=1e-2),
                                    dict(activation_fn=torch.tanh, memory_optimized_mlp=True)], ids=["fused", "composed"])
@pytest.mark.parametrize("marked", [False, True], ids=["noticed", "marked"])
def test_numbers_of_tokens_share_a_graph(device, fields, marked):
    """Also on both sides of T * K == E, where the formula of the plan's bound changes."""
    layer, args = make(device, **{**fields, "moe_num_experts": 30})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for tokens in (24, 9, 40, 13, 11):
        x = torch.randn(tokens, HIDDEN, generator=exact_inputs.generator("cpu", tokens)).to(device)
        expected = run(layer, layer, args, x)
        if marked:
            x = x.requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            gbmoe.clear_load_balancing_loss()
            gbmoe.clear_router_zloss()
            torch.testing.assert_close(loss_of(compiled(x), args)[0].detach(), expected["out"])
        else:
            torch.testing.assert_close(run(layer, compiled, args, x), expected)
    assert counter.frame_count == (1 if marked else 2)


def test_no_token_and_a_single_one_have_a_graph_each():
    """docs/tour.md did not count the graph of no token."""
    layer, _ = make(mlp_type="glu", bias=False)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    graphs = []
    with torch.no_grad():
        for tokens in (8, 4, 1, 0, 5, 1, 0):
            compiled(torch.randn(tokens, HIDDEN))
            graphs.append(counter.frame_count)
    assert graphs == [1, 1, 2, 3, 3, 3, 3]


def test_layers_compiled_one_by_one_share_a_graph():
    """What layers leave behind for the losses grows from layer to layer, and torch gives up after eight graphs."""
    layers = [make(seed=seed, num_layers=12, bias=False, moe_zloss_weight=1e-2)[0] for seed in range(12)]
    args = layers[0].experts.args
    counter = CompileCounterWithBackend("eager")
    compiled = [torch.compile(layer, backend=counter, fullgraph=True) for layer in layers]
    x = torch.randn(6, 1, HIDDEN, requires_grad=True)
    losses = []
    for model in (layers, compiled):
        gbmoe.clear_load_balancing_loss()
        gbmoe.clear_router_zloss()
        losses.append(loss_of(functools.reduce(lambda h, layer: layer(h), model, x), args)[1])
    assert counter.frame_count == 1
    torch.testing.assert_close(losses[1], losses[0])


def test_a_plan_may_come_from_outside():
    x, ids = torch.randn(10, HIDDEN), [exact_inputs.expert_ids(10, EXPERTS, TOP_K, device="cpu", seed=seed) for seed in range(4)]
    w1, w2 = (torch.randn(EXPERTS, FFN, HIDDEN) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")

    def experts(plan):
        return gbmoe.expert_mlp(x, plan, w1, w2)

    compiled = torch.compile(experts, backend=counter, fullgraph=True)
    for choice in ids:
        expected = experts(RoutingPlan.from_experts(choice, EXPERTS))
        torch.testing.assert_close(compiled(RoutingPlan.from_experts(choice, EXPERTS)), expected)
    assert counter.frame_count == 1


# -------------------------------------------------------------------------------------------------------------- operators


def gather_and_scatter(x, weights, w1, w2, v1, ids):
    plan = RoutingPlan.from_experts(ids, EXPERTS, align=4)
    rows, probs_P = gbmoe.padded_gather(x, plan, probs_TK=weights, slot_scale_TK=weights)
    return gbmoe.padded_scatter(rows * probs_P.unsqueeze(1), plan, weights)


def fused(x, weights, w1, w2, v1, ids):
    plan = RoutingPlan.from_experts(ids, EXPERTS, align=16)
    return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation="gelu")


def keeping_rows(x, weights, w1, w2, v1, ids):
    plan = RoutingPlan.from_experts(ids, EXPERTS, align=16)
    return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, keep_gathered_rows=True)


def keeping_rows_of_any_number(x, weights, w1, w2, v1, ids):
    plan = RoutingPlan.from_experts(ids, EXPERTS, align=4, exact=True)
    return gbmoe.expert_mlp(x, plan, w1, w2, weights_TK=weights, keep_gathered_rows=True)


def composed(x, weights, w1, w2, v1, ids):
    plan = RoutingPlan.from_experts(ids, EXPERTS)
    return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=torch.tanh)


def exact(x, weights, w1, w2, v1, ids):
    """P is read from the device: it is a number that the graph does not know."""
    plan = RoutingPlan.from_experts(ids, EXPERTS, align=4, exact=True)
    return gbmoe.expert_mlp(x, plan, w1, w2, weights_TK=weights)


def grouped_products(x, weights, w1, w2, v1, ids):
    sizes = torch.bincount(ids.clamp(min=0).flatten(), minlength=EXPERTS)
    torch._check(sizes.numel() == EXPERTS)  # bincount may return more
    rows = x.repeat_interleave(TOP_K, 0)
    out = gbmoe.gmm(gbmoe.gmm(rows, w1, sizes, trans_b=True), w2, sizes)
    return (out * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(1) + gbmoe.gmm(rows, out, sizes, trans_a=True).sum()


def routed(x, weights, w1, w2, v1, ids):
    routing = route(x @ w1[:, 0].t(), TOP_K, normalize=1.0)
    return x * (routing.scores_TE.square().sum(1) + routing.weights_TK.square().sum(1) + routing.logsumexp_T).unsqueeze(1)


def operands(tokens, device, dtype=torch.float32, seed=0):
    random = functools.partial(torch.randn, generator=exact_inputs.generator("cpu", tokens + seed))
    weights = [random(EXPERTS, FFN, HIDDEN).mul_(0.2) for _ in range(3)]
    ids = exact_inputs.expert_ids(tokens, EXPERTS, TOP_K, device="cpu", seed=tokens + seed)
    ids[0, 0] = -1
    return [t.to(device, dtype).requires_grad_() for t in (random(tokens, HIDDEN), random(tokens, TOP_K), *weights)], ids.to(device)


@pytest.mark.slow
@pytest.mark.parametrize("function, backend", [
    *((function, "aot_eager") for function in (gather_and_scatter, fused, composed, keeping_rows, keeping_rows_of_any_number,
                                                     exact, grouped_products, routed)),
    pytest.param(gather_and_scatter, "inductor", marks=INDUCTOR),
], ids=lambda value: getattr(value, "__name__", value))
def test_operators_with_any_number_of_tokens(device, function, backend):
    skip_without_compiler(backend)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for tokens in (24, 9, 2, 40):
        results = []
        for f in (function, compiled):
            leaves, ids = operands(tokens, device)
            for t in (leaves[0], leaves[1], ids):
                torch._dynamo.mark_dynamic(t, 0)
            out = f(*leaves, ids)
            grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
            results.append([out.detach(), *(g for g in grads if g is not None)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


KEEP_ROWS = [argument.name for argument in torch.ops.gbmoe.expert_mlp.default._schema.arguments].index("keep_rows")


@pytest.mark.parametrize("function", [keeping_rows, keeping_rows_of_any_number])
@pytest.mark.parametrize("ffn, keeps", [(512, False), (520, True)])
def test_whether_rows_are_kept_is_found_while_tracing(monkeypatch, function, ffn, keeps):
    """As Hopper says, whose first product gathers at up to 512."""
    kept = []

    def backend(module, inputs):
        kept.extend(node.args[KEEP_ROWS] for node in module.graph.nodes if str(node.target).startswith("gbmoe.expert_mlp"))
        return module.forward

    monkeypatch.setattr(type(engines.ENGINES["reference"]), "gathers_before_up", type(engines.ENGINES["hopper"]).gathers_before_up,
                        raising=False)
    (x, weights, *_), ids = operands(10, "cpu")
    w1, w2, v1 = (torch.randn(EXPERTS, ffn, HIDDEN, requires_grad=True) for _ in range(3))
    torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(x, weights, w1, w2, v1, ids)
    assert kept == [keeps]


def test_wrong_values_are_found_in_a_graph_too():
    """Values are checked inside the operators, which run with real tensors."""
    plan = torch.compile(lambda ids: RoutingPlan.from_experts(ids, EXPERTS).counts_E, backend="aot_eager", fullgraph=True)
    assert plan(torch.tensor([[0, 3]])).tolist() == [1, 0, 0, 1]
    with pytest.raises(ValueError, match="experts: expected ids in \\[0, 4\\), or -1 to drop a slot, got ids from 0 to 9"):
        plan(torch.tensor([[0, 9]]))
    product = torch.compile(gbmoe.gmm, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="batch_sizes: expected sum\\(batch_sizes\\) == a.size\\(0\\) == 5, got 4"):
        product(torch.zeros(5, 8), torch.zeros(2, 8, 4), torch.tensor([3, 1]))


def test_random_numbers_of_the_activation_are_drawn_again(device):
    """As for the eager layer: out is linear in w1, so <w1, its gradient> is <out, grad> if both passes saw the same mask."""
    leaves, ids = operands(40, device)
    x, weights, w1, w2, _ = leaves

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def dropping(w1):
        return gbmoe.expert_mlp(x, RoutingPlan.from_experts(ids, EXPERTS), w1, w2, weights_TK=weights,
                                activation=lambda h: F.dropout(h, 0.5))

    out = dropping(w1)
    grad = torch.randn_like(out)
    gradient, = torch.autograd.grad(out, w1, grad)
    torch.testing.assert_close((w1 * gradient).sum(), (out * grad).sum(), rtol=1e-4, atol=1e-4)


def test_a_graph_saves_pre_activations_and_computes_the_activation_again():
    """Of the tensors as wide as the ffn, the graph saves h and g for backward, and not the activation."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    handed_over = []

    def forward_compiler(module, inputs):
        outputs, = module.graph.find_nodes(op="output")
        handed_over.append([str(node.target) for node in outputs.args[0]
                            if getattr(node.meta.get("val"), "shape", ())[-1:] == (FFN,) and node.meta["val"].dim() == 2])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=lambda module, inputs: make_boxed_func(module.forward),
                           partition_fn=min_cut_rematerialization_partition)
    leaves, ids = operands(10, "cpu")
    torch.compile(composed, backend=backend, fullgraph=True)(*leaves, ids).sum().backward()
    assert handed_over == [["gbmoe.gmm.default", "gbmoe.gmm.default"]]


def strided(*shape, dtype=torch.float32):
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fakes_say_what_kernels_return_for_any_strides(dtype):
    ops, matrix = torch.ops.gbmoe, functools.partial(strided, dtype=dtype)
    ids, tokens = exact_inputs.expert_ids(10, EXPERTS, TOP_K, device="cpu", seed=0), 10
    sigmoid = RouterFunction("sigmoid", normalize=1).code
    plan, weights = RoutingPlan.from_experts(ids, EXPERTS), strided(tokens, TOP_K)
    maps, rows = (plan.row_of_slot_TK, plan.slot_of_row_P), plan.num_rows
    x, w, h, bias = matrix(tokens, HIDDEN), matrix(EXPERTS, FFN, HIDDEN), matrix(rows, FFN), matrix(EXPERTS, FFN)
    for operator, arguments in (
        (ops.routing_plan, (ids.t().contiguous().t(), EXPERTS, 4, "wait")),
        (ops.route, (matrix(tokens, EXPERTS), None, None, None, TOP_K, softmax_topk_code(1.0), True)),
        (ops.route, (matrix(tokens, EXPERTS), matrix(1, EXPERTS)[0].float(), None, None, TOP_K, sigmoid, False)),
        (ops.route, (matrix(tokens, EXPERTS), None, None, ids.t().contiguous().t(), TOP_K, sigmoid, False)),
        (ops.route_backward, (matrix(tokens, EXPERTS).softmax(-1), ids, None, matrix(tokens, EXPERTS), None, None, softmax_topk_code(1.0),
                              True, dtype)),
        (ops.route_backward, (matrix(tokens, EXPERTS), ids, None, matrix(tokens, EXPERTS), None, None, sigmoid, False, dtype)),
        (ops.padded_gather, (x, *maps, None, None, weights, weights, False)),
        (ops.padded_scatter, (matrix(rows, HIDDEN), *maps, None, None, weights)),
        (ops.padded_scatter_backward, (x, matrix(rows, HIDDEN), *maps, None, None, weights, True)),
        (ops.gmm, (h, w, plan.host_sizes(), False, False, "auto", True)),
        (ops.gmm, (h, matrix(rows, HIDDEN), plan.host_sizes(), True, False, "auto", True)),
        (ops.plan_of_counts, (plan.counts_E, rows + 3, "wait")),
        (ops.bounded_counts, (plan.counts_E, rows + 3, "wait")),
        (ops.expert_mlp, (matrix(rows, HIDDEN), None, None, plan.slot_of_row_P, plan.host_sizes(), w, w, *[None] * 4, "silu", "auto", True,
                          True, False, 1.0, MEGABLOCKS.code)),
        (ops.expert_mlp, (x, weights, *maps, plan.host_sizes(), w, w, w, bias, matrix(EXPERTS, HIDDEN), bias, "silu", "auto", True, False,
                          False, 1.0, MEGABLOCKS.code)),
        (ops.expert_mlp, (x, weights, *maps, plan.host_sizes(), w, w, w, *[None] * 3, "silu", "auto", True, True, False, 1.0,
                          MEGABLOCKS.code)),
        (ops.expert_mlp_backward, (x, x, weights, *maps, plan.host_sizes(), w, w, w, bias, matrix(EXPERTS, HIDDEN), bias, h, h,
                                   *[x.new_empty(0)] * 4, "silu", "auto", 1.0, MEGABLOCKS.code, *[True] * 4, False, *[True] * 3)),
        (ops.expert_mlp_backward, (x, x, weights, *maps, plan.host_sizes(), w, w, w, *[None] * 3, h, h, matrix(rows, HIDDEN),
                                   *[x.new_empty(0)] * 3, "silu", "auto", 1.0, MEGABLOCKS.code, *[True] * 4, *[False] * 4)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


# --------------------------------------------------------------------------------------------------------------- adapters


def through_grouped_gemm(x, weights, w1, w2, v1, ids):
    rows, map_R = grouped_gemm.permute(x, ids.int())
    sizes = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).scatter_add(0, ids.flatten(), torch.ones_like(ids.flatten()))
    out = grouped_gemm.gmm(grouped_gemm.gmm(rows, w1, sizes, trans_b=True), w2, sizes)
    return grouped_gemm.unpermute(out, map_R, weights)


def through_megablocks_ops(x, weights, w1, w2, v1, ids):
    bin_ids, indices = megablocks.sort(ids.flatten().int(), 2)
    bins = megablocks.inclusive_cumsum(megablocks.histogram(bin_ids, EXPERTS), 0)
    rows = megablocks.gather(x, indices, bin_ids, bins, TOP_K)
    return megablocks.scatter(rows, indices, bin_ids, weights.flatten(), bins, TOP_K)


@pytest.mark.parametrize("function", [through_grouped_gemm, through_megablocks_ops])
def test_adapters(device, function):
    results = []
    for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves, ids = operands(24, device)
        out = f(*leaves, ids.clamp(min=0))
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        results.append([out.detach(), *(g for g in grads if g is not None)])
    torch.testing.assert_close(results[1], results[0])


# ------------------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize("engine, copies", [("hopper", 0), ("torch", 0), ("cublas_loop", 1), ("auto", 0)])
def test_a_gpu_graph_copies_sizes_to_the_host_only_for_engines_that_want_them(monkeypatch, engine, copies):
    """Traced on fake CUDA tensors, which need no GPU. Engines are asked, not traced: the real ones look for files."""
    for candidate in engines.ENGINES.values():
        monkeypatch.setitem(vars(candidate), "unavailable", lambda device: None if Path(__file__).exists() else "never")
    monkeypatch.setattr(loader, "load", lambda: (_ for _ in ()).throw(AssertionError("traced")))

    def layer(x, ids, w1, w2, v1):
        return gbmoe.expert_mlp(x, RoutingPlan.from_experts(ids, EXPERTS, check="none"), w1, w2, v1, engine=engine)

    backend, graphs = graphs_of("eager")
    with FakeTensorMode():
        empty = functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        x, ids = empty(64, HIDDEN), empty(64, TOP_K, dtype=torch.int64)
        weights = [empty(EXPERTS, FFN, HIDDEN) for _ in range(3)]
    out = torch.compile(layer, backend=backend, fullgraph=True)(x, ids, *weights)
    assert out.shape == x.shape and out.device.type == "cuda"
    assert graphs[0].count("to") == copies
    assert graphs[0].count("gbmoe.expert_mlp_by_host.default") == copies
    assert graphs[0].count("gbmoe.expert_mlp.default") == 1 - copies


def products(x, weights, w1, w2, v1, ids):
    """Sizes that stay on the device until an engine wants them elsewhere."""
    experts = ids.clamp(min=0).flatten()
    sizes = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).scatter_add(0, experts, torch.ones_like(experts))
    rows = x.repeat_interleave(TOP_K, 0)
    hidden = gbmoe.gmm(rows, w1, sizes, trans_b=True)
    return gbmoe.gmm(hidden, w2, sizes) + gbmoe.gmm(rows, hidden, sizes, trans_a=True).square().mean()


def waiting_plan(x, weights, w1, w2, v1, ids):
    plan = RoutingPlan.from_experts(ids, EXPERTS, check="wait")
    return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights)


# Of an engine only counts whether it takes sizes on the host.
@pytest.mark.slow
@pytest.mark.parametrize("function, engine, on_host", [
    *((function, *engine) for function in (fused, products) for engine in (("hopper", False), ("cublas_loop", True))),
    *((function, *engine) for function in (composed, waiting_plan) for engine in (("torch", False), ("reference", True)))])
def test_cuda_graphs_were_given_sizes_on_the_host(monkeypatch, function, engine, on_host):
    """Inductor makes CUDA graphs of all that is not tagged. Their recording failed ("not allocated in pool"): memory of the host is
    in no pool. Recorded, they would have repeated the sizes of that call for every other."""
    for candidate in engines.ENGINES.values():
        reason = None if candidate.name == engine else "not this one"
        monkeypatch.setitem(vars(candidate), "unavailable", lambda device, reason=reason: reason)
    tagged, reading, waiting = set(), set(), set()

    def keep(module, inputs):
        for node in module.graph.nodes:
            if str(node.target).startswith("gbmoe."):
                on_devices = {a.meta["example_value"].device.type for a in node.all_input_nodes}
                tagged.update({node} if torch.Tag.cudagraph_unsafe in node.target.tags else ())
                reading.update({node} if "cpu" in on_devices else ())
                waiting.update({node} if "wait" in node.args else ())
        return module.forward

    with FakeTensorMode():
        empty = functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        operands = [empty(64, HIDDEN), empty(64, TOP_K), *(empty(EXPERTS, FFN, HIDDEN) for _ in range(3))]
        torch.compile(function, backend=keep, fullgraph=True)(*operands, empty(64, TOP_K, dtype=torch.int64))
    assert tagged == reading | waiting
    assert bool(reading) == on_host and bool(waiting) == (function is waiting_plan)


def test_cuda_graphs_of_backward_were_given_sizes_on_the_host():
    """Backward's operators by themselves: without a GPU autograd does not run on fake CUDA tensors."""
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    for place, suffix in (("cuda", ""), ("cpu", "_by_host")):
        seen = []
        with FakeTensorMode(), Names():
            empty = functools.partial(torch.empty, device="cuda")
            x, w, h, y = empty(8, HIDDEN), empty(EXPERTS, FFN, HIDDEN), empty(16, FFN), empty(16, HIDDEN)
            slots, row_slots = empty(8, TOP_K, dtype=torch.int32), empty(16, dtype=torch.int32)
            sizes = empty(EXPERTS, dtype=torch.int64, device=place)
            backward_operator(x, x, None, slots, row_slots, sizes, w, w, *[None] * 4, h, *[empty(0)] * 5, "silu", "auto", 1.0,
                              MEGABLOCKS.code, True, False, True, True, *[False] * 4)
            grouped(h, w, sizes, engine="auto")
            grouped(h, y, sizes, True, engine="auto")
        assert [name for name in seen if name.startswith("gbmoe::")] == [f"gbmoe::{name}{suffix}" for name in
                                                                         ("expert_mlp_backward", "gmm", "gmm")]


def test_compiled_autograd_traces_backward():
    layer, args = make(mlp_type="glu", bias=False, moe_loss_weight=0)
    x = torch.randn(6, 1, HIDDEN)
    expected = run(layer, layer, args, x)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, loss = loss_of(layer(x), args)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    got = {"out": out.detach(), "loss": loss.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}
    torch.testing.assert_close(got, expected)


def test_lists_of_starred_names_could_not_be_cleared_in_graphs_of_torch_2_10_and_2_11():
    """Their compiler makes a tuple of `rest` in `first, *rest = x`: compiled autograd refused the experts' backward, which cleared one."""
    changes = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}
    found = []
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(Path(gbmoe.__file__).parent.rglob("*.py"))}
    for path, text in texts.items():
        for function in ast.walk(ast.parse(text)) if re.search(r"^[^=(]*\*\w+[^=(]* = ", text, re.MULTILINE) else ():
            nodes = list(ast.walk(function)) if isinstance(function, ast.FunctionDef) else []
            starred = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Store)}
            found += [f"{path}:{node.lineno} {ast.unparse(node)}" for node in nodes
                      if isinstance(node, ast.Attribute) and node.attr in changes and ast.unparse(node.value) in starred]
    assert found == []


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [dict(mlp_type="glu", shared_expert=True),
                                    dict(activation_fn=torch.tanh, memory_optimized_mlp=True)], ids=["fused", "composed"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
@pytest.mark.parametrize("engine", ["hopper", "tensor_core", "torch"])
def test_a_compiled_step_waits_for_nothing(fields, backend, engine):
    reason = engines.ENGINES[engine].unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    # Every expert is chosen, so that the rounding of a logit, which fusion may change, cannot change the routing.
    layer, args = make("cuda", bf16=True, engine=engine, moe_zloss_weight=1e-2, moe_top_k=EXPERTS, **fields)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(64, 2, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        run(layer, compiled, args, x)
    with cuda_graphs.no_host_wait():
        result = run(layer, compiled, args, x)
    eager = run(layer, layer, args, x)
    exact_layer = make("cuda", moe_zloss_weight=1e-2, moe_top_k=EXPERTS, **fields)[0].double()
    exact_layer.load_state_dict(layer.state_dict())
    exact = run(exact_layer, exact_layer, args, x.double())
    assert result.keys() == eager.keys() == exact.keys()
    for what, value in result.items():
        assert_as_accurate_as(value, eager[what], exact[what], what)


# ------------------------------------------------------------------------------------------------------------ CUDA graphs
#
# Inductor's trees of CUDA graphs: the first call of a shape warms up, the second records, the third and later ones replay.

MODES = ["reduce-overhead", "max-autotune"]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of a norm; another routing's result is off by about 1


@pytest.fixture
def graphed():
    """compile(function, mode) for CUDA graphs; at the end no graph may have been passed over."""
    pytest.importorskip("triton")
    counters = torch._dynamo.utils.counters
    counters.clear()

    def compile(function, mode):
        compiled = torch.compile(function, mode=mode, fullgraph=True)

        def step(*inputs):
            torch.compiler.cudagraph_mark_step_begin()  # results of the step before may be overwritten
            return compiled(*inputs)
        return step

    yield compile
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert list(torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device()).get_roots())


def assert_same(got, expected, dtype):
    assert got.keys() == expected.keys()
    for what, value in expected.items():
        assert accuracy.relative_error(got[what], value) < TOLERANCE[dtype], what


def copied(results):
    """Copies of results, outside of the graphs' memory."""
    return {what: value.detach().clone() for what, value in results.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function, dtype", [
    *((function, dtype) for function in (gather_and_scatter, fused, composed, products) for dtype in TOLERANCE),
    (routed, torch.float32), (waiting_plan, torch.float32),
], ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("sizes", [(24,) * 5, (24, 9, 40) * 4], ids=["one size", "changing sizes"])
def test_cuda_graphs_of_operators_replay_other_routings(graphed, function, dtype, mode, sizes):
    """In float32 the engine needs the sizes on the host; in bfloat16 (on Hopper) they stay on the device."""
    compiled = graphed(function, mode)

    def result_and_gradients(function, leaves, ids):
        out = function(*leaves, ids)
        grads = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
        return copied({"out": out, **{f"grad {index}": g for index, g in enumerate(grads) if g is not None}})

    for seed, tokens in enumerate(sizes):
        leaves, ids = operands(tokens, "cuda", dtype, seed)
        expected = result_and_gradients(function, leaves, ids)
        assert_same(result_and_gradients(compiled, leaves, ids), expected, dtype)


GRAPHED_LAYERS = {
    "float32": dict(mlp_type="glu"),
    "losses": dict(moe_zloss_weight=1e-2, bias=False, moe_normalize_expert_weights=1),
    "shared expert": LAYERS["shared expert"],
    "computed again": dict(mlp_type="glu", activation_fn=torch.tanh, memory_optimized_mlp=True),
    # Every expert is chosen, so that the rounding of a logit cannot change the routing.
    "bfloat16": dict(mlp_type="glu", bf16=True, moe_top_k=EXPERTS),
    "bfloat16, computed again": dict(activation_fn=torch.tanh, memory_optimized_mlp=True, bf16=True, moe_top_k=EXPERTS),
    "cublas": dict(mlp_type="glu", bf16=True, moe_top_k=EXPERTS, engine="cublas_loop"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GRAPHED_LAYERS)
@pytest.mark.parametrize("sizes", [(24,) * 5, (24, 9, 40) * 4], ids=["one size", "changing sizes"])
def test_cuda_graphs_of_a_layer_train_as_the_layer(graphed, name, mode, sizes):
    layer, args = make("cuda", **GRAPHED_LAYERS[name])
    reason = engines.ENGINES[args.engine].unavailable(torch.device("cuda")) if args.engine in engines.ENGINES else None
    if reason is not None:
        pytest.skip(f"{args.engine}: {reason}")
    compiled = graphed(layer, mode)
    for seed, tokens in enumerate(sizes):
        x = torch.randn(tokens, 2, HIDDEN, generator=exact_inputs.generator("cpu", seed)).to("cuda", args.dtype)
        expected = run(layer, layer, args, x)
        assert_same(copied(run(layer, compiled, args, x)), expected, args.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["one graph", "a graph a layer"])
@pytest.mark.parametrize("fields", [dict(), dict(bf16=True, moe_top_k=EXPERTS)], ids=["float32", "bfloat16"])
def test_cuda_graphs_of_several_layers(graphed, mode, one_by_one, fields):
    layers = [make("cuda", seed, num_layers=3, bias=False, moe_zloss_weight=1e-2, mlp_type="glu", **fields) for seed in range(3)]
    args, model = layers[0][1], torch.nn.Sequential(*(layer for layer, _ in layers))
    if one_by_one:
        parts = [torch.compile(layer, mode=mode, fullgraph=True) for layer in model]

        def compiled(x):
            torch.compiler.cudagraph_mark_step_begin()
            return functools.reduce(lambda h, part: part(h), parts, x)
    else:
        compiled = graphed(model, mode)
    for seed in range(5):
        x = torch.randn(24, 2, HIDDEN, generator=exact_inputs.generator("cpu", seed)).to("cuda", args.dtype)
        expected = run(model, model, args, x)
        assert_same(copied(run(model, compiled, args, x)), expected, args.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fields", [dict(), dict(bf16=True, moe_top_k=EXPERTS)], ids=["float32", "bfloat16"])
def test_cuda_graphs_of_a_layer_in_evaluation(graphed, mode, without, fields):
    layer, args = make("cuda", mlp_type="glu", bias=False, **fields)
    layer.eval()
    compiled = graphed(layer, mode)
    with without():
        for seed, tokens in enumerate((1, 7, 24) * 4):
            x = torch.randn(tokens, 1, HIDDEN, generator=exact_inputs.generator("cpu", seed)).to("cuda", args.dtype)
            assert_same(copied({"out": compiled(x)}), {"out": layer(x)}, args.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cuda_graphs_read_the_batch_sizes_of_each_call(graphed, dtype):
    """The sizes are given on the host, where a replayed graph would read those of its recording."""
    compiled = graphed(lambda a, b, sizes: gbmoe.gmm(torch.relu(a), b, sizes) + 1, "reduce-overhead")
    a, b = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((64, HIDDEN), (EXPERTS, HIDDEN, FFN)))
    for sizes in ([16, 16, 16, 16], [64, 0, 0, 0], [0, 64, 0, 0], [1, 2, 3, 58], [0, 0, 32, 32]):
        sizes = torch.tensor(sizes)
        assert_same(copied({"out": compiled(a, b, sizes)}), {"out": gbmoe.gmm(torch.relu(a), b, sizes) + 1}, dtype)


# --------------------------------------------------------------------------------------------------- expert parallelism


def worker(rank, store, results):
    rank_groups.join(rank, 2, store)
    for experts, numbers_of_tokens in ((4, (12, 7)), (1, (12,))):  # with one expert each rank has half of its rows
        layer, args = make(mlp_type="glu", bias=False, moe_num_experts=experts, moe_top_k=min(TOP_K, experts),
                           moe_expert_model_parallelism=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        for tokens in numbers_of_tokens:
            x = torch.randn(tokens, 1, HIDDEN, generator=exact_inputs.generator("cpu", rank))
            results[rank, experts, tokens] = run(layer, layer, args, x), run(layer, compiled, args, x)
    rank_groups.leave()


@pytest.mark.slow
def test_expert_parallelism_is_one_graph(tmp_path):
    results = rank_groups.shared_by_ranks(worker, 2, tmp_path)
    assert len(results) == 6
    for expected, compiled in results.values():
        torch.testing.assert_close(compiled, expected)
