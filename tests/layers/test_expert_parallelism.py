"""Expert parallelism: two and four gloo processes give what one process gives."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune

import gbmoe
from gbmoe.layers import Arguments
from tests import rank_groups

TOKENS, HIDDEN = 12, 16


def make(experts, parallel, mlp_type):
    torch.manual_seed(0)
    return gbmoe.dMoE(Arguments(
        hidden_size=HIDDEN, ffn_hidden_size=32, moe_num_experts=experts, moe_top_k=min(2, experts), mlp_type=mlp_type, fp16=False,
        moe_expert_model_parallelism=parallel, device="cpu", bias=False,
        init_method=functools.partial(torch.nn.init.normal_, std=0.3)))


def inputs(world):
    return torch.randn(world, TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(7))


# (world, experts): (4, 2) has more ranks than experts, so that each expert's ffn rows are sharded over two ranks.
LAYERS = [(world, experts, mlp_type) for world, experts in ((2, 4), (2, 2), (4, 2), (2, 1)) for mlp_type in ("mlp", "glu")]


def worker(rank, store, world, results):
    rank_groups.join(rank, world, store)
    for case in LAYERS:
        if case[0] == world:
            results[case, rank] = one_rank(rank, *case)
    dist.destroy_process_group()


def one_rank(rank, world, experts, mlp_type):
    layer = make(experts, True, mlp_type)
    x = inputs(world)[rank].requires_grad_()
    out = layer(x)
    counts = gbmoe.get_load_balancing_loss()[-1][0]
    gbmoe.clear_load_balancing_loss()
    out.square().sum().backward()
    return {"out": out.detach(), "x": x.grad, "counts": counts, "router": layer.router.layer.weight.grad,
            **{name: (p.detach(), p.grad) for name, p in layer.experts.mlp.named_parameters()}}


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function from the number of ranks to what each of them computed of every layer; they are started once."""
    @functools.cache
    def start(world):
        return rank_groups.shared_by_ranks(worker, world, tmp_path_factory.mktemp("ranks"), world)

    return start


@pytest.mark.xdist_group("expert_parallelism")
@pytest.mark.parametrize("world, experts, mlp_type", LAYERS)
def test_ranks_together_are_one_layer(results_of, world, experts, mlp_type):
    results = [results_of(world)[(world, experts, mlp_type), rank] for rank in range(world)]
    layer, x = make(experts, False, mlp_type), inputs(world).requires_grad_()
    outs = [layer(x[rank]) for rank in range(world)]
    counts = [c for c, _ in gbmoe.get_load_balancing_loss()[-world:]]
    gbmoe.clear_load_balancing_loss()
    sum(out.square().sum() for out in outs).backward()
    degree = min(world, experts)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["out"], outs[rank].detach())
        torch.testing.assert_close(result["x"], x.grad[rank])
        assert torch.equal(result["counts"], counts[rank])
        for name, whole in layer.experts.mlp.named_parameters():
            weight, grad = result[name]
            def mine(t):
                t = t.view(degree, experts // degree, world // degree, -1, HIDDEN)
                return t[rank % degree, :, rank // degree].reshape(-1, HIDDEN)
            assert torch.equal(weight, mine(whole.detach()))
            torch.testing.assert_close(grad, mine(whole.grad) / world)  # expert gradients are scaled by 1 / world
    torch.testing.assert_close(sum(r["router"] for r in results), layer.router.layer.weight.grad)


def test_experts_that_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    with pytest.raises(ValueError, match="moe_num_experts: expected a multiple of 3 ranks, got 4"):
        make(4, True, "mlp")


class ScaledSilu(torch.nn.Module):
    """An activation without a kernel, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return torch.nn.functional.silu(x) * self.factor


@pytest.mark.pairs
@pytest.mark.parametrize("dtype, autocast", [
    (torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
], ids=["float32", "bfloat16", "float16", "bfloat16 by autocast", "float16 by autocast"])
@pytest.mark.parametrize("scale", [0.5, 2**-6, 0.3])
@pytest.mark.parametrize("activation", ["kernel", "callable"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_scale_is_in_gradients_of_weights_alone(group_of_one, dtype, autocast, scale, activation, chunks):
    """Whether tokens are scaled or the weights' gradients: not in those of tokens, of the router and of what an activation holds; and in
    float16 by autocast it is multiplied to the parameters' gradients, which are float32."""
    own = ScaledSilu()
    torch.manual_seed(0)
    layer = gbmoe.dMoE(Arguments(
        hidden_size=16, ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, mlp_type="glu", bias=False, device="cpu",
        activation_fn=own if activation == "callable" else torch.nn.functional.silu,
        fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16,
        moe_expert_model_parallelism=True, expert_parallel_chunks=chunks, moe_loss_weight=0))
    x_TH, results = torch.randn(9, 1, 16).to(dtype), []
    for gradient_scale in (1.0, scale):
        layer.experts.mlp.gradient_scale = gradient_scale
        layer.zero_grad()
        own.zero_grad()
        x = x_TH.clone().requires_grad_()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            layer(x).float().square().sum().backward()
        of_weights = {name: getattr(layer.experts.mlp, name).grad.clone() for name in ("w1", "w2", "v1")}
        others = {"x": x.grad, "router": layer.router.layer.weight.grad.clone()}
        results.append((of_weights, others | ({"factor": own.factor.grad.clone()} if activation == "callable" else {})))
    (plain, plain_others), (scaled, scaled_others) = results
    for name, gradient in plain.items():
        if autocast is not None or (scale != 0.3 and dtype != torch.float16):
            assert torch.equal(scaled[name], gradient * scale), name
        else:
            torch.testing.assert_close(scaled[name], gradient * scale)
    for name, gradient in plain_others.items():
        assert torch.equal(scaled_others[name], gradient), name


def ends_the_graph(h):
    torch._dynamo.graph_break()
    return torch.tanh(h)


@pytest.mark.parametrize("fields, chunks, backend", [
    pytest.param({}, 1, "aot_eager", id="kernel"),
    pytest.param({"activation_fn": ends_the_graph}, 2, "eager", id="callable", marks=pytest.mark.slow)])  # fifty graphs
def test_a_compiler_scales_gradients_once(group_of_one, chunks, fields, backend):
    """Frames that are compiled and frames that are not had scaled them twice, or not at all; and where a graph ended between the scaled
    weights and their products, they were not scaled."""
    torch.manual_seed(0)
    layer = gbmoe.dMoE(Arguments(
        hidden_size=16, ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, mlp_type="glu", bias=False, device="cpu", fp16=False,
        moe_expert_model_parallelism=True, expert_parallel_chunks=chunks, moe_loss_weight=0, **fields))
    layer.experts.mlp.gradient_scale = 0.5
    gradients = []
    for function in (layer, torch.compile(layer, backend=backend, dynamic=False)):
        layer.zero_grad()
        torch.manual_seed(9)
        function(torch.randn(9, 1, 16)).square().sum().backward()
        gradients.append([w.grad.clone() for w in layer.experts.mlp.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("use, option", [
    (lambda experts: experts.in_chunks([(0, 4)]), "expert_parallel_chunks and expert_parallel_shadows"),
    (lambda experts: experts.rows_before_weights(), "expert_parallel_exact")])
def test_weights_that_hooks_compute_were_those_of_an_earlier_step(use, option):
    """Pruning computes them when the module is called, and these options take the weights without calling it."""
    experts = gbmoe.dMoE(Arguments(hidden_size=8, ffn_hidden_size=16, moe_num_experts=4, fp16=False, device="cpu")).experts.mlp
    use(experts)
    torch.nn.utils.prune.identity(experts, "w2")
    with pytest.raises(ValueError, match=f"dMoE: experts.mlp: expected parameters or parametrizations with {option}, which uses"):
        use(experts)


class Router(torch.nn.Module):
    """A router without the attribute `args`, from which the layer read that its experts are spread. Weights are float32, and a slot is
    left out."""

    def __init__(self):
        super().__init__()
        self.weight_EH = torch.nn.Parameter(torch.randn(4, HIDDEN))

    def forward(self, x):
        scores_TE = (x.flatten(0, -2).float() @ self.weight_EH.t()).softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(2)
        return scores_TE, weights_TK, torch.where(ids_TK == 3, -1, ids_TK)


def test_spread_experts_needed_the_attribute_args_of_the_router(group_of_one):
    fields = dict(hidden_size=HIDDEN, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, bias=False, shared_expert=True, fp16=False,
                  bf16=True, device="cpu")
    layers = [gbmoe.dMoE(Arguments(moe_expert_model_parallelism=parallel, **fields)) for parallel in (False, True)]
    for layer in layers:
        layer.router = Router()
        layer.load_state_dict(layers[0].state_dict())
    x = torch.randn(TOKENS, 1, HIDDEN).bfloat16()
    torch.testing.assert_close(layers[1](x), layers[0](x))
    gbmoe.clear_load_balancing_loss()
