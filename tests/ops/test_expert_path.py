"""expert_path and the table of `gbmoe info`: what they say is what the engines do, seen by which kernels are asked and with which memory.

Shape suffixes: E experts, H hidden, F ffn hidden, P rows.
"""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gbmoe
from gbmoe import RoutingPlan, WeightLayout, engines, expert_path
from gbmoe.cli.layout_table import ENGINES, LAYOUTS, layouts_by_engine
from gbmoe.engines import hopper, own_kernels, tensor_core
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.ops.expert_path import of_weights
from gbmoe.slot_map import SlotMap
from gbmoe.testing import cuda_graphs

EXPERTS, FFN, HIDDEN = 4, 32, 64
EVERY_LAYOUT = [WeightLayout(*of) for of in itertools.product(("separate", "gate_first", "up_first", "interleaved"), *[(False, True)] * 2)]


def weights(layout, ffn=FFN, dtype=torch.bfloat16, offset=0):
    def one(rows, transposed):
        shape = (EXPERTS, HIDDEN, rows) if transposed else (EXPERTS, rows, HIDDEN)
        return torch.zeros(EXPERTS * rows * HIDDEN + offset, dtype=dtype)[offset:].view(shape)

    w1 = one(2 * ffn if layout.is_combined else ffn, layout.up_transposed)
    return w1, one(ffn, layout.down_transposed), None if layout.is_combined else one(ffn, layout.up_transposed)


@pytest.fixture
def asked(monkeypatch):
    """Which of the kernels were asked, in their place."""
    found = []

    def stand_in(name, results):
        return lambda *arguments, **_: found.append((name, arguments)) or (None,) * results

    monkeypatch.setattr(hopper, "up_gemm", stand_in("fused", 3))
    monkeypatch.setattr(hopper, "up_pairs_gemm", stand_in("fused", 2))
    monkeypatch.setattr(tensor_core, "up_gemm", stand_in("fused", 3))
    monkeypatch.setattr(own_kernels.FewRowsKernels, "up", stand_in("fused", 3))
    monkeypatch.setattr(own_kernels.FewRowsKernels, "up_pairs", stand_in("fused", 2))
    for name, results in (("up", 3), ("up_biased", 3), ("up_pairs", 2)):
        monkeypatch.setattr(Engine, name, stand_in("composed", results))
    return found


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_silu 1.0 7.0 7.0 0.0"])
@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("name", ["hopper", "hopper_batch_invariant", "tensor_core", "tensor_core_batch_invariant"])
def test_what_is_said_to_be_composed_is(asked, name, rows, activation, biased):
    engine = engines.ENGINES[name]
    for layout in EVERY_LAYOUT:
        w1, w2, v1 = weights(layout)
        gate, _, up = layout.matrices(w1, w2, v1)
        x = GatheredRows(None, SlotMap(None, torch.zeros(rows, dtype=torch.int32), 1), torch.zeros(rows, HIDDEN, dtype=torch.bfloat16))
        sizes, bias = torch.full((EXPERTS,), rows // EXPERTS), torch.zeros(EXPERTS, 2 * FFN if layout.is_paired else FFN)
        if layout.is_paired:
            engine.up_pairs(x, layout.pairs(w1), bias if biased else None, sizes, activation, False)
        elif biased:
            engine.up_biased(x, gate, up, bias, bias, sizes, activation, False)
        else:
            engine.up(x, gate, up, sizes, activation, False)
        said = any("kernel of its own" in reason for reason in of_weights(engine, layout, w1, w2, v1, activation, rows, biased))
        assert said == (asked.pop()[0] == "composed"), layout.code


@pytest.mark.parametrize("offset", [0, 4, 8])
@pytest.mark.parametrize("ffn", [FFN, 36])
@pytest.mark.parametrize("name", ["hopper", "reference"])
def test_what_is_said_to_be_copied_is(name, ffn, offset):
    """36 rows of 2 bytes are no multiple of 16 bytes, nor do matrices begin there with an offset of 4 elements."""
    engine = engines.ENGINES[name]
    for layout in EVERY_LAYOUT:
        w1, w2, v1 = weights(layout, ffn, offset=offset)
        for matrix in layout.matrices(w1, w2, v1):
            assert engine.copies(matrix) == (engine.readable(matrix)[0].data_ptr() != matrix.data_ptr()), layout.code


def test_two_matrices_that_one_kernel_reads_must_lie_alike():
    one, other = torch.zeros(EXPERTS, FFN, HIDDEN), torch.zeros(EXPERTS, HIDDEN, FFN).transpose(1, 2)
    engine = engines.ENGINES["hopper"]
    assert not engine.copies(one) and not engine.copies(other) and engine.copies(one, other)


def test_reasons_name_the_device_the_activation_and_the_weights():
    x, plan = torch.randn(6, HIDDEN), RoutingPlan.from_experts(torch.zeros(6, 2, dtype=torch.int64), num_experts=EXPERTS)
    layout = WeightLayout("gate_first")
    w1, w2, _ = weights(layout, dtype=torch.float32)
    path = expert_path(x, plan, w1, w2, layout=layout, activation=lambda h: h.sin(), weights_on="input")
    assert path.engine == "reference" and isinstance(path, gbmoe.ExpertPath)
    for words in ("runs on cpu", "activation has no kernel", "router weights on the input", "w1 is copied"):
        assert sum(words in reason for reason in path.reasons) == 1, path.reasons
    with pytest.raises(ValueError, match="one on meta"):
        expert_path(x.to("meta"), RoutingPlan.from_experts(torch.zeros(6, 2, dtype=torch.int64, device="meta"), num_experts=EXPERTS),
                    w1.to("meta"), w2.to("meta"), layout=layout)
    with pytest.raises(ValueError, match="hopper.*runs on CUDA"):
        expert_path(x, plan, w1, w2, layout=layout, engine="hopper")


BIASES = {name: torch.zeros(EXPERTS, columns) for name, columns in (("w1_bias", FFN), ("w2_bias", HIDDEN), ("v1_bias", FFN))}
REFUSED = [
    dict(weights_on="foo"), dict(weights_on=None), dict(weights_on="between", w2_bias=BIASES["w2_bias"]),
    *[{"activation": torch.nn.functional.mish, name: bias} for name, bias in BIASES.items()],
    dict(activation="mish"), dict(activation=3), dict(w1_bias=BIASES["w2_bias"]), dict(w2_bias=BIASES["w2_bias"].double()),
    dict(engine="foo"), dict(engine="hopper"), dict(engine=None), dict(layout="gate_first"), dict(layout=WeightLayout("gate_first")),
    dict(layout=WeightLayout(down_transposed=True)), dict(batch_invariant=True), dict(batch_invariant=True, engine="reference"),
    dict(fp8_recipe=True), dict(fp8_recipe=gbmoe.Float8BlockScaling()), dict(fp8_recipe=gbmoe.Float8BlockScaling(), engine="reference"),
    dict(fp8_recipe=gbmoe.Float8BlockScaling(), batch_invariant=True), dict(w1=None), dict(w2=[]), dict(v1=torch.zeros(EXPERTS, FFN)),
    dict(x=torch.zeros(6, HIDDEN, dtype=torch.int32)), dict(x=torch.zeros(5, HIDDEN)), dict(plan=None),
    dict(v1=None, v1_bias=BIASES["v1_bias"]),
]


@pytest.mark.parametrize("change", REFUSED,
                         ids=lambda change: "-".join(f"{name}-{str(each)[:20]}".split("\n")[0] for name, each in change.items()))
def test_a_path_was_given_for_calls_that_expert_mlp_refuses(change):
    ids_TK = torch.zeros(6, 2, dtype=torch.int64)
    w1, w2, v1 = (torch.zeros(EXPERTS, FFN, HIDDEN) for _ in range(3))
    given = dict(x=torch.zeros(6, HIDDEN), plan=RoutingPlan.from_experts(ids_TK, num_experts=EXPERTS), w1=w1, w2=w2, v1=v1) | change
    operands = [given.pop(name) for name in ("x", "plan", "w1", "w2", "v1")]
    errors = []
    for function in (gbmoe.expert_mlp, expert_path):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*operands, **given)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1] and any(words in errors[0][1] for words in (": expected", "cannot serve this product"))


@pytest.mark.parametrize("w1", [None, 3, torch.zeros(FFN, HIDDEN)], ids=["None", "number", "matrix"])
def test_grouped_mlp_asked_for_the_length_of_what_was_no_weight(w1):
    with pytest.raises((TypeError, ValueError), match="grouped_mlp: w1: expected"):
        gbmoe.grouped_mlp(torch.zeros(6, HIDDEN), torch.tensor([6, 0, 0, 0]), w1, torch.zeros(EXPERTS, FFN, HIDDEN))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_whether_the_host_waits_had_to_be_known_by_heart():
    """An engine's name was all that was said of it. Tensors without memory stand for a GPU's."""
    with FakeTensorMode():
        x, w = torch.empty(6, HIDDEN, device="cuda"), torch.empty(EXPERTS, FFN, HIDDEN, device="cuda")
        plan = RoutingPlan.from_experts(torch.empty(6, 2, dtype=torch.int64, device="cuda"), num_experts=EXPERTS, check="none")
        assert expert_path(x, plan, w, w, engine="reference").host_waits
    x, w, on_host = torch.empty(6, HIDDEN), torch.empty(EXPERTS, FFN, HIDDEN), torch.zeros(6, 2, dtype=torch.int64)
    assert not expert_path(x, RoutingPlan.from_experts(on_host, num_experts=EXPERTS), w, w).host_waits


@pytest.mark.gpu
@pytest.mark.parametrize("engine, dtype", [("auto", torch.bfloat16), ("auto", torch.float32), ("cublas_loop", torch.bfloat16),
                                           ("cublas_grouped", torch.bfloat16), ("reference", torch.float16)])
def test_the_host_waits_where_it_is_said_to(engine, dtype):
    """And the plan keeps the sizes, so that the second call does not wait."""
    x, w = torch.randn(64, HIDDEN, device="cuda", dtype=dtype), torch.randn(EXPERTS, FFN, HIDDEN, device="cuda", dtype=dtype)
    ids_TK = torch.randint(EXPERTS, (64, 2), device="cuda")
    gbmoe.expert_mlp(x, RoutingPlan.from_experts(ids_TK, num_experts=EXPERTS), w, w, engine=engine)  # loads and compiles what it needs
    for plan in [RoutingPlan.from_experts(ids_TK, num_experts=EXPERTS)] * 2:
        said = expert_path(x, plan, w, w, engine=engine).host_waits
        try:
            with cuda_graphs.no_host_wait():
                gbmoe.expert_mlp(x, plan, w, w, engine=engine)
            waited = False
        except RuntimeError:
            waited = True
            plan.host_sizes()
        assert waited == said


def test_auto_passes_over_engines_with_a_reason_and_products_may_differ(monkeypatch):
    """Odd F: own kernels take neither the products nor, where H alone fits, one of them."""
    from gbmoe.engines import choice
    from gbmoe.tuning.device import Device

    monkeypatch.setattr(choice, "_unavailable", lambda name, device: None)
    monkeypatch.setattr(choice, "_device_fields", lambda device: (132, 50 << 20, (9, 0)) if device.type == "cuda" else None)
    passed = engines.refusals(torch.device("cuda", 0), torch.bfloat16, 1024, (EXPERTS, 33, HIDDEN), False)
    assert "multiples of 8, not 64 and 33" in passed["hopper"] and "tensor_core" in passed and "cublas_grouped" not in passed
    assert engines.refusals(torch.device("cuda", 0), torch.bfloat16, 1024, (EXPERTS, 32, HIDDEN), False) == {}
    assert Device(132, 50 << 20, (9, 0)).capability == (9, 0)


def test_the_table_has_every_layout_and_says_that_float8_copies_none():
    table = layouts_by_engine()
    assert list(table) == list(LAYOUTS) and all(tuple(row) == ENGINES for row in table.values())
    gpt_oss = table["the same with biases (gpt-oss)"]
    assert gpt_oss == {"hopper": "in place, fused", "tensor_core": "in place", "float8_block": "in place", "others": "in place"}
    assert all(row["float8_block"].startswith("in place") for row in table.values())
    assert table["w1, v1, w2 [E,F,H]"] == {name: "in place" if name == "others" else "in place, fused" for name in ENGINES}
