"""dMoE: MegaBlocks' conventions, and the three implementations against each other."""

import collections
import itertools
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gbmoe
from gbmoe import engines
from gbmoe.layers import Arguments
from gbmoe.layers.losses import save_router_logsumexp
from gbmoe.ops import routed_experts
from gbmoe.testing import accuracy, cuda_graphs, exact_inputs
from tests.conftest import assert_as_accurate_as, dtype_id

SIZES = dict(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2)


def make(device="cpu", seed=0, **fields):
    args = Arguments(**{**SIZES, "fp16": False, "device": device, **fields})
    torch.manual_seed(seed)
    return gbmoe.dMoE(args), args


def with_weights_of(layer, **fields):
    """A layer with other arguments and the same parameters."""
    other, _ = make(**fields)
    other.load_state_dict({name: t.to(other.state_dict()[name]) for name, t in layer.state_dict().items()}, strict=True)
    return other


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize("shared_expert", [False, True])
@pytest.mark.parametrize("impl", ["gbmoe", "bmm", "reference"])
def test_parameters_are_megablocks_checkpoint(mlp_type, shared_expert, impl):
    layer, args = make(mlp_type=mlp_type, shared_expert=shared_expert, mlp_impl=impl)
    rows = args.moe_num_experts * args.ffn_hidden_size
    expected = {"router.layer.weight": (4, 32), "experts.bias": (32,), "experts.mlp.w1": (rows, 32), "experts.mlp.w2": (rows, 32)}
    if mlp_type == "glu":
        expected["experts.mlp.v1"] = (rows, 32)
    if shared_expert:
        expected.update({"shared_expert.up_proj.weight": (64, 32), "shared_expert.up_proj.bias": (64,),
                         "shared_expert.down_proj.weight": (32, 64), "shared_expert.down_proj.bias": (32,)})
        if mlp_type == "glu":
            expected.update({"shared_expert.gate_proj.weight": (64, 32), "shared_expert.gate_proj.bias": (64,)})
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == expected


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize("activation", [F.silu, torch.tanh], ids=["silu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("memory_optimized", [False, True])
def test_implementations_agree_with_float64(device, mlp_type, activation, dtype, memory_optimized):
    fields = dict(device=device, mlp_type=mlp_type, activation_fn=activation, memory_optimized_mlp=memory_optimized,
                  moe_normalize_expert_weights=1, moe_zloss_weight=1e-2, shared_expert=True, seed=3,
                  init_method=lambda w: w.copy_(exact_inputs.exact_values(
                      *w.shape, dtype=w.dtype, device=w.device, seed=w.numel(), scale=0.25)))
    halves = dict(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
    with torch.no_grad():
        layer, args = make(mlp_impl="gbmoe", **halves, **fields)
    layers = {"gbmoe": layer}
    for impl in ("bmm", "reference"):
        with torch.no_grad():
            layers[impl], _ = make(mlp_impl=impl, **halves, **fields)
        layers[impl].load_state_dict(layer.state_dict())
    x = exact_inputs.exact_values(24, 2, 32, dtype=dtype, device=device, seed=1)
    grad = exact_inputs.exact_values(24, 2, 32, dtype=dtype, device=device, seed=2)
    ids = layer.router(x)[2]

    def run(layer, x, grad):
        gbmoe.clear_load_balancing_loss()
        gbmoe.clear_router_zloss()
        x = x.clone().requires_grad_()
        out, bias = layer(x)
        losses = gbmoe.batched_load_balancing_loss(args) + gbmoe.batched_router_zloss(args).sum()
        exact_inputs.poison(device)
        torch.autograd.backward([out + bias, losses], [grad, torch.ones_like(losses)])
        return {"out": out.detach(), "losses": losses.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}

    with torch.no_grad():
        exact_layer, _ = make(mlp_impl="reference", **fields)
    exact_layer = exact_layer.double()
    exact_layer.load_state_dict({n: t.double() for n, t in layer.state_dict().items()})
    # Float64 could break a near-tie the other way: the experts are those of the dtype under test.
    exact_layer.router.forward = _router_with_ids(exact_layer.router, ids)
    exact = run(exact_layer, x.double(), grad.double())
    results = {impl: run(layers[impl], x, grad) for impl in layers}
    for impl in ("gbmoe", "reference"):
        for what, result in results[impl].items():
            assert_as_accurate_as(result, results["bmm"][what], exact[what], f"{impl} {what}")


def _router_with_ids(router, ids):
    def forward(x):
        logits = router.layer(x.reshape(-1, x.size(-1)))
        save_router_logsumexp(logits.logsumexp(-1))
        scores = logits.softmax(-1)
        weights = scores.gather(1, ids)
        return scores, weights / weights.norm(p=1, dim=-1, keepdim=True), ids
    return forward


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_a_layer_keeps_gathered_rows_where_it_is_told_to(mlp_type):
    x, results, saved = torch.randn(30, 1, 32), [], []
    for keep in (False, True):
        layer, args = make(mlp_type=mlp_type, bias=False, keep_gathered_rows=keep)
        own = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = layer(own)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [own, *layer.parameters()])])
        rows, weights = 30 * args.moe_top_k, {id(parameter) for parameter in layer.parameters()}
        assert sum(t.dim() == 2 and t.size(1) == 32 and t.size(0) >= rows and id(t) not in weights for t in saved) == keep
        saved.clear()
    assert all(torch.equal(*both) for both in zip(*results))


@pytest.mark.parametrize("bias, return_bias", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("shared_expert", [False, True])
def test_return_convention(bias, return_bias, shared_expert):
    layer, _ = make(bias=bias, return_bias=return_bias, shared_expert=shared_expert)
    x = torch.randn(7, 3, 32)
    out = layer(x)
    if bias and return_bias:
        out, vector = out
        assert vector is layer.experts.bias
    assert isinstance(out, torch.Tensor) and out.shape == x.shape
    if bias:
        with torch.no_grad():
            layer.experts.bias.fill_(3.0)
        again = layer(x)
        again = again[0] if return_bias else again - 3.0
        torch.testing.assert_close(again, out)


def test_shared_expert_weighted_sum():
    layer, args = make(shared_expert=True, shared_expert_weighted_sum=True, bias=False)
    x = torch.randn(5, 1, 32)
    shared = layer.shared_expert(x)
    layer_without = with_weights_of(gbmoe_only(layer), bias=False)
    torch.testing.assert_close(layer(x), shared / 3 + layer_without(x) * 2 / 3)


def gbmoe_only(layer):
    """The layer's parameters without the shared expert's."""
    class Part:
        @staticmethod
        def state_dict():
            return {n: t for n, t in layer.state_dict().items() if not n.startswith("shared_expert")}
    return Part


def test_shared_expert_in_half_precision():
    """MegaBlocks leaves it in float32 there, and the first forward fails."""
    layer, _ = make(shared_expert=True, bf16=True, mlp_type="glu", shared_expert_hidden_size=48, fc_kwargs={"bias": False})
    assert layer.shared_expert.gate_proj.weight.shape == (48, 32) and layer.shared_expert.up_proj.bias is None
    assert layer(torch.randn(5, 1, 32).bfloat16())[0].dtype == torch.bfloat16


def test_fp16_default_runs_on_the_cpu():
    layer, args = make(fp16=True)
    x = torch.randn(5, 1, 32).half().requires_grad_()
    out, _ = layer(x)
    (out.sum() + gbmoe.batched_load_balancing_loss(args)).backward()
    assert out.dtype == torch.float16 and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("impl", ["gbmoe", "bmm", "reference"])
@pytest.mark.parametrize("activation", [F.silu, torch.tanh], ids=["fused", "composed"])
def test_reducing_the_kept_counts_changed_the_gradients(device, monkeypatch, impl, activation):
    """The counts were what backward has its group sizes from; a collective writes to them without autograd's knowledge."""
    monkeypatch.setitem(vars(engines.ENGINES["reference"]), "needs_host_sizes", False)  # on the CPU too it reads the plan's own
    layer, _ = make(device, mlp_impl=impl, mlp_type="glu", activation_fn=activation, bf16=device.type == "cuda")
    x = exact_inputs.exact_values(64, 32, dtype=layer.router.layer.weight.dtype, device=device, seed=0)

    def gradients(reduce):
        layer.zero_grad()
        gbmoe.clear_load_balancing_loss()
        out = layer(x)[0]
        (counts_E, _), = gbmoe.get_load_balancing_loss()
        if reduce:
            counts_E.data.mul_(1000)  # as a collective: no version is counted
        out.float().square().sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(got, want)


def test_uniform_expert_assignment(device):
    for impl in ("gbmoe", "bmm", "reference"):
        layer, _ = make(device, uniform_expert_assignment=True, mlp_impl=impl, moe_top_k=3)
        layer(torch.randn(8, 1, 32, device=device))
        assert gbmoe.get_load_balancing_loss()[-1][0].tolist() == [6, 6, 6, 6]


class _Linear(torch.nn.Linear):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_a_shared_expert_of_a_class_with_any_options_stayed_float32(mlp_type):
    layer, _ = make(bf16=True, bias=False, shared_expert=True, mlp_type=mlp_type, fc_cls=_Linear)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_from_float32_parameters(device):
    layer, args = make(device, mlp_type="glu", shared_expert=True)
    x = torch.randn(9, 2, 32, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out, _ = layer(x)
        loss = out.float().square().sum() + gbmoe.batched_load_balancing_loss(args)
    loss.backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for n, p in layer.named_parameters() if n != "experts.bias")
    plain, _ = with_weights_of(layer, device=device, mlp_type="glu", shared_expert=True)(x)
    assert accuracy.relative_error(out, plain) < 2e-2


@pytest.mark.parametrize("shared_expert", [False, True])
def test_a_bias_made_results_under_autocast_float32(device, shared_expert):
    layer, _ = make(device, bias=True, return_bias=False, shared_expert=shared_expert)
    torch.nn.init.normal_(layer.experts.bias)
    x = torch.randn(9, 2, 32, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert accuracy.relative_error(out, layer(x)) < 2e-2


def test_memory_optimised_with_frozen_weights_or_input(device):
    for frozen in ("experts.mlp.w1", "experts.mlp.w2", "experts.mlp.v1", "x"):
        layer, _ = make(device, memory_optimized_mlp=True, mlp_type="glu", activation_fn=torch.tanh)
        full_x = torch.randn(9, 2, 32, device=device, generator=exact_inputs.generator(device, 1))
        x = full_x.clone().requires_grad_(frozen != "x")
        if frozen != "x":
            layer.get_parameter(frozen).requires_grad_(False)
        out, _ = layer(x)
        grad = torch.ones_like(out)
        out.backward(grad)
        assert bool((grad == 1).all())
        reference_layer = with_weights_of(layer, device=device, mlp_impl="reference", mlp_type="glu", activation_fn=torch.tanh)
        reference_x = full_x.clone().requires_grad_()
        reference_layer(reference_x)[0].backward(grad)
        for name, parameter in layer.named_parameters():
            if name not in (frozen, "experts.bias"):
                torch.testing.assert_close(parameter.grad, reference_layer.get_parameter(name).grad, rtol=2e-5, atol=1e-6)


@pytest.fixture(params=[("hopper", torch.bfloat16), ("hopper", torch.float16), ("tensor_core", torch.bfloat16),
                        ("tensor_core", torch.float16), ("tensor_core", torch.float32), ("torch", torch.bfloat16)],
                ids=lambda case: f"{case[0]}-{dtype_id(case[1])}")
def step_on(request, float32_products):
    """A layer, its input and gradient, and a function that runs it forward and backward and returns all that it computes. In float32
    TF32 is allowed."""
    engine, dtype = request.param
    reason = engines.ENGINES[engine].unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    float32_products("tf32")
    layer, _ = make("cuda", 0, hidden_size=136, ffn_hidden_size=264, moe_num_experts=8, mlp_type="glu", bias=False, engine=engine,
                    bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, init_method=partial(torch.nn.init.normal_, std=0.1))
    x = torch.randn(300, 1, 136, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x, requires_grad=False)

    def step():
        out = layer(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]
    return layer, x, grad, step


@pytest.mark.gpu
def test_a_step_waits_for_nothing(step_on):
    _, _, _, step = step_on
    step()
    with cuda_graphs.no_host_wait():
        step()


@pytest.mark.gpu
def test_one_cuda_graph_of_a_step_serves_every_routing(step_on):
    """Forward and backward, captured once: other tokens, another router and so other counts give eager's bits."""
    layer, x, grad, step = step_on
    graph, captured = cuda_graphs.captured(step)
    counts = set()
    for skew in (0.0, 1.0, 30.0):
        with torch.no_grad():
            x.normal_()
            grad.normal_()
            layer.router.layer.weight.normal_(std=0.1)
            x[..., 0] = 1.0
            layer.router.layer.weight[:, 0] -= skew * torch.arange(8, device="cuda") / 8
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        counts.add(tuple(layer.router(x)[2].flatten().bincount(minlength=8).tolist()))
        eager = step()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True)), f"skew {skew}"
    assert len(counts) == 3 and any(0 in c for c in counts)


def test_meta_device_gives_shapes():
    layer, _ = make("meta", mlp_type="glu")
    assert layer.experts.mlp.w1.device.type == "meta"


def test_zero_tokens(device):
    for impl in ("gbmoe", "bmm", "reference"):
        layer, args = make(device, mlp_impl=impl)
        x = torch.randn(0, 3, 32, device=device, requires_grad=True)
        out, _ = layer(x)
        (out.sum() + gbmoe.batched_load_balancing_loss(args)).backward()
        gbmoe.clear_load_balancing_loss()
        assert out.shape == x.shape and bool((layer.experts.mlp.w1.grad == 0).all())


@pytest.mark.parametrize("x, words", [
    (torch.zeros(3, 1, 31), "x: expected last dimension hidden_size == 32, got \\[3, 1, 31\\]"),
    (torch.zeros(3, 1, 32, dtype=torch.float64), "x: expected the layer's dtype torch.float32, or autocast, got torch.float64"),
    (torch.zeros(3, 1, 32, device="meta"), "x: expected device cpu, got meta"),
    ([1.0], "x: expected a torch.Tensor, got list"),
])
def test_bad_input(x, words):
    with pytest.raises((TypeError, ValueError), match="dMoE: " + words):
        make()[0](x)


def test_expert_parameters_are_marked_for_optimizers():
    layer, _ = make()
    assert layer.experts.mlp.w1.expert_model_parallel is False
    assert not hasattr(layer.router.layer.weight, "expert_model_parallel")


def test_a_float64_layer_stays_float64_under_autocast(device):
    layer, _ = make(device, shared_expert=True, mlp_type="glu", bias=False)
    layer, x = layer.double(), torch.randn(5, 1, 32, dtype=torch.float64, device=device)
    expected = layer(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)
        with pytest.raises(TypeError, match="x: expected the layer's dtype torch.float64, got torch.float32"):
            layer(x.float())


@pytest.mark.parametrize("fields", [dict(mlp_type="glu", shared_expert=True), dict(activation_fn=torch.tanh),
                                    dict(mlp_type="glu", keep_gathered_rows=True)], ids=["fused", "composed", "kept-rows"])
@pytest.mark.parametrize("engine", ["auto", "hopper"])
def test_forward_and_backward_on_the_meta_device(fields, engine):
    layer, args = make("meta", bias=False, moe_zloss_weight=1e-2, engine=engine, **fields)
    x = torch.randn(5, 2, 32, device="meta", requires_grad=True)
    out = layer(x)
    assert out.device.type == "meta" and out.shape == x.shape and out.dtype == x.dtype
    (out.sum() + gbmoe.batched_load_balancing_loss(args) + gbmoe.batched_router_zloss(args).sum()).backward()
    assert all(p.grad.device.type == "meta" and p.grad.shape == p.shape for p in (x, *layer.parameters()))


class Adapter(torch.nn.Module):
    """Wraps a linear layer as LoRA's adapters do; its weight is that of the base layer."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer
        self.down = torch.nn.Linear(base_layer.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base_layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def test_an_adapter_round_the_routers_layer():
    layer, _ = make(bias=False)
    x = torch.randn(5, 1, 32)
    expected = layer(x)
    layer.router.layer = Adapter(layer.router.layer)
    out = layer(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    assert layer.router.layer.up.weight.grad is not None
    with pytest.raises(TypeError, match="x: expected the layer's dtype torch.float32"):
        layer(x.double())


class WithMethod(torch.nn.Module):
    """A linear layer whose weight is a method, as in torch.ao's quantised Linear."""

    def __init__(self, linear):
        super().__init__()
        self.linear = [linear]

    def weight(self):
        return self.linear[0].weight

    def forward(self, x):
        return self.linear[0](x)


def test_a_router_layer_whose_weight_is_a_method():
    layer, _ = make(bias=False)
    x = torch.randn(5, 1, 32)
    expected = layer(x)
    layer.router.layer = WithMethod(layer.router.layer)
    assert torch.equal(layer(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_of_linear_layers():
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch.ao.quantization, "quantize_dynamic"):
        pytest.skip("this build of torch does not quantise")
    layer, _ = make(bias=False, shared_expert=True)
    x = torch.randn(5, 1, 32)
    quantised = torch.ao.quantization.quantize_dynamic(layer.eval(), {torch.nn.Linear}, dtype=torch.qint8)
    assert quantised(x).shape == x.shape


@pytest.mark.parametrize("shared_expert", [False, True])
def test_an_activation_with_parameters_is_registered_by_the_caller(shared_expert):
    """As in MegaBlocks it belongs to the arguments, which layers share. The docstring of Arguments says what to do."""
    activation = torch.nn.PReLU()
    args = Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=2, fp16=False, bias=False, device="cpu",
                     activation_fn=activation, shared_expert=shared_expert)
    model = torch.nn.Sequential(gbmoe.dMoE(args), gbmoe.dMoE(args))
    named = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is activation.weight]
    assert named == ([f"{layer}.shared_expert.act.weight" for layer in range(2)] if shared_expert else [])
    model(torch.randn(5, 1, 16)).sum().backward()
    assert float(activation.weight.grad.abs()) > 0
    model.activation = activation
    assert "activation.weight" in model.state_dict() and any(p is activation.weight for p in model.parameters())


# ------------------------------------------------------------------------------------------------- routers of the user's own


class CastingLinear(torch.nn.Linear):
    """A router.layer that casts by itself, as models with a router in float32 write it."""

    def forward(self, x):
        return F.linear(x.float(), self.weight)


def _linear_with_bias(router):
    layer = torch.nn.Linear(32, 4)
    with torch.no_grad():
        layer.weight.copy_(router.layer.weight)
        layer.bias.zero_()
    router.layer = layer


def _hooked(router):
    router.float().layer.register_forward_hook(lambda module, inputs, output: output)


def _casting(router):
    weight = router.layer.weight.float()
    router.layer = CastingLinear(32, 4, bias=False)
    router.layer.load_state_dict({"weight": weight})


FLOAT32_ROUTERS = {
    "cast": lambda router: router.float(),
    "with bias": _linear_with_bias,
    "hooked": _hooked,
    "parametrized": lambda router: torch.nn.utils.parametrizations.weight_norm(router.float().layer),
    "casts by itself": _casting,
    "compiled": lambda router: setattr(router.float(), "layer", torch.compile(router.layer, backend="eager")),
    "in a checkpoint": lambda router: setattr(router.float(), "layer", checkpoint_wrapper(router.layer)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("change", FLOAT32_ROUTERS.values(), ids=FLOAT32_ROUTERS)
def test_a_float32_router_in_a_layer_of_half_precision_was_refused(device, dtype, change):
    """The layer's dtype was taken from router.layer.weight."""
    fields = dict(device=device, bias=False, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, moe_zloss_weight=1e-2)
    layer, args = make(**fields)
    plain = with_weights_of(layer, **fields)
    change(layer.router)
    layer.router.to(device)
    x = torch.randn(9, 2, 32, device=device, dtype=dtype, requires_grad=True)
    out = layer(x)
    assert out.dtype == dtype
    ids = layer.router(x)[2]
    assert torch.equal(ids, (x.detach().float().flatten(0, 1) @ plain.router.layer.weight.float().t()).topk(2)[1])
    (out.float().square().sum() + gbmoe.batched_load_balancing_loss(args) + gbmoe.batched_router_zloss(args).sum()).backward()
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.any()) for n, p in layer.router.named_parameters() if "bias" not in n)
    with pytest.raises(TypeError, match=f"x: expected the layer's dtype {dtype}, or autocast, got torch.float32"):
        layer(x.detach().float())
    with torch.autocast(device.type, dtype=dtype):
        assert layer(x.detach().float()).dtype == dtype


@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float64], ids=dtype_id)
def test_a_router_of_another_dtype_than_a_float32_layer(device, router_dtype):
    layer, _ = make(device, bias=False)
    x = torch.randn(5, 1, 32, device=device)
    layer.router.to(router_dtype)
    assert layer(x).dtype == torch.float32
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("cast, dtype", [
    (lambda layer: layer.to(torch.bfloat16), torch.bfloat16), (lambda layer: layer.half(), torch.float16),
    (lambda layer: layer.double(), torch.float64), (lambda layer: layer.experts.double(), torch.float64),
    (lambda layer: layer.load_state_dict({n: t.half() for n, t in layer.state_dict().items()}, assign=True), torch.float16),
    (lambda layer: [setattr(p, "data", p.data.half()) for p in layer.parameters()], torch.float16)])
def test_the_layers_dtype_is_what_it_was_cast_to(cast, dtype):
    layer, _ = make(bias=False)
    cast(layer)
    layer.router.float()
    assert layer(torch.randn(5, 1, 32, dtype=dtype)).dtype == dtype
    with pytest.raises(TypeError, match=f"x: expected the layer's dtype {dtype}"):
        layer(torch.randn(5, 1, 32))


class Wrapped(torch.nn.Module):
    """Stands in the place of the experts, as adapters do, and has parameters of another dtype."""

    def __init__(self, experts):
        super().__init__()
        self.factor, self.base_layer = torch.nn.Parameter(torch.ones(1, 1)), experts

    def forward(self, *args):
        return self.base_layer(*args)


@pytest.mark.parametrize("put", [
    lambda mlp: torch.nn.utils.parametrizations.weight_norm(mlp, "w1"), lambda mlp: torch.nn.utils.prune.identity(mlp, "w1"), Wrapped,
    lambda mlp: torch.compile(mlp, backend="eager")], ids=["parametrized", "pruned", "wrapped", "compiled"])
def test_the_layers_dtype_where_something_stands_in_the_place_of_w1(put):
    layer, _ = make(bias=False, bf16=True)
    layer.experts.mlp = put(layer.experts.mlp)
    layer.router.float()
    assert layer(torch.randn(5, 1, 32).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="x: expected the layer's dtype torch.bfloat16"):
        layer(torch.randn(5, 1, 32))


class SigmoidRouter(torch.nn.Module):
    """A router of the user's own, without the attributes `layer` and `args`; `change` is applied to what it returns."""

    def __init__(self, change=lambda scores, weights, ids: (scores, weights, ids)):
        super().__init__()
        self.gate, self.change = torch.nn.Linear(32, 4, bias=False), change

    def forward(self, x):
        scores_TE = self.gate(x.float().flatten(0, -2)).sigmoid()
        weights_TK, ids_TK = scores_TE.topk(2)
        return self.change(scores_TE, weights_TK, ids_TK)


@pytest.mark.parametrize("impl", ["gbmoe", "bmm", "reference"])
@pytest.mark.parametrize("shared_expert", [False, True])
def test_a_router_of_ones_own_needed_undocumented_attributes(device, impl, shared_expert):
    """And its weights may be float32 in a layer of bfloat16, its ids int32."""
    layer, args = make(device, bias=False, bf16=True, mlp_impl=impl, shared_expert=shared_expert)
    layer.router = SigmoidRouter(lambda scores, weights, ids: (scores, weights, ids.int())).to(device)
    x = torch.randn(5, 3, 32, device=device).bfloat16()
    out = layer(x)
    assert out.dtype == torch.bfloat16 and out.shape == x.shape
    scores, weights, ids = layer.router(x)
    counts_E, kept = gbmoe.get_load_balancing_loss()[-1]
    assert counts_E.tolist() == ids.flatten().bincount(minlength=4).tolist() and torch.equal(kept, scores)
    exact_layer, _ = make(device, bias=False, mlp_impl="reference", shared_expert=shared_expert)
    exact_layer = exact_layer.double().eval()
    exact_layer.load_state_dict({n: t.double() for n, t in layer.state_dict().items() if "router" not in n}, strict=False)
    exact_layer.router = SigmoidRouter(lambda *_: (scores.double(), weights.double(), ids)).to(device)
    assert accuracy.relative_error(out, exact_layer(x.double())) < 2e-2
    (out.float().square().sum() + gbmoe.batched_load_balancing_loss(args)).backward()
    gbmoe.clear_load_balancing_loss()
    assert bool(layer.router.gate.weight.grad.any())


def test_a_router_may_leave_slots_out_and_have_no_scores():
    layer, _ = make(bias=False, moe_loss_weight=0)
    layer.router = SigmoidRouter(lambda scores, weights, ids: (None, weights, torch.where(ids == 2, -1, ids)))
    full, _ = make(bias=False, moe_loss_weight=0)
    full.router = SigmoidRouter(lambda scores, weights, ids: (scores, weights * (ids != 2), ids))
    full.load_state_dict(layer.state_dict())
    x = torch.randn(7, 1, 32)
    torch.testing.assert_close(layer(x), full(x))


@pytest.mark.parametrize("change, words", [
    (lambda s, w, i: w, "router: expected to return a tuple \\(scores, weights, ids\\), got <class 'torch.Tensor'>"),
    (lambda s, w, i: (w, i), "router: expected to return a tuple \\(scores, weights, ids\\), got 2 values"),
    (lambda s, w, i: (None, w, i), "scores of router: expected a torch.Tensor, got NoneType"),
    (lambda s, w, i: (s[:, :3], w, i), "scores of router: expected shape \\[T,E\\] == \\[10, 4\\], got \\[10, 3\\]"),
    (lambda s, w, i: (s, w[:, :1], i[:, :1]), "weights of router: expected shape \\[T,K\\] == \\[10, 2\\], got \\[10, 1\\]"),
    (lambda s, w, i: (s, w, i[:5]), "ids of router: expected shape \\[T,K\\] == \\[10, 2\\], got \\[5, 2\\]"),
    (lambda s, w, i: (s, w.view(5, 2, 2), i), "weights of router: expected 2 dimensions, got \\[5, 2, 2\\]"),
    (lambda s, w, i: (s, w, i.float()), "ids of router: expected dtype int32, int64, got torch.float32"),
    (lambda s, w, i: (s, i, i), "weights of router: expected dtype bfloat16, .*got torch.int64"),
    (lambda s, w, i: (s, w, i.to("meta")), "ids of router: expected device cpu, got meta"),
    (lambda s, w, i: (s, w, i + 1), "ids of router: expected ids in \\[0, 4\\), or -1 to leave a slot out, got ids from 3 to 4"),
])
def test_what_a_router_returned_was_not_checked(change, words):
    layer, _ = make(bias=False)
    layer.router = SigmoidRouter(change)
    with torch.no_grad():
        layer.router.gate.weight.fill_(0.0)[3] = 1.0  # so that expert 3 is chosen
    with pytest.raises((TypeError, ValueError), match="dMoE: " + words):
        layer(torch.ones(5, 2, 32))


def test_a_layer_that_was_pickled_without_its_arguments(tmp_path):
    layer, _ = make(shared_expert=True)
    x = torch.randn(3, 1, 32)
    expected = layer(x)[0]
    del layer.args
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(x)[0], expected)


@pytest.mark.parametrize("backward, most, programs", [(False, 180, False), (True, 330, False), (False, 46, True), (True, 54, True)])
def test_a_step_asked_again_what_it_knew(backward, most, programs):
    """A small layer's step takes as long as the Python that launches it. Forward once called 203 of gbmoe's functions, and 378 with
    backward; raise these bounds only for what a step cannot do without. On a GPU programs take the place of what is recorded."""
    layer, _ = make(bf16=True, bias=False, mlp_type="glu")
    x = torch.randn(5, 1, 32, dtype=torch.bfloat16, requires_grad=True)
    package, called, inside = str(Path(gbmoe.__file__).parent), [], []
    recorded = routed_experts._forward.__code__, routed_experts._gradients.__code__

    def step():
        with torch.set_grad_enabled(backward):
            out = layer(x)
        if backward:
            out.sum().backward()

    def see(frame, event, _):
        path = frame.f_code.co_filename
        if programs and frame.f_code in recorded:
            inside.append(1) if event == "call" else inside.pop() if event == "return" else None
        if inside:
            return
        on_gpus = "plain_" not in path and "_accumulate_dtype" not in path  # kernels take the place of plain PyTorch
        if event == "call" and path.startswith(package) and on_gpus:
            called.append(frame.f_code.co_name)

    step()
    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert 0 < len(called) <= most, collections.Counter(called).most_common(20)


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("way", ["parametrization", "pruning"])
def test_a_bias_that_is_computed_was_left_out(way, return_bias):
    """It is then no parameter of that name."""
    layer, _ = make(bias=True, return_bias=return_bias)
    x = torch.randn(5, 1, SIZES["hidden_size"])
    torch.nn.init.normal_(layer.experts.bias)

    def out():
        found = layer(x)
        return sum(found) if return_bias else found

    bias, before = layer.experts.bias.detach().clone(), out()
    if way == "parametrization":
        torch.nn.utils.parametrize.register_parametrization(layer.experts, "bias", torch.nn.ReLU())
        expected = before - bias + bias.relu()
    else:
        torch.nn.utils.prune.custom_from_mask(layer.experts, "bias", bias > 0)
        expected = before - bias + bias * (bias > 0)
    torch.testing.assert_close(out(), expected)
