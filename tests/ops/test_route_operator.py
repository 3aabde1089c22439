"""route: softmax, top-k, norm and logsumexp against PyTorch's own, forward and gradients."""

import math

import pytest
import torch

from gbmoe.launch import router
from gbmoe.ops import route
from gbmoe.ops.route_operator import Routing, route_backward
from gbmoe.plain import plain_router
from gbmoe.router_function import RouterFunction, softmax_topk_code
from gbmoe.testing import exact_inputs
from tests.conftest import FLOATS, HALVES, assert_as_accurate_as, dtype_id

SHAPES = [(33, 8, 2), (5, 1, 1), (64, 3, 3), (20, 16, 4), (17, 33, 5), (40, 64, 6), (50, 128, 8), (21, 256, 8), (9, 250, 7),
          (13, 512, 32), (11, 1024, 32), (7, 1000, 9), (10, 24, 8), (9, 160, 6), (6, 384, 8), (12, 16, 12), (9, 100, 20),
          (8, 255, 17), (9, 256, 32),
          (5, 1023, 32), (0, 8, 2), (300, 5, 1), (10, 32, 16), (9, 28, 9), (40, 64, 10), (50, 128, 16), (21, 256, 12), (17, 33, 9),
          (9, 60, 16), (9, 128, 6), (9, 64, 20), (200, 8, 2), (129, 4, 4), (70, 8, 8), (100, 16, 8), (100, 32, 12), (40, 192, 4),
          (40, 256, 4), (20, 384, 8), (9, 136, 12),
          (20, 512, 8), (9, 512, 4), (9, 512, 12), (9, 384, 4), (11, 384, 20), (7, 384, 12), (9, 192, 20)]


def torchs(logits, ids, p):
    """The router in PyTorch's own functions, for experts that are already chosen."""
    scores = logits.softmax(-1)
    weights = scores.gather(1, ids)
    if p is not None:
        weights = weights / torch.norm(weights, p=p, dim=-1, keepdim=True)
    if logits.dtype != torch.float64:
        return scores, weights, logits.logsumexp(-1)
    # Of logsumexp the gradient is exp(x - logsumexp), and so off by as many last bits as logsumexp is large: the reference must not be.
    largest = logits.detach().amax(-1, keepdim=True)
    return scores, weights, (logits - largest).logsumexp(-1) + largest.squeeze(-1)


def distinct_logits(tokens, experts, dtype, device, seed=1):
    """Logits without ties in any dtype: a permutation of evenly spaced values that bfloat16 still tells apart."""
    noise = torch.rand(tokens, experts, device=device, generator=exact_inputs.generator(device, seed))
    rank = noise.argsort(-1).argsort(-1)
    # Steps within an octave of 128 values; higher experts counts go through several octaves.
    exponent, mantissa = rank // 128, rank % 128
    return (torch.exp2(exponent.float()) * (1 + mantissa.float() / 128) * 0.25).to(dtype)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("p", [None, 1.0, 2.0, 3.0, math.inf])
def test_forward_and_gradients(device, shape, dtype, p):
    tokens, experts, top_k = shape
    logits = distinct_logits(tokens, experts, dtype, device).requires_grad_()
    exact_inputs.poison(device)
    got = route(logits, top_k, normalize=p)
    ids = logits.detach().double().topk(top_k, dim=-1).indices
    assert torch.equal(got.experts_TK, ids) and got.experts_TK.dtype == torch.int64
    leaves = {name: logits.detach().to(t).requires_grad_() for name, t in (("baseline", dtype), ("exact", torch.float64))}
    expected = {name: torchs(leaf, ids, p) for name, leaf in leaves.items()}
    outputs = {"got": (got.scores_TE, got.weights_TK, got.logsumexp_T.to(dtype)), **expected}
    for what, *values in zip(("scores", "weights", "logsumexp"), outputs["got"], outputs["baseline"], outputs["exact"]):
        assert_as_accurate_as(*(t.detach() for t in values), what)
    if tokens == 0:
        return
    grads = [exact_inputs.exact_values(*t.shape, dtype=torch.float64, device=device, seed=seed)
             for seed, t in enumerate(outputs["exact"], start=2)]
    for chosen in ((0,), (1,), (2,), (0, 1, 2)):  # each output's own path, and all together
        gradients = [
            torch.autograd.grad([outputs[name][i] for i in chosen], leaf, [grads[i].to(leaf.dtype) for i in chosen], retain_graph=True)[0]
            for name, leaf in (("got", logits), *leaves.items())]
        if not gradients[1].isfinite().all():  # torch's own float16 overflows in r**p; the float32 gradient, rounded, does not
            leaf = logits.detach().float().requires_grad_()
            values = torchs(leaf, ids, p)
            gradients[1] = torch.autograd.grad([values[i] for i in chosen], leaf, [grads[i].float() for i in chosen])[0].to(dtype)
        if chosen == (1,) and top_k == 1 and p is not None:
            assert float(gradients[0].abs().max()) <= 16 * torch.finfo(dtype).eps  # a weight that is always 1
        else:
            assert_as_accurate_as(*gradients, f"gradient through {chosen}")


def hard_logits(experts, top_k, device):
    """Logits [T,E] in float32, a token for each thing that makes the choice among `experts` hard."""
    noise = torch.randn(8, experts, device=device, generator=exact_inputs.generator(device, 1))
    rank = torch.arange(experts, device=device, dtype=torch.float32)
    nan, inf = float("nan"), math.inf
    sparse_nan, dense_nan, few_numbers, infinite = noise[4].clone(), noise[5].clone(), noise[6].clone(), noise[7].clone()
    sparse_nan[:: experts // 3 + 1] = nan
    dense_nan[: top_k + 5] = -nan  # more than can be chosen
    few_numbers[top_k // 2 :] = -inf
    infinite[1::7], infinite[2::5] = inf, -inf
    crowded = 100 + noise[0] / 100  # distinct in float32, by less than half precision tells apart
    return torch.stack([
        noise[0], noise[1].round(), noise[2].round().clamp(-1, 1), noise[3].sign() * 0.0,  # more and more ties; zeros of both signs
        torch.full_like(rank, 2.5), torch.full_like(rank, -inf), torch.full_like(rank, nan),
        rank, -rank, rank % 8, -(rank % 32), (rank % 256).sqrt(), torch.where(rank < 64, rank, -inf),  # the highest side by side
        torch.where(rank % 37 == 0, 3e38, -3e38), torch.full_like(rank, -3e38),  # the largest numbers
        *(torch.where(rank % 37 == 0, high, low) for high, low in ((3.1e9, 0), (1e20, -1e20), (2e6, 1.9e6), (-1e10, -2e10))),
        sparse_nan, dense_nan, few_numbers, infinite, crowded, rank,
    ])


# Each way that the kernels have, with as many experts as it can hold, and with fewer.
HARD_SHAPES = [*((e, k) for e in (512, 1000, 1024) for k in (8, 9, 16, 31, 32)), (1024, 1), (513, 32), (512, 4),
               (504, 8), (400, 16), (392, 4), (384, 8), (384, 3), (384, 16), (384, 32), (376, 8), (376, 12), (300, 32),
               (272, 31), (264, 4), (260, 9), (256, 8), (256, 32), (256, 12), (256, 1), (252, 32), (250, 8), (248, 8),
               (248, 32), (200, 4), (200, 12), (192, 4), (188, 12), (160, 32), (160, 8), (160, 17), (152, 9), (148, 4),
               (136, 4), (136, 12), (128, 16), (128, 32), (128, 1), (128, 7), (124, 32), (120, 16), (104, 8), (100, 8),
               (96, 31), (72, 3), (64, 8), (64, 10), (64, 17), (64, 4), (60, 4), (60, 10), (60, 32), (56, 8), (52, 17),
               (36, 9), (40, 4), (40, 32), (32, 32), (32, 4), (32, 16), (33, 7), (33, 9), (24, 8), (24, 4), (24, 12),
               (24, 20), (16, 9), (16, 16), (16, 8), (16, 4), (15, 9), (12, 3), (12, 6), (12, 12), (8, 8), (8, 3),
               (6, 5), (4, 4), (2, 1), (1, 1), (504, 32), (392, 17), (512, 1), (384, 1), (260, 17), (192, 8), (192, 16), (192, 32),
               (184, 4), (184, 8), (176, 10), (168, 17), (160, 4), (160, 16), (152, 8), (152, 20), (60, 8), (20, 5), (56, 12),
               (63, 4), (63, 17), (33, 3), (33, 32), (17, 1), (17, 17), (32, 8)]


def by_sorting(logits, top_k):
    """The choice, from a stable sort: NaN above every number, zeros of both signs equal, the lower expert among equals."""
    return logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


@pytest.mark.pairs
@pytest.mark.parametrize("experts, top_k", HARD_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32-scores"])
def test_hard_choices(device, experts, top_k, dtype, wide):
    logits = hard_logits(experts, top_k, device).to(dtype)
    exact_inputs.poison(device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=wide):
        got = route(logits, top_k)
    expected = Routing(*plain_router.softmax_topk(logits.cpu(), top_k, None, torch.float32 if wide else dtype))
    assert torch.equal(got.experts_TK.cpu(), by_sorting(logits.cpu(), top_k))
    for name in ("scores_TE", "logsumexp_T"):
        torch.testing.assert_close(getattr(got, name).cpu(), getattr(expected, name), equal_nan=True)
    torch.testing.assert_close(got.weights_TK, got.scores_TE.gather(1, got.experts_TK), rtol=0, atol=0, equal_nan=True)


def bit_patterns(experts, dtype, device):
    """Numbers that arithmetic may change on its way: NaN of both signs with and without a payload, subnormals; [4,E]."""
    infinity = torch.tensor(math.inf, dtype=dtype).view(torch.int16).item()
    rank = torch.arange(experts, device=device, dtype=torch.int32)
    nans = torch.tensor([0x7FFF, 0xFFFF, infinity + 1, infinity + 0x8001], device=device, dtype=torch.int32)
    some = torch.where(rank % 5 == 3, nans[rank // 5 % 4], rank)
    subnormal = rank % 0x80
    rows = torch.stack([some, nans[rank % 4], subnormal, subnormal | (rank % 2 << 15)])
    return torch.where(rows >= 0x8000, rows - 0x10000, rows).short().view(dtype)


@pytest.mark.parametrize("experts, top_k", [(8, 3), (32, 16), (64, 8), (60, 4), (256, 8), (384, 8), (512, 32), (1024, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_nan_of_any_sign_and_subnormal_numbers(device, experts, top_k, dtype):
    logits = bit_patterns(experts, dtype, device)
    assert torch.equal(route(logits, top_k).experts_TK.cpu(), by_sorting(logits.cpu(), top_k))


@pytest.mark.parametrize("experts, top_k", [(4, 4), (8, 7), (8, 8), (16, 5), (15, 9), (24, 8), (33, 9), (64, 17), (64, 32), (128, 7),
                                            (192, 12), (256, 31), (256, 32), (384, 8), (512, 16), (384, 4), (384, 32), (260, 17),
                                            (128, 3), (128, 16), (128, 32), (160, 8), (192, 32), (63, 32)])
@pytest.mark.parametrize("shift", [0, 1])
def test_pairs_of_floats_that_differ_in_their_last_bits(device, experts, top_k, shift):
    """Every number has one neighbour that is alike in its first 22 bits, and the higher one comes second."""
    rank = torch.arange(experts, device=device) + shift
    logits = (1000 - rank // 2 + rank % 2 / 100).float().expand(64, experts).contiguous()
    assert torch.equal(route(logits, top_k).experts_TK, logits.double().topk(top_k, dim=-1).indices)


@pytest.mark.memcheck
@pytest.mark.parametrize("experts, top_k", [(64, 32), (128, 12), (128, 32), (160, 17), (192, 20), (256, 12), (256, 32), (384, 8), (384, 16),
                                            (384, 32), (512, 4), (512, 8), (512, 10), (512, 16), (512, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_all_that_are_chosen_may_be_in_one_lane(device, experts, top_k, dtype):
    """Lanes own runs of four or eight experts, every so many: a token for each lane, whose experts have the highest logits."""
    expert = torch.arange(experts, device=device)
    owned = torch.stack([expert // width % lanes == lane for width in (4, 8) for lanes in (4, 8, 16) for lane in range(lanes)])
    noise = torch.rand(len(owned), experts, device=device, generator=exact_inputs.generator(device, 1))
    logits = torch.where(owned, 10 + noise, noise).to(dtype)
    assert torch.equal(route(logits, top_k).experts_TK.cpu(), by_sorting(logits.cpu(), top_k))


def test_gradcheck(device):
    logits = torch.randn(6, 9, dtype=torch.float64, device=device, requires_grad=True)
    for p in (None, 1.0, 2.0):
        torch.autograd.gradcheck(lambda x: [t for t in route(x, 3, normalize=p) if t.is_floating_point()], logits)


def test_ties_go_to_the_lower_expert(device):
    logits = torch.zeros(4, 70, device=device)
    logits[1, 5] = logits[1, 40] = 1.0
    ids = route(logits, 3).experts_TK.tolist()
    assert ids[0] == [0, 1, 2] and ids[1] == [5, 40, 0]


def test_negative_and_positive_zero_are_one_value(device):
    logits = torch.tensor([[-0.0, 0.0, -1.0]], device=device)
    assert route(logits, 2).experts_TK.tolist() == [[0, 1]]


def test_minus_infinity_is_never_chosen_before_a_number(device):
    logits = torch.full((2, 40), -math.inf, device=device)
    logits[0, 33], logits[0, 7] = 1.0, -50.0
    scores, weights, ids, _ = route(logits, 3)
    assert ids[0].tolist() == [33, 7, 0] and float(weights[0, 2]) == 0
    assert float(scores[0].sum()) == pytest.approx(1)
    assert ids[1].tolist() == [0, 1, 2] and bool(scores[1].isnan().all())  # nothing but -inf has no softmax


def test_nan_ranks_above_every_number_and_stays_in_its_token(device):
    logits = torch.randn(3, 20, device=device)
    logits[1, 13] = float("nan")
    scores, weights, ids, logsumexp = route(logits, 2)
    assert ids[1, 0].item() == 13 and bool(scores[1].isnan().all())
    assert not bool(scores[[0, 2]].isnan().any() | weights[[0, 2]].isnan().any() | logsumexp[[0, 2]].isnan().any())


def test_infinite_logits_do_not_hide_the_others(device):
    logits = torch.tensor([[1e30, 3e38, -3e38, 0.0]], device=device)
    assert route(logits, 3).experts_TK.tolist() == [[1, 0, 3]]


def test_autocast_gives_float32_scores_as_softmax_does(device):
    logits = torch.randn(5, 8, device=device).bfloat16().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        scores, weights, _, _ = route(logits, 2)
    assert scores.dtype == weights.dtype == torch.float32
    (scores.square().sum() + weights.sum()).backward()
    assert logits.grad.dtype == torch.bfloat16


def test_logits_in_the_middle_of_a_tensor(device):
    """A row that does not start at a multiple of 16 bytes must not be read as if it did."""
    buffer = torch.randn(5 * 128 + 3, device=device).bfloat16()
    logits = buffer[3:].view(5, 128).detach().requires_grad_()
    got, expected = route(logits, 4), route(logits.detach().clone(), 4)
    assert torch.equal(got.experts_TK, expected.experts_TK) and torch.equal(got.scores_TE, expected.scores_TE)
    got.weights_TK.sum().backward()
    assert bool(logits.grad.isfinite().all())


def test_opcheck(device):
    logits = distinct_logits(6, 9, torch.float32, device).requires_grad_()
    torch.library.opcheck(torch.ops.gbmoe.route.default, (logits, None, None, None, 3, softmax_topk_code(1.0), False))


@pytest.mark.parametrize("experts, top_k", [(96, 6), (1024, 32)])
def test_repeats_give_the_same_bits(device, experts, top_k):
    logits = torch.randn(200, experts, device=device).bfloat16()
    first = route(logits, top_k, normalize=1.0)
    assert all(torch.equal(a, b) for _ in range(20) for a, b in zip(first, route(logits, top_k, normalize=1.0)))


@pytest.mark.parametrize("arguments, words", [
    ((torch.zeros(3), 1), "logits: expected 2 dimensions, got \\[3\\]"),
    ((torch.zeros(3, 4, dtype=torch.int64), 1), "logits: expected dtype .*, got torch.int64"),
    ((torch.zeros(3, 4), 5), "top_k: expected an int, 1 to 4, the number of experts, got 5"),
    ((torch.zeros(3, 4), 2.5), "top_k: expected an int, 1 to 4, the number of experts, got 2.5"),
    ((torch.zeros(3, 4), 0), "top_k: expected an int, 1 to 4, the number of experts, got 0"),
])
def test_bad_arguments(arguments, words):
    with pytest.raises((TypeError, ValueError), match="route: " + words):
        route(*arguments)


def test_bad_norm():
    with pytest.raises(ValueError, match="normalize: expected None or a positive p, got -1"):
        route(torch.zeros(3, 4), 1, normalize=-1)


@pytest.mark.memcheck
@pytest.mark.parametrize("experts, top_k", [(8, 2), (40, 3), (64, 12), (256, 8), (1000, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("p", [None, 1.0, 2.0, 3.0])
def test_ids_that_name_no_expert_give_no_gradient(device, experts, top_k, dtype, p):
    """The ids are a tensor of the caller's, who may write to them before backward."""
    tokens = 30
    def draw(*shape, seed):
        return torch.randn(shape, generator=exact_inputs.generator("cpu", seed), dtype=torch.float64).to(dtype)

    scores = torch.softmax(draw(tokens, experts, seed=1).double(), 1).to(dtype)
    ids = scores.topk(top_k).indices
    for i, wild in enumerate((experts, -1, 2**31, 2**32, -2**40, 2**63 - 1)):
        ids[2 * i, i % top_k] = wild
    ids[20] = -5  # none at all
    grads = draw(tokens, experts, seed=2), draw(tokens, top_k, seed=3), draw(tokens, seed=4)
    logsumexp_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    exact_inputs.poison(device)
    result = torch.ops.gbmoe.route_backward(scores.to(device), ids.to(device), None,
                                            *(t.to(device) for t in (*grads[:2], grads[2].to(logsumexp_dtype))),
                                            softmax_topk_code(p), True, dtype)

    expected = []
    for score, chosen, grad_score, grad_weight, grad_lse in zip(scores.double(), ids, *(g.double() for g in grads)):
        score.requires_grad_()
        exists = (chosen >= 0) & (chosen < experts)
        weight = score[chosen[exists]]
        weight = weight if p is None or not exists.any() else weight / torch.linalg.vector_norm(weight, ord=p)
        total, = torch.autograd.grad((weight * grad_weight[exists]).sum() + (score * grad_score).sum(), score)
        score = score.detach()
        expected.append(score * (total - (score * total).sum() + grad_lse))
    tolerance = {torch.bfloat16: 2**-7, torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(result.cpu().double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("p", [0.01, 0.5, 12.0, 40.0, 1e3, 1e30, 1e300])
@pytest.mark.parametrize("experts, top_k", [(8, 2), (64, 6), (1024, 32)])
def test_norms_whose_powers_leave_the_range_of_floats(device, dtype, p, experts, top_k):
    """0.1 to the 46th is 0 in float32, and weights were infinite; sums of roots overflow for p near 0."""
    logits = (2 * torch.randn(7, experts, device=device, generator=exact_inputs.generator(device, 1))).to(dtype)
    logits[3, 1] = -math.inf  # a score of 0
    logits[4] = 1.0  # ties
    logits = logits.requires_grad_()
    grad = exact_inputs.exact_values(7, top_k, dtype=dtype, device=device, seed=2)
    got = route(logits, top_k, normalize=p)
    got.weights_TK.backward(grad)

    exact = logits.detach().double().requires_grad_()
    chosen = exact.gather(1, got.experts_TK)
    of_largest = (chosen - chosen.amax(-1, keepdim=True)).exp()
    if p < 1e4:
        weights = (of_largest.log() - (of_largest**p).sum(-1, keepdim=True).log() / p).exp()
    else:  # powers of all but the largest are 0
        largest = of_largest == 1
        of_largest = of_largest / (of_largest * largest).sum(-1, keepdim=True) * largest.sum(-1, keepdim=True)
        weights = of_largest
    weights.backward(grad.double())
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.weights_TK.double(), weights, rtol=tolerance, atol=tolerance)
    tolerance *= float(grad.abs().sum(1).max())
    torch.testing.assert_close(logits.grad.double(), exact.grad.nan_to_num(), rtol=tolerance, atol=tolerance)


def test_meta_device():
    logits = torch.randn(5, 4, device="meta", requires_grad=True)
    got = route(logits, 2, normalize=1.0)
    assert [tuple(t.shape) for t in got] == [(5, 4), (5, 2), (5, 2), (5,)] and all(t.is_meta for t in got)
    (got.scores_TE.sum() + got.weights_TK.sum() + got.logsumexp_T.sum()).backward()
    assert logits.grad.is_meta and logits.grad.shape == logits.shape


@pytest.mark.memcheck
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("p", [None, 1.0, 3.0])
def test_float32_logits_with_scores_of_16_bits(device, shape, dtype, p):
    """The logits of a layer in 16 bits: chosen by as they are, and only the results are rounded."""
    tokens, experts, top_k = shape
    logits = torch.randn(tokens, experts, device=device, generator=exact_inputs.generator(device, 1))
    exact_inputs.poison(device)
    scores, weights, ids, logsumexp = router.route(logits, None, None, None, top_k, RouterFunction(normalize=p), dtype)
    exact = logits.double()
    assert torch.equal(exact.gather(1, ids), exact.topk(top_k).values)
    for got, expected in zip((scores, weights, logsumexp), torchs(exact, ids, p)):
        tolerance = 1e-5 if got is logsumexp else torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance / 1e3 if dtype == torch.bfloat16 else 2**-24)
    assert scores.dtype == weights.dtype == dtype and logsumexp.dtype == torch.float32


def test_float32_logits_that_are_large_and_near_each_other(device):
    """Kernels took logits above a million for ones that are either equal or far apart, as those of 16 bits are there."""
    logits = torch.tensor([[2e6, 2e6 + 1, 2e6 - 2, -1e7], [3e38, -3e38, 3e38, 0], [-2e6, -2e6 - 0.5, -4e6, -2e6 - 1]], device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        scores, _, ids, _ = router.route(logits, None, None, None, 2, RouterFunction(), dtype)
        torch.testing.assert_close(scores.double(), logits.double().softmax(1), rtol=torch.finfo(dtype).eps, atol=2**-24)
        assert ids.tolist() == [[1, 0], [0, 2], [0, 1]]


@pytest.mark.memcheck
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores_dtype, dtype", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                                 (torch.float32, torch.bfloat16), (torch.float32, torch.float16)], ids=dtype_id)
def test_a_gradient_in_another_dtype_than_the_scores(device, shape, scores_dtype, dtype):
    """That of a float32 router's logits with tokens of 16 bits, or under autocast the other way round."""
    tokens, experts, top_k = shape
    draw = [torch.randn(*size, device=device, generator=exact_inputs.generator(device, seed))
            for seed, size in enumerate(((tokens, experts), (tokens, experts), (tokens, top_k), (tokens,)))]
    scores, grads = draw[0].softmax(1).to(scores_dtype), (draw[1].to(scores_dtype), draw[2].to(scores_dtype), draw[3])
    ids = scores.topk(top_k).indices
    exact_inputs.poison(device)
    result = route_backward(scores, ids, None, *grads, softmax_topk_code(1.0), True, dtype)
    exact = plain_router.softmax_topk_backward(scores.double(), ids, *(g.double() for g in grads), 1.0, torch.float64)
    assert result.dtype == dtype
    tolerance = (1e-5 if dtype == torch.float32 else 1e-3) * (float(exact.abs().max()) if tokens else 1.0)
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=tolerance)


def test_the_gradient_of_logits_has_the_dtype_of_its_fake(device):
    scores, ids = torch.rand(5, 4, device=device), torch.tensor([[0, 1]] * 5, device=device)
    for of in (device, "meta"):
        got = route_backward(scores.to(of), ids.to(of), None, scores.to(of), None, None, softmax_topk_code(None), True, torch.bfloat16)
        assert got.dtype == torch.bfloat16 and got.shape == scores.shape
