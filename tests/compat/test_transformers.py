"""experts_implementation="gbmoe" in transformers' own models, against "eager": logits, gradients, generation, training.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
import types
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import gbmoe
from gbmoe import Float8BlockScaling, engines
from gbmoe.compat import _uncalled_experts, transformers as adapter
from gbmoe.testing import accuracy, exact_inputs
from tests import rank_groups
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id
from tests.forked_python import python

transformers = pytest.importorskip("transformers", minversion="5.8", reason="needs transformers 5.8 or newer")
moe = pytest.importorskip("transformers.integrations.moe")
finegrained_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

VOCABULARY = 96
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 128, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}
# Model type -> its configuration beyond COMMON. With output_router_logits the routers' losses are part of the loss.
MODELS = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 8, "head_dim": 8, "norm_topk_prob": True,
                  "output_router_logits": True},
    "olmoe": {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 4, "output_router_logits": True},
    "deepseek_v3": {"intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 2,
                    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
                    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8},
    # Transposed, with biases, gate and up interleaved, and a gate function of its own.
    "gpt_oss": {"intermediate_size": 48, "num_local_experts": 4, "head_dim": 8},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()
    adapter.register()


@pytest.fixture
def calls(monkeypatch):
    """How often gbmoe computed experts: once a layer with experts and forward pass, never with another implementation."""
    counter, fused_function = SimpleNamespace(count=0), adapter.fused_function

    def counted(*args):
        counter.count += 1
        return fused_function(*args)

    monkeypatch.setattr(adapter, "fused_function", counted)
    return counter


def build(model_type, dtype=torch.float64, **overrides):
    """A tiny random model; parameters that start as zeros or ones (biases, norms) get other values."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **MODELS[model_type], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="gbmoe").to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def token_ids(*shape):
    return torch.randint(3, VOCABULARY, shape, generator=exact_inputs.generator("cpu", 1))


def forward_and_gradients(model, implementation, ids):
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **gradients}


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_and_every_gradient_are_those_of_eager(model_type, calls):
    model, ids = build(model_type), token_ids(2, 11)
    found = forward_and_gradients(model, "gbmoe", ids)
    layers = model.config.num_hidden_layers - getattr(model.config, "first_k_dense_replace", 0)
    assert calls.count == layers
    expected = forward_and_gradients(model, "eager", ids)
    assert calls.count == layers
    assert found.keys() == expected.keys()
    experts = [name for name in found if ".experts." in name]
    assert len(experts) == layers * (4 if model_type == "gpt_oss" else 2)
    for name, value in expected.items():
        # Attention and norms compute in float32 wherever the models say so, with the same inputs except for the last bits.
        assert accuracy.relative_error(found[name], value) < 1e-6, name
        assert value.abs().max() > 0, name


@pytest.mark.parametrize("model_type", MODELS)
def test_generates_the_same_tokens_as_eager(model_type, calls):
    model, ids = build(model_type, output_router_logits=False).eval(), token_ids(2, 5)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    tokens = model.generate(ids, **options)
    assert calls.count > 0 and tokens.shape == (2, 13)
    model.set_experts_implementation("eager")
    assert torch.equal(tokens, model.generate(ids, **options))


@pytest.mark.parametrize("model_type", MODELS)
def test_trains_like_eager(model_type, calls):
    losses = {}
    for implementation in ("gbmoe", "eager"):
        model, ids = build(model_type), token_ids(4, 12)
        model.set_experts_implementation(implementation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[implementation] = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
    assert calls.count > 0
    assert losses["gbmoe"][-1] < 0.9 * losses["gbmoe"][0], losses
    assert losses["gbmoe"] == pytest.approx(losses["eager"], rel=1e-5)


def test_switches_back_and_forth_and_saves_the_same_parameters(calls, tmp_path):
    model, ids = build("mixtral"), token_ids(1, 7)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for implementation in ("eager", "gbmoe", "batched_mm", "gbmoe"):
        model.set_experts_implementation(implementation)
        before = calls.count
        model(ids)
        assert (calls.count > before) == (implementation == "gbmoe")
        assert model.config._experts_implementation == implementation
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="gbmoe", dtype=torch.float64)
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert accuracy.relative_error(loaded(ids).logits, model(ids).logits) < 1e-12


@pytest.mark.parametrize("model_type", [pytest.param("mixtral", marks=pytest.mark.slow), "gpt_oss"])
def test_compiles_without_a_graph_break(model_type):
    model, ids = build(model_type, num_hidden_layers=1), token_ids(2, 9)
    expected = forward_and_gradients(model, "gbmoe", ids)
    torch._dynamo.reset()
    model.zero_grad()
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids)
    out.loss.backward()
    assert accuracy.relative_error(out.logits.detach(), expected["logits"]) < 1e-9
    for name, parameter in model.named_parameters():
        assert accuracy.relative_error(parameter.grad, expected[name]) < 1e-9, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("model_type", MODELS)
def test_generates_from_cuda_graphs(model_type, dtype):
    """A static cache makes generate compile forward with mode="reduce-overhead", as transformers' own
    test_generate_compile_model_forward_fullgraph does: recording failed on sizes that lay on the host."""
    pytest.importorskip("triton")
    torch.compiler.reset()
    model = build(model_type, dtype, output_router_logits=False).cuda().eval()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    static = {"cache_implementation": "static", "compile_config": transformers.CompileConfig(fullgraph=True, dynamic=False)}
    assert static["compile_config"].mode == "reduce-overhead"
    prompts = [token_ids(2, 5).cuda(), token_ids(2, 5).flip(1).cuda()]
    found, expected = ([model.generate(ids, attention_mask=torch.ones_like(ids), **options, **more) for ids in prompts]
                       for more in (static, {}))
    for got, right in zip(found, expected, strict=True):
        logits = torch.stack(got.logits)
        assert logits.shape == torch.stack(right.logits).shape and torch.isfinite(logits).all()
        if dtype == torch.float32:  # of bfloat16 the last bits may choose other experts and tokens
            assert torch.equal(got.sequences, right.sequences)
            assert accuracy.relative_error(logits, torch.stack(right.logits)) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MODELS)
def test_trains_from_cuda_graphs(model_type):
    pytest.importorskip("triton")
    torch.compiler.reset()
    model = build(model_type, torch.float32).cuda()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for step in range(5):
        ids = token_ids(2, 9).roll(step, 1).cuda()
        expected = forward_and_gradients(model, "gbmoe", ids)
        expected = {name: value.clone() for name, value in expected.items()}
        model.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(ids, labels=ids)
        out.loss.backward()
        assert accuracy.relative_error(out.logits.detach(), expected["logits"]) < 1e-3
        for name, parameter in model.named_parameters():
            if name in expected:
                assert accuracy.relative_error(parameter.grad, expected[name]) < 1e-3, name


# -------------------------------------------------------------------------------------------- the experts by themselves


class Experts(torch.nn.Module):
    """Experts in every layout that transformers' decorator describes; forward is their definition."""

    def __init__(self, config):
        super().__init__()
        experts, hidden, ffn = config.shape
        columns = 2 * ffn if config.has_gate else ffn
        self.num_experts, self.act_fn = experts, config.act_fn
        self.up_name = "gate_up_proj" if config.has_gate else "up_proj"
        for index, (name, inner, outer) in enumerate(((self.up_name, hidden, columns), ("down_proj", ffn, hidden))):
            values = exact_inputs.exact_values(experts, outer, inner, dtype=config.dtype, device=config.device, seed=index,
                                               scale=exact_inputs.fan_in_scale(inner))
            if config.is_transposed:
                values = values.transpose(1, 2).contiguous()
            self.register_parameter(name, torch.nn.Parameter(values))
            if config.has_bias:
                bias = exact_inputs.exact_values(experts, outer, dtype=config.dtype, device=config.device, seed=9 + index)
                self.register_parameter(f"{name}_bias", torch.nn.Parameter(bias))
        if config.has_norm:
            self.post_expert_norm = torch.nn.RMSNorm(hidden, eps=1e-5, dtype=config.dtype, device=config.device)

    def linear(self, x, name, e):
        weight = getattr(self, name)[e]
        out = x @ (weight if self.is_transposed else weight.t())
        return out + getattr(self, f"{name}_bias")[e] if self.has_bias else out

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, slot = (top_k_index == e).nonzero(as_tuple=True)
            h = self.linear(hidden_states[token], self.up_name, e)
            y = self.linear(self._apply_gate(h) if self.has_gate else self.act_fn(h), "down_proj", e)
            if self.config.has_norm:
                y = self.post_expert_norm(y)
            out = out.index_add(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out


class InterleavedExperts(Experts):
    def _apply_gate(self, gate_up):
        return self.act_fn(gate_up[..., ::2]) * (gate_up[..., 1::2] + 1)


def decorated(cls, **layout):
    norm = {"has_post_expert_norm": True} if layout.pop("has_norm") else {}
    return moe.use_experts_implementation(type(cls.__name__, (cls,), {}), **layout, **norm)


def make_experts(dtype, device, *, cls=Experts, shape=(5, 24, 40), act_fn=F.silu, has_norm=False, has_gate=True,
                 has_bias=False, is_transposed=False):
    layout = {"has_gate": has_gate, "has_bias": has_bias, "is_transposed": is_transposed,
              "is_concatenated": cls is not InterleavedExperts}
    config = SimpleNamespace(dtype=dtype, device=device, shape=shape, act_fn=act_fn, has_norm=has_norm,
                             _experts_implementation="eager", **layout)
    return decorated(cls, has_norm=has_norm, **layout)(config)


def inputs(dtype, device, *, tokens=50, experts=5, top_k=2, hidden=24):
    x_TH = exact_inputs.exact_values(tokens, hidden, dtype=dtype, device=device, seed=3)
    weights_TK = exact_inputs.exact_values(tokens, top_k, dtype=dtype, device=device, seed=4)
    ids_TK = exact_inputs.expert_ids(tokens, experts - 1, top_k, device=device, seed=5)  # the last expert stays empty
    return x_TH, ids_TK, weights_TK


def run_experts(experts, implementation, x_TH, ids_TK, weights_TK, grad_TH=None):
    experts.config._experts_implementation = implementation
    leaves = {"x": x_TH.detach().clone().requires_grad_(), "weights": weights_TK.detach().clone().requires_grad_()}
    exact_inputs.poison(x_TH.device)
    out = experts(leaves["x"], ids_TK, leaves["weights"])
    if grad_TH is None:
        grad_TH = exact_inputs.exact_values(*out.shape, dtype=out.dtype, device=out.device, seed=6)
    wanted = leaves | dict(experts.named_parameters())
    return {"out": out.detach(), **dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), grad_TH)))}


LAYOUTS = {
    "gated": {}, "plain": {"has_gate": False, "act_fn": F.relu}, "bias": {"has_bias": True},
    "transposed": {"is_transposed": True},
    "plain-bias-transposed": {"has_gate": False, "has_bias": True, "is_transposed": True},
    "interleaved": {"cls": InterleavedExperts, "has_bias": True, "is_transposed": True},
    "norm": {"has_norm": True}, "activation-with-parameter": {"act_fn": torch.nn.PReLU, "has_bias": True},
}


def layout_options(name, dtype, device):
    options = dict(LAYOUTS[name])
    if options.get("act_fn") is torch.nn.PReLU:
        options["act_fn"] = torch.nn.PReLU(dtype=dtype, device=device)
    known = inspect.signature(moe.use_experts_implementation).parameters
    if options.get("has_norm") and "has_post_expert_norm" not in known:
        pytest.skip(f"transformers {transformers.__version__} knows no norm after the experts")
    return options


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_as_accurate_as_its_definition(layout, dtype, device):
    tensors = inputs(dtype, device)
    experts = make_experts(dtype, device, **layout_options(layout, dtype, device))
    exact = make_experts(torch.float64, device, **layout_options(layout, torch.float64, device))
    reference = run_experts(exact, "eager", *(t.double() if t.is_floating_point() else t for t in tensors))
    baseline, found = (run_experts(experts, implementation, *tensors) for implementation in ("eager", "gbmoe"))
    assert found.keys() == reference.keys()
    for name in reference:
        assert_as_accurate_as(found[name], baseline[name], reference[name], name)
    again = run_experts(experts, "gbmoe", *tensors)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sentinels_add_nothing_and_get_zero_gradients(layout, device):
    """Expert parallelism marks slots of other ranks' experts with E: nothing comes of them, whatever they hold."""
    x_TH, ids_TK, weights_TK = inputs(torch.float64, device)
    experts = make_experts(torch.float64, device, **layout_options(layout, torch.float64, device))
    experts._is_expert_parallel = True
    here_TK = torch.rand(ids_TK.shape, generator=exact_inputs.generator(device, 7), device=device) < 0.5
    here_TK[0], gone_T = False, ~here_TK.any(1)
    assert gone_T.sum() > 1
    ids_TK = torch.where(here_TK, ids_TK, experts.num_experts)
    poisoned_TH = torch.where(gone_T.unsqueeze(1), torch.nan, x_TH)
    poisoned_TK = torch.where(here_TK, weights_TK, torch.nan)
    expected = run_experts(experts, "eager", x_TH, ids_TK, weights_TK)
    found = run_experts(experts, "gbmoe", poisoned_TH, ids_TK, poisoned_TK)
    for name, value in expected.items():
        assert accuracy.relative_error(found[name], value) < 1e-12, name
    for name in ("out", "x"):
        assert (found[name][gone_T] == 0).all()
    assert (found["weights"][~here_TK] == 0).all()
    nowhere = run_experts(experts, "gbmoe", poisoned_TH, torch.full_like(ids_TK, experts.num_experts), poisoned_TK)
    assert all((value == 0).all() for value in nowhere.values())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=dtype_id)
@pytest.mark.parametrize("tokens, top_k", [(0, 2), (1, 1), (7, 5)])
def test_few_tokens_and_wide_weights(tokens, top_k, index_dtype, device):
    """No token, one token, and every expert for each token; router weights in float32 with rows in bfloat16."""
    experts = make_experts(torch.bfloat16, device, has_bias=True)
    x_TH = exact_inputs.exact_values(tokens, 24, dtype=torch.bfloat16, device=device, seed=3)
    ids_TK = exact_inputs.expert_ids(tokens, 5, top_k, device=device, seed=5)
    weights_TK = torch.rand(tokens, top_k, generator=exact_inputs.generator(device, 6), device=device)
    found = run_experts(experts, "gbmoe", x_TH, ids_TK.to(index_dtype), weights_TK)
    baseline = run_experts(experts, "eager", x_TH, ids_TK, weights_TK)
    exact = make_experts(torch.float64, device, has_bias=True)
    reference = run_experts(exact, "eager", x_TH.double(), ids_TK, weights_TK.double())
    for name in reference:
        assert_as_accurate_as(found[name], baseline[name], reference[name], name)


def test_autocast_computes_as_its_dtype_and_returns_that_of_the_hidden_states(device):
    halves = inputs(torch.bfloat16, device)
    wide = [t.float() if t.is_floating_point() else t for t in halves]
    exact = [t.double() if t.is_floating_point() else t for t in halves]
    reference = run_experts(make_experts(torch.float64, device, has_bias=True), "eager", *exact)
    baseline = run_experts(make_experts(torch.bfloat16, device, has_bias=True), "eager", *halves)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = run_experts(make_experts(torch.float32, device, has_bias=True), "gbmoe", *wide)
    for name in reference:
        assert found[name].dtype == torch.float32
        assert_as_accurate_as(found[name].bfloat16(), baseline[name], reference[name], name)


def seen_operators(function, *args):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    seen = []
    with Names():
        function(*args)
    return [name.removeprefix("gbmoe::") for name in seen if name.startswith("gbmoe::")]


@pytest.mark.parametrize("model_type", MODELS)
def test_the_experts_of_a_model_were_five_operators(model_type):
    """Gather, two products, the model's gate between them, scatter: they are one."""
    model = build(model_type, dtype=torch.float32)
    model.set_experts_implementation("gbmoe")
    experts = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    function = gbmoe.ClampedSilu(1.702, 7.0, 7.0, 1.0) if model_type == "gpt_oss" else "silu"
    assert experts and all(adapter.fused_function(module) == function for module in experts)
    per_layer = seen_operators(model, token_ids(2, 5))
    assert per_layer == ["routing_plan", "expert_mlp"] * len(experts)


GATE_CONSTANTS = {"num_local_experts": 5, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 40, "hidden_act": "silu",
                  "swiglu_limit": 1.5, "swiglu_alpha": 1.702, "_experts_implementation": "eager"}


@pytest.mark.parametrize("owner", adapter._GATES)
def test_gates_of_models_are_those_that_they_are_taken_for(owner, device):
    """Values and all gradients of the model's own experts, of which clamps are reached."""
    name = {"GptOssExperts": "gpt_oss", "OpenAIPrivacyFilterExperts": "openai_privacy_filter",
            "DeepseekV4Experts": "deepseek_v4", "Glm5NextTextExperts": "glm5_next", "HYV4Experts": "hy_v4", "HYV4VLExperts": "hy_v4_vl",
            "MiniMaxM3VLExperts": "minimax_m3_vl"}[owner]
    try:
        of_model = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError:
        pytest.skip(f"this release of transformers has no {name}")
    dtype = torch.float32 if owner == "OpenAIPrivacyFilterExperts" else torch.float64  # whose own forward computes in float32
    experts = getattr(of_model, owner)(SimpleNamespace(**GATE_CONSTANTS)).to(device, dtype)
    for number, parameter in enumerate(experts.parameters()):
        parameter.data = exact_inputs.exact_values(*parameter.shape, dtype=dtype, device=device, seed=number)
    if owner in ("GptOssExperts", "OpenAIPrivacyFilterExperts"):
        experts.limit = 1.5  # older releases do not take it from the configuration
    assert adapter.fused_function(experts).limit == 1.5
    tensors = inputs(dtype, device)
    expected, got = (run_experts(experts, implementation, *tensors) for implementation in ("eager", "gbmoe"))
    for what, value in expected.items():
        torch.testing.assert_close(got[what], value, msg=what)


def test_every_gate_of_a_model_is_known_or_documented():
    """A release with another gate function shows here: it is computed, but not fused, until it is in the table or in the page's row of
    those. A class that never calls the implementation belongs in another row."""
    composed = set.union(*(names for names, computed in rows_of_the_page() if computed.startswith("composed")))
    never, seen = set(models_that_never_call()), 0
    for source in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        owner = None
        for line in source.read_text().splitlines():
            if line.startswith("class "):
                owner = re.match(r"class (\w+)", line).group(1)
            if line.startswith("    def _apply_gate("):
                seen += 1
                assert owner in adapter._GATES or source.parent.name in composed | never, source
    assert seen >= len(adapter._GATES) // 2


def test_one_of_two_products_wanted_its_sizes_elsewhere(monkeypatch):
    """Row lengths of which Hopper takes one: the other product's engine waited for the device inside the operator, which no CUDA
    graph can hold. On fake CUDA tensors, which need no GPU."""
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    for name, engine in engines.ENGINES.items():
        reason = None if name in ("hopper", "cublas_grouped") else "not this one"
        monkeypatch.setitem(vars(engine), "unavailable", lambda device, reason=reason: reason)
    seen = []
    with FakeTensorMode(), Names():
        empty = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        experts = SimpleNamespace(
            has_gate=True, has_bias=False, is_transposed=False, gate_up_proj=empty(4, 24, 16), down_proj=empty(4, 16, 12),
            _apply_gate=lambda h_PF: torch.mul(*h_PF.chunk(2, 1)))
        experts._parameters, experts._modules = {name: getattr(experts, name) for name in ("gate_up_proj", "down_proj")}, {}
        adapter.experts_forward(experts, empty(10, 16), empty(10, 2, dtype=torch.int64), empty(10, 2))
    assert [name.removeprefix("gbmoe::") for name in seen if name.startswith("gbmoe::")] \
        == ["routing_plan", "padded_gather", "gmm", "gmm_by_host", "padded_scatter"]


def test_frozen_parameters_and_inference(device):
    experts = make_experts(torch.float32, device, has_bias=True)
    x_TH, ids_TK, weights_TK = inputs(torch.float32, device)
    expected = run_experts(experts, "gbmoe", x_TH, ids_TK, weights_TK)
    with torch.inference_mode():
        assert torch.equal(experts(x_TH, ids_TK, weights_TK), expected["out"])
    experts.requires_grad_(False)
    experts.down_proj.requires_grad_()
    out = experts(x_TH, ids_TK, weights_TK)
    out.backward(exact_inputs.exact_values(*out.shape, dtype=out.dtype, device=device, seed=6))
    assert torch.equal(experts.down_proj.grad, expected["down_proj"])
    assert all(p.grad is None for name, p in experts.named_parameters() if name != "down_proj")


# -------------------------------------------------------------------------------------------------------- two processes


def on_two_ranks(rank, store, results):
    """Every arrangement on this rank, against the whole model: the largest error of logits and of every gradient."""
    rank_groups.join(rank, 2, store)
    adapter.register()
    ids, mesh = token_ids(2, 11), dist.init_device_mesh("cpu", (2,))
    expected = forward_and_gradients(build("qwen3_moe"), "gbmoe", ids)
    errors = {}
    for arrangement in ("all_reduce", "all_to_all", "fully_shard"):
        model = build("qwen3_moe")
        if arrangement == "fully_shard":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            from transformers.distributed.expert_parallel import apply_expert_parallelism

            plan = {f"model.layers.{layer}.mlp.experts{name}": style for layer in range(2) for name, style in
                    ((".gate_up_proj", "grouped_gemm"), (".down_proj", "grouped_gemm"), ("", "ep_dispatch_experts"))}
            apply_expert_parallelism(model, mesh, mesh, plan, arrangement)
            assert model.model.layers[0].mlp.experts.num_experts == 4
        assert adapter.uncalled(model) == {}  # sharded weights were taken for quantised ones
        found = forward_and_gradients(model, "gbmoe", ids)
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}
        assert whole.keys() == expected.keys()
        sharded = [value for name, value in found.items() if ".experts." in name]
        assert all(value.to_local().size(0) == 4 for value in sharded)
        errors[arrangement] = max(accuracy.relative_error(whole[name], value) for name, value in expected.items())
    results[rank] = errors
    dist.destroy_process_group()


def test_expert_parallelism_and_fully_shard_give_what_one_process_gives(tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="needs a transformers with it")
    results = rank_groups.shared_by_ranks(on_two_ranks, 2, tmp_path)
    for rank in range(2):
        assert results[rank].keys() == {"all_reduce", "all_to_all", "fully_shard"}
        assert all(error < 1e-6 for error in results[rank].values()), results


# ------------------------------------------------------------------------------------------------------ what is refused


def test_float8_experts_are_refused_by_name():
    config = SimpleNamespace(hidden_size=16, num_local_experts=2, intermediate_size=16, hidden_act="silu",
                             _experts_implementation="gbmoe")
    quantised = moe.use_experts_implementation(type("FP8Experts", (finegrained_fp8.FP8Experts,), {}),
                                               experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    ids_TK, weights_TK = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(TypeError, match=r"FP8Experts.gate_up_proj: expected a plain tensor of bfloat16.*float8_e4m3fn"):
        quantised(config, block_size=(16, 16))(torch.zeros(3, 16), ids_TK, weights_TK)


@pytest.mark.parametrize("name, value", [
    ("gate_up_proj", torch.zeros(5, 40, 24, dtype=torch.uint8)),
    ("down_proj", torch.zeros(5, 24, 20, dtype=torch.int8)),
    # A wrapper that says bfloat16, as quantised tensors of torchao do.
    ("down_proj", torch.nested.nested_tensor([torch.zeros(24, 40)] * 5, dtype=torch.bfloat16, layout=torch.jagged)),
], ids=["uint8", "int8", "wrapper"])
def test_parameters_that_are_not_plain_numbers_are_refused_by_name(name, value):
    experts, tensors = make_experts(torch.bfloat16, "cpu"), inputs(torch.bfloat16, "cpu")
    experts.config._experts_implementation = "gbmoe"
    delattr(experts, name)
    setattr(experts, name, value)
    with pytest.raises(TypeError, match=f'"gbmoe": Experts.{name}: expected a plain tensor of .*choose another'):
        experts(*tensors)


def test_weights_of_another_dtype_were_said_to_be_w1():
    model = build("gpt_oss", torch.bfloat16)
    model.model.layers[0].mlp.experts.float()
    message = r"GptOssExperts.gate_up_proj: expected the dtype of the hidden states, torch.bfloat16 \(load .*, got torch.float32"
    with pytest.raises(TypeError, match=message):
        model(token_ids(1, 8))
    with torch.autocast("cpu", torch.bfloat16):
        model(token_ids(1, 8))
    experts = model.model.layers[0].mlp.experts.bfloat16()
    experts.down_proj_bias.data = experts.down_proj_bias.data.float()
    with pytest.raises(TypeError, match="GptOssExperts.down_proj_bias: expected the dtype of the hidden states"):
        model(token_ids(1, 8))


def test_wrong_arguments_are_named():
    experts, (x_TH, ids_TK, weights_TK) = make_experts(torch.float32, "cpu"), inputs(torch.float32, "cpu")
    experts.config._experts_implementation = "gbmoe"
    with pytest.raises(TypeError, match=r"Experts.gate_up_proj: expected the dtype of .*, torch.float64 \(.*, got torch.float32"):
        experts(x_TH.double(), ids_TK, weights_TK)
    with pytest.raises(ValueError, match="weights: expected shape"):
        experts(x_TH, ids_TK, torch.rand(x_TH.size(0), 5))
    with pytest.raises(TypeError, match="experts: expected dtype int32, int64"):
        experts(x_TH, ids_TK.float(), weights_TK)


def pip_knows(monkeypatch, version):
    def found(package):
        assert package == "transformers"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version
    monkeypatch.setattr(importlib.metadata, "version", found)


def test_without_transformers_the_message_says_what_to_install(monkeypatch):
    pip_knows(monkeypatch, None)
    for name in ("transformers", "transformers.integrations.moe", "transformers.integrations.finegrained_fp8"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"transformers 5.8 or newer: pip install.*\(installed: none\)"):
        adapter.register()


@pytest.mark.parametrize("version", ["4.57.1", "5.7.3", "5.0.0rc1"])
def test_a_transformers_that_is_too_old_is_said_to_be(monkeypatch, version):
    pip_knows(monkeypatch, version)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=rf"transformers 5.8 or newer: pip install.*\(installed: {version}\)"):
        adapter.register()


@pytest.mark.parametrize("version", ["5.8.0", "5.8.0.dev0", "5.23.0", "6.0", None])
def test_a_module_missing_under_transformers_is_not_said_to_be_a_version_too_old(monkeypatch, version):
    class WithoutHttpx(types.ModuleType):
        def __getattr__(self, name):
            raise ModuleNotFoundError("No module named 'httpx'", name="httpx")
    pip_knows(monkeypatch, version)
    module = WithoutHttpx("transformers.integrations.moe")
    module.__path__ = []
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ImportError) as raised:
        adapter.register()
    assert str(raised.value) == (f"gbmoe.compat.transformers: transformers {version or 'of unknown version'} is installed, but"
                                 " its import failed: No module named 'httpx'")
    assert raised.value.name == raised.value.__cause__.name == "httpx"


def test_import_alone_changes_nothing():
    probe = ("import sys, gbmoe.compat.transformers; assert 'transformers' not in sys.modules\n"
             "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as table; assert 'gbmoe' not in table")
    subprocess.run([python("torch"), "-c", probe], check=True)


def test_float8_experts():
    adapter.register(fp8_recipe=Float8BlockScaling())
    model = build("mixtral", dtype=torch.bfloat16)
    ids = token_ids(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_experts_implementation("gbmoe_float8")
        logits = model(ids).logits
    assert 0.001 < accuracy.relative_error(logits, expected.double()) < 0.2
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_anomaly_detection_took_rows_of_dropped_slots_for_gradients(layout, device):
    x_TH, ids_TK, weights_TK = inputs(torch.float64, device)
    experts = make_experts(torch.float64, device, **layout_options(layout, torch.float64, device))
    experts._is_expert_parallel = True
    ids_TK = torch.where(torch.arange(ids_TK.numel(), device=device).view(ids_TK.shape) % 3 == 0, experts.num_experts, ids_TK)
    expected = run_experts(experts, "gbmoe", x_TH, ids_TK, weights_TK)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills with NaN what torch.empty gives, as memory may hold anyway
    try:
        with torch.autograd.detect_anomaly():
            found = run_experts(experts, "gbmoe", x_TH, ids_TK, weights_TK)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# --------------------------------------------------------------------------------------------------- programs that are not edited

PROGRAM = """
import sys, torch
assert "torch" in sys.modules and "gbmoe" not in sys.modules  # nothing before transformers' experts
from transformers import OlmoeConfig, OlmoeForCausalLM
model = OlmoeForCausalLM(OlmoeConfig(vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     num_experts=4, num_experts_per_tok=2, eos_token_id=None, pad_token_id=None))
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
function = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
print(model.config._experts_implementation, getattr(function, "func", function).__module__,
      "fp8_recipe" in getattr(function, "keywords", {}))
with torch.no_grad():
    model.bfloat16()(torch.randint(50, (1, 16)), use_cache=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("value, expected", [(None, "grouped_mm gbmoe.compat.transformers False"),
                                             ("gbmoe_float8", "grouped_mm gbmoe.compat.transformers True"),
                                             ("off", "grouped_mm transformers.integrations.moe False")])
def test_a_program_that_nobody_edits_takes_it(value, expected, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the hidden one')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    environment |= {} if value is None else {"GBMOE_TRANSFORMERS": value}
    path = subprocess.run([python(), "-m", "gbmoe", "transformers"], env=environment, capture_output=True, text=True, check=True)
    environment["PYTHONPATH"] = path.stdout.splitlines()[-1]
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the hidden one", expected]


@pytest.fixture
def as_default(monkeypatch):
    """register(as_default=True), undone after the test."""
    monkeypatch.setattr(moe.ExpertsInterface, "_global_mapping", dict(moe.ExpertsInterface._global_mapping))
    monkeypatch.setattr(transformers.PreTrainedModel, "post_init", transformers.PreTrainedModel.post_init)
    monkeypatch.setattr(_uncalled_experts, "_told", set())
    adapter.register(as_default=True)


@pytest.mark.parametrize("named, while_decoding", [(None, "batched_mm"), ("gbmoe", "gbmoe")])
def test_decode_steps_of_the_default_were_not_gbmoes(named, while_decoding, as_default, calls, monkeypatch):
    # As `generate` asks the model for its device.
    monkeypatch.setattr(transformers.OlmoeForCausalLM, "device", property(lambda self: SimpleNamespace(type="cuda")))
    config = transformers.OlmoeConfig(**COMMON | MODELS["olmoe"], experts_implementation=named)
    model, before = transformers.OlmoeForCausalLM(config), "grouped_mm" if named is None else named
    assert config._experts_implementation == before
    with model._optimize_model_for_decode(), torch.no_grad():
        assert config._experts_implementation == while_decoding
        model(token_ids(2, 1))
    assert calls.count == 2 and config._experts_implementation == before


def test_what_exporters_choose_is_transformers_own_in_an_export(as_default):
    experts, tensors = make_experts(torch.float32, "cpu"), inputs(torch.float32, "cpu")
    experts.config._experts_implementation = "batched_mm"
    assert "expert_mlp" in seen_operators(experts, *tensors)
    graph = torch.export.export(experts, tensors).graph
    targets = [str(node.target) for node in graph.nodes]
    assert any("bmm" in target or "matmul" in target for target in targets)
    assert not [target for target in targets if "gbmoe" in target]


def test_a_model_whose_experts_never_call_the_default_was_built_without_a_word(as_default):
    def llama4():
        return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(
            **COMMON, intermediate_size=16, intermediate_size_mlp=16, num_local_experts=2, head_dim=8, interleave_moe_layer_step=1))
    adapter.register(as_default=True)  # which wrapped nothing twice
    with pytest.warns(UserWarning, match="2 modules of Llama4TextModel will not be computed by gbmoe") as warned:
        llama4()
    assert len([each for each in warned if "gbmoe" in str(each.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gbmoe")
        llama4()
        transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**COMMON | MODELS["olmoe"]))


@pytest.mark.parametrize("model_type", ["olmoe", "gpt_oss"])
def test_a_line_of_the_configuration_file_names_it(model_type, calls, tmp_path):
    model = build(model_type, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert not [key for key in written if "experts_implementation" in key]  # transformers does not write it
    for line, count in (({}, 0), ({"experts_implementation": "gbmoe"}, 2)):
        path.write_text(json.dumps({**written, **line}))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded(token_ids(1, 5))
        assert calls.count == count


def test_experts_of_computed_weights_were_composed():
    """A parametrization of a matrix, as PEFT makes one for LoRA on experts, was taken for a parameter of something else; and each class
    that torch makes for it was kept."""
    class Sum(torch.nn.Module):
        def __init__(self, like):
            super().__init__()
            self.added = torch.nn.Parameter(torch.full_like(like, 0.01))

        def forward(self, weight):
            return weight + self.added

    model = build("gpt_oss")
    experts, known = model.model.layers[0].mlp.experts, len(adapter._KNOWN_GATES)
    expected = adapter.fused_function(experts)
    for name in ("gate_up_proj", "down_proj_bias"):
        torch.nn.utils.parametrize.register_parametrization(experts, name, Sum(getattr(experts, name)))
    assert adapter.fused_function(experts) == expected is not None and len(adapter._KNOWN_GATES) <= known + 1
    found = [forward_and_gradients(model, implementation, token_ids(2, 9)) for implementation in ("gbmoe", "eager")]
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value)


def test_modules_that_will_not_call_it_are_named():
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
    config = SimpleNamespace(num_local_experts=2, intermediate_size=8, hidden_size=8, hidden_act="silu")
    model = torch.nn.ModuleDict({"a": make_experts(torch.float32, "cpu"), "b": Llama4TextExperts(config),
                                 "experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    assert set(adapter.uncalled(model)) == {"b", "experts"}
    with pytest.warns(UserWarning, match="2 modules of ModuleDict will not be computed by gbmoe .b, experts.: Llama4TextExperts computes"):
        adapter.register(model=model)
    assert adapter.uncalled(build("mixtral", dtype=torch.float32)) == {}


def test_experts_in_module_dicts_and_matrices_of_all_experts_were_taken_for_called():
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxFFN
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts
    dbrx = DbrxFFN(SimpleNamespace(hidden_size=8, d_model=8, ffn_config=DbrxFFNConfig(
        ffn_hidden_size=8, moe_num_experts=2, moe_top_k=1, hidden_size=8)))
    assert set(adapter.uncalled(dbrx)) == {"experts.mlp"}
    for experts in (SwitchTransformersExperts(transformers.SwitchTransformersConfig(d_model=8, d_ff=8, num_experts=2)),
                    NllbMoeExperts(transformers.NllbMoeConfig(d_model=8, num_experts=2), 8)):
        assert set(adapter.uncalled(torch.nn.ModuleDict({"experts": experts}))) == {"experts"}
        assert set(adapter.uncalled(experts)) == {""}


def test_experts_that_are_embeddings_were_taken_for_called():
    from transformers.models.doge.modeling_doge import DogeCDMoE
    block = DogeCDMoE(transformers.DogeConfig(hidden_size=8, intermediate_size=8, num_experts=4, num_experts_per_tok=2, is_moe=True))
    assert adapter.uncalled(torch.nn.ModuleDict({"mlp": block})) == {"mlp": "DogeCDMoE computes its experts itself, whatever implementation"
                                                                     " is set"}


def test_shared_experts_and_lists_of_experts_that_call_it_are_not_named():
    class SomeSharedExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = torch.nn.Parameter(torch.empty(2, 8, 8))

    calling = torch.nn.ModuleList([make_experts(torch.float32, "cpu")])
    assert adapter.uncalled(torch.nn.ModuleDict({"experts": calling, "shared_experts": SomeSharedExperts()})) == {}


def models_that_never_call():
    """Types of models whose experts call no implementation: classes by whose names they hold experts, without the decorator."""
    for source in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        lines = source.read_text().splitlines()
        for number, line in enumerate(lines):
            kind = re.match(r"class (\w*(?:(?<!Shared)Experts|CDMoE|NaiveMoe))\(", line)
            if kind is None:
                continue
            above = number
            while above and not lines[above - 1].startswith("class ") and lines[above - 1].strip():
                above -= 1
            base = re.search(r"\((\w+)\):", line)
            inherits = base is not None and base.group(1).endswith(("Experts", "NaiveMoe"))
            if not inherits and not any("use_experts_implementation" in text for text in lines[above:number]):
                yield source.parent.name


def rows_of_the_page():
    """Of the table of models: their names in each row, and how it is computed."""
    page = (Path(__file__).parents[2] / "docs/switching/transformers.md").read_text()
    table = page.partition("## Which models take the fused way")[2]
    return [(set(re.findall(r"\w+", cells[1])), cells[2].strip()) for cells in (line.split("|") for line in table.splitlines())
            if len(cells) == 4]


def test_models_that_never_call_it_were_said_to_be_composed():
    by_the_model = [names for names, computed in rows_of_the_page() if computed.startswith("by the model")]
    others = [names for names, computed in rows_of_the_page() if not computed.startswith("by the model")]
    assert len(by_the_model) == 1 and len(others) > 4
    never = set(models_that_never_call())
    assert {"llama4", "longcat_flash"} <= never
    assert never <= by_the_model[0], never - by_the_model[0]
    assert not never & set.union(*others), never & set.union(*others)


STARTUP = Path(adapter.__file__).parent / "startup"


RUN_THE_STARTUP_FILE = f"""
with open({str(STARTUP / "sitecustomize.py")!r}) as file:
    exec(file.read(), {{"__name__": "sitecustomize", "__file__": file.name}})
"""


def run_at_startup(program, *folders, value="gbmoe", interpreter=sys.executable):
    """Standard output and error of a program with these folders on PYTHONPATH."""
    environment = {**os.environ, "GBMOE_TRANSFORMERS": value, "PYTHONPATH": os.pathsep.join([*map(str, folders), str(STARTUP.parents[2])])}
    done = subprocess.run([interpreter, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import transformers.modeling_utils", "from transformers import PreTrainedModel",
                                   "import transformers.integrations.finegrained_fp8",
                                   "import importlib.util; importlib.util.find_spec('transformers.modeling_utils')"])
def test_it_is_taken_whatever_the_program_imports_first(first):
    """Imports that began with the models' base class, or with float8, were in the middle of a circle when the adapter imported them; and
    a look for the module lost the hook."""
    out, error = run_at_startup(f"""{RUN_THE_STARTUP_FILE}
{first}
import transformers.modeling_utils, transformers.integrations.moe as moe
print(moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"].__module__, "gbmoe" in moe.ALL_EXPERTS_FUNCTIONS)""", STARTUP, interpreter=python("torch"))
    assert out == "gbmoe.compat.transformers True" and "does not compute" not in error


@pytest.mark.slow
def test_an_unknown_choice_leaves_transformers_as_it_is_and_says_so():
    out, error = run_at_startup(f"""{RUN_THE_STARTUP_FILE}
import transformers.modeling_utils, transformers.integrations.moe as moe
print(moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"].__module__)""", STARTUP, value="0", interpreter=python("torch"))
    assert out == "transformers.integrations.moe"
    assert "GBMOE_TRANSFORMERS: expected one of gbmoe, gbmoe_float8, off, got '0'" in error


def test_two_copies_of_the_startup_file_found_each_other_for_ever(tmp_path):
    """Those of two environments, or a folder that is on the path by two names."""
    copies = [tmp_path / name for name in ("one", "two")]
    for copy in copies:
        copy.mkdir()
        (copy / "sitecustomize.py").write_text((STARTUP / "sitecustomize.py").read_text())
    (tmp_path / "sitecustomize.py").write_text("print('the hidden one')")
    out, error = run_at_startup("", *copies, tmp_path)
    assert out == "the hidden one" and "RecursionError" not in error
