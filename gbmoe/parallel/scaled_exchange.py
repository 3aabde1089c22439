"""The experts of a group of ranks by all-to-all of rows in e4m3: tokens, and the gradient of the result, are quantised once by the rank
that owns them, and travel packed (gbmoe/launch/packed_rows.py). Sums and gradients of tokens come back as in exchange.py, in 16 bits.

One chunk and one trip. The experts' pass (gbmoe/ops/expert_forward_backward.py) is computed over a transport of its own, because its rows
are no tensor for which autograd has a gradient.

Shape suffixes: T tokens, K slots a token, R rows sent, S rows received, E experts of this rank, H hidden, F ffn hidden, P rows of this
rank's experts, Y bytes of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gbmoe import _torch_names as names, engines, launch
from gbmoe._define_operator import differentiable_once, may_be_transformed, without_autocast
from gbmoe.engines.base import GatheredRows
from gbmoe.engines.gathered_scaled_rows import GatheredScaledRows
from gbmoe.float8 import Float8BlockScaling
from gbmoe.launch import packed_rows
from gbmoe.ops import expert_forward_backward
from gbmoe.ops.expert_forward_backward import Gradients, Saved
from gbmoe.ops.local_transport import LocalTransport
from gbmoe.ops.pass_weights import weights_of_pass
from gbmoe.ops.plan_sizes import sizes_and_engine
from gbmoe.parallel.dispatch_combine import Trip, first_rows_of
from gbmoe.parallel.pass_agreement import Needs, joined
from gbmoe.plan import RoutingPlan
from gbmoe.slot_map import SlotMap
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients, WeightLayout


@dataclass(frozen=True)
class ScaledExchange:
    """One forward's rows on their way, and its backward's.

    Attributes:
        trip: to the ranks that hold the experts, and back.
        ids_TK: the tokens' experts among all, int32.
        first_expert: the first one of this rank's.
        sizes_E: the rows of each of this rank's experts, on the host.
        needs: which gradients any rank needs.
        recipe: by which rows are quantised.
    """

    trip: Trip
    ids_TK: torch.Tensor
    first_expert: int
    sizes_E: torch.Tensor
    needs: Needs
    recipe: Float8BlockScaling

    def experts(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor,
                v1_EFH: torch.Tensor | None, activation: str, gradient_scale: float, keep_weights: bool,
                layout: WeightLayout = MEGABLOCKS) -> torch.Tensor:
        """The weighted sums [T,H] of this rank's tokens. Collective, in forward and backward.

        Args:
            x_TH, weights_TK: the tokens, bfloat16 or float16, and their router weights.
            w1_EFH, w2_EFH, v1_EFH: the weights of this rank's experts, in `layout` and the dtype of x.
            activation: a name in gbmoe.plain.plain_activation.ACTIVATIONS.
            gradient_scale: the gradients of w1, w2 and v1 are multiplied by it.
            keep_weights: as in gbmoe.Float8BlockScaling.
        """
        x_TH = joined(x_TH, self.needs.any)  # every rank takes part in backward
        inputs = x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, _Call(self, activation, gradient_scale, keep_weights, layout)
        return _ScaledExperts.apply(*inputs) if may_be_transformed() else names.apply(_ScaledExperts, *inputs)


@dataclass(frozen=True)
class _Call:
    exchange: ScaledExchange
    activation: str
    gradient_scale: float
    keep_weights: bool
    layout: WeightLayout


_NAMES = ("w1", "w2", "v1")


class _ScaledExperts(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, x_TH, weights_TK, w1_EFH, w2_EFH, v1_EFH, call):
        exchange, save = call.exchange, call.exchange.needs.any
        trip, recipe = exchange.trip, exchange.recipe
        (weights_SK, ids_SK), = trip.slots(exchange.ids_TK, weights_TK.detach())
        coming = trip.send(0, _packed(x_TH, trip, recipe))
        matrices = call.layout.matrices(w1_EFH, w2_EFH, v1_EFH)
        shape_EFH = matrices[0].shape
        plan = RoutingPlan.from_experts(ids_SK - exchange.first_expert, shape_EFH[0], check="none")  # while the rows travel
        plan = first_rows_of(plan, int(exchange.sizes_E.sum()), exchange.sizes_E)
        sizes_E, resolved = sizes_and_engine(plan, x_TH, shape_EFH, recipe.engine)
        experts = engines.for_experts(resolved, x_TH, plan.num_rows, matrices[0], sizes_E)
        rows_SY = coming.wait()
        transport = ExchangeTransport(exchange, trip, x_TH, plan.slot_map, weights_SK, rows_SY=rows_SY)
        weights = weights_of_pass(call.layout.code, experts.name, w1_EFH, matrices, (None,) * 3,
                                  keep=save and exchange.needs.x and call.keep_weights)
        out_TH, h_PF, g_PF = expert_forward_backward.forward(transport, experts, weights, sizes_E, call.activation, save)
        if save:
            again = ctx.needs_input_grad[2] or ctx.needs_input_grad[4]
            like_TH = x_TH.new_empty(0, x_TH.size(1))
            ctx.save_for_backward(like_TH, w1_EFH, w2_EFH, v1_EFH, h_PF, g_PF, rows_SY if again else None, weights_SK, sizes_E,
                                  trip.map.row_of_slot_TK, trip.map.slot_of_row_P, plan.row_of_slot_TK, plan.slot_of_row_P,
                                  *(weights.kept.get(name) for name in _NAMES))
            without = Trip(SlotMap(x_TH.new_empty(0), x_TH.new_empty(0)), trip.sends, trip.receives, trip.group)
            ctx.call, ctx.experts = replace(call, exchange=replace(exchange, trip=without, ids_TK=x_TH.new_empty(0))), experts
        return out_TH

    @staticmethod
    @differentiable_once
    @without_autocast
    def backward(ctx, grad_TH):
        saved, call, experts, own = list(ctx.saved_tensors), ctx.call, ctx.experts, ctx.needs_input_grad
        exchange, needs = call.exchange, call.exchange.needs
        ctx.maybe_clear_saved_tensors()
        like_TH, weights_SK, sizes_E = saved[0], saved[7], saved[8]
        of_forward = Saved(*saved[4:6])
        layout, kept = call.layout, {name: kept_Y for name, kept_Y in zip(_NAMES, saved[13:]) if kept_Y is not None}
        weights = weights_of_pass(layout.code, experts.name, saved[1], layout.matrices(*saved[1:4]), (None,) * 3, kept=kept)
        gradients = WeightGradients(layout, *saved[1:4])
        trip = replace(exchange.trip, map=SlotMap(row_of_slot_TK=saved[9], slot_of_row_P=saved[10]))
        slots = SlotMap(row_of_slot_TK=saved[11], slot_of_row_P=saved[12])
        transport = ExchangeTransport(exchange, trip, like_TH, slots, weights_SK, rows_SY=saved[6], grad_TH=grad_TH)
        saved.clear()
        del grad_TH, kept
        own_v1 = own[2] if layout.is_combined and not weights.paired else own[4]
        wanted = Gradients(needs.x, needs.weights, own[2], own[3], own_v1)
        scale = call.gradient_scale if needs.experts else 1.0
        computed = expert_forward_backward.backward(
            transport, experts, weights, sizes_E, call.activation, of_forward, wanted, gradients, scale)
        return *(gradient if needed else None for gradient, needed in zip(computed[:5], own)), None


def _packed(x_TH: torch.Tensor, trip: Trip, recipe: Float8BlockScaling) -> torch.Tensor:
    """The rows to send [R,Y]; each token is quantised once."""
    return launch.gather(packed_rows.pack(x_TH, recipe.power_2_scale), trip.map)[0]


class ExchangeTransport(LocalTransport):
    """Rows that came packed, and sums and gradients that travel where they are asked for.

    Args:
        exchange, trip: of the pass; `trip` is the exchange's with its map.
        x_TH: this rank's tokens, of which only dtype, device and H are read.
        slots: from the rows received to those of this rank's experts.
        weights_SK: the router weights of the rows received.
        rows_SY: those rows of x, packed; None where no gradient of weights reads them in backward.
        grad_TH: in backward, the gradient of the result.
    """

    def __init__(self, exchange: ScaledExchange, trip: Trip, x_TH: torch.Tensor, slots: SlotMap, weights_SK: torch.Tensor, *,
                 rows_SY: torch.Tensor | None = None, grad_TH: torch.Tensor | None = None):
        super().__init__(x_TH, slots, weights_SK, grad_TH)
        self._trip, self._recipe, self._rows_SY, self._hidden = trip, exchange.recipe, rows_SY, x_TH.size(1)
        self._sums = self._of_router = None

    def rows(self) -> GatheredRows:
        rows_SY, self._rows_SY = self._rows_SY, None
        assert rows_SY is not None
        return self._scaled(rows_SY)

    def combine(self, y_PH: torch.Tensor) -> torch.Tensor:
        return self._trip.sums([self._trip.send_back(0, self._scattered(y_PH, self.weights_TK)).wait()])

    def gradient_rows(self) -> GatheredRows:
        grad_TH, self._grad_TH = self._grad_TH, None
        assert grad_TH is not None
        return self._scaled(self._trip.send(0, _packed(grad_TH, self._trip, self._recipe)).wait())

    def give_back(self, dx_PH: torch.Tensor, factor: float) -> None:
        super().give_back(dx_PH, factor)
        self._sums = self._trip.send_back(0, self._dx_TH)  # while the gradients of w1 and v1 are computed
        self._dx_TH = None

    def give_back_router_gradient(self, dweights_TK: torch.Tensor | None) -> None:
        self._of_router = self._trip.send_back(0, dweights_TK)

    def arrived(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        coming = self._sums, self._of_router
        dx_TH, dweights_TK = (None if each is None else self._trip.sums([each.wait()]) for each in coming)
        return dx_TH, dweights_TK

    def _scaled(self, rows_SY: torch.Tensor) -> GatheredRows:
        return GatheredScaledRows(self.slots, self._hidden, self.dtype, tokens_TY=rows_SY)
