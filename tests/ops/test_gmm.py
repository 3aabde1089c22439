"""gmm: every engine, layout, dtype and group shape against float64, forward and both gradients."""

import os
import subprocess
import sys

import pytest
import torch

import gbmoe
from gbmoe import engines
from gbmoe.engines.base import device_sizes
from gbmoe.ops.batch_sizes import _sizes_fill
from gbmoe.problem import Problem
from gbmoe.testing import accuracy, exact_inputs, moe_shapes
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id
from tests.forked_python import python

LAYOUTS = {"a@b": (False, False), "a@b.T": (False, True), "a.T@b": (True, False)}


def operands(sizes, layout, dtype, device, inner=32, columns=24):
    trans_a, trans_b = LAYOUTS[layout]
    rows = sum(sizes)
    shape = (rows, columns) if trans_a else (len(sizes), columns, inner) if trans_b else (len(sizes), inner, columns)
    a = exact_inputs.exact_values(rows, inner, dtype=dtype, device=device, seed=1)
    b = exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=2)
    return a, b, torch.tensor(sizes)


def per_group(a, b, sizes, trans_a, trans_b):
    """The obvious PyTorch: one product a group, whatever the dtype."""
    parts = a.split(sizes)
    if trans_a:
        return torch.stack([x.t() @ y for x, y in zip(parts, b.split(sizes))])
    return torch.cat([x @ (w.t() if trans_b else w) for x, w in zip(parts, b)])


def skip_if_refused(engine, a, b, sizes, trans_a, trans_b):
    """Skip where the engine says that it does not take these operands, in its words."""
    reason = engines.ENGINES[engine].refuses(Problem.of(a, b, torch.tensor(sizes), trans_a, trans_b))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("sizes", moe_shapes.GROUP_SIZES.values(), ids=moe_shapes.GROUP_SIZES)
def test_forward_and_gradients(engine_on, layout, dtype, sizes):
    engine, device = engine_on
    trans_a, trans_b = LAYOUTS[layout]
    a, b, batch_sizes = operands(sizes, layout, dtype, device)
    skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
    a.requires_grad_()
    b.requires_grad_()
    out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    grad = exact_inputs.exact_values(*out.shape, dtype=dtype, device=device, seed=3)
    exact_inputs.poison(device)
    results = (out, *torch.autograd.grad(out, (a, b), grad))

    def expected(a, b, grad):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        out = per_group(a, b, sizes, trans_a, trans_b)
        return (out, *torch.autograd.grad(out, (a, b), grad))

    reference = expected(a.double(), b.double(), grad.double())
    # On a CPU a half-precision product may itself be kept in half precision; the bar is the float32 one, rounded once.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    baseline = [t.to(dtype) for t in expected(a.to(wide), b.to(wide), grad.to(wide))]
    for what, result, base, ref in zip(("out", "grad_a", "grad_b"), results, baseline, reference):
        assert_as_accurate_as(result.detach(), base.detach(), ref.detach(), what)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_nyu_prototype_grouped_kernel_wrong_for_unequal_sizes(engine_on, dtype):
    """The prototype placed group i at i * m * k, which holds only where every group has the same rows.

    m-grouped are the forward product and the input's gradient, k-grouped is that of the weight. The same operands in equal groups
    must be right too, and the two splits must differ, or the test would prove nothing.
    """
    engine, device = engine_on
    for layout, (trans_a, trans_b) in LAYOUTS.items():
        results = {}
        for sizes in ((64, 64, 64, 64), (5, 120, 1, 130)):
            a, b, batch_sizes = operands(sizes, layout, dtype, device, inner=64, columns=40)
            skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
            out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
            reference = per_group(a.double(), b.double(), list(sizes), trans_a, trans_b)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            baseline = per_group(a.to(wide), b.to(wide), list(sizes), trans_a, trans_b).to(dtype)
            assert_as_accurate_as(out, baseline, reference, f"{layout} {sizes}")
            results[sizes] = out
        assert not torch.equal(*results.values())


def test_gradient_of_an_empty_groups_weight_is_exactly_zero(engine_on):
    """pytorch #172439, #193633: on memory full of NaN the gradient of a group without rows was left as it was."""
    engine, device = engine_on
    sizes = (0, 48, 0, 0, 80, 0)
    a, b, batch_sizes = operands(sizes, "a@b", torch.bfloat16, device)
    skip_if_refused(engine, a, b, sizes, False, False)
    b.requires_grad_()
    for _ in range(3):
        out = gbmoe.gmm(a, b, batch_sizes, engine=engine)
        grad_out = torch.ones_like(out)
        exact_inputs.poison(device)
        grad, = torch.autograd.grad(out, b, grad_out)
        for e, size in enumerate(sizes):
            assert bool((grad[e] == 0).all()) == (size == 0), f"expert {e} of {size} rows"


@pytest.mark.parametrize("sizes_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes_device", ["cpu", "same"])
def test_batch_sizes_of_any_kind(device, sizes_dtype, sizes_device):
    sizes = moe_shapes.GROUP_SIZES["uneven"]
    a, b, batch_sizes = operands(sizes, "a@b", torch.float32, device)
    batch_sizes = batch_sizes.to(device if sizes_device == "same" else "cpu", sizes_dtype)
    expected = gbmoe.gmm(a, b, torch.tensor(sizes))
    assert torch.equal(gbmoe.gmm(a, b, batch_sizes), expected)
    assert torch.equal(gbmoe.gmm(a, b, batch_sizes.to(device), engine="reference"),
                       gbmoe.gmm(a, b, torch.tensor(sizes), engine="reference"))


@pytest.mark.parametrize("sizes_device", ["host", "with a"])
def test_reducing_batch_sizes_before_backward_changed_the_gradients(device, sizes_device):
    """A collective writes to the sizes without autograd's knowledge; backward has a copy of its own."""
    a, b = (exact_inputs.exact_values(*shape, dtype=torch.float32, device=device, seed=1).requires_grad_()
            for shape in ((12, 8), (3, 8, 8)))
    sizes = torch.tensor([5, 0, 7], device="cpu" if sizes_device == "host" else device)
    expected = torch.autograd.grad(gbmoe.gmm(a, b, sizes).square().sum(), (a, b))
    out = gbmoe.gmm(a, b, sizes)
    sizes.data.mul_(2)
    for got, want in zip(torch.autograd.grad(out.square().sum(), (a, b)), expected, strict=True):
        assert torch.equal(got, want)


def test_strided_batch_sizes(engine_on):
    engine, device = engine_on
    a, b, _ = operands((3, 5), "a.T@b", torch.bfloat16, device)
    sizes = torch.tensor([[3, 0], [5, 0]], device=device)[:, 0]
    expected = gbmoe.gmm(a, b, torch.tensor([3, 5]), trans_a=True, engine=engine)
    assert torch.equal(gbmoe.gmm(a, b, sizes, trans_a=True, engine=engine), expected)


def test_operands_in_the_middle_of_a_tensor(engine_on):
    engine, device = engine_on
    a, b, sizes = operands((3, 5), "a@b", torch.bfloat16, device)
    moved = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (a, b)]
    assert torch.equal(gbmoe.gmm(*moved, sizes, engine=engine), gbmoe.gmm(a, b, sizes, engine=engine))


def test_sizes_are_checked_in_a_compiled_graph():
    compiled = torch.compile(lambda a, b, sizes: gbmoe.gmm(a, b, sizes), backend="eager", fullgraph=True)
    a, b = torch.zeros(5, 3), torch.zeros(2, 3, 4)
    assert compiled(a, b, torch.tensor([2, 3])).shape == (5, 4)
    with pytest.raises(ValueError, match="expected sum\\(batch_sizes\\) == a.size\\(0\\) == 5, got 3"):
        compiled(a, b, torch.tensor([2, 1]))


def test_non_contiguous_inputs(engine_on):
    engine, device = engine_on
    sizes = moe_shapes.GROUP_SIZES["uneven"]
    for layout, (trans_a, trans_b) in LAYOUTS.items():
        a, b, batch_sizes = operands(sizes, layout, torch.bfloat16, device)
        skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
        expected = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
        strided_a = a.t().contiguous().t()
        strided_b = b.transpose(-1, -2).contiguous().transpose(-1, -2)
        padded = torch.full((*b.shape[:-1], b.size(-1) + 3), float("nan"), dtype=b.dtype, device=device)
        padded[..., : b.size(-1)] = b
        reference = per_group(a.double(), b.double(), list(sizes), trans_a, trans_b)
        for b_view in (strided_b, padded[..., : b.size(-1)]):
            got = gbmoe.gmm(strided_a, b_view, batch_sizes, trans_a, trans_b, engine=engine)
            assert_as_accurate_as(got, expected, reference, layout)
    # An expanded gradient has strides of 0.
    a, b, batch_sizes = operands(sizes, "a@b", torch.float32, device)
    a.requires_grad_()
    gbmoe.gmm(a, b, batch_sizes).sum().backward()
    torch.testing.assert_close(a.grad, per_group(torch.ones(len(a), b.size(2), device=device), b, list(sizes), False, True))


@pytest.mark.parametrize("inner, columns", [(0, 8), (8, 0), (0, 0), (1, 1), (3, 5)])
def test_degenerate_and_odd_shapes(device, inner, columns):
    sizes = (2, 0, 3)
    for engine in engines.ENGINES:
        for layout, (trans_a, trans_b) in LAYOUTS.items():
            a, b, batch_sizes = operands(sizes, layout, torch.float32, device, inner, columns)
            chosen = engines.ENGINES[engine]
            if chosen.unavailable(device) or chosen.refuses(Problem.of(a, b, batch_sizes, trans_a, trans_b)):
                continue
            exact_inputs.poison(device)
            out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
            torch.testing.assert_close(out, per_group(a, b, list(sizes), trans_a, trans_b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inner, columns", [(72, 264), (136, 768), (1920, 40), (72, 3840)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_tiles_in_every_number(engine_on, layout, inner, columns, dtype):
    """Kernels that work in pairs of tiles meet one tile, two, few and an odd number, and many and an odd number, either way."""
    engine, device = engine_on
    trans_a, trans_b = LAYOUTS[layout]
    sizes = (130, 0, 65, 1, 64)
    a, b, batch_sizes = operands(sizes, layout, dtype, device, inner, columns)
    skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
    exact_inputs.poison(device)
    out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    baseline = per_group(a.float(), b.float(), sizes, trans_a, trans_b).to(dtype)
    assert_as_accurate_as(out, baseline, per_group(a.double(), b.double(), sizes, trans_a, trans_b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [40, *(pytest.param(columns, marks=pytest.mark.gpu) for columns in (264, 520))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_few_tiles_of_long_sums(engine_on, layout, columns, dtype):
    """Split-K kernels, which divide long sums among multiprocessors, add the partial sums in a fixed order."""
    engine, device = engine_on
    trans_a, trans_b = LAYOUTS[layout]
    sizes, inner = ((12000, 3, 0, 2500), 136) if trans_a else ((130, 0, 65, 1, 64), 6152)
    a, b, batch_sizes = operands(sizes, layout, dtype, device, inner, columns)
    a *= 2.0**-4  # sums of 12,000 terms stay within what float16 holds
    skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
    exact_inputs.poison(device)
    out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    baseline = per_group(a.float(), b.float(), sizes, trans_a, trans_b).to(dtype)
    assert_as_accurate_as(out, baseline, per_group(a.double(), b.double(), sizes, trans_a, trans_b))
    for _ in range(20 if device.type == "cuda" else 1):
        exact_inputs.poison(device)
        assert torch.equal(gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine), out)


@pytest.mark.parametrize("layout", ["a@b", "a@b.T"])
def test_few_tiles_of_long_sums_in_many_groups(engine_on, layout):
    engine, device = engine_on
    trans_a, trans_b = LAYOUTS[layout]
    sizes = [e * 7 % 5 * 30 for e in range(70)]
    a, b, batch_sizes = operands(sizes, layout, torch.bfloat16, device, inner=2056, columns=72)
    skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
    exact_inputs.poison(device)
    out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    baseline = per_group(a.float(), b.float(), sizes, trans_a, trans_b).to(torch.bfloat16)
    assert_as_accurate_as(out, baseline, per_group(a.double(), b.double(), sizes, trans_a, trans_b))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_thousands_of_groups(engine_on, layout):
    engine, device = engine_on
    trans_a, trans_b = LAYOUTS[layout]
    sizes = [e * 7 % 5 for e in range(1100)]
    a, b, batch_sizes = operands(sizes, layout, torch.bfloat16, device)
    skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
    exact_inputs.poison(device)
    out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    baseline = per_group(a.float(), b.float(), sizes, trans_a, trans_b).to(torch.bfloat16)
    assert_as_accurate_as(out, baseline, per_group(a.double(), b.double(), sizes, trans_a, trans_b))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_more_groups_than_a_grid_has_along_its_second_dimension(engine, layout):
    """70,000 groups of one row, or of none in every third."""
    exact_inputs.poison("cuda")
    reason = engines.ENGINES[engine].unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    trans_a, trans_b = LAYOUTS[layout]
    sizes = [int(e % 3 > 0) for e in range(70000)]
    a, b, batch_sizes = operands(sizes, layout, torch.bfloat16, "cuda", inner=16, columns=8)
    skip_if_refused(engine, a, b, sizes, trans_a, trans_b)
    exact_inputs.poison("cuda")
    out = gbmoe.gmm(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    group_of_row = batch_sizes.nonzero().flatten().cuda()
    if trans_a:
        expected = torch.zeros(out.shape, dtype=torch.float64, device="cuda")
        expected[group_of_row] = a.double().unsqueeze(2) * b.double().unsqueeze(1)
    else:
        weights = b.double()[group_of_row]
        expected = (a.double().unsqueeze(1) @ (weights.transpose(1, 2) if trans_b else weights)).squeeze(1)
    assert_as_accurate_as(out, expected.to(torch.bfloat16), expected)


def test_rows_behind_the_last_group_are_not_touched(device):
    a, b, _ = operands((6, 4), "a@b", torch.float32, device)
    for name, engine in engines.ENGINES.items():
        if engine.unavailable(device) or engine.refuses(Problem.of(a, b, torch.tensor([3, 4]), False, False)):
            continue
        out = torch.full((10, b.size(2)), 7.0, device=device)
        engines.product(a, b, torch.tensor([3, 4]), engine=name, out=out)
        assert bool((out[7:] == 7).all()) and not bool((out[:7] == 7).any())


def test_tf32_is_off_unless_torch_allows_it(device):
    """Float32 products keep float32's accuracy; with allow_tf32 a GPU may, and cuBLAS does, round the operands."""
    a = torch.randn(256, 512, device=device)
    b = torch.randn(2, 512, 256, device=device)
    reference = per_group(a.double(), b.double(), [100, 156], False, False)
    errors = {}
    for allowed in (False, True):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            for engine in ("cublas_loop", "cublas_grouped") if device.type == "cuda" else ("reference",):
                if engines.ENGINES[engine].unavailable(device):
                    pytest.skip(engines.ENGINES[engine].unavailable(device))
                out = gbmoe.gmm(a, b, torch.tensor([100, 156]), engine=engine)
                errors[engine, allowed] = accuracy.relative_error(out, reference)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    assert all(error < 2e-6 for (_, allowed), error in errors.items() if not allowed), errors
    if device.type == "cuda":
        assert all(1e-5 < error < 2e-3 for (_, allowed), error in errors.items() if allowed), errors


def test_autocast_casts_the_operands(device):
    a = torch.randn(8, 16, device=device, requires_grad=True)
    b = torch.randn(2, 16, 8, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = gbmoe.gmm(a, b.half(), torch.tensor([3, 5]))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert gbmoe.gmm(a.double(), b.double(), torch.tensor([3, 5])).dtype == torch.float64


def test_opcheck(device):
    a, b, batch_sizes = operands((3, 0, 5), "a@b", torch.float32, device)
    torch.library.opcheck(torch.ops.gbmoe.gmm.default,
                          (a.requires_grad_(), b.requires_grad_(), batch_sizes, False, False, "reference", True))


@pytest.mark.parametrize("engine", ["auto", pytest.param("tensor_core", marks=pytest.mark.gpu)])
def test_two_runs_and_two_processes_give_the_same_bits(device, engine):
    reason = engines.ENGINES[engine].unavailable(device) if engine != "auto" else None
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    program = f"""
import hashlib, torch, gbmoe
from gbmoe.testing import exact_inputs
a = exact_inputs.exact_values(300, 128, dtype=torch.bfloat16, device="{device.type}", seed=1)
b = exact_inputs.exact_values(4, 128, 96, dtype=torch.bfloat16, device="{device.type}", seed=2).requires_grad_()
out = gbmoe.gmm(a, b, torch.tensor([7, 200, 0, 93]), engine="{engine}")
grad, = torch.autograd.grad(out, b, out.detach())
print(hashlib.sha256(torch.cat([out.flatten(), grad.flatten()]).detach().cpu().view(torch.int16).numpy().tobytes()).hexdigest())
"""
    runs = [subprocess.run([python(device=device), "-c", program], capture_output=True, text=True, check=True, env={**os.environ})
            for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""


GOOD = dict(a=torch.zeros(4, 3), b=torch.zeros(2, 3, 5), batch_sizes=torch.tensor([1, 3]))


@pytest.mark.parametrize("change, words", [
    (dict(a=[1]), "a: expected a torch.Tensor, got list"),
    (dict(a=torch.zeros(4, 3, 1)), "a: expected 2 dimensions, got \\[4, 3, 1\\]"),
    (dict(a=torch.zeros(4, 3, dtype=torch.int32)), "a: expected dtype bfloat16, float16, float32, float64, got torch.int32"),
    (dict(b=torch.zeros(3, 5)), "b: expected 3 dimensions, got \\[3, 5\\]"),
    (dict(b=torch.zeros(2, 3, 5, dtype=torch.float64)), "b: expected the dtype of a, torch.float32, got torch.float64"),
    (dict(b=torch.zeros(2, 4, 5)), "b: expected b.size\\(1\\) == a.size\\(1\\) == 3, got 4"),
    (dict(b=torch.zeros(2, 3, 5), trans_b=True), "b: expected b.size\\(2\\) == a.size\\(1\\) == 3, got 5"),
    (dict(b=torch.zeros(2, 3, 5, device="meta")), "b: expected device cpu, got meta"),
    (dict(batch_sizes=[1, 3]), "batch_sizes: expected a torch.Tensor, got list"),
    (dict(batch_sizes=torch.tensor([1.0, 3.0])), "batch_sizes: expected dtype int32, int64, got torch.float32"),
    (dict(batch_sizes=torch.tensor([[1, 3]])), "batch_sizes: expected 1 dimensions, got \\[1, 2\\]"),
    (dict(batch_sizes=torch.tensor([4])), "batch_sizes: expected b.size\\(0\\) == 2 entries, got 1"),
    (dict(batch_sizes=torch.tensor([1, 2])), "batch_sizes: expected sum\\(batch_sizes\\) == a.size\\(0\\) == 4, got 3"),
    (dict(batch_sizes=torch.tensor([-1, 5])), "batch_sizes: expected no negative entry, got -1"),
    # The sum in int64 is 4.
    (dict(b=torch.zeros(6, 3, 5), batch_sizes=torch.tensor([2**62] * 4 + [1, 3])),
     "batch_sizes: expected sum\\(batch_sizes\\) == a.size\\(0\\) == 4, got 18446744073709551620"),
    (dict(trans_a=True, trans_b=True, b=torch.zeros(4, 5)), "trans_a, trans_b: expected at most one of them, got both"),
    (dict(trans_a=True, b=torch.zeros(5, 5)), "b: expected b.size\\(0\\) == a.size\\(0\\) == 4, got 5"),
    (dict(out_dtype=torch.float64), "out_dtype: expected None or torch.float32, as the operands have no scales, got torch.float64"),
    (dict(engine="cutlass"), "engine: expected one of auto, hopper, hopper_batch_invariant, tensor_core, tensor_core_batch_invariant,"
                             " cublas_loop, cublas_grouped, torch, reference, float8_block, float8_block_power_2, float8_block_weights,"
                             " float8_block_power_2_weights, float8_block_dispatch, float8_block_power_2_dispatch,"
                             " float8_block_weights_dispatch, float8_block_power_2_weights_dispatch, got 'cutlass'"),
    (dict(engine="cublas_loop"), "engine 'cublas_loop' cannot serve this product: runs on CUDA devices only, not on cpu"),
])
def test_bad_arguments(change, words):
    with pytest.raises((TypeError, ValueError), match="gmm: " + words):
        gbmoe.gmm(**{**GOOD, **change})


@pytest.mark.gpu
def test_wrong_sizes_on_the_device():
    a, b = torch.zeros(4, 8, device="cuda"), torch.zeros(2, 8, 8, device="cuda")
    with pytest.raises(ValueError, match="expected sum\\(batch_sizes\\) == a.size\\(0\\) == 4, got 3"):
        gbmoe.gmm(a, b, torch.tensor([1, 2], device="cuda"), engine="reference")


@pytest.mark.parametrize("sizes, dtype", [
    ([1, 2], torch.int64), ([1, 2], torch.int32), ([3, 0, 0], torch.int64), ([0, 0], torch.int64), ([], torch.int64),
    ([4], torch.int32), ([2**62] * 4 + [1, 2], torch.int64), ([2**63 - 1, 2**63 - 1, 2, 3], torch.int64), ([-1, 4], torch.int64),
    ([-1, 4], torch.int32), ([-3, 2, 4], torch.int64), ([-(2**62)] * 4 + [3], torch.int64),
    ([2**31 - 1, 2**31 - 1, 5], torch.int32), ([2**53, 3], torch.int64),
], ids=str)
def test_a_sum_that_wraps_filled_the_rows_on_the_device(device, sizes, dtype):
    """The check of sizes that stay there, where the engines read and write whatever rows they name."""
    for rows in (0, 3, 4):
        expected = min(sizes, default=0) >= 0 and sum(sizes) == rows
        assert bool(_sizes_fill(torch.tensor(sizes, dtype=dtype, device=device), rows)) == expected, rows
    every_other = torch.tensor([[size, 7] for size in sizes], dtype=dtype, device=device).view(-1, 2)[:, 0]
    assert bool(_sizes_fill(every_other, 3)) == (min(sizes, default=0) >= 0 and sum(sizes) == 3)


@pytest.mark.gpu
def test_sizes_that_wrap_are_a_device_side_assertion():
    """It runs in a process of its own, because the assertion destroys the process's CUDA context."""
    program = """
import torch, gbmoe
a, b = torch.zeros(3, 8, device="cuda", dtype=torch.bfloat16), torch.zeros(6, 8, 8, device="cuda", dtype=torch.bfloat16)
gbmoe.gmm(a, b, torch.tensor([2**62] * 4 + [1, 2], device="cuda"))
torch.cuda.synchronize()
"""
    if engines.select("auto", Problem(torch.device("cuda"), torch.bfloat16, 3, 6, 8, 8, False)).needs_host_sizes:
        pytest.skip("no engine here that takes sizes on the device")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert run.returncode != 0 and "sum(batch_sizes) == a.size(0) == 3" in run.stderr


def test_batch_sizes_rewritten_before_backward(device):
    """They are rewritten behind autograd's back, as a collective or the reuse of a DataLoader's buffer does."""
    a, b, batch_sizes = operands((3, 5), "a@b", torch.float32, device)
    a.requires_grad_()
    b.requires_grad_()
    grad = torch.ones(8, b.size(2), device=device)
    expected = torch.autograd.grad(gbmoe.gmm(a, b, torch.tensor([3, 5])), (a, b), grad)
    out = gbmoe.gmm(a, b, batch_sizes)
    batch_sizes.numpy()[:] = (8, 0)
    for got, right in zip(torch.autograd.grad(out, (a, b), grad), expected, strict=True):
        assert torch.equal(got, right)


def test_sizes_on_their_way_to_the_device_are_nobody_elses():
    sizes = torch.tensor([3, 5])
    on_device = device_sizes(sizes, torch.device("cpu"))
    sizes.fill_(0)
    assert on_device.tolist() == [3, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hopper", "tensor_core", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pinned_batch_sizes_rewritten_behind_the_call(engine, layout):
    """The copy waits after a kernel that lasts longer than the rewriting takes."""
    reason = engines.ENGINES[engine].unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(f"{engine}: {reason}")
    trans_a, trans_b = LAYOUTS[layout]
    a, b, sizes = operands((24, 40), layout, torch.bfloat16, "cuda")
    expected = gbmoe.gmm(a, b, sizes, trans_a, trans_b, engine=engine)
    pinned = sizes.pin_memory()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    out = gbmoe.gmm(a, b, pinned, trans_a, trans_b, engine=engine)
    pinned.copy_(torch.tensor([64, 0]))
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """Offsets into a pass 2^31: with int32 offsets the last group would read and write somewhere else."""
    rows, inner = (1 << 31) // 4096 + 4096, 4096
    a = torch.zeros(rows, inner, dtype=torch.bfloat16, device="cuda")
    a[-64:] = exact_inputs.exact_values(64, inner, dtype=torch.bfloat16, device="cuda", seed=1)
    b = exact_inputs.exact_values(3, inner, 64, dtype=torch.bfloat16, device="cuda", seed=2)
    sizes = torch.tensor([rows - 100, 36, 64])
    for engine in engines.ENGINES:
        problem = Problem.of(a, b, sizes, False, False)
        if engines.ENGINES[engine].unavailable(a.device) or engines.ENGINES[engine].refuses(problem):
            continue
        out = gbmoe.gmm(a, b, sizes, engine=engine)
        reference = a[-64:].double() @ b[2].double()
        assert_as_accurate_as(out[-64:], a[-64:] @ b[2], reference, engine)
        assert bool((out[:-64] == 0).all())
        weight_grad = gbmoe.gmm(a, out, sizes, trans_a=True, engine=engine)
        assert bool((weight_grad[:2] == 0).all())
        assert_as_accurate_as(weight_grad[2], a[-64:].t() @ out[-64:], a[-64:].double().t() @ out[-64:].double(), engine)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("inner, columns", [(128, 320), (1920, 40), (72, 3840)])
@pytest.mark.parametrize("name", ["hopper", "tensor_core"])
def test_weight_gradients_add_to_a_main_gradient_in_float32(name, dtype, inner, columns):
    engine, device = engines.ENGINES[name], torch.device("cuda")
    reason = engine.unavailable(device)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    sizes = [0, 300, 1, 399, 5000]
    a, b = (exact_inputs.exact_values(sum(sizes), width, dtype=dtype, device=device, seed=seed)
            for seed, width in enumerate((inner, columns)))
    main = torch.ones(len(sizes), inner, columns, device=device)
    for _ in range(2):
        engine.gmm(a, b, torch.tensor(sizes, device=device), True, False, out=main, accumulate=True)
    products = [left.double().t() @ right.double() for left, right in zip(a.split(sizes), b.split(sizes))]
    torch.testing.assert_close(main.double(), 1 + 2 * torch.stack(products), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes_on", ["meta", "cpu"])
@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False)])
def test_meta_device(sizes_on, trans_a, trans_b):
    a = torch.randn(6, 8, device="meta", requires_grad=True)
    b = torch.randn(*((6, 4) if trans_a else (2, 4, 8) if trans_b else (2, 8, 4)), device="meta", requires_grad=True)
    out = gbmoe.gmm(a, b, torch.tensor([2, 4]).to(sizes_on), trans_a, trans_b)
    assert out.is_meta and tuple(out.shape) == ((2, 8, 4) if trans_a else (6, 4))
    out.sum().backward()
    assert a.grad.is_meta and b.grad.is_meta and a.grad.shape == a.shape and b.grad.shape == b.shape
