"""gbmoe.compat.torchtitan in torchtitan 0.3.0 where it is installed, elsewhere in its interface as tests/compat/interfaces has it."""

import contextlib
import importlib
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gbmoe import Float8BlockScaling
from gbmoe.testing import cuda_graphs
from tests.compat import expert_rows, interfaces
from tests.compat.expert_rows import FFN, HIDDEN, ROWS, values

NAME = "gbmoe.compat.torchtitan.experts"
EXPERTS = len(expert_rows.COUNTS)


@pytest.fixture
def titan(tmp_path):
    """torchtitan's modules by their last names."""
    with interfaces.installed("torchtitan", "gbmoe.compat.torchtitan", tmp_path):
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in ("torchtitan.config", "torchtitan.models.common.moe")}


@pytest.fixture
def overridden(titan):
    """A function that makes configurations, lets torchtitan apply the override, and returns what became of them."""
    config, moe = titan["config"], titan["moe"]

    class Other(moe.GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(moe.GroupedExperts.Config):
            pass

    class Layers(config.Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(config.Configurable.Config):
            experts: moe.GroupedExperts.Config
            other: moe.GroupedExperts.Config

    def apply(entry=NAME, **fields):
        sizes = {"dim": HIDDEN, "hidden_dim": FFN, "num_experts": EXPERTS, **fields}
        layers = Layers.Config(experts=moe.GroupedExperts.Config(**sizes), other=Other.Config(**sizes))
        config.apply_overrides(config.OverrideConfig(imports=[entry]), layers)
        assert type(layers.other) is Other.Config  # experts of another formula, or quantised ones
        return layers.experts

    return apply


def parameters(dtype):
    return {"w1_EFD": values(EXPERTS, FFN, HIDDEN, dtype=dtype, seed=2, inner=HIDDEN),
            "w2_EDF": values(EXPERTS, HIDDEN, FFN, dtype=dtype, seed=3, inner=FFN),
            "w3_EFD": values(EXPERTS, FFN, HIDDEN, dtype=dtype, seed=4, inner=HIDDEN)}


def definition(x, w1_EFD, w2_EDF, w3_EFD):
    """torchtitan's formula; in bfloat16 except for float64, the reference."""
    of = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
    w1, w2, w3 = (w.to(of) for w in (w1_EFD, w2_EDF, w3_EFD))

    def expert(e, rows):
        x_RD = x[rows].to(of)
        return ((F.silu(x_RD @ w1[e].t()) * (x_RD @ w3[e].t())) @ w2[e].t()).to(x.dtype)

    return expert_rows.loop(expert, x)


def run(module, counts):
    return lambda x, **weights: torch.func.functional_call(module, weights, (x, counts))


@pytest.mark.parametrize("counted", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_torchtitans_formula(overridden, dtype, counted, device):
    module = overridden().build()
    tensors = {"x": values(ROWS, HIDDEN, dtype=dtype, seed=1), **parameters(dtype)}
    expert_rows.check(run(module, expert_rows.counts(counted, device)), definition, tensors, device=device)


@pytest.mark.gpu
def test_nobody_waits_for_the_counts(overridden):
    module = overridden().build().to("cuda", torch.bfloat16)
    module.load_state_dict(parameters(torch.bfloat16))
    x, counts = values(ROWS, HIDDEN, dtype=torch.bfloat16, seed=1).cuda().requires_grad_(), expert_rows.counts(device="cuda")
    for _ in range(2):
        with cuda_graphs.no_host_wait() if x.grad is not None else contextlib.nullcontext():  # the first call may load kernels
            module(x, counts).sum().backward()


def test_parameters_and_state_dict_are_torchtitans(titan, overridden):
    own = titan["moe"].GroupedExperts.Config(dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS).build()
    own.load_state_dict(parameters(torch.float32))
    module = overridden().build()
    assert isinstance(module, titan["moe"].GroupedExperts) and type(module) is not type(own)
    module.load_state_dict(own.state_dict(), strict=True)
    assert [(name, p.shape) for name, p in module.named_parameters()] == [(name, p.shape) for name, p in own.named_parameters()]
    x = values(expert_rows.USED, HIDDEN, dtype=torch.float32, seed=1)
    torch.testing.assert_close(module(x, expert_rows.counts()), own(x, expert_rows.counts()), rtol=2e-2, atol=2e-2)


def test_the_override_keeps_torchtitans_fields_and_takes_arguments(overridden):
    init = {"w1_EFD": torch.nn.init.zeros_}
    config = overridden((NAME, {"engine": "torch", "float8": False}), param_init=init)
    assert config.param_init is init and config.sharding_config is None
    assert (config.dim, config.hidden_dim, config.num_experts) == (HIDDEN, FFN, EXPERTS)
    module = config.build()
    assert module.engine == "torch" and module.fp8_recipe is None
    assert overridden((NAME, {"float8": True})).build().fp8_recipe == Float8BlockScaling()
    with pytest.raises(TypeError, match="tile"):
        overridden((NAME, {"tile": 128}))


@pytest.fixture
def mesh(group_of_one):
    return init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))


def test_shards_of_dtensors_get_gradients_that_are_dtensors(overridden, mesh):
    module, plain = overridden().build(), overridden().build()
    for each in (module, plain):
        each.load_state_dict(parameters(torch.float32))
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))
    x = values(ROWS, HIDDEN, dtype=torch.float32, seed=1)
    outs = [each(x, expert_rows.counts()) for each in (module, plain)]
    assert torch.equal(*outs)
    for out in outs:
        out.sum().backward()
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == (Shard(0),)
        assert torch.equal(parameter.grad.to_local(), plain.get_parameter(name).grad), name


def test_a_converter_quantised_experts_that_gbmoe_computes_in_bfloat16(overridden):
    config = overridden()
    parent = type(config)._owner

    class Quantised(parent):  # as torchtitan's converters make one of every class of experts
        @dataclass(kw_only=True, slots=True)
        class Config(parent.Config):
            pass

    with pytest.raises(TypeError, match="model.converters: expected none that quantises .* got Quantised"):
        Quantised.Config(dim=8, hidden_dim=8, num_experts=2).build()


def test_counts_were_typed_as_parts_of_a_sum(overridden, monkeypatch):
    """Under debug.spmd_typechecking; torchtitan retypes its offsets, and leaves the dispatcher's counts as they are."""
    import spmd_types

    seen = []
    monkeypatch.setattr(spmd_types, "is_type_checking", lambda: True)
    monkeypatch.setattr(spmd_types, "mutate_type", lambda tensor, axis, *, src, dst: seen.append((tensor, axis, src, dst)))
    module, counts = overridden().build(), expert_rows.counts()
    module.load_state_dict(parameters(torch.float32))
    module(torch.zeros(ROWS, HIDDEN), counts)
    assert [each[1:] for each in seen] == [(axis, spmd_types.P, spmd_types.V) for axis in ("dp", "cp")]
    assert all(each[0] is not counts for each in seen)


def test_one_graph_under_torch_compile(overridden):
    module = overridden().build()
    module.load_state_dict(parameters(torch.float32))
    x = values(ROWS, HIDDEN, dtype=torch.float32, seed=1)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, expert_rows.counts()), module(x, expert_rows.counts()))


if interfaces.is_real("torchtitan"):
    # Without a GPU torchtitan's trainer does not run. Its model, its initial values and FSDP2 with its mixed precision do.
    @pytest.mark.slow
    @pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
    def test_a_debug_model_trains_to_the_same_losses(mesh, sharded):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torchtitan.config import OverrideConfig, apply_overrides
        from torchtitan.models.common import attention
        from torchtitan.models.qwen3 import model_registry

        def losses(imports):
            spec = model_registry("debugmodel_moe", attn_backend="flex")
            spec.model.layers = spec.model.layers[:2]
            for _, _, parent, name in list(spec.model.traverse(attention.FlexAttention.Config)):  # which has no CPU
                setattr(parent, name, attention.ScaledDotProductAttention.Config())
            assert len(apply_overrides(OverrideConfig(imports=imports), spec.model)) == 2 * len(imports)
            torch.manual_seed(0)
            model = spec.model.build()
            model.init_states()
            if sharded:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                for layer in model.layers.values():
                    fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), []
            tokens = torch.randint(2048, (2, 33), generator=torch.Generator().manual_seed(1))
            positions = torch.arange(32).expand(2, 32)
            for _ in range(6):
                out = model(tokens[:, :-1], positions=positions)
                loss = F.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return torch.tensor(seen)

        own, ours = losses([]), losses([NAME])
        assert own[-1] < own[0] - 1
        torch.testing.assert_close(ours, own, rtol=5e-3, atol=0)


@pytest.mark.parametrize("version", ["0.2.2", "0.4.0"])
def test_another_release_says_so(tmp_path, version):
    with interfaces.installed("torchtitan", "gbmoe.compat.torchtitan", tmp_path, version), \
            pytest.raises(ImportError, match=rf"gbmoe.compat.torchtitan: torchtitan: expected 0.3.0, .* got {version};"):
        importlib.import_module("gbmoe.compat.torchtitan")
