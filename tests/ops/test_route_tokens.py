"""route_tokens: the router's product with logits that nothing rounds, and their softmax, choice and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gbmoe import engines
from gbmoe.ops import route, route_tokens
from gbmoe.plain import plain_router
from gbmoe.router_function import softmax_topk_code
from gbmoe.testing import exact_inputs
from tests.conftest import FLOATS, HALVES, assert_as_accurate_as, dtype_id
from tests.ops.test_route_operator import torchs

# The least by which a weight of 0 can be exceeded so that 1 plus it is 1 in the dtype: it is rounded to even.
HALF_A_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def near_tie(dtype, device="cpu"):
    """A token [1,2] and weights [2,2] whose logits are equal in the dtype, and not as they are."""
    return torch.ones(1, 2, dtype=dtype, device=device), torch.tensor([[1, 0], [1, HALF_A_STEP[dtype]]], dtype=dtype, device=device)


def operands(tokens, experts, hidden, dtype, device="cpu", weight_dtype=None):
    """Random tokens [T,H] and weights [E,H] whose logits have a standard deviation of one."""
    x, weight = (torch.randn(*shape, generator=exact_inputs.generator(device, seed), device=device)
                 for seed, shape in enumerate(((tokens, hidden), (experts, hidden))))
    return x.to(dtype).requires_grad_(), (weight / math.sqrt(hidden)).to(weight_dtype or dtype).requires_grad_()


def exact_logits(x, weight):
    return x.detach().double() @ weight.detach().double().t()


def assert_experts_are_those_of(logits, experts):
    """In every token the chosen experts' exact logits are the highest, except for ones that float32 hardly tells apart."""
    best, chosen = logits.topk(experts.size(1)).values, logits.gather(1, experts)
    assert torch.equal(experts.sort().values[:, 1:].diff().gt(0).all(), torch.tensor(True, device=experts.device))
    assert float((best - chosen).abs().max()) <= 1e-5


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
def test_logits_were_rounded_to_the_operands_dtype(device, dtype):
    x, weight = near_tie(dtype, device)
    got = route_tokens(x, weight, 1)
    assert got.experts_TK.tolist() == [[1]] and route(x @ weight.t(), 1).experts_TK.tolist() == [[0]]
    assert got.scores_TE.dtype == got.weights_TK.dtype == dtype and got.logsumexp_T.dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("tokens, experts, hidden, top_k", [(2048, 64, 512, 8), (512, 256, 1024, 8), (256, 896, 512, 16),
                                                            (300, 61, 264, 6)])
def test_other_experts_than_those_of_exact_logits_were_chosen(device, dtype, tokens, experts, hidden, top_k):
    """In 2 to 12 % of the tokens, in bfloat16."""
    x, weight = operands(tokens, experts, hidden, dtype, device)
    exact_inputs.poison(device)
    got, exact = route_tokens(x, weight, top_k), exact_logits(x, weight)
    assert_experts_are_those_of(exact, got.experts_TK)
    if dtype == torch.bfloat16:
        rounded = route(exact.to(dtype), top_k).experts_TK
        assert float((rounded.sort().values != got.experts_TK.sort().values).any(1).double().mean()) > 0.005
    torch.testing.assert_close(got.logsumexp_T.double(), exact.logsumexp(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("p", [None, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(300, 64, 128, 6), (64, 8, 40, 2), (33, 250, 64, 4), (40, 512, 64, 20), (1, 16, 24, 1)], ids=str)
def test_forward_and_gradients(device, dtype, p, shape):
    """As accurate as torch's own in that dtype."""
    tokens, experts, hidden, top_k = shape
    x, weight = operands(tokens, experts, hidden, dtype, device)
    got = route_tokens(x, weight, top_k, normalize=p)
    leaves = {of: [t.detach().to(as_dtype).requires_grad_() for t in (x, weight)]
              for of, as_dtype in (("baseline", dtype), ("exact", torch.float64))}
    outputs = {"got": (got.scores_TE, got.weights_TK, got.logsumexp_T.to(dtype)),
               **{of: torchs(F.linear(*operands), got.experts_TK, p) for of, operands in leaves.items()}}
    for what, *values in zip(("scores", "weights", "logsumexp"), *(outputs[of] for of in ("got", "baseline", "exact"))):
        assert_as_accurate_as(*(t.detach() for t in values), what)
    if top_k == 1:
        return  # a weight that is always 1 has no gradient
    grads = [exact_inputs.exact_values(*t.shape, dtype=torch.float64, device=device, seed=seed)
             for seed, t in enumerate(outputs["exact"], start=2)]
    for chosen in ((0,), (1,), (2,), (0, 1, 2)):
        gradients = [torch.autograd.grad([outputs[of][i] for i in chosen], of_leaves,
                                         [grads[i].to(of_leaves[0].dtype) for i in chosen], retain_graph=True)
                     for of, of_leaves in (("got", (x, weight)), *leaves.items())]
        for what, *values in zip(("x", "weight"), *gradients):
            assert_as_accurate_as(*values, f"gradient of {what} through {chosen}")


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_gradients_that_nobody_wants(device, needed):
    x, weight = operands(20, 8, 16, torch.bfloat16, device)
    expected = torch.autograd.grad(route_tokens(x, weight, 2).weights_TK.sum(), (x, weight))
    x, weight = (t.detach().requires_grad_(need) for t, need in zip((x, weight), needed))
    got = route_tokens(x, weight, 2)
    assert got.weights_TK.requires_grad == any(needed) and not got.experts_TK.requires_grad
    if any(needed):
        gradient, = torch.autograd.grad(got.weights_TK.sum(), [t for t in (x, weight) if t.requires_grad])
        assert torch.equal(gradient, expected[needed.index(True)])


@pytest.mark.parametrize("dtype, weight_dtype, scores_dtype, product_dtype", [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32), (torch.float32, torch.float64, torch.float32, torch.float64),
])
def test_the_logits_gradient_is_in_the_dtype_of_the_products(monkeypatch, dtype, weight_dtype, scores_dtype, product_dtype):
    """In one of float32 it would be cast in a pass of its own, or the products would be of float32."""
    seen, plain = [], plain_router.softmax_topk_backward
    monkeypatch.setattr(plain_router, "softmax_topk_backward", lambda *args: (seen.append(args[-1]), plain(*args))[1])
    x, weight = operands(20, 8, 16, dtype, weight_dtype=weight_dtype)
    got = route_tokens(x, weight, 2, normalize=1.0)
    got.weights_TK.sum().backward()
    assert seen == [product_dtype] and got.scores_TE.dtype == got.weights_TK.dtype == scores_dtype
    assert x.grad.dtype == dtype and weight.grad.dtype == weight_dtype


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
def test_a_float32_router_of_tokens_in_16_bits(device, dtype):
    x, weight = operands(500, 64, 128, dtype, device, weight_dtype=torch.float32)
    got = route_tokens(x, weight, 4, normalize=1.0)
    assert_experts_are_those_of(exact_logits(x, weight), got.experts_TK)
    grad = exact_inputs.exact_values(500, 4, dtype=dtype, device=device, seed=3)
    gradients = torch.autograd.grad(got.weights_TK, (x, weight), grad)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch.autograd.grad(torchs(F.linear(*leaves), got.experts_TK, 1.0)[1], leaves, grad.double())
    for one, other in zip(gradients, exact):
        assert float((one.double() - other).norm()) <= 2 * torch.finfo(dtype).eps * float(other.norm())


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_under_autocast_logits_were_rounded_to_its_dtype(device, parameters):
    x, weight = (t.to(parameters).requires_grad_() for t in near_tie(torch.bfloat16, device))
    with torch.autocast(device.type, torch.bfloat16):
        got = route_tokens(x, weight, 1)
    assert got.experts_TK.tolist() == [[1]] and got.scores_TE.dtype == got.weights_TK.dtype == torch.float32
    torch.testing.assert_close(got.scores_TE, torch.tensor([[1, 1 + 2**-8]], device=device).softmax(1))
    got.scores_TE[:, 0].sum().backward()
    assert x.grad.dtype == weight.grad.dtype == parameters
    x, weight = (t.detach().double() for t in (x, weight))
    with torch.autocast(device.type, torch.bfloat16):
        assert route_tokens(x, weight, 1).scores_TE.dtype == torch.float64


def test_autocast_rounds_its_operands_alone(device):
    x, weight = operands(300, 64, 128, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        got = route_tokens(x, weight, 4)
    assert_experts_are_those_of(exact_logits(x.bfloat16(), weight.bfloat16()), got.experts_TK)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_router_rounds_no_logits(device, backend):
    torch.compiler.reset()
    x, weight = operands(300, 64, 128, torch.bfloat16, device)

    def of(x, weight):
        scores, weights, experts, logsumexp = route_tokens(x * 1, weight, 4, normalize=1.0)
        return weights.float().square().sum() + (scores * scores).float().sum() + logsumexp.sum(), experts

    expected, compiled = of(x, weight), torch.compile(of, fullgraph=True, backend=backend)(x, weight)
    assert torch.equal(expected[1], compiled[1])
    assert_experts_are_those_of(exact_logits(x, weight), compiled[1])
    for one, other in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (expected[0], compiled[0]))):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(0, 8, 16), (1, 8, 16)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_few_tokens_or_none(device, shape, dtype):
    x, weight = operands(*shape, dtype, device)
    got = route_tokens(x, weight, 2, normalize=1.0)
    assert [list(t.shape) for t in got] == [[shape[0], 8], [shape[0], 2], [shape[0], 2], [shape[0]]]
    (got.scores_TE.sum() + got.weights_TK.sum() + got.logsumexp_T.sum()).backward()
    assert x.grad.shape == x.shape and (shape[0] or bool((weight.grad == 0).all()))


def test_operands_with_any_strides(device):
    x, weight = operands(40, 16, 24, torch.bfloat16, device)
    x, weight = x.detach(), weight.detach()
    expected = route_tokens(x, weight, 3)
    strided = torch.empty(40, 48, dtype=x.dtype, device=device)[:, ::2].copy_(x)
    for tokens in (x.t().contiguous().t(), strided):
        for weights in (weight, weight.t().contiguous().t()):
            leaf = tokens.clone().requires_grad_()
            got = route_tokens(leaf, weights, 3)
            assert torch.equal(got.experts_TK, expected.experts_TK)
            torch.testing.assert_close(got.logsumexp_T, expected.logsumexp_T)
            got.weights_TK.sum().backward()


def test_opcheck(device):
    x, weight = operands(6, 9, 16, torch.bfloat16, device)
    torch.library.opcheck(torch.ops.gbmoe.route_tokens.default,
                          (x, weight, None, None, None, None, 3, softmax_topk_code(1.0), None, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_id)
def test_meta_device(dtype):
    x, weight = (t.detach().to("meta").requires_grad_() for t in operands(5, 4, 8, dtype))
    got = route_tokens(x, weight, 2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [(*t.shape, t.dtype) for t in got] == [(5, 4, dtype), (5, 2, dtype), (5, 2, torch.int64), (5, wide)]
    (got.scores_TE.sum() + got.weights_TK.sum()).backward()
    assert x.grad.is_meta and weight.grad.shape == weight.shape


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fake_tensors(place):
    with FakeTensorMode():
        x, weight = (torch.empty(rows, 8, dtype=torch.bfloat16, device=place, requires_grad=True) for rows in (5, 4))
        got = route_tokens(x, weight, 2)
        got.weights_TK.sum().backward()
    assert got.scores_TE.device.type == place and got.logsumexp_T.dtype == torch.float32
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_gradients_have_no_gradients():
    x, weight = operands(6, 4, 8, torch.float32)
    gradient, = torch.autograd.grad(route_tokens(x, weight, 2).weights_TK.square().sum(), x, create_graph=True)
    for of in (x, weight):
        with pytest.raises(RuntimeError, match="gbmoe's operators are differentiable once"):
            torch.autograd.grad(gradient.sum(), of, retain_graph=True)


def test_flops(device):
    x, weight = operands(6, 4, 8, torch.bfloat16, device)
    for function, products in ((lambda: route_tokens(x, weight, 2), 1),
                               (lambda: route_tokens(x, weight, 2).weights_TK.sum().backward(), 3)):
        with FlopCounterMode(display=False) as mode:
            function()
        assert mode.get_total_flops() == products * 2 * 6 * 4 * 8


def test_repeats_give_the_same_bits(device):
    x, weight = operands(700, 96, 256, torch.bfloat16, device)
    runs = []
    for _ in range(5):
        got = route_tokens(x, weight, 6, normalize=1.0)
        runs.append([*got, *torch.autograd.grad(got.weights_TK.square().sum(), (x, weight))])
    assert all(torch.equal(*pair) for run in runs for pair in zip(run, runs[0]))


@pytest.mark.parametrize("arguments, words", [
    ((torch.zeros(3), torch.zeros(2, 3), 1), r"x: expected 2 dimensions, got \[3\]"),
    ((torch.zeros(3, 4, dtype=torch.int8), torch.zeros(2, 4), 1), "x: expected dtype .*, got torch.int8"),
    ((torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.int8), 1), "weight: expected dtype .*, got torch.int8"),
    ((torch.zeros(3, 4), torch.zeros(2, 4, device="meta"), 1), "weight: expected device cpu, got meta"),
    ((torch.zeros(3, 4), torch.zeros(2, 3), 1), r"weight: expected size\(1\) == 4, got 3"),
    ((torch.zeros(3, 4), torch.zeros(2, 4), 3), "top_k: expected an int, 1 to 2, the number of experts, got 3"),
])
def test_bad_arguments(arguments, words):
    with pytest.raises((TypeError, ValueError), match="route_tokens: " + words):
        route_tokens(*arguments)
    with pytest.raises(ValueError, match="route_tokens: normalize: expected None or a positive p, got 0"):
        route_tokens(torch.zeros(3, 4), torch.zeros(2, 4), 1, normalize=0)


def test_an_engine_that_cannot_compute_the_logits_is_an_error():
    with pytest.raises(ValueError, match="engine 'hopper_batch_invariant' cannot serve this product: runs on CUDA devices only"):
        route_tokens(torch.zeros(3, 4), torch.zeros(2, 4), 1, engine="hopper_batch_invariant")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", engines.BATCH_INVARIANT.values())
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("tokens, experts, hidden", [(3, 64, 2048), (300, 61, 264), (1024, 256, 7168), (4096, 128, 2048), (9000, 896, 512),
                                                     (16384, 256, 1032)])
def test_a_batch_invariant_routers_logits_were_rounded(engine, dtype, tokens, experts, hidden):
    """In every kernel that computes them, by the number of tokens."""
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := engines.ENGINES[engine].unavailable(device):
        pytest.skip(reason)
    x, weight = operands(tokens, experts, hidden, dtype, device)
    exact_inputs.poison(device)
    got = route_tokens(x, weight, 1, engine=engine)
    assert_experts_are_those_of(exact_logits(x, weight), got.experts_TK)
    x, weight = near_tie(dtype, device)
    x, weight = F.pad(x, (0, 62)).expand(tokens, 64), F.pad(weight, (0, 62, 0, experts - 2))
    assert bool((route_tokens(x, weight, 1, engine=engine).experts_TK == 1).all())


@pytest.mark.gpu
def test_on_a_gpu_backward_launched_a_cast_of_the_logits_gradient():
    x, weight = operands(512, 64, 256, torch.bfloat16, "cuda")
    got = route_tokens(x, weight, 4)
    grads = torch.randn_like(got.scores_TE), torch.randn_like(got.weights_TK)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.autograd.grad((got.scores_TE, got.weights_TK), (x, weight), grads)
    names = [event.name for event in profile.events()]
    assert names.count("aten::mm") == 2 and not {"aten::copy_", "aten::to", "aten::_to_copy"} & set(names)


@pytest.mark.gpu
def test_products_that_torch_tunes_refuse_another_dtype(monkeypatch):
    x, weight = near_tie(torch.bfloat16, "cuda")
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
    assert route_tokens(x, weight, 1).experts_TK.tolist() == [[1]]
