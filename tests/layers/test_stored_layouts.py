"""Layers that store their weights in any WeightLayout: values, results, gradients and state dicts are those of MegaBlocks' layout.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parametrize, prune

import gbmoe
from gbmoe import WeightLayout
from gbmoe.layers import Arguments, dmoe, from_megatron
from gbmoe.ops.routed_experts import routed_experts
from gbmoe.testing import accuracy, exact_inputs
from tests.test_weight_layout import LAYOUTS, experts_in_float64, ids, laid_out

E, H, FFN, K, T = 4, 16, 24, 2, 40
NAMES, BIASES = ("w1", "w2", "v1"), ("w1_bias", "w2_bias", "v1_bias")
PLAIN = [layout for layout in LAYOUTS if not layout.is_combined]
# As transformers, OLMo-core, gpt-oss and torchtitan keep them.
SOME = [WeightLayout("gate_first", down_transposed=True), WeightLayout("up_first"), WeightLayout("interleaved", True),
        WeightLayout(down_transposed=True)]
of_some = pytest.mark.parametrize("layout", SOME, ids=lambda layout: layout.code.replace(" ", "-"))
of_all = pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
GATE_FIRST = SOME[0]


def make(layout=None, seed=0, **fields):
    torch.manual_seed(seed)
    return gbmoe.dMoE(Arguments(**dict(hidden_size=H, ffn_hidden_size=FFN, moe_num_experts=E, moe_top_k=K, mlp_type="glu", bias=False,
                                       fp16=False, device="cpu", activation_fn=F.silu, moe_loss_weight=0, weight_layout=layout,
                                       init_method=functools.partial(torch.nn.init.normal_, std=0.3)) | fields))


def fill(layer, seed=1):
    """New values in all parameters, biases among them, the same for the same state dict."""
    generator = torch.Generator().manual_seed(seed)
    layer.load_state_dict({name: 0.3 * torch.randn(value.shape, generator=generator) for name, value in layer.state_dict().items()})
    return layer


def as_stored(layout, tensors):
    """{name: tensor} of [E*F,H] and biases, as a layer of this layout has them; made without the class under test."""
    stacks = [tensors[name].unflatten(0, (-1, FFN)) if name in tensors else None for name in NAMES]
    if stacks[2] is None:
        stacks[2] = torch.zeros_like(stacks[0])
    found = {name: tensor for name, tensor in zip(NAMES, laid_out(layout, *stacks)) if tensor is not None and name in tensors}
    if "w1_bias" in tensors:
        if layout.is_combined:
            as_rows = [tensors[name].unsqueeze(2) for name in ("w1_bias", "v1_bias")]
            found["w1_bias"] = laid_out(WeightLayout(layout.gate_up), as_rows[0], as_rows[0], as_rows[1])[0].squeeze(2)
            found["w2_bias"] = tensors["w2_bias"]
        else:
            found.update({name: tensors[name] for name in BIASES if name in tensors})
    return found


def step(layer, x, grad):
    """(out, the gradient of x, {name: gradient} of the router and of the experts)."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    return out.detach(), x.grad, layer.router.layer.weight.grad, {name: p.grad for name, p in layer.experts.mlp.named_parameters()}


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def assert_same_step(layer, plain, x, grad, same=close):
    """A layer's step is that of one of MegaBlocks' layout."""
    *found, of_layer = step(layer, x, grad)
    *expected, of_plain = step(plain, x, grad)
    for one, other in zip(found, expected):
        same(one, other)
    wanted = as_stored(layer.experts.mlp.layout, of_plain)
    assert of_layer.keys() == wanted.keys()
    for name, gradient in of_layer.items():
        assert gradient.is_contiguous() or gradient.shape != layer.experts.mlp._parameters[name].shape
        same(gradient, wanted[name])


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    exact_inputs.poison(torch.device("cpu"))
    return [torch.randn(T, H, generator=generator, dtype=dtype) for _ in range(2)]


@of_all
def test_another_layout_had_other_values_at_first(layout):
    """Values do not depend on the layout, nor the random numbers after them."""
    plain, after = make(), torch.rand(3)
    layer = make(layout)
    assert torch.equal(torch.rand(3), after)
    wanted = as_stored(layout, dict(plain.experts.mlp.named_parameters()))
    parameters = dict(layer.experts.mlp.named_parameters())
    assert list(parameters) == list(wanted)
    for name, parameter in parameters.items():
        assert parameter.is_contiguous() and torch.equal(parameter, wanted[name]), name
    assert (layer.experts.mlp.v1 is None) == layout.is_combined


@of_all
@pytest.mark.parametrize("fields", [{}, {"moe_expert_linear_bias": True}, {"mlp_impl": "bmm"}, {"mlp_impl": "reference"},
                                    {"activation_fn": F.mish}, {"activation_fn": F.mish, "memory_optimized_mlp": True},
                                    {"moe_apply_probs_on_input": True}, {"keep_gathered_rows": True}],
                         ids=lambda fields: ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in fields.items()))
def test_results_and_gradients_are_those_of_megablocks_layout(layout, fields):
    plain, layer = fill(make(**fields)), fill(make(layout, **fields))
    assert_same_step(layer, plain, *data())


@pytest.mark.parametrize("layout", PLAIN, ids=lambda layout: layout.code.replace(" ", "-"))
@pytest.mark.parametrize("biased", [False, True])
def test_experts_without_a_gate(layout, biased):
    fields = dict(mlp_type="mlp", moe_expert_linear_bias=biased)
    assert_same_step(fill(make(layout, **fields)), fill(make(**fields)), *data())


@of_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_against_a_loop_in_float64(layout, dtype):
    layer, (x, grad) = make(layout).to(dtype), data(dtype)
    plain = make().to(dtype)
    _, weights_TK, ids_TK = layer.router(x)
    stacks = {name: p.detach().unflatten(0, (E, FFN)) for name, p in plain.experts.mlp.named_parameters()}
    out, leaves = experts_in_float64(lambda h, g: F.silu(h) * g, ids_TK, x, weights_TK.detach(), *(stacks[name] for name in NAMES))
    _, _, *of_matrices = torch.autograd.grad(out, leaves, grad.double())
    expected = {"out": out.detach(), **dict(zip(NAMES, laid_out(layout, *of_matrices)))}
    found = step(layer, x, grad)
    for name, tensor in {"out": found[0], **found[3]}.items():
        assert accuracy.relative_error(tensor, expected[name]) < (1e-12 if dtype == torch.float64 else 2e-2), name


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.is_paired], ids=lambda layout: layout.code.replace(" ", "-"))
@pytest.mark.parametrize("implementation", ["gbmoe", "reference"])
def test_exact_sums_have_the_bits_of_megablocks_layout(layout, implementation):
    """Values of which every order of a sum gives the same bits, in bfloat16, up to the activation."""
    layers = [make(each, mlp_impl=implementation, bf16=True, activation_fn=F.relu) for each in (None, layout)]
    exact = functools.partial(exact_inputs.exact_values, dtype=torch.bfloat16, device=torch.device("cpu"))
    state = {name: exact(*value.shape, seed=seed) for seed, (name, value) in enumerate(layers[0].state_dict().items())}
    for layer in layers:
        layer.load_state_dict(state)
    assert_same_step(layers[1], layers[0], exact(T, H, seed=8), exact(T, H, seed=9), same=lambda one, other: pytest.fail() if not
                     torch.equal(one, other) else None)


@of_all
def test_router_and_experts_were_two_nodes(layout, monkeypatch):
    """A layer of another layout is one autograd node, too, and gives what it gives where the two are called apart."""
    calls = []
    monkeypatch.setattr(dmoe, "routed_experts", lambda *arguments: calls.append(1) or routed_experts(*arguments))
    for fields in ({}, {"moe_expert_linear_bias": True}, {"keep_gathered_rows": True}):
        layer = fill(make(layout, **fields))
        together = step(layer, *data())
        layer.router.register_forward_hook(lambda *_: None)
        apart = step(layer, *data())
        assert calls == [1]
        calls.clear()
        torch.testing.assert_close(together, apart, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------- state dicts


@of_all
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_move_between_layouts(layout, biased, assign, tmp_path):
    plain, layer = (fill(make(each, moe_expert_linear_bias=biased), seed) for each, seed in ((None, 1), (layout, 2)))
    saved = layer.state_dict()
    assert [(name, tensor.shape) for name, tensor in saved.items()] == [(name, t.shape) for name, t in plain.state_dict().items()]
    torch.save(saved, tmp_path / "saved.pt")
    for parameter in (*plain.parameters(), *layer.parameters()):
        torch.nn.init.zeros_(parameter)
    loaded = torch.load(tmp_path / "saved.pt")
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    for _ in range(2):
        for each in (plain, layer):
            each.load_state_dict(loaded, assign=assign)
            assert all(torch.equal(tensor, before[name]) for name, tensor in each.state_dict().items())
    assert loaded.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())
    own = dict(layer.experts.mlp.named_parameters())
    wanted = as_stored(layout, dict(plain.experts.mlp.named_parameters()))
    assert all(torch.equal(own[name], tensor) and own[name].is_contiguous() for name, tensor in wanted.items())
    assert all(p.requires_grad and p.is_leaf and p.expert_model_parallel is False for p in own.values())
    assert_same_step(layer, plain, *data())


@of_all
def test_parameters_by_their_names_are_a_state_too(layout):
    """As a program has them that keeps averages of parameters."""
    layer = fill(make(layout, moe_expert_linear_bias=True))
    averages = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    layer.load_state_dict(averages)
    assert all(torch.equal(p, averages[name]) for name, p in layer.named_parameters())


def test_a_layer_without_memory_gets_weights():
    plain = fill(make(moe_expert_linear_bias=True))
    for layout in SOME:
        layer = make(layout, device="meta", moe_expert_linear_bias=True)
        assert all(tensor.is_meta for tensor in layer.state_dict().values())
        layer.load_state_dict(plain.state_dict(), assign=True)
        assert_same_step(layer, plain, *data())


@of_some
def test_states_of_torchs_distributed_checkpoints(layout):
    """torch walks along the names of a state dict, and found no v1 in the module."""
    plain, layer = fill(make(moe_expert_linear_bias=True)), make(layout, moe_expert_linear_bias=True)
    set_model_state_dict(layer, get_model_state_dict(plain))
    state = get_model_state_dict(layer)
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


@of_all
def test_a_state_of_views_is_loaded_into_in_place(layout):
    """Where w2 lies as in MegaBlocks' layout, as torch.distributed.checkpoint loads; of others a state dict says nothing to the layer."""
    layer = make(layout)
    layer.state_dict()["experts.mlp.w2"].fill_(2.0)
    assert bool((layer.experts.mlp.w2 == 2).all()) != layout.down_transposed


@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=["default", *ids])
@pytest.mark.parametrize("name", [*NAMES, *BIASES])
def test_what_does_not_fit_is_named(layout, name):
    layer = make(layout, moe_expert_linear_bias=True)
    name, before = f"experts.mlp.{name}", layer.state_dict()
    state = {key: tensor + 1 for key, tensor in before.items()}
    for wrong in (state[name][:-1], state[name][:, :-1], state[name].unsqueeze(0), state[name].new_zeros(5)):
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}: copying a param with shape torch.Size"):
            layer.load_state_dict({**state, name: wrong})
    del state[name]
    with pytest.raises(RuntimeError, match=f'Missing key\\(s\\) in state_dict: "{name}"\\.'):
        layer.load_state_dict(state)
    layer.load_state_dict(before)
    missing, unexpected = layer.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([name], [])
    for key, tensor in layer.state_dict().items():  # what is there is loaded, and the rest is as it was
        assert torch.equal(tensor, before[key] if key == name else state[key]), key


@of_some
def test_a_part_that_is_missing_was_lost_in_a_layer_without_memory(layout):
    state = fill(make()).state_dict()
    layer = make(layout, device="meta")
    del state["experts.mlp.v1"]
    missing, _ = layer.load_state_dict(state, strict=False, assign=True)
    assert "experts.mlp.v1" in missing
    assert layer.experts.mlp.w1.is_meta == layout.is_combined


# ------------------------------------------------------------------------------------------------------ torch's tools


@of_some
def test_steps_of_an_optimizer(layout):
    plain, layer = fill(make()), fill(make(layout))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-2) for each in (plain, layer)]
    for _ in range(3):
        assert_same_step(layer, plain, *data())
        for optimizer in optimizers:
            optimizer.step()
    for name, tensor in layer.state_dict().items():
        close(tensor, plain.state_dict()[name])


@of_some
def test_copies_and_pickles(layout):
    layer = fill(make(layout, moe_expert_linear_bias=True))
    plain = fill(make(moe_expert_linear_bias=True))
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert list(copied.state_dict()) == list(plain.state_dict())
        copied.load_state_dict(plain.state_dict())
        assert_same_step(copied, plain, *data())
    assert f"layout='{layout.code}'" in repr(layer)


@of_some
def test_functional_call_and_stacked_gradients(layout):
    layer, (x, _) = fill(make(layout)), data()
    doubled = {name: 2 * p.detach() for name, p in layer.named_parameters()}
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    close(torch.func.functional_call(layer, doubled, (x,)), other(x))


@of_some
@pytest.mark.parametrize("fields", [{}, {"activation_fn": F.mish, "moe_apply_probs_on_input": True}], ids=["kernel", "callable"])
def test_one_graph_of_a_compiled_layer(layout, fields):
    torch._dynamo.reset()
    layer, (x, grad) = fill(make(layout, **fields)), data()
    expected, compiled = step(layer, x, grad), torch.compile(layer, backend="aot_eager", fullgraph=True)
    layer.zero_grad()
    own = x.clone().requires_grad_()
    out = compiled(own)
    out.backward(grad)
    close((out.detach(), own.grad), expected[:2])
    for name, parameter in layer.experts.mlp.named_parameters():
        close(parameter.grad, expected[3][name])


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@of_some
def test_parametrizations_and_pruning(layout):
    """They are of the parameters as they are stored."""
    layer, plain, (x, _) = fill(make(layout)), fill(make()), data()
    with torch.no_grad():
        for name in NAMES:
            plain.experts.mlp.get_parameter(name).mul_(2)
    for name in list(dict(layer.experts.mlp.named_parameters())):
        parametrize.register_parametrization(layer.experts.mlp, name, Doubled())
    close(layer(x), plain(x))
    layer, plain = fill(make(layout)), make()
    prune.l1_unstructured(layer.experts.mlp, "w1", 0.5)
    out = layer(x)
    prune.remove(layer.experts.mlp, "w1")
    assert int((layer.experts.mlp.w1 == 0).sum()) == layer.experts.mlp.w1.numel() // 2
    plain.load_state_dict(layer.state_dict())
    close(out, plain(x))


def test_frozen_parameters_stay_frozen():
    for layout in SOME:
        layer = make(layout)
        layer.experts.mlp.w1.requires_grad_(False)
        for assign in (False, True):
            layer.load_state_dict(fill(make()).state_dict(), assign=assign)
            assert not layer.experts.mlp.w1.requires_grad and layer.experts.mlp.w2.requires_grad
        layer(data()[0]).sum().backward()
        assert layer.experts.mlp.w1.grad is None and layer.experts.mlp.w2.grad is not None


def test_autocast():
    for layout in SOME:
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (fill(make(each))(data()[0]) for each in (layout, None))
        assert found.dtype == torch.bfloat16
        assert accuracy.relative_error(found, expected) < 2e-2


@of_some
def test_float8(layout):
    fields = dict(bf16=True, fp8_recipe=gbmoe.Float8BlockScaling(), ffn_hidden_size=32)
    plain = make(**fields)
    layer = make(layout, **fields)
    x, grad = data(torch.bfloat16)
    found, expected = step(layer, x, grad), step(plain, x, grad)
    close(found[:3], expected[:3])
    stacks = [expected[3][name].unflatten(0, (E, 32)) for name in NAMES]
    for name, wanted in zip(NAMES, laid_out(layout, *stacks)):
        assert wanted is None or accuracy.relative_error(found[3][name], wanted) < 1e-2


def test_megablocks_layout_by_its_name():
    """[E,F,H], as one_matrix_per_expert has them; None, the default, is MegaBlocks' own [E*F,H]."""
    named = make(WeightLayout())
    assert named.experts.mlp.v1.shape == (E, FFN, H) and make().experts.mlp.v1.shape == (E * FFN, H)
    stacked = make(one_matrix_per_expert=True)
    torch.testing.assert_close(step(named, *data()), step(stacked, *data()), rtol=0, atol=0)
    assert make(GATE_FIRST, one_matrix_per_expert=True).experts.mlp.w1.shape == (E, 2 * FFN, H)


@pytest.mark.parametrize("fields, words", [
    (dict(weight_layout="gate_first"), "weight_layout: expected None or a gbmoe.WeightLayout, got 'gate_first'"),
    (dict(weight_layout=GATE_FIRST, mlp_type="mlp"), "weight_layout: expected gate_up 'separate' with mlp_type 'mlp', which has no gate,"
                                                     " got 'gate_first down_transposed'"),
    (dict(weight_layout=GATE_FIRST, mlp_type="glu", expert_parallel_rows=2.0),
     "expert_parallel_rows: expected None with weight_layout 'gate_first down_transposed', as further rows are .* alone, got 2.0"),
    (dict(weight_layout=WeightLayout(down_transposed=True), expert_parallel_loans=1),
     "expert_parallel_loans: expected 0 with weight_layout 'separate down_transposed', as experts are lent .* alone, got 1"),
])
def test_refused(fields, words):
    with pytest.raises(ValueError, match="Arguments: " + words):
        Arguments(**fields)
    Arguments(expert_parallel_rows=2.0, weight_layout=WeightLayout(), mlp_type="glu")


def test_arguments_that_changed_after_a_layer_was_made_changed_where_it_read():
    layer, (x, _) = make(GATE_FIRST), data()
    expected = layer(x)
    layer.args.weight_layout = WeightLayout("up_first", down_transposed=True)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.state_dict()["experts.mlp.v1"], make().state_dict()["experts.mlp.v1"])


def test_from_megatron_takes_it():
    args = from_megatron(dict_as_object(hidden_size=8, ffn_hidden_size=16, num_experts=4, moe_router_topk=2, moe_router_pre_softmax=True,
                                        mlp_type="glu", weight_layout=GATE_FIRST))
    assert args.weight_layout == GATE_FIRST and args.moe_top_k == 2


def dict_as_object(**fields):
    return type("Config", (), fields)()
