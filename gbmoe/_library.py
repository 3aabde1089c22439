"""One way to register an operator with torch.library: schema, kernels, fake, gradient and autocast rule in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gbmoe._checks import PLAIN

_LIBRARY = torch.library.Library("gbmoe", "FRAGMENT")


def define(
    schema: str, *, reference: Callable, fake: Callable, cuda: Callable | None = None,
    backward: Callable | None = None, setup_context: Callable | None = None, autocast: Sequence[int] = (),
    waits: Callable[..., bool] | None = None,
) -> Callable:
    """Register `gbmoe::<schema>` and return what calls it, with every argument by position.

    The call goes through PyTorch's dispatcher, unless the tensors are on CUDA and nothing is there that would see it: that takes
    some 10 us, of a layer whose kernels may take 70.

    `reference` serves every device, `cuda` CUDA tensors where given. `backward` and `setup_context` are as in
    torch.library.register_autograd; an operator without them is not differentiable. Under autocast the floating tensors at
    the positions `autocast` are cast to the autocast dtype (float64 stays); all others pass as they are.

    `waits` says of the arguments of a call on CUDA whether the host reads what they hold, as it does with sizes that lie there.
    No CUDA graph can keep such a call: it would repeat what was read when it was recorded. It goes to a second operator, of the
    same schema and kernels, whose name ends in `_by_host` and whose tag tells a compiler so.
    """
    name, arguments = schema[: schema.index("(")], schema[schema.index("("):]
    kernel = reference if cuda is None else cuda  # on CUDA
    if backward is None and name.endswith("_backward"):
        backward, setup_context = _refuse_second_derivative, None

    def register(name: str, *tags: torch.Tag) -> tuple[torch._ops.OpOverload, type[torch.autograd.Function] | None]:
        _LIBRARY.define(name + arguments, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        if cuda is not None:
            _LIBRARY.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"gbmoe::{name}", fake, lib=_LIBRARY)
        operator = getattr(torch.ops.gbmoe, name).default
        function = None
        if backward is not None:
            function, differentiable = _differentiable(operator, kernel, backward, setup_context)
            _LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)
        if autocast:
            for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
                _LIBRARY.impl(name, _autocast_kernel(operator, device_type, key, frozenset(autocast)), key)
        return operator, function

    operator, function = register(name)
    by_host = None if waits is None else register(f"{name}_by_host", torch.Tag.cudagraph_unsafe)[0]

    def call(*inputs):
        if not _is_unseen(inputs):
            if by_host is not None and inputs[0].is_cuda and waits(*inputs):
                return by_host(*inputs)
            return operator(*inputs)
        if function is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return function.apply(*inputs, None)
        return kernel(*inputs)

    return call


def _is_unseen(inputs: tuple) -> bool:
    """True where a call of an operator has these CUDA tensors to do with and nothing else; the first input is one.

    Not where it is watched, autocast would take it, or a profiler is to name it (torch.profiler; an ExecutionTraceObserver on its own
    cannot be told).
    """
    # A compiler would trace all that follows.
    if torch.compiler.is_compiling() or not inputs[0].is_cuda or torch.is_autocast_enabled("cuda"):
        return False
    return not (torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled or is_watched(*inputs))


def is_watched(*inputs: object) -> bool:
    """True where a compiler or torch.jit traces operators, a mode, a transform of torch.func, a subclass among the inputs or their
    device, meta, would take them, or forward-mode derivatives are on.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    if is_transformed() or torch.autograd.forward_ad._current_level >= 0:
        return True
    # Lazily negated views are the dispatcher's to resolve; gradients that autograd batches have no transform on its stack; tensors
    # of the meta device have no numbers to compute with.
    return any(isinstance(t, torch.Tensor)
               and (type(t) not in PLAIN or t.is_neg() or t.is_meta or torch._C._functorch.is_legacy_batchedtensor(t)) for t in inputs)


def is_transformed() -> bool:
    """True inside a transform of torch.func, where a tensor may hide that an outer one requires a gradient."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _differentiable(operator: torch._ops.OpOverload, direct: Callable, backward: Callable,
                    setup_context: Callable | None) -> tuple[type[torch.autograd.Function], Callable]:
    """An autograd.Function of the operator's inputs and a keyset, and the kernel that torch.library.register_autograd would
    register, for a schema without defaults.

    Torch's own looks every argument up in the schema at every call: 40 us for eleven arguments. Without a keyset the function
    computes by `direct`.
    """
    assert not any(argument.has_default_value() for argument in operator._schema.arguments), operator

    def below(keyset, *inputs):
        if keyset is None:
            return direct(*inputs)
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
        _refuse_tangents(operator, inputs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            if is_transformed():
                raise NotImplementedError(f"{operator.name()}: torch.func.grad, vjp and what is built from them are not supported,"
                                          " use torch.autograd")
            return function.apply(*inputs, keyset)
        return below(keyset, *inputs)

    return function, kernel


def _refuse_tangents(operator: torch._ops.OpOverload, inputs: tuple) -> None:
    """Raise where a derivative in forward mode comes in, which would get lost."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs):
        raise NotImplementedError(f"{operator.name()}: differentiation in forward mode (torch.func.jvp, torch.autograd.forward_ad)"
                                  " is not supported, use torch.autograd's backward mode")


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
