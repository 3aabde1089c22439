"""Routers of any RouterFunction: against PyTorch's autograd in float64, and where choices are hard.

tests/test_routers_of_models.py compares them with the models' own code.
"""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gbmoe
from gbmoe import RouterFunction, extension
from gbmoe.launch import router
from gbmoe.ops import route, route_tokens
from gbmoe.ops.route_operator import route_backward
from gbmoe.plain import plain_router
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

DEEPSEEK = RouterFunction("sigmoid", num_groups=8, group_topk=4, normalize=1, epsilon=1e-20, scale=2.5)
# By the models that have them.
FUNCTIONS = {
    "mixtral": RouterFunction(normalize=1), "gpt_oss": RouterFunction(pre_softmax=False), "llama4": RouterFunction("sigmoid"),
    "deepseek_v2": RouterFunction(num_groups=8, group_topk=3, group_best=1, scale=16), "deepseek_v3": DEEPSEEK,
    "glm4_moe": RouterFunction("sigmoid", normalize=1, epsilon=1e-20),
    "deepseek_v4": RouterFunction("sqrtsoftplus", normalize=1, epsilon=1e-20, scale=1.5),
    "ernie": RouterFunction(normalize=1, epsilon=1e-12), "megatron groups": RouterFunction(pre_softmax=False, num_groups=8, group_topk=2),
}
BIASED = ("deepseek_v3", "glm4_moe", "deepseek_v4", "ernie", "megatron groups")


def draw(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(*shape, generator=exact_inputs.generator("cpu", seed)).to(dtype).to(device)


def exact_sigmoid(x):
    """PyTorch's own, but in float64, the oracle's dtype, a formula whose slope is exp(-x) s^2. That of torch.sigmoid is s (1 - s), which
    loses as many bits as a score s near 1 leaves of 1 - s: its error is then many times that of what is tested."""
    return 1 / (1 + (-x).exp()) if x.dtype == torch.float64 else x.sigmoid()


def exact(logits, function, top_k, bias=None, ids=None):
    """(scores, weights, ids, logsumexp) as a formula that PyTorch differentiates."""
    scores = {"softmax": lambda: logits.softmax(-1), "sigmoid": lambda: exact_sigmoid(logits),
              "sqrtsoftplus": lambda: torch.nn.functional.softplus(logits).sqrt()}[function.score]()
    if ids is None:
        by = scores.detach() if function.pre_softmax else logits.detach()
        by = by if bias is None else by + bias
        if function.group_topk < function.num_groups:
            groups = by.view(len(by), function.num_groups, -1)
            best = groups.topk(function.group_best, dim=-1).values.sum(-1).topk(function.group_topk, dim=-1).indices
            outside = torch.ones_like(groups[:, :, 0]).scatter(1, best, 0).bool()
            by = groups.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(1)
        ids = by.topk(top_k, dim=-1).indices
    if function.pre_softmax:
        weights = scores.gather(1, ids)
        if function.normalize is not None:
            weights = weights / (weights.norm(p=function.normalize, dim=-1, keepdim=True) + function.epsilon)
    else:
        weights = logits.gather(1, ids).softmax(-1)
    return scores, weights * function.scale, ids, logits.logsumexp(-1)


# ------------------------------------------------------------------------------------------- the formula, forward and gradients


SHAPES = [(33, 8, 8, 2), (40, 64, 8, 6), (21, 256, 8, 8), (9, 1024, 8, 32), (7, 1000, 8, 9), (20, 16, 8, 4), (17, 160, 8, 8),
          (12, 384, 8, 8), (10, 288, 8, 8), (9, 512, 8, 10), (6, 24, 8, 1), (5, 72, 8, 17)]


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("replay", [False, True])
def test_forward_and_gradients(device, shape, dtype, name, replay):
    """As accurate as PyTorch's own in that dtype, for the experts that were chosen."""
    tokens, experts, _, top_k = shape
    function = FUNCTIONS[name]
    if function.has_groups and experts // function.num_groups < function.group_best:
        function = RouterFunction(**{**vars_of(function), "group_best": 1})
    logits = (2 * draw(tokens, experts, seed=1, device=device)).to(dtype).requires_grad_()
    bias = draw(experts, seed=2, device=device) / 20 if name in BIASED else None
    given = draw(tokens, experts, seed=3, device=device).argsort(1)[:, :top_k].contiguous() if replay else None
    exact_inputs.poison(device)
    got = route(logits, top_k, function=function, expert_bias=bias, given_experts=given)
    given is not None or assert_ids_are_best(logits, function, bias, got.experts_TK)
    assert given is None or torch.equal(got.experts_TK, given)
    leaves = {of: logits.detach().to(as_dtype).requires_grad_() for of, as_dtype in (("baseline", dtype), ("exact", torch.float64))}
    outputs = {"got": (got.scores_TE, got.weights_TK, got.logsumexp_T.to(dtype))}
    for of, leaf in leaves.items():
        scores, weights, _, logsumexp = exact(leaf, function, top_k, ids=got.experts_TK)
        outputs[of] = scores, weights, logsumexp
    for what, *values in zip(("scores", "weights", "logsumexp"), *outputs.values()):
        assert_as_accurate_as(*(t.detach() for t in values), what)
    grads = [exact_inputs.exact_values(*t.shape, dtype=torch.float64, device=device, seed=seed)
             for seed, t in enumerate(outputs["exact"], start=2)]
    for chosen in ((0,), (1,), (2,), (0, 1, 2)):
        if chosen == (1,) and top_k == 1 and (function.normalize or not function.pre_softmax):
            continue  # a weight that is always 1
        gradients = [torch.autograd.grad([outputs[of][i] for i in chosen], leaf, [grads[i].to(leaf.dtype) for i in chosen],
                                         retain_graph=True)[0] for of, leaf in (("got", logits), *leaves.items())]
        assert_as_accurate_as(*gradients, f"gradient through {chosen}", factor=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_slopes_keep_their_bits_where_scores_round_to_one(device, dtype, score):
    """Of each logit on its own, to a few units in the last place; the formulas that are expected add nothing but positive terms."""
    logits = torch.linspace(-40, 40, 324, dtype=dtype, device=device).view(9, 36).requires_grad_()
    got = route(logits, 8, function=RouterFunction(score))
    x = logits.detach().double()
    small = (-x.abs()).exp()
    expected = small / (1 + small).square()
    if score == "sqrtsoftplus":
        expected = torch.where(x < 0, small, 1) / (1 + small) / (2 * (x.clamp(min=0) + small.log1p()).sqrt())
    tolerance = dict(rtol=16 * torch.finfo(dtype).eps, atol=0)
    of_scores, = torch.autograd.grad(got.scores_TE.sum(), logits, retain_graph=True)
    torch.testing.assert_close(of_scores.double(), expected, **tolerance)
    of_weights, = torch.autograd.grad(got.weights_TK.sum(), logits)
    torch.testing.assert_close(of_weights.double().gather(1, got.experts_TK), expected.gather(1, got.experts_TK), **tolerance)


def vars_of(function):
    return {name: getattr(function, name) for name in ("score", "pre_softmax", "num_groups", "group_topk", "group_best", "normalize",
                                                       "epsilon", "scale")}


def assert_ids_are_best(logits, function, bias, ids):
    """No expert that was left out ranks above one that was chosen by more than float32 tells apart."""
    logits, ids, bias = logits.detach().cpu().double(), ids.cpu(), None if bias is None else bias.cpu().double()
    best = by_rule(logits, function, ids.size(1), bias)
    scores = exact(logits, RouterFunction(function.score), 1)[0] if function.pre_softmax else logits
    by = scores if bias is None else scores + bias
    assert bool((ids.sort(1).values.diff(dim=1) > 0).all())
    torch.testing.assert_close(by.gather(1, ids), by.gather(1, best), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    function = FUNCTIONS[name]
    if function.has_groups:
        function = RouterFunction(**{**vars_of(function), "num_groups": 4, "group_topk": 2})
    logits = draw(3, 12, seed=1, dtype=torch.float64).requires_grad_()
    bias = torch.arange(12.0) / 100 if name in BIASED else None
    padding, given = torch.tensor([0, 1, 0]).bool(), draw(3, 12, seed=2).argsort(1)[:, :3]
    for arguments in ({}, {"padding_mask": padding}, {"given_experts": given}, {"given_experts": given, "padding_mask": padding}):
        torch.autograd.gradcheck(lambda x: [t for t in route(x, 3, function=function, expert_bias=bias, **arguments)
                                            if t.is_floating_point()], logits)


@pytest.mark.parametrize("p", [0.5, 2.0, 3.0, math.inf])
def test_gradcheck_of_an_epsilon_with_any_norm(p):
    function = RouterFunction("sigmoid", normalize=p, epsilon=0.1)
    torch.autograd.gradcheck(lambda x: route(x, 3, function=function).weights_TK, draw(3, 6, dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize("function", [RouterFunction(), RouterFunction(normalize=1), RouterFunction(normalize=3.0),
                                      RouterFunction(pre_softmax=False)], ids=str)
def test_a_softmax_and_the_highest_are_a_case_of_it_with_the_same_results(device, function):
    """The path for any function, which biases of 0 take, and the one that has a softmax alone."""
    logits = draw(50, 40, seed=1, device=device).requires_grad_()
    special, general = route(logits, 6, function=function), route(logits, 6, function=function, expert_bias=torch.zeros(40, device=device))
    assert torch.equal(special.experts_TK, general.experts_TK)
    grads = draw(50, 40, seed=2, device=device), draw(50, 6, seed=3, device=device), draw(50, seed=4, device=device)
    outputs = [(of.scores_TE, of.weights_TK, of.logsumexp_T) for of in (special, general)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(of, logits, grads)[0] for of in outputs))


def test_a_norm_of_its_own_is_that_of_normalize():
    logits = draw(30, 20)
    for p in (None, 1, 2.0, math.inf):
        for one, other in zip(route(logits, 5, normalize=p), route(logits, 5, function=RouterFunction(normalize=p))):
            assert torch.equal(one, other)


# --------------------------------------------------------------------------------------------------------------- hard choices


def by_rule(logits, function, top_k, bias=None, scores=None):
    """The choice in Python's words: groups by worth, then experts by what they are ranked by, the lower one among equals; NaN first.

    `scores` are those that the choice is made by, for groups whose sums differ by no more than the last bit of their scores.
    """
    def key(value, index):
        return (0, 0, index) if math.isnan(value) else (1, -value, index)

    if function.pre_softmax and (bias is not None or function.has_groups):
        by = plain_router.scores_of(logits, function) if scores is None else scores
    else:
        by = logits
    by = by if bias is None else by + bias
    chosen = []
    for values in by.tolist():
        eligible = range(len(values))
        if function.has_groups:
            size = len(values) // function.num_groups
            groups = [values[g * size : (g + 1) * size] for g in range(function.num_groups)]
            best = [sorted(group, key=lambda value: key(value, 0))[: function.group_best] for group in groups]
            worth = [float(torch.tensor(each, dtype=logits.dtype).sum()) for each in best]
            kept = sorted(range(function.num_groups), key=lambda g: key(worth[g], g))[: function.group_topk]
            eligible = [e for e in eligible if e // size in kept]
        chosen.append(sorted(eligible, key=lambda e: key(values[e], e))[:top_k])
    return torch.tensor(chosen).view(len(by), top_k)


@pytest.mark.parametrize("function", [
    RouterFunction("sigmoid"), RouterFunction(num_groups=2, group_topk=1, group_best=1), RouterFunction(num_groups=2, group_topk=1),
    RouterFunction("sigmoid", num_groups=3, group_topk=2), RouterFunction(pre_softmax=False, num_groups=3, group_topk=2),
    RouterFunction("sqrtsoftplus", num_groups=6, group_topk=4, group_best=1)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_every_order_of_a_few_logits(device, function, biased):
    """All ties, infinities and NaN among six experts whose logits are of few values.

    (a + 1/4) + b and (b + 1/4) + a are the same worth, but not the same float: which is larger depends on the last bits of the scores a
    and b. So the choice is compared with that by the operator's own scores, and these with the exact ones.
    """
    values = [0.0, 1.0, -math.inf, math.nan] if function.num_groups == 2 else [0.0, -1.0, 2.0]
    logits = torch.tensor(list(itertools.product(values, repeat=6)))
    bias = torch.tensor([0.0, 0.25, 0.0, 0.25, -0.5, 0.0]) if biased else None
    best = None
    for top_k in (3, 2, 1):
        on = None if bias is None else bias.to(device)
        scores, _, got, _ = (t.cpu() for t in route(logits.to(device), top_k, function=function, expert_bias=on))
        if best is None:
            best, first = by_rule(logits, function, top_k, bias, scores), scores
        assert torch.equal(got, best[:, :top_k]), top_k
        torch.testing.assert_close(scores, first, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scores, plain_router.scores_of(logits, function), rtol=1e-6, atol=0, equal_nan=True)
        for value in values:  # equal logits have equal scores
            of_value = scores.masked_fill(logits != value, -1), scores.masked_fill(logits != value, math.inf)
            assert bool((of_value[0].amax(1) <= of_value[1].amin(1)).logical_or(scores.isnan().any(1)).all()), value


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("experts, top_k", [(64, 8), (256, 8), (128, 16), (512, 32), (1024, 32), (1000, 8), (200, 12), (8, 2), (264, 9)])
def test_equal_logits_give_the_lowest_experts(device, name, experts, top_k):
    function = FUNCTIONS[name]
    if function.has_groups:
        function = RouterFunction(**{**vars_of(function), "group_topk": 7, "group_best": 1 if experts == 8 else function.group_best})
    for value in (0.0, 2.5, -80.0, 1e4, -math.inf):
        logits = torch.full((3, experts), value, device=device)
        bias = torch.zeros(experts, device=device) if name in BIASED else None
        got = route(logits, top_k, function=function, expert_bias=bias)
        assert got.experts_TK.tolist() == 3 * [list(range(top_k))], value


def test_a_bias_decides_and_does_not_weigh(device):
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]], device=device)
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0], device=device)
    for function in (RouterFunction("sigmoid"), RouterFunction(), RouterFunction("sqrtsoftplus")):
        got = route(logits, 2, function=function, expert_bias=bias)
        assert got.experts_TK.tolist() == [[2, 0]]
        assert torch.equal(got.weights_TK, got.scores_TE[:, [2, 0]])


def test_masked_logits_have_no_score(device):
    """-inf hides an expert from a softmax; a sigmoid of it is 0, and ranks by the bias alone."""
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf]], device=device)
    for function in (RouterFunction("sigmoid", normalize=1, epsilon=1e-20), RouterFunction(pre_softmax=False)):
        got = route(logits, 3, function=function, given_experts=None)
        assert got.experts_TK.tolist() == [[2, 1, 0]] and float(got.weights_TK[0, 2]) == 0
        assert float(got.weights_TK.sum()) == pytest.approx(1)


def test_nan_stays_in_its_token(device):
    logits = draw(3, 32, device=device)
    logits[1, 13] = math.nan
    got = route(logits, 4, function=DEEPSEEK, expert_bias=torch.zeros(32, device=device))
    assert got.experts_TK[1, 0] == 13 and bool(got.weights_TK[1].isnan().all())
    assert not bool(got.weights_TK[[0, 2]].isnan().any() | got.scores_TE[[0, 2]].isnan().any())


def test_all_groups_are_no_limit():
    logits, bias = draw(20, 32), draw(32, seed=1)
    free, limited = (route(logits, 4, function=RouterFunction("sigmoid", num_groups=groups, group_topk=groups), expert_bias=bias)
                     for groups in (1, 4))
    assert torch.equal(free.experts_TK, limited.experts_TK)


# ---------------------------------------------------------------------------------------------------------- padding, and replay


@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_is_left_out(device, name):
    """Whatever its logits are; other tokens have the same bits as without it."""
    function, experts, top_k = FUNCTIONS[name], 64, 6
    logits = draw(9, experts, seed=1, device=device)
    padding = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 0], device=device).bool()
    bias = draw(experts, seed=2, device=device) / 20
    alone = route(logits[~padding], top_k, function=function, expert_bias=bias)
    logits[padding] = math.nan
    logits.requires_grad_()
    got = route(logits, top_k, function=function, expert_bias=bias, padding_mask=padding)
    for one, other in zip(got, alone):
        assert torch.equal(one[~padding], other)
    assert bool((got.experts_TK[padding] == -1).all())
    assert not bool(got.weights_TK[padding].any() | got.scores_TE[padding].any()) and not bool(got.logsumexp_T[padding].any())
    (got.weights_TK.sum() + got.scores_TE.square().sum() + got.logsumexp_T.square().sum()).backward()
    assert not bool(logits.grad[padding].any()) and bool(logits.grad[~padding].isfinite().all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ids_that_were_chosen_give_the_same_bits_again(device, name):
    function, bias = FUNCTIONS[name], draw(64, seed=2, device=device) / 20
    logits = draw(50, 64, seed=1, device=device).requires_grad_()
    chosen = route(logits, 6, function=function, expert_bias=bias)
    again = route(logits, 6, function=function, expert_bias=bias, given_experts=chosen.experts_TK.int())
    grad = draw(50, 6, seed=3, device=device)
    assert all(torch.equal(*pair) for pair in zip(chosen, again))
    assert torch.equal(*(torch.autograd.grad(of.weights_TK, logits, grad)[0] for of in (chosen, again)))


@pytest.mark.parametrize("function", [RouterFunction(normalize=1), RouterFunction(pre_softmax=False), DEEPSEEK], ids=str)
def test_given_ids_may_name_no_expert_or_one_twice(device, function):
    logits = draw(4, 32, dtype=torch.float32, device=device).requires_grad_()
    given = torch.tensor([[3, -1, 5], [7, 7, 2], [32, 1, -5], [-1, -1, -1]], device=device)
    got = route(logits, 3, function=function, given_experts=given)
    assert got.experts_TK.tolist() == [[3, -1, 5], [7, 7, 2], [-1, 1, -1], [-1, -1, -1]]
    grad = draw(4, 3, seed=1, device=device)
    gradient, = torch.autograd.grad(got.weights_TK, logits, grad)
    leaf = logits.detach().double().requires_grad_()
    for token, ids in enumerate([[3, 5], [7, 7, 2], [1]]):
        _, weights, _, _ = exact(leaf[token : token + 1], function, 3, ids=torch.tensor([ids], device=device))
        slots = [slot for slot in range(3) if got.experts_TK[token, slot] >= 0]
        torch.testing.assert_close(got.weights_TK[token, slots].double(), weights[0], rtol=1e-6, atol=1e-7)
        expected, = torch.autograd.grad(weights[0], leaf, grad[token, slots].double())
        torch.testing.assert_close(gradient[token].double(), expected[token], rtol=1e-5, atol=1e-6)
    assert not bool(got.weights_TK[3].any()) and not bool(gradient[3].any()) and not bool(got.weights_TK[2, 0])


def test_weights_of_given_ids_far_below_the_highest_logit(device):
    """Their scores are 0 in float32, of which a norm is NaN: the softmax over them alone is not."""
    logits = torch.tensor([[500.0, 0.0, 1.0, -300.0]], device=device)
    got = route(logits, 2, function=RouterFunction(pre_softmax=False), given_experts=torch.tensor([[1, 2]], device=device))
    torch.testing.assert_close(got.weights_TK, torch.tensor([[0.0, 1.0]], device=device).softmax(1))


# ----------------------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [-1e4, -120.0, -90.0, 0.0, 30.0, 90.0, 1e4])
def test_extreme_logits_have_finite_scores_and_gradients(device, name, value):
    function = FUNCTIONS[name]
    logits = (value + draw(5, 64, seed=1, device=device)).requires_grad_()
    got = route(logits, 4, function=function, expert_bias=torch.zeros(64, device=device))
    (got.scores_TE.square().sum() + (got.weights_TK * draw(5, 4, seed=2, device=device)).sum() + got.logsumexp_T.sum()).backward()
    assert all(bool(t.isfinite().all()) for t in (*got, logits.grad))


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_a_score_of_0_gives_its_logit_no_gradient(device, score):
    logits = torch.tensor([[-1e4, 0.5, 1.0]], device=device, requires_grad=True)
    scores_TE = route(logits, 1, function=RouterFunction(score)).scores_TE
    scores_TE.sum().backward()
    assert scores_TE[0, 0] == 0 and (logits.grad == 0).tolist() == [[True, False, False]]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(0, 8, 2), (1, 8, 8), (3, 8, 1), (2, 1, 1), (2, 13, 13), (2, 61, 5), (1, 1024, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_sizes_at_their_ends(device, name, shape, dtype):
    tokens, experts, top_k = shape
    function = FUNCTIONS[name]
    if function.has_groups:
        return
    logits = draw(*shape[:2], device=device, dtype=dtype).requires_grad_()
    got = route(logits, top_k, function=function, expert_bias=torch.zeros(experts, device=device))
    assert [tuple(t.shape) for t in got] == [(tokens, experts), (tokens, top_k), (tokens, top_k), (tokens,)]
    assert got.experts_TK.dtype == torch.int64 and got.scores_TE.dtype == got.weights_TK.dtype == dtype
    assert top_k < experts or torch.equal(got.experts_TK.sort(1).values, torch.arange(experts, device=device).expand(tokens, -1))
    (got.scores_TE.sum() + got.weights_TK.sum() + got.logsumexp_T.sum()).backward()
    assert logits.grad.shape == logits.shape and logits.grad.dtype == dtype


def test_autocast_gives_float32_scores(device):
    logits = draw(5, 32, device=device, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = route(logits, 4, function=DEEPSEEK)
    assert got.scores_TE.dtype == got.weights_TK.dtype == torch.float32
    got.weights_TK.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------- tokens, and a linear bias


@pytest.mark.parametrize("dtype, weight_dtype", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
                                                 (torch.float32, torch.float32), (torch.float64, torch.float64)], ids=dtype_id)
@pytest.mark.parametrize("function", [DEEPSEEK, RouterFunction(pre_softmax=False), RouterFunction("sigmoid")], ids=str)
def test_tokens_and_a_linear_bias(device, dtype, weight_dtype, function):
    x, weight, bias = (draw(*shape, seed=seed, device=device).to(of).requires_grad_()
                       for seed, (shape, of) in enumerate((((60, 48), dtype), ((64, 48), weight_dtype), ((64,), weight_dtype))))
    got = route_tokens(x, weight, 4, function=function, bias=bias, scores_dtype=torch.float32)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.scores_TE.dtype == got.weights_TK.dtype == got.logsumexp_T.dtype == wide
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    scores, weights, _, logsumexp = exact(leaves[0] @ leaves[1].t() + leaves[2], function, 4, ids=got.experts_TK)
    outputs = got.scores_TE, got.weights_TK, got.logsumexp_T
    for one, other in zip(outputs, (scores, weights, logsumexp)):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=1e-6)
    grads = [draw(*t.shape, seed=seed, device=device) for seed, t in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, (x, weight, bias), [g.to(wide) for g in grads])
    expected = torch.autograd.grad((scores, weights, logsumexp), leaves, [g.double() for g in grads])
    tolerance = 1e-5 if x.dtype == weight.dtype != torch.bfloat16 else 1e-2
    for one, other, of in zip(gradients, expected, (x, weight, bias)):
        assert one.dtype == of.dtype
        assert float((one.double() - other).norm()) <= tolerance * float(other.norm())


# ------------------------------------------------------------------------------------------------------------ as an operator


ARGUMENTS = {"biased": dict(expert_bias=True), "padding": dict(padding_mask=True), "given": dict(given_experts=True),
             "all": dict(expert_bias=True, padding_mask=True, given_experts=True)}


def tensors(names, tokens, experts, top_k, device):
    made = {"expert_bias": draw(experts, seed=2, device=device) / 20, "padding_mask": torch.arange(tokens, device=device) % 3 == 1,
            "given_experts": draw(tokens, experts, seed=3, device=device).argsort(1)[:, :top_k].contiguous()}
    return {name: made[name] for name in names}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_opcheck(device, arguments):
    made = tensors(ARGUMENTS[arguments], 6, 32, 3, device)
    others = [made.get(name) for name in ("expert_bias", "padding_mask", "given_experts")]
    logits = draw(6, 32, device=device).requires_grad_()
    torch.library.opcheck(torch.ops.gbmoe.route.default, (logits, *others, 3, DEEPSEEK.code, False))
    x, weight, bias = (draw(*shape, device=device).bfloat16().requires_grad_() for shape in ((6, 16), (32, 16), (32,)))
    torch.library.opcheck(torch.ops.gbmoe.route_tokens.default,
                          (x, weight, bias, *others, 3, DEEPSEEK.code, None, torch.float32))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_one_graph(device, backend, arguments):
    torch.compiler.reset()
    made = tensors(ARGUMENTS[arguments], 20, 32, 3, device)
    x, weight = draw(20, 16, device=device).requires_grad_(), draw(32, 16, seed=1, device=device).requires_grad_()

    def of(x, weight, made):
        scores, weights, experts, logsumexp = route_tokens(x * 1, weight, 3, function=DEEPSEEK, **made)
        return weights.square().sum() + (scores * scores).sum() + logsumexp.sum(), experts

    expected, compiled = of(x, weight, made), torch.compile(of, fullgraph=True, backend=backend)(x, weight, made)
    assert torch.equal(expected[1], compiled[1])
    for one, other in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (expected[0], compiled[0]))):
        torch.testing.assert_close(one, other)


def test_a_function_that_is_made_inside_a_graph():
    logits = draw(20, 32)
    compiled = torch.compile(lambda x: route(x, 3, function=RouterFunction("sigmoid", normalize=1)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits).experts_TK, route(logits, 3, function=RouterFunction("sigmoid")).experts_TK)


def test_fakes_and_the_meta_device():
    with FakeTensorMode():
        got = route(torch.empty(5, 32), 3, function=DEEPSEEK, expert_bias=torch.empty(32))
        assert [tuple(t.shape) for t in got] == [(5, 32), (5, 3), (5, 3), (5,)]
    logits = torch.empty(5, 32, device="meta", requires_grad=True)
    route(logits, 3, function=DEEPSEEK).weights_TK.sum().backward()
    assert logits.grad.is_meta


def test_logits_with_any_strides(device):
    wide = draw(20, 64, device=device)
    grad = draw(20, 3, seed=1, device=device)
    for logits in (wide[:, ::2], wide.t().contiguous().t()[:, :32], wide[:, 3:35]):
        of = [t.detach().requires_grad_() for t in (logits, logits.contiguous())]
        got = [route(t, 3, function=DEEPSEEK) for t in of]
        assert torch.equal(got[0].experts_TK, got[1].experts_TK)
        torch.testing.assert_close(*(torch.autograd.grad(g.weights_TK, t, grad)[0] for g, t in zip(got, of)))


def test_repeats_give_the_same_bits(device):
    logits = draw(200, 256, device=device)
    given = tensors(ARGUMENTS["all"], 200, 256, 8, device)
    first = route(logits, 8, function=DEEPSEEK, **given)
    assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(first, route(logits, 8, function=DEEPSEEK, **given)))


# ------------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.gpu
@pytest.mark.parametrize("experts, top_k", [(64, 8), (32, 12), (1024, 32)])
@pytest.mark.parametrize("function", [RouterFunction(normalize=3.0), RouterFunction(pre_softmax=False), DEEPSEEK,
                                      RouterFunction("sqrtsoftplus", normalize=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("arguments", ["none", *ARGUMENTS])
def test_a_step_can_be_captured(experts, top_k, function, dtype, arguments):
    """Kernels or plain PyTorch, forward and backward: neither waits for the device, and a replay computes what a call does."""
    given = tensors(ARGUMENTS.get(arguments, ()), 50, experts, top_k, "cuda")
    logits = draw(50, experts, seed=1, device="cuda", dtype=dtype).requires_grad_()
    grads = [draw(*shape, seed=seed, device="cuda") for seed, shape in enumerate(((50, experts), (50, top_k), (50,)))]

    def step():
        got = route(logits, top_k, function=function, **given)
        outputs = got.scores_TE, got.weights_TK, got.logsumexp_T
        gradient = torch.autograd.grad(outputs, logits, [grad.to(of.dtype) for grad, of in zip(grads, outputs)])
        # A node of autograd that outlives its call would tie the next call to its stream.
        return [t.detach() for t in (*got, *gradient)]

    graph, captured = cuda_graphs.captured(step)
    with torch.no_grad():
        logits.copy_(draw(50, experts, seed=5, device="cuda"))
    graph.replay()
    for one, other in zip(captured, step()):
        assert torch.equal(one, other)


# Logits, scores and the logits' gradient.
KERNEL_DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
                 (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]


def memchecked(*values):
    return pytest.param(*values, marks=pytest.mark.memcheck)


@pytest.mark.gpu
@pytest.mark.parametrize("experts, top_k", [(8, 2), (16, 4), (61, 5), (64, 6), (64, 8), (64, 20), (72, 10), (128, 8), (128, 17), (160, 8),
                                            (192, 8), (200, 6), (250, 8), (256, 8), (256, 12), (264, 8), (288, 8), (384, 8),
                                            (512, 8), (512, 22), (600, 8), (896, 16), (1000, 9), (1001, 32), (1024, 32)])
@pytest.mark.parametrize("name", [memchecked(name) if name in ("deepseek_v3", "megatron groups") else name for name in FUNCTIONS])
@pytest.mark.parametrize("given", [False, True])
def test_kernels_agree_with_plain_pytorch(experts, top_k, name, given):
    """The ids bit for bit, where no two experts rank alike, and the rest to rounding; padding and dtypes by turns."""
    assert extension.loaded()
    for turn, (dtype, scores_dtype) in enumerate(KERNEL_DTYPES):
        check_kernels(experts, top_k, grouped(FUNCTIONS[name], experts, top_k), dtype, scores_dtype, given, turn % 2 == 1, name in BIASED,
                      "cuda")


def grouped(function, experts, top_k):
    """The function with groups that these experts have."""
    if not function.has_groups:
        return function
    groups = next(g for g in (8, 4, 5, 2, 7, 1) if experts % g == 0)
    size = experts // groups
    return RouterFunction(**{**vars_of(function), "num_groups": groups, "group_topk": min(groups, -(-top_k // size) + 1),
                             "group_best": min(size, function.group_best)})


def check_kernels(experts, top_k, function, dtype, scores_dtype, given, padded, biased, device, tokens=70, forward=router.route,
                  backward=route_backward):
    """Compare forward and gradient on `device` with plain PyTorch's on the CPU."""
    # Logits that are so far apart that rounding orders none of them anew, biases of few bits.
    rank = torch.rand(tokens, experts, generator=exact_inputs.generator("cpu", 1)).argsort(1)
    logits = ((rank.float() / 8 - experts / 16) / (1 if experts < 256 else 16)).to(dtype)
    bias = torch.randint(-2, 3, (experts,), generator=exact_inputs.generator("cpu", 2)).float() if biased else None
    padding = torch.arange(tokens) % 4 == 1 if padded else None
    ids = torch.rand(tokens, experts, generator=exact_inputs.generator("cpu", 3)).argsort(1)[:, :top_k].contiguous() if given else None
    arguments = bias, padding, ids
    there = [None if t is None else t.to(device) for t in arguments]
    exact_inputs.poison(device)
    got = [t.cpu() for t in forward(logits.to(device), *there, top_k, function, scores_dtype)]
    expected = router.route(logits, *arguments, top_k, function, scores_dtype)
    same = (got[2] == expected[2]).all(1)
    if not bool(same.all()):  # experts whose ranks differ by rounding alone
        assert not given and (dtype != torch.float32 or function.score != "softmax" or biased)
        values = plain_router.scores_of(logits.double(), function) if function.pre_softmax else logits.double()
        values = values if bias is None else values + bias
        torch.testing.assert_close(values.gather(1, got[2].clamp(min=0)), values.gather(1, expected[2].clamp(min=0)), rtol=1e-6, atol=1e-6)
        assert float(same.double().mean()) > 0.8
    for one, other in zip((got[0], got[1][same], got[3]), (expected[0], expected[1][same], expected[3])):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=max(4e-6, torch.finfo(one.dtype).eps), atol=2**-24)
    grads = draw(tokens, experts, seed=4, dtype=scores_dtype), draw(tokens, top_k, seed=5, dtype=scores_dtype), draw(tokens, seed=6)
    of_scores = router.is_softmax_topk(function, *arguments)
    saved = expected[0] if of_scores else logits
    for which in ((0,), (1,), (2,), (0, 1, 2)):
        some = [g if i in which else None for i, g in enumerate(grads)]
        on_device, exactly = ([None if g is None else to(g) for g in some] for to in (lambda g: g.to(device), torch.Tensor.double))
        result = backward(saved.to(device), expected[2].to(device), there[1], *on_device, function.code, of_scores, dtype)
        reference = route_backward(saved.double(), expected[2], padding, *exactly, function.code, of_scores, torch.float64)
        assert result.dtype == dtype
        torch.testing.assert_close(result.cpu().double(), reference, rtol=max(1e-5, torch.finfo(dtype).eps),
                                   atol=1e-5 * float(reference.abs().max()) + 2**-24)


# ------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("arguments, words", [
    (dict(score="tanh"), "score: expected one of softmax, sigmoid, sqrtsoftplus, got 'tanh'"),
    (dict(num_groups=0), "num_groups: expected an int of at least 1, got 0"),
    (dict(group_topk=2), "group_topk: expected at most num_groups == 1, got 2"),
    (dict(group_best=1.5), "group_best: expected an int of at least 1, got 1.5"),
    (dict(normalize=0), "normalize: expected None or a positive p, got 0"),
    (dict(epsilon=-0.5), "epsilon: expected a number of at least 0, got -0.5"),
    (dict(scale=math.inf), "scale: expected a finite number, got inf"),
    (dict(score="sigmoid", pre_softmax=False), "pre_softmax: expected True with score 'sigmoid', got False"),
    (dict(pre_softmax=False, normalize=2), "normalize: expected None or 1 without pre_softmax, .*, got 2"),
])
def test_bad_functions(arguments, words):
    with pytest.raises(ValueError, match="RouterFunction: " + words):
        RouterFunction(**arguments)


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), RouterFunction(normalize=math.inf), RouterFunction(scale=1 / 3)], ids=str)
def test_a_code_stands_for_its_function(function):
    assert RouterFunction.of_code(function.code) == function and hash(RouterFunction.of_code(function.code)) == hash(function)


@pytest.mark.parametrize("arguments, words", [
    (dict(function="sigmoid"), "function: expected a gbmoe.RouterFunction, got str"),
    (dict(function=DEEPSEEK, normalize=1), "normalize: expected None with a function, which has its own, got 1"),
    (dict(function=RouterFunction(num_groups=5, group_topk=2)), "num_groups: expected a divisor of 32, the number of experts, got 5"),
    (dict(function=RouterFunction(num_groups=32, group_topk=2)), "group_best: expected at most 1, the experts of a group, got 2"),
    (dict(function=RouterFunction(num_groups=16, group_topk=1)), "top_k: expected at most 2, the experts of group_topk == 1 groups, got 4"),
    (dict(expert_bias=torch.zeros(31)), r"expert_bias: expected shape \[E\] == \[32\], got \[31\]"),
    (dict(expert_bias=torch.zeros(32).bfloat16()), "expert_bias: expected dtype float32, float64, got torch.bfloat16"),
    (dict(padding_mask=torch.zeros(5)), "padding_mask: expected dtype bool, got torch.float32"),
    (dict(padding_mask=torch.zeros(4).bool()), r"padding_mask: expected shape \[T\] == \[5\], got \[4\]"),
    (dict(given_experts=torch.zeros(5, 3).long()), r"given_experts: expected shape \[T,K\] == \[5, 4\], got \[5, 3\]"),
    (dict(given_experts=torch.zeros(5, 4)), "given_experts: expected dtype int32, int64, got torch.float32"),
])
def test_bad_arguments(arguments, words):
    for call in (lambda: route(torch.zeros(5, 32), 4, **arguments),
                 lambda: route_tokens(torch.zeros(5, 8), torch.zeros(32, 8), 4, **arguments)):
        with pytest.raises((TypeError, ValueError), match="route(_tokens)?: " + words):
            call()


def test_bad_linear_bias_or_dtype():
    x, weight = torch.zeros(5, 8), torch.zeros(32, 8)
    with pytest.raises(ValueError, match=r"route_tokens: bias: expected shape \[E\] == \[32\], got \[8\]"):
        route_tokens(x, weight, 4, bias=torch.zeros(8))
    with pytest.raises(ValueError, match="route_tokens: scores_dtype: expected None or torch.float32, got torch.float16"):
        route_tokens(x, weight, 4, scores_dtype=torch.float16)
    with pytest.raises(ValueError, match="route: scores_dtype: expected None or torch.float32, got torch.float16"):
        route(x, 4, scores_dtype=torch.float16)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_scores_of_logits_in_16_bits_are_kept_in_float32(device, dtype):
    logits = draw(20, 16, device=device, dtype=dtype).requires_grad_()
    got = route(logits, 4, function=DEEPSEEK, scores_dtype=torch.float32)
    expected = route(logits.detach().to(got.scores_TE.dtype), 4, function=DEEPSEEK)
    assert got.scores_TE.dtype == got.weights_TK.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other)
    assert torch.autograd.grad(got.weights_TK.square().sum(), logits)[0].dtype == dtype


def test_it_is_public():
    assert gbmoe.RouterFunction is RouterFunction
