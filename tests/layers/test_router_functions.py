"""The layer with routers of today's models: what Arguments say, the buffer of biases, padding, given experts, the shared expert's gate."""

import copy
import pickle

import pytest
import torch

import gbmoe
from gbmoe import RouterFunction
from gbmoe.layers import Arguments, LearnedRouter
from gbmoe.ops import route

SMALL = dict(hidden_size=16, ffn_hidden_size=24, moe_num_experts=8, moe_top_k=2, fp16=False, bias=False, device="cpu", mlp_type="glu",
             activation_fn=torch.nn.functional.silu, moe_loss_weight=0)
DEEPSEEK = dict(moe_router_score_function="sigmoid", moe_normalize_expert_weights=1, moe_router_enable_expert_bias=True,
                moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5)


def make(**fields):
    torch.manual_seed(0)
    return gbmoe.dMoE(Arguments(**{**SMALL, **fields}))


@pytest.mark.parametrize("fields, function", [
    (dict(), RouterFunction()),
    (dict(moe_normalize_expert_weights=2.0), RouterFunction(normalize=2.0)),
    (dict(moe_router_pre_softmax=False), RouterFunction(pre_softmax=False)),
    (dict(moe_router_score_function="sigmoid"), RouterFunction("sigmoid")),
    (dict(moe_router_score_function="sigmoid", moe_router_pre_softmax=False), RouterFunction("sigmoid")),
    (dict(moe_router_score_function="sqrtsoftplus", moe_normalize_expert_weights=1),
     RouterFunction("sqrtsoftplus", normalize=1, epsilon=1e-20)),
    (DEEPSEEK, RouterFunction("sigmoid", num_groups=4, group_topk=2, group_best=1, normalize=1, epsilon=1e-20, scale=2.5)),
    (dict(moe_router_num_groups=4, moe_router_group_topk=1), RouterFunction(num_groups=4, group_topk=1, group_best=2)),
    (dict(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_group_best=2),
     RouterFunction(num_groups=4, group_topk=2, group_best=2)),
    (dict(moe_router_num_groups=4), RouterFunction()), (dict(moe_router_num_groups=4, moe_router_group_topk=4), RouterFunction()),
    (dict(moe_router_topk_scaling_factor=0.5), RouterFunction(scale=0.5)),
])
def test_arguments_say_what_the_router_computes(fields, function):
    args = Arguments(**{**SMALL, **fields})
    assert args.router_function == function
    router, x = LearnedRouter(args), torch.randn(30, 16)
    scores, weights, ids = router(x)
    expected = route(x @ router.layer.weight.t(), 2, function=function, expert_bias=router.expert_bias)
    assert torch.equal(ids, expected.experts_TK)
    torch.testing.assert_close((scores, weights), (expected.scores_TE, expected.weights_TK))


@pytest.mark.parametrize("fields, words", [
    (dict(moe_router_score_function="tanh"), "moe_router_score_function: expected one of softmax, sigmoid, sqrtsoftplus, got 'tanh'"),
    (dict(moe_router_dtype="fp8"), "moe_router_dtype: expected None, 'fp32' or 'bf16', got 'fp8'"),
    (dict(moe_router_num_groups=3), "moe_router_num_groups: expected a divisor of moe_num_experts == 8, got 3"),
    (dict(moe_router_num_groups=0), "moe_router_num_groups: expected None or an int of at least 1, got 0"),
    (dict(moe_router_group_topk=2), "moe_router_num_groups: expected the number of groups with moe_router_group_topk, got None"),
    (dict(moe_router_num_groups=2, moe_router_group_topk=3), "moe_router_group_topk: expected at most moe_router_num_groups == 2, got 3"),
    (dict(moe_router_num_groups=8, moe_router_group_topk=1),
     "moe_router_group_topk: expected groups of 1 experts .* moe_top_k == 2 .*, got 1"),
    (dict(moe_router_num_groups=4, moe_router_group_topk=2, moe_router_group_best=3),
     "moe_router_group_best: expected at most 2, .*, got 3"),
    (dict(moe_router_topk_scaling_factor=float("nan")), "moe_router_topk_scaling_factor: expected None or a number, got nan"),
    (dict(moe_router_bias_update_rate=-1), "moe_router_bias_update_rate: expected a number of at least 0, got -1"),
    (dict(moe_router_pre_softmax=False, moe_normalize_expert_weights=2),
     "moe_normalize_expert_weights: expected None or 1 without .*, got 2"),
])
def test_what_no_router_computes_is_refused(fields, words):
    with pytest.raises(ValueError, match="Arguments: " + words):
        Arguments(**{**SMALL, **fields})


def test_the_bias_is_saved_and_has_no_gradient():
    layer = make(**DEEPSEEK)
    assert {name for name, _ in layer.named_parameters()} == {name for name, _ in make().named_parameters()}
    assert dict(layer.named_buffers()).keys() == {"router.expert_bias"}
    layer.router.expert_bias.uniform_(-1, 1)
    other = make(**DEEPSEEK)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other.router.expert_bias, layer.router.expert_bias)
    x = torch.randn(20, 16)
    layer(x).sum().backward()
    assert layer.router.expert_bias.grad is None and layer.router.layer.weight.grad is not None
    assert not make().state_dict().keys() ^ {"router.layer.weight", "experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"}


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(),
                                  lambda m: m.bfloat16().float(), lambda m: copy.deepcopy(m).half(),
                                  lambda m: pickle.loads(pickle.dumps(m)).half(),
                                  lambda m: m.to("cpu", torch.float16)])
def test_the_bias_stays_float32_with_all_its_bits(cast):
    router = make(**DEEPSEEK).router
    router.expert_bias.copy_(torch.arange(8) / 1000)
    before = router.expert_bias.clone()
    assert torch.equal(cast(router).expert_bias, before)


def test_the_bias_of_a_router_on_the_meta_device():
    router = make(**DEEPSEEK, device="meta").router.bfloat16()
    assert router.expert_bias.is_meta and router.expert_bias.dtype == torch.float32
    assert router.to_empty(device="cpu").expert_bias.dtype == torch.float32


def test_the_bias_decides_who_computes():
    layer, x = make(**DEEPSEEK), torch.randn(40, 16)
    layer.router.expert_bias[5] = 100
    _, weights, ids = layer.router(x)
    assert bool((ids == 5).any(1).all())
    torch.testing.assert_close(weights.sum(1), torch.full((40,), 2.5))


@pytest.mark.parametrize("layer_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("router_dtype, scores_dtype, rounded", [(None, None, False), ("fp32", torch.float32, False),
                                                                 ("bf16", torch.bfloat16, True)])
@pytest.mark.parametrize("linear_bias", [False, True])
def test_the_dtypes_of_logits_and_weights(layer_dtype, router_dtype, scores_dtype, rounded, linear_bias):
    """The second expert's logit is higher by what bfloat16 cannot tell."""
    fields = dict(moe_num_experts=2, moe_top_k=1, moe_router_dtype=router_dtype, moe_router_score_function="sigmoid",
                  moe_router_linear_bias=linear_bias, bf16=layer_dtype == torch.bfloat16)
    layer = LearnedRouter(Arguments(**{**SMALL, **fields}))
    layer.layer.weight.data.zero_()
    layer.layer.weight.data[:, 0] = 1
    layer.layer.weight.data[1, 1] = 2**-8
    scores, weights, ids = layer(torch.ones(3, 16, dtype=layer_dtype))
    assert ids.tolist() == 3 * [[0 if rounded else 1]]
    assert scores.dtype == weights.dtype == (scores_dtype or layer_dtype)
    before_experts = layer.call_before_experts(None)  # as one node with the experts
    assert rounded if before_experts is None else before_experts.scores_dtype == scores_dtype
    weights.sum().backward()
    assert layer.layer.weight.grad.dtype == layer_dtype
    assert not linear_bias or (layer.layer.bias.grad.dtype == layer_dtype and bool(layer.layer.bias.grad.any()))
    layer.layer.register_forward_hook(lambda *_: None)  # so that it is called
    assert layer(torch.ones(3, 16, dtype=layer_dtype))[0].dtype == (scores_dtype if router_dtype == "fp32" else layer_dtype)


def test_a_linear_bias_is_a_parameter_of_the_routers_layer():
    layer = make(moe_router_linear_bias=True, moe_router_pre_softmax=False)
    assert "router.layer.bias" in layer.state_dict() and not bool(layer.router.layer.bias.any())
    torch.nn.init.normal_(layer.router.layer.bias)
    x = torch.randn(20, 16)
    scores, weights, ids = layer.router(x)
    best, expected = layer.router.layer(x).topk(2)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, best.softmax(-1))
    torch.testing.assert_close(torch.autograd.grad(weights[:, 0].sum(), layer.router.layer.bias)[0],
                               torch.autograd.grad(best.softmax(-1)[:, 0].sum(), layer.router.layer.bias)[0])


@pytest.mark.parametrize("fields", [dict(), DEEPSEEK, dict(moe_router_pre_softmax=False)], ids=["softmax", "deepseek", "post"])
@pytest.mark.parametrize("impl", ["gbmoe", "reference"])
def test_padding_is_computed_by_no_expert(fields, impl):
    layer, x = make(**fields, mlp_impl=impl), torch.randn(5, 3, 16)
    padding = torch.zeros(5, 3, dtype=torch.bool)
    padding[3:, 1] = padding[4] = True
    out = layer(x, padding_mask=padding)
    assert not bool(out[padding].any())
    torch.testing.assert_close(out[~padding], layer(x)[~padding])
    broken = x.clone()
    broken[padding] = float("nan")
    assert torch.equal(layer(broken, padding_mask=padding), out)
    leaf = x.clone().requires_grad_()
    gradient, = torch.autograd.grad(layer(leaf, padding_mask=padding).square().sum(), leaf)
    assert not bool(gradient[padding].any()) and bool(gradient[~padding].any())


@pytest.mark.parametrize("fields", [dict(), DEEPSEEK, dict(moe_router_pre_softmax=False)], ids=["softmax", "deepseek", "post"])
def test_given_experts_are_those_that_compute(fields):
    """As in replay: the ids of one policy, the weights and gradients of another."""
    old, new, x = make(**fields), make(**fields), torch.randn(5, 3, 16)
    new.router.layer.weight.data.normal_()
    ids = old.router(x)[2].view(5, 3, 2)
    torch.testing.assert_close(old(x, given_experts=ids), old(x))
    _, weights, given = new.router(x, given_experts=ids)
    assert torch.equal(given.view(5, 3, 2), ids) and not torch.equal(new.router(x)[2], given)
    out = new(x, given_experts=ids)
    out.square().sum().backward()
    assert bool(new.router.layer.weight.grad.any())
    scores = new.router(x)[0]
    torch.testing.assert_close(weights / weights.sum(1, keepdim=True),
                               scores.gather(1, given) / scores.gather(1, given).sum(1, keepdim=True))


def test_batch_invariance_was_promised_for_norms_without_a_kernel_for_padding():
    layer = make(moe_normalize_expert_weights=2, batch_invariant=True)
    for given in ({"padding_mask": torch.zeros(3, dtype=torch.bool)}, {"given_experts": torch.zeros(3, 2, dtype=torch.int64)}):
        with pytest.raises(ValueError, match="dMoE: moe_normalize_expert_weights: expected None or 1 with batch_invariant .*, got 2"):
            layer(torch.randn(3, 16), **given)


def test_batch_invariant_logits_were_not_rounded_to_bfloat16():
    with pytest.raises(ValueError, match="Arguments: moe_router_dtype: expected None or 'fp32' with batch_invariant, .*, got 'bf16'"):
        Arguments(**SMALL, moe_router_dtype="bf16", batch_invariant=True)


def test_uniform_assignment_leaves_padding_out():
    layer = make(uniform_expert_assignment=True)
    ids = layer.router(torch.randn(3, 16), padding_mask=torch.tensor([False, True, False]))[2]
    assert ids.tolist() == [[0, 1], [-1, -1], [4, 5]]


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_a_layer_is_one_graph(backend):
    torch.compiler.reset()
    layer, x = make(**DEEPSEEK, moe_router_dtype="fp32"), torch.randn(6, 4, 16)
    padding, ids = torch.arange(24).view(6, 4) % 5 == 0, layer.router(x)[2].view(6, 4, 2)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for given in ({}, {"padding_mask": padding}, {"given_experts": ids}):
        torch.testing.assert_close(compiled(x, **given), layer(x, **given))


def test_a_router_of_ones_own_gets_what_is_given():
    class Own(torch.nn.Module):
        def forward(self, x, padding_mask):
            ids = torch.zeros(x.size(0), 2, dtype=torch.int64).masked_fill(padding_mask[:, None], -1)
            return None, torch.ones(x.size(0), 2), ids

    layer = make()
    layer.router = Own()
    out = layer(torch.randn(3, 16), padding_mask=torch.tensor([False, True, False]))
    assert not bool(out[1].any()) and bool(out[0].any())


def test_a_router_that_was_pickled_before_there_were_functions():
    layer, x = make(moe_normalize_expert_weights=1), torch.randn(5, 16)
    expected = layer(x)
    layer.router.__dict__.pop("_function")
    layer.router._buffers.pop("expert_bias")
    for field in list(vars(layer.args)):
        if field.startswith("moe_router_") or field == "moe_shared_expert_gate":
            vars(layer.args).pop(field)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_the_shared_experts_gate_is_qwen2s(mlp_type):
    layer, x = make(shared_expert=True, moe_shared_expert_gate=True, mlp_type=mlp_type), torch.randn(5, 3, 16)
    shared = layer.shared_expert
    assert shared.expert_gate.weight.shape == (1, 16) and "shared_expert.expert_gate.weight" in layer.state_dict()
    assert not [name for name in make(shared_expert=True).state_dict() if "expert_gate" in name]
    ungated = copy.deepcopy(shared)
    ungated.expert_gate = None
    torch.testing.assert_close(shared(x), torch.sigmoid(shared.expert_gate(x)) * ungated(x))
    layer(x).sum().backward()
    assert bool(shared.expert_gate.weight.grad.any())


def test_a_whole_block_is_qwen2_moes():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    config = transformers.Qwen2MoeConfig(hidden_size=16, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8,
                                         num_experts_per_tok=2, norm_topk_prob=False, hidden_act="silu")
    config._experts_implementation = "eager"
    block = Qwen2MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer = make(shared_expert=True, moe_shared_expert_gate=True, shared_expert_hidden_size=40)
    gate_up = block.experts.gate_up_proj
    layer.load_state_dict({
        "router.layer.weight": block.gate.weight, "experts.mlp.w1": gate_up[:, :24].reshape(-1, 16),
        "experts.mlp.v1": gate_up[:, 24:].reshape(-1, 16),
        "experts.mlp.w2": block.experts.down_proj.transpose(1, 2).reshape(-1, 16),
        **{f"shared_expert.{name}.weight": getattr(block.shared_expert, name).weight for name in ("gate_proj", "up_proj", "down_proj")},
        "shared_expert.expert_gate.weight": block.shared_expert_gate.weight})
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(layer(x), block(x), rtol=1e-4, atol=1e-4)
