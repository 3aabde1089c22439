"""The low-rank products of one pass over a layer's experts, forward or backward.

    forward:   t = x A1.T,  h = x W1.T + t B1.T         s = a A2.T,  y = a W2 + s B2.T
    backward:  u = dz B2,   d = dz W2.T + u A2          dA2 = u.T a,   dB2 = dz.T s
               v = dh B1,   dx = dh W1 + v A1           dB1 = dh.T t,  dA1 = v.T x

with each expert's factors, the scale in B1 and B2. Gate and up share A1 and have columns of B1 each. Forward keeps t and s, [P,R], for
backward. In dB2 each row of s has its router weight, by which it is multiplied: 4PR bytes, where s computed again from backward's a, which
has the weights, would be 2PF.

The engine adds the second products to the first (LowRankProducts; Hopper's in one GEMM). Those that have R columns or rows are computed by
its grouped GEMM, or by kernels of their own (csrc/low_rank/). It is asked for those that read the same rows together: u and dB2, and v, dB1
and dA2, which is there by then.

Bytes of memory that this costs, with 2 bytes an element and without matrices of R columns, of a GLU:

    t, s, u, v                          2PH, 2PF, 2PH, 4PF
    dA2, dB2, dB1, dA1                  2PF, 2PH, 4PF, 2PH
                                        0 in place of each 2PH where kernels of their own read tokens, which the L2 holds, and in place of
                                        dB1's 4PF as far as the L2 still holds what v has read
    second products, added in memory    8 for each element, 4 where the engine's GEMM adds in place: of h and g 16PF, y 8PH, d 8PF, dx 8PH
                                        0 where one GEMM sums all: on Hopper, but for few rows
    activation of gate and up           4PF where its kernel is none of the products': on Hopper only with biases, or few rows

Shape suffixes: E experts, H hidden, F ffn hidden, G columns of gate and up, P padded rows of the plan, R ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gbmoe import launch
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.engines.lora_products import LowRank, RankGradient, RankProduct
from gbmoe.lora_factors import LowRankOperands


class LowRankGradients(NamedTuple):
    """Which gradients of LowRankOperands backward is to compute."""

    up_a: bool = False
    up_b: bool = False
    down_a: bool = False
    down_b: bool = False


class LowRankPass:
    """Serves one pass. Asked for the rows of a second pair of operands, in the order of the pass; None where no adapter has them.

    Args:
        columns: how `up_b` divides: "whole" (no gate, or pairs), "gate_first", "up_first" or "interleaved".
        t_PR, s_PR: in backward, what forward kept.
    """

    def __init__(self, operands: LowRankOperands, columns: str, wanted: LowRankGradients | None = None,
                 t_PR: torch.Tensor | None = None, s_PR: torch.Tensor | None = None):
        self.operands, self.t_PR, self.s_PR = operands, t_PR, s_PR
        self.wanted = wanted or LowRankGradients()
        self._columns = columns
        self._u_PR: torch.Tensor | None = None
        self._v_PR: torch.Tensor | None = None
        self.gradients: dict[str, torch.Tensor] = {}

    def up(self, experts: Engine, x: GatheredRows, sizes_E: torch.Tensor) -> LowRank | None:
        a_ERH, b_ERG = self.operands.up_a_ERH, self.operands.up_b_ERG
        if a_ERH is None or b_ERG is None:
            return None
        self.t_PR = experts.rank_product(x, a_ERH, sizes_E)
        b_ERN, b2_ERN = self._divided(b_ERG)
        return LowRank(self.t_PR, b_ERN, b2_ERN)

    def down(self, experts: Engine, a_PF: torch.Tensor, sizes_E: torch.Tensor) -> LowRank | None:
        a_ERF, b_ERH = self.operands.down_a_ERF, self.operands.down_b_ERH
        if a_ERF is None or b_ERH is None:
            return None
        self.s_PR = experts.rank_product(a_PF, a_ERF, sizes_E)
        return LowRank(self.s_PR, b_ERH)

    def down_backward(self, experts: Engine, dz: GatheredRows, weights_TK: torch.Tensor | None, sizes_E: torch.Tensor) -> LowRank | None:
        """Makes dB2 as well, of s with the router's weights, which dz does not have."""
        a_ERF, b_ERH = self.operands.down_a_ERF, self.operands.down_b_ERH
        s_PR, self.s_PR = self.s_PR, None
        if a_ERF is None or b_ERH is None:
            return None
        gradients = []
        if self.wanted.down_b and s_PR is not None:
            s_PR = launch.weigh_rows(s_PR, dz.slots.slot_of_row_P, weights_TK)
            gradients.append(RankGradient(s_PR, dz, self._new_gradient("down_b", b_ERH)))
        self._u_PR = experts.rank_product_and_gradients(RankProduct(dz, b_ERH), gradients, sizes_E)
        return LowRank(self._u_PR, a_ERF)

    def up_backward(self, experts: Engine, a_PF: torch.Tensor, dh_PF: torch.Tensor, dg_PF: torch.Tensor | None, sizes_E: torch.Tensor,
                    want_x: bool) -> LowRank | None:
        """Of a, dh and dg as down_backward gives them, or pairs and None. Makes dB1 and dA2 as well: what they take is there, and nothing
        of it is free before dx is made."""
        a_ERH, b_ERG = self.operands.up_a_ERH, self.operands.up_b_ERG
        (u_PR, self._u_PR), (t_PR, self.t_PR) = (self._u_PR, None), (self.t_PR, None)
        gradients = []
        if self.wanted.up_b and b_ERG is not None and t_PR is not None:
            for right_PF, out_ERF in zip((dh_PF, dg_PF), self._divided(self._new_gradient("up_b", b_ERG))):
                if right_PF is not None and out_ERF is not None:
                    gradients.append(RankGradient(t_PR, right_PF, out_ERF))
        if self.wanted.down_a and u_PR is not None and self.operands.down_a_ERF is not None:
            gradients.append(RankGradient(u_PR, a_PF, self._new_gradient("down_a", self.operands.down_a_ERF)))
        if a_ERH is None or b_ERG is None or not (want_x or self.wanted.up_a):
            for gradient in gradients:
                experts.rank_gradient(gradient.left_PR, gradient.right, sizes_E, gradient.out_ERN)
            return None
        b_ERF, b2_ERF = self._divided(b_ERG)
        self._v_PR = experts.rank_product_and_gradients(RankProduct(dh_PF, b_ERF, dg_PF, b2_ERF), gradients, sizes_E)
        return LowRank(self._v_PR, a_ERH)

    def _new_gradient(self, name: str, operand: torch.Tensor) -> torch.Tensor:
        self.gradients[name] = operand.new_empty(operand.shape)
        return self.gradients[name]

    @property
    def needs_rows_again(self) -> bool:
        """Whether make_up_a_gradient has a gradient to make."""
        return self.wanted.up_a and self._v_PR is not None

    def make_up_a_gradient(self, experts: Engine, x: GatheredRows, sizes_E: torch.Tensor) -> None:
        v_PR, self._v_PR = self._v_PR, None
        if v_PR is not None:
            self.gradients["up_a"] = experts.rank_gradient(v_PR, x, sizes_E)

    def gradients_in_order(self) -> tuple[torch.Tensor | None, ...]:
        """Those of LowRankOperands, each None where it was not wanted."""
        return tuple(self.gradients.get(name) for name in LowRankGradients._fields)

    def _divided(self, b_ERG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(gate's columns, up's), views; (all, None) where there is no gate, and of pairs."""
        if self._columns == "whole":
            return b_ERG, None
        if self._columns == "interleaved":
            return b_ERG[..., ::2], b_ERG[..., 1::2]
        half = b_ERG.size(2) // 2  # two slices: a program has no name for the list that chunk() returns
        first, second = b_ERG[:, :, :half], b_ERG[:, :, half:]
        return (first, second) if self._columns == "gate_first" else (second, first)
