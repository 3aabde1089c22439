"""The auxiliary losses, and what the layers keep for them while threads, checkpoints and backward run."""

import sys
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe.layers import Arguments, losses
from gbmoe.layers.losses import Kept
from tests.conftest import dtype_id
from tests.layers.test_dmoe import make
from tests.layers.test_router import router


def in_threads(count, function):
    threads = [threading.Thread(target=function, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def hasty_threads():
    """The interpreter goes from thread to thread as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_lose_none_of_each_others_items(hasty_threads):
    kept = Kept()
    in_threads(8, lambda thread: [kept.append((thread, number)) for number in range(5000)])
    items = kept.items()
    assert len(items) == 8 * 5000
    for thread in range(8):
        assert [number for owner, number in items if owner == thread] == list(range(5000))


def test_threads_that_run_a_compiled_graph_lose_no_items(hasty_threads):
    torch.compiler.reset()
    kept = Kept()
    counter = CompileCounter()
    # Not with fullgraph: torch 2.13 counts the compiled frames of all threads in one place, and raises where another thread took one.
    compiled = torch.compile(lambda x: kept.append(x + 1), backend=counter)
    compiled(torch.zeros(2))
    assert counter.frame_count == 1
    in_threads(8, lambda thread: [compiled(torch.full((2,), float(thread))) for _ in range(500)])
    assert sorted(int(item[0]) for item in kept.items()) == sorted([1] + [thread + 1 for thread in range(8) for _ in range(500)])


def test_clear_forgets_the_items_of_every_thread():
    kept = Kept()
    kept.append(0)
    in_threads(3, kept.append)
    assert len(kept.items()) == 4
    kept.clear()
    assert kept.items() == []
    kept.append(5)
    assert kept.items() == [5]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_repeats_in_backward_is_not_kept_again(use_reentrant):
    kept = Kept()

    def function(x):
        y = x.exp()
        kept.append(y)
        return y.sin().cos()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert len(kept.items()) == 1
    kept.append(x)
    assert len(kept.items()) == 2


# ------------------------------------------------------------------------------------------------------------ the losses


def test_load_balancing_loss():
    layers = [make(num_layers=2, seed=s)[0] for s in (0, 1)]
    args = layers[0].experts.args
    x, kept = torch.randn(20, 1, 32), []
    for layer in layers:
        layer(x)
        scores, _, ids = layer.router(x)
        kept.append((torch.bincount(ids.flatten(), minlength=4), scores))
    expected = sum(0.1 * 4 / (2 * 20 * 2) * torch.dot(c.float(), s.mean(0)) for c, s in kept)
    torch.testing.assert_close(gbmoe.batched_load_balancing_loss(args), expected)
    layers[0].eval()(x)
    assert len(gbmoe.get_load_balancing_loss()) == 2  # evaluation keeps nothing
    gbmoe.clear_load_balancing_loss()
    layers[1](x)
    with pytest.raises(ValueError, match="layers that ran in training since the last clear: expected 2 .* got 1"):
        gbmoe.batched_load_balancing_loss(args)


def test_load_balancing_loss_of_weight_zero_keeps_nothing():
    layer, args = make(moe_loss_weight=0)
    layer(torch.randn(5, 1, 32))
    assert gbmoe.get_load_balancing_loss() == [] and gbmoe.batched_load_balancing_loss(args) == 0.0


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_load_balancing_loss_in_float16_of_more_tokens_than_float16_counts(share):
    """66,000 is infinite there, and so is the sum of several layers' counts by scores."""
    args = Arguments(num_layers=4, moe_num_experts=2, moe_top_k=1, device="cpu")
    counts = torch.tensor([int(66_000 * share), 66_000 - int(66_000 * share)], dtype=torch.int32)
    scores = torch.tensor([share, 1 - share], dtype=torch.float16).repeat(66_000, 1).requires_grad_()
    for _ in range(4):
        gbmoe.layers.save_load_balancing_loss((counts, scores))
    loss = gbmoe.batched_load_balancing_loss(args)
    assert loss.dtype == torch.float16
    assert loss.item() == pytest.approx(0.1 * 2 * (share**2 + (1 - share) ** 2), rel=2e-3)
    loss.backward(torch.tensor(2.0**15, dtype=torch.float16))  # as a GradScaler scales it
    torch.testing.assert_close(scores.grad[7].double() / 2**15, 0.1 * 2 * counts.double() / 66_000**2, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_a_z_loss_in_float32_was_rounded_before(device, dtype):
    layer, args = make(device, bias=False, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, moe_zloss_weight=1e-2,
                       moe_zloss_in_fp32=True, hidden_size=64, moe_num_experts=8)
    x, logits = torch.randn(256, 64, device=device, dtype=dtype), []
    layer.router.layer.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    layer(x)
    loss, = gbmoe.batched_router_zloss(args)
    exact = 1e-2 * logits[0].double().logsumexp(dim=1).square().mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=0)


LOSSES = {"load_balancing": gbmoe.batched_load_balancing_loss, "router_z": gbmoe.batched_router_zloss}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_kept_by_a_reentrant_checkpoint_are_refused(name):
    """Such a checkpoint runs the layer without gradients first: the loss would train nothing, without any message."""
    layer, args = make(bias=False, moe_zloss_weight=1e-2)
    x = torch.randn(6, 1, 32, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ValueError, match=f"batched_{name}.*loss: .*use_reentrant=False"):
        LOSSES[name](args)
    with torch.no_grad():
        assert bool((LOSSES[name](args) > 0).all())
    out.sum().backward()


def test_a_checkpoint_keeps_each_layers_losses_once(device):
    """Losses kept again when backward repeats the layer would count towards the next step, as they are not cleared in between."""
    layers = [make(device, num_layers=2, bias=False, moe_zloss_weight=1e-2, seed=seed)[0] for seed in (0, 1)]
    args = layers[0].experts.args
    x = torch.randn(6, 1, 32, device=device, requires_grad=True)
    model = torch.nn.Sequential(*layers)
    gradients = []
    for _ in range(2):
        for function in (model, lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)):
            model.zero_grad()
            out = function(x)
            loss = out.square().sum() + gbmoe.batched_load_balancing_loss(args) + gbmoe.batched_router_zloss(args).sum()
            gbmoe.clear_load_balancing_loss()
            gbmoe.clear_router_zloss()
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    assert gbmoe.get_load_balancing_loss() == []
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


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
    """Losses kept in evaluation would pile up, because nothing clears them."""
    layer = router(moe_zloss_weight=1e-2).eval()
    for _ in range(3):
        layer(torch.randn(5, 16))
    assert losses._ROUTER_LOGSUMEXP.items() == []


def test_zloss_without_routers_says_what_is_missing():
    with pytest.raises(ValueError, match="routers that ran in training since the last clear: expected at least 1 .* got 0"):
        gbmoe.batched_router_zloss(router(moe_zloss_weight=1e-2).args)
