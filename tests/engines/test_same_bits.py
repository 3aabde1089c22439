"""Kernels that do not split sums give each one the same bits, whatever their tiles and, on Hopper, their instructions: what batch
invariance rests on."""

import itertools

import pytest
import torch

from gbmoe import engines
from gbmoe.engines import hopper, own_kernels, tensor_core
from gbmoe.engines.base import GatheredRows
from gbmoe.plain import plain_activation
from gbmoe.slot_map import SlotMap
from gbmoe.tuning import tensor_core_tiles
from gbmoe.tuning.hopper_tiles import NARROW, SQUARE, WIDE, GemmConfig
from tests.conftest import dtype_id

pytestmark = pytest.mark.gpu
OF_16_BITS = [torch.bfloat16, torch.float16]
SIZES, INNER, COLUMNS = [64, 0, 128], (8, 24, 72, 520, 2048, 14336), 264
OF_HOPPER = (GemmConfig(WIDE), GemmConfig(WIDE, tile_counter=True), GemmConfig(WIDE, cluster_n=2), GemmConfig(NARROW, cluster_n=2),
             GemmConfig(SQUARE, ping_pong=True), GemmConfig(SQUARE, cluster_n=2, ping_pong=True),
             GemmConfig(SQUARE, cluster_m=2, ping_pong=True, tile_counter=True))
OF_HOPPER_UP = (GemmConfig(WIDE), GemmConfig(WIDE, cluster_n=2, panel=2, even_panels=True, tile_counter=True))
OF_TENSOR_CORE = (tensor_core_tiles.WIDE, tensor_core_tiles.SQUARE, tensor_core_tiles.LOW)
OF_TENSOR_CORE_UP = (tensor_core_tiles.WIDE, tensor_core_tiles.LOW)


@pytest.fixture
def device():
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := engines.ENGINES["tensor_core"].unavailable(device):
        pytest.skip(reason)
    return device


def has_hopper(device):
    return engines.ENGINES["hopper"].unavailable(device) is None


def hard_numbers(kind, *shape, dtype, device, seed):
    """Random numbers: of very different size, cancelling, denormal, with products that vanish, mostly zeros of both signs, or some of them
    not finite."""
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
    elif kind == "vanishing":
        x = x * (2.0**-24 if small else torch.where(some(0.5), 2.0**-100, 2.0**-70))
    elif kind == "mostly zeros":
        x = torch.where(some(0.8), x.sign() * 0.0, x)
    elif kind == "infinite":
        x = torch.where(some(1e-4), x.sign() * float("inf"), x)
    elif kind == "nan":
        x = torch.where(some(1e-4), float("nan"), x)
    return x.to(dtype)


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [*OF_16_BITS, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("kind", ["normal", "of all sizes", "cancelling", "denormal", "mostly zeros", "vanishing", "infinite", "nan"])
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
        if has_hopper(device) and dtype in OF_16_BITS:
            own_kernels.HOPPER_FEW_ROWS.gemm(a, b, sizes, trans_b, out("few rows"))
            if trans_b:
                for rows in (40, 64):  # of few CTAs, and of more
                    alone = torch.full((rows, COLUMNS), 7.0, dtype=dtype, device=device)
                    own_kernels.few_rows_linear(a[:rows], b[0], None, alone)
                    assert torch.equal(bits(alone), bits(outs[OF_TENSOR_CORE[0]][:rows])), (inner, "a group alone")
            for config in OF_HOPPER:
                hopper.launch_rows(config, a, b, None, None, sizes, trans_b, out(config))
        for name, product in outs.items():
            assert torch.equal(bits(product), bits(outs[OF_TENSOR_CORE[0]])), (inner, trans_b, name)


@pytest.mark.parametrize("dtype", OF_16_BITS, ids=dtype_id)
@pytest.mark.parametrize("kind", ["normal", "of all sizes", "cancelling", "denormal", "mostly zeros", "vanishing", "infinite", "nan"])
def test_products_of_rows_in_float32(device, dtype, kind):
    """A router's logits, one group: all bits of their sums, and in the engine's choice of kernels, too."""
    pinned = engines.ENGINES[engines.batch_invariant("auto", device)]
    for inner, rows in itertools.product(INNER, (5, 300)):
        a = hard_numbers(kind, rows, inner, dtype=dtype, device=device, seed=1)
        b = hard_numbers(kind, 1, COLUMNS, inner, dtype=dtype, device=device, seed=2)
        outs = {"engine": pinned.linear(a, b[0])}

        def out(name):
            return outs.setdefault(name, torch.full((rows, COLUMNS), 7.0, device=device))

        for config in OF_TENSOR_CORE:
            tensor_core.launch_rows(config, a, b, None, None, None, True, out(config))
        if has_hopper(device):
            own_kernels.few_rows_linear(a, b[0], None, out("few rows"))
            for counter in (False, True):
                config = GemmConfig(SQUARE, ping_pong=True, tile_counter=counter)
                hopper.launch_rows(config, a, b, None, None, None, True, out(config))
        for name, product in outs.items():
            assert torch.equal(bits(product), bits(outs[OF_TENSOR_CORE[0]])), (inner, rows, name)


def first_gemms(tokens, token_of_row, w1, v1, sizes, activation):
    """The results of every kernel that computes an expert's first GEMM, the same of tokens and of rows gathered before."""
    rows, ffn, device, results = token_of_row.numel(), w1.size(1), w1.device, {}
    x = tokens[token_of_row]

    def outs(name):
        a, h, g = (torch.full((rows, ffn), 7.0, dtype=x.dtype, device=device) for _ in range(3))
        results[name] = (a, h) if v1 is None else (a, h, g)
        return a, h, None if v1 is None else g

    for config in OF_TENSOR_CORE_UP:
        tensor_core.launch_up(config, x, w1, v1, sizes, activation, *outs(config))
    if has_hopper(device):
        gathered = GatheredRows(None, SlotMap(*[torch.empty(0, 0)] * 2), x)
        kernels, lies = own_kernels.HOPPER_FEW_ROWS, {"few rows": lambda w: w, "of transposed weights": lambda w: w.mT.contiguous().mT}
        for name, lie in lies.items():
            few = kernels.up(gathered, lie(w1), None if v1 is None else lie(v1), sizes, activation, True)
            results[name] = tuple(tensor for tensor in few if tensor is not None)
        if v1 is not None:
            pairs = torch.stack([w1, v1], 2).flatten(1, 2).mT.contiguous().mT
            a, kept = kernels.up_pairs(gathered, pairs, None, sizes, activation, True)
            results["of pairs"] = a, kept[:, ::2].contiguous(), kept[:, 1::2].contiguous()
        for config in OF_HOPPER_UP:
            hopper.launch_up(config, x, None, 1, w1, v1, sizes, activation, *outs(config))
        if activation in ("silu", "gelu_tanh"):
            for config in (GemmConfig(WIDE), *(config for config in OF_HOPPER_UP if config.cluster_n == 2)):
                hopper.launch_up(config, tokens, token_of_row.int(), 1, w1, v1, sizes, activation, *outs(("gathered inside", config)))
    return results


@pytest.mark.parametrize("dtype", OF_16_BITS, ids=dtype_id)
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_the_first_gemm_with_its_activation(device, dtype, activation, glu):
    inner, ffn, rows = 520, 264, sum(SIZES)
    sizes = torch.tensor(SIZES, dtype=torch.int32, device=device)
    token_of_row = torch.randperm(rows, device=device, generator=torch.Generator(device).manual_seed(4))
    for kind in ("normal", "of all sizes", "cancelling", "infinite", "nan"):
        tokens = hard_numbers(kind, rows, inner, dtype=dtype, device=device, seed=1)
        w1, v1 = (hard_numbers("normal", len(SIZES), ffn, inner, dtype=dtype, device=device, seed=seed) / 16 for seed in (2, 3))
        results = first_gemms(tokens, token_of_row, w1, v1 if glu else None, sizes, activation)
        for name, got in results.items():
            for one, other in zip(got, results[tensor_core_tiles.WIDE]):
                assert torch.equal(bits(one), bits(other)), (kind, name)


@pytest.mark.parametrize("dtype", OF_16_BITS, ids=dtype_id)
@pytest.mark.parametrize("activation", plain_activation.ACTIVATIONS)
def test_the_activation_of_an_infinite_sum(device, dtype, activation):
    """silu of +inf was NaN in tiles."""
    h = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0], dtype=dtype, device=device)
    tokens, w1 = torch.zeros(4, 8, dtype=dtype, device=device), torch.zeros(1, 8, 8, dtype=dtype, device=device)
    tokens[:, 0], w1[:, :, 0] = h, 1.0
    expected = plain_activation.ACTIVATIONS[activation](h.double(), False).to(dtype)
    for name, (a, _) in first_gemms(tokens, torch.arange(4, device=device), w1, None, torch.tensor([4], device=device), activation).items():
        torch.testing.assert_close(a, expected[:, None].expand(4, 8), equal_nan=True, msg=lambda text: f"{name}: {text}")
