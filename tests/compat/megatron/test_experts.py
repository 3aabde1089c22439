"""Experts of gbmoe.compat.megatron: their results, their parameters, and what they refuse."""

import contextlib
import importlib

import pytest
import torch
import torch.nn.functional as F

from gbmoe import Float8BlockScaling, stacked
from gbmoe.testing import cuda_graphs
from tests.compat import expert_rows, interfaces
from tests.compat.expert_rows import FFN, HIDDEN, ROWS, values
from tests.compat.megatron.conftest import ADAPTER
from tests.compat.megatron.parts import EXPERTS, built, configured, each_expert, groups, halves, parameters


def quick(megatron):
    return megatron.activations.quick_gelu


# A configuration, and its formula between the products.
FUNCTIONS = {
    "swiglu": (lambda m: {}, lambda h: F.silu(halves(h)[0]) * halves(h)[1]),
    "swiglu, clamped": (lambda m: {"activation_func_clamp_value": 0.5}, lambda h: F.silu(halves(h)[0].clamp(max=0.5))
                        * halves(h)[1].clamp(-0.5, 0.5)),
    "gpt-oss": (lambda m: {"activation_func": quick(m), "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
                lambda h: quick_gelu(halves(h)[0].clamp(max=0.5)) * (halves(h)[1].clamp(-0.5, 0.5) + 1)),
    "quick_geglu": (lambda m: {"activation_func": m.fused_bias_geglu.quick_gelu}, lambda h: quick_gelu(halves(h)[0]) * halves(h)[1]),
    "quick_gelu": (lambda m: {"activation_func": quick(m), "gated_linear_unit": False}, lambda h: quick_gelu(h)),
    "geglu": (lambda m: {"activation_func": F.gelu}, lambda h: F.gelu(halves(h)[0]) * halves(h)[1]),
    "gelu": (lambda m: {"activation_func": F.gelu, "gated_linear_unit": False}, F.gelu),
    "fast_gelu": (lambda m: {"activation_func": m.activations.fast_gelu, "gated_linear_unit": False},
                  lambda h: F.gelu(h, approximate="tanh")),
    "squared_relu": (lambda m: {"activation_func": m.activations.squared_relu, "gated_linear_unit": False}, lambda h: F.relu(h).square()),
    "relu": (lambda m: {"activation_func": F.relu, "gated_linear_unit": False}, F.relu),
}


def quick_gelu(h):
    return h * torch.sigmoid(1.702 * h)


def definition(name):
    """Megatron's formula: the probabilities multiply the activation, and linear_fc2's bias."""
    def experts(x, probs, **stacks):
        wide = torch.promote_types(x.dtype, torch.float32)

        def expert(e, rows):
            h = x[rows] @ stacks["linear_fc1.weight"][e].t()
            if "linear_fc1.bias" in stacks:
                h = h + stacks["linear_fc1.bias"][e]
            a = (FUNCTIONS[name][1](h.to(wide)) * probs[rows, None]).to(x.dtype)
            out = a @ stacks["linear_fc2.weight"][e].t()
            return out + (stacks["linear_fc2.bias"][e] * probs[rows, None]).to(x.dtype) if "linear_fc2.bias" in stacks else out
        return expert_rows.loop(expert, x)
    return experts


def run(module, counts):
    def experts(x, probs, **stacks):
        single = module.linear_fc1.single_grouped_weight
        weights = stacks if single else each_expert({name: stack.unbind() for name, stack in stacks.items()})
        out, bias = torch.func.functional_call(module, weights, (x, counts, probs))
        assert bias is None
        return out
    return experts


def inputs(dtype, **kinds):
    probs = torch.float64 if dtype == torch.float64 else torch.float32
    return {"x": values(ROWS, HIDDEN, dtype=dtype, seed=1), "probs": values(ROWS, dtype=probs, seed=4).abs(), **parameters(dtype, **kinds)}


@pytest.mark.parametrize("single", [False, True], ids=["weight0", "weight"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.pairs
def test_experts_are_megatrons_formula(megatron, name, bias, single, device):
    fields = FUNCTIONS[name][0](megatron)
    module = built(megatron, single=single, add_bias_linear=bias, **fields).to(device)
    expert_rows.check(run(module, expert_rows.counts(device=device)), definition(name),
                      inputs(torch.bfloat16, gated=fields.get("gated_linear_unit", True), bias=bias), rowwise=("x", "probs"), device=device)


def test_rows_gate_and_up_in_turns(megatron):
    module = built(megatron, moe_mlp_glu_interleave_size=1, params_dtype=torch.bfloat16)
    tensors = inputs(torch.bfloat16)
    got = run(module, expert_rows.counts())(**tensors)
    first, second = tensors["linear_fc1.weight"].unflatten(1, (-1, 2)).unbind(2)
    tensors["linear_fc1.weight"] = torch.cat((first, second), 1)
    assert torch.equal(got, run(built(megatron, params_dtype=torch.bfloat16), expert_rows.counts())(**tensors))


def test_probabilities_on_the_input_multiplied_the_activation(megatron):
    module = built(megatron, moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True, params_dtype=torch.bfloat16)
    tensors = inputs(torch.bfloat16)
    got = run(module, expert_rows.counts())(**tensors)
    tensors["x"] = (tensors["x"] * tensors["probs"][:, None]).bfloat16()
    tensors["probs"] = torch.ones_like(tensors["probs"])
    torch.testing.assert_close(got, definition("swiglu")(**tensors), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("seeded", [False, True], ids=["no states", "states"])
def test_weights_made_on_a_gpu_wanted_states_of_random_numbers_that_nobody_had_added(megatron, monkeypatch, seeded):
    """Without model_parallel_cuda_manual_seed, TEGroupedLinear takes the device's own state."""
    forked = []

    @contextlib.contextmanager
    def fork(name):
        forked.append(name)
        yield

    tracker = importlib.import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(tracker, "_is_initialized", seeded)
    monkeypatch.setattr(tracker, "states_", {})
    if seeded:
        monkeypatch.setattr(tracker, "fork", fork)
    for single in (False, True):
        module = built(megatron, single=single, use_cpu_initialization=False, perform_initialization=True)
        assert all(part.std() > 0 for linear in (module.linear_fc1, module.linear_fc2) for part in linear._parts("weight"))
    assert forked == ["expert-parallel-rng"] * (4 * EXPERTS if seeded else 0)


def test_a_rank_without_rows_had_no_gradients(megatron):
    module = built(megatron)
    out, _ = module(torch.empty(0, HIDDEN, requires_grad=True), torch.zeros(EXPERTS, dtype=torch.int64), torch.empty(0))
    out.sum().backward()
    assert all(bool((p.grad == 0).all()) for p in module.parameters()) and out.shape == (0, HIDDEN)


@pytest.mark.gpu
def test_nobody_waits_for_the_counts(megatron):
    module = built(megatron, params_dtype=torch.bfloat16, single=True).cuda()
    x, probs = (values(*shape, dtype=torch.bfloat16, seed=1).cuda().requires_grad_() for shape in ((ROWS, HIDDEN), (ROWS,)))
    counts = expert_rows.counts(device="cuda")  # a copy that waits
    module(x, counts, probs)[0].sum().backward()  # loads kernels
    with cuda_graphs.no_host_wait():
        module(x, counts, probs)[0].sum().backward()


def test_blockwise_float8_is_gbmoes_recipe(megatron, monkeypatch):
    assert built(megatron).fp8_recipe is None
    asked = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    assert built(megatron, **asked).fp8_recipe == Float8BlockScaling(power_2_scale=True, float8_weight_gradients=True)
    assert built(megatron, fp8_wgrad=False, **asked).fp8_recipe == Float8BlockScaling(power_2_scale=True)
    own = Float8BlockScaling(keep_weights=False)
    experts = megatron.adapter.GroupedExperts(EXPERTS, configured(megatron), pg_collection=groups(), fp8_recipe=own)
    seen = []
    module = importlib.import_module(f"{ADAPTER}.grouped_experts")
    monkeypatch.setattr(module, "grouped_mlp", lambda *_, fp8_recipe, **__: seen.append(fp8_recipe))
    experts(torch.zeros(ROWS, HIDDEN), expert_rows.counts(), torch.ones(ROWS))
    assert seen == [own]


def test_parameters_are_named_and_marked_as_those_of_te_grouped_linear(megatron):
    module = built(megatron, of=groups(ep=(1, 2)), expert_model_parallel_size=2)
    found = dict(module.named_parameters())
    assert list(found) == [f"linear_fc{n}.weight{e}" for n in (1, 2) for e in range(EXPERTS)]
    for name, parameter in found.items():
        first = name.startswith("linear_fc1")
        assert list(parameter.shape) == ([2 * FFN, HIDDEN] if first else [HIDDEN, FFN])
        assert not parameter.allreduce and parameter.tensor_model_parallel and parameter.partition_dim == (0 if first else 1)
        assert 0.01 < parameter.std() < 0.04 and not parameter.skip_backward_post_hook
    one = built(megatron, single=True, moe_latent_size=None)
    assert {name: list(p.shape) for name, p in one.named_parameters()} == {
        "linear_fc1.weight": [EXPERTS, 2 * FFN, HIDDEN], "linear_fc2.weight": [EXPERTS, HIDDEN, FFN]}
    assert isinstance(module, megatron.experts.TEGroupedMLP)


def test_megatron_bridge_could_not_tell_how_weights_are_divided(megatron):
    """Its AutoMapping knows TransformerEngine's modules by the names of their classes. Of others it asks these attributes, and raised while
    it loaded a checkpoint of transformers, which is how verl makes its models."""
    module = built(megatron)
    for linear, dimension in ((module.linear_fc1, 0), (module.linear_fc2, 1)):
        assert linear.tensor_model_parallel and linear.partition_dim == dimension and linear.config.num_moe_experts == EXPERTS


def test_ranks_of_tensor_parallel_experts_have_their_parts_of_gate_and_up(megatron):
    def weights(rank, size):
        torch.manual_seed(0)
        module = built(megatron, of=groups(tp=(rank, size)), expert_tensor_parallel_size=size, tensor_model_parallel_size=size)
        return module.linear_fc1.weight0, module.linear_fc2.weight0

    whole, parts = weights(0, 1), [weights(rank, 2) for rank in range(2)]
    gates, ups = zip(*(halves(first.t()) for first, _ in parts))
    assert torch.equal(torch.cat((*gates, *ups), 1).t(), whole[0])
    assert torch.equal(torch.cat([second for _, second in parts], 1), whole[1])


def test_parameters_moved_or_cast_for_themselves_lay_apart(megatron):
    module = built(megatron, add_bias_linear=True)
    module = module.double().bfloat16()
    for linear in (module.linear_fc1, module.linear_fc2):
        for name in ("weight", "bias"):
            each = [getattr(linear, f"{name}{e}") for e in range(EXPERTS)]
            assert stacked(each).data_ptr() == each[0].data_ptr() and each[0].dtype == torch.bfloat16
    weights, bias = module.linear_fc1()
    assert [list(each.shape) for each in weights] == [[2 * FFN, HIDDEN]] * EXPERTS and bias.shape == (EXPERTS, 2 * FFN)


def test_hooks_that_wait_for_gathered_parameters_did_not_run(megatron):
    """DDP with overlap_param_gather waits for parameters in hooks before the modules that have them are called."""
    module, called = built(megatron), []
    for linear in (module.linear_fc1, module.linear_fc2):
        linear.register_forward_pre_hook(lambda called_module, _: called.append(called_module))
    module(torch.zeros(ROWS, HIDDEN), expert_rows.counts(), torch.ones(ROWS))
    assert called == [module.linear_fc1, module.linear_fc2]


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_load_whichever_form_they_have(megatron, bias):
    forms = [built(megatron, single=single, add_bias_linear=bias) for single in (False, True)]
    for saved, loaded in (forms, forms[::-1]):
        state = saved.state_dict()
        state |= {f"linear_fc{n}._extra_state{e}": None for n in (1, 2) for e in range(1, EXPERTS)}  # as TransformerEngine's have
        loaded.load_state_dict(state, strict=True)
        for linear in ("linear_fc1", "linear_fc2"):
            for one, other in zip(getattr(saved, linear)(), getattr(loaded, linear)()):
                assert (one is None and other is None) or all(torch.equal(*each) for each in zip(one, other, strict=True))
        for parameter in saved.parameters():
            torch.nn.init.normal_(parameter)


@pytest.mark.parametrize("fields, message", [
    ({"fp4": "e2m1"}, "fp4: expected None or False|fp4: expected False"), ({"moe_paged_stash": True}, "moe_paged_stash: expected False"),
    ({"use_kitchen": True}, "use_kitchen: expected False"), ({"fp8_param": True}, "fp8_param: expected False"),
    ({"first_last_layers_bf16": True}, "first_last_layers_bf16: expected False"), ({"quant_recipe": {}}, "quant_recipe: expected None"),
    ({"activation_func_fp8_input_store": True}, "activation_func_fp8_input_store: expected False"),
    ({"use_te_activation_func": True}, "use_te_activation_func: expected False"),
    ({"expert_gtp_weight_remat_size": 2}, "expert_gtp_weight_remat_size: expected 1"),
    ({"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size: expected 1 .*, got 32"),
    ({"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, "offload_modules: expected none .* got .'moe_act'"),
    ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, "fp8: expected e4m3, .* got hybrid"),
    ({"fp8": "e4m3", "fp8_recipe": "delayed"}, "fp8_recipe: expected blockwise, .* got delayed"),
    ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input: expected False with a moe_router_topk of 2"),
    ({"activation_func": torch.tanh}, "activation_func: expected silu, gelu, .* got tanh"),
    ({"activation_func": F.gelu, "activation_func_clamp_value": 7.0}, "activation_func_clamp_value: expected None with gelu .* got 7.0"),
])
def test_a_configuration_that_gbmoe_does_not_compute_says_why(megatron, fields, message):
    with pytest.raises(ValueError, match=rf"gbmoe.compat.megatron: ({message})"):
        built(megatron, **fields)


def test_arguments_that_experts_do_not_take(megatron):
    with pytest.raises(ValueError, match="add_bias_linear: expected False with expert_tensor_parallel_size above 1"):
        built(megatron, of=groups(tp=(0, 2)), add_bias_linear=True)
    with pytest.raises(ValueError, match=f"expert_tensor_parallel_size: expected a divisor of {2 * FFN}, got 3"):
        built(megatron, of=groups(tp=(0, 3)))
    with pytest.raises(ValueError, match="output_buffer: expected None"):
        built(megatron)(torch.zeros(ROWS, HIDDEN), expert_rows.counts(), torch.ones(ROWS), output_buffer=torch.empty(0))


@pytest.mark.parametrize("version", ["0.19.1", "0.20.0rc1"])
def test_another_release_says_so(tmp_path, version):
    with interfaces.installed("megatron-core", ADAPTER, tmp_path, version), \
            pytest.raises(ImportError, match=rf"gbmoe.compat.megatron: megatron-core: expected 0.19.2, .* got {version};"):
        importlib.import_module(ADAPTER)
