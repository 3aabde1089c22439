"""Operators as torch sees them: called without the dispatcher, in forward mode and torch.func, and where their results lie."""

import ast
import contextlib
import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import gbmoe
from gbmoe import _define_operator, _torch_names, engines
from gbmoe.compat import transformer_engine
from gbmoe.compat.megablocks import ops as megablocks
from gbmoe.float8 import quantize_rows, quantize_weights
from gbmoe.layers import Arguments
from gbmoe.ops import route
from gbmoe.ops.permute import gather_slots, make_slot_map
from gbmoe.ops.plan_sizes import plan_sizes
from gbmoe.router_function import RouterFunction
from gbmoe.testing import exact_inputs
from gbmoe.weight_layout import WeightLayout
from tests.forked_python import python

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 64, 128, 4, 2, 33
OPERATORS = {"gbmoe::route_tokens", "gbmoe::routing_plan", "gbmoe::expert_mlp"}
BACKWARD = {"gbmoe::route_backward", "gbmoe::expert_mlp_backward"}


def make(device):
    torch.manual_seed(0)
    args = Arguments(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=TOP_K, bias=False, fp16=False,
                     bf16=True, mlp_type="glu", device=device)
    return gbmoe.dMoE(args), torch.randn(TOKENS, 1, HIDDEN, device=device, dtype=torch.bfloat16)


def gradients(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))]


class Watch(TorchDispatchMode):
    """Sees every operator and changes nothing."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_call_asked_several_times_whether_a_compiler_traces(monkeypatch, device):
    """Each answer takes two calls of Python's."""
    asked, ask = [], torch.compiler.is_compiling
    x = torch.randn(3, 8, device=device)
    slots = gbmoe.RoutingPlan.from_experts(torch.tensor([[0], [1], [0]], device=device), 2).slot_map
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: asked.append(True) or ask())
    gather_slots(x, slots)
    assert len(asked) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_there_to_see_them(grad, monkeypatch):
    """If the direct path were not taken, the tests below would compare the dispatcher with itself."""
    answers, ask = [], _define_operator._is_unseen
    monkeypatch.setattr(_define_operator, "_is_unseen", lambda inputs: answers.append(ask(inputs)) or answers[-1])
    layer, x = make("cuda")
    layer.router.register_forward_hook(lambda *_: None)  # without it they are one node, which asks for all of them
    with torch.set_grad_enabled(grad):
        layer(x)
    assert answers == [True] * len(OPERATORS)
    answers.clear()
    with Watch():
        layer(x)
    assert answers == [False] * len(OPERATORS)


@pytest.mark.parametrize("grad", [False, True])
def test_a_mode_sees_them_and_changes_no_bit(device, grad):
    layer, x = make(device)

    def results():
        if grad:
            return gradients(layer, x)
        with torch.no_grad():
            return [layer(x)]

    expected = results()
    with Watch() as watch:
        got = results()
    assert OPERATORS | (BACKWARD if grad else set()) <= watch.seen
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_profiler_names_them(device):
    layer, x = make(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(layer, x)
    names = {event.key for event in profile.key_averages()}
    assert OPERATORS | {"gbmoe::route_backward"} <= names


def test_a_profiler_of_all_threads_names_them(device):
    layer, x = make(device)
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as profile:
        layer(x)
    assert OPERATORS <= {event.key for event in profile.key_averages()}


def test_lazily_negated_tensors(device):
    logits = exact_inputs.exact_values(TOKENS, EXPERTS, dtype=torch.bfloat16, device=device, seed=1)
    negated = torch._neg_view(logits)
    assert negated.is_neg()
    for got, expected in zip(route(negated, TOP_K), route(-logits, TOP_K), strict=True):
        assert torch.equal(got, expected)


def test_a_subclass_sees_them(device):
    class Named(torch.Tensor):
        called = set()

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.called.add(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.randn(TOKENS, HIDDEN, device=device).as_subclass(Named)
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(TOKENS, 1, dtype=torch.int64, device=device), EXPERTS)
    assert type(gbmoe.padded_gather(x, plan)) is Named
    assert "gbmoe.padded_gather.default" in Named.called


def test_second_derivatives_are_refused(device):
    logits = torch.randn(TOKENS, EXPERTS, device=device, requires_grad=True)
    grad, = torch.autograd.grad(route(logits, TOP_K).weights_TK.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_autocast_casts(device):
    layer, x = make(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
        plan = gbmoe.RoutingPlan.from_experts(torch.zeros(TOKENS, 1, dtype=torch.int64, device=device), 1)
        w = torch.randn(1, FFN, HIDDEN, device=device)
        assert gbmoe.expert_mlp(x.view(TOKENS, HIDDEN).float(), plan, w, w).dtype == torch.bfloat16


def test_what_is_frozen_has_no_graph(device):
    layer, x = make(device)
    with torch.no_grad():
        expected = layer(x)
    assert expected.grad_fn is None and layer(x).grad_fn is not None
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    layer.requires_grad_(False)
    out = layer(x)
    assert out.grad_fn is None and not out.requires_grad and torch.equal(out, expected)


# ------------------------------------------------------------------------------------------------ forward mode, torch.func


def functions(device):
    """Name of an operator -> a function of its floating operands, and the operands, which are small: jacfwd makes an identity of each."""
    hidden, ffn = 8, 8
    plan = gbmoe.RoutingPlan.from_experts(exact_inputs.expert_ids(TOKENS, EXPERTS, TOP_K, device=device, seed=1), EXPERTS)
    random = functools.partial(torch.randn, device=device)
    x, rows, weights = random(TOKENS, hidden), random(plan.num_rows, hidden), random(TOKENS, TOP_K)
    w1, w2, v1 = (random(EXPERTS, ffn, hidden) for _ in range(3))
    return {
        "gmm": (lambda a, b: gbmoe.gmm(a, b, plan.host_sizes(), trans_b=True), (rows, w1)),
        "route": (lambda logits: tuple(t for t in route(logits, TOP_K) if t.is_floating_point()), (random(TOKENS, EXPERTS),)),
        "padded_gather": (lambda x, scale, probs: gbmoe.padded_gather(x, plan, slot_scale_TK=scale, probs_TK=probs),
                          (x, weights, weights.clone())),
        "padded_scatter": (lambda y, weights: gbmoe.padded_scatter(y, plan, weights), (rows, weights)),
        "expert_mlp": (lambda x, weights, w1, w2, v1: gbmoe.expert_mlp(x, plan, w1, w2, v1, weights_TK=weights),
                       (x, weights, w1, w2, v1)),
        "expert_mlp of rows": (lambda x, weights, w1, w2, v1: gbmoe.grouped_mlp(x, plan.counts_E, w1, w2, v1, weights_R=weights),
                               (rows, weights.flatten(), w1, w2, v1)),
    }


FUNCTIONS = ("gmm", "route", "padded_gather", "padded_scatter", "expert_mlp", "expert_mlp of rows")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_lost_its_tangents_without_a_word(device, name):
    """Tangents were zero or None. Each operand by itself, with and without a gradient that backward mode wants as well."""
    function, operands = functions(device)[name]
    operator = name.split()[0]
    refused = pytest.raises(NotImplementedError, match=f"gbmoe::{operator}(_by_host)?: differentiation in forward mode .* not supported")
    for position, operand in enumerate(operands):
        def of_one(t, position=position):
            return function(*operands[:position], t, *operands[position + 1:])
        with forward_ad.dual_level():
            with refused:
                of_one(forward_ad.make_dual(operand, torch.ones_like(operand)))
            with refused:
                of_one(forward_ad.make_dual(operand.clone().requires_grad_(), torch.ones_like(operand)))
            with torch.no_grad(), refused:
                of_one(forward_ad.make_dual(operand, torch.ones_like(operand)))
            of_one(operand)  # what has no tangent passes
        with refused:
            torch.func.jvp(of_one, (operand,), (torch.ones_like(operand),))
        with refused:
            torch.func.jacfwd(of_one)(operand)


# Operands by which operators are differentiable twice: in these they are linear, and their gradients are such operators again.
TWICE = {("gmm", 0), ("gmm", 1), ("padded_gather", 0)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_those_of_differences_and_second_ones_are_so_or_refused(name):
    function, operands = functions("cpu")[name]
    operands = [t.double().requires_grad_() for t in operands]
    assert torch.autograd.gradcheck(function, operands, fast_mode=True)
    for position in range(len(operands)):
        by_one = [t.detach().requires_grad_(of == position) for of, t in enumerate(operands)]
        if (name, position) in TWICE:
            assert torch.autograd.gradgradcheck(function, by_one, fast_mode=True)
        else:
            with pytest.raises(RuntimeError, match="differentiable once"):
                torch.autograd.gradgradcheck(function, by_one, fast_mode=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func_grad_is_refused_by_name(device, name):
    function, operands = functions(device)[name]

    def loss(*operands):
        results = function(*operands)
        return sum(t.sum() for t in (results if isinstance(results, tuple) else (results,)))

    for transform in (torch.func.grad(loss), torch.func.jacrev(loss)):
        with pytest.raises(NotImplementedError, match=f"gbmoe::{name.split()[0]}(_by_host)?: torch.func.grad, vjp .* not supported"):
            transform(*operands)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_hid_from_expert_mlp_that_a_gradient_is_wanted(device, name):
    """One operand after the other; torch takes them one by one. Backward read pre-activations that forward had not kept."""
    function, operands = functions(device)[name]
    many = [torch.stack([t, -t, 2 * t]).requires_grad_() for t in operands]

    def result_and_gradients(results):
        results = results if isinstance(results, tuple) else (results,)
        return [*results, *torch.autograd.grad(sum(t.square().sum() for t in results), many)]

    got = result_and_gradients(torch.vmap(function)(*many))
    one_by_one = [function(*of_one) for of_one in zip(*many)]
    expected = result_and_gradients(tuple(map(torch.stack, zip(*one_by_one))) if isinstance(one_by_one[0], tuple)
                                    else torch.stack(one_by_one))
    torch.testing.assert_close(got, expected)


def test_expert_mlp_without_saving_refuses_a_gradient(device):
    plan = gbmoe.RoutingPlan.from_experts(exact_inputs.expert_ids(TOKENS, EXPERTS, TOP_K, device=device, seed=1), EXPERTS)
    x, w = torch.randn(TOKENS, HIDDEN, device=device), torch.randn(EXPERTS, FFN, HIDDEN, device=device, requires_grad=True)
    sizes = plan_sizes(plan, x, w, "auto")
    with pytest.raises(ValueError, match="expert_mlp: save: expected True where a gradient is needed, got False"):
        torch.ops.gbmoe.expert_mlp(x, None, plan.row_of_slot_TK, plan.slot_of_row_P, sizes, w, w, *[None] * 4, "silu", "auto", False,
                                   False, False, 1.0, "separate")


# ----------------------------------------------------------------------------------------------------------- where results lie


PAIRED = WeightLayout("interleaved", up_transposed=True).code


def calls(device, dtype, tokens, top_k):
    """Every operator with arguments, as (name, arguments)."""
    def matrix(*shape):
        return torch.randn(*shape[:-2], shape[-1], shape[-2], device=device).to(dtype).transpose(-1, -2)

    ids = torch.arange(tokens * top_k, device=device).view(tokens, top_k) * 3 % EXPERTS
    plan, x, w = gbmoe.RoutingPlan.from_experts(ids, EXPERTS, align=4), matrix(tokens, HIDDEN), matrix(EXPERTS, FFN, HIDDEN)
    maps, rows, weights = (plan.row_of_slot_TK, plan.slot_of_row_P), plan.num_rows, torch.rand(tokens, top_k, device=device)
    logits, h, y = matrix(tokens, EXPERTS), matrix(rows, FFN), matrix(rows, HIDDEN)
    for check in ("wait", "none"):
        yield "routing_plan" if check == "none" else "routing_plan_by_host", (ids, EXPERTS, 4, check)
        yield "plan_of_counts" if check == "none" else "plan_of_counts_by_host", (plan.counts_E, tokens * top_k, check)
        yield "bounded_counts", (plan.counts_E, tokens * top_k, check)
    expert_bias, padding = torch.arange(EXPERTS, dtype=torch.float32, device=device) / 100, torch.arange(tokens, device=device) % 3 == 1
    softmax, deepseek = (f.code for f in (RouterFunction(normalize=1), RouterFunction("sigmoid", normalize=1, epsilon=1e-20, scale=2.5)))
    yield "route", (logits, None, None, None, top_k, softmax, True)
    yield "route", (logits, None, None, None, top_k, RouterFunction().code, False)
    yield "route", (logits, expert_bias, padding, None, top_k, deepseek, True)
    yield "route", (logits, None, None, ids, top_k, softmax, False)
    yield "router_logits", (x, matrix(EXPERTS, HIDDEN), "reference")
    for engine in (None, "reference"):
        yield "route_tokens", (x, matrix(EXPERTS, HIDDEN), None, None, None, None, top_k, softmax, engine, dtype)
        yield "route_tokens", (x, matrix(EXPERTS, HIDDEN), matrix(1, EXPERTS)[0], expert_bias, padding, None, top_k, deepseek, engine,
                               dtype)
    yield "route_backward", (logits.softmax(-1), ids, None, logits, weights.to(dtype), None, softmax, True, dtype)
    yield "route_backward", (logits, ids, padding, logits, weights.to(dtype), None, deepseek, False, dtype)
    for scale in (None, weights):
        yield "padded_gather", (x, *maps, None, None, scale, scale, False)
        yield "padded_scatter", (y, *maps, None, None, scale)
        for need_rows in (False, True):
            yield "padded_scatter_backward", (x, y, *maps, None, None, scale, need_rows)
    yield "map_slots", (plan.row_of_slot_TK, None, None, None, weights, rows)
    yield "clear_rows_without_slot", (plan.slot_of_row_P, h.clone())
    yield "add_token_counts", (plan.counts_E, False, torch.zeros(EXPERTS, dtype=torch.int64, device=device))
    mask = logits > 0
    for routed in (None, int(mask.sum())):
        yield "mask_rows", (mask, None, routed)
    chunk_sizes, order = torch.tensor([tokens // 2, tokens - tokens // 2], device=device), torch.tensor([1, 0], device=device)
    for groups in (0, 2):
        yield "chunk_rows", (x, chunk_sizes, order, groups, 4, "sort")
        yield "chunk_rows_by_host", (x, chunk_sizes.cpu(), order.cpu(), groups, 4, "sort")
    on_gpu, _ = engines.FLOAT8_ENGINES["float8_block"]
    place = "cpu" if on_gpu.unavailable(torch.device(device)) else device
    left, right = quantize_rows(torch.randn(3 * EXPERTS, 32, device=place)), quantize_weights(torch.randn(EXPERTS, 48, 32, device=place))
    operands, three = (left.values_PK, right.values_ENK, left.scales_PC, right.scales), torch.full((EXPERTS,), 3)
    yield "scaled_gmm", (*operands, three.to(place), "bfloat16")
    yield "scaled_gmm_by_host", (*operands, three, "bfloat16")
    sizes = plan_sizes(plan, x, w, "auto")
    of_ffn, of_hidden, of_pairs = (matrix(EXPERTS, columns) for columns in (FFN, HIDDEN, 2 * FFN))
    pairs = torch.stack((w, w), 2).flatten(1, 2).transpose(1, 2).contiguous()
    for suffix, engine, counts in (("", "auto", sizes), ("_by_host", "reference", plan.host_sizes())):
        yield f"gmm{suffix}", (h, w, counts, False, False, engine, False)
        yield f"gmm{suffix}", (h, y, counts, True, False, engine, False)
        for v, save, slot_weights, activation in ((w, True, weights, "silu"), (None, True, None, "identity"),
                                                  (w, False, weights, "gelu")):
            for keep_rows in (False, True):
                for biases in ((None,) * 3, (of_ffn, of_hidden, None if v is None else of_ffn)):
                    yield f"expert_mlp{suffix}", (x, slot_weights, *maps, counts, w, w, v, *biases, activation, engine, save, keep_rows,
                                                  False, 1.0, "separate")
            needs = (save, slot_weights is not None, True, save, v is not None)
            biased = (save, True, v is not None)
            g = h.new_empty(0) if v is None else h
            none = h.new_empty(0)
            for kept in (none, y):
                for biases, needed in (((None,) * 3, (False,) * 3), ((of_ffn, of_hidden, None if v is None else of_ffn), biased)):
                    yield f"expert_mlp_backward{suffix}", (x, x, slot_weights, *maps, counts, w, w, v, *biases, h, g, kept, none, none,
                                                           none, activation, engine, 1.0, "separate", *needs, *needed)
            in_order, scale_P = (None, plan.slot_of_row_P), None if slot_weights is None else torch.rand(rows, 1, device=device)
            yield f"expert_mlp{suffix}", (y, scale_P, *in_order, counts, w, w, v, *[None] * 3, activation, engine, save, save, False, 1.0,
                                          "separate")
            yield f"expert_mlp_backward{suffix}", (y, y, scale_P, *in_order, counts, w, w, v, *[None] * 3, h, g, *[none] * 4, activation,
                                                   engine, 1.0, "separate", *needs, *[False] * 3)
        for save in (False, True):  # gate and up in turns, transposed
            paired = (pairs, w, None, of_pairs, of_hidden, None)
            yield f"expert_mlp{suffix}", (x, weights, *maps, counts, *paired, "silu", engine, save, False, False, 1.0, PAIRED)
            yield f"expert_mlp_backward{suffix}", (x, x, weights, *maps, counts, *paired, torch.cat((h, h), 1), *[none] * 5, "silu", engine,
                                                   1.0, PAIRED, True, True, save, save, False, save, True, False)
    yield from calls_with_adapters(x, w, plan, weights, sizes)
    if dtype == torch.bfloat16 and torch.device(place) == torch.device(device):
        for v in (w, None):
            forward = (x, weights, *maps, plan.padded_counts_E, w, w, v, *[None] * 3, "silu", "float8_block", True, False, True, 1.0,
                       "separate")
            yield "expert_mlp", forward
            _, *saved = torch.ops.gbmoe.expert_mlp(*forward)
            yield "expert_mlp_backward", (x, *forward[:11], *saved, "silu", "float8_block", 1.0, "separate", True, True, True, True,
                                          v is not None, *[False] * 3)


def calls_with_adapters(x, w, plan, weights, sizes):
    """The operators of LoRA with arguments, as (name, arguments)."""
    def factor(*shape):
        return torch.randn(EXPERTS, 8, *shape, device=x.device).to(x.dtype)

    maps, factors = (plan.row_of_slot_TK, plan.slot_of_row_P), (factor(HIDDEN), factor(2 * FFN), factor(FFN), factor(HIDDEN))
    for suffix, engine, counts in (("", "auto", sizes), ("_by_host", "reference", plan.host_sizes())):
        arguments = (x, weights, *maps, counts, w, w, w, *[None] * 3, *factors)
        for save in (False, True):
            yield f"expert_mlp_low_rank{suffix}", (*arguments, "silu", engine, save, "separate")
        saved = getattr(torch.ops.gbmoe, f"expert_mlp_low_rank{suffix}")(*arguments, "silu", engine, True, "separate")[1:]
        for frozen in (False, True):
            needs = (True, True, *[not frozen] * 3, *[False] * 3, *[True] * 4)
            yield f"expert_mlp_low_rank_backward{suffix}", (x, *arguments, *saved, "silu", engine, "separate", *needs)


@functools.cache
def own_operators():
    """The operators that `import gbmoe` registers; other tests may have imported adapters, which add operators of their own."""
    script = "import torch, gbmoe.compat.transformer_engine; print(*torch._C._dispatch_get_all_op_names())"
    names = subprocess.run([python("torch"), "-c", script], capture_output=True, text=True, check=True).stdout.split()
    return {name for name in names if name.startswith("gbmoe::")}


# bfloat16 takes the way of float16, whose calls CI makes as well, but for float8's; a cast that copies nothing is float32's and float64's.
@pytest.mark.parametrize("dtype, tokens, top_k", [
    (torch.float16, TOKENS, TOP_K),
    *(pytest.param(torch.float32, *sizes, marks=pytest.mark.slow) for sizes in (
        (TOKENS, TOP_K), (1, TOP_K), (TOKENS, EXPERTS), (0, TOP_K))),
    *(pytest.param(torch.bfloat16, *sizes, marks=pytest.mark.slow) for sizes in ((1, EXPERTS), (0, TOP_K))),
    pytest.param(torch.float64, TOKENS, TOP_K, marks=pytest.mark.slow)], ids=str)
def test_a_result_was_part_of_a_larger_storage(device, dtype, tokens, top_k):
    """A compiler that plans memory relies on the fakes, by which each result has a storage of its own and of its own size."""
    seen = set()
    for name, arguments in calls(device, dtype, tokens, top_k):
        seen.add(f"gbmoe::{name}")
        operator = getattr(torch.ops.gbmoe, name).default
        results = operator(*arguments)
        with FakeTensorMode() as mode:
            fakes = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        results, fakes = ((r,) if isinstance(r, torch.Tensor) else r or () for r in (results, fakes))
        storages = [t.untyped_storage()._cdata for t in (*results, *arguments) if isinstance(t, torch.Tensor)]
        for index, (result, fake) in enumerate(zip(results, fakes, strict=True)):
            what = f"result {index} of {name}"
            assert (result.shape, result.dtype, result.device) == (fake.shape, fake.dtype, fake.device), what
            steps = [[s for s, size in zip(t.stride(), t.shape) if size > 1 and t.numel()] for t in (result, fake)]
            assert steps[0] == steps[1], what
            assert result.storage_offset() == fake.storage_offset() == 0, what
            assert result.untyped_storage().nbytes() == fake.untyped_storage().nbytes(), what
            assert storages.count(result.untyped_storage()._cdata) == 1, what
    # These need a process group; tests/parallel/test_pass_agreement.py compiles them.
    of_ranks = {"gbmoe::begin_pass", "gbmoe::begin_pass_by_host", "gbmoe::check_pass"}
    assert seen == own_operators() - of_ranks


@pytest.mark.parametrize("dtype", [torch.float16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (
    torch.bfloat16, torch.float32, torch.float64))], ids=str)
def test_opcheck_of_every_operator(dtype):
    """Schemas, fakes and the registration of gradients; what AOT makes of the operators, their own tests check. bfloat16 takes the way of
    float16 but for float8's."""
    chosen = list(calls("cpu", dtype, 5, TOP_K))
    if dtype == torch.bfloat16:
        chosen = [(name, arguments) for name, arguments in chosen if any(isinstance(a, str) and a == "float8_block" for a in arguments)]
        assert len(chosen) == 4
    for name, arguments in chosen:
        checks = ["test_autograd_registration", "test_faketensor"]
        if not name.startswith("scaled_gmm"):  # torch's check of schemas multiplies each argument, which it cannot in float8
            checks.append("test_schema")
        torch.library.opcheck(getattr(torch.ops.gbmoe, name).default, arguments, test_utils=checks)


# ------------------------------------------------------------------------------------------------------------ ambient modes


def autocast_positions(name):
    positions = {"gmm": (0, 1), "expert_mlp": (0, *range(5, 11)), "expert_mlp_low_rank": (0, *range(5, 15)), "router_logits": (0, 1),
                 "route_tokens": (0, 1)}
    return positions.get(name.removesuffix("_by_host"), ())


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)  # also fills what torch.empty gives with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "autocast": lambda device: torch.autocast(device.type, dtype=torch.bfloat16),
    "autocast to float16": lambda device: torch.autocast(device.type, dtype=torch.float16),
    "autocast of another device": lambda device: torch.autocast("cpu" if device.type == "cuda" else "cuda", dtype=torch.bfloat16),
    "inference mode": lambda device: torch.inference_mode(),
    "no_grad": lambda device: torch.no_grad(),
    "anomaly detection": lambda device: torch.autograd.detect_anomaly(),
    "deterministic algorithms": lambda device: deterministic(),
}


def rows_in_use(name, arguments, results):
    """The results without the rows that may hold anything: those after the last expert. A mode changes what they hold, as it changes what
    memory an allocator returns, and torch fills it with NaN where algorithms are to be deterministic."""
    base = name.removesuffix("_by_host")
    if base == "gmm" and not arguments[3]:
        return [results[0][:int(arguments[2].sum())]]
    if base in ("expert_mlp", "expert_mlp_low_rank"):  # of the second the last two of four are x @ A1.T and a @ A2.T
        of_rows = 5 if base == "expert_mlp_low_rank" else 4
        return [results[0], *(t[:int(arguments[4].sum())] for t in results[1:of_rows]), *results[of_rows:]]
    if base == "mask_rows":
        return [results[0], *results[2:]]  # of a ragged map only the entries that are in use count
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mode_of_the_caller_changed_what_an_operator_computes(device, dtype, mode, monkeypatch):
    """What runs in Python inside an operator was computed in autocast's dtype."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch's own products refuse to be deterministic
    for name, arguments in calls(device, dtype, TOKENS, TOP_K):
        operator, positions = getattr(torch.ops.gbmoe, name).default, ()
        with MODES[mode](device):
            if torch.is_autocast_enabled(device.type):
                positions = autocast_positions(name)
        of_autocast = torch.float16 if "float16" in mode else torch.bfloat16
        cast = [t.to(of_autocast) if place in positions and t is not None else t for place, t in enumerate(arguments)]
        if name in ("clear_rows_without_slot", "add_token_counts"):
            continue  # they write to an argument, and compute nothing
        expected = operator(*cast)
        with MODES[mode](device):
            got = operator(*arguments)
        got, expected = (rows_in_use(name, cast, [r] if isinstance(r, torch.Tensor) else list(r)) for r in (got, expected))
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert a.dtype == b.dtype, (name, index)
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda words: f"{name}, result {index}: {words}")


@pytest.mark.parametrize("mode", ["autocast", "autocast to float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_were_computed_in_the_dtype_of_an_autocast_around_backward(device, name, mode):
    """Forward ran without it. Backward is often called inside it, against torch's advice."""
    function, operands = functions(device)[name]
    leaves = [t.clone().requires_grad_() for t in operands]

    def gradients(context):
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum((t * torch.linspace(-1, 1, t.numel(), device=device).view(t.shape)).sum() for t in results)
        with context:
            return torch.autograd.grad(loss, leaves)

    assert all(torch.equal(a, b) for a, b in zip(gradients(MODES[mode](device)), gradients(contextlib.nullcontext())))


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_results_of_an_operator_without_a_gradient_needed_one(device_type):
    """On the CPU plain PyTorch was recorded; through the dispatcher torch gave every result a gradient that only warns."""
    device = torch.device(device_type)
    weights = torch.rand(TOKENS, TOP_K, device=device)
    for requires_grad in (False, True):
        place = "cpu" if engines.FLOAT8_ENGINES["float8_block"][0].unavailable(device) else device_type
        a, b = quantize_rows(torch.randn(48, 32, device=place)), quantize_weights(torch.randn(3, 64, 32, device=place))
        sizes = torch.full((3,), 16, device=place)
        scales = [t.requires_grad_(requires_grad) for t in (a.scales_PC, b.scales)]
        plan = gbmoe.RoutingPlan.from_experts(torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device=device), EXPERTS)
        probs = weights.clone().requires_grad_(requires_grad)
        for watched in (contextlib.nullcontext(), Watch()):
            with watched:
                out = gbmoe.gmm(a.values_PK, b.values_ENK, sizes, trans_b=True, scale_a=scales[0], scale_b=scales[1])
                maps = make_slot_map(plan.row_of_slot_TK, rows=plan.num_rows, probs=probs)
            assert not out.requires_grad and out.grad_fn is None
            assert not any(t.requires_grad for t in maps if t is not None)


@pytest.mark.parametrize("mode", ["autocast", "autocast to float16"])
def test_a_scaled_product_was_multiplied_in_the_dtype_of_autocast(device, mode):
    """Its error grew from 2e-4 to 3e-3, and finite results became infinite."""
    place = torch.device("cpu") if engines.FLOAT8_ENGINES["float8_block"][0].unavailable(device) else device
    a, b = (1e3 * exact_inputs.exact_values(*shape, dtype=torch.float32, device=place, seed=1) for shape in ((96, 256), (2 * 128, 256)))
    a, b = quantize_rows(a), quantize_weights(b.view(2, 128, 256))

    def product():
        return gbmoe.gmm(a.values_PK, b.values_ENK, torch.tensor([60, 36], device=place), trans_b=True, scale_a=a.scales_PC,
                         scale_b=b.scales)

    with MODES[mode](place):
        got = product()
    assert torch.equal(got, product()) and bool(got.isfinite().all())


# ---------------------------------------------------------------------------------------------------------- torch.jit.trace


def traced_functions(device):
    """Name -> (a function, and its inputs for a number of tokens)."""
    def ids(tokens):
        return torch.arange(tokens * TOP_K, device=device).view(tokens, TOP_K) * 3 % (EXPERTS - 1)

    def x(tokens):
        return torch.randn(tokens, HIDDEN, device=device)

    def rows_and_sizes(tokens):
        return x(tokens), torch.tensor([tokens - 3, 1, 0, 2], device=device)

    def tokens_and_ids(tokens):
        return x(tokens), ids(tokens)

    def plan(ids, **options):
        return gbmoe.RoutingPlan.from_experts(ids, EXPERTS, **options)

    def layer(**fields):
        torch.manual_seed(0)
        args = {**dict(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=TOP_K, bias=False, fp16=False,
                       mlp_type="glu", device=device), **fields}
        return gbmoe.dMoE(Arguments(**args))

    def leading(tokens):
        return (torch.randn(*{6: (6, 1), 8: (8, 1), 12: (3, 4)}[tokens], HIDDEN, device=device),)

    w = [torch.randn(EXPERTS, FFN, HIDDEN, device=device) for _ in range(3)]
    return {
        "dMoE": (layer(), leading),
        "dMoE with a shared expert": (layer(shared_expert=True, moe_zloss_weight=1e-3), leading),
        "dMoE with another activation": (layer(activation_fn=torch.nn.functional.mish), leading),
        "dMoE, uniform": (layer(uniform_expert_assignment=True), leading),
        "expert_mlp": (lambda x, ids: gbmoe.expert_mlp(x, plan(ids, align=4), *w), tokens_and_ids),
        "gmm": (lambda x, sizes: gbmoe.gmm(x, w[0], sizes, trans_b=True), rows_and_sizes),
        "gather and scatter": (lambda x, ids: gbmoe.padded_scatter(gbmoe.padded_gather(x, plan(ids)), plan(ids)), tokens_and_ids),
        "tiles": (lambda x, ids: plan(ids, align=4).expert_of_tile, tokens_and_ids),
        "route": (lambda x: route(x[:, :EXPERTS], TOP_K).weights_TK, lambda tokens: (x(tokens),)),
        "a routing map": (lambda x: transformer_engine.fused_compute_score_for_moe_aux_loss(x, TOP_K, "softmax")[0],
                          lambda tokens: (x(tokens),)),
    }, {
        "mlp_impl 'bmm'": (layer(mlp_impl="bmm"), leading),
        "mlp_impl 'reference'": (layer(mlp_impl="reference"), leading),
        "RoutingPlan.exact": (lambda x, ids: gbmoe.expert_mlp(x, plan(ids, exact=True), *w), tokens_and_ids),
        "RoutingPlan.from_counts": (lambda x, sizes: gbmoe.grouped_mlp(x, sizes, *w), rows_and_sizes),
        "gbmoe::mask_rows": (lambda x, ids: transformer_engine.moe_permute(x, ids > 0)[0], tokens_and_ids),
        "gbmoe::map_slots": (lambda x, ids: transformer_engine.moe_permute(x, ids, map_type="index")[0], tokens_and_ids),
        "gbmoe::binned_maps": (lambda x, *bins: megablocks.gather(x, *bins, TOP_K), lambda tokens: (x(tokens), *sorted_slots(ids(tokens)))),
    }


def sorted_slots(ids):
    """(indices, bin_ids, bins), as megablocks.gather takes them."""
    bin_ids, indices = megablocks.sort(ids.flatten())
    return indices, bin_ids, megablocks.inclusive_cumsum(megablocks.histogram(ids.flatten(), EXPERTS), 0)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_returned_other_sizes_in_the_shape_that_it_had_seen(device):
    for name, (function, inputs) in traced_functions(device)[0].items():
        first = [t.requires_grad_() if t.is_floating_point() else t for t in inputs(6)]
        traced = torch.jit.trace(function, tuple(first))  # which compares it with a second trace, made without gradients
        for tokens in (6, 8, 12):
            for grad in (False, True):
                these = [t.requires_grad_(grad) if t.is_floating_point() else t for t in inputs(tokens)]
                got, expected = traced(*these), function(*these)
                assert torch.equal(got, expected), (name, tokens)
                if grad and expected.requires_grad:
                    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), these[0]) for out in (got, expected)), msg=name)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_that_would_make_sizes_constants_is_refused(device):
    for name, (function, inputs) in traced_functions(device)[1].items():
        with pytest.raises(NotImplementedError, match=f"{name} cannot be traced by torch.jit.trace, .*: use torch.compile or torch.export"):
            torch.jit.trace(function, inputs(6), check_trace=False)


def private_names():
    """The names that gbmoe looks up in torch when it is imported, without `torch.`."""
    source = inspect.getsource(_torch_names)
    flags = [f"autograd.{module}.{name}" for module, name in re.findall(r'hasattr\((forward_ad|profiler), "(\w+)"\)', source)]
    assert len(flags) == 2
    return [*re.findall(r'_private\("([\w.]+)"\)', source), "_ops.OpOverload.redispatch", *flags]


# Names that are public except for their first letter.
PUBLIC = (r"torch\.(_check|_foreach_\w+|_assert_async|ops\.aten\._unsafe_view(\.default)?|distributed\._symmetric_memory"
          r"|utils\._python_dispatch\.TorchDispatchMode)$")


def test_private_names_are_asked_for_in_one_place():
    """One place is what lets the test below take them all away. Annotations, which are not evaluated, may contain them."""
    package, used = Path(gbmoe.__file__).parent, []
    for file in package.rglob("*.py"):
        if file == Path(_torch_names.__file__) or file.parent.name in ("rivals", "testing"):
            continue
        tree = ast.parse(file.read_text())
        annotations = [part for node in ast.walk(tree) for part in (getattr(node, "annotation", None), getattr(node, "returns", None))]
        left_out = {id(node) for annotation in annotations if annotation for node in ast.walk(annotation)}
        nodes = [node for node in ast.walk(tree) if id(node) not in left_out]
        found = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        found += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        from_modules = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        found += [f"{node.module}.{alias.name}" for node in from_modules for alias in node.names]
        used += [(file.name, name) for name in found if re.match(r"(torch|operator|dist)\b.*\._[a-z]", name, re.IGNORECASE)
                 and not re.match(PUBLIC, name)]
    assert used == []


@pytest.mark.slow
def test_a_torch_without_one_of_its_private_names(device):
    """Calls raised AttributeError. Gradients, autocast and what is refused are as ever, to the bit; nothing is looked for at a call."""
    names = private_names()
    command = [sys.executable, "-m", "tests.without_private_names", _torch_names.__name__, device.type, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    whole = reports.pop("")
    assert list(reports) == names
    for name, seen in reports.items():
        assert seen["digest"] == whole["digest"], name
        assert seen["flags"] != whole["flags"], f"{name} was there"


def test_what_the_host_reads_is_tagged():
    """The tag keeps these operators out of CUDA graphs; test_compile.py has the calls that this concerns."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gbmoe::")}
    tagged = {name for name in names
              if torch.Tag.cudagraph_unsafe in getattr(torch.ops.gbmoe, name.removeprefix("gbmoe::")).default.tags}
    assert tagged == {name for name in names if name.endswith("_by_host")} and len(tagged) == 10
