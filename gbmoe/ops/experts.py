"""expert_mlp: every expert's MLP or GLU over the tokens routed to it, from x to the weighted sum, as one operator.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan,
Y bytes.

Saved for backward are x, the pre-activations h (and g) and the plan. Backward gathers x's rows again, unless they are to be kept, and
computes the activation again; it computes the router weights' gradient from the activation, so that the experts' output y is not needed
(csrc/activation_kernels.cu has the formulas). What is computed, and in which order, is in gbmoe/ops/expert_forward_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice

import torch

from gbmoe import _torch_names as names, engines
from gbmoe._checks import require
from gbmoe._define_operator import (
    define,
    is_batched,
    is_unseen,
    is_watched,
    may_be_transformed,
    positions,
    profiled,
    without_autocast,
)
from gbmoe.engines.resolved import Resolved, decides_by_kind
from gbmoe.float8 import Float8BlockScaling, ScaledWeights, keeps_weights
from gbmoe.lora_factors import ExpertLora
from gbmoe.ops import expert_forward_backward, flops, saved_for_backward
from gbmoe.ops.composed_experts import composed_experts
from gbmoe.ops.expert_arguments import checked_call
from gbmoe.ops.expert_forward_backward import Gradients, Saved
from gbmoe.ops.gmm import computed_dtype
from gbmoe.ops.gradient_scale import scales_exactly, with_scaled_gradients
from gbmoe.ops.gradient_sink import SunkGradients, WeightGradientSink
from gbmoe.ops.local_transport import local_transport
from gbmoe.ops.lora_experts import low_rank_experts
from gbmoe.ops.pass_weights import is_paired, weights_of_pass
from gbmoe.ops.permute import gather_slots, padded_scatter
from gbmoe.ops.plan_sizes import sizes_and_engine
from gbmoe.ops.separate_experts import NAMES, reads_lists, stacks, stacks_and_lists, with_lists
from gbmoe.plan import RoutingPlan
from gbmoe.programs import Programs
from gbmoe.separate_weights import Lists, StackOrList
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients, WeightLayout


def expert_mlp(
    x_TH: torch.Tensor, plan: RoutingPlan, w1_EFH: StackOrList, w2_EFH: StackOrList, v1_EFH: StackOrList | None = None,
    *, weights_TK: torch.Tensor | None = None, activation: str | Callable = "silu", engine: str = "auto",
    recompute_activation: bool = True, batch_invariant: bool = False, fp8_recipe: Float8BlockScaling | None = None,
    keep_gathered_rows: bool = False, weight_gradient_scale: float = 1, layout: WeightLayout = MEGABLOCKS,
    w1_bias: torch.Tensor | None = None, w2_bias: torch.Tensor | None = None, v1_bias: torch.Tensor | None = None,
    weights_on: str = "output", gradient_sink: WeightGradientSink | None = None, lora: ExpertLora | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * mlp_e(x[t]) with e the expert of slot (t,j), in float32 and rounded once.

    mlp_e(x) = act(x @ w1[e].T) @ w2[e], or with v1 the GLU (act(x @ w1[e].T) * (x @ v1[e].T)) @ w2[e]; MegaBlocks' weight
    layout. A bias is added to each expert's product. `hopper` adds it before the product is rounded, and so does `tensor_core`
    for few rows an expert. Other engines add it afterwards. Differentiable in x, weights, w1, w2, v1 and the biases, any of which may be
    frozen.

    Args:
        x_TH: [T,H], bfloat16, float16, float32 or float64.
        plan: the plan of the router's choice, on the device of x.
        w1_EFH, w2_EFH, v1_EFH: [E,F,H], dtype and device of x (under autocast they are cast with x). Each may also be a list of E matrices
            [F,H] anywhere in memory, as parameters of their own, each of which gets its gradient. `hopper`, `tensor_core` and recipes of
            float8 read up to 256 of them where they lie, at multiples of 16 bytes and with like strides (w1's and v1's together, unless
            those lie alike). Otherwise they are copied into one tensor, unless they are parts of one already (gbmoe.stacked): for other
            engines, with lora, an activation without a kernel or a weight_gradient_scale that is no power of two, under FlopCounterMode,
            where autocast casts them, and where w1 is a list and v1 is none. Inside of torch.compile they always are.
        weights_TK: router weights [T,K], any floating dtype; None gives every slot the weight one.
        activation: a name ("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "identity") or a callable on [P,F], which returns the
            same shape and dtype, may hold parameters and may write to its argument. Torch's own functions and modules of those names
            are recognised and take the fused path, unless they have hooks or are altered.
        engine: the engine of the grouped GEMMs; see gbmoe.engines.
        recompute_activation: for callables without a kernel: save the pre-activation and call the activation again in backward
            (True), as torch.utils.checkpoint does, or keep its graph (False). The fused path always recomputes. With True, a callable
            that writes to its argument costs a copy, one more product and one more call. A write that torch does not see (through
            .data, or by a kernel that does not declare it) makes the saved pre-activation wrong.
        batch_invariant: a token's output has the same bits whatever other tokens there are, however many, and however they are routed.
            On Hopper the engine `hopper` does this, on other GPUs `tensor_core`; with any other engine ValueError says why not. A
            callable without a kernel must have this property itself. It concerns forward only: gradients of weights are sums over tokens.
        fp8_recipe: compute products of rows in float8, see gbmoe.Float8BlockScaling; on the CPU and on compute capability 9.0, for
            bfloat16 and float16, with H and F multiples of 16. Not together with batch_invariant or a named engine.
        keep_gathered_rows: keep the rows of x that forward gathers until backward, which then gathers one time less. They take P * H
            elements of memory until then. The option has no effect where there are none to gather (tokens in expert order; float8), where
            `hopper` gathers inside backward's products too (silu and tanh-gelu up to F = 512), and for a callable without a kernel, whose
            rows are kept anyway. Where forward would gather inside its first product, or has few rows an expert, it gathers them only for
            backward. Where `hopper` gathers for both w1's and v1's gradients in one product (a GLU up to F = 1,024), what it gains was
            not measured.
        weight_gradient_scale: the gradients of w1, w2 and v1 and of their biases are multiplied by it, and no others. A power of two
            costs a few small launches, and for rows in expert order a pass over them. Other values, float16 and a callable without a
            kernel cost a pass over those gradients.
        layout: where the matrices lie, if it is not in w1, w2 and v1 of [E,F,H]; see gbmoe.WeightLayout. They are read where they are, and
            each gradient is one tensor in its parameter's layout. Engines without kernels for it make copies.
        w1_bias, w2_bias, v1_bias: [E,F], [E,H] and [E,F], or in a layout with gate and up in one tensor w1_bias [E,2F] in the order of
            w1's rows (columns); dtype and device of x. Not with a callable without a kernel. A recipe of float8 does not quantise biases,
            but with its float8_weight_gradients the gradients of w1_bias and v1_bias are sums of e4m3.
        weights_on: what the router weights multiply. "output": an expert's result. "between": what its activation returns, as in
            Megatron-Core and torchtitan. Without a w2_bias that is the same sum, and is computed as "output", in float32 and rounded
            once. With a w2_bias it is refused. "input": the rows of x (Llama-4), which are gathered and weighed first.
        gradient_sink: adds the gradients of w1, w2 and v1 to float32 tensors of the caller, in backward or later. Not inside of
            torch.compile, nor with a callable without a kernel.
        lora: adapters of w1, w2 and v1. Rows are multiplied by their factors, which are not added to the weights, so that nothing of the
            weights' size is made. Frozen weights have no gradient GEMM. Not with a callable without a kernel, fp8_recipe or
            gradient_sink; keep_gathered_rows has no effect, and weight_gradient_scale multiplies the gradients of factors, too.

    Returns:
        [T,H], dtype of x, or under autocast that of its products.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> x, experts = torch.randn(6, 16), torch.randint(4, (6, 2))
        >>> w1, w2 = torch.randn(4, 32, 16), torch.randn(4, 32, 16)
        >>> plan = RoutingPlan.from_experts(experts, num_experts=4)
        >>> expert_mlp(x, plan, w1, w2, weights_TK=torch.rand(6, 2), activation="gelu").shape
        torch.Size([6, 16])
    """
    apart: Lists = {}
    w1, w2, v1 = w1_EFH, w2_EFH, v1_EFH
    if not (isinstance(w1, torch.Tensor) and isinstance(w2, torch.Tensor) and (v1 is None or isinstance(v1, torch.Tensor))):
        w1, w2, v1, apart = stacks_and_lists(w1, w2, v1)
    biases = (w1_bias, w2_bias, v1_bias)
    shape_EFH, name, computed_by = checked_call(x_TH, plan, layout, w1, w2, v1, weights_TK, biases, activation, weights_on, fp8_recipe,
                                                engine, batch_invariant)
    if weights_on == "input" and weights_TK is not None:
        rows_PH = gather_slots(x_TH.to(computed_dtype(x_TH)), plan.slot_map, scale=weights_TK)[0]
        of_rows = RoutingPlan.from_counts(plan.padded_counts_E, plan.num_rows, device=rows_PH.device, check="none")
        y_PH = expert_mlp(rows_PH, of_rows, w1_EFH, w2_EFH, v1_EFH, activation=activation, engine=engine,
                          recompute_activation=recompute_activation, batch_invariant=batch_invariant, fp8_recipe=fp8_recipe,
                          weight_gradient_scale=weight_gradient_scale, layout=layout, w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias,
                          gradient_sink=gradient_sink, lora=lora)
        return padded_scatter(y_PH, plan)
    if lora is not None and not (isinstance(lora, ExpertLora) and lora.is_empty):
        for argument, given in (("fp8_recipe", fp8_recipe), ("gradient_sink", gradient_sink)):
            require(given is None, "expert_mlp", argument, "None with lora", given)
        if apart:
            w1, w2, v1 = stacks(w1, w2, v1, apart)
        return low_rank_experts(x_TH, plan, (w1, w2, v1), weights_TK, biases, lora, activation, engine, batch_invariant,
                                weight_gradient_scale, layout)
    sizes, resolved = sizes_and_engine(plan, x_TH, shape_EFH, computed_by, batch_invariant)
    scale = weight_gradient_scale
    in_place = name is not None and (gradient_sink is not None or scales_exactly(scale, computed_dtype(x_TH)))
    if apart and not (in_place and reads_lists(resolved, x_TH, apart)):
        w1, w2, v1, apart = *stacks(w1, w2, v1, apart), {}
    if gradient_sink is not None:
        require(name is not None and not torch.compiler.is_compiling() and not may_be_transformed(), "expert_mlp", "gradient_sink",
                "None inside of torch.compile or a transform, and with an activation without a kernel", gradient_sink)
        gradient_sink.check({"w1": w1, "w2": w2, "v1": v1})
    elif name is None or not scales_exactly(scale, computed_dtype(x_TH)):
        # Outside of the operator, where under autocast a gradient of float16 has become one of float32.
        w1, w2, v1, *biases = with_scaled_gradients(scale, w1, w2, v1, *biases, one_operator=name is not None)  # type: ignore[assignment]
        scale = 1
    if name is None:
        return composed_experts(x_TH, plan, sizes, *layout.matrices(w1, w2, v1), weights_TK, activation, resolved.name,
                                recompute_activation)
    tensors = (x_TH, weights_TK, w1, w2, v1, *biases)
    # A trace may be run with gradients also where it was made without, as torch.jit.trace does for its check.
    records = torch.is_grad_enabled() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    save = records and (any(t is not None and t.requires_grad for t in tensors) or may_be_transformed())
    keep_rows = keep_gathered_rows and save and (may_be_transformed() or any(w is not None and w.requires_grad for w in (w1, v1)))
    # Copies that autocast makes of weights are not in their memory.
    uncast = (w for w in (w1, w2, v1) if w is not None and w.dtype == computed_dtype(w))
    keep_weights = save and (x_TH.requires_grad or may_be_transformed()) and keeps_weights(fp8_recipe, uncast)
    arguments = experts_inputs(x_TH, plan, weights_TK, (w1, w2, v1), tuple(biases), name, sizes, resolved, save=save, keep_rows=keep_rows,
                               keep_weights=keep_weights, scale=scale, layout=layout)
    return forward_operator(*arguments)[0] if gradient_sink is None and not apart else _directly(gradient_sink, apart, arguments)


_Weights = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]  # w1, w2 and v1


def experts_inputs(x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None, weights: _Weights,
                   biases: tuple[torch.Tensor | None, ...], activation: str, sizes_E: torch.Tensor, resolved: Resolved, *, save: bool,
                   keep_rows: bool, keep_weights: bool, scale: float, layout: WeightLayout) -> tuple:
    """The operator's inputs, of arguments that are checked. Rows are kept only where there is something to gather, by an engine that would
    gather them before its first product."""
    row_of_slot_TK = None if plan.is_in_expert_order else plan.row_of_slot_TK
    if keep_rows:
        w1_EFH = layout.matrices(*weights)[0]
        token_bytes = x_TH.numel() * computed_dtype(x_TH).itemsize
        keep_rows = row_of_slot_TK is not None and resolved.gathers_before_up(w1_EFH.size(1), activation, token_bytes)
    return (x_TH, weights_TK, row_of_slot_TK, plan.slot_of_row_P, sizes_E, *weights, *biases, activation, resolved, save, keep_rows,
            keep_weights, scale, layout.code)


# ------------------------------------------------------------------------------------------------------------ operator
#
# Without row_of_slot the tokens are in expert order, with one slot each. `engine` is a name, or what the caller has resolved: a call that
# does not pass the dispatcher hands it on to backward.


def experts_kernel(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, activation, engine, save, keep_rows,
             keep_weights, scale, layout):
    """Returns (out [T,H], h [P,F], g [P,F], rows [P,H], and w1, w2 and v1 for backward). h and g are empty where nothing is saved, g and
    v1 where there is no v1, the gathered rows unless they are to be kept and there is something to gather, and weights unless they are to
    be kept. Weights that are kept are float8's, uint8 [Y], Y = ScaledWeights.bytes_of. Of pairs h is [P,2F], and g is empty. `scale` is
    backward's, and `layout` a WeightLayout.code."""
    matrices = WeightLayout.of_code(layout).matrices(w1, w2, v1)
    experts = engines.for_experts(engine, x, slot_of_row.size(0), matrices[0], sizes)
    transport = local_transport(x, row_of_slot, slot_of_row, weights)
    rows_PH = transport.keep_rows() if keep_rows else None
    of_pass = weights_of_pass(layout, engine, w1, matrices, (w1_bias, w2_bias, v1_bias), keep=keep_weights)
    del w1, w2, v1, matrices
    out_TH, h_PF, g_PF = expert_forward_backward.forward(transport, experts, of_pass, sizes, activation, save)
    # Separate tensors: an operator's may not alias.
    return (out_TH, *[out_TH.new_empty(0) if t is None else t for t in (h_PF, g_PF, rows_PH)],
            *[of_pass.kept[name] if name in of_pass.kept else out_TH.new_empty(0, dtype=torch.uint8) for name in NAMES])


def _forward_fake(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, activation, engine, save, keep_rows,
                  keep_weights, scale, layout):
    w1, w2, v1 = WeightLayout.of_code(layout).matrices(w1, w2, v1)
    rows, ffn, hidden = slot_of_row.size(0), w1.size(1), w1.size(2)
    paired = is_paired(layout, engine)
    return (x.new_empty(x.shape), x.new_empty((rows, 2 * ffn if paired else ffn) if save else 0),
            x.new_empty((rows, ffn) if save and v1 is not None and not paired else 0),
            x.new_empty((rows, hidden) if keep_rows and row_of_slot is not None else 0),
            *(x.new_empty(ScaledWeights.bytes_of(w.shape) if keep_weights and w is not None else 0, dtype=torch.uint8)
              for w in (w1, w2, v1)))


def _backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, h, g, rows, kept_w1, kept_w2,
              kept_v1, activation, engine, scale, layout, *needed):
    grads = experts_gradients([grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, h, g, rows,
                               kept_w1, kept_w2, kept_v1, activation, engine, scale, layout, needed])
    return tuple(grad.new_empty(0) if t is None else t for t in grads)  # separate tensors: an operator's results may not alias


def experts_gradients(inputs: list, sink: WeightGradientSink | None = None) -> tuple[torch.Tensor | None, ...]:
    """The gradients of _LEAVES, each None where `needed` does not want it, of the list (grad, the tensors that forward saved, activation,
    engine, scale, layout, needed). It is emptied, so that each tensor is free again as soon as it has been used, unless the caller has
    other references to it."""
    grad, *saved, activation, engine, scale, layout, needed = inputs
    inputs.clear()
    x, weights, row_of_slot, slot_of_row, sizes, *parameters = saved[:8]
    where, wanted = WeightLayout.of_code(layout), Gradients(*needed)
    matrices = where.matrices(*parameters)
    w1, w2, v1 = parameters
    gradients = WeightGradients(where, w1, w2, v1) if sink is None else SunkGradients(where, w1, w2, v1, sink)
    if v1 is None and where.is_combined and not is_paired(layout, engine):
        wanted = replace(wanted, v1=wanted.w1, v1_bias=wanted.w1_bias)
    kept = {name: kept_Y for name, kept_Y in zip(NAMES, saved[14:]) if kept_Y.numel()}
    of_pass = weights_of_pass(layout, engine, parameters[0], matrices, tuple(saved[8:11]), kept=kept)
    of_forward = Saved(saved[11], saved[12] if saved[12].dim() == 2 else None)
    transport = local_transport(x, row_of_slot, slot_of_row, weights, grad, saved[13] if saved[13].dim() == 2 else None)
    experts = engines.for_experts(engine, x, slot_of_row.size(0), matrices[0], sizes)
    del saved, x, weights, w1, w2, v1, matrices, parameters, kept  # copies that autocast made of weights are held by nothing else
    scale = scale if wanted.w1 or wanted.w2 or wanted.v1 or wanted.any_bias else 1.0
    return expert_forward_backward.backward(transport, experts, of_pass, sizes, activation, of_forward, wanted, gradients, scale)


def experts_gradients_by_operator(inputs: list) -> tuple[torch.Tensor | None, ...]:
    """experts_gradients, through the dispatcher, of forward's results without weights that were kept."""
    *tensors, activation, engine, scale, layout, needed = inputs
    none_Y = tensors[0].new_empty(0, dtype=torch.uint8)
    computed = backward_operator(*tensors, none_Y, none_Y, none_Y, activation, engine, scale, layout, *needed)
    return tuple(gradient if need else None for gradient, need in zip(computed, needed))


_programs = Programs(experts_gradients, "expert_mlp_backward")


def _backward_fake(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, h, g, rows, kept_w1, kept_w2,
                   kept_v1, activation, engine, scale, layout, *needed):
    return saved_for_backward.fake_gradients(grad, (x, weights, w1, w2, v1, w1_bias, w2_bias, v1_bias), needed)


def _setup_context(ctx, inputs, output):
    *tensors, activation, engine, save, _, _, scale, layout = inputs
    saved_for_backward.save(ctx, tensors, output, (activation, engine, scale, layout), save)


def _autograd_backward(ctx, grad, *_):
    return saved_for_backward.gradients_by_name(ctx, grad, _LEAVES, _POSITION_OF, backward_operator, experts_gradients, _programs)


_FORWARD = (
    "expert_mlp(Tensor x, Tensor? weights, Tensor? row_of_slot, Tensor slot_of_row, Tensor sizes, Tensor w1, Tensor w2,"
    " Tensor? v1, Tensor? w1_bias, Tensor? w2_bias, Tensor? v1_bias, str activation, str engine, bool save, bool keep_rows,"
    " bool keep_weights, float scale, str layout)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
_POSITION_OF = positions(_FORWARD)
_CAST = ("x", "w1", "w2", "v1", "w1_bias", "w2_bias", "v1_bias")  # by autocast
_LEAVES = ("x", "weights", "w1", "w2", "v1", "w1_bias", "w2_bias", "v1_bias")  # as Gradients has them, and backward's results

forward_operator = define(
    _FORWARD, reference=experts_kernel, fake=_forward_fake, setup_context=_setup_context, backward=_autograd_backward,
    autocast=_CAST, named="engine",
    waits=lambda x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu", flops=flops.expert_mlp,
    recorded=lambda *inputs: decides_by_kind(inputs[_POSITION_OF["engine"]]),
)

backward_operator = define(
    "expert_mlp_backward(Tensor grad, Tensor x, Tensor? weights, Tensor? row_of_slot, Tensor slot_of_row, Tensor sizes,"
    " Tensor w1, Tensor w2, Tensor? v1, Tensor? w1_bias, Tensor? w2_bias, Tensor? v1_bias, Tensor h, Tensor g, Tensor rows,"
    " Tensor kept_w1, Tensor kept_w2, Tensor kept_v1, str activation, str engine, float scale, str layout, bool need_x,"
    " bool need_weights, bool need_w1, bool need_w2, bool need_v1, bool need_w1_bias, bool need_w2_bias, bool need_v1_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward, fake=_backward_fake,
    waits=lambda grad, x, weights, row_of_slot, slot_of_row, sizes, *_: sizes.device.type == "cpu", flops=flops.expert_mlp_backward,
    named="engine",
)


def _directly(sink: WeightGradientSink | None, apart: Lists, arguments: tuple) -> torch.Tensor:
    without_lists = (None if name in apart else argument for name, argument in zip(_POSITION_OF, arguments))
    # No transform is active, which would need the stacks of lists, and which a sink refuses.
    return names.apply(_Direct, sink, {name: len(tensors) for name, tensors in apart.items()}, *without_lists, *chain(*apart.values()))


class _Direct(torch.autograd.Function):
    """The operators under a node that takes a sink of the weights' gradients, and lists of matrices. These follow the other arguments;
    `apart` says how many there are, by the name of the argument in whose place they stand. Not differentiable twice.

    What is saved depends on the kind of call alone, and neither on what watches it nor on addresses: a checkpoint that repeats a forward
    has to find the same."""

    @staticmethod
    def forward(ctx, sink, apart, *arguments):
        *tensors, ctx.activation, ctx.engine, save, keep_rows, keep_weights, ctx.scale, ctx.layout = arguments[:len(_POSITION_OF)]
        of_lists = arguments[len(_POSITION_OF):]
        # The operator would cast them as well, but backward needs what it computed with.
        tensors = [t.to(computed_dtype(t)) if name in _CAST and t is not None else t for name, t in zip(_POSITION_OF, tensors)]
        inputs, in_place = with_lists(tensors, _POSITION_OF, apart, of_lists, as_stacks=is_watched(tensors[0]))
        compute = without_autocast(experts_kernel) if in_place else forward_operator
        with profiled("gbmoe::expert_mlp", in_place):
            out_TH, *for_backward = compute(*inputs, ctx.activation, ctx.engine, save, keep_rows, keep_weights, ctx.scale, ctx.layout)
        ctx.sink, ctx.apart = sink, apart
        ctx.save_for_backward(*of_lists, *tensors, *for_backward)
        return out_TH

    @staticmethod
    @without_autocast
    def backward(ctx, grad_TH):
        # Of what autograd batches, or will differentiate again, which the operator refuses, nothing may be missing without a word.
        by_operator = is_batched(grad_TH) or torch.is_grad_enabled()
        require(not by_operator or ctx.sink is None, "expert_mlp", "gradient_sink",
                "None where autograd batches gradients (is_grads_batched) or differentiates them (create_graph)", "a WeightGradientSink")
        number, needs = sum(ctx.apart.values()), ctx.needs_input_grad[2:]
        of_lists = iter(needs[len(_POSITION_OF):])
        of_apart = {name: any(list(islice(of_lists, count))) for name, count in ctx.apart.items()}
        needed = tuple([of_apart.get(name, needs[_POSITION_OF[name]]) for name in _LEAVES])
        saved = list(ctx.saved_tensors)
        by_operator = by_operator or (ctx.sink is None and is_watched(grad_TH))
        saved, in_place = with_lists(saved[number:], _POSITION_OF, ctx.apart, saved[:number], as_stacks=by_operator or is_watched(grad_TH))
        inputs = [grad_TH, *saved, ctx.activation, ctx.engine, ctx.scale, ctx.layout, needed]
        saved.clear()
        if by_operator:
            computed = backward_operator(*inputs[:-1], *needed)
        else:
            ctx.maybe_clear_saved_tensors()
            records = not in_place and ctx.sink is None and decides_by_kind(ctx.engine) and is_unseen(*inputs[:9])
            with profiled("gbmoe::expert_mlp_backward", in_place):
                computed = _programs(inputs) if records else experts_gradients(inputs, ctx.sink)
        of_leaf = {name: gradient for name, gradient, need in zip(_LEAVES, computed, needed) if need}
        of_each = [(None,) * count if of_leaf.get(name) is None else of_leaf.pop(name).unbind(0) for name, count in ctx.apart.items()]
        return None, None, *(of_leaf.get(name) for name in _POSITION_OF), *chain(*of_each)
