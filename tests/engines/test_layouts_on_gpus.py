"""Layers whose shapes take each way of the Hopper and tensor_core engines, with weights in every layout, against the separate layout's."""

import gc

import pytest
import torch

import gbmoe
from gbmoe import WeightLayout, engines
from gbmoe.testing import exact_inputs
from tests.conftest import copied_weights
from tests.test_weight_layout import laid_out

CUDA = torch.device("cuda")
LAYOUTS = [WeightLayout(), WeightLayout("gate_first", down_transposed=True), WeightLayout("up_first"), WeightLayout("interleaved"),
           WeightLayout("gate_first", up_transposed=True), WeightLayout("separate", down_transposed=True),
           WeightLayout("separate", up_transposed=True, down_transposed=True), WeightLayout("interleaved", True)]
# (tokens, experts, top-k, H, F): few rows; gathers everywhere; gathers in pairs; gathers for two gradients; tiles that are not full;
# one without gathers
SHAPES = [(40, 16, 2, 256, 128), (1500, 8, 2, 2048, 256), (3000, 8, 2, 2048, 1536), (3000, 4, 2, 2048, 768), (900, 4, 2, 1600, 328),
          (2500, 4, 2, 1536, 2816)]
ACTIVATIONS = ["silu", "gelu", gbmoe.ClampedSilu(1.702, 2, 2, 1), gbmoe.Situ(2.0, 3.0)]


def inputs(shape, layout, dtype=torch.bfloat16):
    """x [T,H], the plan, router weights [T,K] that want gradients, and w1, w2 and v1 or None in `layout`."""
    tokens, experts, top_k, hidden, ffn = shape
    exact = exact_inputs.exact_values
    x = exact(tokens, hidden, dtype=dtype, device=CUDA, seed=1).requires_grad_()
    ids = torch.randint(-1, experts - 1, (tokens, top_k), generator=torch.Generator().manual_seed(3)).to(CUDA)  # the last has no rows
    weights = torch.rand(tokens, top_k, device=CUDA, generator=torch.Generator(CUDA).manual_seed(4)).requires_grad_()
    scale = exact_inputs.fan_in_scale(hidden)
    matrices = [exact(experts, ffn, hidden, dtype=dtype, device=CUDA, seed=seed, scale=scale) for seed in (5, 6, 7)]
    parameters = [None if w is None else w.requires_grad_() for w in laid_out(layout, *matrices)]
    return x, gbmoe.RoutingPlan.from_experts(ids, experts), weights, parameters


def of_inputs(x, plan, weights, parameters, layout, grad, **options):
    """The experts' results, and the gradients of x, the router's weights and the parameters."""
    out = gbmoe.expert_mlp(x, plan, *parameters, weights_TK=weights, layout=layout, **options)
    return out.detach(), *torch.autograd.grad(out, [x, weights, *(w for w in parameters if w is not None)], grad)


def gradients(shape, layout, engine, activation="silu", dtype=torch.bfloat16, **options):
    made = inputs(shape, layout, dtype)
    grad = exact_inputs.exact_values(shape[0], shape[3], dtype=dtype, device=CUDA, seed=8)
    exact_inputs.poison(CUDA)
    return of_inputs(*made, layout, grad, activation=activation, engine=engine, **options)


def allocated(shape, layout):
    """Of a pass forward and backward whose inputs are there: the bytes of all that was asked for, and the most at a time. The allocator may
    give blocks that are up to a MiB larger, as others left them."""
    made = inputs(shape, layout)
    grad = exact_inputs.exact_values(shape[0], shape[3], device=CUDA, dtype=torch.bfloat16, seed=8)
    of_inputs(*made, layout, grad)  # what is kept for later calls
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    of_inputs(*made, layout, grad)
    after = torch.cuda.memory_stats()
    return (after["requested_bytes.all.allocated"] - before["requested_bytes.all.allocated"],
            after["requested_bytes.all.peak"] - before["requested_bytes.all.current"])


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.code)
def test_the_layout_changes_nothing(layout, shape, engine):
    reason = engines.ENGINES[engine].unavailable(CUDA)
    if reason:
        pytest.skip(reason)
    for activation in ACTIVATIONS:
        out, dx, dweights, *of_matrices = gradients(shape, WeightLayout(), engine, activation)
        expected = (out, dx, dweights, *(t for t in laid_out(layout, *of_matrices) if t is not None))
        for name, (got, wanted) in enumerate(zip(gradients(shape, layout, engine, activation), expected, strict=True)):
            assert got.shape == wanted.shape and got.is_contiguous()
            # Sums of one tile may be made in another order, where another kernel serves.
            difference = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            assert difference <= 4e-3, (str(activation), name, difference)
            assert bool(got.isfinite().all()), (str(activation), name)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:4], ids=lambda layout: layout.code)
def test_weights_of_transformers_are_read_in_place(layout, shape, monkeypatch):
    """By kernels of Hopper: no copy of any weight, forward and backward."""
    if engines.ENGINES["hopper"].unavailable(CUDA):
        pytest.skip("no Hopper")
    copied = copied_weights(monkeypatch)
    gradients(shape, layout, "hopper")
    assert not copied


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(20000, 4, 2, 1536, 512), (16000, 8, 2, 1536, 2816), (8000, 32, 4, 1536, 512), (2000, 8, 2, 2048, 4096)],
                         ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.code)
def test_a_layout_allocated_what_separate_weights_did_not(layout, shape):
    """A copy of any weight, gradient or row would be allocated."""
    if engines.ENGINES["hopper"].unavailable(CUDA):
        pytest.skip("no Hopper")
    got, peak = allocated(shape, layout)
    expected, expected_peak = allocated(shape, WeightLayout())
    # The smallest matrix of all experts has 6 MiB; descriptors and tables have a few KiB. Rows may be gathered a second time.
    tokens, _, top_k, hidden, _ = shape
    assert got <= expected + (1 << 19) + (2 * tokens * top_k * hidden if layout.is_combined else 0)
    assert peak <= expected_peak + (1 << 19)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES[2:5], ids=str)
@pytest.mark.parametrize("recipe", [gbmoe.Float8BlockScaling(), gbmoe.Float8BlockScaling(keep_weights=False, power_2_scale=True),
                                    gbmoe.Float8BlockScaling(float8_weight_gradients=True)], ids=["", "twice", "weights"])
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.code)
def test_float8_copied_weights_of_other_layouts(layout, recipe, shape, monkeypatch):
    """What is computed of rows has the same bits, as gradients of weights in e4m3 do. In 16 bits these may be summed in another order."""
    if engines.FLOAT8_ENGINES[recipe.engine][0].unavailable(CUDA):
        pytest.skip("no float8")
    if shape[4] % 16:
        shape = (*shape[:4], 320)
    *of_rows, one, two, three = gradients(shape, WeightLayout(), "auto", fp8_recipe=recipe)
    copied = copied_weights(monkeypatch)
    got = gradients(shape, layout, "auto", fp8_recipe=recipe)
    assert not copied
    assert all(map(torch.equal, got[:3], of_rows))
    for gradient, expected in zip(got[3:], (w for w in laid_out(layout, one, two, three) if w is not None), strict=True):
        assert gradient.is_contiguous() and bool(gradient.isfinite().all())
        assert float((gradient.float() - expected.float()).norm() / expected.float().norm()) <= 4e-3
        assert torch.equal(gradient, expected) or not recipe.float8_weight_gradients


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [gbmoe.Float8BlockScaling(), gbmoe.Float8BlockScaling(float8_weight_gradients=True)],
                         ids=["", "weights"])
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[4], LAYOUTS[7]], ids=lambda layout: layout.code)
def test_float8_in_another_layout_took_more_memory(layout, recipe):
    """Of many rows, where backward needs most before it makes gradients of weights."""
    if engines.FLOAT8_ENGINES[recipe.engine][0].unavailable(CUDA):
        pytest.skip("no float8")

    def peak(layout):
        gradients((50000, 4, 2, 512, 512), layout, "auto", fp8_recipe=recipe)  # what is kept for later calls
        gc.collect()  # or what is freed meanwhile is missing from the peak
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        gradients((50000, 4, 2, 512, 512), layout, "auto", fp8_recipe=recipe)
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    # The test's own weights of another layout are copies, of 6 MiB; one tensor [P,F] has 70.
    assert peak(layout) <= peak(WeightLayout()) + (16 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS[1:6], ids=lambda layout: layout.code)
@pytest.mark.parametrize("options", [dict(batch_invariant=True), dict(keep_gathered_rows=True)], ids=str)
def test_options_take_every_layout(layout, options):
    if engines.ENGINES["hopper"].unavailable(CUDA):
        pytest.skip("no Hopper")
    for activation in ("silu", ACTIVATIONS[2]):
        out, dx, dweights, *of_matrices = gradients(SHAPES[2], WeightLayout(), "auto", activation, **options)
        expected = (out, dx, dweights, *(t for t in laid_out(layout, *of_matrices) if t is not None))
        for name, (got, wanted) in enumerate(zip(gradients(SHAPES[2], layout, "auto", activation, **options), expected, strict=True)):
            difference = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            assert difference <= 4e-3, (str(activation), name, difference)
