"""TransformerEngine's router functions: its own test's cases, choices and formulas, gradients, other dtypes, wrong arguments.

The formulas are plain PyTorch that autograd differentiates. Shape suffixes: T tokens, E experts, K slots a token.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch

from gbmoe.compat import transformer_engine as te
from gbmoe.testing import cuda_graphs, exact_inputs
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

SIZES = [(64, 32), (45, 128), (20, 256)]  # tokens, experts
# Those of TransformerEngine's own test.
LARGE = [(2048, 128), (7168, 32), (8992, 256)]


def on_each_device(sizes, large):
    return [pytest.param("cpu", *size, id=f"cpu-{size}") for size in sizes] + \
        [pytest.param("cuda", *size, id=f"cuda-{size}", marks=pytest.mark.gpu) for size in (*sizes, *large)]


def spread_logits(tokens, experts, device, dtype=torch.float32, seed=0):
    """Logits in another order for each token, no two of which round to one score in any dtype that is tested with choices."""
    generator = exact_inputs.generator("cpu", seed)
    value_E = (torch.arange(experts) + 0.4 * torch.rand(experts, generator=generator) - experts / 2) * (4 / experts)
    return value_E[torch.rand(tokens, experts, generator=generator).argsort(1)].to(dtype).to(device).requires_grad_()


def highest(values_TE, count, num_groups=None, group_topk=None):
    """Ids [T,count] of the highest values, from the groups that are worth most; and by how much they are higher than those left out [T]."""
    margin_T = torch.full_like(values_TE[:, 0], torch.inf)
    if group_topk:
        members_TGS = values_TE.unflatten(1, (num_groups, -1))
        worth_TG = members_TGS.sort(-1, descending=True).values[..., :count // group_topk].sum(-1)
        worth_TG, order_TG = worth_TG.sort(-1, descending=True)
        margin_T = worth_TG[:, group_topk - 1] - worth_TG[:, group_topk]
        worst_TG1 = order_TG[:, group_topk:].unsqueeze(-1)
        values_TE = members_TGS.scatter(1, worst_TG1.expand(-1, -1, members_TGS.size(-1)), -torch.inf).flatten(1)
    values_TE, order_TE = values_TE.sort(-1, descending=True)
    return order_TE[:, :count], torch.minimum(margin_T, values_TE[:, count - 1] - values_TE[:, count])


def score(logits_TE, score_function):
    return {"softmax": lambda: logits_TE.softmax(-1), "sigmoid": logits_TE.sigmoid,
            "sqrtsoftplus": lambda: torch.nn.functional.softplus(logits_TE).sqrt()}[score_function]()


def dense(logits_TE, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias):
    """(probs [T,E], routing_map [T,E], margin of the choice [T]), written down from what TransformerEngine's functions are to compute."""
    after = score_function == "softmax" and not use_pre_softmax
    scores_TE = logits_TE if after else score(logits_TE, score_function)
    by_TE = (scores_TE if expert_bias is None else scores_TE + expert_bias).detach()
    ids_TK, margin_T = highest(by_TE, topk, num_groups, group_topk)
    weights_TK = scores_TE.gather(1, ids_TK)
    if after:
        weights_TK = weights_TK.softmax(-1)
    elif score_function != "softmax" and topk > 1:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    weights_TK = weights_TK * (scaling_factor or 1)
    probs_TE = torch.zeros_like(logits_TE).scatter(1, ids_TK, weights_TK)
    return probs_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, ids_TK, True), margin_T


def aux_scores(logits_TE, topk, score_function):
    scores_TE = score(logits_TE, score_function)
    if score_function != "softmax" and topk > 1:
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, highest(logits_TE.detach(), topk)[0], True), scores_TE


def aux_loss(probs_TE, tokens_E, total, experts, topk, coeff):
    mean_E, share_E = probs_TE.sum(0) / total, tokens_E / (total * topk)
    return coeff * experts * (mean_E * share_E).sum()


# ------------------------------------------------------------------------------------------------------------ its own test


@pytest.mark.pairs
@pytest.mark.parametrize("device, tokens, experts", on_each_device(SIZES, LARGE))
@pytest.mark.parametrize("topk", [4, 8])
@pytest.mark.parametrize("group_topk", [None, 4])
@pytest.mark.parametrize("scaling_factor", [None, 1.2])
@pytest.mark.parametrize("score_function, use_pre_softmax, biased", [
    ("softmax", True, False), ("softmax", False, False), ("sigmoid", False, False), ("sigmoid", False, True),
    ("sqrtsoftplus", False, True), ("sqrtsoftplus", True, False)])
def test_topk(device, tokens, experts, topk, group_topk, scaling_factor, score_function, use_pre_softmax, biased):
    logits = spread_logits(tokens, experts, device)
    bias = (torch.arange(experts, dtype=torch.float32, device=device) * 0.37 % 1 - 0.5) / 8 if biased else None
    arguments = (topk, use_pre_softmax, 8, group_topk, scaling_factor, score_function, bias)
    exact_inputs.poison(device)
    probs, routing_map = te.fused_topk_with_score_function(logits, *arguments)
    other = logits.detach().double().requires_grad_()
    expected, expected_map, margin_T = dense(other, *arguments)
    sure_T = margin_T > 1e-6  # of other tokens rounding may change the choice
    assert float(sure_T.float().mean()) > 0.99
    assert routing_map.dtype == torch.bool and torch.equal(routing_map[sure_T], expected_map[sure_T])
    assert probs.dtype == torch.float32 and not bool(probs[~routing_map].any()) and bool((routing_map.sum(1) == topk).all())
    torch.testing.assert_close(probs[sure_T], expected[sure_T].float(), rtol=4e-6, atol=1e-7)
    grad = exact_inputs.exact_values(tokens, experts, dtype=torch.float32, device=device, seed=1)
    got, = torch.autograd.grad(probs, logits, grad)
    exact, = torch.autograd.grad(expected, other, grad.double())
    torch.testing.assert_close(got[sure_T], exact[sure_T].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device, tokens, experts", on_each_device(SIZES, LARGE))
@pytest.mark.parametrize("topk", [1, 4, 8])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_for_the_aux_loss(device, tokens, experts, topk, score_function):
    logits = spread_logits(tokens, experts, device)
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, topk, score_function)
    other = logits.detach().double().requires_grad_()
    expected_map, expected = aux_scores(other, topk, score_function)
    assert routing_map.dtype == torch.bool and torch.equal(routing_map, expected_map) and scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected.float(), rtol=4e-6, atol=1e-7)
    grad = exact_inputs.exact_values(tokens, experts, dtype=torch.float32, device=device, seed=1)
    got, = torch.autograd.grad(scores, logits, grad)
    exact, = torch.autograd.grad(expected, other, grad.double())
    torch.testing.assert_close(got, exact.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device, tokens, experts", on_each_device(SIZES, LARGE))
@pytest.mark.parametrize("topk", [4, 8])
@pytest.mark.parametrize("counts", [torch.int32, torch.int64, torch.float32, torch.bfloat16], ids=dtype_id)
def test_aux_loss(device, tokens, experts, topk, counts):
    logits = spread_logits(tokens, experts, device)
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, topk, "softmax")
    probs, tokens_E = scores.detach().requires_grad_(), routing_map.sum(0).to(counts)
    loss = te.fused_moe_aux_loss(probs, tokens_E, tokens, experts, topk, 0.01)
    other = probs.detach().double().requires_grad_()
    expected = aux_loss(other, tokens_E.double(), tokens, experts, topk, 0.01)
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=2e-6, atol=0)
    got, = torch.autograd.grad(loss, probs)
    exact, = torch.autograd.grad(expected, other)
    torch.testing.assert_close(got, exact.float(), rtol=2e-6, atol=0)


# ------------------------------------------------------------------------------------------------------------- and beyond it


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_every_dtype_is_rounded_once(device, dtype, score_function):
    """Spread so that no choice depends on rounding."""
    logits = spread_logits(33, 32, device, dtype)
    leaves = {of: logits.detach().to(as_dtype).requires_grad_() for of, as_dtype in (("plain", dtype), ("exact", torch.float64))}
    got = te.fused_topk_with_score_function(logits, 4, False, None, None, 2.5, score_function, None)[0]
    plain, exact = (dense(leaf, 4, False, None, None, 2.5, score_function, None)[0] for leaf in leaves.values())
    assert_as_accurate_as(got.detach(), plain.detach(), exact.detach(), "probs")
    grad = exact_inputs.exact_values(33, 32, dtype=torch.float64, device=device, seed=1)
    gradients = [torch.autograd.grad(out, leaf, grad.to(out.dtype))[0]
                 for out, leaf in ((got, logits), *zip((plain, exact), leaves.values()))]
    assert_as_accurate_as(*gradients, "gradient", factor=3.0)

    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 4, score_function)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(scores.double(), aux_scores(logits.detach().double(), 4, score_function)[1], rtol=4e-6, atol=1e-7)
    probs = scores.detach().to(dtype)
    loss = te.fused_moe_aux_loss(probs, routing_map.sum(0), 33, 32, 4, 0.5)
    expected = aux_loss(probs.double(), routing_map.sum(0).double(), 33, 32, 4, 0.5)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, rtol=torch.finfo(dtype).eps * (1 if dtype.itemsize < 4 else 8), atol=0)


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_one_expert_has_its_score(device, score_function):
    """It was not to be divided by itself, which would leave no gradient."""
    logits = spread_logits(9, 8, device)
    probs, routing_map = te.fused_topk_with_score_function(logits, 1, False, None, None, 2.0, score_function, None)
    torch.testing.assert_close(probs[routing_map], 2 * score(logits, score_function).max(1).values)
    probs.sum().backward()
    assert bool(logits.grad[routing_map].all()) and not bool(logits.grad[~routing_map].any())


def test_tokens_may_have_several_dimensions_and_any_strides(device):
    logits = spread_logits(24, 8, device)
    arguments = 2, False, None, None, None, "sigmoid", None
    expected, expected_map = te.fused_topk_with_score_function(logits, *arguments)
    apart = logits.detach().t().contiguous().t().view(24, 8).unflatten(0, (6, 4)).requires_grad_()
    probs, routing_map = te.fused_topk_with_score_function(apart, *arguments)
    assert torch.equal(probs, expected.view(6, 4, 8)) and torch.equal(routing_map, expected_map)
    probs.square().sum().backward()
    torch.testing.assert_close(apart.grad.view(24, 8), torch.autograd.grad(expected.square().sum(), logits)[0])
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(apart, 2, "sigmoid")
    assert routing_map.shape == (24, 8) and scores.shape == (6, 4, 8)


def test_no_tokens(device):
    logits = torch.zeros(0, 8, device=device, requires_grad=True)
    probs, routing_map = te.fused_topk_with_score_function(logits, 2, True, None, None, None, "softmax", None)
    assert probs.shape == routing_map.shape == (0, 8)
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    loss = te.fused_moe_aux_loss(scores, routing_map.sum(0), 5, 8, 2, 0.1)
    loss.backward()
    assert float(loss.detach()) == 0 and logits.grad.shape == (0, 8)


def test_the_loss_of_each_of_several_sequences(device):
    """As Megatron-Core calls it: sequences lie side by side, and each has counts of its own."""
    probs = torch.rand(10, 3, 8, generator=exact_inputs.generator("cpu", 1)).to(device)
    counts = torch.randint(0, 9, (3, 8), generator=exact_inputs.generator("cpu", 2)).to(device)
    together = te.fused_moe_aux_loss(probs.flatten(1), counts.flatten(), 10, 8, 2, 0.1)
    torch.testing.assert_close(together, sum(te.fused_moe_aux_loss(probs[:, i], counts[i], 10, 8, 2, 0.1) for i in range(3)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=dtype_id)
def test_a_total_of_the_device_is_that_of_the_host(device, dtype):
    probs, counts = torch.rand(10, 8, device=device), torch.full((8,), 2, device=device)
    total = torch.tensor(100_000, dtype=dtype, device=device)  # whose square is no int32
    of_device, of_host = (te.fused_moe_aux_loss(probs, counts, number, 8, 2, 0.1) for number in (total, 100_000))
    torch.testing.assert_close(of_device, of_host)


def test_counts_and_biases_are_constants():
    logits, bias = spread_logits(6, 8, "cpu"), torch.zeros(8, requires_grad=True)
    probs, routing_map = te.fused_topk_with_score_function(logits, 2, False, None, None, None, "sigmoid", bias)
    counts = routing_map.sum(0).float().requires_grad_()
    te.fused_moe_aux_loss(probs, counts, 6, 8, 2, 1.0).backward()
    assert logits.grad is not None and bias.grad is None and counts.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
def test_a_bias_of_any_dtype_decides(device, dtype):
    bias = torch.zeros(8, dtype=dtype, device=device)
    bias[5] = 100
    _, routing_map = te.fused_topk_with_score_function(spread_logits(6, 8, device), 2, False, None, None, None, "sigmoid", bias)
    assert bool(routing_map[:, 5].all()) and routing_map.sum(1).tolist() == 6 * [2]


def test_autocast_changes_no_dtype(device):
    logits = spread_logits(6, 8, device, torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        probs, routing_map = te.fused_topk_with_score_function(logits, 2, False, None, None, None, "sigmoid", None)
        scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")[1]
        loss = te.fused_moe_aux_loss(scores, routing_map.sum(0), 6, 8, 2, 1.0)
    assert probs.dtype == torch.bfloat16 and scores.dtype == loss.dtype == torch.float32
    assert torch.equal(loss, te.fused_moe_aux_loss(scores, routing_map.sum(0), 6, 8, 2, 1.0))


def step(logits, total):
    probs, _ = te.fused_topk_with_score_function(logits, 4, False, 8, 4, 2.5, "sigmoid", None)
    routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 4, "sigmoid")
    loss = te.fused_moe_aux_loss(scores, routing_map.sum(0), total, logits.size(1), 4, 0.1)
    return probs, loss, *torch.autograd.grad((probs.square().sum(), loss), logits)


def test_compiles_without_a_graph_break(device):
    torch.compiler.reset()
    logits, total = spread_logits(20, 32, device), torch.tensor(20.0, device=device)

    def forward(logits):
        probs, _ = te.fused_topk_with_score_function(logits, 4, False, 8, 4, 2.5, "sigmoid", None)
        routing_map, scores = te.fused_compute_score_for_moe_aux_loss(logits, 4, "sigmoid")
        return probs, te.fused_moe_aux_loss(scores, routing_map.sum(0), total, 32, 4, 0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)(logits)
    torch.testing.assert_close(compiled, forward(logits))


@pytest.mark.gpu
def test_no_host_wait_and_one_cuda_graph():
    logits, total = spread_logits(256, 128, "cuda"), torch.tensor(256, device="cuda")
    step(logits, total)
    with cuda_graphs.no_host_wait():
        step(logits, total)
    graph, captured = cuda_graphs.captured(lambda: step(logits, total))
    for seed in (1, 2):
        with torch.no_grad():
            logits.copy_(spread_logits(256, 128, "cuda", seed=seed))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(logits, total)))


LOGITS, PROBS, COUNTS = torch.zeros(5, 8), torch.zeros(5, 8), torch.zeros(8)


@pytest.mark.parametrize("arguments, words", [
    (dict(logits=LOGITS.int()), "logits: expected dtype .*, got torch.int32"),
    (dict(logits=None), "logits: expected a torch.Tensor, got NoneType"),
    (dict(logits=torch.zeros(())), "logits: expected shape .*, got a tensor without dimensions"),
    (dict(topk=0), "topk: expected an int, 1 to 8, the number of experts, got 0"),
    (dict(topk=9), "topk: expected an int, 1 to 8, the number of experts, got 9"),
    (dict(score_function="tanh"), "score_function: expected one of softmax, sigmoid, sqrtsoftplus, got 'tanh'"),
    (dict(group_topk=2), "num_groups: expected a divisor of 8, the number of experts, with group_topk, got None"),
    (dict(num_groups=3, group_topk=2), "num_groups: expected a divisor of 8, the number of experts, with group_topk, got 3"),
    (dict(num_groups=4, group_topk=5), "group_topk: expected 1 to num_groups == 4, groups of 2 experts, .*, got 5"),
    (dict(num_groups=8, group_topk=1), "group_topk: expected 1 to num_groups == 8, .* at least topk == 2 in all, got 1"),
    (dict(scaling_factor=float("nan")), "scaling_factor: expected None or a finite number, got nan"),
    (dict(expert_bias=COUNTS, score_function="softmax"), "expert_bias: expected None with score_function 'softmax', got a tensor"),
    (dict(expert_bias=COUNTS[1:]), r"expert_bias: expected shape \[E\] == \[8\], got \[7\]"),
    (dict(expert_bias=COUNTS.int()), "expert_bias: expected dtype .*, got torch.int32"),
    (dict(expert_bias=COUNTS.to("meta")), "expert_bias: expected device cpu, got meta"),
    (dict(routing_map_format="BITMAP"), "routing_map_format: expected BYTEMAP, .*, got BITMAP"),
    (dict(topk_indices=COUNTS), "topk_indices: expected None, got Tensor"),
    (dict(qb_histogram=COUNTS), "qb_histogram: expected None, got Tensor"),
])
def test_bad_arguments_of_the_choice(arguments, words):
    every = dict(logits=LOGITS, topk=2, use_pre_softmax=False, num_groups=None, group_topk=None, scaling_factor=None,
                 score_function="sigmoid", expert_bias=None)
    with pytest.raises((TypeError, ValueError), match="^fused_topk_with_score_function: " + words):
        te.fused_topk_with_score_function(**{**every, **arguments})
    if arguments.keys() <= {"logits", "topk", "score_function", "routing_map_format"}:
        with pytest.raises((TypeError, ValueError), match="^fused_compute_score_for_moe_aux_loss: " + words):
            te.fused_compute_score_for_moe_aux_loss(**{**dict(logits=LOGITS, topk=2, score_function="sigmoid"), **arguments})


def test_formats_of_the_map_that_are_the_only_one():
    for form in ("BYTEMAP", "bytemap", SimpleNamespace(name="BYTEMAP")):
        te.fused_compute_score_for_moe_aux_loss(LOGITS, 2, "softmax", form)


@pytest.mark.parametrize("arguments, words", [
    (dict(probs=PROBS[0]), r"probs: expected 2 dimensions, got \[8\]"),
    (dict(probs=PROBS.int()), "probs: expected dtype .*, got torch.int32"),
    (dict(tokens_per_expert=COUNTS[1:]), r"tokens_per_expert: expected shape \[C\] == \[8\], got \[7\]"),
    (dict(tokens_per_expert=COUNTS.bool()), "tokens_per_expert: expected dtype .*, got torch.bool"),
    (dict(tokens_per_expert=COUNTS.to("meta")), "tokens_per_expert: expected device cpu, got meta"),
    (dict(total_num_tokens=0), "total_num_tokens: expected a number of at least 1, got 0"),
    (dict(total_num_tokens=COUNTS), r"total_num_tokens: expected one element, got \[8\]"),
    (dict(num_experts=3), "num_experts: expected a divisor of 8, the columns of probs, got 3"),
    (dict(topk=0), "topk: expected an int of at least 1, got 0"),
])
def test_bad_arguments_of_the_loss(arguments, words):
    every = dict(probs=PROBS, tokens_per_expert=COUNTS, total_num_tokens=5, num_experts=8, topk=2, coeff=0.1)
    with pytest.raises((TypeError, ValueError), match="^fused_moe_aux_loss: " + words):
        te.fused_moe_aux_loss(**{**every, **arguments})
