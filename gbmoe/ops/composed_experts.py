"""The experts with any callable as activation: expert_mlp composed of separate operators.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gbmoe._checks import autocast_enabled, require
from gbmoe._define_operator import define, differentiable_once, may_be_batched, may_be_transformed, without_autocast
from gbmoe.launch import clear_rows_without_slot
from gbmoe.ops.gmm import computed_dtype, grouped
from gbmoe.ops.permute import padded_gather, padded_scatter


def composed_experts(x_TH, plan, sizes, w1_EFH, w2_EFH, v1_EFH, weights_TK, activation, engine, recompute):
    """expert_mlp composed of separate operators, for an activation without a kernel.

    Rows without a slot may hold anything in h, in g and in the gradient that comes back. The gradients of tensors that the activation
    captures sum over all rows, so the activation is given zeros in those rows, and gradients of zero.
    """
    compiled, transformed = torch.compiler.is_compiling(), may_be_transformed()
    recompute = recompute and torch.is_grad_enabled() and not transformed
    eager = not compiled and not transformed  # a transform of torch.func takes no write to an argument, and no autograd.Function of ours
    in_place = plan.is_in_expert_order and eager
    xp_PH = _RowsInPlace.apply(x_TH, plan.slot_of_row_P) if in_place else padded_gather(x_TH, plan)
    masks = not eager or plan.pads_within_experts
    live_P1 = plan.slot_of_row_P.unsqueeze(1) >= 0 if masks else None

    def masked(h_PF, g_PF):
        # The activation is given a copy, which it may overwrite, because h is saved.
        a_PF = torch.where(live_P1, _result_of(activation, torch.where(live_P1, h_PF, 0)), 0)
        return a_PF if g_PF is None else a_PF * g_PF

    if not eager:
        # A compiler fuses torch.where with the activation, and sees forward and backward at once: with this mark it computes the
        # activation again in backward, but no product.
        h_PF = _grouped(xp_PH, w1_EFH, sizes, True, engine)
        g_PF = None if v1_EFH is None else _grouped(xp_PH, v1_EFH, sizes, True, engine)
        a_PF = checkpoint(masked, h_PF, g_PF, use_reentrant=False) if recompute else masked(h_PF, g_PF)
        y_PH = _grouped(a_PF, w2_EFH, sizes, False, engine)
    else:
        y_PH = _composed_eagerly(xp_PH, plan.slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH, activation, engine, recompute,
                                 masked if masks else None)
    return padded_scatter(y_PH, plan, weights_TK)


def _composed_eagerly(xp_PH, slot_of_row_P, sizes, w1_EFH, w2_EFH, v1_EFH, activation, engine, recompute, masked):
    """y [P,H]. `masked` computes the activation where rows without a slot lie among an expert's rows, and is None elsewhere.

    If all rows without a slot lie after the last expert, no product reads them. They are set to zero for the activation alone, in
    place, in a product's result that nothing else refers to, which takes no pass over [P,F] beyond the activation's own.

    If they lie among an expert's rows, the GEMMs of the weights' gradients read them. There act(0) is a factor of a and of dg, and its
    slope at 0 is one of dh. The other factors are zeros, but a NaN or an infinity times zero is NaN. The activation's result, and the
    gradient that it hands back, may be its own memory, which must not be written to. So `masked` makes copies. Only g is cleared in place:
    it is a factor of the gradient of act(h), where anomaly detection would see what rows that no product reads may hold.
    """
    w2_EFH = w2_EFH.to(computed_dtype(w2_EFH))
    cleared_P = slot_of_row_P if masked is None else None
    overwrites = computed = False
    version_of_w2 = _version(w2_EFH)

    def up(w_EFH, cleared_P):
        h_PF = _grouped(xp_PH, w_EFH, sizes, True, engine)
        if cleared_P is not None:
            with torch.no_grad():  # gradients need no change, because those of these rows are not used
                _clear_rows_without_slot(cleared_P, h_PF)
        return h_PF

    def activated(h_PF, g_PF):
        a_PF = _result_of(activation, h_PF.clone() if overwrites else h_PF)
        return a_PF if g_PF is None else a_PF * g_PF

    def activated_product(h_PF, g_PF):
        # When it is called again in backward, only the tensors that it saves are needed, not the product.
        nonlocal overwrites, computed
        first, version = not computed, h_PF._version if recompute else None
        a_PF = (masked or activated)(h_PF, g_PF)
        if recompute and first and h_PF._version != version:
            overwrites = True
            return None
        computed = True
        # What the first call saves is dropped, and with it torch's own check. The gradient of w2 alone needs no w2.
        if a_PF.requires_grad and _version(w2_EFH) != version_of_w2:
            raise RuntimeError("expert_mlp: w2 has been modified by an inplace operation between forward and backward: expected version"
                               f" {version_of_w2}, got {_version(w2_EFH)}")
        return _DownProduct.apply(a_PF.to(computed_dtype(a_PF)), w2_EFH, sizes, cleared_P, engine, first)

    g_PF = None if v1_EFH is None else up(v1_EFH, slot_of_row_P)
    if not recompute:
        return activated_product(up(w1_EFH, cleared_P), g_PF)
    y_PH = checkpoint(activated_product, up(w1_EFH, cleared_P), g_PF, use_reentrant=False)
    if y_PH is None:
        # The activation has overwritten the pre-activation, which backward needs. So that is computed once more, and copied this time.
        y_PH = checkpoint(activated_product, up(w1_EFH, cleared_P), g_PF, use_reentrant=False)
    return y_PH


def _version(tensor: torch.Tensor) -> int | None:
    """What an operation that writes to the tensor counts up; None for a tensor of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _result_of(activation: Callable, h_PF: torch.Tensor) -> torch.Tensor:
    """activation(h) [P,F], checked: what follows would name w2 or nothing where the caller's function is wrong."""
    a_PF = activation(h_PF)
    require(isinstance(a_PF, torch.Tensor), "expert_mlp", "activation", "a callable that returns a torch.Tensor", type(a_PF).__name__,
            TypeError)
    require(a_PF.shape == h_PF.shape, "expert_mlp", "activation",
            lambda: f"a result with the shape of its argument, {list(h_PF.shape)}", list(a_PF.shape))
    require(a_PF.dtype == h_PF.dtype or autocast_enabled(h_PF.device.type), "expert_mlp", "activation",
            lambda: f"a result with the dtype of its argument, {h_PF.dtype}", a_PF.dtype, TypeError)
    return a_PF


def _grouped(a, b, sizes, trans_b, engine):
    return grouped(a, b, sizes, False, trans_b, engine=engine)


_clear_rows_without_slot = define(
    "clear_rows_without_slot(Tensor slot_of_row, Tensor(a!) rows) -> ()",
    reference=clear_rows_without_slot, fake=lambda slot_of_row, rows: None,
)


class _RowsInPlace(torch.autograd.Function):
    """x [P,H] as it is, where padded_gather would copy each row to its own place; its gradient is zeros where a row has no slot."""

    @staticmethod
    def forward(ctx, x_PH, slot_of_row_P):
        ctx.save_for_backward(slot_of_row_P)
        return x_PH.view_as(x_PH)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_PH):
        (slot_of_row_P,) = ctx.saved_tensors
        return torch.where(slot_of_row_P.unsqueeze(1) >= 0, grad_PH, 0), None


class _DownProduct(torch.autograd.Function):
    """a @ w2. Without `compute` only a and w2 are saved, and the result is undefined.

    With `slot_of_row` the gradient of a is zero where a row has no slot.
    """

    @staticmethod
    def forward(ctx, a_PF, w2_EFH, sizes, slot_of_row_P, engine, compute):
        need_a, need_w2 = ctx.needs_input_grad[:2]
        ctx.engine = engine
        ctx.save_for_backward(a_PF if need_w2 else None, w2_EFH if need_a else None, sizes, slot_of_row_P)
        if not compute:
            return a_PF.new_empty(1, 1).expand(a_PF.size(0), w2_EFH.size(2))
        return _grouped(a_PF, w2_EFH, sizes, False, engine)

    @staticmethod
    @differentiable_once
    @without_autocast
    def backward(ctx, grad_PH):
        a_PF, w2_EFH, sizes, slot_of_row_P = ctx.saved_tensors
        grad_a = None if w2_EFH is None else _grouped(grad_PH, w2_EFH, sizes, True, ctx.engine)
        if grad_a is not None and slot_of_row_P is not None:
            if may_be_batched(grad_a):
                grad_a = torch.where(slot_of_row_P.unsqueeze(1) >= 0, grad_a, 0)
            else:
                _clear_rows_without_slot(slot_of_row_P, grad_a)
        grad_w2 = None if a_PF is None else grouped(a_PF, grad_PH, sizes, True, engine=ctx.engine)
        return grad_a, grad_w2, None, None, None, None
