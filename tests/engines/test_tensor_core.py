"""The tensor_core engine's kernels with every tile, on a GPU; tests/engines/emulated_gpu/ has what can be seen without one."""

import pytest
import torch
import torch.nn.functional as F

from gbmoe import engines
from gbmoe.engines import tensor_core
from gbmoe.kernels import plain_torch
from gbmoe.testing import exact_inputs
from gbmoe.tuning import grouped_gemm as tuning
from gbmoe.tuning.grouped_gemm import TENSOR_CORE_LOW, TENSOR_CORE_SQUARE, TENSOR_CORE_WIDE, TensorCoreConfig
from tests.conftest import assert_as_accurate_as, dtype_id

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
ENGINE = engines.ENGINES["tensor_core"]
SIZES = [130, 0, 1, 64, 65, 128, 17, 300]
GROUPS = pytest.mark.parametrize("sizes", [SIZES, [1] * 300, [5000], [4096, 0, 2000, 3], [0, 9, 0], [0] * 5],
                                 ids=lambda sizes: f"{sum(sizes)} rows in {len(sizes)}")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)


@pytest.fixture(autouse=True)
def on_a_gpu_since_ampere():
    reason = ENGINE.unavailable(DEVICE)
    if reason is not None:
        pytest.skip(f"tensor_core: {reason}")


def drawn(*shape, dtype, seed, scale=1.0):
    return exact_inputs.exact_values(*shape, dtype=dtype, device=DEVICE, seed=seed, scale=scale)


def rounded(dtype):
    """The dtype whose accuracy is asked for: sums of TF32's products are as accurate as bfloat16's are, and better."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def assert_accurate(got, baseline, exact, name):
    assert_as_accurate_as(got.to(rounded(got.dtype)), baseline.to(rounded(got.dtype)), exact, name)


def poisoned(*shape, dtype):
    exact_inputs.poison(DEVICE)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@GROUPS
@DTYPES
@pytest.mark.parametrize("columns", [8, 72, 256, 264, 1920])
def test_rows_of_every_tile(dtype, sizes, columns):
    """One product or the sum of two, in both layouts of b; fewer k-blocks than stages; a k-block that is not full."""
    rows, on_device = sum(sizes), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    for inner, products in ((8, 1), (72, 2), (328, 1), (1544, 2)):
        a = [drawn(rows + 40, inner, dtype=dtype, seed=i) for i in range(products)]
        b = [drawn(len(sizes), inner, columns, dtype=dtype, seed=2 + i, scale=exact_inputs.fan_in_scale(inner)) for i in range(products)]
        for x in a:
            x[rows:] = float("nan")
        exact, baseline = (sum(torch.cat([r.to(wide) @ w.to(wide) for r, w in zip(x[:rows].split(sizes), y)]) for x, y in zip(a, b))
                           for wide in (torch.float64, torch.float32))
        for trans_b in (False, True):
            if trans_b:
                b = [w.transpose(1, 2).contiguous() for w in b]
            operands = [a[0], b[0], *((a[1], b[1]) if products == 2 else (None, None)), on_device, trans_b]
            for config in (TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE, TENSOR_CORE_LOW, TensorCoreConfig(128, 128, panel=1)):
                first, second = poisoned(rows + 40, columns, dtype=dtype), poisoned(rows + 40, columns, dtype=dtype)
                for out in (first, second):
                    tensor_core.launch_rows(config, *operands, out)
                name = f"inner {inner}, {trans_b=}, {config}"
                assert_accurate(first[:rows], baseline, exact, name)
                assert torch.equal(first[:rows], second[:rows]) and bool(first[rows:].isnan().all()), name


@GROUPS
@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_of_every_tile(dtype, sizes, accumulate):
    """Exact zeros for groups without rows; with `accumulate` they leave what was there."""
    rows, on_device = sum(sizes), torch.tensor(sizes, dtype=torch.int64, device=DEVICE)
    for features, columns in ((8, 8), (136, 72), (200, 520)):
        a, b = drawn(rows + 40, features, dtype=dtype, seed=1), drawn(rows + 40, columns, dtype=dtype, seed=2)
        a[rows:], b[rows:] = float("nan"), float("nan")
        before = drawn(len(sizes), features, columns, dtype=torch.float32, seed=3)
        exact, baseline = (torch.stack([x.to(wide).t() @ y.to(wide) for x, y in zip(a[:rows].split(sizes), b[:rows].split(sizes))])
                           for wide in (torch.float64, torch.float32))
        for config in (TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE):
            outs = [before.clone() if accumulate else poisoned(*before.shape, dtype=dtype) for _ in range(2)]
            for out in outs:
                tensor_core.launch_weight_gradient(config, a, b, on_device, out, accumulate)
            got = outs[0] - before if accumulate else outs[0]
            assert_accurate(got, baseline if accumulate else baseline.to(dtype), exact, f"{features} x {columns}, {config}")
            assert torch.equal(*outs)
            empty = [e for e, size in enumerate(sizes) if size == 0]
            assert bool((got[empty] == 0).all())


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_torch.ACTIVATIONS)
def test_up_of_every_activation(activation, glu, save):
    for dtype, sizes, hidden, ffn in ((torch.bfloat16, SIZES, 72, 136), (torch.float16, [1] * 300, 136, 520)):
        x = drawn(sum(sizes), hidden, dtype=dtype, seed=1)
        w1, v1 = (drawn(len(sizes), ffn, hidden, dtype=dtype, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (2, 3))
        exact_inputs.poison(DEVICE)
        a, h, g = tensor_core.up_gemm(x, w1, v1 if glu else None, torch.tensor(sizes), activation, save)
        assert (h is None, g is None) == (not save, not (save and glu))
        _, h, g = tensor_core.up_gemm(x, w1, v1 if glu else None, torch.tensor(sizes), activation, True)
        for name, weights, got in (("h", w1, h), ("g", v1 if glu else None, g)):
            if weights is not None:
                each = [torch.cat([rows.to(wide) @ w.to(wide).t() for rows, w in zip(x.split(sizes), weights)])
                        for wide in (torch.float32, torch.float64)]
                assert_as_accurate_as(got, each[0].to(dtype), each[1], name)
        for_a = [plain_torch.activate(h.to(wide), g.to(wide) if glu else None, activation) for wide in (torch.float32, torch.float64)]
        assert_as_accurate_as(a, for_a[0].to(dtype), for_a[1], "a")


@pytest.mark.parametrize("config", [TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE, TENSOR_CORE_LOW], ids=["wide", "square", "low"])
def test_rows_keep_nan_in_its_row(config):
    """Tiles reach into the rows of the next group, which they must not read."""
    on_device, rows = torch.tensor(SIZES, device=DEVICE), sum(SIZES)
    a, b = drawn(rows, 200, dtype=torch.bfloat16, seed=1), drawn(len(SIZES), 200, 264, dtype=torch.bfloat16, seed=2)
    clean, out = poisoned(rows, 264, dtype=a.dtype), poisoned(rows, 264, dtype=a.dtype)
    tensor_core.launch_rows(config, a, b, None, None, on_device, False, clean)
    hit = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    hit[[0, 63, 64, 128, 129, 130, 131, 195, 196, rows - 1]] = True
    a[hit] = float("nan")
    tensor_core.launch_rows(config, a, b, None, None, on_device, False, out)
    assert bool(out[hit].isnan().all()) and torch.equal(out[~hit], clean[~hit])


@pytest.mark.memcheck
@pytest.mark.parametrize("sizes", [[2**40, 5], [-7, 2**62, 3], [100, 100, 2**31], [-1, -1], [2**31 + 5]], ids=str)
def test_sizes_beyond_the_rows_stay_inside_of_every_tensor(sizes):
    rows, sizes = 130, torch.tensor(sizes, device=DEVICE)
    a, b = drawn(rows, 72, dtype=torch.bfloat16, seed=1), drawn(sizes.numel(), 72, 136, dtype=torch.bfloat16, seed=2)
    guarded = torch.full((rows + 512, 136), 7.0, dtype=a.dtype, device=DEVICE)
    for config in (TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE, TENSOR_CORE_LOW):
        tensor_core.launch_rows(config, a, b, None, None, sizes, False, guarded[:rows])
        assert bool((guarded[rows:] == 7).all())
    for config in (TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE):
        out = torch.full((sizes.numel() + 1, 72, 136), 7.0, dtype=a.dtype, device=DEVICE)
        tensor_core.launch_weight_gradient(config, a, guarded[:rows].contiguous(), sizes, out[:-1])
        assert bool((out[-1] == 7).all())


def test_float32_is_taken_where_tf32_is_allowed(monkeypatch):
    """And is the product of operands that were rounded to TF32, to nearest."""
    a, b, sizes = torch.randn(64, 32, device=DEVICE), torch.randn(2, 32, 16, device=DEVICE), torch.tensor([30, 34])
    with pytest.raises(ValueError, match="takes float32 only where TF32 is allowed"):
        engines.product(a, b, sizes, engine="tensor_core")
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    got = engines.product(a, b, sizes, engine="tensor_core")

    def to_tf32(t):
        return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()

    exact = torch.cat([to_tf32(x) @ to_tf32(w) for x, w in zip(a.split([30, 34]), b)])
    assert float((got.double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_a_step_is_one_cuda_graph_and_is_replayed_with_other_sizes():
    """Nothing waits for the host, and the sizes are read when the graph is replayed."""
    rows, hidden, ffn = 384, 64, 128
    x, dy = (drawn(rows, hidden, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    w1, w2 = (drawn(3, ffn, hidden, dtype=torch.bfloat16, seed=seed, scale=exact_inputs.fan_in_scale(hidden)) for seed in (3, 4))
    sizes = torch.tensor([128, 128, 128], device=DEVICE)

    def step():
        a, h, _ = tensor_core.up_gemm(x, w1, None, sizes, "silu", True)
        y = ENGINE.down(a, w2, sizes)
        da = ENGINE.product(dy, w2, sizes, trans_b=True)
        return y, ENGINE.product(a, dy, sizes, trans_a=True), da

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for groups in ([128, 128, 128], [0, 300, 84], [384, 0, 0]):
        sizes.copy_(torch.tensor(groups))
        graph.replay()
        replayed = [t.clone() for t in results]
        assert all(torch.equal(got, want) for got, want in zip(replayed, step()))
        a = torch.cat([F.silu((r.double() @ w.double().t()).bfloat16().double()).bfloat16().double() for r, w in zip(x.split(groups), w1)])
        y = torch.cat([r @ w.double() for r, w in zip(a.split(groups), w2)])
        torch.testing.assert_close(replayed[0].double(), y, rtol=2e-2, atol=2e-2)


def test_a_tile_without_an_instance_is_refused():
    a, b = (torch.zeros(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((8, 8), (1, 8, 8)))
    with pytest.raises(RuntimeError, match="tensor_core_rows: no kernel has tiles of 32 x 32"):
        tensor_core.launch_rows(TensorCoreConfig(32, 32), a, b, None, None, torch.tensor([8]), False, torch.empty_like(a))
    assert tuning.tensor_core_rows_gemm(8, 1, 8) == TENSOR_CORE_LOW
