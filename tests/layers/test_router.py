"""LearnedRouter: scores, weights, ids and jitter."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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




@pytest.mark.parametrize("field, value, off", [
    ("moe_normalize_expert_weights", 1, None), ("moe_normalize_expert_weights", 2.0, None), ("moe_router_pre_softmax", False, True)])
def test_a_router_without_a_gradient_is_named_once(field, value, off):
    """The one weight of a token is divided by itself, or is the softmax of one logit."""
    router_module._warn_of_constant_weights.cache_clear()
    fields = {"hidden_size": 16, "moe_num_experts": 8, "fp16": False, "device": "cpu", field: value}
    with pytest.warns(UserWarning, match=f"{field} .* moe_top_k=1: .* the router gets no gradient .* Use {off}") as caught:
        for _ in range(3):
            layer = LearnedRouter(Arguments(**fields))
    assert len(caught) == 1
    layer(torch.randn(9, 16))[1].square().sum().backward()
    assert float(layer.layer.weight.grad.abs().max()) < 1e-6
    router_module._warn_of_constant_weights.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in ({"moe_top_k": 2}, {field: off}, {"moe_num_experts": 1}):
            LearnedRouter(Arguments(**{**fields, **change}))


def test_the_warning_of_constant_weights_names_the_line_that_makes_the_layer():
    router_module._warn_of_constant_weights.cache_clear()
    with pytest.warns(UserWarning, match="all weights are the same") as caught:
        gbmoe.dMoE(Arguments(hidden_size=16, moe_num_experts=8, fp16=False, device="cpu", moe_normalize_expert_weights=1))
    assert caught[0].filename == __file__


def test_normalising_by_0_means_off_and_was_refused():
    layer, x = router(moe_top_k=2, moe_normalize_expert_weights=0), torch.randn(5, 16)
    assert layer.args.moe_normalize_expert_weights is None
    assert torch.equal(layer(x)[1], router(moe_top_k=2)(x)[1])


def near_tie(dtype=torch.bfloat16, **fields):
    """A router of two experts, and a token whose logits are equal once they are rounded: the second expert's is the higher one."""
    layer = LearnedRouter(Arguments(hidden_size=2, moe_num_experts=2, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16,
                                    device="cpu", **fields))
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-9}[dtype]
    layer.layer.weight.data.copy_(torch.tensor([[1, 0], [1, step]]))
    return layer, torch.ones(1, 2, dtype=dtype)


def chosen(layer, x):
    return layer(x)[2].tolist()


def test_logits_in_bf16_had_the_dtype_of_autocast():
    """1 + 2**-9 is a number of float16, and 1 in bfloat16, in which logits that tie go to the lower expert."""
    layer, x = near_tie(torch.float32, moe_router_dtype="bf16")
    assert chosen(layer, x) == [[0]]
    with torch.autocast("cpu", dtype=torch.float16):
        assert chosen(layer, x) == [[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_were_rounded_before_the_choice(dtype):
    layer, x = near_tie(dtype)
    scores, weights, experts = layer(x)
    assert experts.tolist() == [[1]] and scores.dtype == weights.dtype == dtype
    (scores[:, 0].sum() + weights.sum()).backward()
    assert layer.layer.weight.grad.dtype == dtype and bool(layer.layer.weight.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_sent_tokens_to_other_experts(dtype):
    moe = gbmoe.dMoE(Arguments(hidden_size=64, ffn_hidden_size=32, moe_num_experts=64, moe_top_k=6, fp16=dtype == torch.float16,
                               bf16=dtype == torch.bfloat16, bias=False, device="cpu", moe_loss_weight=0)).eval()
    x = torch.randn(1500, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = (x.double() @ moe.router.layer.weight.double().t()).topk(6).indices
    with torch.no_grad():
        assert torch.equal(moe.router(x)[2].sort().values, exact.sort().values)
        assert moe(x).dtype == dtype


def test_under_autocast_logits_were_rounded_before_the_choice():
    layer, x = near_tie()
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        for tokens in (x, x.float()):
            scores, weights, experts = layer(tokens)
            assert experts.tolist() == [[1]] and scores.dtype == weights.dtype == torch.float32


def test_a_float32_router_of_tokens_in_bfloat16():
    layer, x = near_tie()
    layer.float()
    layer.layer.weight.data[1, 1] = 2**-20
    scores, weights, experts = layer(x)
    assert experts.tolist() == [[1]] and scores.dtype == weights.dtype == torch.bfloat16
    weights.sum().backward()
    assert layer.layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_router_rounded_logits(backend):
    torch.compiler.reset()
    layer, x = near_tie()
    assert chosen(torch.compile(layer, fullgraph=True, backend=backend), x) == [[1]]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_router_rounded_logits(strict):
    layer, x = near_tie()
    program = torch.export.export(layer.eval(), (x,), strict=strict)
    assert "gbmoe.route_tokens" in str(program.graph) and program.module()(x)[2].tolist() == [[1]]


def test_weights_in_place_of_the_routers_own():
    """functional_call hands them over as tensors, or as fake ones while torch traces."""
    layer, x = near_tie()
    weight = layer.layer.weight.detach().flip(0)
    assert torch.func.functional_call(layer, {"layer.weight": weight}, (x,))[2].tolist() == [[0]]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (weight, x)]
        scores, _, experts = torch.func.functional_call(layer, {"layer.weight": fakes[0]}, (fakes[1],))
        assert scores.dtype == torch.bfloat16 and experts.shape == (1, 1)


class Subclass(torch.nn.Linear):
    pass


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


def with_a_forward_of_its_own(linear):
    plain = linear.forward
    linear.forward = lambda x: plain(x)


def replaced_by(make):
    def change(linear, router):
        router.layer = make(linear)
    return change


def with_weights_of(linear, other):
    other.weight = linear.weight
    return other


CHANGES = {
    "wrapped": replaced_by(torch.nn.Sequential),
    "subclass": replaced_by(lambda linear: with_weights_of(linear, Subclass(2, 2, bias=False, dtype=linear.weight.dtype))),
    "bias": lambda linear, router: setattr(linear, "bias", torch.nn.Parameter(torch.zeros(2, dtype=linear.weight.dtype))),
    "forward hook": lambda linear, router: linear.register_forward_hook(lambda module, args, out: out),
    "forward pre-hook": lambda linear, router: linear.register_forward_pre_hook(lambda module, args: None),
    "backward hook": lambda linear, router: linear.register_full_backward_hook(lambda module, *grads: None),
    "backward pre-hook": lambda linear, router: linear.register_full_backward_pre_hook(lambda module, grads: None),
    "parametrized": lambda linear, router: torch.nn.utils.parametrize.register_parametrization(linear, "weight", Halved()),
    "forward of its own": lambda linear, router: with_a_forward_of_its_own(linear),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_more_than_a_linear_one_is_called(change):
    """Its logits are taken as they come: here they are rounded, so that both are equal."""
    layer, x = near_tie()
    CHANGES[change](layer.layer, layer)
    assert chosen(layer, x) == [[0]]


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in ("wrapped", "subclass", "bias")])
def test_beside_batch_invariant_it_was_computed_without_its_hooks(change):
    layer, x = near_tie(batch_invariant=True)
    CHANGES[change](layer.layer, layer)
    with pytest.raises(TypeError, match="router.layer: expected a torch.nn.Linear without bias for batch_invariant, and without hooks "
                                        "or a forward of its own, got "):
        layer(x)


def test_hooks_of_all_modules_see_the_layer():
    layer, x = near_tie()
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out.flip(1) if module is layer.layer else None):
        layer.layer.weight.data[1, 1] = 1
        assert chosen(layer, x) == [[0]]
    assert chosen(layer, x) == [[1]]


def test_a_forward_that_torch_was_given_is_called(monkeypatch):
    layer, x = near_tie()
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: torch.nn.functional.linear(x, self.weight).flip(1) + 0)
    layer.layer.weight.data[1, 1] = 1
    assert chosen(layer, x) == [[0]]


@pytest.mark.parametrize("in_fp32, dtype", [(False, torch.bfloat16), (True, torch.float32)])
def test_the_z_loss_keeps_its_dtype(monkeypatch, in_fp32, dtype):
    kept = []
    monkeypatch.setattr("gbmoe.layers.router.save_router_logsumexp", lambda logsumexp, *_: kept.append(logsumexp))
    layer, x = near_tie(moe_zloss_weight=0.1, moe_zloss_in_fp32=in_fp32)
    layer(x)
    assert kept[0].dtype == dtype
