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

    `reference` serves every device, `cuda` CUDA tensors where given. `backward` and `setup_context` are those of
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
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    operator = getattr(torch.ops.gbmoe, name).default
    if autocast:
        for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
            _LIBRARY.impl(name, _autocast_kernel(operator, device_type, key, frozenset(autocast)), key)
    return operator


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
