"""The Hopper engine's fused computations, and its grouped GEMMs with every tiling, also at shapes that "auto" gives to other engines."""

from dataclasses import asdict, replace

import pytest
import torch

from gbmoe import RoutingPlan, engines, expert_mlp, launch
from gbmoe.engines import hopper
from gbmoe.launch import gather
from gbmoe.plain import plain_activation
from gbmoe.testing import exact_inputs
from gbmoe.tuning import gathering, hopper_tiles
from gbmoe.tuning.device import Device
from gbmoe.tuning.hopper_tiles import NARROW, SQUARE, WHOLE, WIDE, GemmConfig
from tests.conftest import assert_as_accurate_as, dtype_id

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HOPPER = engines.ENGINES["hopper"]


@pytest.fixture(autouse=True)
def on_hopper():
    reason = HOPPER.unavailable(DEVICE)
    if reason is not None:
        pytest.skip(f"hopper: {reason}")


def drawn(dtype, seed):
    """A function that draws tensors of a given shape; `number` tells the tensors of one `seed` apart."""
    def values(*shape, number, scale=1.0):
        return exact_inputs.exact_values(*shape, dtype=dtype, device=DEVICE, seed=10 * seed + number, scale=scale)

    return values


def down_backward_inputs(dtype, sizes, hidden, ffn, *, glu, weights, behind=40, seed=0):
    """Rows in no order of their slots, some without one, and `behind` more behind the last group, which belong to nobody."""
    rows, values = sum(sizes) + behind, drawn(dtype, seed)
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    slots = torch.randperm(rows, generator=generator, device=DEVICE).int()
    without = torch.rand(rows, generator=generator, device=DEVICE) < 0.05
    slots = torch.where(without, -1, slots)
    slots[sum(sizes):] = -2
    return {
        "dz": values(rows, hidden, number=1), "w2": values(len(sizes), ffn, hidden, number=2, scale=exact_inputs.fan_in_scale(hidden)),
        "sizes": torch.tensor(sizes, dtype=torch.int32, device=DEVICE),
        "h": values(rows, ffn, number=3), "g": values(rows, ffn, number=4) if glu else None,
        "slot_of_row": slots,
        "weights": None if weights is None else torch.rand(rows, 1, generator=generator, device=DEVICE, dtype=torch.float64).to(weights),
    }


def down_backward(inputs, activation):
    exact_inputs.poison(DEVICE)
    names = ("a", "dh", "dg", "dweights")
    return {name: t for name, t in zip(names, hopper.down_backward_gemm(*inputs.values(), activation)) if t is not None}


def expected_down_backward(inputs, activation, dtype):
    """What the fused kernel computes, in separate steps in `dtype`: each group's product, then the activation's backward by the
    reference."""
    dz, w2, h, g = (None if inputs[name] is None else inputs[name].to(dtype) for name in ("dz", "w2", "h", "g"))
    weights = inputs["weights"].double() if dtype == torch.float64 and inputs["weights"] is not None else inputs["weights"]
    d, first = torch.zeros_like(h), 0
    for group, rows in enumerate(inputs["sizes"].tolist()):
        d[first:first + rows] = dz[first:first + rows] @ w2[group].t()
        first += rows
    a, dg, dweights = plain_activation.activate_backward(h, g, d, inputs["slot_of_row"], weights, activation)
    results = {"a": a, "dh": d, "dg": dg, "dweights": dweights}
    return {name: t for name, t in results.items() if t is not None}


def assert_down_backward(inputs, activation):
    got, rows = down_backward(inputs, activation), int(inputs["sizes"].sum())
    exact = expected_down_backward(inputs, activation, torch.float64)
    baseline = expected_down_backward(inputs, activation, inputs["dz"].dtype)
    assert got.keys() == exact.keys()
    for name in got:
        mine, theirs, true = ((t if name == "dweights" else t[:rows]) for t in (got[name], baseline[name], exact[name]))
        assert_as_accurate_as(mine, theirs, true, name)
        if name != "dweights":
            assert bool((mine[inputs["slot_of_row"][:rows] < 0] == 0).all()), name
    again = down_backward(inputs, activation)
    assert all(torch.equal(got[name][:rows], again[name][:rows]) for name in got if name != "dweights")
    assert "dweights" not in got or torch.equal(got["dweights"], again["dweights"])


SIZES = [130, 0, 1, 64, 65, 128, 17, 300]


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_down_backward_of_every_activation(activation, glu):
    for dtype in (torch.bfloat16, torch.float16):
        assert_down_backward(down_backward_inputs(dtype, SIZES, 136, 264, glu=glu, weights=torch.float32), activation)


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("weights", [None, torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_down_backward_takes_weights_of_any_dtype(weights, glu):
    """In float16 a router weight that lost its last bits changes the result."""
    assert_down_backward(down_backward_inputs(torch.float16, SIZES, 64, 192, glu=glu, weights=weights), "silu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("hidden, ffn", [(8, 8), (64, 72), (72, 384), (2048, 256), (1544, 768), (200, 1152), (72, 1920), (520, 2056),
                                         (264, 3608), (72, 3840)])
def test_down_backward_of_every_tiling(dtype, hidden, ffn):
    """Clusters of two tiles, with one tile left over; narrow tiles; no clusters; columns left over; fewer slices along K than stages,
    and many."""
    assert_down_backward(down_backward_inputs(dtype, SIZES, hidden, ffn, glu=True, weights=torch.float32), "silu")


@pytest.mark.parametrize("sizes", [[5000], [0, 0, 9], [0] * 40, [1] * 300, [4096, 0, 2000, 3], [129] * 64],
                         ids=lambda sizes: f"{sum(sizes)} rows in {len(sizes)}")
@pytest.mark.parametrize("hidden, ffn", [(72, 512), (328, 768), (1544, 640), (264, 3840)])
def test_down_backward_goes_round_its_rings(sizes, hidden, ffn):
    """More tiles than CTAs, so that producer and consumer warps run ahead of each other; and no tile at all."""
    assert_down_backward(down_backward_inputs(torch.bfloat16, sizes, hidden, ffn, glu=True, weights=torch.float32), "silu")


@pytest.mark.parametrize("hidden", [8, 1544])
@pytest.mark.parametrize("ffn", [8, 64, 264, 520])
def test_down_backward_of_tiles_with_few_pieces(hidden, ffn):
    """Some of a CTA's warps have no rows to store in several tiles in a row."""
    for sizes in ([1] * 2000, [17, 33, 1, 0, 90] * 200):
        assert_down_backward(down_backward_inputs(torch.bfloat16, sizes, hidden, ffn, glu=True, weights=torch.float32), "silu")


@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_down_backward_where_the_activation_is_flat_or_steep(activation):
    inputs = down_backward_inputs(torch.bfloat16, SIZES, 64, 256, glu=True, weights=torch.float32)
    values = torch.tensor([-3e4, -100.0, -88.0, -30.0, -8.0, -1e-30, -0.0, 0.0, 1e-30, 8.0, 30.0, 88.0, 100.0, 3e4], device=DEVICE)
    inputs["h"].copy_(values.repeat(inputs["h"].numel() // len(values) + 1)[:inputs["h"].numel()].view_as(inputs["h"]))
    got, exact = down_backward(inputs, activation), expected_down_backward(inputs, activation, torch.float64)
    rows = sum(SIZES)
    for name in ("a", "dh", "dg"):
        torch.testing.assert_close(got[name][:rows].double(), exact[name][:rows], rtol=0.03, atol=1e-3 * float(exact[name].abs().mean()))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "identity"])
def test_down_backward_of_large_numbers_was_nan(activation):
    """gelu_tanh's slope, whose x^2 is infinite; and relu's at NaN is 1."""
    inputs = down_backward_inputs(torch.bfloat16, SIZES, 64, 256, glu=False, weights=torch.float32)
    values = torch.tensor([1.0, 1e10, 1e13, 1e15, 1e18, 1e20, 1e30, 3e38], device=DEVICE)
    values = torch.cat([values, -values])
    inputs["h"].copy_(values.repeat(inputs["h"].numel() // len(values) + 1)[:inputs["h"].numel()].view_as(inputs["h"]))
    rows, exact = sum(SIZES), expected_down_backward(inputs, activation, torch.float64)
    torch.testing.assert_close(down_backward(inputs, activation)["dh"][:rows].double(), exact["dh"][:rows], rtol=0.03,
                               atol=1e-3 * float(exact["dh"].abs().mean()))
    if activation == "relu":
        inputs["h"].fill_(torch.nan)
        exact = expected_down_backward({**inputs, "h": torch.ones_like(inputs["h"])}, activation, torch.float64)
        torch.testing.assert_close(down_backward(inputs, activation)["dh"][:rows].double(), exact["dh"][:rows], rtol=0.03,
                                   atol=1e-3 * float(exact["dh"].abs().mean()))


def test_down_backward_keeps_nan_out_of_rows_without_a_slot():
    inputs = down_backward_inputs(torch.bfloat16, SIZES, 64, 256, glu=True, weights=torch.float32)
    without = inputs["slot_of_row"] < 0
    for name in ("h", "g", "dz"):
        inputs[name][without] = float("nan")
    got, rows = down_backward(inputs, "silu"), sum(SIZES)
    assert bool(got.pop("dweights").isfinite().all())
    for name, t in got.items():
        assert bool(t[:rows].isfinite().all()) and bool((t[:rows][without[:rows]] == 0).all()), name


def test_down_backward_keeps_nan_in_its_row():
    """Tiles reach into the rows of the next group, and the same lanes hold the sums of other rows."""
    inputs = down_backward_inputs(torch.bfloat16, SIZES, 64, 256, glu=True, weights=torch.float32)
    clean, rows = down_backward(inputs, "silu"), sum(SIZES)
    hit = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    hit[[0, 7, 129, 130, 131, 195, rows - 1]] = True
    hit &= inputs["slot_of_row"][:rows] >= 0
    for name in ("h", "g", "dz"):
        inputs[name][:rows][hit] = float("nan")
    got = down_backward(inputs, "silu")
    for name in ("a", "dh", "dg"):
        assert bool(got[name][:rows][hit].isnan().all()) and torch.equal(got[name][:rows][~hit], clean[name][:rows][~hit]), name
    slots = inputs["slot_of_row"][:rows][hit].long()
    assert bool(got["dweights"].view(-1)[slots].isnan().all()) and int(got["dweights"].isnan().sum()) == len(slots)


PING_PONG = [GemmConfig(SQUARE, *cluster, ping_pong=True, tile_counter=counted)
             for cluster, counted in (((1, 2), False), ((1, 2), True), ((2, 1), True), ((1, 1), False))]
EVERY_TILING = [*PING_PONG, GemmConfig(WIDE), GemmConfig(WIDE, cluster_n=2, tile_counter=True), GemmConfig(NARROW, cluster_n=2),
                GemmConfig(WIDE, tile_counter=True, most_ahead=8), GemmConfig(WIDE, cluster_n=2, tile_counter=True, most_ahead=1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("columns", [8, 72, 256, 264, 640, 1920, 2056])
@pytest.mark.parametrize("sizes", [SIZES, [1] * 300, [5000], [4096, 0, 2000, 3], [129] * 64, [0, 9, 0], [0] * 5],
                         ids=lambda sizes: f"{sum(sizes)} rows in {len(sizes)}")
def test_rows_by_every_walk(dtype, sizes, columns):
    """Clusters of two tiles along M or N, with one tile left over, and no clusters; one product or the sum of two; fewer slices along K
    than stages."""
    values, rows, on_device = drawn(dtype, 0), sum(sizes), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    for inner, products in ((8, 1), (72, 2), (328, 1), (1544, 2)):
        a = [values(rows + 40, inner, number=i) for i in range(products)]
        b = [values(len(sizes), inner, columns, number=2 + i, scale=exact_inputs.fan_in_scale(inner)) for i in range(products)]
        exact = sum(torch.cat([r.double() @ w.double() for r, w in zip(x[:rows].split(sizes), y)]) for x, y in zip(a, b))
        baseline = sum(torch.cat([r.float() @ w.float() for r, w in zip(x[:rows].split(sizes), y)]) for x, y in zip(a, b)).to(dtype)
        for trans_b in (False, True):
            if trans_b:
                b = [w.transpose(1, 2).contiguous() for w in b]
            operands = [a[0], b[0], *((a[1], b[1]) if products == 2 else (None, None)), on_device, trans_b]
            for config in EVERY_TILING:
                got = []
                for _ in range(2):
                    out = torch.full((rows + 40, columns), float("nan"), dtype=dtype, device=DEVICE)
                    exact_inputs.poison(DEVICE)  # and with it the workspace
                    hopper.launch_rows(config, *operands, out)
                    got.append(out)
                name = f"inner {inner}, {trans_b=}, {config}"
                assert_as_accurate_as(got[0][:rows], baseline, exact, name)
                assert torch.equal(got[0][:rows], got[1][:rows]) and bool(got[0][rows:].isnan().all()), name


def test_clusters_that_are_kept_together_end_beside_other_launches():
    """Launches on three streams overlap, so that some clusters begin when others of their launch are far ahead: all end, with right
    results. There are more tiles than clusters, or pacing would have ended with the first that has none."""
    values, sizes = drawn(torch.bfloat16, 0), torch.tensor([1500, 0, 1300, 260], device=DEVICE)
    a, b = values(3060, 4096, number=1), values(4, 4096, 4096, number=2, scale=exact_inputs.fan_in_scale(4096))
    config = GemmConfig(WIDE, cluster_n=2, tile_counter=True)
    want, streams = a.new_empty(3060, 4096), [torch.cuda.Stream() for _ in range(3)]
    hopper.launch_rows(config, a, b, None, None, sizes, False, want)
    torch.cuda.synchronize()
    got = []
    for repetition in range(30):
        with torch.cuda.stream(streams[repetition % 3]):
            out = torch.full_like(want, float("nan"))
            hopper.launch_rows(replace(config, most_ahead=1), a, b, None, None, sizes, False, out)
            got.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in got)


@pytest.mark.parametrize("columns", [256, 264, 2056])
@pytest.mark.parametrize("sizes", [SIZES, [129] * 8], ids=["small", "129"])
@pytest.mark.parametrize("config", PING_PONG, ids=range(len(PING_PONG)))
def test_rows_in_ping_pong_keep_nan_in_its_row(sizes, columns, config):
    """Tiles, and the second tile of a cluster, reach into the rows of the next group."""
    on_device, values, rows = torch.tensor(sizes, device=DEVICE), drawn(torch.bfloat16, 1), sum(sizes)  # int64
    a, b, out = values(rows, 200, number=1), values(len(sizes), 200, columns, number=2), values(rows, columns, number=3)
    hopper.launch_rows(config, a, b, None, None, on_device, False, out)
    clean, hit = out.clone(), torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    hit[[0, 63, 64, 128, 129, 130, 131, 195, 196, rows - 1]] = True
    a[hit] = float("nan")
    hopper.launch_rows(config, a, b, None, None, on_device, False, out)
    assert bool(out[hit].isnan().all()) and torch.equal(out[~hit], clean[~hit])


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("hidden, ffn, activation", [(72, 8200, "silu"), (72, 16_392, "silu"), (2048, 1032, "silu"), (2048, 1032, "gelu"),
                                                     (2048, 1032, "relu_squared")])
def test_up_of_many_tiles(hidden, ffn, activation, glu):
    """Tiles that are walked in panels of one height, where a group's do not come out even, and where one panel holds them all; and, of
    long sums, tiles that are taken from a counter."""
    sizes = [2700, 0, 2560, 129, 5200, 1, 2570]

    values = drawn(torch.bfloat16, 0)
    x, scale = values(sum(sizes), hidden, number=1), exact_inputs.fan_in_scale(hidden)
    w1 = values(len(sizes), ffn, hidden, number=2, scale=scale)
    v1 = values(len(sizes), ffn, hidden, number=3, scale=scale) if glu else None
    exact_inputs.poison(DEVICE)
    a, h, g = hopper.up_gemm(x, None, 1, w1, v1, torch.tensor(sizes, dtype=torch.int32, device=DEVICE), activation, True)
    assert hopper_tiles.up_gemm(Device.of(x.device), sum(sizes), hidden, ffn, glu).tile_counter == (hidden != 72)
    for name, weights, got in (("h", w1, h), ("g", v1, g)):
        if weights is None:
            continue
        each = [torch.cat([rows.to(dtype) @ w.to(dtype).t() for rows, w in zip(x.split(sizes), weights)])
                for dtype in (torch.bfloat16, torch.float64)]
        assert_as_accurate_as(got, *each, name)
    exact = plain_activation.activate(h.double(), None if g is None else g.double(), activation)
    assert_as_accurate_as(a, plain_activation.activate(h, g, activation), exact, "a")


def gathered_inputs(dtype, sizes, hidden, ffn, top_k, seed=0):
    """Rows of tokens in no order, some without a slot, and 40 after the last group."""
    rows = sum(sizes) + 40
    tokens, values = (rows + top_k - 1) // top_k, drawn(dtype, seed)
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    slots = torch.randperm(tokens * top_k, generator=generator, device=DEVICE)[:rows].int()
    slots = torch.where(torch.rand(rows, generator=generator, device=DEVICE) < 0.05, -1, slots)
    slots[sum(sizes):] = -2
    x = values(tokens, hidden, number=1)
    gathered = torch.where(slots.unsqueeze(1) >= 0, x[slots.clamp(min=0).long() // top_k], 0)[:sum(sizes)]
    a = values(rows, ffn, number=3)
    a[sum(sizes):] = float("nan")
    return x, gathered, slots, values(len(sizes), ffn, hidden, number=2, scale=exact_inputs.fan_in_scale(hidden)), a


def expected_weights(a, gathered, sizes, dtype):
    """a[rows of e].T @ gathered[rows of e], [E,F,H], in the rows' dtype and in float64."""
    groups = list(zip(gathered.split(sizes), a[:sum(sizes)].split(sizes)))
    return [torch.stack([left.to(t).t() @ rows.to(t) for rows, left in groups]) for t in (dtype, torch.float64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("sizes", [SIZES, [1] * 300, [5000], [4096, 0, 2000, 3], [0, 9, 0]], ids=lambda sizes: f"{len(sizes)} groups")
@pytest.mark.parametrize("hidden, ffn, top_k", [(136, 72, 1), (8, 8, 2), (520, 264, 8), (1544, 512, 3), (1800, 264, 2), (2048, 512, 8)])
def test_products_that_gather(dtype, sizes, hidden, ffn, top_k):
    x, gathered, slots, w, a = gathered_inputs(dtype, sizes, hidden, ffn, top_k)
    on_device, rows = torch.tensor(sizes, dtype=torch.int32, device=DEVICE), sum(sizes)
    exact_inputs.poison(DEVICE)
    got = hopper.rows_gemm_gathered(x, slots, top_k, w, on_device)[:rows]
    each = [torch.cat([g.to(t) @ m.to(t).t() for g, m in zip(gathered.split(sizes), w)]) for t in (dtype, torch.float64)]
    assert_as_accurate_as(got, *each, "rows")
    assert bool((got[slots[:rows] < 0] == 0).all())
    exact_inputs.poison(DEVICE)
    got = hopper.weight_gradient_gemm_gathered(a, x, slots, top_k, on_device)
    assert_as_accurate_as(got, *expected_weights(a, gathered, sizes, dtype), "weights")
    assert bool((got[on_device == 0] == 0).all())
    assert torch.equal(got, hopper.weight_gradient_gemm_gathered(a, x, slots, top_k, on_device))


# Of an expert's first GEMM: in single CTAs rows are copied, in pairs TMA loads them line by line.
GATHERING = (GemmConfig(WIDE), GemmConfig(WIDE, cluster_n=2), GemmConfig(WIDE, cluster_n=2, panel=2, tile_counter=True),
             GemmConfig(WIDE, cluster_n=2, panel=3, even_panels=True),
             GemmConfig(WIDE, cluster_n=2, panel=2, tile_counter=True, most_ahead=1))


@pytest.mark.memcheck
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("sizes", [SIZES, [1] * 300, [5000, 3], [0, 9, 0], [2**31 - 1] * 3], ids=lambda sizes: f"{len(sizes)} groups")
@pytest.mark.parametrize("hidden, ffn, top_k", [(136, 72, 1), (8, 264, 2), (2056, 136, 3), (520, 1032, 8)])
def test_a_first_gemm_that_gathers_has_the_bits_of_one_that_does_not(dtype, sizes, hidden, ffn, top_k, glu):
    """Also in tiles without a partner, whose lines belong to the next group or to nobody, with sizes beyond the rows, and in pairs of CTAs
    with weights that lie contiguous along F."""
    kept = within(sizes, 900) if max(sizes) > 10**6 else sizes
    x, gathered, slots, w, _ = gathered_inputs(dtype, kept, hidden, ffn, top_k)
    v = drawn(dtype, 5)(*w.shape, number=1, scale=exact_inputs.fan_in_scale(hidden)) if glu else None
    rows, guard, on_device = sum(kept), 300, torch.tensor(sizes, dtype=torch.int64, device=DEVICE)
    xp = torch.cat([gathered, gathered.new_full((len(slots) - rows, hidden), float("nan"))])
    if max(sizes) > 10**6:  # the first group then has all rows, with or without a slot
        xp = torch.where((slots >= 0).unsqueeze(1), x[slots.clamp(min=0).long() // top_k], 0)
        rows = len(slots)

    def results(config, w, v, *of):
        around = [torch.full((len(slots) + 2 * guard, ffn), 7.0, dtype=dtype, device=DEVICE) for _ in range(2 + glu)]
        inner = [t[guard:-guard] for t in around]
        hopper.launch_up(config, *of, w, v, on_device, "silu", *inner, *([] if glu else [None]))
        assert all(bool((t[:guard] == 7).all() & (t[guard + rows:] == 7).all()) for t in around)
        return [t[:rows] for t in inner]

    want = results(GemmConfig(WIDE), w, v, xp, None, 1)
    along_f = [None if t is None else t.mT.contiguous().mT for t in (w, v)]
    for config in GATHERING:
        for weights in ((w, v), *[along_f] * (config.cluster_n == 2)):
            exact_inputs.poison(DEVICE)
            for one, other in zip(results(config, *weights, x, slots, top_k), want):
                assert torch.equal(one, other), config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes, inner, columns", [((70, 0, 129, 1, 0), 200, 392), ((3000, 0, 5), 512, 768)], ids=str)
def test_gradients_that_are_added_leave_groups_without_rows_alone(dtype, sizes, inner, columns):
    values, rows = drawn(dtype, 1), sum(sizes)
    a, b, before = values(rows + 9, inner, number=1), values(rows + 9, columns, number=2), values(len(sizes), inner, columns, number=3)
    for e, size in enumerate(sizes):
        if size == 0:
            before[e] = float("nan")
    on_device = torch.tensor(sizes, device=DEVICE)
    engine = engines.ENGINES["hopper"]
    product = engine.gmm(a, b, on_device, True, False)
    got = engine.gmm(a, b, on_device, True, False, out=before.clone(), accumulate=True)
    for e, size in enumerate(sizes):
        assert bool(got[e].isnan().all()) if size == 0 else torch.equal(got[e], before[e] + product[e])



@pytest.mark.memcheck
@pytest.mark.parametrize("hidden, ffn, top_k", [(136, 72, 1), (8, 520, 2), (1544, 512, 3), (264, 768, 8)])
@pytest.mark.parametrize("sizes", [SIZES, [3] * 200, [5000], [0, 9, 0]], ids=lambda sizes: f"{len(sizes)} groups")
def test_weights_that_gather_have_the_same_bits_in_every_cluster(monkeypatch, sizes, hidden, ffn, top_k):
    x, gathered, slots, _, a = gathered_inputs(torch.bfloat16, sizes, hidden, ffn, top_k)
    on_device, rows = torch.tensor(sizes, dtype=torch.int32, device=DEVICE), torch.full((len(slots), hidden), float("nan")).to(x)
    rows[:sum(sizes)] = gathered
    config = hopper_tiles.weight_gradient_gemm(Device.of(x.device), len(slots), len(sizes), ffn, hidden, gathered=True)
    split = [WHOLE] if sum(sizes) < 1000 else [WHOLE, config.split]  # where sums are split depends on the tiles
    want = HOPPER.gmm(a, rows, on_device, True, False)
    for clusters in ((1, 1), (2, 1), (1, 2)):
        for splitting in split:
            choice = replace(config, cluster_m=clusters[0], cluster_n=clusters[1], split=splitting)
            monkeypatch.setattr(hopper_tiles, "weight_gradient_gemm", lambda *_, **__: choice)
            exact_inputs.poison(DEVICE)
            got = hopper.weight_gradient_gemm_gathered(a, x, slots, top_k, on_device)
            assert_as_accurate_as(got, *expected_weights(a, gathered, sizes, torch.bfloat16), f"{clusters}, {splitting}")
            if splitting is WHOLE and len(split) == 1:
                assert torch.equal(got, want), clusters


@pytest.mark.memcheck
@pytest.mark.parametrize("hidden, ffn, top_k", [(136, 72, 1), (8, 520, 2), (1544, 512, 3), (264, 768, 8)])
@pytest.mark.parametrize("sizes", [SIZES, [3] * 200, [5000], [0, 9, 0]], ids=lambda sizes: f"{len(sizes)} groups")
def test_two_weight_gradients_of_one_gemm_are_those_of_two(monkeypatch, sizes, hidden, ffn, top_k):
    """Also where their last tile is not full, and the first one's is the other's partner in a pair. Each has results of its own."""
    x, gathered, slots, _, a = gathered_inputs(torch.bfloat16, sizes, hidden, ffn, top_k)
    a2, on_device = drawn(torch.bfloat16, 6)(*a.shape, number=1), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    a2[sum(sizes):] = float("nan")
    real = hopper_tiles.weight_gradient_gemm
    for clusters in ((1, 2), (2, 1), (1, 1)):
        def choice(*of, clusters=clusters, **more):
            return replace(real(*of, **more), cluster_m=clusters[0], cluster_n=clusters[1], split=WHOLE)
        monkeypatch.setattr(hopper_tiles, "weight_gradient_gemm", choice)
        exact_inputs.poison(DEVICE)
        got = hopper.two_weight_gradients_gemm_gathered(a, a2, x, slots, top_k, on_device)
        for left, gradient in zip((a, a2), got):
            assert torch.equal(gradient, hopper.weight_gradient_gemm_gathered(left, x, slots, top_k, on_device)), clusters
    monkeypatch.setattr(hopper_tiles, "weight_gradient_gemm", real)
    exact_inputs.poison(DEVICE)
    for left, gradient in zip((a, a2), hopper.two_weight_gradients_gemm_gathered(a, a2, x, slots, top_k, on_device)):
        assert_as_accurate_as(gradient, *expected_weights(left, gathered, sizes, torch.bfloat16), "with sums that are split")


@pytest.mark.memcheck
@pytest.mark.parametrize("hidden, ffn, top_k", [(136, 72, 1), (8, 520, 2), (1544, 512, 3), (264, 768, 8)])
@pytest.mark.parametrize("sizes", [SIZES, [3] * 200, [5000], [0, 9, 0]], ids=lambda sizes: f"{len(sizes)} groups")
def test_gradients_that_lie_transposed_were_made_of_rows_in_memory(monkeypatch, sizes, hidden, ffn, top_k):
    """They have the bits of those that do not; alone, and as two halves of one tensor [E,H,2F], of which no column is the other half's."""
    x, gathered, slots, _, a = gathered_inputs(torch.bfloat16, sizes, hidden, ffn, top_k)
    a2, on_device = drawn(torch.bfloat16, 6)(*a.shape, number=1), torch.tensor(sizes, dtype=torch.int32, device=DEVICE)
    real = hopper_tiles.weight_gradient_gemm
    for clusters in ((1, 2), (2, 1), (1, 1)):
        def choice(*of, clusters=clusters, **more):
            return replace(real(*of, **more), cluster_m=clusters[0], cluster_n=clusters[1])
        monkeypatch.setattr(hopper_tiles, "weight_gradient_gemm", choice)
        expected = hopper.two_weight_gradients_gemm_gathered(a, a2, x, slots, top_k, on_device)
        whole = torch.full((len(sizes), hidden, 2 * ffn + 16), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        halves = whole[..., :ffn].transpose(1, 2), whole[..., ffn + 8: 2 * ffn + 8].transpose(1, 2)
        exact_inputs.poison(DEVICE)
        hopper.two_weight_gradients_gemm_gathered(a, a2, x, slots, top_k, on_device, *halves)
        assert all(map(torch.equal, halves, expected)), clusters
        assert bool(whole[..., ffn: ffn + 8].isnan().all()) and bool(whole[..., 2 * ffn + 8:].isnan().all())
        alone = torch.full((len(sizes), hidden, ffn), float("nan"), dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
        hopper.weight_gradient_gemm_gathered(a, x, slots, top_k, on_device, alone)
        assert torch.equal(alone, hopper.weight_gradient_gemm_gathered(a, x, slots, top_k, on_device)), clusters
    with pytest.raises(RuntimeError, match="contiguous along the same dimension"):
        hopper.two_weight_gradients_gemm_gathered(a, a2, x, slots, top_k, on_device, alone, torch.empty_like(expected[1]))


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("sizes", [SIZES, [3] * 200, [5000], [0, 9, 0]], ids=lambda sizes: f"{len(sizes)} groups")
@pytest.mark.parametrize("inner, columns", [(72, 136), (520, 8), (2048, 384), (136, 1000)])
def test_biases_are_added_in_square_tiles_too(monkeypatch, dtype, sizes, inner, columns):
    """With the bits of wide ones, of weights in both orders."""
    draw, on_device, rows = drawn(dtype, 11), torch.tensor(sizes, device=DEVICE), sum(sizes)
    a, b, bias = draw(rows, inner, number=1), draw(len(sizes), inner, columns, number=2), draw(len(sizes), columns, number=3)
    of_rows = bias.repeat_interleave(on_device, 0)
    exact, baseline = (torch.cat([part.to(t) @ m.to(t) for part, m in zip(a.split(sizes), b)]) + of_rows.to(t)
                       for t in (torch.float64, torch.float32))
    real, results = hopper_tiles.biased_rows_gemm, []
    for tile_n in (hopper_tiles.WIDE, hopper_tiles.SQUARE):
        def choice(*of, tile_n=tile_n, **more):
            return replace(real(*of, **more), tile_n=tile_n, cluster_n=2, ping_pong=tile_n == hopper_tiles.SQUARE, split=WHOLE)
        monkeypatch.setattr(hopper_tiles, "biased_rows_gemm", choice)
        for trans_b in (False, True):
            exact_inputs.poison(DEVICE)
            lies = b.transpose(1, 2).contiguous() if trans_b else b
            results.append(hopper.biased_rows_gemm(a, lies, bias, on_device, trans_b, splits=False))
    assert_as_accurate_as(results[0], baseline.to(dtype), exact)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("ffn, align, keep, gemms, gathers", [
    (768, 1, False, 1, 1), (1024, 1, False, 1, 1), (1032, 1, False, 0, 3), (768, 64, False, 0, 3), (768, 1, True, 0, 2)])
def test_backward_of_a_glu_gathers_rows_of_x_inside_one_gemm(monkeypatch, ffn, align, keep, gemms, gathers):
    """Up to the F where that pays, unless rows are padded or kept; the gather that is left is that of the output's gradient."""
    calls = {"two": 0, "gather": 0}

    def counting(name, function):
        def call(*args, **more):
            calls[name] += 1
            return function(*args, **more)
        return call

    monkeypatch.setattr(hopper, "two_weight_gradients_gemm_gathered", counting("two", hopper.two_weight_gradients_gemm_gathered))
    monkeypatch.setattr(launch, "gather", counting("gather", launch.gather))
    hidden, experts, values = 1536, 4, drawn(torch.bfloat16, 7)
    ids = torch.rand(1024, experts, device=DEVICE).topk(2, dim=1).indices
    plan = RoutingPlan.from_experts(ids, experts, align=align)
    w1, w2, v1 = (values(experts, ffn, hidden, number=n, scale=exact_inputs.fan_in_scale(hidden)).requires_grad_() for n in (1, 2, 3))
    x = values(1024, hidden, number=4).requires_grad_()
    expert_mlp(x, plan, w1, w2, v1, activation="silu", engine="hopper", keep_gathered_rows=keep).sum().backward()
    assert calls == {"two": gemms, "gather": gathers}


@pytest.mark.memcheck
def test_weights_that_gather_in_more_groups_than_a_block_has_threads():
    sizes = [*([3] * 1100), 0, 400]
    x, gathered, slots, _, a = gathered_inputs(torch.bfloat16, sizes, 72, 24, 2)
    got = hopper.weight_gradient_gemm_gathered(a, x, slots, 2, torch.tensor(sizes, device=DEVICE))
    assert_as_accurate_as(got, *expected_weights(a, gathered, sizes, torch.bfloat16), "weights")


def test_weights_that_gather_keep_nan_in_its_group():
    for ffn in (136, 512):  # in single CTAs, and in pairs, which load rows of other groups after a group's end
        x, _, slots, _, a = gathered_inputs(torch.bfloat16, SIZES, 264, ffn, 2)
        slots = torch.where((slots == 0) | (slots == 1), 2, slots)
        slots[130] = 0  # token 0 is all of group 2, and in no other
        sizes = torch.tensor(SIZES, device=DEVICE)  # int64
        clean = hopper.weight_gradient_gemm_gathered(a, x, slots, 2, sizes)
        others = torch.arange(len(SIZES), device=DEVICE) != 2
        for of in (a[130], x[0]):
            kept = of.clone()
            of.fill_(float("nan"))
            got = hopper.weight_gradient_gemm_gathered(a, x, slots, 2, sizes)
            assert bool(got[2].isnan().all()) and torch.equal(got[others], clean[others]), ffn
            of.copy_(kept)


def within(sizes, rows):
    """The sizes that the kernels are to make of these: each in [0, rows], and together no more than there are."""
    left, result = rows, []
    for size in sizes:
        result.append(min(max(size, 0), left))
        left -= result[-1]
    return result


OVERWRITTEN = [[2**31 - 1] * 4, [-5, 300, -(2**31), 10**6], [100] * 60, [0, 2**30, 2**30, 7], [2**62] * 4, [-(2**63), 2**40 + 3, 5],
               [2**32 + 7, 200, 2**33], [3] * 1100 + [2**31 - 1] * 3]


@pytest.mark.memcheck
@pytest.mark.parametrize("sizes, inner, columns", [
    pytest.param(sizes, inner, columns, id=f"{number}-{inner}-{columns}")
    for inner, columns in ((72, 264), (1544, 640), (2056, 128), (200, 384)) for number, sizes in enumerate(OVERWRITTEN)
    if len(sizes) * inner * columns < 2**28])  # the weights in float64 are eight bytes each, several times
def test_sizes_beyond_the_rows_led_stores_out_of_bounds(sizes, inner, columns):
    """A collective may have overwritten the sizes, which no check sees: the kernel must not write outside of its result."""
    rows, guard, values = 700, 4096, drawn(torch.bfloat16, 0)
    if max(map(abs, sizes)) < 2**31:
        as_types = (torch.int32, torch.int64)
    else:
        as_types = (torch.int64,)
    a, w = values(rows, inner, number=1), values(len(sizes), inner, columns, number=2, scale=exact_inputs.fan_in_scale(inner))
    right = values(rows, columns, number=3)
    kept = within(sizes, rows)
    used = sum(kept)
    for dtype in as_types:
        on_device = torch.tensor(sizes, dtype=dtype, device=DEVICE)
        for trans_b in (False, True):
            b = w.transpose(1, 2).contiguous() if trans_b else w
            around = torch.full((rows + 2 * guard, columns), 7.0, dtype=torch.bfloat16, device=DEVICE)
            HOPPER.gmm(a, b, on_device, False, trans_b, out=around[guard:-guard])
            each = [torch.cat([r.to(t) @ m.to(t) for r, m in zip(a[:used].split(kept), w)]) for t in (torch.bfloat16, torch.float64)]
            assert_as_accurate_as(around[guard:guard + used], *each)
            assert bool((around[:guard] == 7).all() & (around[guard + used:] == 7).all())
            for config in EVERY_TILING:
                around.fill_(7)
                hopper.launch_rows(config, a, b, None, None, on_device, trans_b, around[guard:-guard])
                assert_as_accurate_as(around[guard:guard + used], *each)
                assert bool((around[:guard] == 7).all() & (around[guard + used:] == 7).all())
        around = torch.full((len(sizes) + 2, inner, columns), 7.0, dtype=torch.bfloat16, device=DEVICE)
        HOPPER.gmm(a, right, on_device, True, False, out=around[1:-1])
        each = [torch.stack([x.to(t).t() @ y.to(t) for x, y in zip(a[:used].split(kept), right[:used].split(kept))])
                for t in (torch.bfloat16, torch.float64)]
        assert_as_accurate_as(around[1:-1], *each)
        assert bool((around[0] == 7).all() & (around[-1] == 7).all())


@pytest.mark.parametrize("columns", [256, 512, 1024])
def test_tiles_that_only_sizes_asked_for_left_split_sums_unwritten(columns):
    """Where sizes add up to more than there are rows, as after expert_parallel_rows' bound was exceeded, the schedule counted tiles that do
    not exist; each ended a cluster, and where none was left for the last splits, rows inside kept what memory held. On 132 multiprocessors
    five groups of 256 columns showed it, with others on others."""
    rows, inner, most = 1280, 8192, 10
    values = drawn(torch.bfloat16, 0)
    a, b = values(rows, inner, number=1), values(most, inner, columns, number=2, scale=exact_inputs.fan_in_scale(inner))
    for inside in ([rows], [700, 580]):
        each = [torch.cat([r.to(t) @ m.to(t) for r, m in zip(a.split(inside), b)]) for t in (torch.bfloat16, torch.float64)]
        for groups in range(len(inside), most + 1):
            sizes = torch.tensor(inside[:-1] + [rows] * (groups + 1 - len(inside)), dtype=torch.int32, device=DEVICE)
            out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=DEVICE)
            exact_inputs.poison(DEVICE)
            HOPPER.gmm(a, b[:groups], sizes, False, False, out=out)
            assert_as_accurate_as(out, *each, f"{groups} groups, {inside}")


@pytest.mark.memcheck
def test_slots_out_of_range_name_no_token():
    """A hand-made plan may hold any slot: those beyond the tokens count as none, in kernels that gather and in the operators around
    them."""
    hidden, ffn, top_k = 1544, 256, 2
    x, gathered, slots, w, a = gathered_inputs(torch.bfloat16, SIZES, hidden, ffn, top_k)
    rows, sizes = sum(SIZES), torch.tensor(SIZES, dtype=torch.int32, device=DEVICE)
    wrong = slots.clone()
    wrong[::7] = torch.tensor([x.size(0) * top_k, 2**31 - 1, -(2**31), x.size(0) * top_k + 1], device=DEVICE, dtype=torch.int32)[
        torch.arange(len(wrong[::7]), device=DEVICE) % 4]
    none = torch.where((wrong < 0) | (wrong >= x.size(0) * top_k), -1, wrong)
    for product in (lambda s: hopper.rows_gemm_gathered(x, s, top_k, w, sizes)[:rows],
                    lambda s: hopper.weight_gradient_gemm_gathered(a, x, s, top_k, sizes),
                    lambda s: hopper.weight_gradient_gemm_gathered(torch.cat([a, a], 1), x, s, top_k, sizes),
                    lambda s: hopper.up_gemm(x, s, top_k, w, w, sizes, "silu", True)[0][:rows],
                    lambda s: hopper.up_gemm(x, s, top_k, w[:, :128].contiguous(), None, sizes, "silu", True)[0][:rows]):
        assert torch.equal(product(wrong), product(none))
    inputs = down_backward_inputs(torch.bfloat16, SIZES, hidden, ffn, glu=True, weights=torch.float32)
    few = inputs["weights"][:100].contiguous()
    none = torch.where(inputs["slot_of_row"] >= 100, -1, inputs["slot_of_row"])
    got, want = (down_backward(inputs | {"weights": few, "slot_of_row": s}, "silu") for s in (inputs["slot_of_row"], none))
    assert all(torch.equal(got[name][:rows], want[name][:rows]) for name in got)


@pytest.mark.large
def test_as_many_rows_as_fit_into_int32():
    """Numbers of rows just below 2^31 - 1024: offsets need 64 bits, and the end of the last tile must still fit 32."""
    rows = 2**31 - 2**10
    a = torch.empty(rows, 8, dtype=torch.bfloat16, device=DEVICE).fill_(0.5)
    tail = exact_inputs.exact_values(300, 8, dtype=torch.bfloat16, device=DEVICE, seed=1)
    a[-300:] = tail
    b = exact_inputs.exact_values(2, 8, 8, dtype=torch.bfloat16, device=DEVICE, seed=2)
    sizes = torch.tensor([rows - 100, 100], dtype=torch.int64, device=DEVICE)
    out = HOPPER.gmm(a, b, sizes, False, False)
    exact = torch.cat([tail[:200].double() @ b[0].double(), tail[200:].double() @ b[1].double()])
    assert_as_accurate_as(out[-300:], torch.cat([tail[:200] @ b[0], tail[200:] @ b[1]]), exact)
    assert bool((out[:-300] == out[0]).all())
    del out
    # The sum over 2^31 rows of 0.25, cut into parts, and those of the tail.
    got = HOPPER.gmm(a, a, sizes, True, False)
    assert_as_accurate_as(got[1], tail[200:].t() @ tail[200:], tail[200:].double().t() @ tail[200:].double())
    torch.testing.assert_close(got[0].double(), torch.full((8, 8), 0.25 * rows, device=DEVICE, dtype=torch.float64), rtol=1e-2, atol=0)


@pytest.mark.large
def test_tokens_of_more_than_64_gib_are_gathered_from_their_places():
    """Products that gather count vectors of 16 bytes in 32 bits, which overflowed here: rows are gathered before them instead."""
    hidden, (tokens, last) = 4096, (bytes // (2 * 4096) for bytes in (66 << 30, 64 << 30))
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=DEVICE)
    picked = torch.tensor([0, 5, last - 1, last, last + 1, tokens - 1], device=DEVICE)
    x[picked] = exact_inputs.exact_values(len(picked), hidden, dtype=torch.bfloat16, device=DEVICE, seed=1)
    ids = torch.full((tokens, 1), -1, dtype=torch.int32, device=DEVICE)
    ids[picked] = 0
    plan = RoutingPlan.from_experts(ids, 1)
    rows, _ = gather(x, plan.slot_map._replace(slot_of_row_P=plan.slot_of_row_P[:8].clone()))
    assert torch.equal(rows[:6], x[picked])
    for tokens_TH, gathers in ((x[:1000], True), (x, False)):
        config = asdict(gathering.layer_config(hidden, 256, True, "silu", tokens_TH.nbytes, False))
        assert {value for name, value in config.items() if name.startswith("gather")} == {gathers}
    with pytest.raises(RuntimeError, match="expected less than 64 GiB to gather from"):
        hopper.rows_gemm_gathered(x, plan.slot_of_row_P[:8], 1, x[:64].unsqueeze(0), plan.padded_counts_E)


def test_a_tiling_without_an_instance_is_refused():
    a, b = torch.zeros(8, 8, dtype=torch.bfloat16, device=DEVICE), torch.zeros(1, 8, 8, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(RuntimeError, match="hopper_rows: no kernel has tiles of 64 columns in clusters of 1 x 1"):
        hopper.launch_rows(GemmConfig(64), a, b, None, None, torch.tensor([8], device=DEVICE), False, torch.empty_like(a))
