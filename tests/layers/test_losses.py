"""The auxiliary losses, and what the layers keep for them while threads, checkpoints and backward run."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import gbmoe
from gbmoe.layers import Arguments, kept as kept_module, losses
from gbmoe.layers.kept import Kept
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
    with pytest.raises(ValueError, match="layers that ran in training since the last clear: expected each layer once, or 2 .* got 0"):
        gbmoe.batched_load_balancing_loss(args)


def sum_of(kept, args):
    """The loss by its definition, in float64."""
    total = 0.0
    for counts_E, scores_TE in kept:
        tokens, experts = scores_TE.shape
        mean_E = scores_TE.double().mean(0) if tokens else scores_TE.double().sum(0)
        total += args.moe_loss_weight * experts / (args.num_layers * max(tokens, 1) * args.moe_top_k) * counts_E.double() @ mean_E
    return total


def check_load_balancing_loss(args, layers, tolerance=1e-6):
    """The loss of what is kept, and that it trains the routers of `layers` and no others."""
    kept = gbmoe.get_load_balancing_loss()
    loss, expected = gbmoe.batched_load_balancing_loss(args), sum_of(kept, args)
    assert loss.dtype == (torch.float32 if args.moe_lbl_in_fp32 else kept[0][1].dtype)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance) and loss > 0
    routers = [layer.router.layer.weight for layer in layers]
    for got, want in zip(*(torch.autograd.grad(of, routers, retain_graph=True) for of in (loss, expected)), strict=True):
        torch.testing.assert_close(got, want, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("ran, fields", [
    (3, dict(num_layers=5, pipeline_model_parallel_size=2)), (2, dict(num_layers=5, pipeline_model_parallel_size=2)),
    (1, dict(num_layers=5, pipeline_model_parallel_size=2)), (4, dict(num_layers=5, pipeline_model_parallel_size=2)),
    (2, dict(num_layers=8, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)),
    (4, dict(num_layers=8, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)),
])
def test_a_stage_with_another_number_of_layers_than_the_mean_was_refused(device, ran, fields):
    layers = [make(device, seed=seed, bias=False, **fields)[0] for seed in range(ran)]
    for layer in layers:
        layer(torch.randn(6, 1, 32, device=device))
    check_load_balancing_loss(layers[0].experts.args, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("in_fp32", [False, True])
def test_layers_with_other_numbers_of_tokens_or_experts_were_refused(device, dtype, in_fp32):
    tokens = (6, 6, 9, 0, 1)
    layers = [make(device, seed=seed, bias=False, num_layers=len(tokens), moe_num_experts=experts, moe_lbl_in_fp32=in_fp32)[0].to(dtype)
              for seed, experts in enumerate((4, 8, 4, 4, 2))]
    for layer, count in zip(layers, tokens):
        layer(torch.randn(count, 1, 32, device=device, dtype=dtype))
    check_load_balancing_loss(layers[0].experts.args, layers, tolerance=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_like_layers_have_the_bits_of_one_product():
    layers = [make(seed=seed, bias=False, num_layers=3)[0] for seed in range(3)]
    for layer in layers:
        layer(torch.randn(20, 1, 32))
    counts, scores = zip(*gbmoe.get_load_balancing_loss())
    one = 4 * 0.1 / (3 * 20 * 2) * torch.dot(torch.cat(counts).float(), torch.cat(scores, dim=1).mean(0))
    assert torch.equal(gbmoe.batched_load_balancing_loss(layers[0].experts.args), one)


@pytest.mark.slow
@pytest.mark.parametrize("how, compiled", [("no_grad", False), ("inference_mode", False), ("eval", False), ("eval and no_grad", False),
                                           ("no_grad", True), ("eval", True), ("eval and no_grad", True)])
def test_frozen_lower_layers_took_the_loss_of_the_others_with_them(how, compiled, device):
    layers = [make(device, seed=seed, bias=False, num_layers=4, moe_zloss_weight=1e-2)[0] for seed in range(4)]
    for layer in layers[:2]:
        layer.train("eval" not in how)
    frozen = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how.split()[-1], contextlib.nullcontext)
    args = layers[0].experts.args

    def forward(x):
        with frozen():
            x = layers[1](layers[0](x))
        return layers[3](layers[2](x.clone() if how == "inference_mode" else x))

    if compiled:
        torch.compiler.reset()
        forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
    forward(torch.randn(5, 1, 32, device=device))
    assert len(gbmoe.get_load_balancing_loss()) == (2 if "eval" in how else 4)
    check_load_balancing_loss(args, layers[2:])
    z_loss = gbmoe.batched_router_zloss(args)
    assert z_loss.shape == (2 if "eval" in how else 4,) and bool((z_loss > 0).all())
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(z_loss.sum(), [layer.router.layer.weight for layer in layers[2:]]))


def test_a_loss_of_layers_that_all_ran_without_gradients_is_a_value():
    layer, args = make(bias=False, moe_zloss_weight=1e-2)
    with torch.no_grad():
        layer(torch.randn(5, 1, 32))
    for loss in (gbmoe.batched_load_balancing_loss(args), gbmoe.batched_router_zloss(args).sum()):
        assert loss > 0 and not loss.requires_grad


@pytest.mark.parametrize("trained, frozen", [([2], [0, 1, 3]), ([0, 1, 2], [3])], ids=str)
def test_some_layers_in_a_reentrant_checkpoint_are_refused_too(trained, frozen):
    layers = [make(seed=seed, bias=False, num_layers=4)[0] for seed in range(4)]
    x = torch.randn(5, 1, 32, requires_grad=True)
    for number, layer in enumerate(layers):
        x = layer(x) if number not in trained else checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        gbmoe.batched_load_balancing_loss(layers[0].experts.args)


def test_a_checkpoint_of_another_library_is_refused_too():
    """DeepSpeed's and Megatron-LM's are autograd.Functions of their own, which run forward under torch.no_grad."""
    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, grad):
            return None, grad

    layer, args = make(bias=False)
    Checkpoint.apply(layer, torch.randn(5, 1, 32, requires_grad=True))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        gbmoe.batched_load_balancing_loss(args)


def test_a_compiled_layer_in_a_reentrant_checkpoint_is_refused_too():
    torch.compiler.reset()
    layer, args = make(bias=False)
    checkpoint(torch.compile(layer, backend="aot_eager"), torch.randn(5, 1, 32, requires_grad=True), use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        gbmoe.batched_load_balancing_loss(args)


@pytest.mark.parametrize("fields", [dict(num_layers=2), dict(num_layers=5, pipeline_model_parallel_size=2),
                                    dict(num_layers=8, num_layers_per_virtual_pipeline_stage=2)], ids=str)
def test_a_layer_that_is_kept_twice_because_nobody_cleared_is_named_with_the_call(fields):
    layers = [make(seed=seed, bias=False, **fields)[0] for seed in (0, 1)]
    args, x = layers[0].experts.args, torch.randn(5, 1, 32)
    for steps in (1, 2, 3):
        for layer in layers:
            layer(x)
        if steps == 1:
            check_load_balancing_loss(args, layers)
        else:
            with pytest.raises(ValueError, match=rf"call gbmoe.clear_load_balancing_loss\(\) once a step.* got {2 * steps}, some of the"
                                                 " same layer"):
                gbmoe.batched_load_balancing_loss(args)


def test_a_layer_that_is_called_for_all_layers_is_no_forgotten_clear():
    layer, args = make(bias=False, num_layers=3)
    for tokens in (5, 5, 7):
        layer(torch.randn(tokens, 1, 32))
    check_load_balancing_loss(args, [layer])
    layer(torch.randn(5, 1, 32))
    with pytest.raises(ValueError, match="got 4, some of the same layer"):
        gbmoe.batched_load_balancing_loss(args)


def test_steps_without_a_clear_passed_for_a_larger_stage():
    """Three layers in two stages: two steps of the stage with one of them are as many forwards as one step of the other."""
    layer, args = make(bias=False, num_layers=3, pipeline_model_parallel_size=2)
    x = torch.randn(5, 1, 32)
    layer(x)
    check_load_balancing_loss(args, [layer])
    layer(x)
    with pytest.raises(ValueError, match=r"call gbmoe.clear_load_balancing_loss\(\) once a step.* got 2, some of the same layer"):
        gbmoe.batched_load_balancing_loss(args)
    assert gbmoe.batched_load_balancing_loss(dataclasses.replace(args, num_layers_per_virtual_pipeline_stage=2)) > 0


def test_copies_of_a_layer_are_other_layers():
    layer, args = make(bias=False, num_layers=1)
    for copied in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied(torch.randn(5, 1, 32))
    assert gbmoe.batched_load_balancing_loss(args) > 0
    del layer.experts._source  # as in a module that an older version has pickled
    layer(torch.randn(5, 1, 32))
    with pytest.raises(ValueError, match=r"expected each layer once, or 1 in all .* got 4"):
        gbmoe.batched_load_balancing_loss(args)


def test_what_is_kept_does_not_hold_a_layer():
    layer, _ = make(bias=False)
    layer(torch.randn(5, 1, 32))
    weight = weakref.ref(layer.experts.mlp.w1)
    gbmoe.get_load_balancing_loss()[0][1].detach_()
    del layer
    gc.collect()
    assert weight() is None


def test_losses_that_a_user_keeps_without_naming_a_layer():
    """MegaBlocks' signature. Each counts as a layer of its own: fewer than the arguments say are summed, more are refused."""
    args = Arguments(num_layers=5, pipeline_model_parallel_size=2, moe_num_experts=4, moe_top_k=1, device="cpu")
    for forwards in range(1, 5):
        gbmoe.layers.save_load_balancing_loss((torch.tensor([3, 1, 0, 2]), torch.rand(6, 4)))
        if forwards <= 3:
            assert gbmoe.batched_load_balancing_loss(args).item() == pytest.approx(sum_of(gbmoe.get_load_balancing_loss(), args).item())
    with pytest.raises(ValueError, match=r"expected each layer once, or 2 to 3 in all .*, got 4"):
        gbmoe.batched_load_balancing_loss(args)


@pytest.mark.parametrize("counts, scores, words", [
    (torch.ones(4, 1), torch.rand(6, 4), r"tokens_per_expert: expected shape \[E\], got \[4, 1\]"),
    (torch.ones(4), torch.rand(6, 3), r"scores: expected shape \[T, 4\], got \[6, 3\]"),
    (torch.ones(4), torch.rand(4), r"scores: expected shape \[T, 4\], got \[4\]"),
])
def test_losses_of_wrong_shapes(counts, scores, words):
    gbmoe.layers.save_load_balancing_loss((counts, scores))
    with pytest.raises(ValueError, match=words):
        gbmoe.batched_load_balancing_loss(Arguments(device="cpu"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["vmap", "compiled vmap", "export", "strict export", "make_fx", "real make_fx", "jit.trace"])
def test_a_traced_or_transformed_layer_left_dead_tensors_for_the_next_loss(how):
    torch.compiler.reset()
    layer, args = make(bias=False, moe_zloss_weight=1e-2)
    x, weights = torch.randn(3, 5, 1, 32), dict(layer.named_parameters())
    by_weights = lambda x, w: torch.func.functional_call(layer, w, (x,))  # noqa: E731
    {"vmap": lambda: torch.vmap(layer)(x), "compiled vmap": lambda: torch.compile(torch.vmap(layer), backend="aot_eager")(x),
     "export": lambda: torch.export.export(layer, (x,), strict=False),
     "strict export": lambda: torch.export.export(layer, (x,), strict=True),
     "make_fx": lambda: make_fx(by_weights, tracing_mode="symbolic")(x, weights),
     "real make_fx": lambda: make_fx(layer, tracing_mode="real")(x),
     "jit.trace": lambda: torch.jit.trace(layer, x, check_trace=False)}[how]()
    assert gbmoe.get_load_balancing_loss() == []
    layer(x)
    check_load_balancing_loss(args, [layer])
    assert gbmoe.batched_router_zloss(args).shape == (1,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["export", "strict export", "make_fx", "real make_fx", "jit.trace"])
def test_a_step_that_is_traced_whole_has_its_losses(how):
    torch.compiler.reset()
    layers = [make(seed=seed, bias=False, num_layers=2, moe_zloss_weight=1e-2)[0] for seed in (0, 1)]
    args = layers[0].experts.args

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x).sum() + gbmoe.batched_load_balancing_loss(args) + gbmoe.batched_router_zloss(args).sum()

    step, x = Step(), torch.randn(5, 1, 32)
    weights = dict(step.named_parameters())
    by_weights = lambda x, w: torch.func.functional_call(step, w, (x,))  # noqa: E731
    traced = {"export": lambda: torch.export.export(step, (x,), strict=False).module(),
              "strict export": lambda: torch.export.export(step, (x,), strict=True).module(),
              "make_fx": lambda: lambda x: make_fx(by_weights, tracing_mode="fake")(x, weights)(x, weights),
              "real make_fx": lambda: make_fx(step, tracing_mode="real")(x),
              "jit.trace": lambda: torch.jit.trace(step, x, check_trace=False)}[how]()
    got = traced(x)
    assert gbmoe.get_load_balancing_loss() == []
    torch.testing.assert_close(got, step(x))


PILES = {"load-balancing loss": (gbmoe.clear_load_balancing_loss, losses._LOAD_BALANCING_LOSS, "gbmoe.batched_load_balancing_loss"),
         "router's z-loss": (gbmoe.clear_router_zloss, losses._ROUTER_LOGSUMEXP, "gbmoe.batched_router_zloss")}


@pytest.mark.slow
@pytest.mark.parametrize("name", PILES)
def test_losses_that_nobody_asked_for_piled_up_without_a_word(name, monkeypatch):
    clear, kept, call = PILES[name]
    monkeypatch.setattr(kept, "_warned", False)
    layers = [make(seed=seed, bias=False, moe_zloss_weight=1e-2, moe_loss_weight=0.1)[0] for seed in range(2)]
    x = torch.randn(2, 1, 32)

    def warned(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad():
                for _ in range(steps):
                    for layer in layers:
                        layer(x)
        return [str(warning.message) for warning in caught if name in str(warning.message)]

    for _ in range(2):  # so many micro-batches a step are no pile
        assert warned(100) == []
        clear()
    message, = warned(2 * kept_module._PILE)
    assert "forwards of one layer" in message and f"call {call}" in message
    assert warned(kept_module._PILE) == []  # once


def test_a_clear_in_a_graph_is_a_clear_for_layers_that_are_not(monkeypatch):
    torch.compiler.reset()
    kept, source = Kept("the test"), kept_module.Source()
    clear = torch.compile(lambda x: kept.clear() or x + 1, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # alone: torch.compile has a RuntimeWarning of its own for Python 3.13.0
        for _ in range(5):
            for number in range(100):
                kept.append(number, source)
            clear(torch.zeros(1))
    assert kept.items() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_losses_are_the_same_within_autocast(device, dtype):
    layers = [make(device, seed=seed, bias=False, num_layers=2, moe_zloss_weight=1e-2)[0].to(dtype) for seed in (0, 1)]
    args = layers[0].experts.args
    for tokens in ((6, 6), (6, 8)):
        gbmoe.clear_load_balancing_loss()
        for layer, count in zip(layers, tokens):
            layer(torch.randn(count, 1, 32, device=device, dtype=dtype))
        for loss in LOSSES.values():
            with torch.autocast(device.type, dtype=torch.float16):
                within = loss(args)
            assert within.dtype == loss(args).dtype and torch.equal(within, loss(args))


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


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32),
                                    (torch.float16, torch.float64)], ids=str)
def test_zloss_had_the_range_of_the_first_routers_dtype(dtypes):
    for dtype in dtypes:
        layer = router(moe_zloss_weight=1e-3).to(dtype)
        with torch.no_grad():
            layer.layer.weight.fill_(20.0)
        layer(torch.ones(5, 16, dtype=dtype))
    loss = gbmoe.batched_router_zloss(layer.args)
    assert loss.dtype == max(dtypes, key=lambda dtype: dtype.itemsize)
    torch.testing.assert_close(loss[0].double(), loss[1].double(), rtol=2e-3, atol=0)


def test_zloss_of_routers_on_two_devices_raised():
    for device in ("meta", "cpu"):
        layer = router(moe_zloss_weight=1e-3).to(device)
        layer(torch.ones(5, 16, device=device))
    assert gbmoe.batched_router_zloss(layer.args).shape == (2,)


def test_zloss_keeps_nothing_in_evaluation():
    """Losses kept in evaluation would pile up, because nothing clears them."""
    layer = router(moe_zloss_weight=1e-2).eval()
    for _ in range(3):
        layer(torch.randn(5, 16))
    assert losses._ROUTER_LOGSUMEXP.items() == []


def test_zloss_without_routers_says_what_is_missing():
    with pytest.raises(ValueError, match="routers that ran in training since the last clear: expected at least 1 .* got 0"):
        gbmoe.batched_router_zloss(router(moe_zloss_weight=1e-2).args)
