"""gbmoe.compat.automodel in NeMo Automodel 0.7.0 where it is installed, elsewhere in its interface as tests/compat/interfaces has it."""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gbmoe import Float8BlockScaling
from tests.compat import expert_rows, interfaces
from tests.compat.expert_rows import FFN, HIDDEN, ROWS, USED, values

EXPERTS = len(expert_rows.COUNTS)


@pytest.fixture
def automodel(tmp_path):
    """Automodel's modules and the adapter; what `register` replaces is put back."""
    with interfaces.installed("nemo-automodel", "gbmoe.compat.automodel", tmp_path):
        experts, utils, adapter = map(importlib.import_module, (
            "nemo_automodel.components.moe.experts", "nemo_automodel.components.moe.megatron.moe_utils", "gbmoe.compat.automodel"))
        theirs = experts._torch_mm_experts_fwd
        yield SimpleNamespace(experts=experts, utils=utils, adapter=adapter, theirs=theirs)
        experts._torch_mm_experts_fwd = theirs


def halves(h):
    return torch.chunk(h, 2, -1)


def clamped(h, limit):
    gate, up = h
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def glu(h, offset=0.0, alpha=1.0):
    gate, up = h
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


# Automodel's function, the keywords of the partial that its modules keep, and its formula without the probabilities.
FUNCTIONS = {
    "swiglu": ("weighted_bias_swiglu_impl", {}, lambda h: glu(halves(h))),
    "geglu": ("weighted_bias_geglu_impl", {}, lambda h: F.gelu(halves(h)[0], approximate="tanh") * halves(h)[1]),
    "relu2": ("relu2_deepep", {}, lambda h: F.relu(h).square()),
    "clamped": ("swiglu_clamped_deepep", {"limit": 0.5}, lambda h: glu(clamped(halves(h), 0.5))),
    "oai": ("swiglu_oai_deepep", {"alpha": 1.5, "limit": 0.5}, lambda h: glu(clamped(halves(h), 0.5), 1.0, 1.5)),
    "oai without limit": ("swiglu_oai_deepep", {"limit": 0.0}, lambda h: glu(halves(h), 1.0, 1.702)),
    "quick_geglu": ("quick_geglu_deepep", {"limit": 0.5, "alpha": 1.702, "linear_offset": 1.0},
                    lambda h: glu(clamped((h[..., ::2], h[..., 1::2]), 0.5), 1.0, 1.702)),
}


def activation_fn(automodel, name):
    function, keywords, _ = FUNCTIONS[name]
    found = getattr(automodel.experts, function, None) or getattr(automodel.utils, function)
    return partial(found, **keywords) if keywords else found


def inputs(dtype, name, probs=torch.float32):
    columns = FFN if name == "relu2" else 2 * FFN
    return {"x": values(ROWS, HIDDEN, dtype=dtype, seed=1), "up": values(EXPERTS, HIDDEN, columns, dtype=dtype, seed=2, inner=HIDDEN),
            "down": values(EXPERTS, FFN, HIDDEN, dtype=dtype, seed=3, inner=FFN), "probs": values(ROWS, 1, dtype=probs, seed=4).abs()}


def definition(name):
    """Automodel's formula: the probabilities multiply the activation."""
    def experts(x, up, down, probs):
        def expert(e, rows):
            a = FUNCTIONS[name][2]((x[rows] @ up[e]).to(torch.promote_types(x.dtype, torch.float32)))
            return (a * probs[rows]).to(x.dtype) @ down[e]
        return expert_rows.loop(expert, x)
    return experts


def call(automodel, name, counts=None):
    return lambda x, up, down, probs: automodel.experts._torch_mm_experts_fwd(
        x, up, down, expert_rows.counts() if counts is None else counts, probs, activation_fn(automodel, name), use_mxfp8=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_registered_experts_are_automodels_formula(automodel, name, dtype, device):
    automodel.adapter.register()
    probs = torch.float64 if dtype == torch.float64 else torch.float32
    expert_rows.check(call(automodel, name, expert_rows.counts(device=device)), definition(name), inputs(dtype, name, probs),
                      rowwise=("x", "probs"), device=device)


def test_gbmoe_computes_what_automodels_own_function_does(automodel):
    """Which shows that the formulas above are Automodel's, where the package is installed."""
    for name in ("swiglu", "quick_geglu"):
        rows = {key: t[:USED] if len(t) == ROWS else t for key, t in inputs(torch.bfloat16, name).items()}
        own = automodel.theirs(rows["x"], rows["up"], rows["down"], expert_rows.counts(), rows["probs"], definition_of_activation(name))
        automodel.adapter.register()
        torch.testing.assert_close(call(automodel, name)(**rows), own, rtol=3e-2, atol=3e-2)


def definition_of_activation(name):
    return lambda h, probs: (FUNCTIONS[name][2](h) * probs).to(h.dtype)


def test_register_twice_changed_what_it_had_put_there(automodel):
    for _ in range(2):
        automodel.adapter.register()
    assert automodel.experts._torch_mm_experts_fwd.__wrapped__ is automodel.theirs
    automodel.adapter.register(fp8_recipe=Float8BlockScaling())
    assert automodel.experts._torch_mm_experts_fwd.__wrapped__ is automodel.theirs


def test_a_recipe_is_handed_over(automodel, monkeypatch):
    seen = []
    monkeypatch.setattr(automodel.adapter, "grouped_mlp", lambda *_, fp8_recipe, **__: seen.append(fp8_recipe))
    recipe = Float8BlockScaling()
    for each in (recipe, None):
        automodel.adapter.register(fp8_recipe=each)
        call(automodel, "swiglu")(**inputs(torch.bfloat16, "swiglu"))
    assert seen == [recipe, None]


def test_what_gbmoe_does_not_know_stays_with_automodel(automodel, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("gbmoe was asked")

    seen = []

    def theirs(hidden_states, gate_and_up_projs, down_projs, tokens_per_expert, permuted_probs, activation_fn, use_mxfp8=False):
        seen.append(use_mxfp8)

    automodel.experts._torch_mm_experts_fwd = theirs
    automodel.adapter.register()
    monkeypatch.setattr(automodel.adapter, "grouped_mlp", refused)
    rows = tuple(inputs(torch.bfloat16, "swiglu").values())
    for function, mxfp8 in ((activation_fn(automodel, "swiglu"), True), (lambda h, probs: h, False),
                            (partial(automodel.experts.relu2_deepep, slope=1.0), False)):
        automodel.experts._torch_mm_experts_fwd(*rows[:3], expert_rows.counts(), rows[3], function, use_mxfp8=mxfp8)
    assert seen == [True, False, False]
    with pytest.raises(ValueError, match="activation_fn: expected one of Automodel's weighted_bias_swiglu_impl, .* got <function"):
        automodel.adapter.experts_forward(*rows[:3], expert_rows.counts(), rows[3], lambda h, probs: h)


def test_one_graph_under_torch_compile(automodel):
    automodel.adapter.register()
    rows = inputs(torch.float32, "clamped")
    function = call(automodel, "clamped", expert_rows.counts())
    compiled = torch.compile(lambda: function(**rows), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), function(**rows))


@pytest.mark.parametrize("version", ["0.6.0", "0.8.0rc0"])
def test_another_release_says_so(tmp_path, version):
    with interfaces.installed("nemo-automodel", "gbmoe.compat.automodel", tmp_path, version):
        adapter = importlib.import_module("gbmoe.compat.automodel")
        with pytest.raises(ImportError, match=rf"gbmoe.compat.automodel: nemo-automodel: expected 0.7.0, .* got {version};"):
            adapter.register()


def test_a_checkout_with_another_signature_says_so(automodel):
    automodel.experts._torch_mm_experts_fwd = lambda hidden_states, weights: None
    with pytest.raises(ImportError, match="expected the parameters hidden_states, gate_and_up_projs, .* got hidden_states, weights"):
        automodel.adapter.register()


@pytest.fixture
def lora_experts(automodel):
    """Automodel's classes with LoRA; what `register` replaces is put back."""
    module = importlib.import_module("nemo_automodel.components._peft.lora_experts")
    local, dispatched = module.GroupedExpertsLoRA, module.GroupedExpertsDeepEPLoRA
    theirs = local._forward_grouped_mm, dispatched.forward
    yield module
    local._forward_grouped_mm, dispatched.forward = theirs


def lora_module(automodel, kind, name, biases, dtype):
    """A module without its construction, which wants a model's configuration."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    columns, rank = FFN if name == "relu2" else 2 * FFN, 4
    module.scale, module.expert_bias, module.n_routed_experts, module.ep_size = 1.5, biases, EXPERTS, 1
    module.expert_activation = module.expert_activation_grouped = activation_fn(automodel, name)
    shapes = {"gate_and_up_projs": (HIDDEN, columns), "down_projs": (FFN, HIDDEN), "lora_gate_and_up_A": (HIDDEN, rank),
              "lora_gate_and_up_B": (rank, columns), "lora_down_A": (FFN, rank), "lora_down_B": (rank, HIDDEN)}
    for seed, (each, shape) in enumerate(shapes.items()):
        value = values(EXPERTS, *shape, dtype=dtype, seed=10 + seed, inner=shape[0])
        module.register_parameter(each, torch.nn.Parameter(value, requires_grad=each.startswith("lora")))
    if biases:
        module.gate_up_proj_bias, module.down_proj_bias = (values(EXPERTS, n, dtype=dtype, seed=30) for n in (columns, HIDDEN))
    return module


@pytest.mark.parametrize("name, biases", [("swiglu", False), ("quick_geglu", True), ("relu2", False)])
def test_lora_was_computed_by_products_of_its_own(automodel, lora_experts, name, biases):
    module = lora_module(automodel, lora_experts.GroupedExpertsLoRA, name, biases, torch.bfloat16)
    x, probs = values(30, HIDDEN, dtype=torch.bfloat16, seed=1).requires_grad_(), torch.rand(30, 2, requires_grad=True)
    indices = torch.stack([torch.arange(30) % 7, (torch.arange(30) + 3) % 7], 1)  # experts 1 to 5 of 7 are here
    mask, tensors = torch.arange(30) != 4, [parameter for _, parameter in module.named_parameters()]
    results = []
    for _ in range(2):
        out = module._forward_grouped_mm(x, mask, probs, indices, *tensors[:6], EXPERTS, 1)
        results.append([out, *torch.autograd.grad(out.sum(), (x, probs, *tensors[2:6]))])
        automodel.adapter.register()
        automodel.adapter.register()
    assert results[1][0].dtype == torch.float32
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=3e-2 * float(theirs.detach().abs().max()))


def test_lora_of_dispatched_rows(automodel, lora_experts):
    module = lora_module(automodel, lora_experts.GroupedExpertsDeepEPLoRA, "swiglu", False, torch.bfloat16)
    rows = inputs(torch.bfloat16, "swiglu")
    module._dispatch_tokens = lambda x, *_: (x, expert_rows.counts(), rows["probs"][:USED])
    object.__setattr__(module, "token_dispatcher", SimpleNamespace(token_unpermutation=lambda y: 2 * y))
    x, leaves = rows["x"][:USED].requires_grad_(), [p for p in module.parameters() if p.requires_grad]
    results = []
    for _ in range(2):
        out = module(x, None, None, None)
        results.append([out, *torch.autograd.grad(out.sum(), (x, *leaves))])
        automodel.adapter.register()
    assert len(leaves) == 4
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=3e-2 * float(theirs.detach().abs().max()))
    module.expert_activation = lambda h, probs: h[..., :FFN]  # not known: left to Automodel
    module(x, None, None, None)
