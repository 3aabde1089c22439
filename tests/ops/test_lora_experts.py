"""Adapters (LoRA) of experts: every layout, engine and dtype against float64, all gradients; what is neither computed nor allocated.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, G rows of w1, R rank.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import gbmoe
from gbmoe import ExpertLora, LoraFactors, WeightLayout, launch, programs
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.reference import Reference
from gbmoe.lora_factors import joined_operands
from gbmoe.testing import exact_inputs
from tests.conftest import assert_as_accurate_as, dtype_id
from tests.ops import test_expert_biases as of_biases
from tests.ops.test_expert_biases import GPT_OSS, E, F, H, served
from tests.test_weight_layout import LAYOUTS, ids

SEPARATE, PAIRED = WeightLayout(), WeightLayout("interleaved", True)


def factors(layout, device, gated, targets, rank, number=1):
    """Leaves by name, such as "w1.a0", float64."""
    leaves = {}
    for seed, (name, columns, inner) in enumerate((("w1", 2 * F if layout.is_combined and gated else F, H), ("v1", F, H), ("w2", H, F))):
        if name not in targets or (name == "v1" and (layout.is_combined or not gated)):
            continue
        for n in range(number):
            for factor, shape in (("a", (E, rank + n, inner)), ("b", (E, columns, rank + n))):
                leaves[f"{name}.{factor}{n}"] = exact_inputs.exact_values(
                    *shape, dtype=torch.float64, device=device, seed=20 + 10 * seed + 2 * n + (factor == "b"), scale=2**-2)
    return leaves


def lora_of(leaves, scale):
    names = {name.partition(".")[0] for name in leaves if "." in name}
    return ExpertLora(**{name: [LoraFactors(leaves[f"{name}.a{n}"], leaves[f"{name}.b{n}"], scale * (n + 1))
                                for n in range(9) if f"{name}.a{n}" in leaves] for name in names})


def by_hand(leaves, chosen_TK, layout, activation, scale):
    """float64's definition, and the obvious PyTorch in other dtypes: the rows times both factors, which are added to the product."""
    lora = lora_of(leaves, scale)
    w1_EFH, w2_EFH, v1_EFH = layout.matrices(leaves["w1"], leaves["w2"], leaves["v1"])
    biases = layout.biases(leaves["w1_bias"], leaves["v1_bias"])

    def columns(name, b_EGR):
        """The rows of b that belong to w1's or v1's matrix, where it has any."""
        if not layout.is_combined or v1_EFH is None or name == "w2":
            return b_EGR
        parts = layout.biases(b_EGR[:, :, 0], None)
        index = torch.arange(b_EGR.size(1), device=b_EGR.device).expand(E, -1)
        return b_EGR[:, layout.biases(index, None)[name == "v1"][0]] if parts[1] is not None else b_EGR

    def product(rows, matrix, name, e, bias):
        out = rows @ matrix
        if bias is not None:
            out = out + bias[e]
        for each in lora.of("w1" if layout.is_combined and name == "v1" else name):
            out = out + (rows @ each.a[e].t()) @ (columns(name, each.b)[e] * each.scale).t()
        return out

    out_TH = torch.zeros_like(leaves["x"])
    for e in range(E):
        token, slot = (chosen_TK == e).nonzero(as_tuple=True)
        rows = leaves["x"][token]
        h = product(rows, w1_EFH[e].t(), "w1", e, biases[0])
        a = activation(h) if v1_EFH is None else of_biases.gated(activation, h, product(rows, v1_EFH[e].t(), "v1", e, biases[1]))
        y = product(a, w2_EFH[e], "w2", e, leaves["w2_bias"])
        out_TH = out_TH.index_add(0, token, (y * leaves["weights"][token, slot, None]).to(out_TH.dtype))
    return out_TH


def results(function, leaves, grad_TH, dtype, frozen=()):
    """The output and the gradients of all leaves that are not frozen, computed in `dtype`."""
    own = {name: None if leaf is None else leaf.to(torch.promote_types(dtype, torch.float32) if name == "weights" else dtype)
           .detach().requires_grad_(name not in frozen) for name, leaf in leaves.items()}
    out_TH = function(own)
    wanted = [name for name, leaf in own.items() if leaf is not None and leaf.requires_grad]
    return {"out": out_TH.detach(), **dict(zip(wanted, torch.autograd.grad(out_TH, [own[name] for name in wanted], grad_TH.to(dtype))))}


def check(layout, device, dtype, engine="auto", activation=GPT_OSS, targets=("w1", "v1", "w2"), rank=8, number=1, scale=0.75, which=(),
          gated=True, frozen=(), tokens=of_biases.T):
    leaves, chosen_TK, grad_TH = of_biases.inputs(layout, device, gated_experts=gated, which=which, tokens=tokens)
    leaves.update(factors(layout, device, gated, targets, rank, number))
    plan = gbmoe.RoutingPlan.from_experts(chosen_TK, E, check="none")

    def ours(own):
        exact_inputs.poison(device)
        return gbmoe.expert_mlp(own["x"], plan, own["w1"], own["w2"], own["v1"], weights_TK=own["weights"], activation=activation,
                                engine=engine, layout=layout, w1_bias=own["w1_bias"], w2_bias=own["w2_bias"], v1_bias=own["v1_bias"],
                                lora=lora_of(own, scale))

    def plain(own):
        return by_hand(own, chosen_TK, layout, activation, scale)

    exact, baseline = (results(plain, leaves, grad_TH, each, frozen) for each in (torch.float64, dtype))
    got = results(ours, leaves, grad_TH, dtype, frozen)
    for name, value in got.items():
        assert_as_accurate_as(value, baseline[name], exact[name], name, factor=3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_the_products_and_every_gradient(layout, dtype, engine_on):
    engine, device = served(engine_on, dtype)
    check(layout, device, dtype, engine)


@pytest.mark.parametrize("layout", [SEPARATE, PAIRED, WeightLayout("up_first")], ids=lambda layout: layout.code)
@pytest.mark.parametrize("targets", [("w1",), ("w2",), ("v1", "w2")], ids="".join)
def test_some_matrices_have_adapters(targets, layout, device):
    if "v1" in targets and layout.is_combined:
        pytest.skip("gate and up are one tensor")
    check(layout, device, torch.float32, targets=targets)


@pytest.mark.parametrize("layout", [SEPARATE, PAIRED, WeightLayout("gate_first", down_transposed=True)], ids=lambda layout: layout.code)
def test_ranks_of_no_multiple_of_8_and_several_adapters_with_biases(layout, device):
    check(layout, device, torch.float32, rank=3, number=2, which=("up", "down"))


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("engine", ["hopper", "hopper_batch_invariant"])
@pytest.mark.parametrize("rank, number, tokens", [(16, 1, 70), (24, 1, 1000), (72, 1, 70), (39, 2, 70), (8, 1, 6), (80, 1, 6)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_ranks_up_to_more_than_a_k_block_and_few_rows_on_hopper(layout, rank, number, tokens, engine):
    """39 and 40 ranks, padded, are one of 80. The last expert has no rows."""
    device = torch.device("cuda")
    reason = gbmoe.engines.ENGINES[engine].unavailable(device)
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    for frozen in ((), ("w1", "w2", "v1")):
        check(layout, device, torch.bfloat16, engine, rank=rank, number=number, tokens=tokens, frozen=frozen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_a_graph_that_is_retained_gave_other_gradients_the_second_time(device, dtype):
    """Rows that forward keeps are multiplied by the router's weights, and are as they were afterwards."""
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=20)
    x, w1, w2, v1, *own = (t.detach().to(device, dtype).requires_grad_(t.requires_grad) for t in (x, w1, w2, v1, *leaves))
    lora = ExpertLora(**{name: LoraFactors(*own[2 * n:2 * n + 2], 2.0) for n, name in enumerate(("w1", "v1", "w2"))})
    plan = gbmoe.RoutingPlan.from_experts(plan.row_of_slot_TK.to(device) % 4, 4)
    weights = torch.rand(20, 2, device=device, requires_grad=True)
    out = gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights, lora=lora).float().sum()
    first, again = (torch.autograd.grad(out, (x, weights, *own), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again)) and all(bool(gradient.any()) for gradient in first)


def test_experts_without_a_gate(device):
    check(SEPARATE, device, torch.float32, activation=torch.nn.functional.relu, gated=False)


def test_frozen_weights(device):
    check(SEPARATE, device, torch.float64, frozen=("w1", "w2", "v1"))


@pytest.mark.parametrize("layout, frozen, expected", [
    (SEPARATE, (), ["u", 1, "v", 3]), (PAIRED, (), ["u", 1, "v", 2]), (SEPARATE, ("w2.a0",), ["u", 1, "v", 2]),
    (SEPARATE, ("w2.b0",), ["u", 0, "v", 3]), (SEPARATE, ("w1.b0", "v1.b0"), ["u", 1, "v", 1]),
    (SEPARATE, ("x", "w1.a0", "v1.a0"), ["u", 1])])
def test_what_reads_the_same_rows_was_asked_for_apart(monkeypatch, layout, frozen, expected):
    """u with dB2, and v with dB1 and dA2, as far as they are wanted; without v these gradients are by themselves."""
    calls, make = [], Reference.rank_product_and_gradients

    def spied(self, product, gradients, sizes):
        calls.extend(("u" if isinstance(product.a, GatheredRows) else "v", len(gradients)))
        rights = [gradient.right for gradient in gradients]
        if calls[-2] == "u":
            assert all(right is product.a for right in rights)
        elif len(rights) > 1:
            assert rights[0] is product.a and rights[1] is (product.a2 if layout is SEPARATE else rights[-1])
        return make(self, product, gradients, sizes)

    monkeypatch.setattr(Reference, "rank_product_and_gradients", spied)
    check(layout, torch.device("cpu"), torch.float64, "reference", frozen=("w1", "w2", "v1", *frozen))
    assert calls == expected


def frozen_layer(experts=32, tokens=6, hidden=64, ffn=64, rank=8):
    values = dict(dtype=torch.float32, device="cpu")
    w1, w2, v1 = (exact_inputs.exact_values(experts, ffn, hidden, seed=seed, **values) for seed in (1, 2, 3))
    x = exact_inputs.exact_values(tokens, hidden, seed=4, **values).requires_grad_()
    pairs = [[exact_inputs.exact_values(*shape, seed=5, **values).requires_grad_() for shape in shapes]
             for shapes in (((experts, rank, hidden), (experts, ffn, rank)),) * 2 + (((experts, rank, ffn), (experts, hidden, rank)),)]
    lora = ExpertLora(**{name: LoraFactors(a, b, 2.0) for name, (a, b) in zip(("w1", "v1", "w2"), pairs)})
    plan = gbmoe.RoutingPlan.from_experts(exact_inputs.expert_ids(tokens, experts, 2, device="cpu", seed=6), experts)
    return x, plan, w1, w2, v1, lora, [factor for pair in pairs for factor in pair]


def test_frozen_weights_had_a_gradient_gemm_or_a_temporary_of_their_size(monkeypatch):
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(hidden=128, ffn=128)
    made, gmm = [], Reference.gmm

    def spied(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        result = gmm(self, a, b, sizes, trans_a, trans_b, out, accumulate)
        made.append(result.numel())
        return result

    monkeypatch.setattr(Reference, "gmm", spied)
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora).sum().backward()
    assert all(leaf.grad is not None for leaf in (x, *leaves)) and w1.grad is None
    assert max(made) < w1.numel() / 2
    largest = max(event.self_cpu_memory_usage for event in profile.function_events)
    assert 0 < largest < w1.nbytes / 2, largest


def test_backward_keeps_neither_rows_nor_activations():
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora).sum()
    known = {t.untyped_storage().data_ptr() for t in (x, w1, w2, v1, *leaves)}
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    extra = sum(size for pointer, size in own.items() if pointer not in known)
    h_and_g, t_and_s, of_factors = 2 * plan.num_rows * 64 * 4, plan.num_rows * (16 + 8) * 4, 8 * sum(leaf.nbytes for leaf in leaves)
    assert extra <= h_and_g + t_and_s + of_factors + 4096


def test_float32_factors_of_bfloat16_experts_have_float32_gradients(device):
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=20)
    wide = gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora)
    half = gbmoe.expert_mlp(x.bfloat16(), plan, w1.bfloat16(), w2.bfloat16(), v1.bfloat16(), lora=lora)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), wide, rtol=0.05, atol=float(wide.detach().abs().max()) / 50)
    assert {grad.dtype for grad in torch.autograd.grad(half.float().sum(), leaves)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        cast = gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora)
    assert torch.equal(cast, half)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0)], ids=["ENR", "ERN", "NRE"])
def test_gradients_of_factors_that_are_cast_were_copied_into_a_parameters_order(device, order):
    """PEFT keeps b as [N, r * E]: autograd takes a gradient that lies like its parameter, and copies another."""
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=20)
    x, w1, w2, v1, *leaves = (t.detach().to(device).requires_grad_(t.requires_grad) for t in (x, w1, w2, v1, *leaves))
    plan, back = gbmoe.RoutingPlan.from_experts(plan.row_of_slot_TK.to(device) % 4, 4), [order.index(dim) for dim in range(3)]
    kept = [leaf.detach().permute(order).contiguous().requires_grad_() for leaf in leaves]

    def gradients(factors, wanted):
        exact_inputs.poison(device)
        lora = ExpertLora(**{name: LoraFactors(*factors[2 * n:2 * n + 2], 2.0) for n, name in enumerate(("w1", "v1", "w2"))})
        args = [t.detach().bfloat16() for t in (x, w1, w2, v1)]
        return torch.autograd.grad(gbmoe.expert_mlp(args[0], plan, *args[1:], lora=lora).float().sum(), wanted)

    expected, found = gradients(leaves, leaves), gradients([leaf.permute(back) for leaf in kept], kept)
    for ours, plain, leaf in zip(found, expected, kept):
        assert ours.stride() == leaf.stride() and ours.dtype == torch.float32
        torch.testing.assert_close(ours.permute(back), plain, rtol=0.02, atol=float(plain.abs().max()) / 100)


def test_factors_that_are_cast_raised_under_create_graph(device):
    x, w1, w2 = torch.randn(6, 16, device=device, dtype=torch.bfloat16), *torch.randn(2, 4, 32, 16, device=device, dtype=torch.bfloat16)
    a, b = torch.randn(4, 2, 16, device=device, requires_grad=True), torch.randn(4, 32, 2, device=device, requires_grad=True)
    out = gbmoe.grouped_mlp(x, torch.tensor([3, 0, 1, 2]), w1, w2, lora=ExpertLora(w1=LoraFactors(a, b, 2.0)))
    first, again = (torch.autograd.grad(out.sum(), (a, b), create_graph=create, retain_graph=True) for create in (False, True))
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="differentiable once"):  # and not none, or those of other terms alone
        torch.autograd.grad(again[0].sum(), b)


def test_factors_that_are_cast_launched_kernels_on_fake_tensors(monkeypatch):
    """Which have no memory: kernels that are no operators of gbmoe are for tensors that nothing watches."""
    launched = []
    monkeypatch.setattr(launch, "copy_scaled", lambda *arguments: launched.append(arguments))
    with FakeTensorMode():
        a, b = torch.empty(4, 8, 16, requires_grad=True), torch.empty(32, 8, 4, requires_grad=True)
        a_ERK, b_ERN = joined_operands([LoraFactors(a, b.permute(2, 0, 1), 2.0)], torch.bfloat16)
        (a_ERK.sum() + (b_ERN * torch.empty(4, 8, 32)).sum()).backward()
        assert not launched and a.grad.shape == a.shape and b.grad.stride() == b.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [SEPARATE, PAIRED], ids=lambda layout: layout.code)
def test_steps_with_adapters_were_no_programs_of_the_extension(monkeypatch, layout):
    """What was added in memory was an operator with a Scalar, which no program can call."""
    made = []

    class Spied(programs.Encoded):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(arguments[4])

    monkeypatch.setattr(programs, "Encoded", Spied)
    programs.forget_all()
    for _ in range(3):
        check(layout, torch.device("cuda"), torch.bfloat16, frozen=("w1", "w2", "v1"))
    assert {name for name in made if "low_rank" in name} == {"expert_mlp_low_rank", "expert_mlp_low_rank_backward"}


def test_adapters_that_change_nothing_gave_other_bits():
    x, plan, w1, w2, v1, lora, _ = frozen_layer(experts=4, tokens=20)
    nothing = ExpertLora(w1=LoraFactors(lora.w1.a, torch.zeros_like(lora.w1.b)), w2=LoraFactors(lora.w2.a, torch.zeros_like(lora.w2.b)))
    expected = gbmoe.expert_mlp(x, plan, w1, w2, v1)
    assert torch.equal(gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=nothing), expected)
    assert torch.equal(gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=ExpertLora()), expected)


def test_rows_in_expert_order_and_weights_on_rows():
    x, _, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=20)
    changed = [w + getattr(lora, name).delta() if name != "w2" else w + lora.w2.delta().transpose(1, 2)
               for name, w in (("w1", w1), ("w2", w2), ("v1", v1))]
    counts, weights = torch.tensor([7, 0, 9, 2]), torch.rand(20)
    found = gbmoe.grouped_mlp(x, counts, w1, w2, v1, weights_R=weights, lora=lora)
    expected = gbmoe.grouped_mlp(x, counts, *changed, weights_R=weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)
    for ours, theirs in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (found, expected))):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=float(theirs.abs().max()) * 1e-4)
    plan = gbmoe.RoutingPlan.from_experts(torch.randint(4, (20, 2)), num_experts=4)
    for where in ("input", "between"):
        options = {"weights_TK": torch.rand(20, 2), "weights_on": where}
        torch.testing.assert_close(gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora, **options),
                                   gbmoe.expert_mlp(x, plan, *changed, **options), rtol=1e-4, atol=1e-2)


@pytest.mark.slow
def test_one_graph_under_torch_compile_with_gradients():
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=20)

    def step(x):
        return gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora)

    expected = torch.autograd.grad(step(x).sum(), (x, *leaves))
    found = torch.autograd.grad(torch.compile(step, backend="aot_eager", fullgraph=True)(x).sum(), (x, *leaves))
    assert all(map(torch.equal, found, expected))


def test_the_scale_of_weights_gradients_is_that_of_factors():
    x, plan, w1, w2, v1, lora, leaves = frozen_layer(experts=4, tokens=20)
    w1.requires_grad_()
    once, scaled = (torch.autograd.grad(gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora, weight_gradient_scale=scale).sum(),
                                        (x, w1, *leaves)) for scale in (1, 0.5))
    assert torch.equal(once[0], scaled[0])
    assert all(torch.equal(0.5 * one, other) for one, other in zip(once[1:], scaled[1:]))


def test_flops_of_factors_are_counted():
    x, plan, w1, w2, v1, lora, _ = frozen_layer(experts=4, tokens=20)
    own, of_factors = 2 * 40 * 64 * 64, 2 * 40 * 64 * 8
    with FlopCounterMode(display=False) as counter:
        out = gbmoe.expert_mlp(x, plan, w1, w2, v1, lora=lora)
    # Gate's and up's factors are one of 16 ranks, and up's two halves have zeros.
    assert counter.get_total_flops() == 3 * own + of_factors * (2 + 4 + 1 + 1)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 3 * own + 2 * of_factors * (2 + 4 + 1 + 1)


def test_what_is_no_adapter_of_these_experts_is_refused():
    x, plan, w1, w2, v1, lora, _ = frozen_layer(experts=4, tokens=20)

    def call(lora, **options):
        return gbmoe.expert_mlp(x, plan, w1, w2, options.pop("v1", v1), lora=lora, **options)

    a, b = lora.w1.a, lora.w1.b
    with pytest.raises(ValueError, match=r"lora.w1.a: expected shape \[4, 64, 64\], got \[4, 64, 8\]"):
        call(ExpertLora(w1=LoraFactors(a.transpose(1, 2), b)))
    with pytest.raises(ValueError, match=r"lora.w2.b: expected shape \[4, 64, 8\], got \[4, 64, 7\]"):
        call(ExpertLora(w2=LoraFactors(a, b[..., :7])))
    with pytest.raises(ValueError, match="lora.v1: expected None where there is no v1"):
        call(ExpertLora(v1=lora.v1), v1=None)
    with pytest.raises(TypeError, match="lora.w1.b: expected"):
        call(ExpertLora(w1=LoraFactors(a, b.to(torch.uint8))))
    with pytest.raises(TypeError, match="lora: expected a gbmoe.ExpertLora, got tuple"):
        call((a, b))
    with pytest.raises(TypeError, match="lora.w1: expected gbmoe.LoraFactors"):
        call(ExpertLora(w1=(a, b)))
    with pytest.raises(ValueError, match="activation: expected one that has a kernel, with lora"):
        call(lora, activation=torch.sin)
    with pytest.raises(ValueError, match="fp8_recipe: expected None with lora"):
        call(lora, fp8_recipe=gbmoe.Float8BlockScaling())
    with pytest.raises(ValueError, match="gradient_sink: expected None with lora"):
        call(lora, gradient_sink=gbmoe.WeightGradientSink())
