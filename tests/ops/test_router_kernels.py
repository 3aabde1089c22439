"""The router's kernels for logits of any type, emulated on a CPU: what the tests of the operator ask of a GPU."""

import shutil

import pytest
import torch

from gbmoe import RouterFunction
from gbmoe.launch import router as launches
from gbmoe.ops import route_operator
from gbmoe.plain import plain_router
from gbmoe.router_function import softmax_topk_code
from gbmoe.tuning import router_kernels as tuning
from tests.ops import emulated_router, test_route_operator as softmax_topk, test_router_functions as functions

pytestmark = [pytest.mark.xdist_group("emulated_router"),  # the kernels are compiled once
              pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return emulated_router.compile_kernels(tmp_path_factory.mktemp("emulated_router"))


@pytest.fixture
def emulated(kernels, monkeypatch):
    """Within it the operator `route` computes on the CPU what a GPU's kernels would, but in float64 and where there is no kernel."""
    router = emulated_router.Router(kernels)
    plain_forward, by_scores, by_logits = launches.route, plain_router.softmax_topk_backward, plain_router.route_backward

    def serves(logits, top_k, function, plain):
        return logits.dtype != torch.float64 and logits.numel() and launches.kernels_take(logits.size(1), top_k, function, plain)

    def forward(logits, bias, padding, given, top_k, function, scores_dtype):
        plain = launches.is_softmax_topk(function, bias, padding, given)
        call = router.forward if serves(logits, top_k, function, plain) else plain_forward
        return tuple(call(logits.contiguous(), bias, padding, given, top_k, function, scores_dtype))

    def from_scores(scores, ids, grad_scores, grad_weights, grad_logsumexp, p, dtype):
        grads = grad_scores, grad_weights, grad_logsumexp
        function = RouterFunction(normalize=p)
        if not serves(scores, ids.size(1), function, True):
            return by_scores(scores, ids, *grads, p, dtype)
        return router.backward(scores, ids, None, *contiguous(grads), softmax_topk_code(p), True, dtype)

    def from_logits(logits, ids, padding, *grads_function_dtype):
        *grads, function, dtype = grads_function_dtype
        if not serves(logits, ids.size(1), function, False):
            return by_logits(logits, ids, padding, *grads, function, dtype)
        return router.backward(logits.contiguous(), ids, padding, *contiguous(grads), function.code, False, dtype)

    monkeypatch.setattr(launches, "route", forward)
    monkeypatch.setattr(plain_router, "softmax_topk_backward", from_scores)
    monkeypatch.setattr(plain_router, "route_backward", from_logits)
    return router


def contiguous(grads):
    return [None if grad is None else grad.contiguous() for grad in grads]


# Of each kernel a call with all of its experts, and one with fewer.
SHAPES = [(8, 2), (64, 8), (56, 3), (61, 5), (128, 8), (100, 8), (256, 8), (192, 6), (250, 8), (255, 12), (512, 8), (384, 8), (264, 8),
          (288, 6), (1024, 32), (600, 8), (896, 16), (1000, 9), (1001, 32), (128, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("experts, top_k", SHAPES)
@pytest.mark.parametrize("given", [False, True])
def test_kernels_agree_with_plain_pytorch(kernels, experts, top_k, given):
    for seed, (name, function) in enumerate(functions.FUNCTIONS.items()):
        router = emulated_router.Router(kernels, seed)
        dtype, scores_dtype = functions.KERNEL_DTYPES[seed % len(functions.KERNEL_DTYPES)]
        functions.check_kernels(experts, top_k, functions.grouped(function, experts, top_k), dtype, scores_dtype, given, seed % 2 == 1,
                                name in functions.BIASED, CPU, tokens=19, forward=router.forward, backward=router.backward)


def test_every_kernel_is_asked_for():
    chosen = {tuning.any_function(*shape) for shape in SHAPES}
    assert chosen == {tuning.any_function(experts, top_k) for experts in range(1, 1025) for top_k in range(1, min(experts, 32) + 1)}
    gradients = {tuning.any_function_backward(experts)[0::2] for experts, _ in SHAPES}
    assert gradients == {tuning.any_function_backward(experts)[0::2] for experts in range(1, 1025)}


@pytest.mark.parametrize("experts, top_k", [shape for number, shape in enumerate(softmax_topk.HARD_SHAPES) if number % 3 == 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_hard_choices_of_a_softmax(emulated, experts, top_k, dtype):
    softmax_topk.test_hard_choices(CPU, experts, top_k, dtype, wide=False)


@pytest.mark.parametrize("experts, top_k", [*SHAPES, (16, 9), (512, 10)])
@pytest.mark.parametrize("function", [RouterFunction(pre_softmax=False, scale=2), RouterFunction("sigmoid")], ids=["post", "sigmoid"])
def test_hard_choices_of_any_function(emulated, experts, top_k, function):
    """What is ranked are the logits here, so that their stable order is what has to come out."""
    logits = softmax_topk.hard_logits(experts, top_k, CPU)
    got = route_operator.route(logits, top_k, function=function)
    assert torch.equal(got.experts_TK, softmax_topk.by_sorting(logits, top_k))


@pytest.mark.parametrize("experts, top_k", [(64, 8), (128, 8), (192, 6), (256, 8), (384, 8), (512, 8), (512, 12), (160, 20), (64, 16),
                                            (128, 12)])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_that_differ_in_their_last_bits_or_lie_in_one_lane(emulated, experts, top_k, biased):
    bias = torch.zeros(experts) if biased else None
    function = RouterFunction(pre_softmax=False)
    rank = torch.arange(experts)
    pairs = [(1000 - (rank + shift) // 2 + (rank + shift) % 2 / 100).float() for shift in (0, 1)]
    owned = [rank // width % lanes == lane for width in (1, 4) for lanes in (4, 8, 16, 32) for lane in range(0, lanes, 3)]
    noise = functions.draw(len(owned), experts).sigmoid()
    logits = torch.stack(pairs + [torch.where(of, 10 + row, row) for of, row in zip(owned, noise)])
    got = route_operator.route(logits, top_k, function=function, expert_bias=bias)
    assert torch.equal(got.experts_TK, softmax_topk.by_sorting(logits, top_k))


@pytest.mark.parametrize("function", [
    RouterFunction("sigmoid"), RouterFunction(num_groups=2, group_topk=1, group_best=1), RouterFunction(num_groups=2, group_topk=1),
    RouterFunction("sigmoid", num_groups=3, group_topk=2), RouterFunction(pre_softmax=False, num_groups=3, group_topk=2)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_every_order_of_a_few_logits(emulated, function, biased):
    functions.test_every_order_of_a_few_logits(CPU, function, biased)


@pytest.mark.parametrize("experts, top_k, groups", [(256, 8, 8), (256, 8, 32), (512, 8, 64), (1024, 32, 64), (160, 6, 8), (72, 8, 9),
                                                    (384, 16, 12)])
def test_groups_of_all_sizes(emulated, experts, top_k, groups):
    for best in (1, 2):
        function = RouterFunction("sigmoid", num_groups=groups, group_topk=max(2, -(-top_k * groups // experts) + 1), group_best=best)
        logits = functions.draw(12, experts, seed=groups)
        logits[1], logits[2, ::3], logits[3] = 0.5, float("nan"), logits[3].round()
        got = route_operator.route(logits, top_k, function=function)
        assert torch.equal(got.experts_TK, functions.by_rule(logits, function, top_k)), best


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_what_the_operator_promises(emulated, name):
    functions.test_padding_is_left_out(CPU, name)
    functions.test_ids_that_were_chosen_give_the_same_bits_again(CPU, name)
    for value in (-1e4, -120.0, 30.0, 1e4):
        functions.test_extreme_logits_have_finite_scores_and_gradients(CPU, name, value)
    for shape in ((0, 8, 2), (1, 8, 8), (2, 1, 1), (2, 61, 5), (1, 1024, 32)):
        functions.test_sizes_at_their_ends(CPU, name, shape, torch.bfloat16)
    for experts, top_k in ((256, 8), (512, 32), (1000, 8), (8, 2)):
        functions.test_equal_logits_give_the_lowest_experts(CPU, name, experts, top_k)


@pytest.mark.parametrize("function", [RouterFunction(normalize=1), RouterFunction(pre_softmax=False), functions.DEEPSEEK], ids=str)
def test_given_ids_may_name_no_expert_or_one_twice(emulated, function):
    functions.test_given_ids_may_name_no_expert_or_one_twice(CPU, function)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_slopes_keep_their_bits_where_scores_round_to_one(emulated, score):
    functions.test_slopes_keep_their_bits_where_scores_round_to_one(CPU, torch.float32, score)


def test_weights_of_given_ids_far_below_the_highest_logit(emulated):
    functions.test_weights_of_given_ids_far_below_the_highest_logit(CPU)


def test_a_bias_decides_nan_stays_and_masks_hide(emulated):
    functions.test_a_bias_decides_and_does_not_weigh(CPU)
    functions.test_nan_stays_in_its_token(CPU)
    functions.test_masked_logits_have_no_score(CPU)


@pytest.mark.parametrize("shape", [(33, 8, 2), (17, 33, 5), (9, 250, 7), (13, 512, 32), (50, 128, 16), (21, 256, 12), (9, 60, 16),
                                   (40, 192, 4)], ids=str)
@pytest.mark.parametrize("p", [None, 1.0, 2.0, 3.0])
def test_a_softmax_forward_and_gradients(emulated, shape, p):
    for dtype in (torch.float32, torch.float16):
        softmax_topk.test_forward_and_gradients(CPU, shape, dtype, p)


@pytest.mark.parametrize("name", functions.FUNCTIONS)
@pytest.mark.parametrize("replay", [False, True])
def test_any_function_forward_and_gradients(emulated, name, replay):
    for shape in functions.SHAPES[:6]:
        if not functions.FUNCTIONS[name].has_groups or shape != (9, 1024, 8, 32):
            functions.test_forward_and_gradients(CPU, shape, torch.float32, name, replay)
