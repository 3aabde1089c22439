"""Biases of an expert's two products: every layout, engine and dtype against float64, all gradients.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, R rows of one expert.
"""

import weakref

import pytest
import torch

import gbmoe
from gbmoe import WeightLayout, engines
from gbmoe.engines.base import Engine
from gbmoe.ops.activations import gated
from gbmoe.ops.expert_forward_backward import Saved
from gbmoe.problem import Problem
from gbmoe.testing import exact_inputs
from tests.conftest import assert_as_accurate_as
from tests.test_weight_layout import LAYOUTS, ids, laid_out

T, K, E, H, F = 70, 2, 5, 32, 48
GPT_OSS = gbmoe.ClampedSilu(alpha=1.702, limit=7, gate_limit=7, gate_offset=1)
NAMES = ("x", "weights", "w1", "w2", "v1", "w1_bias", "w2_bias", "v1_bias")


def laid_out_biases(layout, of_gate_EF, of_up_EF):
    """(w1_bias, v1_bias) in this layout; made without the class under test."""
    if layout.gate_up == "separate":
        return of_gate_EF, of_up_EF
    if layout.gate_up == "interleaved":
        return torch.stack([of_gate_EF, of_up_EF], 2).flatten(1, 2), None
    return torch.cat([of_gate_EF, of_up_EF] if layout.gate_up == "gate_first" else [of_up_EF, of_gate_EF], 1), None


def inputs(layout, device, gated_experts=True, which=("up", "down"), tokens=T, experts=E, hidden=H, ffn=F):
    """(leaves by name, ids, gradient), float64; weights without `v1` for experts without a gate."""
    values = dict(dtype=torch.float64, device=device)
    draw = exact_inputs.exact_values
    w1, w2, v1 = (draw(experts, ffn, hidden, seed=seed, scale=2**-3, **values) for seed in (1, 2, 3))
    w1, w2, v1 = laid_out(layout, w1, w2, v1) if gated_experts else (w1, w2, None)
    biases = [draw(experts, columns, seed=seed, **values) for seed, columns in ((4, ffn), (5, ffn), (6, hidden))]
    w1_bias, v1_bias = laid_out_biases(layout, *biases[:2]) if gated_experts else (biases[0], None)
    generator = torch.Generator().manual_seed(7)
    leaves = {"x": draw(tokens, hidden, seed=8, **values), "w1": w1, "w2": w2, "v1": v1,
              "weights": torch.rand(tokens, K, generator=generator).to(device, torch.float64),
              "w1_bias": w1_bias if "up" in which else None, "v1_bias": v1_bias if "up" in which else None,
              "w2_bias": biases[2] if "down" in which else None}
    chosen_TK = torch.rand(tokens, experts - 1, generator=generator).argsort(1)[:, :K].contiguous()  # the last expert has no rows
    chosen_TK[0, 0] = chosen_TK[3, 1] = -1
    return leaves, chosen_TK.to(device), draw(tokens, hidden, seed=9, **values)


def by_hand(x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias, *, chosen_TK, layout, activation):
    w1_EFH, w2_EFH, v1_EFH = layout.matrices(w1, w2, v1)
    of_gate_EF, of_up_EF = layout.biases(w1_bias, v1_bias)

    def product(rows_R, matrix, bias):
        out = rows_R @ matrix
        return out if bias is None else out + bias

    out_TH = torch.zeros_like(x)
    for e in range(w1_EFH.size(0)):
        token, slot = (chosen_TK == e).nonzero(as_tuple=True)
        h = product(x[token], w1_EFH[e].t(), None if of_gate_EF is None else of_gate_EF[e])
        a = activation(h) if v1_EFH is None else gated(
            activation, h, product(x[token], v1_EFH[e].t(), None if of_up_EF is None else of_up_EF[e]))
        y = product(a, w2_EFH[e], None if w2_bias is None else w2_bias[e])
        out_TH = out_TH.index_add(0, token, (y * weights[token, slot, None]).to(out_TH.dtype))
    return out_TH


def results(function, leaves, grad_TH, dtype):
    """The output and the gradients of all leaves, by name, computed in `dtype`; router weights are float32 where it has 16 bits."""
    own = {name: None if leaf is None else leaf.to(torch.promote_types(dtype, torch.float32) if name == "weights" else dtype)
           .detach().requires_grad_() for name, leaf in leaves.items()}
    out_TH = function(*(own[name] for name in NAMES))
    wanted = [name for name in NAMES if own[name] is not None]
    grads = torch.autograd.grad(out_TH, [own[name] for name in wanted], grad_TH.to(dtype))
    return {"out": out_TH.detach(), **dict(zip(wanted, grads))}


def check(layout, device, dtype, engine="auto", activation=GPT_OSS, factor=3.0, options=None, **of_inputs):
    leaves, chosen_TK, grad_TH = inputs(layout, device, **of_inputs)
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, leaves["w2"].size(0), check="none")

    def ours(x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias):
        exact_inputs.poison(device)
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=activation, engine=engine, layout=layout,
                                w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias, **(options or {}))

    def plain(*tensors):
        return by_hand(*tensors, chosen_TK=chosen_TK, layout=layout, activation=activation)

    exact, baseline = results(plain, leaves, grad_TH, torch.float64), results(plain, leaves, grad_TH, dtype)
    for name, got in results(ours, leaves, grad_TH, dtype).items():
        assert_as_accurate_as(got, baseline[name], exact[name], name, factor=factor)


def served(engine, dtype):
    """Skips what an engine does not take."""
    name, device = engine
    reason = engines.ENGINES[name].refuses(Problem(device, dtype, T * K, E, H, F, False))
    if reason:
        pytest.skip(reason)
    return name, device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_biases_are_added_and_have_gradients(layout, dtype, engine_on):
    engine, device = served(engine_on, dtype)
    check(layout, device, dtype, engine)


@pytest.mark.parametrize("which", [("up",), ("down",)], ids="".join)
@pytest.mark.parametrize("layout", [LAYOUTS[0], WeightLayout("interleaved", True), WeightLayout("up_first")],
                         ids=lambda layout: layout.code)
def test_either_product_has_a_bias(layout, which, engine_on):
    engine, device = served(engine_on, torch.bfloat16)
    check(layout, device, torch.bfloat16, engine, which=which)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu_squared"])
def test_experts_without_a_gate_have_biases(activation, engine_on):
    engine, device = served(engine_on, torch.bfloat16)
    functions = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu_squared": gbmoe.ops.activations.relu_squared}
    check(LAYOUTS[0], device, torch.bfloat16, engine, activation=functions[activation], gated_experts=False)


# (tokens, experts, H, F): few rows; columns that fill no tile; the shape of gpt-oss, smaller; long sums.
LARGE = [(24, 12, 256, 192), (700, 4, 264, 88), (1500, 6, 360, 360), (900, 3, 2880, 328), (2100, 3, 2048, 1536)]


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("engine", ["hopper", "hopper_batch_invariant", "tensor_core"])
@pytest.mark.parametrize("activation", [GPT_OSS, gbmoe.Situ(2.0, 3.0), torch.nn.functional.silu], ids=["gpt_oss", "situ", "silu"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("layout", [WeightLayout("interleaved", True), WeightLayout("interleaved", True, True), WeightLayout("gate_first")],
                         ids=lambda layout: layout.code)
def test_kernels_with_biases(layout, shape, activation, engine):
    device = torch.device("cuda")
    if engines.ENGINES[engine].unavailable(device):
        pytest.skip(engines.ENGINES[engine].unavailable(device))
    tokens, experts, hidden, ffn = shape
    for dtype in (torch.bfloat16, torch.float16):
        check(layout, device, dtype, engine, activation, tokens=tokens, experts=experts, hidden=hidden, ffn=ffn)


@pytest.mark.gpu
@pytest.mark.parametrize("which", [(), ("up", "down")], ids=["", "biases"])
@pytest.mark.parametrize("engine", ["hopper", "tensor_core"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], WeightLayout("interleaved", True), WeightLayout("gate_first", up_transposed=True)],
                         ids=lambda layout: layout.code)
def test_a_token_has_the_same_bits_alone_and_among_others(layout, engine, which):
    """Few rows have kernels of their own, by which a bias was added after the product was rounded."""
    device = torch.device("cuda")
    if engines.ENGINES[engine].unavailable(device):
        pytest.skip(engines.ENGINES[engine].unavailable(device))
    leaves, chosen_TK, _ = inputs(layout, device, which=which, tokens=1500, hidden=512, ffn=384)
    own = {name: None if leaf is None else leaf.bfloat16() for name, leaf in leaves.items()}

    def outputs(count):
        exact_inputs.poison(device)
        plan = gbmoe.RoutingPlan.from_experts(chosen_TK[:count].contiguous(), E, check="none")
        return gbmoe.expert_mlp(own["x"][:count], plan, own["w1"], own["w2"], own["v1"], weights_TK=own["weights"][:count].float(),
                                activation=GPT_OSS, engine=engine, layout=layout, batch_invariant=True, w1_bias=own["w1_bias"],
                                w2_bias=own["w2_bias"], v1_bias=own["v1_bias"])

    whole = outputs(1500)
    for count in (1, 7, 130):
        assert torch.equal(outputs(count), whole[:count]), count


@pytest.mark.parametrize("layout", [LAYOUTS[0], WeightLayout("interleaved", True)], ids=lambda layout: layout.code)
@pytest.mark.parametrize("weight_gradients", [False, True])
def test_recipes_of_float8_do_not_quantise_biases(layout, weight_gradients, device):
    """With weights of zero the biases are all there is."""
    if device.type == "cuda" and engines.ENGINES["hopper"].unavailable(device):
        pytest.skip("no Hopper")
    leaves, chosen_TK, grad_TH = inputs(layout, device)
    for name in ("w1", "w2", "v1"):
        leaves[name] = None if leaves[name] is None else torch.zeros_like(leaves[name])
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    recipe = gbmoe.Float8BlockScaling(float8_weight_gradients=weight_gradients)

    def ours(x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias):
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=GPT_OSS, fp8_recipe=recipe, layout=layout,
                                w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias)

    def plain(*tensors):
        return by_hand(*tensors, chosen_TK=chosen_TK, layout=layout, activation=GPT_OSS)

    exact, baseline, got = (results(function, leaves, grad_TH, dtype)
                            for function, dtype in ((plain, torch.float64), (plain, torch.bfloat16), (ours, torch.bfloat16)))
    for name in ("out", "w2_bias"):
        assert_as_accurate_as(got[name], baseline[name], exact[name], name, factor=3.0)


@pytest.mark.parametrize("layout", [LAYOUTS[0], WeightLayout("interleaved", True)], ids=lambda layout: layout.code)
def test_gradients_of_biases_are_sums_of_e4m3_by_expert(layout, device):
    """An expert whose rows hold NaN made the gradients of all experts' biases NaN, by a product with zeros."""
    if device.type == "cuda" and engines.ENGINES["hopper"].unavailable(device):
        pytest.skip("no Hopper")
    leaves, chosen_TK, grad_TH = inputs(layout, device, tokens=400)
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    recipe = gbmoe.Float8BlockScaling(float8_weight_gradients=True)

    def gradients(dtype, **options):
        own = {name: None if leaf is None else leaf.detach().to(dtype) for name, leaf in leaves.items()}
        biases = [own[name].requires_grad_() for name in ("w1_bias", "v1_bias") if own[name] is not None]
        out_TH = gbmoe.expert_mlp(own["x"], plan, own["w1"], own["w2"], own["v1"], weights_TK=own["weights"].float(), activation=GPT_OSS,
                                  layout=layout, w1_bias=own["w1_bias"], w2_bias=own["w2_bias"], v1_bias=own["v1_bias"], **options)
        return torch.autograd.grad(out_TH, biases, grad_TH.to(dtype))

    exact, got = gradients(torch.float64), gradients(torch.bfloat16, fp8_recipe=recipe)
    for one, other in zip(got, exact):
        assert float((one.double() - other).norm() / other.norm()) < 0.1  # e4m3 has steps of an eighth
        assert not one[-1].any()  # without rows
    leaves["w2"][0] = float("nan")  # [E, ...] in every layout
    for one, other in zip(gradients(torch.bfloat16, fp8_recipe=recipe), got):
        assert bool(one[0].isnan().any()) and torch.equal(one[1:], other[1:])


@pytest.mark.parametrize("layout", [LAYOUTS[0], WeightLayout("interleaved", True)], ids=lambda layout: layout.code)
def test_gradients_of_biases_held_the_pre_activations(layout, monkeypatch):
    """Of which backward's peak of memory is made; they are of no more use then."""
    leaves, chosen_TK, grad_TH = inputs(layout, torch.device("cpu"))
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    own = {name: None if leaf is None else leaf.requires_grad_() for name, leaf in leaves.items()}
    held, alive = [], []

    def take(self):
        tensors = original_take(self)
        held.extend(weakref.ref(tensor) for tensor in tensors if tensor is not None)
        return tensors

    def bias_gradient(self, *arguments):
        alive.append([of() is not None for of in held])
        return original(self, *arguments)

    original, original_take = Engine.bias_gradient, Saved.take
    monkeypatch.setattr(Engine, "bias_gradient", bias_gradient)
    monkeypatch.setattr(Saved, "take", take)
    gbmoe.expert_mlp(own["x"], plan, own["w1"], own["w2"], own["v1"], weights_TK=own["weights"], activation=GPT_OSS, layout=layout,
                     w1_bias=own["w1_bias"], w2_bias=own["w2_bias"], v1_bias=own["v1_bias"]).backward(grad_TH)
    assert alive and not any(map(any, alive))


def test_frozen_biases_had_rows_of_the_gradient_gathered(monkeypatch):
    """Where neither the bias nor the router wants a gradient."""
    leaves, chosen_TK, grad_TH = inputs(LAYOUTS[0], torch.device("cpu"))
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    own = {name: None if leaf is None else leaf.float() for name, leaf in leaves.items()}
    asked = []
    monkeypatch.setattr(Engine, "bias_backward", lambda self, *_: asked.append(self) or (None, None))
    x = own["x"].requires_grad_()
    gbmoe.expert_mlp(x, plan, own["w1"], own["w2"], own["v1"], weights_TK=own["weights"], w1_bias=own["w1_bias"],
                     w2_bias=own["w2_bias"], v1_bias=own["v1_bias"]).backward(grad_TH.float())
    assert not asked and bool(x.grad.isfinite().all())


def test_frozen_biases_have_no_gradient_and_the_others_do(device):
    leaves, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    own = {name: None if leaf is None else leaf.float() for name, leaf in leaves.items()}
    own["w2_bias"].requires_grad_()
    out_TH = gbmoe.expert_mlp(own["x"], plan, own["w1"], own["w2"], own["v1"], weights_TK=own["weights"], w1_bias=own["w1_bias"],
                              w2_bias=own["w2_bias"], v1_bias=own["v1_bias"])
    (gradient,) = torch.autograd.grad(out_TH, own["w2_bias"], grad_TH.float())
    weight_TE = torch.zeros(T, E, device=device)
    live_TK = chosen_TK >= 0
    weight_TE.scatter_add_(1, chosen_TK.clamp(min=0), own["weights"] * live_TK)
    torch.testing.assert_close(gradient, weight_TE.t() @ grad_TH.float())


@pytest.mark.parametrize("scale", [0.25, 0.3])
def test_the_scale_of_weight_gradients_is_that_of_biases(scale, device):
    leaves, chosen_TK, grad_TH = inputs(LAYOUTS[0], device)
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")

    def gradients(scale):
        def ours(x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias):
            return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias,
                                    weight_gradient_scale=scale)
        return results(ours, leaves, grad_TH, torch.float32)

    one, scaled = gradients(1), gradients(scale)
    for name, gradient in one.items():
        factor = 1 if name in ("out", "x", "weights") else scale
        torch.testing.assert_close(scaled[name], gradient * factor, msg=name)


def test_rows_of_grouped_mlp_have_biases(device):
    leaves, _, grad_TH = inputs(LAYOUTS[0], device)
    counts_E = torch.tensor([20, 0, 13, 30, 2], device=device)
    own = {name: None if leaf is None else leaf.requires_grad_() for name, leaf in leaves.items()}
    chosen_T1 = torch.full((T, 1), -1, device=device)
    chosen_T1[:int(counts_E.sum()), 0] = torch.repeat_interleave(torch.arange(E, device=device), counts_E)
    weights_T1 = own["weights"][:, :1]
    out_TH = gbmoe.grouped_mlp(own["x"], counts_E, own["w1"], own["w2"], own["v1"], weights_R=weights_T1[:, 0], activation=GPT_OSS,
                               w1_bias=own["w1_bias"], w2_bias=own["w2_bias"], v1_bias=own["v1_bias"])
    expected_TH = by_hand(own["x"], weights_T1, *(own[name] for name in NAMES[2:]), chosen_TK=chosen_T1, layout=LAYOUTS[0],
                          activation=GPT_OSS)
    torch.testing.assert_close(out_TH, expected_TH)
    for got, wanted in zip(*(torch.autograd.grad(out, list(own.values()), grad_TH) for out in (out_TH, expected_TH))):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("change, words", [
    (dict(w1_bias=torch.zeros(E, F + 1)), "w1_bias: expected shape"), (dict(w2_bias=torch.zeros(E, H, dtype=torch.float64)), "w2_bias"),
    (dict(v1_bias=torch.zeros(E, F)), "v1_bias: expected None without v1"),
    (dict(activation=torch.sin, w2_bias=torch.zeros(E, H)), "kernel"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_no_bias_is_refused(change, words):
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(3, 1, dtype=torch.int64), E)
    with pytest.raises((TypeError, ValueError), match=words):
        gbmoe.expert_mlp(torch.zeros(3, H), plan, torch.zeros(E, F, H), torch.zeros(E, F, H), **change)


# ------------------------------------------------------------------------------------------------- what router weights multiply


@pytest.mark.parametrize("bias", [(), ("up", "down")], ids=["", "biases"])
@pytest.mark.parametrize("layout", [LAYOUTS[0], WeightLayout("interleaved", True)], ids=lambda layout: layout.code)
def test_weights_multiply_the_input(layout, bias, engine_on):
    """Llama-4's experts: of a function that is not linear it is another sum."""
    engine, device = served(engine_on, torch.bfloat16)
    leaves, chosen_TK, grad_TH = inputs(layout, device, which=bias)
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")

    def ours(x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias):
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, activation=GPT_OSS, engine=engine, layout=layout,
                                w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias, weights_on="input")

    def plain(x, weights, *parameters):
        out_TH = torch.zeros_like(x)
        for slot in range(K):  # each slot with a token of its own
            own_TK = torch.full_like(chosen_TK, -1)
            own_TK[:, slot] = chosen_TK[:, slot]
            weighed_TH = (x * weights[:, slot, None]).to(x.dtype)
            out_TH = out_TH + by_hand(weighed_TH, torch.ones_like(weights), *parameters, chosen_TK=own_TK, layout=layout,
                                      activation=GPT_OSS)
        return out_TH

    exact, baseline = results(plain, leaves, grad_TH, torch.float64), results(plain, leaves, grad_TH, torch.bfloat16)
    for name, got in results(ours, leaves, grad_TH, torch.bfloat16).items():
        assert_as_accurate_as(got, baseline[name], exact[name], name, factor=3.0)


def test_weights_between_the_products_are_those_of_the_output(device):
    leaves, chosen_TK, _ = inputs(LAYOUTS[0], device, which=("up",))
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")
    arguments = dict(weights_TK=leaves["weights"], w1_bias=leaves["w1_bias"], v1_bias=leaves["v1_bias"])
    got = gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_on="between", activation=GPT_OSS,
                           **arguments)
    expected = torch.zeros_like(got)
    for e in range(E):
        token, slot = (chosen_TK == e).nonzero(as_tuple=True)
        h, g = (leaves["x"][token] @ leaves[name][e].t() + leaves[f"{name}_bias"][e] for name in ("w1", "v1"))
        between = gated(GPT_OSS, h, g) * leaves["weights"][token, slot, None]
        expected = expected.index_add(0, token, between @ leaves["w2"][e])
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="w2_bias: expected None"):
        gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_on="between",
                         w2_bias=torch.zeros(E, H, dtype=torch.float64, device=device), **arguments)
    with pytest.raises(ValueError, match="weights_on: expected output, between or input"):
        gbmoe.expert_mlp(leaves["x"], plan, leaves["w1"], leaves["w2"], leaves["v1"], weights_on="outside")
