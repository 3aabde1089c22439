"""The private names of torch that gbmoe uses. Each is looked up here, once, when this is imported; those of torch._dynamo, whose import
takes longer than gbmoe's, where torch.compile calls.

With a torch that lacks one, results are the same except for what a function here says: calls go through the dispatcher, which takes some
10 us, and gradients and autocast are registered by torch's public functions alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch._subclasses.fake_tensor
import torch._subclasses.functional_tensor
import torch.distributed as dist
import torch.utils._python_dispatch


def _private(name: str) -> Any:
    """torch.`name`, a private name, or None where this torch has none."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _has(*found: Any) -> bool:
    return all(value is not None for value in found)


# ------------------------------------------------------------------------------------------------------------ the dispatcher

# Tells whether any input needs a gradient.
any_requires_grad = _private("_C._any_requires_grad")

# Computes an operator below autograd, inside the autograd.Function that is its gradient.
below_autograd = _private("_C._AutoDispatchBelowAutograd")
after_autograd_keyset = _private("_C._after_autograd_keyset")
_OpOverload = _private("_ops.OpOverload")
REGISTERS_AUTOGRAD = _has(any_requires_grad, below_autograd, after_autograd_keyset) and hasattr(_OpOverload, "redispatch")


def called_by(overload: Any) -> Callable:
    """What an overload of an operator calls: a function of torch's own, one call of Python earlier; where this torch has none, itself."""
    return getattr(overload, "_op", overload)


def is_view(overload: Any) -> bool:
    """Whether an overload of an operator returns one tensor, in the memory of its first argument; False where this torch does not tell."""
    if overload is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(overload, "_schema", None)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and str(schema.returns[0].type) == "Tensor"


_has_kernel = _private("_C._dispatch_has_kernel_for_dispatch_key")


def is_composed_of_others(overload: Any) -> bool:
    """Whether an overload of an operator has no kernels, and calls other operators; False where this torch does not tell."""
    return (_has_kernel is not None and hasattr(overload, "decompose") and _has_kernel(overload.name(), "CompositeImplicitAutograd")
            and not _has_kernel(overload.name(), "CPU") and not _has_kernel(overload.name(), "CUDA"))


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one dtype are in the same storage."""
    return one.dtype == other.dtype and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def writes_to_arguments(overload: Any) -> bool:
    """Whether an overload of an operator may write to its arguments; also where this torch does not tell."""
    schema = getattr(overload, "_schema", None)
    return schema is None or schema.is_mutable


# A tensor that a transform of torch.func has wrapped, and that outlived it, as what it wraps.
_unwrap_if_dead = _private("_C._functorch.unwrap_if_dead")
_Function: Any = torch.autograd.Function


def apply(function: Any, *inputs: Any) -> Any:
    """function.apply(*inputs) of an autograd.Function without a setup_context, where no transform is active, in half of the time: without
    torch's search for either in Python."""
    if _unwrap_if_dead is None:
        return function.apply(*inputs)
    return super(_Function, function).apply(*[
        _unwrap_if_dead(value) if value is not None and isinstance(value, torch.Tensor) else value for value in inputs])


# Tells whether autocast is on for any type of device, and turns it off for all.
_is_any_autocast_enabled = _private("_C._is_any_autocast_enabled")
_DisableAutocast = _private("_C._DisableAutocast")
_DISABLES_AUTOCAST = _has(_is_any_autocast_enabled, _DisableAutocast)
AUTOCASTS = ("cuda", "cpu")  # the types of devices for which operators have rules


# Whether autocast is on for a type of device that operators have rules for: torch's own function, as every operator asks.
is_any_autocast_enabled: Callable[[], bool] = \
    _is_any_autocast_enabled if _DISABLES_AUTOCAST else lambda: any(map(torch.is_autocast_enabled, AUTOCASTS))


def autocast_off() -> contextlib.AbstractContextManager:
    """`with autocast_off():` no type of device has autocast."""
    if _DISABLES_AUTOCAST:
        return _DisableAutocast()
    stack = contextlib.ExitStack()
    for device_type in AUTOCASTS:
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


# ---------------------------------------------------------------------------------------------------------- who watches a call

# Levels and flags are variables of their modules: whether they exist is found out here; their values are read at each call.
is_tracing = _private("_C._is_tracing")
profiler_enabled = _private("_C._autograd._profiler_enabled")
len_torch_dispatch_stack = _private("_C._len_torch_dispatch_stack")
len_torch_function_stack = _private("_C._len_torch_function_stack")
is_legacy_batchedtensor = _private("_C._functorch.is_legacy_batchedtensor")
peek_interpreter_stack = _private("_C._functorch.peek_interpreter_stack")
is_fwd_grad_enabled = _private("_C._is_fwd_grad_enabled")
forward_ad, profiler = torch.autograd.forward_ad, torch.autograd.profiler
HAS_LEVELS = hasattr(forward_ad, "_current_level")
HAS_PROFILER_FLAG = hasattr(profiler, "_is_profiler_enabled")
SEES_WATCHERS = HAS_LEVELS and _has(
    is_tracing, len_torch_dispatch_stack, len_torch_function_stack, is_legacy_batchedtensor, peek_interpreter_stack)
CALLS_KERNELS = REGISTERS_AUTOGRAD and SEES_WATCHERS and HAS_PROFILER_FLAG and _has(profiler_enabled)

# The modes that see the next operator; none where this torch tells none.
_mode_stack = _private("utils._python_dispatch._get_current_dispatch_mode_stack")

_detect_fake_mode = _private("_guards.detect_fake_mode")
_get_tracing_state = _private("_C._get_tracing_state")
_current_graph_task_id = _private("_C._current_graph_task_id")
_current_autograd_node = _private("_C._current_autograd_node")
_get_sequence_nr = _private("_C._autograd._get_sequence_nr")
_saved_tensors_hooks = _private("_C._autograd._top_saved_tensors_default_hooks")
_FakeTensor = _private("_subclasses.fake_tensor.FakeTensor")
_FunctionalTensor = _private("_subclasses.functional_tensor.FunctionalTensor")
_has_any_global_hook = _private("nn.modules.module._has_any_global_hook")
_call_impl = _private("nn.Module._call_impl")
_wrapped_call_impl = _private("nn.Module._wrapped_call_impl")
_resolve_process_group = _private("distributed.distributed_c10d._resolve_process_group")
_names_of_groups = _private("distributed.distributed_c10d._world.pg_names")
_get_default_store = _private("distributed.distributed_c10d._get_default_store")
_is_traceable_wrapper_subclass = _private("utils._python_dispatch.is_traceable_wrapper_subclass")

# Tensors without memory of their own, which an operator's fake takes.
FAKES: tuple[type, ...] = tuple(kind for kind in (_FakeTensor, _FunctionalTensor) if kind is not None)


def dispatch_modes() -> tuple:
    """The modes that see the next operator; without the name, none."""
    return () if _mode_stack is None else tuple(_mode_stack())


def is_transformed() -> bool:
    """Whether this is inside a transform of torch.func, such as torch.vmap; False where this torch cannot tell."""
    return peek_interpreter_stack is not None and peek_interpreter_stack() is not None


def current_trace() -> Any:
    """What traces eager calls at this moment: torch.jit's state, or the mode of fake tensors, as under torch.export, or that of a make_fx
    which traces real ones; None for nothing, and where this torch cannot tell."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return True if _get_tracing_state is None else _get_tracing_state()
    if _detect_fake_mode is not None and (
            torch.compiler.is_compiling() or len_torch_dispatch_stack is None or len_torch_dispatch_stack()):
        return _detect_fake_mode() or next((mode for mode in dispatch_modes() if type(mode).__name__ == "ProxyTorchDispatchMode"), None)
    return None


def is_in_backward() -> bool:
    """Whether autograd computes gradients on this thread, as where torch.utils.checkpoint repeats a forward; False where this torch
    cannot tell."""
    return _current_graph_task_id is not None and _current_graph_task_id() != -1


def loses_gradient() -> bool:
    """Whether this is a function that the reentrant torch.utils.checkpoint, or one like it, runs without gradients and will repeat.

    Unlike torch.no_grad, an autograd.Function's forward has forward-mode derivatives off as well.
    """
    return not torch.is_inference_mode_enabled() and (is_fwd_grad_enabled is None or not is_fwd_grad_enabled())


def repeated_for() -> tuple[int, int] | None:
    """What asks for a forward that autograd repeats now: the number of the call of backward, and that of a node of its graph. None outside
    backward, and where this torch does not tell."""
    node = None if _current_autograd_node is None or _get_sequence_nr is None or not is_in_backward() else _current_autograd_node()
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else (_current_graph_task_id(), number())


def next_node() -> int:
    """The number of the next node that this thread adds to a graph of autograd; 0 where this torch does not tell."""
    return 0 if _get_sequence_nr is None else _get_sequence_nr()


def is_in_a_function() -> bool:
    """Whether this is the forward of an autograd.Function, such as the reentrant torch.utils.checkpoint; where this torch does not tell,
    whether gradients are off."""
    return not torch.is_grad_enabled() and loses_gradient()


def is_of_a_checkpoint(hook: Any) -> bool:
    """Whether tensors are saved through this function in the first forward of a non-reentrant torch.utils.checkpoint; False where this
    torch calls it otherwise."""
    return getattr(hook, "__qualname__", "").startswith("_checkpoint_hook.")


def saved_tensors_hooks() -> tuple | None:
    """The functions through which saved tensors pass now, or None; also where this torch does not tell."""
    return None if _saved_tensors_hooks is None or torch.compiler.is_compiling() else _saved_tensors_hooks(True)


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules; False where this torch cannot tell."""
    return _has_any_global_hook is not None and _has_any_global_hook()


def calls_modules_alone() -> bool:
    """Whether a module's __call__ is torch's own, which nobody has patched, without hooks for all modules; False where this torch cannot
    tell."""
    module = torch.nn.Module
    return (_is_torchs(_call_impl) and getattr(module, "_call_impl", None) is _call_impl and module.__call__ is _wrapped_call_impl
            and not has_global_hooks())


def _is_torchs(method: Any) -> bool:
    return getattr(method, "__module__", None) == "torch.nn.modules.module"


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of this name, as torch's functional collectives find it."""
    if _resolve_process_group is None:
        raise NotImplementedError("this torch finds no process group by its name, as torch.compile needs for layers with spread experts")
    return _resolve_process_group(name)


def number_of_process_groups() -> int:
    """How many groups this rank belongs to, by which torch.distributed names the next one; 0 where this torch does not tell."""
    return 0 if _names_of_groups is None else len(dist.distributed_c10d._world.pg_names)


def default_store() -> Any:
    """The store of the default process group. Raises NotImplementedError where this torch does not give it."""
    if _get_default_store is None:
        raise NotImplementedError("this torch does not give the default process group's store")
    return _get_default_store()


def wraps_tensors(tensor: torch.Tensor) -> bool:
    """Whether this is of a subclass whose elements are in other tensors, as those of quantised weights."""
    if _is_traceable_wrapper_subclass is None:
        return type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    return _is_traceable_wrapper_subclass(tensor)


# --------------------------------------------------------------------------------------------------- what torch.compile traces


def _tracer() -> Any:
    """What torch.compile traces with at this moment."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    return InstructionTranslator.current_tx().output


def is_in_a_checkpoint() -> bool:
    """Whether torch.compile, while it traces, is inside the function of exactly one torch.utils.checkpoint; False where this torch cannot
    tell: the graph breaks then, as at any side effect."""
    try:
        tracer = _tracer().current_tracer
        return tracer.description == "torch.utils.checkpoint.checkpoint" and tracer.parent.parent is None
    except (AttributeError, ImportError):
        return False


def begins_without_gradients() -> bool:
    """Whether gradients were off when the frame began that torch.compile traces, whose graph is guarded by that; True where this torch
    cannot tell."""
    try:
        return not _tracer().tracing_context.global_context.global_state["grad_enabled"][1]
    except (AttributeError, ImportError, KeyError):
        return True


def is_exporting() -> bool:
    """Whether torch.export traces. torch 2.11's torch.compile takes torch.compiler.is_exporting() for True in what it traces itself."""
    return torch.compiler.is_exporting()


def with_side_effects(function: Callable, *arguments: object) -> None:
    """Call `function` where torch.compile traces a checkpoint's function, whose side effects are allowed in here alone."""
    torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(function, *arguments)


# torch.compile calls these functions instead of tracing them. The attribute is what torch.compiler.assume_constant_result sets.
for _function in (is_in_a_checkpoint, begins_without_gradients, is_exporting, is_transformed):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
