"""Kernels that do not split sums give each one the same bits, whatever their tiles and, on Hopper, their instructions: what batch
invariance rests on."""

import itertools

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import hopper, own_kernels, tensor_core
from gbmoe.engines.base import GatheredRows
from gbmoe.kernels import plain_torch
from gbmoe.slot_map import SlotMap
from gbmoe.tuning.grouped_gemm import NARROW, SQUARE, TENSOR_CORE_LOW, TENSOR_CORE_SQUARE, TENSOR_CORE_WIDE, WIDE, GemmConfig
from tests.conftest import dtype_id

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
SIZES, INNER, COLUMNS = [64, 0, 128], (8, 24, 72, 520, 2048, 14336), 264
OF_HOPPER = (GemmConfig(WIDE), GemmConfig(WIDE, cluster_n=2), GemmConfig(NARROW, cluster_n=2), GemmConfig(SQUARE, ping_pong=True),
             GemmConfig(SQUARE, cluster_n=2, ping_pong=True), GemmConfig(SQUARE, cluster_m=2, ping_pong=True))
OF_TENSOR_CORE = (TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE, TENSOR_CORE_LOW)


@pytest.fixture
def device():
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := engines.ENGINES["tensor_core"].unavailable(device):
        pytest.skip(reason)
    return device


def has_hopper(device):
    return engines.ENGINES["hopper"].unavailable(device) is None


def hard_numbers(kind, *shape, dtype, device, seed):
    """Random numbers: of very different size, cancelling, denormal, mostly zeros of both signs, or with some that are not finite."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, device=device, generator=generator)
    small = dtype == torch.float16

    def powers(low, high):
        return torch.exp2(torch.randint(low, high, shape, device=device, generator=generator).float())

    def some(share):
        return torch.rand(shape, device=device, generator=generator) < share

    if kind == "of all sizes":
        x = x * (powers(-9, 5) if small else powers(-30, 30))
    elif kind == "cancelling":
        x = x.sign() * powers(-8, 9) * (1 + x.abs() / 256)
    elif kind == "denormal":
        x = x * (2.0**-20 if small else 2.0**-64)
    elif kind == "mostly zeros":
        x = torch.where(some(0.8), x.sign() * 0.0, x)
    elif kind == "infinite":
        x = torch.where(some(1e-4), x.sign() * float("inf"), x)
    elif kind == "nan":
        x = torch.where(some(1e-4), float("nan"), x)
    return x.to(dtype)


def bits(tensor):
    return tensor.view(torch.int16)


@DTYPES
@pytest.mark.parametrize("kind", ["normal", "of all sizes", "cancelling", "denormal", "mostly zeros", "infinite", "nan"])
def test_products_of_rows(device, dtype, kind):
    for inner, trans_b in itertools.product(INNER, (False, True)):
        a = hard_numbers(kind, sum(SIZES), inner, dtype=dtype, device=device, seed=1)
        shape = (COLUMNS, inner) if trans_b else (inner, COLUMNS)
        b = hard_numbers(kind, len(SIZES), *shape, dtype=dtype, device=device, seed=2)
        sizes, outs = torch.tensor(SIZES, device=device), {}

        def out(name):
            return outs.setdefault(name, torch.full((a.size(0), COLUMNS), 7.0, dtype=dtype, device=device))

        for config in OF_TENSOR_CORE:
            tensor_core.launch_rows(config, a, b, None, None, sizes, trans_b, out(config))
        if has_hopper(device):
            own_kernels.few_rows_gemm(a, b, sizes, trans_b, out("few rows"), in_turns=True)
            for config in OF_HOPPER:
                hopper.launch_rows(config, a, b, None, None, sizes, trans_b, out(config))
        for name, product in outs.items():
            assert torch.equal(bits(product), bits(outs[OF_TENSOR_CORE[0]])), (inner, trans_b, name)


@DTYPES
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_torch.ACTIVATIONS)
def test_the_first_gemm_with_its_activation(device, dtype, activation, glu):
    inner, ffn = 520, 264
    sizes = torch.tensor(SIZES, dtype=torch.int32, device=device)
    for kind in ("normal", "of all sizes", "cancelling"):
        x = hard_numbers(kind, sum(SIZES), inner, dtype=dtype, device=device, seed=1)
        w1, v1 = (hard_numbers("normal", len(SIZES), ffn, inner, dtype=dtype, device=device, seed=seed) / 16 for seed in (2, 3))
        v1 = v1 if glu else None
        rows = GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), x)
        results = {"tensor_core": tensor_core.up_gemm(x, w1, v1, sizes, activation, True)}
        if has_hopper(device):
            results["few rows"] = own_kernels.few_rows_up(rows, w1, v1, sizes, activation, True, in_turns=True)
            results["hopper"] = hopper.up_gemm(x, None, 1, w1, v1, sizes, activation, True)
        for name, got in results.items():
            for one, other in zip(got, results["tensor_core"]):
                assert (one is None and other is None) or torch.equal(bits(one), bits(other)), (kind, name)
