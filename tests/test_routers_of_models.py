"""docs/routers.md: every row of its table says what it does, and is the router of that model in transformers."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gbmoe import Arguments, RouterFunction
from gbmoe.layers import LearnedRouter
from gbmoe.testing import exact_inputs

PAGE = Path(__file__).parent.parent / "docs" / "routers.md"
COLUMNS = ("model", "E, K", "score", "bias", "groups", "norm", "scale", "`Arguments`")
HIDDEN, TOKENS = 24, 100


def rows():
    """The cells of each row of the page's table, by the model's name."""
    lines = PAGE.read_text().splitlines()
    first = lines.index(f"| {' | '.join(COLUMNS)} |") + 2
    table = lines[first : lines.index("", first)]
    return {cells[0]: dict(zip(COLUMNS, cells, strict=True)) for cells in (line.strip("| ").split(" | ") for line in table)}


ROWS = rows()


def arguments(row):
    experts, top_k = map(int, row["E, K"].split(", "))
    fields = eval(f"dict({row['`Arguments`'].strip('`')})")
    return Arguments(hidden_size=HIDDEN, ffn_hidden_size=8, moe_num_experts=experts, moe_top_k=top_k, fp16=False, device="cpu", **fields)


GROUPED = dict(n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5)
UNGROUPED = GROUPED | dict(n_group=1, topk_group=1)
# Model: its module in transformers, the router's class, and those fields of its configuration that the router reads, except for sizes.
ROUTERS = {
    "Mixtral": ("mixtral", "MixtralTopKRouter", {}),
    "DeepSeek-V2": ("deepseek_v2", "DeepseekV2TopkRouter",
                    dict(topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0)),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3TopkRouter", GROUPED),
    "DeepSeek-V4-Flash": ("deepseek_v4", "DeepseekV4TopKRouter", dict(scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)),
    "Kimi-K2": ("deepseek_v3", "DeepseekV3TopkRouter", UNGROUPED | dict(routed_scaling_factor=2.827)),  # as transformers loads it
    "GLM-4.5": ("glm4_moe", "Glm4MoeTopkRouter", UNGROUPED),
    "GLM-5": ("glm_moe_dsa", "GlmMoeDsaTopkRouter", UNGROUPED),
    "Ling-2.0": ("bailing_hybrid", "BailingHybridTopkRouter", GROUPED),
    "MiniMax-M2": ("minimax_m2", "MiniMaxM2TopKRouter", {}),
    "ERNIE-4.5": ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", dict(moe_norm_min=1e-12)),
    "Qwen2-MoE": ("qwen2_moe", "Qwen2MoeTopKRouter", dict(norm_topk_prob=False)),
    "Qwen3": ("qwen3_moe", "Qwen3MoeTopKRouter", dict(norm_topk_prob=True)),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextTopKRouter", dict(norm_topk_prob=True)),
    "Qwen3.5": ("qwen3_5_moe", "Qwen3_5MoeTopKRouter", {}),
    "Hunyuan-A13B": ("hunyuan_v1_moe", "HunYuanMoEV1Gate", {}),
    "Granite-3.0": ("granitemoe", "GraniteMoeTopKRouter", {}),
    "gpt-oss-120b": ("gpt_oss", "GptOssTopKRouter", {}),
    "Llama-4": ("llama4", "Llama4Router", {}),
}


def test_every_model_has_a_row():
    assert list(ROWS) == list(ROUTERS)


@pytest.mark.parametrize("model", ROWS)
def test_what_a_row_says_is_what_its_arguments_do(model):
    row = ROWS[model]
    args = arguments(row)
    groups = re.fullmatch(r"(\d+) of (\d+), by the best (\d+)", row["groups"])
    chosen, number, best = map(int, groups.groups()) if groups else (1, 1, RouterFunction.group_best)
    expected = RouterFunction(row["score"].removesuffix(" of those chosen"), pre_softmax=" of those chosen" not in row["score"],
                              num_groups=number, group_topk=chosen, group_best=best, normalize={"-": None, "sum": 1}[row["norm"]],
                              epsilon=args.router_function.epsilon, scale=float(row["scale"]))
    assert args.router_function == expected and (groups is not None or row["groups"] == "-")
    said = {"-": (False, False), "choice": (True, False), "linear layer": (False, True)}[row["bias"]]
    assert said == (args.moe_router_enable_expert_bias, args.moe_router_linear_bias)


def normal(*shape, seed):
    return torch.randn(*shape, generator=exact_inputs.generator("cpu", seed))


def made_by_transformers(module, name, experts, top_k, fields):
    """A router of transformers with random parameters, in evaluation mode."""
    pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}", reason="this transformers has no such model")
    router = getattr(modeling, name)(SimpleNamespace(
        hidden_size=HIDDEN, num_experts=experts, num_local_experts=experts, num_experts_per_tok=top_k, moe_topk=top_k, **fields))
    for seed, parameter in enumerate(router.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed) / 3
    return router.eval()


def set_choice_bias(router, bias_E):
    """Put it where the router has such biases, as parameter or as buffer."""
    for module in router.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data = bias_E.view_as(module.e_score_correction_bias)


def decided(model, router, x, bias_E, top_k):
    """(weights [T,K], ids [T,K]) of transformers' router."""
    if model == "Llama-4":
        return router(x)[0].topk(top_k)
    return (router(x, bias_E) if model == "MiniMax-M2" else router(x))[1:]  # whose block has the bias


def linear(router):
    """(weight, bias or None) of transformers' router."""
    layer = getattr(router, "wg", router)
    return layer.weight, getattr(layer, "bias", None)


@pytest.mark.parametrize("model", ROUTERS)
def test_a_row_is_the_models_router(model):
    args = arguments(ROWS[model])
    experts, top_k = args.moe_num_experts, args.moe_top_k
    module, name, fields = ROUTERS[model]
    theirs, mine = made_by_transformers(module, name, experts, top_k, fields), LearnedRouter(args)
    mine.layer.load_state_dict({name: t.detach() for name, t in zip(("weight", "bias"), linear(theirs)) if t is not None})
    bias_E = None
    if args.moe_router_enable_expert_bias:
        bias_E = normal(experts, seed=7) / (10 if args.moe_router_score_function != "softmax" else experts)
        set_choice_bias(theirs, bias_E)
        mine.expert_bias.copy_(bias_E)
    x = normal(TOKENS, HIDDEN, seed=11).requires_grad_()
    weights, ids = decided(model, theirs, x, bias_E, top_k)
    _, my_weights, my_ids = mine(x)

    order, my_order = ids.sort(1), my_ids.sort(1)
    assert torch.equal(my_order.values, order.values)
    torch.testing.assert_close(my_weights.gather(1, my_order.indices), weights.gather(1, order.indices), rtol=2e-6, atol=1e-7)
    if bias_E is not None:  # it must have decided something
        mine.expert_bias.zero_()
        assert not torch.equal(mine(x)[2].sort(1).values, order.values)
    grad = normal(TOKENS, experts, seed=12)  # by expert, because the slots may be in another order
    expected = torch.autograd.grad((weights * grad.gather(1, ids)).sum(), [x, *(t for t in linear(theirs) if t is not None)])
    got = torch.autograd.grad((my_weights * grad.gather(1, my_ids)).sum(), [x, *mine.layer.parameters()])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_deepseek_v4s_hash_layers_are_given_experts():
    args = arguments(ROWS["DeepSeek-V4-Flash"])
    module, _, fields = ROUTERS["DeepSeek-V4-Flash"]
    theirs = made_by_transformers(module, "DeepseekV4HashRouter", args.moe_num_experts, args.moe_top_k, fields | dict(vocab_size=50))
    theirs.tid2eid = exact_inputs.expert_ids(50, args.moe_num_experts, args.moe_top_k, device="cpu", seed=1)
    mine, x = LearnedRouter(args), normal(TOKENS, HIDDEN, seed=11)
    mine.layer.load_state_dict({"weight": theirs.weight})
    input_ids = torch.arange(TOKENS) % 50
    _, weights, ids = theirs(x, input_ids)
    _, my_weights, my_ids = mine(x, given_experts=theirs.tid2eid[input_ids])
    assert torch.equal(my_ids, ids)
    torch.testing.assert_close(my_weights, weights, rtol=2e-6, atol=1e-7)


def test_phimoes_weights_are_no_functions():
    """What the page says of it: each weight is a softmax over the logits near the highest that is left."""
    theirs = made_by_transformers("phimoe", "PhimoeTopKRouter", 16, 2, dict(router_jitter_noise=0.01, input_jitter_noise=0.0))
    x = normal(TOKENS, HIDDEN, seed=11)
    logits, weights, ids = theirs(x)
    for place in range(2):
        left = logits.scatter(1, ids[:, :place], -torch.inf)
        highest = left.max(1, keepdim=True).values
        near = (highest - logits) / logits.abs().clamp(min=highest) <= 0.02
        expected = left.masked_fill(~near, -torch.inf).softmax(1).max(1).values
        torch.testing.assert_close(weights[:, place], expected)
    assert not any(torch.allclose(weights.sum(1), total) for total in (torch.ones(TOKENS), logits.softmax(1).gather(1, ids).sum(1)))
