"""Kernels that find each expert's matrix by a table: the same bits as of one stack, with NaN around every matrix."""

import functools

import pytest
import torch

import gbmoe
from gbmoe import engines
from gbmoe.engines import tensor_core
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.own_kernels import FEW_ROWS
from gbmoe.launch import alignment
from gbmoe.separate_weights import SeparateWeights
from gbmoe.testing import cuda_graphs, exact_inputs
from gbmoe.tuning.tensor_core_tiles import LOW, SQUARE, WIDE
from tests.engines.test_layouts_on_gpus import LAYOUTS, SHAPES
from tests.engines.test_tensor_core import device, drawn, poisoned  # noqa: F401
from tests.scattered import scattered
from tests.test_weight_layout import laid_out

CUDA = torch.device("cuda")
SIZES = [9, 0, 70, 3]


@pytest.mark.pairs
@pytest.mark.parametrize("config", [LOW, SQUARE, WIDE], ids=str)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("products", [1, 2, "2 tables"])
def test_rows(device, config, trans_b, products):  # noqa: F811
    inner, columns, sizes = 72, 136, torch.tensor(SIZES, device=device)
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device)
    terms = inner if trans_b else columns
    a, a2 = draw(sum(SIZES), terms, seed=1), None if products == 1 else draw(sum(SIZES), terms, seed=2)
    stacks = [draw(4, columns, inner, seed=3), draw(4, columns, inner, seed=4)][:1 if products == 1 else 2]
    if products == "2 tables":
        one, two, _ = alignment.two_in_place(*(SeparateWeights(scattered(w, step)) for w, step in zip(stacks, (16, 64))))
        separate = [one, two]
        assert one.numbers != two.numbers
    else:  # as the halves of one matrix
        whole = SeparateWeights(scattered(torch.cat(stacks, 1)))
        separate = [whole[:, i * columns:(i + 1) * columns] for i in range(len(stacks))]
    results = []
    for b in (stacks, separate):
        results.append(poisoned(sum(SIZES), columns if trans_b else inner, dtype=torch.bfloat16, device=device))
        tensor_core.launch_rows(config, a, b[0], a2, b[1] if a2 is not None else None, sizes, trans_b, results[-1])
    assert torch.equal(*results) and bool(results[0].isfinite().all())


@pytest.mark.pairs
@pytest.mark.parametrize("config", [SQUARE, WIDE], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients(device, config, accumulate):  # noqa: F811
    sizes, draw = torch.tensor(SIZES, device=device), functools.partial(drawn, dtype=torch.bfloat16, device=device)
    a, b = draw(sum(SIZES), 72, seed=1), draw(sum(SIZES), 136, seed=2)
    before = drawn(4, 72, 136, dtype=torch.float32 if accumulate else torch.bfloat16, device=device, seed=3)
    stack, tensors = before.clone(), scattered(before)
    for out in (stack, SeparateWeights(tensors)):
        tensor_core.launch_weight_gradient(config, a, b, sizes, out, accumulate)
    assert torch.equal(torch.stack(tensors), stack)
    whole = torch.as_strided(tensors[0], (tensors[0].untyped_storage().nbytes() // tensors[0].element_size(),), (1,), 0)
    assert int(whole.isnan().sum()) == whole.numel() - stack.numel()  # nothing is written beside the matrices


@pytest.mark.slow
@pytest.mark.parametrize("two_tables", [False, True])
def test_up_and_few_rows(device, two_tables):  # noqa: F811
    sizes, draw = torch.tensor(SIZES, device=device), functools.partial(drawn, dtype=torch.bfloat16, device=device)
    x, stacks = draw(sum(SIZES), 72, seed=1), [draw(4, 136, 72, seed=seed) for seed in (3, 4)]
    whole = SeparateWeights(scattered(torch.cat(stacks, 1)))
    halves = [whole[:, :136], whole[:, 136:]]
    if two_tables:
        halves = alignment.two_in_place(*(SeparateWeights(scattered(w, step)) for w, step in zip(stacks, (16, 64))))[:2]
    rows = GatheredRows(None, None, x)
    results = []
    for w, v in (stacks, halves):
        for tile in (LOW, WIDE):
            outs = [poisoned(sum(SIZES), 136, dtype=torch.bfloat16, device=device) for _ in range(3)]
            tensor_core.launch_up(tile, x, w, v, sizes, "silu", *outs)
            results.append(outs)
        of_few = FEW_ROWS.up(rows, w, v, sizes, "silu", True)
        results.append([*of_few, *FEW_ROWS.up(rows, w, None, sizes, "silu", True)[:2], FEW_ROWS.down(of_few[0], w, sizes)])
    for one, other in zip(results[:3], results[3:]):
        assert all(torch.equal(*pair) and bool(pair[0].isfinite().all()) for pair in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------------------ whole layers, on GPUs


def parameters_of(shape, layout, dtype=torch.bfloat16):
    tokens, experts, top_k, hidden, ffn = shape
    exact, scale = exact_inputs.exact_values, exact_inputs.fan_in_scale(hidden)
    x, grad = (exact(tokens, hidden, dtype=dtype, device=CUDA, seed=seed) for seed in (1, 8))
    ids = torch.randint(-1, experts - 1, (tokens, top_k), generator=torch.Generator().manual_seed(3)).to(CUDA)  # the last has no rows
    weights = torch.rand(tokens, top_k, device=CUDA, generator=torch.Generator(CUDA).manual_seed(4))
    stacks = laid_out(layout, *(exact(experts, ffn, hidden, dtype=dtype, device=CUDA, seed=seed, scale=scale) for seed in (5, 6, 7)))
    return x.requires_grad_(), gbmoe.RoutingPlan.from_experts(ids, experts), weights, grad, stacks


def skip_without(engine):
    if engines.ENGINES[engine].unavailable(CUDA):
        pytest.skip(engines.ENGINES[engine].unavailable(CUDA))


def all_of(lists):
    return [tensor for tensors in lists if tensors is not None for tensor in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.code)
def test_lists_have_the_bits_of_stacks(layout, shape, engine):
    skip_without(engine)
    x, plan, weights_TK, grad, stacks = parameters_of(shape, layout)
    lists = [None if w is None else [t.requires_grad_() for t in scattered(w)] for w in stacks]
    whole = [None if w is None else w.requires_grad_() for w in stacks]
    for options in (dict(activation="silu"), dict(activation=gbmoe.ClampedSilu(1.702, 2, 2, 1)), dict(batch_invariant=True),
                    dict(keep_gathered_rows=True)):
        if engine == "tensor_core" and "batch_invariant" in options:
            continue
        options = dict(options, weights_TK=weights_TK, layout=layout, engine=engine)
        results = []
        for each, leaves in ((whole, [w for w in whole if w is not None]), (lists, all_of(lists))):
            exact_inputs.poison(CUDA)
            out = gbmoe.expert_mlp(x, plan, *each, **options)
            dx, *gradients = torch.autograd.grad(out, [x, *leaves], grad)
            results.append([out, dx, *(gradients if each is lists else [one for gradient in gradients for one in gradient])])
        for number, (one, other) in enumerate(zip(*results, strict=True)):
            assert torch.equal(one, other) and bool(one.isfinite().all()), (str(options), number)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[0], LAYOUTS[6]], ids=lambda layout: layout.code)
def test_main_gradients_anywhere_have_the_bits_of_stacks(layout, shape, engine):
    skip_without(engine)
    x, plan, weights_TK, grad, stacks = parameters_of(shape, layout)
    before = [None if w is None else exact_inputs.exact_values(*w.shape, dtype=torch.float32, device=CUDA, seed=2) for w in stacks]
    mains, apart = [None if w is None else w.clone() for w in before], [None if w is None else scattered(w) for w in before]
    lists = [None if w is None else [t.requires_grad_() for t in scattered(w)] for w in stacks]
    for sunk, each in ((mains, [None if w is None else w.requires_grad_() for w in stacks]), (apart, lists)):
        for _ in range(2):
            sink = gbmoe.WeightGradientSink(*sunk)
            gbmoe.expert_mlp(x, plan, *each, weights_TK=weights_TK, layout=layout, engine=engine, gradient_sink=sink).backward(grad)
    for one, each, was in zip(mains, apart, before):
        assert one is None or (torch.equal(one, torch.stack(each)) and not torch.equal(one, was))
        if each is not None:
            buffer = torch.as_strided(each[0], (each[0].untyped_storage().nbytes() // 4,), (1,), 0)
            assert int(buffer.isnan().sum()) == buffer.numel() - one.numel()  # nothing is written beside the matrices


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core"])
def test_matrices_far_apart(engine):
    """More than 2^32 elements lie between the first and the last; without a wait, and in a graph, which keeps nothing alive."""
    skip_without(engine)
    layout, (x, plan, weights_TK, grad, stacks) = LAYOUTS[1], parameters_of(SHAPES[2], LAYOUTS[1])
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB of free memory")
    distance = 10 << 30
    room = torch.empty(2 * distance + (256 << 20), dtype=torch.uint8, device=CUDA)  # nothing reads what lies between
    lists = []
    for number, stack in enumerate(stacks[:2]):
        tensors = []
        for e, matrix in enumerate(stack):
            begin = e % 3 * distance + (number * 8 + e) * (12 << 20) + 16 * e
            tensors.append(room[begin:begin + matrix.nbytes].view(torch.bfloat16).view(matrix.shape))
            tensors[-1].copy_(matrix).requires_grad_()
        lists.append(tensors)
    assert SeparateWeights(lists[0]).numbers

    def step(each):
        out = gbmoe.expert_mlp(x, plan, *each, weights_TK=weights_TK, layout=layout, engine=engine)
        # Without the graph, which would keep nodes of the leaves alive that belong to the stream of the eager step.
        return out.detach(), *torch.autograd.grad(out, [x, *(all_of(each) if isinstance(each[0], list) else each)], grad)

    out, dx, dw1, dw2 = step([w.requires_grad_() for w in stacks[:2]])
    with cuda_graphs.no_host_wait():
        eager = step(lists)
    graph, replayed = cuda_graphs.captured(lambda: step(lists))
    graph.replay()
    for results in (eager, replayed):
        assert all(torch.equal(*pair) for pair in zip(results, (out, dx, *dw1, *dw2), strict=True))
