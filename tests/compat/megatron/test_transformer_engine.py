"""gbmoe.compat.megatron next to TransformerEngine's experts, where TransformerEngine is installed. It needs Megatron-Core itself.

TransformerEngine's modules are made on a CPU, which their constructors refuse only where there is no GPU. They compute nothing there.
"""

import dataclasses
import functools
import importlib

import pytest
import torch
import torch.distributed as dist

from tests.compat import interfaces
from tests.compat.expert_rows import HIDDEN, values
from tests.compat.megatron.parts import EXPERTS, Group, built, configured, groups, on_a_cpu, options_of

pytest.importorskip("transformer_engine.pytorch")
if not interfaces.is_real("megatron-core"):
    pytest.skip("needs Megatron-Core itself", allow_module_level=True)
LINEARS = ("linear_fc1", "linear_fc2")


@pytest.fixture
def te_grouped_mlp(megatron, monkeypatch):
    """Makes a TEGroupedMLP of these fields, on the CPU; `single` is of (weights, biases)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    provider = importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider").TESpecProvider()

    def make(of=None, single=(False, False), **fields):
        config = configured(megatron, **fields)
        config.moe_single_grouped_weight, config.moe_single_grouped_bias = single
        of = of or groups()
        of.expt_gtp_remat = of.expt_dp_gtp_remat = Group()
        return provider.grouped_mlp_modules(True)(EXPERTS, config, pg_collection=of)

    return make


def tensors(module):
    """(name, expert) -> the tensor of this expert in the state dict, whichever form that has."""
    found = {}
    for name in LINEARS:
        linear, state = getattr(module, name), getattr(module, name).state_dict()
        for kind in ("weight", "bias")[: 1 + linear.use_bias]:
            parts = linear._split_grouped_checkpoint_tensor(state[kind], kind) if kind in state else (
                [state[f"{kind}{e}"] for e in range(EXPERTS)])
            found |= {(f"{name}.{kind}", e): part for e, part in enumerate(parts)}
    return found


@pytest.mark.parametrize("ours", [False, True], ids=["to weight0", "to weight"])
@pytest.mark.parametrize("theirs", [(False, False), (True, False), (True, True)], ids=["weight0", "weight", "weight and bias"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
def test_state_dicts_of_te_grouped_mlp_load_and_are_loaded(megatron, te_grouped_mlp, bias, theirs, ours):
    pair = [te_grouped_mlp(single=theirs, add_bias_linear=bias), built(megatron, single=ours, add_bias_linear=bias)]
    assert type(pair[0]) is megatron.experts.TEGroupedMLP and (pair[0].linear_fc1.weight0 is None) is theirs[0]
    for saved, loaded in (pair, pair[::-1]):
        with torch.no_grad():
            for part in tensors(saved).values():
                part.normal_()
        loaded.load_state_dict(saved.state_dict(), strict=True)
        wanted, got = tensors(saved), tensors(loaded)
        assert len(wanted) == 2 * EXPERTS * (1 + bias) and got.keys() == wanted.keys()
        assert all(torch.equal(got[key], wanted[key]) and bool(wanted[key].any()) for key in wanted)


def pieces(sharded):
    """What a distributed checkpoint knows of each entry, without the data."""
    if isinstance(sharded, dict):
        return {key: pieces(each) for key, each in sharded.items()}
    if isinstance(sharded, (list, tuple)):
        return [pieces(each) for each in sharded]
    if hasattr(sharded, "build"):
        return pieces(sharded.build())
    return type(sharded), {field.name: getattr(sharded, field.name) for field in dataclasses.fields(sharded) if field.name != "data"}


@pytest.mark.parametrize("rank, ranks", [(0, 1), (1, 2)])
@pytest.mark.parametrize("fields", [{}, {"add_bias_linear": True}, {"add_bias_linear": True, "gated_linear_unit": False}],
                         ids=["gated", "biases", "not gated"])
def test_distributed_checkpoints_have_te_grouped_mlps_keys_and_pieces(megatron, te_grouped_mlp, fields, rank, ranks):
    fields = {**fields, "expert_model_parallel_size": ranks}
    with on_a_cpu():
        for alone in (False, True):
            def found(module):
                metadata = {"dp_cp_group": dist.group.WORLD, "singleton_local_shards": alone}
                return pieces(module.sharded_state_dict("layer.", ((0, 1, 3),), metadata))

            def of():
                made = groups(ep=(rank, ranks))
                made.expt_tp = dist.group.WORLD
                return made

            wanted = found(te_grouped_mlp(of(), **fields))
            assert len(wanted) == 2 * EXPERTS * (3 if fields.get("add_bias_linear") else 2)
            for single in (False, True):
                assert found(built(megatron, of=of(), single=single, **fields)) == wanted


@pytest.mark.parametrize("fields", [
    {}, {"expert_model_parallel_size": 2}, {"delay_wgrad_compute": True},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}], ids=["alone", "ep", "deferred", "tp"])
def test_parameters_have_the_marks_of_te_grouped_linears(megatron, te_grouped_mlp, fields):
    def marks(module):
        return {name: {mark: value for mark, value in vars(parameter).items() if isinstance(value, (bool, int, str))}
                for name, parameter in module.named_parameters()}

    wanted, got = marks(te_grouped_mlp(groups(), add_bias_linear=True, **fields)), marks(built(megatron, add_bias_linear=True, **fields))
    assert got.keys() == wanted.keys() and all("allreduce" in each for each in wanted.values())
    for name, of in wanted.items():
        assert {mark: got[name].get(mark) for mark in of} == of, name


def experts_in(spec):
    """The builders of experts in a specification of a layer, a block or a stack."""
    if isinstance(spec, functools.partial):
        return [each for value in spec.keywords.values() for each in experts_in(value)]
    if isinstance(spec, (list, tuple)):
        return [each for value in spec for each in experts_in(value)]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        if hasattr(spec, "experts"):
            return [spec.experts]
        return [each for field in dataclasses.fields(spec) for each in experts_in(getattr(spec, field.name))]
    return []


def block(megatron, *, further=False):
    """The specification of three layers, two of them with experts; or of the layers that predict further tokens, of which there is one."""
    config = configured(megatron, num_layers=3, moe_layer_freq=[0, 1, 1], mtp_num_layers=1)
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    with on_a_cpu():
        made = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        return specs.get_gpt_mtp_block_spec(config, made, use_transformer_engine=True) if further else made


def test_specifications_of_transformer_engines_layers_get_gbmoes_experts(megatron):
    theirs, ours = megatron.experts.TEGroupedMLP, megatron.adapter.GroupedExperts
    of_block, of_layer = block(megatron), megatron.moe_module_specs.get_moe_module_spec(True, EXPERTS, True)
    of_stack = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    for spec, layers in ((of_block, 2), (of_layer, 1), (of_stack, 1), (block(megatron, further=True), 1)):
        changed = megatron.adapter.with_gbmoe_experts(spec, engine="torch")
        assert [each.func for each in experts_in(changed)] == [ours] * layers
        assert [each.func for each in experts_in(spec)] == [theirs] * layers
    (changed, of_attention) = (megatron.adapter.with_gbmoe_experts(of_block, whole_layer=True).layer_specs[1].submodules,
                               of_block.layer_specs[1].submodules)
    assert changed.mlp.func is megatron.adapter.GbmoeMoELayer and changed.self_attention == of_attention.self_attention


def test_install_reaches_transformer_engines_specifications(installed):
    made = [*experts_in(block(installed)), *experts_in(installed.moe_module_specs.get_moe_module_spec(True, EXPERTS, True))]
    assert [(each.func, options_of(each)) for each in made] == [(installed.adapter.GroupedExperts, {"engine": "torch"})] * 3
    get_submodules = importlib.import_module("megatron.core.transformer.spec_utils").get_submodules
    assert all(isinstance(get_submodules(each), installed.experts.GroupedMLPSubmodules) for each in made)
    for name in [name for name in vars(installed.moe_utils) if name.startswith("fused_")]:
        assert getattr(installed.moe_utils, name).__module__.startswith("gbmoe."), name


def test_a_specification_made_at_import_kept_te_grouped_mlp_after_install(megatron, installed):
    """HybridModel's is made while its module is imported, which may be before `install`."""
    specs = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs")
    for engine in ("torch", "cublas"):
        installed.adapter.install(engine=engine)
        (builder,) = experts_in(specs.hybrid_stack_spec)
        assert builder.func is megatron.adapter.GroupedExperts and options_of(builder) == {"engine": engine}
        assert isinstance(builder.keywords["submodules"], megatron.experts.GroupedMLPSubmodules)
        (builder,) = experts_in(specs.hybrid_inference_stack_spec)
        assert builder.func is megatron.experts.InferenceGroupedMLP
    installed.adapter.install(experts=False, engine="reference")
    assert options_of(experts_in(specs.hybrid_stack_spec)[0]) == {"engine": "cublas"}


def test_a_float8_layer_was_recomputed_without_its_context(megatron, monkeypatch):
    """TransformerEngine's modules in it, as those of shared experts, ask in backward for the context of forward."""
    collection = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    spec = megatron.moe_module_specs.get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=True)
    seen = []

    def te_checkpoint(function, distributed, tracker, group, *given):
        seen.append((distributed, tracker, group))
        return function(*given)

    with on_a_cpu():
        config = configured(megatron, recompute_granularity="selective", recompute_modules=["moe"])
        layer = megatron.adapter.with_gbmoe_experts(spec, whole_layer=True)(
            config=config, layer_number=1, pg_collection=collection.use_mpu_process_groups())
        assert layer.moe_layer_recompute and layer.training
        config.fp8 = "e4m3"
        monkeypatch.setattr(megatron.moe_layer, "te_checkpoint", te_checkpoint)
        x = values(40, 1, HIDDEN, dtype=torch.float32, seed=2)
        out, _ = layer(x)
        assert [each[0] for each in seen] == [False] and seen[0][2] is layer.tp_group
        assert torch.equal(out, layer.eval()(x)[0]) and len(seen) == 1


def test_a_layer_with_latent_projections_is_megatrons(megatron):
    """The projections are TransformerEngine's, which need a GPU to be computed: here torch computes them of the same parameters."""
    collection = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection
    spec = megatron.moe_module_specs.get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=True)

    def on_torch(projection):
        projection.forward = lambda x: (torch.nn.functional.linear(x, projection.weight), None)

    with on_a_cpu():
        config = configured(megatron, moe_latent_size=16, moe_shared_expert_intermediate_size=40, init_method_std=0.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)  # while TransformerEngine's modules are made
            layers = [megatron.adapter.with_gbmoe_experts(spec, whole_layer=whole)(
                config=config, layer_number=1, pg_collection=collection.use_mpu_process_groups()) for whole in (False, True)]
        layers[1].load_state_dict(layers[0].state_dict())
        results = []
        for layer in layers:
            for projection in (layer.fc1_latent_proj, layer.fc2_latent_proj):
                assert type(projection) is megatron.transformer_engine.TELinear
                on_torch(projection)
            x = values(40, 1, HIDDEN, dtype=torch.float32, seed=2).requires_grad_()
            out, _ = layer(x)
            out.backward(values(40, 1, HIDDEN, dtype=torch.float32, seed=3))
            results.append({"out": out, "x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}})
        assert {"fc1_latent_proj.weight", "fc2_latent_proj.weight", "shared_experts.linear_fc1.weight"} < results[0].keys()
        for name, wanted in results[0].items():
            assert wanted.abs().max() > 0.01, name
            torch.testing.assert_close(results[1][name], wanted, rtol=1e-4, atol=1e-5)
