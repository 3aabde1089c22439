"""LearnedRouter: scores, weights, ids, jitter and the z-loss."""

import pytest
import torch

import gbmoe
from gbmoe.layers import Arguments, LearnedRouter, router as router_module


def router(**fields):
    torch.manual_seed(0)
    return LearnedRouter(Arguments(hidden_size=16, moe_num_experts=8, fp16=False, device="cpu", **fields))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("p", [None, 1, 2.0])
def test_scores_weights_and_ids(top_k, p):
    layer, x = router(moe_top_k=top_k, moe_normalize_expert_weights=p), torch.randn(5, 2, 16)
    scores, weights, ids = layer(x)
    expected = (x.reshape(-1, 16) @ layer.layer.weight.t()).softmax(-1)
    torch.testing.assert_close(scores, expected)
    best, best_ids = expected.topk(top_k)
    torch.testing.assert_close(weights, best if p is None else best / best.norm(p=p, dim=-1, keepdim=True))
    assert torch.equal(ids, best_ids) and weights.shape == ids.shape == (10, top_k)


def test_jitter_in_training_only():
    layer, x = router(moe_jitter_eps=0.5), torch.ones(64, 16)
    noise = layer.jitter(x)
    assert 0.5 <= float(noise.min()) < 0.6 and 1.4 < float(noise.max()) < 1.5
    torch.manual_seed(1)
    trained = layer(x)[0]
    layer.eval()
    quiet = layer(x)[0]
    assert not torch.equal(trained, quiet) and torch.equal(quiet, layer(x)[0])


def test_uniform_expert_assignment():
    _, weights, ids = router(moe_top_k=3, uniform_expert_assignment=True)(torch.randn(5, 16))
    assert ids.flatten().tolist() == [slot % 8 for slot in range(15)]
    assert weights.requires_grad


def test_zloss():
    gbmoe.clear_router_zloss()
    layers = [router(moe_zloss_weight=1e-2) for _ in range(2)]
    x = torch.randn(5, 16)
    for layer in layers:
        layer(x)
    loss = gbmoe.batched_router_zloss(layers[0].args)
    logits = x @ layers[0].layer.weight.t()
    torch.testing.assert_close(loss, 1e-2 * logits.logsumexp(1).square().mean().expand(2))
    loss.sum().backward()
    assert layers[0].layer.weight.grad is not None
    gbmoe.clear_router_zloss()


def test_zloss_of_weight_zero_keeps_nothing_and_warns():
    layer = router()
    layer(torch.randn(5, 16))
    with pytest.warns(UserWarning, match="moe_zloss_weight is 0"):
        assert gbmoe.batched_router_zloss(layer.args) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zloss_of_no_tokens_is_zero_and_has_a_gradient(dtype):
    layer = router(moe_zloss_weight=1e-2).to(dtype)
    layer(torch.randn(0, 16, dtype=dtype))
    layer(torch.randn(5, 16, dtype=dtype))
    loss = gbmoe.batched_router_zloss(layer.args)
    assert loss.dtype == dtype and loss[0] == 0 and loss[1] > 0
    loss.sum().backward()
    assert bool(layer.layer.weight.grad.isfinite().all())


def test_zloss_in_float16_of_a_square_beyond_its_range():
    layer = router(moe_zloss_weight=1e-3).half()
    with torch.no_grad():
        layer.layer.weight.fill_(20.0)
    x = torch.ones(5, 16, dtype=torch.float16)
    logits = layer(x) and (x @ layer.layer.weight.t()).double()
    loss = gbmoe.batched_router_zloss(layer.args)
    assert loss.dtype == torch.float16
    torch.testing.assert_close(loss.double(), 1e-3 * logits.logsumexp(1).square().mean().expand(1), rtol=2e-3, atol=0)
    loss.sum().backward()
    assert bool(layer.layer.weight.grad.isfinite().all())


def test_zloss_keeps_nothing_in_evaluation():
    """Nobody clears what evaluation leaves, and it would pile up."""
    layer = router(moe_zloss_weight=1e-2).eval()
    for _ in range(3):
        layer(torch.randn(5, 16))
    assert router_module._ROUTER_LOGSUMEXP.items() == []


def test_zloss_without_routers_says_what_is_missing():
    with pytest.raises(ValueError, match="routers that ran in training since the last clear: expected at least 1 .* got 0"):
        gbmoe.batched_router_zloss(router(moe_zloss_weight=1e-2).args)
