"""gbmoe.compat.olmo_core in OLMo-core 3.0.0 where it is installed, elsewhere in its interface; v1 through grouped_gemm's name."""

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


def test_calls_with_buffers_are_left_to_olmo(olmo, monkeypatch):
    monkeypatch.setattr(olmo.theirs.RoutedExperts, "forward", lambda self, x, counts, **options: sorted(o for o in options if options[o]
                                                                                                       is not None))
    module, x = built(olmo), values(ROWS, HIDDEN, dtype=torch.bfloat16, seed=1)
    assert "down_proj_out" in module(x, expert_rows.counts(), down_proj_out=x)
    assert "up_proj_input_grad_out" in module(x, expert_rows.counts(), up_proj_input_grad_out=x)
    module = built(olmo, bias=True)
    with pytest.raises(NotImplementedError, match="row_weights: expected None for experts with biases"):
        module(x, expert_rows.counts(), row_weights=torch.ones(ROWS))


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
