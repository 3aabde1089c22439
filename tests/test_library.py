"""Operators that are called without the dispatcher, which happens on CUDA where nothing is there that would see them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gbmoe
from gbmoe import _library, cases
from gbmoe.layers import Arguments
from gbmoe.ops import route

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 64, 128, 4, 2, 33
OPERATORS = {"gbmoe::route", "gbmoe::routing_plan", "gbmoe::expert_mlp"}
BACKWARD = {"gbmoe::route_backward", "gbmoe::expert_mlp_backward"}


def make(device):
    torch.manual_seed(0)
    args = Arguments(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=TOP_K, bias=False, fp16=False,
                     bf16=True, mlp_type="glu", device=device)
    return gbmoe.dMoE(args), torch.randn(TOKENS, 1, HIDDEN, device=device, dtype=torch.bfloat16)


def gradients(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))]


class Watch(TorchDispatchMode):
    """Sees every operator and changes nothing."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_there_to_see_them(grad, monkeypatch):
    """Without this path taken, what the tests below compare it with is itself."""
    answers, ask = [], _library._is_unseen
    monkeypatch.setattr(_library, "_is_unseen", lambda inputs: answers.append(ask(inputs)) or answers[-1])
    layer, x = make("cuda")
    with torch.set_grad_enabled(grad):
        layer(x)
    assert answers == [True] * len(OPERATORS)
    answers.clear()
    with Watch():
        layer(x)
    assert answers == [False] * len(OPERATORS)


@pytest.mark.parametrize("grad", [False, True])
def test_a_mode_sees_them_and_changes_no_bit(device, grad):
    layer, x = make(device)

    def results():
        if grad:
            return gradients(layer, x)
        with torch.no_grad():
            return [layer(x)]

    expected = results()
    with Watch() as watch:
        got = results()
    assert OPERATORS | (BACKWARD if grad else set()) <= watch.seen
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_profiler_names_them(device):
    layer, x = make(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(layer, x)
    names = {event.key for event in profile.key_averages()}
    assert OPERATORS | {"gbmoe::route_backward"} <= names


def test_a_profiler_of_all_threads_names_them(device):
    layer, x = make(device)
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as profile:
        layer(x)
    assert OPERATORS <= {event.key for event in profile.key_averages()}


def test_lazily_negated_tensors(device):
    logits = cases.exact_values(TOKENS, EXPERTS, dtype=torch.bfloat16, device=device, seed=1)
    negated = torch._neg_view(logits)
    assert negated.is_neg()
    for got, expected in zip(route(negated, TOP_K), route(-logits, TOP_K), strict=True):
        assert torch.equal(got, expected)


def test_a_subclass_sees_them(device):
    class Named(torch.Tensor):
        called = set()

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.called.add(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.randn(TOKENS, HIDDEN, device=device).as_subclass(Named)
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(TOKENS, 1, dtype=torch.int64, device=device), EXPERTS)
    assert type(gbmoe.padded_gather(x, plan)) is Named
    assert "gbmoe.padded_gather.default" in Named.called


def test_second_derivatives_are_refused(device):
    logits = torch.randn(TOKENS, EXPERTS, device=device, requires_grad=True)
    grad, = torch.autograd.grad(route(logits, TOP_K).weights_TK.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_autocast_casts(device):
    layer, x = make(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
        plan = gbmoe.RoutingPlan.from_experts(torch.zeros(TOKENS, 1, dtype=torch.int64, device=device), 1)
        w = torch.randn(1, FFN, HIDDEN, device=device)
        assert gbmoe.expert_mlp(x.view(TOKENS, HIDDEN).float(), plan, w, w).dtype == torch.bfloat16


def test_what_is_frozen_has_no_graph(device):
    layer, x = make(device)
    with torch.no_grad():
        expected = layer(x)
    assert expected.grad_fn is None and layer(x).grad_fn is not None
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    layer.requires_grad_(False)
    out = layer(x)
    assert out.grad_fn is None and not out.requires_grad and torch.equal(out, expected)
