"""Where gbmoe.compat.megatron is put: providers, specifications, and the functions that Megatron takes from TransformerEngine."""

import copy

import pytest
import torch

from tests.compat.expert_rows import values
from tests.compat.megatron.parts import EXPERTS, configured, groups, options_of, providers, routed


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
    assert experts_of(changed).func is megatron.adapter.GroupedExperts and options_of(experts_of(changed)) == {"engine": "torch"}
    whole = megatron.adapter.with_gbmoe_experts(spec, whole_layer=True)
    assert whole.func is megatron.adapter.GbmoeMoELayer and issubclass(whole.func, megatron.moe_layer.MoELayer)
    with pytest.raises(ValueError, match="spec: expected one with MoESubmodules in it"):
        megatron.adapter.with_gbmoe_experts([1, "two"])


@pytest.mark.parametrize("options, got", [
    ({"whole_layer": True}, "'whole_layer'; with_gbmoe_experts takes it"), ({"engin": "torch"}, "'engin'")])
def test_keywords_that_experts_do_not_take_were_found_when_a_layer_was_built(megatron, options, got):
    for call in (megatron.adapter.install, megatron.adapter.GbmoeSpecProvider):
        with pytest.raises(TypeError, match="options: expected keywords of GroupedExperts, engine, .*, got " + got):
            call(**options)
    with pytest.raises(TypeError, match="with_gbmoe_experts: options: expected keywords of GroupedExperts"):
        megatron.adapter.with_gbmoe_experts([], engin="torch")


def test_submodules_of_experts_were_no_longer_in_specifications(installed):
    def builders(kind):
        provider = kind()
        yield provider.grouped_mlp_modules(True)
        yield installed.adapter.GbmoeSpecProvider(provider).grouped_mlp_modules(False)  # in whose place install has been already
        spec = installed.moe_module_specs.get_moe_module_spec_for_backend(provider, num_experts=EXPERTS, moe_grouped_gemm=True)
        again = installed.adapter.with_gbmoe_experts(spec)
        yield from map(experts_of, (spec, again))

    for kind, theirs in installed.theirs.items():
        wanted = theirs(kind(), True).keywords["submodules"]
        for builder in builders(kind):
            assert builder.func is installed.adapter.GroupedExperts and builder.keywords["submodules"] == wanted
            made = builder(EXPERTS, configured(installed), pg_collection=groups())
            assert [name for name, _ in made.named_children()] == ["linear_fc1", "linear_fc2"]


def test_install_takes_the_place_of_grouped_experts_alone(installed):
    found = providers(installed)
    for kind in found:
        assert options_of(kind().grouped_mlp_modules(True)) == {"engine": "torch"}
        assert kind().grouped_mlp_modules(False).func is installed.experts.SequentialMLP
    installed.adapter.install(engine="cublas", permutation=False, router=False)
    for kind in found:
        assert options_of(kind().grouped_mlp_modules(True)) == {"engine": "cublas"}
        assert kind.grouped_mlp_modules.__wrapped__ is installed.theirs[kind]


def test_parts_of_install_are_parts(megatron, installed, monkeypatch):
    utils = installed.moe_utils
    assert utils.is_te_min_version("2.12.0") and utils.is_te_min_version("2.13.0") and not utils.is_te_min_version("99.0.0")
    for name in [name for name in vars(utils) if name.startswith("fused_")]:
        monkeypatch.setattr(utils, name, None)
    monkeypatch.setattr(utils, "is_te_min_version", lambda version, check_equality=True: False)
    installed.adapter.install(experts=False, router=False)
    assert utils.is_te_min_version("2.12.0") and not utils.is_te_min_version("2.13.0")
    assert utils.fused_permute is not None and utils.fused_moe_aux_loss is None


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
