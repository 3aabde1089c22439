"""gbmoe.compat.prime_rl in prime-rl 0.8.0 where it is installed, elsewhere in its interface as tests/compat/interfaces has it."""

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gbmoe import Float8BlockScaling
from tests.compat import expert_rows, interfaces
from tests.compat.expert_rows import FFN, HIDDEN, ROWS, USED, values

EXPERTS = len(expert_rows.COUNTS)


@pytest.fixture
def prime_rl(tmp_path):
    """prime-rl's module and the adapter; what `register` replaces is put back."""
    with interfaces.installed("prime-rl", "gbmoe.compat.prime_rl", tmp_path):
        moe, adapter = map(importlib.import_module, ("prime_rl.trainer.models.layers.moe", "gbmoe.compat.prime_rl"))
        theirs = moe._run_experts_grouped_mm_impl
        yield SimpleNamespace(moe=moe, adapter=adapter, theirs=theirs)
        moe._run_experts_grouped_mm_impl = theirs


def inputs(dtype):
    return {"x": values(ROWS, HIDDEN, dtype=dtype, seed=1), "w1": values(EXPERTS, FFN, HIDDEN, dtype=dtype, seed=2, inner=HIDDEN),
            "w2": values(EXPERTS, HIDDEN, FFN, dtype=dtype, seed=3, inner=FFN),
            "w3": values(EXPERTS, FFN, HIDDEN, dtype=dtype, seed=4, inner=HIDDEN)}


def definition(x, w1, w2, w3):
    """prime-rl's formula; in bfloat16 except for float64, the reference."""
    of = torch.float64 if x.dtype == torch.float64 else torch.bfloat16

    def expert(e, rows):
        gate, up, down = (w[e].to(of).t() for w in (w1, w3, w2))
        return ((F.silu(x[rows].to(of) @ gate) * (x[rows].to(of) @ up)) @ down).to(x.dtype)

    return expert_rows.loop(expert, x)


def call(function, counts=None):
    counts = expert_rows.counts(torch.float32) if counts is None else counts  # torch.histc returns floats
    return lambda x, w1, w2, w3: function(w1, w2, w3, x, counts)


@pytest.mark.parametrize("counted", [torch.int32, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_registered_experts_are_prime_rls_formula(prime_rl, dtype, counted, device):
    prime_rl.adapter.register()
    function = call(prime_rl.moe._run_experts_grouped_mm_impl, expert_rows.counts(counted, device))
    expert_rows.check(function, definition, inputs(dtype), device=device)


def test_gbmoe_computes_what_prime_rls_own_function_does(prime_rl):
    rows = inputs(torch.float32) | {"x": inputs(torch.float32)["x"][:USED]}
    own = call(prime_rl.theirs)(**rows)
    prime_rl.adapter.register()
    prime_rl.adapter.register()
    assert prime_rl.moe._run_experts_grouped_mm_impl.__wrapped__ is prime_rl.theirs
    torch.testing.assert_close(call(prime_rl.moe._run_experts_grouped_mm)(**rows), own, rtol=3e-2, atol=3e-2)


def test_float8_experts_stay_with_prime_rl_unless_there_is_a_recipe(prime_rl, monkeypatch):
    seen = []

    def theirs(w1, w2, w3, x, num_tokens_per_expert, fp8=False):
        seen.append("theirs")

    monkeypatch.setattr(prime_rl.moe, "_run_experts_grouped_mm_impl", theirs)
    monkeypatch.setattr(prime_rl.adapter, "bfloat16_experts", lambda *_, fp8_recipe, **__: seen.append(fp8_recipe))
    recipe, rows = Float8BlockScaling(), tuple(inputs(torch.bfloat16).values())
    for each in (None, recipe):
        prime_rl.adapter.register(fp8_recipe=each)
        for fp8 in (False, True):
            prime_rl.moe._run_experts_grouped_mm_impl(*rows, expert_rows.counts(), fp8=fp8)
    assert seen == [None, "theirs", None, recipe]


def test_another_release_says_so(tmp_path):
    with interfaces.installed("prime-rl", "gbmoe.compat.prime_rl", tmp_path, "0.9.0"):
        adapter = importlib.import_module("gbmoe.compat.prime_rl")
        with pytest.raises(ImportError, match="gbmoe.compat.prime_rl: prime-rl: expected 0.8.0, .* got 0.9.0;"):
            adapter.register()


def test_a_checkout_with_another_signature_says_so(prime_rl):
    prime_rl.moe._run_experts_grouped_mm_impl = lambda w1, w2, x: None
    with pytest.raises(ImportError, match="expected the parameters w1, w2, w3, x, num_tokens_per_expert, fp8, got w1, w2, x"):
        prime_rl.adapter.register()


@pytest.fixture
def with_lora(prime_rl):
    multi_moe = importlib.import_module("prime_rl.trainer.models.layers.lora.multi_moe")
    theirs = multi_moe.MultiLoRAGroupedExperts.forward
    yield multi_moe.MultiLoRAGroupedExperts
    multi_moe.MultiLoRAGroupedExperts.forward = theirs


def lora_module(kind, **options):
    tensors = inputs(torch.float32)
    base = SimpleNamespace(**{name: torch.nn.Parameter(tensors[name], requires_grad=False) for name in ("w1", "w2", "w3")})
    module = kind(base, 8, 2, alpha=12.0, **options)
    for number, parameter in enumerate(module.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    module._lora_num_tokens[1] = 60
    return module, tensors["x"][:USED].requires_grad_()


def test_lora_was_computed_by_products_of_its_own(prime_rl, with_lora):
    module, x = lora_module(with_lora)
    leaves = [x, *(parameter for name, parameter in module.named_parameters() if name.endswith("1"))]
    results = []
    for _ in range(2):
        out = module(x, expert_rows.counts(torch.float32))
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
        prime_rl.adapter.register()
        prime_rl.adapter.register()
    assert with_lora.forward.__wrapped__.__module__ == with_lora.__module__
    for theirs, ours in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=2e-2 * float(theirs.detach().abs().max()))


def test_lora_with_dropout_stays_with_prime_rl(prime_rl, with_lora, monkeypatch):
    prime_rl.adapter.register()
    monkeypatch.setattr(prime_rl.adapter, "bfloat16_experts", lambda *_, **__: pytest.fail("gbmoe was asked"))
    module, x = lora_module(with_lora, dropout=0.5)
    module(x, expert_rows.counts())
