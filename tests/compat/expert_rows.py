"""Rows in expert order as a dispatcher leaves them, with unused ones at the end, for adapters that take such rows.

Shape suffixes: R rows, E experts, H hidden, F ffn hidden.
"""

import torch

from gbmoe.testing import exact_inputs
from tests.conftest import assert_as_accurate_as

COUNTS = (17, 0, 3, 40, 0)
USED, ROWS, HIDDEN, FFN = 60, 66, 24, 40  # rows 60 to 65 are nobody's


def values(*shape, dtype, seed, inner=1):
    scale = exact_inputs.fan_in_scale(inner) if inner > 1 else 1.0
    return exact_inputs.exact_values(*shape, dtype=dtype, device="cpu", seed=seed, scale=scale)


def counts(dtype=torch.int64, device="cpu"):
    return torch.tensor(COUNTS, dtype=dtype, device=device)


def loop(expert, x_RH):
    """out[r] = expert(e, x[r]) one expert at a time, with zeros for the rows of nobody."""
    out, first = [], 0
    for e, size in enumerate(COUNTS):
        out.append(expert(e, slice(first, first + size)))
        first += size
    return torch.cat([*out, torch.zeros_like(x_RH[first:])])


def forward_and_gradients(function, tensors, grad):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad, materialize_grads=True)
    return {"out": out.detach(), **{f"grad_{name}": g for name, g in zip(leaves, grads)}}


def check(function, definition, tensors, *, rowwise=("x",), device="cpu"):
    """The function's results and gradients are as accurate as the definition's in the same dtype, whatever unused rows hold.

    Args:
        function: of the tensors by name, x [R,H] among them, to [R,H].
        definition: the same by `loop`.
        rowwise: names of the tensors that have R rows; unused ones become NaN, and get gradients of zero.
        device: to which the tensors are moved.
    """
    tensors = {name: t.to(device) for name, t in tensors.items()}
    grad = values(ROWS, HIDDEN, dtype=tensors["x"].dtype, seed=9).to(device)
    exact = forward_and_gradients(definition, {name: t.double() for name, t in tensors.items()}, grad.double())
    baseline = forward_and_gradients(definition, tensors, grad)
    tensors = {name: t.clone() for name, t in tensors.items()}
    for unused in (grad, *(tensors[name] for name in rowwise)):
        unused[USED:] = float("nan")
    exact_inputs.poison(device)
    got = forward_and_gradients(function, tensors, grad)
    for what in exact:
        assert_as_accurate_as(got[what], baseline[what], exact[what], what)
    for what in ("out", *(f"grad_{name}" for name in rowwise)):
        assert bool((got[what][USED:] == 0).all()), what
