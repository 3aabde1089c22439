"""gbmoe.compat.torchtitan.moe_layer in torchtitan 0.3.0 where it is installed, elsewhere in its interface."""

import functools
import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gbmoe.testing import exact_inputs
from tests.compat import interfaces
from tests.parallel import processes

NAMES = {what: f"gbmoe.compat.torchtitan.{what}" for what in ("experts", "moe_layer")}
HIDDEN, FFN, EXPERTS, TOP_K = 24, 40, 6, 3
PLACES = ("config", "models.common.moe", "models.common.token_dispatcher", "models.common.linear")


@pytest.fixture
def titan(tmp_path):
    with interfaces.installed("torchtitan", "gbmoe.compat.torchtitan", tmp_path):
        modules = [importlib.import_module(f"torchtitan.{place}") for place in PLACES]
        yield SimpleNamespace(config=modules[0], moe=modules[1], dispatchers=modules[2], linear=modules[3])


def layers(titan, imports, inner=None):
    """A configuration with one MoE, after the overrides."""
    moe, config = titan.moe, titan.config
    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=EXPERTS, top_k=TOP_K, score_func="softmax", gate=titan.linear.Linear.Config(in_features=HIDDEN, out_features=EXPERTS))
    routed = moe.RoutedExperts.Config(
        inner_experts=(inner or moe.GroupedExperts.Config)(dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS),
        token_dispatcher=titan.dispatchers.LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K))

    class Model(config.Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(config.Configurable.Config):
            layer: moe.MoE.Config

    made = Model.Config(layer=moe.MoE.Config(num_experts=EXPERTS, routed_experts=routed, router=router, load_balance_coeff=None))
    assert len(config.apply_overrides(config.OverrideConfig(imports=imports), made)) == len(imports)
    return made.layer


def initialised(module, dtype=torch.float32):
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(exact_inputs.exact_values(*parameter.shape, dtype=torch.float32, device="cpu", seed=seed,
                                                      scale=exact_inputs.fan_in_scale(HIDDEN)))
    return module.to(dtype)


def tokens(dtype=torch.float32, seed=9):
    return exact_inputs.exact_values(2, 11, HIDDEN, dtype=dtype, device="cpu", seed=seed).requires_grad_()


def test_the_layer_is_torchtitans_with_its_parameters_router_and_counts(titan):
    own, ours = (initialised(layers(titan, imports).build()) for imports in ([], [NAMES["moe_layer"]]))
    ours.load_state_dict(own.state_dict(), strict=True)
    results = []
    for module in (own, ours):
        x = tokens()
        exact_inputs.poison("cpu")
        out = module(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in module.parameters()), module.tokens_per_expert_E])
    assert type(own.routed_experts) is not type(ours.routed_experts) and type(own) is type(ours)
    for own_result, our_result in zip(*results):
        scale = own_result.abs().max().item()
        torch.testing.assert_close(our_result, own_result, rtol=0.02, atol=0.01 * scale)
    assert results[0][0].abs().max() > 0.01


def test_arguments_reach_the_experts_and_any_dispatcher_is_taken(titan):
    cfg = layers(titan, [(NAMES["moe_layer"], {"engine": "torch", "transport": "exchange"})])
    assert type(cfg.routed_experts.token_dispatcher) is titan.dispatchers.AllToAllTokenDispatcher.Config
    module = cfg.build().routed_experts
    assert (module.engine, module.transport, module.fp8_recipe, module.spread) == ("torch", "exchange", None, None)
    with pytest.raises(ValueError, match="transport: expected one of auto, peer_memory, exchange, got 'nvlink'"):
        layers(titan, [(NAMES["moe_layer"], {"transport": "nvlink"})]).build()


def test_experts_of_another_formula_were_computed_as_silu_gated(titan):
    class Other(titan.moe.GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(titan.moe.GroupedExperts.Config):
            pass

    with pytest.raises(TypeError, match="inner_experts: expected torchtitan's GroupedExperts.Config .*Other.Config"):
        layers(titan, [NAMES["moe_layer"]], inner=Other.Config).build()


def test_shards_that_fsdp_has_not_gathered_say_so(titan):
    module = initialised(layers(titan, [NAMES["moe_layer"]]).build())
    held = module.routed_experts.inner_experts
    held.w1_EFD = torch.nn.Parameter(held.w1_EFD.data[:3])
    with pytest.raises(ValueError, match="inner_experts: expected the weights of 6 experts when the layer runs, got 3"):
        module(tokens())


def test_types_of_spmd_are_refused(titan, monkeypatch):
    import spmd_types

    monkeypatch.setattr(spmd_types, "is_type_checking", lambda: True)
    with pytest.raises(NotImplementedError, match="debug.spmd_typechecking: expected false"):
        initialised(layers(titan, [NAMES["moe_layer"]]).build()).routed_experts(tokens(), *[torch.zeros(2, 11, 3)] * 2, None)


@pytest.mark.slow
def test_one_graph_under_torch_compile(titan):
    module = initialised(layers(titan, [NAMES["moe_layer"]]).build()).routed_experts
    x, ids = tokens().detach(), torch.arange(66).view(2, 11, 3) % EXPERTS
    arguments = (x, torch.rand(2, 11, 3), ids, torch.zeros(EXPERTS))
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(*arguments), module(*arguments))


# ------------------------------------------------------------------------------------- several ranks, without torchtitan


def _inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    count = (7, 12)[rank]
    return (torch.randn(count, HIDDEN, generator=generator).bfloat16().requires_grad_(),
            torch.randint(EXPERTS, (count, TOP_K), generator=generator), torch.rand(count, TOP_K, generator=generator).requires_grad_())


def _weights():
    generator = torch.Generator().manual_seed(9)
    return [(torch.randn(EXPERTS, *shape, generator=generator) * HIDDEN**-0.5).bfloat16()
            for shape in ((FFN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN))]


def _on_a_rank(rank):
    from gbmoe.compat._spread_experts import SpreadExperts

    spread = SpreadExperts(dist.group.WORLD, EXPERTS, "cpu")
    with pytest.raises(ValueError, match="experts: expected a multiple of 2 ranks, got 5"):
        SpreadExperts(dist.group.WORLD, 5, "cpu")
    with pytest.raises(ValueError, match="transport: expected 'auto' or 'exchange', .* CUDA devices only"):
        SpreadExperts(dist.group.WORLD, EXPERTS, "cpu", "peer_memory")
    x, ids, scores = _inputs(rank)
    weights = [w[rank * 3 : rank * 3 + 3].clone().requires_grad_() for w in _weights()]
    exact_inputs.poison("cpu")
    out = spread(x, ids, scores, *weights)
    out.float().square().sum().backward()
    return out.detach(), x.grad, scores.grad, *(w.grad for w in weights)


@pytest.mark.slow
def test_experts_over_two_ranks_are_those_of_one(tmp_path):
    from gbmoe.compat._spread_experts import routed_experts

    weights = [w.requires_grad_() for w in _weights()]
    expected = []
    for rank in range(2):
        x, ids, scores = _inputs(rank)
        out = routed_experts(x, ids, scores, *weights)
        out.float().square().sum().backward()
        expected.append([out.detach(), x.grad, scores.grad])
    for rank, (*own, w1, w2, w3) in enumerate(processes.run(_on_a_rank, 2, tmp_path)):
        for got, want in zip(own, expected[rank]):
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * want.abs().max().item())
        for got, w in zip((w1, w2, w3), weights):
            want = w.grad[rank * 3 : rank * 3 + 3]
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * want.abs().max().item())


# --------------------------------------------------------------------------------------------------- in torchtitan itself


# In torch before 2.14 fully_shard refuses the plain parameters of "spmd_types", whoever computes the experts.
FSDP_TAKES_SPMD_TYPES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def _all_to_all(outputs, inputs, group=None, **_):
    """torch.distributed's, of parts of any sizes, for torchtitan's own dispatcher: gloo's wants equal ones."""
    sizes = [[part.size(0) for part in parts] for parts in (outputs, inputs)]
    whole = torch.cat(outputs)
    dist.all_to_all_single(whole, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, whole.split(sizes[0])):
        output.copy_(part)


def _losses(rank, world, imports, parallelism, dims):
    """Six steps of its debug model by its own parallelisation: FSDP2 with mixed precision, and an "ep" mesh of all ranks. Where FSDP2
    does not take the backend's parameters, the gradients of those that all ranks have are summed here."""
    from torchtitan.config import CompileConfig, OverrideConfig, TrainingConfig, apply_overrides
    from torchtitan.distributed.utils import get_spmd_context
    from torchtitan.models.common import attention
    from torchtitan.models.qwen3 import model_registry
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    spec = model_registry("debugmodel_moe", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for _, _, parent, name in list(spec.model.traverse(attention.FlexAttention.Config)):  # which has no CPU
        setattr(parent, name, attention.ScaledDotProductAttention.Config())
    set_qwen3_sharding_config(spec.model, enable_sp=False, enable_ep=world > 1)
    assert len(apply_overrides(OverrideConfig(imports=imports), spec.model)) == 2 * len(imports)
    model = spec.model.build()
    sharded = world == 1 or parallelism.spmd_backend != "spmd_types" or FSDP_TAKES_SPMD_TYPES
    parallelize_qwen3(model, parallel_dims=dims, training=TrainingConfig(), parallelism=parallelism, compile_config=CompileConfig(),
                      ac_config=None, dump_folder="", skip_dp=not sharded)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no other
            module.set_force_sum_reduction_for_comms(True)
    torch.manual_seed(0)
    model.init_states()
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), []
    tokens = torch.randint(2048, (2, 33), generator=torch.Generator().manual_seed(1 + rank))
    context = get_spmd_context(parallel_dims=dims)
    for _ in range(6):
        with context():
            out = model(tokens[:, :-1], positions=torch.arange(32).expand(2, 32))
            loss = F.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten()) / world
            loss.backward()
        if not sharded:
            for name, parameter in model.named_parameters():
                if "inner_experts" not in name:
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen.append(total.item())
    return torch.tensor(seen)


def _losses_of_all(rank, world, backend):
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend

    dist.all_to_all = _all_to_all
    parallel_dims.device_type = "cpu"  # which it takes from what torch was built for
    set_spmd_backend(backend)
    parallelism = ParallelismConfig(data_parallel_shard_degree=world, expert_parallel_degree=world, spmd_backend=backend)
    dims = ParallelDims.from_config(parallelism, world)  # once: fully_shard asks for the same meshes
    dims.build_mesh()
    return [_losses(rank, world, imports, parallelism, dims) for imports in ([], [NAMES["experts"]], [NAMES["moe_layer"]])]


if interfaces.is_real("torchtitan"):
    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["partial_dtensor", "spmd_types"])
    @pytest.mark.parametrize("world", [1, 2])
    def test_a_debug_model_trains_to_the_same_losses(tmp_path, world, backend):
        """Also under the default of parallelism.spmd_backend, "spmd_types"."""
        own, *ours = processes.run(functools.partial(_losses_of_all, world=world, backend=backend), world, tmp_path, timeout=600.0)[0]
        assert own[-1] < own[0] - 1
        for each in ours:
            torch.testing.assert_close(each, own, rtol=5e-3, atol=0)
