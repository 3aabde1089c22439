"""The experts of a layer over ranks that map each other's memory: rows are pulled from their owners, sums pushed back.

A row crosses a link once for every rank that holds one of the token's experts. Each rank builds a plan that takes the tokens of all ranks
to its own experts (arrival.py), and computes the experts' pass (gbmoe/ops/expert_forward_backward.py) over the transport of
peer_transport.py.

In a step in which ranks lend each other experts (lent_experts.py), a rank's own E experts are followed by those that it has borrowed.

Shape suffixes: T tokens of this rank, S tokens of all ranks, K slots a token, E experts of this rank, B experts that it has borrowed,
M matrices of an expert, H hidden, F ffn hidden of this rank, P rows of this rank, X elements of a row as it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gbmoe import _torch_names as names, engines
from gbmoe._checks import require
from gbmoe._define_operator import differentiable_once, may_be_transformed, without_autocast
from gbmoe.engines.base import Engine
from gbmoe.engines.in_programs import in_programs
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops import expert_forward_backward
from gbmoe.ops.expert_arguments import matrices
from gbmoe.ops.expert_forward_backward import Gradients, Saved, Weights
from gbmoe.ops.gmm import computed_dtype
from gbmoe.ops.gradient_sink import SunkGradients, WeightGradientSink
from gbmoe.ops.pass_weights import weights_of_pass
from gbmoe.parallel import further_windows, pass_agreement
from gbmoe.parallel.arrival import Arrival, Arrived, Joint
from gbmoe.parallel.exchange import as_it_travels
from gbmoe.parallel.lent_experts import BorrowedWeights, LentGradients, WeightsWithBorrowed
from gbmoe.parallel.peer_memory import check_rows, of_group
from gbmoe.parallel.peer_transport import PeerTransport
from gbmoe.parallel.placement import Placement
from gbmoe.parallel.region_rows import pull_rows
from gbmoe.slot_map import SlotMap
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients, WeightLayout


def peer_experts(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor | None, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor,
                 v1_EFH: torch.Tensor | None, activation: str, engine: str, where: Placement,
                 meanwhile: Callable[[], None] | None = None, gradient_scale: float = 1.0, *, layer: int = 0, keep_weights: bool = False,
                 keep_gathered_rows: bool = False, layout: WeightLayout = MEGABLOCKS,
                 gradient_sink: WeightGradientSink | None = None) -> torch.Tensor:
    """out[t] = sum over j of weights[t,j] * mlp_e(x[t]), as gbmoe.expert_mlp, with the experts spread over the ranks of a group.

    Every rank calls it, in the same order. Differentiable in x, weights, w1, w2 and v1; ranks may need different gradients. It waits for
    the device once, for the number of rows, unless `where.rows` bounds it. A compiler's graph breaks around it.

    Args:
        x_TH: [T,H] of this rank, bfloat16, float16 or float32 on CUDA; T may differ between ranks, and be 0.
        ids_TK: each token's experts [T,K], ids among the experts of all ranks, int64; -1 drops a slot.
        weights_TK: [T,K], any floating dtype but float64; None gives every slot the weight one.
        w1_EFH, w2_EFH, v1_EFH: the weights of this rank's experts, [E,F,H] or in `layout`.
        activation: a name in gbmoe.plain.plain_activation.ACTIVATIONS.
        engine: see gbmoe.engines.
        where: which rank holds which experts.
        meanwhile: called once, to start work that the device does while the host waits for the number of rows.
        gradient_scale: the gradients of w1, w2 and v1 are multiplied by it.
        layer: the layer's number, the same on all ranks (gbmoe.parallel.pass_agreement.next_layer), or 0.
        keep_weights: an engine of float8 prepares weights for backward in forward (gbmoe.Float8BlockScaling).
        keep_gathered_rows: keep the rows that forward pulls until backward, which then pulls one time less. With an engine of float8
            forward's rows are e4m3, and only with its float8_dispatch does backward read them.
        layout: where the matrices lie, as in expert_mlp. Where rows are bounded, or experts may be lent, it has to be the default, and
            gradient_sink None.
        gradient_sink: adds the gradients of w1, w2 and v1 to float32 tensors of the caller. Each rank may have one or none.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        ValueError: on all ranks, where they make passes of different layers, or in different ways; it says which ranks differ in what. For
            more tokens than fit, where rows are bounded.
        RuntimeError: where ranks do not come, or have left a pass early; it names them.
    """
    if torch.compiler.is_compiling():
        from gbmoe.parallel import uncompiled
        return uncompiled.peer_experts(
            x_TH, ids_TK, weights_TK, w1_EFH, w2_EFH, v1_EFH, activation, engine, where, meanwhile, gradient_scale, layer=layer,
            keep_weights=keep_weights, keep_gathered_rows=keep_gathered_rows, layout=layout, gradient_sink=gradient_sink)
    x_TH = as_it_travels("peer_experts", x_TH, ids_TK, weights_TK, needs_weights=False)
    memory = of_group(where.group, x_TH.device, where.timeout_seconds)
    # As autocast has operators cast.
    w1_EFH, w2_EFH = (t.to(computed_dtype(t)) for t in (w1_EFH, w2_EFH))
    v1_EFH = None if v1_EFH is None else v1_EFH.to(computed_dtype(v1_EFH))
    x_TH, ids_TK = x_TH.contiguous(), ids_TK.long().contiguous()
    records = torch.is_grad_enabled()
    need = [records and t is not None and t.requires_grad for t in (x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH)]
    # The gradients of w1 and v1 are products of x. Another rank may need those of an expert that this one will borrow.
    reads_x = need[2] or need[4] or (records and where.loans > 0)
    recipe = engines.recipe_of(engine) if x_TH.element_size() == 2 else None
    # Gradients of weights need rows of 16 bits, which forward's are not, unless the recipe has them computed from e4m3.
    narrow = recipe is not None and recipe.float8_dispatch
    keep_gathered_rows = keep_gathered_rows and (recipe is None or narrow)
    needs = Joint(need[0], need[1], any(need[2:]), x_again=reads_x and not keep_gathered_rows,
                  packed=pass_agreement.saved_tensors_are_packed(), wide_gradient=need[3] and not narrow)
    with memory.passing():  # within it, the other ranks are told of an error of this one
        _check(x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, where, layout, gradient_sink, recipe)
        of_experts = layout.matrices(w1_EFH, w2_EFH, v1_EFH)
        with torch.no_grad():
            arrival = Arrival(memory, x_TH, ids_TK, weights_TK, where, layer=layer, records=records, needs=needs,
                              pulls_ahead=True, recipe=recipe, expert_MFH=(2 if v1_EFH is None else 3, *of_experts[0].shape[1:]))
            if meanwhile is not None:
                with torch.set_grad_enabled(records):
                    meanwhile()
            arrived = arrival.finish()
            borrowed = None
            if arrived.ledger is not None:
                borrowed = BorrowedWeights(memory, arrived.regions, arrived.ledger, of_experts, arrival.decided)
            ahead = arrival.rows_ahead()
            if ahead is None and arrived.windows is None:  # further windows come first
                ahead = pull_rows(arrived.regions, "x", arrived.slots, x_TH, memory.rank, recipe)
            rows = [ahead]
            sizes_E, experts = arrival.sizes_and_engine(engine, of_experts[0])
        save = arrived.needs.any
        call = _Call(activation, experts, where, layer, gradient_scale, save,
                     keep_rows=arrived.needs.experts and reads_x and keep_gathered_rows,
                     keep_weights=save and arrived.needs.x and keep_weights, layout=layout, sink=gradient_sink)
        x_TH = pass_agreement.joined(x_TH, save and not any(need))
        inputs = x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, arrival.ids_TK, sizes_E, call, arrived, rows, borrowed
        return _PeerExperts.apply(*inputs) if may_be_transformed() else names.apply(_PeerExperts, *inputs)


def _check(x: torch.Tensor, weights: torch.Tensor | None, w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, where: Placement,
           layout: WeightLayout, sink: WeightGradientSink | None, recipe: Float8BlockScaling | None) -> None:
    reason = check_rows(x.dtype, x.size(1))
    require(reason is None, "peer_experts", "x", "rows that other ranks can pull (the exchange takes any)", reason)
    if weights is not None and weights.dtype == torch.float64:
        require(False, "peer_experts", "weights", "a dtype of 32 or 16 bits (the exchange takes float64)", weights.dtype)
    matrices(layout, w1, w2, v1, "peer_experts")
    if where.rows is not None:
        require(layout == MEGABLOCKS and sink is None, "peer_experts", "layout, gradient_sink", "the defaults where rows are bounded",
                (layout, sink))
    if where.loans:
        require(layout == MEGABLOCKS and sink is None, "peer_experts", "layout, gradient_sink", "the defaults where experts may be lent",
                (layout, sink))
        require(recipe is None, "peer_experts", "engine", "one without a recipe of float8 where experts may be lent", recipe)
        require(w1.dtype == x.dtype, "peer_experts", "w1", f"the dtype of x, {x.dtype}, where experts may be lent", w1.dtype, TypeError)
    if sink is not None:
        sink.check({"w1": w1, "w2": w2, "v1": v1}, "peer_experts")


@dataclass(frozen=True)
class _Call:
    """The arguments of one call that are no tensors.

    Attributes:
        experts: the engine, resolved once for forward and backward.
        save: whether backward runs, on all ranks.
        keep_rows, keep_weights: whether forward keeps the rows of x, and weights in float8, for it.
        layout, sink: of the weights, and of their gradients.
    """

    activation: str
    experts: Engine
    where: Placement
    layer: int
    gradient_scale: float
    save: bool
    keep_rows: bool
    keep_weights: bool
    layout: WeightLayout
    sink: WeightGradientSink | None

    def weights(self, parameters: Sequence[torch.Tensor | None], borrowed_MBFH: torch.Tensor | None,
                borrowed: BorrowedWeights | None = None, **of_pass) -> Weights:
        """The weights of this call's pass, of the parameters w1, w2 and v1, and those of the experts that this rank has borrowed."""
        if borrowed_MBFH is not None:
            return WeightsWithBorrowed(self.experts, parameters, borrowed_MBFH, borrowed)
        return weights_of_pass(self.layout.code, self.experts.name, parameters[0], self.matrices(parameters), (None,) * 3,  # type: ignore[arg-type]
                               **of_pass)

    def products(self, x_TH: torch.Tensor, parameters: Sequence[torch.Tensor | None], borrowed_MBFH: torch.Tensor | None) -> Any:
        """The engine as the pass calls it. Programs hold no lists of matrices."""
        return in_programs(self.experts, x_TH, *parameters) if borrowed_MBFH is None else self.experts

    def gradients(self, parameters: Sequence[torch.Tensor | None], arrived: Arrived) -> WeightGradients:
        """Where the pass writes the gradients of w1, w2 and v1."""
        w1, w2, v1 = parameters
        assert w1 is not None and w2 is not None
        if arrived.ledger is not None:
            return LentGradients(w1, w2, v1, arrived.memory, arrived.regions, arrived.ledger)
        return WeightGradients(self.layout, w1, w2, v1) if self.sink is None else SunkGradients(self.layout, w1, w2, v1, self.sink)

    def matrices(self, parameters: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """w1, w2 and v1, [E,F,H] each, as views."""
        return self.layout.matrices(*parameters)  # type: ignore[arg-type]


_NAMES = ("w1", "w2", "v1")


class _PeerExperts(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, ids_TK, sizes_E, call, arrived, rows, borrowed):
        # `rows` is emptied, so that their memory is free again for what follows.
        transport = PeerTransport(arrived, call.where, x_TH, ids_TK, weights_TK, rows=rows.pop())
        rows_PX = transport.keep_rows() if call.keep_rows else None
        parameters = w1_EFH, w2_EFH, v1_EFH
        borrowed_MBFH = None if borrowed is None else borrowed.weights_MBFH
        weights = call.weights(parameters, borrowed_MBFH, borrowed, keep=call.keep_weights)
        experts = call.products(x_TH, parameters, borrowed_MBFH)
        if arrived.windows is not None:
            further_windows.forward(
                arrived.windows, arrived.divided_SK, transport, experts, call.matrices(parameters), call.activation)
        out_TH, h_PF, g_PF = expert_forward_backward.forward(transport, experts, weights, sizes_E, call.activation, call.save)
        if borrowed is not None:
            borrowed.wait()
        if call.save:
            if arrived.needs.packed:
                arrived = arrived.with_own_capacity()
            slots = arrived.slots
            ctx.save_for_backward(x_TH, ids_TK, weights_TK, w1_EFH, w2_EFH, v1_EFH, h_PF, g_PF, rows_PX, slots.row_of_slot_TK,
                                  slots.slot_of_row_P, sizes_E, arrived.weights_SK, arrived.divided_SK,
                                  borrowed_MBFH, *(weights.kept.get(name) for name in _NAMES))
            ctx.call, ctx.layout, ctx.tokens_W, ctx.needs = call, arrived.regions.layout, arrived.tokens_W, arrived.needs
            ctx.windows, ctx.recipe, ctx.ledger = arrived.windows, arrived.recipe, arrived.ledger
        arrived.memory.end()  # what saves tensors may raise: torch.utils.checkpoint ends a repeated forward so
        return out_TH

    @staticmethod
    @differentiable_once
    @without_autocast
    def backward(ctx, grad_TH):
        saved = list(ctx.saved_tensors)  # before the pass: it may repeat forward
        x_TH, ids_TK, weights_TK = saved[:3]
        of_forward, rows_PX = Saved(*saved[6:8]), saved[8]
        row_of_slot_SK, slot_of_row_P, sizes_E, weights_SK, divided_SK, borrowed_MBFH = saved[9:15]
        parameters, kept = saved[3:6], {name: kept_Y for name, kept_Y in zip(_NAMES, saved[15:]) if kept_Y is not None}
        call, needs, own, windows = ctx.call, ctx.needs, ctx.needs_input_grad, ctx.windows
        matrices = None if windows is None else call.matrices(parameters)
        ctx.maybe_clear_saved_tensors()
        saved.clear()
        memory = of_group(call.where.group, x_TH.device, call.where.timeout_seconds)
        with memory.passing(backward_of=call.layer):
            slots = SlotMap(row_of_slot_TK=row_of_slot_SK, slot_of_row_P=slot_of_row_P)
            arrived = Arrived(memory, memory.regions(ctx.layout), slots, weights_SK, ctx.tokens_W, needs, windows, recipe=ctx.recipe,
                              ledger=ctx.ledger)
            weights = call.weights(parameters, borrowed_MBFH, kept=kept)
            experts = call.products(x_TH, parameters, borrowed_MBFH)
            own_v1 = own[2] if call.layout.is_combined and not weights.paired else own[4]
            # The owner of what this rank has borrowed may need other gradients than this rank does.
            wanted = Gradients(needs.x, needs.weights, *((own[2], own[3], own_v1) if borrowed_MBFH is None else (needs.experts,) * 3))
            gradients = call.gradients(parameters, arrived)
            del parameters, kept, borrowed_MBFH
            transport = PeerTransport(arrived, call.where, x_TH, ids_TK, weights_TK, grad_TH=grad_TH, kept_PX=rows_PX,
                                      pulls_again=windows is not None or (rows_PX is None and (wanted.w1 or wanted.v1)))
            del rows_PX, grad_TH
            scale = call.gradient_scale if needs.experts else 1.0  # the same on all ranks: a token's owner divides what all push
            left = expert_forward_backward.compute_gradients(
                transport, experts, weights, sizes_E, call.activation, of_forward, wanted, gradients, scale)
            if windows is not None:
                further_windows.compute_gradients(
                    windows, divided_SK, transport, experts, matrices, call.activation, wanted, gradients, scale)
            if ctx.ledger is not None and needs.experts:
                gradients.settle()
            computed = *transport.arrived(), *gradients.tensors(left)
        return *(gradient if needed else None for gradient, needed in zip(computed, own)), *[None] * 6
