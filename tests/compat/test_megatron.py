"""gbmoe.compat.megatron in Megatron-Core 0.19.2 where it is installed, elsewhere in its interface as tests/compat/interfaces has it."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gbmoe import Float8BlockScaling, stacked
from gbmoe.testing import cuda_graphs
from tests.compat import expert_rows, interfaces
from tests.compat.expert_rows import FFN, HIDDEN, ROWS, values

EXPERTS = len(expert_rows.COUNTS)
ADAPTER = "gbmoe.compat.megatron"
CORE = ("activations", "extensions.transformer_engine", "fusions.fused_bias_geglu", "models.backends", "models.gpt.moe_module_specs",
        "transformer.moe.experts", "transformer.moe.moe_layer", "transformer.moe.moe_utils", "transformer.transformer_config")


class Group:
    """As much of a process group as experts ask."""

    def __init__(self, rank=0, size=1):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def groups(ep=(0, 1), tp=(0, 1)):
    return SimpleNamespace(ep=Group(*ep), expt_tp=Group(*tp), expt_dp=Group())


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron-Core's modules by their last names, and the adapter."""
    with interfaces.installed("megatron-core", ADAPTER, tmp_path_factory.mktemp("megatron")):
        found = {name.rpartition(".")[2]: importlib.import_module(f"megatron.core.{name}") for name in CORE}
        yield SimpleNamespace(**found, adapter=importlib.import_module(ADAPTER))


def configured(megatron, **fields):
    """A TransformerConfig; what its own checks would refuse without TransformerEngine is set afterwards."""
    later = {name: fields.pop(name) for name in (
        "delay_wgrad_compute", "moe_single_grouped_weight", "fp8", "fp8_recipe", "fp4", "moe_paged_stash", "use_kitchen", "fp8_param",
        "first_last_layers_bf16", "activation_func_fp8_input_store", "quant_recipe", "expert_gtp_weight_remat_size", "offload_modules",
        "fine_grained_activation_offloading", "moe_mlp_glu_interleave_size", "use_te_activation_func") if name in fields}
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN,
             "moe_router_topk": 2, "moe_grouped_gemm": True, "use_cpu_initialization": True, "add_bias_linear": False,
             "gated_linear_unit": True, "activation_func": F.silu}
    config = megatron.transformer_config.TransformerConfig(**{**sizes, **fields})
    for name, value in later.items():
        setattr(config, name, value)
    return config


def built(megatron, *, of=None, single=None, **fields):
    return megatron.adapter.GroupedExperts(EXPERTS, configured(megatron, **fields), pg_collection=of or groups(),
                                           single_grouped_weight=single)


def parameters(dtype, *, gated=True, bias=False):
    """Those of all experts by their names, and a prefix to be cut off where one tensor has all."""
    width = FFN * (1 + gated)
    stacks = {"linear_fc1.weight": values(EXPERTS, width, HIDDEN, dtype=dtype, seed=2, inner=HIDDEN),
              "linear_fc2.weight": values(EXPERTS, HIDDEN, FFN, dtype=dtype, seed=3, inner=FFN)}
    if bias:
        stacks |= {"linear_fc1.bias": values(EXPERTS, width, dtype=dtype, seed=5), "linear_fc2.bias": values(EXPERTS, HIDDEN, dtype=dtype,
                                                                                                         seed=6)}
    return stacks


def each_expert(stacks):
    return {f"{name}{e}": t for name, stack in stacks.items() for e, t in enumerate(stack)}


def halves(h):
    return torch.chunk(h, 2, -1)


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


# --------------------------------------------------------------------------------------------------------------------- results


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


def test_a_rank_without_rows_had_no_gradients(megatron):
    module = built(megatron)
    out, _ = module(torch.empty(0, HIDDEN, requires_grad=True), torch.zeros(EXPERTS, dtype=torch.int64), torch.empty(0))
    out.sum().backward()
    assert all(bool((p.grad == 0).all()) for p in module.parameters()) and out.shape == (0, HIDDEN)


@pytest.mark.gpu
def test_nobody_waits_for_the_counts(megatron):
    module = built(megatron, params_dtype=torch.bfloat16, single=True).cuda()
    x, probs = (values(*shape, dtype=torch.bfloat16, seed=1).cuda().requires_grad_() for shape in ((ROWS, HIDDEN), (ROWS,)))
    module(x, expert_rows.counts(device="cuda"), probs)[0].sum().backward()  # loads kernels
    with cuda_graphs.no_host_wait():
        module(x, expert_rows.counts(device="cuda"), probs)[0].sum().backward()


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


# ------------------------------------------------------------------------------------------------------------------ parameters


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
    weight, bias = module.linear_fc1()
    assert weight.shape == (EXPERTS, 2 * FFN, HIDDEN) and bias.shape == (EXPERTS, 2 * FFN)


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_load_whichever_form_they_have(megatron, bias):
    forms = [built(megatron, single=single, add_bias_linear=bias) for single in (False, True)]
    for saved, loaded in (forms, forms[::-1]):
        state = saved.state_dict()
        state |= {f"linear_fc{n}._extra_state{e}": None for n in (1, 2) for e in range(1, EXPERTS)}  # as TransformerEngine's have
        loaded.load_state_dict(state, strict=True)
        for linear in ("linear_fc1", "linear_fc2"):
            for one, other in zip(getattr(saved, linear)(), getattr(loaded, linear)()):
                assert (one is None and other is None) or torch.equal(one, other)
        for parameter in saved.parameters():
            torch.nn.init.normal_(parameter)


# ----------------------------------------------------------------------------------------------------------- gradients of weights


def main_grads(module, *, reversed_buffer=False):
    """Give parameters what Megatron's DDP gives them: main_grads in one buffer, and the mark."""
    for linear in (module.linear_fc1, module.linear_fc2):
        of = list(linear.parameters())
        buffer = torch.zeros(sum(p.numel() for p in of), device=of[0].device)
        for parameter, part in zip(of[::-1] if reversed_buffer else of, buffer.split(of[0].numel())):
            parameter.main_grad, parameter.grad_added_to_main_grad = part.view(parameter.shape), False


def steps(module, count=2, then=lambda: None):
    for seed in range(count):
        x = values(ROWS, HIDDEN, dtype=torch.float32, seed=seed).requires_grad_()
        out, _ = module(x, expert_rows.counts(), values(ROWS, dtype=torch.float32, seed=8).abs())
        out.backward(values(ROWS, HIDDEN, dtype=torch.float32, seed=seed + 5))
        then()
        yield x.grad


def expected(megatron, count=2):
    """Gradients of a module without fusion, and of rows."""
    torch.manual_seed(0)
    module = built(megatron)
    rows = list(steps(module, count))
    return {name: p.grad for name, p in module.named_parameters()}, rows, module.state_dict()


def check_gradients(found, wanted, single):
    for name, gradient in found.items():
        one = torch.stack([wanted[f"{name}{e}"] for e in range(EXPERTS)]) if single else wanted[name]
        torch.testing.assert_close(gradient, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("single", [False, True], ids=["weight0", "weight"])
def test_fused_gradients_are_added_to_main_grad(megatron, single):
    wanted, rows, state = expected(megatron)
    module = built(megatron, single=single, gradient_accumulation_fusion=True)
    module.load_state_dict(state)
    main_grads(module)
    for got, row in zip(steps(module), rows):
        torch.testing.assert_close(got, row)
        for parameter in module.parameters():  # what DDP's hook asks, before it drops the gradient
            assert parameter.grad_added_to_main_grad and parameter.grad is not None
            parameter.grad = None
    check_gradients({name: p.main_grad for name, p in module.named_parameters()}, wanted, single)


def test_main_grads_in_reverse_order_got_none_or_others_gradients(megatron):
    """DDP fills its buffers from the last parameter to the first; then gradients are autograd's, and DDP adds them."""
    wanted, _, state = expected(megatron)
    module = built(megatron, gradient_accumulation_fusion=True)
    module.load_state_dict(state)
    main_grads(module, reversed_buffer=True)
    list(steps(module))
    assert not any(p.grad_added_to_main_grad or bool(p.main_grad.any()) for p in module.parameters())
    check_gradients({name: p.grad for name, p in module.named_parameters()}, wanted, False)


def test_the_mark_was_set_by_forward_and_kept_after_it_was_reset(megatron):
    module = built(megatron, single=True, gradient_accumulation_fusion=True)
    main_grads(module)
    out, _ = module(torch.zeros(ROWS, HIDDEN), expert_rows.counts(), torch.ones(ROWS))
    assert not any(p.grad_added_to_main_grad for p in module.parameters())
    out.sum().backward()
    assert all(p.grad_added_to_main_grad for p in module.parameters())


@pytest.mark.parametrize("fusion", ["", "in place", "reversed"])
@pytest.mark.parametrize("single", [False, True], ids=["weight0", "weight"])
def test_deferred_gradients_come_with_backward_dw(megatron, single, fusion):
    wanted, rows, state = expected(megatron)
    module = built(megatron, single=single, gradient_accumulation_fusion=bool(fusion), delay_wgrad_compute=True)
    assert all(p.skip_backward_post_hook for p in module.parameters())
    module.load_state_dict(state)
    if fusion:
        main_grads(module, reversed_buffer=fusion == "reversed")
    called = []
    module.linear_fc1.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))

    def gradient(parameter):
        return parameter.main_grad if fusion else parameter.grad

    def nothing_yet():
        before.append([None if gradient(p) is None else gradient(p).clone() for p in module.parameters()])

    before = []
    for number, (got, row) in enumerate(zip(steps(module, then=nothing_yet), rows)):
        torch.testing.assert_close(got, row)
        module.backward_dw()
        assert len(called) == number + 1
    assert all(each is None or not bool(each.any()) for each in before[0])
    check_gradients({name: gradient(p) for name, p in module.named_parameters()}, wanted, single)
    module.backward_dw()  # there is nothing left
    check_gradients({name: gradient(p) for name, p in module.named_parameters()}, wanted, single)


def test_a_second_forward_before_backward_dw_was_forgotten(megatron):
    wanted, _, state = expected(megatron)
    module = built(megatron, delay_wgrad_compute=True)
    module.load_state_dict(state)
    calls = [module(values(ROWS, HIDDEN, dtype=torch.float32, seed=seed), expert_rows.counts(),
                    values(ROWS, dtype=torch.float32, seed=8).abs())[0] for seed in range(2)]
    for seed, out in enumerate(calls):
        out.backward(values(ROWS, HIDDEN, dtype=torch.float32, seed=seed + 5))
        module.backward_dw()
    check_gradients({name: p.grad for name, p in module.named_parameters()}, wanted, False)


def test_frozen_experts_have_no_gradients_and_rows_have(megatron):
    for fields in ({}, {"gradient_accumulation_fusion": True}, {"delay_wgrad_compute": True}):
        module = built(megatron, **fields)
        module.linear_fc1.requires_grad_(False)
        if fields.get("gradient_accumulation_fusion"):
            main_grads(module)
        (got,) = steps(module, 1)
        module.backward_dw()
        assert bool(got.any()) and all(p.grad is None for p in module.linear_fc1.parameters())


# -------------------------------------------------------------------------------------------------------------------- refusals


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


# -------------------------------------------------------------------------------------------------------------------- where it is put


def experts_of(spec):
    return spec.keywords["submodules"].experts


def test_a_provider_has_gbmoes_experts_and_its_fallbacks_modules(megatron):
    provider = megatron.adapter.GbmoeSpecProvider(engine="torch", single_grouped_weight=True)
    spec = megatron.moe_module_specs.get_moe_module_spec_for_backend(provider, num_experts=EXPERTS)
    module = experts_of(spec)(EXPERTS, configured(megatron), pg_collection=groups(), name="experts")
    assert type(module) is megatron.adapter.GroupedExperts and module.engine == "torch" and module.linear_fc1.single_grouped_weight
    assert provider.fuse_layernorm_and_linear() is False and copy.copy(provider).fuse_layernorm_and_linear() is False
    with pytest.raises(AttributeError, match="nothing"):
        provider.nothing()


def test_specifications_that_exist_get_other_experts_and_stay_as_they_were(megatron):
    spec = megatron.moe_module_specs.get_moe_module_spec_for_backend(megatron.backends.LocalSpecProvider(), num_experts=EXPERTS)
    theirs = experts_of(spec)
    (changed,), = megatron.adapter.with_gbmoe_experts([[spec]], engine="torch")
    assert experts_of(spec) is theirs and changed.func is spec.func
    assert experts_of(changed).func is megatron.adapter.GroupedExperts and experts_of(changed).keywords == {"engine": "torch"}
    whole = megatron.adapter.with_gbmoe_experts(spec, whole_layer=True)
    assert whole.func is megatron.adapter.GbmoeMoELayer and issubclass(whole.func, megatron.moe_layer.MoELayer)
    with pytest.raises(ValueError, match="spec: expected one with MoESubmodules in it"):
        megatron.adapter.with_gbmoe_experts([1, "two"])


# ------------------------------------------------------------------------------------------------------------------- whole layers


def megakernel(megatron, *, shared=None, of=None, local=EXPERTS, fields=None, **config):
    of = of or groups()
    experts = megatron.adapter.GroupedExperts(local, configured(megatron, **config), pg_collection=of)
    for name, value in (fields or {}).items():
        setattr(experts.config, name, value)
    return experts, megatron.adapter.build_megakernel_backend(config=experts.config, ep_group=of.ep, routed_experts=experts,
                                                              shared_experts=shared, num_local_experts=local)


@pytest.mark.parametrize("fusion", [False, True])
def test_a_megakernel_is_the_sum_of_each_tokens_experts(megatron, fusion, device):
    experts, kernel = megakernel(megatron, gradient_accumulation_fusion=fusion, shared=lambda x: 2 * x)
    assert not list(kernel.parameters())
    experts.to(device)
    if fusion:
        main_grads(experts)
    x, probs, routing_map = (t.to(device) for t in routed(experts=EXPERTS))
    routing_map[3], routing_map[5] = False, torch.arange(EXPERTS, device=device) == 1  # tokens with fewer experts, dropped or masked
    probs = (probs + routing_map * 0.1) * routing_map
    leaves = [t.clone().requires_grad_() for t in (x, probs)]
    out = kernel(leaves[0].view(8, 5, HIDDEN), leaves[1], routing_map)
    grad = values(40, HIDDEN, dtype=torch.float32, seed=7).to(device)
    out.backward(grad.view_as(out))

    again = [t.clone().requires_grad_() for t in (x, probs)]
    (w1, _), (w2, _) = ((t.detach().requires_grad_() if t is not None else None for t in each()) for each in
                        (experts.linear_fc1, experts.linear_fc2))
    a = [F.silu(halves(again[0] @ one.t())[0]) * halves(again[0] @ one.t())[1] @ two.t() for one, two in zip(w1, w2)]
    wanted = (torch.stack(a, 1) * (again[1] * routing_map)[..., None]).sum(1) + 2 * again[0]
    wanted.backward(grad)
    torch.testing.assert_close(out.view_as(wanted), wanted)
    torch.testing.assert_close(leaves[0].grad, again[0].grad)
    torch.testing.assert_close(leaves[1].grad, again[1].grad)
    for e in range(EXPERTS):
        parameter = getattr(experts.linear_fc1, f"weight{e}")
        torch.testing.assert_close(parameter.main_grad if fusion else parameter.grad, w1.grad[e])


def test_what_a_megakernel_refuses(megatron):
    for name in ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization", "overlap_moe_expert_parallel_comm"):
        with pytest.raises(ValueError, match=f"{name}: expected None or False"):
            megakernel(megatron, fields={name: True})
    with pytest.raises(ValueError, match="expert_tensor_parallel_size: expected 1 .* got 2"):
        megakernel(megatron, of=groups(tp=(0, 2)))
    with pytest.raises(ValueError, match="num_local_experts: expected 5 experts over 2 ranks, got 5"):
        megakernel(megatron, of=groups(ep=(0, 2)))
    with pytest.raises(TypeError, match="routed_experts: expected GroupedExperts .* got Linear"):
        megatron.adapter.Megakernel(config=configured(megatron), ep_group=Group(), routed_experts=torch.nn.Linear(1, 1),
                                    num_local_experts=1)
    x, probs, routing_map = routed(experts=EXPERTS)
    with pytest.raises(ValueError, match=r"routing_map: expected shape \[T,E\] == \[39, 5\], as probs, got \[40, 5\]"):
        megakernel(megatron)[1](x[1:], probs, routing_map)


@pytest.fixture
def installed(megatron, monkeypatch):
    """`install`, whose effects end with the test."""
    for module in (megatron.moe_utils, megatron.transformer_engine):
        for name in [name for name in vars(module) if name.startswith("fused_")] + ["HAVE_TE", "is_te_min_version"]:
            monkeypatch.setattr(module, name, getattr(module, name, None), raising=False)
    provider = megatron.backends.LocalSpecProvider
    monkeypatch.setattr(provider, "grouped_mlp_modules", provider.grouped_mlp_modules)
    megatron.theirs = provider.grouped_mlp_modules
    megatron.adapter.install(engine="torch")
    return megatron


def test_install_takes_the_place_of_grouped_experts_alone(installed):
    provider = installed.backends.LocalSpecProvider()
    assert provider.grouped_mlp_modules(True).keywords == {"engine": "torch"}
    assert provider.grouped_mlp_modules(False).func is installed.experts.SequentialMLP
    installed.adapter.install(engine="cublas", permutation=False, router=False)
    assert provider.grouped_mlp_modules(True).keywords == {"engine": "cublas"}
    assert installed.backends.LocalSpecProvider.grouped_mlp_modules.__wrapped__ is installed.theirs


def test_parts_of_install_are_parts(megatron, installed, monkeypatch):
    utils = installed.moe_utils
    assert utils.is_te_min_version("2.12.0") and utils.is_te_min_version("2.13.0") and not utils.is_te_min_version("99.0.0")
    for name in [name for name in vars(utils) if name.startswith("fused_")]:
        monkeypatch.setattr(utils, name, None)
    monkeypatch.setattr(utils, "is_te_min_version", lambda version, check_equality=True: False)
    installed.adapter.install(experts=False, router=False)
    assert utils.is_te_min_version("2.12.0") and not utils.is_te_min_version("2.13.0")
    assert utils.fused_permute is not None and utils.fused_moe_aux_loss is None


def routed(tokens=40, experts=6, topk=2):
    logits = values(tokens, experts, dtype=torch.float32, seed=1) + torch.arange(experts) * 0.01
    ids = logits.topk(topk).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, ids, True)
    return values(tokens, HIDDEN, dtype=torch.float32, seed=2), torch.softmax(logits, -1) * routing_map, routing_map


@pytest.mark.parametrize("with_probs", [False, True])
def test_fused_permutation_is_megatrons_own(installed, with_probs):
    permute, unpermute = installed.moe_utils.permute, installed.moe_utils.unpermute
    x, probs, routing_map = routed()
    rows = int(routing_map.sum())
    given = probs if with_probs else None
    (own, own_probs, own_order, _, _), (got, got_probs, order, offsets, counts) = (
        permute(x, routing_map, probs=given, num_out_tokens=rows, fused=fused) for fused in (False, True))
    assert torch.equal(got, own) and offsets is None and counts is None
    assert got_probs is None if given is None else torch.equal(got_probs, own_probs)
    back = [unpermute(own, each, x.shape, probs=given, routing_map=routing_map, fused=fused)
            for each, fused in ((own_order, False), (order, True))]
    torch.testing.assert_close(back[1], back[0])


def test_fused_permutation_pads_each_expert(installed):
    x, probs, routing_map = routed()
    counts = routing_map.sum(0)
    got, got_probs, order, offsets, padded = installed.moe_utils.permute(
        x, routing_map, probs=probs, num_out_tokens=int(counts.sum()), fused=True, tokens_per_expert=counts, align_size=16)
    assert torch.equal(padded, (counts + 15) // 16 * 16) and got.size(0) == int(padded.sum())
    back = installed.moe_utils.unpermute(got * got_probs[:, None], order, x.shape, fused=True, pad_offsets=offsets)
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))


@pytest.mark.parametrize("with_probs", [False, True])
def test_fused_sort_of_chunks_is_megatrons_own(installed, with_probs):
    x, probs, _ = routed()
    sizes, order = torch.tensor([7, 0, 13, 20]), torch.tensor([2, 0, 3, 1])
    given = probs.sum(1) if with_probs else None
    own, got = (installed.moe_utils.sort_chunks_by_idxs(x, sizes, order, probs=given, fused=fused) for fused in (False, True))
    assert torch.equal(got[0], own[0]) and (given is None or torch.equal(got[1], own[1]))


@pytest.mark.parametrize("fields", [
    {"score_function": "softmax"}, {"score_function": "softmax", "use_pre_softmax": True, "scaling_factor": 2.5},
    {"score_function": "sigmoid", "expert_bias": torch.linspace(0, 1, 6)}, {"score_function": "sqrtsoftplus", "scaling_factor": 1.5}])
def test_the_fused_router_is_megatrons_own(installed, fields):
    logits = values(40, 6, dtype=torch.float32, seed=3) + torch.arange(6) * 0.01
    own, got = (installed.moe_utils.topk_routing_with_score_function(logits, 2, fused=fused, **fields) for fused in (False, True))
    torch.testing.assert_close(got[0], own[0])
    assert torch.equal(got[1], own[1])
    if fields["score_function"] == "sqrtsoftplus":
        return
    own, got = (installed.moe_utils.compute_routing_scores_for_aux_loss(logits, 2, fields["score_function"], fused=fused)
                for fused in (False, True))
    assert torch.equal(got[0], own[0])
    torch.testing.assert_close(got[1], own[1])
    loss = installed.moe_utils.switch_load_balancing_loss_func
    own, got = (loss(got[1], got[0].sum(0), 40, 2, 6, 0.01, fused=fused) for fused in (False, True))
    torch.testing.assert_close(got, own)
