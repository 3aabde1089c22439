"""Lists of matrices in the place of w1, w2 and v1: the same results, bit for bit, as of one tensor, and each its gradient."""

import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gbmoe
from gbmoe import WeightLayout, engines
from gbmoe.engines.base import Engine
from gbmoe.launch import alignment, quantize
from gbmoe.problem import Problem
from gbmoe.separate_weights import SeparateWeights
from gbmoe.testing import exact_inputs
from tests.scattered import scattered
from tests.test_weight_layout import laid_out

E, F, H = 4, 48, 32
MEGATRON = WeightLayout("gate_first", down_transposed=True)
LAYOUTS = [MEGATRON, WeightLayout(), WeightLayout("interleaved", True), WeightLayout("separate", True, True)]
ids = [layout.code.replace(" ", "-") for layout in LAYOUTS]


@pytest.fixture
def in_place(engine_on, monkeypatch):
    """(engine, device), with an engine that gets the lists, also where its products make a copy of them."""
    monkeypatch.setattr(Engine, "reads_separate_weights", True)
    return engine_on


def inputs(layout, device, dtype=torch.bfloat16, experts=E):
    exact = exact_inputs.exact_values
    x, *matrices = (exact(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(((60, H), *[(experts, F, H)] * 3), 1))
    plan = gbmoe.RoutingPlan.from_experts(torch.randint(experts, (60, 2), generator=torch.Generator().manual_seed(1)).to(device), experts)
    return x.requires_grad_(), plan, laid_out(layout, *matrices), exact(60, H, dtype=dtype, device=device, seed=9)


def as_parameters(weights):
    return [None if w is None else [torch.nn.Parameter(each) for each in scattered(w)] for w in weights]


def flat(lists):
    return [tensor for tensors in lists if tensors is not None for tensor in tensors]


def expected_of(x, plan, weights, grad, **options):
    """(out, dx, the gradients of all matrices) with one tensor each."""
    leaves = [None if w is None else w.clone().requires_grad_() for w in weights]
    out = gbmoe.expert_mlp(x, plan, *leaves, **options)
    dx, *of_weights = torch.autograd.grad(out, [x, *(w for w in leaves if w is not None)], grad)
    return out, dx, [each for gradient in of_weights for each in gradient]


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_lists_change_nothing(layout, in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(layout, device)
    lists = as_parameters(weights)
    options = dict(layout=layout, engine=engine)
    out, dx, of_each = expected_of(x, plan, weights, grad, **options)
    exact_inputs.poison(device)
    got = gbmoe.expert_mlp(x, plan, *lists, **options)
    gradients = torch.autograd.grad(got, [x, *flat(lists)], grad)
    assert torch.equal(got, out) and torch.equal(gradients[0], dx)
    assert all(torch.equal(one, other) for one, other in zip(gradients[1:], of_each, strict=True))
    rows = gbmoe.grouped_mlp(x, torch.tensor([10, 0, 30, 15]), *lists, **options)
    assert torch.equal(rows, gbmoe.grouped_mlp(x, torch.tensor([10, 0, 30, 15]), *weights, **options))


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=ids[:3])
def test_gradients_go_to_lists_of_main_gradients(layout, deferred, in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(layout, device)
    lists = as_parameters(weights)
    before = [None if w is None else exact_inputs.exact_values(*w.shape, dtype=torch.float32, device=device, seed=5) for w in weights]
    whole, apart = [None if w is None else w.clone() for w in before], [None if w is None else scattered(w) for w in before]
    for mains, parameters in ((whole, weights), (apart, lists), (apart, lists)):
        sink = gbmoe.WeightGradientSink(*mains, deferred=deferred, hand_back=parameters is lists)
        if parameters is weights:
            parameters = [None if w is None else w.clone().requires_grad_() for w in weights]
        for _ in range(2 if mains is whole else 1):
            gbmoe.expert_mlp(x, plan, *parameters, layout=layout, engine=engine, gradient_sink=sink).backward(grad)
        sink.compute()
    for one, each in zip(whole, apart):
        assert one is None or torch.equal(one, torch.stack(each))
    assert all(tensor.grad is not None for tensor in flat(lists))  # which only runs hooks


@pytest.mark.parametrize("in_float8", [False, True], ids=["", "in-float8"])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=ids[:3])
def test_float8_adds_to_lists_of_main_gradients(layout, in_float8, device):
    x, plan, weights, grad = inputs(layout, device)
    recipe, sums = gbmoe.Float8BlockScaling(float8_weight_gradients=in_float8), []
    for whole in (True, False):
        parameters = [None if w is None else w.clone().requires_grad_() for w in weights] if whole else as_parameters(weights)
        mains = [None if w is None else torch.ones(w.shape, device=device) for w in weights]
        mains = mains if whole else [None if main is None else scattered(main) for main in mains]
        sink = gbmoe.WeightGradientSink(*mains)
        gbmoe.expert_mlp(x, plan, *parameters, layout=layout, fp8_recipe=recipe, gradient_sink=sink).backward(grad)
        sums.append([main for main in mains if main is not None])
    assert all(torch.equal(one, torch.stack(each)) and bool((one != 1).any()) for one, each in zip(*sums))


def test_what_is_frozen_gets_no_gradient(in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)
    w1[2].requires_grad_(False)
    for tensor in w2:
        tensor.requires_grad_(False)
    _, _, of_each = expected_of(x, plan, weights, grad, layout=MEGATRON, engine=engine)
    gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine).backward(grad)
    assert all(tensor.grad is None for tensor in (w1[2], *w2))
    assert all(torch.equal(w1[e].grad, of_each[e]) for e in (0, 1, 3))
    with torch.no_grad():
        assert not gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine).requires_grad


def test_one_tensor_for_two_experts_gets_both_gradients(in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(WeightLayout(), device)
    w1, w2, v1 = as_parameters(weights)
    w1[3] = w1[0]
    weights = (torch.stack(w1).detach(), *weights[1:])
    _, _, of_each = expected_of(x, plan, weights, grad, engine=engine)
    gbmoe.expert_mlp(x, plan, w1, w2, v1, engine=engine).backward(grad)
    assert torch.equal(w1[0].grad, of_each[0] + of_each[3])


def test_a_change_between_forward_and_backward_is_refused(in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)
    out = gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine)
    with torch.no_grad():
        w1[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)


def test_an_optimizer_may_move_the_parameters(in_place):
    """What is known of an address is known of no tensor."""
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)
    first = gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine)
    w1[0].data, w1[1].data = w1[1].data, w1[0].data
    swapped = (torch.stack([t.detach() for t in w1]), weights[1])
    got = gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine)
    assert torch.equal(got, gbmoe.expert_mlp(x, plan, *swapped, layout=MEGATRON, engine=engine)) and not torch.equal(got, first)


@pytest.mark.parametrize("options", [dict(activation=torch.nn.functional.mish), dict(weight_gradient_scale=0.3), dict(weights_on="input"),
                                     dict(fp8_recipe=gbmoe.Float8BlockScaling())], ids=lambda options: next(iter(options)))
def test_options_take_lists(options, device):
    x, plan, weights, grad = inputs(MEGATRON, device)
    options = dict(layout=MEGATRON, weights_TK=torch.full((60, 2), 0.5, device=device), **options)
    lists = as_parameters(weights)
    out, dx, of_each = expected_of(x, plan, weights, grad, **options)
    got = gbmoe.expert_mlp(x, plan, *lists, **options)
    gradients = torch.autograd.grad(got, [x, *flat(lists)], grad)
    assert torch.equal(got, out) and all(torch.equal(*pair) for pair in zip(gradients, (dx, *of_each), strict=True))


def test_autocast_casts_lists(device):
    x, plan, weights, grad = inputs(MEGATRON, device, torch.float32)
    lists = as_parameters(weights)
    with torch.autocast(device.type, torch.bfloat16):
        out, dx, of_each = expected_of(x, plan, weights, grad.bfloat16(), layout=MEGATRON)
        got = gbmoe.expert_mlp(x, plan, *lists, layout=MEGATRON)
    gradients = torch.autograd.grad(got, [x, *flat(lists)], grad.bfloat16())
    assert torch.equal(got, out) and all(torch.equal(*pair) for pair in zip(gradients, (dx, *of_each), strict=True))


@pytest.mark.slow
def test_compilers_take_lists(device):
    x, plan, weights, grad = inputs(MEGATRON, device, torch.float32)
    lists = as_parameters(weights)
    out, dx, of_each = expected_of(x, plan, weights, grad, layout=MEGATRON)
    got = torch.compile(lambda *tensors: gbmoe.expert_mlp(x, plan, *tensors, layout=MEGATRON), fullgraph=True)(*lists)
    gradients = torch.autograd.grad(got, [x, *flat(lists)], grad)
    assert torch.equal(got, out) and all(torch.equal(*pair) for pair in zip(gradients, (dx, *of_each), strict=True))


LORA = gbmoe.ExpertLora(w1=gbmoe.LoraFactors(torch.ones(E, 2, H), torch.ones(E, F, 2)))
COUNTS = torch.tensor([20, 0, 25, 10])
IN_A_GRAPH = {
    "expert_mlp": gbmoe.expert_mlp,
    "expert_mlp, weights on the input": lambda x, plan, *w: gbmoe.expert_mlp(x, plan, *w, weights_TK=torch.ones(60, 2), weights_on="input"),
    "expert_mlp, scaled gradients": lambda x, plan, *w: gbmoe.expert_mlp(x, plan, *w, weight_gradient_scale=0.3),
    "expert_mlp, any callable": lambda x, plan, *w: gbmoe.expert_mlp(x, plan, *w, activation=torch.nn.functional.mish),
    "expert_mlp, lora": lambda x, plan, *w: gbmoe.expert_mlp(x, plan, *w, lora=LORA),
    "grouped_mlp": lambda x, plan, *w: gbmoe.grouped_mlp(x, COUNTS, *w),
    "gmm": lambda x, plan, *w: gbmoe.gmm(x[:55], w[0], COUNTS, trans_b=True),
    "stacked": lambda x, plan, *w: gbmoe.stacked(w[2]),
}


@pytest.mark.parametrize("in_one_buffer", [False, True], ids=["scattered", "in-one-buffer"])
@pytest.mark.parametrize("function", IN_A_GRAPH.values(), ids=IN_A_GRAPH)
def test_any_list_broke_the_graph_of_torch_compile(function, in_one_buffer):
    x, plan, weights, _ = inputs(WeightLayout(), torch.device("cpu"), torch.float32)
    lists = [[torch.nn.Parameter(each) for each in w.unbind(0)] for w in weights] if in_one_buffer else as_parameters(weights)
    expected = function(x, plan, *lists)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x, plan, *lists)
    assert torch.equal(got, expected)
    leaves, grad = [x, *flat(lists)], torch.randint_like(expected, -3, 4)
    of_got, of_expected = (torch.autograd.grad(out, leaves, grad, allow_unused=True) for out in (got, expected))
    pairs = [pair for pair in zip(of_got, of_expected, strict=True) if pair != (None, None)]
    assert len(pairs) >= E and all(torch.equal(*pair) for pair in pairs)


def test_a_sink_in_a_graph_is_refused_by_name_with_lists_too():
    x, plan, weights, _ = inputs(WeightLayout(), torch.device("cpu"), torch.float32)
    sink = gbmoe.WeightGradientSink(*[[torch.zeros(F, H) for _ in range(E)] for _ in range(3)])
    compiled = torch.compile(lambda *lists: gbmoe.expert_mlp(x, plan, *lists, gradient_sink=sink), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="gradient_sink: expected None inside of torch.compile"):
        compiled(*as_parameters(weights))


@pytest.mark.parametrize("change, words", [
    (lambda w1, w2: (w1, [*w2[:2], w2[2].float(), w2[3]]), r"w2\[2\]: expected \[32, 48\] of torch.bfloat16 on cpu, as w2\[0\]"),
    (lambda w1, w2: ([w1[0], None, *w1[2:]], w2), r"w1\[1\]: expected a torch.Tensor, got NoneType"),
    (lambda w1, w2: ([*w1[:3], w1[3][None]], w2), r"w1\[3\]: expected 2 dimensions, got \[1, 96, 32\]"),
    (lambda w1, w2: ([], w2), "w1: expected at least one tensor"), (lambda w1, w2: (w1[:3], w2), r"w1: expected shape \[E,F,H\]"),
])
def test_lists_of_others_are_refused(change, words):
    x, plan, weights, _ = inputs(MEGATRON, torch.device("cpu"))
    w1, w2, _ = as_parameters(weights)
    with pytest.raises((TypeError, ValueError), match=words):
        gbmoe.expert_mlp(x, plan, *change(w1, w2), layout=MEGATRON)


def test_main_gradients_that_overlap_are_refused():
    main = torch.zeros(F, H)
    with pytest.raises(ValueError, match=r"WeightGradientSink: w2\[1\]: expected memory of its own, got memory of w2\[0\]"):
        gbmoe.WeightGradientSink(w2=[main, main])
    with pytest.raises(TypeError, match=r"WeightGradientSink: w2\[0\]: expected dtype float32"):
        gbmoe.WeightGradientSink(w2=[main.double(), main.double()])


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core", "float8_block", "float8_block_weights"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_no_copy_is_made(layout, engine, monkeypatch):
    device = torch.device("cuda")
    float8 = engine in engines.FLOAT8_ENGINES
    instance = engines.FLOAT8_ENGINES[engine][0] if float8 else engines.ENGINES[engine]
    if instance.unavailable(device):
        pytest.skip(instance.unavailable(device))
    options = dict(fp8_recipe=instance.recipe) if float8 else dict(engine=engine)
    x, plan, weights, grad = inputs(layout, device)
    lists, copied, original = as_parameters(weights), [], alignment.aligned

    def aligned(tensor):
        if tensor.dim() == 3:
            copied.append(tuple(tensor.shape))
        return original(tensor)

    for module in (alignment, engines.base, engines.own_kernels, engines.hopper, engines.tensor_core, quantize):
        monkeypatch.setattr(module, "aligned", aligned)
    monkeypatch.setattr(torch, "stack", lambda *_: pytest.fail("a stack"))
    mains = [None if w is None else scattered(torch.zeros(w.shape, device=device)) for w in weights]
    for sink in (None, gbmoe.WeightGradientSink(*mains)):
        gbmoe.expert_mlp(x, plan, *lists, layout=layout, gradient_sink=sink, **options).backward(grad)
    assert not copied


def test_gradients_that_autograd_batches(in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)
    leaves = [x, *w1, *w2]
    out = gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine)
    one_by_one = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in (grad, 2 * grad)]
    batched = torch.autograd.grad(out, leaves, torch.stack([grad, 2 * grad]), is_grads_batched=True)
    assert all(torch.equal(both, torch.stack(each)) for both, each in zip(batched, zip(*one_by_one)))


def test_expert_path_says_whether_lists_are_copied(in_place, monkeypatch):
    engine, device = in_place
    x, plan, weights, _ = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)

    def copies():
        path = gbmoe.expert_path(x, plan, w1, w2, layout=MEGATRON, engine=engine)
        return [reason for reason in path.reasons if "lists" in reason]

    assert copies() == []
    monkeypatch.setattr(type(engines.ENGINES[engine]), "reads_separate_weights", False, raising=False)
    assert copies() == ["lists of matrices are copied into one tensor in each call: the engine reads no lists"]


@pytest.mark.parametrize("trans_b", [False, True])
def test_gmm_takes_a_list(trans_b, in_place):
    engine, device = in_place
    if engines.ENGINES[engine].needs_host_sizes:
        pytest.skip("an engine that reads sizes on the host gets a stack")
    exact = exact_inputs.exact_values
    a, b, grad = (exact(*shape, dtype=torch.bfloat16, device=device, seed=seed)
                  for seed, shape in enumerate(((60, H), (E, F, H) if trans_b else (E, H, F), (60, F))))
    sizes = torch.tensor([20, 0, 33, 7], device=device)
    leaves = a.requires_grad_(), b.clone().requires_grad_()
    out = gbmoe.gmm(*leaves, sizes, trans_b=trans_b, engine=engine)
    da, db = torch.autograd.grad(out, leaves, grad)
    matrices = as_parameters([b])[0]
    exact_inputs.poison(device)
    got = gbmoe.gmm(a, matrices, sizes, trans_b=trans_b, engine=engine)
    dgot, *of_each = torch.autograd.grad(got, [a, *matrices], grad)
    assert torch.equal(got, out) and torch.equal(dgot, da) and all(torch.equal(one, each) for one, each in zip(of_each, db))
    with pytest.raises(TypeError, match="gmm: b: expected a tensor with trans_a"):
        gbmoe.gmm(a, matrices, sizes, trans_a=True, engine=engine)


def test_second_derivatives_of_lists_were_lost(in_place):
    engine, device = in_place
    x, plan, weights, _ = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)
    out = gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx, = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.sum() + dx.square().sum()).backward()
    sink = gbmoe.WeightGradientSink(*[torch.zeros(w.shape, device=device) for w in weights[:2]])
    out = gbmoe.expert_mlp(x, plan, *weights[:2], layout=MEGATRON, engine=engine, gradient_sink=sink)
    with pytest.raises(ValueError, match="gradient_sink: expected None where autograd batches"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_second_derivatives_of_gmm(in_place):
    engine, device = in_place
    exact = exact_inputs.exact_values
    a, b = (exact(*shape, dtype=torch.float64, device=device, seed=seed) for seed, shape in enumerate(((60, H), (E, H, F))))
    sizes = torch.tensor([20, 0, 33, 7], device=device)

    def penalty(b, leaves):
        out = gbmoe.gmm(a.requires_grad_(), b, sizes, engine=engine)
        da, = torch.autograd.grad(out.square().sum(), a, create_graph=True)
        return torch.autograd.grad(da.square().sum(), leaves)

    if engines.ENGINES[engine].refuses(Problem(a.device, a.dtype, 60, E, H, F, False)):
        pytest.skip("an engine without float64")
    whole, lists = b.clone().requires_grad_(), as_parameters([b])[0]
    of_stack, of_each = penalty(whole, [whole])[0], penalty(lists, lists)
    torch.testing.assert_close(torch.stack(of_each), of_stack)


@pytest.mark.parametrize("between", ["watched", "moved"])
def test_a_checkpoint_of_lists_found_other_nodes(between, in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    w1, w2, _ = as_parameters(weights)
    leaves = [x, *w1, *w2]

    def call(x):
        return gbmoe.expert_mlp(x, plan, w1, w2, layout=MEGATRON, engine=engine)

    expected = torch.autograd.grad(call(x), leaves, grad)
    with FlopCounterMode(display=False) if between == "watched" else contextlib.nullcontext():
        out = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
    if between == "moved":
        for tensors in (w1, w2):
            for parameter, part in zip(tensors, torch.stack([each.detach() for each in tensors])):
                parameter.data = part
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad), expected))


def test_main_gradients_may_move_before_they_are_added_to(in_place):
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    expected, mains = ([[torch.zeros_like(each, dtype=torch.float32) for each in w] for w in weights[:2]] for _ in range(2))
    for of, moves in ((expected, False), (mains, True)):
        sink = gbmoe.WeightGradientSink(*of, deferred=True)
        leaves = [[w.clone().requires_grad_() for w in each] for each in weights[:2]]
        gbmoe.expert_mlp(x, plan, *leaves, layout=MEGATRON, engine=engine, gradient_sink=sink).backward(grad)
        kept = []
        for each in flat(of) if moves else ():
            each.untyped_storage().resize_(0)
            kept.append(torch.empty(each.numel() + 1, device=device))  # what was free is taken
        for each in flat(of) if moves else ():
            each.untyped_storage().resize_(each.numel() * 4)
            each.zero_()
        sink.compute()
    assert all(map(torch.equal, flat(mains), flat(expected))) and any(bool(each.any()) for each in flat(mains))


def test_lists_without_a_table_were_copied_in_every_product(in_place, monkeypatch):
    engine, device = in_place
    x, plan, weights, grad = inputs(MEGATRON, device)
    lists = [[torch.cat((w.new_zeros(e % 2), w.flatten()))[e % 2:].view(w.shape).requires_grad_() for e, w in enumerate(each)]
             for each in weights[:2]]
    assert not any(SeparateWeights(each).numbers for each in lists)
    monkeypatch.setattr(SeparateWeights, "contiguous", lambda self: pytest.fail("a product copied its matrices"))
    out, dx, of_each = expected_of(x, plan, weights, grad, layout=MEGATRON, engine=engine)
    got = gbmoe.expert_mlp(x, plan, *lists, layout=MEGATRON, engine=engine)
    assert torch.equal(got, out) and all(map(torch.equal, torch.autograd.grad(got, [x, *flat(lists)], grad), [dx, *of_each]))
    monkeypatch.setattr(Engine, "copies", lambda self, *_: False)
    assert "kernels read up to 256 matrices" in str(gbmoe.expert_path(x, plan, *lists, layout=MEGATRON, engine=engine).reasons)


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_gmm_of_a_list_saves_what_it_needs(frozen, in_place):
    engine, device = in_place
    a, b = torch.randn(60, H, device=device, dtype=torch.bfloat16), torch.randn(E, H, F, device=device, dtype=torch.bfloat16)
    lists, sizes, saved = scattered(b), torch.tensor([20, 0, 33, 7], device=device), []
    (a.requires_grad_() if frozen == "b" else lists[0].requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        gbmoe.gmm(a, lists, sizes, engine=engine)
    assert ((60, H) in saved) == (frozen == "a") and (not {(H, F), (E, H, F)}.isdisjoint(saved)) == (frozen == "b")


def test_no_gradient_is_made_of_none():
    weights = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    _Absent.apply(gbmoe.stacked(weights)).sum().backward()
    assert all(weight.grad is None for weight in weights)


class _Absent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stack):
        return stack.clone()

    @staticmethod
    def backward(ctx, grad):
        return None
