"""PEFT's LoRA on parameters of experts, in PEFT's and transformers' own classes: gbmoe reads the factors, and makes no changed weights."""

import sys

import pytest
import torch

import gbmoe
from gbmoe.compat import _peft_factors, transformers as adapter
from gbmoe.testing import accuracy
from tests.conftest import assert_as_accurate_as
from tests.test_weight_layout import LAYOUTS, ids

peft = pytest.importorskip("peft", reason="needs PEFT")
pytest.importorskip("transformers", minversion="5.8", reason="needs transformers 5.8 or newer")
of_peft = pytest.importorskip("gbmoe.compat.peft")
models = pytest.importorskip("tests.compat.test_transformers")
layer_module = pytest.importorskip("peft.tuners.lora.layer")
if peft.__version__ not in of_peft.TESTED:
    pytest.skip(f"tested with PEFT {of_peft.TESTED[0]}", allow_module_level=True)

BOTH = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """`register` in effect, and what it replaces put back."""
    monkeypatch.setattr(layer_module.ParamWrapper, "_activate_lora", layer_module.ParamWrapper._activate_lora)
    monkeypatch.setattr(_peft_factors, "_asked", [])
    adapter.register()


@pytest.fixture
def unregistered(monkeypatch):
    """PEFT as it is, of which gbmoe's adapter thinks that it was asked."""
    theirs = layer_module.ParamWrapper._activate_lora
    monkeypatch.setattr(layer_module.ParamWrapper, "_activate_lora", getattr(theirs, "_of_gbmoe", theirs))
    _peft_factors._asked.append(True)


@pytest.fixture
def changed_weights(monkeypatch):
    """The shapes of all that torch.baddbmm has made."""
    made, baddbmm = [], torch.baddbmm

    def spied(*args, **options):
        made.append(tuple(args[0].shape))
        return baddbmm(*args, **options)

    monkeypatch.setattr(torch, "baddbmm", spied)
    return made


def with_adapters(model_type="qwen3_moe", dtype=torch.float64, targets=BOTH, names=("default",), **overrides):
    model = models.build(model_type, dtype, **overrides)
    wrapped = None
    for name in names:
        config = peft.LoraConfig(r=4, lora_alpha=10, target_parameters=list(targets))
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
    for number, (name, parameter) in enumerate(wrapped.named_parameters()):
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    return wrapped


def run(model, implementation, ids=None):
    ids = models.token_ids(2, 11) if ids is None else ids
    model.base_model.model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return {"logits": out.logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def compare(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert accuracy.relative_error(found[name], value) < tolerance, name


@pytest.mark.parametrize("model_type", models.MODELS)
def test_logits_and_gradients_of_factors_are_those_of_eager_with_peft(model_type, changed_weights):
    model = with_adapters(model_type)
    found = run(model, "gbmoe")
    assert changed_weights == []
    compare(found, run(model, "eager"))
    assert changed_weights and len(found) == 1 + 4 * (model.config.num_hidden_layers - getattr(model.config, "first_k_dense_replace", 0))


def test_bfloat16_is_as_accurate_as_grouped_mm_with_peft(changed_weights):
    model = with_adapters(num_hidden_layers=1)
    exact = run(model, "eager")
    model.to(torch.bfloat16)
    baseline = run(model, "grouped_mm")
    del changed_weights[:]
    for name, value in run(model, "gbmoe").items():
        assert_as_accurate_as(value, baseline[name], exact[name], name, factor=3.0)
    assert changed_weights == []


@pytest.mark.parametrize("targets", [BOTH[:1], BOTH[1:]], ids=["gate_up", "down"])
def test_one_of_both_parameters(targets, changed_weights):
    model = with_adapters(targets=targets, num_hidden_layers=1)
    found = run(model, "gbmoe")
    assert changed_weights == []
    compare(found, run(model, "eager"))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_what_peft_parametrizes_itself_is_read_and_no_class_was_kept_for_each_forward(model_type, unregistered, changed_weights):
    model = with_adapters(model_type, num_hidden_layers=1)
    expected, built = run(model, "eager"), len(changed_weights)
    del changed_weights[:]
    before = len(adapter._KNOWN_GATES)
    for _ in range(2):
        compare(run(model, "gbmoe"), expected)
    assert len(adapter._KNOWN_GATES) <= before + 1
    assert len(changed_weights) == built  # torch's check of the parametrization alone: half as many, twice


def test_the_first_forward_registers(monkeypatch):
    theirs = getattr(layer_module.ParamWrapper._activate_lora, "_of_gbmoe", layer_module.ParamWrapper._activate_lora)
    monkeypatch.setattr(layer_module.ParamWrapper, "_activate_lora", theirs)
    monkeypatch.setattr(_peft_factors, "_asked", [])
    run(with_adapters(num_hidden_layers=1), "gbmoe")
    assert layer_module.ParamWrapper._activate_lora._of_gbmoe is theirs
    of_peft.register()
    assert layer_module.ParamWrapper._activate_lora._of_gbmoe is theirs


def test_several_adapters_active_one_by_one_together_and_not_at_all(changed_weights):
    model = with_adapters(names=("one", "two"), num_hidden_layers=1)
    ids, results = models.token_ids(2, 7), {}
    for implementation in ("gbmoe", "eager"):
        model.base_model.model.set_experts_implementation(implementation)
        with torch.no_grad():
            for names in ("one", "two", ["one", "two"]):
                model.base_model.set_adapter(names)
                results[implementation, str(names)] = model(ids).logits
            with model.disable_adapter():
                results[implementation, "none"] = model(ids).logits
            if implementation == "gbmoe":
                assert changed_weights == []
    for key in ("one", "two", "['one', 'two']", "none"):
        assert accuracy.relative_error(results["gbmoe", key], results["eager", key]) < 1e-6, key
    assert len({float(results["gbmoe", key].sum()) for key in ("one", "two", "['one', 'two']", "none")}) == 4


def test_merged_adapters_are_not_added_again():
    model = with_adapters(num_hidden_layers=1)
    ids = models.token_ids(2, 7)
    with torch.no_grad():
        expected = model(ids).logits
        model.merge_adapter()
        merged = model(ids).logits
        model.unmerge_adapter()
        unmerged = model(ids).logits
        unloaded = model.merge_and_unload()(ids).logits
    for found in (merged, unmerged, unloaded):
        assert accuracy.relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, changed_weights):
    model = with_adapters(num_hidden_layers=1)
    model.enable_input_require_grads()
    expected = run(model, "gbmoe")
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    compare(run(model, "gbmoe"), expected)
    assert changed_weights == []


def test_float32_under_autocast(changed_weights):
    model = with_adapters(dtype=torch.float32, num_hidden_layers=1)
    exact = run(model, "eager")
    del changed_weights[:]
    with torch.autocast("cpu", torch.bfloat16):
        found = run(model, "gbmoe")
    assert changed_weights == []
    for name, value in exact.items():
        assert found[name].dtype == value.dtype or name == "logits"
        assert accuracy.relative_error(found[name].float(), value) < 0.1, name


def test_trains_to_the_losses_of_eager():
    losses, ids = {}, models.token_ids(4, 12)
    for implementation in ("gbmoe", "eager"):
        model = with_adapters(num_hidden_layers=1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
        losses[implementation] = []
        for _ in range(6):
            model.base_model.model.set_experts_implementation(implementation)
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
    assert losses["gbmoe"][-1] < 0.98 * losses["gbmoe"][0]
    assert losses["gbmoe"] == pytest.approx(losses["eager"], rel=1e-6)


class Unpacked(torch.nn.Module):
    """As bitsandbytes' parametrization of experts in 4 bits: stored as uint8, computed in each forward."""

    def forward(self, packed):
        return packed.double() / 256


def test_adapters_of_4_bit_weights_are_refused_with_the_reason(unregistered):
    model = with_adapters(targets=BOTH[1:], num_hidden_layers=1)
    experts = next(module for module in model.modules() if type(module).__name__ == "Qwen3MoeExperts")
    experts.down_proj = torch.nn.Parameter(torch.zeros(experts.down_proj.shape, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"Qwen3MoeExperts.down_proj: expected a plain tensor .*, got Parameter of torch.uint8"):
        adapter.experts_forward(experts, torch.zeros(2, 32).double(), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", Unpacked(), unsafe=True)
    with pytest.raises(TypeError, match="down_proj: expected adapters of weights in 16 bits or more: 4-bit .* of torch.uint8"):
        run(model, "gbmoe")


def test_another_release_says_so_and_factors_are_read_anyway(unregistered, monkeypatch):
    del _peft_factors._asked[:]
    version = of_peft.require_release.__globals__["importlib"].metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99" if name == "peft" else version(name))
    with pytest.raises(ImportError, match="gbmoe.compat.peft: peft: expected 0.21.0 or 0.21.2, .* got 0.99"):
        of_peft.register()
    model = with_adapters(num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"peft 0.99 was not tested \(0.21.0 or 0.21.2 was\)"):
        found = run(model, "gbmoe")
    compare(found, run(model, "eager"))


def test_register_imports_no_peft(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    adapter.register()
    assert "peft" not in sys.modules


class Model(torch.nn.Module):
    def __init__(self, stacked, layout=None):
        super().__init__()
        torch.manual_seed(0)
        self.moe = gbmoe.dMoE(gbmoe.Arguments(hidden_size=16, ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, mlp_type="glu",
                                              bias=False, fp16=False, device="cpu", one_matrix_per_expert=stacked,
                                              weight_layout=layout))

    def forward(self, x):
        return self.moe(x)


def of_own_layer(stacked, layout=None):
    own = Model(stacked, layout)
    targets = [name.partition(".experts.")[2] for name, _ in own.named_parameters() if ".experts." in name]
    model = peft.get_peft_model(own, peft.LoraConfig(r=4, target_parameters=targets))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("with_register", [True, False])
def test_one_matrix_per_expert_has_factors_for_each_expert(with_register, changed_weights, request):
    if not with_register:
        request.getfixturevalue("unregistered")
    model, x = of_own_layer(True), torch.randn(3, 5, 16)
    found = model(x)
    assert len(changed_weights) == (0 if with_register else 3)
    with model.disable_adapter():
        assert not torch.allclose(model(x), found)
    found.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    assert len(gradients) == 6 and all(bool(grad.any()) for grad in gradients.values())
    assert torch.allclose(model.merge_and_unload()(x), found, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
@pytest.mark.parametrize("with_register", [True, False])
def test_a_layer_of_any_layout_has_factors_for_each_expert(with_register, layout, changed_weights, request):
    """They are of the parameters as they are stored, gate and up as one matrix where these are one tensor."""
    if not with_register:
        request.getfixturevalue("unregistered")
    model, x = of_own_layer(False, layout), torch.randn(3, 5, 16)
    found, count = model(x), 2 if layout.is_combined else 3
    assert len(changed_weights) == (0 if with_register else count)
    with model.disable_adapter():
        assert not torch.allclose(model(x), found)
    found.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    assert len(gradients) == 2 * count and all(bool(grad.any()) for grad in gradients.values())
    assert torch.allclose(model.merge_and_unload()(x), found, atol=1e-5)


def test_the_rows_of_all_experts_had_one_pair_of_factors():
    with pytest.raises(TypeError, match=r"dMoE: w1: expected adapters of each expert: gbmoe.add_adapter, .* one matrix \[96, 16\]"):
        of_own_layer(False)(torch.randn(3, 5, 16))
