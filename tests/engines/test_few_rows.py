"""The kernels for groups of few rows: those of any GPU, on one and on a CPU that emulates one, and Hopper's."""

import functools

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import own_kernels, tensor_core
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.own_kernels import FEW_ROWS, HOPPER_FEW_ROWS
from gbmoe.plain import plain_activation
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap
from gbmoe.testing import cuda_graphs, exact_inputs
from gbmoe.tuning.tensor_core_tiles import LOW
from tests.conftest import assert_as_accurate_as, dtype_id
from tests.engines.test_tensor_core import device, device_named, devices, drawn, poisoned  # noqa: F401  (fixtures)

pytestmark = pytest.mark.slow

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
SIZES = {"cuda": [[3, 0, 1, 16, 17, 40, 0, 8], [1] * 300, [0] * 200 + [2, 0, 1], [33] * 7 + [100, 0, 32], [5], [0, 0]],
         "cpu": [[3, 0, 17, 1], [0] * 40 + [2, 0, 1]]}
SHAPES = {"cuda": [(8, 8), (72, 136), (256, 64), (2048, 768), (776, 2056)], "cpu": [(8, 8), (296, 72), (584, 24), (1096, 24)]}
E = engines.ENGINES
HOPPER = pytest.param("hopper", marks=pytest.mark.gpu)


@pytest.fixture(params=[*devices("early copies, small memory", "late copies, large memory"), HOPPER])
def few(request):
    """(A device, the kernels that run there.)"""
    hopper = request.param == "hopper"
    with device_named("cuda" if hopper else request.param, request) as where:
        if hopper and (reason := E["hopper"].unavailable(where)):
            pytest.skip(f"hopper: {reason}")
        yield where, HOPPER_FEW_ROWS if hopper else FEW_ROWS


def in_memory(x_PH):
    return GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), x_PH)


def each_group(x_PK, b, sizes, wide, trans_b=True):
    """x @ b[e] for the rows of each group, in `wide`."""
    rows = x_PK[:sum(sizes)].to(wide).split(sizes)
    return torch.cat([r @ (w.to(wide).t() if trans_b else w.to(wide)) for r, w in zip(rows, b)])


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("trans_b", [False, True])
def test_rows(few, dtype, trans_b):
    """Groups without rows, and with more than a kernel multiplies at a time; rows after the last group; odd numbers of steps. On Hopper a
    sum has the bits that a tile of the tensor_core engine gives it."""
    device, few = few  # noqa: F811
    for sizes in SIZES[device.type]:
        for number, (inner, columns) in enumerate(SHAPES[device.type]):
            rows, draw = sum(sizes), functools.partial(drawn, dtype=dtype, device=device)
            a, b = draw(rows + 5, inner, seed=1), draw(len(sizes), columns, inner, seed=2, scale=exact_inputs.fan_in_scale(inner))
            exact, baseline = (each_group(a, b, sizes, wide) for wide in (torch.float64, torch.float32))
            a[rows:] = float("nan")
            b = b if trans_b else b.transpose(1, 2).contiguous()
            outs = [poisoned(rows + 5, columns, dtype=dtype, device=device) for _ in range(2 + (few is HOPPER_FEW_ROWS))]
            on_device = torch.tensor(sizes, dtype=(torch.int32, torch.int64)[number % 2], device=device)
            for reads_early, out in enumerate(outs[:2]):
                few.op("gemm")(a, b, (), on_device, trans_b, bool(reads_early), None, out)
            assert_as_accurate_as(outs[0][:rows], baseline.to(dtype), exact, f"{sizes} of {inner} x {columns}")
            if few is HOPPER_FEW_ROWS:
                tensor_core.launch_rows(LOW, a, b, None, None, on_device, trans_b, outs[2])
            for out in outs[1:]:
                assert torch.equal(outs[0][:rows], out[:rows]) and bool(out[rows:].isnan().all())


def numbers_that_cancel(device, dtype, rows, inner, groups, columns):  # noqa: F811
    """(a, b [E,N,K]) with terms that cancel far apart, so that any other order of a sum shows."""
    a, b = (torch.randn(*shape, generator=exact_inputs.generator(device, seed), device=device)
            for seed, shape in enumerate(((rows, inner), (groups, columns, inner))))
    for term, size in ((5, 4096.0), (inner // 3, -4096.0), (inner // 5, 512.0), (inner * 9 // 10, -512.0)):
        a[:, term], b[:, :, term] = size, 64.0
    return a.to(dtype), b.to(dtype)


@pytest.mark.pairs
@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("rows, inner", [(8, 1096), (8, 584), (8, 4168), (13, 2120), (21, 1096)])
def test_turns_sum_in_the_order_of_a_tile(device, dtype, rows, inner):  # noqa: F811
    """Where CTAs are few, and more terms are in flight, in two kinds of tiles, and where they are many. Sums of parts do differ."""
    rows = 32 * rows if rows > 8 and device.type == "cuda" else rows  # so that CTAs are more than multiprocessors
    a, b = numbers_that_cancel(device, dtype, rows, inner, 1, 24)
    on_device, outs = torch.tensor([rows], device=device), [poisoned(rows, 24, dtype=dtype, device=device) for _ in range(3)]
    own_kernels.few_rows_linear(a, b[0], None, outs[0])
    tensor_core.launch_rows(LOW, a, b, None, None, on_device, True, outs[1])
    FEW_ROWS.gemm(a, b, on_device, True, outs[2])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("few", [HOPPER], indirect=True)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("inner", [72, 584, 1096, 2120])
def test_hopper_sums_in_the_order_of_a_tile(few, dtype, inner, trans_b):
    device, few = few  # noqa: F811
    a, b = numbers_that_cancel(device, dtype, 77, inner, 4, 200)
    b = b if trans_b else b.transpose(1, 2).contiguous()
    sizes, outs = torch.tensor([3, 0, 70, 4], device=device), [poisoned(77, 200, dtype=dtype, device=device) for _ in range(2)]
    few.gemm(a, b, sizes, trans_b, outs[0])
    tensor_core.launch_rows(LOW, a, b, None, None, sizes, trans_b, outs[1])
    assert torch.equal(*outs)


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("on_cpu, on_gpu", [((21, 72, 24), (500, 2048, 72)), ((7, 2120, 24), (40, 7176, 72))], ids=["many", "few"])
def test_linear(device, dtype, on_cpu, on_gpu):  # noqa: F811
    """Its rows are divided among CTAs, whether or not it fills them; few CTAs have more terms in flight. In the bits of a tile of the
    tensor_core engine."""
    rows, inner, columns = on_gpu if device.type == "cuda" else on_cpu
    x, weight = drawn(rows, inner, dtype=dtype, device=device, seed=1), drawn(columns, inner, dtype=dtype, device=device, seed=2)
    for size in (rows, rows - 6, 1):
        outs = [poisoned(rows, columns, dtype=dtype, device=device) for _ in range(2)]
        own_kernels.few_rows_linear(x, weight, torch.tensor([size], device=device), outs[0])
        tensor_core.launch_rows(LOW, x, weight[None], None, None, torch.tensor([size], device=device), True, outs[1])
        assert torch.equal(outs[0][:size], outs[1][:size]) and bool(outs[0][size:].isnan().all())


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("on_cpu, on_gpu", [((21, 72, 21), (500, 2048, 69)), ((7, 2120, 24), (40, 7176, 72))], ids=["many", "few"])
def test_linear_in_float32(device, dtype, on_cpu, on_gpu):  # noqa: F811
    """The sums that it otherwise rounds, and those of a tile of the tensor_core engine. One row after the last is not written."""
    rows, inner, columns = on_gpu if device.type == "cuda" else on_cpu
    x, weight = drawn(rows, inner, dtype=dtype, device=device, seed=1), drawn(columns, inner, dtype=dtype, device=device, seed=2)
    rounded, out = poisoned(rows, columns, dtype=dtype, device=device), poisoned(rows + 1, columns, dtype=torch.float32, device=device)
    own_kernels.few_rows_linear(x, weight, None, rounded)
    own_kernels.few_rows_linear(x, weight, None, out[:rows])
    assert torch.equal(out[:rows].to(dtype), rounded) and not torch.equal(out[:rows], rounded.float()) and bool(out[rows:].isnan().all())
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -columns % 8))
    of_tile = poisoned(rows, padded.size(0), dtype=torch.float32, device=device)
    tensor_core.launch_rows(LOW, x, padded[None], None, None, None, True, of_tile)
    assert torch.equal(of_tile[:, :columns], out[:rows])


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("trans_b", [False, True])
def test_a_group_alone(few, dtype, trans_b):
    """Its rows are divided among CTAs. It needs no tensor of sizes."""
    device, few = few  # noqa: F811
    rows, inner, columns = (500, 2048, 72) if device.type == "cuda" else (21, 72, 24)
    a, b = drawn(rows, inner, dtype=dtype, device=device, seed=1), drawn(1, columns, inner, dtype=dtype, device=device, seed=2)
    exact, baseline = (each_group(a, b, [rows], wide) for wide in (torch.float64, torch.float32))
    b = b if trans_b else b.transpose(1, 2).contiguous()
    for size in (rows, rows - 6, 1, 0, None):
        out = poisoned(rows, columns, dtype=dtype, device=device)
        few.gemm(a, b, None if size is None else torch.tensor([size], device=device), trans_b, out)
        assert_as_accurate_as(out[:size], baseline[:size].to(dtype), exact[:size], f"{size} rows")
        assert size is None or bool(out[size:].isnan().all())


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("sizes", [[3, 0, 5], [6]], ids=["groups", "a group alone"])
def test_columns_that_are_no_multiple_of_8(few, dtype, sizes):
    """As a router's logits may have them; only rows of b have to begin at multiples of 16 bytes."""
    device, few = few  # noqa: F811
    for columns in (1, 4, 13, 30):
        draw = functools.partial(drawn, dtype=dtype, device=device)
        a, b = draw(sum(sizes), 72, seed=1), draw(len(sizes), columns, 72, seed=2, scale=exact_inputs.fan_in_scale(72))
        exact, baseline = (each_group(a, b, sizes, wide) for wide in (torch.float64, torch.float32))
        calls = [lambda out: few.gemm(a, b, torch.tensor(sizes, device=device), True, out)]
        if len(sizes) == 1:
            calls.append(lambda out: own_kernels.few_rows_linear(a, b[0], None, out))
        for call in calls:
            out = poisoned(sum(sizes) + 1, columns, dtype=dtype, device=device)
            call(out[:-1])
            assert_as_accurate_as(out[:-1], baseline.to(dtype), exact, f"{columns} columns")
            assert bool(out[-1].isnan().all())


@pytest.mark.pairs
@pytest.mark.memcheck
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_up(few, activation, glu):
    """h and g are stored only if they are asked for, and a is computed from them as they are stored; on Hopper all have the bits of a tile
    of the tensor_core engine."""
    device, few = few  # noqa: F811
    for sizes in (SIZES[device.type][0], SIZES[device.type][-1]):
        hidden, ffn = SHAPES[device.type][1]
        draw, on_device = functools.partial(drawn, dtype=torch.bfloat16, device=device), torch.tensor(sizes, device=device)
        x = draw(sum(sizes), hidden, seed=1)
        w1, v1 = (draw(len(sizes), ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
        v1 = v1 if glu else None
        exact_inputs.poison(device)
        alone, *nothing = few.up(in_memory(x), w1, v1, on_device, activation, False)
        a, h, g = few.up(in_memory(x), w1, v1, on_device, activation, True)
        if few is HOPPER_FEW_ROWS and sum(sizes):
            for own, of_tile in zip((a, h, g), tensor_core.up_gemm(x, w1, v1, on_device, activation, True)):
                assert (own is None and of_tile is None) or torch.equal(own, of_tile)
        assert nothing == [None, None] and torch.equal(alone, a) and (g is None) == (not glu)
        for name, weights, got in (("h", w1, h), ("g", v1, g)):
            if weights is not None:
                baseline, exact = (each_group(x, weights, sizes, wide) for wide in (torch.float32, torch.float64))
                assert_as_accurate_as(got, baseline.to(got.dtype), exact, name)
        baseline, exact = (plain_activation.activate(h.to(wide), g.to(wide) if glu else None, activation)
                           for wide in (torch.float32, torch.float64))
        assert_as_accurate_as(a, baseline.to(a.dtype), exact, "a")


@pytest.mark.memcheck
@DTYPES
def test_up_reads_rows_from_their_tokens(few, dtype):
    """The same bits as from gathered rows, with slots that are dropped and rows that are padding."""
    device, few = few  # noqa: F811
    experts, hidden, ffn = 5, 72, 40
    draw = functools.partial(drawn, dtype=dtype, device=device)
    ids = torch.tensor([[0, 3], [3, -1], [4, 3], [-1, -1], [0, 4], [3, 0]], dtype=torch.int32, device=device)
    plan = RoutingPlan.from_experts(ids, experts, align=4)
    x = draw(6, hidden, seed=1)
    w1, v1 = (draw(experts, ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
    gathered = torch.zeros(plan.num_rows, hidden, dtype=dtype, device=device)
    taken = plan.slot_of_row_P >= 0
    gathered[taken] = x[plan.slot_of_row_P[taken].long() // 2]
    in_use = int(plan.offsets_E1[-1])
    results = []
    for rows in (GatheredRows(x, plan.slot_map), GatheredRows(None, plan.slot_map, gathered)):
        exact_inputs.poison(device)
        results.append(few.up(rows, w1, v1, plan.padded_counts_E, "silu", True))
    for from_tokens, from_rows in zip(*results):
        assert torch.equal(from_tokens[:in_use], from_rows[:in_use]) and bool((from_tokens[:in_use][~taken[:in_use]] == 0).all())


@pytest.mark.memcheck
def test_padding_is_rows_of_zeros(few):
    """Groups of some tokens and far more rows without any, whole tiles of them among these; gelu of zero is zero."""
    device, few = few  # noqa: F811
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device)
    ids = torch.tensor([[0, 3], [3, -1], [2, 3]], dtype=torch.int32, device=device)
    plan = RoutingPlan.from_experts(ids, 5, align=128 if device.type == "cuda" else 16)
    x, (w1, v1) = draw(3, 72, seed=1), (draw(5, 40, 72, seed=seed, scale=exact_inputs.fan_in_scale(72)) for seed in (2, 3))
    exact_inputs.poison(device)
    results = few.up(GatheredRows(x, plan.slot_map), w1, v1, plan.padded_counts_E, "gelu_tanh", True)
    taken, in_use = plan.slot_of_row_P >= 0, int(plan.offsets_E1[-1])
    assert in_use > 2 * int(taken.sum())
    for got in results:
        assert bool((got[:in_use][~taken[:in_use]] == 0).all()) and bool(got[:in_use][taken[:in_use]].any(1).all())


@pytest.mark.parametrize("trans_b", [False, True])
def test_nan_stays_in_its_row_and_in_its_column(few, trans_b):
    """Also in the last terms of a sum and the last columns, which are loaded together with others that do not exist."""
    device, few = few  # noqa: F811
    sizes = SIZES[device.type][0]
    draw, on_device = functools.partial(drawn, dtype=torch.bfloat16, device=device, seed=1), torch.tensor(sizes, device=device)
    a, b = draw(sum(sizes), 72), draw(len(sizes), 72, 136)
    clean, out = (poisoned(sum(sizes), 136, dtype=a.dtype, device=device) for _ in range(2))
    product = functools.partial(few.gemm, sizes=on_device, trans_b=trans_b)
    product(a, b.transpose(1, 2).contiguous() if trans_b else b, out=clean)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[[0, 4, sum(sizes) - 1]] = True
    a[hit[:, 0]] = float("nan")
    for term, column in ((71, 135), (0, 0), (40, 64)):
        b[:, term, column] = float("nan")
        hit[:, column] = True
    product(a, b.transpose(1, 2).contiguous() if trans_b else b, out=out)
    assert bool(out[hit].isnan().all()) and torch.equal(out[~hit], clean[~hit])


@pytest.mark.memcheck
@pytest.mark.parametrize("sizes", [[2**40, 5], [-7, 2**62, 3], [10, 10, 2**31], [-1, -1], [2**31 + 5]], ids=str)
def test_sizes_beyond_the_rows_stay_inside_of_every_tensor(few, sizes):
    device, few = few  # noqa: F811
    rows, sizes = 13, torch.tensor(sizes, device=device)
    a, b = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((rows, 72), (sizes.numel(), 72, 136)))
    for trans_b in (False, True):
        guarded = torch.full((rows + 64, 136), 7.0, dtype=a.dtype, device=device)
        few.gemm(a, b.view(-1, 136, 72) if trans_b else b, sizes, trans_b, guarded[:rows])
        assert bool((guarded[rows:] == 7).all())
    few.up(in_memory(a), b.view(-1, 136, 72), None, sizes, "silu", True)


@pytest.mark.memcheck
def test_slots_that_name_no_token_are_rows_of_zeros(few):
    device, few = few  # noqa: F811
    slot_of_row_P = torch.tensor([-2**31, 2**31 - 1, 12, 11, -1, 0], dtype=torch.int32, device=device)  # of six tokens with two slots each
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device, seed=1)
    x, w1 = draw(6, 72), draw(2, 40, 72)
    slots = SlotMap(row_of_slot_TK=torch.full((6, 2), -1, dtype=torch.int32, device=device), slot_of_row_P=slot_of_row_P)
    a, h, _ = few.up(GatheredRows(x, slots), w1, None, torch.tensor([4, 2], device=device), "identity", True)
    exist = torch.tensor([3, 5], device=device)
    assert torch.equal(a, h) and bool((h[[0, 1, 2, 4]] == 0).all()) and bool((h[exist] != 0).any(1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core", *engines.BATCH_INVARIANT.values()])
def test_engines_take_these_kernels_for_few_rows_alone(engine, monkeypatch):
    """Hopper's engines their own, and for a router's logits those in order; elsewhere a batch-invariant engine none."""
    if E[engine].unavailable(torch.device("cuda")):
        pytest.skip(E[engine].unavailable(torch.device("cuda")))
    calls, op, linear = [], own_kernels.FewRowsKernels.op, own_kernels.few_rows_linear
    monkeypatch.setattr("gbmoe.engines.hopper.few_rows_linear", lambda *args: (calls.append("few_rows_linear"), linear(*args))[1])
    monkeypatch.setattr(own_kernels.FewRowsKernels, "op", lambda self, name: (calls.append(f"{self.prefix}_{name}"), op(self, name))[1])
    hopper, none, pinned = engine.startswith("hopper"), engine == "tensor_core_batch_invariant", engine == "hopper_batch_invariant"
    prefix = "hopper_few_rows" if hopper else "few_rows"
    for rows, groups, taken in ((1, 1, True), (3, 1, hopper), (9, 1, False), (40, 20, True), (160, 20, hopper), (161, 20, False)):
        product_takes = [f"{prefix}_gemm"] * (taken and not none)
        if groups == 1 and hopper:
            product_takes = ["few_rows_linear"] * (taken or pinned)
        a, b = (drawn(*shape, dtype=torch.bfloat16, device=torch.device("cuda"), seed=1) for shape in ((rows, 64), (groups, 128, 64)))
        sizes = torch.tensor([rows] + [0] * (groups - 1), device="cuda")
        calls.clear()
        product = E[engine].product(a, b, sizes, trans_b=True)
        E[engine].up(in_memory(a), b, None, sizes, "silu", False)
        assert calls == product_takes + [f"{prefix}_up"] * (taken and not none)
        if groups == 1:  # in float32, which only the kernel for logits stores
            calls.clear()
            for weight in (b[0], b[0].t().contiguous().t()):
                of_linear = E[engine].linear(a, weight).to(a.dtype)
                assert torch.equal(of_linear, product) if hopper or none else torch.allclose(of_linear, product, rtol=2**-7, atol=1e-3)
            assert calls == 2 * [name for name in product_takes if name == "few_rows_linear"]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "one element off", "sizes on the host"])
def test_down_reads_early_what_it_does_not_copy(few, layout, monkeypatch):
    """A copy of weights or sizes is what the kernel before writes, and must not be read before that has ended."""
    device, few = few  # noqa: F811
    sizes, (inner, columns) = [3, 0, 1, 2], (72, 136)
    a, w2 = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((6, inner), (4, inner, columns)))
    on_device = torch.tensor(sizes, device=device)
    expected = few.down(a, w2, on_device)
    early, name, kernel = [], f"{few.prefix}_gemm", few.op("gemm")
    monkeypatch.setattr(torch.ops.gbmoe_cuda, name, lambda *args: (early.append(args[5]), kernel(*args))[1])
    if layout == "transposed":
        w2 = w2.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "one element off":
        w2 = torch.empty(w2.numel() + 1, dtype=w2.dtype, device=device)[1:].view(w2.shape).copy_(w2)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the kernel before must not be what writes w2
    got = few.down(a, w2, on_device.cpu() if layout == "sizes on the host" else on_device)
    assert early == [layout in ("contiguous", "transposed") or (layout == "sizes on the host" and device.type == "cpu")]
    if layout == "transposed":
        exact = each_group(a, w2, sizes, torch.float64, trans_b=False)
        assert_as_accurate_as(got, each_group(a, w2, sizes, torch.float32, trans_b=False).to(got.dtype), exact, "y")
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("few", [*devices(), HOPPER], indirect=True)
@pytest.mark.parametrize("groups", [8, 64], ids=["all CTAs at once", "more CTAs than run at once"])
def test_down_waits_for_up(few, groups):
    """Its rows are what the kernel before it writes: in one graph, with other tokens each time."""
    device, few = few  # noqa: F811
    hidden, ffn = 2048, 768
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device)
    w1, v1, w2 = (draw(groups, *shape, seed=seed, scale=exact_inputs.fan_in_scale(shape[seed == 4]))
                  for seed, shape in ((2, (ffn, hidden)), (3, (ffn, hidden)), (4, (ffn, hidden))))
    sizes, x = torch.ones(groups, dtype=torch.int32, device=device), draw(groups, hidden, seed=1)

    def pair():
        a, *_ = few.up(in_memory(x), w1, v1, sizes, "silu", False)
        return few.down(a, w2, sizes)

    graph, y = cuda_graphs.captured(pair)
    for seed in range(20):
        x.copy_(draw(groups, hidden, seed=10 + seed))
        a, *_ = few.up(in_memory(x), w1, v1, sizes, "silu", False)
        torch.cuda.synchronize()
        expected = torch.empty_like(y)
        few.gemm(a, w2, sizes, False, expected)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("few", [*devices(), HOPPER], indirect=True)
@pytest.mark.parametrize("in_graph", [False, True])
def test_down_waits_for_weights_that_another_stream_brings_during_up(few, in_graph):
    """Down reads weights before up has ended, but not before an event between the two, after which lent weights are here."""
    device, few = few  # noqa: F811
    groups, hidden, ffn = 8, 2048, 768
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device)
    w1, v1 = (draw(groups, ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
    brought = draw(groups, ffn, hidden, seed=4, scale=exact_inputs.fan_in_scale(ffn))
    sizes, x = torch.ones(groups, dtype=torch.int32, device=device), draw(groups, hidden, seed=1)
    w2, side = torch.empty_like(brought), torch.cuda.Stream()

    def step():
        current = torch.cuda.current_stream()
        w2.fill_(float("nan"))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)  # cycles: milliseconds, in which up has long ended
            w2.copy_(brought)
            came = side.record_event()
        a, *_ = few.up(in_memory(x), w1, v1, sizes, "silu", False)
        current.wait_event(came)
        return few.down(a, w2, sizes)

    run = step
    if in_graph:
        graph, y = cuda_graphs.captured(step)
        run = lambda: (graph.replay(), y)[1]  # noqa: E731
    a, *_ = few.up(in_memory(x), w1, v1, sizes, "silu", False)
    expected = few.down(a, brought, sizes)
    for _ in range(10):
        assert torch.equal(run(), expected)
