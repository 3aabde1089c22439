"""Formulas by which torch.utils.flop_counter counts the operators that multiply matrices, as it counts torch's: 2 * M * N * K a product.

A formula is given shapes only, and the rows of each group are known only on the device. So it counts all T * K slots of a plan,
dropped or not, without padding, and for `gmm` all rows of a. The activation, the router weights and the permutation are not counted,
as torch does not count elementwise operators.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

from math import prod

from gbmoe._flop_counter import register

__all__ = ["register"]


def gmm(a, b, batch_sizes, trans_a, trans_b, *_, out_shape=None, **__) -> int:
    columns = b[1] if trans_a or trans_b else b[2]
    return 2 * prod(a) * columns


def scaled_gmm(a, b, *_, out_shape=None, **__) -> int:
    return 2 * prod(a) * b[1]


def router_logits(x, weight, *_, out_shape=None, **__) -> int:
    return 2 * prod(x) * weight[0]


def _product(row_of_slot_TK, slot_of_row_P, w2) -> int:
    """One product of all slots with their experts' weights; the gradient of one weight counts the same. Gate and up may be one weight."""
    return 2 * prod(slot_of_row_P if row_of_slot_TK is None else row_of_slot_TK) * prod(w2[1:])


def _has_gate(w1, w2, v1) -> bool:
    return v1 is not None or prod(w1) == 2 * prod(w2)


def expert_mlp(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, *_, out_shape=None, **__) -> int:
    return (3 if _has_gate(w1, w2, v1) else 2) * _product(row_of_slot, slot_of_row, w2)


def expert_mlp_backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, h, g, rows,
                        kept_w1, kept_w2, kept_v1, activation, engine, scale, layout, need_x, need_weights, need_w1, need_w2, need_v1, *_,
                        out_shape=None, **__) -> int:
    # The activation's gradient, which is always computed, dx through w1 and v1, and the weights' gradients.
    gated = _has_gate(w1, w2, v1)
    need_gate = gated and (need_w1 if v1 is None else need_v1)
    return (1 + need_x * (1 + gated) + need_w1 + need_w2 + need_gate) * _product(row_of_slot, slot_of_row, w2)


def _of_factors(row_of_slot_TK, slot_of_row_P, *factors) -> int:
    """A product of all slots with each factor [E,R,N] that there is; the gradient of a factor counts the same."""
    slots = prod(slot_of_row_P if row_of_slot_TK is None else row_of_slot_TK)
    return sum(2 * slots * prod(factor[1:]) for factor in factors if factor is not None)


def expert_mlp_low_rank(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b, down_a, down_b, *_,
                        out_shape=None, **__) -> int:
    own = expert_mlp(x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1)
    return own + _of_factors(row_of_slot, slot_of_row, up_a, up_b, down_a, down_b)


def expert_mlp_low_rank_backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, up_a, up_b,
                                 down_a, down_b, h, g, t, s, activation, engine, layout, need_x, need_weights, need_w1, need_w2, need_v1,
                                 need_w1_bias, need_w2_bias, need_v1_bias, need_up_a, need_up_b, need_down_a, need_down_b, *,
                                 out_shape=None, **__) -> int:
    own = expert_mlp_backward(grad, x, weights, row_of_slot, slot_of_row, sizes, w1, w2, v1, w1_bias, w2_bias, v1_bias, h, g, None, None,
                              None, None, activation, engine, 1.0, layout, need_x, need_weights, need_w1, need_w2, need_v1)
    # Through down's factors to the activation; through up's second to both.
    used = (up_a if need_x else None, up_b if need_x or need_up_a else None, down_a, down_b)
    made = (up_a if need_up_a else None, up_b if need_up_b else None, down_a if need_down_a else None, down_b if need_down_b else None)
    return own + _of_factors(row_of_slot, slot_of_row, *used, *made)
