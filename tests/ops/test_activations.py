"""Which activations are recognised as those that have kernels."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gbmoe.ops.activations import activation_name
from tests.ops.test_experts import expected, inputs, run


@pytest.mark.parametrize("activation, name", [
    (F.silu, "silu"), (torch.nn.SiLU(), "silu"), (F.gelu, "gelu"), (partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    (partial(F.gelu, approximate="none"), "gelu"), (torch.nn.GELU(), "gelu"), (torch.nn.GELU("tanh"), "gelu_tanh"),
    (F.relu, "relu"), (torch.relu, "relu"), (torch.nn.ReLU(), "relu"), (torch.nn.Identity(), "identity"), (torch.tanh, None),
    (partial(F.silu, inplace=True), None), (lambda x: x, None), ("relu_squared", "relu_squared")])
def test_recognised_activations(activation, name):
    assert activation_name(activation) == name


class _Doubled(torch.nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


class _Scaled(partial):
    def __call__(self, x):
        return 3 * super().__call__(x)


def _altered_activations():
    hooked, prehooked, patched = torch.nn.SiLU(), torch.nn.GELU(), torch.nn.ReLU()
    hooked.register_forward_hook(lambda module, args, out: 5 * out)
    prehooked.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    patched.forward = lambda x: 7 * x
    backward = torch.nn.Identity()
    backward.register_full_backward_hook(lambda module, grads, grad_outs: (2 * grads[0],))
    return {"hook": hooked, "pre-hook": prehooked, "backward hook": backward, "own forward": patched,
            "subclass of a module": _Doubled(), "subclass of partial": _Scaled(F.gelu)}


@pytest.mark.parametrize("kind", _altered_activations())
def test_altered_activation_was_replaced_by_the_fused_kernel(device, kind):
    """The hook of an activation module was never called, or the result of its own forward was replaced by that of its class."""
    activation = _altered_activations()[kind]
    assert activation_name(activation) is None
    tensors, ids, grad = inputs(torch.float64, device)
    for name, got in run(tensors, ids, grad, activation).items():
        torch.testing.assert_close(got, expected(tensors, ids, grad, activation, torch.float64)[name])


def test_global_module_hook_was_not_called_for_a_fused_activation():
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        assert activation_name(torch.nn.SiLU()) is None
        tensors, ids, grad = inputs(torch.float32, "cpu")
        run(tensors, ids, grad, torch.nn.SiLU())
    finally:
        hook.remove()
    assert torch.nn.SiLU in seen and activation_name(torch.nn.SiLU()) == "silu"
