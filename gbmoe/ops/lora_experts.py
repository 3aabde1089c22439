"""expert_mlp with adapters (LoRA), as one operator: weights are read where they lie, and nothing of their size is made.

Saved for backward are x, the pre-activations, x @ A1.T and a @ A2.T of each row, and the plan. What is computed is in
gbmoe/ops/lora_forward_backward.py.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gbmoe import engines
from gbmoe._checks import require
from gbmoe._define_operator import define, may_be_transformed, positions
from gbmoe.engines.resolved import Resolved, decides_by_kind
from gbmoe.lora_factors import ExpertLora, LowRankOperands, low_rank_operands
from gbmoe.ops import expert_forward_backward, flops, saved_for_backward
from gbmoe.ops.activations import activation_name
from gbmoe.ops.expert_forward_backward import Gradients, Saved
from gbmoe.ops.gmm import computed_dtype
from gbmoe.ops.gradient_scale import with_scaled_gradients
from gbmoe.ops.local_transport import local_transport
from gbmoe.ops.lora_forward_backward import LowRankGradients, LowRankPass
from gbmoe.ops.pass_weights import is_paired, weights_of_pass
from gbmoe.ops.plan_sizes import sizes_and_engine
from gbmoe.plan import RoutingPlan
from gbmoe.programs import Programs
from gbmoe.weight_layout import WeightGradients, WeightLayout


def low_rank_experts(
    x_TH: torch.Tensor, plan: RoutingPlan, weights: tuple, weights_TK: torch.Tensor | None, biases: tuple, lora: ExpertLora,
    activation: str | Callable, engine: str, batch_invariant: bool, scale: float, layout: WeightLayout,
) -> torch.Tensor:
    """expert_mlp of arguments that it has checked, with adapters. `weights` and `biases` are the parameters, of w1, w2 and v1; `scale` is
    that of all their gradients and of the factors'. Raises TypeError and ValueError as expert_mlp says."""
    w1, w2, v1 = weights
    w1_EFH, _, v1_EFH = layout.matrices(w1, w2, v1)
    operands = low_rank_operands(lora, layout, w1_EFH, v1_EFH is not None, computed_dtype(x_TH), "expert_mlp")
    name = activation_name(activation)
    require(name is not None, "expert_mlp", "activation", "one that has a kernel, with lora", activation)
    sizes, resolved = sizes_and_engine(plan, x_TH, w1_EFH.shape, engine, batch_invariant)
    row_of_slot_TK = None if plan.is_in_expert_order else plan.row_of_slot_TK
    leaves = with_scaled_gradients(scale, w1, w2, v1, *biases, *operands, one_operator=True)
    records = torch.is_grad_enabled() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    save = records and (any(t is not None and t.requires_grad for t in (x_TH, weights_TK, *leaves)) or may_be_transformed())
    return forward_operator(x_TH, weights_TK, row_of_slot_TK, plan.slot_of_row_P, sizes, *leaves, name, resolved, save, layout.code)[0]


# ------------------------------------------------------------------------------------------------------------ operator
#
# Arguments are those of gbmoe::expert_mlp, and LowRankOperands.


def _columns(layout: str, engine: str | Resolved, gated: bool) -> str:
    """How up_b divides, see LowRankPass."""
    if not gated or is_paired(layout, engine):
        return "whole"
    where = WeightLayout.of_code(layout)
    return where.gate_up if where.is_combined else "gate_first"


def _forward(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a, down_b, activation,
             engine, save, layout):
    """Returns (out [T,H], h [P,F], g [P,F], t [P,R], s [P,R]). All but the first are empty where nothing is saved, g without a gate and of
    pairs, of which h is [P,2F], t without adapters of up, and s without those of down."""
    matrices = WeightLayout.of_code(layout).matrices(w1, w2, v1)
    experts = engines.for_experts(engine, x, slot_of_row.size(0), matrices[0], sizes)
    low_rank = LowRankPass(LowRankOperands(up_a, up_b, down_a, down_b), _columns(layout, engine, matrices[2] is not None))
    of_pass = weights_of_pass(layout, engine, w1, matrices, (w1_bias, w2_bias, v1_bias), low_rank=low_rank)
    transport = local_transport(x, row_of_slot, slot_of_row, weights)
    out_TH, h_PF, g_PF = expert_forward_backward.forward(transport, experts, of_pass, sizes, activation, save)
    of_ranks = (low_rank.t_PR, low_rank.s_PR) if save else (None, None)
    return (out_TH, *[out_TH.new_empty(0) if t is None else t for t in (h_PF, g_PF, *of_ranks)])


def _forward_fake(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a, down_b,
                  activation, engine, save, layout):
    w1, w2, v1 = WeightLayout.of_code(layout).matrices(w1, w2, v1)
    rows, ffn, paired = slot_of_row.size(0), w1.size(1), is_paired(layout, engine)
    return (x.new_empty(x.shape), x.new_empty((rows, 2 * ffn if paired else ffn) if save else 0),
            x.new_empty((rows, ffn) if save and v1 is not None and not paired else 0),
            x.new_empty((rows, up_a.size(1)) if save and up_a is not None else 0),
            x.new_empty((rows, down_a.size(1)) if save and down_a is not None else 0))


def _backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a, down_b, h, g,
              t, s, activation, engine, layout, *needed):
    grads = _gradients([grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a,
                        down_b, h, g, t, s, activation, engine, layout, needed])
    return tuple(grad.new_empty(0) if t is None else t for t in grads)  # separate tensors: an operator's results may not alias


def _gradients(inputs: list) -> tuple[torch.Tensor | None, ...]:
    """The gradients of _LEAVES, each None where `needed` does not want it, of the list (grad, the tensors that forward saved, activation,
    engine, layout, needed). It is emptied, so that each tensor is free again as soon as it has been used, unless the caller has other
    references to it."""
    grad, *saved, activation, engine, layout, needed = inputs
    inputs.clear()
    x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1 = saved[:8]
    where = WeightLayout.of_code(layout)
    matrices = where.matrices(w1, w2, v1)
    wanted, of_factors = Gradients(*needed[:8]), LowRankGradients(*needed[8:])
    if v1 is None and where.is_combined and not is_paired(layout, engine):
        wanted = replace(wanted, v1=wanted.w1, v1_bias=wanted.w1_bias)
    h, g, t, s = saved[15:]
    low_rank = LowRankPass(LowRankOperands(*saved[11:15]), _columns(layout, engine, matrices[2] is not None), of_factors,
                           t if t.dim() == 2 else None, s if s.dim() == 2 else None)
    of_pass = weights_of_pass(layout, engine, w1, matrices, tuple(saved[8:11]), low_rank=low_rank)
    gradients = WeightGradients(where, w1, w2, v1)
    of_forward = Saved(h, g if g.dim() == 2 else None)
    transport = local_transport(x, row_of_slot, slot_of_row, weights, grad)
    experts = engines.for_experts(engine, x, slot_of_row.size(0), matrices[0], sizes)
    del saved, x, weights, w1, w2, v1, matrices, h, g, t, s  # copies that autocast made of weights are held by nothing else
    of_parameters = expert_forward_backward.backward(transport, experts, of_pass, sizes, activation, of_forward, wanted, gradients)
    return *of_parameters, *low_rank.gradients_in_order()


_programs = Programs(_gradients, "expert_mlp_low_rank_backward")


def _backward_fake(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a, down_b,
                   h, g, t, s, activation, engine, layout, *needed):
    leaves = (x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a, down_b)
    return saved_for_backward.fake_gradients(grad, leaves, needed)


def _setup_context(ctx, inputs, output):
    *tensors, activation, engine, save, layout = inputs
    saved_for_backward.save(ctx, tensors, output, (activation, engine, layout), save)


def _autograd_backward(ctx, grad, *_):
    return saved_for_backward.gradients_by_name(ctx, grad, _LEAVES, _POSITION_OF, backward_operator, _gradients, _programs)


_FACTORS = ("up_a", "up_b", "down_a", "down_b")
_LEAVES = ("x", "weights", "w1", "w2", "v1", "w1_bias", "w2_bias", "v1_bias", *_FACTORS)  # as backward's results
_TENSORS = ("Tensor x, Tensor? weights, Tensor? row_of_slot, Tensor slot_of_row, Tensor sizes, Tensor w1, Tensor w2, Tensor? v1,"
            " Tensor? w1_bias, Tensor? w2_bias, Tensor? v1_bias, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b")
_FORWARD = (f"expert_mlp_low_rank({_TENSORS}, str activation, str engine, bool save, str layout) -> "
            "(Tensor, Tensor, Tensor, Tensor, Tensor)")
_POSITION_OF = positions(_FORWARD)

forward_operator = define(
    _FORWARD, reference=_forward, fake=_forward_fake, setup_context=_setup_context, backward=_autograd_backward,
    autocast=("x", "w1", "w2", "v1", "w1_bias", "w2_bias", "v1_bias", *_FACTORS), named="engine",
    waits=lambda x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu", flops=flops.expert_mlp_low_rank,
    recorded=lambda *inputs: decides_by_kind(inputs[_POSITION_OF["engine"]]),
)

backward_operator = define(
    f"expert_mlp_low_rank_backward(Tensor grad, {_TENSORS}, Tensor h, Tensor g, Tensor t, Tensor s, str activation, str engine, "
    "str layout, "
    + ", ".join(f"bool need_{name}" for name in _LEAVES) + ") -> (" + ", ".join(["Tensor"] * len(_LEAVES)) + ")",
    reference=_backward, fake=_backward_fake,
    waits=lambda grad, x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu",
    flops=flops.expert_mlp_low_rank_backward, named="engine",
)
