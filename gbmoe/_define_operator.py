"""One way to register an operator with torch.library: schema, kernels, fake, gradient and autocast rule in one call.

Some private names of torch make a call cheap (_torch_names.py). With a torch that lacks one the results are the same, and a call takes some
10 us longer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

import torch

from gbmoe import _torch_names as names
from gbmoe._checks import PLAIN
from gbmoe._flop_counter import add_formula, hand_over
from gbmoe.programs import Programs, is_seen_by_recordings_alone

_Function = TypeVar("_Function", bound=Callable)

_LIBRARY = torch.library.Library("gbmoe", "FRAGMENT")


def positions(schema: str) -> dict[str, int]:
    """The positions of a schema's arguments, by their names."""
    arguments = schema[schema.index("(") + 1:schema.index(")")]
    return {argument.split()[-1]: number for number, argument in enumerate(arguments.split(","))}


def _in_order(position_of: dict[str, int], backward: Callable) -> Callable:
    """`backward`, whose results, by the names of arguments, become a tuple with one for each argument."""
    def gradients(ctx, *grads):
        in_order = [None] * len(position_of)
        for name, gradient in backward(ctx, *grads).items():
            in_order[position_of[name]] = gradient
        return tuple(in_order)
    return gradients


def define(
    schema: str, *, reference: Callable, fake: Callable,
    backward: Callable | None = None, setup_context: Callable | None = None, autocast: Sequence[str] = (),
    waits: Callable[..., bool] | None = None, flops: Callable[..., int] | None = None, named: str | None = None,
    recorded: Callable[..., bool] | None = None,
) -> Callable:
    """Register `gbmoe::<schema>` and return a function that calls it, with every argument by position.

    The call goes through PyTorch's dispatcher, which takes some 10 us, unless the tensors are on CUDA and nothing would intercept it:
    a layer's kernels may take no more than 70 us.

    `reference` serves every device. `backward` and `setup_context` are as in torch.library.register_autograd, except that `backward`
    returns a dictionary: a gradient, or None, by the name of its argument. An operator without them is not differentiable, and its results
    need no gradient on any device. Under autocast the floating tensors named in `autocast` are cast to the autocast dtype (float64 stays);
    all others are passed on unchanged. What `reference` and `backward` compute is computed without autocast and, `backward` excepted, below
    autograd.

    `waits` is a function of the arguments of a call on CUDA. It tells whether the host reads the values of some of them, as it does
    with sizes on the device. A CUDA graph must not contain such a call, because its replays would repeat the values of the recording.
    The call goes to a second operator with the same schema and kernels, whose name ends in `_by_host` and whose tag tells compilers.

    `flops` is the formula by which torch.utils.flop_counter counts the operator, for those that multiply matrices.

    `named` is an argument of type str for which callers may give an object with the attribute `name`. Through the dispatcher goes that name
    alone; a call that does not pass it hands the object to `reference` and `setup_context`.

    `recorded` is a function of the arguments of a call that does not pass the dispatcher. It tells whether `reference` decides by their
    kind alone, so that it may be replaced by a program of what it launches (gbmoe/programs/).

    An operator with an argument of type SymInt is refused inside torch.jit.trace, which records its numbers as constants.
    """
    name, arguments = schema[: schema.index("(")], schema[schema.index("("):]
    assert "=" not in arguments, schema  # gradients take every argument by position
    position_of = positions(schema)
    if backward is None and name.endswith("_backward"):
        backward, setup_context = _refuse_second_derivative, None
    elif backward is not None:
        backward = without_autocast(_in_order(position_of, backward))

    def described(*inputs):
        if flops is not None:
            hand_over()  # to compilers, which estimate with the formulas; they trace with fakes
        return fake(*inputs)

    def register(name: str, *tags: torch.Tag) -> tuple[torch._ops.OpOverload, type[torch.autograd.Function] | None]:
        _LIBRARY.define(name + arguments, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(name, without_autocast(reference), "CompositeExplicitAutograd")
        torch.library.register_fake(f"gbmoe::{name}", described, lib=_LIBRARY)
        if flops is not None:
            add_formula(getattr(torch.ops.gbmoe, name), flops)
        operator = getattr(torch.ops.gbmoe, name).default
        function = None
        if backward is not None and names.REGISTERS_AUTOGRAD:
            function, differentiable = _differentiable(operator, direct, backward, setup_context)
            _LIBRARY.impl(name, differentiable, "Autograd", with_keyset=True)
        elif backward is not None:
            torch.library.register_autograd(f"gbmoe::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
        elif names.REGISTERS_AUTOGRAD:
            _LIBRARY.impl(name, functools.partial(_below_autograd_kernel, operator), "Autograd", with_keyset=True)
        elif not schema.endswith("-> ()"):
            torch.library.register_autograd(f"gbmoe::{name}", _no_gradients, setup_context=_mark_non_differentiable, lib=_LIBRARY)
        if autocast:
            for device_type, key in zip(names.AUTOCASTS, ("AutocastCUDA", "AutocastCPU")):
                _LIBRARY.impl(name, _autocast_kernel(operator, device_type, frozenset(position_of[argument] for argument in autocast)), key)
        return operator, function

    direct = reference
    if recorded is not None:
        programs = Programs(lambda inputs: reference(*inputs), name)

        def direct(*inputs):
            return programs(list(inputs)) if recorded(*inputs) else reference(*inputs)

    operator, function = register(name)
    by_host = None if waits is None else register(f"{name}_by_host", torch.Tag.cudagraph_unsafe)[0]

    takes_sizes = "SymInt" in arguments
    place = None if named is None else position_of[named]

    def call(*inputs):
        # Asked once, and first, because a compiler would trace all that follows.
        compiles = torch.compiler.is_compiling()
        if compiles or not _is_unseen(inputs):
            if not compiles:
                if flops is not None:
                    hand_over()
                if not names.REGISTERS_AUTOGRAD:
                    _refuse_tangents(operator, inputs)  # torch.library.register_autograd would lose them silently
                if takes_sizes:
                    refuse_jit_tracing(f"gbmoe::{name}")
            if place is not None and not isinstance(inputs[place], str):
                inputs = (*inputs[:place], inputs[place].name, *inputs[place + 1:])
            if by_host is not None and inputs[0].is_cuda and waits(*inputs):
                return by_host(*inputs)
            return operator(*inputs)
        if torch.is_grad_enabled() and names.any_requires_grad(*inputs):
            if function is not None:
                return names.apply(function, *inputs, None)
            with names.below_autograd():
                return direct(*inputs)
        return direct(*inputs)

    return call


def without_autocast(function: _Function) -> _Function:
    """The same function of arguments by position, called with autocast off for every type of device.

    Autograd runs gradients under the autocast of the caller of backward(), and an operator's kernel runs under its caller's. Both are
    given operands in the dtype to compute in.
    """
    @functools.wraps(function)
    def call(*args):
        if not names.is_any_autocast_enabled():
            return function(*args)
        with names.autocast_off():
            return function(*args)

    return call  # type: ignore[return-value]


def differentiable_once(backward: _Function) -> _Function:
    """The backward of an autograd.Function, whose gradients refuse to be differentiated. torch's once_differentiable refuses only where the
    gradient that comes in needs one itself, and loses a second derivative without a word elsewhere."""
    @functools.wraps(backward)
    def call(ctx, *grads):
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return gradients
        of_all = gradients if isinstance(gradients, tuple) else (gradients,)
        anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        found = iter(_WithoutGradients.apply(anchor, *(t for t in of_all if t is not None)))
        refusing = tuple(None if t is None else next(found) for t in of_all)
        return refusing if isinstance(gradients, tuple) else refusing[0]

    return call  # type: ignore[return-value]


def is_unseen(*inputs: object) -> bool:
    """True where a call on these inputs, the first of which is a tensor, may launch kernels without passing the dispatcher."""
    return not torch.compiler.is_compiling() and _is_unseen(inputs)


def may_be_one_node(*inputs: object) -> bool:
    """True where operators on these inputs, on any device, may be joined: nothing watches them (is_watched), and autocast is off.

    A profiler does not matter, which sees the operators inside: a checkpoint repeats a forward in backward, where another part of a program
    may be profiled, and has to find the same nodes."""
    if torch.compiler.is_compiling() or not names.CALLS_KERNELS or names.is_any_autocast_enabled():
        return False
    return not _is_watched(inputs)


def is_profiled() -> bool:
    """Whether torch.profiler sees the names of operators."""
    return not names.CALLS_KERNELS or names.profiler_enabled() or names.profiler._is_profiler_enabled


def profiled(name: str, unless_an_operator: bool) -> contextlib.AbstractContextManager:
    """In this context torch.profiler sees `name`, if it runs and what is called is no operator."""
    if unless_an_operator and is_profiled():
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()


def _is_unseen(inputs: tuple) -> bool:
    """True where a call involves nothing but these CUDA tensors, the first input among them. No compiler traces.

    False where something watches the call (is_watched), autocast is on for any device, or torch.profiler has to see its name. An
    ExecutionTraceObserver without a profiler cannot be detected.
    """
    if not inputs[0].is_cuda or not names.CALLS_KERNELS or names.is_any_autocast_enabled():
        return False
    return not (is_profiled() or _is_watched(inputs))


def is_watched(*inputs: object) -> bool:
    """True where something would intercept operators on these inputs: a compiler or torch.jit that traces, a mode, a transform of
    torch.func, a tensor subclass, the meta device, or forward-mode derivatives; and always where this torch cannot tell.
    """
    return torch.compiler.is_compiling() or not names.SEES_WATCHERS or _is_watched(inputs)


def _is_watched(inputs: tuple) -> bool:
    """is_watched of a torch that can tell, where no compiler traces."""
    if names.is_tracing() or names.len_torch_function_stack():
        return True
    if names.len_torch_dispatch_stack() and not is_seen_by_recordings_alone():
        return True
    if names.peek_interpreter_stack() is not None or names.forward_ad._current_level >= 0:
        return True
    # The dispatcher has to resolve lazily negated views. Gradients that autograd batches show no transform on the stack. Tensors of the
    # meta device have no values to compute with.
    tensors = [t for t in inputs if t is not None]
    if not _PLAIN.issuperset(map(type, tensors)):
        tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
        if not _PLAIN.issuperset(map(type, tensors)):
            return True
    return any(map(_is_neg, tensors)) or any(map(_is_meta, tensors)) or any(map(names.is_legacy_batchedtensor, tensors))


# For map(), which calls them without Python between two tensors.
_PLAIN, _is_neg, _is_meta = frozenset(PLAIN), torch.Tensor.is_neg, attrgetter("is_meta")


def refuse_jit_tracing(what: str) -> None:
    """Raise inside torch.jit.trace, for what takes or reads a size as a number of Python's: it would become a constant of the trace, and
    inputs of other sizes would get wrong results without a word."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(f"{what} cannot be traced by torch.jit.trace, which would make the sizes of this input constants:"
                                  " use torch.compile or torch.export")


def may_be_transformed() -> bool:
    """True inside a transform of torch.func, where a tensor may hide that an outer one requires a gradient; and always where this
    torch cannot tell.
    """
    return not torch.compiler.is_compiling() and (names.peek_interpreter_stack is None or names.peek_interpreter_stack() is not None)


def is_batched(tensor: torch.Tensor) -> bool:
    """True for a gradient that autograd batches (is_grads_batched); False where this torch cannot tell."""
    return names.is_legacy_batchedtensor is not None and names.is_legacy_batchedtensor(tensor)


def may_be_batched(tensor: torch.Tensor) -> bool:
    """True for a gradient that autograd batches (is_grads_batched), which operators that write to their argument do not take; and
    always where this torch cannot tell.
    """
    return names.is_legacy_batchedtensor is None or names.is_legacy_batchedtensor(tensor)


def _differentiable(operator: torch._ops.OpOverload, direct: Callable, backward: Callable,
                    setup_context: Callable | None) -> tuple[type[torch.autograd.Function], Callable]:
    """An autograd.Function of the operator's inputs and a keyset, and the kernel that torch.library.register_autograd would
    register, for a schema without defaults.

    Torch's own kernel looks every argument up in the schema at every call, which takes 40 us for eleven arguments. Without a keyset
    the function computes by `direct`.
    """
    def below(keyset, *inputs):
        if keyset is None:
            return direct(*inputs)
        with names.below_autograd():
            return operator.redispatch(keyset & names.after_autograd_keyset, *inputs)

    def forward(ctx, *inputs_and_keyset):
        *inputs, keyset = inputs_and_keyset
        output = below(keyset, *inputs)
        if setup_context is not None:
            setup_context(ctx, tuple(inputs), output)
        return output

    def gradients(ctx, *grads):
        return *backward(ctx, *grads), None

    function = type(f"{operator.__name__.split('.')[0]}_autograd", (torch.autograd.Function,),
                    {"forward": staticmethod(forward), "backward": staticmethod(gradients)})

    def kernel(keyset, *inputs):
        _refuse_tangents(operator, inputs)
        if torch.is_grad_enabled() and names.any_requires_grad(*inputs):
            if names.peek_interpreter_stack is not None and names.peek_interpreter_stack() is not None and may_be_transformed():
                raise NotImplementedError(f"{operator.name()}: torch.func.grad, vjp and what is built from them are not supported,"
                                          " use torch.autograd")
            return function.apply(*inputs, keyset)
        return below(keyset, *inputs)

    return function, kernel


def _below_autograd_kernel(operator: torch._ops.OpOverload, keyset, *inputs):
    """The Autograd kernel of an operator that is not differentiable. Without one, what plain PyTorch computes inside would be recorded, and
    torch would mark other results as needing a gradient that does not exist."""
    with names.below_autograd():
        return operator.redispatch(keyset & names.after_autograd_keyset, *inputs)


def _mark_non_differentiable(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def _no_gradients(ctx, *grads):
    raise AssertionError("no result needs a gradient")


def _refuse_tangents(operator: torch._ops.OpOverload, inputs: tuple) -> None:
    """Raise where an input carries a derivative in forward mode, which would be lost silently."""
    if names.HAS_LEVELS and names.forward_ad._current_level < 0:
        return
    if names.is_fwd_grad_enabled is not None and not names.is_fwd_grad_enabled():
        return
    if any(isinstance(t, torch.Tensor) and names.forward_ad.unpack_dual(t).tangent is not None for t in inputs):
        raise NotImplementedError(f"{operator.name()}: differentiation in forward mode (torch.func.jvp, torch.autograd.forward_ad)"
                                  " is not supported, use torch.autograd's backward mode")


def _refuse_second_derivative(ctx, *grads):
    raise RuntimeError("gbmoe's operators are differentiable once: their gradients have no gradients of their own")


def _autocast_kernel(operator, device_type: str, positions: frozenset[int]) -> Callable:
    def cast(position: int, value):
        if position in positions and isinstance(value, torch.Tensor) and value.is_floating_point() \
                and value.dtype != torch.float64 and value.device.type == device_type:
            return value.to(torch.get_autocast_dtype(device_type))
        return value

    def kernel(*args):
        operands = [cast(position, value) for position, value in enumerate(args)]
        with names.autocast_off():
            return operator(*operands)

    return kernel


class _WithoutGradients(torch.autograd.Function):
    """Gradients of a pass that is differentiable once."""

    @staticmethod
    def forward(ctx, needs_gradient, *gradients):
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    backward = staticmethod(_refuse_second_derivative)
