"""The formulas of csrc/activation_formulas.cuh, compiled for the CPU, those of plain_activation, and the kernels, against torch's own
activations from one end of each dtype's range to the other."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

import gbmoe
from gbmoe import extension, launch
from gbmoe._accumulate_dtype import accumulate_dtype
from gbmoe.plain import plain_activation
from gbmoe.testing import exact_inputs, oracle
from tests.conftest import FLOATS, dtype_id

HERE = Path(__file__).parent
STAND_INS = HERE.parent / "engines" / "emulated_gpu"


class Clamp(torch.autograd.Function):
    """torch.clamp; at the limits the slope is 1, which torch's is up to torch 2.13 alone."""
    @staticmethod
    def forward(ctx, x, low, high):
        ctx.inside = (x >= low) & (x <= high)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        return torch.where(ctx.inside, grad, 0), None, None


def quick_silu(y):
    return y * torch.sigmoid(1.702 * y)


# By code: what torch makes of x, and of the gate.
CONSTANTS = {
    "clamped_silu 1.702 7.0 6.0 1.0": (lambda x: quick_silu(Clamp.apply(x, -math.inf, 7)), lambda g: Clamp.apply(g, -6, 6) + 1),
    "situ 4.0 inf 8.0 0.0": (lambda x: 4 * torch.tanh(x / 4) * torch.sigmoid(x), lambda g: 8 * torch.tanh(g / 8)),
}
FUNCTIONS = {**oracle.ACTIVATIONS, **{code: value for code, (value, _) in CONSTANTS.items()}}
# How the kernels compute them, and in which dtype: the last one has no slopes.
WAYS = {"in_double": torch.float64, "in_float": torch.float32, "in_float_fast": torch.float32, "in_float_together": torch.float32,
        "in_epilogue": torch.float32}


@pytest.fixture(scope="module")
def formulas(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("compiling for the CPU needs g++")
    folder = tmp_path_factory.mktemp("formulas")
    shutil.copy(extension.source_folder() / "activation_formulas.cuh", folder)
    for name in ("approximations.cuh", "emulated_gpu.h"):
        shutil.copy(STAND_INS / name, folder)
    library = folder / "formulas.so"
    subprocess.run(["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-I", str(folder),
                    str(HERE / "activation_formulas.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def points(dtype):
    """Numbers of both signs and all magnitudes of a dtype, densely where activations bend, and the limits of clamps."""
    info = torch.finfo(dtype)
    magnitudes = torch.cat([torch.from_numpy(numpy.geomspace(info.tiny, info.max / 2, 1500)), torch.linspace(0.01, 25, 800).double(),
                            torch.tensor([0.0, 6.0, 7.0, info.max], dtype=torch.float64)])
    return torch.cat([magnitudes, -magnitudes]).to(dtype)


NOT_FINITE = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=torch.float64)


def torchs(activation, x):
    """torch's value and slope, float64."""
    x = x.double().requires_grad_()
    value = FUNCTIONS[activation](x)
    slope, = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def limit_slope(activation, x, slope):
    """The slope where torch's own overflows in float64."""
    return torch.where(slope.isnan(), (x > 0).double(), slope) if activation == "gelu_tanh" else slope


def computed(formulas, way, activation, x):
    x = x.to(WAYS[way]).contiguous()
    results = torch.zeros(2, x.numel(), dtype=x.dtype)
    kind, *constants = plain_activation.kernel_arguments(activation)
    getattr(formulas, way)(int(kind), (ctypes.c_double * len(constants))(*constants), len(constants), *(
        ctypes.c_void_p(t.data_ptr()) if isinstance(t, torch.Tensor) else t for t in (x, x.numel(), results[0], results[1])))
    return results[0], None if way == "in_epilogue" else results[1]


def assert_near(got, exact, dtype, what):
    """Within the range of the dtype, to its last place and some units in the last place of what it is computed in, at least those of 1."""
    in_range = exact.abs() < torch.finfo(dtype).max / 4
    assert bool(got[in_range].isfinite().all()), f"{what}: not finite"
    allowed = 64 * torch.finfo(accumulate_dtype(dtype)).eps * (1 + exact.abs()) + torch.finfo(dtype).eps * exact.abs()
    error = (got.double() - exact).abs()
    assert bool((error <= allowed)[in_range].all()), f"{what}: error {float(error[in_range].max()):.2e}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gelu_tanh_of_large_numbers_had_no_slope(formulas, way, activation):
    """x^3 or x^2 overflowed, and infinity times 0 is NaN: in float32 from 1e13 on."""
    x = points(WAYS[way])
    exact_value, exact_slope = torchs(activation, x)
    value, slope = computed(formulas, way, activation, x)
    assert_near(value, exact_value, WAYS[way], "value")
    if slope is not None:
        assert_near(slope, limit_slope(activation, x, exact_slope), WAYS[way], "slope")


@pytest.mark.parametrize("way", ["in_float", "plain_activation"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", *CONSTANTS])
def test_slopes_near_1_lost_bits(formulas, way, activation):
    """1 - sigmoid(x) was a subtraction, whose rounding is multiplied by x: 1e-6 in gelu_tanh's slope at 4.9."""
    x = torch.linspace(-12, 12, 20_001)
    slope = plain_activation.functions(activation)[0](x, True) if way == "plain_activation" else computed(formulas, way, activation, x)[1]
    assert float((slope.double() - torchs(activation, x)[1]).abs().max()) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_relu_of_nan_had_a_slope_of_0(formulas, way, activation):
    """What is not finite is what torch makes of it."""
    value, slope = computed(formulas, way, activation, NOT_FINITE)
    exact_value, exact_slope = torchs(activation, NOT_FINITE)
    torch.testing.assert_close(value.double(), exact_value, equal_nan=True)
    if slope is not None:
        torch.testing.assert_close(slope.double(), exact_slope, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_plain_activation_at_the_ends_of_the_range(dtype, activation):
    function, x = plain_activation.functions(activation)[0], points(dtype)
    exact_value, exact_slope = torchs(activation, x)
    assert_near(function(x, False), exact_value, dtype, "value")
    assert_near(function(x, True), limit_slope(activation, x, exact_slope), dtype, "slope")
    for slope, exact in zip((False, True), torchs(activation, NOT_FINITE)):
        torch.testing.assert_close(function(NOT_FINITE.to(dtype), slope).double(), exact, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_kernels_at_the_ends_of_the_range(device, dtype, activation):
    """activate and activate_backward, in vectors and, with an odd number of columns, one by one."""
    every = points(dtype)
    x = torch.cat([every, NOT_FINITE.to(dtype), torch.zeros(-(every.numel() + 3) % 8, dtype=dtype)])
    exact_value, exact_slope = torchs(activation, x)
    exact_slope = torch.where(x.isfinite(), limit_slope(activation, x, exact_slope), exact_slope)
    for columns in (8, 1):
        h = x.to(device).view(-1, columns)
        slots = torch.arange(h.size(0), dtype=torch.int32, device=device)
        exact_inputs.poison(device)
        value, dh = launch.activate(h, None, activation), torch.ones_like(h)
        a = launch.activate_backward(h, None, dh, slots, None, activation)[0]
        for what, got, exact in (("value", value, exact_value), ("a", a, exact_value), ("slope", dh, exact_slope)):
            got, finite = got.flatten().cpu(), x.isfinite()
            assert_near(got[finite], exact[finite], dtype, what)
            torch.testing.assert_close(got[~finite], exact[~finite].to(dtype), equal_nan=True, msg=what)


@pytest.mark.parametrize("activation", CONSTANTS)
def test_gates(formulas, activation):
    """In the formulas, in plain_activation and in the class that stands for them, next to torch's own."""
    g = points(torch.float64).requires_grad_()
    exact = CONSTANTS[activation][1](g)
    slope, = torch.autograd.grad(exact.sum(), g)
    g = g.detach()
    value, got = torch.zeros(2, g.numel(), dtype=torch.float64)
    kind, *constants = plain_activation.kernel_arguments(activation)
    formulas.gate_in_double(int(kind), (ctypes.c_double * len(constants))(*constants), len(constants), *(
        ctypes.c_void_p(t.data_ptr()) if isinstance(t, torch.Tensor) else t for t in (g, g.numel(), value, got)))
    of_plain_activation = plain_activation.functions(activation)[1]
    for one in (value, of_plain_activation(g, False)):
        torch.testing.assert_close(one, exact.detach())
    for one in (got, of_plain_activation(g, True)):
        torch.testing.assert_close(one, slope)


def test_the_clamped_silu_had_no_slope_at_its_limits_with_torch_2_14(monkeypatch):
    """Where autograd differentiates it: torch 2.14's clamp has none there, and the kernels have that below the limit, with every torch."""
    class Clamp214(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, low, high):
            ctx.inside = (x > low) & (x < high)
            return torch.minimum(torch.maximum(x, x.new_tensor(low)), x.new_tensor(high))

        @staticmethod
        def backward(ctx, grad):
            return torch.where(ctx.inside, grad, 0), None, None

    monkeypatch.setattr(torch.Tensor, "clamp", lambda x, min=-math.inf, max=math.inf: Clamp214.apply(x, min, max))
    activation = gbmoe.ClampedSilu(1.702, 7, 6, 1)
    value, gate = plain_activation.functions(activation.code)
    h, g = (torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in ([7, 7, 8, 3.0, math.nan], [6, -6, 6, 9, 1.0]))
    got_h, got_g = torch.autograd.grad(activation(h, g).sum(), (h, g))
    with torch.no_grad():
        torch.testing.assert_close(got_h, value(h, True) * gate(g, False), rtol=1e-12, atol=0)
        torch.testing.assert_close(got_g, value(h, False) * gate(g, True), rtol=1e-12, atol=0, equal_nan=True)
    assert got_h[:2].all() and got_g[:2].all()
