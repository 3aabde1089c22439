"""What a layer's experts compute, forward and backward.

    forward:   rows -> up -> (h, g saved) -> activation -> down -> sums of each token's rows
    backward:  gradients of rows -> gradient of the activation -> gradient of w2, of x, of v1 and w1

Where rows come from, and where sums go, is a Transport, and neither function knows which one it has: tokens of this process
(gbmoe/ops/local_transport.py), or of all ranks that map each other's memory (gbmoe/parallel/peer_transport.py). Rows that an all-to-all
brings (gbmoe/parallel/exchange.py) are tokens of the local transport: trips of their own lie before and after it.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden, P padded rows of the plan, Y bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.engines.lora_products import LowRank
from gbmoe.float8 import ScaledWeights
from gbmoe.launch.alignment import aligned
from gbmoe.ops import expert_biases
from gbmoe.ops.gradient_scale import scales_exactly
from gbmoe.ops.lora_forward_backward import LowRankPass
from gbmoe.weight_layout import WeightGradients


class Transport(ABC):
    """Brings the rows that these experts compute, and takes their sums to the tokens. One object serves one pass, forward or backward.

    Attributes:
        dtype: of the tokens.
        weights_TK: the router weights of the slots whose rows these are, or None where every slot counts once.
        gives_back_first: whether dx is computed before the gradient of w2, because it takes time to arrive. It takes more memory.
    """

    dtype: torch.dtype
    weights_TK: torch.Tensor | None
    gives_back_first = False

    @abstractmethod
    def rows(self) -> GatheredRows:
        """The rows of x, for forward's first products."""

    @abstractmethod
    def combine(self, y_PH: torch.Tensor) -> torch.Tensor:
        """Each token's weighted sum of its rows, out [T,H]. It may be computed in the memory of y, which the caller no longer uses."""

    @abstractmethod
    def gradient_rows(self) -> GatheredRows:
        """The rows of the gradient of `combine`'s result, unweighted. Called first in backward."""

    @abstractmethod
    def rows_again(self) -> GatheredRows:
        """The rows of x once more, for the gradients of w1 and v1."""

    @abstractmethod
    def ones_TK(self) -> torch.Tensor:
        """Router weights of one, float32, for the same slots as weights_TK."""

    @abstractmethod
    def give_back(self, dx_PH: torch.Tensor, factor: float) -> None:
        """Send the rows of dx on their way: each token gets `factor`, a power of two, times the sum of its rows."""

    @abstractmethod
    def give_back_router_gradient(self, dweights_TK: torch.Tensor | None) -> None:
        """Send the gradient of weights_TK on its way."""

    @abstractmethod
    def arrived(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx [T,H], dweights [T,K]) of this process's tokens, each None where it was not given back. Called last in backward."""


@dataclass(frozen=True)
class Gradients:
    """Which gradients backward is to compute."""

    x: bool
    weights: bool
    w1: bool
    w2: bool
    v1: bool
    w1_bias: bool = False
    w2_bias: bool = False
    v1_bias: bool = False

    @property
    def any_bias(self) -> bool:
        return self.w1_bias or self.w2_bias or self.v1_bias


@dataclass(frozen=True)
class Biases:
    """What is added to the products of forward, each None or of its own: w1 and v1 [E,F] (w1 [E,2F] where they are pairs), w2 [E,H]."""

    w1: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    v1: torch.Tensor | None = None


_NO_BIASES = Biases()


class Weights:
    """w1, w2 and v1 (None for a plain MLP), each [E,F,H], as the products of one pass take them. `paired`: w1 is [E,2F,H], whose rows are
    gate and up in turns, and v1 is None; then h is [P,2F], columns of h and g in turns, and g is None. `lies_in_pairs`: not that,
    but w1 and v1 are parts of one tensor in which they lie so, of which one gradient can be made.

    With `keep`, forward has an engine of float8 prepare a weight for backward's product too, in memory that backward gets as `kept`:
    uint8 [Y], Y = ScaledWeights.bytes_of, by the weight's name. `low_rank`: adapters of these weights, or None.
    """

    def __init__(self, w1_EFH: torch.Tensor, w2_EFH: torch.Tensor, v1_EFH: torch.Tensor | None, *, keep: bool = False,
                 kept: dict[str, torch.Tensor] | None = None, biases: Biases = _NO_BIASES, paired: bool = False,
                 lies_in_pairs: bool = False, low_rank: LowRankPass | None = None):
        self._of = {"w1": w1_EFH, "w2": w2_EFH, "v1": v1_EFH}
        self.biases, self.paired, self.low_rank = biases, paired, low_rank
        self._lies_in_pairs = lies_in_pairs
        self._keep, self.kept = keep, {} if kept is None else kept

    def gradient_is_of_pairs(self, experts: Engine, added: bool) -> bool:
        """Whether backward makes one gradient of pairs dh and dg, where h and g are apart. Adapters take dh and dg apart."""
        return self._lies_in_pairs and self.low_rank is None and experts.makes_gradient_of_pairs(added)

    def forward(self, experts: Engine, name: str):
        """The weight of this name as forward's product takes it, or None."""
        w_EFH = self._of[name]
        if w_EFH is None or not self._keep:
            return w_EFH
        # As large as the operator's fake says, also where nothing is written: without rows no engine of float8 is asked.
        self.kept[name] = torch.empty(ScaledWeights.bytes_of(w_EFH.shape), dtype=torch.uint8, device=w_EFH.device)
        return experts.weight_for_both_passes(w_EFH, self.kept[name], name == "w2")

    def backward(self, experts: Engine, name: str):
        """The weight of this name as backward's product takes it, or None. It is handed out once, so that what was kept is free again as
        soon as the caller has used it."""
        w_EFH, kept_Y = self._of.pop(name), self.kept.pop(name, None)
        return None if w_EFH is None else experts.weight_for_backward(w_EFH, kept_Y, name == "w2")

    def forget(self) -> None:
        """Free what was not used."""
        self._of.clear()
        self.kept.clear()


class Saved:
    """h and g (None for a plain MLP), [P,F] each, which backward takes out once, so that their memory is free again as soon as they have
    been used. The caller must hold no other references to them. Engines get them contiguous and aligned to 16 bytes, whatever a compiler
    or a caller of the operator made of forward's results."""

    def __init__(self, h_PF: torch.Tensor, g_PF: torch.Tensor | None):
        self._h_PF: torch.Tensor | None = h_PF
        self._g_PF = g_PF

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        h_PF, g_PF = self._h_PF, self._g_PF
        self._h_PF = self._g_PF = None
        assert h_PF is not None, "taken twice"
        return aligned(h_PF), None if g_PF is None else aligned(g_PF)


def forward(t: Transport, experts: Engine, weights: Weights, sizes_E: torch.Tensor, activation: str, save: bool,
            ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(out [T,H], h [P,F], g [P,F]); h and g are None unless `save`, and g without v1.

    Args:
        experts: the engine of all products, as gbmoe.engines.for_experts finds it.
        sizes_E: the rows of each expert with their padding, on the host or on the device, as the engine wants them.
        activation: a name in gbmoe.plain.plain_activation.ACTIVATIONS.
    """
    a_PF, h_PF, g_PF = up(t, experts, weights, sizes_E, activation, save)
    w2, bias = weights.forward(experts, "w2"), weights.biases.w2
    low = None if weights.low_rank is None else weights.low_rank.down(experts, a_PF, sizes_E)
    if low is not None:
        y_PH = experts.down_low_rank(a_PF, w2, bias, sizes_E, low)
    else:
        y_PH = experts.down(a_PF, w2, sizes_E) if bias is None else experts.down_biased(a_PF, w2, bias, sizes_E)
    del a_PF, w2, low
    return t.combine(y_PH), h_PF, g_PF


def up(t: Transport, experts: Engine, weights: Weights, sizes_E: torch.Tensor, activation: str, save: bool,
       ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The first products of `forward`: (a, h, g) [P,F], as Engine.up; of pairs h is [P,2F]."""
    biases, w1 = weights.biases, weights.forward(experts, "w1")
    if weights.low_rank is not None:
        x = t.rows()
        low = weights.low_rank.up(experts, x, sizes_E)
        if low is not None:
            if weights.paired:
                return *experts.up_pairs_low_rank(x, w1, biases.w1, sizes_E, activation, save, low), None
            v1 = weights.forward(experts, "v1")
            return experts.up_low_rank(x, w1, v1, biases.w1, biases.v1, sizes_E, activation, save, low)
    if weights.paired:
        return *experts.up_pairs(t.rows(), w1, biases.w1, sizes_E, activation, save), None
    v1 = weights.forward(experts, "v1")
    if biases.w1 is None and biases.v1 is None:
        return experts.up(t.rows(), w1, v1, sizes_E, activation, save)
    return experts.up_biased(t.rows(), w1, v1, biases.w1, biases.v1, sizes_E, activation, save)


def backward(t: Transport, experts: Engine, weights: Weights, sizes_E: torch.Tensor, activation: str, saved: Saved, wanted: Gradients,
             gradients: WeightGradients, scale: float = 1.0) -> tuple[torch.Tensor | None, ...]:
    """(dx, dweights, dw1, dw2, dv1, and the gradients of the biases of w1, w2 and v1), each None where it is not wanted. dw1, dw2 and dv1
    are as `gradients` has them, in the parameters' layout, times `scale`. Those of biases are multiplied by it, too. It is 1 where none
    of them is wanted, on any rank from which the transport brings rows.

    The steps are ordered so that as little memory as possible is in use at a time. Of a local transport the peak is the largest of three
    moments:

    - five [P,F], a 32nd of one, and one [P,H];
    - two [P,F], one [P,H] (two where an engine cannot accumulate into a product) and two weights' gradients;
    - one [P,F], one [P,H] and three weights' gradients, or two [P,F] and three weights' gradients where w1's and v1's are made in one GEMM
      that gathers, so that there is no [P,H] then. Where w1 and v1 are one parameter both gradients are there as soon as one is, and the
      third moment has two [P,F]; or it is the larger of three [P,F], two [P,H] (one where w2's rows are then gathered again) and two
      weights' gradients, and of what it has where they are apart, if a [P,F] and a [P,H] take no more than a weight's gradient: then w2's
      is the last to be made.

    In float8 the first two have dh and dg in e4m3 as well, which take the memory of one [P,F]; with gradients of weights in e4m3 the three
    moments have 5.5, two and half a [P,F]. Rows that forward has kept are one more [P,H] in the first two moments, and the [P,H] of the
    third.

    A power of two scales the router weights of the rows, and with them a, dh and dg, before they are rounded; dx is divided by it where a
    token's rows are summed. So it costs no pass over the gradients of the weights, and no bit. Other scales do.
    """
    left = compute_gradients(t, experts, weights, sizes_E, activation, saved, wanted, gradients, scale)
    return *t.arrived(), *gradients.tensors(left), *gradients.biases(left)


def compute_gradients(t: Transport, experts: Engine, weights: Weights, sizes_E: torch.Tensor, activation: str, saved: Saved,
                      wanted: Gradients, gradients: WeightGradients, scale: float) -> float:
    """`backward` without its end: what was given back has not arrived, and `gradients` are still to be multiplied by what is returned."""
    w2 = weights.backward(experts, "w2")
    # float16 has too few exponents for a bit to be kept.
    folds = scale != 1 and scales_exactly(scale, t.dtype) and (t.weights_TK is None or t.weights_TK.dtype != torch.float16)
    rows_scale, left = (scale, 1.0) if folds else (1.0, scale)
    dz = t.gradient_rows()
    weights_TK = t.weights_TK
    if folds:
        weights_TK = (t.ones_TK() if weights_TK is None else weights_TK) * scale
    low = weights.low_rank
    of_pairs = weights.paired or weights.gradient_is_of_pairs(experts, not gradients.takes_two)
    a_PF, dh_PF, dg_PF, dweights_TK, (dh, dg) = _down_backward(
        experts, weights, dz, w2, sizes_E, saved, weights_TK, activation, of_pairs)
    del w2
    if wanted.w2 or wanted.w2_bias or (wanted.weights and weights.biases.w2 is not None):
        dz = experts.rows_for_weights(dz)
    expert_biases.gradients_of_up(experts, dh_PF, dg_PF, sizes_E, wanted, gradients)
    if weights.biases.w2 is not None:
        dweights_TK = expert_biases.gradients_of_down(experts, dz, weights.biases.w2, weights_TK, sizes_E, wanted, gradients, dweights_TK)
    if wanted.weights:
        t.give_back_router_gradient(dweights_TK)
    del dweights_TK
    second = None if low is None else low.up_backward(experts, a_PF, dh, dg, sizes_E, wanted.x)
    if t.gives_back_first:
        if wanted.x:
            _give_back_dx(t, experts, weights, dh, dg, sizes_E, 1 / rows_scale, second)
        dh = dg = None
    for_w2 = None
    if wanted.w2 and wanted.w1 and not t.gives_back_first and gradients.are_large_for(a_PF, sizes_E.numel()):
        for_w2 = a_PF, dz
        if gradients.need_the_memory_of_rows(a_PF, sizes_E.numel()):
            dz.forget()  # they are gathered again
    elif wanted.w2:
        gradients.write("w2", experts, a_PF, dz, sizes_E, left)
    del a_PF, dz, weights_TK
    if wanted.x and not t.gives_back_first:
        _give_back_dx(t, experts, weights, dh, dg, sizes_E, 1 / rows_scale, second)
    of_up = [dh_PF, dg_PF]
    del dh, dg, dh_PF, dg_PF, second
    weights.forget()
    if wanted.w1 or wanted.v1 or (low is not None and low.needs_rows_again):
        _make_up_gradients(t, experts, low, of_up, sizes_E, wanted, gradients, of_pairs, left)
    if for_w2 is not None:
        gradients.write("w2", experts, *for_w2, sizes_E, left)
    return left


def _make_up_gradients(t: Transport, experts: Engine, low: LowRankPass | None, of_up: list, sizes_E: torch.Tensor, wanted: Gradients,
                       gradients: WeightGradients, of_pairs: bool, scale: float) -> None:
    """The gradients of w1 and v1, and of the adapter that they share. Takes dh and dg, [P,F], or pairs [P,2F] and None, out of `of_up`, so
    that each is free again as soon as it has been used."""
    dh_PF, dg_PF = of_up
    of_up.clear()
    x = experts.rows_for_weights(t.rows_again())
    if low is not None:
        low.make_up_a_gradient(experts, x, sizes_E)
    both = wanted.w1 and wanted.v1 and gradients.takes_two
    if both and dg_PF is not None and experts.makes_two_weight_gradients(dh_PF, x, sizes_E):
        experts.two_weight_gradients(dh_PF, dg_PF, x, sizes_E, gradients["w1"], gradients["v1"])
        return
    if wanted.v1 and dg_PF is not None:
        gradients.write("v1", experts, dg_PF, x, sizes_E, scale)
    del dg_PF
    if wanted.w1:
        gradients.write("pairs" if of_pairs else "w1", experts, dh_PF, x, sizes_E, scale)


def _down_backward(experts: Engine, weights: Weights, dz: GatheredRows, w2, sizes_E: torch.Tensor, saved: Saved,
                   weights_TK: torch.Tensor | None, activation: str, to_pairs: bool) -> tuple:
    """As Engine.down_backward; with `to_pairs` dh is [P,2F], pairs, and dg None."""
    h_PF, g_PF = saved.take()
    low = None if weights.low_rank is None else weights.low_rank.down_backward(experts, dz, weights_TK, sizes_E)
    if not weights.paired:
        if to_pairs:
            assert g_PF is not None
            a_PF, pairs_PG, dweights_TK, scaled = experts.down_backward_to_pairs(
                dz, w2, sizes_E, h_PF, g_PF, weights_TK, activation)
            return a_PF, pairs_PG, None, dweights_TK, scaled
        if low is not None:
            return experts.down_backward_low_rank(dz, w2, sizes_E, h_PF, g_PF, weights_TK, activation, low)
        return experts.down_backward(dz, w2, sizes_E, h_PF, g_PF, weights_TK, activation)
    if low is not None:
        a_PF, dh_PG, dweights_TK = experts.down_backward_pairs_low_rank(dz, w2, sizes_E, h_PF, weights_TK, activation, low)
    else:
        a_PF, dh_PG, dweights_TK = experts.down_backward_pairs(dz, w2, sizes_E, h_PF, weights_TK, activation)
    return a_PF, dh_PG, None, dweights_TK, (dh_PG, None)


def _give_back_dx(t: Transport, experts: Engine, weights: Weights, dh, dg, sizes_E: torch.Tensor, factor: float, low: LowRank | None,
                  ) -> None:
    w1, v1 = weights.backward(experts, "w1"), weights.backward(experts, "v1")
    if low is None:
        dx_PH = experts.up_backward(dh, w1, dg, v1, sizes_E)
    else:
        dx_PH = experts.up_backward_low_rank(dh, w1, dg, v1, sizes_E, low)
    t.give_back(dx_PH, factor)
