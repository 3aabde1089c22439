"""The stand-ins under MegaBlocks' own ops: `megablocks_ops` everywhere, its Triton kernels where there is no Triton.

The installed package's autograd functions run on them, and are compared with gbmoe.compat.megablocks.ops, whose own
tests compare it with plain PyTorch. On a GPU with Triton the gathers and scatters are MegaBlocks' own, and so is
what is compared.

Shape suffixes: T tokens, K slots a token, R = T * K slots, E experts, H hidden.
"""

import importlib.util

import pytest
import torch

from gbmoe.compat.megablocks import ops, register
from gbmoe.testing import exact_inputs
from tests.compat import skip_where_megablocks_needs_a_gpu

if importlib.util.find_spec("megablocks") is None or importlib.util.find_spec("stk") is None:
    pytest.skip("MegaBlocks is not installed: python -m gbmoe install-megablocks", allow_module_level=True)
register()

import megablocks.ops as theirs  # noqa: E402
from megablocks.layers import moe  # noqa: E402
from megablocks.layers.arguments import Arguments  # noqa: E402

# (tokens, hidden, experts, top_k)
SHAPES = [(4, 2, 2, 1), (64, 1, 64, 4), (128, 96, 4, 1), (33, 8, 5, 3)]


def routed(tokens, experts, top_k, device):
    """indices, bin_ids, bins and padded_bins, by MegaBlocks' own sort, histogram and cumsum."""
    ids = torch.randint(experts, (tokens * top_k,), generator=exact_inputs.generator(device, 1), device=device).int()
    bin_ids, indices = theirs.sort(ids, 6)
    counts = theirs.histogram(ids, experts)
    return indices, bin_ids, theirs.inclusive_cumsum(counts, 0), theirs.inclusive_cumsum(theirs.round_up(counts, 16), 0)


def values_and_gradients(function, *inputs):
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    grad = exact_inputs.exact_values(*out.shape, dtype=out.dtype, device=out.device, seed=9)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "padded", "binned"])
def test_gathers_and_scatters(device, shape, kind):
    skip_where_megablocks_needs_a_gpu(device)
    tokens, hidden, experts, top_k = shape
    indices, bin_ids, bins, padded_bins = routed(tokens, experts, top_k, device)
    x = exact_inputs.exact_values(tokens, hidden, dtype=torch.float32, device=device, seed=2)
    weights = exact_inputs.exact_values(tokens * top_k, dtype=torch.float32, device=device, seed=3)
    # Half the capacity that all would need, so that slots are dropped.
    capacity = max(1, tokens * top_k // experts // 2)

    def gather(package, x):
        return {"plain": lambda: package.gather(x, indices, bin_ids, bins, top_k),
                "padded": lambda: package.padded_gather(x, indices, bin_ids, bins, padded_bins, top_k),
                "binned": lambda: package.binned_gather(x, indices, bins, capacity, top_k)}[kind]()

    def scatter(package, y, w=None):
        return {"plain": lambda: package.scatter(y, indices, bin_ids, w, bins, top_k),
                "padded": lambda: package.padded_scatter(y, indices, bin_ids, w, bins, padded_bins, top_k),
                "binned": lambda: package.binned_scatter(y, indices, w, bins, top_k)}[kind]()

    results = [values_and_gradients(lambda x: gather(package, x), x) for package in (theirs, ops)]
    torch.testing.assert_close(*results)
    y = results[0][0]
    for inputs in ((y,), (y, weights)):
        torch.testing.assert_close(*(values_and_gradients(lambda *inputs: scatter(package, *inputs), *inputs)
                                     for package in (theirs, ops)))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_sort_histogram_and_cumsums(device, dtype):
    x = torch.randint(100, (1000,), generator=exact_inputs.generator(device, 1), device=device).to(dtype)
    for end_bit in (None, 7):
        values, order = theirs.sort(x, end_bit)
        expected = x.sort(stable=True)
        assert values.dtype == order.dtype == dtype
        assert torch.equal(values, expected.values) and torch.equal(order.long(), expected.indices)
    for batch in (x, x.view(4, 250)):
        counts = (batch.unsqueeze(-1) == torch.arange(100, device=device)).sum(-2).int()
        assert torch.equal(theirs.histogram(batch, 100), counts)
        sums = batch.cumsum(-1, dtype=dtype)
        dim = batch.dim() - 1
        assert torch.equal(theirs.inclusive_cumsum(batch, dim), sums)
        assert torch.equal(theirs.exclusive_cumsum(batch, dim), sums - batch)


@pytest.mark.parametrize("batch", [1, 3])
def test_replicate(device, batch):
    counts = torch.tensor([3, 0, 5, 1], device=device)
    x = exact_inputs.exact_values(batch, 4, dtype=torch.float16, device=device, seed=1)
    bins = counts.cumsum(0).int()
    out, grad_x = values_and_gradients(lambda x: theirs.replicate(x, bins, 9), x)
    grad = exact_inputs.exact_values(batch, 9, dtype=torch.float16, device=device, seed=9)
    assert torch.equal(out, x.repeat_interleave(counts, 1))
    expected = torch.stack([part.double().sum(1) for part in grad.split(counts.tolist(), 1)], 1)
    assert torch.equal(grad_x, expected.half())
    assert torch.equal(theirs.replicate(x.int(), bins, 9), x.int().repeat_interleave(counts, 1))


def test_topology(device):
    padded_bins = torch.tensor([256, 256, 384], dtype=torch.int32, device=device)
    assert theirs.topology(padded_bins, 128, 3, 2).tolist() == [0, 1, 0, 1, 4, 5]


def test_megablocks_own_moe_with_a_capacity(device):
    """Not a dMoE: bins of one size and torch.bmm, on the stand-ins where there is no Triton."""
    skip_where_megablocks_needs_a_gpu(device)
    torch.manual_seed(0)
    args = Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2, moe_capacity_factor=0,
                     mlp_impl="gbmoe", fp16=False, device=device, bias=False, moe_loss_weight=0)
    layer = moe.MoE(args)
    x = torch.randn(6, 2, 32, device=device)
    scores, weights, ids = layer.router(x)
    x_TH, w1, w2 = x.flatten(0, 1), layer.experts.mlp.w1, layer.experts.mlp.w2
    expected = torch.stack([sum(weight * (args.activation_fn(row @ w1[e]) @ w2[e]) for weight, e in zip(*chosen))
                            for row, *chosen in zip(x_TH, weights, ids)])
    torch.testing.assert_close(layer(x), expected.view_as(x))
