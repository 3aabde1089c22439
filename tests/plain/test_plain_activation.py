"""gbmoe.plain.plain_activation, the oracle, against autograd and torch's own functions."""

import pytest
import torch

from gbmoe.plain import plain_activation
from gbmoe.testing import oracle


@pytest.mark.parametrize("name", plain_activation.ACTIVATIONS)
def test_activation_slopes_are_what_autograd_says(name):
    x = torch.linspace(-4, 4, 101, dtype=torch.float64).requires_grad_()
    value = plain_activation.ACTIVATIONS[name](x, False)
    expected, = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(plain_activation.ACTIVATIONS[name](x.detach(), True), expected)


@pytest.mark.parametrize("name", plain_activation.ACTIVATIONS)
def test_activations_are_torchs(name):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(plain_activation.ACTIVATIONS[name](x, False), oracle.ACTIVATIONS[name](x))
