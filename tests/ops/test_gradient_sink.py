"""WeightGradientSink: what is added is what autograd would have been given, at once and later, over several calls."""

import pytest
import torch

import gbmoe
from gbmoe import WeightLayout, engines
from gbmoe.engines.base import Engine
from gbmoe.testing import exact_inputs
from tests.conftest import assert_as_accurate_as
from tests.ops.test_expert_biases import GPT_OSS, LAYOUTS, NAMES, E, by_hand, ids, inputs, served

WEIGHTS = ("w1", "w2", "v1")


def run(leaves, chosen_TK, layout, engine="auto", sink=None, **options):
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, leaves["w2"].size(0), check="none")
    return gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_TK=leaves["weights"], activation=GPT_OSS,
                            engine=engine, layout=layout, w1_bias=leaves["w1_bias"], w2_bias=leaves["w2_bias"], v1_bias=leaves["v1_bias"],
                            gradient_sink=sink, **options)


def leaves_of(exact, dtype):
    return {name: None if leaf is None else leaf.detach().to(torch.float32 if name == "weights" else dtype).requires_grad_()
            for name, leaf in exact.items()}


def main_grads(leaves, device):
    draw = exact_inputs.exact_values
    return {name: None if leaves[name] is None else draw(*leaves[name].shape, dtype=torch.float32, device=device, seed=11)
            for name in WEIGHTS}


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_two_calls_add_their_gradients(layout, deferred, engine_on):
    engine, device = served(engine_on, torch.bfloat16)
    exact, chosen_TK, grad_TH = inputs(layout, device)
    leaves = leaves_of(exact, torch.bfloat16)
    before = main_grads(leaves, device)
    added = {name: None if main is None else main.clone() for name, main in before.items()}
    sink = gbmoe.WeightGradientSink(**added, deferred=deferred)
    others = [name for name in NAMES if leaves[name] is not None and name not in WEIGHTS]
    expected = torch.autograd.grad(run(leaves, chosen_TK, layout, engine), [leaves[name] for name in others], grad_TH.bfloat16())
    for _ in range(2):
        exact_inputs.poison(device)
        run(leaves, chosen_TK, layout, engine, sink).backward(grad_TH.bfloat16())
        got = [leaves[name].grad for name in others]
        assert all(torch.equal(one, other) for one, other in zip(got, expected))
        for name in others:
            leaves[name].grad = None
        assert all(leaves[name] is None or leaves[name].grad is None for name in WEIGHTS)
    if deferred:
        assert all(main is None or torch.equal(main, before[name]) for name, main in added.items())
    sink.compute()
    sink.compute()  # nothing is left

    # In float64, of what was rounded on the way in.
    wide = {name: None if leaf is None else leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    out_TH = by_hand(*(wide[name] for name in NAMES), chosen_TK=chosen_TK, layout=layout, activation=GPT_OSS)
    plain = leaves_of(exact, torch.bfloat16)
    baseline_TH = by_hand(*(plain[name] for name in NAMES), chosen_TK=chosen_TK, layout=layout, activation=GPT_OSS)
    wanted = [name for name in WEIGHTS if leaves[name] is not None]
    references = torch.autograd.grad(out_TH, [wide[name] for name in wanted], grad_TH)
    baselines = torch.autograd.grad(baseline_TH, [plain[name] for name in wanted], grad_TH.bfloat16())
    for name, reference, baseline in zip(wanted, references, baselines):
        assert_as_accurate_as(((added[name] - before[name]) / 2).bfloat16(), baseline, reference, name, factor=3.0)


@pytest.mark.parametrize("options", [dict(weight_gradient_scale=0.25), dict(weight_gradient_scale=0.3), dict(keep_gathered_rows=True),
                                     dict(weights_on="input"), dict(fp8_recipe=gbmoe.Float8BlockScaling()),
                                     dict(fp8_recipe=gbmoe.Float8BlockScaling(float8_weight_gradients=True))], ids=str)
def test_options_go_with_it(options, device):
    if "fp8_recipe" in options and device.type == "cuda" and engines.ENGINES["hopper"].unavailable(device):
        pytest.skip("no Hopper")
    layout = WeightLayout("gate_first", down_transposed=True)
    exact, chosen_TK, grad_TH = inputs(layout, device)
    leaves = leaves_of(exact, torch.bfloat16)
    wanted = [leaves[name] for name in WEIGHTS if leaves[name] is not None]
    expected = torch.autograd.grad(run(leaves, chosen_TK, layout, **options), wanted, grad_TH.bfloat16())
    main = {name: None if leaves[name] is None else torch.zeros_like(leaves[name], dtype=torch.float32) for name in WEIGHTS}
    run(leaves, chosen_TK, layout, sink=gbmoe.WeightGradientSink(**main), **options).backward(grad_TH.bfloat16())
    for got, gradient in zip((main[name] for name in WEIGHTS if main[name] is not None), expected):
        error = float((got - gradient.float()).norm() / gradient.float().norm())
        assert error <= 4e-3, error


def test_hooks_that_wait_for_a_gradient_ran_no_more(device):
    """Those of Megatron-Core's DistributedDataParallel, for one."""
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    leaves, seen = leaves_of(exact, torch.float32), []
    main = {name: torch.zeros_like(leaves[name]) for name in WEIGHTS}
    for name in WEIGHTS:
        leaves[name].register_post_accumulate_grad_hook(lambda parameter, name=name: seen.append((name, parameter.grad.shape)))
    run(leaves, chosen_TK, LAYOUTS[0], sink=gbmoe.WeightGradientSink(**main, hand_back=True)).backward(grad_TH.float())
    assert sorted(seen) == [(name, leaves[name].shape) for name in sorted(WEIGHTS)]
    assert all(bool(tensor.any()) for tensor in main.values())


@pytest.mark.parametrize("changed", ["x", "grad"])
@pytest.mark.parametrize("in_expert_order", [False, True], ids=["", "in_expert_order"])
def test_tensors_changed_before_deferred_gradients_gave_others(changed, in_expert_order, device):
    """Autograd refuses what was saved for backward and changed; what waits for `compute` was no longer saved."""
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    leaves = leaves_of(exact, torch.float32)
    sink = gbmoe.WeightGradientSink(**{name: torch.zeros_like(leaves[name]) for name in WEIGHTS}, deferred=True)
    tensors = {"x": leaves["x"] * 1, "grad": grad_TH.float()}
    if in_expert_order:
        counts_E = torch.tensor([20, 0, 13, 30, 2], device=device)
        out_TH = gbmoe.grouped_mlp(tensors["x"], counts_E, leaves["w1"], leaves["w2"], leaves["v1"], gradient_sink=sink)
    else:
        out_TH = run({**leaves, "x": tensors["x"]}, chosen_TK, LAYOUTS[0], sink=sink)
    out_TH.backward(tensors["grad"])
    with torch.no_grad():
        tensors[changed].zero_()
    with pytest.raises(RuntimeError, match="changed in place after backward"):
        sink.compute()


def test_a_gradient_of_inference_mode_may_wait(device):
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    leaves = leaves_of(exact, torch.float32)
    sink = gbmoe.WeightGradientSink(**{name: torch.zeros_like(leaves[name]) for name in WEIGHTS}, deferred=True)
    with torch.inference_mode():
        grad_TH = grad_TH.float().clone()
    run(leaves, chosen_TK, LAYOUTS[0], sink=sink).backward(grad_TH)
    sink.compute()
    assert all(bool(sink[name].any()) for name in WEIGHTS)


def test_anomaly_detection_took_what_is_handed_back_for_gradients(device):
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    leaves = leaves_of(exact, torch.float32)
    sink = gbmoe.WeightGradientSink(**{name: torch.zeros_like(leaves[name]) for name in WEIGHTS}, hand_back=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        for _ in range(3):
            exact_inputs.poison(device)
            for name in WEIGHTS:  # memory that is taken next
                torch.full_like(leaves[name], float("nan"))
            run(leaves, chosen_TK, LAYOUTS[0], sink=sink).backward(grad_TH.float())


def test_gradients_that_autograd_batches_are_refused():
    """They ended in "Cannot access data pointer of Tensor that doesn't have storage"."""
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], torch.device("cpu"))
    leaves = leaves_of(exact, torch.float32)
    out_TH = run(leaves, chosen_TK, LAYOUTS[0], sink=gbmoe.WeightGradientSink(**{name: torch.zeros_like(leaves[name]) for name in WEIGHTS}))
    with pytest.raises(ValueError, match="gradient_sink: expected None where autograd batches gradients"):
        torch.autograd.grad(out_TH, leaves["x"], torch.stack([grad_TH.float()] * 2), is_grads_batched=True)


def test_frozen_weights_need_no_tensor(device):
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    leaves = leaves_of(exact, torch.float32)
    leaves["w1"].requires_grad_(False)
    main = {name: torch.zeros_like(leaves[name]) for name in ("w2", "v1")}
    run(leaves, chosen_TK, LAYOUTS[0], sink=gbmoe.WeightGradientSink(**main)).backward(grad_TH.float())
    assert all(bool(tensor.any()) for tensor in main.values())


def test_autocast_adds_to_float32(device):
    exact, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    leaves = leaves_of(exact, torch.float32)
    main = {name: torch.zeros_like(leaves[name]) for name in WEIGHTS}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        expected = run(leaves, chosen_TK, LAYOUTS[0])
        out_TH = run(leaves, chosen_TK, LAYOUTS[0], sink=gbmoe.WeightGradientSink(**main))
    assert torch.equal(out_TH, expected) and out_TH.dtype == torch.bfloat16
    grads = torch.autograd.grad(expected, [leaves[name] for name in ("x", *WEIGHTS)], grad_TH.bfloat16())
    out_TH.backward(grad_TH.bfloat16())
    assert torch.equal(leaves["x"].grad, grads[0])
    for name, gradient in zip(WEIGHTS, grads[1:]):
        assert float((main[name] - gradient).norm() / gradient.norm()) <= 4e-3


@pytest.mark.parametrize("make, words", [
    (lambda: gbmoe.WeightGradientSink(torch.zeros(2, 3, 4, dtype=torch.bfloat16)), "w1"),
    (lambda: gbmoe.WeightGradientSink(w2=torch.zeros(2, 3)), "w2"),
])
def test_what_is_no_main_gradient_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize("sink, activation, words", [
    (dict(w1=(E, 48, 32)), GPT_OSS, "a tensor for w2, which needs a gradient"), (dict(w1=(E, 8, 32), w2=(E, 48, 32)), GPT_OSS, "for w1"),
    (dict(w1=(E, 48, 32), w2=(E, 48, 32), v1=(E, 48, 32)), torch.sin, "None inside of"),
], ids=["missing", "shape", "callable"])
def test_sinks_that_do_not_fit_are_refused(sink, activation, words):
    exact, chosen_TK, _ = inputs(LAYOUTS[0], torch.device("cpu"), which=())
    leaves = leaves_of(exact, torch.float32)
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    with pytest.raises(ValueError, match=words):
        gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], activation=activation,
                         gradient_sink=gbmoe.WeightGradientSink(**{name: torch.zeros(shape) for name, shape in sink.items()}))


def test_engines_say_whether_they_add_to_float32():
    assert not Engine().adds_in_place(torch.zeros(2, 8, 8))
    assert engines.ENGINES["tensor_core"].adds_in_place(torch.zeros(2, 8, 8))
