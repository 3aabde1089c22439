"""The tensor_core engine's kernels with every tile: on a GPU, and on a CPU that emulates one, where shapes are small."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F

from gbmoe import engines
from gbmoe.engines import tensor_core
from gbmoe.plain import plain_activation
from gbmoe.testing import cuda_graphs, exact_inputs
from gbmoe.tuning.device import FITTED_ON
from gbmoe.tuning.tensor_core_tiles import LOW, SQUARE, WIDE, TensorCoreConfig, rows_gemm
from tests.conftest import assert_as_accurate_as, dtype_id
from tests.engines import emulated_gpu

ENGINE = engines.ENGINES["tensor_core"]
SIZES = [130, 0, 1, 64, 65, 128, 17, 300]
GROUPS = {"cuda": [SIZES, [1] * 300, [5000], [4096, 0, 2000, 3], [0, 9, 0], [0] * 5],
          "cpu": [[70, 0, 1, 129, 0]]}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
TILES = {"wide": WIDE, "square": SQUARE, "low": LOW}


EMULATED = pytest.mark.xdist_group("emulated_gpu")  # the kernels are compiled once


def devices(*emulations):
    return [pytest.param("cuda", marks=pytest.mark.gpu), *(pytest.param(name, marks=EMULATED) for name in emulations)]


EVERY_EMULATION = pytest.mark.parametrize("device", devices(*(
    f"{copies} copies, {memory} memory" for copies in ("early", "late") for memory in ("small", "large"))), indirect=True)


@contextlib.contextmanager
def device_named(name, request):
    """Where the kernels run. Emulated, cp.async writes shared memory at once, or as late as it may; with the kernels for small or large
    shared memory."""
    if name == "cuda":
        reason = ENGINE.unavailable(torch.device("cuda"))
        if reason is not None:
            pytest.skip(f"tensor_core: {reason}")
        yield torch.device("cuda")
    else:
        late = "late" in name  # with one CTA, whose ring of tiles goes round
        with emulated_gpu.operators(request.getfixturevalue("kernels"), ctas=1 if late else 3, late_copies=late,
                                    large_memory="large" in name):
            yield torch.device("cpu")


@pytest.fixture(params=devices("early copies, small memory", "late copies, large memory"))
def device(request):
    with device_named(request.param, request) as where:
        yield where


def drawn(*shape, dtype, device, seed, scale=1.0):
    return exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=seed, scale=scale)


def rounded(dtype):
    """The dtype whose accuracy is asked for: sums of TF32's products are as accurate as bfloat16's are, and better."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def assert_accurate(got, baseline, exact, name):
    assert_as_accurate_as(got.to(rounded(got.dtype)), baseline.to(rounded(got.dtype)), exact, name)


def poisoned(*shape, dtype, device):
    exact_inputs.poison(device)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.pairs
@pytest.mark.parametrize("rows, inner, columns", [(1, 8, 8), (70, 72, 24), (300, 136, 264)])
@pytest.mark.parametrize("config", [LOW, SQUARE, WIDE], ids=str)
def test_without_sizes_one_group_has_all_rows(device, config, rows, inner, columns):
    a, b = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((rows, inner), (1, columns, inner)))
    results = []
    for sizes in (None, torch.tensor([rows], device=device)):
        results.append(poisoned(rows, columns, dtype=torch.bfloat16, device=device))
        tensor_core.launch_rows(config, a, b, None, None, sizes, True, results[-1])
    assert torch.equal(*results) and torch.equal(results[0], (a.double() @ b[0].double().t()).to(torch.bfloat16))


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=dtype_id)
@pytest.mark.parametrize("tile", TILES)
def test_results_in_float32_are_the_sums_themselves(device, dtype, tile):
    """A router's logits: what other results are rounded from, in rows that exist alone."""
    for rows, inner, columns in ((70, 72, 24), (300, 136, 264)):
        a, b = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, inner), (1, columns, inner)))
        out, rounded = (poisoned(rows + 1, columns, dtype=of, device=device) for of in (torch.float32, dtype))
        for results in (out, rounded):
            tensor_core.launch_rows(TILES[tile], a, b, None, None, None, True, results[:rows])
        exact = a.double() @ b[0].double().t()
        assert float((out[:rows] - exact).abs().max()) <= 1e-5 * float(exact.abs().max())
        assert torch.equal(out[:rows].to(dtype), rounded[:rows]) and bool(out[rows:].isnan().all())


@pytest.mark.slow
@pytest.mark.pairs
@EVERY_EMULATION
@DTYPES
@pytest.mark.parametrize("tile", TILES)
def test_rows_of_every_tile(device, dtype, tile):
    """One product or the sum of two, in both layouts of b; fewer k-blocks than stages; a k-block that is not full; short panels."""
    shapes = [(8, 264, 1, 16), (72, 136, 2, 1)]
    if device.type == "cuda":
        shapes += [(200, 8, 1, 16), (328, 1920, 1, 16), (1544, 264, 2, 16), (72, 256, 1, 16)]
    for sizes in GROUPS[device.type]:
        rows, on_device = sum(sizes), torch.tensor(sizes, dtype=torch.int32, device=device)
        for inner, columns, products, panel in shapes:
            draw = functools.partial(drawn, dtype=dtype, device=device)
            a = [draw(rows + 40, inner, seed=i) for i in range(products)]
            b = [draw(len(sizes), inner, columns, seed=2 + i, scale=exact_inputs.fan_in_scale(inner)) for i in range(products)]
            exact, baseline = (sum(torch.cat([r.to(wide) @ w.to(wide) for r, w in zip(x[:rows].split(sizes), y)]) for x, y in zip(a, b))
                               for wide in (torch.float64, torch.float32))
            for x in a:
                x[rows:] = float("nan")
            for trans_b in (False, True):
                second = [w.transpose(1, 2).contiguous() for w in b] if trans_b else b
                operands = [a[0], second[0], *((a[1], second[1]) if products == 2 else (None, None)), on_device, trans_b]
                outs = [poisoned(rows + 40, columns, dtype=dtype, device=device) for _ in range(2)]
                for out in outs:
                    tensor_core.launch_rows(TensorCoreConfig(TILES[tile].tile_m, TILES[tile].tile_n, panel), *operands, out)
                name = f"{sizes} of {inner} x {columns}, {trans_b=}"
                assert_accurate(outs[0][:rows], baseline, exact, name)
                assert torch.equal(outs[0][:rows], outs[1][:rows]) and bool(outs[0][rows:].isnan().all()), name


@pytest.mark.slow
@pytest.mark.pairs
@EVERY_EMULATION
@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("tile", ["wide", "square"])
def test_weight_gradients_of_every_tile(device, dtype, tile, accumulate):
    """Exact zeros for groups without rows; with `accumulate` they leave what was there."""
    for sizes in GROUPS[device.type]:
        rows, on_device = sum(sizes), torch.tensor(sizes, dtype=torch.int64, device=device)
        for features, columns in ((136, 72), (200, 520)) if device.type == "cuda" else ((8, 8), (136, 264)):
            a, b = (drawn(rows + 40, width, dtype=dtype, device=device, seed=width) for width in (features, columns))
            exact, baseline = (torch.stack([x.to(wide).t() @ y.to(wide) for x, y in zip(a[:rows].split(sizes), b[:rows].split(sizes))])
                               for wide in (torch.float64, torch.float32))
            a[rows:], b[rows:] = float("nan"), float("nan")
            before = drawn(len(sizes), features, columns, dtype=torch.float32, device=device, seed=3)
            outs = [before.clone() if accumulate else poisoned(*before.shape, dtype=dtype, device=device) for _ in range(2)]
            for out in outs:
                tensor_core.launch_weight_gradient(TILES[tile], a, b, on_device, out, accumulate)
            got = outs[0] - before if accumulate else outs[0]
            assert_accurate(got, baseline.to(got.dtype), exact, f"{sizes} of {features} x {columns}")
            assert torch.equal(*outs)
            empty = [e for e, size in enumerate(sizes) if size == 0]
            assert bool((got[empty] == 0).all())


def test_more_groups_than_a_warp_has_lanes(device):
    """Rows and tiles are counted 32 groups at a time."""
    sizes = [1, 0, 3] * 14
    on_device, draw = torch.tensor(sizes, device=device), functools.partial(drawn, dtype=torch.bfloat16, device=device)
    a, b, right = draw(sum(sizes), 8, seed=1), draw(len(sizes), 8, 16, seed=2), draw(sum(sizes), 16, seed=3)
    out, gradient = (poisoned(*shape, dtype=a.dtype, device=device) for shape in ((sum(sizes), 16), (len(sizes), 8, 16)))
    tensor_core.launch_rows(LOW, a, b, None, None, on_device, False, out)
    tensor_core.launch_weight_gradient(SQUARE, a, right, on_device, gradient)
    for name, got, each in (("rows", out, lambda x, y, w: x @ w), ("gradient", gradient, lambda x, y, w: x.t() @ y)):
        exact, baseline = ([each(*(t.to(wide) for t in of_group)) for of_group in zip(a.split(sizes), right.split(sizes), b)]
                           for wide in (torch.float64, torch.float32))
        join = torch.cat if name == "rows" else torch.stack
        assert_as_accurate_as(got, join(baseline).to(got.dtype), join(exact), name)


@pytest.mark.slow
@pytest.mark.pairs
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_up_of_every_activation(device, activation, glu):
    """Both tiles, by the number of rows; what backward needs is stored only if it is asked for."""
    shapes = {"cuda": ((SIZES, 72, 136), ([1] * 300, 136, 520)), "cpu": (([70, 0, 129], 72, 136), ([1] * 9, 8, 72))}
    for sizes, hidden, ffn in shapes[device.type]:
        on_device = torch.tensor(sizes, device=device)
        draw = functools.partial(drawn, dtype=torch.bfloat16, device=device)
        x = draw(sum(sizes), hidden, seed=1)
        w1, v1 = (draw(len(sizes), ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
        v1 = v1 if glu else None
        exact_inputs.poison(device)
        alone, *nothing = tensor_core.up_gemm(x, w1, v1, on_device, activation, False)
        a, h, g = tensor_core.up_gemm(x, w1, v1, on_device, activation, True)
        assert nothing == [None, None] and torch.equal(alone, a) and (g is None) == (not glu)
        for name, weights, got in (("h", w1, h), ("g", v1, g)):
            if weights is not None:
                each = [torch.cat([rows.to(wide) @ w.to(wide).t() for rows, w in zip(x.split(sizes), weights)])
                        for wide in (torch.float32, torch.float64)]
                assert_as_accurate_as(got, each[0].to(got.dtype), each[1], name)
        each = [plain_activation.activate(h.to(wide), g.to(wide) if glu else None, activation) for wide in (torch.float32, torch.float64)]
        assert_as_accurate_as(a, each[0].to(a.dtype), each[1], "a")


@pytest.mark.parametrize("tile", TILES)
def test_rows_keep_nan_in_its_row(device, tile):
    """Tiles reach into the rows of the next group, which they must not read."""
    on_device, rows = torch.tensor(SIZES, device=device), sum(SIZES)
    a, b = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((rows, 40), (len(SIZES), 40, 72)))
    clean, out = (poisoned(rows, 72, dtype=a.dtype, device=device) for _ in range(2))
    tensor_core.launch_rows(TILES[tile], a, b, None, None, on_device, False, clean)
    hit = torch.zeros(rows, dtype=torch.bool, device=device)
    hit[[0, 63, 64, 128, 129, 130, 131, 195, 196, rows - 1]] = True
    a[hit] = float("nan")
    tensor_core.launch_rows(TILES[tile], a, b, None, None, on_device, False, out)
    assert bool(out[hit].isnan().all()) and torch.equal(out[~hit], clean[~hit])


@pytest.mark.memcheck
@pytest.mark.parametrize("sizes", [[2**40, 5], [-7, 2**62, 3], [100, 100, 2**31], [-1, -1], [2**31 + 5]], ids=str)
def test_sizes_beyond_the_rows_stay_inside_of_every_tensor(device, sizes):
    rows, sizes = 130, torch.tensor(sizes, device=device)
    a, b = (drawn(*shape, dtype=torch.bfloat16, device=device, seed=1) for shape in ((rows, 72), (sizes.numel(), 72, 136)))
    right = drawn(rows, 136, dtype=torch.bfloat16, device=device, seed=2)
    for tile in TILES.values():
        guarded = torch.full((rows + 512, 136), 7.0, dtype=a.dtype, device=device)
        tensor_core.launch_rows(tile, a, b, None, None, sizes, False, guarded[:rows])
        assert bool((guarded[rows:] == 7).all())
    for tile in (WIDE, SQUARE):
        out = torch.full((sizes.numel() + 1, 72, 136), 7.0, dtype=a.dtype, device=device)
        tensor_core.launch_weight_gradient(tile, a, right, sizes, out[:-1])
        assert bool((out[-1] == 7).all())


def test_float32_is_rounded_to_tf32_to_nearest(device):
    a, b, sizes = torch.randn(64, 32, device=device), torch.randn(2, 32, 16, device=device), torch.tensor([30, 34], device=device)
    out = torch.empty(64, 16, device=device)
    tensor_core.launch_rows(LOW, a, b, None, None, sizes, False, out)

    def to_tf32(t):
        return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()

    exact = torch.cat([to_tf32(x) @ to_tf32(w) for x, w in zip(a.split([30, 34]), b)])
    assert float((out.double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_the_engines_experts_are_those_of_plain_pytorch(device):
    """up, down and all gradients through the engine's methods, which choose the tiles."""
    sizes, hidden, ffn = [70, 0, 33], 40, 72
    on_device, draw = torch.tensor(sizes, device=device), functools.partial(drawn, dtype=torch.bfloat16, device=device)
    x, dh, dg = draw(sum(sizes), hidden, seed=1), draw(sum(sizes), ffn, seed=2), draw(sum(sizes), ffn, seed=3)
    w1, v1, w2 = (draw(len(sizes), ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(ffn)) for seed in (4, 5, 6))

    def products(wide):
        def of(left, right, transposed=False):
            return torch.cat([r.to(wide) @ (w.to(wide).t() if transposed else w.to(wide)) for r, w in zip(left.split(sizes), right)])
        gradient = torch.stack([left.to(wide).t() @ right.to(wide) for left, right in zip(dh.split(sizes), x.split(sizes))])
        return of(dh, w2), of(x, w1, True), of(dh, w1) + of(dg, v1), gradient

    got = (ENGINE.down(dh, w2, on_device), ENGINE.product(x, w1, on_device, trans_b=True),
           ENGINE.up_backward(dh, w1, dg, v1, on_device), ENGINE.product(dh, x, on_device, trans_a=True))
    names = ("down", "trans_b", "up_backward", "gradient")
    for name, mine, baseline, exact in zip(names, got, products(torch.float32), products(torch.float64)):
        assert_as_accurate_as(mine, baseline.to(mine.dtype), exact, name)


@pytest.mark.gpu
def test_float32_is_taken_where_tf32_is_allowed(float32_products):
    a, b, sizes = torch.randn(64, 32, device="cuda"), torch.randn(2, 32, 16, device="cuda"), torch.tensor([30, 34])
    reason = ENGINE.unavailable(a.device)
    if reason is not None:
        pytest.skip(f"tensor_core: {reason}")
    with pytest.raises(ValueError, match="takes float32 only where TF32 is allowed"):
        engines.product(a, b, sizes, engine="tensor_core")
    float32_products("tf32")
    exact = torch.cat([x.double() @ w.double() for x, w in zip(a.split([30, 34]), b)])
    torch.testing.assert_close(engines.product(a, b, sizes, engine="tensor_core").double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_a_step_is_one_cuda_graph_and_is_replayed_with_other_sizes():
    """There is no host wait, and the sizes are read when the graph is replayed."""
    reason = ENGINE.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"tensor_core: {reason}")
    rows, hidden, ffn = 384, 64, 128
    draw = functools.partial(drawn, dtype=torch.bfloat16, device="cuda")
    x, dy = (draw(rows, hidden, seed=seed) for seed in (1, 2))
    w1, w2 = (draw(3, ffn, hidden, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (3, 4))
    sizes = torch.tensor([128, 128, 128], device="cuda")

    def step():
        a, h, _ = tensor_core.up_gemm(x, w1, None, sizes, "silu", True)
        y = ENGINE.down(a, w2, sizes)
        da = ENGINE.product(dy, w2, sizes, trans_b=True)
        return y, ENGINE.product(a, dy, sizes, trans_a=True), da

    graph, results = cuda_graphs.captured(step)
    for groups in ([128, 128, 128], [0, 300, 84], [384, 0, 0]):
        sizes.copy_(torch.tensor(groups))
        graph.replay()
        replayed = [t.clone() for t in results]
        assert all(torch.equal(got, want) for got, want in zip(replayed, step()))
        a = torch.cat([F.silu((r.double() @ w.double().t()).bfloat16().double()).bfloat16().double() for r, w in zip(x.split(groups), w1)])
        y = torch.cat([r @ w.double() for r, w in zip(a.split(groups), w2)])
        torch.testing.assert_close(replayed[0].double(), y, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_tile_without_an_instance_is_refused():
    reason = ENGINE.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"tensor_core: {reason}")
    a, b = (torch.zeros(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((8, 8), (1, 8, 8)))
    with pytest.raises(RuntimeError, match="tensor_core_rows: no kernel has tiles of 32 x 32"):
        tensor_core.launch_rows(TensorCoreConfig(32, 32), a, b, None, None, torch.tensor([8]), False, torch.empty_like(a))
    with pytest.raises(RuntimeError, match="tensor_core_rows: out has another dtype than the result"):  # b is not [E,N,K]
        tensor_core.launch_rows(LOW, a, b, None, None, torch.tensor([8]), False, torch.empty_like(a, dtype=torch.float32))
    assert rows_gemm(FITTED_ON, 8, 1, 8) == LOW
