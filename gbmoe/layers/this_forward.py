"""What can be known of a forward while it runs or is traced: whether something repeats it, transforms it, or takes its gradients away."""

from __future__ import annotations

from typing import Any

import torch


def is_in_one_checkpoint() -> bool:
    """Whether torch.compile, while it traces, is inside the function of exactly one torch.utils.checkpoint.

    Items kept inside nested checkpoints, or inside torch's other higher-order operators, cannot leave them.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        return tracer.description == "torch.utils.checkpoint.checkpoint" and tracer.parent.parent is None
    except (AttributeError, ImportError):  # this torch has other names for them: the graph breaks here, as at any side effect
        return False


def begins_without_gradients() -> bool:
    """Whether gradients were off when the frame began that torch.compile traces; its graph is guarded by that."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        state: Any = InstructionTranslator.current_tx().output.tracing_context.global_context.global_state
        return not state["grad_enabled"][1]
    except (AttributeError, ImportError, KeyError):  # this torch has other names for it
        return True


def is_transformed() -> bool:
    """Whether this is inside a transform of torch.func, such as torch.vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_repeated() -> bool:
    """Whether this eager forward runs while autograd computes gradients: torch.utils.checkpoint repeats it."""
    return torch._C._current_graph_task_id() != -1


def current_trace() -> Any:
    """What traces eager calls at this moment: torch.jit's state, or the mode of fake tensors, as under torch.export; None for nothing."""
    if torch._C._is_tracing():
        return torch._C._get_tracing_state()
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch._guards.detect_fake_mode()
    return None


def loses_gradient() -> bool:
    """Whether this is a function that the reentrant torch.utils.checkpoint, or one like it, runs without gradients and will repeat.

    Unlike torch.no_grad, an autograd.Function's forward has forward-mode derivatives off as well.
    """
    if torch.is_inference_mode_enabled():
        return False
    is_forward_mode_enabled = getattr(torch._C, "_is_fwd_grad_enabled", None)
    return is_forward_mode_enabled is None or not is_forward_mode_enabled()


# torch.compile calls these functions instead of tracing them. The attribute is what torch.compiler.assume_constant_result sets.
for _function in (is_in_one_checkpoint, begins_without_gradients, is_transformed):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
