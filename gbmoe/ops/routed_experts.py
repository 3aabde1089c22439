"""routed_experts: a router, the plan of its choice and the experts, as one autograd node, whose launches are one program.

It computes what route_tokens, RoutingPlan.from_experts and expert_mlp do one after the other, with the same kernels. A layer of few tokens
is host-bound: each of the three takes longer on the host, where arguments are checked and a node of Python is called in backward, than on
the device. Here arguments are checked when a kind of call comes for the first time.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden, F ffn hidden. x, its gradient and the result have H elements in
their last dimension and T in the others together; experts' weights are [E*F,H], or one matrix an expert in a WeightLayout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gbmoe import _torch_names as names, programs
from gbmoe._define_operator import is_profiled, is_unseen, is_watched, without_autocast
from gbmoe.engines.resolved import decides_by_kind
from gbmoe.ops.expert_arguments import check_arguments, check_biases, matrices
from gbmoe.ops.experts import (
    experts_gradients,
    experts_gradients_by_operator,
    experts_inputs,
    experts_kernel,
    forward_operator,
)
from gbmoe.ops.plan_sizes import sizes_and_engine
from gbmoe.ops.route_tokens import router_gradients, router_inputs, router_kernel, router_operator, saved_of_router
from gbmoe.plan import RoutingPlan
from gbmoe.programs import Programs
from gbmoe.router_function import RouterFunction
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout


class RouterCall(NamedTuple):
    """What route_tokens is called with; see there. `tensors` are weight [E,H], bias [E] or None, expert_bias [E] or None, and padding_mask
    [T] or None."""

    tensors: tuple[torch.Tensor | None, ...]
    top_k: int
    normalize: float | None
    function: RouterFunction | None
    engine: str | None
    scores_dtype: torch.dtype | None


class ExpertsCall(NamedTuple):
    """What expert_mlp is called with; see there. `tensors` are w1, w2 and v1, the last one None without a gate, each [E*F,H],
    or one matrix an expert in the layout of this WeightLayout.code, and w1_bias, w2_bias and v1_bias, or None. The activation has a kernel,
    and is given by its name."""

    tensors: tuple[torch.Tensor | None, ...]
    activation: str
    engine: str
    batch_invariant: bool
    keep_gathered_rows: bool
    layout: str = MEGABLOCKS.code


class RoutedExperts(NamedTuple):
    """out in the shape of x, scores [T,E] and logsumexp [T], which have gradients; experts [T,K] and counts [E], which have none."""

    out: torch.Tensor
    scores_TE: torch.Tensor
    logsumexp_T: torch.Tensor
    experts_TK: torch.Tensor
    counts_E: torch.Tensor


def routed_experts(x: torch.Tensor, router: RouterCall, of_experts: ExpertsCall) -> RoutedExperts:
    """The experts' weighted sums for the router's choice. To be called where may_be_one_node says so of all tensors.

    Raises:
        TypeError, ValueError: as route_tokens and expert_mlp do.
    """
    w1, _, v1, *_ = of_experts.tensors
    tensors = (x, *router.tensors, *of_experts.tensors)
    save = torch.is_grad_enabled() and names.any_requires_grad(*tensors)
    keep_rows = save and of_experts.keep_gathered_rows and names.any_requires_grad(w1, v1)
    options = (*router[1:], *of_experts[1:4], of_experts.layout, save, keep_rows)
    if save:
        return RoutedExperts(*names.apply(_RoutedExperts, options, x, *tensors))
    return RoutedExperts(*_computed(tensors, options)[0])


def _computed(tensors: tuple[torch.Tensor | None, ...], options: tuple) -> tuple[tuple, tuple]:
    inputs = [*tensors, options]
    return _forward(inputs) if not tensors[0].is_cuda or is_profiled() else _forward_programs(inputs)  # type: ignore[union-attr]


def _forward(inputs: list) -> tuple[tuple, tuple]:
    """The parts of RoutedExperts, and what is kept for backward, of the list (x, the tensors of a RouterCall and of an ExpertsCall,
    options), which is emptied."""
    x, weight_EH, bias_E, expert_bias_E, padding_mask_T, w1, w2, v1, *biases, options = inputs
    inputs.clear()
    num_experts, x_TH = weight_EH.size(0), x.reshape(-1, x.size(-1))
    weights = _one_each(w1, w2, v1, num_experts)
    top_k, normalize, function, router_engine, scores_dtype, activation, engine, batch_invariant, code, save, keep_rows = options
    layout = WeightLayout.of_code(code)
    of_experts = matrices(layout, *weights)
    routing = router_inputs(
        x_TH, weight_EH, top_k, normalize=normalize, engine=router_engine, bias=bias_E, function=function, expert_bias=expert_bias_E,
        padding_mask=padding_mask_T, scores_dtype=scores_dtype)
    profiled = is_profiled()  # then by operators, whose names are seen
    scores_TE, weights_TK, experts_TK, logsumexp_T, logits_TE = (router_operator if profiled else router_kernel)(*routing)
    plan = RoutingPlan.from_experts(experts_TK, num_experts, check="none")  # these ids are in range
    check_arguments(x_TH, plan, *of_experts, weights_TK)
    check_biases(x_TH, of_experts[0].shape, v1, biases, layout)
    sizes_E, resolved = sizes_and_engine(plan, x_TH, of_experts[0].shape, engine, batch_invariant)
    if not decides_by_kind(resolved):
        programs.refuse("the engine decides by more than the kind of call")
    arguments = experts_inputs(x_TH, plan, weights_TK, weights, tuple(biases), activation, sizes_E, resolved, save=save,
                               keep_rows=keep_rows, keep_weights=False, scale=1.0, layout=layout)
    out_TH, h_PF, g_PF, rows_PH, *_ = (forward_operator if profiled else experts_kernel)(*arguments)
    # Not a view: hooks on one are lost where it is written to, and fully_shard has hooks on results.
    out = torch.ops.aten._unsafe_view.default(out_TH, x.shape)
    results = out, scores_TE, logsumexp_T, experts_TK, plan.counts_E
    if not save:
        return results, ()
    of_router = saved_of_router(routing, scores_TE, logits_TE)
    return results, (*of_router, weights_TK, *arguments[2:5], h_PF, g_PF, rows_PH, resolved)


_forward_programs = Programs(_forward, "routed_experts")


def _one_each(w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, num_experts: int) -> tuple:
    """One matrix an expert."""
    return tuple(w if w is None or w.dim() == 3 else w.view(num_experts, -1, w.size(1)) for w in (w1, w2, v1))


class _RoutedExperts(torch.autograd.Function):
    """Inputs are the options, x twice, and the tensors of a RouterCall and of an ExpertsCall. Autograd adds the gradient of x from the
    experts and then that from the router to other gradients of x, as it would add those of two nodes: sums have the same bits."""

    @staticmethod
    def forward(ctx, options, x_of_experts, *tensors):
        results, (of_scores, code, kept_TE, *of_experts, resolved) = _computed(tensors, options)
        ctx.set_materialize_grads(False)
        if names.any_requires_grad(*tensors[:3]):
            ctx.mark_non_differentiable(*results[3:])
        else:
            ctx.mark_non_differentiable(*results[1:])
        x, weight_EH, bias_E, _, padding_mask_T, *parameters = tensors
        bias_dtype = None if bias_E is None else bias_E.dtype
        ctx.options = of_scores, code, (x.dtype, weight_EH.dtype, bias_dtype), weight_EH.size(0), options[5], resolved, options[8]
        if not names.any_requires_grad(x, weight_EH, bias_E):
            weight_EH = padding_mask_T = kept_TE = None  # these may be written to before backward
        elif not x.requires_grad:
            weight_EH = None
        ctx.save_for_backward(x, weight_EH, padding_mask_T, kept_TE, results[3], *of_experts[:4], *parameters, *of_experts[4:])
        return results

    @staticmethod
    @without_autocast
    def backward(ctx, grad_out, grad_scores_TE, grad_logsumexp_T, *_):
        if grad_out is None and grad_scores_TE is None and grad_logsumexp_T is None:
            return (None,) * 13
        tensors = [grad_out, grad_scores_TE, grad_logsumexp_T, *ctx.saved_tensors]
        unseen = is_unseen(tensors[3], *tensors)
        inputs = [*tensors, (*ctx.options, ctx.needs_input_grad)]
        del tensors
        if torch.is_grad_enabled() or (not unseen and is_watched(*inputs)):
            return _gradients(inputs, by_operators=True)
        ctx.maybe_clear_saved_tensors()
        return _backward_programs(inputs) if unseen else _gradients(inputs)


def _gradients(inputs: list, by_operators: bool = False) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a node's inputs of the list (the results' gradients, what was saved, options), which is emptied. With `by_operators`
    every launch is an operator that autograd, modes and transforms see."""
    grad_out, grad_scores_TE, grad_logsumexp_T, *saved, options = inputs
    x, weight_EH, padding_mask_T, kept_TE, experts_TK, weights_TK, *tables, w1, w2, v1, b1, b2, bv, h, g, rows = saved
    of_forward = [b1, b2, bv, h, g, rows]
    del saved, h, g, rows
    inputs.clear()
    of_scores, code, dtypes, num_experts, activation, resolved, layout, needs = options
    _, _, need_x, need_weight, need_bias, _, _, *need_parameters = needs
    need_router, x_TH = need_x or need_weight or need_bias, x.reshape(-1, x.size(-1))
    dx_TH: torch.Tensor | None = None
    dweights_TK: torch.Tensor | None = None
    dparameters: list[torch.Tensor | None] = [None] * 6
    if grad_out is not None:
        of_experts = [grad_out.reshape(x_TH.shape), x_TH, weights_TK, *tables, *_one_each(w1, w2, v1, num_experts),
                      *of_forward, activation, resolved, 1.0, layout, (need_x, need_router, *need_parameters)]
        of_forward.clear()
        dx_TH, dweights_TK, *dparameters = (experts_gradients_by_operator if by_operators else experts_gradients)(of_experts)
        dparameters = [d if d is None or d.shape == w.shape else d.view(w.shape) for d, w in zip(dparameters, (w1, w2, v1, b1, b2, bv))]
    of_router: tuple[torch.Tensor | None, ...] = (None,) * 3
    if need_router and not (dweights_TK is None and grad_scores_TE is None and grad_logsumexp_T is None):
        operands = x_TH if need_weight else None, weight_EH if need_x else None
        of_router = router_gradients([grad_scores_TE, dweights_TK, grad_logsumexp_T, *operands, kept_TE, experts_TK, padding_mask_T, code,
                                      of_scores, *dtypes[:2], dtypes[2] if need_bias else None])
    dx, dx_of_router = (None if d is None else d.view(x.shape) for d in (dx_TH, of_router[0]))
    return None, dx, dx_of_router, *of_router[1:], None, None, *dparameters


_backward_programs = Programs(_gradients, "routed_experts_backward")
