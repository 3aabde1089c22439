"""The numbers of blockwise-scaled e4m3, to the bit: as they are defined, and on a GPU as the kernels compute them."""

import contextlib
import itertools
import threading
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gbmoe import Float8BlockScaling, RoutingPlan, engines, float8, launch
from gbmoe.float8 import ScaledKBlocks, ScaledRows, weight_cache
from gbmoe.plain import plain_activation
from gbmoe.slot_map import SlotMap
from gbmoe.testing import exact_inputs
from tests.conftest import dtype_id

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
POWER_2 = pytest.mark.parametrize("power_2_scale", [False, True], ids=["scale", "power-2"])


def hard_rows(rows, columns, dtype, device="cpu"):
    """Rows whose tiles are ordinary, full of zeros, tiny, huge, with one outlier, or of one number alone."""
    x = torch.randn(rows, columns, generator=exact_inputs.generator("cpu", 3))
    finfo = torch.finfo(dtype)
    x[1::7] = 0
    x[2::7] *= finfo.tiny
    x[3::7] *= finfo.max / 8
    x[4::7, 1::50] *= 1000
    x[5::7] = 3.1
    x[6::7] *= finfo.tiny * finfo.eps * 4  # subnormal in every dtype
    return x.clamp(finfo.min, finfo.max).to(dtype).to(device)


def tiles_of(x):
    """x [P,K] cut into tiles of 128 columns, in Python's order, for a definition that shares nothing with float8.py."""
    return [[row[k : k + 128] for k in range(0, len(row), 128)] for row in x]


@DTYPES
@POWER_2
def test_each_number_is_the_nearest_of_its_tile(dtype, power_2_scale):
    x = hard_rows(14, 300, dtype)
    scaled = float8.quantize_rows(x, power_2_scale)
    assert scaled.values_PK.dtype == torch.float8_e4m3fn and scaled.values_PK.is_contiguous()
    assert scaled.scales_PC.shape == (14, 3) and scaled.scales_PC.dtype == torch.float32
    for row, (tiles, values) in enumerate(zip(tiles_of(x.double()), tiles_of(scaled.values_PK.double()))):
        for c, (tile, stored) in enumerate(zip(tiles, values)):
            decode = scaled.scales_PC[row, c].double()
            largest = tile.abs().max()
            if largest == 0:
                assert decode == 1 and not stored.any()
                continue
            # The largest number takes the end of e4m3's range; with powers of two at least its half.
            at_least = 447 if not power_2_scale else 224
            if largest > 1e-36:
                assert at_least * decode <= largest <= 449 * decode
            # Nearest: half a unit of the three bits after the point, or half of the smallest subnormal, 2**-9.
            error = (stored * decode - tile).abs()
            assert (error <= torch.maximum(tile.abs() / 16, decode * 2**-10) * (1 + 1e-6)).all()


def test_power_2_scales_are_powers_of_two():
    scales = float8.quantize_rows(hard_rows(14, 300, torch.float32), True).scales_PC
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_tile_that_is_not_finite_has_no_scale(number):
    x = torch.ones(3, 256)
    x[1, 130] = number
    scales = float8.quantize_rows(x).scales_PC
    assert torch.isnan(scales).nonzero().tolist() == [[1, 1]]
    assert torch.isnan(float8.quantize_rows(x).dequantized()[1, 128:]).all()


@DTYPES
@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 144, 80), (1, 16, 400), (2, 0, 16), (0, 16, 16)])
def test_weights_have_a_scale_for_each_block(dtype, shape):
    w = exact_inputs.exact_values(*shape, dtype=dtype, device="cpu", seed=1)
    natural, transposed = float8.quantize_weights(w), float8.quantize_weights(w, transpose=True)
    for both, alone in zip(launch.quantize_weights_both_ways(w, False), (natural, transposed)):
        assert_same_numbers(both, alone)
    assert torch.equal(natural.values_ENK.float(), transposed.values_ENK.transpose(1, 2).float())
    assert torch.equal(natural.scales, transposed.scales.transpose(1, 2))
    for e in range(shape[0]):
        for i in range(0, shape[1], 128):
            for j in range(0, shape[2], 128):
                block = w[e, i : i + 128, j : j + 128]
                alone = float8.quantize_weights(block[None])
                assert torch.equal(alone.scales[0, 0, 0], natural.scales[e, i // 128, j // 128])
                assert torch.equal(alone.values_ENK[0].float(), natural.values_ENK[e, i : i + 128, j : j + 128].float())


SIZES = {"uneven": [130, 0, 1, 64, 127, 128, 17, 300], "one-row": [1] * 40, "one-group": [256], "empty": [0, 9, 0], "all-empty": [0] * 3,
         "no-experts": [], "beyond-the-rows": [5, 2**31 - 1, 3, -2, 7]}


@DTYPES
@POWER_2
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_k_blocks_have_a_scale_for_each_column(dtype, power_2_scale, sizes):
    rows, columns = 8 + sum(size for size in sizes if 0 < size < 1000), 48
    x = hard_rows(rows, columns, dtype)
    scaled = float8.quantize_k_blocks(x, torch.tensor(sizes, dtype=torch.int64), power_2_scale)
    blocks = -(-rows // 128) + len(sizes)
    assert scaled.values_BKR.shape == (blocks, columns, 128) and scaled.values_BKR.dtype == torch.float8_e4m3fn
    assert scaled.values_BKR.is_contiguous() and scaled.scales_BK.shape == (blocks, columns) and scaled.scales_BK.dtype == torch.float32
    row = block = 0
    for size, filled in zip(sizes, scaled.filled_rows_E.tolist(), strict=True):
        end = min(row + max(size, 0), rows)
        assert filled == -(-(end - row) // 128) * 128
        for first in range(row, end, 128):
            # A column of a k-block is quantised as a row of as many numbers.
            alone = float8.quantize_rows(x[first : min(first + 128, end)].t(), power_2_scale)
            count = alone.values_PK.size(1)
            assert torch.equal(scaled.scales_BK[block], alone.scales_PC[:, 0])
            assert torch.equal(scaled.values_BKR[block, :, :count].view(torch.uint8), alone.values_PK.view(torch.uint8))
            assert not scaled.values_BKR[block, :, count:].view(torch.uint8).any(), "the k-block is not filled up with zeros"
            assert torch.equal(scaled.dequantized()[block * 128 : block * 128 + count], alone.dequantized().t())
            block += 1
        row = end
    assert block <= blocks


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_column_that_is_not_finite_has_no_scale(number):
    x = torch.ones(300, 32)
    x[140, 3] = number
    scales = float8.quantize_k_blocks(x, torch.tensor([10, 290])).scales_BK
    assert torch.isnan(scales).nonzero().tolist() == [[2, 3]]


# -------------------------------------------------------------------------------------------------------------- the cache


@pytest.fixture
def quantized():
    """(lookup, calls): `lookup(w)` asks for a weight as an engine does, `calls` has an entry for each time that one was quantised."""
    calls = []

    def lookup(w, power_2_scale=False):
        def quantize():
            calls.append(tuple(w.shape))
            return launch.quantize_weights_both_ways(w.contiguous(), power_2_scale)
        return float8.cached(w, power_2_scale, quantize)

    return lookup, calls


def weight(*shape, seed=1):
    return exact_inputs.exact_values(*shape, dtype=torch.bfloat16, device="cpu", seed=seed)


def assert_kept(kept, w, power_2_scale=False):
    for transpose in (False, True):
        assert_same_numbers(kept[transpose], float8.quantize_weights(w, power_2_scale, transpose))


def test_a_weight_is_quantized_once(quantized):
    lookup, calls = quantized
    w = torch.nn.Parameter(weight(6, 144, 80).flatten(0, 1))
    assert lookup(w.view(6, 144, 80)) is None and not calls
    with float8.cached_weights([w]):
        kept = lookup(w.view(6, 144, 80))
        assert_kept(kept, w.detach().view(6, 144, 80))
        assert lookup(w.view(6, 144, 80)) is kept and lookup(w.detach().view(6, 144, 80)) is kept and len(calls) == 1
        # Whatever else differs is another weight.
        assert_kept(lookup(w.view(3, 288, 80)), w.detach().view(3, 288, 80))
        assert_kept(lookup(w.view(6, 144, 80)[2:]), w.detach().view(6, 144, 80)[2:])
        assert_kept(lookup(w.view(6, 144, 80).transpose(1, 2)), w.detach().view(6, 144, 80).transpose(1, 2))
        assert_kept(lookup(w.view(6, 144, 80), True), w.detach().view(6, 144, 80), True)
        assert len(calls) == 5 and lookup(w.view(6, 144, 80)) is kept
    assert lookup(w.view(6, 144, 80)) is None


def test_a_tensor_that_is_not_among_the_weights_is_not_kept(quantized):
    lookup, calls = quantized
    w = weight(2, 16, 32)
    with float8.cached_weights(torch.nn.ParameterList([w])):
        assert lookup(w.clone()) is None and lookup(w.half()) is None and not calls
        assert lookup(w) is not None


def test_a_weight_that_changes_is_quantized_anew(quantized):
    lookup, calls = quantized
    w = torch.nn.Parameter(weight(2, 16, 32))
    optimizer = torch.optim.SGD([w], lr=1.0)
    with float8.cached_weights([w]):
        before = lookup(w)
        w.grad = torch.ones_like(w)
        optimizer.step()
        after = lookup(w)
        assert_kept(after, w.detach())
        assert len(calls) == 2 and not torch.equal(before[0].values_ENK.float(), after[0].values_ENK.float())
        with torch.no_grad():
            w[1].mul_(3)  # through a view
        assert_kept(lookup(w), w.detach())
        w.data = weight(2, 16, 32, seed=9)  # other memory, which is not among the weights
        assert lookup(w) is None


def stepping(w, optimizer=torch.optim.AdamW, **options):
    """An optimizer of w whose fused step torch does not count, with a gradient for it."""
    w.grad = torch.ones_like(w)
    return optimizer([w], lr=1.0, fused=True, **options)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_weight_that_a_fused_optimizer_changes_is_quantized_anew(quantized, optimizer):
    lookup, calls = quantized
    w = torch.nn.Parameter(weight(2, 16, 32))
    optimizer = stepping(w, optimizer)
    with float8.cached_weights([w]):
        for step in range(1, 4):
            assert_kept(lookup(w), w.detach())
            assert lookup(w) is lookup(w) and len(calls) == step
            version = w._version
            optimizer.step()
            assert w._version == version, "this torch counts the change, so that the test shows nothing"
        assert_kept(lookup(w), w.detach())


@pytest.mark.parametrize("registers", ["pre of all", "pre", "post", "post of all"])
def test_a_weight_that_an_optimizers_hook_changes_is_quantized_anew(quantized, registers):
    lookup, _ = quantized
    w = torch.nn.Parameter(weight(2, 16, 32))
    optimizer = stepping(w, torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = 0.0
    register = {"pre of all": register_optimizer_step_pre_hook, "pre": optimizer.register_step_pre_hook,
                "post": optimizer.register_step_post_hook, "post of all": register_optimizer_step_post_hook}[registers]

    def hook(*_):
        if registers != "post of all":  # one of these that is registered now runs last, after the change has become known
            assert lookup(w) is None
        w.data.mul_(-3)

    with float8.cached_weights([w]):
        before = lookup(w)
        handle = register(hook)
        try:
            optimizer.step()
            after = lookup(w)
        finally:
            handle.remove()
    assert_kept(after, w.detach())
    assert not torch.equal(before[0].scales, after[0].scales)


class TwoStep(torch.optim.Optimizer):
    """Writes through .data between two calls of its closure, and after the second."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        for factor in (-3, -0.5):
            closure()
            for weight in self.param_groups[0]["params"]:
                weight.data.mul_(factor)


def test_nothing_is_kept_while_an_optimizer_steps(quantized):
    lookup, calls = quantized
    w, recipe, used = torch.nn.Parameter(weight(2, 16, 32)), Float8BlockScaling(), []

    def closure():
        assert float8.keeps_weights(recipe, [w])  # as without a context
        used.append(lookup(w))

    with float8.cached_weights([w]):
        lookup(w)
        assert not float8.keeps_weights(recipe, [w])
        TwoStep([w]).step(closure)
        assert used == [None, None] and not float8.keeps_weights(recipe, [w])
        assert_kept(lookup(w), w.detach())
        assert lookup(w) is lookup(w) and len(calls) == 2


def test_a_step_that_raises_leaves_nothing_that_is_out_of_date(quantized):
    lookup, _ = quantized
    w = torch.nn.Parameter(weight(2, 16, 32))
    used = []

    def closure():
        if used:
            raise KeyError
        used.append(w)

    with float8.cached_weights([w]):
        lookup(w)
        with pytest.raises(KeyError):
            TwoStep([w]).step(closure)
        assert lookup(w) is None
        stepping(w).step()
        assert_kept(lookup(w), w.detach())


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_a_compiled_optimizer_changes_is_quantized_anew(quantized, fused):
    lookup, calls = quantized
    w = torch.nn.Parameter(weight(2, 16, 32))
    w.grad = torch.ones_like(w)
    optimizer, backend = torch.optim.AdamW([w], lr=1.0, fused=fused), CompileCounterWithBackend("aot_eager")
    step = torch.compile(optimizer.step, backend=backend)
    step()
    compiled = backend.frame_count
    for number in range(1, 11):
        with float8.cached_weights([w]):
            lookup(w)
            step()
            assert_kept(lookup(w), w.detach())
            assert len(calls) == 2 * number
    assert backend.frame_count == compiled, "a context made torch compile the step again"


def test_a_weight_that_changes_during_backward_is_quantized_anew(quantized):
    lookup, _ = quantized
    w = torch.nn.Parameter(weight(2, 16, 32))
    optimizer = stepping(w)
    w.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with float8.cached_weights([w]):
        before = lookup(w)
        w.square().sum().backward()
        assert_kept(lookup(w), w.detach())
        assert not torch.equal(before[0].scales, lookup(w)[0].scales)


def test_what_cannot_be_seen_is_said(quantized):
    lookup, calls = quantized
    w, v, inference = torch.nn.Parameter(weight(2, 16, 32)), weight(2, 16, 32, seed=2), torch.inference_mode()(weight)(2, 16, 32)
    float8.weights_changed()  # nothing is kept anywhere
    with float8.cached_weights([w, inference]), float8.cached_weights([v]):
        for unseen in (w, v, inference):
            kept = lookup(unseen)
            unseen.data.mul_(-3)
            assert lookup(unseen) is kept
            float8.weights_changed()
            assert_kept(lookup(unseen), unseen.detach())
        assert len(calls) == 6


def test_a_context_that_checks_names_the_weight_that_changed_unseen(quantized):
    lookup, _ = quantized
    layer = torch.nn.ParameterDict({"w1": weight(2, 16, 32), "w2": weight(2, 16, 32, seed=2)})
    memory = weight(6, 16, 32, seed=3)
    first, second = memory[:2], memory[2:].view(64, 32)
    for weights, changed, name in ((layer, layer["w2"], "w2"), ([first, second], first, r"weights\[0\]"),
                                   ([first, second], second.view(4, 16, 32)[1:], r"weights\[1\]")):
        changed.data[0, 0, 0] = torch.nan
        with float8.cached_weights(weights, check=True):
            kept = lookup(changed)
            assert lookup(changed) is kept  # a scale that is NaN is the same
            with torch.no_grad():
                changed.mul_(-1)
            assert_kept(lookup(changed), changed.detach())
            changed.data[1].mul_(-3)
            with pytest.raises(RuntimeError, match=rf"cached_weights: {name}: expected the values that were quantised"):
                lookup(changed)
            float8.weights_changed()
            assert_kept(lookup(changed), changed.detach())
    with float8.cached_weights([first]):
        lookup(first)
        first.data[1].mul_(-3)
        lookup(first)
        with float8.cached_weights([memory], check=True), pytest.raises(RuntimeError, match=r"cached_weights: weights\[0\]"):
            lookup(first)  # kept by the outer one, which does not check
    with pytest.raises(TypeError, match="cached_weights: check: expected a bool, got 1"):
        float8.cached_weights([first], check=1).__enter__()


def test_optimizers_are_hooked_once(monkeypatch):
    """Each context's hooks would change what torch iterates over while another thread steps."""
    registered = []
    monkeypatch.setattr(weight_cache, "_optimizers_are_hooked", False)
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        monkeypatch.setattr(weight_cache, name, lambda hook, name=name: registered.append(name))
    for _ in range(3):
        with float8.cached_weights([]):
            pass
    assert sorted(registered) == ["register_optimizer_step_post_hook", "register_optimizer_step_pre_hook"]


def test_a_weight_whose_memory_has_moved_is_quantized_anew(quantized):
    lookup, calls = quantized
    w = weight(2, 16, 32)
    storage, address, version = w.untyped_storage(), w.data_ptr(), w._version
    with float8.cached_weights([w]):
        lookup(w)
        storage.resize_(2 * storage.nbytes())
        w.data.mul_(3)
        assert w.data_ptr() != address and w._version == version
        assert_kept(lookup(w), w)
        assert len(calls) == 2


def test_a_kept_weight_holds_its_memory(quantized):
    """Another tensor at the address of a weight that is gone would be taken for it."""
    lookup, calls = quantized
    w = weight(2, 64, 64)
    address = w.data_ptr()
    with float8.cached_weights([w]):
        lookup(w)
        del w
        others = [weight(2, 64, 64, seed=seed) for seed in range(20)]
        assert all(other.data_ptr() != address and lookup(other) is None for other in others)


def test_nothing_is_kept_after_an_exception(quantized):
    lookup, _ = quantized
    w = weight(2, 16, 32)
    with pytest.raises(KeyError) as raised, float8.cached_weights([w]):
        values = weakref.ref(lookup(w)[0].values_ENK)
        assert values() is not None
        raise KeyError
    assert raised.tb is not None and values() is None and not weight_cache._caches and lookup(w) is None


def test_contexts_are_nested(quantized):
    lookup, calls = quantized
    outer, inner = weight(2, 16, 32), weight(2, 16, 32, seed=2)
    with float8.cached_weights([outer]):
        with float8.cached_weights([outer, inner]):
            kept = lookup(outer)
            assert_kept(lookup(inner), inner)
        assert lookup(outer) is kept and lookup(inner) is None and len(calls) == 2


def test_contexts_of_threads_may_end_in_any_order(quantized):
    lookup, calls = quantized
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    w, v = weight(2, 16, 32), weight(2, 16, 32, seed=2)
    first.enter_context(float8.cached_weights([w]))
    second.enter_context(float8.cached_weights([v]))
    lookup(w), lookup(v)
    first.close()
    assert lookup(w) is None and lookup(v) is not None and len(calls) == 2
    second.close()
    assert not weight_cache._caches


def test_threads_share_what_is_kept(quantized):
    lookup, calls = quantized
    w, start, found = weight(8, 144, 160), threading.Barrier(8), []

    def look():
        start.wait()
        found.append(lookup(w))

    with float8.cached_weights([w]):
        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8 and all(kept is found[0] for kept in found) and len(calls) == 1


def test_the_cache_says_what_it_does_not_take():
    class Sharded(torch.Tensor):
        def to_local(self):
            raise AssertionError

    with pytest.raises(TypeError, match="cached_weights: weights: expected a module or tensors, got str"):
        float8.cached_weights(["w1"]).__enter__()
    with pytest.raises(TypeError, match="cached_weights: weights: expected plain tensors, whose memory stays, got Sharded"):
        float8.cached_weights([torch.zeros(2).as_subclass(Sharded)]).__enter__()
    assert not weight_cache._caches


def test_the_recipe_says_what_it_does_not_take():
    for name in ("power_2_scale", "float8_weight_gradients", "keep_weights", "float8_dispatch"):
        with pytest.raises(TypeError, match=f"Float8BlockScaling: {name}: expected a bool, got 1"):
            Float8BlockScaling(**{name: 1})


def test_each_recipe_has_an_engine():
    recipes = [Float8BlockScaling(power_2, weights, float8_dispatch=dispatch)
               for dispatch in (False, True) for weights in (False, True) for power_2 in (False, True)]
    assert [recipe.engine for recipe in recipes] == list(engines.FLOAT8_ENGINES)
    for recipe in recipes:
        for engine in engines.FLOAT8_ENGINES[recipe.engine]:
            for field in ("power_2_scale", "float8_weight_gradients", "float8_dispatch"):
                assert getattr(engine, field) == getattr(recipe, field)


@HALVES
@POWER_2
@pytest.mark.parametrize("glu", [True, False], ids=["glu", "mlp"])
def test_the_activations_gradient_is_quantized_as_it_is_stored(dtype, power_2_scale, glu):
    h, g = (torch.linspace(-3, 3, 9 * 144).view(9, 144).to(dtype) / power for power in (1, 30))
    d = hard_rows(9, 144, dtype)
    slots, weights = torch.tensor([0, 1, -1, 2, 3, -2, 4, 5, 6], dtype=torch.int32), torch.rand(7, 1)
    g, dh = g if glu else None, d.clone()
    expected_a, expected_dg, expected_dweights = launch.activate_backward(h, g, dh, slots, weights, "silu")
    a, dg, dweights, scaled_dh, scaled_dg = launch.activate_backward_scaled(h, g, d, slots, weights, "silu", power_2_scale)
    assert all(torch.equal(*pair) for pair in ((a, expected_a), (d, dh), (dweights, expected_dweights)))
    assert_same_numbers(scaled_dh, float8.quantize_rows(dh, power_2_scale))
    assert (scaled_dh.scales_PC[[2, 5]] == 1).all() and not scaled_dh.values_PK[[2, 5]].float().any()
    assert (dg is None) == (scaled_dg is None) == (not glu)
    if glu:
        assert torch.equal(dg, expected_dg)
        assert_same_numbers(scaled_dg, float8.quantize_rows(dg, power_2_scale))
        d = hard_rows(9, 144, dtype)
        in_pairs = launch.activate_backward_scaled(h, g, d, slots, weights, "silu", power_2_scale, True)
        assert_are_pairs(in_pairs, d, (expected_a, dh, dg, expected_dweights, scaled_dh, scaled_dg))


def assert_are_pairs(got, d, expected):
    """Of activate_backward_scaled with in_pairs, whose d this is: what it returns without, and dh in d."""
    a, dh, dg, dweights, scaled_dh, scaled_dg = expected
    got_a, pairs, got_dweights, *scaled = got
    assert got_a is d and pairs.shape == (d.size(0), 2 * d.size(1)) and pairs.is_contiguous()
    for one, other in ((got_a, a), (pairs[:, ::2].contiguous(), dh), (pairs[:, 1::2].contiguous(), dg)):
        assert_same_bits(one, other)
    assert (got_dweights is None) == (dweights is None)
    if dweights is not None:
        assert_same_bits(got_dweights, dweights)
    for one, other in zip(scaled, (scaled_dh, scaled_dg)):
        assert_same_bits(one.values_PK, other.values_PK)
        assert_same_bits(one.scales_PC, other.scales_PC)


# ------------------------------------------------------------------------------------------------------------ the kernels


def assert_same_numbers(got, expected, where=slice(None)):
    values, scales = (got.values_PK, got.scales_PC) if hasattr(got, "values_PK") else (got.values_ENK, got.scales)
    of_values, of_scales = (expected.values_PK, expected.scales_PC) if hasattr(got, "values_PK") else (expected.values_ENK, expected.scales)
    assert torch.equal(scales.cpu()[where].nan_to_num(-1), of_scales[where].nan_to_num(-1))
    assert torch.equal(values.cpu()[where].view(torch.uint8), of_values[where].view(torch.uint8))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("shape", [(14, 128), (257, 16), (1, 144), (700, 2048), (0, 64)])
def test_kernel_of_rows(dtype, power_2_scale, shape):
    x = hard_rows(*shape, dtype)
    exact_inputs.poison("cuda")
    assert_same_numbers(launch.quantize_rows(x.cuda(), power_2_scale), float8.quantize_rows(x, power_2_scale))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("tokens, hidden, experts, top_k, align", [(70, 144, 4, 2, 16), (33, 2048, 8, 8, 128), (300, 16, 5, 1, 1),
                                                                    (9, 128, 12, 12, 8), (1, 4096, 8, 3, 1)])
def test_kernel_of_the_gather(dtype, power_2_scale, tokens, hidden, experts, top_k, align):
    x, ids = hard_rows(tokens, hidden, dtype), exact_inputs.expert_ids(tokens, experts, top_k, device="cpu", seed=5)
    plan = RoutingPlan.from_experts(ids, experts, align=align)
    on_gpu = RoutingPlan.from_experts(ids.cuda(), experts, align=align)
    expected = launch.quantize_gathered(x, plan.slot_map, power_2_scale)
    exact_inputs.poison("cuda")
    in_use = int(plan.offsets_E1[-1])  # rows after the last expert may hold anything
    assert_same_numbers(launch.quantize_gathered(x.cuda(), on_gpu.slot_map, power_2_scale), expected, slice(in_use))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 144, 80), (1, 16, 400), (8, 768, 2048), (0, 16, 16)])
@pytest.mark.parametrize("transpose", [False, True], ids=["natural", "transposed"])
def test_kernel_of_weights(dtype, power_2_scale, shape, transpose):
    w = hard_rows(shape[0] * shape[1], shape[2], dtype).view(shape)
    expected = float8.quantize_weights(w, power_2_scale, transpose)
    exact_inputs.poison("cuda")
    assert_same_numbers(launch.quantize_weights(w.cuda(), power_2_scale, transpose), expected)


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 144, 80), (1, 16, 400), (8, 768, 2048), (0, 16, 16)])
def test_kernel_of_weights_in_both_orientations(dtype, power_2_scale, shape):
    w = hard_rows(shape[0] * shape[1], shape[2], dtype, "cuda").view(shape)
    if w.numel():
        w[0, 0, 1] = torch.nan
    expected = [launch.quantize_weights(w, power_2_scale, transpose) for transpose in (False, True)]
    exact_inputs.poison("cuda")
    for got, alone in zip(launch.quantize_weights_both_ways(w, power_2_scale), expected):
        assert_same_bits(got.values_ENK, alone.values_ENK)
        assert_same_bits(got.scales, alone.scales)


def assert_same_bits(got, expected):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("columns", [16, 144, 256, 768, 1040])
@pytest.mark.parametrize("glu", [True, False], ids=["glu", "mlp"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "no-weights"])
def test_kernel_of_the_activations_gradient(dtype, power_2_scale, columns, glu, weighted):
    """Its results are those of the two kernels that it replaces."""
    rows = 77  # the last warp has one row alone
    generator = exact_inputs.generator("cuda", 1)
    h, g, d = (torch.randn(rows, columns, generator=generator, device="cuda").to(dtype) for _ in range(3))
    d.copy_(hard_rows(rows, columns, dtype, "cuda"))
    slots = torch.randperm(rows, generator=generator, device="cuda").int()
    slots[3], slots[4], slots[20], slots[-9:-4] = -1, -2, rows + 5, -2  # without weights that one counts
    for tensor in (h, g, d):
        tensor[3] = torch.nan  # must not leak
        tensor[4] = torch.inf
    h[30, columns // 2], d[31, 0], d[32, -1] = torch.nan, torch.inf, -torch.inf
    weights = torch.rand(rows, 1, generator=generator, device="cuda")
    weights[int(slots[33])] = torch.nan
    weights, g = weights if weighted else None, g if glu else None
    for activation in plain_activation.ACTIVATIONS:
        dh_16 = d.clone()
        a, dg, dweights = launch.activate_backward(h, g, dh_16, slots, weights, activation)
        expected = [None if t is None else launch.quantize_rows(t, power_2_scale) for t in (dh_16, dg)]
        exact_inputs.poison("cuda")
        dh = d.clone()
        got_a, got_dg, got_dweights, *scaled = launch.activate_backward_scaled(h, g, dh, slots, weights, activation, power_2_scale)
        assert_same_bits(got_a, a)
        assert_same_bits(dh, dh_16)
        assert (got_dg is None) == (dg is None) == (not glu) and (got_dweights is None) == (not weighted)
        if glu:
            assert_same_bits(got_dg, dg)
        if weighted:
            assert_same_bits(got_dweights, dweights)
        for got, alone in zip(scaled, expected):
            assert (got is None) == (alone is None)
            if got is not None:
                assert_same_bits(got.values_PK, alone.values_PK)
                assert_same_bits(got.scales_PC, alone.scales_PC)
        without_slot = scaled[0].scales_PC[[3, 4, rows - 5]]
        assert (without_slot == 1).all() and not scaled[0].values_PK[[3, 4, rows - 5]].view(torch.uint8).any()
        assert torch.isnan(scaled[0].scales_PC[31, 0]) and torch.isnan(scaled[0].scales_PC[32, -1])
        if glu:
            exact_inputs.poison("cuda")
            in_place = d.clone()
            in_pairs = launch.activate_backward_scaled(h, g, in_place, slots, weights, activation, power_2_scale, True)
            assert_are_pairs(in_pairs, in_place, (a, dh_16, dg, dweights, *scaled))


@pytest.mark.gpu
def test_kernel_of_the_activations_gradient_without_rows():
    h, slots = torch.empty(0, 32, dtype=torch.bfloat16, device="cuda"), torch.empty(0, dtype=torch.int32, device="cuda")
    weights = torch.ones(3, 1, device="cuda")
    a, dg, dweights, dh, scaled_dg = launch.activate_backward_scaled(h, h, h.clone(), slots, weights, "silu", False)
    assert a.shape == dg.shape == dh.values_PK.shape == (0, 32) and scaled_dg.scales_PC.shape == (0, 1) and not dweights.any()


def activation_gradients_in_k_blocks(h, g, d, slots, weights, sizes, activation, power_2_scale):
    """What activate_backward_k_blocks computes, step by step: a, dh and dg in k-blocks, dweights, dh and dg in rows."""
    dh = d.clone()
    a, dg, dweights = launch.activate_backward(h, g, dh, slots, weights, activation)
    blocks = [None if t is None else launch.quantize_k_blocks(t, sizes, power_2_scale) for t in (a, dh, dg)]
    return *blocks, dweights, *(None if t is None else launch.quantize_rows(t, power_2_scale) for t in (dh, dg))


@HALVES
@POWER_2
@pytest.mark.parametrize("glu", [True, False], ids=["glu", "mlp"])
@pytest.mark.parametrize("device, activations, columns", [
    ("cpu", ["silu"], [48]),
    pytest.param("cuda", plain_activation.ACTIVATIONS, [16, 144, 768], marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
def test_the_activations_gradient_in_k_blocks_is_that_of_separate_steps(device, activations, columns, dtype, power_2_scale, glu):
    sizes = torch.tensor([130, 0, 1, 257, 64], device=device)
    rows, in_use = 470, 452
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    slots[[3, 4, 129, 200]], slots[in_use:] = torch.tensor([-1, -5, -1, 9999], dtype=torch.int32, device=device), -1
    weights = torch.rand(rows, 1, generator=exact_inputs.generator("cpu", 5)).to(device)
    for activation, size in itertools.product(activations, columns):
        generator = exact_inputs.generator("cpu", size)
        h, g = (torch.randn(rows, size, generator=generator).to(device, dtype) for _ in range(2))
        d = hard_rows(rows, size, dtype, device)
        g, h[3], weighted = g if glu else None, torch.nan, weights if size != 16 else None
        expected = activation_gradients_in_k_blocks(h, g, d, slots, weighted, sizes, activation, power_2_scale)
        exact_inputs.poison(device)
        got = launch.activate_backward_k_blocks(h, g, d.clone(), slots, weighted, sizes, activation, power_2_scale)
        assert [t is None for t in got] == [t is None for t in expected] == [False, False, not glu, weighted is None, False, not glu]
        for blocks, alone in zip(got[:3], expected[:3]):
            if blocks is not None:
                assert_same_k_blocks(blocks, ScaledKBlocks(alone.values_BKR.cpu(), alone.scales_BK.cpu(), alone.filled_rows_E.cpu()))
        if weighted is not None:  # sums in another order, which is worth a comparison where nothing overflows
            moderate = d.float().abs().amax(1) < 1e4
            assert torch.allclose(got[3][moderate], expected[3][moderate], rtol=1e-4, atol=1e-3)
        for of_rows, alone in zip(got[4:], expected[4:]):
            if of_rows is not None:
                assert_same_numbers(of_rows, ScaledRows(alone.values_PK.cpu(), alone.scales_PC.cpu()), slice(in_use))
        if glu:
            exact_inputs.poison(device)
            in_pairs = launch.activate_backward_k_blocks(h, g, d.clone(), slots, weighted, sizes, activation, power_2_scale, True)
            assert in_pairs[2] is None and in_pairs[1].values_BKR.is_contiguous() and in_pairs[1].scales_BK.is_contiguous()
            for first, alone in enumerate(expected[1:3]):
                half = ScaledKBlocks(in_pairs[1].values_BKR[:, first::2], in_pairs[1].scales_BK[:, first::2], in_pairs[1].filled_rows_E)
                assert_same_k_blocks(half, ScaledKBlocks(alone.values_BKR.cpu(), alone.scales_BK.cpu(), alone.filled_rows_E.cpu()))
            assert_same_k_blocks(in_pairs[0], ScaledKBlocks(got[0].values_BKR.cpu(), got[0].scales_BK.cpu(), got[0].filled_rows_E.cpu()))
            for of_rows, alone in zip(in_pairs[4:], expected[4:]):
                assert_same_numbers(of_rows, ScaledRows(alone.values_PK.cpu(), alone.scales_PC.cpu()), slice(in_use))
            if weighted is not None:
                moderate = d.float().abs().amax(1) < 1e4
                assert torch.equal(in_pairs[3][moderate], got[3][moderate])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[3] * 1100, [5, 2**31 - 1, 3, -2], [0, 2**40]], ids=["many-groups", "beyond-the-rows", "no-bound"])
def test_the_activations_gradient_in_k_blocks_of_any_sizes(sizes):
    rows = 3300
    sizes = torch.tensor(sizes, device="cuda")
    h, g, d = (torch.randn(rows, 48, generator=exact_inputs.generator("cuda", seed), device="cuda").bfloat16() for seed in range(3))
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    expected = activation_gradients_in_k_blocks(h, g, d, slots, None, sizes, "silu", False)
    exact_inputs.poison("cuda")
    got = launch.activate_backward_k_blocks(h, g, d, slots, None, sizes, "silu", False)
    for blocks, alone in zip(got[:3], expected[:3]):
        assert_same_k_blocks(blocks, ScaledKBlocks(alone.values_BKR.cpu(), alone.scales_BK.cpu(), alone.filled_rows_E.cpu()))


@pytest.mark.gpu
def test_kernel_of_the_activations_gradient_in_k_blocks_without_rows():
    h, slots = torch.empty(0, 32, dtype=torch.bfloat16, device="cuda"), torch.empty(0, dtype=torch.int32, device="cuda")
    sizes = torch.zeros(2, dtype=torch.int64, device="cuda")
    a, dh_blocks, dg_blocks, dweights, dh, dg = launch.activate_backward_k_blocks(
        h, h, h.clone(), slots, torch.ones(3, 1, device="cuda"), sizes, "silu", False)
    assert not a.filled_rows_E.any() and dh_blocks.values_BKR.shape == dg_blocks.values_BKR.shape == (2, 32, 128)
    assert dh.values_PK.shape == dg.values_PK.shape == (0, 32) and not dweights.any()


@pytest.mark.gpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_kernels_see_what_is_not_finite(number):
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    x[1, 130] = number
    scales = launch.quantize_rows(x.cuda(), False).scales_PC.cpu()
    assert torch.isnan(scales).nonzero().tolist() == [[1, 1]]
    for transpose in (False, True):
        weights = launch.quantize_weights(x.cuda()[None], False, transpose)
        assert torch.isnan(weights.scales.cpu()).nonzero().tolist() == [[0, 1, 0] if transpose else [0, 0, 1]]


def assert_same_k_blocks(got, expected):
    """The same numbers in the k-blocks that are in use; the others may hold anything."""
    assert torch.equal(got.filled_rows_E.cpu(), expected.filled_rows_E)
    assert got.values_BKR.shape == expected.values_BKR.shape and got.scales_BK.shape == expected.scales_BK.shape
    in_use = int(expected.filled_rows_E.sum()) // 128
    assert torch.equal(got.scales_BK[:in_use].cpu().nan_to_num(-1), expected.scales_BK[:in_use].nan_to_num(-1))
    assert torch.equal(got.values_BKR[:in_use].cpu().view(torch.uint8), expected.values_BKR[:in_use].view(torch.uint8))


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("columns", [16, 144, 2048])
@pytest.mark.parametrize("sizes_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_kernel_of_k_blocks(dtype, power_2_scale, sizes, columns, sizes_dtype):
    x = hard_rows(8 + sum(size for size in sizes if 0 < size < 1000), columns, dtype)
    sizes_E = torch.tensor(sizes, dtype=sizes_dtype)
    expected = float8.quantize_k_blocks(x, sizes_E, power_2_scale)
    exact_inputs.poison("cuda")
    assert_same_k_blocks(launch.quantize_k_blocks(x.cuda(), sizes_E.cuda(), power_2_scale), expected)


@pytest.mark.gpu
@HALVES
@POWER_2
@pytest.mark.parametrize("tokens, hidden, experts, top_k, align", [(70, 144, 4, 2, 16), (33, 2048, 8, 8, 128), (300, 16, 5, 1, 1),
                                                                    (500, 256, 70, 3, 8), (1, 4096, 8, 3, 1), (300, 80, 3, 3, 1)])
def test_kernel_of_gathered_k_blocks(dtype, power_2_scale, tokens, hidden, experts, top_k, align):
    x, ids = hard_rows(tokens, hidden, dtype), exact_inputs.expert_ids(tokens, experts, top_k, device="cpu", seed=5)
    plan = RoutingPlan.from_experts(ids, experts, align=align)
    on_gpu = RoutingPlan.from_experts(ids.cuda(), experts, align=align)
    expected = launch.quantize_gathered_k_blocks(x, plan.slot_map, plan.padded_counts_E, power_2_scale)
    exact_inputs.poison("cuda")
    assert_same_k_blocks(launch.quantize_gathered_k_blocks(x.cuda(), on_gpu.slot_map, on_gpu.padded_counts_E, power_2_scale), expected)


@pytest.mark.gpu
def test_a_slot_that_does_not_exist_is_a_row_of_zeros():
    x = torch.ones(4, 32, dtype=torch.bfloat16, device="cuda")
    slot_of_row = torch.tensor([0, -1, 8, 2**31 - 1, -(2**31), 7], dtype=torch.int32, device="cuda")
    slots = SlotMap(row_of_slot_TK=torch.full((4, 2), -1, dtype=torch.int32, device="cuda"), slot_of_row_P=slot_of_row)
    exact_inputs.poison("cuda")
    rows = launch.quantize_gathered_k_blocks(x, slots, torch.tensor([6], device="cuda"), False).dequantized()
    assert rows[:128].ne(0).any(1).nonzero().flatten().tolist() == [0, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_kernel_of_k_blocks_sees_what_is_not_finite(number):
    x = torch.ones(300, 32, dtype=torch.bfloat16)
    x[140, 3] = number
    sizes = torch.tensor([10, 290])
    scales = launch.quantize_k_blocks(x.cuda(), sizes.cuda(), False).scales_BK[:4].cpu()
    assert torch.isnan(scales).nonzero().tolist() == [[2, 3]]
