"""Adapters of a layer's experts: by name, active or not, merged, saved; what cannot have them says so."""

import copy

import pytest
import torch
import torch.distributed as dist

import gbmoe
from gbmoe import WeightLayout
from gbmoe.layers import Arguments
from gbmoe.testing import accuracy
from tests.forked_python import spawn
from tests.test_weight_layout import LAYOUTS, ids

COMMON = dict(hidden_size=16, ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, bias=False, fp16=False, device="cpu")


def make(seed=0, **options):
    torch.manual_seed(seed)
    return gbmoe.dMoE(Arguments(**{**COMMON, "mlp_type": "glu", **options})).double()


def rows():
    return torch.randn(5, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def trained(layer, name, seed=1, **options):
    """An adapter whose second factors are no zeros."""
    for number, parameter in enumerate(gbmoe.add_adapter(layer, name, **{"rank": 4, "alpha": 6, **options})):
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(100 * seed + number))
    return layer.experts.mlp.adapters[name]


def changed_by_hand(layer, adapters):
    """A layer without adapters whose weights have the changes of these."""
    other = copy.deepcopy(layer)
    for name in list(other.experts.mlp.adapters):
        gbmoe.remove_adapter(other, name)
    for adapter in adapters:
        for name in adapter.targets:
            delta = torch.bmm(getattr(adapter, f"{name}_b"), getattr(adapter, f"{name}_a")) * adapter.scale
            weight = getattr(other.experts.mlp, name)
            weight.data += (delta.transpose(1, 2) if name == "w2" else delta).reshape(weight.shape)
    return other


@pytest.mark.parametrize("options", [{}, {"mlp_type": "mlp"}, {"one_matrix_per_expert": True}, {"weight_layout": WeightLayout()}],
                         ids=["glu", "mlp", "stacked", "layout"])
def test_an_adapter_is_a_change_of_the_weights(options):
    layer, x = make(**options), rows()
    before = layer(x)
    adapter = trained(layer, "task", rank_stabilised=True)
    assert adapter.scale == 3
    assert adapter.targets == (("w1", "w2") if options.get("mlp_type") == "mlp" else ("w1", "v1", "w2"))
    assert not torch.allclose(layer(x), before)
    assert accuracy.relative_error(layer(x), changed_by_hand(layer, [adapter])(x)) < 1e-12


def test_a_new_adapter_changes_nothing_and_trains_alone():
    layer, x = make(), rows()
    before = layer(x)
    parameters = gbmoe.add_adapter(layer, "task", rank=8)
    assert torch.equal(layer(x), before)
    layer(x).square().sum().backward()
    assert [p.grad is not None for p in parameters] == [True] * 6
    assert all(getattr(layer.experts.mlp, name).grad is None for name in ("w1", "w2", "v1"))
    other = make()
    gbmoe.add_adapter(other, "task", rank=8, freeze=False, targets=["w2"], dtype=torch.float32)
    other(x).square().sum().backward()
    assert other.experts.mlp.w1.grad is not None and other.experts.mlp.adapters["task"].w2_b.grad.dtype == torch.float32


def test_adapters_by_name_are_active_together_or_not():
    layer, x = make(), rows()
    before = layer(x)
    one, two = trained(layer, "one"), trained(layer, "two", seed=2, rank=3, targets=("w1", "w2"))
    for names, adapters in (("one", [one]), ("two", [two]), (("one", "two"), [one, two]), ((), [])):
        if names != "one":
            gbmoe.set_adapters(layer, names)
        assert accuracy.relative_error(layer(x), changed_by_hand(layer, adapters)(x)) < 1e-12, names
    assert torch.equal(layer(x), before)
    gbmoe.remove_adapter(layer, "one")
    gbmoe.remove_adapter(layer, "two")
    assert not any("adapters" in key for key in layer.state_dict())


def test_merged_adapters_were_added_twice():
    layer, x = make(), rows()
    trained(layer, "one"), trained(layer, "two", seed=2)
    gbmoe.set_adapters(layer, ["one", "two"])
    expected, weights = layer(x), {name: getattr(layer.experts.mlp, name).clone() for name in ("w1", "w2", "v1")}
    for _ in range(2):
        gbmoe.merge_adapters(layer)
        assert accuracy.relative_error(layer(x), expected) < 1e-12
    with pytest.raises(ValueError, match=r"set_adapters: 'experts.mlp': expected adapters that are not merged .*, got \['one', 'two'\]"):
        gbmoe.set_adapters(layer, "one")
    merged = copy.deepcopy(layer)
    gbmoe.unmerge_adapters(layer)
    assert accuracy.relative_error(layer(x), expected) < 1e-12
    for name, weight in weights.items():
        assert accuracy.relative_error(getattr(layer.experts.mlp, name), weight) < 1e-12
    for name in ("one", "two"):
        gbmoe.remove_adapter(merged, name)
    assert accuracy.relative_error(merged(x), expected) < 1e-12


def test_factors_that_were_written_while_merged_were_subtracted_from_the_weights():
    layer = make()
    adapter = trained(layer, "task")
    weights = {name: getattr(layer.experts.mlp, name).detach().clone() for name in ("w1", "v1", "w2")}
    state = {key: torch.zeros_like(value) for key, value in gbmoe.adapter_state_dict(layer, "task").items()}
    gbmoe.merge_adapters(layer)
    with pytest.raises(ValueError, match="load_adapter_state_dict: 'experts.mlp.task': expected an adapter that is not merged"):
        gbmoe.load_adapter_state_dict(layer, "task", state)
    gbmoe.unmerge_adapters(layer)
    assert all(torch.allclose(getattr(layer.experts.mlp, name), weight) for name, weight in weights.items())
    gbmoe.load_adapter_state_dict(layer, "task", state)
    gbmoe.merge_adapters(layer)
    with torch.no_grad():
        adapter.w1_a.add_(1.0)
    with pytest.raises(ValueError, match="unmerge_adapters: 'experts.mlp.task': expected factors that have not been written since"):
        gbmoe.unmerge_adapters(layer)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda layer: layer.float(), lambda layer: layer.to("cpu"),
                                    lambda layer: layer.requires_grad_(False)], ids=["copied", "float", "moved", "frozen"])
def test_a_merged_layer_that_was_changed_as_a_whole_is_unmerged(change):
    layer = make()
    trained(layer, "task")
    before = layer.experts.mlp.w1.detach().clone()
    gbmoe.merge_adapters(layer)
    layer = change(layer)
    gbmoe.unmerge_adapters(layer)
    torch.testing.assert_close(layer.experts.mlp.w1.detach().double(), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["active", "merged", "training", "keys", "lora"])
def test_names_of_attributes_were_no_value_errors(name):
    layer = make()
    with pytest.raises(ValueError, match="add_adapter: name: expected a name without dots"):
        gbmoe.add_adapter(layer, name, rank=4)
    assert layer.experts.mlp.adapters is None and layer.experts.mlp.w1.requires_grad


def test_an_adapter_without_a_matrix_froze_all_the_same():
    layer = make(mlp_type="mlp")
    with pytest.raises(ValueError, match="add_adapter: targets: expected a matrix that some layer has"):
        gbmoe.add_adapter(layer, "task", rank=4, targets=["v1"])
    assert layer.experts.mlp.w1.requires_grad


def test_state_dicts_of_one_adapter_and_of_the_model():
    model, x = torch.nn.Sequential(make(), make(seed=1)), rows()
    gbmoe.add_adapter(model, "task", rank=4)
    for layer in model:
        for parameter in layer.experts.mlp.adapters["task"].parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    state = gbmoe.adapter_state_dict(model, "task")
    assert len(state) == 12 and state["1.experts.mlp.w2_b"].shape == (4, 16, 4)
    other = torch.nn.Sequential(make(), make(seed=1))
    gbmoe.add_adapter(other, "another", rank=4)
    gbmoe.load_adapter_state_dict(other, "another", state)
    assert torch.equal(other(x), model(x))
    third = torch.nn.Sequential(make(seed=5), make(seed=6))
    gbmoe.add_adapter(third, "task", rank=4)
    third.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(third(x), model(x))
    with pytest.raises(ValueError, match="load_adapter_state_dict: state: expected the keys"):
        gbmoe.load_adapter_state_dict(other, "another", dict(list(state.items())[1:]))


def test_what_cannot_have_an_adapter_is_refused():
    for options in ({"mlp_impl": "bmm"}, {"mlp_impl": "reference"}, {"activation_fn": torch.sin},
                    {"fp8_recipe": gbmoe.Float8BlockScaling()}):
        with pytest.raises(ValueError, match="add_adapter: 'experts.mlp' of model: expected mlp_impl 'gbmoe', an activation with a kernel"):
            gbmoe.add_adapter(gbmoe.dMoE(Arguments(**COMMON, bf16=True, **options)), "task", rank=4)
    layer = make()
    gbmoe.add_adapter(layer, "task", rank=4)
    for arguments, message in (({"name": "task"}, "name: expected none that 'experts.mlp' of model has, got 'task'"),
                               ({"name": "a.b"}, "name: expected a name without dots"), ({"name": "keys"}, "name: expected a name"),
                               ({"rank": 0}, "rank: expected at least 1, got 0"), ({"targets": ["w3"]}, "targets: expected some of w1"),
                               ({"model": torch.nn.Linear(2, 2)}, "model: expected a module with at least one gbmoe.dMoE")):
        with pytest.raises(ValueError, match=f"add_adapter: {message}"):
            gbmoe.add_adapter(**{"model": layer, "name": "other", "rank": 4, **arguments})
    for function in (gbmoe.set_adapters, gbmoe.remove_adapter, gbmoe.adapter_state_dict):
        with pytest.raises(ValueError, match="name: expected one of task, got 'tusk'"):
            function(layer, "tusk")


def test_ways_that_compute_with_weights_alone_would_lose_adapters():
    layer = make()
    gbmoe.add_adapter(layer, "task", rank=4)
    for call in (layer.experts.mlp.weights_EFH, lambda: layer.experts.mlp.in_chunks([(0, 2), (2, 4)])):
        with pytest.raises(ValueError, match="adapters: expected none that is active, .* with experts in mapped memory, in chunks"):
            call()
    gbmoe.set_adapters(layer, ())
    layer.experts.mlp.weights_EFH()


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_adapters_of_another_layout_were_refused(layout):
    """Factors, results, gradients, states and merged weights are those of MegaBlocks' layout, whatever tensors have gate and up."""
    plain, layer, x = make(), make(weight_layout=layout), rows()
    found = []
    for each in (plain, layer):
        adapters = trained(each, "one"), trained(each, "two", seed=2, rank=3, targets=("v1", "w2"))
        gbmoe.set_adapters(each, ["one", "two"])
        out = each(x)
        out.square().sum().backward()
        assert all(p.grad is None for p in each.experts.mlp.own_weights())
        found.append([out, *(p.grad for adapter in adapters for p in adapter.parameters())])
    for one, other in zip(*found, strict=True):
        assert accuracy.relative_error(other, one) < 1e-12
    assert gbmoe.adapter_state_dict(layer, "one").keys() == gbmoe.adapter_state_dict(plain, "one").keys()
    assert list(layer.state_dict()) == list(plain.state_dict())
    before = {name: p.detach().clone() for name, p in layer.experts.mlp.named_parameters()}
    for change in (gbmoe.merge_adapters, gbmoe.unmerge_adapters):
        change(plain)
        change(layer)
        for (name, one), (_, other) in zip(plain.state_dict().items(), layer.state_dict().items(), strict=True):
            assert accuracy.relative_error(other, one) < 1e-12, name
        assert accuracy.relative_error(layer(x), found[0][0]) < 1e-12
    assert all(accuracy.relative_error(p, before[name]) < 1e-12 for name, p in layer.experts.mlp.named_parameters())
    gbmoe.remove_adapter(layer, "two")
    gbmoe.remove_adapter(plain, "two")
    layer.load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.slow
def test_one_graph_of_a_compiled_layer():
    layer, x = make(), rows()
    trained(layer, "task")
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def rank_of_two(rank, store):
    """Half of the experts on each rank: results and gradients of factors are those of one process, chunks are refused."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone, layer = make(), make(moe_expert_model_parallelism=True, expert_parallel_chunks=1)
    trained(alone, "task")
    mine = slice(2 * rank, 2 * rank + 2)
    pairs = list(zip(gbmoe.add_adapter(layer, "task", rank=4, alpha=6), alone.experts.mlp.adapters["task"].parameters()))
    x_of_rank = torch.stack([rows(), rows().flip(0)])
    with torch.no_grad():
        for own, whole in pairs:
            own.copy_(whole[mine])
    expected = [alone(x) for x in x_of_rank]
    found = layer(x_of_rank[rank])
    assert accuracy.relative_error(found, expected[rank]) < 1e-12
    torch.stack(expected).square().sum(tuple(range(1, 4))).mean().backward()
    found.square().sum().backward()
    for own, whole in pairs:
        assert accuracy.relative_error(own.grad, whole.grad[mine]) < 1e-12 and own.expert_model_parallel
    chunks = make(moe_expert_model_parallelism=True, expert_parallel_chunks=2)
    gbmoe.add_adapter(chunks, "task", rank=4)
    with pytest.raises(ValueError, match="adapters: expected none that is active"):
        chunks(x_of_rank[rank])
    dist.destroy_process_group()


@pytest.mark.slow
def test_experts_spread_over_ranks(tmp_path):
    spawn(rank_of_two, (tmp_path / "store",), nprocs=2)
