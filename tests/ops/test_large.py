"""Layers whose tensors have more than 2^31 elements, compared with float64 where their offsets no longer fit 32 bits."""

import pytest
import torch

import gbmoe

pytestmark = [pytest.mark.gpu, pytest.mark.large]
BEYOND = 2**31


@pytest.fixture(autouse=True)
def memory():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def randn(*shape, scale=1.0, requires_grad=True):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale).requires_grad_(requires_grad)


def check_some_tokens(x, ids, weights, w, out, grad):
    """Of x, router weights and out, at both ends."""
    picked = torch.cat([torch.arange(3), torch.arange(len(x) - 3, len(x))]).cuda()
    leaf = x[picked].detach().double().requires_grad_()
    of_weights = weights[picked].detach().double().requires_grad_()
    expected = torch.zeros_like(leaf)
    for token, experts in enumerate(ids[picked].tolist()):
        for slot, e in enumerate(experts):
            w1, w2, v1 = (t[e].detach().double() for t in w)
            h, g = leaf[token] @ w1.t(), leaf[token] @ v1.t()
            expected = expected.index_add(0, torch.tensor([token], device="cuda"),
                                          (of_weights[token, slot] * ((torch.nn.functional.silu(h) * g) @ w2))[None])
    expected.backward(grad[picked].double())
    for got, exact in ((out[picked], expected), (x.grad[picked], leaf.grad), (weights.grad[picked], of_weights.grad)):
        assert (got.double() - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.parametrize("tokens, hidden, ffn, experts, top_k", [
    pytest.param(2_200_000, 1024, 256, 4, 1, id="tokens"), pytest.param(300_000, 512, 2048, 8, 4, id="rows"),
    pytest.param(96, 4096, 8448, 64, 2, id="weights")])
def test_layers_beyond_two_to_the_31_elements(tokens, hidden, ffn, experts, top_k):
    assert max(tokens * hidden, tokens * top_k * ffn, experts * ffn * hidden) > BEYOND
    torch.manual_seed(0)
    x, weights = randn(tokens, hidden), torch.rand(tokens, top_k, device="cuda").requires_grad_()
    w = [randn(experts, ffn, hidden, scale=fan_in**-0.5) for fan_in in (hidden, ffn, hidden)]
    ids = (torch.arange(tokens, device="cuda")[:, None] + torch.arange(top_k, device="cuda")) % experts
    grad = randn(tokens, hidden, requires_grad=False)
    out = gbmoe.expert_mlp(x, gbmoe.RoutingPlan.from_experts(ids, experts), *w, weights_TK=weights)
    out.backward(grad)
    check_some_tokens(x, ids, weights, w, out.detach(), grad)
    for leaf in (x, *w):
        assert bool(leaf.grad.flatten()[-4096:].isfinite().all()) and bool(leaf.grad.flatten()[-4096:].any())


def test_gradients_of_more_than_two_to_the_31_weights_are_those_of_few():
    """Expert by expert, the last of which lies beyond 2^31 elements: its gradient has the bits that it has alone."""
    torch.manual_seed(0)
    experts, ffn, hidden, tokens = 64, 8448, 4096, 640
    x, grad = randn(tokens, hidden), randn(tokens, hidden, requires_grad=False)
    w = [randn(experts, ffn, hidden, scale=fan_in**-0.5) for fan_in in (hidden, ffn, hidden)]
    ids = torch.arange(tokens, device="cuda")[:, None] % experts
    gbmoe.expert_mlp(x, gbmoe.RoutingPlan.from_experts(ids, experts), *w).backward(grad)
    last = (ids == experts - 1).any(1)
    few = [t[-1:].detach().clone().requires_grad_() for t in w]
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(int(last.sum()), 1, dtype=torch.int64, device="cuda"), 1)
    gbmoe.expert_mlp(x.detach()[last], plan, *few).backward(grad[last])
    for many, one in zip(w, few):
        assert (many.grad[-1].double() - one.grad[0].double()).norm() <= 1e-2 * one.grad.double().norm()


def test_logits_beyond_two_to_the_31_elements():
    tokens, hidden, experts, top_k = 8_500_000, 64, 256, 2
    assert tokens * experts > BEYOND
    torch.manual_seed(0)
    x, weight = randn(tokens, hidden), randn(experts, hidden)
    routing = gbmoe.ops.route_tokens(x, weight, top_k)
    routing.weights_TK.sum().backward()
    for few in (slice(0, 64), slice(tokens - 64, tokens)):
        part = x.detach()[few].clone().requires_grad_()
        alone = gbmoe.ops.route_tokens(part, weight.detach(), top_k)
        alone.weights_TK.sum().backward()
        assert torch.equal(routing.experts_TK[few], alone.experts_TK)
        torch.testing.assert_close(routing.weights_TK[few], alone.weights_TK, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(x.grad[few], part.grad, rtol=5e-2, atol=1e-3)
