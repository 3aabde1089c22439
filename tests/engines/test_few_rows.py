"""The kernels for groups of few rows: on a GPU, and on a CPU that emulates one."""

import functools

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import own_kernels, tensor_core
from gbmoe.engines.base import GatheredRows
from gbmoe.kernels import plain_torch
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap
from gbmoe.testing import cuda_graphs, exact_inputs
from gbmoe.tuning.grouped_gemm import TENSOR_CORE_LOW
from tests.conftest import assert_as_accurate_as, dtype_id
from tests.engines.test_tensor_core import device, devices, drawn, kernels, poisoned  # noqa: F401  (fixtures)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
SIZES = {"cuda": [[3, 0, 1, 16, 17, 40, 0, 8], [1] * 300, [0] * 200 + [2, 0, 1], [5], [0, 0]], "cpu": [[3, 0, 17, 1], [0] * 40 + [2, 0, 1]]}
SHAPES = {"cuda": [(8, 8), (72, 136), (256, 64), (2048, 768), (776, 2056)], "cpu": [(8, 8), (296, 72), (584, 24), (1096, 24)]}
IN_TURNS = pytest.mark.parametrize("in_turns", [False, True], ids=["parts", "in turns"])
E = engines.ENGINES


def each_group(x_PK, b, sizes, wide, trans_b=True):
    """x @ b[e] for the rows of each group, in `wide`."""
    rows = x_PK[:sum(sizes)].to(wide).split(sizes)
    return torch.cat([r @ (w.to(wide).t() if trans_b else w.to(wide)) for r, w in zip(rows, b)])


@pytest.mark.memcheck
@DTYPES
@IN_TURNS
@pytest.mark.parametrize("trans_b", [False, True])
def test_rows(device, dtype, trans_b, in_turns):  # noqa: F811
    """Groups without rows, and with more than a kernel multiplies at a time; rows behind the last group; odd numbers of steps. In turns a
    sum has the bits that a tile of the tensor_core engine gives it."""
    for sizes in SIZES[device.type]:
        for number, (inner, columns) in enumerate(SHAPES[device.type]):
            rows, draw = sum(sizes), functools.partial(drawn, dtype=dtype, device=device)
            a, b = draw(rows + 5, inner, seed=1), draw(len(sizes), columns, inner, seed=2, scale=exact_inputs.fan_in_scale(inner))
            exact, baseline = (each_group(a, b, sizes, wide) for wide in (torch.float64, torch.float32))
            a[rows:] = float("nan")
            b = b if trans_b else b.transpose(1, 2).contiguous()
            outs = [poisoned(rows + 5, columns, dtype=dtype, device=device) for _ in range(3 if in_turns else 2)]
            on_device = torch.tensor(sizes, dtype=(torch.int32, torch.int64)[number % 2], device=device)
            for reads_early, out in enumerate(outs[:2]):
                torch.ops.gbmoe_cuda.few_rows_gemm(a, b, on_device, trans_b, in_turns, bool(reads_early), out)
            assert_as_accurate_as(outs[0][:rows], baseline.to(dtype), exact, f"{sizes} of {inner} x {columns}")
            if in_turns:
                tensor_core.launch_rows(TENSOR_CORE_LOW, a, b, None, None, on_device, trans_b, outs[2])
            for out in outs[1:]:
                assert torch.equal(outs[0][:rows], out[:rows]) and bool(out[rows:].isnan().all())


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("sizes, inner", [([3, 0, 5], 1096), ([3, 0, 5], 584), ([8], 2120)], ids=["long", "short", "a group alone"])
def test_turns_sum_in_the_order_of_a_tile(device, dtype, sizes, inner, trans_b):  # noqa: F811
    """With terms that cancel far apart, so that any other order shows: sums of parts do differ. There are kernels for short sums, and for a
    group alone."""
    columns = 24
    a, b = (torch.randn(*shape, generator=exact_inputs.generator(device, seed), device=device)
            for seed, shape in enumerate(((8, inner), (len(sizes), columns, inner))))
    for term, size in ((5, 4096.0), (inner // 3, -4096.0), (inner // 5, 512.0), (inner * 9 // 10, -512.0)):
        a[:, term], b[:, :, term] = size, 64.0
    a, b = a.to(dtype), b.to(dtype)
    b = b if trans_b else b.transpose(1, 2).contiguous()
    on_device, outs = torch.tensor(sizes, device=device), [poisoned(8, columns, dtype=dtype, device=device) for _ in range(3)]
    own_kernels.few_rows_gemm(a, b, on_device, trans_b, outs[0], in_turns=True)
    tensor_core.launch_rows(TENSOR_CORE_LOW, a, b, None, None, on_device, trans_b, outs[1])
    own_kernels.few_rows_gemm(a, b, on_device, trans_b, outs[2])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.memcheck
@DTYPES
@pytest.mark.parametrize("on_cpu, on_gpu", [((21, 72, 24), (500, 2048, 72)), ((7, 2120, 24), (40, 7176, 72))], ids=["many", "few"])
def test_a_group_alone(device, dtype, on_cpu, on_gpu):  # noqa: F811
    """Its rows are divided among CTAs, whether or not it fills them; few CTAs have more terms in flight. It needs no tensor of sizes."""
    rows, inner, columns = on_gpu if device.type == "cuda" else on_cpu
    a, b = drawn(rows, inner, dtype=dtype, device=device, seed=1), drawn(1, columns, inner, dtype=dtype, device=device, seed=2)
    for size in (rows, rows - 6, 1, 0, None):
        outs = [poisoned(rows, columns, dtype=dtype, device=device) for _ in range(2)]
        on_device = torch.tensor([rows if size is None else size], device=device)
        own_kernels.few_rows_gemm(a, b, None if size is None else on_device, True, outs[0], in_turns=True)
        tensor_core.launch_rows(TENSOR_CORE_LOW, a, b, None, None, on_device, True, outs[1])
        assert torch.equal(outs[0][:size], outs[1][:size]) and (size is None or bool(outs[0][size:].isnan().all()))
    if dtype == torch.bfloat16:  # the emulated GPU's only one for the first GEMM's tiles
        rows_of_x = GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), a)
        results = (own_kernels.few_rows_up(rows_of_x, b, b, torch.tensor([rows], device=device), "silu", True, in_turns=True),
                   tensor_core.up_gemm(a, b, b, torch.tensor([rows], device=device), "silu", True))
        assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.memcheck
@DTYPES
@IN_TURNS
@pytest.mark.parametrize("sizes", [[3, 0, 5], [6]], ids=["groups", "a group alone"])
def test_columns_that_are_no_multiple_of_8(device, dtype, in_turns, sizes):  # noqa: F811
    """As a router's logits may have them; only rows of b have to begin at multiples of 16 bytes."""
    for columns in (1, 4, 13, 30):
        draw = functools.partial(drawn, dtype=dtype, device=device)
        a, b = draw(sum(sizes), 72, seed=1), draw(len(sizes), columns, 72, seed=2, scale=exact_inputs.fan_in_scale(72))
        exact, baseline = (each_group(a, b, sizes, wide) for wide in (torch.float64, torch.float32))
        out = poisoned(sum(sizes) + 1, columns, dtype=dtype, device=device)
        own_kernels.few_rows_gemm(a, b, torch.tensor(sizes, device=device), True, out[:-1], in_turns)
        assert_as_accurate_as(out[:-1], baseline.to(dtype), exact, f"{columns} columns")
        assert bool(out[-1].isnan().all())


@pytest.mark.memcheck
@IN_TURNS
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_torch.ACTIVATIONS)
def test_up(device, activation, glu, in_turns):  # noqa: F811
    """h and g are stored only if they are asked for, and a is computed from them as they are stored; in turns all have the bits of a tile
    of the tensor_core engine."""
    sizes, (hidden, ffn) = SIZES[device.type][0], SHAPES[device.type][1]
    draw, on_device = functools.partial(drawn, dtype=torch.bfloat16, device=device), torch.tensor(sizes, device=device)
    x = draw(sum(sizes), hidden, seed=1)
    w1, v1 = (draw(len(sizes), ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
    v1 = v1 if glu else None
    exact_inputs.poison(device)
    rows = GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), x)
    alone, *nothing = own_kernels.few_rows_up(rows, w1, v1, on_device, activation, False, in_turns)
    a, h, g = own_kernels.few_rows_up(rows, w1, v1, on_device, activation, True, in_turns)
    if in_turns:
        for own, of_tile in zip((a, h, g), tensor_core.up_gemm(x, w1, v1, on_device, activation, True)):
            assert (own is None and of_tile is None) or torch.equal(own, of_tile)
    assert nothing == [None, None] and torch.equal(alone, a) and (g is None) == (not glu)
    for name, weights, got in (("h", w1, h), ("g", v1, g)):
        if weights is not None:
            baseline, exact = (each_group(x, weights, sizes, wide) for wide in (torch.float32, torch.float64))
            assert_as_accurate_as(got, baseline.to(got.dtype), exact, name)
    baseline, exact = (plain_torch.activate(h.to(wide), g.to(wide) if glu else None, activation) for wide in (torch.float32, torch.float64))
    assert_as_accurate_as(a, baseline.to(a.dtype), exact, "a")


@pytest.mark.memcheck
@DTYPES
def test_up_reads_rows_from_their_tokens(device, dtype):  # noqa: F811
    """The same bits as from gathered rows, with slots that are dropped and rows that are padding."""
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
        results.append(own_kernels.few_rows_up(rows, w1, v1, plan.padded_counts_E, "silu", True))
    for from_tokens, from_rows in zip(*results):
        assert torch.equal(from_tokens[:in_use], from_rows[:in_use]) and bool((from_tokens[:in_use][~taken[:in_use]] == 0).all())


@pytest.mark.parametrize("trans_b", [False, True])
def test_nan_stays_in_its_row_and_in_its_column(device, trans_b):  # noqa: F811
    """Also in the last terms of a sum and the last columns, which are loaded together with others that do not exist."""
    sizes = SIZES[device.type][0]
    draw, on_device = functools.partial(drawn, dtype=torch.bfloat16, device=device, seed=1), torch.tensor(sizes, device=device)
    a, b = draw(sum(sizes), 72), draw(len(sizes), 72, 136)
    clean, out = (poisoned(sum(sizes), 136, dtype=a.dtype, device=device) for _ in range(2))
    product = functools.partial(own_kernels.few_rows_gemm, sizes=on_device, trans_b=trans_b)
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
def test_sizes_beyond_the_rows_stay_inside_of_every_tensor(device, sizes):  # noqa: F811
    rows, sizes = 13, torch.tensor(sizes, device=device)
    a, b = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((rows, 72), (sizes.numel(), 72, 136)))
    for trans_b in (False, True):
        guarded = torch.full((rows + 64, 136), 7.0, dtype=a.dtype, device=device)
        own_kernels.few_rows_gemm(a, b.view(-1, 136, 72) if trans_b else b, sizes, trans_b, guarded[:rows])
        assert bool((guarded[rows:] == 7).all())
    own_kernels.few_rows_up(GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), a), b.view(-1, 136, 72), None, sizes, "silu", True)


@pytest.mark.memcheck
def test_slots_that_name_no_token_are_rows_of_zeros(device):  # noqa: F811
    slot_of_row_P = torch.tensor([-2**31, 2**31 - 1, 12, 11, -1, 0], dtype=torch.int32, device=device)  # of six tokens with two slots each
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device, seed=1)
    x, w1 = draw(6, 72), draw(2, 40, 72)
    slots = SlotMap(row_of_slot_TK=torch.full((6, 2), -1, dtype=torch.int32, device=device), slot_of_row_P=slot_of_row_P)
    a, h, _ = own_kernels.few_rows_up(GatheredRows(x, slots), w1, None, torch.tensor([4, 2], device=device), "identity", True)
    exist = torch.tensor([3, 5], device=device)
    assert torch.equal(a, h) and bool((h[[0, 1, 2, 4]] == 0).all()) and bool((h[exist] != 0).any(1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core", *engines.BATCH_INVARIANT.values()])
def test_engines_take_these_kernels_for_few_rows_alone(engine, monkeypatch):
    """On Hopper, where the number of rows must not matter, in turns, and then for more rows of a group alone too: a router's. On other GPUs
    not at all then."""
    if E[engine].unavailable(torch.device("cuda")):
        pytest.skip(E[engine].unavailable(torch.device("cuda")))
    calls, without_sizes = [], []

    def recorded(name):
        def call(*args, **in_turns):
            calls.append(in_turns)
            without_sizes.append(name == "few_rows_gemm" and args[2] is None)
            return getattr(own_kernels, name)(*args, **in_turns)
        return call

    for module in ("hopper", "tensor_core"):
        for name in ("few_rows_gemm", "few_rows_up"):
            monkeypatch.setattr(f"gbmoe.engines.{module}.{name}", recorded(name))
    in_turns = {"hopper": [{"in_turns": False}], "hopper_batch_invariant": [{"in_turns": True}], "tensor_core": [{}]}.get(engine, [])
    pinned = engine == "hopper_batch_invariant"
    for rows, groups, taken in ((1, 1, 2), (3, 1, 2 * pinned), (40, 20, 2), (41, 20, 0), (300, 4, 0)):
        a, b = (drawn(*shape, dtype=torch.bfloat16, device=torch.device("cuda"), seed=1) for shape in ((rows, 64), (groups, 128, 64)))
        sizes = torch.tensor([rows] + [0] * (groups - 1), device="cuda")
        calls.clear()
        product = E[engine].product(a, b, sizes, trans_b=True)
        E[engine].up(GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), a), b, None, sizes, "silu", False)
        assert calls == in_turns * taken
        if groups == 1:
            without_sizes.clear()
            for weight in (b[0], b[0].t().contiguous().t()):
                assert torch.equal(E[engine].linear(a, weight), product)
            assert any(without_sizes) == bool(in_turns * taken)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "one element off", "sizes on the host"])
def test_down_reads_early_what_it_does_not_copy(device, layout, monkeypatch):  # noqa: F811
    """A copy of weights or sizes is what the kernel before writes, and must not be read before that has ended."""
    sizes, (inner, columns) = [3, 0, 1, 2], (72, 136)
    a, w2 = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((6, inner), (4, inner, columns)))
    on_device = torch.tensor(sizes, device=device)
    expected = own_kernels.few_rows_down(a, w2, on_device)
    early = []
    kernel = torch.ops.gbmoe_cuda.few_rows_gemm
    monkeypatch.setattr(torch.ops.gbmoe_cuda, "few_rows_gemm", lambda *args: (early.append(args[5]), kernel(*args))[1])
    if layout == "transposed":
        w2 = w2.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "one element off":
        w2 = torch.empty(w2.numel() + 1, dtype=w2.dtype, device=device)[1:].view(w2.shape).copy_(w2)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the kernel before must not be what writes w2
    got = own_kernels.few_rows_down(a, w2, on_device.cpu() if layout == "sizes on the host" else on_device)
    assert early == [layout in ("contiguous", "transposed") or (layout == "sizes on the host" and device.type == "cpu")]
    if layout == "transposed":
        exact = each_group(a, w2, sizes, torch.float64, trans_b=False)
        assert_as_accurate_as(got, each_group(a, w2, sizes, torch.float32, trans_b=False).to(got.dtype), exact, "y")
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", devices(), indirect=True)
def test_down_waits_for_up(device):  # noqa: F811
    """Its rows are what the kernel before it writes: in one graph, with other tokens each time, and more CTAs than run at once."""
    groups, hidden, ffn = 64, 2048, 768
    draw = functools.partial(drawn, dtype=torch.bfloat16, device=device)
    w1, v1, w2 = (draw(groups, *shape, seed=seed, scale=exact_inputs.fan_in_scale(shape[seed == 4]))
                  for seed, shape in ((2, (ffn, hidden)), (3, (ffn, hidden)), (4, (ffn, hidden))))
    sizes, x = torch.ones(groups, dtype=torch.int32, device=device), draw(groups, hidden, seed=1)

    def pair():
        a, *_ = own_kernels.few_rows_up(GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), x), w1, v1, sizes, "silu", False)
        return own_kernels.few_rows_down(a, w2, sizes)

    graph, y = cuda_graphs.captured(pair)
    for seed in range(20):
        x.copy_(draw(groups, hidden, seed=10 + seed))
        a, *_ = own_kernels.few_rows_up(GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), x), w1, v1, sizes, "silu", False)
        torch.cuda.synchronize()
        expected = torch.empty_like(y)
        torch.ops.gbmoe_cuda.few_rows_gemm(a, w2, sizes, False, False, False, expected)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
