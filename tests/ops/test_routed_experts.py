"""routed_experts next to the three calls that it stands for, and what keeps a layer from using it."""

import contextlib
import itertools

import pytest
import torch
import torch.overrides
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe.layers import dmoe
from gbmoe.layers.router import LearnedRouter
from gbmoe.ops import expert_mlp, route_tokens, routed_experts as module
from gbmoe.ops.routed_experts import ExpertsCall, RouterCall, routed_experts
from gbmoe.programs import recording
from gbmoe.router_function import RouterFunction
from gbmoe.testing.exact_inputs import poison

E, F, H, K = 5, 48, 32, 2


def inputs(device="cpu", dtype=torch.float32, glu=True, biases=False, function=None, expert_bias=False, padding=False, flat=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = draw(3, 7, H)
    router = RouterCall((draw(E, H), draw(E) if biases else None, draw(E, dtype=torch.float32) if expert_bias else None,
                         (torch.arange(21, device=device) % 4 == 0) if padding else None), K, None if function else 1, function, None, None)
    w1, w2, v1 = (draw(E * F, H) / 4 if flat else draw(E, F, H) / 4 for _ in range(3))
    of_experts = ExpertsCall((w1, w2, v1 if glu else None, draw(E, F) if biases else None, draw(E, H) if biases else None,
                              draw(E, F) if biases and glu else None), "silu", "auto", False, False)
    return x, router, of_experts


def three_calls(x, router, of_experts):
    x_TH = x.reshape(-1, x.size(-1))
    weight_EH, bias_E, expert_bias_E, padding_mask_T = router.tensors
    routing = route_tokens(x_TH, weight_EH, router.top_k, normalize=router.normalize, bias=bias_E, function=router.function,
                           expert_bias=expert_bias_E, padding_mask=padding_mask_T, scores_dtype=router.scores_dtype)
    plan = gbmoe.RoutingPlan.from_experts(routing.experts_TK, E, check="none")
    # The experts' own view of x, as their module makes one.
    rows_TH = x.reshape(-1, x.size(-1))
    w1, w2, v1 = (w if w is None else w.view(E, F, H) for w in of_experts.tensors[:3])
    w1_bias, w2_bias, v1_bias = of_experts.tensors[3:]
    out_TH = expert_mlp(rows_TH, plan, w1, w2, v1, weights_TK=routing.weights_TK, activation=of_experts.activation,
                        w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias)
    return out_TH.view(x.shape), routing.scores_TE, routing.logsumexp_T, routing.experts_TK, plan.counts_E


def leaves_of(x, router, of_experts):
    tensors = (x, *router.tensors[:2], *of_experts.tensors)
    return [t for t in tensors if t is not None]


def gradients(results, leaves, of=(0, 1, 2)):
    loss = sum((results[number].float() * torch.arange(1, results[number].numel() + 1, device=results[number].device)
                .view(results[number].shape).cos()).sum() for number in of)
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.shape == b.shape and a.stride() == b.stride())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [
    {}, {"glu": False}, {"biases": True}, {"flat": False, "dtype": torch.bfloat16}, {"padding": True},
    {"function": RouterFunction("sigmoid", normalize=1, scale=2.5), "expert_bias": True, "biases": True},
], ids=str)
def test_one_call_has_the_bits_of_three(device, case):
    """Results, and gradients of all leaves and of each without the others, from all results and from each without the others."""
    arguments = inputs(device, **case)
    leaves = leaves_of(*arguments)
    for _ in range(3 if device == "cuda" else 1):  # the third one runs programs
        for wanted in (leaves, leaves[:1], leaves[1:2], leaves[-1:], []):
            for leaf in leaves:
                leaf.requires_grad_(any(leaf is one for one in wanted))
            for of in ((0, 1, 2), (0,), (1,), (2,)):
                poison(device)
                mine, theirs = routed_experts(*arguments), three_calls(*arguments)
                assert_same(mine, theirs)
                assert [t.requires_grad for t in mine] == [t.requires_grad for t in theirs]
                if all(mine[number].requires_grad for number in of):
                    assert_same(gradients(mine, leaves, of), gradients(theirs, leaves, of))


def test_engines_that_decide_by_more_than_the_kind_are_not_recorded():
    x, router, of_experts = inputs(biases=True)
    arguments = [x, *router.tensors, *of_experts.tensors, (*router[1:], *of_experts[1:4], of_experts.layout, True, False)]
    results, program = recording.record(module._forward, list(arguments))  # the CPU's engine reads sizes
    assert program is None
    assert_same(results[0], module._forward(arguments)[0])


def test_gradients_were_those_of_one_backward_alone():
    """With retain_graph a second backward has the same gradients; without it, torch's error."""
    arguments = inputs()
    leaves = [leaf.requires_grad_() for leaf in leaves_of(*arguments)]
    out = routed_experts(*arguments).out.square().sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert_same(first, torch.autograd.grad(out, leaves))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves)


def test_second_derivatives_are_refused_and_batched_gradients_are_those_of_each():
    arguments = inputs()
    leaves = [leaf.requires_grad_() for leaf in leaves_of(*arguments)]
    out = routed_experts(*arguments).out
    first, = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        first.sum().backward()
    grads = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for number, grad in enumerate(grads):
        for one, other in zip(batched, torch.autograd.grad(out, leaves, grad, retain_graph=True)):
            torch.testing.assert_close(one[number], other)


def test_a_results_change_in_place_is_found():
    """As of any tensor that is saved for backward."""
    arguments = inputs()
    leaves = [leaf.requires_grad_() for leaf in leaves_of(*arguments)]
    results = routed_experts(*arguments)
    results.experts_TK.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(results.out.sum(), leaves)
    results = routed_experts(*arguments)
    results.counts_E.zero_()  # which callers may reduce over ranks
    torch.autograd.grad(results.out.sum(), leaves)


# ---------------------------------------------------------------------------------------------------------------- in a layer


LOSSES = gbmoe.batched_load_balancing_loss, gbmoe.batched_router_zloss


def layer_of(**fields):
    torch.manual_seed(0)
    return gbmoe.dMoE(gbmoe.Arguments(**{"hidden_size": H, "ffn_hidden_size": F, "moe_num_experts": E, "moe_top_k": K, "mlp_type": "glu",
                                         "bias": False, "fp16": False, "device": "cpu", **fields}))


@pytest.fixture
def calls(monkeypatch):
    """How often layers have used routed_experts."""
    made = []
    monkeypatch.setattr(dmoe, "routed_experts", lambda *arguments: made.append(1) or routed_experts(*arguments))
    return made


def apart(layer, x, **given):
    """What the layer returns where router and experts are called one after the other."""
    handle = layer.router.register_forward_hook(lambda *_: None)
    try:
        return layer(x, **given)
    finally:
        handle.remove()


@pytest.mark.parametrize("fields", [
    {}, {"bias": True, "return_bias": True}, {"shared_expert": True}, {"moe_router_enable_expert_bias": True, "moe_zloss_weight": 1e-3},
    {"moe_expert_linear_bias": True, "moe_router_linear_bias": True}, {"one_matrix_per_expert": True, "mlp_type": "mlp"},
    {"moe_router_load_balancing_type": "seq_aux_loss"}, {"keep_gathered_rows": True},
], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_layers_step_is_the_same_in_one_call(calls, fields, padded):
    """Output, losses, counts of tokens and gradients."""
    layer, x = layer_of(**fields), torch.randn(7, 3, H)
    given = {"padding_mask": torch.rand(7, 3) < 0.3} if padded else {}
    steps = []
    for forward in (apart, lambda layer, x, **given: layer(x, **given)):
        own = x.clone().requires_grad_()
        out = forward(layer, own, **given)
        out = out[0] if isinstance(out, tuple) else out
        losses = [torch.as_tensor(loss(layer.args)) for loss in LOSSES[:1 + bool(layer.args.moe_zloss_weight)]]
        counts = layer.experts.tokens_per_expert
        steps.append([out, *losses, *([] if counts is None else [counts.clone()]),
                      *torch.autograd.grad(out.square().sum() + sum(losses), [own, *layer.parameters()], allow_unused=True)])
        for clear in (gbmoe.clear_load_balancing_loss, gbmoe.clear_router_zloss):
            clear()
        if counts is not None:
            counts.zero_()
    assert calls == [1]
    assert_same(*steps)


def hooked(name, register):
    return lambda layer: removed(getattr(layer.get_submodule(name), register)(lambda *_: None))


@contextlib.contextmanager
def removed(handle):
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def replaced(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(owner, torch.nn.Module) and name in owner._modules:
            patch.setitem(owner._modules, name, value)
        else:
            patch.setattr(owner, name, value)
        yield
    owner.__dict__.pop(name, None) if isinstance(owner, torch.nn.Module) else None  # monkeypatch leaves what it found in the class


def patched(owner, name):
    original = getattr(owner, name)
    return replaced(owner, name, lambda *arguments, **keywords: original(*arguments, **keywords))


class OtherRouter(LearnedRouter):
    pass


REGISTERS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("change", [
    *(pytest.param(hooked(name, register), id=f"{name}: {register}")
      for name, register in itertools.product(["router", "router.layer", "experts", "experts.mlp"], REGISTERS)),
    pytest.param(lambda layer: removed(torch.nn.modules.module.register_module_forward_hook(lambda *_: None)), id="hook of all modules"),
    pytest.param(lambda layer: replaced(layer, "router", OtherRouter(layer.args)), id="a subclass of the router"),
    pytest.param(lambda layer: replaced(layer.router, "forward", layer.router.forward), id="a forward of the router's own"),
    pytest.param(lambda layer: replaced(layer.experts, "forward", layer.experts.forward), id="a forward of the experts' own"),
    pytest.param(lambda layer: patched(LearnedRouter, "forward"), id="a router that was patched"),
    pytest.param(lambda layer: torch.autocast("cpu"), id="autocast"),
    pytest.param(lambda layer: torch.overrides.BaseTorchFunctionMode(), id="a mode"),
    pytest.param(lambda layer: patched(torch.nn.Module, "_call_impl"), id="calls of all modules"),
    pytest.param(lambda layer: replaced(layer, "_route", layer._route), id="a choice of the layer's own"),
    pytest.param(lambda layer: replaced(layer.router, "_route", layer.router._route), id="a choice of the router's own"),
    pytest.param(lambda layer: replaced(layer.experts.mlp, "compute", layer.experts.mlp.compute), id="products of the experts' own"),
    pytest.param(lambda layer: patched(type(layer.experts.mlp), "compute"), id="products that were patched"),
    pytest.param(lambda layer: torch.autograd.forward_ad.dual_level(), id="forward mode"),
    pytest.param(lambda layer: gbmoe.record_experts(layer), id="a tape"),
])
def test_what_watches_or_replaces_a_part_finds_it_called(calls, change):
    layer, x = layer_of(), torch.randn(4, 1, H)
    expected = layer(x)
    assert calls == [1]
    with change(layer):
        layer(x)
    assert calls == [1]
    assert torch.equal(layer(x), expected) and calls == [1, 1]


@pytest.mark.parametrize("fields", [
    {"moe_jitter_eps": 0.1}, {"uniform_expert_assignment": True}, {"mlp_impl": "reference"}, {"moe_router_dtype": "bf16"},
    {"activation_fn": torch.tanh}, {"moe_apply_probs_on_input": True},
], ids=lambda fields: next(iter(fields)))
def test_what_does_more_is_called_one_after_the_other(calls, fields):
    layer_of(**fields)(torch.randn(4, 1, H))
    assert calls == []


def test_a_profiler_sees_the_operators_and_a_checkpoint_the_same_nodes(calls):
    """Also where the forward, or its repetition in backward, alone is profiled."""
    layer, x = layer_of(), torch.randn(4, 1, H, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for profiled in ("forward", "backward"):
        with torch.profiler.profile() if profiled == "forward" else contextlib.nullcontext() as seen:
            out = checkpoint(layer, x, use_reentrant=False).square().sum()
        with torch.profiler.profile() if profiled == "backward" else contextlib.nullcontext(seen) as seen:
            got = torch.autograd.grad(out, [x, *layer.parameters()])
        assert_same(expected, got)
        assert {"gbmoe::route_tokens", "gbmoe::routing_plan", "gbmoe::expert_mlp"} <= {event.name for event in seen.events()}
    assert calls == [1] * 5


@pytest.mark.parametrize("trained", ["router", "experts"])
def test_what_backward_does_not_read_may_be_written_to(trained):
    """A mask that micro-batches share, and the router's weight where x needs no gradient, as with two nodes."""
    layer, mask = layer_of(), torch.zeros(4, 1, dtype=torch.bool)
    layer.router.requires_grad_(trained == "router")
    layer.experts.requires_grad_(trained == "experts")
    out = layer(torch.randn(4, 1, H), padding_mask=mask)
    with torch.no_grad():
        layer.router.layer.weight.add_(1)
        if trained == "experts":
            mask.fill_(True)
    out.square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in layer.parameters())


def test_a_checkpoint_repeats_the_call(calls):
    layer, x = layer_of(), torch.randn(4, 1, H, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    got = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), [x, *layer.parameters()])
    assert_same(expected, got)
    assert calls == [1, 1, 1]
