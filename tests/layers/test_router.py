"""LearnedRouter: scores, weights, ids and jitter."""

import warnings

import pytest
import torch

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


@pytest.mark.parametrize("outputs", [7, 9])
def test_a_layer_of_another_width_lost_slots(outputs):
    """With more outputs than experts slots were dropped, with fewer experts were never chosen, and nothing said so."""
    layer = router(moe_top_k=2)
    layer.layer = torch.nn.Linear(16, outputs, bias=False)
    with pytest.raises(ValueError, match=rf"dMoE: router.layer: expected a module that maps .* with E == 8, got \[10, {outputs}\]"):
        layer(torch.randn(10, 16))


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




@pytest.mark.parametrize("p", [1, 2.0])
def test_a_router_without_a_gradient_is_named_once(p):
    """The one weight of a token is divided by itself."""
    router_module._warn_that_weights_are_one.cache_clear()
    fields = dict(hidden_size=16, moe_num_experts=8, fp16=False, device="cpu", moe_normalize_expert_weights=p)
    with pytest.warns(UserWarning, match="moe_normalize_expert_weights .* moe_top_k=1 .* the router gets no gradient") as caught:
        for _ in range(3):
            LearnedRouter(Arguments(**fields))
    assert len(caught) == 1
    router_module._warn_that_weights_are_one.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in (dict(moe_top_k=2), dict(moe_normalize_expert_weights=None), dict(moe_num_experts=1)):
            LearnedRouter(Arguments(**{**fields, **change}))


def test_normalising_by_0_means_off_and_was_refused():
    layer, x = router(moe_top_k=2, moe_normalize_expert_weights=0), torch.randn(5, 16)
    assert layer.args.moe_normalize_expert_weights is None
    assert torch.equal(layer(x)[1], router(moe_top_k=2)(x)[1])
