"""gbmoe.compat.olmo_core in OLMo-core 3.0.0 where it is installed, elsewhere in its interface; v1 through grouped_gemm's name."""

import contextlib
import importlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gbmoe.compat import grouped_gemm
from gbmoe.testing import exact_inputs
from tests.compat import expert_rows, interfaces
from tests.compat.expert_rows import FFN, HIDDEN, ROWS, values

EXPERTS = len(expert_rows.COUNTS)
LIMIT = 0.5  # of gpt_oss_swiglu, which some rows exceed


@pytest.fixture
def olmo(tmp_path):
    with interfaces.installed("ai2-olmo-core", "gbmoe.compat.olmo_core", tmp_path):
        theirs = importlib.import_module("olmo_core.nn.moe.v2.routed_experts")
        build = theirs.RoutedExpertsConfig.build
        yield SimpleNamespace(theirs=theirs, DType=importlib.import_module("olmo_core.config").DType,
                              fp8_config=getattr(theirs, "MoERowwiseFP8Config", SimpleNamespace),
                              ours=importlib.import_module("gbmoe.compat.olmo_core"))
        theirs.RoutedExpertsConfig.build = build


def built(olmo, dtype=torch.bfloat16, **fields):
    olmo.ours.register()
    return olmo.theirs.RoutedExpertsConfig(d_model=HIDDEN, hidden_size=FFN, num_experts=EXPERTS, dtype=olmo.DType.from_pt(dtype),
                                           **{"bias": False, **fields}).build()


def parameters(module, dtype):
    inner = {"w_up_gate": HIDDEN, "w_down": FFN, "b_up_gate": 1, "b_down": 1}
    return {name: values(*p.shape, dtype=dtype, seed=seed, inner=inner[name])
            for seed, (name, p) in enumerate(module.named_parameters(), 2)}


def definition(activation):
    def activated(y):
        if activation == "swiglu":
            up, gate = y.chunk(2, dim=-1)
            return up * F.silu(gate)
        if activation == "relu2":
            return F.relu(y).square()
        gate, up = y[..., ::2].clamp(max=LIMIT), y[..., 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    def whole(x, w_up_gate, w_down, b_up_gate=None, b_down=None, row_weights=None):
        def expert(e, rows):
            y = x[rows] @ w_up_gate[e].t()
            y = activated(y if b_up_gate is None else y + b_up_gate[e])
            y = y if row_weights is None else y * row_weights[rows, None]
            return y @ w_down[e] if b_down is None else y @ w_down[e] + b_down[e]

        return expert_rows.loop(expert, x)

    return whole


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss_swiglu", "relu2"])
@pytest.mark.parametrize("more", ["bias", "row_weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_olmos_formula(olmo, activation, more, dtype):
    module = built(olmo, dtype, activation=activation, activation_limit=LIMIT, bias=more == "bias")
    tensors = {"x": values(ROWS, HIDDEN, dtype=dtype, seed=1), **parameters(module, dtype)}
    if more == "row_weights":
        tensors["row_weights"] = values(ROWS, dtype=dtype, seed=8)

    def run(x, row_weights=None, **weights):
        return torch.func.functional_call(module, weights, (x, expert_rows.counts()), {"row_weights": row_weights})

    expert_rows.check(run, definition(activation), tensors, rowwise=("x", "row_weights") if more == "row_weights" else ("x",))


def test_parameters_are_olmos_and_register_reaches_its_configuration(olmo):
    module = built(olmo)
    assert type(module) is olmo.ours.RoutedExperts and isinstance(module, olmo.theirs.RoutedExperts)
    assert [(name, list(p.shape)) for name, p in module.named_parameters()] == [
        ("w_up_gate", [EXPERTS, 2 * FFN, HIDDEN]), ("w_down", [EXPERTS, FFN, HIDDEN])]
    olmo.ours.register(engine="torch")
    config = olmo.theirs.RoutedExpertsConfig(d_model=8, hidden_size=8, num_experts=2, bias=False, dtype=olmo.DType.from_pt(torch.bfloat16))
    assert config.build().engine == "torch" and module.engine == "auto"


@pytest.mark.parametrize("more", ["", "row_weights"])
@pytest.mark.parametrize("shared", [False, True], ids=["own memory", "x's memory"])
def test_buffers_of_rowwise_expert_parallelism_were_filled_by_olmos_experts(olmo, more, shared):
    """The results are in the one that other ranks read, and the gradient of x in the other, which may be x."""
    module, dtype = built(olmo), torch.bfloat16
    weights = parameters(module, dtype)
    module.load_state_dict(weights)
    scores = values(ROWS, dtype=dtype, seed=8) if more else None
    plain, placed = (values(ROWS, HIDDEN, dtype=dtype, seed=1).requires_grad_() for _ in range(2))
    upstream = values(ROWS, HIDDEN, dtype=dtype, seed=9)
    exact_inputs.poison("cpu")
    expected = module(plain, expert_rows.counts(), row_weights=scores)
    expected.backward(upstream)
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    results = torch.full_like(plain, math.nan, requires_grad=False)
    inner = placed * 1  # as the dispatcher's, no leaf
    gradient = inner.detach() if shared else torch.full_like(plain, math.nan, requires_grad=False)
    out = module(inner, expert_rows.counts(), row_weights=scores, down_proj_out=results.detach(), up_proj_input_grad_out=gradient)
    assert out.data_ptr() == results.data_ptr() and out.shape == results.shape and out.requires_grad
    assert torch.equal(results, expected) and results.norm() > 0.1
    out.backward(upstream)
    assert torch.equal(gradient, plain.grad) and torch.equal(placed.grad, plain.grad) and plain.grad.norm() > 0.1
    for parameter, expected in zip(module.parameters(), gradients):
        assert torch.equal(parameter.grad, expected)


def test_buffers_that_do_not_fit_say_so(olmo):
    module, x = built(olmo), values(ROWS, HIDDEN, dtype=torch.bfloat16, seed=1)
    for name, buffer in (("down_proj_out", x[1:]), ("up_proj_input_grad_out", x.float())):
        with pytest.raises(ValueError, match=rf"{name}: expected the shape and dtype of x, .* got .*{buffer.size(0)}"):
            module(x, expert_rows.counts(), **{name: buffer})
    with pytest.raises(NotImplementedError, match="row_weights: expected None for experts with biases"):
        built(olmo, bias=True)(x, expert_rows.counts(), row_weights=torch.ones(ROWS))


def test_olmos_own_float8_bypassed_gbmoe(olmo, monkeypatch):
    said = "rowwise_fp8: expected None, or enabled=False, .*fp8_recipe"
    with pytest.raises(ValueError, match=said):
        built(olmo, rowwise_fp8=olmo.fp8_config(enabled=True))
    module = built(olmo, rowwise_fp8=olmo.fp8_config(enabled=False))
    module.load_state_dict(parameters(module, torch.bfloat16))
    x = values(ROWS, HIDDEN, dtype=torch.bfloat16, seed=1)
    assert torch.isfinite(module(x, expert_rows.counts(), use_rowwise_fp8=True)).all()
    module.rowwise_fp8 = SimpleNamespace(enabled=True)
    with pytest.raises(ValueError, match=said):
        module(x, expert_rows.counts())
    monkeypatch.setenv("OLMO_PROFILE_ROUNDED_WGRAD", "1")
    with pytest.raises(ValueError, match="OLMO_PROFILE_ROUNDED_WGRAD: expected unset"):
        built(olmo)


def test_parts_of_the_experts_bypassed_gbmoe(olmo):
    module, x = built(olmo), values(ROWS, HIDDEN, dtype=torch.bfloat16, seed=1)
    with pytest.raises(NotImplementedError, match="forward_row_offset: expected a call of forward"):
        module.forward_row_offset(x, expert_rows.counts(), expert_start=0, expert_end=1, row_start=torch.tensor(0))
    with pytest.raises(NotImplementedError, match="act_and_down: expected a call of forward"):
        module.act_and_down(x, expert_rows.counts())


def test_a_block_that_reads_the_weights_itself_bypassed_gbmoe(olmo):
    """With ep.path="rowwise_wave" OLMo-core's block gives the weights to an autograd.Function of its own."""
    module, seen = built(olmo), []
    mesh = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)

    class Meshes:
        def __getitem__(self, names):
            seen.append(names)
            return mesh

    module.apply_ep(Meshes())  # without a block
    assert seen[0] == ("ep_dp", "ep_mp")
    for path in ("rowwise_nvshmem", "rowwise_wave"):
        block = SimpleNamespace(ep=SimpleNamespace(path=path))
        module.w_up_gate._moe_rowwise_fp8_cache_owner = lambda block=block: block
        with pytest.raises(ValueError, match="ep.path: expected sync_1d, .* got rowwise_wave") if path == "rowwise_wave" else \
                contextlib.nullcontext():
            module.apply_ep(Meshes())


if interfaces.is_real("ai2-olmo-core"):
    @pytest.mark.parametrize("path", ["sync_1d", "rowwise_wave"])
    def test_olmos_blocks_name_their_experts_the_path(olmo, group_of_one, path):
        from olmo_core.nn.attention import AttentionConfig
        from olmo_core.nn.ddp.block import OLMoDDPTransformerBlock
        from olmo_core.nn.layer_norm import LayerNormConfig
        from olmo_core.nn.moe.v2.ep_config import ExpertParallelConfig
        from olmo_core.nn.moe.v2.router import MoERouterConfigV2
        from torch.distributed.device_mesh import init_device_mesh

        olmo.ours.register()
        dtype = olmo.DType.bfloat16
        block = OLMoDDPTransformerBlock(
            d_model=32, block_idx=0, n_layers=1, sequence_mixer=AttentionConfig(n_heads=2, dtype=dtype),
            attention_norm=LayerNormConfig(dtype=dtype), feed_forward_norm=LayerNormConfig(dtype=dtype),
            routed_experts=olmo.theirs.RoutedExpertsConfig(d_model=32, hidden_size=16, num_experts=4, bias=False, dtype=dtype),
            routed_experts_router=MoERouterConfigV2(d_model=32, num_experts=4, top_k=2), shared_experts=None, shared_experts_router=None,
            ep=ExpertParallelConfig(path=path))
        assert type(block.routed_experts) is olmo.ours.RoutedExperts
        with pytest.raises(ValueError, match="got rowwise_wave") if path == "rowwise_wave" else contextlib.nullcontext():
            block.apply_ep(init_device_mesh("cpu", (1, 1), mesh_dim_names=("ep_dp", "ep_mp")))


def test_another_release_says_so(tmp_path):
    with interfaces.installed("ai2-olmo-core", "gbmoe.compat.olmo_core", tmp_path, "2.9.0"), \
            pytest.raises(ImportError, match=r"gbmoe.compat.olmo_core: ai2-olmo-core: expected 3.0.0, .* got 2.9.0;"):
        importlib.import_module("gbmoe.compat.olmo_core")


def test_grouped_gemms_name_serves_v1(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "grouped_gemm", grouped_gemm)
    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", grouped_gemm.ops)
    with interfaces.installed("ai2-olmo-core", "gbmoe.compat.olmo_core", tmp_path):
        mlp = importlib.reload(importlib.import_module("olmo_core.nn.moe.mlp"))  # which may have looked for grouped_gemm before
        assert mlp.gmm is grouped_gemm.ops.gmm
        module = mlp.DroplessMoEMLP(d_model=HIDDEN, hidden_size=FFN, num_experts=EXPERTS, dtype=torch.bfloat16)
    weights = {name: values(*p.shape, dtype=torch.bfloat16, seed=seed, inner=HIDDEN)
               for seed, (name, p) in enumerate(module.named_parameters(), 2)}
    x = values(expert_rows.USED, HIDDEN, dtype=torch.bfloat16, seed=1)
    exact_inputs.poison("cpu")
    out = torch.func.functional_call(module, weights, (x, expert_rows.counts()))
    w1, w2, w3 = (weights[name].double().view(EXPERTS, FFN, HIDDEN) for name in ("w1", "w2", "w3"))
    exact = expert_rows.loop(lambda e, rows: (F.silu(x[rows].double() @ w1[e].t()) * (x[rows].double() @ w3[e].t())) @ w2[e], x)
    assert math.isclose((out.double() - exact[: expert_rows.USED]).norm() / exact.norm(), 0, abs_tol=0.02) and out.norm() > 0.1
