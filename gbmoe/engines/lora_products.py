"""The products of a layer with adapters (LoRA): those of Engine with a second pair of operands, whose product is added to the first.

Shape suffixes: E experts, H hidden, F ffn hidden, G columns of pairs, 2F, P padded rows of the plan, R ranks, K inner, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gbmoe import launch

if TYPE_CHECKING:
    from gbmoe.engines.base import GatheredRows


class LowRank(NamedTuple):
    """A second pair of operands of small inner dimension R, whose product is added to that of the first: rows [P,R] and matrices [E,R,N]
    with any strides. A product that makes gate and up takes both: `b_ERN` and `b2_ERN` have its gate's and its up's columns."""

    rows_PR: torch.Tensor
    b_ERN: torch.Tensor
    b2_ERN: torch.Tensor | None = None


class RankProduct(NamedTuple):
    """The operands of rank_product."""

    a: GatheredRows | torch.Tensor
    b_ERK: torch.Tensor
    a2: torch.Tensor | None = None
    b2_ERK: torch.Tensor | None = None


class RankGradient(NamedTuple):
    """The operands of rank_gradient."""

    left_PR: torch.Tensor
    right: GatheredRows | torch.Tensor
    out_ERN: torch.Tensor


class LowRankProducts:
    """A part of Engine, which has the other methods. Here the second product is added to the first in memory, after that is rounded. An
    engine whose GEMM sums both overrides these."""

    product: Any
    biased_product: Any
    up_backward: Any
    weight_gradient: Any
    write_gradient: Any

    def rank_product(self, a: GatheredRows | torch.Tensor, b_ERK: torch.Tensor, sizes_E: torch.Tensor, a2: torch.Tensor | None = None,
                     b2_ERK: torch.Tensor | None = None) -> torch.Tensor:
        """a[rows of e] @ b[e].T, [P,R]; with a second pair of the same shapes + a2[rows of e] @ b2[e].T. Factors have any strides."""
        rows = a if isinstance(a, torch.Tensor) else a.rows_PH()
        if a2 is None or b2_ERK is None:
            return self.product(rows, b_ERK, sizes_E, trans_b=True)
        return self.up_backward(rows, b_ERK.transpose(1, 2), a2, b2_ERK.transpose(1, 2), sizes_E)

    def rank_gradient(self, left_PR: torch.Tensor, right: GatheredRows | torch.Tensor, sizes_E: torch.Tensor,
                      out_ERN: torch.Tensor | None = None) -> torch.Tensor:
        """out[e] = left[rows of e].T @ right[rows of e], to out of any strides, or a new one; exactly 0 for an expert without rows."""
        if not isinstance(right, torch.Tensor):
            return self.weight_gradient(left_PR, right, sizes_E, out_ERN)
        if out_ERN is None:
            return self.product(left_PR, right, sizes_E, trans_a=True)
        self.write_gradient(left_PR, right, sizes_E, out_ERN)
        return out_ERN

    def rank_product_and_gradients(self, product: RankProduct, gradients: Sequence[RankGradient], sizes_E: torch.Tensor) -> torch.Tensor:
        """Returns rank_product, and makes rank_gradient of each of `gradients`, none of which takes another one's result. It is for those
        that read the same wide rows: an engine that computes them in one kernel overrides it, and gives all of them the same bits."""
        for gradient in gradients:
            self.rank_gradient(gradient.left_PR, gradient.right, sizes_E, gradient.out_ERN)
        return self.rank_product(product.a, product.b_ERK, sizes_E, product.a2, product.b2_ERK)

    def product_low_rank(self, a: torch.Tensor, b: torch.Tensor, bias_EN: torch.Tensor | None, sizes_E: torch.Tensor, trans_b: bool,
                         rows_PR: torch.Tensor, b_ERN: torch.Tensor) -> torch.Tensor:
        """a[rows of e] @ b[e] + bias[e] + rows[rows of e] @ b_ERN[e]; the bias may be None, and b is [E,N,K] with trans_b."""
        out_PN = self.biased_product(a, b, bias_EN, sizes_E, trans_b)
        return self.product(rows_PR, b_ERN, sizes_E, out=out_PN, accumulate=True)

    def up_low_rank(self, x: GatheredRows, w1_EFH: torch.Tensor, v1_EFH: torch.Tensor | None, w1_bias_EF: torch.Tensor | None,
                    v1_bias_EF: torch.Tensor | None, sizes_E: torch.Tensor, activation: str, save: bool, low: LowRank,
                    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """`up_biased` with h = x @ w1[e].T + w1_bias[e] + low.rows @ low.b[e], and g likewise with low.b2."""
        h_PF = self.product_low_rank(x.rows_PH(), w1_EFH, w1_bias_EF, sizes_E, True, low.rows_PR, low.b_ERN)
        g_PF = None
        if v1_EFH is not None and low.b2_ERN is not None:
            g_PF = self.product_low_rank(x.rows_PH(), v1_EFH, v1_bias_EF, sizes_E, True, low.rows_PR, low.b2_ERN)
        x.forget()
        a_PF = launch.activate(h_PF, g_PF, activation)
        return (a_PF, h_PF, g_PF) if save else (a_PF, None, None)

    def up_pairs_low_rank(self, x: GatheredRows, w_EGH: torch.Tensor, bias_EG: torch.Tensor | None, sizes_E: torch.Tensor, activation: str,
                          save: bool, low: LowRank) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`up_pairs` with low.rows @ low.b[e], columns of gate and up in turns, added."""
        pairs_PG = self.product_low_rank(x.rows_PH(), w_EGH, bias_EG, sizes_E, True, low.rows_PR, low.b_ERN)
        x.forget()
        a_PF = launch.activate_pairs(pairs_PG, activation)
        return a_PF, pairs_PG if save else None

    def down_low_rank(self, a_PF: torch.Tensor, w2_EFH: torch.Tensor, bias_EH: torch.Tensor | None, sizes_E: torch.Tensor, low: LowRank,
                      ) -> torch.Tensor:
        """`down_biased` with low.rows @ low.b[e] added; the bias may be None."""
        return self.product_low_rank(a_PF, w2_EFH, bias_EH, sizes_E, False, low.rows_PR, low.b_ERN)

    def down_backward_low_rank(self, dz: GatheredRows, w2_EFH: torch.Tensor, sizes_E: torch.Tensor, h_PF: torch.Tensor,
                               g_PF: torch.Tensor | None, weights_TK: torch.Tensor | None, activation: str, low: LowRank,
                               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple]:
        """`down_backward` with d = dz @ w2[e].T + low.rows @ low.b[e]."""
        d_PF = self.product_low_rank(dz.rows_PH(), w2_EFH, None, sizes_E, True, low.rows_PR, low.b_ERN)
        a_PF, dg_PF, dweights_TK = launch.activate_backward(h_PF, g_PF, d_PF, dz.slots.slot_of_row_P, weights_TK, activation)
        return a_PF, d_PF, dg_PF, dweights_TK, (d_PF, dg_PF)

    def down_backward_pairs_low_rank(self, dz: GatheredRows, w2_EFH: torch.Tensor, sizes_E: torch.Tensor, pairs_PG: torch.Tensor,
                                     weights_TK: torch.Tensor | None, activation: str, low: LowRank,
                                     ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`down_backward_pairs` with d = dz @ w2[e].T + low.rows @ low.b[e]."""
        d_PF = self.product_low_rank(dz.rows_PH(), w2_EFH, None, sizes_E, True, low.rows_PR, low.b_ERN)
        return launch.activate_pairs_backward(pairs_PG, d_PF, dz.slots.slot_of_row_P, weights_TK, activation)

    def up_backward_low_rank(self, dh_PF: torch.Tensor, w1_EFH: torch.Tensor, dg_PF: torch.Tensor | None, v1_EFH: torch.Tensor | None,
                             sizes_E: torch.Tensor, low: LowRank) -> torch.Tensor:
        """`up_backward` with low.rows @ low.b[e] added."""
        dx_PH = self.up_backward(dh_PF, w1_EFH, dg_PF, v1_EFH, sizes_E)
        return self.product(low.rows_PR, low.b_ERN, sizes_E, out=dx_PH, accumulate=True)
