"""One way to register an operator with torch.library: schema, kernels, fake, gradient and autocast rule in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_LIBRARY = torch.library.Library("gbmoe", "FRAGMENT")


def define(
    schema: str, *, reference: Callable, fake: Callable, cuda: Callable | None = None,
    backward: Callable | None = None, setup_context: Callable | None = None, autocast: Sequence[int] = (),
) -> torch._ops.OpOverload:
    """Register `gbmoe::<schema>` and return it.

    `reference` serves every device, `cuda` CUDA tensors where given. `backward` and `setup_context` are as in
    torch.library.register_autograd; an operator without them is not differentiable. Under autocast the floating tensors at
    the positions `autocast` are cast to the autocast dtype (float64 stays); all others pass as they are.
    """
    name = schema[: schema.index("(")]
    qualified = f"gbmoe::{name}"
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    if cuda is not None:
        _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is None and name.endswith("_backward"):
        backward, setup_context = _refuse_second_derivative, None
    operator = getattr(torch.ops.gbmoe, name).default
    if backward is not None:
        _LIBRARY.impl(name, _differentiable(operator, backward, setup_context), "Autograd", with_keyset=True)
    if autocast:
        for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
            _LIBRARY.impl(name, _autocast_kernel(operator, device_type, key, frozenset(autocast)), key)
    return operator


def _differentiable(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable | None) -> Callable:
    """The kernel that torch.library.register_autograd would register, for a schema without defaults.

    Torch's own looks every argument up in the schema at every call: 40 us for eleven arguments.
    """
    assert not any(argument.has_default_value() for argument in operator._schema.arguments), operator

    def below(keyset, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx, *inputs_and_keyset):
        *inputs, keyset = inputs_and_keyset
        output = below(keyset, *inputs)
        if setup_context is not None:
            setup_context(ctx, tuple(inputs), output)
        return output

    def gradients(ctx, *grads):
        result = backward(ctx, *grads)
        return (*result, None) if isinstance(result, tuple) else (result, None)

    function = type(f"{operator._opname}_autograd", (torch.autograd.Function,),
                    {"forward": staticmethod(forward), "backward": staticmethod(gradients)})

    def kernel(keyset, *inputs):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return function.apply(*inputs, keyset)
        return below(keyset, *inputs)

    return kernel


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError("gbmoe's operators are differentiable once: their gradients have no gradients of their own")


def _autocast_kernel(operator, device_type: str, key: str, positions: frozenset[int]) -> Callable:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(position: int, value):
        if position in positions and isinstance(value, torch.Tensor) and value.is_floating_point() \
                and value.dtype != torch.float64 and value.device.type == device_type:
            return value.to(torch.get_autocast_dtype(device_type))
        return value

    def kernel(*args):
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*(cast(position, value) for position, value in enumerate(args)))

    return kernel
