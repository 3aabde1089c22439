"""How many tokens each expert of a layer gets in training, added up on the device until the experts' biases are moved.

Shape suffixes: E experts.
"""

from __future__ import annotations

import torch

from gbmoe import _torch_names
from gbmoe._define_operator import define


def _add(counts_E: torch.Tensor, without_gradients: bool, total_E: torch.Tensor) -> None:
    # What a graph cannot know when it is traced: that an eager checkpoint calls it, or that the caller has gradients off for good.
    if not _torch_names.is_in_backward() and (not without_gradients or _torch_names.loses_gradient()):
        total_E.add_(counts_E.to(total_E.device))


_add_in_graph = define("add_token_counts(Tensor counts_E, bool without_gradients, Tensor(a!) total_E) -> ()",
                       reference=_add, fake=lambda *_: None)


def add(counts_E: torch.Tensor, total_E: torch.Tensor) -> None:
    """total_E += counts_E, int64 [E], if this is a forward that is to be trained: with gradients, and counted once where
    torch.utils.checkpoint, also the reentrant one, repeats it in backward.

    The host does not wait, and a CUDA graph that records the forward adds in every replay. What torch.export, make_fx and torch.jit.trace
    trace, and what transforms of torch.func compute, is not counted.
    """
    if torch.compiler.is_dynamo_compiling():
        without_gradients = not torch.is_grad_enabled()
        may_be_trained = not without_gradients or _torch_names.begins_without_gradients()
        if may_be_trained and not _torch_names.is_transformed() and not _torch_names.is_exporting():
            _add_in_graph(counts_E, without_gradients, total_E)
    elif not (_torch_names.is_transformed() or _torch_names.current_trace() is not None or counts_E.is_meta):
        _add(counts_E, not torch.is_grad_enabled(), total_E)
